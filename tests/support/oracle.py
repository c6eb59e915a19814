"""The equations of the paper, transcribed literally, as the reference of the tests. Imports torch only.

Everything runs in the dtype of its inputs: float64 is the reference, a lower dtype the baseline of the 2x rule.
Shapes: see mgk/__init__.py.
"""

import math

import torch
from torch import Tensor

INF = float("inf")


def allowed(length: int, size: int, causal: str | Tensor | None) -> Tensor:
    """Return the allowed pairs [L, S]; a tensor is returned unchanged."""
    if isinstance(causal, Tensor):
        return causal
    visible = torch.ones(length, size, dtype=torch.bool)
    return visible if causal is None else visible.tril(size - length if causal == "bottom-right" else 0)


def component_scores(query: Tensor, keys: Tensor, scale=None, tau=1.0) -> Tensor:
    """Return [B, H, M, L, S]: Eq. 9's exponent -|q - k|^2 / 2 sigma^2 for tau 1, Eq. 8's q.k / sigma^2 for tau 0."""
    groups = query.shape[1] // keys.shape[1]
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if isinstance(scale, Tensor) and scale.dim():
        scale = scale[..., None, :] if scale.dim() == 4 else scale.expand(keys.shape[1:3])[None, ..., None, None]
        scale = scale.repeat_interleave(groups, 1) if scale.shape[1] > 1 else scale
    if isinstance(tau, Tensor) and tau.dim():
        tau = tau.expand(keys.shape[1]).repeat_interleave(groups)[:, None, None, None]
    q, k = query[:, :, None, :, None], keys.repeat_interleave(groups, 1)[:, :, :, None]
    distance, product = (q - k).square().sum(-1), (q * k).sum(-1)
    return -tau * scale / 2 * distance + (1 - tau) * scale * product


def full_prior(log_prior: Tensor | None, query: Tensor, keys: Tensor) -> Tensor:
    """Return log_prior as [B, H, M, S]; None is uniform, 1/M."""
    batch, key_heads, components, size, _ = keys.shape
    if log_prior is None:
        log_prior = -torch.tensor(float(components), dtype=query.dtype).log()
    return log_prior.expand(batch, key_heads, components, size).repeat_interleave(query.shape[1] // key_heads, 1)


def mixture(query, keys, value, *, log_prior=None, scale=None, tau=1.0, mask=None, causal=None, hard=False):
    """Return Eq. 10 with the weights of Eq. 8, 9 or 12: output, weights [B, H, L, S], log denominator [B, H, L]."""
    scores = component_scores(query, keys, scale, tau)  # [B, H, M, L, S]
    if not hard:
        scores = scores + full_prior(log_prior, query, keys)[..., None, :]
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.expand(*query.shape[:3], keys.shape[3])[:, :, None]
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask.expand(*query.shape[:3], keys.shape[3])[:, :, None], -INF)
    scores = scores.masked_fill(~allowed(query.shape[2], keys.shape[3], causal), -INF)
    if not keys.shape[3]:
        return value.new_zeros(*query.shape[:3], value.shape[-1]), scores.sum(2), scores.new_full(query.shape[:3], -INF)
    # The largest score of a row is subtracted in numerator and denominator, so that exp does not overflow.
    largest = scores.detach().amax((2, 4), keepdim=True)
    largest = torch.where(largest == -INF, 0, largest)
    numerator = (scores - largest).amax(2).exp() if hard else (scores - largest).exp().sum(2)
    denominator = numerator.sum(-1)
    empty = denominator == 0
    denominator = torch.where(empty, 1, denominator)
    weights = numerator / denominator[..., None]
    lse = torch.where(empty, -INF, largest[:, :, 0, :, 0] + denominator.log())
    return weights @ value.repeat_interleave(query.shape[1] // value.shape[1], 1), weights, lse


def posterior(query, key, log_prior=None, sigma2=None):
    """Return the weights of Eq. 4-5, [B, H, L, S], one Gaussian per key; arguments broadcast to [B, H, S]."""
    size = key.shape[2]
    prior = torch.full((size,), 1 / size, dtype=query.dtype) if log_prior is None else log_prior.exp()
    sigma2 = query.shape[-1] ** 0.5 if sigma2 is None else sigma2[..., None, :]
    density = (-(query[:, :, :, None] - key[:, :, None]).square().sum(-1) / (2 * sigma2)).exp()
    joint = prior[..., None, :] * density
    return joint / joint.sum(-1, keepdim=True)


def responsibilities(query, keys, *, log_prior=None, scale=None, tau=1.0):
    """Return the responsibilities of Eq. 11, [B, H, M, L, S]."""
    scores = component_scores(query, keys, scale, tau) + full_prior(log_prior, query, keys)[..., None, :]
    joint = (scores - scores.amax(2, keepdim=True)).exp()
    return joint / joint.sum(2, keepdim=True)


def m_step(query, gamma):
    """Return Eq. 13 for one head: query [L, D], gamma [M, L, S] -> means [M, S, D], variances [M, S]."""
    count = gamma.sum(1)  # [M, S]
    mean = torch.einsum("mls,ld->msd", gamma, query) / count[..., None]
    distance = (query[None, :, None] - mean[:, None]).square().sum(-1)  # [M, L, S]
    return mean, (gamma * distance).sum(1) / (count * query.shape[-1])


def elu(x: Tensor) -> Tensor:
    """Return elu(x) + 1."""
    return torch.where(x > 0, x + 1, x.masked_fill(x > 0, 0).exp())


FEATURE_MAPS = {"elu": elu, "relu": torch.relu}


def linear(query, keys, value, *, log_prior=None, feature_map="elu", key_mask=None, causal=None):
    """Return Eq. 14 by its L x S sums: output, weights [B, H, L, S]; a row whose denominator is 0 gives 0."""
    phi = FEATURE_MAPS.get(feature_map, feature_map)
    groups = query.shape[1] // keys.shape[1]
    features = phi(keys).repeat_interleave(groups, 1)  # [B, H, M, S, F]
    terms = phi(query)[:, :, None] @ features.mT  # [B, H, M, L, S]
    kernel = (full_prior(log_prior, query, keys).exp()[..., None, :] * terms).sum(2)
    if key_mask is not None:
        kernel = kernel.masked_fill(~key_mask[:, None, None], 0)
    kernel = kernel.masked_fill(~allowed(query.shape[2], keys.shape[3], causal), 0)
    denominator = kernel.sum(-1, keepdim=True)
    denominator = torch.where(denominator == 0, 1, denominator)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return kernel @ value / denominator, kernel / denominator


def state(keys, value, *, log_prior=None, feature_map="elu", key_mask=None):
    """Return the sums of Eq. 14 over all keys: Z [B, Hs, F, E], Hs = lcm(Hk, Hv), and z [B, Hk, F]."""
    prior = full_prior(log_prior, keys[:, :, 0], keys).exp()[..., None]
    mixed = (prior * FEATURE_MAPS[feature_map](keys)).sum(2)  # [B, Hk, S, F]
    if key_mask is not None:
        mixed = mixed * key_mask[:, None, :, None]
    heads = math.lcm(keys.shape[1], value.shape[1])
    features, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (mixed, value))
    return features.transpose(-1, -2) @ value, mixed.sum(2)


def shifted(key: Tensor, shift: Tensor) -> Tensor:
    """Return k_jr = k_j + b_r: [B, Hk, S, D] and [Hk, M, D] -> [B, Hk, M, S, D]."""
    return key[:, :, None] + shift[:, :, None]


def packed(operator, query, keys, value, cu_seqlens_q, cu_seqlens_k, *, log_prior=None, **options):
    """Apply `operator` to each sequence, and join the results along the queries, without the weights."""
    results = []
    for n in range(len(cu_seqlens_q) - 1):
        i, j = slice(*cu_seqlens_q[n : n + 2].tolist()), slice(*cu_seqlens_k[n : n + 2].tolist())
        per_key = log_prior is not None and log_prior.shape[-1] == keys.shape[3]
        prior = log_prior[..., j] if per_key else log_prior
        results.append(operator(query[:, :, i], keys[:, :, :, j], value[:, :, j], log_prior=prior, **options))
    out = torch.cat([result[0] for result in results], 2)
    return out, None, torch.cat([result[-1] for result in results], 2) if operator is mixture else None
