"""Groups of shapes with speed targets: part `groups` of `mgk bench`.

A ratio is the time of an operator over that of the best SDPA with H heads, forward and with all gradients. Targets are
for the geometric mean of a group.
"""

from __future__ import annotations

from typing import NamedTuple

from mgk.bench.implementations import Shape

Pair = tuple[float, float]  # forward, forward + backward


class Group(NamedTuple):
    """Shapes with common targets, for half the heads and, with gradients, for equal heads."""

    name: str
    shapes: tuple[Shape, ...]
    smgk_needed: Pair
    smgk_aim: Pair | None
    mgk_needed: Pair
    equal_needed: float | None = None  # sMGK with H heads, with gradients
    equal_aim: float | None = None


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(map(Shape.parse, text.split()))


EQUAL = (1.30, 1.15)
GROUPS = (
    Group(
        "training lengths", _shapes("16x16x1024x64xcausal 64x12x512x64 128x8x512x64xcausal 8x16x2048x128xcausal"),
        (0.65, 0.70), (0.55, 0.60), (0.95, 0.95), *EQUAL,
    ),
    Group("short", _shapes("64x12x128x64"), (0.90, 0.80), (0.80, 0.70), (1.05, 0.95)),
    Group("short, D 16", _shapes("96x8x256x16xcausal"), (0.65, 0.55), None, (1.05, 0.95)),
    Group(
        "long, D 64", _shapes("8x8x4096x64 8x8x4096x64xcausal 2x8x16384x64xcausal"),
        (0.58, 0.65), (0.53, 0.57), (0.85, 0.95), *EQUAL,
    ),
    Group(
        "long, D 128", _shapes("4x16x4096x128 4x16x4096x128xcausal 2x16x16384x128xcausal"),
        (0.62, 0.68), (0.53, 0.57), (0.90, 1.00), *EQUAL,
    ),
    Group("D 32", _shapes("32x8x2048x32 32x8x4096x32"), (0.48, 0.57), (0.46, 0.52), (0.73, 0.80)),
    Group("D 80 and 96", _shapes("4x12x3000x80xcausal 2x16x8192x96xcausal"), (0.68, 0.74), None, (1.0, 1.05)),
    Group("D 256", _shapes("2x8x4096x256xcausal"), (0.80, 0.85), None, (1.1, 1.2)),
)  # fmt: skip
SHAPES = tuple(shape for group in GROUPS for shape in group.shapes)
# No shape may exceed the target of its group by more than this factor.
MAX_EXCESS = 1.15
