"""What of a call's launches follows from layouts and flags alone: found once, and looked up by every call like it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from mgk.kernels.jit_cache import LaunchSpec
from mgk.kernels.mixture.args import NUM_TENSORS, MixtureArgs
from mgk.kernels.mixture.block_sizes import CAPPED, SPLIT_WIDTH, Block
from mgk.kernels.mixture.bwd_common import add_parts, summed_entries
from mgk.kernels.mixture.bwd_dkdv import DK_AND_DV, DK_ONLY, DV_ONLY, mixture_backward_dkdv
from mgk.kernels.mixture.bwd_dq import mixture_backward_dq
from mgk.kernels.mixture.component_gemm import write_key_operand
from mgk.kernels.mixture.fwd import mixture_forward
from mgk.kernels.mixture.preprocess import prepare_keys
from mgk.kernels.mixture.tile import BOTH, FALLBACK, FAST, GENERAL, KEY_TILE, ROW_ALIGNMENT

SLOT = KEY_TILE.value
HEAD_ROWS = ROW_ALIGNMENT.value
L2_BYTES = 24 << 20

# Columns of the operands that blend the components of shifted keys in one step of the tensor cores.
BLEND_WIDTH = 16

# Of the block in which the parts of sums are added up; 16 columns are 64 bytes of a row, two sectors of memory.
PART_ROWS, PART_COLS = 512, 16

# Of the gradient of log pi: nothing, its sum over batch and keys, or all of it.
NOTHING, SUMMED, EACH = 0, 1, 2


class TensorLayout(NamedTuple):
    """Of a tensor, all but where it lies."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class LaunchFlags(NamedTuple):
    """The rest of what a plan is for."""

    causal: int
    hard: bool
    dropout: bool
    max_q: int
    max_k: int
    slots: int
    small: bool  # one launch a pass, by pointers
    bounded: bool  # the forward may take a bound of the row for its maximum
    precision: str
    blocks: Callable[..., Block]  # where the block sizes are looked up
    unblended: bool = False  # the forward takes blocks without the operand of a blend, where there are such


def layouts(*tensors: Any) -> tuple[Any, ...]:
    """Plain tuples, which cost a call less; a plan makes `Layout` of them."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors])


def _args_of_layouts(tensors: tuple[Any, ...], flags: LaunchFlags) -> tuple[Any, list[Any]]:
    """Return a `MixtureArgs` with layouts in place of tensors, and the layouts that follow its own."""
    layouts = [x and TensorLayout(*x) for x in tensors]
    numbers = (0.0, 0.0, 0.0, float(flags.dropout), flags.causal, flags.hard, flags.max_q, flags.max_k)
    return MixtureArgs._make((*layouts[:NUM_TENSORS], *numbers)), layouts[NUM_TENSORS:]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def padded_width(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def broadcast_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """As of a tensor expanded to a larger shape."""
    return tuple(0 if n == 1 else stride for n, stride in zip(shape, strides, strict=True))


def _four_strides(x: TensorLayout | None) -> tuple[int, ...]:
    return (0,) * 4 if x is None else broadcast_strides(x.shape, x.strides)


def key_strides(strides: tuple[int, ...], shifted: bool) -> tuple[int, ...]:
    b, h, *rest = strides
    return (b, h, 0, rest[0]) if shifted else (b, h, rest[0], rest[1])


def _section(n_heads: int, bytes_per_head: int) -> int:
    return max(1, min(n_heads, L2_BYTES // max(1, bytes_per_head)))


def switches_of(args: MixtureArgs, precision: str) -> dict[str, Any]:
    """What the attention kernels are compiled for; a launch adds its block sizes."""
    query, _, value, shift, _, scale_t, tau_t, mask, _, cu_q, _, _, _, _, dropout_p, causal, hard, _, _ = args
    D, E = query.shape[3], value.shape[3]
    return {
        "M": args.components, "D": D, "E": E, "BD": padded_width(D),
        "BE": padded_width(E),
        "SHIFTED": shift is not None, "HARD": hard,
        "SCALE": 0 if scale_t is None else scale_t.shape[1], "TAU": tau_t is not None, "CAUSAL": causal,
        "MASK": 0 if mask is None else 1 + mask.dtype.is_floating_point, "DROPOUT": dropout_p > 0,
        "PACKED": cu_q is not None,
        "PRECISION": precision,
    }  # fmt: skip


def _factored(switches: dict[str, Any]) -> bool:
    """Whether the first kernel takes one exponential a pair, where the general one takes one a component."""
    return switches["SHIFTED"] and not switches["HARD"] and switches["SCALE"] <= 1


def _blends(way: int, factored: bool, components: int) -> bool:
    """Whether a block blends the components as a product."""
    return bool(way & 2) and factored and components > 1 and 3 * components <= BLEND_WIDTH


def _cap(first: bool, small: bool, switches: dict[str, Any]) -> str:
    """Before the name of a block: whether it may be one of few registers."""
    plain = not (switches["MASK"] or switches["DROPOUT"] or switches["SCALE"] > 1)
    return CAPPED if first and not small and plain else ""


def _paths(first: bool, small: bool) -> tuple[int, ...]:
    """The forms a kernel is launched in: the general one for all tiles (0); the first and then the general one for the
    tiles that it leaves (1, 2); or both in one launch, which costs a small call less (3)."""
    if not first:
        return (GENERAL.value,)
    return (BOTH.value,) if small else (FAST.value, FALLBACK.value)


@functools.lru_cache(1 << 10)
def preparation(
    tensors: tuple[Any, ...], hard: bool, n_seq: int, max_k: int, slots: int, operand: bool = False
) -> LaunchSpec:  # fmt: skip
    """Of keys, shift, bias, scale_t, tau_t, cu_k: the launch that fills `prepared`, `stats` and, if there is one, the
    keys' operand. Without it the launch is another: one is for tensors that are None each time or never."""
    keys, shift, bias, scale_t, tau_t, cu_k = (x and TensorLayout(*x) for x in tensors)
    HK, (S, D), M = keys.shape[1], keys.shape[-2:], (keys if shift is None else shift).shape[1 + (shift is None)]
    switches = {
        "M": M, "D": D, "BC": min(64, padded_width(D)), "SHIFTED": shift is not None, "BIAS": bias is not None,
        "SCALE": 0 if scale_t is None else scale_t.shape[1], "TAU": tau_t is not None, "HARD": hard,
        "PACKED": cu_k is not None,
    }  # fmt: skip
    strides = (*key_strides(keys.strides, shift is not None), *_four_strides(bias))
    tiles = ceil_div(max_k, SLOT)
    return LaunchSpec(prepare_keys, (tiles * n_seq, HK, 1), strides, (HK, S, slots, tiles), switches)


class ForwardPlan(NamedTuple):
    prepare: LaunchSpec
    attend: LaunchSpec
    cols: int  # keys of a block
    flags: int  # room for so many of them; 0 where there is no second kernel
    operand: int  # keys of the operand that blends the components, where that is a product, or 0


@functools.lru_cache(1 << 10)
def forward_plan(tensors: tuple[Any, ...], flags: LaunchFlags, bulk: bool, want_lse: bool) -> ForwardPlan:
    """tensors: the layouts of the tensors of `MixtureArgs`, and of out."""
    args, (out,) = _args_of_layouts(tensors, flags)
    query, keys, value, shift, mask, cu_q = args.query, args.keys, args.value, args.shift, args.mask, args.cu_q
    _, hard, _, max_q, max_k, slots, small, bounded, precision, blocks, unblended = flags
    switches = switches_of(args, precision)
    (B, H, L, D), (HK, S, E), M, shifted = query.shape, value.shape[1:], switches["M"], shift is not None
    n_seq, size = B if cu_q is None else cu_q.shape[0] - 1, query.dtype.itemsize
    # A float mask has no bound that is known beforehand.
    first = bounded and switches["MASK"] != 2 and (not small or (_factored(switches) and M > 2))
    kind = "small " if small else "hard " if hard else "unblended " if unblended else ""
    rows, cols, warps, stages, registers, way = blocks(
        _cap(first, small, switches) + kind + "forward", max(switches["BD"], switches["BE"]), M, shifted, size
    )
    n_tiles = ceil_div(max_q, rows)
    switches.update(BM=rows, BN=cols, TMA=bulk, IN_REGISTERS=way % 2)
    blends = _blends(way, first and _factored(switches), M)
    paths = _paths(first, small)
    attend = LaunchSpec(
        mixture_forward, (n_tiles * n_seq * H, 1, 1),
        (*query.strides[:3], *key_strides(keys.strides, shifted), *value.strides[:3], *_four_strides(mask),
        *out.strides[:3], H // HK),
        (H, L, S, slots, n_tiles, n_seq * H, _section(n_seq * H, ((1 if shifted else M) * D + E) * size * S)),
        switches, warps, stages, registers, paths,
    )  # fmt: skip
    prepare = preparation((*tensors[1:2], *tensors[3:7], tensors[10]), hard, n_seq, max_k, slots, blends)
    return ForwardPlan(prepare, attend, cols, n_seq * H * n_tiles * (len(paths) > 1), HK * slots * SLOT * blends)


class KeysPass(NamedTuple):
    launch: LaunchSpec
    rows: int  # queries of a block
    by_engine: bool  # the bulk copy engine reads the rows' vectors


class BackwardPlan(NamedTuple):
    queries: LaunchSpec
    keys: tuple[KeysPass, ...]  # dk and dv together, or one after the other
    cols: int  # keys of a block along the keys
    # Workspaces: vectors of the rows, ranges of them, flags (0 without a second kernel), and parts of sums.
    rows: tuple[int, int]
    spread: int
    flags: int
    parts: tuple[int, int, int]
    # Keys and rows of the operands that blend the components, where that is a product, or 0; and what writes the first.
    key_operand: int
    row_operand: int
    write: LaunchSpec
    add: LaunchSpec  # the parts to one another


@functools.lru_cache(1 << 10)
def backward_plan(
    tensors: tuple[Any, ...], flags: LaunchFlags, along_keys: bool, along_queries: bool, mask_grad: bool,
    prior_grad: int,
) -> BackwardPlan:  # fmt: skip
    """tensors: the layouts of the tensors of `MixtureArgs`, of out and of the gradients of out and lse. The bulk copy
    engine reads along_keys keys and value, along_queries query and gradient."""
    args, (out, grad, grad_lse) = _args_of_layouts(tensors, flags)
    query, keys, value, shift, mask, cu_q = args.query, args.keys, args.value, args.shift, args.mask, args.cu_q
    _, hard, dropout, max_q, max_k, slots, small, bounded, precision, blocks, _ = flags
    switches = switches_of(args, precision)
    (B, H, L, D), (HK, S, E), M, shifted = query.shape, value.shape[1:], switches["M"], shift is not None
    n_seq = B if cu_q is None else cu_q.shape[0] - 1
    width, size = max(switches["BD"], switches["BE"]), query.dtype.itemsize
    # Blocks of small calls are for a warp or two, whose registers masks, dropout and several scales would not fit.
    smallest = small and not dropout and not switches["MASK"] and switches["SCALE"] <= 1
    hardness, smallness = "hard " if hard else "", "small " if smallest else ""
    # Packed sequences begin anywhere in the rows' vectors.
    bulk = along_queries and cu_q is None
    of_keys = ("bulk " if bulk else smallness) + hardness
    factored = _factored(switches) and (size == 2 or bounded) and (not small or M > 2)
    # Independent keys, and hard shifted ones: one side's exponents are factors, which fp16 has no range for.
    apart = (hard or not shifted) and switches["SCALE"] <= 1 and switches["MASK"] != 2 and bounded and not small
    cap = _cap(factored or apart, small, switches)
    q_rows, q_cols, q_warps, q_stages, q_registers, q_way = blocks(
        cap + ("bulk " if along_keys else smallness) + hardness + "queries", width, M, shifted, size
    )  # fmt: skip
    in_turn = not shifted and not hard and bool(blocks(of_keys + "keys", width, M, shifted, size)[-1] & 2)
    together = shifted or width <= SPLIT_WIDTH or in_turn
    parts = ((DK_AND_DV, "keys"),) if together else ((DK_ONLY, "keys"), (DV_ONLY, "values"))
    q_tiles = ceil_div(max_q, q_rows)
    k_tiles = [ceil_div(max_k, blocks(of_keys + k, width, M, shifted, size)[1]) for _, k in parts]
    query_sums = n_seq * (H // HK) * q_tiles
    row_length = B * H * ceil_div(L, HEAD_ROWS) * HEAD_ROWS
    strides = (
        *query.strides[:3], *key_strides(keys.strides, shifted), *value.strides[:3], *_four_strides(mask),
        *grad.strides[:3], row_length, H // HK,
    )  # fmt: skip
    paths = _paths(factored or apart, small)
    # Not along the queries where independent keys are hard, whose components differ before one is chosen, or where dk
    # and dv are together, which have no registers left for it.
    key_paths = paths if shifted or (len(parts) > 1 and not hard) else (GENERAL.value,)
    queries = LaunchSpec(
        mixture_backward_dq, (q_tiles * n_seq * H, 1, 1), (*strides, *out.strides[:3]),
        (H, L, S, slots, q_tiles, n_seq * H, _section(n_seq * H, (D * (1 if shifted else M) + E) * size * S)),
        dict(switches, BM=q_rows, BN=q_cols, DMASK=mask_grad, DLSE=grad_lse is not None, TMA=along_keys,
        IN_REGISTERS=q_way % 2, PRIOR=prior_grad), q_warps, q_stages, q_registers, paths,
    )  # fmt: skip
    passes = []
    for (wanted, kind), tiles in zip(parts, k_tiles, strict=True):
        k_rows, k_cols, warps, stages, registers, k_way = blocks(of_keys + kind, width, M, shifted, size)
        by_engine = bulk and bool(k_way & 4)
        launch = LaunchSpec(
            mixture_backward_dkdv, (tiles * n_seq * HK, 1, 1), strides,
            (H, L, S, slots, tiles, n_seq * HK, q_tiles, query_sums,
            _section(n_seq * HK, (D + E) * size * L * H // HK)),
            dict(switches, BM=k_rows, BN=k_cols, BQ=q_rows, TMA=along_queries, IN_REGISTERS=k_way % 2,
            PER_COMPONENT=k_way % 4 >= 2, TMA_ROWS=by_engine, OUTPUTS=wanted.value, PRIOR=prior_grad), warps,
            stages, registers, key_paths,
        )  # fmt: skip
        passes.append(KeysPass(launch, k_rows, by_engine))
    # fp16's gradients have more digits than the products of bf16 would leave them.
    key_blend, row_blend = (
        _blends(way, factored and bounded, M) for way in (q_way, blocks(of_keys + "keys", width, M, shifted, size)[-1])
    )
    shifts, n_parts = M * D if shifted else 0, query_sums + n_seq * k_tiles[0]
    sums = summed_entries(M, shifts, prior_grad == SUMMED)
    most_tiles = max(H * q_tiles, *(HK * n for n in k_tiles))  # one launch after another
    return BackwardPlan(
        queries, tuple(passes), q_cols, rows=(2 * M, row_length), spread=n_seq * H * q_tiles,
        flags=n_seq * most_tiles * (len(paths) > 1),
        parts=(n_parts, HK, sums),
        key_operand=HK * slots * SLOT * key_blend, row_operand=row_length * row_blend,
        write=LaunchSpec(write_key_operand, (slots, HK, 1), (), (slots,), {"M": M}),
        add=LaunchSpec(
            add_parts, (ceil_div(HK * sums, PART_COLS), 1, 1), (), (n_parts, HK),
            {"SHIFTS": shifts, "M": M, "SCALES": max(switches["SCALE"], 1), "SUMS": sums, "BLOCK_ROWS": PART_ROWS,
            "BLOCK_COLS": PART_COLS}, num_warps=8,
        ),
    )  # fmt: skip
