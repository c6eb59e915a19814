"""The operators: what they take, what they promise, and which backend runs them.

B batch, H query heads, Hk key heads, M components, L queries, S keys, D head width, E value width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk._core.calls import LinearCall, MixtureCall, linear_call, mixture_call
from mgk._core.precision import compute_dtype
from mgk._core.validation import fail, one_of
from mgk.backends import chunked, cpu_flash, eager, fused_linear, meta, torch_sdpa, triton


class Backend(NamedTuple):
    refuses: Callable[[Any], str | None]  # why it does not cover a call, or None
    run: Callable[[Any], tuple[Any, Any, Any]]
    slower: Callable[[Any], str | None] = lambda call: None  # why `auto` asks on although it covers the call, or None

    @classmethod
    def of(cls, module: ModuleType) -> Backend:
        return cls(module.refuses, module.run)


# In the order in which `auto` asks them.
MIXTURE_BACKENDS = {
    "meta": Backend(meta.refuses, meta.run_mixture),
    "plain": Backend(torch_sdpa.refuses, torch_sdpa.run, torch_sdpa.slower),
    "triton": Backend.of(triton),
    "sdpa": Backend.of(cpu_flash),
    "eager": Backend.of(eager),
}
LINEAR_BACKENDS = {
    "meta": Backend(meta.refuses, meta.run_linear),
    "triton": Backend(fused_linear.refuses, fused_linear.run),
    "chunked": Backend(chunked.refuses_chunked, chunked.run_chunked),
    "eager": Backend(chunked.refuses_eager, chunked.run_eager),
}


@dataclass(frozen=True)
class BackendChoice:
    """Which backend `auto` runs, and why not each of the others."""

    backend: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.backend}: runs", *(f"{name}: {reason}" for name, reason in self.reasons.items())]
        return "\n".join(lines)


def mgk_attention(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool | str = False,
    dropout_p: float = 0.0,
    scale: float | Tensor | None = None,
    log_prior: Tensor | None = None,
    similarity: str | float | Tensor = "gaussian",
    assignment: str = "soft",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    backend: str = "auto",
    return_weights: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention whose every key is a mixture of M Gaussians (Eq. 8–12), the component keys given independently.

    Args:
        query: [B, H, L, D].
        keys: [B, Hk, M, S, D]; Hk divides H, and a group of H/Hk query heads shares keys, value, prior and scale.
        value: [B, Hk, S, E].
        attn_mask: broadcastable to [B, H, L, S]. Bool: **True = attend**, as in SDPA. Floating point: added to the
            logits, with a gradient; below -1e30, as -inf and the least number of fp32 and bf16
            are, it hides. May come together with is_causal; both apply.
        is_causal: True aligns the diagonal top-left, as SDPA does; "bottom-right" is for queries at the end of a cache.
        dropout_p: dropout on the attention weights.
        scale: 1/σ², a number or broadcastable to [Hk, M] (backend eager: also [B, Hk, M, S]). Default 1/√D.
        log_prior: log π, broadcastable to [B, Hk, M, S] (so one per head is [Hk, M, 1]); -inf is allowed. It need not
            be normalised: what it sums to is a weight on the key. Default: uniform, 1/M.
        similarity: "gaussian" (Eq. 9), "dot" (Eq. 8), or τ between them: 1 is gaussian, 0 is dot; a number or [Hk].
        assignment: "soft" (Eq. 10) or "hard" (Eq. 12, which ignores log_prior).
        cu_seqlens_q, cu_seqlens_k: int32 [N + 1] offsets of N sequences packed along L and S, with B = 1.
        max_seqlen_q, max_seqlen_k: longest packed sequence; only GPU kernels use them.
        backend: "auto" runs the fastest that covers the call; a backend named runs or says why not.

    Returns:
        The output [B, H, L, E]; with return_weights and return_lse a tuple (output, weights [B, H, L, S],
        lse [B, H, L]), in this order, of those asked for. lse_i = log Σ_j exp ℓ_ij, the query's log likelihood up to
        constants. A query that may attend to nothing gives zeros, lse -inf and zero gradients.
    """
    call = mixture_call(
        query, keys, value, attn_mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale, log_prior=log_prior,
        similarity=similarity, assignment=assignment, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, return_weights=return_weights, return_lse=return_lse,
    )  # fmt: skip
    return run_mixture(call, backend)


def smgk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shift: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool | str = False,
    dropout_p: float = 0.0,
    scale: float | Tensor | None = None,
    log_prior: Tensor | None = None,
    similarity: str | float | Tensor = "gaussian",
    assignment: str = "soft",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    backend: str = "auto",
    return_weights: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention with shifted mixture keys (sMGK): component r of key j is key_j + shift_r.

    key is [B, Hk, S, D] and shift [Hk, M, D]; everything else is as in `mgk_attention`. With similarity="dot" and a
    prior shared over positions this is plain softmax attention whatever the shifts: they cancel.
    """
    call = mixture_call(
        query, key, value, attn_mask, shift=shift, shifted=True, is_causal=is_causal, dropout_p=dropout_p, scale=scale,
        log_prior=log_prior, similarity=similarity, assignment=assignment, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, return_weights=return_weights,
        return_lse=return_lse,
    )  # fmt: skip
    return run_mixture(call, backend)


def mlk_attention(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    *,
    log_prior: Tensor | None = None,
    feature_map: str | Callable[[Tensor], Tensor] = "elu",
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    cu_seqlens: Tensor | None = None,
    initial_state: tuple[Tensor, ...] | None = None,
    return_state: bool = False,
    return_weights: bool = False,
    backend: str = "auto",
) -> Any:
    """Linear attention with mixture keys (Eq. 14): φ(q)·Σ_j φ̃_j v_j / φ(q)·Σ_j φ̃_j, φ̃_j = Σ_r π_jr φ(k_jr).

    Args:
        query, keys, value: [B, H, L, D], [B, Hk, M, S, D], [B, Hk, S, E].
        log_prior: log π, broadcastable to [B, Hk, M, S]. Default: uniform.
        feature_map: "elu" (elu + 1), "relu", or a callable [..., D] -> [..., F] such as `FAVOR` and `DPFP`.
        key_mask: bool [B, S], **True = attend**.
        is_causal: query i sees keys up to i; needs L = S.
        cu_seqlens: int32 [N + 1] offsets of N packed sequences, with B = 1 and L = S.
        initial_state, return_state: the sums over earlier keys, to go on from; constant in size.

    Returns:
        The output [B, H, L, E]; with return_weights and return_state a tuple (output, weights [B, H, L, S], state), in
        this order, of those asked for. state is (Z [B, Hk, F, E], z [B, Hk, F]), for FAVOR with a log weight [B, Hk].
        A query whose features meet no key gives zeros.
    """
    call = linear_call(
        query, keys, value, log_prior=log_prior, feature_map=feature_map, key_mask=key_mask, is_causal=is_causal,
        cu_seqlens=cu_seqlens, initial_state=initial_state, return_state=return_state, return_weights=return_weights,
    )  # fmt: skip
    return run_linear(call, backend)


def smlk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shift: Tensor,
    *,
    log_prior: Tensor | None = None,
    feature_map: str | Callable[[Tensor], Tensor] = "elu",
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    cu_seqlens: Tensor | None = None,
    initial_state: tuple[Tensor, ...] | None = None,
    return_state: bool = False,
    return_weights: bool = False,
    backend: str = "auto",
) -> Any:
    """Linear attention with shifted mixture keys (sMLK): key [B, Hk, S, D], shift [Hk, M, D]; else `mlk_attention`."""
    call = linear_call(
        query, key, value, shift=shift, shifted=True, log_prior=log_prior, feature_map=feature_map, key_mask=key_mask,
        is_causal=is_causal, cu_seqlens=cu_seqlens, initial_state=initial_state, return_state=return_state,
        return_weights=return_weights,
    )  # fmt: skip
    return run_linear(call, backend)


def explain_backend(op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> BackendChoice:
    """Which backend runs op(*args, **kwargs), and why not each of the others.

    op is one of the four operators or its name, e.g. explain_backend(mgk.smgk_attention, q, k, v, shift). With a
    backend named, whether that covers the call: a ValueError says why not, as the call's would.
    """
    operators = {f.__name__: f for f in (mgk_attention, smgk_attention, mlk_attention, smlk_attention)}
    if isinstance(op, torch.nn.Module):
        fail("op", f"must be an operator ({', '.join(operators)}) with its tensors, got a layer, {type(op).__name__}")
    name = one_of("op", op if isinstance(op, str) else getattr(op, "__name__", repr(op)), operators)
    try:
        bound = inspect.signature(operators[name]).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"args of {name}: {error}") from None
    bound.apply_defaults()
    given = bound.arguments
    asked = given.pop("backend")
    if "key" in given:
        given.update(keys=given.pop("key"), shifted=True)
    if name in ("mlk_attention", "smlk_attention"):
        return _choose(linear_call(**given), asked, LINEAR_BACKENDS)
    return _choose(mixture_call(**given), asked, MIXTURE_BACKENDS)


def _choose(call: Any, asked: Any, backends: dict[str, Backend]) -> BackendChoice:
    """What `auto` runs: the first that covers the call. Who asks for fp64 checks gradients, and gets the equations."""
    if asked != "auto":
        _backend(call, asked, backends)
        others = (name for name in backend_names(backends) if name not in ("auto", asked))
        return BackendChoice(asked, dict.fromkeys(others, f"backend={asked!r} was asked for"))
    reasons: dict[str, str] = {}
    chosen = ""
    for name, backend in backends.items():
        if name == "meta" and call.query.device.type != "meta":
            continue
        if chosen:
            reasons[name] = f"{chosen} covers the call and is faster"
            continue
        reason = _passed_over(name, backend, call)
        if reason is None:
            chosen = name
        else:
            reasons[name] = reason
    return BackendChoice(chosen, reasons)


def _passed_over(name: str, backend: Backend, call: Any) -> str | None:
    """Why `auto` asks on, or None."""
    reason = backend.refuses(call) or backend.slower(call)
    if reason is not None or name in ("eager", "chunked"):
        return reason
    if call.query.dtype == torch.float64:
        return "auto computes fp64 by the equations"
    # Only where somebody records what is done: to ask takes longer than the rest.
    if (torch.compiler.is_compiling() or torch.jit.is_tracing()) and torch.onnx.is_in_onnx_export():
        return "ONNX knows the equations alone"
    return None


def backend_names(backends: dict[str, Backend]) -> list[str]:
    """What `backend` may be. The one for the meta device is chosen by the device."""
    return ["auto", *(name for name in backends if name != "meta")]


def _backend(call: Any, asked: Any, backends: dict[str, Backend]) -> Backend:
    if asked == "auto":
        # As `_choose`, but nobody asks why not the others.
        for name, backend in backends.items():
            if (name != "meta" or call.query.is_meta) and _passed_over(name, backend, call) is None:
                return backend
    one_of("backend", asked, backend_names(backends))
    reason = backends[asked].refuses(call)
    if reason is not None:
        fail("backend", f"{asked!r} does not cover this call: {reason}. Use 'auto' or 'eager'")
    return backends[asked]


def run_mixture(call: MixtureCall, backend: str) -> Any:
    if call.count is not None and (backend not in ("auto", "triton") or triton.refuses(call) is not None):
        call = call.hiding()
    chosen = _backend(call, backend, MIXTURE_BACKENDS)
    if call.keys.shape[-2] == 0:
        output, lse, weights = _nothing_to_attend(call)
    else:
        output, lse, weights = chosen.run(call)
    if call.hard and call.log_prior is not None and call.log_prior.requires_grad:
        # A hard assignment ignores the prior, whose gradient is then 0, and there, where somebody waits for it.
        output = output + (0 * call.log_prior.clamp(-1, 1).sum()).to(output.dtype)
    if lse is not None and call.return_lse:
        # The query's own term, which is added past the mask, has no gradient either where nothing is seen.
        lse = lse.masked_fill(lse == -torch.inf, -torch.inf)
    return _asked_for(output, (call.return_weights, weights), (call.return_lse, lse))


def run_linear(call: LinearCall, backend: str) -> Any:
    output, state, weights = _backend(call, backend, LINEAR_BACKENDS).run(call)
    return _asked_for(output, (call.return_weights, weights), (call.return_state, state))


def _asked_for(output: Tensor, *extras: tuple[bool, Any]) -> Any:
    """The output alone, or with the extras that were asked for."""
    wanted = [extra for asked, extra in extras if asked]
    return (output, *wanted) if wanted else output


def _nothing_to_attend(call: MixtureCall) -> tuple[Tensor, Tensor, Tensor]:
    """No keys at all: every row is fully masked. The product with the query keeps autograd's graph whole."""
    nothing = call.query[..., :1] * 0
    output = nothing.expand(*call.query.shape[:-1], call.value.shape[-1])
    lse = nothing[..., 0].to(compute_dtype(call.query.dtype)) - torch.inf
    return output, lse, nothing[..., :0]
