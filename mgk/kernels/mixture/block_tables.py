"""Tables of block sizes: measured on an H200 in bf16 (benchmarks/block_sizes.py), and for wide heads compiled."""

from mgk.kernels.architecture import HOPPER
from mgk.kernels.mixture.block_config import BlockConfig, BlockKey, BlockTable, BlockTables

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
    BlockKey("fwd", capped=True, no_component_gemm=True, short=True): {
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
    # The start and the end of a program take as long as ten steps of the loop: three programs per SM hide more of it.
    BlockKey("dq", tma=True, capped=True, short=True): {
        32: BlockConfig(64, 64, 4, 3, maxnreg=128, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 3, maxnreg=168, operand_in_registers=True),
    },
    BlockKey("dq", tma=True, hard=True, capped=True, short=True): {
        32: BlockConfig(64, 128, 4, 3, operand_in_registers=True),
        64: BlockConfig(64, 64, 4, 3, maxnreg=168, operand_in_registers=True),
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
    BlockKey("dkdv", tma=True, capped=True): {
        32: BlockConfig(128, 64, 4, 3),
        64: BlockConfig(64, 64, 4, 3, maxnreg=168, tma_rows=True),
    },
    BlockKey("dkdv", tma=True, capped=True, short=True): {
        32: BlockConfig(64, 64, 4, 3, maxnreg=128, tma_rows=True),
        64: BlockConfig(64, 64, 4, 3, maxnreg=168, tma_rows=True),
    },
    # Compiled, not timed: 17.0 instructions per pair. Without component GEMM 20.5, and a tenth slower than two passes
    # (H200). With tma_rows, a sixth more instructions.
    BlockKey("onepass"): {
        32: BlockConfig(64, 64, 4, 2, component_gemm=True),
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


MEASURED = BlockTables(SHIFTED, SHIFTED_MANY, INDEPENDENT)

# Widths above 128 with elements of 2 bytes; two components, or shifted keys. Chosen by the resources of
# the compiled kernels (results/wide_blocks.csv), not by times. A warp group needs 64 rows: eight warps compute the
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
