"""mgk.Attention: every variant and preset against the oracle with the layer's weights."""

import dataclasses

import pytest
import torch

import mgk
from mgk import Attention, Variant
from tests.support import oracle
from tests.support.exact import F64, close, randn
from tests.support.layers import EMBED, HK, LINEAR, D, H, L, component_keys, log_prior, make, reference, split

# Axes of the paper's names: (similarity, keys, prior, assignment, components under num_components=3).
MEANING = {
    "softmax": ("dot", "independent", "uniform", "soft", 1),
    "linear": ("linear", "independent", "uniform", "soft", 1),
    "mgk": ("gaussian", "independent", "learned", "soft", 3),
    "smgk": ("gaussian", "shifted", "learned", "soft", 3),
    "mlk": ("linear", "independent", "learned", "soft", 3),
    "smlk": ("linear", "shifted", "learned", "soft", 3),
    "mgk-hard": ("gaussian", "independent", "uniform", "hard", 3),
    "mgk-em": ("gaussian", "independent", "em", "soft", 3),
    "smgk-hard": ("gaussian", "shifted", "uniform", "hard", 3),
    "smgk-em": ("gaussian", "shifted", "em", "soft", 3),
    "gaussian": ("gaussian", "independent", "uniform", "soft", 1),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("preset", mgk.PRESETS)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_every_variant_and_preset_equals_the_oracle(variant, preset, causal):
    layer, x = make(variant, preset=preset, is_causal=causal), randn(2, L, EMBED)
    out, weights = layer(x, need_weights=True)
    expected, expected_weights = reference(layer, x, preset=preset, causal="top-left" if causal else None)
    close(out, expected)
    close(weights, expected_weights)
    close(layer(x), expected)


def test_table_of_variants():
    assert list(mgk.VARIANTS) == list(MEANING)
    for name, (similarity, keys, prior, assignment, components) in MEANING.items():
        layer = Attention(EMBED, H, variant=name, num_components=3)
        axes = (layer.variant.similarity, layer.variant.keys, layer.variant.prior, layer.variant.assignment)
        assert (*axes, layer.num_components) == (similarity, keys, prior, assignment, components)
        assert layer.variant is mgk.VARIANTS[name]
        assert layer.is_linear == (name in LINEAR)
        assert layer.head_dim == EMBED // H
    assert list(mgk.PRESETS) == ["paper", "ref-lra", "ref-lm"]


@pytest.mark.parametrize("components", [1, 3, 4])
@pytest.mark.parametrize("variant", ["mgk", "smgk", "smgk-hard", "mgk-em", "smlk"])
def test_any_number_of_components(variant, components):
    layer, x = make(variant, num_components=components), randn(2, L, EMBED)
    close(layer(x), reference(layer, x)[0])


# The attention layer of LRA (d 64, head dimension 32, with biases); with EM the prior is not a parameter.
PARAMETERS = [
    ("softmax", 8, 66_368),
    ("softmax", 4, 33_216),
    ("mgk", 4, 41_544),
    ("smgk", 4, 33_480),
    ("mgk-em", 4, 41_536),
    ("smgk-em", 4, 33_472),
    ("mgk-hard", 4, 41_536),
    ("smgk-hard", 4, 33_472),
    ("linear", 8, 66_368),
    ("mlk", 4, 41_544),
    ("smlk", 4, 33_480),
]


@pytest.mark.parametrize("variant, heads, count", PARAMETERS)
def test_number_of_parameters(variant, heads, count):
    layer = Attention(64, heads, head_dim=32, variant=variant)
    assert sum(p.numel() for p in layer.parameters()) == count


def test_settings_of_presets():
    start = {preset: Attention(64, 4, head_dim=32, preset=preset) for preset in mgk.PRESETS}
    assert [layer.dropout for layer in start.values()] == [0.0, 0.1, 0.0]
    assert [layer.query.bias is not None for layer in start.values()] == [True, True, False]
    assert [tuple(layer.prior.weights.shape) for layer in start.values()] == [(4, 2, 1), (1, 2, 1), (4, 2, 256)]
    for layer in start.values():
        prior = layer.prior(7, None).exp()
        close(prior, torch.full_like(prior, 0.5), 1e-6)
    assert 0.8 < start["paper"].keys.shifts.std() < 1.2
    for preset in ("ref-lra", "ref-lm"):
        shifts = start[preset].keys.shifts
        assert not shifts[:, 0].any()
        assert 0.35 < shifts[:, 1].std() < 0.65
        assert shifts.requires_grad
    # Arguments override the preset.
    layer = Attention(64, 4, preset="ref-lra", dropout=0.0, bias=False)
    assert layer.dropout == 0
    assert layer.query.bias is None
    with pytest.raises(ValueError, match="num_components must be 2 with this preset"):
        Attention(64, 4, preset="ref-lm", num_components=3)


@pytest.mark.parametrize("factors", [(3.0, 3.0), (3.0, 5.0)])
def test_component_scales_of_a_preset(monkeypatch, factors):
    monkeypatch.setitem(mgk.PRESETS, "scaled", mgk.Preset(component_scales=factors))
    scale, _ = Attention(64, 4, preset="scaled").variance()
    close(torch.as_tensor(scale).expand(2), torch.tensor(factors) / 4, 1e-6)


def test_keys_of_components_start_different():
    for layer in (Attention(EMBED, H, variant="mgk"), Attention(EMBED, H, variant="smgk")):
        keys = component_keys(layer, torch.randn(1, 3, EMBED))
        assert (keys[:, :, 0] - keys[:, :, 1]).abs().max() > 0.1


@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_grouped_heads(variant):
    layer, x = make(variant, num_kv_heads=HK, is_causal=True), randn(2, L, EMBED)
    assert layer.value.out_features == HK * D
    close(layer(x), reference(layer, x, causal="top-left")[0])


@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_cross_attention_with_other_widths(variant):
    layer = make(variant, kdim=7, vdim=3, num_kv_heads=HK)
    query, key, value = randn(2, L, EMBED), randn(2, 13, 7), randn(2, 13, 3)
    out, weights = layer(query, key, value, need_weights=True)
    expected, expected_weights = reference(layer, query, key, value)
    close((out, weights), (expected, expected_weights))
    with pytest.raises(ValueError, match="key is required"):
        layer(query)
    with pytest.raises(ValueError, match="value has length 12, but key has 13"):
        layer(query, key, value[:, :12])


def test_value_defaults_to_key():
    layer, x, memory = make("smgk"), randn(2, L, EMBED), randn(2, 13, EMBED)
    assert torch.equal(layer(x, memory), layer(x, memory, memory))
    assert torch.equal(layer(x), layer(x, x, x))


BETWEEN = [
    Variant("between", "shifted", "learned"),
    Variant("between", "independent", "em"),
    Variant("between", "shifted", "uniform", "hard"),
]


@pytest.mark.parametrize("variant", BETWEEN, ids=lambda v: f"{v.keys}-{v.prior}-{v.assignment}")
def test_learned_tau(variant):
    layer, x = make(variant, num_kv_heads=HK), randn(2, L, EMBED)
    assert layer.tau.shape == (HK,)
    assert torch.equal(Attention(EMBED, H, variant=variant).tau, torch.ones(H))
    q, keys, v = split(layer.query(x), H), component_keys(layer, x), split(layer.value(x), HK)
    hard = variant.assignment == "hard"
    out = oracle.mixture(q, keys, v, log_prior=log_prior(layer, L), tau=layer.tau, hard=hard)[0]
    close(layer(x), layer.out(out.transpose(1, 2).flatten(2)))
    layer(x).sum().backward()
    assert layer.tau.grad.abs().min() > 0


@pytest.mark.parametrize("keys", ["independent", "shifted"])
@pytest.mark.parametrize("prior", ["uniform", "learned", "em"])
@pytest.mark.parametrize("variance", ["learned", "em"])
def test_unequal_variances_include_the_normalizer(keys, prior, variance):
    layer, x = make(Variant("gaussian", keys, prior, variance=variance), num_kv_heads=HK), randn(2, L, EMBED)
    start = Attention(EMBED, H, head_dim=D, variant=layer.variant).variance.log_variance
    close(start.exp().double(), torch.full((H, 2), D**0.5, dtype=F64), 1e-6)
    with torch.no_grad():
        layer.variance.log_variance.copy_(randn(HK, 2))
    variances = layer.variance.log_variance.exp()
    prior = log_prior(layer, L)
    prior = torch.tensor(0.5, dtype=F64).log() if prior is None else prior
    q, k, v = split(layer.query(x), H), component_keys(layer, x), split(layer.value(x), HK)
    normalized = prior + (D / 2 * (1 / variances).log())[..., None]
    out = oracle.mixture(q, k, v, log_prior=normalized, scale=1 / variances)[0]
    close(layer(x), layer.out(out.transpose(1, 2).flatten(2)))
    assert isinstance(layer.variance.log_variance, torch.nn.Parameter) == (variance == "learned")
    if variance == "learned":
        layer(x).sum().backward()
        assert layer.variance.log_variance.grad.abs().min() > 0


@pytest.mark.parametrize("keys", ["independent", "shifted"])
def test_normalized_queries_and_keys(keys):
    """Normalize queries and projected keys before shifts. With one component and no shift this is Eq. 6."""
    layer, x = make(Variant("gaussian", keys, normalise=True)), randn(2, L, EMBED)
    unit = lambda t: t / t.norm(dim=-1, keepdim=True)  # noqa: E731
    close(layer(x), reference(layer, x, rotate=unit)[0])
    layer = make(Variant("gaussian", "independent", "uniform", normalise=True, components=1))
    q, k = (unit(split(t, H)) for t in (layer.query(x), layer.keys.projection(x)))
    close(layer(x, need_weights=True)[1], (q @ k.mT / D**0.5).softmax(-1))


def test_custom_variant():
    mine = Variant("dot", "independent", "learned", components=3)
    layer, x = make(mine, num_components=2), randn(2, L, EMBED)
    assert layer.variant == mine
    assert layer.num_components == 3
    close(layer(x), reference(layer, x)[0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        mine.prior = "em"
    assert dataclasses.replace(mine, prior="em").prior == "em"


INVALID = [
    ({"similarity": "cosine"}, "similarity must be one of 'gaussian', 'dot', 'between', 'linear'"),
    ({"keys": "random"}, "keys must be one of 'independent', 'shifted'"),
    ({"prior": "flat"}, "prior must be one of 'uniform', 'learned', 'em'"),
    ({"assignment": "firm"}, "assignment must be one of 'soft', 'hard'"),
    ({"variance": None}, "variance must be one of 'fixed', 'learned', 'em'"),
    ({"assignment": "hard"}, "prior must be 'uniform'"),
    ({"assignment": "hard", "prior": "uniform", "variance": "learned"}, "variance must be 'fixed'"),
    ({"similarity": "linear", "assignment": "hard", "prior": "uniform"}, "'linear'"),
    ({"similarity": "linear", "prior": "em"}, "'linear'"),
    ({"similarity": "linear", "variance": "learned"}, "'linear'"),
    ({"similarity": "linear", "normalise": True}, "'linear'"),
    ({"em_momentum": 1.0}, "em_momentum"),
    ({"em_momentum": -0.1}, "em_momentum"),
    ({"variance_floor": 0.0}, "variance_floor"),
    ({"components": 0}, "components"),
    ({"components": 2.5}, "components"),
    ({"normalise": 1}, "normalise"),
]


@pytest.mark.parametrize("fields, message", INVALID, ids=lambda x: str(x)[:40])
def test_invalid_variant_raises(fields, message):
    with pytest.raises(ValueError, match=message):
        Variant(**fields)


@pytest.mark.parametrize("feature_map", ["elu", "relu"])
@pytest.mark.parametrize("variant", ["mlk", "smlk"])
def test_linear_attention_to_keys_without_prior_is_zero(variant, feature_map):
    """Clamped priors can all fall to 0; the first position then has no key, and its gradients must not overflow."""
    layer = mgk.Attention(8, 2, variant=variant, preset="ref-lm", feature_map=feature_map, is_causal=True)
    with torch.no_grad():
        layer.prior.weights[:, :, 0] = -0.01
    x = torch.randn(2, 6, 8, requires_grad=True)
    output = layer(x)
    output.square().sum().backward()
    torch.testing.assert_close(output[:, 0], layer.out.bias.expand(2, 8) if layer.out.bias is not None else 0 * x[:, 0])
    assert all(bool(y.grad.isfinite().all()) for y in (x, *layer.parameters()))
    assert layer.query.weight.grad.norm() > 0
