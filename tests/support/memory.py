"""Peak memory of tensors, by accounting: the storages that operators return, until they are freed."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Context manager that counts the bytes of live tensors allocated inside it."""

    def __init__(self):
        super().__init__()
        self.current = self.peak = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before:
                self._add(x.untyped_storage())
        return result

    def _add(self, storage):
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._remove, size)

    def _remove(self, size):
        self.current -= size
