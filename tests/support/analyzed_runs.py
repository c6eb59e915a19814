"""Run directories of tiny untrained models, and the command that analyzes them."""

import csv
import dataclasses
import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from mgk import tasks
from mgk.cli import commands
from mgk.models import Classifier, EncoderConfig, save_model

TASK = dataclasses.replace(tasks.TASKS["listops-short"], name="tiny", counts={"test": 60, "dev": 4, "train": 4})


def make_run(directory: Path, variant: str, heads: int, scale: float = 1) -> Path:
    """Write the files of a run of task "tiny" without training; a large `scale` makes the attention less uniform."""
    config = EncoderConfig(
        vocab_size=32, num_classes=10, max_length=60, num_heads=heads, head_dim=8, variant=variant, embed_dim=16
    )
    model = Classifier(config)
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.query.weight.mul_(scale)
    save_model(model, directory / "best")
    row = f"{variant}:{heads}"
    (directory / "run.json").write_text(json.dumps({"task": "tiny", "recipe": "tiny", "row": row, "seed": 0}))
    lines = ["step,split,loss,accuracy,lr,seconds"]
    for step in (10, 20, 30):
        lines += [f"{step},train,{3 / step:.3f},0.{step},1e-3,0", f"{step},dev,nan,0.{step + 5},1e-3,0"]
    (directory / "metrics.csv").write_text("\n".join(lines) + "\n")
    return directory


def run_analyze(*arguments):
    """Run `mgk analyze` with these arguments."""
    return CliRunner().invoke(commands.app, ["analyze", *map(str, arguments)])


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
