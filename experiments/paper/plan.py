"""Planned experiments, and which of them have results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from experiments.paper.recipe_results import PRESET
from experiments.paper.text import wrap
from experiments.result_rows import Rows
from mgk._core.markdown import markdown_table
from mgk.training import config
from mgk.training.config import ModelSpec
from mgk.training.runs import finished_runs
from mgk.training.sweep import SOLO_METRICS, filter_rows, is_timed, is_trained

SEVERAL_SEEDS = 3


@dataclass(frozen=True)
class Experiment:
    """Models of a recipe with their planned number of seeds."""

    item: int  # number in the table
    title: str
    recipe: str
    seeds: dict[ModelSpec, int]
    timed: bool = True  # time each model in isolation; False if another experiment has the same models and batches


def _models(names: str) -> tuple[ModelSpec, ...]:
    return tuple(map(ModelSpec.parse, names.split()))


def _rows(names: str, several: str = "") -> dict[ModelSpec, int]:
    """Plan SEVERAL_SEEDS seeds for the models in `several` and one for the others."""
    return {row: SEVERAL_SEEDS if row in _models(several) else 1 for row in _models(names)}


_TABLES_1_2_4 = " ".join(map(str, config.load_recipe("listops").rows))
_TABLE_1 = "softmax:8 smgk:4 mgk:4 softmax:4 smgk:2 mgk:2 softmax:2 smgk:1 mgk:1 softmax:1"

EXPERIMENTS = (
    Experiment(1, "ListOps (lr 4e-4)", "listops-4e-4", _rows(_TABLES_1_2_4, _TABLES_1_2_4)),
    Experiment(
        1,
        "ListOps (the paper's schedule)",
        "listops",
        _rows(_TABLE_1, _TABLE_1) | {ModelSpec("linear", 8): 2, ModelSpec("mlk", 4): 2},
        timed=False,
    ),
    Experiment(
        2, "Text (5,000 steps)", "text-5k", _rows(f"{_TABLE_1} linear:8 mlk:4 smlk:4", "softmax:8 mgk:4 smgk:4")
    ),
    Experiment(3, "Retrieval (PeerRead stand-in, 3,000 steps)", "retrieval-peerread", _rows("softmax:8 smgk:4")),
    Experiment(
        3,
        "Retrieval (PeerRead stand-in, random negatives)",
        "retrieval-peerread-random",
        _rows(
            "softmax:4 softmax:2 mgk:4 mgk:2 mgk:1 smgk:4 smgk:2 linear:4 linear:2 mlk:4 mlk:2 mlk:1",
            "softmax:4 mgk:2 smgk:2",
        ),
    ),
    Experiment(4, "Language model (enwiki-lm stand-in, one pass)", "enwiki-lm", _rows("softmax:8 smgk:4"), timed=False),
    Experiment(
        4,
        "Language model (enwiki-lm stand-in, two passes)",
        "enwiki-lm-2",
        # softmax:4 is the control for half the heads; smgk:8/4 has half the key heads.
        _rows("softmax:8 mgk:8 mgk:4 smgk:8 smgk:4 softmax:8/4 linear:8 mlk:8 mlk:4 softmax:4 smgk:8/4", "softmax:8"),
    ),
)

# Recipes for the tasks of Tables 1, 2 and 4, in their order.
LRA = ("listops-4e-4", "text-5k", "retrieval-peerread-random")


class PaperFigure(NamedTuple):
    """A figure of the paper.

    Attributes:
        number: Its number in the paper.
        subject: What it shows.
        files: Files of our version, relative to the results directory.
    """

    number: str
    subject: str
    files: tuple[str, ...]


FIGURES = (
    PaperFigure("1", "curves on retrieval", ("curves/retrieval-peerread-random-mgk-2-paper-s0.csv",)),
    PaperFigure(
        "2",
        "maps and ranks on retrieval",
        ("retrieval-peerread-random-analysis/maps-1.png", "retrieval-peerread-random-analysis/ranks.csv"),
    ),
    PaperFigure("3", "FLOPs and parameters", ("../docs/figures/figure-3a.png", "../docs/figures/figure-3b.png")),
    PaperFigure("4", "curves of the language model", ("curves/enwiki-lm-2-softmax-8-paper-s0.csv",)),
    PaperFigure("5", "maps of the language model", ("enwiki-lm-2-analysis/maps-1.png",)),
    PaperFigure("6", "ranks of the language model", ("enwiki-lm-2-analysis/ranks.csv",)),
    PaperFigure("7", "FLOPs and parameters of EM and hard inference", ("../docs/figures/figure-7.png",)),
    PaperFigure(
        "8", "maps of linear attention on retrieval", ("retrieval-peerread-random-linear-analysis/maps-1.png",)
    ),
)


@dataclass(frozen=True)
class HeadAnalysis:
    """An analysis of trained models and its directory in results/."""

    recipe: str
    kind: str  # part of the folder's name
    rows: tuple[ModelSpec, ...]
    split: str

    @property
    def folder(self) -> str:
        return f"{self.recipe}-{self.kind}analysis"

    def is_done(self, results: Path) -> bool:
        return (results / self.folder / "ranks.csv").exists()

    def models(self, runs: Path) -> dict[ModelSpec, list[Path]]:
        """Return the finished run directories of each model, of all seeds."""
        return {row: finished_runs(runs, self.recipe, row, PRESET) for row in self.rows}

    def command(self, results: Path, runs: Path) -> list[str] | None:
        """Return the arguments of `mgk`, or None if a model has no run directory."""
        models = self.models(runs).values()
        if not all(models):
            return None
        directories = [str(path) for paths in models for path in paths]
        return ["analyze", *directories, "--split", self.split, "--out", str(results / self.folder)]


# Analyses for figures 2, 5, 6 and 8.
ANALYSES = (
    HeadAnalysis("retrieval-peerread-random", "", _models("softmax:4 mgk:2 smgk:2"), "test"),
    HeadAnalysis("retrieval-peerread-random", "linear-", _models("linear:4 mlk:2"), "test"),
    HeadAnalysis("enwiki-lm-2", "", _models("softmax:8 mgk:8 mgk:4"), "dev"),
)


def next_seed(rows: Rows, recipe: str, row: ModelSpec) -> int:
    """Return a seed that is neither in the results nor planned."""
    planned = [item.seeds[row] for item in EXPERIMENTS if item.recipe == recipe and row in item.seeds]
    trained = filter_rows(rows, config.load_recipe(recipe), row, PRESET, None)
    return max([0, *planned, *(int(line["seed"]) + 1 for line in trained)])


def missing_seeds(rows: Rows, experiment: Experiment) -> dict[ModelSpec, list[int]]:
    """Return the planned seeds without results, by model; complete models are omitted."""
    recipe = config.load_recipe(experiment.recipe)
    missing = {
        row: [seed for seed in range(seeds) if not is_trained(rows, recipe, row, PRESET, seed)]
        for row, seeds in experiment.seeds.items()
    }
    return {row: seeds for row, seeds in missing.items() if seeds}


def untimed_models(rows: Rows, experiment: Experiment) -> list[ModelSpec]:
    """Return the models whose times in isolation are planned but missing."""
    recipe = config.load_recipe(experiment.recipe)
    return [
        row
        for row in experiment.seeds
        if experiment.timed and not is_timed(rows, recipe, row, PRESET, metrics=SOLO_METRICS)
    ]


def trained_models(rows: Rows, experiment: Experiment) -> list[ModelSpec]:
    """Return the models that have results."""
    recipe = config.load_recipe(experiment.recipe)
    return [row for row in experiment.seeds if is_trained(rows, recipe, row, PRESET, 0)]


def unplanned_seeds(rows: Rows, experiment: Experiment) -> dict[ModelSpec, list[int]]:
    """Return the seeds of an experiment's models that have results and are not planned, by model."""
    recipe = config.load_recipe(experiment.recipe)
    stored_seeds = {
        row: sorted({int(line["seed"]) for line in filter_rows(rows, recipe, row, PRESET, None)})
        for row in experiment.seeds
    }
    unplanned = {
        row: [seed for seed in stored if seed >= experiment.seeds[row] and is_trained(rows, recipe, row, PRESET, seed)]
        for row, stored in stored_seeds.items()
    }
    return {row: seeds for row, seeds in unplanned.items() if seeds}


def _describe_unplanned(rows: Rows) -> str:
    """List the runs of planned models that are not planned, with their number; "" if there are none."""
    count, parts = 0, []
    for experiment in EXPERIMENTS:
        unplanned = unplanned_seeds(rows, experiment)
        count += sum(map(len, unplanned.values()))
        names = [f"{row} (seed {', '.join(map(str, seeds))})" for row, seeds in unplanned.items()]
        parts += [f"{experiment.title}: {', '.join(names)}"] if names else []
    if not parts:
        return ""
    return f"{count} more runs of these models are not in the plan; all intervals include them. {'; '.join(parts)}."


def _describe_remaining(rows: Rows, experiment: Experiment) -> str:
    missing = missing_seeds(rows, experiment)
    runs = [f"{row} (seed {', '.join(map(str, seeds))})" for row, seeds in missing.items()]
    untimed = [str(row) for row in untimed_models(rows, experiment)]
    parts = [f"train {', '.join(runs)}"] if runs else []
    parts += [f"time {', '.join(untimed)}"] if untimed else []
    return "; ".join(parts) or "nothing"


def table(rows: Rows, results: Path) -> str:
    """Format the state of every planned experiment and figure."""
    lines = [["item", "experiment", "finished runs", "complete models", "timed in isolation", "remaining"]]
    for experiment in EXPERIMENTS:
        missing = missing_seeds(rows, experiment)
        planned, remaining = sum(experiment.seeds.values()), sum(map(len, missing.values()))
        untimed, models = untimed_models(rows, experiment), len(experiment.seeds)
        lines.append(
            [
                str(experiment.item),
                experiment.title,
                f"{planned - remaining} of {planned}",
                f"{models - len(missing)} of {models}",
                f"{models - len(untimed)} of {models}" if experiment.timed else "–",
                _describe_remaining(rows, experiment),
            ]
        )
    figures = [["figure (item 5)", "subject", "from models of the size above"]]
    for figure in FIGURES:
        exists = all((results / path).exists() for path in figure.files)
        figures.append([figure.number, figure.subject, "yes" if exists else "no"])
    command = "`python -m experiments.paper --run` trains, times and analyses the remaining ones."
    unplanned = wrap(_describe_unplanned(rows))
    return "\n\n".join(filter(None, [markdown_table(lines), unplanned, command, markdown_table(figures)]))
