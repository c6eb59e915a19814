"""What a finished run is worth: accuracy on the test sets, parameters, FLOPs, step time, memory."""

from __future__ import annotations

import csv
import json
import resource
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from mgk import results
from mgk.models import Classifier, EncoderConfig, load_model
from mgk.models.storage import write_atomically
from mgk.training import Fit, Record, Run
from mgk.variants import VARIANTS


def forward_flops(config: EncoderConfig, length: int) -> int:
    """FLOPs of one example's forward, counted on the meta device."""
    with torch.device("meta"):
        model = Classifier(config).eval()
        shape = (1, length) if config.documents == 1 else (1, 2, length)
        tokens, lengths = torch.empty(shape, dtype=torch.long), torch.empty(shape[:-1], dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens, lengths)
    return int(counter.get_total_flops())


def parameters(config: EncoderConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Classifier(config).parameters())


def test_splits(task: Any) -> list[str]:
    return [name for name in task.splits if name not in ("train", "dev")]


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


def finish(run: Run, task: Any, module: Fit, record: Record) -> list[dict[str, Any]]:
    """Evaluates the best model on the test sets and writes result.json; the rows are for a file of results."""
    config, settings = module.model.config, run.recipe.training
    memory = peak_memory_mb()
    best = load_model(run.directory / "best", record.device)
    assert isinstance(best, Classifier)
    judge = Fit(best, settings, run.seed, {name: task.split(run.data_dir, name) for name in test_splits(task)})
    judge.to(record.device)
    judge.setup("test")
    # The first window holds compilation and warm-up.
    windows = record.step_ms[1:] or record.step_ms
    step_ms = statistics.median(windows) if windows else float("nan")
    common = {
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
        "step_ms": f"{step_ms:.3f}",
        "peak_mem_mb": f"{memory:.0f}",
        "command": shlex.join(["mgk", *sys.argv[1:]]),
        **results.environment(),
    }
    rows = [
        {**common, "split": "dev", "n_examples": len(module.splits["dev"]), "metric": name, "value": value}
        for name, value in (("best_accuracy", module.best["accuracy"]), ("best_step", module.best["step"]))
    ]
    if run.recipe.plateau is not None:
        # 0: never.
        step = plateau_left(run.directory / "metrics.csv", run.recipe.plateau / 100)
        rows.append({**rows[0], "metric": "plateau_left_at_step", "value": step})
    for split in test_splits(task):
        correct = judge.correct(split)
        shares = judge.splits[split].class_shares(task.num_classes)
        examples = {**common, "split": split, "n_examples": len(correct)}
        rows.append({**examples, "metric": "majority_share", "value": float(shares.max())})
        np.save(run.directory / f"correct-{split}.npy", correct, allow_pickle=False)
        rows.append({**examples, "metric": "accuracy", "value": float(correct.mean())})
        for name, scores in task.baselines(run.data_dir).items():
            if split in scores:
                rows.append({**examples, "metric": f"baseline: {name}", "value": scores[split]})
    write_atomically(run.directory / "result.json", json.dumps(rows, indent=2))
    return rows


def read_run(directory: Path) -> dict[str, Any]:
    """The description of a run, from its directory."""
    try:
        description = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{directory} is no run: it has no run.json") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{directory / 'run.json'} is damaged: {error}") from None
    return dict(description)
