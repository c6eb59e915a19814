"""mgk analyze."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgk._core.validation import fail, number, one_of, positive_integer
from mgk.cli.app import DataDir, app, check_output_directory, check_same_data, print_progress, resolve_data_dir

if TYPE_CHECKING:
    from mgk.analysis.capture import Progress
    from mgk.analysis.report.html import AnalyzedModel

# Longer sequences without a GPU: fewer matrices are ranked unless more are asked for.
LONG = 512
# More heads than these get smaller maps.
MANY = 48
# Seconds between two lines where there is no terminal.
LINE_EVERY = 10.0
# Samples that go through the model in one call while its heads are silenced one by one.
TOGETHER = 16


@app.command()
def analyze(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Directories of runs; several are shown side by side.")
    ] = None,
    hf: Annotated[
        str | None, typer.Option(help="A Transformers model instead: a directory, or a name on the hub.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="Text to run it on, or a file of text; may be repeated.")
    ] = None,
    ids: Annotated[Path | None, typer.Option(help="Token ids: .npy, or a text file with a sample a line.")] = None,
    images: Annotated[list[Path] | None, typer.Option(help="An image for a model of images; may be repeated.")] = None,
    split: Annotated[str, typer.Option(help="Of a run's own data, where nothing else is given.")] = "test",
    length: Annotated[int | None, typer.Option(help="Cut samples to so many tokens, and take none shorter.")] = None,
    matrices: Annotated[
        int | None, typer.Option(help="To rank in each layer; default 200, for long sequences on a CPU 8; paper: 1000.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="Singular values above it count for the rank.")] = 1e-6,
    memory: Annotated[float, typer.Option(help="GiB to work in, beside the model.")] = 2.0,
    map_size: Annotated[
        int | None,
        typer.Option(help="Pixels of a map, default 256 or 128; longer ones are pooled, and shown as tiles."),
    ] = None,
    removal: Annotated[int, typer.Option(min=0, help="Samples to try without each head; 0: leave it out.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the choice of samples.")] = 0,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Default: RUN/analysis, or analysis/MODEL.")] = None,
) -> None:
    """Are my heads redundant, and what would fewer cost? Ranks, redundancy, maps, mixtures, costs: one HTML report."""
    if bool(runs) == (hf is not None):
        raise ValueError("give the directory of one or more runs, or --hf MODEL")
    if length is not None:
        positive_integer("--length", length)
    if matrices is not None:
        positive_integer("--matrices", matrices)
    if map_size is not None:
        positive_integer("--map-size", map_size)
    number("--memory", memory, 0, above=True)
    number("--threshold", threshold, 0, above=True)
    number("--seed", seed, 0)
    from mgk.analysis.report.curves import read_curves
    from mgk.analysis.report.figures import draw_all
    from mgk.analysis.report.html import write_report
    from mgk.analysis.report.tables import write_tables

    directory = out or (runs[0] / "analysis" if runs else Path("analysis") / Path(hf or "").name)
    check_output_directory("--out", directory)
    settings: dict[str, Any] = {"threshold": threshold, "memory": int(memory * 2**30), "removal": removal}
    if sum(map(bool, (text, ids, images))) > 1:
        raise ValueError("give one of --text, --ids and --images")
    texts = [_read(part) for part in text or []]
    given = _Given(texts, ids, images or [], length, split, seed, data_dir, map_size)
    with _bar() as tell:
        if hf is not None:
            subjects = [_transformers(hf, given, matrices, settings, _tiles(directory, Path(hf).name), tell)]
        else:
            subjects = [
                _run(run, given, matrices, settings, _tiles(directory, f"{n + 1}-{run.resolve().name}"), tell)
                for n, run in enumerate(runs or [])
            ]
            subjects = _named_apart(subjects, runs or [])
        curves = [
            curve
            for run, subject in zip(runs or [], subjects, strict=False)
            for curve in read_curves(run, subject.name)
        ]
        tell("writing", 0, 1)
        analyses = {subject.name: subject.analysis for subject in subjects}
        costs = {subject.name: subject.costs for subject in subjects}
        files = draw_all(directory, analyses, curves) + write_tables(directory, analyses, costs, curves)
        command = shlex.join(["mgk", *sys.argv[1:]])
        write_report(directory / "report.html", subjects, curves, sorted(files), command)
        tell("writing", 1, 1)
    _say(subjects)
    print(f"report: {directory / 'report.html'}   figures and numbers: {directory}")


@dataclass(frozen=True)
class _Given:
    """What the user gives a model to look at, and how to show it."""

    texts: list[str]
    ids: Path | None
    images: list[Path]
    length: int | None
    split: str
    seed: int
    data: Path | None
    map_size: int | None


def _read(text: str) -> str:
    """A file's text, if it names one."""
    try:
        if Path(text).is_file():
            return Path(text).read_text(encoding="utf-8")
    except OSError:
        # Too long for the name of a file.
        return text
    except UnicodeDecodeError as error:
        raise ValueError(f"--text: {text} is no UTF-8 text") from error
    if Path(text).suffix and not any(character.isspace() for character in text):
        raise ValueError(f"--text: there is no file {text}")
    return text


def _tiles(out: Path, name: str) -> Path:
    """Where the tiles of a model's maps go; those of an earlier analysis are removed."""
    folder = out / "maps" / name
    for old in folder.glob("layer*-head*-*.png"):
        old.unlink()
    return folder


def _named_apart(subjects: list[AnalyzedModel], runs: list[Path]) -> list[AnalyzedModel]:
    """Runs that have the same row, recipe and seed are called by their directories too."""
    names = [subject.name for subject in subjects]
    return [
        subject if names.count(subject.name) == 1 else dataclasses.replace(subject, name=f"{subject.name} ({run})")
        for subject, run in zip(subjects, runs, strict=True)
    ]


def _map_size(asked: int | None, config: Any) -> int:
    """Smaller where there are many heads, so that the page stays small."""
    heads = getattr(config, "num_layers", 0) or getattr(config, "num_hidden_layers", 1)
    heads *= getattr(config, "num_heads", 0) or getattr(config, "num_attention_heads", 1)
    return asked or (256 if heads <= MANY else 128)


def _default_matrices(asked: int | None, longest: int, device: str) -> int:
    return asked or (200 if device == "cuda" or longest <= LONG else 8)


def _run(
    run: Path, given: _Given, matrices: int | None, settings: dict[str, Any], tiles: Path, tell: Progress
) -> AnalyzedModel:
    import torch

    from mgk import tasks
    from mgk.analysis import analyse
    from mgk.analysis import inputs as samples
    from mgk.analysis.report.html import AnalyzedModel
    from mgk.models.run_directory import RunDirectory
    from mgk.tasks.samples import sample_split, text_codec

    description = RunDirectory(run).read_description("recipe", "row", "seed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = RunDirectory(run).load_best_model(device)
    config: Any = model.config
    wanted = _default_matrices(matrices, given.length or config.max_length, device)
    if given.images:
        fail("--images", "goes with --hf")
    task = tasks.task(description["task"])
    codec = text_codec(task, run)
    if given.texts:
        found = samples.from_ids(model, samples.read_text(model, given.texts, given.length, codec), codec)
    elif given.ids is not None:
        found = samples.from_ids(model, samples.read_ids(given.ids, given.length), codec)
    else:
        one_of("--split", given.split, task.splits)
        where = resolve_data_dir(given.data, description)
        task.prepare(where, 1, print_progress)
        check_same_data(run, description, task, where)
        count = max(-(-wanted // config.num_heads), settings["removal"])
        split, words = task.split(where, given.split), f"{description['task']}, {given.split}"
        found = sample_split(model, split, words, count, given.length, given.seed, codec)
    inputs = samples.to_device(found.inputs, device)
    name = f"{description['row']} {description['recipe']} seed {description['seed']}"
    settings = {**settings, "tiles": tiles, "progress": tell, "map_size": _map_size(given.map_size, config)}
    analysis = analyse(model, inputs, matrices=wanted, together=TOGETHER, **settings)
    costs, own = _costs(config)
    return AnalyzedModel(name, found.about, analysis, found.tokens, costs, own, tiles=tiles)


def _costs(config: Any) -> tuple[list[Any], Any]:
    """What the model costs with other variants and fewer heads, and as it is; nothing where it cannot be counted."""
    from mgk.analysis.flops import ModelCost, count_costs, fewer_heads
    from mgk.training.evaluate import count_parameters, forward_flops
    from mgk.variants import VARIANTS

    def count(changed: Any, length: int) -> tuple[int, int]:
        return count_parameters(changed), forward_flops(changed, length)

    kinds = set(config.layer_variants)
    mixed = len(kinds) > 1
    linear = all(VARIANTS[kind].similarity == "linear" for kind in kinds)
    family = ("linear", "mlk", "smlk") if linear else ("softmax", "mgk", "smgk")
    variants = list(dict.fromkeys([*family, *(() if mixed else kinds)]))
    own = ModelCost(
        "mixed" if mixed else next(iter(kinds)), config.num_heads, config.max_length, *count(config, config.max_length)
    )
    return count_costs(config, variants, fewer_heads(config.num_heads), [config.max_length], count), own


def _transformers(
    name: str, given: _Given, matrices: int | None, settings: dict[str, Any], tiles: Path, tell: Progress
) -> AnalyzedModel:
    import torch

    try:
        import mgk.hf  # noqa: F401  (makes Transformers know our own models)
        from mgk.analysis import hf_models
    except ImportError as error:
        raise ValueError(
            f"--hf needs the extra 'hf' ({error.name} is missing): pip install '.[hf]' in mgk's folder"
        ) from error
    from mgk.analysis import analyse
    from mgk.analysis import inputs as samples
    from mgk.analysis.flops import per_head
    from mgk.analysis.report.html import AnalyzedModel

    # It would tell of each time that it tries a hub it cannot reach.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not (given.texts or given.ids or given.images):
        fail("--hf", "needs something to look at: --text, --ids or --images")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = hf_models.load(name, device)
    positions = getattr(model.config, "max_position_embeddings", None)
    length = min(x for x in (given.length, positions, 1 << 30) if x is not None)
    tokens: list[str] = []
    if given.texts:
        inputs, tokens = hf_models.from_text(name, given.texts, length, given.length or samples.MIN_LENGTH)
        about = "text"
    elif given.ids is not None:
        rows = [row[:length] for row in samples.read_ids(given.ids, given.length)]
        inputs, about = hf_models.from_ids(rows, model), f"token ids of {given.ids.name}"
        tokens = [str(i) for i in rows[0]]
    else:
        inputs, about = hf_models.from_images(given.images, name, model), f"{len(given.images)} images"
    longest = max((sample["input_ids"].shape[1] for sample in inputs if "input_ids" in sample), default=LONG)
    wanted = _default_matrices(matrices, longest, device)
    config = model.config.get_text_config()
    settings = {**settings, "tiles": tiles, "progress": tell, "map_size": _map_size(given.map_size, config)}
    inputs = samples.to_device(inputs, device)
    analysis = analyse(model, inputs, matrices=wanted, capture=hf_models.capture_attention, **settings)
    share = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) / config.num_attention_heads
    one = per_head(config.hidden_size, analysis.layers[0].head_dim, share, analysis.longest)
    return AnalyzedModel(Path(name).name, about, analysis, tokens, [], one_head=one, tiles=tiles)


@contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar on the terminal, one line a stage; elsewhere a plain line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        stages: dict[str, Any] = {}
        told, begun = time.monotonic(), ""

        def tell(stage: str, done: int, total: int) -> None:
            nonlocal told, begun
            # A stage that has had a line also has one for its end.
            due = time.monotonic() - told > LINE_EVERY or (stage == begun and done >= total)
            if not console.is_terminal and due:
                told, begun = time.monotonic(), stage if done < total else ""
                print(f"{stage}: {done:,} of {total:,}", file=sys.stderr, flush=True)
            # A second model goes through the same stages again.
            if stage not in stages or bar.tasks[stages[stage]].finished:
                stages[stage] = bar.add_task(stage, total=total)
            bar.update(stages[stage], completed=done, total=total)

        yield tell


def _say(subjects: list[AnalyzedModel]) -> None:
    from mgk.analysis.report import findings

    for subject in subjects:
        print(f"{subject.name}: {findings.headline(subject.analysis)}")
        for sentence in findings.sentences(subject.analysis, subject.costs, subject.cost, subject.one_head):
            print(f"  {sentence}")
