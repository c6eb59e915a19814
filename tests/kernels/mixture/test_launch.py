"""Chunked inference: less workspace and, without a component GEMM, the same bits as one launch."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from mgk._core.calls import MixtureCall
from mgk.backends import triton
from mgk.kernels.mixture import launch, launch_config
from mgk.kernels.mixture.block_config import BlockConfig

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []

CASES = {
    "heads": {"B": 1, "H": 4, "Hk": 4},
    "groups, three heads of four": {"B": 2, "H": 8, "Hk": 4, "chunk_heads": 3, "causal": "top-left"},
    "entries of the batch": {"B": 3, "H": 2, "Hk": 2, "chunk_heads": 4, "padding": True},
    "independent keys": {"B": 2, "H": 2, "Hk": 2, "shifted": False, "mask": (2, 2, 40, 40)},
    "a scale per head": {"B": 1, "H": 2, "Hk": 2, "scales": True, "padding": True},
}


def make(B, H, Hk, shifted=True, mask=None, padding=False, scales=False, causal=None, n=40, D=16, M=2):
    g = torch.Generator(device="cpu").manual_seed(0)

    def randn(*shape, dtype=torch.float16):
        return torch.randn(*shape, generator=g).to(DEVICE, dtype)

    attn_mask = None if mask is None else randn(*mask, dtype=torch.float32)
    if padding:
        attn_mask = (torch.arange(n) < torch.arange(n, n - 6 * B, -6)[:, None]).view(B, 1, 1, n).to(DEVICE)
    return MixtureCall(
        query=randn(B, H, n, D),
        keys=randn(B, Hk, n, D) if shifted else randn(B, Hk, M, n, D),
        value=randn(B, Hk, n, D),
        shift=randn(Hk, M, D, dtype=torch.float32) if shifted else None,
        attn_mask=attn_mask,
        causal=causal,
        dropout_p=0.0,
        scale=torch.linspace(0.2, 0.4, Hk, device=DEVICE).view(1, Hk, 1, 1) if scales else 0.25,
        log_prior=torch.log_softmax(randn(1, Hk, M, 1, dtype=torch.float32), 2),
        tau=torch.linspace(0.5, 1.0, Hk, device=DEVICE) if scales else 1.0,
        hard=False,
        packed=None,
        return_weights=False,
        return_lse=True,
    )


@pytest.mark.parametrize("name", CASES)
def test_chunks_give_the_same_bits(name, monkeypatch):
    options = dict(CASES[name])
    chunk_heads = options.pop("chunk_heads", 1)
    call = make(**options)
    want = triton.run_mixture(call)
    tiles = []

    forward_into = launch.forward_into

    def into(out, lse, prepared, *args):
        tiles.append(prepared.shape[1] * prepared.shape[3] // launch_config.KEYS_PER_TILE)
        assert args[-1] is True, "a chunk has no operand for the component GEMM"
        forward_into(out, lse, prepared, *args)

    monkeypatch.setattr(launch, "key_heads_per_chunk", lambda *_: chunk_heads)
    monkeypatch.setattr(launch, "forward_into", into)
    got = triton.run_mixture(call)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert len(tiles) > 1
    assert sum(tiles) == options["B"] * options["Hk"]
    assert max(tiles) <= chunk_heads


def test_unused_lse_is_not_allocated(monkeypatch):
    """Without gradients and return_lse, the kernels get None."""
    call = make(1, 2, 2)
    want = triton.run_mixture(call)[0]
    lses = []

    forward_into = launch.forward_into

    def into(out, lse, *args):
        lses.append(lse)
        forward_into(out, lse, *args)

    monkeypatch.setattr(launch, "forward_into", into)
    got, lse, _ = triton.run_mixture(dataclasses.replace(call, return_lse=False))
    assert torch.equal(got, want)
    assert lse is None
    assert lses == [None]


@pytest.mark.parametrize(("length", "hard", "no_component_gemm", "components", "expected"), [
    (2048, False, False, 2, True), (2048, False, False, 1, False), (2048, False, True, 2, False),
    (2048, True, False, 2, False), (1024, False, False, 2, False),
])  # fmt: skip
def test_component_gemm_operand_is_allocated(length, hard, no_component_gemm, components, expected):
    """For two soft components at width 64, but not for chunks and short sequences."""
    call = make(1, 2, 2, D=64, M=components)
    tensors = (call.query, call.keys, call.value, call.shift, *(None,) * 7, call.query)
    flags = launch_config.LaunchFlags(
        0, hard, False, length, length, 1, False, True, "ieee", launch.select_block, no_component_gemm
    )
    config = launch_config.forward_config(launch_config.layouts(*tensors), flags, False, True)
    assert (config.operand_keys > 0) == expected


def test_chunks_are_large():
    """The workspace is as large as lse, unless chunks would be too small for the GPU."""
    count, block = launch.key_heads_per_chunk, BlockConfig(64, 64, 4, 3, operand_in_registers=True)
    assert count(1, 4, 4, 1 << 17, 1 << 17, 2, block) == 1
    assert count(1, 4, 4, 1 << 17, 1 << 17, 1, block) == 2
    assert count(2, 8, 4, 1 << 16, 1 << 16, 2, block) == 4
    # Chunks would have 512 programs, take less than a millisecond or have few rows.
    assert count(1, 4, 4, 1 << 15, 1 << 15, 2, block) == 4
    assert count(32, 4, 4, 4096, 4096, 2, block) == 128
    assert count(1, 4, 4, 128, 1 << 17, 2, block) == 4
