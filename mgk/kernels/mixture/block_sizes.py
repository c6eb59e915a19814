"""Block sizes of the mixture kernels, measured on an H200 in bf16 (benchmarks/block_sizes.py, docs/kernels-log.md)."""

import functools

# By pass and largest head width: rows and keys of a block, warps, pipeline stages, registers a thread (None: the
# compiler's choice), and the way. Hard assignment, small calls and those along queries that the bulk copy
# engine reads take the others' where they have none of their own. "capped" ones are for the first kernel of calls
# without masks, dropout and several scales, which would not fit so few registers. The way is a sum of
#   1  left operands that stay over the loop are kept in registers,
#   2  soft shifted keys, at most 5 components: their blend, and in the backward passes (bf16) the sums of d a and d c,
#      are steps of the tensor cores; keys, soft and independent: a walk for each component, dk and dv together,
#   4  bulk keys: the engine reads the rows' vectors as well, which otherwise take a copy a number below 128 rows.
Block = tuple[int, int, int, int, int | None, int]
SHIFTED_BLOCKS: dict[str, dict[int, Block]] = {
    "forward": {
        32: (64, 128, 4, 3, None, 1),
        64: (64, 64, 4, 3, None, 3),
        128: (64, 64, 4, 3, None, 1),
        256: (64, 32, 4, 2, None, 0),
    },
    # Without the blend's operand: inference in parts is to hold little.
    "unblended forward": {
        32: (64, 128, 4, 3, None, 1),
        64: (64, 64, 4, 3, None, 1),
    },
    "capped unblended forward": {
        32: (64, 128, 4, 3, None, 1),
        64: (64, 64, 4, 3, 128, 1),
    },
    "capped hard forward": {
        32: (64, 128, 4, 3, None, 1),
        64: (64, 64, 4, 3, 128, 1),
    },
    "queries": {
        32: (64, 128, 4, 3, None, 1),
        64: (64, 128, 4, 2, None, 1),
        128: (64, 64, 4, 2, None, 0),
        256: (64, 32, 8, 1, None, 0),
    },
    "hard queries": {
        32: (64, 128, 4, 3, None, 1),
        64: (64, 128, 4, 2, None, 1),
        128: (64, 64, 4, 2, None, 1),
        256: (64, 32, 8, 1, None, 0),
    },
    "capped bulk queries": {
        32: (64, 64, 4, 3, 128, 1),
    },
    # More stages than devices without the engine have shared memory for.
    "bulk queries": {
        64: (64, 128, 4, 3, None, 1),
        128: (64, 64, 4, 2, None, 0),
        256: (64, 32, 8, 2, None, 0),
    },
    "bulk hard queries": {
        64: (64, 128, 4, 3, None, 1),
        128: (64, 64, 4, 2, None, 1),
        256: (64, 32, 8, 2, None, 0),
    },
    "keys": {
        32: (128, 64, 4, 3, None, 0),
        64: (128, 64, 4, 2, None, 0),
        128: (32, 64, 4, 2, None, 0),
        256: (32, 32, 8, 2, None, 0),
    },
    "hard keys": {
        32: (128, 64, 4, 3, None, 0),
        64: (64, 64, 4, 2, None, 0),
        128: (32, 64, 4, 2, None, 0),
        256: (32, 32, 8, 2, None, 0),
    },
    "bulk keys": {
        32: (128, 64, 4, 3, None, 0),
        64: (64, 64, 4, 3, None, 4),
        128: (64, 64, 4, 2, None, 4),
        256: (32, 64, 8, 2, None, 0),
    },
    "bulk hard keys": {
        32: (128, 64, 4, 3, None, 0),
        64: (64, 64, 4, 3, None, 4),
        128: (64, 64, 4, 2, None, 4),
        256: (32, 64, 8, 2, None, 0),
    },
    "small forward": {
        16: (32, 64, 2, 2, None, 0),
    },
    "small queries": {
        16: (32, 32, 1, 2, None, 1),
    },
    "small hard queries": {
        16: (32, 32, 1, 2, None, 1),
    },
    "small keys": {
        16: (32, 32, 1, 2, None, 1),
    },
    "small hard keys": {
        16: (32, 32, 1, 2, None, 1),
    },
}
# More than two components: where what is above would not fit the registers.
MANY_SHIFTED_BLOCKS: dict[str, dict[int, Block]] = {
    "forward": {
        32: (64, 64, 4, 3, None, 3),
        64: (64, 64, 4, 3, None, 3),
        128: (64, 64, 4, 3, None, 3),
        256: (64, 32, 4, 2, None, 0),
    },
    "capped queries": {
        32: (64, 64, 4, 3, 168, 3),
    },
    "capped hard queries": {
        32: (64, 64, 4, 3, 168, 3),
    },
    "queries": {
        32: (64, 64, 4, 3, None, 3),
        64: (64, 64, 4, 3, None, 3),
        128: (64, 64, 4, 2, None, 2),
        256: (64, 32, 8, 1, None, 0),
    },
    "bulk keys": {
        16: (128, 64, 4, 3, None, 0),
        32: (64, 64, 4, 3, None, 6),
        64: (64, 64, 4, 3, None, 6),
        128: (32, 64, 4, 2, None, 6),
    },
    "small queries": {
        16: (32, 32, 1, 2, None, 1),
    },
    "small keys": {
        16: (32, 32, 1, 2, None, 1),
    },
    "small hard keys": {
        16: (128, 64, 4, 3, None, 0),
    },
}
INDEPENDENT_BLOCKS: dict[str, dict[int, Block]] = {
    "forward": {
        32: (64, 64, 4, 3, None, 1),
        64: (64, 64, 4, 3, None, 1),
        128: (64, 64, 4, 2, None, 1),
        256: (64, 32, 4, 1, None, 0),
    },
    "capped forward": {
        32: (64, 64, 4, 3, 128, 1),
        64: (64, 64, 4, 3, 152, 1),
        128: (64, 32, 4, 3, 168, 1),
    },
    "capped hard forward": {
        32: (64, 64, 4, 3, 128, 1),
        64: (64, 64, 4, 3, None, 1),
        128: (64, 32, 4, 3, 168, 1),
    },
    "queries": {
        32: (64, 128, 4, 2, None, 1),
        64: (64, 64, 4, 2, None, 0),
        128: (64, 32, 4, 2, None, 1),
        256: (64, 16, 4, 1, None, 0),
    },
    "hard queries": {
        32: (64, 64, 4, 3, None, 1),
        64: (64, 64, 4, 2, None, 1),
        128: (64, 32, 4, 2, None, 1),
        256: (64, 16, 4, 1, None, 0),
    },
    "capped bulk queries": {
        32: (64, 64, 4, 3, 168, 1),
    },
    "capped bulk hard queries": {
        32: (64, 64, 4, 3, 168, 1),
    },
    "bulk queries": {
        32: (64, 128, 4, 2, None, 1),
        64: (64, 64, 4, 3, None, 1),
        128: (64, 64, 4, 2, None, 1),
        256: (64, 16, 4, 1, None, 0),
    },
    "bulk hard queries": {
        64: (64, 64, 4, 3, None, 1),
        128: (64, 64, 4, 2, None, 1),
        256: (64, 16, 4, 1, None, 0),
    },
    "keys": {
        32: (64, 64, 4, 2, None, 1),
        64: (64, 64, 4, 2, None, 0),
        128: (32, 64, 4, 2, None, 0),
        256: (16, 32, 8, 1, None, 0),
    },
    "hard keys": {
        32: (64, 64, 4, 2, None, 1),
        64: (64, 64, 4, 2, None, 0),
        128: (32, 64, 4, 2, None, 0),
        256: (16, 32, 8, 1, None, 0),
    },
    "values": {
        128: (64, 64, 4, 2, None, 1),
        256: (32, 32, 8, 1, None, 0),
    },
    "bulk keys": {
        16: (64, 64, 4, 2, None, 1),
        32: (64, 64, 4, 3, None, 5),
        64: (64, 64, 4, 4, None, 4),
        128: (64, 64, 4, 2, None, 6),
    },
    "bulk hard keys": {
        16: (64, 64, 4, 2, None, 1),
        32: (64, 64, 4, 3, None, 5),
        64: (64, 64, 4, 3, None, 4),
        128: (32, 64, 4, 3, None, 4),
    },
    "bulk hard values": {
        128: (64, 64, 4, 3, None, 5),
    },
    "small forward": {
        16: (32, 32, 2, 2, None, 0),
    },
    "small queries": {
        16: (32, 32, 1, 2, None, 1),
    },
    "small hard queries": {
        16: (32, 32, 1, 2, None, 1),
    },
    "small keys": {
        16: (32, 32, 1, 2, None, 1),
    },
    "small hard keys": {
        16: (32, 32, 1, 2, None, 1),
    },
}
# Beyond this width the pass along the queries is launched once for dk and once for dv, unless components come one after
# another: the accumulators of both, M + 1 of them, do not fit the registers. A product more, and no spills.
SPLIT_WIDTH = 64
CAPPED = "capped "


@functools.cache
def blocks(
    kind: str, width: int, components: int, shifted: bool, itemsize: int
) -> tuple[int, int, int, int, int | None, int]:
    tables = (MANY_SHIFTED_BLOCKS,) * (components > 2) + (SHIFTED_BLOCKS,) if shifted else (INDEPENDENT_BLOCKS,)
    kind, capped = kind.removeprefix(CAPPED), kind.startswith(CAPPED)
    rest = kind.removeprefix("small ").removeprefix("bulk ")
    names = [kind, rest, rest.removeprefix("hard ").removeprefix("unblended ")]
    # A cap of soft assignment's is not for a hard one.
    caps = [CAPPED + name for name in (kind, rest, rest.removeprefix("unblended "))]
    names = caps + names if capped else names
    rows, keys, warps, stages, registers, resident = next(
        block
        for table in tables
        for name in names
        if name in table
        for limit, block in table[name].items()
        if width <= limit
    )
    if itemsize > 2 or (not shifted and components > 2):
        # Wider numbers or more products a tile: less of each, so that a tile still fits the registers and shared
        # memory.
        narrow = width <= 64 or (width <= 128 and (shifted or itemsize == 2))
        rows, keys = min(rows, 64 if narrow else 32), min(keys, 32 if width <= 128 else 16)
        keys = 16 if itemsize > 2 and components > 2 and not shifted else keys
        warps, stages, registers, resident = max(warps, 4), min(stages, 2 if width <= 64 else 1), None, 0
    return rows, keys, warps, stages, registers, resident


# For a single row of 2-byte numbers, by largest head width: keys of a block, warps, stages, programs a processor holds.
ROW_BLOCKS: dict[int, tuple[int, int, int, int]] = {
    32: (128, 4, 4, 4),
    64: (64, 4, 4, 4),
    128: (32, 4, 4, 4),
    256: (16, 4, 4, 4),
}
ROW_BYTES = 72 << 10  # of keys and values under way in one program


@functools.cache
def row_block(width: int, tiles: int, itemsize: int) -> tuple[int, int, int, int]:
    """`tiles`: of keys and values, in each stage."""
    keys, warps, stages, programs = next(block for limit, block in ROW_BLOCKS.items() if width <= limit)
    return keys, warps, max(1, min(stages, ROW_BYTES // (keys * width * tiles * itemsize))), programs
