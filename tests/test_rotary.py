"""Dtypes of the rotary embedding."""

import pytest
import torch

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
    monkeypatch.setattr(rotary, "uses_table", lambda x: torch.compiler.is_compiling() and x.numel() > 200)
    for heads, calls in [(1, 0), (2, 1)]:
        x = torch.randn(3, heads, 5, 8, requires_grad=True)
        probe = torch.randn_like(x)
        expected = embed(x, positions)
        output = compiled(x)
        torch.testing.assert_close(output, expected)
        gradients = (torch.autograd.grad(y, x, probe)[0] for y in (output, expected))
        torch.testing.assert_close(*gradients)
        assert counts.pop() == calls


def test_tables_are_for_compiled_code_on_a_gpu():
    assert not rotary.uses_table(torch.empty(rotary.MIN_ELEMENTS_FOR_TABLE, device="meta"))
    torch.library.opcheck(rotary.rotation_table, (torch.arange(5), 4, 10000.0, torch.float32))
