"""Dtypes of the rotary embedding, and its table in compiled code."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from mgk import Rotary, rotary


def rotated(x, positions, base=10000.0):
    """Return the rotation of x in fp64, computed with complex numbers."""
    pairs = x.shape[-1] // 2
    angles = positions.double()[:, None] * base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    numbers = torch.complex(x[..., :pairs].double(), x[..., pairs:].double())
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([numbers.real, numbers.imag], -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_angles_of_distant_positions_are_accurate_in_every_dtype(dtype):
    """In bf16 position 3001 would be rounded to 3008, and in fp32 the angles of fp64 inputs have an error of 1e-4."""
    x, positions = torch.randn(1, 2, 3, 8).to(dtype), torch.tensor([1, 1000, 3001])
    out = Rotary(8)(x, positions)
    assert out.dtype == dtype
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    error = (out.double() - rotated(x, positions)).abs().max()
    assert error <= 8 * torch.finfo(dtype).eps + 3001 * eps * 4


@pytest.mark.parametrize("shape", [[15], [3, 5]], ids=["shared", "per sequence"])
def test_compiled_code_reads_the_rotations_of_large_tensors_from_a_table(shape, monkeypatch):
    """The table is one operator, which the compiler does not fuse; outputs and gradients do not change."""
    counts = []

    def backend(graph, inputs):
        counts.append(sum(node.target is torch.ops.mgk.rotation_table.default for node in graph.graph.nodes))
        return graph.forward

    positions = torch.arange(15).view(shape)[..., :5]
    embed = Rotary(8)
    compiled = torch.compile(lambda x: embed(x, positions), backend=backend, fullgraph=True)
    monkeypatch.setattr(rotary, "TABLE_DEVICES", {"cpu"})
    monkeypatch.setattr(rotary, "MIN_ELEMENTS_FOR_TABLE", 200)
    for heads, calls in [(1, 0), (2, 1)]:
        x = torch.randn(3, heads, 5, 8, requires_grad=True)
        probe = torch.randn_like(x)
        expected = embed(x, positions)
        output = compiled(x)
        torch.testing.assert_close(output, expected)
        gradients = (torch.autograd.grad(y, x, probe)[0] for y in (output, expected))
        torch.testing.assert_close(*gradients)
        assert counts.pop() == calls


def test_exported_and_uncompiled_code_has_no_table(monkeypatch):
    monkeypatch.setattr(rotary, "TABLE_DEVICES", {"cpu"})
    monkeypatch.setattr(rotary, "MIN_ELEMENTS_FOR_TABLE", 1)
    x, positions = torch.randn(1, 2, 5, 8), torch.arange(5)
    assert not rotary.uses_table(x)
    exported = torch.export.export(Rotary(8), (x, positions), strict=False)
    assert not [node for node in exported.graph.nodes if "mgk" in str(node.target)]
    torch.testing.assert_close(exported.module()(x, positions), Rotary(8)(x, positions))


def test_the_operator_of_the_table_is_registered_correctly():
    torch.library.opcheck(rotary.rotation_table, (torch.arange(5), 4, 10000.0, torch.float32))


@pytest.mark.gpu
def test_compiled_rotation_on_a_gpu_computes_no_angles():
    """The kernel that rotates a large tensor has no powers, cosines and sines."""
    embed, positions = Rotary(64), torch.arange(1024, device="cuda")
    x = torch.randn(64, 1, 1024, 64, device="cuda", dtype=torch.bfloat16)
    _, code = run_and_get_code(torch.compile(embed), x, positions)
    assert "mgk.rotation_table" in "".join(code)
    assert not re.search(r"libdevice\.(pow|cos|sin)|tl_math\.(cos|sin)", "".join(code))
