"""Parts of all figures: labels at the ends of lines instead of a legend, short names, small PNG files."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mgk._core.io import replacing

LINE_SPACING = 1.3  # distance of two labels, in font sizes
GAP = 0.035  # between the axes and the labels, as a share of the width of the axes


class End(NamedTuple):
    """The last point of a line and its label."""

    x: float
    y: float
    text: str
    colour: str


def spread_apart(positions: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """Return positions in the same order that are at least `gap` apart, as close to the given ones as possible.

    Args:
        positions: Positions in any order; equal ones keep their order.
        gap: Smallest distance of two returned positions.
        low: Lowest position.
        high: Highest position; exceeded if there are too many positions.

    Examples:
        >>> spread_apart([1.0, 1.0, 5.0], 1.0)
        [0.5, 1.5, 5.0]
    """
    order = sorted(range(len(positions)), key=lambda n: positions[n])
    # Isotonic regression of the positions minus the required distances: merge blocks until their means increase.
    blocks: list[tuple[float, int]] = []
    for rank, n in enumerate(order):
        total, count = positions[n] - rank * gap, 1
        while blocks and blocks[-1][0] / blocks[-1][1] >= total / count:
            previous, members = blocks.pop()
            total, count = total + previous, count + members
        blocks.append((total, count))
    means = [total / count for total, count in blocks for _ in range(count)]
    spread = [0.0] * len(positions)
    for rank, n in enumerate(order):
        highest = high - (len(order) - 1) * gap
        spread[n] = max(low, min(means[rank], highest)) + rank * gap
    return spread


def label_ends(axes: Any, ends: Sequence[End], size: float = 9) -> None:
    """Write labels to the right of the axes, each connected with the end of its line.

    The limits of the axes must be final. In a constrained layout the axes become narrower by the width of the labels.

    Args:
        axes: Matplotlib axes.
        ends: Ends of the lines.
        size: Font size in points.
    """
    axes.figure.draw_without_rendering()  # computes the height of the axes
    to_share = axes.transData + axes.transAxes.inverted()
    heights = [float(to_share.transform((end.x, end.y))[1]) for end in ends]
    line_height = LINE_SPACING * size * axes.figure.dpi / 72 / axes.bbox.height
    for end, position in zip(ends, spread_apart(heights, line_height, 0, 1), strict=True):
        connection = {"arrowstyle": "-", "color": end.colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            end.text, xy=(end.x, end.y), xycoords="data", xytext=(1 + GAP, position), textcoords="axes fraction",
            va="center", ha="left", fontsize=size, color=end.colour, annotation_clip=False,
            arrowprops=connection | {"relpos": (0, 0.5)},
        )  # fmt: skip


def shorten_names(names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return short names, without the words that all names have at the same place, and these words.

    The first word stays, and "seed" with its number is one word.

    Examples:
        >>> shorten_names(["softmax:4 demo seed 0", "smgk:2 demo seed 0"])
        ({'softmax:4 demo seed 0': 'softmax:4', 'smgk:2 demo seed 0': 'smgk:2'}, 'demo seed 0')
    """
    words = {name: re.findall(r"seed \S+|\S+", name) for name in names}
    shortest = min(map(len, words.values()), default=0)
    shared = [n for n in range(1, shortest) if len(words) > 1 and len({of_name[n] for of_name in words.values()}) == 1]
    short = {
        name: " ".join(word for n, word in enumerate(of_name) if n not in shared) for name, of_name in words.items()
    }
    return short, " ".join(next(iter(words.values()))[n] for n in shared)


def save_png(figure: Any, path: Path, dpi: int, metadata: Mapping[str, str | None] | None = None) -> None:
    """Write a figure as a PNG file of 256 colours, which is a third of the size of one with all colours.

    Args:
        figure: Matplotlib figure.
        path: The file.
        dpi: Dots per inch.
        metadata: Text fields of the file.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi)
    fields = PngInfo()
    for name, text in (metadata or {}).items():
        if text is not None:
            fields.add_text(name, text)
    with Image.open(content) as image:
        pixels = np.asarray(image.convert("RGB")).astype(np.int64) @ (1 << 16, 1 << 8, 1)
    values, indices, counts = np.unique(pixels, return_inverse=True, return_counts=True)
    colours = np.stack([values >> 16, values >> 8 & 255, values & 255], -1)
    kept, nearest = _reduce_colours(colours, counts)
    reduced = Image.fromarray(nearest[indices].reshape(pixels.shape).astype(np.uint8), "P")
    reduced.putpalette(kept.astype(np.uint8).tobytes())
    with replacing(path) as temporary:
        reduced.save(temporary, format="png", optimize=True, pnginfo=fields)


def _reduce_colours(colours: Any, counts: Any) -> tuple[Any, Any]:
    """Return at most 256 of the colours, and for each colour the index of the nearest of them.

    The most frequent colour is followed by those with the largest squared errors, summed over their pixels. The colours
    of lines and surfaces stay exact; those at the edges of letters change a little.
    """
    chosen = [int(counts.argmax())]
    errors = np.square(colours - colours[chosen[0]]).sum(-1)
    nearest = np.zeros(len(colours), dtype=np.int64)
    while errors.any() and len(chosen) < 256:
        chosen.append(int((errors * counts).argmax()))
        new_errors = np.square(colours - colours[chosen[-1]]).sum(-1)
        nearest[new_errors < errors] = len(chosen) - 1
        errors = np.minimum(errors, new_errors)
    return colours[chosen], nearest
