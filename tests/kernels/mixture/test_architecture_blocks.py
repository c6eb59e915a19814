"""Block sizes by GPU architecture, and the settings that depend on it."""

import pytest
import torch

from mgk.kernels import architecture
from mgk.kernels.architecture import targeting
from mgk.kernels.linear import ops as linear_ops
from mgk.kernels.mixture import launch, launch_config
from mgk.kernels.mixture.architecture_blocks import blocks_of
from mgk.kernels.mixture.block_config import BlockKey
from mgk.kernels.mixture.block_sizes import select_block
from tests.kernels.mixture.test_block_sizes import block_cases

ARCHITECTURES = (80, 86, 89, 100, 103, 110, 120, "gfx942", "gfx1100")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("shifted", [True, False])
def test_blocks_of_an_architecture_fit_the_kernels(arch, shifted):
    for key, width, components, itemsize in block_cases(shifted):
        if key.tma and not architecture.has_tma(arch):
            continue
        at = (key, width, components)
        block = select_block(key, width, components, shifted, itemsize, arch)
        assert block.maxnreg is None, at
        assert launch_config.KEYS_PER_TILE % block.block_n == 0, at
        assert block.block_m % 16 == 0, at
        writers = [BlockKey("dq", tma=tma, hard=key.hard, capped=capped) for tma in (0, 1) for capped in (0, 1)]
        written = [select_block(w, width, components, shifted, itemsize, arch).block_m for w in writers]
        rows = (launch_config.ROWS_PER_TILE, *written)
        assert not block.tma_rows or (block.block_m >= 32 and not any(n % block.block_m for n in rows)), at
        assert not (block.operand_in_registers and not blocks_of(arch).operand_in_registers), at
        assert not block.component_gemm or key.pass_ in blocks_of(arch).component_gemm, at


def test_unknown_architectures_have_the_blocks_of_the_nearest_one():
    key = BlockKey("dkdv")
    assert select_block(key, 64, 2, True, 2, 87) == select_block(key, 64, 2, True, 2, 86)
    assert select_block(key, 64, 2, True, 2, 121) == select_block(key, 64, 2, True, 2, 120)
    assert select_block(key, 64, 2, True, 2, 90) != select_block(key, 64, 2, True, 2, 80)


def test_target_replaces_the_architecture_of_the_device(monkeypatch):
    x = torch.zeros(2, 2, 16, 16)
    assert architecture.architecture(x.device) == architecture.HOPPER
    assert not launch.supports_tma(x)  # the interpreter reads by pointer
    with targeting(100):
        assert architecture.architecture(x.device) == 100
        assert launch.supports_tma(x)
        assert not launch.supports_tma(x[:, :, :1].expand(2, 2, 16, 16))
    with targeting(89):
        assert not launch.supports_tma(x)
    assert architecture.compile_target() is None


def test_amd_gpus_have_no_tf32(monkeypatch):
    monkeypatch.setattr(launch, "tf32_allowed", lambda: True)
    monkeypatch.setattr(linear_ops, "tf32_allowed", lambda: True)
    x = torch.zeros(1)
    for target, precision in ((90, "tf32"), ("gfx942", "ieee")):
        with targeting(target):
            assert launch.precision_of(x) == precision
            assert linear_ops._precision(torch.float16, x.device) == precision


@pytest.mark.parametrize(("hip", "expected"), [(None, 89), ("7.0", "gfx942")])
def test_architecture_is_read_from_the_device(hip, expected, monkeypatch):
    architecture._architecture_of.cache_clear()
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    properties = type("Properties", (), {"gcnArchName": "gfx942:sramecc+:xnack-"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert architecture.architecture(torch.device("cuda:0")) == expected
    architecture._architecture_of.cache_clear()
