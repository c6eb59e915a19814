"""Differential and latent attention against literal references of their papers' equations, in fp64."""

import math

import pytest
import torch

from experiments.cost_quality import query_shifts, rivals
from mgk import Attention
from mgk.models import DecoderConfig, LanguageModel
from mgk.models.decoder import FORMS

EMBED, WIDTH, LENGTH = 24, 8, 7


def randomize(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.double()


def rotate(vector, position, base=10000.0):
    """Rotate one vector: pair n is features n and n + D/2."""
    half, result = len(vector) // 2, vector.clone()
    for n in range(half):
        angle = position * base ** (-n / half)
        first, second = vector[n], vector[n + half]
        result[n] = first * math.cos(angle) - second * math.sin(angle)
        result[n + half] = first * math.sin(angle) + second * math.cos(angle)
    return result


def softmax_row(logits):
    exponentials = [math.exp(logit - max(logits)) for logit in logits]
    return [value / sum(exponentials) for value in exponentials]


def rms_norm(vector, weight):
    return vector / torch.sqrt((vector**2).mean() + rivals.EPS) * weight


def differential_reference(layer, x, layer_number):
    heads, kv_heads, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
    initial = 0.8 - 0.6 * math.exp(-0.3 * (layer_number - 1))  # Eq. 3; layers count from 1
    (q1, q2), (k1, k2) = layer.lambdas
    factor = math.exp(q1 @ k1) - math.exp(q2 @ k2) + initial  # Eq. 2
    rows = []
    for i in range(len(x)):
        outputs = []
        for head in range(heads):
            kv_head = head * kv_heads // heads
            query = layer.query.weight @ x[i]
            maps = []
            for n in range(2):
                begin = (2 * head + n) * width
                rotated = rotate(query[begin : begin + width], i)
                key_begin = (2 * kv_head + n) * width
                keys = [rotate((layer.key.weight @ x[j])[key_begin : key_begin + width], j) for j in range(i + 1)]
                maps.append(softmax_row([float(rotated @ key) / math.sqrt(width) for key in keys]))
            values = [
                (layer.value.weight @ x[j])[2 * kv_head * width : 2 * (kv_head + 1) * width] for j in range(i + 1)
            ]
            mixed = sum((a - factor * b) * value for a, b, value in zip(*maps, values, strict=True))  # Eq. 1
            outputs.append((1 - initial) * rms_norm(mixed, layer.head_norm.weight))
        rows.append(layer.out.weight @ torch.cat(outputs))
    return torch.stack(rows)


def latent_reference(layer, x):
    heads, width, rotary = layer.num_heads, layer.head_dim, layer.rotary_dim
    rows = []
    for i in range(len(x)):
        query = layer.query.weight @ rms_norm(layer.query_latent.weight @ x[i], layer.query_norm.weight)
        outputs = []
        for head in range(heads):
            part = query[head * (width + rotary) : (head + 1) * (width + rotary)]
            logits, values = [], []
            for j in range(i + 1):
                latent = rms_norm(layer.latent.weight @ x[j], layer.latent_norm.weight)
                own_part = slice(head * width, (head + 1) * width)
                logit = part[:width] @ (layer.key.weight @ latent)[own_part]
                logit = logit + rotate(part[width:], i) @ rotate(layer.rotary_key.weight @ x[j], j)
                logits.append(float(logit) / math.sqrt(width + rotary))
                values.append((layer.value.weight @ latent)[own_part])
            weights = softmax_row(logits)
            outputs.append(sum(weight * value for weight, value in zip(weights, values, strict=True)))
        rows.append(layer.out.weight @ torch.cat(outputs))
    return torch.stack(rows)


@pytest.mark.parametrize(("heads", "kv_heads", "layer_index"), [(4, 4, 0), (4, 2, 3)])
@torch.no_grad()
def test_differential_attention_matches_its_equations(heads, kv_heads, layer_index):
    layer = randomize(rivals.DifferentialAttention(EMBED, heads, kv_heads, WIDTH, layer_index=layer_index))
    x = torch.randn(LENGTH, EMBED, dtype=torch.float64)
    torch.testing.assert_close(layer(x[None])[0], differential_reference(layer, x, layer_index + 1))


@torch.no_grad()
def test_latent_attention_matches_its_equations():
    layer = randomize(rivals.LatentAttention(EMBED, 3, WIDTH, latent_dim=10, query_latent_dim=12, rotary_dim=4))
    x = torch.randn(LENGTH, EMBED, dtype=torch.float64)
    torch.testing.assert_close(layer(x[None])[0], latent_reference(layer, x))


@pytest.mark.parametrize("variant", ["diff", "mla", "smgk-query-shifts"])
def test_rivals_in_a_language_model(variant):
    config = DecoderConfig(
        50, embed_dim=32, ffn_dim=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, variant=variant,
        **FORMS["modern"],
    )  # fmt: skip
    model = LanguageModel(config).eval()
    tokens = torch.randint(0, 50, (2, 9))
    hidden = model.hidden(tokens)
    torch.testing.assert_close(model.last_hidden(tokens), hidden[:, -1])
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 50
    torch.testing.assert_close(model.hidden(changed)[:, :6], hidden[:, :6])
    model.losses(tokens, tokens).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.layers.named_parameters())
    with pytest.raises(ValueError, match=f"got '{variant}'"):
        model.make_caches(1, 8)


def test_rivals_have_the_cache_of_softmax_with_the_same_heads():
    config = DecoderConfig(50, embed_dim=512, num_heads=8, num_kv_heads=4, head_dim=64, variant="mla")
    options = {"layer_index": 0, "is_causal": True, "rotary": 10000.0}
    latent = rivals.make_latent(config, **options)
    differential = rivals.make_differential(config, **options)
    assert latent.cache_width == 2 * 4 * 64
    assert differential.key.out_features + differential.value.out_features == 2 * 4 * 64


def test_rivals_refuse_what_they_lack():
    layer = rivals.DifferentialAttention(EMBED, 4, 4, WIDTH)
    with pytest.raises(ValueError, match="key_padding_mask is not supported"):
        layer(torch.randn(1, 3, EMBED), key_padding_mask=torch.zeros(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="num_heads must be even"):
        rivals.DifferentialAttention(EMBED, 3, 3, WIDTH)


def test_query_shifts_are_attention_with_repeated_keys():
    """Repeat the keys of each key head for its query heads: outputs and all gradients equal those of mgk.Attention."""
    options = {"head_dim": WIDTH, "num_kv_heads": 4, "is_causal": True, "rotary": 10000.0}
    layer = randomize(query_shifts.QueryShiftAttention(EMBED, 4, num_key_heads=2, **options))
    full = Attention(EMBED, 4, **options).double()
    weights = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    for name in ("keys.projection.weight", "keys.projection.bias"):
        weights[name] = weights[name].unflatten(0, (2, WIDTH)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(weights)
    x = torch.randn(2, LENGTH, EMBED, dtype=torch.float64)
    output, expected = layer(x), full(x)
    torch.testing.assert_close(output, expected)
    probe = torch.randn_like(output)
    (output * probe).sum().backward()
    (expected * probe).sum().backward()
    for (name, first), second in zip(layer.named_parameters(), full.parameters(), strict=True):
        gradient = second.grad
        if name.startswith("keys.projection"):
            gradient = gradient.unflatten(0, (2, 2, WIDTH)).sum(1).flatten(0, 1)
        torch.testing.assert_close(first.grad, gradient)


def test_equal_shifts_of_query_heads_are_shifts_of_key_heads():
    options = {"head_dim": WIDTH, "num_kv_heads": 4, "num_key_heads": 2, "is_causal": True}
    layer = randomize(query_shifts.QueryShiftAttention(EMBED, 4, **options))
    shared = Attention(EMBED, 4, **options).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.shape[0] == 4:  # shifts and priors, per query head
                parameter.copy_(parameter[[0, 0, 2, 2]])
            shared.get_parameter(name).copy_(parameter[::2] if parameter.shape[0] == 4 else parameter)
    x = torch.randn(2, LENGTH, EMBED, dtype=torch.float64)
    torch.testing.assert_close(layer(x), shared(x))
    assert layer.cache_width == (2 + 4) * WIDTH
    with pytest.raises(ValueError, match="cache is not supported"):
        layer.make_cache(1, 8)
