"""Test the recomputed weights of layers whose query heads share key or value heads."""

import pytest
import torch

import mgk
from mgk._core.calls import linear_call, mixture_call
from mgk.analysis.weights import sample_weights


@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 1), (1, 4), (4, 1), (2, 4)])
@pytest.mark.parametrize("linear", [False, True], ids=["mixture", "linear"])
def test_every_query_head_has_weights(linear, key_heads, value_heads):
    query, value = torch.randn(2, 4, 5, 3), torch.randn(2, value_heads, 5, 3)
    keys, prior = torch.randn(2, key_heads, 2, 5, 3), torch.randn(key_heads, 2, 1).log_softmax(1)
    operator, make_call = (mgk.mlk_attention, linear_call) if linear else (mgk.mgk_attention, mixture_call)
    expected = operator(query, keys, value, log_prior=prior, return_weights=True)[1][1]
    weights = sample_weights(make_call(query, keys, value, log_prior=prior), 1)
    assert weights.heads == 4
    assert weights.component_keys.shape[0] == weights.value.shape[0] == 4
    for heads in (slice(None), slice(2, 3)):
        (block,) = weights.blocks(1 << 20, heads)
        torch.testing.assert_close(block.weights.float(), expected[heads], atol=1e-5, rtol=1e-5)
