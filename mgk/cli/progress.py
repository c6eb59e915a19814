"""Progress of a command with several stages, as a callback: a bar, or lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mgk._core.progress import Progress

# Seconds between progress lines if stderr is not a terminal.
LINE_EVERY = 10.0


def print_progress(stage: str, done: int, total: int) -> None:
    """Print a progress line on stderr; without a terminal, only when a stage is complete."""
    end = "\n" if done >= total else "\r"
    if sys.stderr.isatty() or done >= total:
        print(f"{stage}: {done:,} of {total:,}", end=end, file=sys.stderr, flush=True)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a progress callback: a bar per stage on a terminal, otherwise a line every `LINE_EVERY` seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        stages: dict[str, Any] = {}
        last_line, open_stage = time.monotonic(), ""

        def report(stage: str, done: int, total: int) -> None:
            nonlocal last_line, open_stage
            # A stage with a line of progress also gets a line when it is complete.
            is_due = time.monotonic() - last_line > LINE_EVERY or (stage == open_stage and done >= total)
            if not console.is_terminal and is_due:
                last_line, open_stage = time.monotonic(), stage if done < total else ""
                print(f"{stage}: {done:,} of {total:,}", file=sys.stderr, flush=True)
            # A second model repeats the stages of the first.
            if stage not in stages or bar.tasks[stages[stage]].finished:
                stages[stage] = bar.add_task(stage, total=total)
            bar.update(stages[stage], completed=done, total=total)

        yield report
