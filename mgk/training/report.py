"""One table and one picture of what a comparison has found, made from the files of results."""

from __future__ import annotations

import statistics
from pathlib import Path

from mgk._core.io import write_atomically
from mgk._core.markdown import markdown_table
from mgk.training import results
from mgk.training.config import ModelSpec, Recipe
from mgk.training.plots import draw
from mgk.training.predictions import Difference
from mgk.training.summary import Summary, all_splits, compare_answers, summarise
from mgk.training.sweep import MetricFormat, metric_format

NOT_MEASURED = "—"
MAJORITY = "always the most frequent class"


def table(summaries: list[Summary], recipe: Recipe, paired_on: str = "") -> list[list[str]]:
    """Header and rows, as text."""
    splits, how = all_splits(summaries), metric_format(recipe)
    header = ["model", *(f"{split} {how.title}" for split in splits), "each seed"]
    header += [f"minus {summaries[0].row}, {paired_on}{how.unit}"] if paired_on else []
    header += [] if recipe.plateau is None else ["left the plateau at step"]
    header += ["paper"] if recipe.paper else []
    lines = [[*header, "parameters", "GFLOPs", "step, ms", "memory, MB"]]
    for summary in summaries:
        each = summary.values.get(splits[0], {})
        cells = [str(summary.row), *(_mean(summary, split, how) for split in splits)]
        cells.append(" ".join(f"{each[seed]:.1f}" for seed in summary.seeds if seed in each))
        cells += [_difference(summary.difference, how.decimals)] if paired_on else []
        if recipe.plateau is not None:
            steps = [summary.left_plateau[seed] for seed in summary.seeds if seed in summary.left_plateau]
            cells.append(" ".join(f"{step:,}" if step else "never" for step in steps))
        if recipe.paper:
            paper = recipe.paper.get(str(summary.row))
            cells.append("" if paper is None else f"{paper:.2f}")
        step = NOT_MEASURED if summary.step_ms is None else f"{summary.step_ms:.1f}"
        lines.append([*cells, f"{summary.params:,}", f"{summary.flops / 1e9:.3f}", step, f"{summary.memory_mb:,.0f}"])
    return lines


def _mean(summary: Summary, split: str, how: MetricFormat) -> str:
    values, width = summary.of(split), summary.spread(split, how)
    if not values:
        return ""
    said = f"{statistics.mean(values):.2f}" + ("" if width is None else f" ± {width:.2f}")
    counted, seeds = len(summary.counted), len(summary.seeds)
    return said if counted == seeds else f"{said} ({counted} of {seeds} seeds)"


def _difference(found: Difference | str, decimals: int) -> str:
    return found if isinstance(found, str) else f"{found.mean:+.{decimals}f} ± {found.half_width:.{decimals}f}"


def without_a_network(rows: list[dict[str, str]], recipe: Recipe) -> dict[str, float]:
    """What simple methods get on the test set, in per cent, as far as it was recorded."""
    own = [row for row in rows if row.get("recipe") == recipe.name and row.get("split") == "test"]
    known = {row["metric"]: 100 * float(row["value"]) for row in own}
    simple = {name.removeprefix("baseline: "): known[name] for name in known if name.startswith("baseline: ")}
    return simple | ({MAJORITY: known["majority_share"]} if "majority_share" in known else {})


def notes(summaries: list[Summary], recipe: Recipe) -> list[str]:
    """What the numbers are."""
    how = metric_format(recipe)
    cells = [(len(values), summary.spread(split, how)) for summary in summaries for split, values in _counted(summary)]
    several = any(count > 1 for count, _ in cells)
    meant = ["the standard deviation over seeds"] if several else []
    if any(count == 1 and spread is not None for count, spread in cells):
        meant.append(f"{'with one seed ' if several else ''}half the 95 % interval of the test set")
    # Which targets are frequent words matters where the rare ones pay for a second softmax.
    targets = ", all its targets frequent words" if recipe.model.get("cutoffs") else ""
    said = [how.note, f"± is {', or '.join(meant)}." if meant else "", f"{how.flops}{targets}."]
    return [sentence for sentence in said if sentence]


def _counted(summary: Summary) -> list[tuple[str, list[float]]]:
    return [(split, summary.of(split)) for split in summary.values]


def remarks(summaries: list[Summary], recipe: Recipe, paired_on: str) -> list[str]:
    """What the columns mean, as far as it is not the same for all tables."""
    said = []
    if any(len(summary.counted) < len(summary.seeds) for summary in summaries):
        said.append("(n of m seeds): of the n that left the plateau; the others stand in `each seed` alone.")
    if paired_on:
        said.append(f"Minus {summaries[0].row}: {metric_format(recipe).paired}, with its 95 % interval over examples.")
        said.append("Other seeds would widen it.")
    if any(isinstance(summary.difference, str) and summary.difference for summary in summaries):
        said.append("n/a where one of the two learned and the other stayed on the plateau.")
    timed = [summary.step_ms is not None for summary in summaries]
    said += ["Step time: one model after another, with nothing else of mgk beside it."] if any(timed) else []
    said += [] if all(timed) else [f"{NOT_MEASURED}: not timed alone on the machine, which `--alone` does."]
    return said


def page(lines: list[list[str]], recipe: Recipe, said: list[str]) -> str:
    return "\n".join([f"# {recipe.title}", "", markdown_table(lines), "", " ".join(said), ""])


def report(
    recipe: Recipe,
    models: list[ModelSpec],
    preset: str,
    files: list[Path],
    out: Path,
    setups: dict[ModelSpec, str] | None = None,
) -> list[list[str]]:
    """Writes NAME.md and NAME.png beside the results; the table comes back for the terminal.

    setups: of the models' runs; results of the same name with other settings or data are then left out.
    """
    known = results.read(files)
    rows = known if setups is None else [row for row in known if row.get("setup") in setups.values()]
    summaries = summarise(rows, recipe, models, preset)
    if not summaries:
        named = sorted(
            {f"{row['variant']}:{row['heads']}" for row in known if row.get("recipe") == recipe.name} - {":"}
        )
        others = " with other settings or data, which --set may give" if set(named) & set(map(str, models)) else ""
        has = f"; there are {', '.join(named)}{others}" if named else ""
        asked = ", ".join(map(str, models))
        raise ValueError(f"{out} has no results of {asked} under recipe {recipe.name} and preset {preset}{has}")
    paired_on = compare_answers(summaries, recipe, preset, out, setups or {})
    lines = table(summaries, recipe, paired_on)
    simple = without_a_network(rows, recipe)
    said = notes(summaries, recipe)
    if simple:
        said.append(f"Without a network: {', '.join(f'{name} {value:.1f} %' for name, value in simple.items())}.")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / f"{recipe.name}.md", page(lines, recipe, said + remarks(summaries, recipe, paired_on)))
    draw(summaries, recipe, out / f"{recipe.name}.png", simple.get(MAJORITY))
    return lines
