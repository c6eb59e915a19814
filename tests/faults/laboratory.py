"""A small language model trained by `mgk train`, and the comparison of two runs of it bit by bit."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from mgk._core.checksums import read_checksums
from mgk.models.run_directory import RunDirectory
from mgk.training import results

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "tests" / "fixtures" / "aa005c7" / "text"
SETTINGS = (
    "warmup=1 eval_every=2 batch_size=2 model.embed_dim=8 model.ffn_dim=8 model.head_dim=4 model.num_layers=1 lr=1e-2"
)
# Name of $TMPDIR in the folder of a laboratory.
TEMPORARIES = "temporaries"
# Columns of results that differ between two equal runs.
VOLATILE = ("step_ms", "peak_mem_mb", "date", "command")


class Laboratory:
    """A server process that runs `mgk`, and a folder for the runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "text"
        if not self.data.exists():
            shutil.copytree(TEXT, self.data)
        temporaries = folder / TEMPORARIES
        temporaries.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "MGK_COMMIT": "abc1234",
            "PYTHONWARNINGS": "ignore",
            "TMPDIR": str(temporaries),
        }
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n"

    def close(self) -> None:
        self._server.communicate()

    def mgk(self, place: Path, *arguments: Any, kind: str = "none", point: int = 0) -> tuple[int, str]:
        """Run a command in a folder; return its exit code and its output."""
        place.mkdir(parents=True, exist_ok=True)
        request = {
            "cwd": str(place),
            "kind": kind,
            "point": point,
            "arguments": [*map(str, arguments)],
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        status, log = json.loads(self._server.stdout.readline())
        return status, log

    def train(self, place: Path, kind: str = "none", point: int = 0) -> tuple[int, str]:
        """Train the model in `place`/out, or resume its run."""
        arguments = ["train", "bytes", "--variant", "smgk", "--heads", 2, "--steps", 6, "--accelerator", "cpu"]
        arguments += [part for setting in SETTINGS.split() for part in ("--set", setting)]
        arguments += ["--data-dir", self.data, "--out", "out/run", "--results", "out/results.csv", "--resume", "auto"]
        return self.mgk(place, *arguments, kind=kind, point=point)

    def operations(self, place: Path) -> list[str]:
        """Train without a fault; return the operations of the process."""
        status, log = self.train(place, "count")
        assert status == 0, log
        return list(json.loads((place / "operations.json").read_text()))


@contextmanager
def laboratory() -> Iterator[Laboratory]:
    with tempfile.TemporaryDirectory() as folder:
        lab = Laboratory(Path(folder))
        try:
            yield lab
        finally:
            lab.close()


def _flatten(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{prefix}/{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _flatten(item, f"{prefix}/{number}")
    else:
        yield prefix, value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


def end_of_run(place: Path) -> dict[str, Any]:
    """Return everything that a finished run leaves, except for times, in a form that == compares bit by bit."""
    out = place / "out"
    files = RunDirectory(out / "run")
    checkpoint = torch.load(files.checkpoint, weights_only=True)
    names = ("state_dict", "optimizer_states", "lr_schedulers", "best", "global_step")
    end: dict[str, Any] = dict(_flatten({name: checkpoint[name] for name in names}, "checkpoint"))
    end |= dict(_flatten(load_file(files.best_model / "model.safetensors"), "best"))
    end["best config.json"] = json.loads((files.best_model / "config.json").read_text())
    # The newest checksum of each file.
    accepted = read_checksums(files.best_model)
    end["best checksums.json"] = {name: values[0] for name, values in accepted.items()}
    for path in (files.metrics, *sorted((out / "curves").glob("*.csv"))):
        end[path.name] = [line.rsplit(",", 1)[0] for line in path.read_text().splitlines()]
    for path in sorted(files.path.glob("*.npy")):
        end[path.name] = path.read_bytes()
    for path in sorted((out / "answers").rglob("*.npz")):
        with np.load(path) as arrays:
            end[path.name] = {name: arrays[name].tobytes() for name in arrays}
    end["results"] = [
        {key: row[key] for key in row if key not in VOLATILE} for row in results.read([out / "results.csv"])
    ]
    temporaries = [*out.rglob("*.tmp"), *place.glob(".*"), *(place.parent / TEMPORARIES).iterdir()]
    end["temporary files"] = sorted(str(path.relative_to(place.parent)) for path in temporaries)
    return end


def difference(place: Path, reference: dict[str, Any]) -> str | None:
    """Return the first thing in which a finished run differs from the reference, or None."""
    try:
        end = end_of_run(place)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return next((name for name in {**reference, **end} if reference.get(name) != end.get(name)), None)
