"""What a finished run is worth: its metric on the test sets, parameters, FLOPs, step time, memory."""

from __future__ import annotations

import csv
import json
import resource
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mgk._core.io import write_atomically
from mgk.models import Classifier, LanguageModel, load_model
from mgk.models.checkpoint import KINDS
from mgk.training import results
from mgk.training.callbacks import CheckpointCallback
from mgk.training.config import TrainConfig
from mgk.training.module import TrainingModule
from mgk.training.objectives import OBJECTIVES, Metric, Objective
from mgk.training.trainer import Run
from mgk.variants import VARIANTS


def _classify(model: Any, length: int) -> None:
    shape = (1, length) if model.config.documents == 1 else (1, 2, length)
    model(torch.empty(shape, dtype=torch.long), torch.empty(shape[:-1], dtype=torch.long))


def _predict(model: Any, length: int) -> None:
    """Every target a frequent token: how many are not, and pay for a second softmax, only the text can tell."""
    tokens = torch.empty((1, length), dtype=torch.long)
    model.losses(tokens, tokens, [0] * len(model.config.cutoffs))


FORWARDS: dict[type, Callable[[Any, int], None]] = {Classifier: _classify, LanguageModel: _predict}


def _unallocated(config: Any) -> nn.Module:
    with torch.device("meta"):
        kind = next(model for configuration, model in KINDS.values() if isinstance(config, configuration))
        model: nn.Module = kind(config)
        return model.eval()


def forward_flops(config: Any, length: int) -> int:
    """FLOPs of one example's forward, counted on the meta device."""
    model = _unallocated(config)
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        FORWARDS[type(model)](model, length)
    return int(counter.get_total_flops())


def parameters(config: Any) -> int:
    return sum(parameter.numel() for parameter in _unallocated(config).parameters())


def peak_memory_mb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def plateau_left(metrics: Path, accuracy: float) -> int:
    """The first step at which the development set was above this accuracy, 0 if none was."""
    with metrics.open(newline="", encoding="utf-8") as file:
        steps = [
            int(row["step"])
            for row in csv.DictReader(file)
            if row["split"] == "dev" and float(row["accuracy"]) > accuracy
        ]
    return min(steps, default=0)


def description(run: Run, task: Any, config: Any) -> dict[str, Any]:
    """The columns of results that say which model was measured on what, and where."""
    settings = run.recipe.training
    return {
        "recipe": run.recipe.name,
        "task": run.recipe.task,
        "dataset": task.dataset,
        "variant": run.row.variant,
        "preset": run.preset,
        "components": VARIANTS[run.row.variant].components or config.num_components,
        "heads": run.row.heads,
        "kv_heads": run.row.kv_heads or run.row.heads,
        "seed": run.seed,
        "steps": settings.steps,
        "lr": settings.lr,
        "batch": settings.batch_size,
        "length": task.max_length,
        "dtype": settings.precision,
        "backend": config.backend,
        "params": parameters(config),
        "flops": forward_flops(config, task.max_length),
        "command": shlex.join(["mgk", *sys.argv[1:]]),
        "setup": run.setup(task),
        **results.environment(),
    }


def finish(run: Run, task: Any, module: TrainingModule, record: CheckpointCallback) -> list[dict[str, Any]]:
    """Evaluates the best model on the test sets and writes result.json; the rows are for a file of results."""
    config, settings = module.model.config, run.recipe.training
    memory = peak_memory_mb()
    # What was compiled for training also evaluates; of a model that is shared out this process has a part alone.
    trained = None if module.device_mesh is not None else module.objective
    judge = judge_of(run.files.best_model, settings, task, run.data_dir, record.device, trained=trained)
    # The first window holds compilation and warm-up.
    windows = record.step_ms[1:] or record.step_ms
    step_ms = statistics.median(windows) if windows else float("nan")
    common = description(run, task, config)
    common.update(step_ms=f"{step_ms:.3f}", peak_mem_mb=f"{memory:.0f}")
    metric = module.objective.metric
    rows = [
        {**common, "split": "dev", "n_examples": len(module.splits["dev"]), "metric": name, "value": value}
        for name, value in ((f"best_{metric}", module.best[metric]), ("best_step", module.best["step"]))
    ]
    if run.recipe.plateau is not None:
        # 0: never.
        step = plateau_left(run.files.metrics, run.recipe.plateau / 100)
        rows.append({**rows[0], "metric": "plateau_left_at_step", "value": step})
    baselines = task.baselines(run.data_dir)
    for split in judge.splits:
        known = [(f"baseline: {name}", scores[split]) for name, scores in baselines.items() if split in scores]
        found = list(judge.judge(split, run.directory))
        found += [Metric(found[0].n_examples, *baseline) for baseline in known]
        rows += [{**common, "split": split, **each._asdict()} for each in found]
    write_atomically(run.files.result, json.dumps(rows, indent=2))
    return rows


def judge_of(
    directory: Path,
    settings: TrainConfig,
    task: Any,
    data_dir: Path,
    device: torch.device,
    split: str | None = None,
    trained: Objective | None = None,
) -> Objective:
    """A saved model, ready to be judged on a split, or on all that a finished model is judged on.

    trained: the objective whose model this was; that model takes the saved weights, and nothing is compiled again.
    """
    kind = OBJECTIVES[task.objective]
    model = load_model(directory, device)
    if not isinstance(model, kind.model_class):
        raise ValueError(
            f"{directory} holds a {type(model).__name__}, and {task.name} is for a {kind.model_class.__name__}"
        )
    if trained is not None:
        trained.model.load_state_dict(model.state_dict())
        model = trained.model.to(device).eval()
    names = kind.judged_on(task) if split is None else [split]
    judge = kind(model, settings, task, {name: task.split(data_dir, name) for name in names})
    judge.place(device, trained and trained.network)
    return judge
