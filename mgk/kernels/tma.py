"""Encoded TMA descriptors, cached by address, for launches that repeat.

Triton encodes each descriptor in Python at every launch. results/host_time.csv has the CPU time of calls.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from mgk.kernels.jit_cache import LaunchSpec

try:
    from triton.backends.nvidia.driver import make_tensordesc_arg
except ImportError:
    make_tensordesc_arg = None

# Since Triton 3.8, `make_tensordesc_arg` has a third argument, which is not used.
UNUSED = (None,) if make_tensordesc_arg and [*inspect.signature(make_tensordesc_arg).parameters][2:] == ["_"] else ()

# Encoded descriptors of the process, of all plans together: one takes 0.6 KB of memory, and a training step uses up to
# 10 per layer. With a limit per plan, training on batches of 1,000 lengths kept 1 GB of them.
MAX_ENCODED = 1 << 14

logger = logging.getLogger("mgk")


class Layout(NamedTuple):
    """Shape, strides and block of a TMA descriptor."""

    shape: Sequence[int]
    strides: Sequence[int]
    block: Sequence[int]


class Address(int):
    """An address in place of a tensor."""

    def data_ptr(self) -> int:
        return self


def descriptor_at(address: int, layout: Layout) -> TensorDescriptor:
    """Return a TMA descriptor of memory at an address, without Triton's checks of the tensor."""
    descriptor = object.__new__(TensorDescriptor)
    values = {"base": Address(address), "shape": layout.shape, "strides": layout.strides, "block_shape": layout.block}
    defaults = {x.name: x.default for x in dataclasses.fields(TensorDescriptor)}
    for name, default in defaults.items():
        setattr(descriptor, name, values.get(name, default))
    return descriptor


def encoding_properties(kernels: Sequence[Any], tensors: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the properties by which the descriptors of compiled kernels are encoded.

    Args:
        kernels: Compiled kernels of one launch.
        tensors: Its tensors and descriptors.

    Returns:
        One element per descriptor. None if the kernels differ in one, or if this version of Triton encodes descriptors
        in another way: then they have to be passed to Triton.
    """
    descriptors = [x for x in tensors if isinstance(x, TensorDescriptor)]
    if not descriptors:
        return ()
    metadata = [tuple(getattr(kernel.metadata, "tensordesc_meta", None) or ()) for kernel in kernels]
    is_known = (
        make_tensordesc_arg is not None
        and len(metadata[0]) == len(descriptors)
        and None not in metadata[0]
        and all(x == metadata[0] for x in metadata)
        and None not in [launcher_after_encoding(kernel.run) for kernel in kernels]
        and all(map(_can_encode, descriptors, metadata[0]))
    )
    if not is_known:
        logger.debug("TMA descriptors of %s are encoded at every launch", kernels[0].metadata.name)
        return None
    return metadata[0]


def _can_encode(descriptor: TensorDescriptor, properties: Any) -> bool:
    """Return whether a descriptor by address is encoded as that of the tensor; the encoded objects are not compared."""
    layout = Layout(descriptor.shape, descriptor.strides, descriptor.block_shape)
    try:
        encoded = make_tensordesc_arg(descriptor_at(descriptor.base.data_ptr(), layout), properties, *UNUSED)
        return list(encoded[1:]) == list(make_tensordesc_arg(descriptor, properties, *UNUSED)[1:])
    except Exception:  # another version of Triton
        return False


def launcher_after_encoding(run: Any) -> Any:
    """Return a copy of a compiled kernel's launcher that takes encoded descriptors, or None."""
    # Triton 3.4 to 3.9: `run.launch` is a closure of `launcher`, which takes encoded descriptors.
    encode = getattr(run, "launch", None)
    names = getattr(getattr(encode, "__code__", None), "co_freevars", ())
    if encode is None or "launcher" not in names:
        return None
    launcher: Any = copy.copy(run)
    launcher.launch = encode.__closure__[names.index("launcher")].cell_contents
    return launcher


class DescriptorArguments:
    """Arguments of a launch that pass one TMA descriptor."""

    def __init__(self, spec: LaunchSpec, index: int, layout: Layout):
        """Prepare the descriptor at position `index` of a launch, of tensors with a layout."""
        self.spec, self.index, self.layout = spec, index, layout

    def encode(self, address: int, device: int) -> tuple[Any, ...]:
        """Return the arguments for a tensor at an address: encoded, or a descriptor that Triton encodes.

        The kernels of the launch are compiled for the device.
        """
        properties = self.spec.compiled[max(device, 0)][0].descriptors
        descriptor = descriptor_at(address, self.layout)
        if properties is None:
            return (descriptor,)
        return tuple(make_tensordesc_arg(descriptor, properties[self.index], *UNUSED))


@functools.lru_cache(MAX_ENCODED)
def arguments_at(descriptor: DescriptorArguments, address: int, device: int) -> tuple[Any, ...]:
    """Return the result of `DescriptorArguments.encode`, cached."""
    return descriptor.encode(address, device)


def descriptor_arguments(spec: LaunchSpec, *layouts: Layout | None) -> tuple[DescriptorArguments | None, ...]:
    """Return the descriptors of a launch in the order of its arguments; None for those that are not descriptors."""
    positions = itertools.count()
    return tuple(None if x is None else DescriptorArguments(spec, next(positions), x) for x in layouts)


def encode(
    descriptors: tuple[DescriptorArguments | None, ...] | None, device: int, *addresses: int | None
) -> list[tuple[Any, ...]]:
    """Return the arguments of a launch for each address: those of its descriptor, or the address itself."""
    if descriptors is None:
        return [(x,) for x in addresses]
    return [
        (x,) if x is None or descriptor is None else arguments_at(descriptor, x, device)
        for x, descriptor in zip(addresses, descriptors, strict=True)
    ]
