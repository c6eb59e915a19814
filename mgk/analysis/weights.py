"""The attention weights of one sample of a call, in fp64, a block of rows at a time.

H heads, M components, L queries, S keys, E value width, R rows of a block. Padding is left out: L and S are the real
tokens. Factors that a preset puts on the output of linear attention are left out too.
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
from mgk._core.masks import allowed_pairs, block_of_rows, repeat_heads
from mgk._core.query_blocks import expand_inputs
from mgk.analysis.capture import Call

AnyCall = TypeVar("AnyCall", MixtureCall, LinearCall)


@dataclass(frozen=True)
class Block:
    rows: slice  # of the real queries
    weights: Tensor  # [H, R, S]
    # log of what each component contributes, with and without its prior, [H, R, M, S]; None where there is one alone
    scores: Tensor | None = None
    unweighted: Tensor | None = None


class SampleWeights(ABC):
    """The weights of one sample of a call, for all heads or some."""

    components: int
    value: Tensor  # [H, S, E]
    component_keys: Tensor  # [H, M, S, D]
    log_prior: Tensor | None  # [H, M, S or 1]; None is uniform
    real: slice  # the real tokens among the keys

    def __init__(self, queries: int, keys: int, real: slice) -> None:
        self.real = real
        # Padding of a cross-attention's keys says nothing of its queries.
        self.real_queries = real if queries == keys else slice(0, queries)

    @property
    def shape(self) -> tuple[int, int]:
        """Real queries and keys."""
        return _size(self.real_queries), _size(self.real)

    @property
    def heads(self) -> int:
        return self.value.shape[0]

    @abstractmethod
    def block(self, rows: slice, heads: slice, components: bool) -> Block:
        """Rows of the real queries for some heads; with `components`, what each of them contributes too."""

    def blocks(self, memory: int, heads: slice = slice(None), *, components: bool = False) -> Iterator[Block]:
        """All rows, in blocks that take at most about `memory` bytes while they are worked on."""
        queries, keys = self.shape
        count = len(range(*heads.indices(self.heads)))
        # Logits and their softmax, masks, and what the caller forms of the weights.
        one_row = 8 * count * keys * (4 * self.components + 6)
        step = max(1, min(queries, memory // max(1, one_row)))
        for start in range(0, queries, step):
            yield self.block(slice(start, min(start + step, queries)), heads, components)

    def _queries(self, rows: slice) -> slice:
        """Rows of the real queries as rows of all queries."""
        return slice(rows.start + self.real_queries.start, rows.stop + self.real_queries.start)


class MixtureWeights(SampleWeights):
    """Of softmax and Gaussian attention: Eq. 10 or 12."""

    def __init__(self, call: MixtureCall, sample: int) -> None:
        self.call = one = _in_fp64(_pick(call, sample))
        super().__init__(one.query.shape[2], one.keys.shape[-2], _real(_visible(one.attn_mask), one.keys.shape[-2]))
        self.query, self.keys, value, prior, self.scale, self.tau = expand_inputs(one)
        assert prior is not None
        self.prior = prior
        self.components = one.components
        self.value = value[0][:, self.real]
        self.component_keys = self.keys[0][:, :, self.real]
        # A prior says nothing where the hard assignment ignores it.
        self.log_prior = None if one.log_prior is None or one.hard else _expand_prior(self.prior, self.heads, self.real)

    def block(self, rows: slice, heads: slice, components: bool) -> Block:
        call, block = self.call, self._queries(rows)
        queries, keys = self.query.shape[2], self.keys.shape[-2]
        prior, bias = _heads(self.prior, heads), call.attn_mask
        scale = _heads(self.scale, heads) if isinstance(self.scale, Tensor) else self.scale
        tau = self.tau[heads] if isinstance(self.tau, Tensor) else self.tau
        bare, _ = equations.component_logits(self.query[:, heads, block], self.keys[:, heads], None, scale, tau)
        soft = bare if prior is None else bare + prior.unsqueeze(-3)  # [1, H, R, M, S]
        logits = bare.amax(-2, keepdim=True) if call.hard else soft
        if bias is not None and bias.dtype != torch.bool:
            logits = logits + _heads(block_of_rows(bias, block), heads).unsqueeze(-2)
        allowed = allowed_pairs(block, queries, keys, _mask_of(bias, heads), call.causal, call.packed, self.query)
        if allowed is not None:
            logits = logits.masked_fill(~allowed.unsqueeze(-2), -math.inf)
        joint, _ = equations.safe_softmax(logits.flatten(-2), -1)
        weights = joint.unflatten(-1, logits.shape[-2:]).sum(-2)[0, ..., self.real]
        if not components or self.components == 1:
            return Block(rows, weights)
        return Block(rows, weights, soft[0, ..., self.real], bare[0, ..., self.real])


class LinearWeights(SampleWeights):
    """Of linear attention, which itself never forms them: Eq. 14."""

    def __init__(self, call: LinearCall, sample: int) -> None:
        self.call = one = _in_fp64(_pick(call, sample))
        super().__init__(one.query.shape[2], one.keys.shape[-2], _real(one.key_mask, one.keys.shape[-2]))
        keys = one.component_keys(torch.float64)
        self.components, self.query = one.components, one.feature_map(one.query)[0]
        if hasattr(one.feature_map, "key_features"):
            features, log_scale = one.feature_map.key_features(keys)
        else:
            features, log_scale = one.feature_map(keys), torch.zeros(keys.shape[:-1], dtype=keys.dtype).to(keys.device)
        prior = one.log_prior
        uniform = torch.full_like(log_scale[:, :, :, :1], -math.log(one.components))
        self.log_scale = repeat_heads(log_scale, one.group)[0]  # [H, M, S]
        self.features = repeat_heads(features, one.group)[0]  # [H, M, S, F]
        self.prior = repeat_heads(uniform if prior is None else prior.expand(1, keys.shape[1], -1, -1), one.group)[0]
        self.value = repeat_heads(one.value, one.group)[0][:, self.real]
        self.component_keys = repeat_heads(keys, one.group)[0][:, :, self.real]
        self.log_prior = None if prior is None else _expand_prior(self.prior[None], self.heads, self.real)

    def block(self, rows: slice, heads: slice, components: bool) -> Block:
        call, block = self.call, self._queries(rows)
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
        weights = weights[..., self.real]
        if not components or self.components == 1:
            return Block(rows, weights)
        return Block(rows, weights, scores[..., self.real], bare[..., self.real])


def sample_weights(call: Call, sample: int) -> SampleWeights:
    if isinstance(call, MixtureCall):
        return MixtureWeights(call, sample)
    if call.cu_seqlens is not None or call.initial_state is not None:
        raise ValueError("packed or continued linear attention cannot be analysed: give whole sequences")
    return LinearWeights(call, sample)


def _size(part: slice) -> int:
    return int(part.stop - part.start)


def _pick(call: AnyCall, sample: int) -> AnyCall:
    """The call with one sample of the batch."""

    def pick(x: Any) -> Any:
        batched = isinstance(x, Tensor) and x.dim() > 1 and x.shape[0] == call.query.shape[0]
        return x[sample : sample + 1] if batched else x

    # The shift and what belongs to heads alone have no batch.
    parts = ("query", "keys", "value", "log_prior", "attn_mask", "key_mask", "scale")
    names = {field.name for field in dataclasses.fields(call)}
    return dataclasses.replace(call, **{name: pick(getattr(call, name)) for name in parts if name in names})


def _in_fp64(call: AnyCall) -> AnyCall:
    changes: dict[str, Any] = {
        field.name: x.double()
        for field in dataclasses.fields(call)
        if isinstance(x := getattr(call, field.name), Tensor) and x.is_floating_point()
    }
    return dataclasses.replace(call, **changes)


def _visible(mask: Tensor | None) -> Tensor | None:
    """Whether any query may see a key: [1, S]."""
    if mask is None:
        return None
    return (mask if mask.dtype == torch.bool else mask != -math.inf).flatten(0, -2).any(0)[None]


def _real(visible: Tensor | None, length: int) -> slice:
    """From the first key that can be seen to the last."""
    if visible is None or visible.shape[-1] == 1:
        return slice(0, length)
    places = visible[0].nonzero().flatten()
    return slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0, 0)


def _heads(x: Tensor, heads: slice) -> Tensor:
    """Some heads of [1, H or 1, ...]."""
    return x if x.shape[1] == 1 else x[:, heads]


def _mask_of(mask: Tensor | None, heads: slice) -> Tensor | None:
    return None if mask is None else _heads(mask, heads)


def _expand_prior(prior: Tensor, heads: int, real: slice) -> Tensor:
    """[1, H or 1, M, S or 1] -> [H, M, S or 1]"""
    prior = prior[0].expand(heads, -1, -1)
    return prior if prior.shape[-1] == 1 else prior[..., real]
