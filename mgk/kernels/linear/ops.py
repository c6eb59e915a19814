"""Linear attention as a torch operator: block sizes, launches, gradients, FLOP counts."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk.kernels.autograd import make_autograd_op, raise_no_double_backward
from mgk.kernels.jit_cache import LaunchSpec, launch
from mgk.kernels.linear import kernels
from mgk.kernels.linear.decode import decode_token
from mgk.kernels.mixture.launch import empty_like_bshd, tf32_allowed
from mgk.kernels.mixture.launch_config import ceil_div, key_strides, padded_width


class Blocks(NamedTuple):
    slot: int  # rows that share a state
    block: int  # rows of a tile
    warps: int
    stages: int


# By the larger of feature and value width, for numbers of 2 bytes; docs/kernels.md has the measurements.
BLOCKS = {64: Blocks(128, 64, 4, 3), 128: Blocks(128, 64, 4, 1), 256: Blocks(256, 32, 8, 1)}
# For fp16 and fp32, whose products read 4 bytes.
WIDE_BLOCKS = {64: Blocks(128, 32, 4, 1), 128: Blocks(128, 32, 4, 1), 256: Blocks(128, 16, 8, 1)}
# Rows of a slot where all keys are one state.
SUMMED_ROWS = 512
# Columns of a state that a product takes at a time.
PART = 64
# Columns of a state that a program has where there is one token alone.
STEP_COLUMNS = 32


@functools.cache
def blocks(width: int, type_bytes: int) -> Blocks:
    table = BLOCKS if type_bytes == 2 else WIDE_BLOCKS
    return next(block for limit, block in table.items() if width <= limit)


def feature_type(dtype: torch.dtype) -> torch.dtype:
    """What φ̃ is kept in and products read. Sums of fp16 features leave fp16's range."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _precision(dtype: torch.dtype) -> str:
    """TF32 has fp16's digits and fp32's range."""
    return "tf32" if dtype == torch.float16 or (dtype == torch.float32 and tf32_allowed()) else "ieee"


def _slots(S: int, slot: int, cu_seqlens: Tensor | None) -> int:
    """Each packed sequence begins a new slot; how many that makes is known up to one a sequence."""
    return ceil_div(S, slot) if cu_seqlens is None else S // slot + cu_seqlens.shape[0] - 1


def _slot_table(cu_seqlens: Tensor, slots: int, slot: int) -> Tensor:
    """int32 [slots, 4]: first row, end, whether first and whether last of its sequence. Slots left over are empty."""
    counts = (cu_seqlens.diff() + slot - 1) // slot
    ends = counts.cumsum(0)
    index = torch.arange(slots, device=cu_seqlens.device)
    sequence = torch.bucketize(index, ends, right=True)
    used = sequence < counts.shape[0]
    sequence = sequence.clamp(max=counts.shape[0] - 1)
    within = index - (ends - counts)[sequence]
    begin = cu_seqlens[sequence] + within * slot
    end = torch.minimum(begin + slot, cu_seqlens[sequence + 1])
    columns = (begin, end, within == 0, within == counts[sequence] - 1)
    return torch.stack([(column * used).int() for column in columns], 1).contiguous()


class Plan(NamedTuple):
    """What the launches of one call share."""

    B: int
    H: int
    HK: int
    L: int  # queries
    S: int  # keys
    D: int
    E: int
    M: int
    causal: bool
    table: Tensor | None
    size: Blocks
    constexprs: dict[str, Any]

    def slots(self, length: int) -> int:
        """Parts of a sequence that have sums of their own."""
        return _slots(length, self.size.slot, None) if self.table is None else self.table.shape[0]


def _plan(
    query: Tensor, keys: Tensor, value: Tensor, shift: Tensor | None, cu_seqlens: Tensor | None, causal: bool
) -> Plan:
    (B, H, L, D), (HK, S, E) = query.shape, value.shape[1:]
    dtype = feature_type(query.dtype)
    size = blocks(max(padded_width(D), padded_width(E)), dtype.itemsize)
    size = size if causal else size._replace(slot=SUMMED_ROWS)
    table = None if cu_seqlens is None else _slot_table(cu_seqlens, _slots(S, size.slot, cu_seqlens), size.slot)
    constexprs = {
        "D": D, "E": E, "BLOCK": size.block, "CHUNK": size.slot, "CAUSAL": causal, "PACKED": table is not None,
        "TYPE": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32, "PRECISION": _precision(query.dtype),
    }  # fmt: skip
    M = keys.shape[2] if shift is None else shift.shape[1]
    return Plan(B, H, HK, L, S, D, E, M, causal, table, size, constexprs)


@functools.lru_cache(1 << 10)
def _launch_spec(
    kernel: Any, grid: tuple[int, ...], dtypes: tuple[torch.dtype | None, ...], scalars: tuple[float, ...],
    names: tuple[str, ...], values: tuple[Any, ...], num_warps: int, num_stages: int,
) -> LaunchSpec:  # fmt: skip
    x, y, z = (*grid, 1, 1)[:3]
    constexprs = dict(zip(names, values, strict=True))
    taken = {name: constexprs[name] for name in kernel.arg_names[len(dtypes) + len(scalars) :]}
    return LaunchSpec(kernel, (x, y, z), scalars, (), taken, num_warps, num_stages)


def _launch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Any, ...], scalars: tuple[float, ...],
    constexprs: dict[str, Any], num_warps: int = 4, num_stages: int = 1,
) -> None:  # fmt: skip
    """Launch a kernel with those of the constexprs that it takes."""
    dtypes = tuple([None if x is None else x.dtype for x in tensors])
    names, values = tuple(constexprs), tuple(constexprs.values())
    launch(_launch_spec(kernel, grid, dtypes, scalars, names, values, num_warps, num_stages), tensors)


def _mixture(plan: Plan, keys: Any, shift: Any, prior: Any, mask: Any, feature_map: int) -> tuple[Any, Any, Any]:
    """Grid, strides and constexprs of the two kernels between keys and mixed features."""
    width = padded_width(plan.D)
    rows = max(16, 4096 // width)
    strides = key_strides(keys.stride(), shift is not None)
    if prior is not None:
        strides += prior.expand(plan.B, plan.HK, plan.M, plan.S).stride()
    else:
        strides += (0,) * 4
    constexprs = {
        "D": plan.D, "BD": width, "ROWS": rows, "MAP": feature_map, "SHIFTED": shift is not None,
        "PRIOR": prior is not None, "MASK": mask is not None,
    }  # fmt: skip
    return (ceil_div(plan.S, rows), plan.B * plan.HK), (*strides, 1 / plan.M, plan.HK, plan.S, plan.M), constexprs


def _sum_states(
    plan: Plan, start: Tensor | None, features: Tensor, value: Tensor, rows: tuple[Any, Any], feature_map: int
) -> Tensor:
    """The states [B, HK, slots + 1, D·(E+1)] of what lies before each slot, or with `rows` (1/d and −δ/d) of what lies
    behind; not causal, that of all slots in one row. start: what was there before, or nothing."""
    behind, length = rows[0] is not None, features.shape[2]
    slots, width = plan.slots(length), plan.D * (plan.E + 1)
    states = features.new_empty(plan.B, plan.HK, slots + 1, width, dtype=torch.float32)
    first = states[:, :, -1 if behind else 0]
    if start is None:
        first.zero_()
    else:
        first.copy_(start)
    something = length > 0 and states.numel() > 0
    if something:
        part_d, part_e = min(PART, padded_width(plan.D)), min(PART, padded_width(plan.E))
        parts = ceil_div(plan.D, part_d) * ceil_div(plan.E, part_e)
        _launch(
            kernels.sum_chunks, (slots, plan.B * plan.HK, parts), (features, value, *rows, states, plan.table),
            (*features.stride()[:3], *value.stride()[:3], plan.HK, plan.H // plan.HK if behind else 1, length, slots,
            0 if behind else 1),
            {**plan.constexprs, "BD": part_d, "BE": part_e, "MAP": feature_map, "REVERSE": behind}, *plan.size[2:],
        )  # fmt: skip
    if not plan.causal:
        return states.sum(2, keepdim=True)
    if something:
        _launch(
            kernels.scan_states, (ceil_div(width, 128), plan.B * plan.HK), (states, plan.table), (width, slots),
            {"STEP": 16, "BLOCK": 128, "REVERSE": behind, "PACKED": plan.table is not None},
        )  # fmt: skip
    return states


def _tiles(plan: Plan, length: int) -> tuple[int, int, dict[str, Any]]:
    """Tiles in a head, slots with a state of their own, and what the kernels that work on tiles are compiled for."""
    BD, BE = padded_width(plan.D), padded_width(plan.E)
    constexprs = {**plan.constexprs, "BD": BD, "BE": BE, "PART": min(PART, BD, BE)}
    if not plan.causal:
        return ceil_div(length, plan.size.block), 0, {**constexprs, "CHUNK": plan.size.block}
    slots = plan.slots(length)
    return slots * (plan.size.slot // plan.size.block), slots, constexprs


def launch_forward(
    query: Any, keys: Any, value: Any, shift: Any, prior: Any, mask: Any, initial: Any, cu_seqlens: Any,
    feature_map: int, normalise: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    plan = _plan(query, keys, value, shift, cu_seqlens, causal)
    B, H, HK, L, S, D, E = plan[:7]
    out = empty_like_bshd(query, E)
    mixed = query.new_empty(B, HK, S, D, dtype=feature_type(query.dtype))
    if mixed.numel() > 0:
        grid, numbers, constexprs = _mixture(plan, keys, shift, prior, mask, feature_map)
        _launch(kernels.mix_features, grid, (keys, shift, prior, mask, mixed), numbers, constexprs)
    states = _sum_states(plan, initial, mixed, value, (None, None), feature_map)
    inverse = states.new_empty(B, H, L) if normalise else states.new_ones(B, H, L)
    if out.numel() > 0:
        tiles, slots, constexprs = _tiles(plan, L)
        _launch(
            kernels.linear_forward, (tiles, B * H), (query, mixed, value, states, plan.table, out, inverse),
            (*(n for x in (query, mixed, value, out) for n in x.stride()[:3]), H, H // HK, L, slots),
            {**constexprs, "MAP": feature_map, "NORMALISE": normalise}, *plan.size[2:],
        )  # fmt: skip
    return out, states[:, :, -1].clone(), mixed, states, inverse


def launch_backward(
    grad: Any, grad_final: Any, query: Any, keys: Any, value: Any, shift: Any, prior: Any, mask: Any, cu_seqlens: Any,
    mixed: Any, states: Any, inverse: Any, feature_map: int, normalise: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    plan = _plan(query, keys, value, shift, cu_seqlens, causal)
    B, H, HK, L, S, D = plan[:6]
    dquery, dkeys, dvalue = map(empty_like_bshd, (query, keys, value))
    dprior = states.new_empty(B, HK, plan.M, S) if prior is not None else states.new_empty(0)
    grid, numbers, constexprs = _mixture(plan, keys, shift, prior, mask, feature_map)
    dshift = states.new_empty(grid[0], B, *shift.shape) if shift is not None else states.new_empty(0)
    factor = torch.empty_like(inverse) if normalise else torch.zeros_like(inverse)
    strides = tuple(n for x in (grad, query, mixed, value) for n in x.stride()[:3])
    if query.numel() > 0:
        tiles, slots, tile_constexprs = _tiles(plan, L)
        _launch(
            kernels.linear_backward_dq, (tiles, B * H),
            (grad, query, mixed, value, states, inverse, plan.table, dquery, factor),
            (*strides, *dquery.stride()[:3], H, H // HK, L, slots),
            {**tile_constexprs, "MAP": feature_map, "NORMALISE": normalise}, *plan.size[2:],
        )  # fmt: skip
    behind = _sum_states(plan, grad_final, query, grad, (inverse, factor), feature_map)
    if value.numel() > 0:
        dmixed = states.new_empty(B, HK, S, D)
        tiles, slots, tile_constexprs = _tiles(plan, S)
        _launch(
            kernels.linear_backward_dkdv, (tiles, B * HK),
            (grad, query, mixed, value, behind, inverse, factor, plan.table, dmixed, dvalue),
            (*strides, *dvalue.stride()[:3], HK, H // HK, S, slots),
            {**tile_constexprs, "MAP": feature_map}, *plan.size[2:],
        )  # fmt: skip
        _launch(
            kernels.unmix_gradients, grid, (dmixed, keys, shift, prior, mask, dkeys, dshift, dprior),
            (*numbers, *key_strides(dkeys.stride(), shift is not None)), constexprs,
        )  # fmt: skip
    dshift = dshift.sum((0, 1)) if shift is not None else dshift
    return dquery, dkeys, dvalue, dshift, dprior, behind[:, :, 0].clone()


def linear_step(
    query: Tensor, keys: Tensor, value: Tensor, shift: Tensor | None, prior: Tensor | None,
    state: tuple[Tensor, ...], feature_map: int, normalise: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """Output [B, H, 1, E] and the state (Z [B, HK, D, E], z [B, HK, D]) in fp32, from query [B, H, 1, D] and the rest
    as of a LinearCall with a single token."""
    (B, H, _, D), (HK, _, E) = query.shape, value.shape[1:]
    M = keys.shape[2] if shift is None else shift.shape[1]
    total, norm = (x if x.stride(-1) == 1 and x.dtype == torch.float32 else x.float().contiguous() for x in state)
    out = query.new_empty(B, H, 1, E)
    new_total, new_norm = total.new_empty(B, HK, D, E), total.new_empty(B, HK, D)
    width = min(STEP_COLUMNS, padded_width(E))
    prior_strides: tuple[int, ...] = (0, 0, 0)
    if prior is not None:
        prior_strides = tuple(
            0 if n == 1 else stride for n, stride in zip(prior.shape[:3], prior.stride(), strict=False)
        )
    constexprs: dict[str, Any] = {
        "D": D, "E": E, "BD": padded_width(D), "BE": width, "MAP": feature_map, "SHIFTED": shift is not None,
        "PRIOR": prior is not None, "NORMALISE": normalise,
    }  # fmt: skip
    _launch(
        decode_token, (-(-E // width), HK, B),
        (query, keys, value, shift, prior, total, norm, out, new_total, new_norm),
        (*query.stride()[:2], *keys.stride()[:2], 0 if shift is not None else keys.stride(2), *value.stride()[:2],
        *prior_strides, *total.stride()[:3], *norm.stride()[:2], 1 / M, HK, H // HK, M), constexprs,
    )  # fmt: skip
    return out, (new_total, new_norm)


@torch.library.custom_op("mgk::linear_attention", mutates_args=())
def forward_op(
    query: Tensor, keys: Tensor, value: Tensor, shift: Tensor | None, prior: Tensor | None, mask: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, feature_map: int, normalise: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out [B, H, L, E], the final state [B, Hk, D·(E+1)], and for the backward: φ̃ [B, Hk, S, D], the states before
    each slot [B, Hk, slots + 1, D·(E+1)] or, not causal, that of all keys [B, Hk, 1, D·(E+1)], 1/d [B, H, L]."""
    return launch_forward(query, keys, value, shift, prior, mask, initial, cu_seqlens, feature_map, normalise, causal)


@forward_op.register_fake
def _forward_fake(
    query: Any, keys: Any, value: Any, shift: Any, prior: Any, mask: Any, initial: Any, cu_seqlens: Any,
    feature_map: Any, normalise: Any, causal: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    (B, H, L, D), (HK, S, E) = query.shape, value.shape[1:]
    dtype = feature_type(query.dtype)
    # Head widths are numbers, also where a compiler keeps other sizes open.
    slot = blocks(max(padded_width(int(D)), padded_width(int(E))), dtype.itemsize).slot
    slots = _slots(S, slot, cu_seqlens) if causal else 0
    empty = lambda *shape: query.new_empty(*shape, dtype=torch.float32)  # noqa: E731
    state = D * (E + 1)
    mixed = query.new_empty(B, HK, S, D, dtype=dtype)
    return empty_like_bshd(query, E), empty(B, HK, state), mixed, empty(B, HK, slots + 1, state), empty(B, H, L)


@torch.library.custom_op("mgk::linear_attention_backward", mutates_args=())
def backward_op(
    grad: Tensor, grad_final: Tensor | None, query: Tensor, keys: Tensor, value: Tensor, shift: Tensor | None,
    prior: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None, mixed: Tensor, states: Tensor,
    inverse: Tensor, feature_map: int, normalise: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, keys, value, shift (or empty), log prior [B, Hk, M, S] (or empty), and the initial state."""
    return launch_backward(
        grad, grad_final, query, keys, value, shift, prior, mask, cu_seqlens, mixed, states, inverse, feature_map,
        normalise, causal,
    )  # fmt: skip


@backward_op.register_fake
def _backward_fake(
    grad: Any, grad_final: Any, query: Any, keys: Any, value: Any, shift: Any, prior: Any, mask: Any, cu_seqlens: Any,
    mixed: Any, states: Any, inverse: Any, feature_map: Any, normalise: Any, causal: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    M = keys.shape[2] if shift is None else shift.shape[1]
    dshift = states.new_empty(shift.shape if shift is not None else 0)
    dprior = states.new_empty(*value.shape[:2], M, value.shape[2]) if prior is not None else states.new_empty(0)
    dinitial = states.new_empty(*states.shape[:2], states.shape[3])
    return *map(empty_like_bshd, (query, keys, value)), dshift, dprior, dinitial


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, keys, value, shift, prior, mask, _, cu_seqlens, *ctx.numbers = inputs
    ctx.save_for_backward(query, keys, value, shift, prior, mask, cu_seqlens, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Any, grad_final: Any, *_: Any, launch: Any = None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    query, _, value, shift, prior = saved[:5]
    if grad is None:
        grad = query.new_zeros(*query.shape[:3], value.shape[3])
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    need = ctx.needs_input_grad
    dquery, dkeys, dvalue, dshift, dprior, dinitial = (launch or backward_op)(grad, grad_final, *saved, *ctx.numbers)
    return (
        dquery, dkeys, dvalue, dshift.to(shift.dtype) if need[3] else None,
        dprior.sum_to_size(prior.shape).to(prior.dtype) if need[4] else None,
        None, dinitial if need[6] else None, None, None, None, None,
    )  # fmt: skip


# Output and final state.
linear_attention = make_autograd_op(forward_op, launch_forward, launch_backward, _save, _gradients)
backward_op.register_autograd(raise_no_double_backward)


def _products(query: Any, value: Any) -> int:
    """Σ φ̃ vᵀ over the keys, φ(q)·Z and φ(q)·z for each query, as for tensors on the meta device."""
    (B, H, L, D), (HK, S, E) = query, value[1:]
    return 2 * B * D * (HK * S * E + H * L * (E + 1))


@register_flop_formula(torch.ops.mgk.linear_attention)
def _forward_flops(query: Any, keys: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _products(query, value)


@register_flop_formula(torch.ops.mgk.linear_attention_backward)
def _backward_flops(
    grad: Any, grad_final: Any, query: Any, keys: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return 2 * _products(query, value)
