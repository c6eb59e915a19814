"""The attention layer: projections, mixture keys, masks, caches and EM, for every variant."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mgk import functional
from mgk._core.attention_projections import project_inputs, reset_projections
from mgk._core.calls import AttentionArgs, LinearCall, MixtureCall, Packed
from mgk._core.em import EMStatistics
from mgk._core.from_softmax import from_softmax
from mgk._core.head_shards import HeadShards, local_tensor
from mgk._core.heads import count_heads
from mgk._core.key_projections import KEYS, KeyProjection, mix_keys
from mgk._core.layer_checks import (
    check_cache,
    check_factory_kwargs,
    check_input,
    check_key_and_value,
    check_layer_packing,
    check_padding_mask,
    check_positions,
)
from mgk._core.masks import cu_seqlens_to_segments
from mgk._core.operator_checks import SIMILARITIES, check_mask, check_same_length, check_scale, check_state
from mgk._core.priors import PRIORS, VARIANCES, update_em
from mgk._core.validation import fail, flag, number, one_of, positive_integer
from mgk.backends import LINEAR_BACKENDS, MIXTURE_BACKENDS, backend_names, em_statistics
from mgk.cache import Cache, KeyValueCache, StateCache
from mgk.features import L1Features, resolve_feature_map
from mgk.rotary import Rotary
from mgk.variants import AXES, PRESETS, VARIANTS, Variant


class Attention(nn.Module):
    """Multi-head attention whose keys are mixtures of Gaussians.

    The saving comes from fewer heads of the same dimension: 8 softmax heads of dimension 64 become
    ``Attention(512, 4, head_dim=64)``.

    Args:
        embed_dim: Dimension of the input and the output.
        num_heads: Number of query heads H.
        head_dim: Dimension D of a head. Default: ``embed_dim // num_heads``, as in torch.
        num_kv_heads: Number of value heads Hv, and of key heads by default (GQA). A divisor of ``num_heads``.
            Default: ``num_heads``.
        num_key_heads: Number of key heads Hk, a divisor of ``num_heads``. Query head h uses key head
            ``h // (num_heads // num_key_heads)``; shifts, priors and variances belong to key heads.
            Default: ``num_kv_heads``.
        kdim, vdim: Dimensions of the key and the value input. Default: ``embed_dim``.
        variant: Name in ``VARIANTS``, or a ``Variant``.
        num_components: Number of components M per key. Ignored by ``softmax`` and ``linear``, which have one.
        preset: Name in ``PRESETS``: ``"paper"``, or the settings of the authors' code, ``"ref-lra"`` and ``"ref-lm"``.
        feature_map: Feature map of the linear variants: ``"elu"``, ``"relu"``, or a module such as ``FAVOR(head_dim)``
            or ``DPFP()``.
        dropout: Dropout probability on the attention weights during training. Default: the preset's, 0 in ``"paper"``.
        bias: Whether the projections have a bias. Default: the preset's, True in ``"paper"``.
        is_causal: If True, a query attends to keys up to its own position only.
        max_positions: Number of key positions with separate priors, for EM priors and the learned priors of
            ``"ref-lm"``. Default: EM priors are shared over positions.
        rotary: Base of a rotary embedding, such as 10000.0, or a callable
            ``(x [B, H, (M,) S, D], positions [S] or [B, S]) -> x``. Shifts are added after the rotation.
        backend: Name of a backend, or ``"auto"``; see ``mgk_attention``.
        device, dtype: Device and dtype of the parameters.

    Examples:
        >>> mgk.Attention(512, 4, head_dim=64, is_causal=True)(torch.randn(2, 100, 512)).shape
        torch.Size([2, 100, 512])
    """

    head_shards: HeadShards | None = None  # of tensor parallelism

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        num_key_heads: int | None = None,
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
        factory_kwargs = check_factory_kwargs(device, dtype)
        self.variant = variant if isinstance(variant, Variant) else VARIANTS[one_of("variant", variant, VARIANTS)]
        self.preset = PRESETS[one_of("preset", preset, PRESETS)]
        self.embed_dim = positive_integer("embed_dim", embed_dim)
        self.num_heads = positive_integer("num_heads", num_heads)
        if head_dim is None and embed_dim % num_heads:
            fail("num_heads", f"= {num_heads} does not divide embed_dim = {embed_dim}: pass head_dim")
        self.head_dim = embed_dim // num_heads if head_dim is None else positive_integer("head_dim", head_dim)
        self.num_key_heads, self.num_kv_heads = count_heads(num_heads, num_kv_heads, num_key_heads)
        self.kdim = embed_dim if kdim is None else positive_integer("kdim", kdim)
        self.vdim = embed_dim if vdim is None else positive_integer("vdim", vdim)
        self.num_components = self.variant.components or positive_integer("num_components", num_components)
        self.dropout = self.preset.dropout if dropout is None else number("dropout", dropout, 0, 1)
        bias = self.preset.bias if bias is None else flag("bias", bias)
        self.is_causal = flag("is_causal", is_causal)
        if max_positions is not None:
            positive_integer("max_positions", max_positions)
        num_positions = max_positions or self.preset.max_positions
        backends = LINEAR_BACKENDS if self.is_linear else MIXTURE_BACKENDS
        self.backend = one_of("backend", backend, backend_names(backends))
        if rotary is not None and not callable(rotary):
            rotary = Rotary(self.head_dim, number("rotary", rotary, 0, above=True))
        self.rotary: Callable[[Tensor, Tensor], Tensor] | None = rotary
        # Resolved even if the variant does not use it, so that a misspelt name fails early.
        resolved_map = resolve_feature_map(feature_map)
        self.feature_map = L1Features(resolved_map) if self.preset.linear.l1_features else resolved_map
        heads, width, components = self.num_key_heads, self.head_dim, self.num_components
        self.query = nn.Linear(embed_dim, num_heads * width, bias=bias, **factory_kwargs)
        self.keys: KeyProjection = KEYS[self.variant.keys](
            self.kdim, heads, components, width, bias=bias, preset=self.preset, **factory_kwargs
        )
        self.value = nn.Linear(self.vdim, self.num_kv_heads * width, bias=bias, **factory_kwargs)
        self.out = nn.Linear(num_heads * width, embed_dim, bias=bias, **factory_kwargs)
        options = (self.variant, self.preset)
        self.prior = PRIORS[self.variant.prior](heads, components, *options, num_positions, **factory_kwargs)
        self.variance = VARIANCES[self.variant.variance](heads, components, width, *options, **factory_kwargs)
        self.tau = nn.Parameter(torch.empty(heads, **factory_kwargs)) if self.variant.similarity == "between" else None
        reset_projections(self)

    # Overridden by layers whose sequences are sharded over ranks.
    run_mixture = staticmethod(functional.run_mixture)
    run_linear = staticmethod(functional.run_linear)

    @property
    def is_linear(self) -> bool:
        return self.variant.similarity == "linear"

    def extra_repr(self) -> str:
        sizes = f"{self.embed_dim}, heads={self.num_heads}, head_dim={self.head_dim}, components={self.num_components}"
        return ", ".join([sizes, *(f"{axis}={getattr(self.variant, axis)!r}" for axis in AXES)])

    def reset_parameters(self) -> None:
        """Reinitialize all parameters and buffers of the layer and its submodules.

        Examples:
            >>> attention = mgk.Attention(64, 2, device="meta").to_empty(device="cpu")  # memory without values
            >>> attention.reset_parameters()
        """
        # Children before their parents, which initialize some of them in another way.
        for module in reversed(list(self.modules())[1:]):
            reset_parameters = getattr(module, "reset_parameters", None)
            if reset_parameters is not None:
                reset_parameters()
        reset_projections(self)

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
        """Compute self-attention, or cross-attention if ``key`` is given.

        Args:
            query: [B, L, embed_dim].
            key: [B, S, kdim]. Default: ``query``.
            value: [B, S, vdim]. Default: ``key``.
            key_padding_mask: bool [B, S], **True = padding**, as in torch.nn.MultiheadAttention. With a cache, it
                covers all keys in the cache.
            attn_mask: Broadcastable to [B, H, L, S]: bool, **True = attend**, as in SDPA, or floating point, added.
            position_ids: [L] or [B, L], for rotary embeddings and per-position priors. Default: 0, 1, ..., or
                continued from the cache.
            cu_seqlens: int32 [N + 1], offsets of N sequences packed along L, with B = 1 (self-attention only).
            max_seqlen: Length of the longest packed sequence, or an upper bound; GPU kernels then launch smaller grids.
            cache: Cache from ``make_cache``, to which keys and values are appended (inference only).
            need_weights: If True, return the weights [B, H, L, S] too. Linear attention with a cache returns only those
                of the new keys.

        Returns:
            The output [B, L, embed_dim], or a tuple (output, weights) with ``need_weights``.

        Examples:
            >>> attention, x = mgk.Attention(64, 2), torch.randn(3, 10, 64)
            >>> padding = torch.arange(10) >= torch.tensor([[10], [7], [4]])  # sequences of 10, 7 and 4 tokens
            >>> output, weights = attention(x, key_padding_mask=padding, need_weights=True)
            >>> output.shape, weights.shape
            (torch.Size([3, 10, 64]), torch.Size([3, 2, 10, 10]))
        """
        flag("need_weights", need_weights)
        args = AttentionArgs(
            self.is_causal,
            key_padding_mask,
            attn_mask=attn_mask,
            cu_seqlens=cu_seqlens,
            cache=cache,
            need_weights=need_weights,
            max_seqlen=max_seqlen,
        )
        return self.attend(query, key, value, args, position_ids)

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        args: AttentionArgs,
        position_ids: Tensor | None = None,
    ) -> Any:
        """Compute `forward` with its masks, cache and causality in one record."""
        check_input("query", query, self.embed_dim)
        key, value, is_self = check_key_and_value(query, key, value, self.kdim, self.vdim)
        if args.cache is not None:
            check_cache(args.cache, StateCache if self.is_linear else KeyValueCache, query.shape[0])
        check_layer_packing(query, args.cu_seqlens, args.max_seqlen, supported=is_self and args.cache is None)
        positions = self._positions(query, position_ids, args)
        key_positions = positions if is_self else self._positions(key, None, args)
        q, k, v = project_inputs(self, query, key, value, positions, key_positions)
        if self.is_linear:
            output, weights = self._attend_linear(q, k, v, key_positions, args)
        else:
            output, weights = self._attend_mixture(q, k, v, key_positions, args, is_self)
        if weights is not None and self.head_shards is not None:
            weights = self.head_shards.gather_heads(weights)
        output = self.out(output.transpose(1, 2).flatten(2))
        return (output, weights) if args.need_weights else output

    def _positions(self, x: Tensor, position_ids: Tensor | None, args: AttentionArgs) -> Tensor | None:
        """Return the positions of x, [L] or [B, L]; None if they are 0 to L - 1 or unused."""
        if position_ids is not None:
            return check_positions(position_ids, x)
        if self.rotary is None and getattr(self.prior, "positions", None) is None:
            return None
        if args.cu_seqlens is not None:
            return cu_seqlens_to_segments(args.cu_seqlens, x.shape[1])[1]
        if args.cache is not None:
            return args.cache.next_positions(x)
        return None

    def _attend_mixture(
        self, query: Tensor, keys: Tensor, value: Tensor, positions: Tensor | None, args: AttentionArgs, is_self: bool
    ) -> tuple[Tensor, Tensor | None]:
        if args.cache is None:
            return self._run_mixture(query, keys, value, positions, args, is_self)
        cached_length = args.cache.length
        try:
            return self._run_mixture(query, keys, value, positions, args, is_self)
        except Exception:
            # Roll the cache back if the call fails.
            args.cache.crop(min(cached_length, args.cache.length))
            raise

    def _run_mixture(
        self, query: Tensor, keys: Tensor, value: Tensor, positions: Tensor | None, args: AttentionArgs, is_self: bool
    ) -> tuple[Tensor, Tensor | None]:
        cache: Any = args.cache
        causal, num_valid_keys = "top-left" if args.is_causal else None, None
        if cache is not None:
            cache.check_inference(query, keys, value)
            cache.check_padding_mask(args.key_padding_mask is not None)
            if positions is not None and positions.dim() == 1:
                positions = positions.expand(query.shape[0], -1)
            keys, value, positions = cache.append(keys, value, positions)
            # A single query attends to all keys in the cache.
            causal = "bottom-right" if args.is_causal and query.shape[2] > 1 else None
            num_valid_keys = cache.num_valid_keys
        length = keys.shape[-2]
        scale, log_normalizer = self.variance()
        log_prior = self.prior(length, positions)
        if log_normalizer is not None:
            log_prior = log_normalizer if log_prior is None else log_prior + log_normalizer
        heads, cu_seqlens = self.num_key_heads, args.cu_seqlens
        call = MixtureCall(
            query=query,
            keys=keys,
            value=value,
            shift=self.keys.shift,
            log_prior=_as_4d(log_prior),
            return_weights=args.need_weights,
            attn_mask=check_mask(args.combined_mask(query, length), query, length),
            causal=causal,
            dropout_p=self.dropout if self.training else 0.0,
            scale=check_scale(scale, query, (1, heads, self.num_components, 1)) if isinstance(scale, Tensor) else scale,
            tau=SIMILARITIES[self.variant.similarity] if self.tau is None else local_tensor(self.tau),
            hard=self.variant.assignment == "hard",
            packed=None if cu_seqlens is None else Packed(cu_seqlens, cu_seqlens, args.max_seqlen, args.max_seqlen),
            return_lse=False,
            num_valid_keys=num_valid_keys,
        )
        result = self.run_mixture(call, self.backend)
        if cache is not None:
            cache.padded = args.key_padding_mask is not None
        update_em(self, call, positions, args, is_self)
        return result if args.need_weights else (result, None)

    def em_statistics(
        self, call: MixtureCall, positions: Tensor | None, real_queries: Tensor | None, with_spread: bool
    ) -> tuple[EMStatistics, Tensor | None]:
        """Return the statistics of a call's keys, and the positions of these keys."""
        return em_statistics(call, real_queries, with_spread=with_spread), positions

    def _attend_linear(
        self, query: Tensor, keys: Tensor, value: Tensor, positions: Tensor | None, args: AttentionArgs
    ) -> tuple[Tensor, Tensor | None]:
        if args.attn_mask is not None:
            fail("attn_mask", "is not supported by linear attention, which forms no weights: use key_padding_mask")
        form, length = self.preset.linear, keys.shape[-2]
        cache: Any = args.cache
        form.check_supported(cache=cache, cu_seqlens=args.cu_seqlens)
        if cache is not None:
            cache.check_inference(query, keys, value)
        padding = args.key_padding_mask
        if padding is not None:
            total = length if cache is None else cache.length + length
            padding = check_padding_mask(padding, query.shape[0], total, query)[:, total - length :]
        log_prior, shift = self.prior(length, positions), self.keys.shift
        if args.key_bias is not None:
            # Softmax attention adds it to the logits; here its exponential multiplies the key features, as π does.
            bias = args.key_bias[:, None, None, :]
            log_prior = bias - math.log(self.num_components) if log_prior is None else log_prior + bias
        if form.mix_before_map:
            keys, shift, log_prior = mix_keys(keys, shift, log_prior), None, None
        if args.is_causal:
            check_same_length("is_causal", query, length)
        call = LinearCall(
            query=query,
            keys=keys,
            value=value,
            shift=shift,
            log_prior=_as_4d(log_prior),
            return_weights=args.need_weights,
            feature_map=self.feature_map,
            key_mask=None if padding is None else ~padding,
            causal=args.is_causal,
            cu_seqlens=args.cu_seqlens,
            initial_state=None if cache is None else check_state(cache.state, query, keys, value),
            return_state=cache is not None,
            normalise=form.normalise,
        )
        results = self.run_linear(call, self.backend)
        output, *extras = results if isinstance(results, tuple) else (results,)
        if cache is not None:
            cache.replace(extras[-1], length)
        factor = form.output_factor(length, self.head_dim)
        weights = extras[0] * factor if args.need_weights else None
        output = output if factor == 1 else output * factor
        # Linear attention forms no weights: dropout acts on the output.
        if self.training and self.dropout:
            output = nn.functional.dropout(output, self.dropout)
        return output, weights

    def make_cache(self, batch_size: int, max_length: int) -> Cache:
        """Make an empty cache for decoding.

        Args:
            batch_size: Number of sequences.
            max_length: Maximum number of tokens per sequence.

        Returns:
            A ``KeyValueCache``, or for linear variants a ``StateCache``.

        Examples:
            >>> mgk.Attention(64, 2, variant="smlk", is_causal=True).make_cache(1, max_length=1000).nbytes  # any length
            8448
        """
        positive_integer("batch_size", batch_size)
        positive_integer("max_length", max_length)
        # Projections may have been replaced by quantized modules. If all were, they compute in the default dtype.
        tensors = (*self.parameters(), *self.buffers(), torch.empty(0))
        like = local_tensor(next(x for x in tensors if x.is_floating_point()))
        if self.is_linear:
            empty = like.new_zeros(batch_size, self.num_heads, 0, self.head_dim).detach()
            _, state = functional.mlk_attention(
                empty,
                empty[:, : self.num_key_heads, None],
                empty[:, : self.num_kv_heads],
                feature_map=self.feature_map,
                return_state=True,
            )
            return StateCache(batch_size, max_length, state)
        components = () if self.keys.shift is not None else (self.num_components,)
        keys = like.new_zeros(batch_size, self.num_key_heads, *components, max_length, self.head_dim).detach()
        value = like.new_zeros(batch_size, self.num_kv_heads, max_length, self.head_dim).detach()
        return KeyValueCache(max_length, keys, value, with_positions=getattr(self.prior, "positions", None) is not None)

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
        """Make a mixture layer with the outputs of a trained torch.nn.MultiheadAttention.

        The similarity becomes ``"between"`` with τ = 0: shifts and a shared prior then cancel, and τ has a gradient.
        Copies of frozen weights are frozen; shifts, prior and τ are trainable.

        Args:
            source: Layer to convert.
            variant, num_components, is_causal, backend: As in the constructor. The variant must not be linear.
            noise: Standard deviation of the noise added to the copies of the key weights (independent keys only),
                relative to that of the weights. It changes the outputs to second order (hard assignment: first order).

        Returns:
            The layer. Its inputs are [B, L, embed_dim], regardless of the source's ``batch_first``.

        Examples:
            >>> source = torch.nn.MultiheadAttention(64, 2, batch_first=True)
            >>> layer, x = mgk.Attention.from_softmax(source), torch.randn(1, 10, 64)
            >>> torch.allclose(layer(x), source(x, x, x)[0], atol=1e-5)
            True
        """
        layer: Attention = from_softmax(
            cls, source, variant, num_components=num_components, is_causal=is_causal, noise=noise, backend=backend
        )
        if not source.batch_first:
            message = "source takes [L, B, E] (batch_first=False), but this layer takes [B, L, E]: for a drop-in "
            warnings.warn(f"{message}replacement, use mgk.MultiheadAttention.from_softmax", stacklevel=2)
        return layer


def _as_4d(log_prior: Tensor | None) -> Tensor | None:
    return log_prior if log_prior is None or log_prior.dim() == 4 else log_prior.unsqueeze(0)
