"""Progress callbacks of functions with several stages."""

from __future__ import annotations

from collections.abc import Callable

# Called with the name of the stage, the finished steps and their total.
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore progress."""
