"""Time the decoders of the study: python -m experiments.cost_quality.decoding --runs runs.

For each model and each length: prefill in tokens per second, decoding in tokens per second with that
many tokens in the cache, and the bytes of the cache. One sequence, bf16 on a GPU, with the decoding step captured as a
CUDA graph; fp32 on a CPU. Speed and cache do not depend on the weights: a model without a finished run has random ones,
and the column `weights` of the results is then "random". Results are appended to RESULTS/cost-quality-decoding.csv.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments.cost_quality.plan import PLAN, PRESET, Arm, Plan, is_language_model, load_plan
from experiments.result_rows import Rows, model_of
from mgk import tasks
from mgk._core.markdown import markdown_table
from mgk._core.validation import fail
from mgk.cli import run_app
from mgk.cli.app import check_output_directory
from mgk.models import LanguageModel
from mgk.models.generation import DecodingStep
from mgk.models.run_directory import RunDirectory
from mgk.training import results
from mgk.training.config import load_recipe
from mgk.training.objectives import LanguageModelling
from mgk.training.runs import finished_runs
from mgk.variants import VARIANTS

RECIPE = "cost-quality-decoding"
PREFILL, DECODE, CACHE = "prefill_tokens_per_second", "decode_tokens_per_second", "cache_bytes"
LENGTHS = "1024,8192,32768"
EXTRA_COLUMNS = ("weights",)
TRAINED, RANDOM = "trained", "random"
MAX_BYTES = 256  # vocabulary of a model of bytes
CHUNK = 4096  # tokens of a prompt per forward pass
STEPS = 32  # decoded tokens per repetition
REPETITIONS = 5

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def decoders(plan: Plan, runs: Path) -> dict[Arm, Path | None]:
    """Return the language models that have a cache, with the directory of a finished run or None."""
    directories: dict[Arm, Path | None] = {}
    models = set()
    for arm in plan.arms:
        recipe = load_recipe(arm.recipe)
        has_cache = is_language_model(recipe) and arm.model.variant in VARIANTS
        # Arms and recipes with other training settings have the speed of their model.
        model = recipe.task, json.dumps(recipe.model, sort_keys=True), arm.model
        if has_cache and arm.time_of is None and not arm.overrides and model not in models:
            finished = finished_runs(arm.runs_folder(runs), recipe.name, arm.model, PRESET)
            directories[arm] = finished[0] if finished else None
            models.add(model)
    return directories


def load_decoder(arm: Arm, directory: Path | None, device: torch.device) -> LanguageModel:
    """Return the model of an arm in eval mode, from a run directory, or with random weights.

    Args:
        arm: The arm.
        directory: Directory of a finished run; None for random weights.
        device: Device of the model.
    """
    if directory is not None:
        return RunDirectory(directory).load_language_model(device)
    recipe = load_recipe(arm.recipe)
    task: Any = tasks.get_task(recipe.task)
    # The vocabulary is that of the prepared data, at most this size.
    sizes = {"vocab_size": getattr(task, "subwords", MAX_BYTES), "max_length": task.max_length}
    config: Any = LanguageModelling.resolve_config(recipe, arm.model, PRESET, sizes)
    return LanguageModel(config).to(device).eval()


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a function over REPETITIONS calls, after one call to warm up."""
    times = []
    for _ in range(1 + REPETITIONS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@torch.no_grad()
def measure(model: LanguageModel, length: int) -> dict[str, float]:
    """Return prefill and decoding speed and the size of the cache at a length, for one sequence.

    Args:
        model: A language model in eval mode.
        length: Number of tokens in the cache.
    """
    device = model.table.weight.device
    prompt = torch.randint(model.config.vocab_size, (1, length), device=device)
    caches = model.make_caches(1, length + STEPS)

    def prefill() -> None:
        for cache in caches:
            cache.reset()
        for chunk in prompt.split(CHUNK, dim=1):
            model.hidden(chunk, caches=caches)

    step = DecodingStep(model, caches) if device.type == "cuda" else None

    def decode() -> None:
        for cache in caches:
            cache.crop(length)
        token = prompt[:, -1:]
        for _ in range(STEPS):
            logits = model.table.logits(model.hidden(token, caches=caches)[:, -1]) if step is None else step(token)
            token = logits.argmax(-1, keepdim=True)

    seconds = median_seconds(prefill, device)
    return {
        PREFILL: length / seconds,
        DECODE: STEPS / median_seconds(decode, device),
        CACHE: sum(cache.nbytes for cache in model.make_caches(1, length)),
    }


def result_rows(arm: Arm, model: LanguageModel, length: int, values: dict[str, float]) -> list[dict[str, object]]:
    columns = {
        "recipe": RECIPE,
        "task": arm.recipe,
        "dataset": "random tokens",
        "variant": arm.model.variant,
        "preset": PRESET,
        "components": VARIANTS[arm.model.variant].components or model.config.num_components,
        "heads": arm.model.heads,
        "kv_heads": arm.model.kv_heads or arm.model.heads,
        "key_heads": arm.model.key_heads,
        "batch": 1,
        "length": length,
        "dtype": str(model.table.weight.dtype).removeprefix("torch."),
        "backend": model.config.backend,
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "command": shlex.join(["python", "-m", "experiments.cost_quality.decoding", *sys.argv[1:]]),
        **results.environment(),
    }
    return [{**columns, "metric": metric, "value": f"{value:.12g}"} for metric, value in values.items()]


def table(rows: Rows) -> str:
    """Format the latest measurement of each model and length; "" without any."""
    measured = results.latest(
        [row for row in rows if row.get("recipe") == RECIPE],
        ("task", "variant", "heads", "kv_heads", "key_heads", "length", "gpu", "metric"),
    )
    values: dict[tuple[str, ...], dict[str, float]] = {}
    for row in measured:
        key = row["task"], str(model_of(row)), row["length"], row["gpu"]
        values.setdefault(key, {})[row["metric"]] = float(row["value"])
    if not values:
        return ""
    lines = [["recipe", "model", "tokens", "prefill, tokens/s", "decoding, tokens/s", "cache, MB", "device"]]
    for (task, name, length, gpu), by_metric in values.items():
        cells = [f"{by_metric[metric]:,.0f}" if metric in by_metric else "–" for metric in (PREFILL, DECODE)]
        cells.append(f"{by_metric[CACHE] / 1e6:,.1f}" if CACHE in by_metric else "–")
        lines.append([task, f"`{name}`", f"{int(length):,}", *cells, gpu])
    return markdown_table(lines)


def parse_lengths(text: str) -> list[int]:
    """Parse --lengths; an empty text has none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        fail("--lengths", f"must be positive integers separated by commas, got {text!r}")
    return list(map(int, parts))


def parse_device(text: str | None) -> torch.device:
    """Parse --device; the default is a GPU if there is one."""
    try:
        return torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        fail("--device", f"must be a device of torch such as cpu or cuda:0, got {text!r}")


@app.command()
def decoding(
    runs: Annotated[Path, typer.Option(help="Parent directory of the run directories.")] = Path("runs"),
    out: Annotated[Path, typer.Option("--results", help="Results directory.")] = Path("results"),
    plan: Annotated[Path | None, typer.Option(help="Plan of the runs; default: the plan.yaml of the study.")] = None,
    lengths: Annotated[str, typer.Option(help="Numbers of tokens in the cache, separated by commas.")] = LENGTHS,
    device: Annotated[str | None, typer.Option(help="Device; default: cuda if it is available.")] = None,
) -> None:
    """Time prefill and decoding of the decoders, and append the results."""
    cached_tokens, model_device = parse_lengths(lengths), parse_device(device)
    if not cached_tokens:
        fail("--lengths", "must have at least one number of tokens")
    arms = decoders(load_plan(plan or PLAN), runs)
    if not arms:
        fail("--plan", "has no language model with a cache")
    check_output_directory("--results", out)
    for arm, directory in arms.items():
        model = load_decoder(arm, directory, model_device)
        weights = RANDOM if directory is None else TRAINED
        model = model.to(torch.bfloat16 if model_device.type == "cuda" else torch.float32)
        for length in cached_tokens:
            values = measure(model, length)
            rows = [{**row, "weights": weights} for row in result_rows(arm, model, length, values)]
            results.append(out / f"{RECIPE}.csv", rows, EXTRA_COLUMNS)
            numbers = ", ".join(f"{metric} {value:,.0f}" for metric, value in values.items())
            print(f"{arm} of {arm.recipe}, {weights} weights, {length:,} tokens: {numbers}")


def main() -> None:
    run_app(lambda: app, "python -m experiments.cost_quality.decoding", sys.argv[1:])


if __name__ == "__main__":
    main()
