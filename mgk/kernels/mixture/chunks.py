"""Chunks of a large forward without gradients: batch entries or key heads that run one after another."""

from collections.abc import Iterator

from mgk._core.integers import ceil_div
from mgk.kernels.mixture.block_config import BlockConfig
from mgk.kernels.mixture.launch_config import COMPONENT_GEMM_WIDTH

# A large forward without gradients runs chunk by chunk, in the workspace of one chunk. A chunk keeps the GPU busy
# (about three waves of programs on 132 SMs) and takes far longer than its launches.
CHUNK_PROGRAMS = 1024
CHUNK_PAIRS = 1 << 31
# Workspace bytes per key: c and C of each component, and its row of the component GEMM's operand.
PREPARED_BYTES = 8
OPERAND_BYTES = 2 * COMPONENT_GEMM_WIDTH
# Workspace bytes allowed per row and head: the size of the call's lse, which other implementations keep.
WORKSPACE_BYTES = 4


def key_heads_per_chunk(
    batch: int, heads: int, key_heads: int, L: int, S: int, components: int, block: BlockConfig
) -> int:
    """Return the key heads per chunk, of B·Hk in all; B·Hk if chunks within the memory limit would be too small."""
    bytes_per_key = PREPARED_BYTES * components + OPERAND_BYTES * block.component_gemm
    group, total = heads // key_heads, batch * key_heads
    largest = max(WORKSPACE_BYTES * heads * L * batch // (bytes_per_key * S), 1)
    smallest = max(
        ceil_div(CHUNK_PROGRAMS, group * ceil_div(L, block.block_m)), ceil_div(CHUNK_PAIRS, group * L * S)
    )  # fmt: skip
    return largest if smallest <= largest < total else total


def chunks(batch: int, key_heads: int, chunk_heads: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the batch and of the key heads; a chunk of lse is contiguous."""
    if chunk_heads >= key_heads:
        step = chunk_heads // key_heads
        for b in range(0, batch, step):
            yield slice(b, b + step), slice(0, key_heads)
        return
    for b in range(batch):
        for h in range(0, key_heads, chunk_heads):
            yield slice(b, b + 1), slice(h, min(h + chunk_heads, key_heads))
