"""mgk.Attention: every variant and preset against the oracle fed with the layer's own weights, and each option."""

import dataclasses
import math

import oracle
import pytest
import torch
from exact import F64, close, randn
from safetensors.torch import load_file, save_file

import mgk
from mgk import Attention, Variant

EMBED, H, HK, D, L = 12, 4, 2, 5, 9
MIXTURES = [name for name, variant in mgk.VARIANTS.items() if variant.similarity != "linear"]
LINEAR = ["linear", "mlk", "smlk"]

# What a paper's name must mean: (similarity, keys, prior, assignment, components under num_components=3).
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
}


@torch.no_grad()
def scrambled(layer):
    """The layer with every parameter and EM prior moved off its start, so that nothing can be left out unseen."""
    for name, parameter in layer.named_parameters():
        clamped = name == "prior.weights" and layer.prior.clamped
        parameter.copy_(
            torch.rand_like(parameter) * 1.2 + 0.1 if clamped else parameter + 0.4 * randn(*parameter.shape)
        )
    if hasattr(layer.prior, "prior"):
        layer.prior.prior.copy_(randn(*layer.prior.prior.shape).softmax(1))
    return layer.eval()


def make(variant, heads=H, **options):
    options = {"head_dim": D, "dtype": F64, **options}
    return scrambled(Attention(EMBED, heads, variant=variant, **options))


def split(x, heads):
    """[B, L, heads * D] -> [B, heads, L, D]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def component_keys(layer, key, preset="paper", rotate=None):
    projected, heads = layer.keys.projection(key), layer.num_kv_heads
    rotate = rotate or (lambda x: x)
    if layer.variant.keys == "independent":
        return rotate(projected.unflatten(-1, (heads, layer.num_components, -1)).permute(0, 2, 3, 1, 4))
    sign = 1 if preset == "paper" else -1  # the authors' code has k - mu
    return oracle.shifted(rotate(split(projected, heads)), sign * layer.keys.shifts)


def log_prior(layer, size, preset="paper"):
    """[Hk or 1, M, S or 1], or None for a uniform one."""
    kind = layer.variant.prior
    if kind == "uniform":
        return None
    if kind == "em":
        return layer.prior.prior.log()[..., :size]
    if preset == "paper":
        return layer.prior.weights.log_softmax(1)
    return layer.prior.weights.clamp(0, 1).log()[..., :size]


def reference(layer, query, key=None, value=None, *, preset="paper", causal=None, mask=None, rotate=None):
    """Output and weights of a layer, written out. mask is SDPA's, or for linear attention the key mask."""
    key = query if key is None else key
    value = split(layer.value(key if value is None else value), layer.num_kv_heads)
    q = split(layer.query(query), layer.num_heads)
    q = q if rotate is None else rotate(q)
    keys = component_keys(layer, key, preset, rotate)
    prior, width = log_prior(layer, keys.shape[3], preset), layer.head_dim
    if layer.variant.similarity == "linear":
        out, weights = linear_reference(q, keys, value, prior, preset, causal, mask)
    else:
        scale = {"paper": width**-0.5, "ref-lra": 32**-0.5, "ref-lm": width**-0.5 * torch.tensor([1.0, 3.0], dtype=F64)}
        scale = scale[preset][:1] if preset == "ref-lm" and layer.num_components == 1 else scale[preset]
        tau = 0.0 if layer.variant.similarity == "dot" else 1.0
        hard = layer.variant.assignment == "hard"
        options = {"log_prior": prior, "scale": scale, "tau": tau, "mask": mask, "causal": causal, "hard": hard}
        out, weights, _ = oracle.mixture(q, keys, value, **options)
    return layer.out(out.transpose(1, 2).flatten(2)), weights


def linear_reference(q, keys, value, prior, preset, causal, mask):
    if preset == "ref-lra":  # mixed before the map, no denominator, both sides times S^(-1/4)
        mixed = (oracle.full_prior(prior, q, keys).exp()[..., None] * keys).sum(2)
        weights = oracle.elu(q) @ oracle.elu(mixed).mT / keys.shape[3] ** 0.5
        weights = weights * oracle.allowed(q.shape[2], keys.shape[3], causal)
        return weights @ value, weights
    if preset == "ref-lm":  # features of a token sum to 1, the output is divided by sqrt D

        def l1(x):
            return oracle.elu(x) / oracle.elu(x).sum(-1, keepdim=True)

        out, weights = oracle.linear(q, keys, value, log_prior=prior, feature_map=l1, causal=causal)
        return out / q.shape[-1] ** 0.5, weights / q.shape[-1] ** 0.5
    return oracle.linear(q, keys, value, log_prior=prior, key_mask=mask, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("preset", mgk.PRESETS)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_every_variant_and_preset_is_the_oracle(variant, preset, causal):
    layer, x = make(variant, preset=preset, is_causal=causal), randn(2, L, EMBED)
    out, weights = layer(x, need_weights=True)
    wanted, wanted_weights = reference(layer, x, preset=preset, causal="top-left" if causal else None)
    close(out, wanted)
    close(weights, wanted_weights)
    close(layer(x), wanted)


def test_the_table_of_variants_is_the_papers():
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


# The attention layer of LRA (d 64, head width 32, with biases); by EM the prior is no parameter.
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
def test_the_number_of_parameters(variant, heads, count):
    layer = Attention(64, heads, head_dim=32, variant=variant)
    assert sum(p.numel() for p in layer.parameters()) == count


def test_what_a_preset_sets():
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
    # What is said beats the preset.
    layer = Attention(64, 4, preset="ref-lra", dropout=0.0, bias=False)
    assert layer.dropout == 0
    assert layer.query.bias is None
    with pytest.raises(ValueError, match="num_components must be 2 under this preset"):
        Attention(64, 4, preset="ref-lm", num_components=3)


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
def test_cross_attention_with_its_own_widths(variant):
    layer = make(variant, kdim=7, vdim=3, num_kv_heads=HK)
    query, key, value = randn(2, L, EMBED), randn(2, 13, 7), randn(2, 13, 3)
    out, weights = layer(query, key, value, need_weights=True)
    wanted, wanted_weights = reference(layer, query, key, value)
    close((out, weights), (wanted, wanted_weights))
    with pytest.raises(ValueError, match="key is needed"):
        layer(query)
    with pytest.raises(ValueError, match="value has length 12, but key has 13"):
        layer(query, key, value[:, :12])


def test_the_value_is_the_key_by_default():
    layer, x, memory = make("smgk"), randn(2, L, EMBED), randn(2, 13, EMBED)
    assert torch.equal(layer(x, memory), layer(x, memory, memory))
    assert torch.equal(layer(x), layer(x, x, x))


LENGTHS = (5, 1, 8)
CU = torch.tensor([0, 5, 6, 14], dtype=torch.int32)


@pytest.mark.parametrize("options", [{}, {"rotary": 100.0}, {"max_positions": 14}], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_packed_sequences_are_separate_sequences(variant, causal, options):
    layer, x = make(variant, is_causal=causal, num_kv_heads=HK, **options), randn(1, 14, EMBED)
    wanted = torch.cat([layer(part) for part in x.split(LENGTHS, 1)], 1)
    close(layer(x, cu_seqlens=CU), wanted)
    assert (layer(x) - wanted).abs().max() > 1e-3


def test_packed_sequences_go_with_self_attention_alone():
    layer, x = make("smgk"), randn(1, 14, EMBED)
    with pytest.raises(ValueError, match="cu_seqlens goes with self-attention without a cache"):
        layer(x, x.clone(), cu_seqlens=CU)
    with torch.no_grad(), pytest.raises(ValueError, match="cu_seqlens goes with self-attention without a cache"):
        layer(x, cu_seqlens=CU, cache=layer.make_cache(1, 20))


def turn(base, positions, width=D):
    """Rotary positions, written out: pair n of the halves turns by position * base^(-n / pairs)."""
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
def test_rotary_turns_queries_and_keys_before_the_shift(variant):
    layer, x = make(variant, rotary=50.0, num_kv_heads=HK), randn(2, L, EMBED)
    close(layer(x), reference(layer, x, rotate=turn(50.0, torch.arange(L)))[0], ANGLES)
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5])
    close(layer(x, position_ids=ids), reference(layer, x, rotate=turn(50.0, ids))[0], ANGLES)


def test_a_callable_as_rotary():
    calls = []

    def rotary(x, positions):
        calls.append((x.dim(), positions.tolist()))
        return x * (1 + positions[:, None])

    layer, x = make("mgk", rotary=rotary), randn(2, 4, EMBED)
    close(layer(x), reference(layer, x, rotate=lambda x: x * (1 + torch.arange(4)[:, None]))[0])
    assert calls == [(4, [0, 1, 2, 3]), (5, [0, 1, 2, 3])]


@pytest.mark.parametrize("variant", ["softmax", "mgk", "mgk-hard"])
def test_rotary_attention_sees_distances_alone(variant):
    layer, x = make(variant, rotary=10000.0), randn(2, L, EMBED)
    near, far = (layer(x, position_ids=torch.arange(L) + start) for start in (0, 100))
    close(near, far, 1e-4)
    stretched = layer(x, position_ids=2 * torch.arange(L))
    assert (near - stretched).abs().max() > 1e-2


@pytest.mark.parametrize("options", [{"rotary": 50.0}, {"max_positions": 12}], ids=str)
def test_position_ids_for_each_row(options):
    layer, x = make("smgk-em", **options), randn(2, L, EMBED)
    ids = torch.stack([torch.arange(L), torch.arange(L) + 3])
    out = layer(x, position_ids=ids)
    for n in range(2):
        close(out[n : n + 1], layer(x[n : n + 1], position_ids=ids[n]))
    close(out[:1], layer(x[:1]))
    assert (out[1:] - layer(x[1:])).abs().max() > 1e-4
    close(layer(x, position_ids=ids[1:]), layer(x, position_ids=ids[1]))


@pytest.mark.parametrize("variant, preset", [("smgk-em", "paper"), ("mgk", "ref-lm"), ("smlk", "ref-lm")])
def test_priors_per_position_have_a_last_position(variant, preset):
    limit = 256 if preset == "ref-lm" else 6
    layer = make(variant, preset=preset, **({} if preset == "ref-lm" else {"max_positions": limit}))
    assert layer.prior(limit, None).shape == (H, 2, limit)
    x = randn(1, limit + 1, EMBED)
    layer(x[:, :limit])
    with pytest.raises(ValueError, match=f"has {limit + 1} positions, but the prior has {limit}"):
        layer(x)
    with pytest.raises(ValueError, match=f"has {limit + 1} positions, but the prior has {limit}"):
        layer(x[:, :2], position_ids=torch.tensor([0, limit]))


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
    found = layer(x, attn_mask=mask, key_padding_mask=padding)
    close(found, reference(layer, x, mask=both, causal="top-left")[0])
    added = randn(*shape)
    found = layer(x, attn_mask=added, key_padding_mask=padding)
    hidden = added.expand(2, -1, L, L) if len(shape) == 4 else added.expand(2, 1, L, L)
    hidden = hidden.masked_fill(padding[:, None, None], -math.inf)
    close(found, reference(layer, x, mask=hidden, causal="top-left")[0])


def test_linear_attention_says_that_it_takes_no_attn_mask():
    with pytest.raises(ValueError, match="attn_mask does not go with linear attention"):
        make("mlk")(randn(2, L, EMBED), attn_mask=torch.ones(L, L, dtype=torch.bool))


BETWEEN = [
    Variant("between", "shifted", "learned"),
    Variant("between", "independent", "em"),
    Variant("between", "shifted", "uniform", "hard"),
]


@pytest.mark.parametrize("variant", BETWEEN, ids=lambda v: f"{v.keys}-{v.prior}-{v.assignment}")
def test_a_learned_tau(variant):
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
def test_free_variances_come_with_their_normaliser(keys, prior, variance):
    layer, x = make(Variant("gaussian", keys, prior, variance=variance), num_kv_heads=HK), randn(2, L, EMBED)
    start = Attention(EMBED, H, head_dim=D, variant=layer.variant).variance.log_variance
    close(start.exp().double(), torch.full((H, 2), D**0.5, dtype=F64), 1e-6)
    with torch.no_grad():
        layer.variance.log_variance.copy_(randn(HK, 2))
    variances = layer.variance.log_variance.exp()
    given = log_prior(layer, L)
    given = torch.tensor(0.5, dtype=F64).log() if given is None else given
    q, k, v = split(layer.query(x), H), component_keys(layer, x), split(layer.value(x), HK)
    normalised = given + (D / 2 * (1 / variances).log())[..., None]
    out = oracle.mixture(q, k, v, log_prior=normalised, scale=1 / variances)[0]
    close(layer(x), layer.out(out.transpose(1, 2).flatten(2)))
    assert isinstance(layer.variance.log_variance, torch.nn.Parameter) == (variance == "learned")
    if variance == "learned":
        layer(x).sum().backward()
        assert layer.variance.log_variance.grad.abs().min() > 0


@pytest.mark.parametrize("keys", ["independent", "shifted"])
def test_normalised_queries_and_keys(keys):
    """Norm 1 for queries and projected keys; shifts come after. With one component and no shift it is Eq. 6."""
    layer, x = make(Variant("gaussian", keys, normalise=True)), randn(2, L, EMBED)
    unit = lambda t: t / t.norm(dim=-1, keepdim=True)  # noqa: E731
    close(layer(x), reference(layer, x, rotate=unit)[0])
    layer = make(Variant("gaussian", "independent", "uniform", normalise=True, components=1))
    q, k = (unit(split(t, H)) for t in (layer.query(x), layer.keys.projection(x)))
    close(layer(x, need_weights=True)[1], (q @ k.mT / D**0.5).softmax(-1))


def test_a_variant_of_ones_own():
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
def test_an_invalid_variant_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Variant(**fields)


STATEFUL = [
    ("mgk", {}),
    ("smgk", {"preset": "ref-lm"}),
    ("smgk-em", {"max_positions": 11}),
    ("mlk", {}),
    (Variant("between", "shifted", "em", variance="em"), {}),
    (Variant("gaussian", "independent", "learned", variance="learned"), {"rotary": 100.0}),
]


@pytest.mark.parametrize("variant, options", STATEFUL, ids=lambda x: str(x)[:30])
def test_weights_survive_a_file(variant, options, tmp_path):
    layer, x = make(variant, **options), randn(2, L, EMBED)
    other = make(variant, **options)
    assert (other(x) - layer(x)).abs().max() > 1e-3
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(other(x), layer(x))
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    third = make(variant, **options)
    third.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(third(x), layer(x))


def test_favor_directions_survive_a_file():
    layer, x = make("mlk", feature_map=mgk.FAVOR(D)), randn(2, L, EMBED)
    other = make("mlk", feature_map=mgk.FAVOR(D))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("variant, options", STATEFUL, ids=lambda x: str(x)[:30])
def test_weights_loaded_into_a_layer_made_on_the_meta_device(variant, options):
    layer, x = make(variant, **options), randn(2, L, EMBED)
    empty = Attention(EMBED, H, head_dim=D, variant=variant, device="meta", dtype=F64, **options).eval()
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), layer(x))


@pytest.mark.parametrize("options", [{}, {"rotary": 100.0, "is_causal": True, "num_kv_heads": HK}], ids=str)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_shapes_flow_on_the_meta_device(variant, options):
    layer = Attention(EMBED, H, variant=variant, device="meta", **options)
    x = torch.empty(2, L, EMBED, device="meta")
    assert layer(x).shape == layer.eval()(x).shape == x.shape
    assert layer(x, need_weights=True)[1].shape == (2, H, L, L)


def test_repr_says_what_it_is():
    text = repr(Attention(EMBED, H, head_dim=D, variant="mgk-hard", num_components=3))
    for part in (
        "12, heads=4, head_dim=5",
        "components=3",
        "'gaussian'",
        "'independent'",
        "'uniform'",
        "'hard'",
        "'fixed'",
    ):
        assert part in text


@pytest.mark.parametrize("variant", ["smgk", "mlk", "softmax"])
def test_dropout_is_for_training(variant):
    layer, x = make(variant, dropout=0.5), randn(1, L, EMBED)
    wanted = layer(x)
    assert torch.equal(layer(x), wanted)
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    draws = layer(x.expand(4000, -1, -1))
    close(draws.mean(0, keepdim=True), wanted, 0.25)


def test_width_and_heads():
    with pytest.raises(ValueError, match="num_heads = 5 does not divide embed_dim = 12: pass head_dim"):
        Attention(EMBED, 5)
    with pytest.raises(ValueError, match="num_kv_heads = 3 must divide num_heads = 4"):
        Attention(EMBED, H, num_kv_heads=3)
    assert Attention(EMBED, 5, head_dim=3)(torch.randn(2, L, EMBED)).shape == (2, L, EMBED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_lower_precision_layers(variant, dtype):
    layer, x = make(variant, is_causal=True, num_kv_heads=HK), randn(2, L, EMBED)
    wanted = layer(x)
    out = layer.to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    assert (out - wanted).abs().max() < 40 * torch.finfo(dtype).eps * wanted.abs().max()
