"""Launches of the fused kernels: workspaces, and what each kernel is given."""

import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mgk.kernels.jit_cache import LaunchSpec, launch
from mgk.kernels.mixture.args import NUM_TENSORS, MixtureArgs
from mgk.kernels.mixture.block_sizes import blocks, row_block
from mgk.kernels.mixture.bwd_common import summed_entries
from mgk.kernels.mixture.decode import decode_merge, decode_row, decode_split
from mgk.kernels.mixture.launch_config import (  # fmt: skip
    BLEND_WIDTH,
    EACH,
    SLOT,
    SUMMED,
    LaunchFlags,
    backward_plan,
    broadcast_strides,
    ceil_div,
    forward_plan,
    key_strides,
    layouts,
    padded_width,
    preparation,
    switches_of,
)

# Types whose forward may take a bound of the row for its maximum. Weights in fp16 need their true maximum near 1, or
# they flush; fp32 would lose digits to the bound.
BOUNDED = (torch.bfloat16,)

HAS_NEW_TF32 = hasattr(torch.backends.cuda.matmul, "fp32_precision")

# Up to so many pairs of a query and a key, a call waits for its launches rather than for the device: it takes one
# launch instead of two, by pointers, which cost the launcher less than descriptors do. That is of the general kernels
# or, where they take more than two exponentials and the first takes one, of both forms in one kernel.
SMALL_PAIRS = 1 << 25


def _in_pairs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """bf16 two by two, where that still makes loads of 16 bytes."""
    if tensors[0].dtype != torch.bfloat16 or any(
        n % 32 for x in tensors for n in (x.data_ptr() // 2, *x.stride()[:-1])
    ):
        return tensors
    if any(x.shape[-1] % 2 for x in tensors):
        return tensors
    return tuple(x.view(torch.int32) for x in tensors)


def tf32_allowed() -> bool:
    """By either of torch's two settings: to ask the old one raises once the new one is used."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if HAS_NEW_TF32 else bool(matmul.allow_tf32)


def precision_of(x: Tensor) -> str:
    return "tf32" if x.dtype == torch.float32 and tf32_allowed() else "ieee"


@functools.cache
def _has_bulk_copy(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _bulk(*tensors: Tensor) -> bool:
    """Whether the bulk copy engine can read these: Hopper or later, rows and heads at multiples of 16 bytes."""
    if tensors[0].device.type != "cuda" or not _has_bulk_copy(tensors[0].device):
        return False
    return all(x.data_ptr() % 16 == 0 and all(n * x.element_size() % 16 == 0 for n in x.stride()[:-1]) for x in tensors)


def _sources(bulk: bool, rows: int, *tensors: Tensor | None) -> tuple[Any, ...]:
    if not bulk:
        return tensors
    return tuple(
        x if x is None
        else TensorDescriptor(x, x.shape, x.stride(), [1] * (x.dim() - 2) + [rows, padded_width(x.shape[-1])])
        for x in tensors
    )  # fmt: skip


def _operand(like: Tensor, rows: int) -> Tensor | None:
    """Room for so many rows (or keys) of an operand that blends the components."""
    return like.new_empty(rows, BLEND_WIDTH, dtype=torch.bfloat16) if rows else None


def by_position(x: Tensor, width: int | None = None) -> Tensor:
    """Room for an output or gradient like x, [B, H, L, D] or [B, H, M, L, D], that lies as a projection of the
    positions does, [B, L, H, (M,) D]: a layer then moves nothing."""
    # Strides by hand instead of a view of that: views may not be changed in place by users.
    if x.dim() == 4:
        B, H, L, D = x.shape
        E = D if width is None else width
        return x.new_empty_strided((B, H, L, E), (L * H * E, E, H * E, 1))
    B, H, M, L, D = x.shape
    return x.new_empty_strided((B, H, M, L, D), (L * H * M * D, M * D, D, H * M * D, 1))


def leading_strides(x: Tensor | None, n: int) -> tuple[int, ...]:
    return (0,) * n if x is None else x.stride()[:n]


def slots_of(cu_k: Tensor | None, batch: int, keys: int) -> int:
    """Tiles of prepared keys: a sequence begins a new one."""
    return batch * ((keys + SLOT - 1) // SLOT) if cu_k is None else keys // SLOT + cu_k.shape[0] - 1


def prepare(args: MixtureArgs, prepared: Tensor, stats: Tensor) -> None:
    """Fill `prepared` and `stats`."""
    keys, shift, bias, scale_t, tau_t, cu_k = args.keys, args.shift, args.bias, args.scale_t, args.tau_t, args.cu_k
    step = preparation(
        layouts(keys, shift, bias, scale_t, tau_t, cu_k), args.hard, args.num_sequences, args.max_k, stats.shape[1]
    )
    tensors = (keys, shift, bias, scale_t, tau_t, cu_k, prepared, stats, None)
    launch(step, tensors, (args.scale, args.tau, args.constant))


def launch_forward(args: MixtureArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, prepared and stats of `ops.forward_op`."""
    query, value = args.query, args.value
    (B, H, L, _), (_, HK, S, E) = query.shape, value.shape
    out = by_position(query, E)
    lse = query.new_empty(B, H, L, dtype=torch.float32)
    prepared, stats = workspace(lse, HK, args.components, slots_of(args.cu_k, B, S))
    forward_into(out, lse, prepared, stats, args)
    return out, lse, prepared, stats


def workspace(like: Tensor, key_heads: int, components: int, slots: int) -> tuple[Tensor, Tensor]:
    """`prepared` and `stats`, not filled."""
    prepared = like.new_empty(2, key_heads, components, slots * SLOT, dtype=torch.float32)
    return prepared, prepared.new_empty(key_heads, slots, 4)


def forward_into(
    out: Tensor, lse: Tensor | None, prepared: Tensor, stats: Tensor, args: MixtureArgs, unblended: bool = False
) -> None:
    """Fills out [B, H, L, E] and, unless it is None, lse [B, H, L], which is contiguous. unblended: by blocks that need
    no operand to blend components, where there are such."""
    if out.numel() == 0:
        return
    if args.value.shape[2] == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("inf"))
        return
    (
        query, keys, value, shift, bias, scale_t, tau_t, mask, seed, cu_q, cu_k, scale, tau, constant, dropout_p, _, _,
        _, _,
    ) = args  # fmt: skip
    flags = _flags(args, stats, unblended)
    bulk = not flags.small and _bulk(keys, value)
    plan = forward_plan(layouts(*args[:NUM_TENSORS], out), flags, bulk, lse is not None)
    operand = _operand(stats, plan.operand)
    launch(
        plan.prepare, (keys, shift, bias, scale_t, tau_t, cu_k, prepared, stats, operand), (scale, tau, constant)
    )  # fmt: skip
    launch(
        plan.attend,
        (query, *_sources(bulk, plan.cols, keys, value), shift, mask, seed, scale_t, tau_t, cu_q, cu_k, prepared, stats,
        stats.new_empty(plan.flags) if plan.flags else stats,
        *_sources(bulk, plan.cols, operand), out, lse),
        (scale, tau, dropout_p),
    )  # fmt: skip


def _flags(args: MixtureArgs, stats: Tensor, unblended: bool = False) -> LaunchFlags:
    query, max_q, max_k = args.query, args.max_q, args.max_k
    pairs = args.num_sequences * query.shape[1] * max_q * max_k
    return LaunchFlags(
        args.causal, args.hard, args.dropout_p > 0, max_q, max_k, stats.shape[1], pairs <= SMALL_PAIRS,
        query.dtype in BOUNDED, precision_of(query), blocks, unblended,
    )  # fmt: skip


# Exponents of a key, of all queries that share it and all components, up to which no products are used to decode: more
# take longer than the memory does.
ROW_SCORES = 8
DECODE_SWITCHES = ("M", "D", "E", "BD", "BE", "SHIFTED", "HARD", "SCALE", "TAU", "CAUSAL")


@functools.cache
def _decode_switches(
    switches: tuple[tuple[str, Any], ...], rows: int, cols: int, across: int, stages: int, bias: int, counted: bool
) -> dict[str, Any]:
    """What a step is compiled for, in the order of the kernels' arguments; across is 0 for the general kernel."""
    given = dict(switches)
    compiled_for = {name: given[name] for name in DECODE_SWITCHES} | {"BN": cols}
    if across:
        return compiled_for | {"GROUP": rows, "BI": across, "BIAS": bias, "STAGES": stages, "COUNTED": counted}
    general = {"BM": rows, "MASK": given["MASK"], "BIAS": bias > 0, "PRECISION": given["PRECISION"], "COUNTED": counted}
    return compiled_for | general


@functools.cache
def _processors(device: torch.device) -> int:
    # Without a GPU, a few splits for the interpreter to merge.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launch_decode(args: MixtureArgs, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return out and lse of `ops.decode_op`."""
    query, keys, value, shift, bias, scale_t, tau_t, mask, _, _, _, scale, tau, constant, _, _, _, _, _ = args
    (B, H, L, _), (_, HK, S, E), shifted = query.shape, value.shape, shift is not None
    out = query.new_empty(B, H, L, E)
    lse = query.new_empty(B, H, L, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    if S == 0:
        return out.zero_(), lse.fill_(float("inf"))
    switches = switches_of(args, precision_of(query))
    mask = None if mask is None else mask.expand(B, H, L, S)
    bias_strides = (0,) * 4 if bias is None else broadcast_strides(bias.shape, bias.stride())
    group = H // HK
    by_rows = L == 1 and mask is None and group * switches["M"] <= ROW_SCORES
    width, size, tiles = max(switches["BD"], switches["BE"]), query.element_size(), 1 if shifted else switches["M"]
    if by_rows:
        cols, warps, stages, per_processor = row_block(width, tiles + 1, size)
    else:
        room = (1 << 15) // (width * size * tiles)
        cols, warps, stages, per_processor = min(128, max(16, 1 << (room.bit_length() - 1))), 4, 2, 4
    rows = group if by_rows else padded_width(group * L)
    compiled_for = _decode_switches(
        tuple(switches.items()), rows, cols,
        # A thread reads 16 bytes.
        min(cols, max(1, warps * 32 * 16 // (width * size))) if by_rows else 0, stages,
        0 if bias is None else 1 + (bias_strides[3] != 0), count is not None,
    )  # fmt: skip
    # As many programs as the device holds at once, and at least two blocks of keys for each.
    splits = max(1, min(per_processor * _processors(query.device) // (B * HK), ceil_div(S, 2 * cols)))
    chunk = ceil_div(ceil_div(S, splits), cols) * cols
    splits = ceil_div(S, chunk)
    parts, sums = lse.new_empty(B * HK * splits, rows, E), lse.new_empty(2, B * HK * splits, rows)
    if by_rows:
        keys, value = _in_pairs(keys, value)
    strides = (*key_strides(keys.stride(), shifted), *value.stride()[:3], *bias_strides)
    tensors: tuple[Any, ...]
    if by_rows:
        tensors = (query, keys, value, shift, bias, scale_t, tau_t, count, parts, sums)
        step = LaunchSpec(
            decode_row, (splits, HK, B), (*query.stride()[:2], *strides), (HK, S, chunk, splits), compiled_for,
            warps,
        )  # fmt: skip
    else:
        tensors = (query, keys, value, shift, bias, mask, scale_t, tau_t, count, parts, sums)
        step = LaunchSpec(
            decode_split, (splits, HK, B), (*query.stride()[:3], *strides, *leading_strides(mask, 4), group),
            (H, L, S, chunk, splits), compiled_for, warps, stages,
        )  # fmt: skip
    launch(step, tensors, (scale, tau, constant))
    merged = {"E": E, "BE": switches["BE"], "BM": rows, "BS": 16}
    step = LaunchSpec(decode_merge, (group * L, HK, B), (group,), (H, L, splits), merged)
    launch(step, (parts, sums, out, lse))
    return out, lse


def launch_backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, prepared: Tensor, stats: Tensor, args: MixtureArgs,
    mask_grad: bool, prior_grad: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of `ops.backward_op`, None where those are empty. bias and constant are not read."""
    query, keys, value, shift, _, scale_t, tau_t, mask, seed, cu_q, cu_k, scale, tau, _, dropout_p, causal, _, _, _ = (
        args
    )
    (B, H, L, D), (_, HK, S, _), M = query.shape, value.shape, prepared.shape[2]
    shifts = 0 if shift is None else M * D
    dq, dk, dv = by_position(query), by_position(keys), by_position(value)
    dbias = lse.new_empty(B, HK, M, S) if prior_grad == EACH else None
    dmask = (lse.new_zeros if causal else lse.new_empty)(B, H, L, S) if mask_grad else None
    if query.numel() == 0 or S == 0:
        for x in (dq, dk, dv, dbias, dmask):
            if x is not None:
                x.zero_()
        return dq, dk, dv, dbias, lse.new_zeros(HK * summed_entries(M, shifts, prior_grad == SUMMED)), dmask
    flags = _flags(args, stats)
    along_keys, along_queries = (not flags.small and _bulk(*pair) for pair in ((keys, value), (query, grad)))
    plan = backward_plan(
        layouts(*args[:NUM_TENSORS], out, grad, grad_lse), flags, along_keys, along_queries, mask_grad, prior_grad,
    )  # fmt: skip
    rows, spread = lse.new_empty(plan.rows), lse.new_empty(plan.spread)
    flagged = lse.new_empty(plan.flags) if plan.flags else spread
    parts = (lse.new_empty if cu_q is None else lse.new_zeros)(plan.parts)
    sums = lse.new_empty(plan.parts[1] * plan.parts[2])
    inputs = (shift, mask, seed, scale_t, tau_t, cu_q, cu_k, prepared, stats)
    floats = (scale, tau, dropout_p)
    key_operand, row_operand = _operand(stats, plan.key_operand), _operand(stats, plan.row_operand)
    if key_operand is not None:
        launch(plan.write, (prepared[1], key_operand))
    # What is not wanted is not written, wherever it would lie.
    launch(
        plan.queries,
        (query, *_sources(along_keys, plan.cols, keys, value), *inputs, out, lse, grad, grad_lse, dq,
        parts if dmask is None else dmask, rows, row_operand, *_sources(along_keys, plan.cols, key_operand), spread,
        flagged, parts), floats,
    )  # fmt: skip
    for step, k_rows, by_engine in plan.keys:
        launch(
            step,
            (*_sources(along_queries, k_rows, query), keys, value, *inputs, *_sources(along_queries, k_rows, grad),
            TensorDescriptor(rows, rows.shape, rows.stride(), [1, k_rows]) if by_engine else rows,
            *_sources(along_queries and cu_q is None, k_rows, row_operand), spread, flagged, dk, dv,
            parts if dbias is None else dbias, parts), floats,
        )  # fmt: skip
    launch(plan.add, (parts, sums))
    return dq, dk, dv, dbias, sums, dmask
