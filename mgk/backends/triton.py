"""The fused Triton backend: forward and backward in O(L + S) memory. docs/kernels.md lists what it leaves to others."""

import importlib.util
import math
import os
from pathlib import Path

import torch
from torch import Tensor

from mgk._core.calls import MixtureCall, Packed
from mgk._core.masks import MASK_VALUE


def _unusable_triton() -> str | None:
    """Why the kernels cannot be imported, or None. Triton is looked at, not imported: that takes long."""
    found = importlib.util.find_spec("triton")
    if found is None:
        return "Triton is not installed"
    places = found.submodule_search_locations or ()
    if any(Path(place, "tools", "tensor_descriptor.py").is_file() for place in places):
        return None
    return "the kernels need Triton 3.4 or newer, which comes with torch 2.8"


# Looked up once: the import system cannot be traced by torch.compile.
NO_TRITON = _unusable_triton()
MAX_WIDTH = 256
MAX_COMPONENTS = 8
DIFFERENTIABLE = ("query", "keys", "value", "shift", "log_prior", "scale", "tau", "attn_mask")
# So many rows, of all query heads of a key head, are attended with the keys split over programs where no gradient is
# needed.
DECODE_ROWS = 16
# A batch entry is an index of the grid's last axis there, which has no more.
MAX_BATCH = 65535
CAUSAL = {None: 0, "top-left": 1, "bottom-right": 2}


def refuses(call: MixtureCall) -> str | None:
    """Why the fused kernels do not cover this call, or None."""
    if NO_TRITON is not None:
        return NO_TRITON
    query, value = call.query, call.value
    if not query.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the kernels need a CUDA device, query is on {query.device.type}"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{query.dtype} is not covered (float16, bfloat16 and float32 are)"
    if call.return_weights:
        return "the weights are never formed (return_weights=True)"
    if max(query.shape[-1], value.shape[-1]) > MAX_WIDTH:
        return f"head widths above {MAX_WIDTH} are not covered"
    if call.components > MAX_COMPONENTS:
        return f"more than {MAX_COMPONENTS} components are not covered"
    if isinstance(call.scale, Tensor) and (call.scale.shape[0] > 1 or call.scale.shape[3] > 1):
        return "a scale per batch entry or per position is not covered"
    if call.count is not None and not decodes(call):
        return f"a count of keys goes with at most {DECODE_ROWS} queries and no gradients"
    if call.packed is not None and call.attn_mask is not None:
        return "attn_mask together with cu_seqlens is not covered"
    if value.shape[-1] == 0:
        return "values of width 0 are not covered"
    if _scales_differ(call) and call.shift is not None and _adds_to_scores(call):
        return "a float attn_mask together with shifted keys and a scale per component is not covered"
    if call.transform is not None:
        return f"{call.transform} are not covered"
    return None


def _scales_differ(call: MixtureCall) -> bool:
    return isinstance(call.scale, Tensor) and call.scale.shape[2] > 1


def _is_of_keys(mask: Tensor, call: MixtureCall) -> bool:
    """The same for all queries: it joins the prior."""
    return mask.shape[2] == 1 and (mask.shape[1] == 1 or call.group == 1)


def _adds_to_scores(call: MixtureCall) -> bool:
    mask = call.attn_mask
    return mask is not None and mask.is_floating_point() and not _is_of_keys(mask, call)


def run(call: MixtureCall) -> tuple[Tensor, Tensor | None, None]:
    """Output [B, H, L, E], natural lse [B, H, L] or None, and no weights."""
    from mgk.kernels.mixture import ops

    query, keys, value = last_contiguous(call.query), last_contiguous(call.keys), last_contiguous(call.value)
    differentiated = _needs_gradients(call)
    bias = None if call.hard or call.log_prior is None else call.log_prior
    constant = 0.0 if call.hard or call.log_prior is not None else -math.log(call.components)
    mask = call.attn_mask
    if mask is not None and _is_of_keys(mask, call):
        bias, mask = _fold(bias, mask), None
    scale, scale_t, tau, tau_t = _numbers(call)
    shift = None if call.shift is None else call.shift.contiguous()
    if not differentiated and _few_rows(call):
        out, lse2 = ops.decode(
            query, keys, value, shift, bias, scale_t, tau_t, mask, scale, tau, constant, CAUSAL[call.causal], call.hard,
            call.count,
        )  # fmt: skip
        return out, _natural(lse2, query, call) if call.return_lse else None, None
    seed = torch.randint(2**31, (1,), device=query.device) if call.dropout_p > 0 else None
    packed = call.packed
    arguments = (
        query, keys, value, shift, bias, scale_t, tau_t, mask, seed, *_offsets(packed),
        scale, tau, constant, float(call.dropout_p), CAUSAL[call.causal], call.hard,
        (packed and packed.max_seqlen_q) or query.shape[2], (packed and packed.max_seqlen_k) or value.shape[2],
    )  # fmt: skip
    if not differentiated:
        out, found = ops.infer(call.return_lse, *arguments)
        return out, None if found is None else _natural(found, query, call), None
    out, lse2 = ops.mixture(*arguments)
    return out, _natural(lse2, query, call) if call.return_lse else None, None


def _needs_gradients(call: MixtureCall) -> bool:
    if not torch.is_grad_enabled():
        return False
    for field in DIFFERENTIABLE:
        x = getattr(call, field)
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def decodes(call: MixtureCall) -> bool:
    """Few queries, forward only. The length is asked for last: a compiled training step then does not depend on it."""
    return not _needs_gradients(call) and _few_rows(call)


def _few_rows(call: MixtureCall) -> bool:
    if call.packed is not None or call.dropout_p > 0 or call.query.shape[0] > MAX_BATCH:
        return False
    return call.query.shape[2] * call.group <= DECODE_ROWS


def count_components(call: MixtureCall) -> tuple[Tensor, Tensor]:
    """N_jr [B, Hk, M, S] and N_j [B, Hk, S] of Eq. 11, without the weights' second pass over the equations."""
    from mgk.kernels.mixture import em_ops

    query, keys = last_contiguous(call.query), last_contiguous(call.keys)
    scale, scale_t, tau, tau_t = _numbers(call)
    mask, packed, seen = call.attn_mask, call.packed, None
    if mask is not None and _is_of_keys(mask, call):
        seen, mask = mask[:, :, 0] if mask.dtype == torch.bool else mask[:, :, 0] >= MASK_VALUE, None
    count, pairs = em_ops.component_counts(
        query, keys, None if call.shift is None else call.shift.contiguous(), call.log_prior, scale_t, tau_t, mask,
        *_offsets(packed), scale, tau, CAUSAL[call.causal],
        (packed and packed.max_seqlen_q) or query.shape[2], (packed and packed.max_seqlen_k) or call.value.shape[2],
    )  # fmt: skip
    return (count, pairs) if seen is None else (count * seen.unsqueeze(2), pairs * seen)


def _numbers(call: MixtureCall) -> tuple[float, Tensor | None, float, Tensor | None]:
    """scale and tau as the kernels take them, each a number, or a tensor [Hk, 1 or M] or [Hk] that overrides it."""
    key_heads, scale, tau = call.value.shape[1], call.scale, call.tau
    scale_t = scale.float()[0, :, :, 0].expand(key_heads, -1).contiguous() if isinstance(scale, Tensor) else None
    tau_t = tau.float().expand(key_heads).contiguous() if isinstance(tau, Tensor) else None
    return 1.0 if scale_t is not None else float(scale), scale_t, 0.0 if tau_t is not None else float(tau), tau_t


def _offsets(packed: Packed | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the offsets of packed queries and keys, contiguous: the kernels read them by address."""
    return (None, None) if packed is None else (packed.cu_seqlens_q.contiguous(), packed.cu_seqlens_k.contiguous())


def last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _fold(bias: Tensor | None, mask: Tensor) -> Tensor:
    """A mask that is the same for every query joins the log prior, which the kernels read once per key: [B, 1 or H, 1,
    S] for every component."""
    if mask.dtype == torch.bool:
        zero = torch.zeros((), device=mask.device) if bias is None else bias
        return torch.where(mask, zero, -math.inf)
    return mask.float() if bias is None else bias + mask


def _natural(lse2: Tensor, query: Tensor, call: MixtureCall) -> Tensor:
    """The kernels' lse is base 2, +inf for empty rows and, for equal scales, without the query's norm."""
    lse = torch.where(torch.isinf(lse2), -math.inf, lse2 * math.log(2))
    scale = call.scale
    if isinstance(scale, Tensor):
        if scale.shape[2] > 1:
            return lse
        scale = scale[:, :, 0, :]
        scale = scale.repeat_interleave(query.shape[1] // scale.shape[1], 1) if scale.shape[1] > 1 else scale
    tau = call.tau
    if isinstance(tau, Tensor):
        tau = tau.repeat_interleave(query.shape[1] // tau.shape[0]).view(1, -1, 1)
    return lse - tau * scale * 0.5 * query.float().square().sum(-1)
