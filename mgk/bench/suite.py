"""The parts of `mgk bench`: each checks what it will time, then gives a row of results for every measurement."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mgk.attention import Attention
from mgk.bench import timing
from mgk.bench.implementations import (
    LINEAR,
    OPERATORS,
    BenchmarkCase,
    Implementation,
    Shape,
    make,
    variant_and_components,
    wrong,
)
from mgk.training import results

# Beyond the columns of all results: pass, mask, head width, the H of the shape, device and eager time over that of the
# best SDPA with H heads in the same run (em: over the layer without EM), and Triton's version.
EXTRA = ("pass", "causal", "head_dim", "full_heads", "ratio", "eager_ratio", "triton")

Record = dict[str, Any]
Contenders = dict[Shape, list[Implementation]]

# B, H, N, D: the shapes of the goal, and behind them the paper's language model.
SHAPES = tuple(
    map(
        Shape.parse,
        "8x8x4096x64 8x8x4096x64xcausal 2x8x16384x64xcausal 4x16x4096x128xcausal 2x16x16384x128xcausal 32x8x2048x32 "
        "32x8x4096x32 96x8x256x16xcausal".split(),
    )
)
VARIANTS = ("smgk", "smgk:4", "smgk-hard", "mgk", "mgk-hard")
# FlexAttention compiles for long.
FLEX_SHAPES = SHAPES[:2]
MEMORY_SHAPE = (1, 8, 64)  # B, H, D
DECODING_SHAPES = (Shape(16, 8, 32768, 64, False, 1), Shape(8, 16, 32768, 128, False, 1))
LINEAR_SHAPE = (2, 8, 64)
WHOLE_SHAPES = (Shape(32, 8, 2048, 32, False), Shape(32, 8, 4096, 32, False))
LENGTHS = tuple(4096 << n for n in range(6))
# SDPA's time is quadratic: it is measured up to here.
SDPA_LONGEST = 32768
EM_SHAPES = (Shape(8, 8, 4096, 64, False), Shape(8, 8, 4096, 64, True))
CPU_SHAPES = (Shape(1, 4, 512, 32, False), Shape(1, 4, 512, 32, True))


@dataclass(frozen=True)
class Setting:
    """Where and what to measure. Empty shapes or variants: the defaults of each part."""

    device: str
    dtype: torch.dtype
    shapes: tuple[Shape, ...] = ()
    variants: tuple[str, ...] = ()
    say: Callable[[str], None] = print

    @property
    def backend(self) -> str:
        return "triton" if self.device == "cuda" else "auto"

    def ours(self, names: Iterable[str], shapes: Iterable[Shape], linear: bool = False) -> Contenders:
        """Our contenders on each shape, with half the heads: of the variants asked for those that the part is about."""
        parsed = [variant_and_components(text) for text in self.variants or names]
        parsed = [(name, components) for name, components in parsed if (name in LINEAR) == linear]
        return {
            s: [
                Implementation(name, self.backend, s.heads // 2, s.heads // 2, components)
                for name, components in parsed
            ]
            for s in shapes
            if parsed
        }


def row(
    task: str, contender: Implementation, shape: Shape, which: str, metric: str, value: float, **more: Any
) -> Record:
    return {
        "recipe": "bench", "task": task, "dataset": "random normal", "variant": contender.variant,
        "components": contender.components, "heads": contender.heads, "kv_heads": contender.kv_heads,
        "batch": shape.batch, "length": shape.length, "backend": contender.backend, "metric": metric,
        "value": f"{value:.4f}", "pass": which, "causal": shape.causal, "head_dim": shape.width,
        "full_heads": shape.heads, **more,
    }  # fmt: skip


def _wrong(task: tuple[Implementation, Shape, str, torch.dtype]) -> list[str]:
    try:
        return wrong(*task)
    except Exception as error:
        return [f"{task[0]}, {task[1]}: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"]


def without_the_wrong(setting: Setting, asked: dict[str, Contenders]) -> tuple[dict[str, Contenders], list[str]]:
    """What is right of each part's contenders, so that nothing wrong is timed, and in words what is wrong.

    On a GPU many processes check at once: most of their time goes into compiling kernels, which stay in Triton's cache
    for what comes next.
    """

    def kind(contender: Implementation, shape: Shape) -> tuple[Any, ...]:
        return contender, shape.width, shape.causal, shape.queries

    every = [(c, s) for contenders in asked.values() for s, some in contenders.items() for c in some]
    tasks = {kind(c, s): (c, s, setting.device, setting.dtype) for c, s in every}
    # What compiles longest comes first.
    order = sorted(tasks, key=lambda key: (OPERATORS[key[0].variant].shifted, -key[1]))
    if setting.device == "cpu":
        found = [_wrong(tasks[key]) for key in order]
    else:
        workers = max(1, min(len(tasks), os.cpu_count() or 1))
        with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(_wrong, [tasks[key] for key in order]))
    lines = dict(zip(order, found, strict=True))
    right = {
        name: {s: [c for c in some if not lines[kind(c, s)]] for s, some in contenders.items()}
        for name, contenders in asked.items()
    }
    setting.say(f"correct: {sum(not some for some in found)} of {len(tasks)} kinds of calls, outputs and gradients")
    return right, [line for some in found for line in some]


def _measured(setting: Setting, contender: Implementation, shape: Shape, **options: Any) -> dict[str, timing.Timing]:
    """Nothing, and a line that says why, where a contender does not manage the shape: the others still do."""
    try:
        problem = make(contender, shape, setting.device, setting.dtype, gradients=options.get("backward", True))
        return timing.measure(problem, setting.device, **options)
    except Exception as error:
        setting.say(f"{contender} {shape}: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}")
        return {}
    finally:
        if setting.device == "cuda":
            torch.cuda.empty_cache()


def timed_rows(
    setting: Setting,
    task: str,
    shape: Shape,
    baseline: list[Implementation],
    others: list[Implementation],
    **options: Any,
) -> Iterator[Record]:
    """Everybody's times on one shape, and over the best of `baseline`."""
    costs = {c: _measured(setting, c, shape, **options) for c in [*baseline, *others]}
    for which in timing.PASSES:
        first = [costs[c][which] for c in baseline if which in costs[c]]
        for contender, found in costs.items():
            if which not in found:
                continue
            cost, more = found[which], {}
            if first:
                more["ratio"] = f"{cost.device_ms / min(c.device_ms for c in first):.3f}"
                more["eager_ratio"] = f"{cost.eager_ms / min(c.eager_ms for c in first):.3f}"
            peak = "" if cost.peak_mb is None else f"{cost.peak_mb:.1f}"
            more |= {"step_ms": f"{cost.eager_ms:.4f}", "peak_mem_mb": peak}
            line = f"{task:8} {shape!s:24} {which:16} {contender!s:28} {cost.device_ms:9.3f} ms "
            line += f"{more.get('ratio', ''):>6}"
            if setting.device != "cpu":  # where there is but one time
                line += f"   eager {cost.eager_ms:9.3f} ms {more.get('eager_ratio', ''):>6}"
            setting.say(line)
            yield row(task, contender, shape, which, "device_ms", cost.device_ms, **more)


def _sdpa(heads: int, kv_heads: int, names: Iterable[str]) -> list[Implementation]:
    return [Implementation("softmax", name, heads, kv_heads) for name in names]


def _fast_sdpa(setting: Setting) -> tuple[str, ...]:
    return ("cudnn", "flash") if setting.device == "cuda" else ("flash", "math")


def speed(setting: Setting, contenders: Contenders) -> Iterator[Record]:
    names = _fast_sdpa(setting)
    for shape, some in contenders.items():
        H = shape.heads
        others = [*_sdpa(H, H // 2, names), *_sdpa(H // 2, H // 2, names), *some]
        yield from timed_rows(setting, "speed", shape, _sdpa(H, H, names), others)


def flex(setting: Setting, contenders: Contenders) -> Iterator[Record]:
    """FlexAttention expressing sMGK, beside the same SDPA."""
    for shape, some in contenders.items():
        yield from timed_rows(setting, "speed", shape, _sdpa(shape.heads, shape.heads, _fast_sdpa(setting)), some)


def _expressed(setting: Setting) -> Contenders:
    shapes = setting.shapes or FLEX_SHAPES
    return {shape: [Implementation("smgk", "flex", shape.heads // 2, shape.heads // 2, 2)] for shape in shapes}


def memory(setting: Setting, contenders: Contenders) -> Iterator[Record]:
    """Against SDPA-flash with the same heads, at growing lengths."""
    for shape, some in contenders.items():
        extras: dict[str, float] = {}
        for contender in [*_sdpa(shape.heads // 2, shape.heads // 2, ["flash"]), *some]:
            found = timing.memory(make(contender, shape, setting.device, setting.dtype))
            for which, cost in found.items():
                extra = extras.setdefault(which, cost.extra_mb)
                ratio = f"{cost.extra_mb / extra:.3f}" if extra else ""
                setting.say(f"memory   {shape!s:24} {which:16} {contender!s:28} {cost.extra_mb:9.2f} MB {ratio:>6}")
                more = {"peak_mem_mb": f"{cost.peak_mb:.1f}", "ratio": ratio}
                yield row("memory", contender, shape, which, "extra_mb", cost.extra_mb, **more)
            torch.cuda.empty_cache()


def decoding(setting: Setting, contenders: Contenders) -> Iterator[Record]:
    """One query against a long cache."""
    for shape, some in contenders.items():
        H, names = shape.heads, ("cudnn", "flash", "efficient")
        others = [*_sdpa(H, H // 2, names[:2]), *_sdpa(H // 2, H // 2, names), *some]
        yield from timed_rows(setting, "decoding", shape, _sdpa(H, H, names), others, backward=False)


def linear(task: str, setting: Setting, contenders: Contenders) -> Iterator[Record]:
    """Linear attention with mixture keys: `linear`, causal at growing lengths, or `whole`, of whole sequences."""
    for shape, some in contenders.items():
        baseline = _sdpa(shape.heads, shape.heads, _fast_sdpa(setting)) if shape.length <= SDPA_LONGEST else []
        yield from timed_rows(setting, task, shape, baseline, some)


def _layer(setting: Setting, variant: str, shape: Shape) -> BenchmarkCase:
    width = shape.heads * shape.width // 2
    place: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    layer = Attention(width, shape.heads // 2, variant=variant, is_causal=shape.causal, **place)
    x = torch.randn(shape.batch, shape.length, width, requires_grad=True, **place)
    return BenchmarkCase(lambda: layer(x), [x, *(p for p in layer.parameters() if p.requires_grad)])


def em(setting: Setting, _: Contenders) -> Iterator[Record]:
    """A layer in training with priors from EM, over the same with learned priors: plain calls, where EM may look at
    its numbers, and graphs if both can be recorded."""
    for shape in setting.shapes or EM_SHAPES:
        graph, costs = True, {}
        for name in ("smgk", "smgk-em"):
            try:
                costs[name] = timing.measure(_layer(setting, name, shape), setting.device, graph=graph)
            except RuntimeError as error:
                setting.say(f"{name}: no CUDA graph, so plain calls are compared: {str(error).splitlines()[0][:100]}")
                graph = False
        if not graph:
            costs = {
                name: timing.measure(_layer(setting, name, shape), setting.device, graph=False)
                for name in ("smgk", "smgk-em")
            }
        first = costs["smgk"]["forward+backward"]
        for name, found in costs.items():
            contender, cost = (
                Implementation(name, "auto", shape.heads // 2, shape.heads // 2, 2),
                found["forward+backward"],
            )
            ratio, eager = cost.device_ms / first.device_ms, cost.eager_ms / first.eager_ms
            setting.say(
                f"em       {shape!s:24} {'training layer':16} {contender!s:28} {cost.device_ms:9.3f} ms {ratio:6.3f}   "
                f"eager {cost.eager_ms:9.3f} ms {eager:6.3f}"
            )
            more = {"step_ms": f"{cost.eager_ms:.4f}", "ratio": f"{ratio:.3f}", "eager_ratio": f"{eager:.3f}"}
            metric = "device_ms" if graph else "eager_ms"
            yield row("em", contender, shape, "forward+backward", metric, cost.device_ms, **more)


@dataclass(frozen=True)
class Suite:
    """A part of the benchmark: which of ours it is about, and its measurements of those that are right."""

    rows: Callable[[Setting, Contenders], Iterator[Record]]
    ours: Callable[[Setting], Contenders] = lambda setting: {}


def _also(contenders: Contenders, other: Callable[[Implementation, Shape], Implementation]) -> Contenders:
    return {shape: [*some, *(other(each, shape) for each in some)] for shape, some in contenders.items()}


def _sharing(contender: Implementation, shape: Shape) -> Implementation:
    """With all the query heads, two of which share a key head."""
    return replace(contender, heads=shape.heads)


def _by_products(contender: Implementation, shape: Shape) -> Implementation:
    return replace(contender, backend="chunked")


def _growing(shape: tuple[int, int, int]) -> list[Shape]:
    B, H, D = shape
    return [Shape(B, H, length, D, True) for length in LENGTHS]


PARTS = {
    "speed": Suite(speed, lambda s: s.ours(VARIANTS, s.shapes or (SHAPES if s.device == "cuda" else CPU_SHAPES))),
    "linear": Suite(
        partial(linear, "linear"),
        lambda s: s.ours(LINEAR, [replace(x, causal=True) for x in s.shapes] or _growing(LINEAR_SHAPE), linear=True),
    ),
    "whole": Suite(
        partial(linear, "whole"),
        lambda s: _also(
            s.ours(LINEAR, [replace(x, causal=False) for x in s.shapes] or WHOLE_SHAPES, linear=True), _by_products
        ),
    ),
    "decoding": Suite(
        decoding,
        lambda s: _also(
            s.ours(("smgk",), [replace(x, causal=False, queries=1) for x in s.shapes] or DECODING_SHAPES), _sharing
        ),
    ),
    "em": Suite(em),
    "memory": Suite(memory, lambda s: s.ours(("smgk", "mgk"), s.shapes or _growing(MEMORY_SHAPE))),
    "flex": Suite(flex, _expressed),
}
# Without a GPU there are no fused kernels to measure: the other parts would measure something else.
CPU_PARTS = ("speed",)


def environment(setting: Setting, command: str) -> Record:
    version = results.version_of("triton") or ""
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[setting.dtype]
    return {"dtype": name, "triton": version, "command": command, **results.environment()}
