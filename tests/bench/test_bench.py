"""Test `mgk bench`: checks before timing and columns of the results."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mgk.bench import implementations, suite, timing
from mgk.bench.implementations import Implementation, Shape
from mgk.cli import commands
from mgk.training import results

ROOT = Path(__file__).parents[2]
SMALL = ["--shapes", "1x2x40x8,1x2x40x8xcausal", "--variants", "smgk,smgk:3,mgk-hard"]


@pytest.fixture(autouse=True)
def cpu_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "MAX_REPEATS", 2)
    monkeypatch.setattr(timing, "MIN_REPEATS", 1)


def bench(*arguments):
    return CliRunner().invoke(commands.app, ["bench", *arguments])


def test_bench_measures_all_implementations_on_the_cpu(tmp_path):
    result = bench(*SMALL, "--out", str(tmp_path / "new" / "times.csv"))
    assert result.exception is None, result.output
    rows = results.read([tmp_path / "new" / "times.csv"])
    assert list(rows[0]) == [*results.COLUMNS, *suite.EXTRA_COLUMNS]
    ours = {(r["variant"], r["components"], r["pass"], r["causal"]) for r in rows if r["variant"] != "softmax"}
    variants = [("smgk", "2"), ("smgk", "3"), ("mgk-hard", "2")]
    assert ours == {(*v, p, c) for v in variants for p in timing.PASSES for c in ("True", "False")}
    peers = {(r["heads"], r["kv_heads"]) for r in rows if r["variant"] == "softmax"}
    assert peers == {("2", "2"), ("2", "1"), ("1", "1")}
    for row in rows:
        assert float(row["value"]) > 0
        same = [r for r in rows if r["causal"] == row["causal"] and r["pass"] == row["pass"]]
        best = min(float(r["value"]) for r in same if r["variant"] == "softmax" and r["kv_heads"] == "2")
        assert float(row["ratio"]) == pytest.approx(float(row["value"]) / best, abs=0.2, rel=0.2)


@pytest.mark.parametrize("name", ["output", "value", "shift", "log_prior"])
def test_wrong_results_are_not_timed(name, monkeypatch, tmp_path):
    right = implementations.OPERATORS["smgk"]

    def slightly_wrong(*, backend, **x):
        if backend == "eager":
            return right.call(backend=backend, **x)
        if name == "output":
            return 1.001 * right.call(backend=backend, **x)
        share = 0.1 if name == "log_prior" else 0.001
        other = x | {name: (1 - share) * x[name] + share * x[name].detach()}  # the same output, another gradient
        return right.call(backend=backend, **other)

    monkeypatch.setitem(implementations.OPERATORS, "smgk", replace(right, call=slightly_wrong))
    result = bench("--shapes", "1x2x40x8", "--variants", "smgk,mgk", "--out", str(tmp_path / "times.csv"))
    assert isinstance(result.exception, ValueError)
    assert "wrong results, not timed" in str(result.exception)
    assert f"{name} is off" in str(result.exception)
    timed = {row["variant"] for row in results.read([tmp_path / "times.csv"])}
    assert timed == {"softmax", "mgk"}


def test_correct_results_are_never_called_wrong():
    """Without SUM_ROUNDING 6 of these 300 draws fail, because the terms of the prior's gradient cancel."""
    implementation, shape = Implementation("smgk", "auto", 1, 1, 2), Shape(1, 2, 40, 8, False)
    for seed in range(300):
        torch.manual_seed(seed)
        assert implementations.find_errors(implementation, shape, "cpu", torch.float32) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--shapes", "8x8x64"], "--shapes"),
        (["--shapes", "8x3x64x8"], "even number"),
        (["--shapes", "8x8x0x8"], "--shapes"),
        (["--variants", "softmax"], "--variants"),
        (["--variants", "smgk:0"], "--variants"),
        (["--variants", "smgk,mlk"], "mlk: not in any of the measured parts"),
        (["--only", "everything"], "--only"),
        (["--only", "speed,memory"], "needs a CUDA GPU"),
    ],
    ids=str,
)
def test_wrong_options_are_rejected(arguments, word):
    result = bench(*arguments)
    assert isinstance(result.exception, ValueError)
    assert word in str(result.exception)


def test_shapes_are_parsed_as_they_are_printed():
    for text in ("8x8x4096x64", "2x16x16384x128xcausal"):
        assert str(Shape.parse(text)) == text
    assert Shape.parse("2x4x6x8xcausal") == Shape(2, 4, 6, 8, True)


def test_check_runs_the_kernels_of_the_timed_shape(monkeypatch):
    """Small calls have other kernels."""
    launch = pytest.importorskip("mgk.kernels.mixture.launch")
    limits = []

    def run_operator(implementation, shape, x, backend):
        if backend == "triton":
            limits.append(launch._small_pairs)
        return original(implementation, shape, x, "eager")

    original = implementations.run_operator
    monkeypatch.setattr(implementations, "run_operator", run_operator)
    ours = implementations.Implementation("smgk", "triton", 2, 2, 2)
    for length in (1 << 14, 16):
        assert (
            implementations.find_errors(ours, implementations.Shape(1, 4, length, 8, True), "cpu", torch.float32) == []
        )
    assert limits == [0, launch.SMALL_PAIRS]
    assert launch._small_pairs == launch.SMALL_PAIRS


def test_decoding_is_checked_without_gradients(monkeypatch):
    enabled = []

    def run_operator(implementation, shape, x, backend):
        enabled.append(torch.is_grad_enabled())
        return original(implementation, shape, x, "eager") * (1 if backend == "eager" else 1.5)

    original = implementations.run_operator
    monkeypatch.setattr(implementations, "run_operator", run_operator)
    shape = implementations.Shape(1, 4, 64, 8, False, 1)
    (line,) = implementations.find_errors(
        implementations.Implementation("smgk", "plain", 2, 2, 2), shape, "cpu", torch.float32
    )
    assert "output" in line
    assert not enabled[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_expresses_smgk(causal, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    implementation, shape = Implementation("smgk", "flex", 2, 2, 2), Shape(2, 4, 40, 16, causal)
    # FlexAttention has no gradients on a CPU.
    x = implementations.random_inputs(implementation, shape, "cpu", torch.float32, gradients=False)
    pair = (implementation, replace(implementation, backend="eager"))
    flex, ours = (implementations.make_forward(i, shape, x)() for i in pair)
    torch.testing.assert_close(flex, ours, rtol=1e-5, atol=1e-5)


def test_flex_attention_is_checked_before_it_is_timed():
    config = suite.BenchmarkConfig("cuda", torch.bfloat16, (Shape(8, 8, 512, 64, True),), (), lambda text: None)
    (shape, (implementation,)), *more = suite.PARTS["flex"].implementations(config).items()
    assert (implementation.backend, implementation.heads, shape.causal, more) == ("flex", 4, True, [])
