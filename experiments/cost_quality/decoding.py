"""Time the trained decoders of the study: python -m experiments.cost_quality.decoding --runs runs.

For each arm with a finished run and each length: prefill in tokens per second, decoding in tokens per second with that
many tokens in the cache, and the bytes of the cache. One sequence, bf16 on a GPU, with the decoding step captured as a
CUDA graph; fp32 on a CPU. Results are appended to RESULTS/cost-quality-decoding.csv.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from experiments.cost_quality.plan import PLAN, PRESET, Arm, Plan, is_language_model, load_plan
from experiments.result_rows import Rows, model_of
from mgk._core.io import markdown_table
from mgk._core.validation import fail
from mgk.cli import run_app
from mgk.cli.app import check_output_directory
from mgk.models import LanguageModel
from mgk.models.generation import DecodingStep
from mgk.models.run_directory import RunDirectory
from mgk.training import results
from mgk.training.config import load_recipe
from mgk.training.runs import finished_runs
from mgk.variants import VARIANTS

RECIPE = "cost-quality-decoding"
PREFILL, DECODE, CACHE = "prefill_tokens_per_second", "decode_tokens_per_second", "cache_bytes"
LENGTHS = "1024,8192,32768"
CHUNK = 4096  # tokens of a prompt per forward pass
STEPS = 32  # decoded tokens per repetition
REPETITIONS = 5

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def trained_arms(plan: Plan, runs: Path) -> dict[Arm, Path]:
    """Return a run directory for each language model that has a cache and a finished run."""
    directories = {}
    for arm in plan.arms:
        finished = finished_runs(arm.runs_folder(runs), arm.recipe, arm.model, PRESET)
        has_cache = is_language_model(load_recipe(arm.recipe)) and arm.model.variant in VARIANTS
        # Arms with other steps have the speed of their model.
        if has_cache and finished and arm.time_of is None:
            directories[arm] = finished[0]
    return directories


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
    return [{**columns, "metric": metric, "value": f"{value:.6g}"} for metric, value in values.items()]


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
    lines = [["recipe", "model", "tokens", "prefill, tokens/s", "decoding, tokens/s", "cache, bytes", "device"]]
    for (task, name, length, gpu), by_metric in values.items():
        cells = [f"{by_metric[metric]:,.0f}" if metric in by_metric else "–" for metric in (PREFILL, DECODE, CACHE)]
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
    """Time prefill and decoding of the trained decoders, and append the results."""
    cached_tokens, model_device = parse_lengths(lengths), parse_device(device)
    arms = trained_arms(load_plan(plan or PLAN), runs)
    if not arms:
        fail(
            "--runs",
            f"{runs} has no finished run of a decoder of the plan: run python -m experiments.cost_quality --run",
        )
    check_output_directory("--results", out)
    for arm, directory in arms.items():
        model = RunDirectory(directory).load_language_model(model_device)
        model = model.to(torch.bfloat16 if model_device.type == "cuda" else torch.float32)
        for length in cached_tokens:
            values = measure(model, length)
            results.append(out / f"{RECIPE}.csv", result_rows(arm, model, length, values))
            numbers = ", ".join(f"{metric} {value:,.0f}" for metric, value in values.items())
            print(f"{arm} of {arm.recipe}, {length:,} tokens: {numbers}")


def main() -> None:
    run_app(lambda: app, "python -m experiments.cost_quality.decoding", sys.argv[1:])


if __name__ == "__main__":
    main()
