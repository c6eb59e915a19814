"""Rows × seeds of a recipe, trained side by side, and one table and one picture of what came out."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from mgk import results, tasks
from mgk.models.storage import write_atomically
from mgk.recipes import Recipe, Row

# Of these results the table takes step time and memory where they exist; `mgk.cost` measures them.
ALONE = ("step_ms_alone", "peak_mem_mb_alone")
# Seconds between two lines on how the running trainings stand.
TOLD_EVERY = 60


@dataclass
class Job:
    """One training in a process of its own."""

    row: Row
    seed: int
    directory: Path
    process: subprocess.Popen[bytes] | None = None


@dataclass(frozen=True)
class Shown:
    """How the metric of an objective is shown."""

    metric: str
    title: str
    factor: float
    note: str


SHOWN = {
    "classification": Shown(
        "accuracy",
        "accuracy, %",
        100.0,
        "± is the standard deviation over seeds, or with one seed half the 95 % interval of the test set. "
        "GFLOPs are one example's forward.",
    ),
    "language-model": Shown(
        "perplexity",
        "perplexity",
        1.0,
        "Perplexity of the sliding window, every prediction with a full window before it. "
        "± is the standard deviation over seeds. GFLOPs are one segment's forward, all its targets frequent words.",
    ),
}


def shown(recipe: Recipe) -> Shown:
    return SHOWN[tasks.task(recipe.task).objective]


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
    alone: bool = False  # step_ms and memory_mb were measured with the machine to itself


def matching(
    rows: list[dict[str, str]], recipe: Recipe, row: Row, preset: str, seed: int | None
) -> list[dict[str, str]]:
    """The rows of results that belong to this recipe, model and schedule."""
    settings = recipe.training
    wanted = {
        "recipe": recipe.name,
        "variant": row.variant,
        "preset": preset,
        "heads": str(row.heads),
        "kv_heads": str(row.kv_heads or row.heads),
        "steps": str(settings.steps),
        "lr": str(settings.lr),
        "batch": str(settings.batch_size),
    }
    if seed is not None:
        wanted["seed"] = str(seed)
    return [each for each in rows if all(each.get(key) == value for key, value in wanted.items())]


def finished(rows: list[dict[str, str]], recipe: Recipe, row: Row, preset: str, seed: int) -> bool:
    """Whether the results already have this training."""
    return any(each["metric"] == shown(recipe).metric for each in matching(rows, recipe, row, preset, seed))


def timed(rows: list[dict[str, str]], recipe: Recipe, row: Row, preset: str) -> bool:
    """Whether the results already have what the row costs by itself."""
    return any(each["metric"] in ALONE for each in matching(rows, recipe, row, preset, None))


def run_jobs(jobs: list[Job], command: list[str], at_once: int) -> list[Job]:
    """Runs each job as `command` with its row and seed, several at once; returns those that failed."""
    waiting, running, failed = list(jobs), [], []  # type: ignore[var-annotated]
    try:
        _run_all(waiting, running, failed, command, at_once)
    finally:
        # Interrupted: what still trains is asked to save and leave, and is not left behind.
        for job in running:
            assert job.process is not None
            job.process.terminate()
        for job in running:
            assert job.process is not None
            job.process.wait()
    return failed


def _run_all(waiting: list[Job], running: list[Job], failed: list[Job], command: list[str], at_once: int) -> None:
    total, started = len(waiting), time.time()
    told = started
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            job.directory.mkdir(parents=True, exist_ok=True)
            arguments = ["--variant", job.row.variant, "--heads", str(job.row.heads), "--seed", str(job.seed)]
            arguments += ["--kv-heads", str(job.row.kv_heads)] if job.row.kv_heads else []
            arguments += ["--out", str(job.directory), "--resume", "auto"]
            with (job.directory / "log.txt").open("ab") as log:
                job.process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log)
            running.append(job)
        time.sleep(0.5)
        if time.time() - told > TOLD_EVERY:
            told = time.time()
            for job in running:
                print(f"  {job.row} seed {job.seed}: {_last_line(job)}", file=sys.stderr)
        for job in list(running):
            assert job.process is not None
            if job.process.poll() is None:
                continue
            running.remove(job)
            outcome = "done"
            if job.process.returncode != 0:
                failed.append(job)
                outcome = f"FAILED: {_last_line(job)} (see {job.directory / 'log.txt'})"
            done = total - len(waiting) - len(running)
            print(
                f"[{done}/{total}] {job.row} seed {job.seed}: {outcome} ({time.time() - started:.0f} s)",
                file=sys.stderr,
            )


def _last_line(job: Job) -> str:
    text = (job.directory / "log.txt").read_text(encoding="utf-8", errors="replace").strip()
    return text.rpartition("\n")[2] or "no output yet"


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


def table(summaries: list[Summary], recipe: Recipe) -> list[list[str]]:
    """Header and rows, as text."""
    splits, how = all_splits(summaries), shown(recipe)
    header = ["model", *(f"{split} {how.title}" for split in splits), "each seed"]
    header += [] if recipe.plateau is None else ["left the plateau at step"]
    lines = [[*header, "paper", "parameters", "GFLOPs", "step, ms", "memory, MB"]]
    for summary in summaries:
        cells = [str(summary.row)]
        for split in splits:
            values = summary.values.get(split, [])
            width = spread(summary, split, how) if values else None
            cell = f"{statistics.mean(values):.2f}" if values else ""
            cells.append(cell if width is None else f"{cell} ± {width:.2f}")
        cells.append(" ".join(f"{value:.1f}" for value in summary.values.get(splits[0], [])))
        if recipe.plateau is not None:
            cells.append(" ".join(f"{step:,}" if step else "never" for step in summary.plateau))
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


def report(recipe: Recipe, models: list[Row], preset: str, files: list[Path], out: Path) -> list[list[str]]:
    """Writes NAME.md and NAME.png beside the results; the table comes back for the terminal."""
    rows = results.read(files)
    summaries = summarise(rows, recipe, models, preset)
    if not summaries:
        raise ValueError(f"no results of recipe {recipe.name} in {', '.join(map(str, files))}")
    lines = table(summaries, recipe)
    alone = all(summary.alone for summary in summaries)
    remark = to_beat(rows, recipe) + (" Step time and memory: each model alone on the machine." if alone else "")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / f"{recipe.name}.md", markdown(lines, recipe, remark))
    picture(summaries, recipe, out / f"{recipe.name}.png")
    return lines
