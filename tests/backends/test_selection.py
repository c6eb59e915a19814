"""Selection of the backend, and interception of operator calls."""

import dataclasses
import threading

import pytest
import torch

import mgk
from mgk._core.calls import linear_call, mixture_call
from mgk.backends import LINEAR_BACKENDS, MIXTURE_BACKENDS, select_backend, triton
from mgk.backends.triton import mixture_unsupported_reason
from mgk.functional import intercept_calls

QUERY, KEYS, VALUE = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 3, 5, 4), torch.randn(1, 2, 5, 4)
META = tuple(x.to("meta") for x in (QUERY, KEYS, VALUE))
CALLS = {
    "softmax": (mixture_call(QUERY, KEYS[:, :, :1], VALUE, similarity="dot"), "plain"),
    "softmax-fp64": (
        mixture_call(QUERY.double(), KEYS[:, :, :1].double(), VALUE.double(), similarity="dot"),
        "eager",
    ),
    "mixture": (mixture_call(QUERY, KEYS, VALUE), "sdpa"),
    "mixture-hard": (mixture_call(QUERY, KEYS, VALUE, assignment="hard"), "eager"),
    "mixture-meta": (mixture_call(*META), "meta"),
    "linear": (linear_call(QUERY, KEYS, VALUE), "chunked"),
    "linear-fp64": (linear_call(QUERY.double(), KEYS.double(), VALUE.double()), "chunked"),
    "linear-weights": (linear_call(QUERY, KEYS, VALUE, return_weights=True), "eager"),
    "linear-meta": (linear_call(*META), "meta"),
}


@pytest.fixture(autouse=True)
def without_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("name", CALLS)
def test_auto_selects_the_first_supported_backend(name):
    call, expected = CALLS[name]
    backend, reasons = select_backend(call)
    explained, all_reasons = select_backend(call, explain=True)
    assert backend.name == explained.name == expected
    assert backend is explained
    table = LINEAR_BACKENDS if "linear" in name else MIXTURE_BACKENDS
    names = [other for other in table if other != "meta" or "meta" in name]
    assert [*all_reasons] == [other for other in names if other != expected]
    # Without `explain`, the reasons end with the selected backend.
    assert list(reasons.items()) == list(all_reasons.items())[: names.index(expected)]


class Wrapper(torch.Tensor):
    """A subclass without storage, like a DTensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, *_):
        return cls(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def test_calls_that_the_kernels_cannot_run(monkeypatch):
    """Such calls would read at address 0, launch an invalid grid, or record kernels in a trace."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def reason(*tensors):
        return mixture_unsupported_reason(mixture_call(*tensors))

    assert reason(QUERY, KEYS, VALUE) is None
    wrapped = mixture_unsupported_reason(dataclasses.replace(CALLS["mixture"][0], value=Wrapper(VALUE)))
    assert "tensor subclasses without storage of their own are not supported" in wrapped
    many = torch.empty(1, 65_536, 1, 4)
    assert reason(many, many[:, :1, None], many[:, :1]) == "more than 65,535 heads are not supported"
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    assert reason(QUERY, KEYS, VALUE) == "torch.jit.trace cannot record the kernels"


def test_keys_with_large_offsets_of_components_are_copied(monkeypatch):
    keys = torch.stack([torch.randn(1, 2, 5, 4) for _ in range(3)]).movedim(0, 2)
    assert triton._ensure_small_component_offsets(keys) is keys
    monkeypatch.setattr(triton, "MAX_COMPONENT_OFFSET", 79)
    copy = triton._ensure_small_component_offsets(keys)  # the last component starts at 80
    assert copy.is_contiguous()
    assert torch.equal(copy, keys)
    assert triton._ensure_small_component_offsets(copy) is copy
    assert triton.plan_mixture(mixture_call(QUERY, keys, VALUE), None) is None


def test_named_backend_is_selected_or_raises():
    call, _ = CALLS["softmax"]
    backend, reasons = select_backend(call, "eager", explain=True)
    assert backend is MIXTURE_BACKENDS["eager"]
    assert reasons == dict.fromkeys(("plain", "triton", "factored", "sdpa"), "backend='eager' was requested")
    assert select_backend(call, "eager")[1] == {}
    with pytest.raises(ValueError, match="'chunked' does not support this call: it never forms the attention weights"):
        select_backend(CALLS["linear-weights"][0], "chunked")
    with pytest.raises(ValueError, match="backend must be one of"):
        select_backend(call, "meta")


def test_handlers_receive_calls_and_replace_results():
    names = []

    def double(call, result):
        names.append(type(call).__name__)
        return 2 * result

    layer = mgk.Attention(8, 2, variant="smgk")
    x = torch.randn(1, 5, 8)
    plain = mgk.mlk_attention(QUERY, KEYS, VALUE), layer.out(torch.zeros(8)), layer(x)
    with intercept_calls(double):
        doubled = mgk.mlk_attention(QUERY, KEYS, VALUE), layer.out(torch.zeros(8)), layer(x)
    assert names == ["LinearCall", "MixtureCall"]
    assert torch.equal(doubled[0], 2 * plain[0])
    torch.testing.assert_close(doubled[2] - doubled[1], 2 * (plain[2] - plain[1]))
    assert torch.equal(mgk.mlk_attention(QUERY, KEYS, VALUE), plain[0])


def test_inner_handler_runs_first_and_is_removed_after_an_error():
    order = []

    def stop(call, result):
        order.append("inner")
        raise RuntimeError("stop")

    with intercept_calls(lambda call, result: order.append("outer") or result):
        with pytest.raises(RuntimeError, match="stop"), intercept_calls(stop):
            mgk.mgk_attention(QUERY, KEYS, VALUE)
        mgk.mgk_attention(QUERY, KEYS, VALUE)
    mgk.mgk_attention(QUERY, KEYS, VALUE)
    assert order == ["inner", "outer"]


def test_calls_of_other_threads_are_not_intercepted():
    intercepted = []
    with intercept_calls(lambda call, result: intercepted.append(call) or result):
        thread = threading.Thread(target=mgk.mgk_attention, args=(QUERY, KEYS, VALUE))
        thread.start()
        thread.join()
    assert intercepted == []


@pytest.mark.parametrize("variant", ["softmax", "smgk", "mlk"])
def test_layers_compile_without_graph_breaks_and_are_intercepted_in_eager_mode(variant):
    layer = mgk.Attention(8, 2, variant=variant, is_causal=True).eval()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(1, 5, 8)
    intercepted = []
    with torch.no_grad():
        expected = layer(x)
        torch.testing.assert_close(compiled(x), expected)
        with intercept_calls(lambda call, result: intercepted.append(call) or result):
            torch.testing.assert_close(compiled(x), expected)
            assert intercepted == []
            with torch.compiler.set_stance("force_eager"):
                torch.testing.assert_close(compiled(x), expected)
    assert len(intercepted) == 1
