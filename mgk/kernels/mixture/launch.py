"""Host side of the mixture kernels: workspaces and the arguments of each launch."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mgk._core.integers import ceil_div
from mgk.kernels.architecture import architecture, compile_target, has_tma, is_amd
from mgk.kernels.jit_cache import LaunchSpec, compiled_together, launch
from mgk.kernels.mixture import experimental
from mgk.kernels.mixture.args import MixtureArgs
from mgk.kernels.mixture.block_config import BlockKey
from mgk.kernels.mixture.block_sizes import select_block, select_decode_config
from mgk.kernels.mixture.bwd_common import summed_entries
from mgk.kernels.mixture.chunks import chunks, key_heads_per_chunk
from mgk.kernels.mixture.decode import decode_merge, decode_row, decode_split
from mgk.kernels.mixture.decode_config import decode_constexprs, decode_value_heads
from mgk.kernels.mixture.launch_config import (  # fmt: skip
    COMPONENT_GEMM_WIDTH,
    FULL_PRIOR_GRAD,
    KEYS_PER_TILE,
    SUMMED_PRIOR_GRAD,
    LaunchFlags,
    backward_config,
    broadcast_strides,
    constexprs_of,
    forward_config,
    key_strides,
    layouts,
    padded_width,
    preprocess_spec,
)

# Dtypes whose forward may use an upper bound of a row's exponents instead of their maximum. In fp16 the largest weight
# must be near 1, or weights underflow to 0; in fp32 the bound would cost precision.
BOUNDED = (torch.bfloat16,)

HAS_NEW_TF32 = hasattr(torch.backends.cuda.matmul, "fp32_precision")

# Calls of up to this number of query-key pairs are limited by launch overhead. They take one launch per pass instead of
# two, with pointers, which the launcher handles faster than TMA descriptors. Its path is GENERAL, or BOTH if GENERAL
# takes more than two exponentials per pair and FAST takes one.
SMALL_PAIRS = 1 << 25
_small_pairs = SMALL_PAIRS


@contextlib.contextmanager
def small_call_limit(pairs: int) -> Iterator[None]:
    """Treat calls of up to this number of query-key pairs as small.

    The limit is process-wide, because autograd runs the backward pass in other threads. Its default is `SMALL_PAIRS`.
    """
    global _small_pairs
    previous, _small_pairs = _small_pairs, pairs
    try:
        yield
    finally:
        _small_pairs = previous


# Block sizes of a launch, and of decoding.
_select_block, _select_decode_config = select_block, select_decode_config


@contextlib.contextmanager
def block_selection(select: Any = None, select_decode: Any = None) -> Iterator[None]:
    """Take block sizes from other functions than `select_block` and `select_decode_config`.

    They are process-wide, as the limit of small calls. Configurations are cached by `select`: use a new function for
    other blocks.
    """
    global _select_block, _select_decode_config
    previous = _select_block, _select_decode_config
    _select_block, _select_decode_config = select or _select_block, select_decode or _select_decode_config
    try:
        yield
    finally:
        _select_block, _select_decode_config = previous


def view_as_int32_pairs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """View bf16 tensors as pairs in int32 if loads of 16 bytes remain aligned; else return them unchanged."""
    if tensors[0].dtype != torch.bfloat16 or any(
        n % 32 for x in tensors for n in (x.data_ptr() // 2, *x.stride()[:-1])
    ):
        return tensors
    if any(x.shape[-1] % 2 for x in tensors):
        return tensors
    return tuple(x.view(torch.int32) for x in tensors)


def tf32_allowed() -> bool:
    """Return torch's TF32 setting, new or old: reading the old one raises once the new one has been set."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if HAS_NEW_TF32 else bool(matmul.allow_tf32)


def precision_of(x: Tensor) -> str:
    tf32 = x.dtype == torch.float32 and tf32_allowed() and not is_amd(architecture(x.device))
    return "tf32" if tf32 else "ieee"


def supports_tma(*tensors: Tensor) -> bool:
    """Return whether TMA can read the tensors: Hopper or later, addresses and strides at multiples of 16 bytes.

    Strides of 0, as of expanded tensors, are not among the strides that CUDA's documentation defines.
    """
    device = tensors[0].device
    if (device.type != "cuda" and compile_target() is None) or not has_tma(architecture(device)):
        return False
    return all(
        x.data_ptr() % 16 == 0 and all(n > 0 and n * x.element_size() % 16 == 0 for n in x.stride()[:-1])
        for x in tensors
    )


def as_descriptors(tma: bool, rows: int, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Return TMA descriptors for blocks of `rows` rows, or the tensors unchanged if `tma` is False."""
    if not tma:
        return tensors
    return tuple(
        x if x is None
        else TensorDescriptor(x, x.shape, x.stride(), [1] * (x.dim() - 2) + [rows, padded_width(x.shape[-1])])
        for x in tensors
    )  # fmt: skip


def row_descriptor(row_vectors: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(row_vectors, row_vectors.shape, row_vectors.stride(), [1, rows])


def empty_operand(like: Tensor, rows: int) -> Tensor | None:
    """Allocate an operand of the component GEMM for `rows` rows or keys; return None for 0."""
    return like.new_empty(rows, COMPONENT_GEMM_WIDTH, dtype=torch.bfloat16) if rows else None


def empty_like_bshd(
    x: Tensor, width: int | None = None, heads: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Allocate an output or gradient like x with the memory layout of a projection.

    [B, H, L, D] or [B, H, M, L, D] is laid out as [B, L, H, (M,) D]: a layer then reshapes it without a copy. `width`
    replaces D, and `heads` H.
    """
    B, H, *components, L, D = x.shape
    H, D = H if heads is None else heads, D if width is None else width
    # new_empty_strided instead of a transposed view: users must be able to change the result in place.
    if not components:
        return x.new_empty_strided((B, H, L, D), (L * H * D, D, H * D, 1), dtype=dtype)
    (M,) = components
    return x.new_empty_strided((B, H, M, L, D), (L * H * M * D, M * D, D, H * M * D, 1), dtype=dtype)


def leading_strides(x: Tensor | None, n: int) -> tuple[int, ...]:
    return (0,) * n if x is None else x.stride()[:n]


def count_key_tiles(cu_k: Tensor | None, batch: int, keys: int) -> int:
    """Return the number of tiles of preprocessed keys, an upper bound for packed sequences.

    Every sequence begins a new tile.
    """
    if cu_k is None:
        return batch * ((keys + KEYS_PER_TILE - 1) // KEYS_PER_TILE)
    return keys // KEYS_PER_TILE + cu_k.shape[0] - 1


def empty_workspace(like: Tensor, key_heads: int, components: int, key_tiles: int) -> tuple[Tensor, Tensor]:
    """Allocate `prepared` and `stats`, the outputs of the preprocessing."""
    prepared = like.new_empty(2, key_heads, components, key_tiles * KEYS_PER_TILE, dtype=torch.float32)
    return prepared, prepared.new_empty(key_heads, key_tiles, 4)


def preprocess(args: MixtureArgs, prepared: Tensor, stats: Tensor) -> None:
    """Launch the preprocessing kernel, which fills `prepared` and `stats`."""
    keys, shift, bias, scale_t, tau_t, cu_k = args.keys, args.shift, args.bias, args.scale_t, args.tau_t, args.cu_k
    spec = preprocess_spec(
        layouts(keys, shift, bias, scale_t, tau_t, cu_k), args.hard, args.num_sequences, args.max_k, stats.shape[1]
    )
    tensors = (keys, shift, bias, scale_t, tau_t, cu_k, prepared, stats, None)
    launch(spec, tensors, (args.scale, args.tau, args.constant))


def launch_forward(args: MixtureArgs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out, lse, prepared and stats of `ops.forward_op`."""
    query, value = args.query, args.value
    (B, H, L, _), HK, (S, E) = query.shape, args.keys.shape[1], value.shape[2:]
    out = empty_like_bshd(query, E)
    lse = query.new_empty(B, H, L, dtype=torch.float32)
    prepared, stats = empty_workspace(lse, HK, args.components, count_key_tiles(args.cu_k, B, S))
    forward_into(out, lse, prepared, stats, args)
    return out, lse, prepared, stats


@compiled_together()
def forward_into(
    out: Tensor, lse: Tensor | None, prepared: Tensor, stats: Tensor, args: MixtureArgs, no_component_gemm: bool = False
) -> None:
    """Fill out [B, H, L, E] and lse [B, H, L] (contiguous, or None).

    no_component_gemm: prefer blocks without a component GEMM, which need no operand.
    """
    if out.numel() == 0:
        return
    if args.value.shape[2] == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("inf"))
        return
    flags = call_flags(args, stats.shape[1], no_component_gemm)
    tma = not flags.small and supports_tma(args.keys, args.value)
    config = forward_config(layouts(*args.tensors, out), flags, tma, lse is not None)
    operand = empty_operand(stats, config.operand_keys)
    shift, scale_t, tau_t, cu_k = args.shift, args.scale_t, args.tau_t, args.cu_k
    launch(
        config.preprocess, (args.keys, shift, args.bias, scale_t, tau_t, cu_k, prepared, stats, operand),
        (args.scale, args.tau, args.constant),
    )  # fmt: skip
    launch(
        config.attend,
        (args.query, *as_descriptors(tma, config.block_n, args.keys, args.value), shift, args.mask, args.seed, scale_t,
        tau_t, args.cu_q, cu_k, prepared, stats, stats.new_empty(config.num_flags) if config.num_flags else stats,
        *as_descriptors(tma, config.block_n, operand), out, lse),
        (args.scale, args.tau, args.dropout_p),
    )  # fmt: skip


def settings() -> tuple[Any, ...]:
    """Return the process-wide settings that launch configurations depend on."""
    return _small_pairs, _select_block, BOUNDED, compile_target(), experimental.one_pass_allowed()


def call_flags(args: MixtureArgs, num_key_tiles: int, no_component_gemm: bool = False) -> LaunchFlags:
    query, max_q, max_k = args.query, args.max_q, args.max_k
    pairs = args.num_sequences * query.shape[1] * max_q * max_k
    small = pairs <= _small_pairs
    return LaunchFlags(
        args.causal, args.hard, args.dropout_p > 0, max_q, max_k, num_key_tiles, small,
        query.dtype in BOUNDED, precision_of(query), _select_block, no_component_gemm, architecture(query.device),
        not small and experimental.is_one_pass(args),
    )  # fmt: skip


# The block sizes of a chunk.
CHUNK_KEY = BlockKey("fwd", no_component_gemm=True)


def chunked_heads(args: MixtureArgs) -> int:
    """Return the key heads per chunk of an inference, B·Hk without chunks."""
    query, value = args.query, args.value
    (B, H, L, D), (_, HV, S, E), M = query.shape, value.shape, args.components
    HK = args.keys.shape[1]
    # Not in chunks: packed sequences, which share a batch entry, and dropout, whose random numbers depend on the head.
    if query.numel() == 0 or value.numel() == 0 or args.cu_q is not None or args.dropout_p > 0:
        return B * HK
    block = _select_block(
        CHUNK_KEY, padded_width(max(D, E)), M, args.shift is not None, query.element_size(), architecture(query.device)
    )
    chunk_heads = key_heads_per_chunk(B, H, HK, L, S, M, block)
    # Key heads with the value heads of other chunks: only batch entries are separated.
    return chunk_heads if HK == HV else max(chunk_heads, HK)


def launch_inference(return_lse: bool, args: MixtureArgs) -> tuple[Tensor, Tensor | None]:
    """Return out and lse (None unless return_lse) as `launch_forward` does, chunk by chunk if the call is large."""
    query, value, shift = args.query, args.value, args.shift
    (B, H, L, _), (_, HV, S, E), M = query.shape, value.shape, args.components
    HK = args.keys.shape[1]
    out = empty_like_bshd(query, E)
    lse = query.new_empty(B, H, L, dtype=torch.float32) if return_lse else None
    chunk_heads = chunked_heads(args)
    if chunk_heads >= B * HK:
        prepared, stats = empty_workspace(query, HK, M, count_key_tiles(args.cu_k, B, S))
        forward_into(out, lse, prepared, stats, args)
        return out, lse
    group = H // HK
    tiles = count_key_tiles(None, max(1, chunk_heads // HK), S)
    workspace = empty_workspace(query, min(chunk_heads, HK), M, tiles)

    def take(x: Any, batch: slice, heads: slice) -> Any:
        """Slice a tensor [B or 1, heads or 1, ...]."""
        if x is None:
            return None
        x = x[batch] if x.shape[0] > 1 else x
        return x[:, heads] if x.shape[1] > 1 else x

    for batch, keys in chunks(B, HK, chunk_heads):
        rows = slice(keys.start * group, keys.stop * group)
        values = keys if HK == HV else slice(0, HV)
        chunk = args._replace(
            query=take(query, batch, rows), keys=take(args.keys, batch, keys), value=take(value, batch, values),
            shift=None if shift is None else shift[keys], bias=take(args.bias, batch, keys),
            scale_t=None if args.scale_t is None else args.scale_t[keys],
            tau_t=None if args.tau_t is None else args.tau_t[keys], mask=take(args.mask, batch, rows),
        )  # fmt: skip
        prepared, stats = _leading(*workspace, keys.stop - keys.start, count_key_tiles(None, chunk.query.shape[0], S))
        forward_into(take(out, batch, rows), take(lse, batch, rows), prepared, stats, chunk, True)
    return out, lse


def _leading(prepared: Tensor, stats: Tensor, heads: int, key_tiles: int) -> tuple[Tensor, Tensor]:
    """Return the leading part of a workspace, for a chunk that is smaller than the others."""
    M, n = prepared.shape[2], key_tiles * KEYS_PER_TILE
    return (
        prepared.view(-1)[: 2 * heads * M * n].view(2, heads, M, n),
        stats.view(-1)[: heads * key_tiles * 4].view(heads, key_tiles, 4),
    )


# Maximum number of exponents per key (queries that share it times components) for decoding without GEMMs: more take
# longer than reading the keys.
MAX_ROW_SCORES = 8


@functools.cache
def _num_sms(device: torch.device) -> int:
    # 1 without a GPU: a few splits for the interpreter.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launch_decode(args: MixtureArgs, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return out and lse of `ops.decode_op`."""
    query, keys, value, bias = args.query, args.keys, args.value, args.bias
    (B, H, L, _), HK, (S, E), shifted = query.shape, keys.shape[1], value.shape[2:], args.shift is not None
    out = query.new_empty(B, H, L, E)
    lse = query.new_empty(B, H, L, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    if S == 0:
        return out.zero_(), lse.fill_(float("inf"))
    shared = constexprs_of(args, precision_of(query))
    mask = None if args.mask is None else args.mask.expand(B, H, L, S)
    bias_strides = (0,) * 4 if bias is None else broadcast_strides(bias.shape, bias.stride())
    group = H // HK
    value_heads = decode_value_heads(group, args.value_group)
    by_rows = L == 1 and mask is None and group * shared["M"] <= MAX_ROW_SCORES
    width, size, tiles = max(shared["BD"], shared["BE"]), query.element_size(), 1 if shifted else shared["M"]
    if by_rows:
        block_n, num_warps, stages, programs_per_sm = _select_decode_config(width, tiles + value_heads[1], size)
    else:
        keys_in_shared = (1 << 15) // (width * size * tiles)
        block_n = min(128, max(16, 1 << (keys_in_shared.bit_length() - 1)))
        num_warps, stages, programs_per_sm = 4, 2, 4
    rows = group if by_rows else padded_width(group * L)
    constexprs = decode_constexprs(
        tuple(shared.items()), rows, block_n,
        # A thread reads 16 bytes.
        min(block_n, max(1, num_warps * 32 * 16 // (width * size))) if by_rows else 0, stages,
        0 if bias is None else 1 + (bias_strides[3] != 0), count is not None, value_heads,
    )  # fmt: skip
    # One wave of programs, with at least two blocks of keys each.
    splits = max(1, min(programs_per_sm * _num_sms(query.device) // (B * HK), ceil_div(S, 2 * block_n)))
    keys_per_split = ceil_div(ceil_div(S, splits), block_n) * block_n
    splits = ceil_div(S, keys_per_split)
    parts, sums = lse.new_empty(B * HK * splits, rows, E), lse.new_empty(2, B * HK * splits, rows)
    if by_rows:
        keys, value = view_as_int32_pairs(keys, value)
    strides = (*key_strides(keys.stride(), shifted), *value.stride()[:3], *bias_strides)
    tensors: tuple[Any, ...]
    if by_rows:
        tensors = (query, keys, value, args.shift, bias, args.scale_t, args.tau_t, count, parts, sums)
        spec = LaunchSpec(
            decode_row, (splits, HK, B), (*query.stride()[:2], *strides), (HK, S, keys_per_split, splits), constexprs,
            num_warps,
        )  # fmt: skip
    else:
        tensors = (query, keys, value, args.shift, bias, mask, args.scale_t, args.tau_t, count, parts, sums)
        spec = LaunchSpec(
            decode_split, (splits, HK, B), (*query.stride()[:3], *strides, *leading_strides(mask, 4), group),
            (H, L, S, keys_per_split, splits), constexprs, num_warps, stages,
        )  # fmt: skip
    launch(spec, tensors, (args.scale, args.tau, args.constant))
    constexprs = {"E": E, "BE": shared["BE"], "BM": rows, "BS": 16}
    spec = LaunchSpec(decode_merge, (group * L, HK, B), (group,), (H, L, splits), constexprs)
    launch(spec, (parts, sums, out, lse))
    return out, lse


def launch_backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, prepared: Tensor, stats: Tensor, args: MixtureArgs,
    mask_grad: bool, prior_grad: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of `ops.backward_op`, None where those are empty. bias and constant are not read."""
    query, keys, value, shift, cu_q = args.query, args.keys, args.value, args.shift, args.cu_q
    (B, H, L, D), S, M = query.shape, value.shape[2], prepared.shape[2]
    HK, HV, HP = args.head_counts
    dq, dk, dv = empty_like_bshd(query), empty_like_bshd(keys), empty_like_bshd(value)
    dbias = lse.new_empty(B, HK, M, S) if prior_grad == FULL_PRIOR_GRAD else None
    dmask = (lse.new_zeros if args.causal else lse.new_empty)(B, H, L, S) if mask_grad else None
    if query.numel() == 0 or S == 0:
        for x in (dq, dk, dv, dbias, dmask):
            if x is not None:
                x.zero_()
        entries = summed_entries(M, 0 if shift is None else M * D, prior_grad == SUMMED_PRIOR_GRAD)
        return dq, dk, dv, dbias, lse.new_zeros(HK * entries), dmask
    flags = call_flags(args, stats.shape[1])
    tma_keys = not flags.small and not flags.one_pass and supports_tma(keys, value)
    tma_queries = not flags.small and supports_tma(query, grad)
    config = backward_config(
        layouts(*args.tensors, out, grad, grad_lse), flags, tma_keys, tma_queries, mask_grad, prior_grad
    )
    row_vectors, spread = lse.new_empty(config.row_vectors), lse.new_empty(config.num_spreads)
    flagged = lse.new_empty(config.num_flags) if config.num_flags else spread
    parts = (lse.new_empty if cu_q is None else lse.new_zeros)(config.parts)
    sums = lse.new_empty(config.parts[1] * config.parts[2])
    inputs = (shift, args.mask, args.seed, args.scale_t, args.tau_t, cu_q, args.cu_k, prepared, stats)
    floats = (args.scale, args.tau, args.dropout_p)
    key_operand = empty_operand(stats, config.key_operand_keys)
    row_operand = empty_operand(stats, config.row_operand_rows)
    query_sums = lse.new_empty(config.query_sums) if config.finish is not None else None
    with compiled_together():
        if key_operand is not None:
            launch(config.write_key_operand, (prepared[1], key_operand))
        # Outputs without gradient get `parts` as a dummy pointer; the kernels do not write them.
        dq_tensors = (
            query, *as_descriptors(tma_keys, config.dq_block_n, keys, value), *inputs, out, lse, grad, grad_lse, dq,
            parts if dmask is None else dmask, row_vectors, row_operand,
            *as_descriptors(tma_keys, config.dq_block_n, key_operand), query_sums, spread, flagged, parts,
        )  # fmt: skip
        launch(config.dq, dq_tensors, floats)
        # With different numbers of key and value heads, the kernel writes fp32 parts of the gradients per pair head.
        pair_dk = dk if HK == HP else empty_like_bshd(keys, heads=HP, dtype=torch.float32)
        pair_dv = dv if HV == HP else empty_like_bshd(value, heads=HP, dtype=torch.float32)
        pair_dbias = dbias if dbias is None or HK == HP else lse.new_empty(B, HP, M, S)
        for spec, block_m, tma_rows in config.dkdv:
            launch(
                spec,
                (*as_descriptors(tma_queries, block_m, query), keys, value, *inputs,
                *as_descriptors(tma_queries, block_m, grad),
                row_descriptor(row_vectors, block_m) if tma_rows else row_vectors,
                *as_descriptors(tma_queries and cu_q is None, block_m, row_operand, query_sums), spread, flagged,
                pair_dk, pair_dv, parts if dbias is None else pair_dbias, parts), floats,
            )  # fmt: skip
        if config.finish is not None:
            launch(config.finish, dq_tensors, floats)
        launch(config.add_parts, (parts, sums))
    for total, pairs in ((dk, pair_dk), (dv, pair_dv), (dbias, pair_dbias)):
        if total is not None and pairs is not None and pairs is not total:
            total.copy_(pairs.unflatten(1, (total.shape[1], -1)).sum(2))
    return dq, dk, dv, dbias, sums, dmask
