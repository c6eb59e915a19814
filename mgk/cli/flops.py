"""mgk flops."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mgk._core.validation import fail, one_of
from mgk.cli.app import DataDir, Settings, app, check_output_directory, resolve_data_dir
from mgk.cli.help_texts import epilog
from mgk.training.config import ModelSpec, load_recipe
from mgk.variants import VARIANTS

if TYPE_CHECKING:
    from mgk.analysis.flops import ModelCost


class Series(NamedTuple):
    """One line in a figure."""

    name: str
    variant: str
    half: bool = False  # whether the model has half the heads of the x axis


# Figures of the paper that need no training: file name, title and lines of each panel.
FIGURES: dict[int, dict[str, tuple[str, list[Series]]]] = {
    3: {
        "figure-3a": (
            "softmax, and mixtures with half the heads",
            [
                Series("softmax", "softmax"),
                Series("MGK, half the heads", "mgk", True),
                Series("softmax, half the heads", "softmax", True),
                Series("sMGK, half the heads", "smgk", True),
            ],
        ),
        "figure-3b": (
            "linear attention, and mixtures with half the heads",
            [
                Series("linear", "linear"),
                Series("MLK, half the heads", "mlk", True),
                Series("linear, half the heads", "linear", True),
                Series("sMLK, half the heads", "smlk", True),
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


def _parse_counts(option: str, text: str) -> list[int]:
    parts = text.split(",")
    # At most 18 digits: int() also accepts digits of other scripts, and any number of them.
    if not all(re.fullmatch("0*[1-9][0-9]{0,17}", part.strip()) for part in parts):
        fail(option, f"must be positive integers separated by commas, got {text!r}")
    return [int(part) for part in parts]


@app.command(epilog=epilog("flops", settings=True))
def flops(
    recipe: Annotated[str, typer.Argument(help="Recipe that defines the model.")] = "retrieval-aan",
    variants: Annotated[
        str | None, typer.Option(help="Variants, separated by commas: softmax,smgk; default: all.")
    ] = None,
    heads: Annotated[str, typer.Option(help="Numbers of heads, separated by commas; the width is fixed.")] = "1,2,4,8",
    lengths: Annotated[
        str | None, typer.Option(help="Sequence lengths, separated by commas; default: the task's.")
    ] = None,
    figure: Annotated[int | None, typer.Option(help="Draw Figure 3 or 7 of the paper instead of a table.")] = None,
    settings: Settings = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Directory for flops.csv and the figures.")] = None,
) -> None:
    """Count the parameters and forward FLOPs of variants for several numbers of heads and lengths.

    No weights are needed; data is needed only if the vocabulary size depends on it.
    """
    from rich.console import Console
    from rich.table import Table

    from mgk.analysis.flops import count_costs
    from mgk.analysis.report.tables import write_csv
    from mgk.training.evaluate import parameters_and_flops

    if figure is not None:
        one_of("--figure", str(figure), map(str, FIGURES))
    if out is not None:
        check_output_directory("--out", out)
    head_counts = _parse_counts("--heads", heads)
    requested = list(VARIANTS) if variants is None else variants.split(",")
    names = [one_of("--variants", name.strip(), VARIANTS) for name in requested]
    config = _model_config(recipe, settings or [], resolve_data_dir(data_dir))
    token_counts = _parse_counts("--lengths", lengths) if lengths else [config.max_length]
    if figure is not None:
        for path in _draw_paper_figure(figure, config, head_counts, token_counts[0], out or Path("."), recipe):
            print(path)
        return
    costs = count_costs(config, names, head_counts, token_counts, parameters_and_flops)
    table = Table("variant", "heads", "length", "parameters", "GFLOPs per forward pass", title=f"Model of {recipe}")
    for cost in costs:
        cells = (cost.variant, str(cost.heads), f"{cost.length:,}", f"{cost.params:,}", f"{cost.flops / 1e9:.4f}")
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if out is not None:
        rows = ((cost.variant, cost.heads, cost.length, cost.params, cost.flops) for cost in costs)
        write_csv(out / "flops.csv", "variant heads length params flops", rows)
        print(out / "flops.csv")
        axes = {"heads": head_counts, "length": token_counts}
        for axis in (name for name, values in axes.items() if len(values) > 1):
            for path in _draw_costs(axis, costs, head_counts, token_counts, out, recipe):
                print(path)


def _model_config(recipe: str, settings: list[str], data: Path) -> Any:
    from mgk import tasks
    from mgk.training.trainer import Run

    loaded = load_recipe(recipe).with_settings(settings)
    row = loaded.rows[0] if loaded.rows else ModelSpec("softmax", 8)
    return Run(loaded, row, "paper", 0, data, Path(".")).model_config(tasks.get_task(loaded.task))


def _draw_costs(
    axis: str, costs: list[ModelCost], head_counts: list[int], token_counts: list[int], out: Path, recipe: str
) -> list[Path]:
    """Plot the costs against heads or length, with the other one at its maximum."""
    from mgk.analysis.report.figures import draw_costs

    fixed, value = ("length", max(token_counts)) if axis == "heads" else ("heads", max(head_counts))
    curves: dict[str, list[tuple[int, ModelCost]]] = {}
    for cost in costs:
        if getattr(cost, fixed) == value:
            curves.setdefault(cost.variant, []).append((getattr(cost, axis), cost))
    title = f"{recipe}: {value:,} {'tokens' if fixed == 'length' else 'heads'}"
    return [out / file for file in draw_costs(curves, out, f"flops-{axis}", title, axis)]


def _draw_paper_figure(
    figure: int, config: Any, head_counts: list[int], length: int, out: Path, recipe: str
) -> list[Path]:
    """Draw a figure of the paper; the defaults of the options are the paper's settings."""
    from mgk.analysis.flops import count_costs
    from mgk.analysis.report.figures import draw_costs
    from mgk.training.evaluate import parameters_and_flops

    paths = []
    for name, (title, series) in FIGURES[figure].items():
        has_half = any(line.half for line in series)
        # A model with one head has no counterpart with half the heads.
        x = [count for count in sorted(head_counts) if count > 1 or not has_half]
        curves = {}
        for line in series:
            line_heads = [count // 2 if line.half else count for count in x]
            costs = count_costs(config, [line.variant], line_heads, [length], parameters_and_flops)
            curves[line.name] = list(zip(x, costs, strict=True))
        label = "heads of the baseline" if has_half else "heads"
        files = draw_costs(curves, out, name, f"{recipe}, {length:,} tokens: {title}", label)
        paths += [out / file for file in files]
    return paths
