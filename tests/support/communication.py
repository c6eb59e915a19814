"""Volume of the collectives and transfers of torch.distributed, by kind."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operator -> kind of communication. The volume is that of the whole tensor: the output of an all-gather, and the input
# of the other collectives.
KINDS = {
    "c10d::send": "send",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allgather_": "all_gather",
}


class CommunicationVolume(TorchDispatchMode):
    """Context manager that counts the bytes of tensors passed to communication operators."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        kind = KINDS.get(name)
        if kind is not None:
            # The first argument is the output of an all-gather and of a reduce-scatter, the second its input.
            tensors = args[1] if name == "c10d::_reduce_scatter_base_" else args[0]
            self.bytes[kind] += sum(x.nbytes for x in tree_leaves(tensors) if isinstance(x, torch.Tensor))
        elif name.startswith(("c10d::", "_c10d_functional::")):
            self.bytes[name] += 1  # so that a test notices an operator that KINDS lacks
        return result
