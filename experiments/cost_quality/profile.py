"""Profile one training step by kernel family: python -m experiments.cost_quality.profile.

The kernels of a step (operators on a CPU) are grouped by their names. GEMMs of the output layer have the names of all
others and count as GEMM; "loss" has the softmax over the vocabulary and the selection of targets. Results are appended
to RESULTS/cost-quality-profile.csv; RESULTS/cost-quality-profile.md has the longest kernels of the last profile.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.profiler import ProfilerActivity, profile

from experiments.commands import add_plugin
from experiments.cost_quality.plan import PRESET
from experiments.result_rows import Rows, model_of
from mgk import tasks
from mgk._core.io import write_atomically
from mgk._core.markdown import markdown_table
from mgk.cli import run_app
from mgk.cli.app import DataDir, check_output_directory, resolve_data_dir
from mgk.cli.preparation import prepare_data
from mgk.training import results
from mgk.training.config import ModelSpec, load_recipe
from mgk.training.evaluate import result_columns
from mgk.training.profiling import StepProfiler
from mgk.training.trainer import Run

RECIPE = "cost-quality-profile"
OTHER = "other"
NAME_LENGTH = 100  # printed characters of a kernel's name
# Families and patterns of names, in the order in which they are tried. Names of kernels are those of Triton, cuDNN,
# FlashAttention, cuBLAS, CUTLASS and the compiler; operators are those of ATen and of this package.
FAMILIES = {
    "attention backward": r"mixture_backward|add_parts|query_terms|factored_mixture_backward"
    r"|sdpa_mixture_backward|linear_attention_backward|(flash|fmha|sdpa|attention).*(bwd|bprop|backward)",
    "attention forward": r"mixture_forward|prepare_keys|factored_mixture|sdpa_mixture|mgk::linear_attention"
    r"|flash|fmha|sdpa|scaled_dot_product",
    "optimizer": r"multi_tensor_apply|adam|_foreach|fused_sgd",
    "GEMM": r"gemm|nvjet|cutlass|cublas|splitk|aten::(mm|addmm|bmm|baddbmm|linear|matmul|_scaled_mm)\b",
    "loss": r"log_?softmax|logsumexp|nll|cross_entropy|arange_eq_exp",
    "rotary embedding": r"rotation_table|_(cos|sin)_|aten::(cos|sin)\b",
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def family_of(name: str) -> str:
    """Return the family of a kernel or an operator."""
    lowered = name.lower()
    return next((family for family, pattern in FAMILIES.items() if re.search(pattern, lowered)), OTHER)


def kernel_milliseconds(events: Any, steps: int, *, is_cuda: bool) -> dict[str, float]:
    """Return the time of each kernel of a profile in ms per step, the longest first.

    Args:
        events: Events of a profiler; on a GPU its kernels are counted, on a CPU the own time of its operators.
        steps: Number of profiled steps.
        is_cuda: Whether the steps ran on a GPU.
    """
    times: dict[str, float] = {}
    for event in events:
        if is_cuda and event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.key] = times.get(event.key, 0.0) + event.self_device_time_total / 1000 / steps
        elif not is_cuda:
            times[event.key] = times.get(event.key, 0.0) + event.self_cpu_time_total / 1000 / steps
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def milliseconds_by_family(kernels: dict[str, float]) -> dict[str, float]:
    """Sum the times of kernels by family."""
    times = dict.fromkeys([*FAMILIES, OTHER], 0.0)
    for name, milliseconds in kernels.items():
        times[family_of(name)] += milliseconds
    return times


def kernel_table(kernels: dict[str, float], count: int) -> str:
    """Format the longest kernels: milliseconds, family and the start of the name."""
    lines = [["ms per step", "family", "kernel"]]
    for name, milliseconds in list(kernels.items())[:count]:
        lines.append([f"{milliseconds:.2f}", family_of(name), f"`{name[:NAME_LENGTH]}`"])
    return markdown_table(lines)


def profile_step(
    run: Run, task: Any, device: torch.device, steps: int, shown: int = 0
) -> tuple[list[dict[str, Any]], str]:
    """Profile training steps of a run, after warming up; return one result row per family, and the longest kernels.

    Args:
        run: The run.
        task: Its task.
        device: Device to train on.
        steps: Number of profiled steps.
        shown: Number of kernels to describe.
    """
    profiler = StepProfiler(run, task, device)
    profiler.warm_up()
    profiler.module.train()
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as recorded:
        for number in range(steps):
            profiler.step(number)
        if is_cuda:
            torch.cuda.synchronize()
    kernels = kernel_milliseconds(recorded.key_averages(), steps, is_cuda=is_cuda)
    times = milliseconds_by_family(kernels)
    columns = result_columns(run, task, profiler.config)
    command = shlex.join(["python", "-m", "experiments.cost_quality.profile", *sys.argv[1:]])
    columns |= {"recipe": RECIPE, "task": run.recipe.name, "split": "train", "command": command}
    rows = [{**columns, "metric": f"{family}, ms per step", "value": f"{ms:.4f}"} for family, ms in times.items()]
    return rows, f"`{run.row}` of {run.recipe.name}, commit {columns['commit']}:\n\n{kernel_table(kernels, shown)}\n"


def table(rows: list[list[dict[str, Any]]]) -> str:
    """Format the rows of each model: milliseconds, and their share of the step."""
    lines = [["recipe", "model", *FAMILIES, OTHER, "sum, ms"]]
    for rows_of_model in rows:
        by_family = {row["metric"].partition(",")[0]: float(row["value"]) for row in rows_of_model}
        # A profile from before a family was added has none of it.
        times = [by_family.get(family) for family in (*FAMILIES, OTHER)]
        total = sum(by_family.values()) or 1.0
        lines.append(
            [
                rows_of_model[0]["task"],
                f"`{model_of(rows_of_model[0])}`",
                *("–" if ms is None else f"{ms:.2f} ({100 * ms / total:.0f} %)" for ms in times),
                f"{total:.2f}",
            ]
        )
    return markdown_table(lines)


def latest_table(rows: Rows) -> str:
    """Format the latest profile of each model, with its commit; "" without any."""
    profiles = [row for row in rows if row.get("recipe") == RECIPE]
    latest = results.latest(profiles, ("task", "variant", "heads", "kv_heads", "key_heads", "gpu", "metric"))
    by_model: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in latest:
        by_model.setdefault((row["task"], str(model_of(row)), row["gpu"], row["commit"]), []).append(row)
    if not by_model:
        return ""
    commits = ", ".join(
        f"`{name}` of {recipe} on {gpu or 'a CPU'} at {commit}" for recipe, name, gpu, commit in by_model
    )
    return f"{table(list(by_model.values()))}\n\nMeasured: {commits}."


@app.command()
def profile_models(
    recipe: Annotated[str, typer.Option(help="Recipe of the models.")] = "study",
    rows: Annotated[str, typer.Option(help="Models, separated by commas.")] = "softmax:8,smgk:8",
    steps: Annotated[int, typer.Option(min=1, help="Number of profiled steps.")] = 5,
    kernels: Annotated[int, typer.Option(min=0, help="Number of kernels to list, the longest first.")] = 20,
    out: Annotated[Path, typer.Option("--results", help="Results directory.")] = Path("results"),
    data_dir: DataDir = None,
) -> None:
    """Profile training steps by kernel family, print a table, and append the results."""
    loaded, data = load_recipe(recipe), resolve_data_dir(data_dir)
    models = [ModelSpec.parse(text, "--rows") for text in rows.split(",")]
    check_output_directory("--results", out)
    task = tasks.get_task(loaded.task)
    prepare_data(task, data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measured, descriptions = [], []
    for model in models:
        values, description = profile_step(Run(loaded, model, PRESET, 0, data, Path()), task, device, steps, kernels)
        results.append(out / f"{RECIPE}.csv", values)
        print(description)
        measured.append(values)
        descriptions.append(description)
    if kernels:
        write_atomically(out / f"{RECIPE}.md", "\n".join(["# Longest kernels of a training step\n", *descriptions]))
    print(table(measured))


def main() -> None:
    add_plugin("experiments.cost_quality")
    run_app(lambda: app, "python -m experiments.cost_quality.profile", sys.argv[1:])


if __name__ == "__main__":
    main()
