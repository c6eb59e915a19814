"""Argument checks. A failed check raises ValueError("<argument> <what it should be>, got ...")."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from mgk._core.heads import pair_heads
from mgk._core.precision import autocast_inputs, is_autocast_enabled

NESTED = "is a nested tensor: concatenate its sequences to [1, T, ...] and pass cu_seqlens"
# Names of τ, which interpolates between Eq. 8 (0) and Eq. 9 (1).
SIMILARITIES = {"gaussian": 1.0, "dot": 0.0}


# Numbers, flags and names


def fail(name: str, message: str) -> NoReturn:
    """Raise a ValueError about the argument `name`."""
    raise ValueError(f"{name} {message}")


def nearest(value: Any, known: Iterable[str], cutoff: float = 0.7) -> str:
    """Return a suggestion ("; did you mean 'x'?") for a misspelt name, or an empty string."""
    alike = difflib.get_close_matches(value, list(known), cutoff=cutoff) if isinstance(value, str) else []
    # Names with the same letters in another order come first.
    alike.sort(key=lambda name: sorted(name) != sorted(value))
    return f"; did you mean {alike[0]!r}?" if alike else ""


def one_of(name: str, value: Any, known: Iterable[str]) -> Any:
    """Check that the value is one of the known names."""
    known = list(known)
    if not isinstance(value, str) or value not in known:
        fail(name, f"must be one of {', '.join(map(repr, known))}, got {value!r}{nearest(value, known)}")
    return value


def number(name: str, value: Any, least: float = -math.inf, below: float = math.inf, *, above: bool = False) -> float:
    """Check that the value is in [least, below), or in (least, below) with `above`; return it as a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        fail(name, f"must be a number, got {repr(value) if isinstance(value, str) else type(value).__name__}")
    # float() cannot convert integers above 1.8e308.
    result = math.inf if isinstance(value, int) and abs(value) > 1 << 1000 else float(value)
    if math.isnan(result) or math.isinf(result) or not least <= result < below or (above and result == least):
        bounds = "finite" if least == -math.inf else f"{'more than' if above else 'at least'} {least:g}"
        bounds += "" if below == math.inf else f" and below {below:g}"
        fail(name, f"must be {bounds}, got {value!r}")
    return result


def flag(name: str, value: Any) -> bool:
    """Check that the value is a bool."""
    if not isinstance(value, bool):
        fail(name, f"must be True or False, got {value!r}")
    return value


def positive_integer(name: str, value: Any) -> int:
    """Check that the value is an int from 1 to 2⁶³ - 1, the largest size of a tensor."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        fail(name, f"must be a positive integer, got {value!r}")
    if value >= 1 << 63:
        fail(name, f"must be below 2^63, got {value:.3g}")
    return value


# Tensors


def describe(value: Any) -> str:
    """Describe a value in a message: dtype and shape of a tensor, otherwise the type."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    """Check that a tensor is on the device of the query."""
    if tensor.device != query.device:
        fail(name, f"is on {tensor.device} but query is on {query.device}: move it there")


def check_tensor(name: str, value: Any, dims: str | None = None, *, like: Tensor | None = None) -> Tensor:
    """Check a floating-point tensor with the dimensions `dims` ("B H L D"), on the device of `like`."""
    if not isinstance(value, Tensor):
        fail(name, f"must be a tensor, got {type(value).__name__}")
    if value.is_nested:
        fail(name, NESTED)
    if not value.is_floating_point():
        fail(name, f"must be a floating-point tensor, got {value.dtype}")
    if dims is not None and value.dim() != dims.count(" ") + 1:
        fail(name, f"must have shape [{dims.replace(' ', ', ')}], got {list(value.shape)}")
    if like is not None:
        check_device(name, value, like)
    return value


def broadcasts_to(tensor: Tensor, target: tuple[int, ...]) -> bool:
    """Return whether each dimension is 1 or that of the target."""
    return all(size in (1, full) for size, full in zip(tensor.shape, target, strict=True))


def broadcast_to_4d(name: str, tensor: Tensor, target: tuple[int, ...], dims: str) -> Tensor:
    """Add leading dimensions up to four and check that the tensor broadcasts to `target`."""
    missing = 4 - tensor.dim()
    if missing >= 0 and broadcasts_to(tensor, target[missing:]):
        # No view of a 4-d tensor: it would add an autograd node.
        return tensor[(None,) * missing] if missing else tensor
    fail(name, f"must broadcast to [{dims}] = {list(target)}, got {list(tensor.shape)}")


# Arguments of the operators


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
            fail("similarity", message + nearest(similarity, SIMILARITIES))
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
    _check_key_shape("key_mask", key_mask, query.shape[0], length)
    check_device("key_mask", key_mask, query)
    return key_mask


def check_padding_mask(mask: Any, batch: int, length: int, like: Tensor) -> Tensor:
    """Check a padding mask, bool [B, S], True = padding."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        fail("key_padding_mask", f"must be a bool tensor [B, S], True = padding, got {describe(mask)}")
    _check_key_shape("key_padding_mask", mask, batch, length)
    check_device("key_padding_mask", mask, like)
    return mask


def check_torch_mask(name: str, mask: Any) -> Tensor:
    """Check a mask in torch.nn.MultiheadAttention's convention: bool, True = masked, or additive."""
    if not isinstance(mask, Tensor) or (mask.dtype != torch.bool and not mask.is_floating_point()):
        fail(name, f"must be a bool (True = masked) or floating-point tensor, got {describe(mask)}")
    return mask


def check_torch_padding_mask(mask: Any, batched: bool, query: Tensor, key: Tensor) -> Tensor:
    """Check the key_padding_mask of torch.nn.MultiheadAttention and return it as [B, S]."""
    mask = check_torch_mask("key_padding_mask", mask)
    mask = mask if batched or mask.dim() != 1 else mask.unsqueeze(0)
    _check_key_shape("key_padding_mask", mask, query.shape[0], key.shape[1])
    return mask


def check_torch_attn_mask(mask: Any, query: Tensor, key: Tensor, num_heads: int) -> Tensor:
    """Check the attn_mask of torch.nn.MultiheadAttention and return it as [L, S] or [B, H, L, S]."""
    mask = check_torch_mask("attn_mask", mask)
    (batch, queries), length = query.shape[:2], key.shape[1]
    shared, per_head = (queries, length), (batch * num_heads, queries, length)
    if mask.shape not in (shared, per_head):
        shapes = f"[L, S] = {list(shared)} or [B·H, L, S] = {list(per_head)}"
        fail("attn_mask", f"must have shape {shapes}, got {list(mask.shape)}")
    return mask if mask.dim() == 2 else mask.unflatten(0, (batch, num_heads))


def _check_key_shape(name: str, mask: Tensor, batch: int, length: int) -> None:
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


# Arguments of the layers and models


def check_input(name: str, x: Any, width: int, like: Tensor | None = None) -> Tensor:
    """Check an input [B, L, width] of a layer, with the batch and on the device of `like`."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        fail(name, f"must be a floating-point tensor [B, L, {width}], got {describe(x)}")
    if x.is_nested:
        fail(name, NESTED)
    if x.dim() != 3 or x.shape[-1] != width:
        fail(name, f"must have shape [B, L, {width}], got {list(x.shape)}")
    if like is not None and x.shape[0] != like.shape[0]:
        fail(name, f"must have query's batch size {like.shape[0]}, got {list(x.shape)}")
    if like is not None:
        check_device(name, x, like)
    return x


def check_key_and_value(query: Tensor, key: Any, value: Any, kdim: int, vdim: int) -> tuple[Tensor, Tensor, bool]:
    """Resolve and check the key and value inputs of a layer; return them and whether it is self-attention."""
    is_self, same_width = key is None or key is query, kdim == vdim == query.shape[-1]
    if is_self and same_width and (value is None or value is query):
        return query, query, True
    key = query if key is None else check_input("key", key, kdim, query)
    value = key if value is None else check_input("value", value, vdim, query)
    if is_self and not same_width:
        fail("key", f"is required: this layer takes keys of kdim = {kdim} and values of vdim = {vdim}")
    if key.shape[1] != value.shape[1]:
        fail("value", f"has length {value.shape[1]}, but key has {key.shape[1]}")
    return key, value, is_self


def check_dtype(name: str, x: Tensor, projection: torch.nn.Module) -> None:
    """Check that an input has the dtype of the weights, unless autocast converts both, and has data if they have.

    Skipped if the projection was replaced by a module without a floating-point weight, such as a quantized one.
    """
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return
    if x.device.type == "meta" and weight.device.type != "meta":
        fail(name, f"is on the meta device, but the layer's weights are on {weight.device}: move one of them")
    if x.dtype != weight.dtype and not is_autocast_enabled(x.device.type):
        remedy = "convert one of them, or use autocast"
        fail(name, f"has dtype {x.dtype}, but the layer's weights have {weight.dtype}: {remedy}")


def check_positions(position_ids: Any, query: Tensor) -> Tensor:
    """Check the positions of query [B, L, width]."""
    if not isinstance(position_ids, Tensor) or position_ids.dtype not in (torch.int32, torch.int64):
        fail("position_ids", "must be an integer tensor [L] or [B, L]")
    batch, length = query.shape[:2]
    if position_ids.shape not in ((length,), (batch, length), (1, length)):
        fail("position_ids", f"must have shape [L] or [B, L] = [{batch}, {length}], got {list(position_ids.shape)}")
    check_device("position_ids", position_ids, query)
    return position_ids


def check_cache(cache: Any, cache_class: type[Any], batch: int) -> None:
    """Check the class and the batch size of a cache."""
    if not isinstance(cache, cache_class):
        fail("cache", f"must come from this layer's make_cache, got {type(cache).__name__}")
    if cache.batch_size != batch:
        fail("cache", f"was made for batch size {cache.batch_size}, got {batch}")


def check_layer_packing(query: Tensor, cu_seqlens: Any, max_seqlen: Any, *, supported: bool) -> None:
    """Check the packing arguments of a layer's forward."""
    if cu_seqlens is not None:
        if not supported:
            fail("cu_seqlens", "is supported only for self-attention without a cache")
        check_cu_seqlens("cu_seqlens", cu_seqlens, query, query.shape[1])
        check_max_seqlen("max_seqlen", max_seqlen, cu_seqlens)
    elif max_seqlen is not None:
        fail("max_seqlen", "requires cu_seqlens, which is not given")


def check_tokens(tokens: Any, *dims: str | int) -> None:
    """Check token ids with the dimensions `dims`: names, or fixed sizes ("B", 2, "L")."""
    is_integer = isinstance(tokens, Tensor) and tokens.dtype in (torch.int32, torch.int64)
    sizes = tokens.shape if is_integer else ()
    if len(sizes) != len(dims) or any(isinstance(n, int) and n != size for n, size in zip(dims, sizes, strict=True)):
        fail("tokens", f"must be an int32 or int64 tensor [{', '.join(map(str, dims))}], got {describe(tokens)}")


def check_factory_kwargs(device: Any, dtype: Any) -> dict[str, Any]:
    """Check the device and dtype of a new module; return them as keyword arguments."""
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        fail("dtype", f"must be a floating-point torch.dtype, got {dtype!r}")
    try:
        device = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a torch device, got {device!r}") from error
    return {"device": device, "dtype": dtype}
