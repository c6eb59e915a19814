"""Pictures that carry a digest of their numbers, so that a test can compare a committed picture with the results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgk.analysis.report.drawing import save_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN_FROM = "Drawn from"  # PNG metadata field with the digest


@dataclass(frozen=True)
class Picture:
    """A figure: its numbers, the function that draws them, and its resolution in dots per inch."""

    name: str
    data: Any
    draw: Callable[[Any], Figure]
    dpi: int = 130

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.data, sort_keys=True).encode()).hexdigest()[:16]

    def write(self, folder: Path) -> Path:
        """Write the PNG file and return its path."""
        from matplotlib import pyplot

        figure, path = self.draw(self.data), folder / f"{self.name}.png"
        folder.mkdir(parents=True, exist_ok=True)
        save_png(figure, path, dpi=self.dpi, metadata={DRAWN_FROM: self.digest})
        pyplot.close(figure)
        return path
