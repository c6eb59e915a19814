"""Mask helpers, and literals of the size of MASK_VALUE in the kernels."""

import ast
import math
from pathlib import Path

import pytest
import torch

import mgk
from mgk._core.linear_features import EMPTY_LOG_WEIGHT
from mgk._core.masks import MASK_VALUE, and_mask, as_additive, as_bool, cu_seqlens_to_segments

KERNELS = sorted((Path(mgk.__file__).parent / "kernels").rglob("*.py"))
INF = math.inf


def large_constants(path):
    """Return the float literals of a file that are as large as a mask value."""
    constants = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    return {value for value in constants if isinstance(value, float) and 1e20 < value < INF}


def test_kernels_use_the_same_mask_value():
    constants = {value: path.name for path in KERNELS for value in large_constants(path)}
    assert set(constants) == {-MASK_VALUE}, constants
    assert EMPTY_LOG_WEIGHT == MASK_VALUE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mask_value_masks_the_least_number_of_a_dtype(dtype):
    mask = torch.tensor([0.0, -1e4, torch.finfo(dtype).min, -INF]).to(dtype)
    assert as_bool(mask).tolist() == [True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bool_and_additive_masks_convert_to_each_other(dtype):
    mask = torch.tensor([[True, False], [False, False]])
    additive = as_additive(mask, dtype)
    assert additive.dtype == dtype
    assert additive.tolist() == [[0.0, -INF], [-INF, -INF]]
    assert as_bool(additive).equal(mask)
    assert as_additive(additive, torch.float32) is additive
    assert as_bool(mask) is mask


def test_and_mask_keeps_the_kind_of_the_mask():
    attend = torch.tensor([True, False, True])
    assert and_mask(attend, None) is attend
    assert and_mask(attend, torch.tensor([True, True, False])).tolist() == [True, False, False]
    assert and_mask(attend, torch.tensor([0.5, 1.0, -INF])).tolist() == [0.5, -INF, -INF]


def test_segments_of_packed_sequences():
    segment, position = cu_seqlens_to_segments(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 6)
    assert segment.tolist() == [0, 0, 2, 2, 2, 3]
    assert position.tolist() == [0, 1, 0, 1, 2, 0]
