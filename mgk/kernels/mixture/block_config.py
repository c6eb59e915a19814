"""Records of the block sizes: the properties of a launch, and the sizes and code variants that are chosen for it."""

from typing import Literal, NamedTuple

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
