"""The kernels as torch operators: launches, block sizes, shapes for the compiler, gradients and FLOP counts."""

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .triton_backward import gradient_keys, gradient_queries
from .triton_forward import mixture_forward
from .triton_prepare import prepare_keys
from .triton_tiles import SAFE_RANGE, TILE

L2_BYTES = 24 << 20
PATHS = 0

# (pass, head width at most): rows and keys of a block, warps, pipeline stages. Found on an H200 in 16-bit types; docs/kernels.md has the measurements.
SHIFTED_BLOCKS = {
    "forward": ((32, (128, 128, 4, 3)), (64, (128, 64, 4, 3)), (128, (128, 64, 8, 3)), (256, (128, 32, 8, 2))),
    "queries": ((32, (128, 64, 4, 3)), (64, (128, 64, 8, 3)), (128, (128, 64, 8, 2)), (256, (64, 32, 8, 2))),
    "keys": ((32, (64, 128, 8, 3)), (64, (64, 128, 8, 3)), (128, (64, 128, 8, 2)), (256, (32, 64, 8, 2))),
}
INDEPENDENT_BLOCKS = {
    "forward": ((32, (128, 64, 4, 3)), (64, (128, 64, 8, 3)), (128, (128, 64, 8, 2)), (256, (64, 32, 4, 2))),
    "queries": ((32, (128, 64, 8, 3)), (64, (128, 64, 8, 2)), (128, (64, 64, 4, 2)), (256, (64, 16, 4, 1))),
    "keys": ((32, (64, 128, 8, 2)), (64, (64, 128, 8, 2)), (128, (32, 64, 8, 2)), (256, (16, 32, 8, 1))),
}


def blocks(kind: str, width: int, components: int, shifted: bool, itemsize: int) -> tuple[int, int, int, int]:
    table = SHIFTED_BLOCKS if shifted else INDEPENDENT_BLOCKS
    rows, keys, warps, stages = next(block for limit, block in table[kind] if width <= limit)
    if itemsize > 2 or (not shifted and components > 2):
        # Wider numbers or more products a tile: less of each, so that a tile still fits the registers and shared memory.
        rows, keys, stages = min(rows, 32 if width > 128 else 64), min(keys, 32 if width <= 128 else 16), min(stages, 2 if width <= 64 else 1)
        keys = 16 if itemsize > 2 and components > 2 and not shifted else keys
    return rows, keys, warps, stages


def _width(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _precision(x: Tensor) -> str:
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _strides(x: Tensor | None, n: int) -> tuple[int, ...]:
    return (0,) * n if x is None else x.stride()[:n]


def _key_strides(keys: Tensor, shifted: bool) -> tuple[int, ...]:
    b, h, *rest = keys.stride()
    return (b, h, 0, rest[0]) if shifted else (b, h, rest[0], rest[1])


def _section(n_heads: int, bytes_per_head: int) -> int:
    return max(1, min(n_heads, L2_BYTES // max(1, bytes_per_head)))


def _slots(cu_k: Tensor | None, batch: int, keys: int) -> int:
    return batch * triton.cdiv(keys, TILE.value) if cu_k is None else keys // TILE.value + cu_k.numel() - 1


def _common(query, keys, value, shift, mask, seed, scale_t, tau_t, cu_q, cu_k, causal, hard, dropout_p):
    """Sizes and compile-time switches that the three attention kernels share."""
    B, H, L, D = query.shape
    shifted = shift is not None
    M = shift.shape[1] if shifted else keys.shape[2]
    S, E = value.shape[2:]
    n_seq = B if cu_q is None else cu_q.numel() - 1
    switches = dict(
        M=M, D=D, E=E, BD=_width(D), BE=_width(E), SHIFTED=shifted, HARD=hard, SCALE=0 if scale_t is None else scale_t.shape[1], TAU=tau_t is not None,
        CAUSAL=causal, MASK=0 if mask is None else (1 if mask.dtype == torch.bool else 2), DROPOUT=dropout_p > 0, PACKED=cu_q is not None,
        PRECISION=_precision(query), PATHS=PATHS,
    )  # fmt: skip
    return B, H, value.shape[1], n_seq, L, S, D, E, M, shifted, switches


@torch.library.custom_op("mgk::mixture_forward", mutates_args=())
def forward_op(
    query: Tensor, keys: Tensor, value: Tensor, shift: Tensor | None, bias: Tensor | None, scale_t: Tensor | None, tau_t: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, scale: float, tau: float, constant: float, dropout_p: float,
    causal: int, hard: bool, max_q: int, max_k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out [B, H, L, E], base-2 lse [B, H, L], and for the backward pass: c and C [2, Hk, M, slots * TILE], statistics of their tiles."""
    B, H, HK, n_seq, L, S, D, E, M, shifted, switches = _common(query, keys, value, shift, mask, seed, scale_t, tau_t, cu_q, cu_k, causal, hard, dropout_p)
    slots = _slots(cu_k, B, S)
    out = query.new_empty(B, H, L, E)
    lse = query.new_empty(B, H, L, dtype=torch.float32)
    prepared = query.new_empty(2, HK, M, slots * TILE.value, dtype=torch.float32)
    stats = query.new_empty(HK, slots, 4, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse, prepared, stats
    if S == 0:
        return out.zero_(), lse.fill_(float("inf")), prepared, stats
    c, coef = prepared.unbind(0)
    bias = None if bias is None else bias.expand(B, HK, M, S)
    mask = None if mask is None else mask.expand(B, H, L, S)
    key_strides = _key_strides(keys, shifted)
    prepare_keys[(triton.cdiv(max_k, TILE.value), HK, n_seq)](
        keys, shift, bias, scale_t, tau_t, cu_k, c, coef, stats, scale, tau, constant, *key_strides, *_strides(bias, 4), S, slots,
        M=M, D=D, BC=min(64, _width(D)), SHIFTED=shifted, BIAS=bias is not None, SCALE=switches["SCALE"], TAU=switches["TAU"], PACKED=switches["PACKED"],
        num_warps=4,
    )  # fmt: skip
    rows, cols, warps, stages = blocks("forward", max(switches["BD"], switches["BE"]), M, shifted, query.element_size())
    n_tiles = triton.cdiv(max_q, rows)
    half = query.dtype == torch.float16
    mixture_forward[(n_tiles * n_seq * H,)](
        query, keys, value, shift, mask, seed, scale_t, tau_t, cu_q, cu_k, c, coef, stats, out, lse, scale, tau, dropout_p,
        *query.stride()[:3], *key_strides, *value.stride()[:3], *_strides(mask, 4), H, H // HK, L, S, slots, n_tiles, n_seq * H,
        _section(n_seq * H, (M * D if not shifted else D) * query.element_size() * S + E * query.element_size() * S), **switches,
        # Weights in fp16 need their true maximum near 1; a bound on the row, or a wide factored range, would flush them.
        BM=rows, BN=cols, BOUNDED=not half and switches["MASK"] != 2, RANGE=10.0 if half else SAFE_RANGE.value, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse, prepared, stats


@forward_op.register_fake
def _(query, keys, value, shift, bias, scale_t, tau_t, mask, seed, cu_q, cu_k, scale, tau, constant, dropout_p, causal, hard, max_q, max_k):
    B, H, L, _ = query.shape
    HK, S, E = value.shape[1:]
    M = shift.shape[1] if shift is not None else keys.shape[2]
    slots = B * ((S + TILE.value - 1) // TILE.value) if cu_k is None else S // TILE.value + cu_k.shape[0] - 1
    empty = lambda *shape: query.new_empty(*shape, dtype=torch.float32)  # noqa: E731
    return query.new_empty(B, H, L, E), empty(B, H, L), empty(2, HK, M, slots * TILE.value), empty(HK, slots, 4)


@torch.library.custom_op("mgk::mixture_backward", mutates_args=())
def backward_op(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, prepared: Tensor, stats: Tensor, query: Tensor, keys: Tensor, value: Tensor,
    shift: Tensor | None, scale_t: Tensor | None, tau_t: Tensor | None, mask: Tensor | None, seed: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
    scale: float, tau: float, dropout_p: float, causal: int, hard: bool, max_q: int, max_k: int, mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, keys, value, log prior [B, Hk, M, S]; [Hk, M * D + 1 + M] of shift, tau and scale; [B, H, L, S] of a float mask or empty."""
    B, H, HK, n_seq, L, S, D, E, M, shifted, switches = _common(query, keys, value, shift, mask, seed, scale_t, tau_t, cu_q, cu_k, causal, hard, dropout_p)
    slots = stats.shape[1]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, keys, value))
    dbias = lse.new_empty(B, HK, M, S)
    dmask = lse.new_empty(B, H, L, S) if mask_grad else lse.new_empty(0)
    if query.numel() == 0 or S == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), dbias.zero_(), lse.new_zeros(HK, M * D + 1 + M), dmask.zero_()
    if causal or cu_q is not None:
        dmask.zero_()
    c, coef = prepared.unbind(0)
    mask = None if mask is None else mask.expand(B, H, L, S)
    width, size = max(switches["BD"], switches["BE"]), query.element_size()
    q_rows, q_cols, q_warps, q_stages = blocks("queries", width, M, shifted, size)
    k_rows, k_cols, k_warps, k_stages = blocks("keys", width, M, shifted, size)
    q_tiles, k_tiles = triton.cdiv(max_q, q_rows), triton.cdiv(max_k, k_cols)
    query_sums = n_seq * (H // HK) * q_tiles
    rows = lse.new_empty(2 * M, B * H * L)
    spread = lse.new_empty(n_seq * H, q_tiles)
    sums = (lse.new_empty if cu_q is None else lse.new_zeros)(query_sums + n_seq * k_tiles, HK, M * D + 1 + M)
    strides = (*query.stride()[:3], *_key_strides(keys, shifted), *value.stride()[:3], *_strides(mask, 4), *grad.stride()[:3], rows.stride(0))
    gradient_queries[(q_tiles * n_seq * H,)](
        query, keys, value, shift, mask, seed, scale_t, tau_t, cu_q, cu_k, c, coef, stats, out, lse, grad, grad_lse, dq, dmask, rows, spread, sums,
        scale, tau, dropout_p, *strides, H, H // HK, L, S, slots, q_tiles, n_seq * H, _section(n_seq * H, (D * (1 if shifted else M) + E) * size * S),
        **switches, BM=q_rows, BN=q_cols, DMASK=mask_grad, DLSE=grad_lse is not None, num_warps=q_warps, num_stages=q_stages,
    )  # fmt: skip
    gradient_keys[(k_tiles * n_seq * HK,)](
        query, keys, value, shift, mask, seed, scale_t, tau_t, cu_q, cu_k, c, coef, stats, grad, rows, spread, dk, dv, dbias, sums,
        scale, tau, dropout_p, *strides, H, H // HK, L, S, slots, k_tiles, n_seq * HK, q_tiles, query_sums, _section(n_seq * HK, (D + E) * size * L * H // HK),
        **switches, BM=k_rows, BN=k_cols, BQ=q_rows, num_warps=k_warps, num_stages=k_stages,
    )  # fmt: skip
    return dq, dk, dv, dbias, sums.sum(0), dmask


@backward_op.register_fake
def _(grad, grad_lse, out, lse, prepared, stats, query, keys, value, shift, scale_t, tau_t, mask, seed, cu_q, cu_k, scale, tau, dropout_p, causal, hard,
      max_q, max_k, mask_grad):  # fmt: skip
    B, H, L, D = query.shape
    HK, S = value.shape[1:3]
    M = prepared.shape[2]
    same = lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)  # noqa: E731
    dmask = lse.new_empty(B, H, L, S) if mask_grad else lse.new_empty(0)
    return same(query), same(keys), same(value), lse.new_empty(B, HK, M, S), lse.new_empty(HK, M * D + 1 + M), dmask


def _save(ctx, inputs, output):
    query, keys, value, shift, bias, scale_t, tau_t, mask, seed, cu_q, cu_k, *numbers = inputs
    ctx.save_for_backward(*output, query, keys, value, shift, scale_t, tau_t, mask, seed, cu_q, cu_k)
    ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
    ctx.numbers = numbers
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad, grad_lse, *_):
    out, lse, prepared, stats, query, keys, value, shift, scale_t, tau_t, mask, seed, cu_q, cu_k = ctx.saved_tensors
    scale, tau, _, dropout_p, causal, hard, max_q, max_k = ctx.numbers
    if grad is None:
        grad = torch.zeros_like(out)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    dq, dk, dv, dbias, sums, dmask = backward_op(
        grad, grad_lse, out, lse, prepared, stats, query, keys, value, shift, scale_t, tau_t, mask, seed, cu_q, cu_k, scale, tau, dropout_p, causal, hard,
        max_q, max_k, ctx.needs_input_grad[7],
    )  # fmt: skip
    need = ctx.needs_input_grad
    M, D = prepared.shape[2], query.shape[3]
    return (
        dq, dk, dv,
        sums[:, : M * D].reshape(shift.shape).to(shift.dtype) if need[3] else None,
        dbias.sum_to_size(ctx.bias_like[0]).to(ctx.bias_like[1]) if need[4] else None,
        sums[:, M * D + 1 : M * D + 1 + scale_t.shape[1]].to(scale_t.dtype) if need[5] else None,
        sums[:, M * D].to(tau_t.dtype) if need[6] else None,
        dmask.sum_to_size(mask.shape).to(mask.dtype) if need[7] else None,
        *(None,) * 11,
    )  # fmt: skip


forward_op.register_autograd(_gradients, setup_context=_save)


@register_flop_formula(torch.ops.mgk.mixture_forward)
def _forward_flops(query, keys, value, shift, *args, out_shape=None, **kwargs) -> int:
    B, H, L, D = query
    M = 1 if shift is not None else keys[2]
    return 2 * B * H * L * value[2] * (M * D + value[3])


@register_flop_formula(torch.ops.mgk.mixture_backward)
def _backward_flops(grad, grad_lse, out, lse, prepared, stats, query, keys, value, shift, *args, out_shape=None, **kwargs) -> int:
    """As torch counts SDPA's: the products that the gradients need, one pass, with the scores recomputed."""
    B, H, L, D = query
    M = 1 if shift is not None else keys[2]
    return 2 * B * H * L * value[2] * (3 * M * D + 2 * value[3])
