"""The linear attention kernels as torch operators: block sizes, launches, gradients and FLOP counts.

A sequence is split into chunks. A state is Z = Σ φ̃ vᵀ and z = Σ φ̃ over keys, where φ̃ are the features of a key, mixed
over its components; both are stored in one row of D·(E+1) numbers.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mgk._core.heads import pair_heads
from mgk._core.integers import ceil_div
from mgk.kernels.architecture import architecture, is_amd
from mgk.kernels.autograd import make_autograd_op, raise_no_double_backward
from mgk.kernels.jit_cache import LaunchSpec, launch
from mgk.kernels.linear import kernels
from mgk.kernels.linear.decode import decode_token
from mgk.kernels.mixture.launch import empty_like_bshd, tf32_allowed
from mgk.kernels.mixture.launch_config import broadcast_strides, key_strides, padded_width


class BlockConfig(NamedTuple):
    """Block sizes of the linear kernels."""

    chunk: int  # rows that share a state
    block: int  # rows of a tile
    num_warps: int
    num_stages: int


# By the larger padded dimension of features and values, for GEMM inputs of 2 bytes; measured in docs/kernels.md.
BLOCKS = {64: BlockConfig(128, 64, 4, 3), 128: BlockConfig(128, 64, 4, 1), 256: BlockConfig(256, 32, 8, 1)}
# For fp16 and fp32, whose GEMM inputs have 4 bytes.
WIDE_BLOCKS = {64: BlockConfig(128, 32, 4, 1), 128: BlockConfig(128, 32, 4, 1), 256: BlockConfig(128, 16, 8, 1)}
# Rows of a chunk without causality, where all keys are one state.
FULL_CHUNK = 512
# Columns of a state per GEMM.
STATE_COLUMNS = 64
# Columns of a state per program of the decode kernel.
DECODE_COLUMNS = 32


CPU = torch.device("cpu")


@functools.cache
def select_block(width: int, itemsize: int) -> BlockConfig:
    table = BLOCKS if itemsize == 2 else WIDE_BLOCKS
    return next(block for limit, block in table.items() if width <= limit)


def feature_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of φ̃ and of the GEMM inputs. Sums of fp16 features exceed fp16's range."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _precision(dtype: torch.dtype, device: torch.device = CPU) -> str:
    """Return the GEMM precision. TF32 has the precision of fp16 and the range of fp32."""
    if is_amd(architecture(device)):
        return "ieee"
    return "tf32" if dtype == torch.float16 or (dtype == torch.float32 and tf32_allowed()) else "ieee"


def _count_chunks(S: int, chunk: int, cu_seqlens: Tensor | None) -> int:
    """Return the number of chunks, or an upper bound for packed sequences, each of which begins a new chunk."""
    return ceil_div(S, chunk) if cu_seqlens is None else S // chunk + cu_seqlens.shape[0] - 1


def _chunk_table(cu_seqlens: Tensor, num_chunks: int, chunk: int) -> Tensor:
    """Return int32 [chunks, 4]: first row, end, whether first, whether last of its sequence; 0 in unused chunks."""
    counts = (cu_seqlens.diff() + chunk - 1) // chunk
    ends = counts.cumsum(0)
    index = torch.arange(num_chunks, device=cu_seqlens.device)
    sequence = torch.bucketize(index, ends, right=True)
    used = sequence < counts.shape[0]
    sequence = sequence.clamp(max=counts.shape[0] - 1)
    within = index - (ends - counts)[sequence]
    begin = cu_seqlens[sequence] + within * chunk
    end = torch.minimum(begin + chunk, cu_seqlens[sequence + 1])
    columns = (begin, end, within == 0, within == counts[sequence] - 1)
    return torch.stack([(column * used).int() for column in columns], 1).contiguous()


class LaunchConfig(NamedTuple):
    """Sizes and constexprs that the launches of one call share."""

    B: int
    H: int
    HK: int
    HP: int  # pair heads: the fewest that key and value heads can be repeated to
    L: int  # queries
    S: int  # keys
    D: int
    E: int
    M: int
    causal: bool
    table: Tensor | None  # of the chunks of packed sequences
    block: BlockConfig
    constexprs: dict[str, Any]

    def count_chunks(self, length: int) -> int:
        return _count_chunks(length, self.block.chunk, None) if self.table is None else self.table.shape[0]


def _make_config(
    query: Tensor, keys: Tensor, value: Tensor, shift: Tensor | None, cu_seqlens: Tensor | None, causal: bool
) -> LaunchConfig:
    (B, H, L, D), (HV, S, E), HK = query.shape, value.shape[1:], keys.shape[1]
    HP = pair_heads(HK, HV)
    dtype = feature_dtype(query.dtype)
    block = select_block(max(padded_width(D), padded_width(E)), dtype.itemsize)
    block = block if causal else block._replace(chunk=FULL_CHUNK)
    table = None
    if cu_seqlens is not None:
        table = _chunk_table(cu_seqlens, _count_chunks(S, block.chunk, cu_seqlens), block.chunk)
    constexprs = {
        "D": D, "E": E, "BLOCK": block.block, "CHUNK": block.chunk, "CAUSAL": causal, "PACKED": table is not None,
        "TYPE": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        "PRECISION": _precision(query.dtype, query.device), "KEY_REPEAT": HP // HK, "VALUE_REPEAT": HP // HV,
    }  # fmt: skip
    M = keys.shape[2] if shift is None else shift.shape[1]
    return LaunchConfig(B, H, HK, HP, L, S, D, E, M, causal, table, block, constexprs)


@functools.lru_cache(1 << 10)
def _launch_spec(
    kernel: Any, grid: tuple[int, ...], dtypes: tuple[torch.dtype | None, ...], scalars: tuple[float, ...],
    names: tuple[str, ...], values: tuple[Any, ...], num_warps: int, num_stages: int,
) -> LaunchSpec:  # fmt: skip
    x, y, z = (*grid, 1, 1)[:3]
    constexprs = dict(zip(names, values, strict=True))
    kernel_constexprs = {name: constexprs[name] for name in kernel.arg_names[len(dtypes) + len(scalars) :]}
    return LaunchSpec(kernel, (x, y, z), scalars, (), kernel_constexprs, num_warps, num_stages)


def _launch(
    kernel: Any, grid: tuple[int, ...], tensors: tuple[Any, ...], scalars: tuple[float, ...],
    constexprs: dict[str, Any], num_warps: int = 4, num_stages: int = 1,
) -> None:  # fmt: skip
    """Launch a kernel; constexprs that it does not take are ignored."""
    dtypes = tuple([None if x is None else x.dtype for x in tensors])
    names, values = tuple(constexprs), tuple(constexprs.values())
    launch(_launch_spec(kernel, grid, dtypes, scalars, names, values, num_warps, num_stages), tensors)


def _mixing_launch(
    config: LaunchConfig, keys: Any, shift: Any, prior: Any, mask: Any, feature_map: int
) -> tuple[Any, Any, Any]:
    """Return grid, scalars and constexprs of `mix_features` and `unmix_gradients`."""
    B, HK, S, M, width = config.B, config.HK, config.S, config.M, padded_width(config.D)
    rows = max(16, 4096 // width)
    strides = key_strides(keys.stride(), shift is not None)
    if prior is not None:
        strides += prior.expand(B, HK, M, S).stride()
    else:
        strides += (0,) * 4
    constexprs = {
        "D": config.D, "BD": width, "ROWS": rows, "MAP": feature_map, "SHIFTED": shift is not None,
        "PRIOR": prior is not None, "MASK": mask is not None,
    }  # fmt: skip
    return (ceil_div(S, rows), B * HK), (*strides, 1 / M, HK, S, M), constexprs


def _sum_states(
    config: LaunchConfig, start: Tensor | None, features: Tensor, value: Tensor, rows: tuple[Any, Any], feature_map: int
) -> Tensor:
    """Return the states [B, Hs, chunks + 1, D·(E+1)] before or after each chunk; one state if not causal.

    Args:
        config: Sizes and constexprs of the call.
        start: The state before the first or after the last chunk; None for 0.
        features: Mixed keys (forward) or queries (backward).
        value: Values or their gradients.
        rows: (None, None) for the states before each chunk; 1/d and −δ/d of each query for those after it.
        feature_map: Code of the feature map.
    """
    B, H, HP, D, E = config.B, config.H, config.HP, config.D, config.E
    reverse, length = rows[0] is not None, features.shape[2]
    chunks, width = config.count_chunks(length), D * (E + 1)
    states = features.new_empty(B, HP, chunks + 1, width, dtype=torch.float32)
    first = states[:, :, -1 if reverse else 0]
    if start is None:
        first.zero_()
    else:
        first.copy_(start)
    is_empty = length == 0 or states.numel() == 0
    if not is_empty:
        BD, BE = min(STATE_COLUMNS, padded_width(D)), min(STATE_COLUMNS, padded_width(E))
        parts = ceil_div(D, BD) * ceil_div(E, BE)
        _launch(
            kernels.sum_chunks, (chunks, B * HP, parts), (features, value, *rows, states, config.table),
            (*features.stride()[:3], *value.stride()[:3], HP, H // HP if reverse else 1, length, chunks,
            0 if reverse else 1),
            {**config.constexprs, "BD": BD, "BE": BE, "MAP": feature_map, "REVERSE": reverse}, *config.block[2:],
        )  # fmt: skip
    if not config.causal:
        return states.sum(2, keepdim=True)
    if not is_empty:
        _launch(
            kernels.scan_states, (ceil_div(width, 128), B * HP), (states, config.table), (width, chunks),
            {"STEP": 16, "BLOCK": 128, "REVERSE": reverse, "PACKED": config.table is not None},
        )  # fmt: skip
    return states


def _tile_launch(config: LaunchConfig, length: int) -> tuple[int, int, dict[str, Any]]:
    """Return tiles per head, chunks per head (0 if not causal), and the constexprs of the tile kernels."""
    BD, BE = padded_width(config.D), padded_width(config.E)
    constexprs = {**config.constexprs, "BD": BD, "BE": BE, "PART": min(STATE_COLUMNS, BD, BE)}
    if not config.causal:
        return ceil_div(length, config.block.block), 0, {**constexprs, "CHUNK": config.block.block}
    chunks = config.count_chunks(length)
    return chunks * (config.block.chunk // config.block.block), chunks, constexprs


def launch_forward(
    query: Any, keys: Any, value: Any, shift: Any, prior: Any, mask: Any, initial: Any, cu_seqlens: Any,
    feature_map: int, normalise: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the outputs of `forward_op`."""
    config = _make_config(query, keys, value, shift, cu_seqlens, causal)
    B, H, HK, HP, L, S, D, E = config[:8]
    out = empty_like_bshd(query, E)
    mixed = query.new_empty(B, HK, S, D, dtype=feature_dtype(query.dtype))
    if mixed.numel() > 0:
        grid, scalars, constexprs = _mixing_launch(config, keys, shift, prior, mask, feature_map)
        _launch(kernels.mix_features, grid, (keys, shift, prior, mask, mixed), scalars, constexprs)
    states = _sum_states(config, initial, mixed, value, (None, None), feature_map)
    inverse = states.new_empty(B, H, L) if normalise else states.new_ones(B, H, L)
    if out.numel() > 0:
        tiles, chunks, constexprs = _tile_launch(config, L)
        _launch(
            kernels.linear_forward, (tiles, B * H), (query, mixed, value, states, config.table, out, inverse),
            (*(n for x in (query, mixed, value, out) for n in x.stride()[:3]), H, H // HP, L, chunks),
            {**constexprs, "MAP": feature_map, "NORMALISE": normalise}, *config.block[2:],
        )  # fmt: skip
    return out, states[:, :, -1].clone(), mixed, states, inverse


def launch_backward(
    grad: Any, grad_final: Any, query: Any, keys: Any, value: Any, shift: Any, prior: Any, mask: Any, cu_seqlens: Any,
    mixed: Any, states: Any, inverse: Any, feature_map: int, normalise: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of `backward_op`."""
    config = _make_config(query, keys, value, shift, cu_seqlens, causal)
    B, H, HK, HP, L, S, D = config[:7]
    dquery, dkeys, dvalue = map(empty_like_bshd, (query, keys, value))
    dprior = states.new_empty(B, HK, config.M, S) if prior is not None else states.new_empty(0)
    grid, scalars, constexprs = _mixing_launch(config, keys, shift, prior, mask, feature_map)
    dshift = states.new_empty(grid[0], B, *shift.shape) if shift is not None else states.new_empty(0)
    factor = torch.empty_like(inverse) if normalise else torch.zeros_like(inverse)
    strides = tuple(n for x in (grad, query, mixed, value) for n in x.stride()[:3])
    if query.numel() > 0:
        tiles, chunks, tile_constexprs = _tile_launch(config, L)
        _launch(
            kernels.linear_backward_dq, (tiles, B * H),
            (grad, query, mixed, value, states, inverse, config.table, dquery, factor),
            (*strides, *dquery.stride()[:3], H, H // HP, L, chunks),
            {**tile_constexprs, "MAP": feature_map, "NORMALISE": normalise}, *config.block[2:],
        )  # fmt: skip
    states_after = _sum_states(config, grad_final, query, grad, (inverse, factor), feature_map)
    if value.numel() > 0:
        dmixed = states.new_empty(B, HP, S, D)
        # With different numbers of key and value heads, the kernel writes parts of the gradients, one per pair head.
        pairs = dvalue if value.shape[1] == HP else empty_like_bshd(value, heads=HP, dtype=torch.float32)
        tiles, chunks, tile_constexprs = _tile_launch(config, S)
        _launch(
            kernels.linear_backward_dkdv, (tiles, B * HP),
            (grad, query, mixed, value, states_after, inverse, factor, config.table, dmixed, pairs),
            (*strides, *pairs.stride()[:3], HP, H // HP, S, chunks),
            {**tile_constexprs, "MAP": feature_map}, *config.block[2:],
        )  # fmt: skip
        if pairs is not dvalue:
            dvalue.copy_(pairs.unflatten(1, (value.shape[1], -1)).sum(2))
        if HP != HK:
            dmixed = dmixed.unflatten(1, (HK, -1)).sum(2)
        _launch(
            kernels.unmix_gradients, grid, (dmixed, keys, shift, prior, mask, dkeys, dshift, dprior),
            (*scalars, *key_strides(dkeys.stride(), shift is not None)), constexprs,
        )  # fmt: skip
    dshift = dshift.sum((0, 1)) if shift is not None else dshift
    return dquery, dkeys, dvalue, dshift, dprior, states_after[:, :, 0].clone()


def launch_decode(
    query: Tensor, keys: Tensor, value: Tensor, shift: Tensor | None, prior: Tensor | None,
    state: tuple[Tensor, ...], feature_map: int, normalise: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """Return the output [B, H, 1, E] of a single token and the new state in fp32.

    Args:
        query: [B, H, 1, D].
        keys: [B, Hk, 1, D] if shift is given, else [B, Hk, M, 1, D].
        value: [B, Hv, 1, E].
        shift: [Hk, M, D] or None.
        prior: Log prior, broadcastable to [B, Hk, M, 1], or None.
        state: Z [B, Hs, D, E] and z [B, Hk, D] of the preceding tokens.
        feature_map: Code of the feature map.
        normalise: Whether to divide by φ(q)·z.
    """
    (B, H, _, D), (HV, _, E), HK = query.shape, value.shape[1:], keys.shape[1]
    HP = pair_heads(HK, HV)
    M = keys.shape[2] if shift is None else shift.shape[1]
    total, norm = (x if x.stride(-1) == 1 and x.dtype == torch.float32 else x.float().contiguous() for x in state)
    out = query.new_empty(B, H, 1, E)
    new_total, new_norm = total.new_empty(B, HP, D, E), total.new_empty(B, HK, D)
    width = min(DECODE_COLUMNS, padded_width(E))
    prior_strides: tuple[int, ...] = (0, 0, 0)
    if prior is not None:
        prior_strides = broadcast_strides(prior.shape[:3], prior.stride()[:3])
    constexprs: dict[str, Any] = {
        "D": D, "E": E, "BD": padded_width(D), "BE": width, "MAP": feature_map, "SHIFTED": shift is not None,
        "PRIOR": prior is not None, "NORMALISE": normalise, "KEY_REPEAT": HP // HK, "VALUE_REPEAT": HP // HV,
    }  # fmt: skip
    _launch(
        decode_token, (ceil_div(E, width), HP, B),
        (query, keys, value, shift, prior, total, norm, out, new_total, new_norm),
        (*query.stride()[:2], *keys.stride()[:2], 0 if shift is not None else keys.stride(2), *value.stride()[:2],
        *prior_strides, *total.stride()[:3], *norm.stride()[:2], 1 / M, HP, H // HP, M), constexprs,
    )  # fmt: skip
    return out, (new_total, new_norm)


@torch.library.custom_op("mgk::linear_attention", mutates_args=())
def forward_op(
    query: Tensor, keys: Tensor, value: Tensor, shift: Tensor | None, prior: Tensor | None, mask: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, feature_map: int, normalise: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return out [B, H, L, E], the final state [B, Hs, D·(E+1)] and, for the backward pass, three tensors.

    Those are φ̃ [B, Hk, S, D], the states before each chunk [B, Hs, chunks + 1, D·(E+1)] (not causal: of all keys, [B,
    Hs, 1, D·(E+1)]) and 1/d [B, H, L], the inverse denominators. Hs is the number of pair heads.
    """
    return launch_forward(query, keys, value, shift, prior, mask, initial, cu_seqlens, feature_map, normalise, causal)


@forward_op.register_fake
def _forward_fake(
    query: Any, keys: Any, value: Any, shift: Any, prior: Any, mask: Any, initial: Any, cu_seqlens: Any,
    feature_map: Any, normalise: Any, causal: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    (B, H, L, D), (HV, S, E), HK = query.shape, value.shape[1:], keys.shape[1]
    HP = pair_heads(HK, HV)
    dtype = feature_dtype(query.dtype)
    # int: head dimensions are specialized even if torch.compile treats other sizes as dynamic.
    chunk = select_block(max(padded_width(int(D)), padded_width(int(E))), dtype.itemsize).chunk
    chunks = _count_chunks(S, chunk, cu_seqlens) if causal else 0
    empty = lambda *shape: query.new_empty(*shape, dtype=torch.float32)  # noqa: E731
    state = D * (E + 1)
    mixed = query.new_empty(B, HK, S, D, dtype=dtype)
    return empty_like_bshd(query, E), empty(B, HP, state), mixed, empty(B, HP, chunks + 1, state), empty(B, H, L)


@torch.library.custom_op("mgk::linear_attention_backward", mutates_args=())
def backward_op(
    grad: Tensor, grad_final: Tensor | None, query: Tensor, keys: Tensor, value: Tensor, shift: Tensor | None,
    prior: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None, mixed: Tensor, states: Tensor,
    inverse: Tensor, feature_map: int, normalise: bool, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, keys, value, shift, log prior [B, Hk, M, S] and the initial state.

    Gradients of shift and log prior are empty tensors if the call has none.
    """
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
    dprior = states.new_empty(*keys.shape[:2], M, value.shape[2]) if prior is not None else states.new_empty(0)
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


def _gemm_flops(query: Any, keys: Any, value: Any) -> int:
    """Count Σ φ̃ vᵀ over the keys, φ(q)·Z and φ(q)·z of each query, as the meta backend does."""
    (B, H, L, D), (HV, S, E) = query, value[1:]
    return 2 * B * D * (pair_heads(keys[1], HV) * S * E + H * L * (E + 1))


@register_flop_formula(torch.ops.mgk.linear_attention)
def _forward_flops(query: Any, keys: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _gemm_flops(query, keys, value)


@register_flop_formula(torch.ops.mgk.linear_attention_backward)
def _backward_flops(
    grad: Any, grad_final: Any, query: Any, keys: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return 2 * _gemm_flops(query, keys, value)
