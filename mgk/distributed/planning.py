"""Memory and communication of a training step on many GPUs, from formulas that the tests compare with small runs.

`python -m mgk.distributed.planning` prints the plan of docs/distributed.md; options change length and layouts.
A rank holds 1/cp of each sequence and 1/tp of the heads; FSDP shards the parameters over dp × cp ranks. Activations are
recomputed in the backward pass, one layer at a time (torch.utils.checkpoint), and the parameters are kept in fp32 and
gathered in the compute dtype (MixedPrecisionPolicy).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from mgk._core.io import write_atomically
from mgk._core.markdown import fill_marked_parts, markdown_table
from mgk._core.validation import fail, positive_integer
from mgk.models.adaptive_softmax import MAX_LOGITS
from mgk.models.decoder import FORMS, DecoderConfig, LanguageModel
from mgk.variants import VARIANTS

GB = 1e9
# Parameters of a layer that tensor parallelism does not shard: norms, and biases added after the sum over ranks.
REPLICATED = re.compile(r"^layers\.\d+\.(before_|after_|attention\.out\.bias$|mlp\.(3|down)\.bias$)")
MASTER_BYTES = 4  # parameters and their gradients are kept in fp32
ADAM_BYTES = 8  # two moments in fp32


@dataclass(frozen=True)
class Layout:
    """Numbers of ranks for data, context and tensor parallelism."""

    dp: int
    cp: int
    tp: int

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "tp"):
            positive_integer(name, getattr(self, name))

    @property
    def fsdp(self) -> int:
        """Number of ranks that FSDP shards parameters over."""
        return self.dp * self.cp

    def __str__(self) -> str:
        return f"{self.dp} × {self.cp} × {self.tp}"


@dataclass(frozen=True)
class TrainingStep:
    """A training step: a model, a layout, and the sequences of a data-parallel rank.

    Attributes:
        config: The model; all layers have one mixture variant.
        layout: The ranks.
        length: Length of the sequences.
        sequences: Number of sequences of each data-parallel rank.
        compute_bytes: Bytes of an activation and of a gathered parameter; 2 is bf16.
        recompute: Whether the activations of layers are recomputed.
    """

    config: DecoderConfig
    layout: Layout
    length: int
    sequences: int = 1
    compute_bytes: int = 2
    recompute: bool = True

    def __post_init__(self) -> None:
        if VARIANTS[self.config.layer_variants[0]].similarity == "linear" or len({*self.config.layer_variants}) > 1:
            fail("config", "must have one mixture variant in all layers")
        if self.length % (2 * self.layout.cp):
            fail("length", f"= {self.length} must be a multiple of 2 × cp = {2 * self.layout.cp}")
        for count in (self.config.num_heads, self.key_heads, self.value_heads, self.config.ffn_dim):
            if count % self.layout.tp:
                fail("layout", f"has tp = {self.layout.tp}, which does not divide {count} heads or hidden units")

    @property
    def value_heads(self) -> int:
        return self.config.num_kv_heads or self.config.num_heads

    @property
    def key_heads(self) -> int:
        return self.config.num_key_heads or self.value_heads

    @property
    def tokens(self) -> int:
        """Number of tokens of a rank."""
        return self.sequences * self.length // self.layout.cp

    @property
    def key_copies(self) -> int:
        """Number of keys per token and head that are stored: M with independent component keys."""
        variant = VARIANTS[self.config.layer_variants[0]]
        return (variant.components or self.config.num_components) if variant.keys == "independent" else 1


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a rank before FSDP shards them."""

    layers: int
    root: int  # embedding, final norm

    @property
    def total(self) -> int:
        return self.layers + self.root


@cache
def count_parameters(config: DecoderConfig, tp: int = 1) -> Parameters:
    """Return the numbers of parameters that one of `tp` tensor-parallel ranks has."""
    with torch.device("meta"):
        model = LanguageModel(config)
    layers = root = 0
    for name, parameter in model.named_parameters():
        if not name.startswith("layers."):
            root += parameter.numel()
        else:
            layers += parameter.numel() if REPLICATED.match(name) else parameter.numel() // tp
    return Parameters(layers, root)


def key_value_bytes(step: TrainingStep, element_bytes: int) -> int:
    """Return the size of a rank's block of keys and values in one layer."""
    heads = step.key_copies * step.key_heads + step.value_heads
    return step.tokens * heads // step.layout.tp * step.config.head_dim * element_bytes


def ring_bytes(step: TrainingStep) -> int:
    """Return the bytes that a rank sends to its neighbour: keys and values, and their gradients in fp32.

    The ring has cp - 1 steps in every pass. Gradients travel one step further, to the owner of the keys.
    """
    cp = step.layout.cp
    if cp == 1:
        return 0
    passes = 3 if step.recompute else 2
    per_layer = passes * (cp - 1) * key_value_bytes(step, step.compute_bytes) + cp * key_value_bytes(step, 4)
    return step.config.num_layers * per_layer


def tensor_parallel_volume(step: TrainingStep) -> int:
    """Return the bytes of the tensors that are summed over tensor-parallel ranks.

    A layer sums the outputs of attention and feed-forward layer, and the gradients of their inputs. The recomputation
    stops before the sum of the feed-forward layer's output, which no gradient needs.
    """
    if step.layout.tp == 1:
        return 0
    sums = 5 if step.recompute else 4
    return step.config.num_layers * sums * step.tokens * step.config.embed_dim * step.compute_bytes


def tensor_parallel_bytes(step: TrainingStep) -> int:
    """Return the bytes that a rank sends for these sums: a ring all-reduce sends 2 (tp - 1) / tp of a tensor."""
    return tensor_parallel_volume(step) * 2 * (step.layout.tp - 1) // step.layout.tp


def fsdp_volumes(step: TrainingStep) -> tuple[int, int]:
    """Return the bytes of the gathered parameters and of the reduced gradients.

    The layers are gathered in the forward and the backward pass, the rest once.
    """
    if step.layout.fsdp == 1:
        return 0, 0
    parameters = count_parameters(step.config, step.layout.tp)
    return (2 * parameters.layers + parameters.root) * step.compute_bytes, parameters.total * MASTER_BYTES


def fsdp_bytes(step: TrainingStep) -> int:
    """Return the bytes that a rank sends: (n - 1) / n of every gathered and reduced tensor."""
    ranks = step.layout.fsdp
    return sum(fsdp_volumes(step)) * (ranks - 1) // ranks


def state_bytes(step: TrainingStep) -> int:
    """Return the memory of parameters, gradients and Adam's moments of a rank."""
    parameters = count_parameters(step.config, step.layout.tp)
    return parameters.total * (2 * MASTER_BYTES + ADAM_BYTES) // step.layout.fsdp


def gathered_bytes(step: TrainingStep) -> int:
    """Return the memory of gathered parameters and whole gradients: the root, the current layer and the next one."""
    if step.layout.fsdp == 1:
        return 0
    parameters = count_parameters(step.config, step.layout.tp)
    layer = parameters.layers // step.config.num_layers
    return (2 * layer + parameters.root) * step.compute_bytes + (layer + parameters.root) * MASTER_BYTES


def saved_bytes(step: TrainingStep) -> int:
    """Return the memory that one layer saves for its backward pass (pre-norm, rotary positions, SwiGLU).

    Each norm saves its input, the normalized input and its output; attention saves query, keys, value, the output twice
    (as heads and as rows) and the lse in fp32; rotary positions sine and cosine for queries and keys; SwiGLU gate, up,
    silu(gate) and their product.
    """
    config, tp = step.config, step.layout.tp
    heads = (3 * config.num_heads + step.key_copies * step.key_heads + step.value_heads) // tp
    # The norms also save one number per token; the rotary angles are shared by all sequences and heads.
    elements = step.tokens * (6 * config.embed_dim + heads * config.head_dim + 4 * config.ffn_dim // tp + 2)
    rotary = step.tokens // step.sequences * 2 * config.head_dim
    return (elements + rotary) * step.compute_bytes + step.tokens * config.num_heads // tp * 4


def activation_bytes(step: TrainingStep) -> int:
    """Return an upper bound of the memory of activations: inputs of all layers, one recomputed layer, logits.

    While a layer is differentiated, its saved tensors and gradients of at most the same size are in memory, and two
    blocks of keys and values with their gradients.
    """
    config = step.config
    stored = step.tokens * config.embed_dim * step.compute_bytes * config.num_layers
    layers = 2 * saved_bytes(step) * (1 if step.recompute else config.num_layers)
    ring = 2 * (key_value_bytes(step, step.compute_bytes) + key_value_bytes(step, 4)) if step.layout.cp > 1 else 0
    # Logits and their gradient, in fp32, of a chunk of tokens.
    logits = 2 * 4 * min(MAX_LOGITS, step.tokens * config.vocab_size)
    return (stored if step.recompute else 0) + layers + ring + logits


def attention_intensity(step: TrainingStep) -> float:
    """Return the FLOPs of causal attention per byte that the ring sends, in the forward pass of a layer."""
    config, layout = step.config, step.layout
    pairs = step.tokens * step.length / 2
    flops = 2 * pairs * config.num_heads // layout.tp * config.head_dim * (step.key_copies + 1)
    return flops / ((layout.cp - 1) * key_value_bytes(step, step.compute_bytes))


# The plan of docs/distributed.md: a decoder of 7 B parameters, sequences of 128 k tokens, 64 GPUs.
SIZES = {"embed_dim": 4096, "ffn_dim": 11008, "num_layers": 32, "head_dim": 128, "dropout": 0.0}
MODELS = {
    "softmax:32": DecoderConfig(32_000, **{**SIZES, **FORMS["modern"]}, variant="softmax", num_heads=32),
    "smgk:16": DecoderConfig(32_000, **{**SIZES, **FORMS["modern"]}, variant="smgk", num_heads=16),
}
LAYOUTS = (Layout(1, 64, 1), Layout(4, 16, 1), Layout(1, 16, 4), Layout(1, 8, 8))
LENGTH = 131_072


def plan_table(length: int = LENGTH, layouts: Sequence[Layout] = LAYOUTS) -> str:
    """Return a Markdown table of memory and communication of a rank."""
    header = [
        "model", "dp × cp × tp", "parameters, B", "state, GB", "gathered, GB", "activations, GB", "**memory, GB**",
        "ring, GB", "TP, GB", "FSDP, GB", "FLOPs per byte of the ring",
    ]  # fmt: skip
    rows = []
    for name, config in MODELS.items():
        for layout in layouts:
            step = TrainingStep(config, layout, length)
            memory = [state_bytes(step), gathered_bytes(step), activation_bytes(step)]
            sent = [ring_bytes(step), tensor_parallel_bytes(step), fsdp_bytes(step)]
            cells = [f"{number / GB:.1f}" for number in memory] + [f"**{sum(memory) / GB:.1f}**"]
            cells += [f"{number / GB:.1f}" for number in sent]
            intensity = f"{attention_intensity(step):,.0f}" if layout.cp > 1 else "–"
            rows.append([name, str(layout), f"{count_parameters(config).total / 1e9:.2f}", *cells, intensity])
    return markdown_table([header, *rows])


def _layouts(text: str) -> list[Layout]:
    try:
        return [Layout(*map(int, part.split("x"))) for part in text.split(",")]
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"must be like 1x16x4,1x8x8 (dp x cp x tp), got {text!r}") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or write it to a page."""
    parser = argparse.ArgumentParser(description="Plan the memory and the communication of a run on many GPUs.")
    parser.add_argument("--length", type=int, default=LENGTH, help="Length of the sequences.")
    parser.add_argument("--layouts", type=_layouts, default=LAYOUTS, help="Layouts dp x cp x tp, such as 1x16x4,1x8x8.")
    parser.add_argument("--page", type=Path, help="Page whose marked table is replaced.")
    options = parser.parse_args(arguments)
    try:
        table = plan_table(options.length, options.layouts)
        if options.page is None:
            print(table)
        else:
            page = options.page.read_text(encoding="utf-8")
            write_atomically(options.page, fill_marked_parts(page, {"plan": table}, keep_others=True))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
