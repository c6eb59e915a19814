"""Attention weights of one sample of a call, recomputed in fp64 in blocks of rows.

Padding is excluded: L and S count unpadded tokens. Output factors of linear-attention presets are excluded too.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from mgk import equations
from mgk._core.calls import LinearCall, MixtureCall
from mgk._core.masks import allowed_pairs, block_of_rows
from mgk._core.query_blocks import expand_inputs
from mgk.analysis.capture import Call

AnyCall = TypeVar("AnyCall", MixtureCall, LinearCall)


@dataclass(frozen=True)
class Block:
    """Attention weights of a range of rows."""

    rows: slice  # range of the unpadded queries
    weights: Tensor  # [H, R, S]
    # Logits of the components with and without prior, [H, R, M, S]; None for a single component or if not requested.
    scores: Tensor | None = None
    unweighted: Tensor | None = None


class SampleWeights(ABC):
    """Attention weights of one sample of a call, for all heads or a range of heads."""

    components: int
    value: Tensor  # [H, S, E]
    component_keys: Tensor  # [H, M, S, D]
    log_prior: Tensor | None  # [H, M, S or 1]; None is uniform
    unpadded: slice  # keys that are not padding

    def __init__(self, queries: int, keys: int, unpadded: slice) -> None:
        self.unpadded = unpadded
        # In cross-attention the padding of the keys does not apply to the queries.
        self.unpadded_queries = unpadded if queries == keys else slice(0, queries)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of unpadded queries and keys."""
        return _size(self.unpadded_queries), _size(self.unpadded)

    @property
    def heads(self) -> int:
        return self.value.shape[0]

    @abstractmethod
    def block(self, rows: slice, heads: slice, components: bool) -> Block:
        """Compute the weights of some rows and heads.

        Args:
            rows: Range of the unpadded queries.
            heads: Range of the heads.
            components: Whether to return the logits of each component too.
        """

    def blocks(self, memory: int, heads: slice = slice(None), *, components: bool = False) -> Iterator[Block]:
        """Yield all rows in blocks that need at most about `memory` bytes, including workspace."""
        queries, keys = self.shape
        count = len(range(*heads.indices(self.heads)))
        # Logits and softmax of each component, masks, and temporary tensors of the caller.
        bytes_per_row = 8 * count * keys * (4 * self.components + 6)
        step = max(1, min(queries, memory // max(1, bytes_per_row)))
        for start in range(0, queries, step):
            yield self.block(slice(start, min(start + step, queries)), heads, components)

    def _padded_rows(self, rows: slice) -> slice:
        """Convert a range of the unpadded queries to a range of all queries."""
        return slice(rows.start + self.unpadded_queries.start, rows.stop + self.unpadded_queries.start)


class MixtureWeights(SampleWeights):
    """Weights of softmax and Gaussian attention: Eq. 10 or 12."""

    def __init__(self, call: MixtureCall, sample: int) -> None:
        self.call = call = _in_fp64(_select_sample(call, sample))
        queries, keys = call.query.shape[2], call.keys.shape[-2]
        super().__init__(queries, keys, _visible_range(_visible_keys(call.attn_mask), keys))
        self.query, shared_keys, shared_value, prior, self.scale, self.tau = expand_inputs(call)
        # A single key or value head is not repeated yet.
        self.keys, value = (x.expand(-1, call.query.shape[1], *x.shape[2:]) for x in (shared_keys, shared_value))
        assert prior is not None
        self.prior = prior
        self.components = call.components
        self.value = value[0][:, self.unpadded]
        self.component_keys = self.keys[0][:, :, self.unpadded]
        # Hard assignment ignores the prior.
        self.log_prior = (
            None if call.log_prior is None or call.hard else _expand_prior(self.prior, self.heads, self.unpadded)
        )

    def block(self, rows: slice, heads: slice, components: bool) -> Block:
        call, block = self.call, self._padded_rows(rows)
        queries, keys = self.query.shape[2], self.keys.shape[-2]
        prior, mask = _select_heads(self.prior, heads), call.attn_mask
        scale = _select_heads(self.scale, heads) if isinstance(self.scale, Tensor) else self.scale
        tau = self.tau[heads] if isinstance(self.tau, Tensor) else self.tau
        bare, _ = equations.component_logits(self.query[:, heads, block], self.keys[:, heads], None, scale, tau)
        soft = bare if prior is None else bare + prior.unsqueeze(-3)  # [1, H, R, M, S]
        logits = bare.amax(-2, keepdim=True) if call.hard else soft
        if mask is not None:
            mask = _select_heads(mask, heads)
            if mask.dtype != torch.bool:
                logits = logits + block_of_rows(mask, block).unsqueeze(-2)
        allowed = allowed_pairs(block, queries, keys, mask, call.causal, call.packed, self.query)
        if allowed is not None:
            logits = logits.masked_fill(~allowed.unsqueeze(-2), -math.inf)
        joint, _ = equations.safe_softmax(logits.flatten(-2), -1)
        weights = joint.unflatten(-1, logits.shape[-2:]).sum(-2)[0, ..., self.unpadded]
        if not components or self.components == 1:
            return Block(rows, weights)
        return Block(rows, weights, soft[0, ..., self.unpadded], bare[0, ..., self.unpadded])


class LinearWeights(SampleWeights):
    """Weights of linear attention: Eq. 14."""

    def __init__(self, call: LinearCall, sample: int) -> None:
        self.call = call = _in_fp64(_select_sample(call, sample))
        super().__init__(call.query.shape[2], call.keys.shape[-2], _visible_range(call.key_mask, call.keys.shape[-2]))
        keys = call.component_keys(torch.float64)
        self.components, self.query = call.components, call.feature_map(call.query)[0]
        if hasattr(call.feature_map, "key_features"):
            features, log_scale = call.feature_map.key_features(keys)
        else:
            features, log_scale = call.feature_map(keys), torch.zeros(keys.shape[:-1], dtype=keys.dtype).to(keys.device)
        prior, heads = call.log_prior, call.query.shape[1]
        uniform = torch.full_like(log_scale[:, :, :, :1], -math.log(call.components))
        self.log_scale = _to_query_heads(log_scale, heads)  # [H, M, S]
        self.features = _to_query_heads(features, heads)  # [H, M, S, F]
        self.prior = _to_query_heads(uniform if prior is None else prior.expand(1, keys.shape[1], -1, -1), heads)
        self.value = _to_query_heads(call.value, heads)[:, self.unpadded]
        self.component_keys = _to_query_heads(keys, heads)[:, :, self.unpadded]
        self.log_prior = None if prior is None else _expand_prior(self.prior[None], self.heads, self.unpadded)

    def block(self, rows: slice, heads: slice, components: bool) -> Block:
        call, block = self.call, self._padded_rows(rows)
        queries, keys = self.query.shape[1], self.features.shape[2]
        products = self.query[heads, None, block] @ self.features[heads].mT  # [H, M, R, S]
        bare = products.log().transpose(1, 2) + self.log_scale[heads].unsqueeze(1)  # [H, R, M, S]
        scores = bare + self.prior[heads].unsqueeze(1)
        logits = scores.logsumexp(-2)
        causal = "top-left" if call.causal else None
        mask = None if call.key_mask is None else call.key_mask[:, None, None]
        allowed = allowed_pairs(block, queries, keys, mask, causal, None, self.query)
        if allowed is not None:
            logits = logits.masked_fill(~allowed.reshape(1, *allowed.shape[-2:]), -math.inf)
        weights = equations.safe_softmax(logits, -1)[0] if call.normalise else logits.exp()
        weights = weights[..., self.unpadded]
        if not components or self.components == 1:
            return Block(rows, weights)
        return Block(rows, weights, scores[..., self.unpadded], bare[..., self.unpadded])


def _to_query_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat the key or value heads of one sample, [1, h, ...] -> [H, ...]."""
    return x.repeat_interleave(heads // x.shape[1], 1)[0]


def sample_weights(call: Call, sample: int) -> SampleWeights:
    """Return the weights of one sample of a call's batch."""
    if isinstance(call, MixtureCall):
        return MixtureWeights(call, sample)
    if call.cu_seqlens is not None or call.initial_state is not None:
        raise ValueError("packed or continued linear attention cannot be analyzed: pass whole sequences")
    return LinearWeights(call, sample)


def _size(part: slice) -> int:
    return int(part.stop - part.start)


def _select_sample(call: AnyCall, sample: int) -> AnyCall:
    """Return the call with a single sample of the batch."""

    def pick(x: Any) -> Any:
        has_batch = isinstance(x, Tensor) and x.dim() > 1 and x.shape[0] == call.query.shape[0]
        return x[sample : sample + 1] if has_batch else x

    # Shifts and per-head numbers have no batch dimension.
    batched = ("query", "keys", "value", "log_prior", "attn_mask", "key_mask", "scale")
    names = {field.name for field in dataclasses.fields(call)}
    return dataclasses.replace(call, **{name: pick(getattr(call, name)) for name in batched if name in names})


def _in_fp64(call: AnyCall) -> AnyCall:
    changes: dict[str, Any] = {
        field.name: x.double()
        for field in dataclasses.fields(call)
        if isinstance(x := getattr(call, field.name), Tensor) and x.is_floating_point()
    }
    return dataclasses.replace(call, **changes)


def _visible_keys(mask: Tensor | None) -> Tensor | None:
    """Return whether any query attends to each key, [1, S]."""
    if mask is None:
        return None
    return (mask if mask.dtype == torch.bool else mask != -math.inf).flatten(0, -2).any(0)[None]


def _visible_range(visible: Tensor | None, length: int) -> slice:
    """Return the range from the first visible key to the last."""
    if visible is None or visible.shape[-1] == 1:
        return slice(0, length)
    indices = visible[0].nonzero().flatten()
    return slice(int(indices[0]), int(indices[-1]) + 1) if len(indices) else slice(0, 0)


def _select_heads(x: Tensor, heads: slice) -> Tensor:
    """Select heads of [1, H or 1, ...]."""
    return x if x.shape[1] == 1 else x[:, heads]


def _expand_prior(prior: Tensor, heads: int, unpadded: slice) -> Tensor:
    """Expand [1, H or 1, M, S or 1] to [H, M, S or 1] without padding."""
    prior = prior[0].expand(heads, -1, -1)
    return prior if prior.shape[-1] == 1 else prior[..., unpadded]
