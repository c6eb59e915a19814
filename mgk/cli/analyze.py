"""mgk analyze."""

from __future__ import annotations

import dataclasses
import errno
import os
import shlex
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mgk._core.integers import ceil_div
from mgk._core.validation import fail, number, one_of, positive_integer
from mgk.cli.advice import advise_run, advise_transformers
from mgk.cli.app import (
    RunDataDir,
    app,
    check_bounds,
    check_output_directory,
    check_same_data,
    import_hf,
    resolve_data_dir,
)
from mgk.cli.help_texts import epilog
from mgk.cli.progress import print_progress, progress_bar

if TYPE_CHECKING:
    from mgk._core.progress import Progress
    from mgk.analysis.report.html import AnalyzedModel

# Sequence length above which fewer matrices are ranked by default without a GPU.
LONG = 512
# Number of heads above which attention maps are smaller by default.
MANY_HEADS = 48
# Limit of the numbers of samples, which are drawn before the analysis.
MAX_SAMPLES = 1_000_000
# Samples per batch while heads are ablated one by one.
ABLATION_BATCH = 16


@app.command(epilog=epilog("analyze"))
def analyze(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories; the report shows several side by side.")
    ] = None,
    hf: Annotated[
        str | None, typer.Option(help="Transformers model to analyze instead: a directory or a name on the Hub.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the repository of --hf, if it has any.")
    ] = False,
    text: Annotated[list[str] | None, typer.Option(help="Input text, or a text file; may be repeated.")] = None,
    ids: Annotated[
        Path | None, typer.Option(help="Input token ids: a .npy file, or a text file with one sample per line.")
    ] = None,
    images: Annotated[list[Path] | None, typer.Option(help="Input image of a vision model; may be repeated.")] = None,
    split: Annotated[str, typer.Option(help="Split of the run's data, if no other input is given.")] = "test",
    length: Annotated[
        int | None, typer.Option(help="Truncate samples to this number of tokens and skip shorter ones.")
    ] = None,
    matrices: Annotated[
        int | None,
        typer.Option(
            help="Attention matrices to rank per layer; default: 200, or 8 for long sequences on a CPU. "
            "The paper uses 1000."
        ),
    ] = None,
    threshold: Annotated[float, typer.Option(help="The rank is the number of singular values above this.")] = 1e-6,
    memory: Annotated[float, typer.Option(help="Working memory in GiB, besides the model.")] = 2.0,
    map_size: Annotated[
        int | None,
        typer.Option(
            help="Maximum pixels per side of a map; default: 256, or 128 with many heads. "
            "Longer maps are pooled and also written as tiles."
        ),
    ] = None,
    removal: Annotated[
        int,
        typer.Option(
            callback=check_bounds("--removal", 0, MAX_SAMPLES),
            help="Samples on which to ablate each head; 0 skips the ablation.",
        ),
    ] = 64,
    seed: Annotated[int, typer.Option(help="Seed for selecting samples.")] = 0,
    data_dir: RunDataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="Output directory; default: RUN/analysis, or analysis/MODEL with --hf.")
    ] = None,
) -> None:
    """Analyze the attention heads of models: ranks, redundancy, maps, mixtures and costs.

    Writes an HTML report with figures and tables.
    """
    if bool(runs) == (hf is not None):
        raise ValueError("give one or more run directories, or --hf MODEL")
    if trust_remote_code and hf is None:
        fail("--trust-remote-code", "requires --hf")
    for option, value in (("--length", length), ("--matrices", matrices), ("--map-size", map_size)):
        if value is not None:
            positive_integer(option, value)
    if matrices is not None and matrices > MAX_SAMPLES:
        fail("--matrices", f"must be at most {MAX_SAMPLES:,}, got {matrices}")
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
        raise ValueError("give only one of --text, --ids and --images")
    texts = [_read_text(value) for value in text or []]
    options = _InputOptions(
        texts=texts,
        text_files=[value for value, content in zip(text or [], texts, strict=True) if value != content],
        ids=ids,
        images=images or [],
        length=length,
        split=split,
        seed=seed,
        data_dir=data_dir,
        matrices=matrices,
        map_size=map_size,
        trust_remote_code=trust_remote_code,
    )
    with progress_bar() as progress:
        if hf is not None:
            tiles = _tile_directory(directory, Path(hf).name)
            models = [_analyze_transformers_model(hf, options, settings, tiles, progress)]
        else:
            models = []
            for n, run in enumerate(runs or []):
                tiles = _tile_directory(directory, f"{n + 1}-{run.resolve().name}")
                models.append(_analyze_run(run, options, settings, tiles, progress))
            models = _make_names_unique(models, runs or [])
        curves = [
            curve for run, model in zip(runs or [], models, strict=False) for curve in read_curves(run, model.name)
        ]
        progress("writing", 0, 1)
        analyses = {model.name: model.analysis for model in models}
        costs = {model.name: model.costs for model in models}
        # Tables first: they hold the results if a figure fails.
        files = write_tables(directory, analyses, costs, curves)
        files += draw_all(directory, analyses, curves, {model.name: model.variant for model in models})
        command = shlex.join(["mgk", *sys.argv[1:]])
        write_report(directory / "report.html", models, curves, sorted(files), command)
        progress("writing", 1, 1)
    _print_findings(models)
    print(f"report: {directory / 'report.html'}   figures and tables: {directory}")


@dataclass(frozen=True)
class _InputOptions:
    """Command-line options that select the inputs and the size of the analysis."""

    texts: list[str]  # contents of --text
    text_files: list[str]  # values of --text that name a file
    ids: Path | None
    images: list[Path]
    length: int | None
    split: str
    seed: int
    data_dir: Path | None
    matrices: int | None
    map_size: int | None
    trust_remote_code: bool

    def resolve_matrices(self, length: int, device: str) -> int:
        """Return --matrices, or its default for sequences of this length."""
        return self.matrices or (200 if device == "cuda" or length <= LONG else 8)

    def resolve_map_size(self, config: Any) -> int:
        """Return --map-size, or its default, which is smaller for models with many heads to bound the report's size."""
        heads = getattr(config, "num_layers", 0) or getattr(config, "num_hidden_layers", 1)
        heads *= getattr(config, "num_heads", 0) or getattr(config, "num_attention_heads", 1)
        return self.map_size or (256 if heads <= MANY_HEADS else 128)


def _read_text(text: str) -> str:
    """Return the contents of the file `text`, or `text` itself if it does not name a file."""
    try:
        # os.path.isfile and Path.is_file hide some errors.
        if stat.S_ISREG(os.stat(text).st_mode):
            return Path(text).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.EINVAL):
            return text
        raise ValueError(f"--text: {text} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--text: {text} is not UTF-8 text") from error
    except ValueError:
        # A null byte: no path has one.
        return text
    if Path(text).suffix and not any(character.isspace() for character in text):
        raise ValueError(f"--text: {text} does not exist")
    return text


def _tile_directory(out: Path, name: str) -> Path:
    """Return the directory for the tiles of a model's maps, after deleting those of an earlier analysis."""
    directory = out / "maps" / name
    for tile in directory.glob("layer*-head*-*.png"):
        tile.unlink()
    return directory


def _make_names_unique(models: list[AnalyzedModel], runs: list[Path]) -> list[AnalyzedModel]:
    """Add the run directory to the names of models with the same spec, recipe and seed."""
    names = [model.name for model in models]
    return [
        model if names.count(model.name) == 1 else dataclasses.replace(model, name=f"{model.name} ({run})")
        for model, run in zip(models, runs, strict=True)
    ]


def _analyze_run(
    run: Path, options: _InputOptions, settings: dict[str, Any], tiles: Path, progress: Progress
) -> AnalyzedModel:
    import torch

    from mgk.analysis import analyse
    from mgk.analysis.inputs import from_ids, read_ids, read_text, to_device
    from mgk.analysis.report.html import AnalyzedModel
    from mgk.models.run_directory import RunDirectory
    from mgk.tasks.analysis_samples import sample_split, text_codec
    from mgk.training.runs import task_of_run

    description = RunDirectory(run).read_description("recipe", "row", "seed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = RunDirectory(run).load_best_model(device)
    config: Any = model.config
    matrices = options.resolve_matrices(options.length or config.max_length, device)
    if options.images:
        fail("--images", "requires --hf")
    task = task_of_run(RunDirectory(run))
    codec = text_codec(task, run, getattr(config, "vocab_size", 0))  # vision models have no vocabulary
    if options.texts:
        sampled = from_ids(model, read_text(model, options.texts, options.length, codec), codec)
    elif options.ids is not None:
        sampled = from_ids(model, read_ids(options.ids, options.length), codec)
    else:
        one_of("--split", options.split, task.splits)
        data = resolve_data_dir(options.data_dir, description)
        task.prepare(data, 1, print_progress)
        check_same_data(run, description, task, data)
        count = max(ceil_div(matrices, config.num_heads), settings["removal"])
        title = f"{description['task']}, {options.split}"
        split = task.split(data, options.split)
        sampled = sample_split(model, split, title, count, options.length, options.seed, codec)
    inputs = to_device(sampled.inputs, device)
    name = f"{description['row']} {description['recipe']} seed {description['seed']}"
    settings = {**settings, "tiles": tiles, "progress": progress, "map_size": options.resolve_map_size(config)}
    analysis = analyse(model, inputs, matrices=matrices, together=ABLATION_BATCH, **settings)
    costs, own_cost = _count_costs(config)
    advice = advise_run(analysis, str(description["recipe"]), str(description["row"]))
    return AnalyzedModel(
        name, sampled.about, analysis, sampled.tokens, costs, own_cost, tiles=tiles, advice=advice,
        variant=str(description["row"]).partition(":")[0],
    )  # fmt: skip


def _count_costs(config: Any) -> tuple[list[Any], Any]:
    """Count the costs of the model with other variants and fewer heads, and of the model itself."""
    from mgk.analysis.flops import ModelCost, count_costs, fewer_heads
    from mgk.training.evaluate import parameters_and_flops
    from mgk.variants import VARIANTS

    kinds = set(config.layer_variants)
    is_mixed = len(kinds) > 1
    is_linear = all(VARIANTS[kind].similarity == "linear" for kind in kinds)
    family = ("linear", "mlk", "smlk") if is_linear else ("softmax", "mgk", "smgk")
    variants = list(dict.fromkeys([*family, *(() if is_mixed else kinds)]))
    variant = "mixed" if is_mixed else next(iter(kinds))
    length = config.max_length
    own_cost = ModelCost(variant, config.num_heads, length, *parameters_and_flops(config, length))
    return count_costs(config, variants, fewer_heads(config.num_heads), [length], parameters_and_flops), own_cost


def _analyze_transformers_model(
    name: str, options: _InputOptions, settings: dict[str, Any], tiles: Path, progress: Progress
) -> AnalyzedModel:
    import torch

    import_hf("--hf")
    from mgk.analysis import analyse, hf_models
    from mgk.analysis.flops import estimate_head_cost
    from mgk.analysis.inputs import MIN_LENGTH, read_ids, to_device
    from mgk.analysis.report.html import AnalyzedModel
    from mgk.hf.upcycling.fidelity import max_positions

    if not (options.texts or options.ids or options.images):
        fail("--hf", "requires an input: --text, --ids or --images")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trust = {"trust_remote_code": options.trust_remote_code}
    model = hf_models.load(name, device, **trust)
    length = min(limit for limit in (options.length, max_positions(model), 1 << 30) if limit is not None)
    tokens: list[str] = []
    if options.texts:
        min_length = options.length or MIN_LENGTH
        inputs, tokens = hf_models.from_text(name, options.texts, length, min_length, **trust)
        title = "text"
    elif options.ids is not None:
        rows = [row[:length] for row in read_ids(options.ids, options.length)]
        inputs, title = hf_models.from_ids(rows, model), f"token ids of {options.ids.name}"
        tokens = [str(token) for token in rows[0]]
    else:
        inputs, title = hf_models.from_images(options.images, name, model, **trust), f"{len(options.images)} images"
    longest = max((sample["input_ids"].shape[1] for sample in inputs if "input_ids" in sample), default=LONG)
    matrices = options.resolve_matrices(longest, device)
    config = model.config.get_text_config()
    settings = {**settings, "tiles": tiles, "progress": progress, "map_size": options.resolve_map_size(config)}
    inputs = to_device(inputs, device)
    analysis = analyse(model, inputs, matrices=matrices, capture=hf_models.capture_attention, **settings)
    layers = analysis.layers  # a merged model has other numbers of heads than its configuration
    kv_share = sum(layer.key_heads + layer.value_heads for layer in layers) / sum(2 * layer.heads for layer in layers)
    head_cost = estimate_head_cost(config.hidden_size, layers[0].head_dim, kv_share, analysis.longest)
    reason, keys_are_fixed = hf_models.check_mergeable(model, inputs[0])
    advice = advise_transformers(
        analysis, name, options.text_files, reason,
        keys_are_fixed=keys_are_fixed, is_trusted=options.trust_remote_code,
    )  # fmt: skip
    return AnalyzedModel(
        Path(name).name, title, analysis, tokens, [], one_head=head_cost, tiles=tiles, advice=advice,
        variant=hf_models.variant_of(model.config),
    )  # fmt: skip


def _print_findings(models: list[AnalyzedModel]) -> None:
    from mgk.analysis.report.findings import sentences
    from mgk.analysis.report.verdicts import headline

    for model in models:
        print(f"{model.name}: {headline(model.analysis)}")
        for sentence in sentences(model.analysis, model.costs, model.cost, model.one_head):
            print(f"  {sentence}")
        if model.advice is not None:
            print(f"  {model.advice.sentence}")
            if model.advice.command:
                print(f"    {model.advice.command}")
