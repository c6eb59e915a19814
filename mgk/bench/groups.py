"""Groups of shapes of `mgk bench`, part `groups`: a group is summarized by the geometric mean of its ratios."""

from __future__ import annotations

from typing import NamedTuple

from mgk.bench.implementations import Shape


class Group(NamedTuple):
    """Shapes that are summarized together."""

    name: str
    shapes: tuple[Shape, ...]


def _group(name: str, shapes: str) -> Group:
    return Group(name, tuple(map(Shape.parse, shapes.split())))


GROUPS = (
    _group("training lengths", "16x16x1024x64xcausal 64x12x512x64 128x8x512x64xcausal 8x16x2048x128xcausal"),
    _group("short", "64x12x128x64"),
    _group("short, D 16", "96x8x256x16xcausal"),
    _group("long, D 64", "8x8x4096x64 8x8x4096x64xcausal 2x8x16384x64xcausal"),
    _group("long, D 128", "4x16x4096x128 4x16x4096x128xcausal 2x16x16384x128xcausal"),
    _group("D 32", "32x8x2048x32 32x8x4096x32"),
    _group("D 80 and 96", "4x12x3000x80xcausal 2x16x8192x96xcausal"),
    _group("D 256", "2x8x4096x256xcausal"),
)
SHAPES = tuple(shape for group in GROUPS for shape in group.shapes)
