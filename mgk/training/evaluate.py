"""Evaluation of a finished run: test metrics, parameters, FLOPs, step time and memory."""

from __future__ import annotations

import csv
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mgk._core.checksums import write_verified
from mgk.models import load_model
from mgk.training import results
from mgk.training.callbacks import CheckpointCallback
from mgk.training.config import TrainConfig
from mgk.training.module import TrainingModule
from mgk.training.objectives import OBJECTIVES, Metric, Objective, objective_for
from mgk.training.trainer import Run
from mgk.variants import VARIANTS


def _meta_model(config: Any) -> nn.Module:
    with torch.device("meta"):
        return objective_for(config).model_class(config).eval()


def forward_flops(config: Any, length: int) -> int:
    """Count the FLOPs of one example's forward pass, on the meta device."""
    model = _meta_model(config)
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        objective_for(config).run_example(model, length)
    return int(counter.get_total_flops())


def count_parameters(config: Any) -> int:
    """Count the parameters of the model with this configuration."""
    return sum(parameter.numel() for parameter in _meta_model(config).parameters())


def parameters_and_flops(config: Any, length: int) -> tuple[int, int]:
    """Return `count_parameters` and `forward_flops` of the model with this configuration."""
    return count_parameters(config), forward_flops(config, length)


def peak_memory_mb() -> float:
    """Return the peak memory of this process, on the GPU if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        memory = psutil.Process().memory_info()
        return float(getattr(memory, "peak_wset", memory.rss)) / 2**20
    # macOS counts bytes, Linux KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def first_step_above(metrics: Path, accuracy: float) -> int:
    """Return the first step in metrics.csv with a higher accuracy on the development set, or 0 if there is none."""
    with metrics.open(newline="", encoding="utf-8") as file:
        steps = [
            int(row["step"])
            for row in csv.DictReader(file)
            if row["split"] == "dev" and float(row["accuracy"]) > accuracy
        ]
    return min(steps, default=0)


def _num_components(variant: str, config: Any) -> int:
    """Return the number of Gaussians per key; 1 for layers that `register_attention` added."""
    if variant not in VARIANTS:
        return 1
    return VARIANTS[variant].components or int(config.num_components)


def result_columns(run: Run, task: Any, config: Any) -> dict[str, Any]:
    """Return the columns shared by all result rows of a run: model, data, settings and environment."""
    settings = run.recipe.training
    return {
        "recipe": run.recipe.name,
        "task": run.recipe.task,
        "dataset": task.dataset,
        "variant": run.row.variant,
        "preset": run.preset,
        "components": _num_components(run.row.variant, config),
        "heads": run.row.heads,
        "kv_heads": run.row.kv_heads or run.row.heads,
        "key_heads": run.row.key_heads or "",
        "seed": run.seed,
        "steps": settings.steps,
        "lr": settings.lr,
        "batch": settings.batch_size,
        "length": task.max_length,
        "dtype": settings.precision,
        "backend": config.backend,
        "params": count_parameters(config),
        "flops": forward_flops(config, task.max_length),
        "command": shlex.join(["mgk", *sys.argv[1:]]),
        "setup": run.setup(task),
        **results.environment(),
    }


def evaluate_run(run: Run, task: Any, module: TrainingModule, callback: CheckpointCallback) -> list[dict[str, Any]]:
    """Evaluate the best model of a run on the test splits and write result.json.

    Args:
        run: The run trained by `fit`.
        task: Its task.
        module: The module that `fit` returned.
        callback: The callback that `fit` returned.

    Returns:
        Rows for a results file.
    """
    config, settings = module.model.config, run.recipe.training
    memory = peak_memory_mb()
    # Reuse the network compiled for training, unless FSDP has sharded its weights.
    trained = None if module.device_mesh is not None else module.objective
    objective = load_objective(run.files.best_model, settings, task, run.data_dir, callback.device, trained=trained)
    step_ms = statistics.median(callback.step_ms) if callback.step_ms else float("nan")
    columns = result_columns(run, task, config)
    columns.update(step_ms=f"{step_ms:.3f}", peak_mem_mb=f"{memory:.0f}")
    metric = objective.metric
    rows = [
        {**columns, "split": "dev", "n_examples": len(module.splits["dev"]), "metric": name, "value": value}
        for name, value in ((f"best_{metric}", module.best[metric]), ("best_step", module.best["step"]))
    ]
    if run.recipe.plateau is not None:
        step = first_step_above(run.files.metrics, run.recipe.plateau / 100)
        rows.append({**rows[0], "metric": "plateau_left_at_step", "value": step})
    baselines = task.baselines(run.data_dir)
    for split in objective.splits:
        metrics = list(objective.evaluate(split, run.directory))
        metrics += [
            Metric(metrics[0].n_examples, f"baseline: {name}", scores[split])
            for name, scores in baselines.items()
            if split in scores
        ]
        rows += [{**columns, "split": split, **entry._asdict()} for entry in metrics]
    write_verified(run.files.result, json.dumps(rows, indent=2))
    return rows


def load_objective(
    directory: Path,
    settings: TrainConfig,
    task: Any,
    data_dir: Path,
    device: torch.device,
    split: str | None = None,
    trained: Objective | None = None,
) -> Objective:
    """Load a saved model and the splits to evaluate it on.

    Args:
        directory: Directory of the saved model.
        settings: Training settings; evaluation uses its batch size, precision, padding and stride.
        task: Task of the model.
        data_dir: Directory of the data.
        device: Device to evaluate on.
        split: Split to load; None loads all test splits.
        trained: Objective that trained the model. Its compiled network is reused with the saved weights.
    """
    objective_class = OBJECTIVES[task.objective]
    model = load_model(directory, device)
    model_class = objective_class.model_class
    if not isinstance(model, model_class):
        raise ValueError(f"{directory} holds a {type(model).__name__}, but {task.name} needs a {model_class.__name__}")
    if trained is not None:
        trained.model.load_state_dict(model.state_dict())
        model = trained.model.to(device).eval()
    names = objective_class.test_splits(task) if split is None else [split]
    objective = objective_class(model, settings, task, {name: task.split(data_dir, name) for name in names})
    objective.to_device(device, compiled=None if trained is None else trained.network)
    return objective
