"""Checks of the arguments of the operators: query, keys and value, masks, packed sequences, states."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from mgk._core.heads import pair_heads
from mgk._core.precision import autocast_inputs
from mgk._core.validation import (
    broadcast_to_4d,
    broadcasts_to,
    check_device,
    check_tensor,
    describe,
    fail,
    number,
    positive_integer,
    spelling_hint,
)

# Names of τ, which interpolates between Eq. 8 (0) and Eq. 9 (1).
SIMILARITIES = {"gaussian": 1.0, "dot": 0.0}


def check_query_keys_value(
    query: Any, keys: Any, value: Any, shift: Any | None, shifted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Check shapes, dtypes and devices of query, keys (named `key` if shifted), value and shift; apply autocast."""
    name = "key" if shifted else "keys"
    query = check_tensor("query", query, "B H L D")
    keys = check_tensor(name, keys, "B Hk S D" if shifted else "B Hk M S D", like=query)
    value = check_tensor("value", value, "B Hv S E", like=query)
    query, keys, value = autocast_inputs(query, keys, value)
    dtype = query.dtype
    for argument, tensor in ((name, keys), ("value", value)):
        if tensor.dtype != dtype:
            fail(argument, f"has dtype {tensor.dtype} but query has {dtype}: convert the inputs to one dtype")
    batch, heads, _, width = query.shape
    key_batch, key_heads, *components, length, key_width = keys.shape
    if width == 0:
        fail("query", f"must have a head dimension of at least 1, got {list(query.shape)}")
    if key_batch != batch or key_width != width:
        fail(name, f"must have query's batch size {batch} and head dimension {width}, got {list(keys.shape)}")
    if key_heads == 0 or heads % key_heads:
        fail(name, f"has {key_heads} heads, which must divide the {heads} heads of query")
    value_batch, value_heads, value_length, _ = value.shape
    if value_batch != batch or value_length != length:
        shape = f"[{batch}, Hv, {length}, E]"
        fail("value", f"must have shape {shape} to match {name}, got {list(value.shape)}")
    if value_heads == 0 or heads % value_heads:
        fail("value", f"has {value_heads} heads, which must divide the {heads} heads of query")
    if shifted:
        shift = check_tensor("shift", shift, "Hk M D", like=query)
        if shift.shape[0] != key_heads or shift.shape[1] == 0 or shift.shape[2] != width:
            fail("shift", f"must have shape [Hk, M, D] = [{key_heads}, M, {width}], got {list(shift.shape)}")
    elif components == [0]:
        fail(name, f"must have at least one component, got {list(keys.shape)}")
    return query, keys, value, shift


def check_log_prior(log_prior: Any, query: Tensor, target: tuple[int, int, int, int]) -> Tensor | None:
    """Check log π and return it as a 4-d tensor."""
    if log_prior is None:
        return None
    return broadcast_to_4d("log_prior", check_tensor("log_prior", log_prior, like=query), target, "B, Hk, M, S")


def check_scale(scale: Any, query: Tensor, target: tuple[int, int, int, int]) -> float | Tensor:
    """Check 1/σ² and return it as a number or a 4-d tensor; the default is 1/√D."""
    if scale is None:
        return 1 / math.sqrt(query.shape[-1])
    if not isinstance(scale, Tensor):
        return number("scale", scale, 0, above=True)
    scale = check_tensor("scale", scale, like=query)
    if scale.dim() <= 2:
        # [Hk, M]: one 1/σ² per head and component.
        heads, components = target[1:3]
        padded = scale.reshape((1,) * (2 - scale.dim()) + tuple(scale.shape))
        if padded.shape[0] in (1, heads) and padded.shape[1] in (1, components):
            return padded[None, :, :, None]
        fail("scale", f"must broadcast to [Hk, M] = [{heads}, {components}], got {list(scale.shape)}")
    if scale.dim() == 4 and broadcasts_to(scale, target):
        return scale
    fail("scale", f"must broadcast to [Hk, M] or to [B, Hk, M, S] = {list(target)}, got {list(scale.shape)}")


def check_similarity(similarity: Any, query: Tensor, key_heads: int) -> float | Tensor:
    """Check a similarity and return its τ: a number or a tensor [Hk]."""
    if isinstance(similarity, str):
        if similarity not in SIMILARITIES:
            choices = ", ".join(map(repr, SIMILARITIES))
            message = f"must be {choices}, or τ between them as a number or a tensor [Hk], got {similarity!r}"
            fail("similarity", message + spelling_hint(similarity, SIMILARITIES))
        return SIMILARITIES[similarity]
    if not isinstance(similarity, Tensor):
        return number("similarity", similarity)
    tau = check_tensor("similarity", similarity, like=query)
    if tau.dim() > 1 or tau.numel() not in (1, key_heads):
        fail("similarity", f"as a tensor must have shape [Hk] = [{key_heads}], got {list(tau.shape)}")
    return tau.expand(key_heads)


def check_causal(is_causal: Any) -> str | None:
    """Return the alignment of the causal diagonal: None, "top-left" or "bottom-right"."""
    if isinstance(is_causal, bool):
        return "top-left" if is_causal else None
    if is_causal != "bottom-right":
        fail("is_causal", f"must be False, True (aligned top-left, as in SDPA) or 'bottom-right', got {is_causal!r}")
    return "bottom-right"


def check_same_length(name: str, query: Tensor, length: int) -> None:
    """Check that the number of queries in [B, H, L, D] equals the number of keys."""
    if query.shape[2] != length:
        fail(name, f"requires the same number of queries and keys, got {query.shape[2]} and {length}")


def check_state(state: Any, query: Tensor, keys: Tensor, value: Tensor) -> tuple[Tensor, ...] | None:
    """Check the initial state of linear attention."""
    if state is None:
        return None
    form = "must be a state from return_state=True: a tuple (Z [B, Hs, F, E], z [B, Hk, F], log weight [B, Hk])"
    if not isinstance(state, tuple) or len(state) not in (2, 3) or not all(isinstance(x, Tensor) for x in state):
        fail("initial_state", form)
    batch, key_heads = query.shape[0], keys.shape[1]
    shapes_fit = (
        state[0].dim() == 4
        and state[0].shape[:2] == (batch, pair_heads(key_heads, value.shape[1]))
        and state[0].shape[3] == value.shape[-1]
        and state[1].shape == (batch, key_heads, state[0].shape[2])
        and all(x.is_floating_point() for x in state)
    )
    if not shapes_fit:
        fail("initial_state", f"{form}; got shapes {[list(x.shape) for x in state]}")
    for tensor in state:
        check_device("initial_state", tensor, query)
    return state


# Masks


def check_mask(attn_mask: Any, query: Tensor, length: int) -> Tensor | None:
    """Check an SDPA mask for query [B, H, L, D] and `length` keys, and return it as a 4-d tensor."""
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, Tensor):
        fail("attn_mask", f"must be a tensor, got {type(attn_mask).__name__}")
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        fail("attn_mask", f"must be bool (True = attend) or floating point (added), got {attn_mask.dtype}")
    check_device("attn_mask", attn_mask, query)
    batch, heads, queries, _ = query.shape
    return broadcast_to_4d("attn_mask", attn_mask, (batch, heads, queries, length), "B, H, L, S")


def check_key_mask(key_mask: Any, query: Tensor, length: int) -> Tensor | None:
    """Check the mask of linear attention, bool [B, S], True = attend."""
    if key_mask is None:
        return None
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        fail("key_mask", "must be a bool tensor [B, S], True = attend")
    check_key_shape("key_mask", key_mask, query.shape[0], length)
    check_device("key_mask", key_mask, query)
    return key_mask


def check_key_shape(name: str, mask: Tensor, batch: int, length: int) -> None:
    """Check that a mask of keys has the shape [B, S]."""
    if mask.shape != (batch, length):
        fail(name, f"must have shape [B, S] = [{batch}, {length}], got {list(mask.shape)}")


# Packed sequences


def _is_readable(offsets: Tensor) -> bool:
    # Reading a GPU tensor synchronizes the stream, and torch.compile cannot trace it.
    return offsets.device.type == "cpu" and not torch.compiler.is_compiling()


def check_cu_seqlens(name: str, cu_seqlens: Any, query: Tensor, length: int) -> Tensor:
    """Check the offsets of packed sequences of `length` rows in total."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        fail(name, f"must be an int32 tensor [N + 1] of offsets, got {describe(cu_seqlens)}")
    check_device(name, cu_seqlens, query)
    if cu_seqlens.numel() < 2:
        fail(name, "must hold at least two offsets, 0 and the total length")
    if query.shape[0] != 1:
        fail(name, f"requires batch size 1, with the sequences one after another, got {query.shape[0]}")
    if _is_readable(cu_seqlens):
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0 or offsets[-1] != length or any(a > b for a, b in itertools.pairwise(offsets)):
            fail(name, f"must increase from 0 to the total length {length}, got {offsets}")
    return cu_seqlens


def check_max_seqlen(name: str, limit: Any, offsets: Tensor) -> None:
    """Check an upper bound of the lengths of packed sequences."""
    if limit is None:
        return
    positive_integer(name, limit)
    if _is_readable(offsets) and limit < int(offsets.diff().max()):
        fail(name, f"= {limit} is less than the longest packed sequence, {int(offsets.diff().max())}")


def check_packing(query: Tensor, length: int, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any) -> bool:
    """Check the packing arguments of an operator; return whether sequences are packed."""
    if cu_q is None and cu_k is None:
        for name, limit in (("max_seqlen_q", max_q), ("max_seqlen_k", max_k)):
            if limit is not None:
                fail(name, "requires cu_seqlens_q and cu_seqlens_k, which are not given")
        return False
    for name, offsets in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if offsets is None:
            fail(name, "is missing: packed sequences need cu_seqlens_q and cu_seqlens_k")
    cu_q = check_cu_seqlens("cu_seqlens_q", cu_q, query, query.shape[2])
    cu_k = check_cu_seqlens("cu_seqlens_k", cu_k, query, length)
    if cu_q.numel() != cu_k.numel():
        fail("cu_seqlens_k", f"has {cu_k.numel()} offsets but cu_seqlens_q has {cu_q.numel()}")
    check_max_seqlen("max_seqlen_q", max_q, cu_q)
    check_max_seqlen("max_seqlen_k", max_k, cu_k)
    return True
