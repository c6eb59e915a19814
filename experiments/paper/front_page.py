"""Short tables for the README, the FAQ, docs/performance.md and docs/language-model.md: quality, cache and times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from experiments.paper import group_table, kernel_targets, speed_table, verdicts
from experiments.paper.claims import cost
from experiments.paper.claims.quality import ExperimentResults
from experiments.paper.comparisons import compare
from experiments.paper.recipe_results import PRESET
from experiments.paper.text import wrap
from experiments.result_rows import Row, Rows
from mgk._core.markdown import format_number, format_signed, markdown_table
from mgk.bench.implementations import Shape
from mgk.bench.timing import PASSES
from mgk.training import results as files
from mgk.training.config import ModelSpec
from mgk.training.equal_time import STEP_TIME
from mgk.training.sweep import SOLO_METRICS, filter_rows
from mgk.variants import VARIANTS

# Models of the table, in pairs: softmax and sMGK with the same numbers of heads and key heads.
MODELS = tuple(map(ModelSpec.parse, ("softmax:8", "smgk:8", "softmax:8/4", "smgk:8/4", "softmax:4", "smgk:4")))


def cache_share(row: ModelSpec, full: ModelSpec) -> float:
    """Return the size of a model's cache relative to another's, for keys and values of the same width."""
    return _cached_vectors(row) / _cached_vectors(full)


def _cached_vectors(row: ModelSpec) -> int:
    """Return the number of vectors that a layer caches per token: the keys without shifts, and the values."""
    components = 1 if VARIANTS[row.variant].keys == "shifted" else VARIANTS[row.variant].components or 2
    value_heads = row.kv_heads or row.heads
    return components * (row.key_heads or value_heads) + value_heads


def language_model(item: ExperimentResults, rows: Rows) -> str:
    """Format perplexity, cache and training step of MODELS relative to the first."""
    full, results = MODELS[0], item.results
    measured = [row for row in MODELS if results.runs_of(row)]
    if full not in measured:
        return verdicts.MISSING_SENTENCE
    steps = {entry.row: entry.values.get("training step") for entry in cost.experiment_costs(item, rows)}
    lines = [
        [
            "model", "perplexity", "difference from the first row", "difference from softmax with as many heads",
            "cache", "training step", "seeds",
        ]
    ]  # fmt: skip
    for row in measured:
        step, reference = steps.get(row), steps.get(full)
        share = "–" if step is None or reference is None else f"{step / reference:.2f}"
        changes = [_change(item, row, other) for other in (full, _softmax(row))]
        cells = [_name(row), format_number(results.mean(row), 1), *changes, f"{cache_share(row, full):.2f}", share]
        lines.append([*cells, str(len(results.runs_of(row)))])
    return markdown_table(lines)


def _softmax(row: ModelSpec) -> ModelSpec:
    """Return the softmax model with the same heads."""
    return dataclasses.replace(row, variant="softmax")


def _timed(item: ExperimentResults, rows: Rows) -> Rows:
    """Return the latest times in isolation of MODELS in an experiment."""
    timed = []
    for row in MODELS:
        if runs := item.results.runs_of(row):
            measured = filter_rows(rows, item.results.recipe, row, PRESET, None, runs[0].setup)
            timed += files.latest([line for line in measured if line["metric"] in SOLO_METRICS], ["metric"])
    return timed


def equal_heads(item: ExperimentResults, rows: Rows) -> str:
    """State the cost of sMGK with the same number of heads: the operator, and steps of language models; "" if none."""
    times = group_table.equal_ratios(rows)
    steps = step_ratios(item, rows)
    if not times or not steps:
        return ""
    lengths, widths = ([getattr(Shape.parse(shape), name) for shape in times] for name in ("length", "width"))
    operator, step = (f"{min(values):.2f} to {max(values):.2f}" for values in (times.values(), steps))
    return wrap(
        f"With the same heads, a forward and backward pass of sMGK takes **{operator}** times as long as one of "
        f"softmax (lengths of {min(lengths):,} to {max(lengths):,}, widths of {min(widths)} to {max(widths)}), "
        f"and a training step of the language models with {MODELS[0].heads} heads {step} times."
    )


def step_ratios(item: ExperimentResults, rows: Rows) -> list[float]:
    """Return the training steps of sMGK over softmax with the same heads, of the language models with all heads."""
    timed = [row for row in [*_timed(item, rows), *_decoders(rows)] if row["metric"] == STEP_TIME]
    return [ratio for row, ratio in _against_softmax(timed) if row["heads"] == str(MODELS[0].heads)]


def _against_softmax(timed: Rows) -> Iterable[tuple[Row, float]]:
    """Yield the rows of sMGK with their time over that of softmax with the same heads."""
    key = ("recipe", "metric", "variant", "heads", "kv_heads")
    times = {tuple(row[column] for column in key): float(row["value"]) for row in timed}
    for row in timed:
        softmax = times.get(tuple({**row, "variant": "softmax"}[column] for column in key))
        if row["variant"] == "smgk" and softmax is not None:
            yield row, float(row["value"]) / softmax


def inference(item: ExperimentResults, rows: Rows) -> str:
    """Format the inference of sMGK over softmax with the same heads, of language models timed in isolation."""
    timed = [row for row in [*_timed(item, rows), *_decoders(rows)] if row["metric"] == SOLO_METRICS[1]]
    lines = [["model", "length", "softmax, ms", "sMGK, ms", "ratio", "commit"]]
    for row, ratio in _against_softmax(timed):
        value = float(row["value"])
        size = f"{int(row['params']) / 1e6:.0f} M parameters, {_heads(row['heads'], row['kv_heads'])}"
        lines.append(
            [size, f"{int(row['length']):,}", f"{value / ratio:.1f}", f"{value:.1f}", f"{ratio:.2f}", row["commit"]]
        )
    return markdown_table(lines) if len(lines) > 1 else verdicts.MISSING_SENTENCE


def perplexities(item: ExperimentResults) -> str:
    """Format the perplexities of all models on all splits, best first, with the change to the first of MODELS."""
    results, full = item.results, MODELS[0]
    rows = [row for row in results.rows if results.mean(row) is not None]
    if full not in rows:
        return verdicts.MISSING_SENTENCE
    splits = sorted({split for run in results.runs for split in run.values})
    lines = [["model", *splits, f"relative to {full}", "seeds"]]
    for row in sorted(rows, key=lambda row: results.mean(row) or 0.0):
        runs = results.runs_of(row)
        means = [sum(run.values[split] for run in runs) / len(runs) for split in splits]
        cells = [str(row), *(format_number(mean, 1) for mean in means), _change(item, row, full)]
        lines.append([*cells, str(len(runs))])
    return markdown_table(lines)


def _change(item: ExperimentResults, row: ModelSpec, full: ModelSpec) -> str:
    """Return the change of the perplexity in per cent with its interval; "" for the same model."""
    difference = None if row == full else compare(item.results, row, full)
    if difference is None:
        return ""
    # The score is −100 × nats per token.
    change = f"{format_signed(100 * math.expm1(-difference.difference / 100), 1)} %"
    return change if difference.half_width is None else f"{change} ± {format_number(difference.half_width, 1)}"


def _name(row: ModelSpec) -> str:
    name = {"softmax": "softmax", "smgk": "sMGK"}[row.variant]
    heads = _heads(str(row.heads), str(row.kv_heads or row.heads))
    return f"{name}, {heads}" if name == "softmax" else f"**{name}**, {heads}"


def _heads(heads: str, kv_heads: str) -> str:
    return f"{heads} heads" if heads == kv_heads else f"{heads} heads, {kv_heads} key and value heads"


def shapes(rows: Rows) -> str:
    """Format the time of each operator by shape: batch, heads, length and width in separate columns."""
    measured = kernel_targets.on_gpu(rows)
    if not measured:
        return verdicts.MISSING_SENTENCE
    columns = {
        (name, pass_): kernel_targets.ratios(measured, name, pass_) for name in ("smgk", "mgk") for pass_ in PASSES
    }
    control = {pass_: speed_table.half_softmax_ratios(measured, pass_) for pass_ in PASSES}
    plain = {pass_: kernel_targets.plain_ratios(measured, "smgk", pass_) for pass_ in PASSES}
    titles = ["sMGK", "MGK", "softmax, H/2 heads", "sMGK, plain calls"]
    lines = [["length", "width", "batch", "H", "causal", *titles]]
    for name in (*kernel_targets.GOAL_SHAPES, kernel_targets.SMALL_SHAPE):
        shape = Shape.parse(name)
        sizes = [f"{shape.length:,}", str(shape.width), str(shape.batch), str(shape.heads)]
        by_pass = [
            *({pass_: columns[variant, pass_] for pass_ in PASSES} for variant in ("smgk", "mgk")),
            control,
            plain,
        ]
        cells = [" / ".join(format_number(values[pass_].get(name)) for pass_ in PASSES) for values in by_pass]
        lines.append([*sizes, "yes" if shape.causal else "no", *cells])
    ours = kernel_targets.select(measured, "speed", variant="smgk", components="2", backend="triton")
    commits = ", ".join(sorted({row["commit"] for row in ours}))
    return f"{markdown_table(lines)}\n\nCommits of the measurements: {commits}."


def host_time(rows: Rows) -> str:
    """Format the CPU time of plain calls (benchmarks/host_time.py), of the first and the last measured commit."""
    measured = [row for row in rows if row["recipe"] == "host-time"]
    if not measured:
        return verdicts.MISSING_SENTENCE
    # Times with another stand-in for the driver include other work.
    measured = [row for row in measured if row["dataset"] == measured[-1]["dataset"]]
    passes = list(dict.fromkeys(row["split"] for row in measured))
    commits = [measured[0]["commit"], measured[-1]["commit"]]
    lines = [["CPU time of a call, µs", *passes]]
    for task in dict.fromkeys(row["task"] for row in measured):
        cells = []
        for name in passes:
            times = {row["commit"]: row["value"] for row in measured if (row["task"], row["split"]) == (task, name)}
            cells.append(" → ".join(times.get(commit, "–") for commit in dict.fromkeys(commits)))
        lines.append([task, *cells])
    versions = f"Commits {' → '.join(dict.fromkeys(commits))}, torch {measured[-1]['torch']}."
    return f"{markdown_table(lines)}\n\n{versions}"


def cpu_times(rows: Rows) -> str:
    """Format the times on a CPU relative to SDPA (benchmarks/cpu.py), the latest of each shape."""
    measured = [row for row in rows if (row["recipe"], row["metric"]) == ("benchmark-cpu", "time_ratio_to_sdpa")]
    if not measured:
        return verdicts.MISSING_SENTENCE
    latest = files.latest(measured, ("variant", "length", "causal", "pass"))
    ratios = {(row["variant"], row["length"], row["causal"], row["pass"]): float(row["value"]) for row in latest}
    names = {"smgk": "sMGK", "mgk": "MGK"}
    columns = [(variant, causal) for variant in names for causal in ("False", "True")]
    titles = [f"{names[variant]}{', causal' if causal == 'True' else ''}" for variant, causal in columns]
    lines = [["length", *titles]]
    for length in dict.fromkeys(row["length"] for row in latest):
        cells = [[ratios.get((variant, length, causal, name)) for name in PASSES] for variant, causal in columns]
        lines.append([f"{int(length):,}", *(" / ".join(map(format_number, cell)) for cell in cells)])
    commits = ", ".join(sorted({row["commit"] for row in latest}))
    return f"{markdown_table(lines)}\n\nCommits of the measurements: {commits}, {latest[-1]['cpu']}."


def decoder_steps(rows: Rows) -> str:
    """Format the training step of the study's decoder, timed in isolation."""
    latest = [row for row in _decoders(rows) if row["metric"] == STEP_TIME]
    if not latest:
        return verdicts.MISSING_SENTENCE
    # Ratios compare measurements of one commit only.
    times = {
        (_decoder_name(row), row["commit"]): float(row["value"])
        for row in _timed_decoders(rows)
        if row["metric"] == STEP_TIME
    }
    lines = [["model", "training step, ms", "relative to softmax with the same heads", "peak memory, MB", "commit"]]
    for row in latest:
        softmax = times.get((_decoder_name({**row, "variant": "softmax"}), row["commit"]))
        share = "–" if softmax is None else f"{float(row['value']) / softmax:.3f}"
        cells = [_decoder_name(row), f"{float(row['value']):.1f}", share, f"{int(row['peak_mem_mb']):,}"]
        lines.append([*cells, row["commit"]])
    return markdown_table(lines)


def _timed_decoders(rows: Rows) -> Rows:
    """Return all times in isolation of the study's decoder."""
    return [row for row in rows if row["recipe"] == "study" and row["metric"] in SOLO_METRICS and "H200" in row["gpu"]]


def _decoders(rows: Rows) -> Rows:
    """Return the latest times in isolation of the study's decoder."""
    return files.latest(_timed_decoders(rows), ["metric", "variant", "heads", "kv_heads", "key_heads"])


def _decoder_name(row: Row) -> str:
    return f"{row['variant']}, {_heads(row['heads'], row['kv_heads'])}"
