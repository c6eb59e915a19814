"""Draw docs/figures/mixture-key.svg, the picture of a mixture key: python docs/figures/mixture_key.py."""

from __future__ import annotations

import math
from pathlib import Path

from mgk._core.palette import COLOURS

WIDTH, HEIGHT = 880, 372
INK, QUIET, BLUE = "#1f2328", "#59636e", "#0969da"
SIGMA = 40.0  # standard deviation of a key, in pixels
QUERIES = {"q₁": (-86.0, -2.0), "q₂": (88.0, 6.0)}  # relative to the centre of a panel
NUMBERS = "Numbers and widths of the lines: the weight of the key for the query, before normalisation."
CAPTION = "sMGK stores one key k and one value per token, as softmax does. The shifts bᵣ and priors πᵣ are learned."
Point = tuple[float, float]


def text(
    x: float, y: float, content: str, size: int = 15, colour: str = INK, anchor: str = "middle", **style: str
) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{extra}>{content}</text>'
    )


def rings(x: float, y: float, colour: str) -> list[str]:
    """Return a Gaussian as rings of one, two and three thirds of 1.6 standard deviations."""
    radii = [1.6 * SIGMA * share for share in (1, 2 / 3, 1 / 3)]
    return [f'<circle cx="{x:g}" cy="{y:g}" r="{r:.1f}" fill="{colour}" fill-opacity="0.13"/>' for r in radii]


def dot(x: float, y: float, colour: str, radius: float = 5) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{colour}"/>'


def similarity(query: Point, centres: list[Point]) -> float:
    """Return exp(score): the mean over the centres of exp(−‖q − k‖²/2σ²), the weight of a key before normalisation."""
    squares = [(query[0] - x) ** 2 + (query[1] - y) ** 2 for x, y in centres]
    return sum(math.exp(-square / (2 * SIGMA**2)) for square in squares) / len(centres)


def panel(x: float, y: float, title: str, subtitle: str, centres: list[Point], colour: str) -> list[str]:
    """Return one key with its centres, and the similarity of two queries with it."""
    parts = [text(x, 34, title, 18, font_weight="600"), text(x, 58, subtitle, 14, QUIET)]
    for dx, dy in centres:
        parts += rings(x + dx, y + dy, colour)
    for name, (dx, dy) in QUERIES.items():
        score = similarity((dx, dy), centres)
        nearest = min(centres, key=lambda centre: math.dist(centre, (dx, dy)))
        line = f'x1="{x + dx:g}" y1="{y + dy:g}" x2="{x + nearest[0]:g}" y2="{y + nearest[1]:g}"'
        parts.append(f'<line {line} stroke="{BLUE}" stroke-width="{1 + 6 * score:.1f}" stroke-opacity="0.55"/>')
        parts += [dot(x + dx, y + dy, BLUE, 6)]
        side = -1 if dx < 0 else 1
        parts.append(
            text(x + dx + 14 * side, y + dy + 5, name, 16, BLUE, "end" if side < 0 else "start", font_weight="600")
        )
        parts.append(text(x + dx + 40 * side, y + dy + 5, f"{score:.2f}", 14, BLUE, "end" if side < 0 else "start"))
    if len(centres) > 1:
        for (dx, dy), label in zip(centres, ("k + b₁", "k + b₂"), strict=True):
            line = f'x1="{x:g}" y1="{y:g}" x2="{x + dx:g}" y2="{y + dy:g}"'
            parts.append(f'<line {line} stroke="{colour}" stroke-width="1.5" stroke-dasharray="4 3"/>')
            parts += [dot(x + dx, y + dy, colour), text(x + dx, y + dy + (26 if dy > 0 else -16), label, 14, colour)]
    parts += [dot(x, y, INK, 4), text(x + 10, y - 8, "k", 15, INK, "start", font_style="italic")]
    return parts


def picture() -> str:
    parts = [
        *panel(
            220, 163, "Softmax key: one centre", "a query far from it gets little weight", [(0, 0)], COLOURS["softmax"],
        ),
        *panel(
            660, 163, "Mixture key: several centres", "a query near any of them attends", [(-52, -28), (54, 28)],
            COLOURS["smgk"],
        ),
        '<line x1="440" y1="24" x2="440" y2="306" stroke="#d1d9e0"/>',
        text(220, 278, "score = q · k / σ²", 15, QUIET, font_style="italic"),
        text(220, 300, "for keys of equal norm equivalent to −‖q − k‖² / 2σ²", 14, QUIET),
        text(660, 278, "score = log Σᵣ πᵣ exp(−‖q − k − bᵣ‖² / 2σ²)", 15, QUIET, font_style="italic"),
        text(440, 334, NUMBERS, 14, BLUE),
        text(440, 356, CAPTION, 14),
    ]  # fmt: skip
    font = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{font}">'
    # A card of its own colour: the picture is legible on light and on dark pages.
    card = f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10" fill="#ffffff" stroke="#d1d9e0"/>'
    title = "<title>A softmax key has one centre, a mixture key has several</title>"
    return "\n".join([head, title, card, *parts, "</svg>", ""])


if __name__ == "__main__":
    (Path(__file__).parent / "mixture-key.svg").write_text(picture(), encoding="utf-8")
