"""Block sizes of the mixture kernels, measured on an H200 in bf16 (benchmarks/block_sizes.py, docs/kernels-log.md)."""

import functools
from typing import Literal, NamedTuple

from mgk.kernels.architecture import HOPPER, Architecture
from mgk.kernels.mixture.architecture_blocks import blocks_of

# The forward pass; dq; dk and dv, or dk alone; dv alone; all gradients (`bwd_onepass`).
Pass = Literal["fwd", "dq", "dkdv", "dv", "onepass"]

# Above this padded head dimension, dkdv of independent keys is launched once for dk and once for dv (unless
# `per_component`): the M + 1 accumulators do not fit the registers. That takes one more GEMM and avoids spills.
SPLIT_WIDTH = 64


class BlockConfig(NamedTuple):
    """Block sizes and code variants of one launch."""

    block_m: int  # rows (queries) of a tile
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # registers per thread; None: chosen by the compiler
    operand_in_registers: bool = False  # left GEMM operands that the loop does not change stay in registers
    component_gemm: bool = False  # soft shifted keys, M <= 5: the sums over components are GEMMs (backward: bf16 only)
    per_component: bool = False  # dkdv of soft independent keys: one loop per component, dk and dv together
    split: bool = False  # dkdv of shifted keys, or with per_component: dk and dv in separate launches
    tma_rows: bool = False  # dkdv with tma: TMA reads the row vectors too; below 128 rows other copies are element-wise


class BlockKey(NamedTuple):
    """Properties of a launch by which its block sizes are looked up."""

    pass_: Pass
    small: bool = False  # one launch per pass, with pointers instead of TMA descriptors
    tma: bool = False  # TMA reads the tensors along which the kernel loops
    hard: bool = False
    capped: bool = False  # FAST path without masks, dropout and several scales: `maxnreg` may limit its registers
    no_component_gemm: bool = False

    def fallbacks(self) -> tuple["BlockKey", ...]:
        """Return the keys to look up, in order; the first one that a table has is used."""
        general = self._replace(small=False, tma=False)
        if not self.capped:
            return self, general, general._replace(hard=False, no_component_gemm=False)
        # A register limit measured for soft assignment does not hold for hard assignment.
        capped = (self, general, general._replace(no_component_gemm=False))
        return capped + self._replace(capped=False).fallbacks()


# Configurations by the largest padded head dimension that they are used for.
BlockTable = dict[BlockKey, dict[int, BlockConfig]]

SHIFTED: BlockTable = {
    BlockKey("fwd"): {
        32: BlockConfig(64, 128, 4, 3, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 3, operand_in_registers=True, component_gemm=True),
        128: BlockConfig(64, 64, 4, 3, operand_in_registers=True),
        256: BlockConfig(64, 32, 4, 2),
    },
    # Chunked inference keeps no workspace for the component GEMM.
    BlockKey("fwd", no_component_gemm=True): {
        32: BlockConfig(64, 128, 4, 3, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 3, operand_in_registers=True),
    },
    BlockKey("fwd", capped=True, no_component_gemm=True): {
        32: BlockConfig(64, 128, 4, 3, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 3, maxnreg=128, operand_in_registers=True),
    },
    BlockKey("fwd", hard=True, capped=True): {
        32: BlockConfig(64, 128, 4, 3, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 3, maxnreg=128, operand_in_registers=True),
    },
    BlockKey("dq"): {
        32: BlockConfig(64, 128, 4, 3, operand_in_registers=True),
        64: BlockConfig(64, 128, 4, 2, operand_in_registers=True),
        128: BlockConfig(64, 64, 4, 2),
        256: BlockConfig(64, 32, 8, 1),
    },
    BlockKey("dq", hard=True): {
        32: BlockConfig(64, 128, 4, 3, operand_in_registers=True),
        64: BlockConfig(64, 128, 4, 2, operand_in_registers=True),
        128: BlockConfig(64, 64, 4, 2, operand_in_registers=True),
        256: BlockConfig(64, 32, 8, 1),
    },
    BlockKey("dq", tma=True, capped=True): {
        32: BlockConfig(64, 64, 4, 3, maxnreg=128, operand_in_registers=True),
    },
    # More stages than fit the shared memory of GPUs without TMA.
    BlockKey("dq", tma=True): {
        64: BlockConfig(64, 128, 4, 3, operand_in_registers=True),
        128: BlockConfig(64, 64, 4, 2),
        256: BlockConfig(64, 32, 8, 2),
    },
    BlockKey("dq", tma=True, hard=True): {
        64: BlockConfig(64, 128, 4, 3, operand_in_registers=True),
        128: BlockConfig(64, 64, 4, 2, operand_in_registers=True),
        256: BlockConfig(64, 32, 8, 2),
    },
    BlockKey("dkdv"): {
        32: BlockConfig(128, 64, 4, 3),
        64: BlockConfig(128, 64, 4, 2),
        128: BlockConfig(32, 64, 4, 2),
        256: BlockConfig(32, 32, 8, 2),
    },
    BlockKey("dkdv", hard=True): {
        32: BlockConfig(128, 64, 4, 3),
        64: BlockConfig(64, 64, 4, 2),
        128: BlockConfig(32, 64, 4, 2),
        256: BlockConfig(32, 32, 8, 2),
    },
    BlockKey("dkdv", tma=True): {
        32: BlockConfig(128, 64, 4, 3),
        64: BlockConfig(64, 64, 4, 3, tma_rows=True),
        128: BlockConfig(64, 64, 4, 2, tma_rows=True),
        256: BlockConfig(32, 64, 8, 2),
    },
    BlockKey("dkdv", tma=True, hard=True): {
        32: BlockConfig(128, 64, 4, 3),
        64: BlockConfig(64, 64, 4, 3, tma_rows=True),
        128: BlockConfig(64, 64, 4, 2, tma_rows=True),
        256: BlockConfig(32, 64, 8, 2),
    },
    # The best block of a prototype. With tma_rows, the kernel spills 48 bytes and takes a sixth more instructions.
    BlockKey("onepass"): {
        32: BlockConfig(64, 64, 4, 3),
    },
    BlockKey("fwd", small=True): {
        16: BlockConfig(32, 64, 2, 2),
    },
    BlockKey("dq", small=True): {
        16: BlockConfig(32, 32, 1, 2, operand_in_registers=True),
    },
    BlockKey("dq", small=True, hard=True): {
        16: BlockConfig(32, 32, 1, 2, operand_in_registers=True),
    },
    BlockKey("dkdv", small=True): {
        16: BlockConfig(32, 32, 1, 2, operand_in_registers=True),
    },
    BlockKey("dkdv", small=True, hard=True): {
        16: BlockConfig(32, 32, 1, 2, operand_in_registers=True),
    },
}
# More than two components: the configurations above would not fit the registers.
SHIFTED_MANY: BlockTable = {
    BlockKey("fwd"): {
        32: BlockConfig(64, 64, 4, 3, operand_in_registers=True, component_gemm=True),
        64: BlockConfig(64, 64, 4, 3, operand_in_registers=True, component_gemm=True),
        128: BlockConfig(64, 64, 4, 3, operand_in_registers=True, component_gemm=True),
        256: BlockConfig(64, 32, 4, 2),
    },
    BlockKey("dq", capped=True): {
        32: BlockConfig(64, 64, 4, 3, maxnreg=168, operand_in_registers=True, component_gemm=True),
    },
    BlockKey("dq", hard=True, capped=True): {
        32: BlockConfig(64, 64, 4, 3, maxnreg=168, operand_in_registers=True, component_gemm=True),
    },
    BlockKey("dq"): {
        32: BlockConfig(64, 64, 4, 3, operand_in_registers=True, component_gemm=True),
        64: BlockConfig(64, 64, 4, 3, operand_in_registers=True, component_gemm=True),
        128: BlockConfig(64, 64, 4, 2, component_gemm=True),
        256: BlockConfig(64, 32, 8, 1),
    },
    BlockKey("dkdv", tma=True): {
        16: BlockConfig(128, 64, 4, 3),
        32: BlockConfig(64, 64, 4, 3, component_gemm=True, tma_rows=True),
        64: BlockConfig(64, 64, 4, 3, component_gemm=True, tma_rows=True),
        128: BlockConfig(32, 64, 4, 2, component_gemm=True, tma_rows=True),
    },
    # Compiled only: blocks of 64 queries spill 88 to 216 bytes.
    BlockKey("onepass"): {
        32: BlockConfig(32, 64, 4, 3),
    },
    BlockKey("dq", small=True): {
        16: BlockConfig(32, 32, 1, 2, operand_in_registers=True),
    },
    BlockKey("dkdv", small=True): {
        16: BlockConfig(32, 32, 1, 2, operand_in_registers=True),
    },
    BlockKey("dkdv", small=True, hard=True): {
        16: BlockConfig(128, 64, 4, 3),
    },
}
INDEPENDENT: BlockTable = {
    BlockKey("fwd"): {
        32: BlockConfig(64, 64, 4, 3, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 3, operand_in_registers=True),
        128: BlockConfig(64, 64, 4, 2, operand_in_registers=True),
        256: BlockConfig(64, 32, 4, 1),
    },
    BlockKey("fwd", capped=True): {
        32: BlockConfig(64, 64, 4, 3, maxnreg=128, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 3, maxnreg=152, operand_in_registers=True),
        128: BlockConfig(64, 32, 4, 3, maxnreg=168, operand_in_registers=True),
    },
    BlockKey("fwd", hard=True, capped=True): {
        32: BlockConfig(64, 64, 4, 3, maxnreg=128, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 3, operand_in_registers=True),
        128: BlockConfig(64, 32, 4, 3, maxnreg=168, operand_in_registers=True),
    },
    BlockKey("dq"): {
        32: BlockConfig(64, 128, 4, 2, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 2),
        128: BlockConfig(64, 32, 4, 2, operand_in_registers=True),
        256: BlockConfig(64, 16, 4, 1),
    },
    BlockKey("dq", hard=True): {
        32: BlockConfig(64, 64, 4, 3, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 2, operand_in_registers=True),
        128: BlockConfig(64, 32, 4, 2, operand_in_registers=True),
        256: BlockConfig(64, 16, 4, 1),
    },
    BlockKey("dq", tma=True, capped=True): {
        32: BlockConfig(64, 64, 4, 3, maxnreg=168, operand_in_registers=True),
    },
    BlockKey("dq", tma=True, hard=True, capped=True): {
        32: BlockConfig(64, 64, 4, 3, maxnreg=168, operand_in_registers=True),
    },
    BlockKey("dq", tma=True): {
        32: BlockConfig(64, 128, 4, 2, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 3, operand_in_registers=True),
        128: BlockConfig(64, 64, 4, 2, operand_in_registers=True),
        256: BlockConfig(64, 16, 4, 1),
    },
    BlockKey("dq", tma=True, hard=True): {
        64: BlockConfig(64, 64, 4, 3, operand_in_registers=True),
        128: BlockConfig(64, 64, 4, 2, operand_in_registers=True),
        256: BlockConfig(64, 16, 4, 1),
    },
    BlockKey("dkdv"): {
        32: BlockConfig(64, 64, 4, 2, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 2),
        128: BlockConfig(32, 64, 4, 2),
        256: BlockConfig(16, 32, 8, 1),
    },
    BlockKey("dkdv", hard=True): {
        32: BlockConfig(64, 64, 4, 2, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 2),
        128: BlockConfig(32, 64, 4, 2),
        256: BlockConfig(16, 32, 8, 1),
    },
    BlockKey("dv"): {
        128: BlockConfig(64, 64, 4, 2, operand_in_registers=True),
        256: BlockConfig(32, 32, 8, 1),
    },
    BlockKey("dkdv", tma=True): {
        16: BlockConfig(64, 64, 4, 2, operand_in_registers=True),
        32: BlockConfig(64, 64, 4, 3, operand_in_registers=True, tma_rows=True),
        64: BlockConfig(64, 64, 4, 4, tma_rows=True),
        128: BlockConfig(64, 64, 4, 2, per_component=True, tma_rows=True),
    },
    BlockKey("dkdv", tma=True, hard=True): {
        16: BlockConfig(64, 64, 4, 2, operand_in_registers=True),
        32: BlockConfig(64, 64, 4, 3, operand_in_registers=True, tma_rows=True),
        64: BlockConfig(64, 64, 4, 3, tma_rows=True),
        128: BlockConfig(32, 64, 4, 3, tma_rows=True),
    },
    BlockKey("dv", tma=True, hard=True): {
        128: BlockConfig(64, 64, 4, 3, operand_in_registers=True, tma_rows=True),
    },
    BlockKey("fwd", small=True): {
        16: BlockConfig(32, 32, 2, 2),
    },
    BlockKey("dq", small=True): {
        16: BlockConfig(32, 32, 1, 2, operand_in_registers=True),
    },
    BlockKey("dq", small=True, hard=True): {
        16: BlockConfig(32, 32, 1, 2, operand_in_registers=True),
    },
    BlockKey("dkdv", small=True): {
        16: BlockConfig(32, 32, 1, 2, operand_in_registers=True),
    },
    BlockKey("dkdv", small=True, hard=True): {
        16: BlockConfig(32, 32, 1, 2, operand_in_registers=True),
    },
}


class BlockTables(NamedTuple):
    """The configurations of one GPU architecture."""

    shifted: BlockTable
    shifted_many: BlockTable  # more than two components; falls back to `shifted`
    independent: BlockTable


# The largest width with blocks for small calls; wider ones use the blocks of the other calls.
SMALL_WIDTH = 16
MEASURED = BlockTables(SHIFTED, SHIFTED_MANY, INDEPENDENT)

# Widths above 128 with elements of 2 bytes; two components, or shifted keys. Chosen by the compiled kernels
# (results/wide_blocks.csv); nothing was timed. Warp groups have 64 rows of their own each: eight warps compute the
# scores of 64 rows twice, and 32 rows are too few for wgmma. Accumulators of dk and dv together do not fit the
# registers. Passes that are missing use the tables above.
WIDE_HOPPER = BlockTables(
    shifted={
        BlockKey("fwd"): {256: BlockConfig(128, 64, 8, 2)},
        BlockKey("dq"): {256: BlockConfig(128, 32, 8, 2)},
        BlockKey("dkdv"): {256: BlockConfig(32, 128, 8, 2, split=True)},
        BlockKey("dv"): {256: BlockConfig(64, 128, 8, 2)},
    },
    shifted_many={
        BlockKey("fwd"): {256: BlockConfig(128, 64, 8, 2, component_gemm=True)},
        BlockKey("dq"): {256: BlockConfig(128, 32, 8, 2, component_gemm=True)},
        # The exponents of all components spill more with 128 rows.
        BlockKey("dq", hard=True): {256: BlockConfig(64, 32, 8, 1)},
    },
    independent={
        BlockKey("dq"): {256: BlockConfig(128, 32, 8, 2)},
        BlockKey("dkdv"): {256: BlockConfig(32, 128, 8, 2, per_component=True, split=True)},
        BlockKey("dkdv", hard=True): {256: BlockConfig(32, 64, 8, 1)},
        BlockKey("dv"): {256: BlockConfig(32, 128, 8, 2)},
    },
)
# mma.sync: a warp has 16 rows.
WIDE_MMA = BlockTables(
    shifted={
        BlockKey("fwd"): {256: BlockConfig(64, 32, 4, 2)},
        BlockKey("dq"): {256: BlockConfig(64, 32, 4, 1)},
        BlockKey("dkdv"): {256: BlockConfig(32, 64, 4, 1, split=True)},
        BlockKey("dv"): {256: BlockConfig(32, 64, 4, 1)},
    },
    shifted_many={
        BlockKey("fwd"): {256: BlockConfig(64, 32, 8, 2)},
        BlockKey("dq"): {256: BlockConfig(64, 32, 8, 1)},
    },
    independent={
        BlockKey("fwd"): {256: BlockConfig(64, 16, 4, 2)},
        BlockKey("dq"): {256: BlockConfig(32, 32, 4, 1)},
        BlockKey("dkdv"): {256: BlockConfig(32, 64, 4, 1, per_component=True, split=True)},
        BlockKey("dkdv", hard=True): {256: BlockConfig(16, 32, 8, 1)},
        BlockKey("dv"): {256: BlockConfig(32, 64, 4, 1)},
    },
)
WIDE_TENSOR_MEMORY = BlockTables(
    shifted={BlockKey("fwd"): {256: BlockConfig(128, 64, 8, 2)}},
    shifted_many={},
    independent={
        BlockKey("dkdv"): {256: BlockConfig(32, 64, 8, 1)},
        BlockKey("dv"): {256: BlockConfig(32, 128, 8, 2)},
    },
)
WIDE = {HOPPER: WIDE_HOPPER, 100: WIDE_TENSOR_MEMORY} | dict.fromkeys((80, 86, 89, 120), WIDE_MMA)


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
    full_tiles = itemsize <= 2 and (shifted or components <= 2)
    if full_tiles and width > 128 and architecture in WIDE:
        block = _look_up(WIDE[architecture], key, width, components, shifted)
        if block is not None:
            return block
    block = _look_up(MEASURED, key, width, components, shifted)
    assert block is not None
    block = _block_of_architecture(block, key, width, shifted, architecture)
    if full_tiles:
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
