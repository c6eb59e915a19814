"""mgk bench: it refuses to time what is wrong, writes the columns of all results, and says which goals are reached."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from experiments.paper import speed_goals
from mgk.bench import implementations, suite, timing
from mgk.bench.implementations import Implementation, Shape
from mgk.cli import commands
from mgk.training import results

ROOT = Path(__file__).parents[2]
SMALL = ["--shapes", "1x2x40x8,1x2x40x8xcausal", "--variants", "smgk,smgk:3,mgk-hard"]


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "MOST", 2)
    monkeypatch.setattr(timing, "FEWEST", 1)


def bench(*arguments):
    return CliRunner().invoke(commands.app, ["bench", *arguments])


def test_it_measures_everybody_on_the_processor(tmp_path):
    result = bench(*SMALL, "--out", str(tmp_path / "new" / "times.csv"))
    assert result.exception is None, result.output
    rows = results.read([tmp_path / "new" / "times.csv"])
    assert list(rows[0]) == [*results.COLUMNS, *suite.EXTRA]
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
def test_what_is_wrong_is_not_timed(name, monkeypatch, tmp_path):
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


def test_what_is_right_is_never_called_wrong():
    """Also where next to nothing is left of the sum that is the prior's gradient: it was, in 6 of these 300 draws."""
    contender, shape = Implementation("smgk", "auto", 1, 1, 2), Shape(1, 2, 40, 8, False)
    for seed in range(300):
        torch.manual_seed(seed)
        assert implementations.wrong(contender, shape, "cpu", torch.float32) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--shapes", "8x8x64"], "--shapes"),
        (["--shapes", "8x3x64x8"], "even number"),
        (["--shapes", "8x8x0x8"], "--shapes"),
        (["--variants", "softmax"], "--variants"),
        (["--variants", "smgk:0"], "--variants"),
        (["--variants", "smgk,mlk"], "mlk is in none of the parts"),
        (["--only", "everything"], "--only"),
        (["--only", "speed,memory"], "needs a CUDA GPU"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(arguments, word):
    result = bench(*arguments)
    assert isinstance(result.exception, ValueError)
    assert word in str(result.exception)


def test_shapes_are_read_as_they_are_written():
    for text in ("8x8x4096x64", "2x16x16384x128xcausal"):
        assert str(Shape.parse(text)) == text
    assert Shape.parse("2x4x6x8xcausal") == Shape(2, 4, 6, 8, True)


def rows_of(ratio, task="speed", shapes=None, **contender):
    contender = Implementation(
        **{"variant": "smgk", "backend": "triton", "heads": 4, "kv_heads": 4, "components": 2} | contender
    )
    return [
        {k: str(v) for k, v in suite.row(task, contender, shape, p, "device_ms", 100 * ratio, ratio=ratio).items()}
        | {"dtype": "bf16", "step_ms": str(ratio)}
        for shape in shapes or suite.SHAPES
        for p in timing.PASSES
    ]


def got(rows, words):
    found = [goal for goal in speed_goals.goals(rows) if words in goal.what]
    assert found, words
    return found


def test_goals_of_speed():
    rows = rows_of(0.5) + rows_of(0.6, components=4)
    assert all(goal.reached and goal.got == pytest.approx(0.5) for goal in got(rows, "geometric mean"))
    assert all(goal.reached and goal.got == pytest.approx(1.2) for goal in got(rows, "M 4 over M 2"))
    slow = rows + rows_of(0.96, shapes=suite.SHAPES[:1])
    assert not any(goal.reached for goal in got(slow, "largest, 8x8x4096x64"))
    flash = {"variant": "softmax", "backend": "flash", "heads": 8, "components": 1}
    # The one with shared keys is another peer.
    with_flash = rows + rows_of(0.4, kv_heads=8, **flash) + rows_of(0.2, kv_heads=4, **flash)
    assert all(goal.got == pytest.approx(1.25) and not goal.reached for goal in got(with_flash, "D 16"))
    # Without all of its shapes a mean says nothing.
    assert not [goal for goal in speed_goals.goals(rows[2:]) if "mean" in goal.what and "M 4" not in goal.what]


def test_goals_of_the_other_parts():
    linear = [
        row
        for n in (16384, 131072)
        for row in rows_of(n / 16384 / 10, "linear", [Shape(2, 8, n, 64, True)], variant="mlk")
    ]
    assert all(goal.got == pytest.approx(1) and goal.reached for goal in got(linear, "power of N"))
    assert all(goal.got == pytest.approx(0.1) for goal in got(linear, "N 16384 over SDPA"))
    decoding = rows_of(0.5, "decoding", [suite.DECODING_SHAPES[0]]) + rows_of(
        0.4, "decoding", [suite.DECODING_SHAPES[0]], variant="softmax", backend="flash", heads=8
    )
    assert got(decoding, "over SDPA with H heads")[0].reached
    assert got(decoding, "GQA")[0].got == pytest.approx(1.25)
    assert not got(rows_of(1.4, "em", [suite.EM_SHAPES[0]], variant="smgk-em"), "EM")[0].reached
    assert not got(rows_of(1.3, "memory", [Shape(1, 8, 4096, 64, True)]), "memory")[0].reached


def test_the_last_measurement_counts():
    rows = rows_of(0.9) + rows_of(0.5)
    assert {row["ratio"] for row in speed_goals.latest(rows)} == {"0.5"}


def test_the_table_is_made_from_the_file():
    """results/attention.md is what benchmarks/report.py makes of results/attention.csv."""
    spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    rows = speed_goals.latest(results.read([ROOT / "results" / "attention.csv"]))
    assert report.report(rows) == (ROOT / "results" / "attention.md").read_text(encoding="utf-8")


def test_the_check_takes_the_kernels_that_are_timed(monkeypatch):
    """Short calls have kernels of their own, unless what is timed is as short."""
    launch = pytest.importorskip("mgk.kernels.mixture.launch")
    seen, before = [], launch.SMALL_PAIRS

    def attend(contender, shape, x, backend):
        if backend == "triton":
            seen.append(launch.SMALL_PAIRS)
        return original(contender, shape, x, "eager")

    original = implementations.attend
    monkeypatch.setattr(implementations, "attend", attend)
    ours = implementations.Implementation("smgk", "triton", 2, 2, 2)
    for length in (1 << 14, 16):
        assert implementations.wrong(ours, implementations.Shape(1, 4, length, 8, True), "cpu", torch.float32) == []
    assert seen == [0, before]
    assert before == launch.SMALL_PAIRS


def test_decoding_is_checked_without_gradients(monkeypatch):
    enabled = []

    def attend(contender, shape, x, backend):
        enabled.append(torch.is_grad_enabled())
        return original(contender, shape, x, "eager") * (1 if backend == "eager" else 1.5)

    original = implementations.attend
    monkeypatch.setattr(implementations, "attend", attend)
    shape = implementations.Shape(1, 4, 64, 8, False, 1)
    (line,) = implementations.wrong(
        implementations.Implementation("smgk", "plain", 2, 2, 2), shape, "cpu", torch.float32
    )
    assert "output" in line
    assert not enabled[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_expresses_smgk(causal, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    contender, shape = Implementation("smgk", "flex", 2, 2, 2), Shape(2, 4, 40, 16, causal)
    x = implementations.draw(contender, shape, "cpu", torch.float32, gradients=False)  # it has no gradients on a CPU
    flex, ours = (implementations.call_of(c, shape, x)() for c in (contender, replace(contender, backend="eager")))
    torch.testing.assert_close(flex, ours, rtol=1e-5, atol=1e-5)


def test_flex_attention_is_checked_before_it_is_timed():
    setting = suite.Setting("cuda", torch.bfloat16, (Shape(8, 8, 512, 64, True),), (), lambda text: None)
    (shape, (contender,)), *others = suite.PARTS["flex"].ours(setting).items()
    assert (contender.backend, contender.heads, shape.causal, others) == ("flex", 4, True, [])
