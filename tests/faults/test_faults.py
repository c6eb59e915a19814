"""A sample of the faults that `make test-faults` tries."""

import csv
import sys
from pathlib import Path

import pytest

from tests.faults import __main__ as command
from tests.faults import cases
from tests.faults.laboratory import laboratory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the operations are counted by means of Linux"),
]


@pytest.fixture(scope="module")
def bench():
    with laboratory() as lab:
        bench = cases.Bench(lab)
        bench.prepare()
        yield bench


def select(bench: cases.Bench, kind: str, name: str) -> cases.Case:
    """Return the last case of a kind whose name ends with a text."""
    return [case for case in cases.cases(bench.operations) if case.kind == kind and case.name.endswith(name)][-1]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (cases.KILL, " write run/.last.ckpt.tmp"),
        (cases.KILL, " rename run/.last.ckpt.tmp"),  # last.ckpt has been renamed to last-1.ckpt
        (cases.STOP, " validation_step"),
        (cases.FULL, " write run/.last.ckpt.tmp"),
        (cases.LIMIT, "8000 bytes"),
        (cases.READ_ONLY, "resumed run"),
        (cases.DAMAGED, "last.ckpt: flipped bit"),
    ],
    ids=lambda value: value.strip(),
)
def test_run_survives(bench, kind, name):
    assert select(bench, kind, name).run(bench) is None


def test_every_kind_of_operation_is_tried(bench):
    """At least as many points as the 83 at which runs were killed by hand."""
    points = [case.name.split()[1] for case in cases.cases(bench.operations) if case.kind == cases.KILL]
    assert len(points) > 83
    assert set(points) == {
        "mkdir", "open", "write", "fsync", "rename", "remove", "on_train_batch_end", "validation_step",
    }  # fmt: skip


def test_damage_that_is_not_detected_is_reported(bench, monkeypatch):
    """Without the comparison of checksums, a flipped bit in the weights changes the output."""
    name = "best/model.safetensors: flipped bit"
    monkeypatch.setitem(cases.DAMAGES, "flipped bit", flip_without_checksums)
    assert "other output" in str(select(bench, cases.DAMAGED, name).run(bench))


def flip_without_checksums(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 64
    path.write_bytes(content)
    (path.parent / "checksums.json").unlink()


def test_recorded_results_are_complete():
    """results/faults.csv has every kind, and every run survives."""
    path = Path(__file__).parents[2] / "results" / "faults.csv"
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == command.COLUMNS
    assert tuple(row["kind"] for row in rows) == command.KINDS
    assert all(row["survived"] == row["tried"] for row in rows)
