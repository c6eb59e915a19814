"""GPUs on which "auto" does not run the Triton kernels: "triton" raises, or runs them where they only are untested."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mgk
from mgk._core.calls import mixture_call
from mgk.backends import select_backend, triton

pytestmark = pytest.mark.skipif(triton.NO_TRITON is not None, reason=str(triton.NO_TRITON))

SM_75 = "the kernels require compute capability 8.0, and the GPU has 7.5"
SM_100 = "the mixture kernels require Triton 3.7 on GPUs of compute capability 10.0"
ROCM = "the kernels compile for ROCm and have not run there (backend='triton' runs them)"


@pytest.fixture
def old_triton(monkeypatch):
    monkeypatch.setattr(triton, "TRITON_VERSION", (3, 6))


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that sets the compute capabilities of the GPUs, by index."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton, "_capabilities", {})
    reads = []

    def set_capabilities(*capabilities):
        def read(index):
            reads.append(index)
            return capabilities[index]

        monkeypatch.setattr(torch.cuda, "get_device_capability", read)
        return reads

    return set_capabilities


def tensors(operator, index=0):
    device, dtype = f"cuda:{index}", torch.bfloat16
    query, value = (torch.empty(1, 2, 32, 16, device=device, dtype=dtype) for _ in range(2))
    if operator[0] == "s":
        return query, value, value, torch.empty(2, 2, 16, device=device)
    return query, torch.empty(1, 2, 2, 32, 16, device=device, dtype=dtype), value


@pytest.mark.parametrize("operator", ["mgk_attention", "smgk_attention"])
@pytest.mark.parametrize(
    "capability, version, reason",
    [
        ((10, 0), (3, 6), SM_100),
        ((10, 3), (3, 6), SM_100[:-1] + "3"),
        ((10, 0), (3, 7), None),
        ((11, 0), (99,), None),
        ((12, 0), (3, 4), None),
        ((8, 0), (3, 4), None),
        ((9, 0), (3, 4), None),
        ((7, 5), (3, 7), SM_75),
    ],
)
def test_mixture_kernels_are_refused_by_capability(gpus, operator, capability, version, reason, monkeypatch):
    monkeypatch.setattr(triton, "TRITON_VERSION", version)
    gpus(capability)
    with FakeTensorMode():
        inputs = tensors(operator)
        choice = mgk.explain_backend(operator, *inputs)
        assert choice.reasons.get("triton") == reason
        assert choice.backend == ("eager" if reason else "triton")
        if reason:
            with pytest.raises(ValueError, match=f"'triton' does not support this call: {reason}. Use 'auto'"):
                getattr(mgk, operator)(*inputs, backend="triton")


def test_softmax_attention_with_padding_runs_on_sdpa_if_the_kernels_are_refused(gpus, old_triton):
    with FakeTensorMode():
        query, keys, value = (torch.empty(n, device="cuda:0") for n in ((1, 2, 9, 4), (1, 2, 1, 9, 4), (1, 2, 9, 4)))
        mask = torch.ones(1, 1, 1, 9, dtype=torch.bool, device=query.device)
        call = {"attn_mask": mask, "similarity": "dot"}
        gpus((9, 0))
        assert mgk.explain_backend("mgk_attention", query, keys, value, **call).backend == "triton"
        triton._capabilities.clear()
        gpus((10, 0))
        assert mgk.explain_backend("mgk_attention", query, keys, value, **call).backend == "plain"


@pytest.mark.parametrize("operator", ["mgk_attention", "smgk_attention", "mlk_attention", "smlk_attention"])
def test_auto_does_not_run_the_kernels_on_rocm(gpus, operator, monkeypatch):
    reads = gpus((9, 4))
    monkeypatch.setattr(torch.version, "hip", "7.2.0")
    with FakeTensorMode():
        choice = mgk.explain_backend(operator, *tensors(operator))
        assert choice.reasons["triton"] == ROCM
        assert choice.backend in ("eager", "chunked")
        assert mgk.explain_backend(operator, *tensors(operator), backend="triton").backend == "triton"
    assert reads == []


def test_helpers_of_auto_do_not_run_the_kernels_on_rocm(gpus, monkeypatch):
    """EM counts and masks of caches select the kernels outside of the table of backends."""
    gpus((9, 4))
    with FakeTensorMode():
        query, key, value, shift = tensors("smgk_attention")
        call = mixture_call(query, key, value, shift=shift, shifted=True)
        assert triton.can_auto_run_mixture(call)
        monkeypatch.setattr(torch.version, "hip", "7.2.0")
        assert not triton.can_auto_run_mixture(call)
        assert triton.mixture_unsupported_reason(call) is None


def test_kernels_of_linear_attention_run_on_every_nvidia_gpu(gpus, old_triton):
    gpus((10, 0))
    with FakeTensorMode():
        assert mgk.explain_backend("smlk_attention", *tensors("smlk_attention")).backend == "triton"


def test_capability_is_read_once_per_gpu(gpus, old_triton):
    reads = gpus((9, 0), (10, 0))
    with FakeTensorMode():
        for index, name in ((0, "triton"), (1, "eager"), (1, "eager"), (0, "triton")):
            assert mgk.explain_backend("smgk_attention", *tensors("smgk_attention", index)).backend == name
    assert reads == [0, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fake_tensors_need_no_gpu(monkeypatch):
    monkeypatch.setattr(triton, "_capabilities", {})
    with FakeTensorMode():
        assert mgk.explain_backend("smgk_attention", *tensors("smgk_attention")).backend == "triton"


@pytest.mark.parametrize("capability, backend", [((9, 0), "triton"), ((10, 0), "eager")], ids=str)
def test_selection_compiles_without_graph_breaks(gpus, capability, backend, old_triton):
    """The capability is a constant of the graph: fullgraph=True raises at a graph break, warnings are errors."""
    gpus(capability)

    def select(query, key, value, shift):
        call = mixture_call(query, key, value, shift=shift, shifted=True)
        return query * 2, select_backend(call)[0].name

    torch.compiler.reset()
    with FakeTensorMode(), torch.no_grad():
        _, name = torch.compile(select, backend="eager", fullgraph=True)(*tensors("smgk_attention"))
    assert name == backend
