"""Blocks of widths above 128, which were chosen by compilation: results, and the code variants that only they use."""

import pytest
import torch

pytest.importorskip("triton")

from mgk.kernels.mixture import launch, launch_config
from mgk.kernels.mixture.block_config import BlockKey
from mgk.kernels.mixture.block_tables import WIDE
from tests.kernels.mixture.test_block_sizes import check_within
from tests.kernels.mixture.test_kernels import (  # noqa: F401
    BLOCKS,
    DTYPES,
    GPU,
    case,
    check,
    small_blocks,
)

pytestmark = [pytest.mark.gpu] if GPU else []

# More than one tile of every block along both axes, and no multiple of any.
SIZES = {"D": 256, "E": 256, "L": 133, "S": 141}
WIDE_CASES = {
    "smgk": {"causal": "top-left"},
    "smgk-cross": {"D": 200, "E": 160, "L": 70, "H": 2, "Hk": 1, "prior": (1, 1, 2, 141)},
    "smgk-hard": {"hard": True, "prior": False},
    "smgk-m4": {"M": 4, "L": 70},
    "smgk-unequal": {"L": 70, "S": 37, "scale_shape": (1, 1, 2, 1), "tau_shape": (1,)},
    "smgk-padding": {"L": 37, "padding": ((3, 120),)},
    "mgk": {"variant": "mgk", "causal": "bottom-right"},
    "mgk-hard": {"variant": "mgk", "hard": True, "prior": False, "causal": "top-left", "L": 70},
    "mgk-padding": {"variant": "mgk", "L": 37, "padding": ((3, 120),)},
}


@pytest.fixture
def wide_blocks(monkeypatch):
    """Select the blocks of 2-byte elements for every dtype."""

    def select(architecture):
        blocks = lambda key, width, M, shifted, *_: BLOCKS(key, width, M, shifted, 2, architecture)  # noqa: E731
        monkeypatch.setattr(launch, "_select_block", blocks)

    return select


@pytest.mark.parametrize("name", WIDE_CASES)
def test_two_times_rule_in_half_precision(name, wide_blocks, poisoned):
    wide_blocks(90)
    check(torch.float16, **SIZES | WIDE_CASES[name])


@pytest.mark.skipif(GPU, reason="fp32 does not fit the shared memory with these blocks")
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        (name, arch)
        for name in WIDE_CASES
        for arch in (90, 80, 100)
        if arch == 90 or name in ("smgk", "mgk", "mgk-hard")
    ],
)
def test_fast_and_fallback_paths(name, architecture, wide_blocks, monkeypatch, poisoned):
    """In fp32, which shows more digits: the paths of bf16, with large queries left to the fallback."""
    wide_blocks(architecture)
    monkeypatch.setattr(launch, "BOUNDED", DTYPES)
    leaves, options = case(**SIZES | WIDE_CASES[name])
    leaves["query"][:, :, 64:] *= 4
    # The component GEMM rounds gradients to bf16.
    check_within(torch.finfo(torch.bfloat16).eps if name == "smgk-m4" else 2e-4, leaves, options)


@pytest.mark.parametrize("architecture", sorted(WIDE))
def test_keys_per_block_divide_a_tile(architecture):
    for shifted, table in enumerate((WIDE[architecture].independent, WIDE[architecture].shifted)):
        for key in table:
            block = BLOCKS(key, 256, 2, bool(shifted), 2, architecture)
            assert launch_config.KEYS_PER_TILE % block.block_n == 0
            assert not block.split or BlockKey("dv") in table
