"""Launches of the fused kernels: grids, workspaces, which paths."""

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .triton_backward_keys import BOTH, KEYS, VALUES, gradient_keys
from .triton_backward_queries import gradient_queries
from .triton_blend import write_key_operand
from .triton_blocks import SPLIT_WIDTH, blocks, row_block
from .triton_decode import decode_merge, decode_row, decode_split
from .triton_forward import mixture_forward
from .triton_prepare import prepare_keys
from .triton_tiles import TILE

SLOT = TILE.value
L2_BYTES = 24 << 20
# Types whose forward may take a bound of the row for its maximum. Weights in fp16 need their true maximum near 1, or
# they flush; fp32 would
# lose digits to the bound.
BOUNDED = (torch.bfloat16,)

# Up to so many pairs of a query and a key, a call waits for its launches rather than for the device: it takes the
# general kernels alone, one launch instead of two (unless they take more than two exponentials where the first takes
# one), by pointers, which cost the launcher less than descriptors do.
SMALL_PAIRS = 1 << 25

# Columns of the operands that blend the components of shifted keys in one step of the tensor cores.
BLEND_WIDTH = 16


def _in_pairs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """bf16 two by two, where that still makes loads of 16 bytes."""
    if tensors[0].dtype != torch.bfloat16 or any(
        n % 32 for x in tensors for n in (x.data_ptr() // 2, *x.stride()[:-1])
    ):
        return tensors
    return tuple(x.view(torch.int32) for x in tensors)


_compiled: dict[tuple[Any, ...], Any] = {}


@functools.lru_cache(1 << 12)
def kinds_of(numbers: tuple[Any, ...]) -> tuple[int, ...]:
    """What Triton specialises on. Most launches are of strides that have been seen before."""
    return tuple((n % 16 == 0) + 2 * (n == 1) + 4 * (n >= 1 << 31) for n in numbers)


def launch(
    kernel: Any, grid: Any, tensors: Any, floats: Any, numbers: Any, free: Any, switches: Any, paths: Any,
    warps: Any, stages: Any, registers: Any = None,
) -> None:  # fmt: skip
    """Launches a kernel for each of `paths`; past the first time without Triton's examination of every argument, which
    takes longer than small problems do. The key has what Triton specialises on: types and alignment of `tensors`,
    divisibility of `numbers`; `floats` and `free` it does not look at."""
    key = (
        kernel, torch.cuda.current_device() if torch.cuda.is_initialized() else 0, warps, stages, registers,
        *switches.values(), kinds_of(numbers),
        *[(x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x is None for x in tensors],
    )  # fmt: skip
    args = (*tensors, *floats, *numbers, *free)
    for path in paths:
        compiled = _compiled.get((path, key))
        if compiled is not None:
            compiled[grid](*args, *switches.values(), path)
        else:
            options = {} if registers is None or path != 1 else {"maxnreg": registers}
            _compiled[path, key] = kernel[grid](
                *args, **switches, PATH=path, num_warps=warps, num_stages=stages, **options
            )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def padded_width(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def precision_of(x: Tensor) -> str:
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


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


def leading_strides(x: Tensor | None, n: int) -> tuple[int, ...]:
    return (0,) * n if x is None else x.stride()[:n]


def _broadcast_strides(x: Tensor) -> tuple[int, ...]:
    """As of x expanded to a larger shape."""
    return tuple(0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True))


def strides_of_keys(keys: Tensor, shifted: bool) -> tuple[int, ...]:
    b, h, *rest = keys.stride()
    return (b, h, 0, rest[0]) if shifted else (b, h, rest[0], rest[1])


def _section(n_heads: int, bytes_per_head: int) -> int:
    return max(1, min(n_heads, L2_BYTES // max(1, bytes_per_head)))


def slots_of(cu_k: Tensor | None, batch: int, keys: int) -> int:
    """Tiles of prepared keys: a sequence begins a new one."""
    return batch * ((keys + SLOT - 1) // SLOT) if cu_k is None else keys // SLOT + cu_k.shape[0] - 1


def _switches(
    query: Any, keys: Any, value: Any, shift: Any, mask: Any, scale_t: Any, tau_t: Any, cu_q: Any, dropout_p: Any,
    causal: Any, hard: Any,
) -> dict[str, Any]:  # fmt: skip
    """What the attention kernels are compiled for; a launch adds its block sizes."""
    D, E = query.shape[3], value.shape[3]
    return {
        "M": keys.shape[2] if shift is None else shift.shape[1], "D": D, "E": E, "BD": padded_width(D),
        "BE": padded_width(E),
        "SHIFTED": shift is not None, "HARD": hard,
        "SCALE": 0 if scale_t is None else scale_t.shape[1], "TAU": tau_t is not None, "CAUSAL": causal,
        "MASK": 0 if mask is None else 1 + mask.is_floating_point(), "DROPOUT": dropout_p > 0,
        "PACKED": cu_q is not None,
        "PRECISION": precision_of(query),
    }  # fmt: skip


def _factored(switches: dict[str, Any]) -> bool:
    """Whether the first kernel takes one exponential a pair, where the general one takes one a component."""
    return switches["SHIFTED"] and not switches["HARD"] and switches["SCALE"] <= 1


def _operand(way: int, factored: bool, components: int, like: Tensor, rows: int) -> Tensor | None:
    """Where a block blends the components as a product: room for so many rows (or keys) of an operand."""
    if not (way & 2 and factored and 3 * components <= BLEND_WIDTH):
        return None
    return like.new_empty(rows, BLEND_WIDTH, dtype=torch.bfloat16)


def prepare(
    keys: Any, shift: Any, bias: Any, scale_t: Any, tau_t: Any, cu_k: Any, prepared: Any, stats: Any, scale: Any,
    tau: Any, constant: Any, hard: Any, n_seq: Any, max_k: Any, operand: Any = None,
) -> None:  # fmt: skip
    """Fills `prepared` and `stats`, and the keys' side of the blend where the forward takes it as a product."""
    (B, HK), (S, D), M = keys.shape[:2], keys.shape[-2:], prepared.shape[2]
    bias = None if bias is None else bias.expand(B, HK, M, S)
    switches = {
        "M": M, "D": D, "BC": min(64, padded_width(D)), "SHIFTED": shift is not None, "BIAS": bias is not None,
        "SCALE": 0 if scale_t is None else scale_t.shape[1], "TAU": tau_t is not None, "HARD": hard,
        "PACKED": cu_k is not None,
    }  # fmt: skip
    launch(
        prepare_keys, (ceil_div(max_k, SLOT), HK, n_seq), (keys, shift, bias, scale_t, tau_t, cu_k, prepared, stats,
        operand), (scale, tau, constant), (*strides_of_keys(keys, shift is not None), *leading_strides(bias, 4)),
        (HK, S, stats.shape[1]), switches, (0,), 4, 1,
    )  # fmt: skip


def launch_forward(
    query: Any, keys: Any, value: Any, shift: Any, bias: Any, scale_t: Any, tau_t: Any, mask: Any, seed: Any,
    cu_q: Any, cu_k: Any, scale: Any, tau: Any, constant: Any, dropout_p: Any, causal: Any, hard: Any, max_q: Any,
    max_k: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, lse, prepared and stats of `triton_ops.forward_op`."""
    (B, H, L), (HK, S, E) = query.shape[:3], value.shape[1:]
    out = query.new_empty(B, H, L, E)
    lse = query.new_empty(B, H, L, dtype=torch.float32)
    M = keys.shape[2] if shift is None else shift.shape[1]
    prepared, stats = workspace(lse, HK, M, slots_of(cu_k, B, S))
    forward_into(
        out, lse, prepared, stats, query, keys, value, shift, bias, scale_t, tau_t, mask, seed, cu_q, cu_k, scale, tau,
        constant, dropout_p, causal, hard, max_q, max_k,
    )  # fmt: skip
    return out, lse, prepared, stats


def workspace(like: Tensor, key_heads: int, components: int, slots: int) -> tuple[Tensor, Tensor]:
    """`prepared` and `stats`, not filled."""
    floats = functools.partial(like.new_empty, dtype=torch.float32)
    return floats(2, key_heads, components, slots * SLOT), floats(key_heads, slots, 4)


def forward_into(
    out: Any, lse: Any, prepared: Any, stats: Any, query: Any, keys: Any, value: Any, shift: Any, bias: Any,
    scale_t: Any, tau_t: Any, mask: Any, seed: Any, cu_q: Any, cu_k: Any, scale: Any, tau: Any, constant: Any,
    dropout_p: Any, causal: Any, hard: Any, max_q: Any, max_k: Any,
) -> None:  # fmt: skip
    """Fills out [B, H, L, E] and, unless it is None, lse [B, H, L], both contiguous."""
    switches = _switches(query, keys, value, shift, mask, scale_t, tau_t, cu_q, dropout_p, causal, hard)
    (B, H, L, D), (HK, S, E), M, shifted = query.shape, value.shape[1:], switches["M"], shift is not None
    if out.numel() == 0:
        return
    if S == 0:
        out.zero_()
        if lse is not None:
            lse.fill_(float("inf"))
        return
    n_seq, slots = B if cu_q is None else cu_q.shape[0] - 1, stats.shape[1]
    mask = None if mask is None else mask.expand(B, H, L, S)
    key_strides, size = strides_of_keys(keys, shifted), query.element_size()
    rows, cols, warps, stages, registers, way = blocks("forward", max(switches["BD"], switches["BE"]), M, shifted, size)
    n_tiles = ceil_div(max_q, rows)
    small = n_seq * H * max_q * max_k <= SMALL_PAIRS
    bulk = not small and _bulk(keys, value)
    switches.update(BM=rows, BN=cols, TMA=bulk, REGISTERS=way % 2)
    # A float mask has no bound that is known beforehand.
    bounded = query.dtype in BOUNDED and switches["MASK"] != 2
    paths = (1, 2) if bounded and (not small or (_factored(switches) and M > 2)) else (0,)
    operand = _operand(way, paths[0] == 1 and _factored(switches), M, stats, HK * slots * SLOT)
    prepare(keys, shift, bias, scale_t, tau_t, cu_k, prepared, stats, scale, tau, constant, hard, n_seq, max_k, operand)
    launch(
        mixture_forward, (n_tiles * n_seq * H, 1, 1),
        (query, *_sources(bulk, cols, keys, value), shift, mask, seed, scale_t, tau_t, cu_q, cu_k, prepared, stats,
        stats.new_empty(n_seq * H * n_tiles),
        *_sources(bulk, cols, operand), out, lse),
        (scale, tau, dropout_p),
        (*query.stride()[:3], *key_strides, *value.stride()[:3], *leading_strides(mask, 4), H // HK),
        (H, L, S, slots, n_tiles, n_seq * H, _section(n_seq * H, ((1 if shifted else M) * D + E) * size * S)),
        switches, paths, warps, stages, registers,
    )  # fmt: skip


DECODE_SWITCHES = ("M", "D", "E", "BD", "BE", "SHIFTED", "HARD", "SCALE", "TAU", "CAUSAL")


@functools.cache
def _decode_switches(
    switches: tuple[tuple[str, Any], ...], rows: int, cols: int, across: int, stages: int, bias: int, counted: bool
) -> dict[str, Any]:
    """What a step is compiled for, in the order of the kernels' arguments; rows is 1 for a single row."""
    given = dict(switches)
    compiled_for = {name: given[name] for name in DECODE_SWITCHES} | {"BN": cols}
    if rows == 1:
        return compiled_for | {"BI": across, "BIAS": bias, "STAGES": stages, "COUNTED": counted}
    general = {"BM": rows, "MASK": given["MASK"], "BIAS": bias > 0, "PRECISION": given["PRECISION"], "COUNTED": counted}
    return compiled_for | general


@functools.cache
def _processors(device: torch.device) -> int:
    # Without a GPU, a few splits for the interpreter to merge.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def launch_decode(
    query: Any, keys: Any, value: Any, shift: Any, bias: Any, scale_t: Any, tau_t: Any, mask: Any, scale: Any,
    tau: Any, constant: Any, causal: Any, hard: Any, count: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse of `triton_ops.decode_op`."""
    (B, H, L), (HK, S, E), shifted = query.shape[:3], value.shape[1:], shift is not None
    out = query.new_empty(B, H, L, E)
    lse = query.new_empty(B, H, L, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    if S == 0:
        return out.zero_(), lse.fill_(float("inf"))
    switches = _switches(query, keys, value, shift, mask, scale_t, tau_t, None, 0.0, causal, hard)
    mask = None if mask is None else mask.expand(B, H, L, S)
    bias_strides = (0,) * 4 if bias is None else _broadcast_strides(bias)
    group, single = H // HK, H == HK and L == 1 and mask is None
    width, size, tiles = max(switches["BD"], switches["BE"]), query.element_size(), 1 if shifted else switches["M"]
    if single:
        cols, warps, stages, per_processor = row_block(width, tiles + 1, size)
    else:
        cols, warps, stages, per_processor = min(128, max(16, (1 << 15) // (width * size * tiles))), 4, 2, 4
    rows = 1 if single else padded_width(group * L)
    compiled_for = _decode_switches(
        tuple(switches.items()), rows, cols,
        # A thread reads 16 bytes.
        min(cols, max(1, warps * 32 * 16 // (width * size))), stages,
        0 if bias is None else 1 + (bias_strides[3] != 0), count is not None,
    )  # fmt: skip
    # As many programs as the device holds at once, and at least two blocks of keys for each.
    splits = max(1, min(per_processor * _processors(query.device) // (B * HK), ceil_div(S, 2 * cols)))
    chunk = ceil_div(ceil_div(S, splits), cols) * cols
    splits = ceil_div(S, chunk)
    parts, sums = lse.new_empty(B * HK * splits, rows, E), lse.new_empty(2, B * HK * splits, rows)
    if single:
        keys, value = _in_pairs(keys, value)
    key_strides = strides_of_keys(keys, shifted)
    if single:
        launch(
            decode_row, (splits, HK, B), (query, keys, value, shift, bias, scale_t, tau_t, count, parts, sums),
            (scale, tau, constant), (*query.stride()[:2], *key_strides, *value.stride()[:3], *bias_strides),
            (HK, S, chunk, splits), compiled_for, (0,), warps, 1,
        )  # fmt: skip
    else:
        launch(
            decode_split, (splits, HK, B),
            (query, keys, value, shift, bias, mask, scale_t, tau_t, count, parts, sums), (scale, tau, constant),
            (*query.stride()[:3], *key_strides, *value.stride()[:3], *bias_strides, *leading_strides(mask, 4), group),
            (H, L, S, chunk, splits), compiled_for, (0,), warps, stages,
        )  # fmt: skip
    launch(
        decode_merge, (group * L, HK, B), (parts, sums, out, lse), (), (group,), (H, L, splits),
        {"E": E, "BE": switches["BE"], "BM": rows, "BS": 16}, (0,), 4, 1,
    )  # fmt: skip
    return out, lse


# Of the gradient of log pi: nothing, its sum over batch and keys, or all of it.
NOTHING, SUMMED, EACH = 0, 1, 2


def sums_of(components: int, width: int, prior_grad: int) -> int:
    """How many sums over all rows a head has: of d shift, d tau, d scale and, where its sum is asked for, d log pi."""
    return components * width + 1 + components + (components if prior_grad == SUMMED else 0)


def launch_backward(
    grad: Any, grad_lse: Any, out: Any, lse: Any, prepared: Any, stats: Any, query: Any, keys: Any, value: Any,
    shift: Any, scale_t: Any, tau_t: Any, mask: Any, seed: Any, cu_q: Any, cu_k: Any, scale: Any, tau: Any,
    dropout_p: Any, causal: Any, hard: Any, max_q: Any, max_k: Any, mask_grad: Any, prior_grad: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients that `triton_ops.backward_op` returns."""
    switches = _switches(query, keys, value, shift, mask, scale_t, tau_t, cu_q, dropout_p, causal, hard)
    (B, H, L, D), (HK, S, E), M, shifted = query.shape, value.shape[1:], switches["M"], shift is not None
    n_seq = B if cu_q is None else cu_q.shape[0] - 1
    slots = stats.shape[1]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, keys, value))
    dbias = lse.new_empty(B, HK, M, S) if prior_grad == EACH else lse.new_empty(0)
    columns = sums_of(M, D, prior_grad)
    dmask = lse.new_empty(B, H, L, S) if mask_grad else lse.new_empty(0)
    if query.numel() == 0 or S == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), dbias.zero_(), lse.new_zeros(HK, columns), dmask.zero_()
    if mask_grad and causal:
        dmask.zero_()
    mask = None if mask is None else mask.expand(B, H, L, S)
    width, size = max(switches["BD"], switches["BE"]), query.element_size()
    hardness = "hard " if hard else ""
    q_rows, q_cols, *q_options, q_way = blocks(hardness + "queries", width, M, shifted, size)
    in_turn = not shifted and not hard and bool(blocks("keys", width, M, shifted, size)[-1] & 2)
    together = shifted or width <= SPLIT_WIDTH or in_turn
    parts = ((BOTH, "keys"),) if together else ((KEYS, "keys"), (VALUES, "values"))
    q_tiles = ceil_div(max_q, q_rows)
    k_tiles, *more_tiles = (ceil_div(max_k, blocks(hardness + k, width, M, shifted, size)[1]) for _, k in parts)
    query_sums = n_seq * (H // HK) * q_tiles
    rows = lse.new_empty(2 * M, ceil_div(B * H * L, 4) * 4)[:, : B * H * L]  # a multiple of 16 bytes apart
    spread = lse.new_empty(n_seq * H, q_tiles)
    flags = lse.new_empty(
        n_seq * max(H * q_tiles, HK * k_tiles, *(HK * n for n in more_tiles))
    )  # one launch after another
    sums = (lse.new_empty if cu_q is None else lse.new_zeros)(query_sums + n_seq * k_tiles, HK, columns)
    inputs = (shift, mask, seed, scale_t, tau_t, cu_q, cu_k, prepared, stats)
    small = n_seq * H * max_q * max_k <= SMALL_PAIRS
    along_keys, along_queries = (not small and _bulk(*pair) for pair in ((keys, value), (query, grad)))
    strides = (
        *query.stride()[:3], *strides_of_keys(keys, shifted), *value.stride()[:3], *leading_strides(mask, 4),
        *grad.stride()[:3], rows.stride(0), H // HK,
    )  # fmt: skip
    bounded = query.dtype in BOUNDED
    factored = _factored(switches) and (size == 2 or bounded) and (not small or M > 2)
    # Independent keys, and hard shifted ones: one side's exponents are factors, which fp16 has no range for.
    apart = (hard or not shifted) and switches["SCALE"] <= 1 and switches["MASK"] != 2 and bounded and not small
    paths = (1, 2) if factored or apart else (0,)
    # Not along the queries where independent keys are hard, whose components differ before one is chosen, or where dk
    # and dv are together, which have no registers left for it.
    key_paths = paths if shifted or (len(parts) > 1 and not hard) else (0,)
    # fp16's gradients have more digits than the products of bf16 would leave them.
    key_operand, row_operand = (
        _operand(way, factored and bounded, M, stats, n)
        for way, n in ((q_way, HK * slots * SLOT), (blocks("keys", width, M, shifted, size)[-1], B * H * L))
    )
    if key_operand is not None:
        launch(write_key_operand, (slots, HK, 1), (prepared[1], key_operand), (), (), (slots,), {"M": M}, (0,), 4, 1)
    launch(
        gradient_queries, (q_tiles * n_seq * H, 1, 1),
        (query, *_sources(along_keys, q_cols, keys, value), *inputs, out, lse, grad, grad_lse, dq, dmask, rows,
        row_operand, *_sources(along_keys, q_cols, key_operand), spread, flags, sums),
        (scale, tau, dropout_p), strides,
        (H, L, S, slots, q_tiles, n_seq * H, _section(n_seq * H, (D * (1 if shifted else M) + E) * size * S)),
        dict(switches, BM=q_rows, BN=q_cols, DMASK=mask_grad, DLSE=grad_lse is not None, TMA=along_keys,
        REGISTERS=q_way % 4, PRIOR=prior_grad), paths, *q_options,
    )  # fmt: skip
    for wanted, kind in parts:
        k_rows, k_cols, *k_options, k_way = blocks(hardness + kind, width, M, shifted, size)
        k_tiles = ceil_div(max_k, k_cols)
        # Vectors of 128 rows take one copy as they are.
        by_engine = along_queries and cu_q is None and bool(k_way & 4)
        launch(
            gradient_keys, (k_tiles * n_seq * HK, 1, 1),
            (*_sources(along_queries, k_rows, query), keys, value, *inputs, *_sources(along_queries, k_rows, grad),
            TensorDescriptor(rows, rows.shape, rows.stride(), [1, k_rows]) if by_engine else rows,
            *_sources(along_queries and cu_q is None, k_rows, row_operand), spread, flags, dk, dv, dbias, sums),
            (scale, tau, dropout_p), strides,
            (H, L, S, slots, k_tiles, n_seq * HK, q_tiles, query_sums,
            _section(n_seq * HK, (D + E) * size * L * H // HK)),
            dict(switches, BM=k_rows, BN=k_cols, BQ=q_rows, TMA=along_queries, REGISTERS=k_way % 4,
            ROWS=by_engine, WANTED=wanted.value, PRIOR=prior_grad), key_paths, *k_options,
        )  # fmt: skip
    return dq, dk, dv, dbias, sums.sum(0), dmask
