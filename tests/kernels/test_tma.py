"""TMA descriptors that are encoded once per address. tests/benchmarks/test_host_time.py compares them with Triton's."""

import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.tools.tensor_descriptor import TensorDescriptor

from mgk.kernels import tma

PROPERTIES = {"block_size": [1, 16]}
LAYOUT = tma.Layout((4, 16), (16, 1), (1, 16))


def with_descriptors(launcher):
    """Return the launch function of a kernel with TMA descriptors, as Triton makes it."""

    def encode_and_launch(*args):
        return launcher(*args)

    return encode_and_launch


ENCODES = with_descriptors(print)


def kernel(*properties, launch=ENCODES):
    metadata = SimpleNamespace(tensordesc_meta=properties, name="kernel")
    return SimpleNamespace(metadata=metadata, run=SimpleNamespace(launch=launch))


@pytest.fixture
def encoded(monkeypatch):
    """Replace Triton's encoding; return the list of encoded descriptors."""
    calls = []

    def make_tensordesc_arg(arg, metadata):
        calls.append(arg)
        return [("map", arg.base.data_ptr(), metadata), *arg.shape, *arg.strides]

    monkeypatch.setattr(tma, "make_tensordesc_arg", make_tensordesc_arg)
    return calls


def tensors(n=1):
    return [None, torch.zeros(1), *[TensorDescriptor.from_tensor(torch.zeros(4, 16), [1, 16])] * n]


def test_properties_are_those_of_all_kernels(encoded):
    assert tma.encoding_properties([kernel(PROPERTIES)] * 2, tensors()) == (PROPERTIES,)
    assert tma.encoding_properties([kernel(PROPERTIES), kernel({"block_size": [1, 32]})], tensors()) is None


def test_launch_without_descriptors_has_no_properties(encoded):
    assert tma.encoding_properties([SimpleNamespace()], tensors(0)) == ()


@pytest.mark.parametrize(
    "compiled, count",
    [
        (kernel(PROPERTIES), 2),
        (kernel(None), 1),
        (kernel(), 1),
        (kernel(PROPERTIES, launch=lambda *args: None), 1),
        (SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=[PROPERTIES], name="kernel"), run=print), 1),
    ],
    ids=["other-number", "no-tma", "no-metadata", "other-launch", "no-launch"],
)
def test_unknown_encodings_are_left_to_triton(encoded, compiled, count):
    assert tma.encoding_properties([compiled], tensors(count)) is None


def other_values(arg, metadata):
    return [("map",), *arg.shape, *arg.strides, type(arg.base) is tma.Address]


@pytest.mark.parametrize("other", [None, lambda arg: [arg], lambda arg, metadata, _: [arg], other_values])
def test_other_encodings_of_triton_are_left_to_triton(monkeypatch, other):
    monkeypatch.setattr(tma, "make_tensordesc_arg", other)
    assert tma.encoding_properties([kernel(PROPERTIES)], tensors()) is None


def test_unused_argument_of_the_encoding(monkeypatch):
    """Since Triton 3.8."""
    monkeypatch.setattr(tma, "make_tensordesc_arg", lambda arg, metadata, _: [("map",), *arg.shape, *arg.strides])
    assert tma.encoding_properties([kernel(PROPERTIES)], tensors()) is None
    monkeypatch.setattr(tma, "UNUSED", (None,))
    assert tma.encoding_properties([kernel(PROPERTIES)], tensors()) == (PROPERTIES,)
    spec = SimpleNamespace(compiled={0: [SimpleNamespace(descriptors=(PROPERTIES,))]})
    assert tma.DescriptorArguments(spec, 0, LAYOUT).encode(4096, 0) == (("map",), 4, 16, 16, 1)


def test_unknown_encoding_passes_descriptors_by_address(encoded):
    spec = SimpleNamespace(compiled={0: [SimpleNamespace(descriptors=None)]})
    (descriptor,) = tma.DescriptorArguments(spec, 0, LAYOUT).encode(4096, 0)
    assert isinstance(descriptor, TensorDescriptor)
    fields = descriptor.base.data_ptr(), descriptor.shape, descriptor.strides, descriptor.block_shape
    assert fields == (4096, *LAYOUT)
    assert not encoded


def test_launcher_skips_the_encoding_and_leaves_the_kernel_unchanged():
    launches = []
    run = SimpleNamespace(launch=with_descriptors(launches.append))
    launcher = tma.launcher_after_encoding(run)
    assert launcher.launch == launches.append
    assert run.launch != launches.append


def test_descriptors_are_encoded_once_per_address(encoded):
    spec = SimpleNamespace(compiled={0: [SimpleNamespace(descriptors=({}, PROPERTIES))]})
    arguments = tma.DescriptorArguments(spec, 1, LAYOUT)
    assert tma.arguments_at(arguments, 4096, -1) == (("map", 4096, PROPERTIES), 4, 16, 16, 1)
    assert tma.arguments_at(arguments, 8192, -1)[0] == ("map", 8192, PROPERTIES)
    assert tma.arguments_at(arguments, 4096, -1) is tma.arguments_at(arguments, 4096, -1)
    assert len(encoded) == 2
    other = tma.DescriptorArguments(spec, 1, tma.Layout((8, 16), (16, 1), (1, 16)))
    assert tma.arguments_at(other, 4096, -1)[1:] == (8, 16, 16, 1)


class EncodedMap:
    """A descriptor that Triton has encoded."""


def test_number_of_encoded_descriptors_is_limited_for_all_plans_together(monkeypatch):
    """Batches of many lengths have a plan each, and the allocator returns other addresses in every step."""
    maps = weakref.WeakSet()

    def make_tensordesc_arg(arg, metadata):
        encoded_map = EncodedMap()
        maps.add(encoded_map)
        return [encoded_map, *arg.shape, *arg.strides]

    monkeypatch.setattr(tma, "make_tensordesc_arg", make_tensordesc_arg)
    spec = SimpleNamespace(compiled={0: [SimpleNamespace(descriptors=(PROPERTIES,))]})
    plans = [tma.descriptor_arguments(spec, LAYOUT) for _ in range(80)]
    for plan in plans:
        for index in range(256):
            tma.encode(plan, 0, 4096 + 16 * index)
    assert 0 < len(maps) <= 1 << 14


def test_arguments_that_are_no_descriptors_stay_addresses(encoded):
    spec = SimpleNamespace(compiled={0: [SimpleNamespace(descriptors=(PROPERTIES, PROPERTIES))]})
    descriptors = tma.descriptor_arguments(spec, LAYOUT, None, LAYOUT)
    first, second, third = tma.encode(descriptors, 0, 4096, 8192, None)
    assert (first[0], second, third) == (("map", 4096, PROPERTIES), (8192,), (None,))
    assert [x if x is None else x.index for x in descriptors] == [0, None, 1]
    assert tma.encode(None, 0, 4096, None) == [(4096,), (None,)]
