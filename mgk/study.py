"""What is kept of finished runs when their weights cannot be: curves, samples, and whatever else looks at a model."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mgk.generation import Sampling, generate
from mgk.models.storage import write_atomically
from mgk.runs import load_language_model, read_run

# A look at a finished run: (the run's directory, the data, where to write) -> the files it wrote.
Look = Callable[[Path, Path, Path], list[Path]]


def sample(run: Path, data_dir: Path, out: Path, prompt: str = "The", tokens: int = 120) -> list[Path]:
    """What the model writes on from a prompt, three times."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, vocabulary = load_language_model(run, device)
    lines = [f"# Samples of {run.name}", "", f"Temperature 1, top_p 0.9, from {prompt!r}."]
    for seed in range(3):
        ids, _ = vocabulary.encode(prompt)
        drawn = generate(model, ids.tolist(), max_tokens=tokens, sampling=Sampling(top_p=0.9, seed=seed))
        joint = " " if vocabulary.spaced else ""
        lines += ["", f"## Seed {seed}", "", prompt + joint + vocabulary.decode(drawn).replace("\n", "\n\n")]
    path = out / f"samples-{run.name}.md"
    write_atomically(path, "\n".join(lines) + "\n")
    return [path]


# In the order in which they look; a new one joins here.
LOOKS: list[Look] = [sample]


def read_curve(run: Path) -> dict[str, list[tuple[int, float]]]:
    """metrics.csv: for each split, steps and the metric."""
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    metric = next(n for n, name in enumerate(header) if name in ("accuracy", "perplexity"))
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        curves.setdefault(row[1], []).append((int(row[0]), float(row[metric])))
    return curves


def draw_curves(runs: Sequence[Path], title: str, path: Path) -> Path:
    """The development set's metric against steps, a line for each run, and training's beside it, dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), constrained_layout=True)
    for n, run in enumerate(runs):
        label = f"{read_run(run)['row']}, seed {read_run(run)['seed']}"
        for split, style in (("train", "--"), ("dev", "-")):
            points = read_curve(run).get(split, [])
            axes.plot(*zip(*points, strict=True), style, color=f"C{n}", label=f"{label}, {split}", marker=".")
    is_perplexity = "perplexity" in (runs[0] / "metrics.csv").read_text().partition("\n")[0]
    axes.set_yscale("log" if is_perplexity else "linear")
    axes.set_xlabel("step")
    axes.set_ylabel("perplexity within segments" if is_perplexity else "accuracy")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=150, format="png")
    pyplot.close(figure)
    temporary.replace(path)
    return path
