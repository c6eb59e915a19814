"""The Triton backend of linear attention: forward and backward in time and memory linear in the length."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from mgk._core.calls import LinearCall
from mgk.backends.triton import MAX_WIDTH, NO_TRITON, last_contiguous
from mgk.features import FEATURE_MAPS
from mgk.kernels.autograd import needs_dispatcher

MAX_HEADS = 65_535  # programs along the second axis of a grid
# The numbers by which the kernels know them.
MAPS = {FEATURE_MAPS["elu"]: 0, FEATURE_MAPS["relu"]: 1}


def refuses(call: LinearCall) -> str | None:
    """Why the kernels do not cover this call, or None."""
    if NO_TRITON is not None:
        return NO_TRITON
    query = call.query
    if query.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the kernels need a CUDA device, query is on {query.device.type}"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"{query.dtype} is not covered (float16, bfloat16 and float32 are)"
    if call.cu_seqlens is not None and not call.causal:
        return "of packed sequences (cu_seqlens) only causal ones are covered"
    if call.return_weights:
        return "the weights are never formed (return_weights=True)"
    if call.transform is not None:
        return f"{call.transform} are not covered"
    if not any(call.feature_map is known for known in MAPS):
        return "only the feature maps 'elu' and 'relu' are covered"
    if max(query.shape[-1], call.value.shape[-1]) > MAX_WIDTH:
        return f"head widths above {MAX_WIDTH} are not covered"
    if call.value.shape[-1] == 0:
        return "values of width 0 are not covered"
    if query.shape[0] * query.shape[1] > MAX_HEADS:
        return f"more than {MAX_HEADS:,} heads, over the batch, are not covered"
    return None


def _decodes(call: LinearCall) -> bool:
    """One token more, without gradients. Who looks on sees the operator for any number of tokens."""
    if not call.causal or call.query.shape[2] != 1 or torch.is_grad_enabled():
        return False
    if call.key_mask is not None or call.cu_seqlens is not None:
        return False
    return call.query.shape[0] > 0 and not needs_dispatcher()


def run(call: LinearCall) -> tuple[Tensor, tuple[Tensor, Tensor] | None, None]:
    """Output [B, H, L, E], the state (Z, z) or None, and no weights."""
    from mgk.kernels.linear import ops

    query, keys, value = map(last_contiguous, (call.query, call.keys, call.value))
    width, columns = query.shape[-1], value.shape[-1]
    initial = None
    if call.initial_state is not None:
        if len(call.initial_state) != 2 or call.initial_state[1].shape[-1] != width:
            raise ValueError("initial_state comes from another feature_map: use the state that this one returned")
        if _decodes(call):
            shift = None if call.shift is None else call.shift.contiguous()
            output, state = ops.linear_step(
                query, keys, value, shift, call.log_prior, call.initial_state, MAPS[call.feature_map], call.normalise
            )
            return output, state, None
        initial = torch.cat([call.initial_state[0].flatten(2), call.initial_state[1]], dim=-1).float()
    output, final = ops.linear_attention(
        query, keys, value, None if call.shift is None else call.shift.contiguous(), call.log_prior,
        None if call.key_mask is None else call.key_mask.to(torch.uint8).contiguous(), initial, call.cu_seqlens,
        MAPS[call.feature_map], call.normalise, call.causal,
    )  # fmt: skip
    if not call.return_state:
        return output, None, None
    total, norm = final.split([width * columns, width], dim=-1)
    return output, (total.unflatten(-1, (width, columns)), norm), None
