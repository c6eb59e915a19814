"""Test the groups of shapes of `mgk bench`, and FlashAttention as a peer, by stub modules."""

import sys
from types import ModuleType

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from mgk.bench import flash_attention, groups, suite, timing
from mgk.bench.implementations import Implementation, Shape, make_case

SHAPE = Shape(1, 4, 32, 16, True)


def attend(query, key, value, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


@pytest.fixture
def install(monkeypatch):
    """Return a function that installs a stub of FlashAttention-3 or -4."""
    for name in ("flash_attn_interface", "flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)

    def install(backend, function):
        module = ModuleType(flash_attention.MODULES[backend])
        module.flash_attn_func = function
        if backend == "fa4":
            monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


def backends(log=lambda text: None):
    return flash_attention.flash_backends("cpu", torch.float32, log)


def test_peers_are_optional(install):
    assert backends() == ()
    with pytest.raises(ImportError, match="flash_attn_interface is not installed"):
        make_case(Implementation("softmax", "fa3", 4, 4), SHAPE, "cpu", torch.float32)


def test_installed_peers_are_found(install):
    install("fa3", attend)
    assert backends() == ("fa3",)
    install("fa4", lambda *args, **options: (attend(*args, **options), None))  # with lse
    assert backends() == ("fa3", "fa4")
    case = make_case(Implementation("softmax", "fa4", 4, 2), SHAPE, "cpu", torch.float32)
    output = case.forward()
    assert output.shape == (1, 32, 4, 16)
    assert all(x is not None for x in torch.autograd.grad(output.sum(), case.inputs))


def test_wrong_and_failing_peers_are_not_timed(install):
    def fails(*args, **options):
        raise RuntimeError("no kernel image is available")

    install("fa3", lambda query, key, value, causal: attend(query, key, value))  # not causal
    install("fa4", fails)
    lines = []
    assert backends(lines.append) == ()
    assert lines[0].startswith("not timed: fa3: the output is off by ")
    assert lines[1] == "not timed: fa4: RuntimeError: no kernel image is available"


@pytest.mark.parametrize("part", ["speed", "groups"])
def test_peers_are_timed_with_all_heads(part, install, monkeypatch):
    install("fa3", attend)
    monkeypatch.setattr(suite, "_flash", lambda config: ("fa3",))
    monkeypatch.setattr(timing, "MAX_REPEATS", 2)
    monkeypatch.setattr(timing, "MIN_REPEATS", 1)
    config = suite.BenchmarkConfig("cpu", torch.float32, (SHAPE,), ("smgk", "mgk"), lambda text: None)
    selected = suite.PARTS[part].implementations(config)
    rows = list(suite.PARTS[part].measure(config, selected))
    peers = [row for row in rows if row["backend"] == "fa3"]
    assert [(row["heads"], row["pass"]) for row in peers] == [(4, which) for which in timing.PASSES]
    assert all(float(row["ratio"]) > 0 for row in peers)
    ours = {(row["variant"], row["heads"]) for row in rows if row["variant"] != "softmax"}
    equal = {("smgk", 4)} if part == "groups" else set()
    assert ours == {("smgk", 2), ("mgk", 2)} | equal


def test_groups_have_all_shapes_of_the_speed_part():
    assert set(suite.SHAPES) <= set(groups.SHAPES)
    assert len(groups.SHAPES) == len(set(groups.SHAPES)) == 17
    config = suite.BenchmarkConfig("cuda", torch.bfloat16)
    implementations = suite.PARTS["groups"].implementations(config)
    assert tuple(implementations) == groups.SHAPES
    shape = Shape.parse("64x12x512x64")
    assert implementations[shape] == [
        Implementation("smgk", "triton", 6, 6, 2),
        Implementation("mgk", "triton", 6, 6, 2),
        Implementation("smgk", "triton", 12, 12, 2),
    ]
