"""Tables of faults. A case returns None if the run survives the fault, otherwise what went wrong."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgk._core.checksums import MANIFEST
from mgk.models import load_model
from mgk.models.run_directory import RunDirectory
from tests.faults.laboratory import Laboratory, difference, end_of_run

KILL, STOP, FULL = "killed (SIGKILL) at an operation", "stopped (SIGTERM) in a step", "disk full from an operation on"
LIMIT, READ_ONLY, DAMAGED = "file size limit (RLIMIT_FSIZE)", "read-only file system", "damaged file of a run"
PROMPT = ("generate", "out/run", "--prompt", "The key", "--max-tokens", "4", "--temperature", "0")


@dataclass
class Bench:
    """A laboratory with a finished run, the reference, and one that was killed before its last checkpoint."""

    lab: Laboratory
    operations: list[str] = field(default_factory=list)
    reference: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        self.operations = self.lab.operations(self.finished)
        self.reference = end_of_run(self.finished)
        last_step = max(n for n, name in enumerate(self.operations, 1) if name == "on_train_batch_end")
        self.lab.train(self.killed, "SIGKILL", last_step)
        self.outputs = {command[0]: self._output(self.finished, command) for command in self.readers}

    @property
    def finished(self) -> Path:
        return self.lab.folder / "finished"

    @property
    def killed(self) -> Path:
        return self.lab.folder / "killed"

    @property
    def readers(self) -> list[tuple[str, ...]]:
        """Commands that read a run."""
        return [("eval", "out/run", "--data-dir", str(self.lab.data)), PROMPT]

    def _output(self, place: Path, command: tuple[str, ...]) -> str:
        status, log = self.lab.mgk(place, *command)
        assert status == 0, log
        return log

    def new_place(self, copy_of: Path | None = None) -> Path:
        place = self.lab.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        if copy_of is not None:
            shutil.copytree(copy_of / "out", place / "out")
        return place

    def resume(self, place: Path) -> str | None:
        """Resume a run without a fault; return what differs from the reference."""
        status, log = self.lab.train(place)
        if status != 0:
            return f"resume failed with {status}: {last_line(log)}"
        return f"{name} differs" if (name := difference(place, self.reference)) is not None else None


def last_line(log: str) -> str:
    return (log.strip().splitlines() or ["no output"])[-1]


def refusal_error(status: int, log: str, text: str = "") -> str | None:
    """Return what is wrong with a refusal: it must have exit code 2 and one line that contains `text`."""
    if status != 2 or "Traceback" in log:
        return f"exit code {status}: {last_line(log)}"
    line = last_line(log)
    return None if line.startswith("mgk: ") and text in line else f"message: {line}"


@dataclass(frozen=True)
class Case:
    kind: str
    name: str
    run: Callable[[Bench], str | None]


def _killed_at(point: int) -> Callable[[Bench], str | None]:
    def run(bench: Bench) -> str | None:
        place = bench.new_place()
        status, log = bench.lab.train(place, "SIGKILL", point)
        # TensorBoard's thread may save an operation, so that a process ends before the last point.
        is_reached = status == -9 or (status == 0 and point == len(bench.operations))
        return bench.resume(place) if is_reached else f"exit code {status}: {last_line(log)}"

    return run


def _stopped_at(point: int) -> Callable[[Bench], str | None]:
    def run(bench: Bench) -> str | None:
        place = bench.new_place()
        status, log = bench.lab.train(place, "SIGTERM", point)
        # A run that is stopped in its last evaluation is completed.
        is_complete = status == 0 and RunDirectory(place / "out" / "run").result.exists()
        return bench.resume(place) if status == 143 or is_complete else f"exit code {status}: {last_line(log)}"

    return run


def _failing_from(kind: str, point: int, message: str) -> Callable[[Bench], str | None]:
    """Writes fail from an operation on: one line, and the run continues later as if nothing had happened."""

    def run(bench: Bench) -> str | None:
        place = bench.new_place()
        status, log = bench.lab.train(place, kind, point)
        # A file that is not needed, like a lock or a curve, may fail without ending the run.
        return (None if status == 0 else refusal_error(status, log, message)) or bench.resume(place)

    return run


def _resumed_read_only(bench: Bench) -> str | None:
    place = bench.new_place(bench.killed)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    status, log = bench.lab.train(place, "EROFS", 1)
    if error := refusal_error(status, log, "Read-only file system"):
        return error
    changed = [path.name for path, content in before.items() if not path.exists() or path.read_bytes() != content]
    return f"changed: {changed}" if changed else bench.resume(place)


def _read_read_only(command: int) -> Callable[[Bench], str | None]:
    def run(bench: Bench) -> str | None:
        place, arguments = bench.new_place(bench.finished), bench.readers[command]
        status, log = bench.lab.mgk(place, *arguments, kind="EROFS", point=1)
        return None if (status, log) == (0, bench.outputs[arguments[0]]) else f"exit code {status}: {last_line(log)}"

    return run


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES = (
    "run.json environment.json metrics.csv last.ckpt last-1.ckpt checksums.json result.json losses-test.npy "
    f"best/config.json best/model.safetensors best/{MANIFEST}"
).split()
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped bit": _flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
    "other JSON": lambda path: path.write_text(json.dumps([{"a": [1]}])),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "directory": _replace_by_directory,
}


def _is_model_good(place: Path) -> bool:
    try:
        load_model(RunDirectory(place / "out" / "run").best_model)
    except (ValueError, OSError):
        return False
    return True


def _damaged(name: str, damage: str) -> Callable[[Bench], str | None]:
    """Each command gives the same numbers as without the damage, or refuses in one line."""

    def run(bench: Bench) -> str | None:
        for origin in (bench.finished, bench.killed):
            place = bench.new_place(origin)
            path = place / "out" / "run" / name
            if not path.exists():
                continue
            DAMAGES[damage](path)
            was_good = _is_model_good(place)
            for command in bench.readers if origin == bench.finished else ():
                status, log = bench.lab.mgk(place, *command)
                if status == 0 and log != bench.outputs[command[0]]:
                    return f"{command[0]}: other output: {last_line(log)}"
                if status != 0 and (error := refusal_error(status, log)):
                    return f"{command[0]}: {error}"
            status, log = bench.lab.train(place)
            error = difference(place, bench.reference) if status == 0 else refusal_error(status, log)
            # A damaged file that the command does not read stays as it is. Without result.json, the model is evaluated
            # again and the same numbers are appended again, with other times.
            allowed = "results" if name == "result.json" else Path(name).name
            if error and not (status == 0 and error.endswith(allowed)):
                return f"resume: {error}"
            if was_good and not _is_model_good(place):
                return "the best model is lost"
        return None

    return run


def cases(operations: list[str]) -> list[Case]:
    """Return all cases for a run with these operations."""
    numbered = list(enumerate(operations, 1))
    steps = [(n, name) for n, name in numbered if name in ("on_train_batch_end", "validation_step")]
    writing = [(n, name) for n, name in numbered if " " in name and not name.startswith("remove ")]
    return [
        *(Case(KILL, f"{n} {name}", _killed_at(n)) for n, name in numbered),
        *(Case(STOP, f"{n} {name}", _stopped_at(n)) for n, name in steps),
        *(Case(FULL, f"{n} {name}", _failing_from("ENOSPC", n, "No space left")) for n, name in writing),
        *(Case(LIMIT, f"{size} bytes", _failing_from("EFBIG", size, "File too large")) for size in LIMITS),
        Case(READ_ONLY, "new run", _failing_from("EROFS", 1, "Read-only file system")),
        Case(READ_ONLY, "resumed run", _resumed_read_only),
        Case(READ_ONLY, "eval", _read_read_only(0)),
        Case(READ_ONLY, "generate", _read_read_only(1)),
        *(Case(DAMAGED, f"{name}: {damage}", _damaged(name, damage)) for name in FILES for damage in DAMAGES),
    ]


# Sizes around those of the files of a run.
LIMITS = (0, 100, 400, 1000, 2000, 4000, 8000, 12_000, 16_000, 24_000, 32_000, 48_000, 64_000, 100_000)
