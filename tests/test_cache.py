"""Decoding with a cache: equality with the full forward, sizes, and errors."""

import numpy as np
import pytest
import torch

import mgk
from mgk import Attention, Variant

EMBED, H, HK, D, L = 12, 4, 2, 5, 13
CHUNKS = {"one-at-a-time": (1,) * L, "prompt-then-ones": (7, *(1,) * 6), "chunks": (4, 1, 5, 3), "all": (L,)}


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def randn(*size):
    return torch.randn(*size, dtype=torch.float64)


def close(actual, expected, tolerance=1e-11):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def make(variant, **options):
    options = {"head_dim": D, "is_causal": True, "dtype": torch.float64, **options}
    layer = Attention(EMBED, H, variant=variant, **options).eval()
    for parameter in layer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    if hasattr(layer.prior, "prior"):
        layer.prior.prior.copy_(torch.randn_like(layer.prior.prior).softmax(1))
    return layer


def decode(layer, x, chunks, cache=None, **options):
    """Return the outputs of x processed in chunks; a key_padding_mask covers all keys so far."""
    cache = layer.make_cache(x.shape[0], x.shape[1]) if cache is None else cache
    padding, outs = options.pop("key_padding_mask", None), []
    for piece in x.split(chunks, 1):
        if padding is not None:
            options["key_padding_mask"] = padding[:, : cache.length + piece.shape[1]]
        outs.append(layer(piece, cache=cache, **options))
    assert cache.length == x.shape[1]
    return torch.cat(outs, 1)


OPTIONS = {
    "plain": {},
    "rotary-gqa": {"rotary": 30.0, "num_kv_heads": HK},
    "positions": {"max_positions": L},
    "ref-lm": {"preset": "ref-lm", "rotary": 30.0},
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_decoding_in_chunks_equals_the_full_forward(variant, options, chunks):
    layer, x = make(variant, **options), randn(2, L, EMBED)
    close(decode(layer, x, chunks), layer(x))


FREE = [
    Variant("between", "shifted", "em", variance="em"),
    Variant("gaussian", "independent", "learned", variance="learned", normalise=True),
]


@pytest.mark.parametrize("variant", FREE, ids=["em", "learned"])
def test_decoding_with_unequal_variances_and_tau(variant):
    layer, x = make(variant, rotary=30.0), randn(2, L, EMBED)
    close(decode(layer, x, (6, 1, 6)), layer(x))


FEATURE_MAPS = {"relu": lambda: "relu", "favor": lambda: mgk.FAVOR(D, 8), "dpfp": lambda: mgk.DPFP(2)}


@pytest.mark.parametrize("preset", ["paper", "ref-lm"])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS.values(), ids=FEATURE_MAPS)
@pytest.mark.parametrize("variant", ["linear", "mlk", "smlk"])
def test_decoding_with_every_feature_map(variant, feature_map, preset):
    layer, x = make(variant, feature_map=feature_map(), preset=preset), randn(2, L, EMBED)
    close(decode(layer, x, (4, 1, 1, 7)), layer(x))


@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_left_padding(variant):
    """Check rows of different lengths that end together against each row alone."""
    layer, x = make(variant, rotary=30.0, num_kv_heads=HK, max_positions=L), randn(3, L, EMBED)
    lengths = (L, 4, 9)
    padding = torch.stack([torch.arange(L) < L - n for n in lengths])
    ids = torch.stack([(torch.arange(L) - (L - n)).clamp(min=0) for n in lengths])
    cache, outs = layer.make_cache(3, L), []
    for start, stop in ((0, 10), (10, 11), (11, L)):
        masks = {"key_padding_mask": padding[:, :stop], "position_ids": ids[:, start:stop]}
        outs.append(layer(x[:, start:stop], cache=cache, **masks))
    actual = torch.cat(outs, 1)
    for row, n in enumerate(lengths):
        close(actual[row : row + 1, L - n :], layer(x[row : row + 1, L - n :]))
        assert not actual[row, : L - n].isnan().any()


def test_chunks_without_causality():
    layer, x = make("smgk", is_causal=False), randn(2, 6, EMBED)
    cache = layer.make_cache(2, 6)
    close(layer(x[:, :4], cache=cache), layer(x[:, :4]))
    close(layer(x[:, 4:], cache=cache), layer(x)[:, 4:])


def test_weights_cover_all_cached_keys():
    layer, x = make("mgk"), randn(2, L, EMBED)
    cache = layer.make_cache(2, L)
    layer(x[:, :9], cache=cache)
    close(layer(x[:, 9:], cache=cache, need_weights=True)[1], layer(x, need_weights=True)[1][:, :, 9:])


# Numbers per token and key head with M = 2: D + E, 2D + E, D + E.
PER_TOKEN = {"softmax": 2 * D, "mgk": 3 * D, "mgk-hard": 3 * D, "mgk-em": 3 * D, "smgk": 2 * D, "smgk-hard": 2 * D}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", PER_TOKEN)
def test_size_of_a_cache(variant, dtype):
    cache = Attention(EMBED, H, head_dim=D, num_kv_heads=HK, variant=variant, dtype=dtype).make_cache(3, 20)
    assert cache.nbytes == 3 * 20 * HK * PER_TOKEN[variant] * dtype.itemsize


def test_half_the_heads_halve_the_cache():
    softmax = Attention(512, 8, head_dim=64, variant="softmax").make_cache(2, 100).nbytes
    assert Attention(512, 4, head_dim=64, variant="smgk").make_cache(2, 100).nbytes == 0.5 * softmax
    assert Attention(512, 4, head_dim=64, variant="mgk").make_cache(2, 100).nbytes == 0.75 * softmax


@pytest.mark.parametrize("feature_map, width", [("elu", D), (mgk.DPFP(2), 4 * D), (mgk.FAVOR(D, 7), 7)])
@pytest.mark.parametrize("variant", ["linear", "mlk", "smlk"])
def test_linear_attention_needs_constant_memory(variant, feature_map, width):
    layer = Attention(EMBED, H, head_dim=D, variant=variant, feature_map=feature_map, is_causal=True)
    short, long = layer.make_cache(2, 5), layer.make_cache(2, 10**9)
    log_weight = 1 if isinstance(feature_map, mgk.FAVOR) else 0
    assert short.nbytes == long.nbytes == 2 * H * (width * D + width + log_weight) * 4
    layer(torch.randn(2, 300, EMBED), cache=long)
    assert long.nbytes == short.nbytes
    assert long.length == 300


SOME = [
    ("softmax", {}),
    ("smgk", {}),
    ("mgk-em", {"max_positions": L}),
    ("mlk", {}),
    ("mlk", {"feature_map": mgk.FAVOR(D)}),
]


@pytest.mark.parametrize("variant, options", SOME, ids=["softmax", "smgk", "mgk-em", "mlk", "favor"])
def test_reorder(variant, options):
    layer, x = make(variant, **options), randn(3, L, EMBED)
    cache, rows = layer.make_cache(3, L), torch.tensor([2, 0, 2])
    layer(x[:, :8], cache=cache)
    cache.reorder(rows)
    close(layer(x[:, 8:], cache=cache), layer(torch.cat([x[rows, :8], x[:, 8:]], 1))[:, 8:])
    with pytest.raises(ValueError, match="rows must be 3 indices"):
        cache.reorder(torch.tensor([0, 1]))


@pytest.mark.parametrize("change", ["reorder", "take"])
def test_rows_move_with_their_positions(change):
    """With left padding the rows have different positions, which select the priors of cached keys."""
    layer, x = make("mgk-em", max_positions=L), randn(2, 6, EMBED)
    ids = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 2]])
    padding = torch.tensor([[False] * 6, [True] * 3 + [False] * 3])
    rows = torch.tensor([1, 0])
    cache = layer.make_cache(2, 6)
    layer(x[:, :5], cache=cache, key_padding_mask=padding[:, :5], position_ids=ids[:, :5])
    getattr(cache, change)(rows)
    last = layer(x[rows, 5:], cache=cache, key_padding_mask=padding[rows], position_ids=ids[rows, 5:])
    close(last[0], layer(x[1:, 3:])[0, -1:])
    close(last[1], layer(x[:1])[0, -1:])


@pytest.mark.parametrize("variant", ["softmax", "smgk", "mgk-hard"])
def test_padding_applies_to_a_single_decoding_step(variant):
    layer, x = make(variant), randn(2, 6, EMBED)
    padding = torch.tensor([[False] * 6, [True] * 3 + [False] * 3])
    cache = layer.make_cache(2, 6)
    layer(x[:, :5], cache=cache, key_padding_mask=padding[:, :5])
    last = layer(x[:, 5:], cache=cache, key_padding_mask=padding)
    close(last[1], layer(x[1:, 3:])[0, -1:])
    assert (last[1] - layer(x[1:])[0, -1:]).abs().max() > 1e-3


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_enlarge_and_take(variant, options):
    layer, x = make(variant, **options), randn(2, L, EMBED)
    cache = layer.make_cache(2, 6)
    layer(x[:, :6], cache=cache)
    cache.enlarge(L)
    rows = torch.tensor([1, 0, 1])
    cache.take(rows)
    close(layer(x[rows, 6:], cache=cache), layer(x)[rows, 6:])
    cache.reset()
    close(layer(x[rows], cache=cache), layer(x)[rows])
    with pytest.raises(ValueError, match="max_length must be at least the current 13"):
        cache.enlarge(12)
    with pytest.raises(ValueError, match="rows must be indices from 0 to 2"):
        cache.take(torch.tensor([3]))


@pytest.mark.parametrize("variant, options", SOME, ids=["softmax", "smgk", "mgk-em", "mlk", "favor"])
def test_reset_keeps_the_buffers(variant, options):
    layer, x, y = make(variant, **options), randn(2, L, EMBED), randn(2, L, EMBED)
    cache = layer.make_cache(2, L)
    size = cache.nbytes
    decode(layer, 5 * y, (L,), cache)
    cache.reset()
    assert (cache.length, cache.nbytes) == (0, size)
    close(decode(layer, x, (5, 8), cache), layer(x))
    cache.crop(0)
    close(decode(layer, x, (5, 8), cache), layer(x))


@pytest.mark.parametrize("variant", ["softmax", "smgk", "mgk"])
def test_crop_discards_tokens(variant):
    layer, x = make(variant, rotary=30.0), randn(2, L, EMBED)
    cache = layer.make_cache(2, L)
    layer(x[:, :5], cache=cache)
    layer(randn(2, 6, EMBED), cache=cache)
    cache.crop(np.int64(5))
    close(layer(x[:, 5:], cache=cache), layer(x)[:, 5:])
    for length in (-1, L + 1, 2.0, "0", True):
        with pytest.raises(ValueError, match=f"length must be an integer from 0 to the {L} tokens .*, got {length!r}"):
            cache.crop(length)


def test_crop_keeps_the_padding_of_the_remaining_tokens():
    layer, x = make("smgk"), randn(2, L, EMBED)
    padding = (torch.arange(L) < 2).expand(2, L)
    cache = layer.make_cache(2, L)
    layer(x[:, :8], cache=cache, key_padding_mask=padding[:, :8])
    cache.crop(5)
    with pytest.raises(ValueError, match="key_padding_mask was given for earlier tokens"):
        layer(x[:, 5:6], cache=cache)
    close(layer(x[:, 5:], cache=cache, key_padding_mask=padding), layer(x, key_padding_mask=padding)[:, 5:])


def test_crop_to_zero_discards_padding():
    layer, x = make("smgk"), randn(2, L, EMBED)
    cache = layer.make_cache(2, L)
    layer(x, cache=cache, key_padding_mask=torch.zeros(2, L, dtype=torch.bool))
    cache.crop(0)
    close(layer(x, cache=cache), layer(x))


def test_state_cache_cannot_be_cropped():
    layer = make("mlk")
    cache = layer.make_cache(2, L)
    layer(randn(2, 5, EMBED), cache=cache)
    cache.crop(5)
    with pytest.raises(ValueError, match="length must be 0 or 5"):
        cache.crop(3)


@pytest.mark.parametrize("variant", ["smgk", "mlk"])
def test_rejected_calls_leave_the_cache_unchanged(variant):
    """Check that the next valid call is not affected by rejected ones."""
    layer, x = make(variant), randn(2, L, EMBED)
    cache = layer.make_cache(2, L)
    layer(x[:, :8], cache=cache)
    wrong_padding = {"key_padding_mask": torch.zeros(2, 2, dtype=torch.bool)}
    rejected = [
        (randn(2, 6, EMBED), {}, "cache holds 8 of at most 13 tokens: 6 more do not fit"),
        (randn(3, 1, EMBED), {}, "cache was made for batch size 2, got 3"),
        (randn(2, 1, EMBED), wrong_padding, r"key_padding_mask must have shape \[B, S\] = \[2, 9\]"),
    ]
    for piece, options, message in rejected:
        with pytest.raises(ValueError, match=message):
            layer(piece, cache=cache, **options)
        assert cache.length == 8
    with torch.enable_grad(), pytest.raises(ValueError, match="cache is for inference"):
        layer(x[:, 8:], cache=cache)
    other = make("mlk" if variant == "smgk" else "smgk").make_cache(2, L)
    with pytest.raises(ValueError, match="cache must come from this layer's make_cache"):
        layer(x[:, 8:], cache=other)
    close(layer(x[:, 8:], cache=cache), layer(x)[:, 8:])


@pytest.mark.parametrize("variant", ["softmax", "smgk", "mgk-em", "mlk"])
def test_explicit_key_equals_default_key(variant):
    """Check that attn(x, x, x), as in torch, decodes as attn(x)."""
    layer, x = make(variant, rotary=30.0, max_positions=L), randn(2, L, EMBED)
    cache = layer.make_cache(2, L)
    actual = torch.cat([layer(piece, piece, piece, cache=cache) for piece in x.split(5, 1)], 1)
    close(actual, layer(x))


def test_positions_beyond_the_prior():
    layer = make("smgk-em", max_positions=4)
    cache = layer.make_cache(1, 10)
    layer(randn(1, 4, EMBED), cache=cache)
    with pytest.raises(ValueError, match="has 5 positions, but the prior has 4"):
        layer(randn(1, 1, EMBED), cache=cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_decoding_in_lower_precision(variant, dtype):
    layer, x = make(variant, rotary=30.0), randn(2, L, EMBED)
    layer, x = layer.to(dtype), x.to(dtype)
    actual, expected = decode(layer, x, (1,) * L), layer(x)
    assert actual.dtype == dtype
    assert (actual - expected).abs().max() <= 8 * torch.finfo(dtype).eps * expected.abs().max()


def test_decoding_under_autocast():
    layer, x = make("smgk").float(), torch.randn(2, L, EMBED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = decode(layer, x, (3, 10)), layer(x)
    assert actual.dtype == torch.bfloat16
    assert (actual - expected).abs().max() <= 0.05 * expected.abs().max()


def test_padding_mask_of_earlier_tokens_is_required():
    layer = mgk.Attention(16, 2, head_dim=8, is_causal=True)
    x, padding = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    padding[0, :2] = True
    with torch.no_grad():
        cache = layer.make_cache(2, 10)
        layer(x[:, :5], cache=cache, key_padding_mask=padding[:, :5])
        with pytest.raises(ValueError, match="key_padding_mask was given for earlier tokens"):
            layer(x[:, 5:], cache=cache)
        assert cache.length == 5
        layer(x[:, 5:], cache=cache, key_padding_mask=padding)
        cache.reset()
        layer(x, cache=cache)


def test_cache_of_another_layer_raises():
    cache = mgk.Attention(16, 2, head_dim=4, is_causal=True).make_cache(2, 10)
    with torch.no_grad(), pytest.raises(ValueError, match="cache was made by a layer with different sizes"):
        mgk.Attention(16, 2, head_dim=8, is_causal=True)(torch.randn(2, 6, 16), cache=cache)


@pytest.mark.parametrize("rows", [[1, 0], torch.tensor([0.0, 1.0]), torch.tensor([0, 5]), torch.tensor([0])], ids=str)
def test_reorder_rejects_wrong_rows(rows):
    with pytest.raises(ValueError, match="rows must be"):
        mgk.Attention(16, 2, head_dim=4).make_cache(2, 10).reorder(rows)


# torch 2.10 warns that torchao replaces torch.ao.quantization.
@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning", "ignore:.*quantiz:UserWarning")
@pytest.mark.parametrize("variant", ["softmax", "linear", "mgk-em", "smgk"])
def test_cache_of_a_dynamically_quantized_layer(variant):
    layer = Attention(16, 2, variant=variant, is_causal=True).eval()
    layer = torch.ao.quantization.quantize_dynamic(layer, {torch.nn.Linear}, dtype=torch.qint8)
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        expected, cache = layer(x), layer.make_cache(2, 6)
        actual = torch.cat([layer(x[:, :5], cache=cache), layer(x[:, 5:], cache=cache)], dim=1)
    # The quantization of activations depends on the range of the call.
    torch.testing.assert_close(actual, expected, atol=0.05, rtol=0)


@pytest.mark.parametrize("variant", ["linear", "mlk", "smgk"])
def test_no_new_tokens_with_a_padding_mask(variant):
    layer = Attention(16, 2, variant=variant, is_causal=True).eval()
    cache, x = layer.make_cache(2, 6), torch.randn(2, 5, 16)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    with torch.no_grad():
        layer(x, cache=cache, key_padding_mask=padding)
        assert layer(x[:, :0], cache=cache, key_padding_mask=padding).shape == (2, 0, 16)
    assert cache.length == 5
