"""Test the speed targets of the kernels and the report of results/attention.csv."""

from pathlib import Path

import pytest

from experiments.paper import attention_report, kernel_targets
from mgk.bench import suite, timing
from mgk.bench.implementations import Implementation, Shape
from mgk.training import results

ROOT = Path(__file__).parents[3]


def rows_of(ratio, task="speed", shapes=None, **fields):
    defaults = {"variant": "smgk", "backend": "triton", "heads": 4, "kv_heads": 4, "components": 2}
    implementation = Implementation(**defaults | fields)
    return [
        {
            column: str(value)
            for column, value in suite.result_row(
                task, implementation, shape, p, "device_ms", 100 * ratio, ratio=ratio
            ).items()
        }
        | {"dtype": "bf16", "step_ms": str(ratio)}
        for shape in shapes or suite.SHAPES
        for p in timing.PASSES
    ]


def goals_named(rows, words):
    goals = [goal for goal in kernel_targets.goals(rows) if words in goal.title]
    assert goals, words
    return goals


def test_goals_of_speed():
    rows = rows_of(0.5) + rows_of(0.6, components=4)
    assert all(goal.reached and goal.measured == pytest.approx(0.5) for goal in goals_named(rows, "geometric mean"))
    assert all(goal.reached and goal.measured == pytest.approx(1.2) for goal in goals_named(rows, "M 4 over M 2"))
    slow = rows + rows_of(0.96, shapes=suite.SHAPES[:1])
    assert not any(goal.reached for goal in goals_named(slow, "largest, 8x8x4096x64"))
    flash = {"variant": "softmax", "backend": "flash", "heads": 8, "components": 1}
    # SDPA with shared keys is a different peer.
    with_flash = rows + rows_of(0.4, kv_heads=8, **flash) + rows_of(0.2, kv_heads=4, **flash)
    assert all(goal.measured == pytest.approx(1.25) and not goal.reached for goal in goals_named(with_flash, "D 16"))
    # There is no mean without all of its shapes.
    assert not [goal for goal in kernel_targets.goals(rows[2:]) if "mean" in goal.title and "M 4" not in goal.title]


def test_goals_of_the_other_parts():
    linear = [
        row
        for n in (16384, 131072)
        for row in rows_of(n / 16384 / 10, "linear", [Shape(2, 8, n, 64, True)], variant="mlk")
    ]
    assert all(goal.measured == pytest.approx(1) and goal.reached for goal in goals_named(linear, "power of N"))
    assert all(goal.measured == pytest.approx(0.1) for goal in goals_named(linear, "N 16384 over SDPA"))
    decoding = rows_of(0.5, "decoding", [suite.DECODING_SHAPES[0]]) + rows_of(
        0.4, "decoding", [suite.DECODING_SHAPES[0]], variant="softmax", backend="flash", heads=8
    )
    assert goals_named(decoding, "over SDPA with H heads")[0].reached
    assert goals_named(decoding, "GQA")[0].measured == pytest.approx(1.25)
    assert not goals_named(rows_of(1.4, "em", [suite.EM_SHAPES[0]], variant="smgk-em"), "EM")[0].reached
    assert not goals_named(rows_of(1.3, "memory", [Shape(1, 8, 4096, 64, True)]), "memory")[0].reached


def test_goals_use_the_last_measurement():
    rows = rows_of(0.9) + rows_of(0.5)
    assert {row["ratio"] for row in kernel_targets.latest_bench(rows)} == {"0.5"}


def test_attention_table_matches_its_csv():
    rows = kernel_targets.latest_bench(results.read([ROOT / "results" / "attention.csv"]))
    assert attention_report.report(rows) == (ROOT / "results" / "attention.md").read_text(encoding="utf-8")
