"""Launch configurations of the mixture kernels, cached by tensor layouts and flags."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from mgk._core.integers import ceil_div
from mgk.kernels.architecture import HOPPER, Architecture
from mgk.kernels.jit_cache import LaunchSpec
from mgk.kernels.mixture.args import NUM_TENSORS, MixtureArgs
from mgk.kernels.mixture.block_config import BlockConfig, BlockKey
from mgk.kernels.mixture.block_sizes import SHORT_LENGTH, SPLIT_WIDTH
from mgk.kernels.mixture.bwd_common import add_parts, summed_entries
from mgk.kernels.mixture.bwd_dkdv import mixture_backward_dkdv
from mgk.kernels.mixture.bwd_dq import mixture_backward_dq
from mgk.kernels.mixture.component_gemm import write_key_operand
from mgk.kernels.mixture.fwd import mixture_forward
from mgk.kernels.mixture.preprocess import prepare_keys
from mgk.kernels.mixture.query_walk import DK_AND_DV, DK_ONLY, DV_ONLY
from mgk.kernels.mixture.tile import (  # fmt: skip
    BOTH,
    FALLBACK,
    FAST,
    FINISH,
    GENERAL,
    KEY_TILE,
    PREPARE,
    ROW_ALIGNMENT,
    RUNNING,
)

KEYS_PER_TILE = KEY_TILE.value  # keys per tile of preprocessed keys
# Tiles per program of a FALLBACK launch on Hopper. With one tile each, a launch took 6 to 8 us for 3,072 tiles without
# a flag (H200): a program occupies the kernel's registers and shared memory until its flag is loaded. On other GPUs and
# at widths above 128 the loop over the tiles spills up to 2 KB (compiled).
FALLBACK_TILES, MAX_FALLBACK_WIDTH = 8, 128
ROWS_PER_TILE = ROW_ALIGNMENT.value  # a head's row vectors are padded to a multiple of this
L2_BYTES = 24 << 20

# Columns of the operands of the component GEMM: one K step of the tensor cores.
COMPONENT_GEMM_WIDTH = 16

# Block in which partial sums are added; 16 columns are 64 bytes of a row, two memory sectors.
PART_ROWS, PART_COLS = 512, 16

# Gradient of the log prior: none, its sum over batch and keys, or one per key.
NO_PRIOR_GRAD, SUMMED_PRIOR_GRAD, FULL_PRIOR_GRAD = 0, 1, 2


class TensorLayout(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class LaunchFlags(NamedTuple):
    """Properties of a call, besides tensor layouts, that determine its launch configuration."""

    causal: int
    hard: bool
    dropout: bool
    max_q: int
    max_k: int
    num_key_tiles: int
    small: bool  # one launch per pass, with pointers instead of TMA descriptors
    bounded: bool  # the forward may use an upper bound of a row's exponents instead of their maximum
    precision: str
    select_block: Callable[..., BlockConfig]
    no_component_gemm: bool = False  # the forward prefers blocks without a component GEMM
    architecture: Architecture = HOPPER
    one_pass: bool = False  # backward pass of `bwd_onepass`; excludes small

    @property
    def length(self) -> int:
        """The larger number of queries and keys."""
        return max(self.max_q, self.max_k)


def layouts(*tensors: Any) -> tuple[Any, ...]:
    """Return layouts as plain tuples, which are cheaper to make than `TensorLayout`s."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors])


def _args_of_layouts(tensors: tuple[Any, ...], flags: LaunchFlags) -> tuple[Any, list[Any]]:
    """Return a `MixtureArgs` with layouts in place of tensors, and the remaining layouts."""
    layouts = [x and TensorLayout(*x) for x in tensors]
    tensor_fields: dict[str, Any] = dict(zip(MixtureArgs._fields[:NUM_TENSORS], layouts[:NUM_TENSORS], strict=True))
    args = MixtureArgs(
        **tensor_fields, scale=0.0, tau=0.0, constant=0.0, dropout_p=float(flags.dropout), causal=flags.causal,
        hard=flags.hard, max_q=flags.max_q, max_k=flags.max_k,
    )  # fmt: skip
    return args, layouts[NUM_TENSORS:]


@functools.cache
def padded_width(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def broadcast_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor that is expanded to a larger shape."""
    return tuple(0 if n == 1 else stride for n, stride in zip(shape, strides, strict=True))


def _four_strides(x: TensorLayout | None) -> tuple[int, ...]:
    return (0,) * 4 if x is None else broadcast_strides(x.shape, x.strides)


def key_strides(strides: tuple[int, ...], shifted: bool) -> tuple[int, ...]:
    """Return the strides of batch, head, component and position; shifted keys have no component dimension."""
    b, h, *inner = strides
    return (b, h, 0, inner[0]) if shifted else (b, h, inner[0], inner[1])


def _heads_in_l2(num_heads: int, bytes_per_head: int) -> int:
    return max(1, min(num_heads, L2_BYTES // max(1, bytes_per_head)))


def constexprs_of(args: MixtureArgs, precision: str) -> dict[str, Any]:
    """Return the constexprs that the attention kernels share; a launch adds its block sizes."""
    D, E, scale_t, mask = args.query.shape[3], args.value.shape[3], args.scale_t, args.mask
    return {
        "M": args.components, "D": D, "E": E, "BD": padded_width(D), "BE": padded_width(E),
        "SHIFTED": args.shift is not None, "HARD": args.hard, "SCALE": 0 if scale_t is None else scale_t.shape[1],
        "TAU": args.tau_t is not None, "CAUSAL": args.causal,
        "MASK": 0 if mask is None else 1 + mask.dtype.is_floating_point, "DROPOUT": args.dropout_p > 0,
        "PACKED": args.cu_q is not None, "PRECISION": precision,
    }  # fmt: skip


def _is_factored(constexprs: dict[str, Any]) -> bool:
    """Return whether the FAST path takes one exponential per pair, and the GENERAL one M of them."""
    return constexprs["SHIFTED"] and not constexprs["HARD"] and constexprs["SCALE"] <= 1


def _uses_component_gemm(block: BlockConfig, factored: bool, components: int) -> bool:
    return block.component_gemm and factored and components > 1 and 3 * components <= COMPONENT_GEMM_WIDTH


def _is_capped(fast: bool, small: bool, constexprs: dict[str, Any]) -> bool:
    """Return whether the registers of the FAST path may be limited: masks, dropout and several scales need more."""
    return fast and not small and not (constexprs["MASK"] or constexprs["DROPOUT"] or constexprs["SCALE"] > 1)


def _paths(fast: bool, small: bool) -> tuple[int, ...]:
    """Return the paths of a kernel, one launch each.

    GENERAL covers all tiles; FAST flags the tiles that it does not cover for FALLBACK; BOTH chooses per tile in one
    launch, which is cheaper for a small call.
    """
    if not fast:
        return (GENERAL.value,)
    return (BOTH.value,) if small else (FAST.value, FALLBACK.value)


@functools.lru_cache(1 << 10)
def preprocess_spec(
    tensors: tuple[Any, ...], hard: bool, num_sequences: int, max_k: int, num_key_tiles: int, operand: bool = False
) -> LaunchSpec:
    """Return the launch that fills `prepared`, `stats` and, if operand, the keys' operand of the component GEMM.

    tensors: layouts of keys, shift, bias, scale_t, tau_t and cu_k. operand is part of the cache key because a spec
    needs None in the same positions at every launch.
    """
    keys, shift, bias, scale_t, tau_t, cu_k = (x and TensorLayout(*x) for x in tensors)
    HK, (S, D), M = keys.shape[1], keys.shape[-2:], keys.shape[2] if shift is None else shift.shape[1]
    constexprs = {
        "M": M, "D": D, "BC": min(64, padded_width(D)), "SHIFTED": shift is not None, "BIAS": bias is not None,
        "SCALE": 0 if scale_t is None else scale_t.shape[1], "TAU": tau_t is not None, "HARD": hard,
        "PACKED": cu_k is not None,
    }  # fmt: skip
    strides = (*key_strides(keys.strides, shift is not None), *_four_strides(bias))
    tiles = ceil_div(max_k, KEYS_PER_TILE)
    return LaunchSpec(
        prepare_keys, (tiles * num_sequences, HK, 1), strides, (HK, S, num_key_tiles, tiles), constexprs
    )  # fmt: skip


def _fallback_tiles(flags: LaunchFlags, width: int) -> int:
    """Return the number of tiles per program of a FALLBACK launch."""
    return FALLBACK_TILES if flags.architecture == HOPPER and width <= MAX_FALLBACK_WIDTH else 1


class ForwardConfig(NamedTuple):
    """Launches and workspace sizes of a forward pass."""

    preprocess: LaunchSpec
    attend: LaunchSpec
    block_n: int
    num_flags: int  # 0 without a FALLBACK launch
    operand_keys: int  # keys of the component GEMM's operand; 0 without a component GEMM


@functools.lru_cache(1 << 10)
def forward_config(tensors: tuple[Any, ...], flags: LaunchFlags, tma: bool, return_lse: bool) -> ForwardConfig:
    """Return the configuration of a forward pass.

    Args:
        tensors: Layouts of the tensors of `MixtureArgs` and of out.
        flags: The other properties of the call.
        tma: Whether TMA reads keys and values.
        return_lse: Whether lse is written. Part of the cache key only, as a spec needs None in the same positions.
    """
    args, (out,) = _args_of_layouts(tensors, flags)
    query, keys, value, shift, hard, small = args.query, args.keys, args.value, args.shift, flags.hard, flags.small
    constexprs = constexprs_of(args, flags.precision)
    (_, H, L, D), HK, (S, E), M = query.shape, keys.shape[1], value.shape[2:], constexprs["M"]
    shifted = shift is not None
    num_sequences, size, key_tiles = args.num_sequences, query.dtype.itemsize, flags.num_key_tiles
    # The values of a float mask have no bound that is known in advance.
    fast = flags.bounded and constexprs["MASK"] != 2 and (not small or (_is_factored(constexprs) and M > 2))
    short = flags.length <= SHORT_LENGTH
    key = BlockKey(
        "fwd", small=small, hard=hard and not small, capped=_is_capped(fast, small, constexprs), short=short,
        # Writing the operand of short sequences takes longer than the component GEMM saves.
        no_component_gemm=(flags.no_component_gemm or short) and not small and not hard,
    )  # fmt: skip
    width = max(constexprs["BD"], constexprs["BE"])
    block = flags.select_block(key, width, M, shifted, size, flags.architecture)
    tiles, fallback = ceil_div(args.max_q, block.block_m), _fallback_tiles(flags, width)
    constexprs.update(
        BM=block.block_m, BN=block.block_n, VALUE_GROUP=args.value_group, TMA=tma,
        IN_REGISTERS=block.operand_in_registers, TILES=fallback,
    )  # fmt: skip
    component_gemm = _uses_component_gemm(block, fast and _is_factored(constexprs), M)
    # fp16 weights relative to a bound of their row underflow. With one component GENERAL takes one exponential too.
    running = size == 2 and not flags.bounded and not small and M > 1 and _is_factored(constexprs)
    paths = _paths(fast, small)
    if running and constexprs["MASK"] != 2:
        paths = (RUNNING.value, FALLBACK.value)
        if flags.architecture == HOPPER and width <= 64 and _is_capped(True, small, constexprs):
            block = block._replace(maxnreg=168)  # three programs per SM, without spills in the loop (compiled only)
    heads = num_sequences * H
    attend = LaunchSpec(
        mixture_forward, (tiles * heads, 1, 1),
        (*query.strides[:3], *key_strides(keys.strides, shifted), *value.strides[:3], *_four_strides(args.mask),
        *out.strides[:3], H // HK),
        (H, L, S, key_tiles, tiles, heads, _heads_in_l2(heads, ((1 if shifted else M) * D + E) * size * S)),
        constexprs, block.num_warps, block.num_stages, block.maxnreg, paths, (ceil_div(tiles * heads, fallback), 1, 1),
    )  # fmt: skip
    preprocess = preprocess_spec(
        (keys, shift, args.bias, args.scale_t, args.tau_t, args.cu_k), hard, num_sequences, args.max_k, key_tiles,
        component_gemm,
    )  # fmt: skip
    needs_flags = len(paths) > 1
    return ForwardConfig(
        preprocess, attend, block.block_n, num_flags=heads * tiles if needs_flags else 0,
        operand_keys=HK * key_tiles * KEYS_PER_TILE if component_gemm else 0,
    )  # fmt: skip


class DkdvLaunch(NamedTuple):
    """A launch of the dkdv kernel."""

    spec: LaunchSpec
    block_m: int
    tma_rows: bool  # TMA reads the row vectors


class BackwardConfig(NamedTuple):
    """Launches and workspace sizes of a backward pass."""

    dq: LaunchSpec
    dkdv: tuple[DkdvLaunch, ...]  # dk and dv together, or one after the other
    dq_block_n: int
    row_vectors: tuple[int, int]
    num_spreads: int
    num_flags: int  # 0 without a FALLBACK launch
    parts: tuple[int, int, int]  # partial sums [parts, Hk, entries]
    key_operand_keys: int  # keys and rows of the component GEMM's operands; 0 without a component GEMM
    row_operand_rows: int
    write_key_operand: LaunchSpec
    add_parts: LaunchSpec
    finish: LaunchSpec | None = None  # of the one-pass backward, after dkdv, with the arguments of dq
    query_sums: tuple[int, int] = (0, 1)  # rows and columns


class _BackwardPass(NamedTuple):
    """Properties that the launches of a backward pass share."""

    args: Any  # `MixtureArgs` of layouts
    flags: LaunchFlags
    constexprs: dict[str, Any]
    strides: tuple[int, ...]
    prior_grad: int
    dq_block: BlockConfig
    q_tiles: int
    query_parts: int  # partial sums that dq writes per key head
    fallback_tiles: int


def _backward_forms(args: Any, flags: LaunchFlags, constexprs: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether the mixture sum is factored, and whether the FAST path exists."""
    size = args.query.dtype.itemsize
    factored = _is_factored(constexprs) and (size == 2 or flags.bounded) and (not flags.small or constexprs["M"] > 2)
    # Independent keys and hard shifted keys: powers of one side's exponents are factors, beyond the range of fp16.
    one_sided = (flags.hard or args.shift is None) and constexprs["SCALE"] <= 1 and constexprs["MASK"] != 2
    return factored, factored or (one_sided and flags.bounded and not flags.small)


def _backward_blocks(
    args: Any, flags: LaunchFlags, constexprs: dict[str, Any], fast: bool, tma_keys: bool, tma_rows: bool
) -> tuple[BlockConfig, list[tuple[Any, BlockConfig]]]:
    """Return the block of dq, and OUTPUTS and the block of each dkdv launch."""
    width, shifted = max(constexprs["BD"], constexprs["BE"]), args.shift is not None

    def select(key: BlockKey) -> BlockConfig:
        size = args.query.dtype.itemsize
        return flags.select_block(key, width, constexprs["M"], shifted, size, flags.architecture)

    # Blocks of small calls have one or two warps: the registers of masks, dropout and several scales would not fit.
    small = flags.small and not flags.dropout and not constexprs["MASK"] and constexprs["SCALE"] <= 1
    capped = _is_capped(fast, flags.small, constexprs)
    short = flags.length <= (2 if flags.causal else 1) * SHORT_LENGTH
    key = BlockKey("dq", hard=flags.hard, capped=capped, short=short)
    dq_block = select(key._replace(small=small and not tma_keys, tma=tma_keys))
    dkdv_key = key._replace(pass_="dkdv", small=small and not tma_rows, tma=tma_rows)
    dkdv_block = select(dkdv_key)
    if flags.one_pass:
        dq_block = dkdv_block = select(BlockKey("onepass", tma=tma_rows))
    per_component = not shifted and not flags.hard and dkdv_block.per_component
    if dkdv_block.split if shifted or per_component else width > SPLIT_WIDTH:
        return dq_block, [(DK_ONLY, dkdv_block), (DV_ONLY, select(dkdv_key._replace(pass_="dv")))]
    return dq_block, [(DK_AND_DV, dkdv_block)]


def _dq_spec(
    shared: _BackwardPass, out: TensorLayout, paths: tuple[int, ...], tma_keys: bool, mask_grad: bool, lse_grad: bool
) -> LaunchSpec:
    args, flags, constexprs, block = shared.args, shared.flags, shared.constexprs, shared.dq_block
    (_, H, L, D), HK, (S, E) = args.query.shape, args.keys.shape[1], args.value.shape[2:]
    heads, bytes_per_key = args.num_sequences * H, args.query.dtype.itemsize
    bytes_per_key *= D * (1 if args.shift is not None else constexprs["M"]) + E
    programs = shared.q_tiles * heads
    return LaunchSpec(
        mixture_backward_dq, (programs, 1, 1), (*shared.strides, H // HK, *out.strides[:3]),
        (H, L, S, flags.num_key_tiles, shared.q_tiles, heads, _heads_in_l2(heads, bytes_per_key * S)),
        dict(constexprs, BM=block.block_m, BN=block.block_n, DMASK=mask_grad, DLSE=lse_grad,
        VALUE_GROUP=args.value_group, TMA=tma_keys, IN_REGISTERS=block.operand_in_registers, PRIOR=shared.prior_grad,
        TILES=shared.fallback_tiles),
        block.num_warps, block.num_stages, block.maxnreg, paths, (ceil_div(programs, shared.fallback_tiles), 1, 1),
    )  # fmt: skip


def _dkdv_launch(
    shared: _BackwardPass, outputs: Any, block: BlockConfig, paths: tuple[int, ...], tma_queries: bool, tma_rows: bool
) -> DkdvLaunch:
    args, flags = shared.args, shared.flags
    (_, H, L, D), (S, E), (HK, HV, HP) = args.query.shape, args.value.shape[2:], args.head_counts
    tiles, all_pairs = ceil_div(args.max_k, block.block_n), args.num_sequences * HP
    pair_bytes = (D + E) * args.query.dtype.itemsize * L * H // HP
    tma_rows = tma_rows and block.tma_rows
    spec = LaunchSpec(
        mixture_backward_dkdv, (tiles * all_pairs, 1, 1), (*shared.strides, H // HP),
        (H, L, S, flags.num_key_tiles, tiles, all_pairs, shared.q_tiles, shared.query_parts,
        _heads_in_l2(all_pairs, pair_bytes)),
        dict(shared.constexprs, BM=block.block_m, BN=block.block_n, BQ=shared.dq_block.block_m, KEY_REPEAT=HP // HK,
        VALUE_REPEAT=HP // HV, TMA=tma_queries, IN_REGISTERS=block.operand_in_registers,
        PER_COMPONENT=block.per_component, TMA_ROWS=tma_rows, OUTPUTS=outputs.value, PRIOR=shared.prior_grad,
        TILES=shared.fallback_tiles),
        block.num_warps, block.num_stages, block.maxnreg, paths,
        (ceil_div(tiles * all_pairs, shared.fallback_tiles), 1, 1),
    )  # fmt: skip
    return DkdvLaunch(spec, block.block_m, tma_rows)


@functools.lru_cache(1 << 10)
def backward_config(
    tensors: tuple[Any, ...], flags: LaunchFlags, tma_keys: bool, tma_queries: bool, mask_grad: bool, prior_grad: int
) -> BackwardConfig:
    """Return the configuration of a backward pass.

    Args:
        tensors: Layouts of the tensors of `MixtureArgs`, of out, and of the gradients of out and lse.
        flags: The other properties of the call.
        tma_keys: Whether TMA reads keys and values in the dq kernel; False in one pass.
        tma_queries: Whether TMA reads queries and gradients in the dkdv kernel.
        mask_grad: Whether a float mask has a gradient.
        prior_grad: NO_PRIOR_GRAD, SUMMED_PRIOR_GRAD or FULL_PRIOR_GRAD.
    """
    args, (out, grad, grad_lse) = _args_of_layouts(tensors, flags)
    constexprs = constexprs_of(args, flags.precision)
    (B, H, L, D), M, shifted = args.query.shape, constexprs["M"], args.shift is not None
    HK, _, HP = args.head_counts
    factored, fast = _backward_forms(args, flags, constexprs)
    # Packed sequences begin at arbitrary offsets in the row vectors, which TMA cannot read.
    tma_rows = tma_queries and args.cu_q is None
    dq_block, passes = _backward_blocks(args, flags, constexprs, fast, tma_keys, tma_rows)
    paths = _paths(fast, flags.small)
    # The dkdv kernel is GENERAL for hard independent keys, whose components differ before one is chosen, and for dk and
    # dv of independent keys together, which leave no registers for the fast form.
    dkdv_paths = paths if shifted or (len(passes) > 1 and not flags.hard) else (GENERAL.value,)
    if flags.one_pass:
        paths, dkdv_paths = (PREPARE.value,), (BOTH.value,)
    row_length = B * H * ceil_div(L, ROWS_PER_TILE) * ROWS_PER_TILE
    strides = (
        *args.query.strides[:3], *key_strides(args.keys.strides, shifted), *args.value.strides[:3],
        *_four_strides(args.mask), *grad.strides[:3], row_length,
    )  # fmt: skip
    q_tiles, k_tiles = ceil_div(args.max_q, dq_block.block_m), [ceil_div(args.max_k, b.block_n) for _, b in passes]
    query_parts = args.num_sequences * (H // HK) * q_tiles
    shared = _BackwardPass(
        args, flags, constexprs, strides, prior_grad, dq_block, q_tiles, query_parts,
        _fallback_tiles(flags, max(constexprs["BD"], constexprs["BE"])),
    )  # fmt: skip
    dq = _dq_spec(shared, out, paths, tma_keys, mask_grad, lse_grad=grad_lse is not None)
    # The GEMM operands are bf16, which has fewer digits than fp16 gradients.
    key_gemm, row_gemm = (_uses_component_gemm(b, factored and flags.bounded, M) for b in (dq_block, passes[0][1]))
    key_gemm &= not flags.one_pass  # dq has no loop over the keys
    shift_entries = M * D if shifted else 0
    num_parts = query_parts + args.num_sequences * k_tiles[0] * (HP // HK)
    entries = summed_entries(M, shift_entries, prior_grad == SUMMED_PRIOR_GRAD)
    # The kernels reuse one buffer of flags.
    num_flags = args.num_sequences * max(H * q_tiles, *(HP * n for n in k_tiles)) if len(paths) > 1 else 0
    return BackwardConfig(
        dq,
        tuple(_dkdv_launch(shared, outputs, b, dkdv_paths, tma_queries, tma_rows) for outputs, b in passes),
        dq_block.block_n,
        row_vectors=(2 * M + (M - 1 if flags.one_pass else 0), row_length),
        num_spreads=args.num_sequences * H * q_tiles,
        num_flags=num_flags,
        parts=(num_parts, HK, entries),
        key_operand_keys=HK * flags.num_key_tiles * KEYS_PER_TILE if key_gemm else 0,
        row_operand_rows=row_length if row_gemm else 0,
        write_key_operand=LaunchSpec(
            write_key_operand, (flags.num_key_tiles, HK, 1), (), (flags.num_key_tiles,), {"M": M}
        ),
        add_parts=LaunchSpec(
            add_parts, (ceil_div(HK * entries, PART_COLS), 1, 1), (), (num_parts, HK),
            {"SHIFTS": shift_entries, "M": M, "SCALES": max(constexprs["SCALE"], 1), "SUMS": entries,
            "BLOCK_ROWS": PART_ROWS, "BLOCK_COLS": PART_COLS}, num_warps=8,
        ),
        finish=dataclasses.replace(dq, paths=(FINISH.value,), compiled={}) if flags.one_pass else None,
        query_sums=(row_length if flags.one_pass else 0, constexprs["BD"]),
    )  # fmt: skip
