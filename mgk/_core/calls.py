"""Records of validated calls, which every backend receives, and the functions that build them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mgk._core.layer_checks import check_padding_mask
from mgk._core.masks import and_mask, as_additive, as_bool, attended_keys
from mgk._core.operator_checks import (
    check_causal,
    check_cu_seqlens,
    check_key_mask,
    check_log_prior,
    check_mask,
    check_packing,
    check_query_keys_value,
    check_same_length,
    check_scale,
    check_similarity,
    check_state,
)
from mgk._core.precision import compute_dtype
from mgk._core.validation import fail, flag, number, one_of
from mgk.cache import Cache
from mgk.features import resolve_feature_map

ASSIGNMENTS = ("soft", "hard")


@dataclass(frozen=True)
class Packed:
    """Offsets of packed sequences: sequence n has rows cu_seqlens[n] to cu_seqlens[n + 1]."""

    cu_seqlens_q: Tensor  # int32 [N + 1]
    cu_seqlens_k: Tensor  # int32 [N + 1]
    max_seqlen_q: int | None
    max_seqlen_k: int | None


@dataclass(frozen=True)
class AttentionCall:
    """Arguments that mixture and linear attention have in common."""

    query: Tensor  # [B, H, L, D]
    keys: Tensor  # [B, Hk, M, S, D]; [B, Hk, S, D] with a shift
    value: Tensor  # [B, Hv, S, E]
    shift: Tensor | None  # [Hk, M, D]: k_jr = k_j + b_r
    log_prior: Tensor | None  # 4-d, broadcastable to [B, Hk, M, S]; None is uniform, log(1/M)
    return_weights: bool

    @property
    def components(self) -> int:
        """Number of components, M."""
        return self.keys.shape[2] if self.shift is None else self.shift.shape[1]

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.query.shape[1] // self.keys.shape[1]

    @property
    def value_group(self) -> int:
        """Number of query heads per value head."""
        return self.query.shape[1] // self.value.shape[1]

    @property
    def unsupported_transform(self) -> str | None:
        """Name of an active torch.func transform or forward-mode AD, which the custom operators do not support."""
        # Tracing by torch.compile may be mistaken for a transform.
        if torch.compiler.is_compiling():
            return None
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "the transforms of torch.func"
        if forward_ad._current_level < 0:
            return None
        tensors = (x for x in vars(self).values() if isinstance(x, Tensor))
        tangents = any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
        return "forward-mode derivatives" if tangents else None

    def component_keys(self, dtype: torch.dtype) -> Tensor:
        """Return the component keys k_jr, [B, Hk, M, S, D], in a dtype."""
        keys = self.keys.to(dtype)
        # Converted before the sum: half precision would round key + shift.
        return keys if self.shift is None else keys.unsqueeze(2) + self.shift.to(dtype).unsqueeze(-2)


@dataclass(frozen=True)
class MixtureCall(AttentionCall):
    """Validated arguments of mgk_attention or smgk_attention."""

    attn_mask: Tensor | None  # 4-d, bool (True = attend) or float, broadcastable to [B, H, L, S]
    causal: str | None  # None, "top-left", "bottom-right"
    dropout_p: float
    scale: float | Tensor  # 1/σ²: a number, or 4-d and broadcastable to [B, Hk, M, S]
    tau: float | Tensor  # 1 is Eq. 9, 0 is Eq. 8; or a tensor [Hk]
    hard: bool  # Eq. 12: log_prior is ignored
    packed: Packed | None
    return_lse: bool
    num_valid_keys: Tensor | None = None  # int32 [1]: later keys are masked; inference only

    def with_valid_keys_mask(self) -> MixtureCall:
        """Return the same call with `num_valid_keys` converted to a part of attn_mask."""
        if self.num_valid_keys is None:
            return self
        valid = torch.arange(self.keys.shape[-2], device=self.query.device) < self.num_valid_keys
        return replace(self, attn_mask=and_mask(valid[None, None, None], self.attn_mask), num_valid_keys=None)

    def with_zeroed_padding(self) -> MixtureCall:
        """Return the same call with zeros in the keys and values that attn_mask masks for every query.

        They have weight 0, but products with very large ones overflow: 0 times infinity would be NaN.
        """
        if self.attn_mask is None:
            return self
        masked_keys = ~attended_keys(self.attn_mask, self.group).unsqueeze(-1)
        masked_values = ~attended_keys(self.attn_mask, self.value_group).unsqueeze(-1)
        keys = self.keys.masked_fill(masked_keys if self.shift is not None else masked_keys.unsqueeze(2), 0)
        return replace(self, keys=keys, value=self.value.masked_fill(masked_values, 0))

    def converted(self, dtype: torch.dtype) -> MixtureCall:
        """Return the same call with all tensors except attn_mask in a dtype.

        A tensor that is converted at each use gets a sum of gradients that are rounded one by one.
        """
        names = ("query", "keys", "value", "shift", "log_prior", "scale", "tau")
        values = {name: getattr(self, name) for name in names}
        tensors: dict[str, Any] = {name: x.to(dtype) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **tensors)

    def results_without_keys(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return output, lse and weights if there are no keys: every row is fully masked."""
        # Sums of no elements keep the autograd graph connected to all inputs, whose gradients are zeros.
        inputs = (x for x in vars(self).values() if isinstance(x, Tensor) and x.requires_grad)
        zero = sum((x[..., :0].sum().to(self.query.dtype) for x in inputs), self.query.new_zeros(()))
        shape = self.query.shape[:-1]
        output = self.query.new_zeros(*shape, self.value.shape[-1]) + zero
        lse = self.query.new_full(shape, -torch.inf, dtype=compute_dtype(self.query.dtype)) + zero
        return output, lse, self.query.new_zeros(*shape, 0) + zero

    @property
    def equal_scale(self) -> bool:
        """True if 1/σ² is equal for all components and keys of a head: ‖q‖² then cancels in the softmax."""
        return not isinstance(self.scale, Tensor) or self.scale.shape[2:] == (1, 1)


@dataclass(frozen=True)
class LinearCall(AttentionCall):
    """Validated arguments of mlk_attention or smlk_attention."""

    feature_map: Callable[[Tensor], Tensor]
    key_mask: Tensor | None  # bool [B, S], True = attend
    causal: bool
    cu_seqlens: Tensor | None  # int32 [N + 1]
    initial_state: tuple[Tensor, ...] | None
    return_state: bool
    normalise: bool = True  # False omits Eq. 14's denominator, as the authors' LRA code does


@dataclass(frozen=True)
class AttentionArgs:
    """Arguments of one forward of a layer, besides its inputs: causality, masks, packing and cache."""

    is_causal: bool
    key_padding_mask: Tensor | None = None  # bool [B, S], True = padding
    key_bias: Tensor | None = None  # floating point [B, S], added to the logits of each key
    attn_mask: Tensor | None = None  # broadcastable to [B, H, L, S], bool (True = attend) or floating point
    cu_seqlens: Tensor | None = None
    cache: Cache | None = None
    need_weights: bool = False
    max_seqlen: int | None = None

    def combined_mask(self, query: Tensor, length: int) -> Tensor | None:
        """Combine key_padding_mask, key_bias and attn_mask into one SDPA mask for `length` keys."""
        # Before the masks are combined, which would broadcast a wrong shape or fail without the argument's name.
        mask = check_mask(self.attn_mask, query, length)
        if self.key_bias is not None:
            bias = self.key_bias[:, None, None, :]
            mask = bias if mask is None else as_additive(mask, bias.dtype) + bias
        if self.key_padding_mask is None:
            return mask
        attend = ~check_padding_mask(self.key_padding_mask, query.shape[0], length, query)[:, None, None, :]
        return and_mask(attend, mask)

    def real_tokens(self) -> Tensor | None:
        """Return the tokens of self-attention that are not padding, bool [B, L]; None if all are real."""
        real = None if self.key_bias is None else as_bool(self.key_bias)
        return real if self.key_padding_mask is None else and_mask(~self.key_padding_mask, real)


def mixture_call(
    query: Any, keys: Any, value: Any, attn_mask: Any = None, *, shift: Any = None, shifted: bool = False,
    is_causal: Any = False, dropout_p: Any = 0.0, scale: Any = None, log_prior: Any = None,
    similarity: Any = "gaussian", assignment: Any = "soft", cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, return_weights: Any = False, return_lse: Any = False,
) -> MixtureCall:  # fmt: skip
    """Validate the arguments of mgk_attention or, if shifted, of smgk_attention."""
    query, keys, value, shift = check_query_keys_value(query, keys, value, shift, shifted)
    (batch, heads), length = keys.shape[:2], keys.shape[-2]
    target = (batch, heads, shift.shape[1] if shifted else keys.shape[2], length)
    is_packed = check_packing(query, length, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return MixtureCall(
        query=query,
        keys=keys,
        value=value,
        shift=shift,
        attn_mask=check_mask(attn_mask, query, length),
        causal=check_causal(is_causal),
        dropout_p=number("dropout_p", dropout_p, 0, 1),
        scale=check_scale(scale, query, target),
        log_prior=check_log_prior(log_prior, query, target),
        tau=check_similarity(similarity, query, heads),
        hard=one_of("assignment", assignment, ASSIGNMENTS) == "hard",
        packed=Packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) if is_packed else None,
        return_weights=flag("return_weights", return_weights),
        return_lse=flag("return_lse", return_lse),
    )


def linear_call(
    query: Any, keys: Any, value: Any, *, shift: Any = None, shifted: bool = False, log_prior: Any = None,
    feature_map: Any = "elu", key_mask: Any = None, is_causal: Any = False, cu_seqlens: Any = None,
    initial_state: Any = None, return_state: Any = False, return_weights: Any = False, normalise: bool = True,
) -> LinearCall:  # fmt: skip
    """Validate the arguments of mlk_attention or, if shifted, of smlk_attention."""
    query, keys, value, shift = check_query_keys_value(query, keys, value, shift, shifted)
    components = shift.shape[1] if shifted else keys.shape[2]
    length = keys.shape[-2]
    causal = flag("is_causal", is_causal)
    if causal:
        check_same_length("is_causal", query, length)
    if cu_seqlens is not None:
        cu_seqlens = check_cu_seqlens("cu_seqlens", cu_seqlens, query, length)
        check_same_length("cu_seqlens", query, length)
        for name, is_set in (("initial_state", initial_state is not None), ("return_state", return_state)):
            if is_set:
                fail(name, "is not supported with cu_seqlens: packed sequences have no common state")
    return LinearCall(
        query=query,
        keys=keys,
        value=value,
        shift=shift,
        log_prior=check_log_prior(log_prior, query, (query.shape[0], keys.shape[1], components, length)),
        feature_map=resolve_feature_map(feature_map),
        key_mask=check_key_mask(key_mask, query, length),
        causal=causal,
        cu_seqlens=cu_seqlens,
        initial_state=check_state(initial_state, query, keys, value),
        return_state=flag("return_state", return_state),
        return_weights=flag("return_weights", return_weights),
        normalise=normalise,
    )
