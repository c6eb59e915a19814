"""Triton kernels ("triton"): forward and backward in O(L + S) memory, for mixture and linear attention.

docs/kernels.md lists the unsupported calls. The kernel modules are imported by the first call, because importing Triton
is slow.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mgk._core.calls import LinearCall, MixtureCall, Packed
from mgk._core.linear_features import check_state_features
from mgk._core.masks import and_mask, as_bool
from mgk.features import FEATURE_MAPS
from mgk.kernels.architecture import compile_target
from mgk.kernels.autograd import needs_dispatcher
from mgk.kernels.mixture.args import MixtureArgs


def _missing_triton_reason() -> str | None:
    """Return why the kernels cannot be imported, or None. Triton itself is not imported."""
    spec = importlib.util.find_spec("triton")
    if spec is None:
        return "Triton is not installed"
    if any(Path(folder, "tools", "tensor_descriptor.py").is_file() for folder in spec.submodule_search_locations or ()):
        return None
    return "the kernels require Triton 3.4 or newer, which comes with torch 2.8"


def _triton_version() -> tuple[int, ...]:
    """Return major and minor version of Triton; of a build with another distribution name, (99,)."""
    try:
        return tuple(int(number) for number in importlib.metadata.version("triton").split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return (99,)


# Evaluated once: torch.compile cannot trace the import system.
NO_TRITON = _missing_triton_reason()
TRITON_VERSION = _triton_version()
MAX_WIDTH = 256  # largest head or value dimension
MAX_COMPONENTS = 8
DIFFERENTIABLE = ("query", "keys", "value", "shift", "log_prior", "scale", "tau", "attn_mask")
# Without gradients, up to this many query rows per key head run on the decode kernel, which splits the keys.
DECODE_ROWS = 16
# The same for one query per head if there are more value heads than key heads: a key is read once for all of them.
DECODE_HEADS = 32
# The decode kernel indexes the batch by the grid's last axis.
MAX_BATCH = 65_535
# The linear kernels index the heads of all batch entries by the grid's second axis, the mixture kernels those of one.
MAX_HEADS = 65_535
# The kernels multiply a component's index by the stride, an integer of 32 bits if the stride fits.
MAX_COMPONENT_OFFSET = 2**31 - 1
# Major compute capabilities of B200 and Thor, whose tensor cores use a separate memory, and the first Triton with which
# the mixture kernels were compiled for them (`make compile-check`).
TENSOR_MEMORY, TENSOR_MEMORY_TRITON = (10, 11), (3, 7)
# Older GPUs have no bf16 tensor cores; the kernels are compiled for none of them.
FIRST_CAPABILITY = (8, 0)
# Codes of causal alignments and feature maps in the kernels.
CAUSAL = {None: 0, "top-left": 1, "bottom-right": 2}
MAPS = {FEATURE_MAPS["elu"]: 0, FEATURE_MAPS["relu"]: 1}


_capabilities: dict[int, tuple[int, int]] = {}


def device_capability(index: int) -> tuple[int, int]:
    """Return the compute capability of a GPU, read once; (0, 0) for fake tensors of a GPU that is not present."""
    if index not in _capabilities:
        try:
            _capabilities[index] = torch.cuda.get_device_capability(index)
        except (AssertionError, RuntimeError):
            return 0, 0
    return _capabilities[index]


# A constant to torch.compile, which cannot trace the query of a device.
device_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def untested_gpu_reason(call: MixtureCall | LinearCall) -> str | None:
    """Return why "auto" does not run the kernels although they compile for the GPU of the call, or None."""
    if call.query.device.type == "cuda" and torch.version.hip is not None:
        return "the kernels compile for ROCm and have not run there (backend='triton' runs them)"
    return None


def can_auto_run_mixture(call: MixtureCall) -> bool:
    """Return whether "auto" may run the mixture kernels."""
    return untested_gpu_reason(call) is None and mixture_unsupported_reason(call) is None


def _unsupported_platform_reason(call: MixtureCall | LinearCall) -> str | None:
    if NO_TRITON is not None:
        return NO_TRITON
    query = call.query
    if torch.jit.is_tracing():
        return "torch.jit.trace cannot record the kernels"
    # The compiler replaces the operators of such tensors before any kernel is launched.
    if not torch.compiler.is_compiling() and any(map(is_traceable_wrapper_subclass, _tensors(call))):
        return "DTensors and other tensor subclasses without storage of their own are not supported"
    if query.device.type == "cuda" and torch.version.hip is None:
        major, minor = device_capability(query.get_device())
        if (0, 0) < (major, minor) < FIRST_CAPABILITY:
            return f"the kernels require compute capability 8.0, and the GPU has {major}.{minor}"
        if major in TENSOR_MEMORY and TRITON_VERSION < TENSOR_MEMORY_TRITON and isinstance(call, MixtureCall):
            return f"the mixture kernels require Triton 3.7 on GPUs of compute capability {major}.{minor}"
    if not query.is_cuda and compile_target() is None and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the kernels require a CUDA device, but query is on {query.device.type}"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{query.dtype} is not supported (float16, bfloat16 and float32 are)"
    if call.return_weights:
        return "the weights are never formed (return_weights=True)"
    return None


def _tensors(call: MixtureCall | LinearCall) -> list[Tensor]:
    return [x for x in (call.query, call.keys, call.value, call.shift) if x is not None]


def mixture_unsupported_reason(call: MixtureCall) -> str | None:
    """Return why the mixture kernels do not support the call, or None."""
    reason = _unsupported_platform_reason(call)
    if reason is not None:
        return reason
    query, value = call.query, call.value
    if max(query.shape[-1], value.shape[-1]) > MAX_WIDTH:
        return f"head dimensions above {MAX_WIDTH} are not supported"
    if call.components > MAX_COMPONENTS:
        return f"more than {MAX_COMPONENTS} components are not supported"
    if query.shape[1] > MAX_HEADS:
        return f"more than {MAX_HEADS:,} heads are not supported"
    if isinstance(call.scale, Tensor) and (call.scale.shape[0] > 1 or call.scale.shape[3] > 1):
        return "a scale per batch entry or per position is not supported"
    if call.num_valid_keys is not None and not uses_decode_kernel(call):
        return f"a count of valid keys is supported for at most {DECODE_ROWS} queries without gradients"
    if call.packed is not None and call.attn_mask is not None:
        return "attn_mask together with cu_seqlens is not supported"
    if value.shape[-1] == 0:
        return "a value dimension of 0 is not supported"
    if _has_scale_per_component(call) and call.shift is not None and _has_bias_per_query(call):
        return "a float attn_mask together with shifted keys and a scale per component is not supported"
    if call.unsupported_transform is not None:
        return f"{call.unsupported_transform} are not supported"
    return None


def linear_unsupported_reason(call: LinearCall) -> str | None:
    """Return why the kernels of linear attention do not support the call, or None."""
    reason = _unsupported_platform_reason(call)
    if reason is not None:
        return reason
    query, value = call.query, call.value
    if call.cu_seqlens is not None and not call.causal:
        return "packed sequences (cu_seqlens) are supported with is_causal=True only"
    if call.unsupported_transform is not None:
        return f"{call.unsupported_transform} are not supported"
    if not any(call.feature_map is feature_map for feature_map in MAPS):
        return "only the feature maps 'elu' and 'relu' are supported"
    if max(query.shape[-1], value.shape[-1]) > MAX_WIDTH:
        return f"head dimensions above {MAX_WIDTH} are not supported"
    if value.shape[-1] == 0:
        return "a value dimension of 0 is not supported"
    if query.shape[0] * query.shape[1] > MAX_HEADS:
        return f"a batch size times number of heads above {MAX_HEADS:,} is not supported"
    return None


def _has_scale_per_component(call: MixtureCall) -> bool:
    return isinstance(call.scale, Tensor) and call.scale.shape[2] > 1


def _is_key_only_mask(mask: Tensor, call: MixtureCall) -> bool:
    """Return whether the mask is the same for all queries of a key head."""
    return mask.shape[2] == 1 and (mask.shape[1] == 1 or call.group == 1)


def _has_bias_per_query(call: MixtureCall) -> bool:
    mask = call.attn_mask
    return mask is not None and mask.is_floating_point() and not _is_key_only_mask(mask, call)


def run_mixture(call: MixtureCall) -> tuple[Tensor, Tensor | None, None]:
    """Return the output [B, H, L, E], the natural lse [B, H, L] or None, and None for the weights."""
    from mgk.kernels.mixture import ops

    needs_gradients = _needs_gradients(call)
    args = mixture_args(call)
    lse2: Tensor | None  # base 2
    if needs_gradients:
        out, lse2 = ops.mixture(*args)
    elif _fits_decode_kernel(call):
        out, lse2 = ops.decode(args, call.num_valid_keys)
    else:
        out, lse2 = ops.infer(call.return_lse, args)
    lse = _to_natural_log(lse2, args.query, call) if call.return_lse and lse2 is not None else None
    return out, lse, None


def mixture_args(call: MixtureCall) -> MixtureArgs:
    """Return the arguments of the kernels for a call; a mask of keys becomes part of the log prior."""
    query, value = map(_ensure_last_dim_contiguous, (call.query, call.value))
    keys = _ensure_small_component_offsets(call.keys)
    bias, mask = None if call.hard else call.log_prior, call.attn_mask
    constant = _constant_log_prior(call)
    if mask is not None and _is_key_only_mask(mask, call):
        bias, mask = _fold_mask_into_bias(bias, mask), None
    scale, scale_t, tau, tau_t = _split_scale_and_tau(call)
    cu_q, cu_k = _contiguous_offsets(call.packed)
    max_q, max_k = _longest_sequences(call)
    return MixtureArgs(
        query=query, keys=keys, value=value, shift=None if call.shift is None else call.shift.contiguous(), bias=bias,
        scale_t=scale_t, tau_t=tau_t, mask=mask,
        seed=torch.randint(2**31, (1,), device=query.device) if call.dropout_p > 0 else None,
        cu_q=cu_q, cu_k=cu_k, scale=scale, tau=tau, constant=constant, dropout_p=float(call.dropout_p),
        causal=CAUSAL[call.causal], hard=call.hard, max_q=max_q, max_k=max_k,
    )  # fmt: skip


def plan_mixture(call: MixtureCall, prior_shape: tuple[int, ...] | None) -> Callable[..., Tensor] | None:
    """Return a function that repeats the call for other tensors of the same layouts, or None.

    It takes query, keys, value, shift and log prior, and returns the output.

    Args:
        call: A call that the kernels support.
        prior_shape: Shape of the log prior that the function receives, or None.
    """
    if call.attn_mask is not None or call.dropout_p > 0 or call.packed is not None or call.return_lse:
        return None
    if isinstance(call.scale, Tensor) or isinstance(call.tau, Tensor) or call.num_valid_keys is not None:
        return None
    # Hard assignment ignores the prior, but its gradient is 0, not None.
    if call.hard and call.log_prior is not None:
        return None
    if any(x.stride(-1) != 1 for x in (call.query, call.keys, call.value)) or _has_large_component_offsets(call.keys):
        return None
    needs_gradients = _needs_gradients(call)
    if (not needs_gradients and _fits_decode_kernel(call)) or not (call.shift is None or call.shift.is_contiguous()):
        return None
    from mgk.kernels.mixture.call_plan import make_call_plan

    return make_call_plan(mixture_args(call), prior_shape, needs_gradients)


def run_linear(call: LinearCall) -> tuple[Tensor, tuple[Tensor, Tensor] | None, None]:
    """Return the output [B, H, L, E], the state (Z, z) or None, and None for the weights."""
    from mgk.kernels.linear import ops

    query, value = map(_ensure_last_dim_contiguous, (call.query, call.value))
    keys = _ensure_small_component_offsets(call.keys)
    width, columns = query.shape[-1], value.shape[-1]
    shift = None if call.shift is None else call.shift.contiguous()
    initial = None
    if call.initial_state is not None:
        check_state_features(call.initial_state, 2, width)
        if _is_linear_decode_step(call):
            output, state = ops.launch_decode(
                query, keys, value, shift, call.log_prior, call.initial_state, MAPS[call.feature_map], call.normalise
            )
            return output, state, None
        total, norm = call.initial_state
        # The kernels have a z for every Z.
        repeats = total.shape[1] // norm.shape[1]
        norm = norm if repeats == 1 else norm.repeat_interleave(repeats, dim=1)
        initial = torch.cat([total.flatten(2), norm], dim=-1).float()
    key_mask = None if call.key_mask is None else call.key_mask.to(torch.uint8).contiguous()
    output, final = ops.linear_attention(
        query, keys, value, shift, call.log_prior, key_mask, initial, call.cu_seqlens, MAPS[call.feature_map],
        call.normalise, call.causal,
    )  # fmt: skip
    if not call.return_state:
        return output, None, None
    total, norm = final.split([width * columns, width], dim=-1)
    repeats = norm.shape[1] // keys.shape[1]
    norm = norm if repeats == 1 else norm[:, ::repeats]
    return output, (total.unflatten(-1, (width, columns)), norm), None


def _is_linear_decode_step(call: LinearCall) -> bool:
    """Return whether the call is one token without gradients, outside of torch.compile and dispatch modes."""
    if not call.causal or call.query.shape[2] != 1 or torch.is_grad_enabled():
        return False
    if call.key_mask is not None or call.cu_seqlens is not None:
        return False
    return call.query.shape[0] > 0 and not needs_dispatcher()


def _needs_gradients(call: MixtureCall) -> bool:
    if not torch.is_grad_enabled():
        return False
    for field in DIFFERENTIABLE:
        x = getattr(call, field)
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def uses_decode_kernel(call: MixtureCall) -> bool:
    """Return whether the call has few queries and needs no gradients."""
    # The length is read last: a compiled training step then has no guard on it.
    return not _needs_gradients(call) and _fits_decode_kernel(call)


def _fits_decode_kernel(call: MixtureCall) -> bool:
    if call.packed is not None or call.dropout_p > 0 or call.query.shape[0] > MAX_BATCH:
        return False
    queries, group = call.query.shape[2], call.group
    shares_keys = call.value.shape[1] > call.keys.shape[1]
    return queries * group <= DECODE_ROWS or (shares_keys and queries == 1 and group <= DECODE_HEADS)


def count_components(call: MixtureCall, real_queries: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sum the responsibilities of Eq. 11 over the queries, without forming them.

    Args:
        call: The call; its masks and causality apply.
        real_queries: bool [B, L], False for queries to leave out. Default: all are counted.

    Returns:
        N_jr [B, Hk, M, S], and the number N_j of queries that attend to key j, [B, Hk, S].
    """
    from mgk.kernels.mixture import em_counts

    query, keys = _ensure_last_dim_contiguous(call.query), _ensure_small_component_offsets(call.keys)
    scale, scale_t, tau, tau_t = _split_scale_and_tau(call)
    mask, attendable = call.attn_mask, None
    # A key-only mask is applied to the result: joined with `real_queries` it would take L·S elements.
    if mask is not None and _is_key_only_mask(mask, call):
        attendable, mask = as_bool(mask[:, :, 0]), None
    if real_queries is not None:
        mask = and_mask(real_queries[:, None, :, None].expand(-1, -1, -1, call.value.shape[2]), mask)
    count, pairs = em_counts.component_counts(
        query, keys, None if call.shift is None else call.shift.contiguous(), call.log_prior, scale_t, tau_t, mask,
        *_contiguous_offsets(call.packed), scale, tau, CAUSAL[call.causal], *_longest_sequences(call),
    )  # fmt: skip
    if attendable is None:
        return count, pairs
    return torch.where(attendable.unsqueeze(2), count, 0.0), torch.where(attendable, pairs, 0.0)


def _split_scale_and_tau(call: MixtureCall) -> tuple[float, Tensor | None, float, Tensor | None]:
    """Return scale and tau as the kernels take them.

    Each is a number and, if it was a tensor, a tensor [Hk, 1 or M] or [Hk] that overrides the number.
    """
    key_heads, scale, tau = call.keys.shape[1], call.scale, call.tau
    scale_t = scale.float()[0, :, :, 0].expand(key_heads, -1).contiguous() if isinstance(scale, Tensor) else None
    tau_t = tau.float().expand(key_heads).contiguous() if isinstance(tau, Tensor) else None
    return 1.0 if scale_t is not None else float(scale), scale_t, 0.0 if tau_t is not None else float(tau), tau_t


def _constant_log_prior(call: MixtureCall) -> float:
    """Return the logarithm of a uniform prior; 0 if the call has a log prior or ignores it."""
    return 0.0 if call.hard or call.log_prior is not None else -math.log(call.components)


def _longest_sequences(call: MixtureCall) -> tuple[int, int]:
    """Return upper bounds of the lengths of packed query and key sequences; without packing, L and S."""
    queries, keys = call.query.shape[2], call.value.shape[2]
    if call.packed is None:
        return queries, keys
    return call.packed.max_seqlen_q or queries, call.packed.max_seqlen_k or keys


def _contiguous_offsets(packed: Packed | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the offsets of packed queries and keys, contiguous: the kernels read them by address."""
    return (None, None) if packed is None else (packed.cu_seqlens_q.contiguous(), packed.cu_seqlens_k.contiguous())


def _ensure_last_dim_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _has_large_component_offsets(keys: Tensor) -> bool:
    return keys.dim() == 5 and (keys.shape[2] - 1) * keys.stride(2) > MAX_COMPONENT_OFFSET


def _ensure_small_component_offsets(keys: Tensor) -> Tensor:
    """Return keys [B, HK, M, S, D] whose components the kernels can locate with 32 bits, copied if necessary."""
    return keys.contiguous() if _has_large_component_offsets(keys) else _ensure_last_dim_contiguous(keys)


def _fold_mask_into_bias(bias: Tensor | None, mask: Tensor) -> Tensor:
    """Add a key-only mask [B, 1 or H, 1, S] to the log prior, which the kernels read once per key."""
    if mask.dtype == torch.bool:
        zero = torch.zeros((), device=mask.device) if bias is None else bias
        return torch.where(mask, zero, -math.inf)
    return mask.float() if bias is None else bias + mask


def _to_natural_log(lse2: Tensor, query: Tensor, call: MixtureCall) -> Tensor:
    """Convert the kernels' lse to the natural logarithm.

    The kernels' lse is base 2, +inf for empty rows and, if all components share a scale, lacks the query's norm.
    """
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
