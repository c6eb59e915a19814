"""The kernels compile for GPUs that are not present and fit their resources, which the interpreter does not check."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("triton")

PATH = Path(__file__).parents[2] / "benchmarks" / "compiled.py"


@pytest.fixture(scope="module")
def compiled():
    spec = importlib.util.spec_from_file_location("compiled", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, call",
    [
        (90, ("smgk", "bf16", 64, 2, "causal")),
        (90, ("mgk-hard", "bf16", 128, 2, "plain")),
        (90, ("smgk", "bf16", 16, 4, "small")),
        (86, ("mgk", "fp16", 64, 2, "mask")),
        (86, ("smgk-hard", "fp32", 64, 2, "packed")),
        (86, ("smgk", "bf16", 256, 2, "plain")),
        (86, ("smlk", "bf16", 64, 2, "plain")),
        (86, ("mlk", "bf16", 64, 2, "causal")),
        (80, ("mgk", "bf16", 64, 4, "one query")),
        (90, ("smgk", "bf16", 128, 2, "shared keys")),
    ],
    ids=lambda x: "-".join(map(str, x)).replace(" ", "-") if isinstance(x, tuple) else f"sm_{x}",
)
def test_kernels_fit_the_gpu(compiled, arch, call):
    kernels = compiled.kernels(compiled.Call(*call), arch)
    assert kernels
    assert {kernel.name: kernel.misfit(arch) for kernel in kernels if kernel.misfit(arch)} == {}


def test_kernel_that_does_not_fit_reports_the_reason(compiled):
    assert "232449 bytes" in compiled.Kernel("some", 255, 0, 232_449).misfit(90)
    assert compiled.Kernel("some", 255, 0, 232_448).misfit(90) == ""
    assert compiled.Kernel("some", failure="no such register").misfit(90) == "no such register"
