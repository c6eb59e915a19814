"""The attention layer: any variant, with projections, masks, caches and EM.

B batch, H query heads, Hk key heads, M components, L queries, S keys, D head width.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mgk import functional
from mgk._core.calls import (
    SIMILARITIES,
    LinearCall,
    MixtureCall,
    Packed,
    autocast_inputs,
    check_feature_map,
    check_mask,
    check_query_keys_value,
    check_same_length,
    check_scale,
    check_state,
)
from mgk._core.from_softmax import from_softmax
from mgk._core.how import AttentionArgs
from mgk._core.key_projections import KEYS, KeyLayout, mixed_keys
from mgk._core.masks import cu_seqlens_to_segments
from mgk._core.priors import PRIORS, VARIANCES, EMPrior, EMVariance
from mgk._core.recomputation import counted_already
from mgk._core.validation import (
    check_dtype,
    check_input,
    check_padding,
    check_place,
    check_positions,
    fail,
    flag,
    number,
    one_of,
    positive_integer,
)
from mgk.backends import LINEAR_BACKENDS, MIXTURE_BACKENDS, backend_names, em_statistics
from mgk.cache import Cache, KeyValueCache, StateCache
from mgk.features import L1Features
from mgk.rotary import Rotary
from mgk.variants import AXES, PRESETS, VARIANTS, Variant


class Attention(nn.Module):
    """Multi-head attention whose keys are mixtures: y = attn(x).

    The paper's saving comes from fewer heads **of the same width**: pass head_dim. With 8 softmax heads of width 64
    replaced by 4 mixture heads: Attention(512, 4, head_dim=64).

    Args:
        embed_dim: width of the input and the output.
        num_heads: query heads H.
        head_dim: D; default embed_dim // num_heads, as in torch.
        num_kv_heads: key heads Hk, a divisor of num_heads (GQA); default num_heads.
        kdim, vdim: widths of key and value inputs; default embed_dim.
        variant: a name in VARIANTS or a Variant.
        num_components: M. Variants that are no mixture (softmax, linear) have one component whatever it says.
        preset: a name in PRESETS: "paper", or the settings of the authors' code, "ref-lra" and "ref-lm".
        feature_map: for linear variants: "elu", "relu" or a module such as FAVOR(head_dim) or DPFP().
        dropout: on the attention weights, in training. None takes the preset's (0 in "paper").
        bias: of the projections. None takes the preset's (True in "paper").
        is_causal: a query sees keys up to its own position.
        max_positions: EM priors, and the learned ones of preset ref-lm, are kept for each key position up to this one;
            None shares EM's over positions. Other priors have none.
        rotary: None, a base (10000.0), or a callable (x [B, H, (M,) S, D], positions [S] or [B, S]) -> x. Shifts are
            added after the rotation.
        backend: as in the operators.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        variant: str | Variant = "smgk",
        num_components: int = 2,
        preset: str = "paper",
        feature_map: str | Callable[[Tensor], Tensor] = "elu",
        dropout: float | None = None,
        bias: bool | None = None,
        is_causal: bool = False,
        max_positions: int | None = None,
        rotary: float | Callable[[Tensor, Tensor], Tensor] | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place = check_place(device, dtype)
        self.variant = variant if isinstance(variant, Variant) else VARIANTS[one_of("variant", variant, VARIANTS)]
        self.preset = PRESETS[one_of("preset", preset, PRESETS)]
        self.embed_dim = positive_integer("embed_dim", embed_dim)
        self.num_heads = positive_integer("num_heads", num_heads)
        if head_dim is None and embed_dim % num_heads:
            fail("num_heads", f"= {num_heads} does not divide embed_dim = {embed_dim}: pass head_dim")
        self.head_dim = embed_dim // num_heads if head_dim is None else positive_integer("head_dim", head_dim)
        self.num_kv_heads = num_heads if num_kv_heads is None else positive_integer("num_kv_heads", num_kv_heads)
        if num_heads % self.num_kv_heads:
            fail("num_kv_heads", f"= {num_kv_heads} must divide num_heads = {num_heads}")
        self.kdim = embed_dim if kdim is None else positive_integer("kdim", kdim)
        self.vdim = embed_dim if vdim is None else positive_integer("vdim", vdim)
        self.num_components = self.variant.components or positive_integer("num_components", num_components)
        self.dropout = self.preset.dropout if dropout is None else number("dropout", dropout, 0, 1)
        bias = self.preset.bias if bias is None else flag("bias", bias)
        self.is_causal = flag("is_causal", is_causal)
        if max_positions is not None:
            positive_integer("max_positions", max_positions)
        positions = max_positions or self.preset.max_positions
        backends = LINEAR_BACKENDS if self.is_linear else MIXTURE_BACKENDS
        self.backend = one_of("backend", backend, backend_names(backends))
        self.rotary = self._make_rotary(rotary)
        # Looked at also where the variant has no use for it, so that a wrong name is found out.
        chosen = check_feature_map(feature_map)
        self.feature_map = L1Features(chosen) if self.preset.linear.l1_features else chosen

        heads, width, components = self.num_kv_heads, self.head_dim, self.num_components
        self.query = nn.Linear(embed_dim, num_heads * width, bias=bias, **place)
        self.keys: KeyLayout = KEYS[self.variant.keys](
            self.kdim, heads, components, width, bias=bias, preset=self.preset, **place
        )
        self.value = nn.Linear(self.vdim, heads * width, bias=bias, **place)
        self.out = nn.Linear(num_heads * width, embed_dim, bias=bias, **place)
        self.prior = PRIORS[self.variant.prior](heads, components, self.variant, self.preset, positions, **place)
        self.variance = VARIANCES[self.variant.variance](heads, components, width, self.variant, self.preset, **place)
        self.tau = nn.Parameter(torch.empty(heads, **place)) if self.variant.similarity == "between" else None
        self._reset_own()

    def _reset_own(self) -> None:
        for projection in (self.query, self.value, self.out):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.tau is not None:
            nn.init.ones_(self.tau)

    def reset_parameters(self) -> None:
        """Draws all of the layer's weights anew, those of its parts too: call it after theirs, as `apply` does."""
        for part in [*self.modules()][:0:-1]:
            getattr(part, "reset_parameters", lambda: None)()
        self._reset_own()

    @property
    def is_linear(self) -> bool:
        return self.variant.similarity == "linear"

    def extra_repr(self) -> str:
        sizes = f"{self.embed_dim}, heads={self.num_heads}, head_dim={self.head_dim}, components={self.num_components}"
        return ", ".join([sizes, *(f"{axis}={getattr(self.variant, axis)!r}" for axis in AXES)])

    def _make_rotary(self, rotary: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
        if rotary is None or callable(rotary):
            return rotary
        return Rotary(self.head_dim, number("rotary", rotary, 0, above=True))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
    ) -> Any:
        """Self-attention, or cross-attention when key (and value) are given.

        Args:
            query: [B, L, embed_dim].
            key: [B, S, kdim], by default the query. value: [B, S, vdim], by default the key.
            key_padding_mask: bool [B, S], **True = padding**, as in torch's module. With a cache: of all keys held.
            attn_mask: broadcastable to [B, H, L, S]: bool **True = attend**, as in SDPA, or floating point, added.
            position_ids: [L] or [B, L], for rotary positions and per-position priors of self-attention; by default
                they count from 0, or on from the cache.
            cu_seqlens: int32 [N + 1] offsets of N sequences packed along L, with B = 1 (self-attention).
            max_seqlen: the longest of them, or a bound; spares GPU kernels programs with nothing to do.
            cache: from `make_cache`; keys and values are appended to it. For inference only.
            need_weights: also return the weights [B, H, L, S]; of linear attention with a cache, on the new keys alone.

        Returns:
            [B, L, embed_dim], or with need_weights a tuple of it and the weights.
        """
        flag("need_weights", need_weights)
        how = AttentionArgs(
            self.is_causal, key_padding_mask, None, attn_mask, cu_seqlens, cache, need_weights, max_seqlen
        )
        return self.attend(query, key, value, how, position_ids)

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        how: AttentionArgs,
        position_ids: Tensor | None = None,
    ) -> Any:
        """`forward`, with causality as an argument."""
        check_input("query", query, self.embed_dim)
        self_attention = key is None or key is query
        if self_attention and (value is None or value is query) and self.kdim == self.vdim == self.embed_dim:
            key = value = query
        else:
            key, value = self._check_key_and_value(query, key, value)
        to_query, to_keys, to_value = self.query, self.keys, self.value
        check_dtype("query", query, to_query)
        check_dtype("key", key, to_keys.projection)
        check_dtype("value", value, to_value)
        how.check(query, self_attention, StateCache if self.is_linear else KeyValueCache)
        positions = self._positions(query, position_ids, how)
        key_positions = positions if self_attention else self._positions(key, None, how)

        (batch, queries), length = query.shape[:2], key.shape[1]
        q = to_query(query).view(batch, queries, self.num_heads, self.head_dim).transpose(1, 2)
        keys = to_keys(key)
        v = to_value(value).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        if self.variant.normalise:
            q, keys = nn.functional.normalize(q, dim=-1), nn.functional.normalize(keys, dim=-1)
        if self.rotary is not None:
            q, keys = self.rotary(q, _count(positions, query)), self.rotary(keys, _count(key_positions, key))
        q, keys, v = autocast_inputs(q, keys, v)
        # What the layer has made itself needs no look, unless others had a hand in it.
        if not (self.rotary is None or isinstance(self.rotary, Rotary)) or not q.dtype == keys.dtype == v.dtype:
            check_query_keys_value(q, keys, v, to_keys.shift, to_keys.shift is not None)
        if self.is_linear:
            output, weights = self._linear(q, keys, v, key_positions, how)
        else:
            output, weights = self._mixture(q, keys, v, key_positions, how, self_attention)
        output = self.out(output.transpose(1, 2).flatten(2))
        return (output, weights) if how.need_weights else output

    def _check_key_and_value(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
        self_attention = key is None or key is query
        key = query if key is None else check_input("key", key, self.kdim, query)
        value = key if value is None else check_input("value", value, self.vdim, query)
        if self_attention and (self.kdim != self.embed_dim or self.vdim != self.embed_dim):
            fail("key", f"is needed: this layer takes keys of width {self.kdim} and values of width {self.vdim}")
        if key.shape[1] != value.shape[1]:
            fail("value", f"has length {value.shape[1]}, but key has {key.shape[1]}")
        return key, value

    def _positions(self, x: Tensor, position_ids: Tensor | None, how: AttentionArgs) -> Tensor | None:
        """Positions of the tokens of x, [L] or [B, L]. None counts from 0, or nobody asks for them."""
        if position_ids is not None:
            return check_positions(position_ids, x)
        if self.rotary is None and getattr(self.prior, "positions", None) is None:
            return None
        if how.cu_seqlens is not None:
            return cu_seqlens_to_segments(how.cu_seqlens, x.shape[1])[1]
        if how.cache is not None:
            return how.cache.next_positions(x)
        return None

    def _mixture(
        self,
        query: Tensor,
        keys: Tensor,
        value: Tensor,
        positions: Tensor | None,
        how: AttentionArgs,
        self_attention: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if how.cache is not None:
            held = how.cache.length
            try:
                return self._attend_mixture(query, keys, value, positions, how, self_attention)
            except Exception:
                # What was refused is not remembered.
                how.cache.crop(min(held, how.cache.length))
                raise
        return self._attend_mixture(query, keys, value, positions, how, self_attention)

    def _attend_mixture(
        self,
        query: Tensor,
        keys: Tensor,
        value: Tensor,
        positions: Tensor | None,
        how: AttentionArgs,
        self_attention: bool,
    ) -> tuple[Tensor, Tensor | None]:
        causal, count = "top-left" if how.is_causal else None, None
        if how.cache is not None:
            cache = _for_inference(how.cache, query, keys, value)
            cache.check_padding(how.key_padding_mask is not None)
            if positions is not None and positions.dim() == 1:
                positions = positions.expand(query.shape[0], -1)
            keys, value, positions = cache.append(keys, value, positions)
            # A single query sees all that is held.
            causal = "bottom-right" if how.is_causal and query.shape[2] > 1 else None
            count = cache.count
        length = keys.shape[-2]
        scale, normaliser = self.variance()
        log_prior = self.prior(length, positions)
        if normaliser is not None:
            log_prior = normaliser if log_prior is None else log_prior + normaliser
        heads, cu_seqlens = self.num_kv_heads, how.cu_seqlens
        call = MixtureCall(
            query=query,
            keys=keys,
            value=value,
            shift=self.keys.shift,
            log_prior=_four_dimensional(log_prior),
            return_weights=how.need_weights,
            attn_mask=check_mask(how.mask(query, length), query, length),
            causal=causal,
            dropout_p=self.dropout if self.training else 0.0,
            scale=check_scale(scale, query, (1, heads, self.num_components, 1)) if isinstance(scale, Tensor) else scale,
            tau=SIMILARITIES[self.variant.similarity] if self.tau is None else self.tau,
            hard=self.variant.assignment == "hard",
            packed=None if cu_seqlens is None else Packed(cu_seqlens, cu_seqlens, how.max_seqlen, how.max_seqlen),
            return_lse=False,
            count=count,
        )
        result = functional.run_mixture(call, self.backend)
        if isinstance(how.cache, KeyValueCache):
            how.cache.padded = how.key_padding_mask is not None
        self._update(call, positions, how, self_attention)
        return result if how.need_weights else (result, None)

    def _update(self, call: MixtureCall, positions: Tensor | None, how: AttentionArgs, self_attention: bool) -> None:
        """EM: what this training batch says replaces the prior (and variance) that it has used.

        Of the queries of cross-attention, and of those that follow on a cache, nobody says which are padding.
        """
        if not self.training or not torch.is_grad_enabled():
            return
        # A tuple: the compiler of torch 2.6 does not know `EMPrior | EMVariance`.
        updated = [part for part in (self.prior, self.variance) if isinstance(part, (EMPrior, EMVariance))]
        if updated and not counted_already():
            counted = how.counted() if self_attention and how.cache is None else None
            statistics = em_statistics(call, counted=counted, spread=isinstance(self.variance, EMVariance))
            for part in updated:
                part.update(statistics, positions)

    def _linear(
        self, query: Tensor, keys: Tensor, value: Tensor, positions: Tensor | None, how: AttentionArgs
    ) -> tuple[Tensor, Tensor | None]:
        if how.attn_mask is not None:
            fail("attn_mask", "does not go with linear attention, which forms no weights: use key_padding_mask")
        form, cache, length = self.preset.linear, how.cache, keys.shape[-2]
        if form.length_scaled:
            for name, given in (("cache", cache), ("cu_seqlens", how.cu_seqlens)):
                if given is not None:
                    fail(
                        name, "does not go with preset 'ref-lra', whose linear attention is scaled by the whole length"
                    )
        if cache is not None:
            cache = _for_inference(cache, query, keys, value)
        padding = how.key_padding_mask
        if padding is not None:
            total = length if cache is None else cache.length + length
            padding = check_padding(padding, query.shape[0], total, query)[:, -length:]
        log_prior, shift = self.prior(length, positions), self.keys.shift
        if how.key_bias is not None:
            # Added to the logits of softmax attention; here a factor of the key's feature, as the prior is.
            bias = how.key_bias[:, None, None, :]
            log_prior = bias - math.log(self.num_components) if log_prior is None else log_prior + bias
        if form.mix_before_map:
            keys, shift, log_prior = mixed_keys(keys, shift, log_prior), None, None
        if how.is_causal:
            check_same_length("is_causal", query, length)
        call = LinearCall(
            query=query,
            keys=keys,
            value=value,
            shift=shift,
            log_prior=_four_dimensional(log_prior),
            return_weights=how.need_weights,
            feature_map=self.feature_map,
            key_mask=None if padding is None else ~padding,
            causal=how.is_causal,
            cu_seqlens=how.cu_seqlens,
            initial_state=None if cache is None else check_state(cache.state, query, keys, value),
            return_state=cache is not None,
            normalise=form.normalise,
        )
        results = functional.run_linear(call, self.backend)
        output, *extras = results if isinstance(results, tuple) else (results,)
        if cache is not None:
            cache.replace(extras[-1], length)
        factor = (length**-0.5 if form.length_scaled else 1.0) * (self.head_dim**-0.5 if form.width_scaled else 1.0)
        weights = extras[0] * factor if how.need_weights else None
        output = output if factor == 1 else output * factor
        # There are no weights to drop entries of: the output's are dropped.
        if self.training and self.dropout:
            output = nn.functional.dropout(output, self.dropout)
        return output, weights

    def make_cache(self, batch_size: int, max_length: int) -> Cache:
        """An empty cache for decoding `batch_size` sequences of up to `max_length` tokens."""
        positive_integer("batch_size", batch_size)
        positive_integer("max_length", max_length)
        # Not the weight of a projection, in whose place there may be another module.
        like = next(x for x in (*self.parameters(), *self.buffers()) if x.is_floating_point())
        heads, width = self.num_kv_heads, self.head_dim
        if self.is_linear:
            nothing = like.new_zeros(batch_size, heads, 0, width).detach()
            _, state = functional.mlk_attention(
                nothing, nothing.unsqueeze(2), nothing, feature_map=self.feature_map, return_state=True
            )
            return StateCache(batch_size, max_length, state)
        components = () if self.keys.shift is not None else (self.num_components,)
        keys = like.new_zeros(batch_size, heads, *components, max_length, width)
        value = like.new_zeros(batch_size, heads, max_length, width)
        positions = None
        if getattr(self.prior, "positions", None) is not None:
            positions = torch.zeros(batch_size, max_length, dtype=torch.long, device=like.device)
        return KeyValueCache(max_length, keys.detach(), value.detach(), positions)

    @classmethod
    def from_softmax(
        cls,
        source: nn.MultiheadAttention,
        variant: str | Variant = "smgk",
        *,
        num_components: int = 2,
        is_causal: bool = False,
        noise: float = 0.01,
        backend: str = "auto",
    ) -> Attention:
        """A mixture layer that starts as a trained nn.MultiheadAttention and can learn from there.

        The similarity becomes "between", with τ = 0 at the start: shifts and a shared prior then cancel, and τ has a
        gradient. Independent keys start as copies that differ by `noise` times the spread of the weights: exact up to
        the square of the noise (hard: up to the noise). Inputs are [B, L, embed_dim], also where the source's are not.
        Copies of frozen weights are frozen; shifts, prior and τ learn.
        """
        layer: Attention = from_softmax(cls, source, variant, num_components, is_causal, noise, backend)
        if not source.batch_first:
            words = "source takes [L, B, E] (batch_first=False) and this layer [B, L, E]: in the source's place use "
            warnings.warn(f"{words}mgk.MultiheadAttention.from_softmax", stacklevel=2)
        return layer


def _count(positions: Tensor | None, x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device) if positions is None else positions


def _four_dimensional(log_prior: Tensor | None) -> Tensor | None:
    return log_prior if log_prior is None or log_prior.dim() == 4 else log_prior.unsqueeze(0)


def _for_inference(cache: Any, *tensors: Tensor) -> Any:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        fail("cache", "is for inference: wrap the call in torch.no_grad()")
    return cache
