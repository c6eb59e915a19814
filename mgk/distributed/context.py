"""Context parallelism of layers and models: attention over sequences that are sharded over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mgk import functional
from mgk._core.calls import AttentionArgs, LinearCall, MixtureCall, linear_call, mixture_call
from mgk._core.em import EMStatistics
from mgk._core.operator_checks import check_cu_seqlens, check_mask, check_max_seqlen
from mgk._core.validation import fail
from mgk.attention import Attention
from mgk.backends import em_statistics
from mgk.distributed.linear_state import run_state_passing
from mgk.distributed.ring import Shards, part_call, plan_part, run_ring, split_tensors
from mgk.distributed.sharding import check_local_length, check_mesh, local_positions
from mgk.models.decoder import POSITIONS, LanguageModel
from mgk.models.encoder import Classifier

Module = TypeVar("Module", bound=nn.Module)


def make_shards(mesh: DeviceMesh, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Shards:
    """Return the ring of a mesh."""
    return Shards(mesh.get_group(), mesh.get_local_rank(), mesh.size(), cu_seqlens, max_seqlen)


class ContextParallelAttention(Attention):
    """Attention whose inputs and outputs are the rows of this rank; made by `context_parallel`."""

    context_mesh: DeviceMesh
    _shards: Shards
    _full_mask: Tensor | None = None

    # Compiled models run this layer in eager mode: the compiler cannot trace the exchanges.
    @torch.compiler.disable
    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        args: AttentionArgs,
        position_ids: Tensor | None = None,
    ) -> Any:
        """Compute `forward` for the rows of this rank.

        Inputs, key_padding_mask and position_ids have the rows of this rank, as `shard` returns them. cu_seqlens and
        the columns of attn_mask are those of the whole sequence.
        """
        if args.cache is not None:
            fail("cache", "is not supported with context parallelism: decode with a model that is not sharded")
        if args.need_weights:
            fail("need_weights", "is not supported with context parallelism, which forms no weights")
        if self.is_linear and self.preset.linear.length_scaled:
            fail("preset", "'ref-lra' scales linear attention by the length of a rank: use 'paper' or 'ref-lm'")
        if self.training and self.dropout and not self.is_linear:
            fail("dropout", f"= {self.dropout} must be 0 in training with context parallelism: blocks are recomputed")
        for name, x in (("query", query), ("key", key)):
            if isinstance(x, Tensor) and x.dim() == 3:
                check_local_length(name, x.shape[1])
        cu_seqlens, ranks = args.cu_seqlens, self.context_mesh.size()
        shards = make_shards(self.context_mesh, cu_seqlens, args.max_seqlen)
        if cu_seqlens is not None:
            if key is not None and key is not query:
                fail("cu_seqlens", "is supported only for self-attention without a cache")
            check_cu_seqlens("cu_seqlens", cu_seqlens, query, query.shape[1] * ranks)
            check_max_seqlen("max_seqlen", args.max_seqlen, cu_seqlens)
            args = replace(args, cu_seqlens=None, max_seqlen=None)
        full_mask = None if self.is_linear else args.attn_mask
        if full_mask is not None:
            args = replace(args, attn_mask=None)
        self._shards, self._full_mask = shards, full_mask
        try:
            return super().attend(query, key, value, args, position_ids)
        finally:
            self._full_mask = None

    def _positions(self, x: Tensor, position_ids: Tensor | None, args: AttentionArgs) -> Tensor | None:
        is_used = self.rotary is not None or getattr(self.prior, "positions", None) is not None
        if position_ids is not None or not is_used:
            return super()._positions(x, position_ids, args)
        return local_positions(x.shape[1], self.context_mesh, self._shards.cu_seqlens).to(x.device)

    def run_mixture(self, call: MixtureCall, backend: str) -> Any:
        """Run a mixture call of this rank's rows over the keys of all ranks."""
        return run_ring(self._shards, call, backend, check_full_mask(self._full_mask, call, self._shards))

    def run_linear(self, call: LinearCall, backend: str) -> Any:
        """Run a linear call of this rank's rows over the keys of all ranks."""
        return run_state_passing(self._shards, call, backend)

    def em_statistics(
        self, call: MixtureCall, positions: Tensor | None, real_queries: Tensor | None, with_spread: bool
    ) -> tuple[EMStatistics, Tensor | None]:
        """Return the statistics of this rank's queries over the keys of all ranks, with their positions."""
        full_mask = check_full_mask(self._full_mask, call, self._shards)
        return ring_statistics(self._shards, call, full_mask, positions, real_queries, with_spread)


class ContextParallelLanguageModel(LanguageModel):
    """Language model whose tokens are those of this rank; made by `context_parallel`."""

    context_mesh: DeviceMesh

    def embed(self, tokens: Tensor, position_ids: Tensor | None = None, start: int = 0) -> Tensor:
        """Embed the tokens of this rank at their positions in the whole sequence."""
        if position_ids is None and POSITIONS[self.config.positions].added:
            position_ids = local_positions(tokens.shape[1], self.context_mesh).to(tokens.device)
        return super().embed(tokens, position_ids, start)

    def last_hidden(self, tokens: Tensor) -> Tensor:
        fail("last_hidden", "is not supported with context parallelism: only one rank has the last position")


@torch.no_grad()
def ring_statistics(
    shards: Shards, call: MixtureCall, full_mask: Tensor | None, positions: Tensor | None, real_queries: Tensor | None,
    with_spread: bool,
) -> tuple[EMStatistics, Tensor | None]:  # fmt: skip
    """Return the EM statistics of this rank's queries over the keys of all ranks.

    Args:
        shards: The ring.
        call: Call with the rows of this rank.
        full_mask: Mask with the columns of all keys, or None.
        positions: Positions of this rank's keys, [S] or [B, S], or None.
        real_queries: bool [B, L], False for queries of this rank to leave out.
        with_spread: Compute the spread too.

    Returns:
        Statistics of the keys of all ranks, one rank after the other, and the positions of these keys.
    """
    tensors, travelling = split_tensors(call, full_mask)
    block = {name: x for name, x in tensors.items() if name in travelling and name != "value"}
    if positions is not None:
        block["positions"] = positions
    counts, pairs, spreads, all_positions = [], [], [], []
    for source, remote in shards.circulate(block):
        current = {**tensors, **remote}
        part = plan_part(shards, tensors, source, call.causal is not None)
        rows = None if real_queries is None else real_queries[:, part.rows]
        statistics = em_statistics(part_call(call, current, part), rows, with_spread=with_spread)
        missing = (0, call.keys.shape[-2] - part.columns.stop)
        counts.append(nn.functional.pad(statistics.count, missing))
        pairs.append(nn.functional.pad(statistics.pairs, missing))
        if statistics.spread is not None:
            spreads.append(nn.functional.pad(statistics.spread, missing))
        if positions is not None:
            all_positions.append(remote["positions"])
    spread = torch.cat(spreads, -1) if spreads else None
    result = EMStatistics(torch.cat(counts, -1), torch.cat(pairs, -1), spread)
    return result, None if positions is None else torch.cat(all_positions, -1)


def check_full_mask(mask: Tensor | None, call: MixtureCall, shards: Shards) -> Tensor | None:
    """Check a mask with the rows of this rank and the columns of all keys."""
    return check_mask(mask, call.query, call.keys.shape[-2] * shards.ranks)


MIXINS: dict[Any, Any] = {
    Attention: ContextParallelAttention,
    LanguageModel: ContextParallelLanguageModel,
}


@cache
def _subclass(base: Any, mixin: Any) -> Any:
    """Return the context-parallel class of a class of layers or models."""
    return mixin if issubclass(mixin, base) else type(f"ContextParallel{base.__name__}", (mixin, base), {})


def context_parallel(module: Module, mesh: DeviceMesh) -> Module:
    """Make the attention of a module work on sequences that are sharded over the ranks of a mesh, in place.

    Pass the rows of this rank (`shard`) to the module afterwards; the outputs are those of the same rows. Rotary
    embeddings, per-position priors and the positions of a `LanguageModel` are those of the whole sequence. Everything
    else in the module must act on each token alone.

    The parameters must be equal on all ranks. The gradients of parameters are sums over the rows of this rank: let
    DDP or FSDP reduce them over a mesh that includes these ranks, or call `reduce_gradients`.

    Args:
        module: An `Attention`, a `LanguageModel`, or a module with attention layers.
        mesh: One-dimensional mesh, such as ``init_device_mesh("cuda", (8,))`` or ``mesh["cp"]``.

    Returns:
        The module.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # under torchrun: the number of ranks
        >>> layer = mgk.distributed.context_parallel(mgk.Attention(32, 4, is_causal=True), mesh)
        >>> layer(mgk.distributed.shard(torch.randn(1, 8, 32), mesh)).shape
        torch.Size([1, 8, 32])
    """
    check_mesh(mesh)
    layers = [layer for layer in module.modules() if isinstance(layer, Attention)]
    if not layers:
        fail("module", f"has no mgk.Attention layers: {type(module).__name__}")
    for submodule in module.modules():
        if isinstance(submodule, Classifier):
            fail("module", "is a Classifier, which averages over the sequence: context_parallel supports LanguageModel")
        for base, mixin in MIXINS.items():
            if isinstance(submodule, base):
                if not isinstance(submodule, mixin):
                    submodule.__class__ = _subclass(submodule.__class__, mixin)
                submodule.context_mesh = mesh
    return module


def sharded_attention(op: Callable[..., Any] | str, *args: Any, mesh: DeviceMesh, **kwargs: Any) -> Any:
    """Run an operator on tensors that are sharded over the ranks of a mesh.

    Args:
        op: One of the four operators, or its name.
        *args: Positional arguments of the operator, with the rows of this rank.
        mesh: One-dimensional mesh.
        **kwargs: Keyword arguments of the operator. cu_seqlens are those of the whole length, equal for queries and
            keys. attn_mask has the rows of this rank and the columns of all keys in the order of the sequence; or one
            row and the columns of this rank's keys.

    Returns:
        The output of this rank's queries; with return_lse, a tuple of output and lse. Gradients of query, keys and
        value are complete, as are those of a log_prior, scale or mask per key. Gradients of the other tensors (shift,
        a shared log_prior or scale, τ, a mask with all columns) are those of this rank's queries: sum them over the
        ranks (`reduce_gradients`).

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # under torchrun: the number of ranks
        >>> query, key, value = (mgk.distributed.shard(x, mesh, dim=2) for x in torch.randn(3, 1, 2, 8, 4))
        >>> shift = torch.randn(2, 2, 4)
        >>> mgk.distributed.sharded_attention(mgk.smgk_attention, query, key, value, shift, mesh=mesh).shape
        torch.Size([1, 2, 8, 4])
    """
    arguments = functional.bind_arguments(op, *args, **kwargs)
    backend = arguments.pop("backend")
    check_mesh(mesh)
    for name in ("query", "keys"):
        check_local_length(name, arguments[name].shape[-2])
    if "attn_mask" in arguments:
        return _run_sharded_mixture(arguments, backend, mesh)
    return _run_sharded_linear(arguments, backend, mesh)


def _run_sharded_mixture(arguments: dict[str, Any], backend: str, mesh: DeviceMesh) -> Any:
    shards = make_shards(mesh, *_pop_packing(arguments, mesh.size()))
    mask, length = arguments.pop("attn_mask"), arguments["keys"].shape[-2]
    # With one rank, the columns of this rank's keys are those of all keys.
    is_key_mask = isinstance(mask, Tensor) and mesh.size() > 1 and mask.dim() == 4 and mask.shape[-2:] == (1, length)
    call = mixture_call(**arguments, attn_mask=mask if is_key_mask else None)
    return run_ring(shards, call, backend, None if is_key_mask else check_full_mask(mask, call, shards))


def _run_sharded_linear(arguments: dict[str, Any], backend: str, mesh: DeviceMesh) -> Any:
    query, cu_seqlens = arguments["query"], arguments.pop("cu_seqlens")
    if cu_seqlens is not None:
        check_cu_seqlens("cu_seqlens", cu_seqlens, query, query.shape[2] * mesh.size())
    return run_state_passing(make_shards(mesh, cu_seqlens), linear_call(**arguments), backend)


def _pop_packing(arguments: dict[str, Any], ranks: int) -> tuple[Tensor | None, int | None]:
    """Remove the packing from the arguments of an operator; return cu_seqlens and max_seqlen of the whole length."""
    offsets = {name: arguments.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    limits = {name: arguments.pop(name) for name in ("max_seqlen_q", "max_seqlen_k")}
    cu_seqlens, keys_cu_seqlens = offsets.values()
    if cu_seqlens is None and keys_cu_seqlens is None:
        for name, limit in limits.items():
            if limit is not None:
                fail(name, "requires cu_seqlens_q and cu_seqlens_k, which are not given")
        return None, None
    query = arguments["query"]
    for name, x in offsets.items():
        if x is not None:
            check_cu_seqlens(name, x, query, query.shape[2] * ranks)
    if cu_seqlens is None or keys_cu_seqlens is None or not torch.equal(cu_seqlens, keys_cu_seqlens):
        fail("cu_seqlens_k", "must equal cu_seqlens_q with context parallelism")
    for name, limit in limits.items():
        check_max_seqlen(name, limit, cu_seqlens)
    return cu_seqlens, limits["max_seqlen_q"]
