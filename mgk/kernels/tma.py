"""Encoded TMA descriptors, cached by address, for launches that repeat.

Triton encodes each descriptor in Python at every launch. results/host_time.csv has the CPU time of calls.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from mgk.kernels.jit_cache import LaunchSpec

try:
    from triton.backends.nvidia.driver import make_tensordesc_arg
except ImportError:
    make_tensordesc_arg = None

Layout = tuple[Sequence[int], Sequence[int]]  # shape and strides of a tensor

# Encoded descriptors per argument. A training step reuses the addresses of its tensors, so that there are few.
MAX_ENCODED = 1 << 10


class Address(int):
    """An address in place of a tensor."""

    def data_ptr(self) -> int:
        return self


class Descriptor(NamedTuple):
    """A TMA descriptor as Triton encodes it, without a tensor. The blocks are those of the compiled kernel."""

    base: Address
    shape: Sequence[int]
    strides: Sequence[int]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


def encoding_properties(kernels: Sequence[Any], tensors: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the properties by which the descriptors of compiled kernels are encoded.

    Args:
        kernels: Compiled kernels of one launch.
        tensors: Its tensors and descriptors.

    Returns:
        One element per descriptor. None if the kernels differ in one, or if this version of Triton encodes descriptors
        in another way: then they have to be passed to Triton.
    """
    num_descriptors = sum(isinstance(x, TensorDescriptor) for x in tensors)
    if num_descriptors == 0:
        return ()
    if make_tensordesc_arg is None or list(inspect.signature(make_tensordesc_arg).parameters) != ["arg", "metadata"]:
        return None
    properties = [tuple(getattr(kernel.metadata, "tensordesc_meta", None) or ()) for kernel in kernels]
    if len(properties[0]) != num_descriptors or None in properties[0] or any(x != properties[0] for x in properties):
        return None
    return None if None in [launcher_after_encoding(kernel.run) for kernel in kernels] else properties[0]


def launcher_after_encoding(run: Any) -> Callable[..., None] | None:
    """Return a copy of a compiled kernel's launcher that takes encoded descriptors, or None."""
    # Triton 3.6 and 3.7: `run.launch` is a closure of `launcher`, which takes encoded descriptors.
    encode = getattr(run, "launch", None)
    names = getattr(getattr(encode, "__code__", None), "co_freevars", ())
    if encode is None or "launcher" not in names:
        return None
    launcher: Any = copy.copy(run)
    launcher.launch = encode.__closure__[names.index("launcher")].cell_contents
    return launcher


class DescriptorArguments:
    """Arguments of a launch that pass one TMA descriptor, cached by the tensor's address."""

    def __init__(self, spec: LaunchSpec, index: int, layout: Layout):
        """Prepare the descriptor at position `index` of a launch, of tensors with a layout."""
        self.spec, self.index, self.layout = spec, index, layout
        self.encoded: dict[int, tuple[Any, ...]] = {}

    def at(self, address: int, device: int) -> tuple[Any, ...]:
        """Return the arguments for a tensor at an address. The kernels of the launch are compiled for the device."""
        arguments = self.encoded.get(address)
        if arguments is None:
            if len(self.encoded) >= MAX_ENCODED:
                self.encoded.clear()
            properties: Any = self.spec.compiled[max(device, 0)][0].descriptors
            descriptor = Descriptor(Address(address), *self.layout)
            arguments = self.encoded[address] = tuple(make_tensordesc_arg(descriptor, properties[self.index]))
        return arguments


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
        (x,) if x is None or descriptor is None else descriptor.at(x, device)
        for x, descriptor in zip(addresses, descriptors, strict=True)
    ]
