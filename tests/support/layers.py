"""Layers with random parameters, and the oracle with their weights."""

import torch

import mgk
from mgk import Attention
from tests.support import oracle
from tests.support.exact import F64, randn

EMBED, H, HK, D, L = 12, 4, 2, 5, 9
MIXTURES = [name for name, variant in mgk.VARIANTS.items() if variant.similarity != "linear"]
LINEAR = ["linear", "mlk", "smlk"]


@torch.no_grad()
def scrambled(layer):
    """Move every parameter and EM prior off its initial value, so that each affects the output."""
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
    """Reshape [B, L, heads * D] to [B, heads, L, D]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def component_keys(layer, key, preset="paper", rotate=None):
    projected, heads = layer.keys.projection(key), layer.num_key_heads
    rotate = rotate or (lambda x: x)
    if layer.variant.keys == "independent":
        return rotate(projected.unflatten(-1, (heads, layer.num_components, -1)).permute(0, 2, 3, 1, 4))
    sign = 1 if preset == "paper" else -1  # the authors' code has k - mu
    return oracle.shifted(rotate(split(projected, heads)), sign * layer.keys.shifts)


def log_prior(layer, size, preset="paper"):
    """Return the log prior, [Hk or 1, M, S or 1], or None if it is uniform."""
    kind = layer.variant.prior
    if kind == "uniform":
        return None
    if kind == "em":
        return layer.prior.prior.log()[..., :size]
    if preset == "paper":
        return layer.prior.weights.log_softmax(1)
    return layer.prior.weights.clamp(0, 1).log()[..., :size]


def reference(layer, query, key=None, value=None, *, preset="paper", causal=None, mask=None, rotate=None):
    """Return output and weights of a layer, written out. mask is SDPA's, or for linear attention the key mask."""
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
