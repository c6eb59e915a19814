"""The paper, equation by equation: eager, in log space, differentiable twice. Everything fast is checked against it.

Nguyen et al., "Improving Transformers with Probabilistic Attention Keys", ICML 2022 (arXiv 2110.08678).
B batch, H heads, M components, L queries, S keys, D head width, E value width; i, j, r index queries, keys, components.
scale is λ = 1/σ², log_prior is log π, and tau goes from Eq. 8 (0, dot products) to Eq. 9 (1, Gaussian keys).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


def safe_softmax(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Softmax and logsumexp over `dim`. Where every logit is -inf: zeros and -inf, with zero gradients."""
    empty = (logits == -math.inf).all(dim, keepdim=True)
    logits = logits.masked_fill(empty, 0)
    return logits.softmax(dim).masked_fill(empty, 0), logits.logsumexp(dim).masked_fill(empty.squeeze(dim), -math.inf)


def posterior(query: Tensor, key: Tensor, log_prior: Tensor | None = None, variance: Tensor | None = None) -> Tensor:
    """Eq. 4–5: P(t_j = 1 | q_i), each key a Gaussian N(k_j, σ_j²I) with prior π_j. Weights [B, H, L, S].

    log_prior (log π_j) and variance (σ_j²) broadcast to [B, H, S]; by default uniform and √D.
    As in the paper, the Gaussians' normalisers are left out.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if variance is None else (1 / variance).unsqueeze(-2)
    if log_prior is not None:
        log_prior = log_prior.unsqueeze(-2)
    logits, _ = component_logits(query, key.unsqueeze(-3), log_prior, scale)
    return safe_softmax(logits.squeeze(-2), -1)[0]


def normalised_posterior(query: Tensor, key: Tensor) -> Tensor:
    """Eq. 6: with q and k of norm 1, equal variances √D and a uniform prior, Eq. 5 is softmax(q·k/√D)."""
    query, key = (x / x.norm(dim=-1, keepdim=True) for x in (query, key))
    return posterior(query, key)


def component_logits(
    query: Tensor, keys: Tensor, log_prior: Tensor | None = None, scale: float | Tensor = 1.0, tau: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Eq. 7–9: ℓ_ijr = log π_jr + λ q_i·k_jr − τ λ/2 (‖q_i‖² + ‖k_jr‖²), [B, H, L, M, S]; at τ = 1, −λ/2 ‖q_i − k_jr‖².

    query [B, H, L, D]; keys [B, H, M, S, D]; log_prior and scale broadcast to [B, H, M, S], tau to [H].
    Where λ is the same for all keys and components, ‖q_i‖² drops out of every softmax; taken along it would only cost
    precision. It is therefore left out of the logits then, and returned for the logsumexp: [B, H, L], else zeros.
    """
    scale = torch.as_tensor(scale, dtype=query.dtype, device=query.device)
    tau = torch.as_tensor(tau, dtype=query.dtype, device=query.device)[..., None, None]
    query_norm, key_norm = query.square().sum(-1), keys.square().sum(-1)  # [B, H, L], [B, H, M, S]
    # One product per component: equal components then get bitwise equal logits, and hard ties are ties.
    products = (query.unsqueeze(-3) @ keys.transpose(-1, -2)).transpose(-3, -2)  # [B, H, L, M, S]
    if scale.dim() < 2 or scale.shape[-2:] == (1, 1):
        logits = scale.unsqueeze(-1) * (products - (0.5 * tau * key_norm).unsqueeze(-3))
        left_out = -0.5 * (tau * scale)[..., 0] * query_norm
    else:
        norms = key_norm.unsqueeze(-3) + query_norm[..., None, None]
        logits = scale.unsqueeze(-3) * (products - 0.5 * tau.unsqueeze(-1) * norms)
        left_out = torch.zeros_like(query_norm)
    return (logits if log_prior is None else logits + log_prior.unsqueeze(-3)), left_out


class AttentionOutput(NamedTuple):
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
    """Eq. 10 (soft) or 12 (hard): h_i = Σ_j a_ij v_j, a_ij ∝ Σ_r exp ℓ_ijr, or max_r exp ℓ_ijr without π.

    bias is added to ℓ_ij; where allowed is False a pair has no weight. Both broadcast to [B, H, L, S].
    Soft weights are one softmax over keys and components together, summed over components.
    """
    logits, query_term = component_logits(query, keys, None if hard else log_prior, scale, tau)
    if hard:
        logits = logits.amax(-2, keepdim=True)
    if bias is not None:
        logits = logits + bias.unsqueeze(-2)
    if allowed is not None:
        logits = logits.masked_fill(~allowed.unsqueeze(-2), -math.inf)
    joint, lse = safe_softmax(logits.flatten(-2), -1)
    weights = joint.unflatten(-1, logits.shape[-2:]).sum(-2)
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    # With unequal λ the term is in the logits and this one is zero.
    return AttentionOutput(weights @ value, weights, lse + query_term)


def responsibilities(
    query: Tensor, keys: Tensor, log_prior: Tensor | None, *, scale: float | Tensor, tau: float | Tensor = 1.0
) -> Tensor:
    """Eq. 11: γ_ijr, how far component r of key j answers for query i. [B, H, L, M, S], summing to 1 over r."""
    logits, _ = component_logits(query, keys, log_prior, scale, tau)
    return safe_softmax(logits, -2)[0]


class MStep(NamedTuple):
    prior: Tensor  # [B, H, M, S]
    means: Tensor  # [B, H, M, S, D]
    variance: Tensor  # [B, H, M, S]


def m_step(query: Tensor, gamma: Tensor, floor: float = 1e-6) -> MStep:
    """Eq. 13 and the prior of §2.3, per key: π = N_jr/N, k_jr = Σ_i γ q_i / N_jr, σ² = Σ_i γ ‖q_i − k_jr‖² / (D N_jr).

    query [B, H, L, D]; gamma [B, H, L, M, S] with zeros for the pairs that do not count. The paper leaves out the D of
    an isotropic Gaussian in D dimensions. Variances that differ need the normaliser −(D/2) log σ² in Eq. 9 and 11
    (add it to log_prior): without it the iteration collapses.
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
    """φ̃_j = Σ_r π_jr φ(k_jr), the key feature of Eq. 14: [B, H, M, S, D] -> [B, H, S, F]. Uniform prior if None."""
    features = feature_map(keys)
    if log_prior is None:
        return features.mean(-3)
    return (log_prior.exp().unsqueeze(-1) * features).sum(-3)


def linear_attention(
    query_features: Tensor, key_features: Tensor, value: Tensor, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Eq. 14 as a weighted mean over keys: output [B, H, L, E], weights [B, H, L, S]. Rows without weight give 0."""
    scores = query_features @ key_features.transpose(-1, -2)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, 0)
    total = scores.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    return (scores @ value).masked_fill(empty, 0) / total, scores / total
