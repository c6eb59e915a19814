"""Layers with different numbers of key and value heads: outputs, gradients, caches, EM and saved weights."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import mgk
from mgk import Attention
from mgk.models import DecoderConfig, LanguageModel, load_model, save_model
from tests.support.exact import close, randn
from tests.support.layers import EMBED, D, L, log_prior, make, reference
from tests.support.operator_cases import HEADS

OPTIONS = {name: {"heads": n["H"], "num_key_heads": n["Hk"], "num_kv_heads": n["Hv"]} for name, n in HEADS.items()}


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS)
def heads(request):
    return request.param


@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_outputs_and_gradients(variant, heads):
    layer, x = make(variant, is_causal=True, **heads), randn(2, L, EMBED).requires_grad_()
    assert layer.keys.heads == heads["num_key_heads"]
    assert layer.value.out_features == heads["num_kv_heads"] * D
    tensors = [x, *(p for p in layer.parameters() if p.requires_grad)]
    outs = layer(x), reference(layer, x, causal="top-left")[0]
    close(*outs)
    actual, expected = (
        torch.autograd.grad(out.square().sum(), tensors, allow_unused=True, materialize_grads=True) for out in outs
    )
    close(actual, expected)


def test_weights(heads):
    for variant in ("smgk", "mlk"):
        layer, x = make(variant, **heads), randn(2, L, EMBED)
        close(layer(x, need_weights=True), reference(layer, x))


@torch.no_grad()
@pytest.mark.parametrize("variant", ["smgk", "mgk", "softmax", "smgk-em", "mgk-hard", "smlk", "linear"])
def test_decoding_equals_the_full_forward(variant, heads):
    """Decode one token at a time and in chunks, with beams reordered and tokens discarded."""
    layer, x = make(variant, is_causal=True, rotary=30.0, **heads), randn(2, L, EMBED)
    full, cache = layer(x), layer.make_cache(2, L)
    for chunks in ((1,) * L, (4, 1, L - 5)):
        close(torch.cat([layer(piece, cache=cache) for piece in x.split(chunks, 1)], 1), full)
        cache.reset()
    swap = torch.tensor([1, 0])
    layer(x[:, :5], cache=cache)
    cache.reorder(swap)
    close(layer(x[swap, 5:], cache=cache), full[swap, 5:])
    if not layer.is_linear:
        cache.crop(5)
        close(layer(x[swap, 5:], cache=cache), full[swap, 5:])
    cache.take(swap[:1])
    assert cache.batch_size == 1


@pytest.mark.parametrize(("variant", "components"), [("smgk", 1), ("softmax", 1), ("mgk", 2)])
def test_cache_has_the_key_and_value_heads(variant, components, heads):
    cache = make(variant, **heads).make_cache(3, 7)
    keys, value = cache.buffers
    assert keys.shape[:2] == (3, heads["num_key_heads"])
    assert value.shape[:2] == (3, heads["num_kv_heads"])
    assert cache.nbytes == 3 * 7 * D * 8 * (components * heads["num_key_heads"] + heads["num_kv_heads"])


def test_one_key_head_nearly_halves_the_cache():
    """The keys of 12 value heads are one twelfth: 13/24 of the full cache."""
    full, small = (Attention(48, 12, num_key_heads=n, variant="softmax").make_cache(1, 100).nbytes for n in (None, 1))
    assert small * 24 == full * 13


@pytest.mark.parametrize("variant", ["smgk-em", "mgk-em"])
def test_em_prior_belongs_to_key_heads(variant, heads):
    layer, x = make(variant, **heads), randn(2, L, EMBED)
    before = log_prior(layer, L)
    assert before.shape[0] == heads["num_key_heads"]
    layer.train()(x)
    assert not torch.equal(log_prior(layer, L), before)
    close(layer.prior.prior.sum(1), torch.ones_like(layer.prior.prior.sum(1)))


def test_weights_are_saved_and_loaded(heads):
    layer, other, x = make("smgk", **heads), make("smgk", **heads), randn(2, L, EMBED)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_default_is_the_number_of_value_heads():
    """Layers without num_key_heads have the parameters of earlier versions."""
    layer = make("smgk", num_kv_heads=2)
    assert layer.num_key_heads == layer.num_kv_heads == 2
    other = make("smgk", num_kv_heads=2, num_key_heads=2)
    other.load_state_dict(layer.state_dict())
    x = randn(1, L, EMBED)
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("number", [0, 3, -1, 2.0, True, 8])
def test_wrong_number_of_key_heads(number):
    with pytest.raises(ValueError, match=r"^num_key_heads"):
        Attention(EMBED, 4, num_key_heads=number)


def test_cache_of_a_layer_with_other_key_heads():
    layer, other = (make("smgk", num_key_heads=n, is_causal=True) for n in (1, 2))
    with torch.no_grad(), pytest.raises(ValueError, match="cache was made by a layer with different sizes"):
        layer(randn(2, 3, EMBED), cache=other.make_cache(2, 5))


def test_dropout_with_one_key_head():
    """Dropout acts on the weights of a query head: in expectation the output does not change."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 3, 4), torch.randn(1, 1, 6, 4), torch.randn(1, 4, 6, 4)
    shift = torch.randn(1, 2, 4)
    exact, weights = mgk.smgk_attention(query, key, value, shift, return_weights=True)
    dropped = mgk.smgk_attention(query, key, value, shift, dropout_p=0.5, return_weights=True)
    is_undropped = dropped[1] != 0
    close(dropped[1][is_undropped], 2 * weights[is_undropped], 1e-5)
    close(dropped[0], dropped[1] @ value, 1e-5)
    close(exact, weights @ value, 1e-5)


@pytest.mark.parametrize("variant", ["smgk", "smlk"])
def test_model_with_one_key_head(variant, tmp_path):
    """A language model trains, decodes, is saved and loaded, and has as many FLOPs as its projections and attention."""
    sizes = {"max_length": 8, "embed_dim": 16, "ffn_dim": 16, "num_layers": 1, "num_heads": 4, "head_dim": 4}
    config = DecoderConfig(11, variant=variant, num_key_heads=1, **sizes)
    model, tokens = LanguageModel(config).eval(), torch.randint(11, (2, 8))
    assert model.layers[0].attention.num_key_heads == 1
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == config
    with torch.no_grad():
        full, caches = model(tokens), model.make_caches(2, 8)
        assert torch.equal(loaded.eval()(tokens), full)
        parts = [model(tokens[:, n : n + 1], caches=caches) for n in range(8)]
    close(torch.cat(parts, 1), full, 1e-4)
    # Three key heads fewer: their projection, of 8 tokens.
    more = count_flops(DecoderConfig(11, variant=variant, **sizes)) - count_flops(config)
    assert more == 2 * 8 * 16 * 3 * 4


def count_flops(config):
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        LanguageModel(config)(torch.zeros(1, 8, dtype=torch.long, device="meta"))
    return counter.get_total_flops()


def test_configuration_of_transformers():
    pytest.importorskip("transformers")
    from mgk.hf import MGKConfig

    config = DecoderConfig(11, num_heads=4, num_key_heads=1)
    converted = MGKConfig.of(config)
    assert converted.num_key_heads == 1
    assert MGKConfig.from_dict(converted.to_dict()).settings() == config
    # Configurations of earlier versions lack the field.
    before = {name: value for name, value in converted.to_dict().items() if name != "num_key_heads"}
    assert MGKConfig.from_dict(before).settings() == DecoderConfig(11, num_heads=4)


def test_configuration_with_a_wrong_number_of_key_heads():
    with pytest.raises(ValueError, match=r"^num_key_heads must be a positive integer"):
        DecoderConfig(11, num_key_heads=0)
