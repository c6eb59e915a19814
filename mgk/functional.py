"""The attention operators, and `explain_backend`, which reports the backend that runs a call.

B batch, H query heads, Hk key heads, Hv value heads, M components, L queries, S keys, D head dimension, E value
dimension, F features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgk._core.calls import LinearCall, MixtureCall, linear_call, mixture_call
from mgk._core.repeated_calls import find_current_plan, repeated_call_key, store_plan
from mgk._core.validation import fail, one_of
from mgk.backends import mask_invalid_keys, plan_repeated_call, select_backend

# Receives a call and its result, and returns the result that the caller of the operator gets.
CallHandler = Callable[[MixtureCall | LinearCall, Any], Any]
_call_handlers: ContextVar[tuple[CallHandler, ...]] = ContextVar("call_handlers", default=())


@dataclass(frozen=True)
class BackendChoice:
    """The backend that runs a call, and why each of the others does not.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 2, 10, 8)
        >>> choice = mgk.explain_backend(mgk.smgk_attention, query, key, value, torch.randn(2, 2, 8), backend="eager")
        >>> choice.backend, choice.reasons["sdpa"]
        ('eager', "backend='eager' was requested")
    """

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
    """Compute attention in which every key is a mixture of M Gaussians (Eq. 8–12) with independent component keys.

    Args:
        query: [B, H, L, D].
        keys: Component keys, [B, Hk, M, S, D]. Hk divides H: a group of H/Hk query heads shares keys, prior and scale.
        value: [B, Hv, S, E]. Hv divides H, and need not equal Hk.
        attn_mask: Broadcastable to [B, H, L, S]. Bool: **True = attend**, as in SDPA. Floating point: added to the
            logits, and differentiable; values below -1e30 (-inf, the lowest finite fp32 and bf16 number) mask the
            pair. May be combined with is_causal: both apply.
        is_causal: True aligns the diagonal top-left, as SDPA does; "bottom-right" is for queries at the end of a cache.
        dropout_p: Probability of dropout on the attention weights.
        scale: 1/σ², a number or broadcastable to [Hk, M] (backend "eager": also [B, Hk, M, S]). Default: 1/√D.
        log_prior: log π, broadcastable to [B, Hk, M, S] ([Hk, M, 1]: one per head); -inf is allowed. Need not be
            normalized: the sum of π over components weights the key. Default: uniform, 1/M.
        similarity: "gaussian" (Eq. 9), "dot" (Eq. 8), or τ between them, where 1 is gaussian and 0 is dot: a number or
            a tensor [Hk].
        assignment: "soft" (Eq. 10), or "hard" (Eq. 12), which ignores log_prior.
        cu_seqlens_q: int32 [N + 1], offsets of N sequences packed along L, with B = 1.
        cu_seqlens_k: int32 [N + 1], offsets of N sequences packed along S, with B = 1.
        max_seqlen_q: Length of the longest packed sequence of queries; used by GPU kernels only.
        max_seqlen_k: Length of the longest packed sequence of keys; used by GPU kernels only.
        backend: "auto" runs the fastest backend that supports the call. "triton", "plain", "factored", "sdpa" and
            "eager" run that backend, or raise a ValueError with the reason why it does not support the call.
        return_weights: Return the attention weights too.
        return_lse: Return the logsumexp of the logits too.

    Returns:
        The output [B, H, L, E]. With return_weights or return_lse, a tuple of the output followed by the weights
        [B, H, L, S] and the lse [B, H, L], as requested. lse_i = log Σ_j exp ℓ_ij is the query's log likelihood up to
        constants. A fully masked query gives zeros, an lse of -inf, and zero gradients.

    Examples:
        >>> query, value = torch.randn(2, 2, 4, 100, 64)
        >>> keys = torch.randn(2, 4, 2, 100, 64)  # two components per key
        >>> mask = torch.rand(100, 100) < 0.9
        >>> output, weights = mgk.mgk_attention(query, keys, value, mask, return_weights=True)
        >>> torch.allclose(weights.sum(-1), torch.ones(2, 4, 100))
        True
    """
    tensors = (query, keys, value, None, log_prior)
    call_key, plan = _look_up_plan(
        tensors, (attn_mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        (is_causal, dropout_p, scale, similarity, assignment, backend, return_weights, return_lse),
    )  # fmt: skip
    if plan is not None:
        return plan(*tensors)
    call = mixture_call(
        query, keys, value, attn_mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale, log_prior=log_prior,
        similarity=similarity, assignment=assignment, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, return_weights=return_weights, return_lse=return_lse,
    )  # fmt: skip
    return _run_mixture(call, backend, call_key, tensors)


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
    """Compute attention with shifted mixture keys (sMGK): component r of key j is key_j + shift_r.

    With similarity="dot" and a prior shared over positions the shifts cancel, and this is softmax attention.

    Args:
        query: [B, H, L, D].
        key: [B, Hk, S, D]. Hk divides H: a group of H/Hk query heads shares key, shift, prior and scale.
        value: [B, Hv, S, E]. Hv divides H, and need not equal Hk.
        shift: [Hk, M, D].
        attn_mask: Broadcastable to [B, H, L, S]. Bool: **True = attend**, as in SDPA. Floating point: added to the
            logits, and differentiable; values below -1e30 (-inf, the lowest finite fp32 and bf16 number) mask the
            pair. May be combined with is_causal: both apply.
        is_causal: True aligns the diagonal top-left, as SDPA does; "bottom-right" is for queries at the end of a cache.
        dropout_p: Probability of dropout on the attention weights.
        scale: 1/σ², a number or broadcastable to [Hk, M] (backend "eager": also [B, Hk, M, S]). Default: 1/√D.
        log_prior: log π, broadcastable to [B, Hk, M, S] ([Hk, M, 1]: one per head); -inf is allowed. Need not be
            normalized: the sum of π over components weights the key. Default: uniform, 1/M.
        similarity: "gaussian" (Eq. 9), "dot" (Eq. 8), or τ between them, where 1 is gaussian and 0 is dot: a number or
            a tensor [Hk].
        assignment: "soft" (Eq. 10), or "hard" (Eq. 12), which ignores log_prior.
        cu_seqlens_q: int32 [N + 1], offsets of N sequences packed along L, with B = 1.
        cu_seqlens_k: int32 [N + 1], offsets of N sequences packed along S, with B = 1.
        max_seqlen_q: Length of the longest packed sequence of queries; used by GPU kernels only.
        max_seqlen_k: Length of the longest packed sequence of keys; used by GPU kernels only.
        backend: "auto" runs the fastest backend that supports the call. "triton", "plain", "factored", "sdpa" and
            "eager" run that backend, or raise a ValueError with the reason why it does not support the call.
        return_weights: Return the attention weights too.
        return_lse: Return the logsumexp of the logits too.

    Returns:
        The output [B, H, L, E]. With return_weights or return_lse, a tuple of the output followed by the weights
        [B, H, L, S] and the lse [B, H, L], as requested. lse_i = log Σ_j exp ℓ_ij is the query's log likelihood up to
        constants. A fully masked query gives zeros, an lse of -inf, and zero gradients.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 4, 100, 64)  # [B, H, L, D] each
        >>> shift = torch.randn(4, 2, 64)  # two components per key
        >>> mgk.smgk_attention(query, key, value, shift, is_causal=True).shape
        torch.Size([2, 4, 100, 64])
        >>> half = slice(0, 2)  # grouped key heads: 4 query heads share 2 key heads
        >>> mgk.smgk_attention(query, key[:, half], value[:, half], shift[half]).shape
        torch.Size([2, 4, 100, 64])
    """
    tensors = (query, key, value, shift, log_prior)
    call_key, plan = _look_up_plan(
        tensors, (attn_mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        (is_causal, dropout_p, scale, similarity, assignment, backend, return_weights, return_lse),
    )  # fmt: skip
    if plan is not None:
        return plan(*tensors)
    call = mixture_call(
        query, key, value, attn_mask, shift=shift, shifted=True, is_causal=is_causal, dropout_p=dropout_p, scale=scale,
        log_prior=log_prior, similarity=similarity, assignment=assignment, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, return_weights=return_weights,
        return_lse=return_lse,
    )  # fmt: skip
    return _run_mixture(call, backend, call_key, tensors)


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
    """Compute linear attention with mixture keys (Eq. 14).

    The output is φ(q)·Σ_j φ̃_j v_j / φ(q)·Σ_j φ̃_j with φ̃_j = Σ_r π_jr φ(k_jr).

    Args:
        query: [B, H, L, D].
        keys: Component keys k_jr, [B, Hk, M, S, D]. Hk divides H.
        value: [B, Hv, S, E]. Hv divides H, and need not equal Hk.
        log_prior: log π, broadcastable to [B, Hk, M, S]. Default: uniform, 1/M.
        feature_map: "elu" (elu + 1), "relu", or a callable [..., D] -> [..., F] such as `FAVOR` and `DPFP`.
        key_mask: bool [B, S], **True = attend**.
        is_causal: Query i attends to keys up to i; needs L = S.
        cu_seqlens: int32 [N + 1], offsets of N packed sequences, with B = 1 and L = S.
        initial_state: State of the earlier keys, from a call with return_state. Its size is constant.
        return_state: Return the state too: sums over all keys, from which a later call continues.
        return_weights: Return the attention weights too.
        backend: "auto" runs the fastest backend that supports the call. "triton", "chunked" and "eager" run that
            backend, or raise a ValueError with the reason why it does not support the call.

    Returns:
        The output [B, H, L, E]. With return_weights or return_state, a tuple of the output followed by the weights
        [B, H, L, S] and the state, as requested. The state is (Z [B, Hs, F, E], z [B, Hk, F]), for FAVOR followed by a
        log weight [B, Hk]. Hs is the least common multiple of Hk and Hv: Hk if they are equal. A query whose
        denominator is 0 gives zeros.

    Examples:
        >>> query, value = torch.randn(2, 2, 4, 100, 64)
        >>> keys = torch.randn(2, 4, 2, 100, 64)  # two components per key
        >>> output, state = mgk.mlk_attention(query, keys, value, is_causal=True, return_state=True)
        >>> output.shape, state[0].shape  # the state has a constant size
        (torch.Size([2, 4, 100, 64]), torch.Size([2, 4, 64, 64]))
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
    """Compute linear attention with shifted mixture keys (sMLK): component r of key j is key_j + shift_r.

    Args:
        query: [B, H, L, D].
        key: [B, Hk, S, D]. Hk divides H.
        value: [B, Hv, S, E]. Hv divides H, and need not equal Hk.
        shift: [Hk, M, D].
        log_prior: log π, broadcastable to [B, Hk, M, S]. Default: uniform, 1/M.
        feature_map: "elu" (elu + 1), "relu", or a callable [..., D] -> [..., F] such as `FAVOR` and `DPFP`.
        key_mask: bool [B, S], **True = attend**.
        is_causal: Query i attends to keys up to i; needs L = S.
        cu_seqlens: int32 [N + 1], offsets of N packed sequences, with B = 1 and L = S.
        initial_state: State of the earlier keys, from a call with return_state. Its size is constant.
        return_state: Return the state too: sums over all keys, from which a later call continues.
        return_weights: Return the attention weights too.
        backend: "auto" runs the fastest backend that supports the call. "triton", "chunked" and "eager" run that
            backend, or raise a ValueError with the reason why it does not support the call.

    Returns:
        The output [B, H, L, E]. With return_weights or return_state, a tuple of the output followed by the weights
        [B, H, L, S] and the state, as requested. The state is (Z [B, Hs, F, E], z [B, Hk, F]), for FAVOR followed by a
        log weight [B, Hk]. Hs is the least common multiple of Hk and Hv: Hk if they are equal. A query whose
        denominator is 0 gives zeros.

    Examples:
        >>> query, key, value = torch.randn(3, 2, 4, 100, 32)  # [B, H, L, D] each
        >>> mgk.smlk_attention(query, key, value, torch.randn(4, 2, 32), feature_map="relu").shape
        torch.Size([2, 4, 100, 32])
    """
    call = linear_call(
        query, key, value, shift=shift, shifted=True, log_prior=log_prior, feature_map=feature_map, key_mask=key_mask,
        is_causal=is_causal, cu_seqlens=cu_seqlens, initial_state=initial_state, return_state=return_state,
        return_weights=return_weights,
    )  # fmt: skip
    return run_linear(call, backend)


OPERATORS = {f.__name__: f for f in (mgk_attention, smgk_attention, mlk_attention, smlk_attention)}


def explain_backend(op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> BackendChoice:
    """Return the backend that runs ``op(*args, **kwargs)``, and why each of the others does not.

    Args:
        op: One of the four operators, or its name.
        *args: Positional arguments of the operator.
        **kwargs: Keyword arguments of the operator. If `backend` names a backend that does not support the call, a
            ValueError is raised, as by the operator.

    Returns:
        A `BackendChoice`: the name of the backend, and a dict of the other backends' names and reasons.

    Examples:
        >>> query, key, value = torch.randn(3, 1, 2, 10, 8, dtype=torch.float64)
        >>> print(mgk.explain_backend(mgk.smgk_attention, query, key, value, torch.randn(2, 2, 8).double()))
        eager: runs
        plain: ...
        sdpa: 'auto' runs fp64 on a reference backend
    """
    arguments = bind_arguments(op, *args, **kwargs)
    backend = arguments.pop("backend")
    make_call = mixture_call if "attn_mask" in arguments else linear_call
    selected, reasons = select_backend(make_call(**arguments), backend, explain=True)
    return BackendChoice(selected.name, reasons)


def bind_arguments(op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of op(*args, **kwargs) by name, with defaults, as `mixture_call` or `linear_call` take them.

    The argument `backend` is included.
    """
    if isinstance(op, torch.nn.Module):
        fail("op", f"must be an operator ({', '.join(OPERATORS)}) with its tensors, got a layer, {type(op).__name__}")
    name = one_of("op", op if isinstance(op, str) else getattr(op, "__name__", repr(op)), OPERATORS)
    try:
        bound = inspect.signature(OPERATORS[name]).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"args of {name}: {error}") from None
    bound.apply_defaults()
    arguments = bound.arguments
    if "key" in arguments:
        arguments.update(keys=arguments.pop("key"), shifted=True)
    return arguments


@contextmanager
def intercept_calls(handler: CallHandler) -> Iterator[None]:
    """Pass every operator call of this thread, and its result, to a handler.

    Calls of the four operators and of the layers are intercepted. Compiled code is not: run it under
    `torch.compiler.set_stance("force_eager")`.

    Args:
        handler: Called as handler(call, result) after each call. It returns the result that the model receives: the
            output, or a tuple of the output and extras. With nested contexts the inner handler runs first.
    """
    token = _call_handlers.set((handler, *_call_handlers.get()))
    try:
        yield
    finally:
        _call_handlers.reset(token)


def _handle(call: MixtureCall | LinearCall, result: Any) -> Any:
    # is_compiling() is constant to torch.compile, which cannot trace a ContextVar.
    if not torch.compiler.is_compiling():
        for handler in _call_handlers.get():
            result = handler(call, result)
    return result


def _look_up_plan(tensors: tuple[Any, ...], unplanned: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return the key of a call and its plan, or None. A call with one of the `unplanned` arguments has no key."""
    has_key = all([x is None for x in unplanned])  # noqa: C419  (a generator takes twice the time)
    call_key = repeated_call_key(tensors, *options) if has_key else None
    if call_key is None or _call_handlers.get():
        return None, None
    return call_key, find_current_plan(call_key)


def run_mixture(call: MixtureCall, backend: str) -> Any:
    """Run a validated call of mgk_attention or smgk_attention, and return the operator's result."""
    tensors = (call.query, call.keys, call.value, call.shift, call.log_prior)
    call_key, plan = _look_up_plan(
        tensors, (call.attn_mask, call.packed, call.num_valid_keys),
        (call.causal, call.dropout_p, call.scale, call.tau, call.hard, backend, call.return_weights, call.return_lse),
    )  # fmt: skip
    return _run_mixture(call, backend, call_key, tensors) if plan is None else plan(*tensors)


def _run_mixture(call: MixtureCall, backend: str, call_key: Any, tensors: tuple[Any, ...]) -> Any:
    """Run a call that has no plan; store a plan for `tensors` under the call key, unless that is None."""
    if call.num_valid_keys is not None:
        call = mask_invalid_keys(call, backend)
    selected, _ = select_backend(call, backend)
    # Autocast may have converted the tensors of the call.
    is_converted = not (call.query is tensors[0] and call.keys is tensors[1] and call.value is tensors[2])
    if call_key is not None and not is_converted:
        plan = plan_repeated_call(selected, call, tensors[4])
        if plan is not None:
            store_plan(call_key, plan)
            return plan(*tensors)
    if call.keys.shape[-2] == 0:
        output, lse, weights = call.results_without_keys()
    else:
        output, lse, weights = selected.run(call)
    if call.hard and call.log_prior is not None and call.log_prior.requires_grad:
        # Hard assignment ignores the prior: add 0 * prior, so that its gradient is 0, not None.
        output = output + (0 * call.log_prior.clamp(-1, 1).sum()).to(output.dtype)
    if lse is not None and call.return_lse:
        # The query's norm is added after masking: remove its gradient for fully masked rows.
        lse = lse.masked_fill(lse == -torch.inf, -torch.inf)
    return _handle(call, _pack_outputs(output, (call.return_weights, weights), (call.return_lse, lse)))


def run_linear(call: LinearCall, backend: str) -> Any:
    """Run a validated call of mlk_attention or smlk_attention, and return the operator's result."""
    selected, _ = select_backend(call, backend)
    output, state, weights = selected.run(call)
    return _handle(call, _pack_outputs(output, (call.return_weights, weights), (call.return_state, state)))


def _pack_outputs(output: Tensor, *extras: tuple[bool, Any]) -> Any:
    """Return the output, or a tuple of it and the requested extras."""
    requested = [extra for is_requested, extra in extras if is_requested]
    return (output, *requested) if requested else output
