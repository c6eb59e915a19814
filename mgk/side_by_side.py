"""One table and one picture of what a comparison has found, made from the files of results."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mgk import answers, results
from mgk.compare import ALONE, Shown, matching, shown
from mgk.models.storage import write_atomically
from mgk.recipes import Recipe, Row


@dataclass
class Summary:
    """A line of the table."""

    row: Row
    values: dict[str, list[float]] = field(default_factory=dict)  # split -> one a seed, as shown
    seeds: list[int] = field(default_factory=list)
    examples: dict[str, int] = field(default_factory=dict)
    params: int = 0
    flops: int = 0
    step_ms: float = float("nan")
    memory_mb: float = float("nan")
    plateau: list[int] = field(default_factory=list)  # the step at which each seed left it, 0: never
    # Minus the first row on the same examples, as shown: of the largest split that all seeds' answers are kept of.
    difference: answers.Difference | None = None
    alone: bool = False  # step_ms and memory_mb were measured with the machine to itself


def summarise(rows: list[dict[str, str]], recipe: Recipe, models: list[Row], preset: str) -> list[Summary]:
    summaries = []
    for row in models:
        how = shown(recipe)
        measured = matching(rows, recipe, row, preset, None)
        found = [each for each in measured if each["metric"] == how.metric]
        if not found:
            continue
        summary = Summary(row)
        summary.plateau = [int(each["value"]) for each in measured if each["metric"] == "plateau_left_at_step"]
        for each in found:
            summary.values.setdefault(each["split"], []).append(how.factor * float(each["value"]))
            summary.examples[each["split"]] = int(each["n_examples"])
            summary.seeds = sorted({*summary.seeds, int(each["seed"])})
        summary.params, summary.flops = int(found[0]["params"]), int(found[0]["flops"])
        summary.step_ms = statistics.median(float(each["step_ms"]) for each in found)
        summary.memory_mb = statistics.median(float(each["peak_mem_mb"]) for each in found)
        costs = {each["metric"]: float(each["value"]) for each in measured if each["metric"] in ALONE}
        if costs:
            summary.alone = True
            summary.step_ms, summary.memory_mb = costs["step_ms_alone"], costs["peak_mem_mb_alone"]
        summaries.append(summary)
    return summaries


def compare_answers(summaries: list[Summary], recipe: Recipe, preset: str, out: Path, setups: dict[Row, str]) -> str:
    """Fills in the differences to the first row; returns the split they are of, "" if there are none."""
    first, *others = summaries
    how = shown(recipe)
    split = max(first.examples, key=lambda name: first.examples[name])

    def kept(summary: Summary) -> list[np.ndarray]:
        setup = setups.get(summary.row, "")
        places = (answers.Place(recipe.name, summary.row, preset, seed, split, setup) for seed in summary.seeds)
        return [found for place in places if (found := answers.read(out, place)) is not None]

    for summary in others:
        difference = answers.paired(kept(summary), kept(first))
        if difference is not None:
            summary.difference = answers.Difference(how.factor * difference.mean, how.factor * difference.half_width)
    return split if any(summary.difference for summary in others) else ""


def interval(percent: float, examples: int) -> float:
    """Half the width of the 95 % interval of an accuracy measured on so many examples."""
    share = percent / 100
    return float(196 * (share * (1 - share) / examples) ** 0.5)


def spread(summary: Summary, split: str, how: Shown) -> float | None:
    """Over seeds; with one, what the size of the test set leaves open, where that is known."""
    values = summary.values[split]
    if len(values) > 1:
        return statistics.stdev(values)
    return interval(values[0], summary.examples[split]) if how.metric == "accuracy" else None


def all_splits(summaries: list[Summary]) -> list[str]:
    """The one that decides first."""
    names = {split for summary in summaries for split in summary.values}
    return sorted(names, key=lambda name: (name != "test", name != "dev", name))


def table(summaries: list[Summary], recipe: Recipe, paired_on: str = "") -> list[list[str]]:
    """Header and rows, as text."""
    splits, how = all_splits(summaries), shown(recipe)
    header = ["model", *(f"{split} {how.title}" for split in splits), "each seed"]
    header += [f"minus {summaries[0].row}, {paired_on}"] if paired_on else []
    header += [] if recipe.plateau is None else ["left the plateau at step"]
    header += ["paper"] if recipe.paper else []
    lines = [[*header, "parameters", "GFLOPs", "step, ms", "memory, MB"]]
    for summary in summaries:
        cells = [str(summary.row)]
        for split in splits:
            values = summary.values.get(split, [])
            width = spread(summary, split, how) if values else None
            cell = f"{statistics.mean(values):.2f}" if values else ""
            cells.append(cell if width is None else f"{cell} ± {width:.2f}")
        cells.append(" ".join(f"{value:.1f}" for value in summary.values.get(splits[0], [])))
        if paired_on:
            found = summary.difference
            cells.append("" if found is None else f"{found.mean:+.2f} ± {found.half_width:.2f}")
        if recipe.plateau is not None:
            cells.append(" ".join(f"{step:,}" if step else "never" for step in summary.plateau))
        if recipe.paper:
            paper = recipe.paper.get(str(summary.row))
            cells.append("" if paper is None else f"{paper:.2f}")
        cells += [f"{summary.params:,}", f"{summary.flops / 1e9:.3f}"]
        step = "" if math.isnan(summary.step_ms) else f"{summary.step_ms:.1f}"
        lines.append([*cells, step, f"{summary.memory_mb:,.0f}"])
    return lines


def to_beat(rows: list[dict[str, str]], recipe: Recipe) -> str:
    """What simple methods get on the test set, in words; "" where none was recorded."""
    own = [row for row in rows if row.get("recipe") == recipe.name and row.get("split") == "test"]
    known = {row["metric"]: 100 * float(row["value"]) for row in own if row["metric"].startswith("baseline: ")}
    said = [f"{name.removeprefix('baseline: ')} {value:.1f} %" for name, value in known.items()]
    majority = [row for row in own if row["metric"] == "majority_share"]
    said += [f"always the most frequent class {100 * float(majority[0]['value']):.1f} %"] if majority else []
    return f" Without a network: {', '.join(said)}." if said else ""


def markdown(lines: list[list[str]], recipe: Recipe, remark: str) -> str:
    head, *body = ("| " + " | ".join(line) + " |" for line in lines)
    rule = "|" + "---|" * len(lines[0])
    note = f"{shown(recipe).note}{remark}"
    return "\n".join([f"# {recipe.title}", "", head, rule, *body, "", note, ""])


def picture(summaries: list[Summary], recipe: Recipe, path: Path) -> None:
    """The metric against forward FLOPs, a point for each model, with the paper's number beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), constrained_layout=True)
    how, split = shown(recipe), all_splits(summaries)[0]
    colours = {variant: f"C{n}" for n, variant in enumerate(dict.fromkeys(s.row.variant for s in summaries))}
    for summary in summaries:
        values = summary.values.get(split, [])
        if not values:
            continue
        mean, width = statistics.mean(values), spread(summary, split, how)
        axes.errorbar(summary.flops / 1e9, mean, width, fmt="o", capsize=3, color=colours[summary.row.variant])
        axes.annotate(str(summary.row), (summary.flops / 1e9, mean), xytext=(6, 6), textcoords="offset points")
        if str(summary.row) in recipe.paper:
            axes.plot(summary.flops / 1e9, recipe.paper[str(summary.row)], "x", color="grey")
    axes.set_xlabel("GFLOPs of one example's forward")
    axes.set_ylabel(f"{split} {how.title}" + ("  (× the paper's)" if recipe.paper else ""))
    axes.set_title(recipe.title, fontsize=10)
    axes.margins(x=0.15)
    axes.grid(alpha=0.3)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=150, format="png")
    pyplot.close(figure)
    temporary.replace(path)


def report(
    recipe: Recipe,
    models: list[Row],
    preset: str,
    files: list[Path],
    out: Path,
    setups: dict[Row, str] | None = None,
) -> list[list[str]]:
    """Writes NAME.md and NAME.png beside the results; the table comes back for the terminal.

    setups: of the models' runs; results of the same name with other settings or data are then left out.
    """
    rows = results.read(files)
    if setups is not None:
        rows = [row for row in rows if row.get("setup") in setups.values()]
    summaries = summarise(rows, recipe, models, preset)
    if not summaries:
        raise ValueError(f"no results of recipe {recipe.name} in {', '.join(map(str, files))}")
    paired_on = compare_answers(summaries, recipe, preset, out, setups or {})
    lines = table(summaries, recipe, paired_on)
    alone = all(summary.alone for summary in summaries)
    remark = to_beat(rows, recipe) + (" Step time and memory: each model alone on the machine." if alone else "")
    if paired_on:
        remark += f" Minus {summaries[0].row}: {shown(recipe).paired}, with its 95 % interval over examples."
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / f"{recipe.name}.md", markdown(lines, recipe, remark))
    picture(summaries, recipe, out / f"{recipe.name}.png")
    return lines
