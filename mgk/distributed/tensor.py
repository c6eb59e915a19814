"""Tensor parallelism: the heads of attention and the hidden units of feed-forward layers sharded over ranks."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from mgk._core.head_shards import HeadShards
from mgk._core.validation import fail
from mgk.attention import Attention
from mgk.distributed.sharding import check_mesh
from mgk.models.decoder import DecoderLayer, SwiGLU
from mgk.models.encoder import EncoderLayer

Module = TypeVar("Module", bound=nn.Module)
# Position of the two projections in the feed-forward layers that are sequences of modules.
UP, DOWN = "0", "3"


class ReplicatedInput(ParallelStyle):
    """Convert the inputs of a module to DTensors once, so that their gradients are summed over the ranks once.

    Otherwise each of the projections that share an input would sum its gradient.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def convert(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            converted: dict[int, Any] = {}  # one DTensor for an input that is passed as query and as key
            for x in args:
                if isinstance(x, Tensor) and x.is_floating_point() and not isinstance(x, DTensor):
                    converted[id(x)] = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
            return tuple(converted.get(id(x), x) for x in args)

        module.register_forward_pre_hook(convert)
        return module


class HeadShardedTensors(ParallelStyle):
    """Shard the tensors of a module along their first dimension, the key heads; one that heads share is replicated."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if parameter.shape[0] > 1:
                sharded = distribute_tensor(parameter, device_mesh, [Shard(0)])
                module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        for name, buffer in [*module.named_buffers(recurse=False)]:
            if buffer.dim() > 1:
                setattr(module, name, distribute_tensor(buffer, device_mesh, [Shard(0)]))
        if hasattr(module, "head_shards"):
            module.head_shards = HeadShards(  # type: ignore[assignment]
                device_mesh.get_group(), device_mesh.get_local_rank(), device_mesh.size()
            )
        return module


class HeadParallel(ParallelStyle):
    """Shard the heads of an `mgk.Attention`, for a plan of `parallelize_module`.

    Query, keys and value are sharded column-wise, the output projection row-wise; shifts, priors, τ and variances
    belong to key heads and are sharded with them. The numbers of heads must be divisible by the number of ranks.

    Examples:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # under torchrun: the number of ranks
        >>> block = torch.nn.Sequential(torch.nn.LayerNorm(32), mgk.Attention(32, 4))
        >>> block = parallelize_module(block, mesh, {"1": mgk.distributed.HeadParallel()})
        >>> block(torch.randn(1, 8, 32)).shape
        torch.Size([1, 8, 32])
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Attention):
            fail("module", f"must be an mgk.Attention, got {type(module).__name__}")
        ranks = device_mesh.size()
        check_head_counts(module, ranks)
        for name in ("feature_map", "rotary"):
            part = getattr(module, name)
            if isinstance(part, nn.Module) and any(True for _ in part.parameters()):
                fail(name, "has parameters, which all heads share: tensor parallelism does not sum their gradients")
        plan = {
            "query": ColwiseParallel(),
            "keys": HeadShardedTensors(),
            "keys.projection": ColwiseParallel(),
            "value": ColwiseParallel(),
            "prior": HeadShardedTensors(),
            "variance": HeadShardedTensors(),
            "out": RowwiseParallel(),
        }
        parallelize_module(module, device_mesh, plan)
        HeadShardedTensors()._apply(module, device_mesh)  # τ
        ReplicatedInput()._apply(module, device_mesh)
        module.num_heads //= ranks
        module.num_key_heads //= ranks
        module.num_kv_heads //= ranks
        module.keys.heads //= ranks
        return module


def check_head_counts(layer: Attention, ranks: int) -> None:
    """Check that every rank gets the same number of query, key and value heads."""
    for name in ("num_heads", "num_key_heads", "num_kv_heads"):
        count = getattr(layer, name)
        if count % ranks:
            fail(name, f"= {count} is not divisible by the {ranks} ranks of mesh, which each get as many whole heads")


class SplitSwiGLU(nn.Module):
    """SwiGLU with separate gate and up projections, whose hidden units can be sharded."""

    def __init__(self, source: SwiGLU) -> None:
        super().__init__()
        weight = source.gate_and_up.weight
        self.gate, self.up = (self._projection(part, weight.requires_grad) for part in weight.detach().chunk(2))
        self.dropout, self.down = source.dropout, source.down

    @staticmethod
    def _projection(weight: Tensor, requires_grad: bool) -> nn.Linear:
        projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        projection.weight = nn.Parameter(weight.clone(), requires_grad=requires_grad)
        return projection

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.dropout(nn.functional.silu(self.gate(x)) * self.up(x)))
        return down


def tensor_parallel(module: Module, mesh: DeviceMesh) -> Module:
    """Shard the heads of all attention layers, and the feed-forward layers of mgk's models, over ranks, in place.

    Inputs and outputs are those of one process, equal on all ranks. Embeddings, norms and the softmax are not sharded:
    combine with FSDP over another dimension of the mesh. Make the optimizer afterwards. Seed all ranks alike, so that
    they draw the same dropout masks of the tensors that are not sharded.

    Args:
        module: An `Attention`, a model of `mgk.models`, or a module with attention layers.
        mesh: One-dimensional mesh whose size divides the numbers of query, key and value heads.

    Returns:
        The module. Its parameters are DTensors.

    Examples:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # under torchrun: the number of ranks
        >>> layer = mgk.distributed.tensor_parallel(mgk.Attention(32, 4), mesh)
        >>> layer(torch.randn(1, 8, 32)).shape, type(layer.query.weight).__name__
        (torch.Size([1, 8, 32]), 'DTensor')
    """
    check_mesh(mesh)
    layers = [layer for layer in module.modules() if isinstance(layer, Attention)]
    if not layers:
        fail("module", f"has no mgk.Attention layers: {type(module).__name__}")
    for layer in layers:
        check_head_counts(layer, mesh.size())
    blocks = [block for block in module.modules() if isinstance(block, DecoderLayer | EncoderLayer)]
    for block in blocks:
        down: Any = block.mlp.down if isinstance(block.mlp, SwiGLU) else block.mlp.get_submodule(DOWN)
        hidden = down.in_features
        if hidden % mesh.size():
            fail("ffn_dim", f"= {hidden} is not divisible by the {mesh.size()} ranks of mesh")
    for layer in layers:
        parallelize_module(layer, mesh, HeadParallel())
    for block in blocks:
        if isinstance(block.mlp, SwiGLU):
            block.mlp = SplitSwiGLU(block.mlp)
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block.mlp, mesh, ReplicatedInput())
        else:
            plan = {UP: ColwiseParallel(), DOWN: RowwiseParallel()}
        parallelize_module(block.mlp, mesh, plan)
    return module
