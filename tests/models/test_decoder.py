"""The language model: decoding agrees with the full forward."""

import pytest
import torch
from torch.nn import functional as F

import mgk
from mgk.models import DecoderConfig, LanguageModel, decoder, load_model, save_model
from mgk.models.decoder import FORMS

CUTOFFS = {"paper": (10, 30), "modern": ()}


def tiny(form="paper", **settings) -> LanguageModel:
    """Return a small model whose parameters are all different."""
    sizes = {"embed_dim": 16, "ffn_dim": 24, "num_layers": 3, "num_heads": 4, "head_dim": 6, "cutoffs": CUTOFFS[form]}
    model = LanguageModel(DecoderConfig(50, 24, **{**sizes, **FORMS[form], **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def tokens():
    return torch.randint(50, (2, 17))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
@torch.no_grad()
def test_decoding_equals_full_forward(form, variant, tokens):
    model = tiny(form, variant=variant, num_kv_heads=2)
    caches = model.make_caches(2, 17)
    prefix = model(tokens[:, :5], caches=caches)
    steps = [model(tokens[:, n : n + 1], caches=caches) for n in range(5, 17)]
    torch.testing.assert_close(torch.cat([prefix, *steps], 1), model(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("preset", ["paper", "ref-lm"])
@pytest.mark.parametrize("feature_map", ["relu", "favor", "dpfp"])
@torch.no_grad()
def test_feature_maps_decode_and_save(feature_map, preset, tokens, tmp_path):
    model = tiny(variant="mlk", feature_map=feature_map, preset=preset)
    caches = model.make_caches(2, 17)
    steps = [model(tokens[:, n : n + 1], caches=caches) for n in range(17)]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(tokens), tiny(variant="mlk", preset=preset)(tokens), atol=1e-3)
    save_model(model, tmp_path)
    torch.testing.assert_close(load_model(tmp_path)(tokens), model(tokens), atol=0, rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
@torch.no_grad()
def test_last_hidden_equals_full_forward(form, variant, tokens):
    model = tiny(form, variant=variant)
    torch.testing.assert_close(model.last_hidden(tokens), model.hidden(tokens)[:, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_left_padding_keeps_logits(form, tokens):
    model = tiny(form, variant="smgk")
    padded = F.pad(tokens, (3, 0))
    padding = torch.arange(20).expand(2, 20) < 3
    positions = (torch.arange(20) - 3).clamp(min=0).expand(2, 20)
    full = model(padded, key_padding_mask=padding, position_ids=positions)[:, 3:]
    torch.testing.assert_close(full, model(tokens), atol=1e-5, rtol=1e-5)
    caches = model.make_caches(2, 20)
    model(padded[:, :12], key_padding_mask=padding[:, :12], position_ids=positions[:, :12], caches=caches)
    remaining = model(padded[:, 12:], key_padding_mask=padding, position_ids=positions[:, 12:], caches=caches)
    torch.testing.assert_close(remaining, full[:, 9:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_causality(tokens):
    model = tiny(variant=("softmax", "smgk", "mlk"))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(-1).min() > 1e-6


def test_paper_model_parameter_counts():
    with torch.device("meta"):
        model = LanguageModel(DecoderConfig(267_735, variant="softmax", cutoffs=(20_000, 40_000, 200_000)))

    def count(*modules):
        return sum(p.numel() for module in modules for p in module.parameters())

    assert count(model.table) == 267_735 * 128 + 267_735 + 3 * 129
    assert count(*(layer.attention for layer in model.layers)) == 16 * 4 * (128 * 128 + 128)
    assert count(*(layer.mlp for layer in model.layers)) == 16 * (2 * 128 * 2048 + 2048 + 128)
    assert count(model) == 44_026_586


def test_save_and_load_round_trip(tmp_path, tokens):
    model = tiny(variant=("softmax", "smgk", "mlk"))
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm": "batch"}, "norm must be one of"),
        ({"norm_place": "middle"}, "norm_place must be one of"),
        ({"positions": "learned"}, "positions must be one of"),
        ({"mlp": "tanh"}, "mlp must be one of"),
        ({"variant": ("softmax", "smgk")}, "variant must have one name for all layers or one for each of 16, got 2"),
        ({"variant": "soft"}, "variant must be one of"),
        ({"cutoffs": (60,)}, "cutoffs must increase"),
        ({"embed_dim": 0}, "embed_dim must be a positive integer"),
        ({"embed_dim": 10**30}, r"embed_dim must be below 2\^63"),
        ({"variant": None}, "variant must be a name, or a list of names"),
        ({"cutoffs": 5}, "cutoffs must be a list of token ids, got 5"),
        ({"head_bias": "zz"}, "head_bias must be True or False, got 'zz'"),
        ({"num_kv_heads": "zz"}, "num_kv_heads must be a positive integer"),
        ({"num_components": 0}, "num_components must be a positive integer"),
        ({"attention_dropout": 2}, "attention_dropout must be at least 0 and below 1"),
        ({"dropout": 10**400}, "dropout must be at least 0 and below 1"),
    ],
)
def test_invalid_setting_raises(settings, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(50, **settings)


def test_invalid_input_raises():
    model = tiny()
    with pytest.raises(ValueError, match="tokens"):
        model(torch.rand(2, 3))
    for token in (-1, model.config.vocab_size):
        with pytest.raises(ValueError, match=f"tokens must hold ids .* vocab_size - 1 = {model.config.vocab_size - 1}"):
            model(torch.tensor([[0, token]]))
    with pytest.raises(ValueError, match="caches must have 3 entries"):
        model(torch.zeros(1, 1, dtype=torch.long), caches=model.make_caches(1, 4)[:1])


# torch.compile reads .grad of a group's input.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("variant", ["softmax", "smgk", "mlk"])
def test_all_groups_share_one_compilation(variant, monkeypatch):
    monkeypatch.setattr(decoder, "GROUP_SIZE", 2)
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = tiny(variant=variant, num_layers=6, dropout=0.0).train()
    text = torch.randint(50, (2, 18))
    expected = model.losses(text[:, :-1], text[:, 1:])
    model.compile_layers(count)
    for _ in range(2):
        actual = model.losses(text[:, :-1], text[:, 1:])
        actual.mean().backward()
    torch.compiler.reset()
    assert len(graphs) == 1
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("form", ["paper", "modern"])
def test_positions_of_another_shape_are_refused(form, tokens):
    """Sinusoidal positions would be added to the embedding by broadcasting."""
    model = tiny(form).eval()
    caches = model.make_caches(len(tokens), 12)
    with torch.no_grad():
        model(tokens[:, :5], caches=caches)
        for positions in (torch.arange(6), torch.arange(6).expand(len(tokens), 6)):
            with pytest.raises(ValueError, match=r"position_ids must have shape \[L\] or \[B, L\]"):
                model(tokens[:, 5:6], caches=caches, position_ids=positions)
    assert caches[0].length == 5
