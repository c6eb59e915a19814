"""Inputs of mgk.Attention besides the query: packed sequences, positions, masks."""

import math

import pytest
import torch

import mgk
from tests.support.exact import F64, close, randn
from tests.support.layers import EMBED, HK, MIXTURES, D, H, L, make, reference

LENGTHS = (5, 1, 8)
CU = torch.tensor([0, 5, 6, 14], dtype=torch.int32)


@pytest.mark.parametrize("options", [{}, {"rotary": 100.0}, {"max_positions": 14}], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_packed_sequences_are_separate_sequences(variant, causal, options):
    layer, x = make(variant, is_causal=causal, num_kv_heads=HK, **options), randn(1, 14, EMBED)
    expected = torch.cat([layer(part) for part in x.split(LENGTHS, 1)], 1)
    close(layer(x, cu_seqlens=CU), expected)
    assert (layer(x) - expected).abs().max() > 1e-3


def test_packed_sequences_require_self_attention():
    layer, x = make("smgk"), randn(1, 14, EMBED)
    with pytest.raises(ValueError, match="cu_seqlens is supported only for self-attention without a cache"):
        layer(x, x.clone(), cu_seqlens=CU)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="cu_seqlens is supported only for self-attention without a cache"),
    ):
        layer(x, cu_seqlens=CU, cache=layer.make_cache(1, 20))


def turn(base, positions, width=D):
    """Return a rotary embedding, written out: pair n of the halves is rotated by position * base^(-n / pairs)."""
    pairs = width // 2

    def rotate(x):
        out = x.clone()
        for n in range(pairs):
            angle = positions.to(F64) * base ** (-n / pairs)
            a, b = x[..., n], x[..., pairs + n]
            out[..., n], out[..., pairs + n] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return out

    return rotate


# Angles are computed in float32.
ANGLES = 2e-6


@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_rotary_is_applied_before_the_shift(variant):
    layer, x = make(variant, rotary=50.0, num_kv_heads=HK), randn(2, L, EMBED)
    close(layer(x), reference(layer, x, rotate=turn(50.0, torch.arange(L)))[0], ANGLES)
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5])
    close(layer(x, position_ids=ids), reference(layer, x, rotate=turn(50.0, ids))[0], ANGLES)


def test_callable_as_rotary():
    calls = []

    def rotary(x, positions):
        calls.append((x.dim(), positions.tolist()))
        return x * (1 + positions[:, None])

    layer, x = make("mgk", rotary=rotary), randn(2, 4, EMBED)
    close(layer(x), reference(layer, x, rotate=lambda x: x * (1 + torch.arange(4)[:, None]))[0])
    assert calls == [(4, [0, 1, 2, 3]), (5, [0, 1, 2, 3])]
    for wrong, message in (
        (lambda x, _: x.float(), "value has dtype"),
        (lambda x, _: x[..., :1, :], "value must have"),
    ):
        with pytest.raises(ValueError, match=message):
            make("mgk", rotary=wrong)(x)


@pytest.mark.parametrize("variant", ["softmax", "mgk", "mgk-hard"])
def test_rotary_attention_depends_on_distances_only(variant):
    layer, x = make(variant, rotary=10000.0), randn(2, L, EMBED)
    near, far = (layer(x, position_ids=torch.arange(L) + start) for start in (0, 100))
    close(near, far, 1e-4)
    stretched = layer(x, position_ids=2 * torch.arange(L))
    assert (near - stretched).abs().max() > 1e-2


@pytest.mark.parametrize("options", [{"rotary": 50.0}, {"max_positions": 12}], ids=str)
def test_position_ids_per_row(options):
    layer, x = make("smgk-em", **options), randn(2, L, EMBED)
    ids = torch.stack([torch.arange(L), torch.arange(L) + 3])
    out = layer(x, position_ids=ids)
    for n in range(2):
        close(out[n : n + 1], layer(x[n : n + 1], position_ids=ids[n]))
    close(out[:1], layer(x[:1]))
    assert (out[1:] - layer(x[1:])).abs().max() > 1e-4
    close(layer(x, position_ids=ids[1:]), layer(x, position_ids=ids[1]))


@pytest.mark.parametrize("variant, preset", [("smgk-em", "paper"), ("mgk", "ref-lm"), ("smlk", "ref-lm")])
def test_priors_per_position_limit_the_length(variant, preset):
    limit = 256 if preset == "ref-lm" else 6
    layer = make(variant, preset=preset, **({} if preset == "ref-lm" else {"max_positions": limit}))
    assert layer.prior(limit, None).shape == (H, 2, limit)
    x = randn(1, limit + 1, EMBED)
    layer(x[:, :limit])
    with pytest.raises(ValueError, match=f"has {limit + 1} positions, but the prior has {limit}"):
        layer(x)
    with pytest.raises(ValueError, match=f"has {limit + 1} positions, but the prior has {limit}"):
        layer(x[:, :2], position_ids=torch.tensor([0, limit]))
    with pytest.raises(ValueError, match="position_ids must be at least 0"):
        layer(x[:, :2], position_ids=torch.tensor([-1, 0]))


@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_true_in_key_padding_mask_is_padding(variant):
    layer, x = make(variant), randn(2, L, EMBED)
    padding = torch.zeros(2, L, dtype=torch.bool)
    padding[0, 6:] = padding[1, :2] = True
    out, weights = layer(x, key_padding_mask=padding, need_weights=True)
    mask = ~padding if layer.is_linear else ~padding[:, None, None]
    close((out, weights), reference(layer, x, mask=mask))
    assert not weights.movedim(3, 1)[padding].any()
    assert (out[0, :6] - layer(x[:1, :6])[0]).abs().max() < 1e-10


@pytest.mark.parametrize("shape", [(L, L), (2, 1, L, L), (2, H, L, L)], ids=str)
@pytest.mark.parametrize("variant", MIXTURES)
def test_true_in_attn_mask_is_attend(variant, shape):
    layer, x = make(variant, is_causal=True), randn(2, L, EMBED)
    mask = torch.rand(shape) > 0.4
    mask |= torch.eye(L, dtype=torch.bool)
    padding = torch.zeros(2, L, dtype=torch.bool)
    padding[1, 7:] = True
    close(layer(x, attn_mask=mask, need_weights=True), reference(layer, x, mask=mask, causal="top-left"))
    both = mask & ~padding[:, None, None]
    actual = layer(x, attn_mask=mask, key_padding_mask=padding)
    close(actual, reference(layer, x, mask=both, causal="top-left")[0])
    added = randn(*shape)
    actual = layer(x, attn_mask=added, key_padding_mask=padding)
    masked = added.expand(2, -1, L, L) if len(shape) == 4 else added.expand(2, 1, L, L)
    masked = masked.masked_fill(padding[:, None, None], -math.inf)
    close(actual, reference(layer, x, mask=masked, causal="top-left")[0])


def test_linear_attention_rejects_attn_mask():
    with pytest.raises(ValueError, match="attn_mask is not supported by linear attention"):
        make("mlk")(randn(2, L, EMBED), attn_mask=torch.ones(L, L, dtype=torch.bool))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(L, L + 1),
        torch.ones(L - 1, L).bool(),
        torch.ones(3, H, L, L),
        torch.ones(1, 1, 1, L, L),
        torch.ones(7),
    ],
    ids=lambda mask: str(list(mask.shape)),
)
@pytest.mark.parametrize("padded", [False, True])
def test_attn_mask_of_wrong_shape_is_named(mask, padded):
    padding = torch.zeros(2, L, dtype=torch.bool) if padded else None
    with pytest.raises(ValueError, match=rf"attn_mask must broadcast to .* got \{list(mask.shape)}"):
        make("smgk")(randn(2, L, EMBED), attn_mask=mask, key_padding_mask=padding)


def test_integer_attn_mask_with_padding_is_named():
    padding = torch.zeros(2, L, dtype=torch.bool)
    with pytest.raises(ValueError, match="attn_mask must be bool"):
        make("smgk")(randn(2, L, EMBED), attn_mask=torch.ones(L, L, dtype=torch.int32), key_padding_mask=padding)


@pytest.mark.parametrize("variant", ["smgk", "mlk"])
def test_query_on_the_meta_device_is_named(variant):
    with pytest.raises(ValueError, match="query is on the meta device, but the layer's weights are on cpu"):
        make(variant)(randn(2, L, EMBED).to("meta"))
