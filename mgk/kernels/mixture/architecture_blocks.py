"""Block sizes of GPUs other than Hopper.

They were chosen by the registers, spills and shared memory of the compiled kernels (`make compile-check`); nothing was
timed. The tables are for soft and hard assignment alike; code variants come from the measured tables.
"""

from __future__ import annotations

from typing import NamedTuple

from mgk.kernels.architecture import HOPPER, Architecture, has_tma, is_amd


class TileConfig(NamedTuple):
    """The fields of a `BlockConfig` that an architecture replaces."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    operand_in_registers: bool = False


# By pass and by the largest padded head dimension; passes and widths that are missing use the measured blocks.
TileTable = dict[str, dict[int, TileConfig]]


class ArchitectureBlocks(NamedTuple):
    """The replacements of one family of GPUs."""

    shifted: TileTable
    independent: TileTable
    operand_in_registers: bool = True  # False: left operands of GEMMs cannot be kept in registers
    component_gemm: tuple[str, ...] = ("fwd", "dq", "dkdv")  # passes that may sum over components by a GEMM


# mma.sync: sm_80 to sm_89 and sm_120. Accumulators and both operands take registers, and 99 KB of shared memory must be
# enough for all but sm_80. The blocks of Hopper take up to 7 KB of local memory per thread there.
MMA = ArchitectureBlocks(
    shifted={
        "fwd": {
            32: TileConfig(64, 64, 4, 3, True),
            64: TileConfig(64, 64, 4, 3),
            128: TileConfig(64, 64, 4, 3),
            256: TileConfig(64, 32, 8, 2),
        },
        "dq": {
            32: TileConfig(64, 64, 4, 2, True),
            64: TileConfig(64, 64, 4, 2, True),
            128: TileConfig(64, 64, 8, 2),
            256: TileConfig(64, 32, 8, 1),
        },
        "dkdv": {
            32: TileConfig(64, 64, 4, 2),
            64: TileConfig(32, 64, 4, 2),
            128: TileConfig(64, 64, 8, 2),
            256: TileConfig(32, 32, 8, 2),
        },
    },
    independent={
        "fwd": {
            32: TileConfig(64, 64, 4, 3, True),
            64: TileConfig(64, 64, 4, 3, True),
            128: TileConfig(64, 32, 4, 2, True),
            256: TileConfig(64, 16, 8, 1),
        },
        "dq": {
            32: TileConfig(64, 64, 4, 2, True),
            64: TileConfig(64, 32, 4, 2),
            128: TileConfig(64, 32, 8, 2),
            256: TileConfig(64, 16, 8, 1),
        },
        "dkdv": {
            32: TileConfig(64, 64, 4, 2),
            64: TileConfig(32, 64, 8, 2),
            128: TileConfig(32, 64, 8, 2),
            256: TileConfig(16, 32, 8, 1),
        },
        "dv": {
            128: TileConfig(64, 64, 8, 2),
            256: TileConfig(32, 32, 8, 1),
        },
    },
)

# sm_120 has TMA, whose descriptors take more registers: the blocks above spill 184 bytes in dq.
MMA_WITH_TMA = MMA._replace(shifted={**MMA.shifted, "dq": {**MMA.shifted["dq"], 64: TileConfig(64, 32, 4, 2)}})

# tcgen05: sm_100 to sm_110. Accumulators and some operands are in tensor memory; the identity GEMM that keeps an
# operand in registers does not compile. Eight warps read a tile of 64 rows without spills.
TENSOR_MEMORY = ArchitectureBlocks(
    shifted={
        "dq": {
            32: TileConfig(64, 64, 4, 3),
            64: TileConfig(64, 64, 8, 2),
            128: TileConfig(64, 64, 8, 2),
        },
        "dkdv": {
            64: TileConfig(64, 64, 4, 3),
            128: TileConfig(64, 64, 4, 2),
        },
    },
    independent={
        "fwd": {
            64: TileConfig(64, 64, 4, 3),
            128: TileConfig(64, 64, 4, 2),
        },
        "dq": {
            64: TileConfig(64, 64, 8, 2),
            128: TileConfig(64, 64, 8, 2),
        },
        "dkdv": {
            64: TileConfig(64, 64, 8, 2),
            128: TileConfig(64, 64, 8, 2),
        },
    },
    operand_in_registers=False,
    # Triton 3.7 fails on the sums of d log pi from an accumulator of the component GEMM.
    component_gemm=("fwd", "dq"),
)

# CDNA: waves of 64 threads with 512 registers each, 64 KB of LDS.
CDNA = ArchitectureBlocks(
    shifted={
        "fwd": {
            64: TileConfig(64, 64, 4, 1),
            128: TileConfig(64, 32, 4, 1),
            256: TileConfig(64, 16, 8, 1),
        },
        "dq": {
            64: TileConfig(64, 64, 4, 1),
            128: TileConfig(64, 32, 8, 1),
            256: TileConfig(32, 16, 8, 1),
        },
        "dkdv": {
            64: TileConfig(32, 64, 4, 1),
            128: TileConfig(32, 64, 8, 1),
            256: TileConfig(16, 32, 8, 1),
        },
        "onepass": {
            32: TileConfig(32, 64, 4, 1),
        },
    },
    independent={
        "fwd": {
            64: TileConfig(64, 64, 4, 1),
            128: TileConfig(64, 32, 4, 1),
            256: TileConfig(32, 16, 8, 1),
        },
        "dq": {
            64: TileConfig(64, 32, 4, 1),
            128: TileConfig(64, 32, 8, 1),
            256: TileConfig(32, 16, 8, 1),
        },
        "dkdv": {
            64: TileConfig(32, 64, 8, 1),
            128: TileConfig(32, 32, 8, 1),
            256: TileConfig(16, 16, 8, 1),
        },
        "dv": {
            128: TileConfig(32, 64, 8, 1),
            256: TileConfig(16, 32, 8, 1),
        },
    },
    operand_in_registers=False,
)


def blocks_of(architecture: Architecture) -> ArchitectureBlocks | None:
    """Return the replacements of an architecture; None for Hopper, whose blocks were measured."""
    if is_amd(architecture):
        return CDNA
    assert isinstance(architecture, int)
    if architecture == HOPPER:
        return None
    if 100 <= architecture < 120:
        return TENSOR_MEMORY
    return MMA_WITH_TMA if has_tma(architecture) else MMA
