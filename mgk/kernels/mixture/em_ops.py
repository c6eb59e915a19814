"""The counts of expectation maximisation as a torch operator."""

from typing import Any

import torch
from torch import Tensor

from mgk.kernels.jit_cache import LaunchSpec, launch
from mgk.kernels.mixture.args import MixtureArgs
from mgk.kernels.mixture.em_counts import count_components, query_terms
from mgk.kernels.mixture.launch import count_key_tiles, leading_strides, precision_of, preprocess
from mgk.kernels.mixture.launch_config import KEYS_PER_TILE, ceil_div, key_strides, padded_width


@torch.library.custom_op("mgk::component_counts", mutates_args=())
def component_counts(
    query: Tensor, keys: Tensor, shift: Tensor | None, log_prior: Tensor | None, scale_t: Tensor | None,
    tau_t: Tensor | None, mask: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, scale: float, tau: float,
    causal: int, max_q: int, max_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """N_jr [B, Hk, M, S] and N_j [B, Hk, S] of the queries that may see key j."""
    (B, H, L, D), HK, S = query.shape, keys.shape[1], keys.shape[-2]
    args = MixtureArgs(
        query,
        keys,
        keys,
        shift,
        log_prior,
        scale_t,
        tau_t,
        mask,
        None,
        cu_q,
        cu_k,
        scale,
        tau,
        0.0,
        0.0,
        causal,
        False,
        max_q,
        max_k,
    )  # fmt: skip  (no values)
    M = args.components
    count = query.new_empty(B, HK, M, S, dtype=torch.float32)
    pairs = count.new_empty(B, HK, S)
    if query.numel() == 0 or S == 0:
        return count.zero_(), pairs.zero_()
    n_seq, key_tiles, shifted = args.num_sequences, count_key_tiles(cu_k, B, S), shift is not None
    prepared, stats = count.new_empty(2, HK, M, key_tiles * KEYS_PER_TILE), count.new_empty(HK, key_tiles, 4)
    preprocess(args, prepared, stats)
    unequal = scale_t is not None and scale_t.shape[1] > 1
    products = not shifted or unequal
    rows, cols = (32, 32) if products and (query.element_size() > 2 or D > 128) else (64, 64)
    q_tiles, k_tiles = ceil_div(max_q, rows), ceil_div(max_k, cols)
    terms, spread = count.new_empty(2 * M, B * H * L), count.new_empty(n_seq * H, q_tiles)
    common = {
        "M": M, "D": D, "BD": padded_width(D), "BM": rows, "SHIFTED": shifted,
        "SCALE": 0 if scale_t is None else scale_t.shape[1],
    }  # fmt: skip
    terms_of = LaunchSpec(
        query_terms, (q_tiles * n_seq, H, 1), (*query.stride()[:3], terms.stride(0), H // HK), (H, L, q_tiles),
        common | {"TAU": tau_t is not None, "PACKED": cu_q is not None},
    )  # fmt: skip
    launch(terms_of, (query, shift, scale_t, tau_t, cu_q, terms, spread), (scale, tau))
    mask = None if mask is None else mask.expand(B, H, L, S)
    counts_of = LaunchSpec(
        count_components, (k_tiles * n_seq, HK, 1),
        (*query.stride()[:3], *key_strides(keys.stride(), shifted), *leading_strides(mask, 4), terms.stride(0),
        H // HK),
        (H, L, S, key_tiles, q_tiles, k_tiles),
        common | {"BN": cols, "CAUSAL": causal, "MASK": 0 if mask is None else 1 + mask.is_floating_point(),
        "PACKED": cu_q is not None, "PRECISION": precision_of(query)}, num_stages=2 if products else 1,
    )  # fmt: skip
    tensors = (query, keys, mask, scale_t, cu_q, cu_k, prepared, terms, spread, count, pairs)
    launch(counts_of, tensors, (scale,))
    return count, pairs


@component_counts.register_fake
def _counts_fake(
    query: Any, keys: Any, shift: Any, log_prior: Any, scale_t: Any, tau_t: Any, mask: Any, cu_q: Any, cu_k: Any,
    scale: Any, tau: Any, causal: Any, max_q: Any, max_k: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, HK, S = keys.shape[0], keys.shape[1], keys.shape[-2]
    M = keys.shape[2] if shift is None else shift.shape[1]
    count = query.new_empty(B, HK, M, S, dtype=torch.float32)
    return count, count.new_empty(B, HK, S)
