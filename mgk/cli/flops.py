"""mgk flops."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mgk._core.validation import fail, one_of
from mgk.cli.app import DataDir, Settings, app, check_output_directory, resolve_data_dir
from mgk.training import config as recipes
from mgk.variants import VARIANTS

if TYPE_CHECKING:
    from mgk.analysis.flops import ModelCost


class Series(NamedTuple):
    name: str
    variant: str
    half: bool = False  # half the heads that stand below it


# The figures of the paper that need no training: file, title and lines of each panel.
FIGURES: dict[int, dict[str, tuple[str, list[Series]]]] = {
    3: {
        "figure-3a": (
            "softmax against MGK with half the heads",
            [
                Series("softmax", "softmax"),
                Series("MGK, half the heads", "mgk", True),
                Series("sMGK, half", "smgk", True),
            ],
        ),
        "figure-3b": (
            "linear against MLK with half the heads",
            [
                Series("linear", "linear"),
                Series("MLK, half the heads", "mlk", True),
                Series("sMLK, half", "smlk", True),
            ],
        ),
    },
    7: {
        "figure-7": (
            "ways to learn a mixture",
            [
                Series("MGK", "mgk"),
                Series("sMGK", "smgk"),
                Series("MGK Hard-E", "mgk-hard"),
                Series("MGK Soft-E", "mgk-em"),
            ],
        )
    },
}


def _numbers(name: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        fail(name, f"must be positive integers with commas between, got {text!r}")
    return [int(part) for part in parts]


@app.command()
def flops(
    recipe: Annotated[str, typer.Argument(help="The recipe whose model is counted.")] = "retrieval-aan",
    variants: Annotated[str | None, typer.Option(help="softmax,smgk,…; default: all.")] = None,
    heads: Annotated[str, typer.Option(help="Numbers of heads, of the same width.")] = "1,2,4,8",
    lengths: Annotated[str | None, typer.Option(help="Tokens; default: the task's.")] = None,
    figure: Annotated[int | None, typer.Option(help="3 or 7: that figure of the paper, redrawn.")] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="A directory for flops.csv and the figures.")] = None,
) -> None:
    """Count parameters and forward FLOPs of every variant against heads and length.

    Needs no weights, and data only where the vocabulary is counted from it.
    """
    from rich.console import Console
    from rich.table import Table

    from mgk.analysis.flops import count_costs
    from mgk.analysis.report.tables import write_csv

    if figure is not None:
        one_of("--figure", str(figure), map(str, FIGURES))
    if out is not None:
        check_output_directory("--out", out)
    counts = _numbers("--heads", heads)
    given = list(VARIANTS) if variants is None else variants.split(",")
    names = [one_of("--variants", name.strip(), VARIANTS) for name in given]
    config = _config(recipe, settings or [], resolve_data_dir(data_dir))
    tokens = _numbers("--lengths", lengths) if lengths else [config.max_length]
    if figure is not None:
        for path in _draw(figure, config, counts, tokens[0], out or Path("."), recipe):
            print(path)
        return
    found = count_costs(config, names, counts, tokens, _count)
    shown = Table("variant", "heads", "length", "parameters", "GFLOPs of one forward", title=f"The model of {recipe}")
    for cost in found:
        cells = (cost.variant, str(cost.heads), f"{cost.length:,}", f"{cost.params:,}", f"{cost.flops / 1e9:.4f}")
        shown.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    if out is not None:
        rows = ((c.variant, c.heads, c.length, c.params, c.flops) for c in found)
        write_csv(out / "flops.csv", "variant heads length params flops", rows)
        print(out / "flops.csv")
        across = {"heads": counts, "length": tokens}
        for name in (name for name, values in across.items() if len(values) > 1):
            for path in _against(name, found, counts, tokens, out, recipe):
                print(path)


def _config(recipe: str, settings: list[str], data: Path) -> Any:
    from mgk import tasks
    from mgk.training.trainer import Run

    chosen = recipes.load_recipe(recipe).with_settings(settings)
    row = chosen.rows[0] if chosen.rows else recipes.ModelSpec("softmax", 8)
    task = tasks.task(chosen.task)
    return Run(chosen, row, "paper", 0, data, Path(".")).model_config(task)


def _count(config: Any, length: int) -> tuple[int, int]:
    from mgk.training.evaluate import count_parameters, forward_flops

    return count_parameters(config), forward_flops(config, length)


def _against(
    name: str, found: list[ModelCost], counts: list[int], tokens: list[int], out: Path, recipe: str
) -> list[Path]:
    """The table as a picture, with the other of heads and length at its largest."""
    from mgk.analysis.report.figures import draw_costs

    fixed, value = ("length", max(tokens)) if name == "heads" else ("heads", max(counts))
    lines: dict[str, list[tuple[int, ModelCost]]] = {}
    for cost in found:
        if getattr(cost, fixed) == value:
            lines.setdefault(cost.variant, []).append((getattr(cost, name), cost))
    title = f"{recipe}: {value:,} {'tokens' if fixed == 'length' else 'heads'}"
    return [out / file for file in draw_costs(lines, out, f"flops-{name}", title, name)]


def _draw(figure: int, config: Any, counts: list[int], length: int, out: Path, recipe: str) -> list[Path]:
    """A figure of the paper, at the paper's settings where the defaults are kept."""
    from mgk.analysis.flops import count_costs
    from mgk.analysis.report.figures import draw_costs

    paths = []
    for name, (title, lines) in FIGURES[figure].items():
        halved = any(line.half for line in lines)
        # One head has no half to stand against it.
        places = [count for count in sorted(counts) if count > 1 or not halved]
        found = {
            line.name: list(
                zip(
                    places,
                    count_costs(config, [line.variant], [p // 2 if line.half else p for p in places], [length], _count),
                    strict=True,
                )
            )
            for line in lines
        }
        label = "heads of the baseline" if halved else "heads"
        files = draw_costs(found, out, name, f"{recipe}, {length:,} tokens: {title}", label)
        paths += [out / file for file in files]
    return paths
