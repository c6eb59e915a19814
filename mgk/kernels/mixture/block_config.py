"""Records of the block sizes: the properties of a launch, and the sizes and code variants that are chosen for it."""

import re
from typing import Literal, NamedTuple, get_type_hints

# The forward pass; dq; dk and dv, or dk alone; dv alone; all gradients (`bwd_onepass`).
Pass = Literal["fwd", "dq", "dkdv", "dv", "onepass"]


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


# Fields of `BlockConfig` that select a code variant.
BLOCK_VARIANTS = tuple(name for name, kind in get_type_hints(BlockConfig).items() if kind is bool)


def format_block(block: BlockConfig) -> str:
    """Return a block as text, for example "64x64,w4,s3,r168,tma_rows"; without r, the compiler chooses registers."""
    registers = [] if block.maxnreg is None else [f"r{block.maxnreg}"]
    variants = [name for name in BLOCK_VARIANTS if getattr(block, name)]
    sizes = [f"{block.block_m}x{block.block_n}", f"w{block.num_warps}", f"s{block.num_stages}"]
    return ",".join([*sizes, *registers, *variants])


def parse_block(text: str) -> BlockConfig:
    """Return the block of a text of `format_block`."""
    match = re.fullmatch(r"(\d+)x(\d+),w(\d+),s(\d+)(?:,r(\d+))?((?:,[a-z_]+)*)", text)
    variants = match[6].split(",")[1:] if match else []
    if match is None or not set(variants) <= set(BLOCK_VARIANTS):
        raise ValueError(
            f"block must have the form 64x64,w4,s3,r168,tma_rows (warps, stages, registers if limited, and any of "
            f"{', '.join(BLOCK_VARIANTS)}), got {text!r}"
        )
    block_m, block_n, num_warps, num_stages = map(int, match.groups()[:4])
    maxnreg = None if match[5] is None else int(match[5])
    return BlockConfig(block_m, block_n, num_warps, num_stages, maxnreg, **dict.fromkeys(variants, True))


class BlockKey(NamedTuple):
    """Properties of a launch by which its block sizes are looked up."""

    pass_: Pass
    small: bool = False  # one launch per pass, with pointers instead of TMA descriptors
    tma: bool = False  # TMA reads the tensors along which the kernel loops
    hard: bool = False
    capped: bool = False  # FAST path without masks, dropout and several scales: `maxnreg` may limit its registers
    no_component_gemm: bool = False
    short: bool = False  # few queries and keys, see SHORT_LENGTH

    def fallbacks(self) -> tuple["BlockKey", ...]:
        """Return the keys to look up, in order; the first one that a table has is used."""
        if self.short:
            return self, *self._replace(short=False).fallbacks()
        general = self._replace(small=False, tma=False)
        if not self.capped:
            return self, general, general._replace(hard=False, no_component_gemm=False)
        # A register limit measured for soft assignment does not hold for hard assignment.
        capped = (self, general, general._replace(no_component_gemm=False))
        return capped + self._replace(capped=False).fallbacks()


# Configurations by the largest padded head dimension that they are used for.
BlockTable = dict[BlockKey, dict[int, BlockConfig]]


class BlockTables(NamedTuple):
    """The configurations of one GPU architecture."""

    shifted: BlockTable
    shifted_many: BlockTable  # more than two components; falls back to `shifted`
    independent: BlockTable
