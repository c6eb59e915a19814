"""Backends of the attention operators, and the selection between them.

One module holds one backend: `unsupported_reason(call)` returns why it does not support a call, or None; `run(call)`
returns (output, lse, weights) of a MixtureCall or (output, state, weights) of a LinearCall. A module that implements
both families has one `run` function for each. Backend modules do not import each other.

To add a backend, write such a module and add a row to MIXTURE_BACKENDS or LINEAR_BACKENDS, before the slower backends.
If a later backend is faster or safer for some calls, give the row a `prefer_other_reason` that returns the reason.

Shapes: B batch, H query heads, Hk key heads, Hv value heads, M components, L queries, S keys, D head dimension,
E value dimension, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk._core.calls import LinearCall, MixtureCall
from mgk._core.em import EMStatistics, statistics_by_equations
from mgk._core.validation import fail, one_of
from mgk.backends import chunked, cpu_factored, cpu_flash, eager, meta, torch_sdpa, triton


class Backend(NamedTuple):
    """A backend of one operator family: a row of MIXTURE_BACKENDS or LINEAR_BACKENDS."""

    name: str
    unsupported_reason: Callable[[Any], str | None]  # why it does not support a call, or None
    run: Callable[[Any], tuple[Any, Any, Any]]
    prefer_other_reason: Callable[[Any], str | None] | None = None  # why "auto" runs a later one instead, or None
    is_reference: bool = False  # "auto" runs fp64 and ONNX export on these only


def _prefer_triton_to_plain(call: MixtureCall) -> str | None:
    """Return why the Triton kernels are faster than SDPA for the call, or None.

    Measured on an H200: with padding, SDPA takes 1.2 times (forward) and 1.3 times (with gradients) the time of the
    fused kernels; one token at a time with a growing cache, 50 ms for 16 layers against 8.
    """
    is_decode_step = call.query.is_cuda and _is_cudnn_decode_step(call) and triton.uses_decode_kernel(call)
    has_key_mask = call.attn_mask is not None and call.attn_mask.shape[2] == 1
    has_pairs = call.keys.shape[1] != call.value.shape[1]
    if not (is_decode_step or has_key_mask or has_pairs) or not triton.can_auto_run_mixture(call):
        return None
    if has_pairs:
        return "triton needs no copies of keys or values, whose numbers of heads differ"
    if is_decode_step:
        return "triton is faster: cuDNN makes a new plan for every number of keys"
    return "triton is faster: it reads the key mask once per key, and skips masked keys"


def _is_cudnn_decode_step(call: MixtureCall) -> bool:
    """Return whether the call is one query that SDPA runs on cuDNN: a 2-byte dtype and no shared key heads."""
    query, keys = call.query, call.keys
    return query.dtype.itemsize == 2 and call.group == 1 and query.shape[2] == 1 and keys.shape[-2] > 1


def _table(*backends: Backend) -> dict[str, Backend]:
    return {backend.name: backend for backend in backends}


# In order of preference: "auto" runs the first that supports the call and has no reason to prefer another.
MIXTURE_BACKENDS = _table(
    Backend("meta", meta.unsupported_reason, meta.run_mixture),
    Backend("plain", torch_sdpa.unsupported_reason, torch_sdpa.run, _prefer_triton_to_plain),
    Backend("triton", triton.mixture_unsupported_reason, triton.run_mixture, triton.untested_gpu_reason),
    Backend("factored", cpu_factored.unsupported_reason, cpu_factored.run, cpu_factored.prefer_other_reason),
    Backend("sdpa", cpu_flash.unsupported_reason, cpu_flash.run),
    Backend("eager", eager.unsupported_reason, eager.run_mixture, is_reference=True),
)
LINEAR_BACKENDS = _table(
    Backend("meta", meta.unsupported_reason, meta.run_linear),
    Backend("triton", triton.linear_unsupported_reason, triton.run_linear, triton.untested_gpu_reason),
    Backend("chunked", chunked.unsupported_reason, chunked.run, is_reference=True),
    Backend("eager", eager.unsupported_reason, eager.run_linear, is_reference=True),
)


def backend_names(backends: Mapping[str, Backend]) -> list[str]:
    """Return the valid values of the argument `backend`; "meta" is chosen by the device only."""
    return ["auto", *(name for name in backends if name != "meta")]


def mask_invalid_keys(call: MixtureCall, name: str) -> MixtureCall:
    """Replace a call's count of valid keys by a mask, unless "triton", which reads the count, runs the call."""
    if (name == "auto" and triton.can_auto_run_mixture(call)) or (
        name == "triton" and triton.mixture_unsupported_reason(call) is None
    ):
        return call
    return call.with_valid_keys_mask()


def select_backend(
    call: MixtureCall | LinearCall, name: str = "auto", *, explain: bool = False
) -> tuple[Backend, dict[str, str]]:
    """Return the backend that runs a call, and why others do not.

    Args:
        call: The validated call.
        name: "auto", or the name of a backend. A ValueError is raised if that does not support the call.
        explain: Return a reason for every other backend. Otherwise, only backends that were tried before the selected
            one have a reason.

    Returns:
        The backend, and a dict of the names and reasons of others.
    """
    backends = MIXTURE_BACKENDS if isinstance(call, MixtureCall) else LINEAR_BACKENDS
    reasons: dict[str, str] = {}
    if name != "auto":
        backend = backends[one_of("backend", name, backend_names(backends))]
        reason = backend.unsupported_reason(call)
        if reason is not None:
            fail("backend", f"{name!r} does not support this call: {reason}. Use 'auto' or 'eager'")
        if explain:
            _add_reason(reasons, backends, backend, f"backend={name!r} was requested")
        return backend, reasons
    for key, backend in backends.items():
        if key == "meta" and not call.query.is_meta:
            continue
        reason = backend.unsupported_reason(call)
        if reason is None:
            reason = _skip_reason(backend, call)
        if reason is None:
            if explain:
                _add_reason(reasons, backends, backend, f"{key} supports the call and is faster")
            return backend, reasons
        reasons[key] = reason
    raise AssertionError("eager supports every call")


def plan_repeated_call(backend: Backend, call: MixtureCall, log_prior: Tensor | None) -> Any:
    """Return a function of query, keys, value, shift and log prior that repeats the call, or None.

    log_prior: The prior as the function receives it, before it is viewed as 4-dimensional.
    """
    if backend.name != "triton":
        return None
    return triton.plan_mixture(call, None if log_prior is None else log_prior.shape)


def _add_reason(reasons: dict[str, str], backends: Mapping[str, Backend], selected: Backend, reason: str) -> None:
    """Add a reason for every backend that has none and is not selected."""
    for name in backend_names(backends)[1:]:
        if name != selected.name:
            reasons.setdefault(name, reason)


def _skip_reason(backend: Backend, call: MixtureCall | LinearCall) -> str | None:
    """Return why "auto" does not run a supported call on the backend, or None."""
    prefer_other_reason = backend.prefer_other_reason
    reason = None if prefer_other_reason is None else prefer_other_reason(call)
    if reason is not None or backend.is_reference:
        return reason
    if call.query.dtype == torch.float64:
        return "'auto' runs fp64 on a reference backend"
    # Checked only while compiling or tracing: is_in_onnx_export() is slow.
    if (torch.compiler.is_compiling() or torch.jit.is_tracing()) and torch.onnx.is_in_onnx_export():
        return "ONNX export supports reference backends only"
    return None


@torch.no_grad()
def em_statistics(call: MixtureCall, real_queries: Tensor | None = None, *, with_spread: bool = True) -> EMStatistics:
    """Sum the responsibilities of Eq. 11 over the queries of a call; its masks and causality apply.

    Args:
        call: The validated call.
        real_queries: bool [B, L], False for queries to leave out, such as padding. None includes all.
        with_spread: Compute the spread too, which only variances use. Without it, the kernels are used if they support
            the call.
    """
    if with_spread or not triton.can_auto_run_mixture(call):
        return statistics_by_equations(call, real_queries)
    count, pairs = triton.count_components(call, real_queries)
    return EMStatistics(count, pairs, None)
