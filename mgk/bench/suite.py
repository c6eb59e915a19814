"""Parts of `mgk bench`: their implementations and shapes, the check before timing, and the result rows."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from mgk.attention import Attention
from mgk.bench import groups, timing
from mgk.bench.flash_attention import flash_backends
from mgk.bench.implementations import (
    LINEAR,
    OPERATORS,
    BenchmarkCase,
    Implementation,
    Shape,
    describe_error,
    find_errors,
    make_case,
    parse_variant,
)
from mgk.training import results

# Columns in addition to those of all results: pass, mask, head width, H of the shape, device and eager time relative to
# the best SDPA with H heads in the same run (em: relative to the layer without EM), and Triton's version.
EXTRA_COLUMNS = ("pass", "causal", "head_dim", "full_heads", "ratio", "eager_ratio", "triton")

Record = dict[str, Any]
ByShape = dict[Shape, list[Implementation]]

# BxHxNxD of the speed part; the last is the paper's language model.
SHAPES = tuple(
    map(
        Shape.parse,
        "8x8x4096x64 8x8x4096x64xcausal 2x8x16384x64xcausal 4x16x4096x128xcausal 2x16x16384x128xcausal 32x8x2048x32 "
        "32x8x4096x32 96x8x256x16xcausal".split(),
    )
)
VARIANTS = ("smgk", "smgk:4", "smgk-hard", "mgk", "mgk-hard")
FLEX_SHAPES = SHAPES[:2]  # FlexAttention takes long to compile
MEMORY_SHAPE = (1, 8, 64)  # B, H, D
DECODING_SHAPES = (Shape(16, 8, 32768, 64, False, 1), Shape(8, 16, 32768, 128, False, 1))
LINEAR_SHAPE = (2, 8, 64)
WHOLE_SHAPES = (Shape(32, 8, 2048, 32, False), Shape(32, 8, 4096, 32, False))
LENGTHS = tuple(4096 << n for n in range(6))
# Maximum length at which SDPA, whose time is quadratic, is timed as the baseline of linear attention.
MAX_SDPA_LENGTH = 32768
EM_SHAPES = (Shape(8, 8, 4096, 64, False), Shape(8, 8, 4096, 64, True))
CPU_SHAPES = (Shape(1, 4, 512, 32, False), Shape(1, 4, 512, 32, True))


@dataclass(frozen=True)
class BenchmarkConfig:
    """Device, data type, shapes and variants to measure; empty shapes or variants are the defaults of each part."""

    device: str
    dtype: torch.dtype
    shapes: tuple[Shape, ...] = ()
    variants: tuple[str, ...] = ()
    log: Callable[[str], None] = print

    @property
    def backend(self) -> str:
        return "triton" if self.device == "cuda" else "auto"

    def implementations(self, variants: Iterable[str], shapes: Iterable[Shape], linear: bool = False) -> ByShape:
        """Return this package's implementations on each shape, with half the heads.

        Args:
            variants: Default variants of the part.
            shapes: Shapes of the part.
            linear: Whether the part measures linear attention; variants of the other kind are skipped.
        """
        parsed = [parse_variant(text) for text in self.variants or variants]
        selected = [(name, components) for name, components in parsed if (name in LINEAR) == linear]
        if not selected:
            return {}

        def with_half_the_heads(shape: Shape) -> list[Implementation]:
            half = shape.heads // 2
            return [Implementation(name, self.backend, half, half, components) for name, components in selected]

        return {shape: with_half_the_heads(shape) for shape in shapes}


def measured_variants(parts: dict[str, ByShape]) -> set[tuple[str, int]]:
    """Return variant and number of components of the implementations of all parts."""
    shapes = [selected for by_shape in parts.values() for selected in by_shape.values()]
    return {(implementation.variant, implementation.components) for selected in shapes for implementation in selected}


def result_row(
    task: str, implementation: Implementation, shape: Shape, pass_name: str, metric: str, value: float, **columns: Any
) -> Record:
    """Return a row of results/attention.csv; `columns` are additional ones."""
    return {
        "recipe": "bench", "task": task, "dataset": "random normal", "variant": implementation.variant,
        "components": implementation.components, "heads": implementation.heads, "kv_heads": implementation.kv_heads,
        "batch": shape.batch, "length": shape.length, "backend": implementation.backend, "metric": metric,
        "value": f"{value:.4f}", "pass": pass_name, "causal": shape.causal, "head_dim": shape.width,
        "full_heads": shape.heads, **columns,
    }  # fmt: skip


def _check(call: tuple[Implementation, Shape, str, torch.dtype]) -> list[str]:
    implementation, shape, device, dtype = call
    try:
        return find_errors(implementation, shape, device, dtype)
    except Exception as error:
        return [f"{implementation}, {shape}: {describe_error(error, 200)}"]


class CallKind(NamedTuple):
    """Properties of a call that select its kernels: calls of one kind are checked once."""

    implementation: Implementation
    width: int
    causal: bool
    queries: int | None


def _call_kind(implementation: Implementation, shape: Shape) -> CallKind:
    return CallKind(implementation, shape.width, shape.causal, shape.queries)


def select_correct(config: BenchmarkConfig, parts: dict[str, ByShape]) -> tuple[dict[str, ByShape], list[str]]:
    """Check the outputs and gradients of all implementations and select the correct ones.

    On a GPU the checks run in many processes: compilation takes most of the time, and Triton caches kernels on disk.

    Args:
        config: Device and data type.
        parts: Implementations of each part.

    Returns:
        The correct implementations of each part, and messages on the wrong ones.
    """
    calls = {}
    for by_shape in parts.values():
        for shape, implementations in by_shape.items():
            for implementation in implementations:
                calls[_call_kind(implementation, shape)] = (implementation, shape, config.device, config.dtype)
    # Start with the kernels that take longest to compile.
    kinds = sorted(calls, key=lambda kind: (OPERATORS[kind.implementation.variant].shifted, -kind.width))
    if config.device == "cpu":
        checked = [_check(calls[kind]) for kind in kinds]
    else:
        workers = max(1, min(len(calls), os.cpu_count() or 1))
        with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            checked = list(pool.map(_check, [calls[kind] for kind in kinds]))
    errors = dict(zip(kinds, checked, strict=True))

    def select(by_shape: ByShape) -> ByShape:
        return {
            shape: [i for i in implementations if not errors[_call_kind(i, shape)]]
            for shape, implementations in by_shape.items()
        }

    config.log(f"correct: {sum(not lines for lines in checked)} of {len(calls)} kinds of calls, outputs and gradients")
    correct = {name: select(by_shape) for name, by_shape in parts.items()}
    return correct, [line for lines in checked for line in lines]


def _measure(
    config: BenchmarkConfig, implementation: Implementation, shape: Shape, backward: bool
) -> dict[str, timing.Timing]:
    """Time an implementation; if it fails on the shape, log the error and return an empty dict."""
    try:
        case = make_case(implementation, shape, config.device, config.dtype, gradients=backward)
        return timing.measure_time(case, config.device, backward=backward)
    except Exception as error:
        config.log(f"{implementation} {shape}: {describe_error(error, 100)}")
        return {}
    finally:
        if config.device == "cuda":
            torch.cuda.empty_cache()


def time_shape(
    config: BenchmarkConfig,
    task: str,
    shape: Shape,
    baselines: list[Implementation],
    compared: list[Implementation],
    backward: bool = True,
) -> Iterator[Record]:
    """Time all implementations on a shape and yield their rows.

    Args:
        config: Device and data type.
        task: Value of the task column.
        shape: The shape.
        baselines: Implementations whose best time is the denominator of the ratios.
        compared: Other implementations to time.
        backward: Whether to time forward and backward too.
    """
    timings = {i: _measure(config, i, shape, backward) for i in [*baselines, *compared]}
    for pass_name in timing.PASSES:
        references = [timings[i][pass_name] for i in baselines if pass_name in timings[i]]
        for implementation, by_pass in timings.items():
            if pass_name not in by_pass:
                continue
            measured = by_pass[pass_name]
            peak = "" if measured.peak_mb is None else f"{measured.peak_mb:.1f}"
            columns = {"step_ms": f"{measured.eager_ms:.4f}", "peak_mem_mb": peak}
            if references:
                columns["ratio"] = f"{measured.device_ms / min(t.device_ms for t in references):.3f}"
                columns["eager_ratio"] = f"{measured.eager_ms / min(t.eager_ms for t in references):.3f}"
            line = f"{task:8} {shape!s:24} {pass_name:16} {implementation!s:28} {measured.device_ms:9.3f} ms "
            line += f"{columns.get('ratio', ''):>6}"
            if config.device != "cpu":  # the CPU has only one time
                line += f"   eager {measured.eager_ms:9.3f} ms {columns.get('eager_ratio', ''):>6}"
            config.log(line)
            yield result_row(task, implementation, shape, pass_name, "device_ms", measured.device_ms, **columns)


def _sdpa(heads: int, kv_heads: int, backends: Iterable[str]) -> list[Implementation]:
    return [Implementation("softmax", backend, heads, kv_heads) for backend in backends]


def _fast_sdpa(config: BenchmarkConfig) -> tuple[str, ...]:
    return ("cudnn", "flash") if config.device == "cuda" else ("flash", "math")


def _flash(config: BenchmarkConfig) -> tuple[str, ...]:
    return flash_backends(config.device, config.dtype, config.log) if config.device == "cuda" else ()


def measure_speed(config: BenchmarkConfig, implementations: ByShape) -> Iterator[Record]:
    """Time against SDPA with H heads, with H/2 key heads, and with H/2 heads; and FlashAttention if it is installed."""
    backends, flash = _fast_sdpa(config), _flash(config)
    for shape, selected in implementations.items():
        H = shape.heads
        compared = [*_sdpa(H, H // 2, backends), *_sdpa(H // 2, H // 2, backends), *_sdpa(H, H, flash), *selected]
        yield from time_shape(config, "speed", shape, _sdpa(H, H, backends), compared)


def measure_groups(config: BenchmarkConfig, implementations: ByShape) -> Iterator[Record]:
    """Time the groups of shapes with half the heads and, for sMGK, with all heads."""
    backends, flash = _fast_sdpa(config), _flash(config)
    for shape, selected in implementations.items():
        H = shape.heads
        yield from time_shape(config, "groups", shape, _sdpa(H, H, backends), [*_sdpa(H, H, flash), *selected])


def _group_implementations(config: BenchmarkConfig) -> ByShape:
    """Return sMGK and MGK with half the heads, and the shifted variants with all heads too."""
    half = config.implementations(("smgk", "mgk"), config.shapes or groups.SHAPES)
    return {
        shape: [*selected, *(_use_all_heads(i, shape) for i in selected if OPERATORS[i.variant].shifted)]
        for shape, selected in half.items()
    }


def _use_all_heads(implementation: Implementation, shape: Shape) -> Implementation:
    return replace(implementation, heads=shape.heads, kv_heads=shape.heads)


def measure_flex(config: BenchmarkConfig, implementations: ByShape) -> Iterator[Record]:
    """Time sMGK expressed in FlexAttention against SDPA with H heads."""
    for shape, selected in implementations.items():
        baselines = _sdpa(shape.heads, shape.heads, _fast_sdpa(config))
        yield from time_shape(config, "speed", shape, baselines, selected)


def _flex_implementations(config: BenchmarkConfig) -> ByShape:
    shapes = config.shapes or FLEX_SHAPES
    return {shape: [Implementation("smgk", "flex", shape.heads // 2, shape.heads // 2, 2)] for shape in shapes}


def measure_memory(config: BenchmarkConfig, implementations: ByShape) -> Iterator[Record]:
    """Measure memory against SDPA-flash with the same number of heads, at growing lengths."""
    for shape, selected in implementations.items():
        reference: dict[str, float] = {}  # memory of SDPA-flash, which is measured first, by pass
        for implementation in [*_sdpa(shape.heads // 2, shape.heads // 2, ["flash"]), *selected]:
            by_pass = timing.measure_memory(make_case(implementation, shape, config.device, config.dtype))
            for pass_name, measured in by_pass.items():
                extra = reference.setdefault(pass_name, measured.extra_mb)
                ratio = f"{measured.extra_mb / extra:.3f}" if extra else ""
                config.log(
                    f"memory   {shape!s:24} {pass_name:16} {implementation!s:28} {measured.extra_mb:9.2f} MB {ratio:>6}"
                )
                columns = {"peak_mem_mb": f"{measured.peak_mb:.1f}", "ratio": ratio}
                yield result_row("memory", implementation, shape, pass_name, "extra_mb", measured.extra_mb, **columns)
            torch.cuda.empty_cache()


def measure_decoding(config: BenchmarkConfig, implementations: ByShape) -> Iterator[Record]:
    """Time one query against a long cache."""
    for shape, selected in implementations.items():
        H, backends = shape.heads, ("cudnn", "flash", "efficient")
        compared = [*_sdpa(H, H // 2, backends[:2]), *_sdpa(H // 2, H // 2, backends), *selected]
        yield from time_shape(config, "decoding", shape, _sdpa(H, H, backends), compared, backward=False)


def measure_linear(task: str, config: BenchmarkConfig, implementations: ByShape) -> Iterator[Record]:
    """Time linear attention: task `linear` is causal at growing lengths, `whole` is not causal."""
    for shape, selected in implementations.items():
        baselines = _sdpa(shape.heads, shape.heads, _fast_sdpa(config)) if shape.length <= MAX_SDPA_LENGTH else []
        yield from time_shape(config, task, shape, baselines, selected)


def _layer_case(config: BenchmarkConfig, variant: str, shape: Shape) -> BenchmarkCase:
    width = shape.heads * shape.width // 2
    options: dict[str, Any] = {"device": config.device, "dtype": config.dtype}
    layer = Attention(width, shape.heads // 2, variant=variant, is_causal=shape.causal, **options)
    x = torch.randn(shape.batch, shape.length, width, requires_grad=True, **options)
    return BenchmarkCase(lambda: layer(x), [x, *(p for p in layer.parameters() if p.requires_grad)])


def measure_em(config: BenchmarkConfig, _: ByShape) -> Iterator[Record]:
    """Time a training layer with EM priors against one with learned priors.

    Device times are those of CUDA graphs if both layers can be captured, else of eager calls.
    """
    for shape in config.shapes or EM_SHAPES:
        try:
            timings, metric = _time_em_layers(config, shape, graph=True), "device_ms"
        except RuntimeError as error:
            config.log(f"em: no CUDA graph, comparing eager calls: {describe_error(error, 100)}")
            timings, metric = _time_em_layers(config, shape, graph=False), "eager_ms"
        reference = timings["smgk"]["forward+backward"]
        for name, by_pass in timings.items():
            implementation = Implementation(name, "auto", shape.heads // 2, shape.heads // 2, 2)
            measured = by_pass["forward+backward"]
            ratio, eager = measured.device_ms / reference.device_ms, measured.eager_ms / reference.eager_ms
            config.log(
                f"em       {shape!s:24} {'training layer':16} {implementation!s:28} {measured.device_ms:9.3f} ms "
                f"{ratio:6.3f}   eager {measured.eager_ms:9.3f} ms {eager:6.3f}"
            )
            columns = {"step_ms": f"{measured.eager_ms:.4f}", "ratio": f"{ratio:.3f}", "eager_ratio": f"{eager:.3f}"}
            yield result_row("em", implementation, shape, "forward+backward", metric, measured.device_ms, **columns)


def _time_em_layers(config: BenchmarkConfig, shape: Shape, graph: bool) -> dict[str, dict[str, timing.Timing]]:
    """Time the layers with learned priors and with EM priors; the timings of each are by pass."""
    return {
        variant: timing.measure_time(_layer_case(config, variant, shape), config.device, graph=graph)
        for variant in ("smgk", "smgk-em")
    }


@dataclass(frozen=True)
class BenchmarkPart:
    """A part of the benchmark: its measurements, and this package's implementations, which are checked first."""

    measure: Callable[[BenchmarkConfig, ByShape], Iterator[Record]]
    implementations: Callable[[BenchmarkConfig], ByShape] = lambda config: {}


def _with_copies(implementations: ByShape, change: Callable[[Implementation, Shape], Implementation]) -> ByShape:
    """Add a changed copy of each implementation."""
    return {
        shape: [*selected, *(change(implementation, shape) for implementation in selected)]
        for shape, selected in implementations.items()
    }


def _share_key_heads(implementation: Implementation, shape: Shape) -> Implementation:
    """Use all H query heads, two per key head."""
    return replace(implementation, heads=shape.heads)


def _run_chunked(implementation: Implementation, shape: Shape) -> Implementation:
    return replace(implementation, backend="chunked")


def _shapes_by_length(shape: tuple[int, int, int]) -> list[Shape]:
    B, H, D = shape
    return [Shape(B, H, length, D, True) for length in LENGTHS]


def _linear_implementations(config: BenchmarkConfig) -> ByShape:
    shapes = [replace(shape, causal=True) for shape in config.shapes] or _shapes_by_length(LINEAR_SHAPE)
    return config.implementations(LINEAR, shapes, linear=True)


def _whole_implementations(config: BenchmarkConfig) -> ByShape:
    shapes = [replace(shape, causal=False) for shape in config.shapes] or WHOLE_SHAPES
    return _with_copies(config.implementations(LINEAR, shapes, linear=True), _run_chunked)


def _decoding_implementations(config: BenchmarkConfig) -> ByShape:
    shapes = [replace(shape, causal=False, queries=1) for shape in config.shapes] or DECODING_SHAPES
    return _with_copies(config.implementations(("smgk",), shapes), _share_key_heads)


PARTS = {
    "speed": BenchmarkPart(
        measure_speed,
        lambda c: c.implementations(VARIANTS, c.shapes or (SHAPES if c.device == "cuda" else CPU_SHAPES)),
    ),
    "groups": BenchmarkPart(measure_groups, _group_implementations),
    "linear": BenchmarkPart(partial(measure_linear, "linear"), _linear_implementations),
    "whole": BenchmarkPart(partial(measure_linear, "whole"), _whole_implementations),
    "decoding": BenchmarkPart(measure_decoding, _decoding_implementations),
    "em": BenchmarkPart(measure_em),
    "memory": BenchmarkPart(
        measure_memory, lambda c: c.implementations(("smgk", "mgk"), c.shapes or _shapes_by_length(MEMORY_SHAPE))
    ),
    "flex": BenchmarkPart(measure_flex, _flex_implementations),
}
# The other parts measure the GPU kernels.
CPU_PARTS = ("speed",)


def environment(config: BenchmarkConfig, command: str) -> Record:
    """Return the columns shared by all rows of a benchmark run."""
    version = results.version_of("triton") or ""
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[config.dtype]
    return {"dtype": name, "triton": version, "command": command, **results.environment()}
