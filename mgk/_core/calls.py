"""What an operator was asked for, checked once: the records that every backend receives.

B batch, H query heads, Hk key heads, M components, L queries, S keys, D head width, E value width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mgk._core.validation import NESTED, fail, flag, kind_of, nearest, number, one_of, positive_integer
from mgk.features import FEATURE_MAPS

SIMILARITIES = {"gaussian": 1.0, "dot": 0.0}
ASSIGNMENTS = ("soft", "hard")


@dataclass(frozen=True)
class Packed:
    """Sequences lying one after another: sequence n has rows cu_seqlens[n] to cu_seqlens[n + 1]."""

    cu_seqlens_q: Tensor  # int32 [N + 1]
    cu_seqlens_k: Tensor  # int32 [N + 1]
    max_seqlen_q: int | None
    max_seqlen_k: int | None


@dataclass(frozen=True)
class AttentionCall:
    """What mixture and linear attention have in common."""

    query: Tensor  # [B, H, L, D]
    keys: Tensor  # [B, Hk, M, S, D]; [B, Hk, S, D] when shift is given
    value: Tensor  # [B, Hk, S, E]
    shift: Tensor | None  # [Hk, M, D]: k_jr = k_j + b_r
    log_prior: Tensor | None  # 4-d, broadcastable to [B, Hk, M, S]; None is uniform, log(1/M)
    return_weights: bool

    @property
    def components(self) -> int:
        return self.keys.shape[2] if self.shift is None else self.shift.shape[1]

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.query.shape[1] // self.keys.shape[1]

    @property
    def transform(self) -> str | None:
        """What is wanted of the call that operators of our own have no rule for, or would drop without a word."""
        # A compiler's own work may look like a transform.
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
        """The component keys k_jr, [B, Hk, M, S, D], in the type to compute in."""
        keys = self.keys.to(dtype)
        # Added in that type, so that half precision does not round the sum of key and shift.
        return keys if self.shift is None else keys.unsqueeze(2) + self.shift.to(dtype).unsqueeze(-2)


@dataclass(frozen=True)
class MixtureCall(AttentionCall):
    """A checked call of mgk_attention or smgk_attention."""

    attn_mask: Tensor | None  # 4-d, bool (True = attend) or float, broadcastable to [B, H, L, S]
    causal: str | None  # None, "top-left", "bottom-right"
    dropout_p: float
    scale: float | Tensor  # 1/σ²: one number, or 4-d and broadcastable to [B, Hk, M, S]
    tau: float | Tensor  # 1 is Eq. 9, 0 is Eq. 8; or a tensor [Hk]
    hard: bool  # Eq. 12: log_prior is ignored
    packed: Packed | None
    return_lse: bool
    count: Tensor | None = None  # int32 [1]: only so many keys, the first, are there; no gradients

    def hiding(self) -> MixtureCall:
        """The same call with a mask for what lies beyond `count`."""
        if self.count is None:
            return self
        there = (torch.arange(self.keys.shape[-2], device=self.query.device) < self.count)[None, None, None]
        return replace(self, attn_mask=and_mask(there, self.attn_mask), count=None)

    @property
    def equal_scale(self) -> bool:
        """True when 1/σ² is the same for all components and keys of a head: ‖q‖² then cancels in the softmax."""
        return not isinstance(self.scale, Tensor) or self.scale.shape[2:] == (1, 1)


@dataclass(frozen=True)
class LinearCall(AttentionCall):
    """A checked call of mlk_attention or smlk_attention."""

    feature_map: Callable[[Tensor], Tensor]
    key_mask: Tensor | None  # bool [B, S], True = attend
    causal: bool
    cu_seqlens: Tensor | None  # int32 [N + 1]
    initial_state: tuple[Tensor, ...] | None
    return_state: bool
    normalise: bool = True  # False leaves out Eq. 14's denominator, as the authors' LRA code does


def and_mask(attend: Tensor, mask: Tensor | None) -> Tensor:
    """A mask in SDPA's sense, bool or added, with nothing left of it but what `attend`, bool, leaves."""
    if mask is None:
        return attend
    return mask & attend if mask.dtype == torch.bool else mask.masked_fill(~attend, -math.inf)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def check_tensor(name: str, value: Any, dims: str | None = None, *, like: Tensor | None = None) -> Tensor:
    """A floating-point tensor of as many dimensions as `dims` names ('B H L D'), on the device of `like`."""
    if not isinstance(value, Tensor):
        fail(name, f"must be a tensor, got {type(value).__name__}")
    if value.is_nested:
        fail(name, NESTED)
    if not value.is_floating_point():
        fail(name, f"must be a floating-point tensor, got {value.dtype}")
    if dims is not None and value.dim() != dims.count(" ") + 1:
        fail(name, f"must have shape [{dims}], got {_shape(value)}")
    if like is not None and value.device != like.device:
        fail(name, f"is on {value.device} but query is on {like.device}: move it there")
    return value


def _broadcasts(tensor: Tensor, target: tuple[int, ...]) -> bool:
    return all(have in (1, want) for have, want in zip(tensor.shape, target, strict=True))


def broadcast_to_4d(name: str, tensor: Tensor, target: tuple[int, ...], dims: str) -> Tensor:
    """The tensor with leading ones up to four dimensions, checked to broadcast to `target`."""
    missing = 4 - tensor.dim()
    if missing >= 0 and _broadcasts(tensor, target[missing:]):
        # A view is a step of the backward pass.
        return tensor[(None,) * missing] if missing else tensor
    fail(name, f"must broadcast to [{dims}] = {list(target)}, got {_shape(tensor)}")


def autocast_inputs(query: Tensor, keys: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In the type that autocast computes in, where it is on."""
    kind = query.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return query, keys, value
    dtype = torch.get_autocast_dtype(kind)
    return query.to(dtype), keys.to(dtype), value.to(dtype)


def check_query_keys_value(
    query: Any, keys: Any, value: Any, shift: Any | None, shifted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    name = "key" if shifted else "keys"
    query = check_tensor("query", query, "B H L D")
    keys = check_tensor(name, keys, "B Hk S D" if shifted else "B Hk M S D", like=query)
    value = check_tensor("value", value, "B Hk S E", like=query)
    query, keys, value = autocast_inputs(query, keys, value)
    dtype = query.dtype
    for which, x in ((name, keys), ("value", value)):
        if x.dtype != dtype:
            fail(which, f"has dtype {x.dtype} but query has {dtype}: give all three the same")
    batch, heads, _, width = query.shape
    key_batch, key_heads, *components, length, key_width = keys.shape
    if width == 0:
        fail("query", f"must have a head width of at least 1, got {_shape(query)}")
    if key_batch != batch or key_width != width:
        fail(name, f"must have query's batch {batch} and head width {width}, got {_shape(keys)}")
    if key_heads == 0 or heads % key_heads:
        fail(name, f"has {key_heads} heads, which must divide query's {heads}")
    if value.shape[:3] != (batch, key_heads, length):
        fail("value", f"must have shape [{batch}, {key_heads}, {length}, E] to go with {name}, got {_shape(value)}")
    if shifted:
        shift = check_tensor("shift", shift, "Hk M D", like=query)
        if shift.shape[0] != key_heads or shift.shape[1] == 0 or shift.shape[2] != width:
            fail("shift", f"must have shape [Hk, M, D] = [{key_heads}, M, {width}], got {_shape(shift)}")
    elif components == [0]:
        fail(name, f"must have at least one component, got {_shape(keys)}")
    return query, keys, value, shift


def check_log_prior(log_prior: Any, query: Tensor, target: tuple[int, int, int, int]) -> Tensor | None:
    if log_prior is None:
        return None
    return broadcast_to_4d("log_prior", check_tensor("log_prior", log_prior, like=query), target, "B, Hk, M, S")


def check_scale(scale: Any, query: Tensor, target: tuple[int, int, int, int]) -> float | Tensor:
    if scale is None:
        return 1 / math.sqrt(query.shape[-1])
    if not isinstance(scale, Tensor):
        return number("scale", scale, 0, above=True)
    scale = check_tensor("scale", scale, like=query)
    if scale.dim() <= 2:
        # [Hk, M] reads as one 1/σ² per head and component.
        heads, components = target[1:3]
        padded = scale.reshape((1,) * (2 - scale.dim()) + tuple(scale.shape))
        if padded.shape[0] in (1, heads) and padded.shape[1] in (1, components):
            return padded[None, :, :, None]
        fail("scale", f"must broadcast to [Hk, M] = [{heads}, {components}], got {_shape(scale)}")
    if scale.dim() == 4 and _broadcasts(scale, target):
        return scale
    fail("scale", f"must broadcast to [Hk, M] or to [B, Hk, M, S] = {list(target)}, got {_shape(scale)}")


def check_similarity(similarity: Any, query: Tensor, key_heads: int) -> float | Tensor:
    if isinstance(similarity, str):
        if similarity not in SIMILARITIES:
            choices = ", ".join(map(repr, SIMILARITIES))
            told = f"must be {choices}, or τ between them as a number or a tensor [Hk], got {similarity!r}"
            fail("similarity", told + nearest(similarity, SIMILARITIES))
        return SIMILARITIES[similarity]
    if not isinstance(similarity, Tensor):
        return number("similarity", similarity)
    tau = check_tensor("similarity", similarity, like=query)
    if tau.dim() > 1 or tau.numel() not in (1, key_heads):
        fail("similarity", f"as a tensor must have shape [Hk] = [{key_heads}], got {_shape(tau)}")
    return tau.expand(key_heads)


def check_mask(attn_mask: Any, query: Tensor, length: int) -> Tensor | None:
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        fail("attn_mask", f"must be a tensor, got {type(attn_mask).__name__}")
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        fail("attn_mask", f"must be bool (True = attend) or floating point (added), got {attn_mask.dtype}")
    if attn_mask.device != query.device:
        fail("attn_mask", f"is on {attn_mask.device} but query is on {query.device}: move it there")
    batch, heads, queries, _ = query.shape
    return broadcast_to_4d("attn_mask", attn_mask, (batch, heads, queries, length), "B, H, L, S")


def check_causal(is_causal: Any) -> str | None:
    if isinstance(is_causal, bool):
        return "top-left" if is_causal else None
    if is_causal != "bottom-right":
        fail("is_causal", f"must be False, True (aligned top-left, as in SDPA) or 'bottom-right', got {is_causal!r}")
    return "bottom-right"


def _readable(offsets: Tensor) -> bool:
    """Reading the values of a GPU tensor would stop the stream, and a compiler cannot trace it."""
    return offsets.device.type == "cpu" and not torch.compiler.is_compiling()


def check_cu_seqlens(name: str, cu_seqlens: Any, query: Tensor, length: int) -> Tensor:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        fail(name, f"must be an int32 tensor [N + 1] of offsets, got {kind_of(cu_seqlens)}")
    if cu_seqlens.device != query.device:
        fail(name, f"is on {cu_seqlens.device} but query is on {query.device}: move it there")
    if cu_seqlens.numel() < 2:
        fail(name, "must hold at least two offsets, 0 and the total length")
    if query.shape[0] != 1:
        fail(name, f"goes with a batch of 1, the sequences one after another; got a batch of {query.shape[0]}")
    if _readable(cu_seqlens):
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or offsets[-1] != length or any(a > b for a, b in itertools.pairwise(offsets)):
            fail(name, f"must rise from 0 to the total length {length}, got {offsets}")
    return cu_seqlens


def check_same_length(name: str, query: Tensor, length: int) -> None:
    if query.shape[2] != length:
        fail(name, f"needs as many queries as keys, got {query.shape[2]} and {length}")


def check_packed(query: Tensor, keys: Tensor, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any) -> Packed | None:
    if cu_q is None and cu_k is None:
        for name, limit in (("max_seqlen_q", max_q), ("max_seqlen_k", max_k)):
            if limit is not None:
                fail(name, "goes with cu_seqlens_q and cu_seqlens_k, which are not given")
        return None
    for name, offsets in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if offsets is None:
            fail(name, "is missing: packed sequences need cu_seqlens_q and cu_seqlens_k")
    cu_q = check_cu_seqlens("cu_seqlens_q", cu_q, query, query.shape[2])
    cu_k = check_cu_seqlens("cu_seqlens_k", cu_k, query, keys.shape[-2])
    if cu_q.numel() != cu_k.numel():
        fail("cu_seqlens_k", f"has {cu_k.numel()} offsets but cu_seqlens_q has {cu_q.numel()}")
    check_max_seqlen("max_seqlen_q", max_q, cu_q)
    check_max_seqlen("max_seqlen_k", max_k, cu_k)
    return Packed(cu_q, cu_k, max_q, max_k)


def check_max_seqlen(name: str, limit: Any, offsets: Tensor) -> None:
    if limit is None:
        return
    positive_integer(name, limit)
    if _readable(offsets) and limit < int(offsets.diff().max()):
        fail(name, f"= {limit} is below the longest packed sequence, {int(offsets.diff().max())}")


def check_feature_map(feature_map: Any) -> Callable[[Tensor], Tensor]:
    if callable(feature_map):
        return feature_map
    known = ", ".join(map(repr, FEATURE_MAPS))
    if not isinstance(feature_map, str) or feature_map not in FEATURE_MAPS:
        fail("feature_map", f"must be one of {known}, or a callable, got {feature_map!r}")
    return FEATURE_MAPS[feature_map]


def check_key_mask(key_mask: Any, query: Tensor, length: int) -> Tensor | None:
    if key_mask is None:
        return None
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        fail("key_mask", "must be a bool tensor [B, S], True = attend")
    if key_mask.shape != (query.shape[0], length):
        fail("key_mask", f"must have shape [B, S] = [{query.shape[0]}, {length}], got {_shape(key_mask)}")
    if key_mask.device != query.device:
        fail("key_mask", f"is on {key_mask.device} but query is on {query.device}: move it there")
    return key_mask


def check_state(state: Any, query: Tensor, keys: Tensor, value: Tensor) -> tuple[Tensor, ...] | None:
    if state is None:
        return None
    wanted = "must be what return_state=True gave: a tuple (Z [B, Hk, F, E], z [B, Hk, F], log weight [B, Hk])"
    if not isinstance(state, tuple) or len(state) not in (2, 3) or not all(isinstance(x, Tensor) for x in state):
        fail("initial_state", wanted)
    batch, heads = query.shape[0], keys.shape[1]
    shapes_fit = (
        state[0].dim() == 4
        and state[0].shape[:2] == (batch, heads)
        and state[0].shape[3] == value.shape[-1]
        and state[1].shape == state[0].shape[:3]
        and all(x.is_floating_point() for x in state)
    )
    if not shapes_fit:
        fail("initial_state", f"{wanted}; got shapes {[_shape(x) for x in state]}")
    for x in state:
        if x.device != query.device:
            fail("initial_state", f"is on {x.device} but query is on {query.device}: move it there")
    return state


def mixture_call(
    query: Any, keys: Any, value: Any, attn_mask: Any = None, *, shift: Any = None, shifted: bool = False,
    is_causal: Any = False, dropout_p: Any = 0.0, scale: Any = None, log_prior: Any = None,
    similarity: Any = "gaussian", assignment: Any = "soft", cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, return_weights: Any = False, return_lse: Any = False,
) -> MixtureCall:  # fmt: skip
    """The arguments of mgk_attention (or, shifted, of smgk_attention), checked."""
    query, keys, value, shift = check_query_keys_value(query, keys, value, shift, shifted)
    (batch, heads), length = keys.shape[:2], keys.shape[-2]
    target = (batch, heads, shift.shape[1] if shifted else keys.shape[2], length)
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
        packed=check_packed(query, keys, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        return_weights=flag("return_weights", return_weights),
        return_lse=flag("return_lse", return_lse),
    )


def linear_call(
    query: Any, keys: Any, value: Any, *, shift: Any = None, shifted: bool = False, log_prior: Any = None,
    feature_map: Any = "elu", key_mask: Any = None, is_causal: Any = False, cu_seqlens: Any = None,
    initial_state: Any = None, return_state: Any = False, return_weights: Any = False, normalise: bool = True,
) -> LinearCall:  # fmt: skip
    """The arguments of mlk_attention (or, shifted, of smlk_attention), checked."""
    query, keys, value, shift = check_query_keys_value(query, keys, value, shift, shifted)
    components = shift.shape[1] if shifted else keys.shape[2]
    length = keys.shape[-2]
    causal = flag("is_causal", is_causal)
    if causal:
        check_same_length("is_causal", query, length)
    if cu_seqlens is not None:
        cu_seqlens = check_cu_seqlens("cu_seqlens", cu_seqlens, query, length)
        check_same_length("cu_seqlens", query, length)
        for name, given in (("initial_state", initial_state is not None), ("return_state", return_state)):
            if given:
                fail(name, "does not go with cu_seqlens: packed sequences have no common state")
    return LinearCall(
        query=query,
        keys=keys,
        value=value,
        shift=shift,
        log_prior=check_log_prior(log_prior, query, (query.shape[0], keys.shape[1], components, length)),
        feature_map=check_feature_map(feature_map),
        key_mask=check_key_mask(key_mask, query, length),
        causal=causal,
        cu_seqlens=cu_seqlens,
        initial_state=check_state(initial_state, query, keys, value),
        return_state=flag("return_state", return_state),
        return_weights=flag("return_weights", return_weights),
        normalise=normalise,
    )
