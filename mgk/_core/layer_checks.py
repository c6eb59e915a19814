"""Checks of the arguments of the layers and models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mgk._core.operator_checks import check_cu_seqlens, check_key_shape, check_max_seqlen
from mgk._core.precision import is_autocast_enabled
from mgk._core.validation import NESTED, check_device, describe, fail


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


# Masks


def check_padding_mask(mask: Any, batch: int, length: int, like: Tensor) -> Tensor:
    """Check a padding mask, bool [B, S], True = padding."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        fail("key_padding_mask", f"must be a bool tensor [B, S], True = padding, got {describe(mask)}")
    check_key_shape("key_padding_mask", mask, batch, length)
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
    check_key_shape("key_padding_mask", mask, query.shape[0], key.shape[1])
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


# Models


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
