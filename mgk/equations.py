"""The equations of the paper in log space, twice differentiable; the eager backend runs them.

Nguyen et al., "Improving Transformers with Probabilistic Attention Keys", ICML 2022 (arXiv 2110.08678).
B batch, H heads, M components, L queries, S keys, D head dimension, E value dimension, F features; i, j, r index
queries, keys and components. scale is λ = 1/σ², log_prior is log π, and tau interpolates between Eq. 8 (0, dot
products) and Eq. 9 (1, Gaussian keys).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def safe_softmax(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return softmax and logsumexp over `dim`; zeros and -inf, with zero gradients, if all logits are -inf.

    Examples:
        >>> logits = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])
        >>> mgk.equations.safe_softmax(logits, dim=-1)
        (tensor([[0.5000, 0.5000],
                [0.0000, 0.0000]]), tensor([0.6931,   -inf]))
    """
    empty = (logits == -math.inf).all(dim, keepdim=True)
    logits = logits.masked_fill(empty, 0)
    # The gradient of logsumexp is exp(logits - lse), which the rounding error of a large lse would scale.
    largest = logits.detach().amax(dim, keepdim=True) if logits.shape[dim] > 0 else logits.new_zeros(empty.shape)
    logits = logits - largest
    lse = (logits.logsumexp(dim) + largest.squeeze(dim)).masked_fill(empty.squeeze(dim), -math.inf)
    return logits.softmax(dim).masked_fill(empty, 0), lse


def squared_norms(x: Tensor) -> Tensor:
    """Return ‖x‖² over the last dimension, at most the largest number: masked padding times τ = 0 stays 0.

    Examples:
        >>> mgk.equations.squared_norms(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        tensor([25.,  1.])
    """
    return x.square().sum(-1).clamp(max=torch.finfo(x.dtype).max)


def posterior(query: Tensor, key: Tensor, log_prior: Tensor | None = None, variance: Tensor | None = None) -> Tensor:
    """Compute P(t_j = 1 | q_i), Eq. 4–5, for keys that are Gaussians N(k_j, σ_j²I) with priors π_j.

    As in the paper, the normalizers of the Gaussians are omitted.

    Args:
        query: [B, H, L, D].
        key: [B, H, S, D].
        log_prior: log π_j, broadcastable to [B, H, S]. Default: uniform.
        variance: σ_j², broadcastable to [B, H, S]. Default: √D.

    Returns:
        Weights [B, H, L, S].

    Examples:
        >>> query, key = torch.randn(2, 1, 2, 10, 8)
        >>> prior = torch.rand(1, 2, 10).softmax(-1)
        >>> weights = mgk.equations.posterior(query, key, prior.log())
        >>> torch.allclose(weights.sum(-1), torch.ones(1, 2, 10))
        True
    """
    scale = 1 / math.sqrt(query.shape[-1]) if variance is None else (1 / variance).unsqueeze(-2)
    if log_prior is not None:
        log_prior = log_prior.unsqueeze(-2)
    logits, _ = component_logits(query, key.unsqueeze(-3), log_prior, scale)
    return safe_softmax(logits.squeeze(-2), -1)[0]


def normalised_posterior(query: Tensor, key: Tensor) -> Tensor:
    """Compute Eq. 6: with q and k of norm 1, variances √D and a uniform prior, Eq. 5 is softmax(q·k/√D).

    Examples:
        >>> query, key = torch.nn.functional.normalize(torch.randn(2, 1, 2, 10, 16), dim=-1)
        >>> softmax = (query @ key.mT / 4).softmax(-1)
        >>> torch.allclose(mgk.equations.normalised_posterior(query, key), softmax, atol=1e-6)
        True
    """
    query, key = (x / x.norm(dim=-1, keepdim=True) for x in (query, key))
    return posterior(query, key)


def component_logits(
    query: Tensor,
    keys: Tensor,
    log_prior: Tensor | None = None,
    scale: float | Tensor = 1.0,
    tau: float | Tensor = 1.0,
    *,
    exact_ties: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the logits of Eq. 7–9, ℓ_ijr = log π_jr + λ q_i·k_jr − τ λ/2 (‖q_i‖² + ‖k_jr‖²).

    At τ = 1 the last terms are −λ/2 ‖q_i − k_jr‖². If λ is the same for all keys and components, ‖q_i‖² cancels in
    every softmax and would only cost precision: it is omitted from the logits and returned separately.

    Args:
        query: [B, H, L, D].
        keys: [B, H, M, S, D].
        log_prior: Broadcastable to [B, H, M, S].
        scale: λ, broadcastable to [B, H, M, S].
        tau: Broadcastable to [H].
        exact_ties: Whether equal components must get bitwise equal logits.

    Returns:
        Logits [B, H, L, M, S], and the omitted term of the logsumexp, [B, H, L] (zeros if λ differs).

    Examples:
        >>> query, keys = torch.randn(1, 2, 10, 8), torch.randn(1, 2, 3, 10, 8)  # three components per key
        >>> logits, omitted = mgk.equations.component_logits(query, keys)
        >>> logits.shape, omitted.shape
        (torch.Size([1, 2, 10, 3, 10]), torch.Size([1, 2, 10]))
    """
    scale = torch.as_tensor(scale, dtype=query.dtype, device=query.device)
    tau = torch.as_tensor(tau, dtype=query.dtype, device=query.device)[..., None, None]
    if exact_ties:
        # The rounding of a GEMM depends on strides and on the alignment of memory: each component gets its own copy.
        parts = [part.clone(memory_format=torch.contiguous_format) for part in keys.unbind(-3)]
        products = torch.stack([query @ part.transpose(-1, -2) for part in parts], -3)
        key_norm = torch.stack([squared_norms(part) for part in parts], -2)
    else:
        products, key_norm = query.unsqueeze(-3) @ keys.transpose(-1, -2), squared_norms(keys)
    products, query_norm = products.transpose(-3, -2), query.square().sum(-1)  # [B, H, L, M, S], [B, H, L]
    if scale.dim() < 2 or scale.shape[-2:] == (1, 1):
        logits = scale.unsqueeze(-1) * (products - (0.5 * tau * key_norm).unsqueeze(-3))
        omitted = -0.5 * (tau * scale)[..., 0] * query_norm
    else:
        norms = key_norm.unsqueeze(-3) + query_norm[..., None, None]
        logits = scale.unsqueeze(-3) * (products - 0.5 * tau.unsqueeze(-1) * norms)
        omitted = torch.zeros_like(query_norm)
    return (logits if log_prior is None else logits + log_prior.unsqueeze(-3)), omitted


class AttentionOutput(NamedTuple):
    """Output, weights and logsumexp of mixture attention."""

    output: Tensor  # [B, H, L, E]
    weights: Tensor  # [B, H, L, S], after dropout
    lse: Tensor  # [B, H, L]: log Σ_j exp(ℓ_ij)


def mixture_attention(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    log_prior: Tensor | None = None,
    *,
    scale: float | Tensor,
    tau: float | Tensor = 1.0,
    hard: bool = False,
    bias: Tensor | None = None,
    allowed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> AttentionOutput:
    """Compute Eq. 10 or, if hard, Eq. 12: h_i = Σ_j a_ij v_j, a_ij ∝ Σ_r exp ℓ_ijr or max_r exp ℓ_ijr without π.

    Soft weights are one softmax over keys and components together, summed over components.

    Args:
        query: [B, H, L, D].
        keys: [B, H, M, S, D].
        value: [B, H, S, E].
        log_prior, scale, tau: As in `component_logits`.
        hard: Whether to assign each pair to its largest component.
        bias: Added to ℓ_ij, broadcastable to [B, H, L, S].
        allowed: bool, False masks a pair; broadcastable to [B, H, L, S].
        dropout_p: Dropout probability of the weights.

    Examples:
        >>> query, value = torch.randn(2, 1, 2, 10, 8)
        >>> keys = torch.randn(1, 2, 3, 10, 8)  # three components per key
        >>> output, weights, lse = mgk.equations.mixture_attention(query, keys, value, scale=8**-0.5)
        >>> output.shape, weights.shape, lse.shape
        (torch.Size([1, 2, 10, 8]), torch.Size([1, 2, 10, 10]), torch.Size([1, 2, 10]))
    """
    logits, query_term = component_logits(query, keys, None if hard else log_prior, scale, tau, exact_ties=hard)
    if hard:
        logits = logits.amax(-2, keepdim=True)
    if bias is not None:
        bias = bias.unsqueeze(-2)
        # Filled too, in case the logit of masked padding overflowed.
        logits = (logits + bias).masked_fill(bias == -math.inf, -math.inf)
    if allowed is not None:
        logits = logits.masked_fill(~allowed.unsqueeze(-2), -math.inf)
    joint, lse = safe_softmax(logits.flatten(-2), -1)
    weights = joint.unflatten(-1, logits.shape[-2:]).sum(-2)
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    # With unequal λ the query's norm is part of the logits, and query_term is zero.
    return AttentionOutput(weights @ value, weights, lse + query_term)


def responsibilities(
    query: Tensor, keys: Tensor, log_prior: Tensor | None, *, scale: float | Tensor, tau: float | Tensor = 1.0
) -> Tensor:
    """Compute the responsibilities of Eq. 11, γ_ijr of component r for query i and key j; they sum to 1 over r.

    Examples:
        >>> query, keys = torch.randn(1, 2, 10, 8), torch.randn(1, 2, 3, 10, 8)
        >>> gamma = mgk.equations.responsibilities(query, keys, None, scale=8**-0.5)  # [B, H, L, M, S]
        >>> torch.allclose(gamma.sum(-2), torch.ones(1, 2, 10, 10))
        True
    """
    logits, _ = component_logits(query, keys, log_prior, scale, tau)
    return safe_softmax(logits, -2)[0]


class MStep(NamedTuple):
    """Parameters of the components after an M-step."""

    prior: Tensor  # [B, H, M, S]
    means: Tensor  # [B, H, M, S, D]
    variance: Tensor  # [B, H, M, S]


def m_step(query: Tensor, gamma: Tensor, floor: float = 1e-6) -> MStep:
    """Compute Eq. 13 and the prior of §2.3 per key.

    π = N_jr/N, k_jr = Σ_i γ q_i / N_jr and σ² = Σ_i γ ‖q_i − k_jr‖² / (D N_jr). The paper omits the D of an isotropic
    Gaussian in D dimensions. Unequal variances need the normalizer −(D/2) log σ² in Eq. 9 and 11 (added to log_prior):
    without it the iteration collapses.

    Args:
        query: [B, H, L, D].
        gamma: Responsibilities [B, H, L, M, S], with zeros for masked pairs.
        floor: Minimum variance.

    Examples:
        >>> query, keys = torch.randn(1, 2, 10, 8), torch.randn(1, 2, 3, 10, 8)
        >>> gamma = mgk.equations.responsibilities(query, keys, None, scale=8**-0.5)
        >>> prior, means, variance = mgk.equations.m_step(query, gamma)
        >>> prior.shape, means.shape, variance.shape
        (torch.Size([1, 2, 3, 10]), torch.Size([1, 2, 3, 10, 8]), torch.Size([1, 2, 3, 10]))
    """
    count = gamma.sum(-3)  # N_jr: [B, H, M, S]
    safe = count.clamp(min=torch.finfo(count.dtype).tiny).unsqueeze(-1)
    weighted = gamma.movedim(-3, -1)  # [B, H, M, S, L]
    means = weighted @ query.unsqueeze(-3) / safe
    # Σ γ‖q − k‖² = Σ γ‖q‖² − N‖k‖² at the weighted mean, computed about one query to keep the difference accurate.
    origin = query[..., :1, :].detach()
    centred, centred_means = query - origin, means - origin.unsqueeze(-3)
    spread = weighted @ centred.square().sum(-1)[..., None, :, None] / safe
    variance = (spread.squeeze(-1) - centred_means.square().sum(-1)) / query.shape[-1]
    prior = count / count.sum(-2, keepdim=True).clamp(min=torch.finfo(count.dtype).tiny)
    return MStep(prior, means, variance.clamp(min=floor))


def mixed_features(keys: Tensor, log_prior: Tensor | None, feature_map: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute the key features of Eq. 14, φ̃_j = Σ_r π_jr φ(k_jr): [B, H, M, S, D] -> [B, H, S, F].

    Examples:
        >>> keys = torch.randn(1, 2, 3, 10, 8)  # three components per key
        >>> mgk.equations.mixed_features(keys, None, torch.relu).shape
        torch.Size([1, 2, 10, 8])
    """
    features = feature_map(keys)
    if log_prior is None:
        return features.mean(-3)
    return (log_prior.exp().unsqueeze(-1) * features).sum(-3)


def linear_attention(
    query_features: Tensor, key_features: Tensor, value: Tensor, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute Eq. 14: output [B, H, L, E] and weights [B, H, L, S]; zeros for a row whose scores sum to 0.

    Examples:
        >>> query_features, key_features = torch.rand(2, 1, 2, 10, 16)
        >>> output, weights = mgk.equations.linear_attention(query_features, key_features, torch.randn(1, 2, 10, 8))
        >>> output.shape, weights.shape
        (torch.Size([1, 2, 10, 8]), torch.Size([1, 2, 10, 10]))
    """
    scores = query_features @ key_features.transpose(-1, -2)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, 0)
    total = scores.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    return (scores @ value).masked_fill(empty, 0) / total, scores / total
