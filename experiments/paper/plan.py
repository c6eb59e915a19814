"""The experiments that the evidence is to rest on, and how many of them results/ already has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.paper.recipe_results import PRESET
from mgk._core.io import markdown_table
from mgk.training import config
from mgk.training.config import ModelSpec
from mgk.training.run_dir import finished_runs
from mgk.training.sweep import SOLO_METRICS, filter_rows, is_timed, is_trained

ALL = 3  # seeds, where a row is to have several


@dataclass(frozen=True)
class Experiment:
    """Rows of a recipe and the seeds each is to have. timed: whether each row is to be timed alone; not where another
    experiment has the same models and batches."""

    item: int
    title: str
    recipe: str
    seeds: dict[ModelSpec, int]
    timed: bool = True


def _models(names: str) -> tuple[ModelSpec, ...]:
    return tuple(map(ModelSpec.parse, names.split()))


def _rows(names: str, several: str = "") -> dict[ModelSpec, int]:
    """Three seeds of the rows in `several`, one of the others."""
    return {row: ALL if row in _models(several) else 1 for row in _models(names)}


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
        # softmax:4 is the control of half the heads, smgk:8/4 what half the key heads are worth to a mixture.
        _rows("softmax:8 mgk:8 mgk:4 smgk:8 smgk:4 softmax:8/4 linear:8 mlk:8 mlk:4 softmax:4 smgk:8/4", "softmax:8"),
    ),
)

# The recipes that stand for the tasks of Tables 1, 2 and 4, in their order.
LRA = ("listops-4e-4", "text-5k", "retrieval-peerread-random")

# Figures of the paper: what they show, and the files, seen from the results' folder, without which there is none.
FIGURES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("1", "curves on retrieval", ("curves/retrieval-peerread-random-mgk-2-paper-s0.csv",)),
    (
        "2",
        "maps and ranks on retrieval",
        ("retrieval-peerread-random-analysis/maps-1.png", "retrieval-peerread-random-analysis/ranks.csv"),
    ),
    ("3", "FLOPs and parameters", ("../docs/figures/figure-3a.png", "../docs/figures/figure-3b.png")),
    ("4", "curves of the language model", ("curves/enwiki-lm-2-softmax-8-paper-s0.csv",)),
    ("5", "maps of the language model", ("enwiki-lm-2-analysis/maps-1.png",)),
    ("6", "ranks of the language model", ("enwiki-lm-2-analysis/ranks.csv",)),
    ("7", "FLOPs and parameters of the ways to learn", ("../docs/figures/figure-7.png",)),
    ("8", "maps of linear attention on retrieval", ("retrieval-peerread-random-linear-analysis/maps-1.png",)),
)


@dataclass(frozen=True)
class Looked:
    """An analysis of trained models, and the folder of results/ that holds it."""

    recipe: str
    kind: str  # in the folder's name
    rows: tuple[ModelSpec, ...]
    split: str

    @property
    def folder(self) -> str:
        return f"{self.recipe}-{self.kind}analysis"

    def done(self, results: Path) -> bool:
        return (results / self.folder / "ranks.csv").exists()

    def models(self, runs: Path) -> dict[ModelSpec, list[Path]]:
        """The runs of each row that are still there, of all seeds; those that have come to their end."""
        return {row: finished_runs(runs, self.recipe, row, PRESET) for row in self.rows}

    def command(self, results: Path, runs: Path) -> list[str] | None:
        """As arguments of `mgk`. None where a row has no model."""
        models = self.models(runs).values()
        if not all(models):
            return None
        directories = [str(each) for of_row in models for each in of_row]
        return ["analyze", *directories, "--split", self.split, "--out", str(results / self.folder)]


# Those of figures 2, 5, 6 and 8.
ANALYSES = (
    Looked("retrieval-peerread-random", "", _models("softmax:4 mgk:2 smgk:2"), "test"),
    Looked("retrieval-peerread-random", "linear-", _models("linear:4 mlk:2"), "test"),
    Looked("enwiki-lm-2", "", _models("softmax:8 mgk:8 mgk:4"), "dev"),
)


def next_seed(rows: list[dict[str, str]], recipe: str, row: ModelSpec) -> int:
    """One that results have no training of, nor the plan."""
    planned = max((each.seeds[row] for each in EXPERIMENTS if each.recipe == recipe and row in each.seeds), default=0)
    own = filter_rows(rows, config.load_recipe(recipe), row, PRESET, None)
    return max([planned, *(int(each["seed"]) + 1 for each in own)])


def left(rows: list[dict[str, str]], experiment: Experiment) -> dict[ModelSpec, list[int]]:
    """The seeds that have not been run, of each row that lacks one."""
    recipe = config.load_recipe(experiment.recipe)
    missing = {
        row: [seed for seed in range(seeds) if not is_trained(rows, recipe, row, PRESET, seed)]
        for row, seeds in experiment.seeds.items()
    }
    return {row: seeds for row, seeds in missing.items() if seeds}


def untimed(rows: list[dict[str, str]], experiment: Experiment) -> list[ModelSpec]:
    """The rows that are to be timed alone and have not been."""
    recipe = config.load_recipe(experiment.recipe)
    return [
        row
        for row in experiment.seeds
        if experiment.timed and not is_timed(rows, recipe, row, PRESET, metrics=SOLO_METRICS)
    ]


def trained(rows: list[dict[str, str]], experiment: Experiment) -> list[ModelSpec]:
    """The rows that have results."""
    recipe = config.load_recipe(experiment.recipe)
    return [row for row in experiment.seeds if is_trained(rows, recipe, row, PRESET, 0)]


def _rest(rows: list[dict[str, str]], experiment: Experiment) -> str:
    """What is left, in words."""
    missing = left(rows, experiment)
    said = [f"{row} (seed {', '.join(map(str, seeds))})" for row, seeds in missing.items()]
    untimed_rows = [str(row) for row in untimed(rows, experiment)]
    parts = [f"train {', '.join(said)}"] if said else []
    parts += [f"time {', '.join(untimed_rows)}"] if untimed_rows else []
    return "; ".join(parts) or "nothing"


def table(rows: list[dict[str, str]], results: Path) -> str:
    lines = [["item", "what", "planned trainings run", "rows complete", "timed alone", "what is left"]]
    for experiment in EXPERIMENTS:
        missing = left(rows, experiment)
        wanted, rest = sum(experiment.seeds.values()), sum(map(len, missing.values()))
        without_times, models = untimed(rows, experiment), len(experiment.seeds)
        lines.append(
            [
                str(experiment.item),
                experiment.title,
                f"{wanted - rest} of {wanted}",
                f"{models - len(missing)} of {models}",
                f"{models - len(without_times)} of {models}" if experiment.timed else "–",
                _rest(rows, experiment),
            ]
        )
    figures = [["figure (item 5)", "what", "from models of the size above"]]
    for number, what, needs in FIGURES:
        figures.append([number, what, "yes" if all((results / each).exists() for each in needs) else "no"])
    command = "`python -m experiments.paper --run` trains, times and draws the remaining ones."
    return f"{markdown_table(lines)}\n\n{command}\n\n{markdown_table(figures)}"
