"""Benchmark the paper's language model on a GPU: training throughput, sliding-window evaluation, decoding.

    python benchmarks/language_model.py --parts throughput,evaluation,decoding
    python benchmarks/language_model.py --tiny --device cpu           # a smoke test of all parts

throughput: forward, backward and optimizer at 24,576 tokens per step, layers compiled and steps captured as CUDA graphs
as in training (--plain: not captured), relative to the first model.
evaluation: check the sliding window against one window at a time, then time it for the whole text.
decoding: tokens per second with and without CUDA graph capture, and bytes of cache, against the length; plots both
(--picture: only plots).
Results are appended to results/language_model.csv.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mgk._core.palette import colour_of
from mgk.analysis.report.drawing import End, label_ends, save_png
from mgk.analysis.report.figures import alternating_dashes
from mgk.models import DecoderConfig, LanguageModel, load_model
from mgk.models.cuda_graphs import GraphedBackward
from mgk.models.generation import DecodingStep
from mgk.models.sliding_window import sliding_losses
from mgk.training import results
from mgk.training.config import ModelSpec
from mgk.training.evaluate import count_parameters, forward_flops
from mgk.variants import VARIANTS

PARTS = ("throughput", "evaluation", "decoding")
PAPER = DecoderConfig(267_735, cutoffs=(20_000, 40_000, 200_000))
TINY = DecoderConfig(500, 16, embed_dim=16, ffn_dim=32, num_layers=2, head_dim=4, cutoffs=(100, 200, 400))
# Share of the words of an English text in each cluster of the paper's cutoffs, counted on Wikipedia.
SHARES = (0.9355, 0.0311, 0.032, 0.0014)
# Metric names of decoding without and with CUDA graph capture.
PLAIN, CAPTURED = "decode_tokens_per_second", "decode_tokens_per_second_recorded"
# Target throughput relative to the first model: (variant, length) -> minimum.
TARGETS = {("smgk", 256): 1.0, ("mgk", 256): 1.0, ("smgk", 4096): 1.1, ("mgk", 4096): 0.95}


def config_of(row: ModelSpec, base: DecoderConfig, length: int) -> DecoderConfig:
    return replace(
        base,
        variant=row.variant,
        num_heads=row.heads,
        num_kv_heads=row.kv_heads,
        num_key_heads=row.key_heads,
        max_length=max(length, base.max_length),
    )


def words(config: DecoderConfig, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Draw random words with the cluster frequencies of a text."""
    edges = [0, *config.cutoffs, config.vocab_size]
    cluster = np.random.choice(len(SHARES), size=shape, p=np.array(SHARES) / sum(SHARES))
    low, high = np.array(edges[:-1])[cluster], np.array(edges[1:])[cluster]
    return torch.from_numpy(np.random.randint(low, high)).to(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


class Bench:
    """The parts of the benchmark, with the options of the command line."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.base = TINY if arguments.tiny else PAPER
        self.rows = [ModelSpec.parse(text) for text in arguments.rows.split(",")]

    def record(self, row: ModelSpec, config: DecoderConfig, metric: str, value: float, **columns: Any) -> None:
        """Append a result; `columns` are further columns."""
        line = {
            "recipe": "language-model",
            "task": "tiny" if self.arguments.tiny else "wikitext-103 model",
            "dataset": "random words",
            "variant": row.variant,
            "preset": config.preset,
            "components": VARIANTS[row.variant].components or config.num_components,
            "heads": row.heads,
            "kv_heads": row.kv_heads or row.heads,
            "key_heads": row.key_heads,
            "dtype": "bf16",
            "backend": config.backend,
            "metric": metric,
            "value": f"{value:.6g}",
            "params": count_parameters(config),
            "command": shlex.join(["python", *sys.argv]),
            **results.environment(),
            **columns,
        }
        results.append(self.arguments.out, [line])

    def throughput(self) -> None:
        """Time training steps."""
        tokens_per_step = 96 * 256 if not self.arguments.tiny else 256
        for length in self.arguments.lengths:
            first = None
            for row in self.rows:
                torch.compiler.reset()
                config = config_of(row, self.base, length)
                batch = max(1, tokens_per_step // length)
                steps = self.prepare(config, batch, length)
                if self.arguments.warm_only:
                    continue
                ms, memory = self.time_steps(steps)
                rate = 1000 * batch * length / ms
                first = first or rate
                target = TARGETS.get((row.variant, length), 0.0) if row != self.rows[0] else 0.0
                verdict = "" if not target else f", {'meets' if rate / first >= target else 'MISSES'} {target}"
                print(
                    f"length {length:5d} {row!s:12s} {ms:7.2f} ms per step {rate:12,.0f} tokens/s"
                    f" {rate / first:5.2f} of the first model{verdict} {memory:8,.0f} MB",
                    flush=True,
                )
                flops = forward_flops(config, length)
                columns = {"batch": batch, "length": length, "step_ms": f"{ms:.4f}", "peak_mem_mb": f"{memory:.0f}"}
                metric = "tokens_per_second" + ("_plain" if self.arguments.plain else "")
                self.record(row, config, metric, rate, flops=flops, **columns)

    def prepare(self, config: DecoderConfig, batch: int, length: int) -> Callable[[int], None]:
        """Return a function that runs n training steps, compiled and warmed up."""
        device = self.device
        if device.type == "cuda":
            # Graph capture allocates from a private pool: free the cache first.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        np.random.seed(0)  # the same words for all models: rare words cost more
        model = LanguageModel(config).to(device)
        if device.type == "cuda":
            model.compile_layers()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, eps=1e-8, weight_decay=0.0, fused=device.type == "cuda")
        texts = [words(config, (batch, length + 1), device) for _ in range(4)]
        capacities = [tuple(model.table.cluster_capacities(text[:, 1:])) for text in texts]
        learn = GraphedBackward(
            list(model.parameters()),
            lambda x, y, *capacities: {"loss": model.losses(x, y, capacities).mean()},
            use_graphs=device.type == "cuda" and not self.arguments.plain,
        )

        def steps(count: int) -> None:
            for n in range(count):
                text = texts[n % 4]
                with torch.autocast(device.type, torch.bfloat16):
                    learn((text[:, :-1], text[:, 1:]), capacities[n % 4])
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                optimizer.step()

        start = time.perf_counter()
        steps(2 if self.arguments.tiny else 8)
        synchronize(device)
        print(f"  ready after {time.perf_counter() - start:.1f} s", flush=True)
        return steps

    def time_steps(self, steps: Callable[[int], None]) -> tuple[float, float]:
        """Return milliseconds per step and peak megabytes."""
        device = self.device
        count = 2 if self.arguments.tiny else 20
        times = [1000 * seconds(lambda: steps(count), device) / count for _ in range(self.arguments.windows)]
        memory = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else float("nan")
        return statistics.median(times), memory

    def evaluation(self) -> None:
        """Check the sliding window, then time it."""
        model = self.evaluated_model()
        config = model.config
        row = ModelSpec(str(config.variant), config.num_heads, config.num_kv_heads, config.num_key_heads)
        tokens = self.arguments.tokens
        if tokens is not None:
            text = torch.from_numpy(np.load(tokens, allow_pickle=False).astype(np.int64)).to(self.device)
        else:
            # The length of WikiText-103's validation set.
            length = 100 * config.max_length if self.arguments.tiny else 217_646
            text = words(config, (length,), self.device)
        columns = {"length": config.max_length, "dataset": "random words" if tokens is None else tokens.name}
        for dtype in ("fp32", "bf16"):
            self.compare_windows(model, row, text, dtype, columns)
        for dtype in [name for name in self.arguments.timed.split(",") if name != "none"]:
            elapsed = seconds(functools.partial(self.slide, model, text, dtype), self.device)
            print(f"{row!s:12s} {dtype}: {len(text) - 1:,} positions in {elapsed:.1f} s", flush=True)
            self.record(row, config, "sliding_seconds", elapsed, **columns, n_examples=len(text) - 1, dtype=dtype)

    def evaluated_model(self) -> LanguageModel:
        """Return the saved model of --model, or a random one."""
        if self.arguments.model is None:
            config = config_of(self.rows[0], self.base, self.base.max_length)
            return LanguageModel(config).to(self.device).eval()
        model = load_model(self.arguments.model, self.device)
        assert isinstance(model, LanguageModel)
        return model

    @torch.no_grad()
    def slide(self, model: LanguageModel, text: torch.Tensor, dtype: str) -> torch.Tensor:
        """Return the losses of a text with a sliding window."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=dtype == "bf16"):
            return sliding_losses(model, text, batch_size=self.arguments.window_batch)

    @torch.no_grad()
    def compare_windows(
        self, model: LanguageModel, row: ModelSpec, text: torch.Tensor, dtype: str, columns: dict[str, Any]
    ) -> None:
        """Compare the sliding window with one window at a time; exit if they differ in fp32."""
        window = model.config.max_length
        count = min(self.arguments.compared, len(text) - window - 1)
        part = text[: window + 1 + count]
        losses = self.slide(model, part, dtype)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=dtype == "bf16"):
            expected = [model.losses(part[None, :window], part[None, 1 : window + 1])[0]]
            expected += [
                model.losses(part[None, n : n + window], part[None, n + 1 : n + 1 + window])[0, -1:]
                for n in range(1, count + 1)
            ]
        difference = losses - torch.cat(expected)
        largest, mean = float(difference.abs().max()), float(difference.mean())
        print(f"{row!s:12s} {dtype}: {count:,} windows, largest {largest:.2e}, mean {mean:.2e} nats apart", flush=True)
        columns = {**columns, "n_examples": count + window, "dtype": dtype}
        self.record(row, model.config, "sliding_difference_largest", largest, **columns)
        self.record(row, model.config, "sliding_difference_mean", abs(mean), **columns)
        if dtype == "fp32" and largest > 1e-4:
            raise SystemExit("the sliding window differs from one window at a time: not timed")

    def decoding(self) -> None:
        """Time decoding at several lengths."""
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        for row in self.rows:
            config = config_of(row, self.base, max(self.arguments.decode_lengths))
            model = LanguageModel(config).to(self.device, dtype).eval()
            for length in self.arguments.decode_lengths:
                measured = self.measure_decoding(model, length)
                values = [f"{metric} {value:,.1f}" for metric, value in measured.items()]
                print(f"{row!s:12s} length {length:6d} {', '.join(values)}", flush=True)
                columns = {"batch": 1, "length": length, "dtype": str(dtype).removeprefix("torch.")}
                for metric, value in measured.items():
                    self.record(row, config, metric, value, **columns)

    @torch.no_grad()
    def measure_decoding(self, model: LanguageModel, length: int) -> dict[str, float]:
        """Return the bytes of the cache and tokens per second, with graph capture only if the device supports it."""
        steps = 4 if self.arguments.tiny else 32
        caches = model.make_caches(1, length + 4 * steps)
        for chunk in words(model.config, (1, length), self.device).split(4096, dim=1):
            model.hidden(chunk, caches=caches)

        def plain(token: torch.Tensor) -> torch.Tensor:
            return model.table.logits(model.hidden(token, caches=caches)[:, -1])

        def decode(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            for _ in range(steps):
                token = step(token).argmax(-1, keepdim=True)

        # The size for `length` tokens, without the capacity for the timed steps.
        measured: dict[str, float] = {"cache_bytes": sum(cache.nbytes for cache in model.make_caches(1, length))}
        captured = DecodingStep(model, caches)
        for metric, step in ((PLAIN, plain), (CAPTURED, captured)):
            decode(step)
            measured[metric] = steps / seconds(functools.partial(decode, step), self.device)
        if not captured.is_captured:
            del measured[CAPTURED]
        return measured


def draw(path: Path, picture: Path) -> None:
    """Plot decoding speed and cache size against the length, from the last rows of the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, dict[str, dict[int, float]]] = {CAPTURED: {}, PLAIN: {}, "cache_bytes": {}}
    for row in results.read([path]):
        if row["metric"] in lines:
            key_heads = int(row["key_heads"]) if row.get("key_heads") else None
            kv_heads = None if row["kv_heads"] == row["heads"] else int(row["kv_heads"])
            name = str(ModelSpec(row["variant"], int(row["heads"]), kv_heads, key_heads))
            lines[row["metric"]].setdefault(name, {})[int(row["length"])] = float(row["value"])
    # Without graphs, launches by Python take most of the time.
    speeds = lines[CAPTURED] or lines[PLAIN]
    megabytes = {
        name: {length: value / 1e6 for length, value in points.items()} for name, points in lines["cache_bytes"].items()
    }
    figure, (speed, cache) = pyplot.subplots(1, 2, figsize=(8.8, 3.8), constrained_layout=True)
    graphs = "with" if lines[CAPTURED] else "without"
    speed_title = f"tokens per second, one sequence, {graphs} CUDA graphs\n(the axis does not start at 0)"
    for axes, title, scale in ((speed, speed_title, "linear"), (cache, "cache of one sequence, MB", "log")):
        axes.set_title(title, fontsize=10)
        axes.set_yscale(scale)
        axes.set_xscale("log", base=2)
        lengths = sorted({length for points in speeds.values() for length in points})
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_xlabel("tokens in the cache", fontsize=10)
        axes.tick_params(labelsize=9)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    cache.yaxis.set_major_formatter("{x:g}")
    # Dashed: fewer key heads than query heads. Lines that coincide alternate.
    plot_lines(speed, speeds, {name: (0, (4, 2)) if "/" in name else "-" for name in speeds})
    plot_lines(cache, megabytes, alternating_dashes({name: list(p.values()) for name, p in megabytes.items()}))
    for axes, named in ((speed, speeds), (cache, megabytes)):
        ends = [(name, max(points), points[max(points)]) for name, points in named.items()]
        label_ends(axes, [End(x, y, name, colour_of(name.partition(":")[0])) for name, x, y in ends])
    save_png(figure, picture, dpi=140)
    pyplot.close(figure)


def plot_lines(axes: Any, lines: dict[str, dict[int, float]], styles: dict[str, Any]) -> None:
    """Plot a line per model."""
    for name, points in lines.items():
        x, y = zip(*sorted(points.items()), strict=True)
        marker = "s" if "/" in name else "o"
        colour = colour_of(name.partition(":")[0])
        axes.plot(x, y, linestyle=styles[name], linewidth=1.8, color=colour)
        axes.plot(x, y, marker, markersize=4, color=colour)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parts_of(text: str) -> list[str]:
    """Parse --parts."""
    parts = text.split(",")
    if unknown := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"has no part {unknown.pop()!r}; the parts are {', '.join(PARTS)}")
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=parts_of, default=list(PARTS), help="separated by commas (default: all)")
    parser.add_argument("--rows", default="softmax:8,smgk:4,mgk:4")
    parser.add_argument("--lengths", type=numbers, default=[256, 4096])
    parser.add_argument("--windows", type=int, default=5, help="number of timings; the median is reported")
    parser.add_argument("--decode-lengths", type=numbers, default=[256, 1024, 4096, 16384])
    parser.add_argument("--model", type=Path, help="evaluation: a saved model instead of a random one")
    parser.add_argument("--tokens", type=Path, help="evaluation: ids of a text, .npy, instead of random words")
    parser.add_argument("--compared", type=int, default=2000, help="evaluation: windows to compare one by one")
    parser.add_argument(
        "--timed", default="bf16,fp32", help="evaluation: precisions to time the whole text in, or `none`"
    )
    parser.add_argument("--window-batch", type=int, default=1024)
    parser.add_argument("--plain", action="store_true", help="throughput: do not capture steps as CUDA graphs")
    parser.add_argument("--warm-only", action="store_true", help="throughput: compile only")
    parser.add_argument("--picture", action="store_true", help="only redraw the picture from the file of --out")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/language_model.csv"))
    arguments = parser.parse_args()
    results.check_file("--out", arguments.out)
    bench = Bench(arguments)
    for part in arguments.parts if not arguments.picture else ():
        {"throughput": bench.throughput, "evaluation": bench.evaluation, "decoding": bench.decoding}[part]()
    if arguments.picture or "decoding" in arguments.parts:
        draw(arguments.out, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
