"""Measure the time and memory of a training step of the Long Range Arena encoder for several models.

    python benchmarks/training_step.py --length 4096 --batch 32 --rows softmax:8,smgk:4

A step is forward, backward and optimizer, compiled, on fresh random tokens. All models run in one process; times are
medians over windows of steps. Results are appended to results/training_step.csv.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mgk.models import Classifier, EncoderConfig
from mgk.training import results
from mgk.training.config import ModelSpec
from mgk.training.evaluate import count_parameters, forward_flops
from mgk.training.profiling import median_ms, warm_up
from mgk.variants import VARIANTS


def measure(
    config: EncoderConfig, batch: int, length: int, device: torch.device, windows: int, padded: bool
) -> tuple[float, float]:
    """Return milliseconds per step and peak megabytes."""
    model = Classifier(config).to(device)
    network: Any = torch.compile(model) if device.type == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=device.type == "cuda")

    def step(_: int) -> None:
        tokens = torch.randint(1, config.vocab_size, (batch, length), device=device)
        lengths = torch.randint(length // 2, length + 1, (batch,), device=device) if padded else None
        labels = torch.randint(config.num_classes, (batch,), device=device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(network(tokens, lengths).float(), labels)
        loss.backward()
        optimizer.step()

    warm_up(step, device)
    ms = median_ms(step, device, windows)
    return ms, torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="softmax:8,softmax:4,smgk:4,mgk:4,smgk-hard:4,linear:8,mlk:4")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--padded", action="store_true", help="documents of half to full length, with a padding mask")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/training_step.csv"))
    arguments = parser.parse_args()
    results.check_file("--out", arguments.out)
    first = None
    for text in arguments.rows.split(","):
        row = ModelSpec.parse(text)
        config = EncoderConfig(
            512,
            2,
            arguments.length,
            num_heads=row.heads,
            num_kv_heads=row.kv_heads,
            num_key_heads=row.key_heads,
            variant=row.variant,
            dropout=0.1,
        )
        torch.compiler.reset()
        device = torch.device(arguments.device)
        ms, memory = measure(config, arguments.batch, arguments.length, device, arguments.windows, arguments.padded)
        first = first or ms
        print(f"{text:12s} {ms:8.2f} ms per step, {ms / first:.2f} of the first model, {memory:8.0f} MB", flush=True)
        record = {
            "recipe": "training-step" + ("-padded" if arguments.padded else ""),
            "task": "lra-encoder",
            "dataset": "random tokens",
            "variant": row.variant,
            "preset": "paper",
            "components": VARIANTS[row.variant].components or config.num_components,
            "heads": row.heads,
            "kv_heads": row.kv_heads or row.heads,
            "key_heads": row.key_heads,
            "batch": arguments.batch,
            "length": arguments.length,
            "dtype": "bf16",
            "backend": "auto",
            "metric": "step_ms",
            "value": f"{ms:.4f}",
            "params": count_parameters(config),
            "flops": forward_flops(config, arguments.length),
            "step_ms": f"{ms:.4f}",
            "peak_mem_mb": f"{memory:.0f}",
            "command": shlex.join(["python", *sys.argv]),
            **results.environment(),
        }
        results.append(arguments.out, [record])


if __name__ == "__main__":
    main()
