"""Speed: time with half the heads relative to the fastest softmax attention with all heads, by operator and model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from experiments.paper import kernel_targets, verdicts
from experiments.paper.claims import cost
from experiments.paper.text import wrap
from experiments.result_rows import Rows
from mgk._core.markdown import format_number, markdown_table
from mgk.bench.implementations import Shape
from mgk.bench.timing import PASSES
from mgk.training.results import latest

Ratio = float | None
LINEAR_LENGTH = "16384"  # sequence length of causal linear attention
LENGTHS = ("4096", "256")  # sequence lengths of the language model
PLAIN, CAPTURED = "tokens_per_second_plain", "tokens_per_second"


@dataclass(frozen=True)
class SpeedRow:
    """Ratios on the device and in plain calls: forward and with all gradients, or one number; None: not measured."""

    title: str
    device: tuple[Ratio, ...]
    plain: tuple[Ratio, ...]
    commits: set[str]


def sentence(rows: Rows) -> str:
    """State the time of sMGK relative to the fastest softmax attention."""
    measured = kernel_targets.on_gpu(rows)
    forward, both = (kernel_targets.mean(kernel_targets.ratios(measured, "smgk", pass_)) for pass_ in PASSES)
    if forward is None or both is None:
        return verdicts.MISSING_SENTENCE
    lengths = [Shape.parse(shape).length for shape in kernel_targets.GOAL_SHAPES]
    setting = (
        f"On an {measured[-1]['gpu']} in {measured[-1]['dtype']}, at lengths of {min(lengths):,} to {max(lengths):,}"
    )
    control = [f"{ratio:.2f}" for ratio in _half_softmax(measured).device if ratio is not None]
    softmax = f" Softmax with half the heads takes {' and '.join(control)}." if control else ""
    return wrap(
        f"{setting}, sMGK with half the heads (query, key and value) takes **{forward:.2f}** of the time of PyTorch's "
        f"fastest softmax attention with all heads in a forward pass, and **{both:.2f}** in a forward and backward "
        f"pass (device time, geometric means of {len(kernel_targets.GOAL_SHAPES)} shapes).{softmax}"
    )


def table(rows: Rows) -> str:
    """Format the times of operators, layers and models relative to softmax."""
    measured = kernel_targets.on_gpu(rows)
    lines = [
        *(_operator(measured, variant) for variant in ("smgk", "mgk")),
        _half_softmax(measured),
        _small(measured),
        *_against_best(measured, "decoding", "smgk", "sMGK, one token against a cache of 32,768, width"),
        *_against_best(measured, "linear", "mlk", "causal MLK at length 16,384, width", length=LINEAR_LENGTH),
        *_encoder_step(rows),
        *(_language_model_step(rows, length) for length in LENGTHS),
    ]
    header = ["", "device time", "plain calls, with Python overhead", "commit"]
    text = markdown_table(
        [header, *([line.title, _cell(line.device), _cell(line.plain), _commits(line.commits)] for line in lines)]
    )
    return f"{text}\n\n**Bold**: below 1."


def _cell(values: tuple[Ratio, ...]) -> str:
    ratios = [ratio for ratio in values if ratio is not None]
    return ", ".join(f"**{format_number(x)}**" if x < 1 else format_number(x) for x in ratios) or "–"


def _commits(commits: set[str]) -> str:
    return ", ".join(sorted(commits)) or "–"


def _commits_of(rows: Rows) -> set[str]:
    return {row["commit"] for row in rows}


def _both(ratio_of: Callable[[str], Ratio]) -> tuple[Ratio, ...]:
    return tuple(ratio_of(pass_) for pass_ in PASSES)


def _operator(rows: Rows, variant: str) -> SpeedRow:
    return SpeedRow(
        f"{kernel_targets.NAMES[variant]}, seven shapes (geometric mean): forward, with all gradients",
        _both(lambda pass_: kernel_targets.mean(kernel_targets.ratios(rows, variant, pass_))),
        _both(lambda pass_: kernel_targets.mean(kernel_targets.plain_ratios(rows, variant, pass_))),
        _commits_of(kernel_targets.select(rows, "speed", variant=variant, components="2", backend="triton")),
    )


def _half_softmax_rows(rows: Rows) -> Rows:
    softmax = kernel_targets.select(rows, "speed", variant="softmax")
    return [row for row in softmax if kernel_targets.has_heads(row, 2, 2)]


def half_softmax_ratios(rows: Rows, pass_: str) -> dict[str, float]:
    """Return the time of the best SDPA with half the heads over that with all heads, by shape."""
    ratios: dict[str, float] = {}
    for row in kernel_targets.select(_half_softmax_rows(rows), "speed", pass_):
        shape = kernel_targets.shape_of(row)
        ratios[shape] = min(ratios.get(shape, math.inf), float(row["ratio"]))
    return ratios


def _half_softmax(rows: Rows) -> SpeedRow:
    """Return the control: softmax with half the heads."""
    half = _half_softmax_rows(rows)
    title = "control: softmax with half the heads, the same shapes"
    means = _both(lambda pass_: kernel_targets.mean(half_softmax_ratios(rows, pass_)))
    return SpeedRow(title, means, (), _commits_of(half))


def _small(rows: Rows) -> SpeedRow:
    shape = kernel_targets.SMALL_SHAPE
    measured = [
        row for row in kernel_targets.select(rows, "speed", variant="smgk") if kernel_targets.shape_of(row) == shape
    ]
    return SpeedRow(
        "sMGK at length 256 and width 16, the paper's language model",
        _both(lambda pass_: kernel_targets.ratios(rows, "smgk", pass_).get(shape)),
        _both(lambda pass_: kernel_targets.plain_ratios(rows, "smgk", pass_).get(shape)),
        _commits_of(measured),
    )


def _against_best(rows: Rows, task: str, variant: str, title: str, **columns: str) -> list[SpeedRow]:
    """Return a row per head width of a part of `mgk bench`, relative to the best SDPA."""
    lines = []
    part = kernel_targets.select(rows, task, **columns)
    for width in dict.fromkeys(row["head_dim"] for row in part):
        mixture = kernel_targets.select(part, task, variant=variant, backend="triton", head_dim=width)
        mixture = [row for row in mixture if row["heads"] == row["kv_heads"]]
        softmax = kernel_targets.select(part, task, variant="softmax", head_dim=width)
        softmax = [row for row in softmax if kernel_targets.has_heads(row, 1, 1)]
        if mixture:
            device, plain = (_both(partial(_ratio_to_best, mixture, softmax, name)) for name in ("value", "step_ms"))
            lines.append(SpeedRow(f"{title} {width}", device, plain, _commits_of(mixture)))
    return lines


def _ratio_to_best(mixture: Rows, softmax: Rows, column: str, pass_: str) -> Ratio:
    """Return the last time of a mixture over the best of softmax, of one pass."""
    of_pass = [row for row in mixture if row["pass"] == pass_]
    peers = [float(row[column]) for row in softmax if row["pass"] == pass_]
    return float(of_pass[-1][column]) / min(peers) if of_pass and peers else None


def _encoder_step(rows: Rows) -> list[SpeedRow]:
    title = "a training step of the paper's encoder at length 4,096, compiled"
    commits = _commits_of(cost.step_rows(rows))
    return [
        SpeedRow(title, (cost.ratios(mixture, baseline)["training step"],), (), commits)
        for mixture, baseline in cost.pairs(cost.step_costs(rows))
        if mixture.row.variant == "smgk"
    ]


def _language_model_step(rows: Rows, length: str) -> SpeedRow:
    ratios: dict[str, float] = {}
    commits: set[str] = set()
    size = ""
    for metric in (CAPTURED, PLAIN):
        columns = {"recipe": "language-model", "metric": metric, "length": length}
        steps = latest([row for row in rows if columns.items() <= row.items()], ("variant", "heads", "kv_heads"))
        by_model = {(row["variant"], row["heads"], row["kv_heads"]): row for row in steps}
        mixture, softmax = by_model.get(("smgk", "4", "4")), by_model.get(("softmax", "8", "8"))
        if mixture is not None and softmax is not None:
            ratios[metric] = float(softmax["value"]) / float(mixture["value"])
            commits |= {mixture["commit"], softmax["commit"]}
            size = f" of {int(softmax['params']) / 1e6:.1f} M parameters"
    title = (
        f"a training step of its language model{size} at length {int(length):,} (with CUDA graphs, the default; "
        "without)"
    )
    return SpeedRow(title, (ratios.get(CAPTURED),), (ratios.get(PLAIN),), commits)
