"""Speed targets of the kernels, and the measurements of `mgk bench` compared with them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from experiments.result_rows import Row, Rows
from mgk.bench.suite import SHAPES
from mgk.bench.timing import PASSES
from mgk.training.results import latest

# Shapes of the geometric means; the last shape, the paper's language model, has a separate target.
GOAL_SHAPES = tuple(map(str, SHAPES[:-1]))
SMALL_SHAPE = str(SHAPES[-1])
NAMES = {"smgk": "sMGK", "smgk-hard": "sMGK hard", "mgk": "MGK", "mgk-hard": "MGK hard"}
# Targets for the time with H/2 heads relative to the best SDPA with H: geometric means, and maximum over shapes.
MEANS = {"smgk": (0.68, 0.78), "smgk-hard": (0.65, 0.75), "mgk": (0.95, 1.10), "mgk-hard": (0.85, 1.00)}
LARGEST = {"smgk": 0.95, "smgk-hard": 0.95, "mgk": 1.30, "mgk-hard": 1.20}
KEY = (
    "task variant components heads kv_heads batch length dtype backend metric pass causal head_dim full_heads"
).split()


@dataclass(frozen=True)
class Goal:
    """A target and its measured value."""

    title: str
    limit: float
    measured: float

    @property
    def reached(self) -> bool:
        return self.measured <= self.limit


def latest_bench(rows: Iterable[Row]) -> Rows:
    """Return the latest row of each measurement of `mgk bench`."""
    return latest((row for row in rows if row["recipe"] == "bench"), KEY)


def on_gpu(rows: Iterable[Row]) -> Rows:
    """Return the latest measurements of operators on a GPU."""
    return latest_bench(row for row in rows if row.get("pass") and not row["gpu"].startswith("cpu"))


def shape_of(row: Row) -> str:
    """Return the shape of a row as `mgk bench` writes it: 8x8x4096x64xcausal."""
    mask = "xcausal" if row["causal"] == "True" else ""
    return f"{row['batch']}x{row['full_heads']}x{row['length']}x{row['head_dim']}{mask}"


def select(rows: Iterable[Row], task: str, pass_: str | None = None, **columns: str) -> Rows:
    """Return the rows of a part of `mgk bench`, of one pass if it is given, with these values of columns."""
    return [
        row
        for row in rows
        if row["task"] == task
        and pass_ in (None, row["pass"])
        and all(row[name] == value for name, value in columns.items())
    ]


def has_heads(row: Row, share: int, key_share: int) -> bool:
    """Return whether a row has H/share query heads and H/key_share key heads."""
    return int(row["full_heads"]) == share * int(row["heads"]) == key_share * int(row["kv_heads"])


def geometric_mean(values: list[float]) -> float:
    """Return the geometric mean of positive values."""
    return math.exp(statistics.mean(map(math.log, values)))


def mean(by_shape: dict[str, float]) -> float | None:
    """Return the geometric mean over GOAL_SHAPES, or None if one is missing."""
    values = [by_shape[shape] for shape in GOAL_SHAPES if shape in by_shape]
    return geometric_mean(values) if len(values) == len(GOAL_SHAPES) else None


def ratios(rows: Rows, variant: str, pass_: str, components: str = "2") -> dict[str, float]:
    """Return the device time over that of the best SDPA with H heads by shape."""
    measured = select(rows, "speed", pass_, variant=variant, components=components, backend="triton")
    return {shape_of(row): float(row["ratio"]) for row in measured}


def plain_ratios(rows: Rows, variant: str, pass_: str) -> dict[str, float]:
    """Return the time ratios of plain calls, which include Python and launch overhead."""
    measured = select(rows, "speed", pass_, variant=variant, components="2", backend="triton")
    return {shape_of(row): float(row["eager_ratio"]) for row in measured if row["eager_ratio"]}


def _speed(rows: Rows) -> Iterable[Goal]:
    for variant, means in MEANS.items():
        for pass_, limit in zip(PASSES, means, strict=True):
            by_shape = {shape: r for shape, r in ratios(rows, variant, pass_).items() if shape in GOAL_SHAPES}
            measured = mean(by_shape)
            if measured is not None:
                yield Goal(f"{NAMES[variant]}, {pass_}: geometric mean", limit, measured)
            if by_shape:
                worst = max(by_shape, key=lambda shape: by_shape[shape])
                title = f"{NAMES[variant]}, {pass_}: largest, {worst}"
                yield Goal(title, LARGEST[variant], by_shape[worst])
    for pass_ in PASSES:
        two, four = (_times(rows, pass_, components) for components in ("2", "4"))
        by_shape = {shape: four[shape] / two[shape] for shape in four if shape in two}
        if by_shape:
            worst = max(by_shape, key=lambda shape: by_shape[shape])
            yield Goal(f"sMGK, {pass_}: M 4 over M 2, {worst}", 1.25, by_shape[worst])


def _times(rows: Rows, pass_: str, components: str) -> dict[str, float]:
    measured = select(rows, "speed", pass_, variant="smgk", components=components, backend="triton")
    return {shape_of(row): float(row["value"]) for row in measured}


def _small(rows: Rows) -> Iterable[Goal]:
    """Compare head width 16 with SDPA-flash with H heads, on the device and in plain calls."""
    small = [row for row in rows if shape_of(row) == SMALL_SHAPE]
    for pass_ in PASSES:
        flash = [r for r in select(small, "speed", pass_, backend="flash") if has_heads(r, 1, 1)]
        if not flash:
            continue
        for row in select(small, "speed", pass_, variant="smgk", components="2", backend="triton"):
            for label, name in (("device", "value"), ("eager", "step_ms")):
                ratio = float(row[name]) / min(float(r[name]) for r in flash)
                yield Goal(f"sMGK, {pass_}: D 16 over SDPA-flash with H heads, {label}", 1.0, ratio)


def _memory(rows: Rows) -> Iterable[Goal]:
    for variant in ("smgk", "mgk"):
        for pass_ in PASSES:
            measured = [row for row in select(rows, "memory", pass_, variant=variant) if row["ratio"]]
            if measured:
                worst = max(measured, key=lambda row: float(row["ratio"]))
                title = f"{NAMES[variant]}, {pass_}: extra memory over SDPA-flash, N {worst['length']}"
                yield Goal(title, 1.2, float(worst["ratio"]))


def _decoding(rows: Rows) -> Iterable[Goal]:
    for row in select(rows, "decoding", variant="smgk", backend="triton"):
        if row["heads"] != row["kv_heads"]:
            continue
        yield Goal(f"sMGK, decoding {shape_of(row)} over SDPA with H heads", 0.60, float(row["ratio"]))
        same = [r for r in select(rows, "decoding", variant="softmax") if shape_of(r) == shape_of(row)]
        grouped = [float(r["value"]) for r in same if r["heads"] == row["full_heads"] and r["kv_heads"] == row["heads"]]
        if grouped:
            title = f"sMGK with H/2 heads, decoding {shape_of(row)} over SDPA with GQA H : H/2"
            yield Goal(title, 1.1, float(row["value"]) / min(grouped))


def _linear(rows: Rows) -> Iterable[Goal]:
    for variant, name in (("mlk", "MLK"), ("smlk", "sMLK")):
        for pass_ in PASSES:
            measured = select(rows, "linear", pass_, variant=variant, backend="triton")
            for row in measured:
                if row["length"] == "16384" and row["ratio"]:
                    yield Goal(f"{name}, {pass_}: N 16384 over SDPA with H heads", 0.5, float(row["ratio"]))
            times = {int(row["length"]): float(row["value"]) for row in measured}
            last = max(times, default=0)
            if last > 16384 and 16384 in times:
                power = math.log(times[last] / times[16384], last / 16384)
                yield Goal(f"{name}, {pass_}: power of N from 16384 to {last}", 1.05, power)


def _em(rows: Rows) -> Iterable[Goal]:
    for row in select(rows, "em", variant="smgk-em"):
        yield Goal(f"sMGK-EM over sMGK, training layer {shape_of(row)}", 1.3, float(row["ratio"]))


SECTIONS: tuple[Callable[[Rows], Iterable[Goal]], ...] = (_speed, _small, _memory, _decoding, _linear, _em)


def goals(rows: Iterable[Row]) -> list[Goal]:
    """Return the goals whose quantities were measured."""
    latest_rows = latest_bench(rows)
    return [goal for section in SECTIONS for goal in section(latest_rows)]
