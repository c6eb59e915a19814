"""Add a task to mgk: find the most frequent letter. Train two models on it and compare them.

python examples/new_task.py
MGK_PLUGINS=examples.new_task mgk compare examples/new_task.yaml      # the same from the command line, in a clone
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mgk.tasks import Task, register_task
from mgk.tasks.base import Example, write_split


@dataclass(frozen=True)
class MostFrequent(Task):
    """Find the most frequent of three letters. The fields enter the checksum of the prepared data."""

    name: str = "most-frequent"
    dataset: str = "most-frequent"
    vocab_size: int = 4  # 0 is padding
    num_classes: int = 3
    max_length: int = 32
    documents: int = 1

    def files(self, data_dir: Path) -> list[str]:
        return []  # generated: no source files

    def build(self, data_dir: Path, folder: Path, workers: int, progress: Any) -> dict[str, Any]:
        sizes = {"train": 2000, "dev": 200, "test": 500}
        for seed, (split, size) in enumerate(sizes.items()):
            write_split(folder, split, self.examples(seed, size))
        return {"examples": sizes}

    def examples(self, seed: int, size: int) -> Iterator[Example]:
        generator = np.random.default_rng(seed)
        for _ in range(size):
            tokens = generator.integers(1, 4, generator.integers(8, self.max_length + 1)).astype(np.uint8)
            yield [tokens], int(np.bincount(tokens, minlength=4)[1:].argmax())


register_task(MostFrequent())


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mgk", "compare", str(root / "examples" / "new_task.yaml")]
        command += ["--data-dir", folder, "--out", f"{folder}/out", "--runs", f"{folder}/runs", *sys.argv[1:]]
        environment = {**os.environ, "MGK_PLUGINS": "examples.new_task", "PYTHONPATH": str(root)}
        sys.exit(subprocess.run(command, env=environment).returncode)
