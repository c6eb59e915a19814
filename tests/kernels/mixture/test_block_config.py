"""Blocks as text: the arguments of benchmarks/block_sizes.py."""

import pytest

from mgk.kernels.mixture.block_config import BLOCK_VARIANTS, BlockConfig, format_block, parse_block

TEXTS = {
    "64x64,w4,s3,r168,tma_rows": BlockConfig(64, 64, 4, 3, 168, tma_rows=True),
    "128x32,w8,s2": BlockConfig(128, 32, 8, 2),
    "16x16,w1,s1,operand_in_registers,component_gemm,per_component,split,tma_rows": BlockConfig(
        16, 16, 1, 1, None, True, True, True, True, True
    ),
}


@pytest.mark.parametrize("text", TEXTS)
def test_blocks_are_written_and_read(text):
    assert format_block(TEXTS[text]) == text
    assert parse_block(text) == TEXTS[text]
    assert len(BLOCK_VARIANTS) == 5


@pytest.mark.parametrize("text", ["64,64,4,3,168,4", "64x64,w4", "64x64,w4,s3,maxnreg", "64x64,w4,s3,tma_rows,r168"])
def test_other_texts_are_rejected(text):
    with pytest.raises(ValueError, match=r"64x64,w4,s3,r168,tma_rows .* got '64"):
        parse_block(text)
