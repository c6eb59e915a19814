"""Priors π over components and variances σ²: constant, learned by gradient descent, or updated by EM."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mgk._core.calls import AttentionArgs, MixtureCall
from mgk._core.em import EMStatistics
from mgk._core.em_checkpointing import CheckpointedStateLog, is_recomputed_forward
from mgk._core.head_shards import HeadShards, local_tensor
from mgk._core.precision import compute_dtype
from mgk._core.validation import fail
from mgk.variants import Preset, Variant


def sum_over_ranks(*tensors: Tensor, shards: HeadShards | None = None) -> tuple[Tensor, ...]:
    """Return statistics [Hk, ...] summed over all ranks of data-parallel training.

    Args:
        tensors: The statistics of this rank.
        shards: The part of the heads that this rank has. Default: all ranks have all heads.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return tensors
    if shards is not None:
        return tuple(shards.sum_over_ranks(tensor) for tensor in tensors)
    for tensor in tensors:
        dist.all_reduce(tensor)
    return tensors


class EMState(nn.Module):
    """Base class of modules whose buffers are updated by EM.

    The buffers are fp32 or fp64, because half precision rounds small updates to 0. `half` and `to` move them without
    rounding. State dicts with half-precision buffers can be loaded.
    """

    def register_state(self, name: str, *shape: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        """Register an uninitialized buffer in the compute dtype of `dtype`."""
        dtype = compute_dtype(dtype or torch.get_default_dtype())
        self.register_buffer(name, torch.empty(*shape, device=device, dtype=dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        former = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            old = former[name]
            if buffer is not None and old is not None and buffer.dtype != compute_dtype(buffer.dtype):
                self._buffers[name] = old.to(buffer.device, compute_dtype(buffer.dtype))
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # load_state_dict(assign=True) replaces the buffers.
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = buffer.to(compute_dtype(buffer.dtype))


class UniformPrior(nn.Module):
    """Uniform prior, π = 1/M."""

    def __init__(
        self, heads: int, components: int, variant: Variant, preset: Preset, positions: int | None, **factory: Any
    ):
        super().__init__()

    def forward(self, length: int, positions: Tensor | None) -> Tensor | None:
        return None


class PerPositionTable(nn.Module):
    """Table [Hk or 1, M, P or 1] with one column shared by all key positions, or one for each of P positions."""

    head_shards: HeadShards | None = None

    def __init__(self, heads: int, components: int, positions: int | None) -> None:
        super().__init__()
        self.heads, self.components, self.positions = heads, components, positions

    def lookup(self, table: Tensor, length: int, positions: Tensor | None) -> Tensor:
        """Return a shared table [Hk, M, 1], or the columns of key positions, [Hk, M, S] or [B, Hk, M, S]."""
        if self.positions is None:
            return table
        if positions is None:
            self._check(length)
            return table[..., :length]
        if positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
            first, last = (int(end) for end in positions.aminmax())
            if first < 0:
                fail("position_ids", f"must be at least 0 with per-position priors, got {first}")
            self._check(last + 1)
        columns = table[..., positions]  # [Hk, M, S] or [Hk, M, B, S]
        return columns if positions.dim() == 1 else columns.permute(2, 0, 1, 3)

    def _check(self, length: int) -> None:
        assert self.positions is not None
        if length > self.positions:
            fail("key", f"has {length} positions, but the prior has {self.positions}: increase max_positions")


class LearnedPrior(PerPositionTable):
    """Prior as a parameter: a softmax over components or, as in the authors' code, clamped to [0, 1]."""

    def __init__(
        self, heads: int, components: int, variant: Variant, preset: Preset, positions: int | None, **factory: Any
    ):
        super().__init__(heads, components, positions if preset.prior_sharing == "position" else None)
        self.clamped, self.is_linear = preset.prior_clamped, variant.similarity == "linear"
        rows = 1 if preset.prior_sharing == "layer" else heads
        self.weights = nn.Parameter(torch.empty(rows, components, self.positions or 1, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weights, 1 / self.components if self.clamped else 0.0)

    def forward(self, length: int, positions: Tensor | None) -> Tensor:
        weights = local_tensor(self.weights)
        if self.head_shards is not None and self.weights.shape[0] == 1:
            weights = self.head_shards.sum_gradient(weights)
        if self.clamped:
            log_prior = weights.clamp(torch.finfo(weights.dtype).tiny, 1).log()
            if self.is_linear:
                # The sum of the weights of a row must be 0, not tiny: its gradient would overflow.
                log_prior = log_prior.masked_fill(weights <= 0, -math.inf)
        else:
            log_prior = weights.log_softmax(1)
        return self.lookup(log_prior, length, positions)


class EMPrior(PerPositionTable, EMState):
    """Prior as a buffer, replaced after each training batch by the batch's N_jr/N_j (Eq. 11)."""

    prior: Tensor  # [Hk, M, P or 1]

    def __init__(
        self, heads: int, components: int, variant: Variant, preset: Preset, positions: int | None, **factory: Any
    ):
        super().__init__(heads, components, positions)
        self.momentum = variant.em_momentum
        self.register_state("prior", heads, components, positions or 1, **factory)
        self.state_log = CheckpointedStateLog()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.prior, 1 / self.components)

    def forward(self, length: int, positions: Tensor | None) -> Tensor:
        return self.lookup(self.state_log.state_for_forward(local_tensor(self.prior)).log(), length, positions)

    @torch.no_grad()
    def update(self, statistics: EMStatistics, positions: Tensor | None) -> None:
        """Update the prior with the statistics of a training batch."""
        count, pairs = statistics.count, statistics.pairs.unsqueeze(2)  # [B, Hk, M, S], [B, Hk, 1, S]
        if self.positions is None:
            count, pairs = count.sum((0, -1)).unsqueeze(-1), pairs.sum((0, -1)).unsqueeze(-1)
        else:
            count, pairs = (self._sum_by_position(x, positions) for x in (count, pairs))
        count, pairs = sum_over_ranks(count, pairs, shards=self.head_shards)
        prior = local_tensor(self.prior)
        new = count / pairs.clamp(min=1)
        new = torch.lerp(new, prior.to(new.dtype), self.momentum) if self.momentum else new
        # Positions that no query attends to keep their prior.
        prior.copy_(torch.where(pairs > 0, new, prior.to(new.dtype)))

    def _sum_by_position(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Sum [B, Hk, *, S] over the batch into the columns of key positions, [Hk, *, P]."""
        batch, heads, rows, length = x.shape
        if positions is None:
            positions = torch.arange(length, device=x.device)
        columns = positions.expand(batch, length).reshape(-1)
        table = x.new_zeros(heads, rows, self.positions or 1)
        return table.index_add(-1, columns, x.permute(1, 2, 0, 3).flatten(2))


PRIORS = {"uniform": UniformPrior, "learned": LearnedPrior, "em": EMPrior}


class FixedVariance(nn.Module):
    """Constant 1/σ² of the preset: a number or, if the components differ, a buffer [M]."""

    scales: Tensor | None

    def __init__(self, heads: int, components: int, head_dim: int, variant: Variant, preset: Preset, **factory: Any):
        super().__init__()
        self.scale = 1 / math.sqrt(preset.variance_width or head_dim)
        factors = preset.component_scales
        if factors is not None and components == 1:
            factors = factors[:1]
        if factors is not None and len(factors) != components:
            fail("num_components", f"must be {len(factors)} with this preset, which sets each component's variance")
        if factors is not None and len(set(factors)) == 1:
            self.scale *= factors[0]
            factors = None
        self.factors = factors
        self.register_buffer("scales", None if self.factors is None else torch.empty(components, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.scales is not None:
            self.scales.copy_(self.scale * torch.tensor(self.factors).to(self.scales))

    def forward(self) -> tuple[float | Tensor, Tensor | None]:
        """Return 1/σ² and the logarithm of the Gaussians' normalizer, which is added to log π: [Hk, M, 1] or None."""
        return (self.scale if self.scales is None else self.scales), None


class LogVariance(nn.Module):
    """Base class: log σ² per head and component. Unequal variances require the normalizer (D/2) log 1/σ²."""

    log_variance: Tensor  # [Hk, M]
    head_shards: HeadShards | None = None

    def __init__(self, heads: int, components: int, head_dim: int, variant: Variant, preset: Preset, **factory: Any):
        super().__init__()
        self.head_dim, self.floor = head_dim, variant.variance_floor
        self.momentum = variant.em_momentum
        self.start = 0.5 * math.log(preset.variance_width or head_dim)
        self._register(heads, components, **factory)
        self.reset_parameters()

    def _register(self, heads: int, components: int, **factory: Any) -> None:
        raise NotImplementedError

    def reset_parameters(self) -> None:
        nn.init.constant_(self.log_variance, self.start)

    def current(self) -> Tensor:
        return local_tensor(self.log_variance)

    def forward(self) -> tuple[float | Tensor, Tensor | None]:
        log_variance = self.current()
        return (-log_variance).exp(), (-0.5 * self.head_dim * log_variance).unsqueeze(-1)


class LearnedVariance(LogVariance):
    """Variance as a parameter."""

    def _register(self, heads: int, components: int, **factory: Any) -> None:
        self.log_variance = nn.Parameter(torch.empty(heads, components, **factory))


class EMVariance(LogVariance, EMState):
    """Variance as a buffer, updated by Eq. 13 pooled over positions: Σ γ ‖q − k‖² / (D Σ γ)."""

    def _register(self, heads: int, components: int, **factory: Any) -> None:
        self.register_state("log_variance", heads, components, **factory)
        self.state_log = CheckpointedStateLog()

    def current(self) -> Tensor:
        return self.state_log.state_for_forward(local_tensor(self.log_variance))

    @torch.no_grad()
    def update(self, statistics: EMStatistics, positions: Tensor | None) -> None:
        """Update the variance with the statistics of a training batch."""
        assert statistics.spread is not None
        count, spread = statistics.count.sum((0, -1)), statistics.spread.sum((0, -1))  # [Hk, M]
        count, spread = sum_over_ranks(count, spread, shards=self.head_shards)
        log_variance = local_tensor(self.log_variance)
        old = log_variance.exp().to(count.dtype)
        new = torch.where(count > 0, spread / (count * self.head_dim).clamp(min=torch.finfo(count.dtype).tiny), old)
        new = torch.lerp(new, old, self.momentum) if self.momentum else new
        log_variance.copy_(new.clamp(min=self.floor).log())


VARIANCES = {"fixed": FixedVariance, "learned": LearnedVariance, "em": EMVariance}


def update_em(layer: Any, call: MixtureCall, positions: Tensor | None, args: AttentionArgs, is_self: bool) -> None:
    """Update EM priors and variances from a training batch, after the batch has used the old ones.

    Args:
        layer: An `Attention` layer.
        call: Call of the forward.
        positions: Positions of the keys, [S] or [B, S]; None counts from 0.
        args: Arguments of the forward.
        is_self: Whether the keys belong to the tokens of the queries.
    """
    if not layer.training or not torch.is_grad_enabled():
        return
    # A tuple: the compiler of torch 2.6 does not support isinstance with a union.
    modules = [module for module in (layer.prior, layer.variance) if isinstance(module, (EMPrior, EMVariance))]
    if modules and not is_recomputed_forward():
        # The padding mask covers the keys: it applies to the queries only in self-attention.
        real_queries = args.real_tokens() if is_self and args.cache is None else None
        with_spread = isinstance(layer.variance, EMVariance)
        statistics, positions = layer.em_statistics(call, positions, real_queries, with_spread)
        for module in modules:
            module.update(statistics, positions)
