"""`mgk.warmup`: kernels are compiled before the call, for the GPU or for an architecture that is not present."""

import gc
import logging
from types import SimpleNamespace

import pytest
import torch

import mgk
from mgk.backends.triton import NO_TRITON

if NO_TRITON is not None:
    pytest.skip(NO_TRITON, allow_module_level=True)

from mgk._core import repeated_calls
from mgk.kernels import architecture, jit_cache, offline

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def collected(monkeypatch):
    """Collect the names and paths of the kernels instead of compiling them."""
    kernels = []

    def collect(launches, threads):
        kernels.extend(spec.kernel.__name__ for spec, _, _ in launches)
        assert threads in (None, 3)
        return [spec.kernel.__name__ for spec, _, _ in launches]

    monkeypatch.setattr(jit_cache, "compile_kernels", collect)
    yield kernels
    repeated_calls._plans_by_key.clear()


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def smgk_inputs(length=2048):
    query, key, value = (meta(2, 4, length, 64) for _ in range(3))
    return query, key, value, meta(4, 2, 64, dtype=torch.float32)


@pytest.mark.parametrize("op", [mgk.smgk_attention, "smgk_attention"])
def test_kernels_of_a_training_step_are_collected(op, collected):
    prior = meta(4, 2, 1, dtype=torch.float32)
    result = mgk.warmup(op, *smgk_inputs(), log_prior=prior, is_causal=True, arch=90, threads=3)
    assert result.kernels == tuple(collected)
    assert result.reason is None
    assert set(collected) == {
        "prepare_keys", "mixture_forward", "mixture_backward_dq", "mixture_backward_dkdv", "add_parts"
    }  # fmt: skip
    assert str(result).startswith("5 kernels compiled in ")
    assert architecture.compile_target() is None


def test_inference_has_no_backward_kernels(collected):
    mgk.warmup("smgk_attention", *smgk_inputs(), arch=100, backward=False)
    assert set(collected) == {"prepare_keys", "mixture_forward"}


def test_decoding_and_linear_attention(collected):
    query, key, value, shift = smgk_inputs()
    mgk.warmup("smgk_attention", meta(2, 4, 1, 64), key, value, shift, arch=90, backward=False)
    assert collected == ["decode_row", "decode_merge"]
    collected.clear()
    mgk.warmup("smlk_attention", query, key, value, shift, is_causal=True, arch="gfx942", backend="triton")
    assert "linear_backward_dkdv" in collected


def test_module_is_unchanged(collected):
    """EM would otherwise replace the prior by counts that were never computed."""
    layer = mgk.Attention(128, 2, head_dim=64, variant="smgk-em", is_causal=True, dtype=torch.bfloat16)
    before = {name: x.clone() for name, x in layer.state_dict().items()}
    random_state = torch.get_rng_state()
    result = mgk.warmup(layer, meta(2, 256, 128), arch=90)
    assert {"mixture_backward_dq", "count_components"} <= set(result.kernels)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())
    assert all(p.grad is None for p in layer.parameters())


def test_call_without_kernels_has_a_reason():
    x = torch.randn(1, 2, 8, 16, dtype=torch.float64)
    result = mgk.warmup(mgk.smgk_attention, x, x, x, torch.randn(2, 2, 16).double())
    assert result.kernels == ()
    assert "require a CUDA device" in result.reason
    assert str(result) == f"no kernels compiled: {result.reason}"
    assert mgk.warmup(torch.nn.Linear(4, 4), torch.randn(2, 4)).reason == "the call launches no Triton kernels"


@WITHOUT_GPU
def test_meta_tensors_need_a_gpu_or_an_architecture():
    with pytest.raises(ValueError, match="arch must name an architecture, such as 90"):
        mgk.warmup("smgk_attention", *smgk_inputs())


@pytest.mark.parametrize("options, message", [
    ({"threads": 0}, "threads must be a positive integer or None, got 0"),
    ({"threads": True}, "threads must be"),
    ({"arch": 75}, "arch must be a compute capability such as 90"),
    ({"arch": 9.0}, "arch must be"),
])  # fmt: skip
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        mgk.warmup("smgk_attention", *smgk_inputs(), **options)


def test_unknown_operator():
    with pytest.raises(ValueError, match="op must be"):
        mgk.warmup("attention", *smgk_inputs(), arch=90)


@pytest.mark.slow
def test_kernels_are_compiled_in_threads_and_once(caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit_cache, "SLOW_COMPILATION", 0.0)
    monkeypatch.setattr(jit_cache, "_compiled", {})
    _, key, value, shift = smgk_inputs(64)
    arguments = ("smgk_attention", meta(2, 4, 1, 64), key, value, shift)
    with caplog.at_level(logging.WARNING, "mgk"):
        result = mgk.warmup(*arguments, backward=False, arch=90, threads=2)
        again = mgk.warmup(*arguments, backward=False, arch=90, threads=2)
    assert result.kernels == ("decode_row", "decode_merge")
    assert {compiled.name for compiled in jit_cache._compiled.values()} == {"decode_row", "decode_merge"}
    assert again.reason == "all of them were compiled before"
    (record,) = caplog.records
    assert record.getMessage().startswith("compiled 2 kernels in ")
    assert any(tmp_path.rglob("decode_row.cubin"))
    # Another architecture is compiled separately.
    assert mgk.warmup(*arguments, backward=False, arch=80, threads=1).kernels == result.kernels


@pytest.fixture
def fail_to_parse(monkeypatch, tmp_path):
    """Return a function that makes the parser fail, in a kernel or in a function that a kernel calls."""
    from triton.runtime.jit import JITFunction

    parse = JITFunction.parse
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit_cache, "_compiled", {})

    def fail(function, errors):
        def failing(self):
            if errors and self.__name__ == function:
                raise errors.pop()
            return parse(self)

        monkeypatch.setattr(JITFunction, "parse", failing)

    return fail


def decode_inputs(width):
    """Return the arguments of a call that decodes, of a width of no other test: Triton keeps kernels of a process."""
    _, key, value, shift = smgk_inputs(64)
    return ("smgk_attention", meta(2, 4, 1, width), key[..., :width], value[..., :width], shift[..., :width])


@pytest.mark.slow
@pytest.mark.parametrize(("function", "width"), [("decode_row", 48), ("walk_keys", 40)], ids=["kernel", "callee"])
def test_parser_errors_of_threads_are_retried(function, width, fail_to_parse):
    """Python up to 3.11 raises them at random if several threads parse: python/cpython#106905."""
    errors = [SystemError("AST constructor recursion depth mismatch (before=33, after=202)"), RecursionError()]
    fail_to_parse(function, errors)
    result = mgk.warmup(*decode_inputs(width), backward=False, arch=90, threads=2)
    assert result.kernels == ("decode_row", "decode_merge")
    assert not errors
    assert gc.isenabled()


@pytest.mark.slow
def test_kernels_compile_after_a_compilation_that_failed(fail_to_parse):
    fail_to_parse("decode_row", [ValueError("not a parser error")])
    with pytest.raises(ValueError, match="not a parser error"):
        mgk.warmup(*decode_inputs(56), backward=False, arch=90, threads=2)
    assert gc.isenabled()
    assert "decode_row" in mgk.warmup(*decode_inputs(24), backward=False, arch=90, threads=2).kernels


def test_fast_compilations_are_not_logged(caplog, monkeypatch):
    monkeypatch.setattr(jit_cache, "JITFunction", StubKernel)
    monkeypatch.setattr(jit_cache, "_compiled", {})
    spec = jit_cache.LaunchSpec(StubKernel(), (1, 1, 1), (16,), (), {"M": 2}, paths=(1, 2), maxnreg=128)
    launches = [(spec, (torch.zeros(4),), (0.5,))] * 2
    assert jit_cache.compile_kernels(launches, threads=1) == ["stub", "stub"]
    assert jit_cache.compile_kernels(launches) == []
    assert caplog.records == []
    options = {"grid": (1, 1, 1), "M": 2, "num_warps": 4, "num_stages": 1}
    assert spec.kernel.compilations == [options | {"PATH": 1, "maxnreg": 128}, options | {"PATH": 2}]


class StubKernel:
    __name__ = "stub"

    def __init__(self):
        self.compilations = []

    def warmup(self, *args, **options):
        self.compilations.append(options)
        return object()


@pytest.mark.parametrize("attribute", ["_active", "active"])
def test_driver_of_the_compilation_is_replaced(attribute, monkeypatch):
    """Triton 3.4 keeps its driver in `active`, later versions in `_active`."""
    monkeypatch.setattr(offline, "driver", SimpleNamespace(**{attribute: "default"}))
    with offline.compiling_for(90):
        assert vars(offline.driver)[attribute].get_current_device() == 90
    assert vars(offline.driver) == {attribute: "default"}
