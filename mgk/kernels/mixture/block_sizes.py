"""Selection of the block sizes of a launch."""

import functools
from typing import NamedTuple

from mgk.kernels.architecture import HOPPER, Architecture
from mgk.kernels.mixture.architecture_blocks import blocks_of
from mgk.kernels.mixture.block_config import BlockConfig, BlockKey, BlockTables
from mgk.kernels.mixture.block_tables import MEASURED, WIDE

# Calls of at most this number of queries and keys have blocks of their own. For the backward pass of causal calls,
# which have half as many pairs, the limit is twice this number.
SHORT_LENGTH = 1024

# Above this padded head dimension, dkdv of independent keys is launched once for dk and once for dv (unless
# `per_component`): the M + 1 accumulators do not fit the registers. That takes one more GEMM and avoids spills.
SPLIT_WIDTH = 64

# The largest width with blocks for small calls; wider ones use the blocks of the other calls.
SMALL_WIDTH = 16


def _block_of_architecture(
    block: BlockConfig, key: BlockKey, width: int, shifted: bool, architecture: Architecture
) -> BlockConfig:
    """Replace a measured block by that of the GPU. Limits of registers are those of Hopper."""
    replacements = blocks_of(architecture)
    if replacements is None:
        return block
    block = block._replace(
        maxnreg=None, operand_in_registers=block.operand_in_registers and replacements.operand_in_registers,
        component_gemm=block.component_gemm and key.pass_ in replacements.component_gemm,
    )  # fmt: skip
    if key.small and width <= SMALL_WIDTH:
        return block
    table = (replacements.shifted if shifted else replacements.independent).get(key.pass_, {})
    tile = next((tile for limit, tile in table.items() if width <= limit), None)
    return block if tile is None else block._replace(**tile._asdict())


def _look_up(tables: BlockTables, key: BlockKey, width: int, components: int, shifted: bool) -> BlockConfig | None:
    choices = [tables.shifted] if shifted else [tables.independent]
    if shifted and components > 2:
        choices.insert(0, tables.shifted_many)
    blocks = (
        block
        for table in choices
        for candidate in key.fallbacks()
        for limit, block in table.get(candidate, {}).items()
        if width <= limit
    )
    return next(blocks, None)


@functools.cache
def select_block(
    key: BlockKey, width: int, components: int, shifted: bool, itemsize: int, architecture: Architecture = HOPPER
) -> BlockConfig:
    """Return the block sizes of a launch.

    Args:
        key: Properties of the launch.
        width: The larger of the padded head and value dimensions.
        components: Number of components M.
        shifted: Whether the components share their keys up to a shift.
        itemsize: Bytes per element of the query.
        architecture: The GPU.
    """
    if has_full_tiles(components, shifted, itemsize) and width > 128 and architecture in WIDE:
        block = _look_up(WIDE[architecture], key, width, components, shifted)
        if block is not None:
            return block
    return select_measured_block(key, width, components, shifted, itemsize, architecture)


def has_full_tiles(components: int, shifted: bool, itemsize: int) -> bool:
    """Return whether a call uses the blocks of the tables; others use smaller ones."""
    return itemsize <= 2 and (shifted or components <= 2)


def select_measured_block(
    key: BlockKey, width: int, components: int, shifted: bool, itemsize: int, architecture: Architecture = HOPPER
) -> BlockConfig:
    """Return the block sizes of a launch without the tables of wide heads. Arguments as for `select_block`."""
    block = _look_up(MEASURED, key, width, components, shifted)
    assert block is not None
    block = _block_of_architecture(block, key, width, shifted, architecture)
    if has_full_tiles(components, shifted, itemsize):
        return block
    # Wider elements or more GEMMs per tile: smaller tiles, to fit the registers and shared memory.
    narrow = width <= 64 or (width <= 128 and (shifted or itemsize == 2))
    block_m, block_n = min(block.block_m, 64 if narrow else 32), min(block.block_n, 32 if width <= 128 else 16)
    if itemsize > 2 and components > 2 and not shifted:
        block_n = 16
    return BlockConfig(block_m, block_n, max(block.num_warps, 4), min(block.num_stages, 2 if width <= 64 else 1))


class DecodeConfig(NamedTuple):
    """Block sizes of the decode kernel for a single query per head."""

    block_n: int  # keys of a block
    num_warps: int
    num_stages: int
    programs_per_sm: int


# For elements of 2 bytes, by the largest padded head dimension.
DECODE_CONFIGS = {
    32: DecodeConfig(128, 4, 4, 4),
    64: DecodeConfig(64, 4, 4, 4),
    128: DecodeConfig(32, 4, 4, 4),
    256: DecodeConfig(16, 4, 4, 4),
}
DECODE_BYTES = 72 << 10  # of keys and values in flight in one program


@functools.cache
def select_decode_config(width: int, tiles: int, itemsize: int) -> DecodeConfig:
    """Return the block sizes of a decode launch with this number of key and value tiles per pipeline stage."""
    config = next(config for limit, config in DECODE_CONFIGS.items() if width <= limit)
    stages = DECODE_BYTES // (config.block_n * width * tiles * itemsize)
    return config._replace(num_stages=max(1, min(config.num_stages, stages)))
