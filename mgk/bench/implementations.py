"""Who is measured: our operators, SDPA on each of its backends, FlexAttention; each on inputs of its own.

B batch, H heads of softmax attention (ours have H/2), N length, D head width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import mgk
from mgk._core.validation import fail, one_of


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int  # of softmax attention
    length: int
    width: int
    causal: bool
    queries: int | None = None  # for decoding; otherwise as many as keys

    def __str__(self) -> str:
        mask = "xcausal" if self.causal else ""
        return f"{self.batch}x{self.heads}x{self.length}x{self.width}{mask}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        numbers = text.removesuffix("xcausal").split("x")
        if len(numbers) != 4 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
            fail("--shapes", f"must be like 8x8x4096x64 or 8x8x4096x64xcausal (B, H, N, D), got {text!r}")
        batch, heads, length, width = map(int, numbers)
        if heads % 2:
            fail("--shapes", f"needs an even number of heads, since ours have half of them: {text!r}")
        return cls(batch, heads, length, width, text.endswith("xcausal"))


@dataclass(frozen=True)
class Implementation:
    """A row of the results: which attention, on which backend, with how many heads and components."""

    variant: str
    backend: str
    heads: int
    kv_heads: int
    components: int = 1

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}:{self.kv_heads}"
        components = f" M {self.components}" if self.components > 1 else ""
        return f"{self.variant} {self.backend} {heads} heads{components}"


class BenchmarkCase(NamedTuple):
    """One call to measure, and what it is differentiated by."""

    forward: Callable[[], Tensor]
    inputs: list[Tensor]


@dataclass(frozen=True)
class Operator:
    call: Callable[..., Any]
    shifted: bool
    hard: bool = False


OPERATORS = {
    "smgk": Operator(mgk.smgk_attention, True),
    "smgk-hard": Operator(mgk.smgk_attention, True, hard=True),
    "mgk": Operator(mgk.mgk_attention, False),
    "mgk-hard": Operator(mgk.mgk_attention, False, hard=True),
    "mlk": Operator(mgk.mlk_attention, False),
    "smlk": Operator(mgk.smlk_attention, True),
}
LINEAR = ("mlk", "smlk")
SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# ‖ours − fp64‖ / ‖fp64‖ that is not wrong yet. The prior's gradient is a sum over keys that nearly cancels, most of all
# in linear attention, where rounding the features to bf16 alone moves it by up to a tenth.
LIMITS = {torch.bfloat16: {"log_prior": 5e-2, "": 1e-2}, torch.float32: {"": 1e-4}}
LINEAR_PRIOR_LIMIT = 0.2
# Of the norm of its terms, what fp32 may lose when it adds them up: by chance next to nothing of them is left.
SUM_ROUNDING = 3e-6


def variant_and_components(text: str) -> tuple[str, int]:
    """`smgk` has two components, `smgk:4` four."""
    name, _, components = text.partition(":")
    if components and not (components.isdecimal() and int(components) > 0):
        fail("--variants", f"must be like smgk or smgk:4, got {text!r}")
    return one_of("--variants", name, OPERATORS), int(components or 2)


def draw(
    contender: Implementation, shape: Shape, device: str, dtype: torch.dtype, gradients: bool = True
) -> dict[str, Any]:
    """Fresh random inputs of one of our operators, by name."""
    B, N, D, H, HK, M = *(shape.batch, shape.length, shape.width), contender.heads, contender.kv_heads, (
        contender.components
    )  # fmt: skip
    operator = OPERATORS[contender.variant]

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, device=device)

    x = {"query": randn(B, H, shape.queries or N, D), "value": randn(B, HK, N, D)}
    x |= {"key": randn(B, HK, N, D)} if operator.shifted else {"keys": randn(B, HK, M, N, D)}
    x = {name: t.to(dtype) for name, t in x.items()}
    if operator.shifted:
        x["shift"] = 0.5 * randn(HK, M, D)
    if not operator.hard:
        x["log_prior"] = randn(HK, M, 1).log_softmax(1)
    return {name: t.requires_grad_(gradients) for name, t in x.items()}


def attend(contender: Implementation, shape: Shape, x: dict[str, Tensor], backend: str) -> Tensor:
    operator = OPERATORS[contender.variant]
    options: dict[str, Any] = {"backend": backend, "is_causal": shape.causal}
    if operator.hard:
        options["assignment"] = "hard"
    output: Tensor = operator.call(**x, **options)
    return output


def softmax(
    contender: Implementation, shape: Shape, device: str, dtype: torch.dtype, gradients: bool = True
) -> BenchmarkCase:
    B, N, D = shape.batch, shape.length, shape.width
    query = torch.randn(B, contender.heads, shape.queries or N, D, device=device, dtype=dtype, requires_grad=gradients)
    key, value = (
        torch.randn(B, contender.kv_heads, N, D, device=device, dtype=dtype, requires_grad=gradients) for _ in range(2)
    )
    grouped = contender.kv_heads < contender.heads

    def forward() -> Tensor:
        with sdpa_kernel(SDPA_BACKENDS[contender.backend]):
            return scaled_dot_product_attention(query, key, value, is_causal=shape.causal, enable_gqa=grouped)

    return BenchmarkCase(forward, [query, key, value])


def expressed(contender: Implementation, shape: Shape, x: dict[str, Tensor]) -> Callable[[], Tensor]:
    """sMGK as a score modification of FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    assert contender.components == 2  # as many as the modification below has
    scale, N, device = shape.width**-0.5, shape.length, x["query"].device.type
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device=device) if shape.causal else None
    attention = torch.compile(flex_attention, dynamic=False)

    def forward() -> Tensor:
        # Prepared outside of the compiled part, which takes only tensors that lie in memory.
        keys = x["key"].float().unsqueeze(2) + x["shift"].unsqueeze(-2)  # [B, H, M, N, D]
        a = scale * x["query"].float() @ x["shift"].transpose(-1, -2)  # [B, H, N, M]
        c = x["log_prior"] - 0.5 * scale * keys.square().sum(-1)  # [B, H, M, N]
        # log(exp(a0 + c0) + exp(a1 + c1)) = a0 + c0 + softplus(a1 - a0 + c1 - c0), where a0 is the same for all keys of
        # a row and so changes nothing: three numbers to look up for a pair, and one exponential. FlexAttention has
        # gradients only of tensors that are read in one place.
        first, row, column = c[:, :, 0].contiguous(), a[..., 1] - a[..., 0], c[:, :, 1] - c[:, :, 0]

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            difference = row[b, h, i] + column[b, h, j]
            softplus = torch.relu(difference) + torch.log(1 + torch.exp(-torch.abs(difference)))
            return s + first[b, h, j] + softplus

        output: Tensor = attention(x["query"], x["key"], x["value"], score_mod=score, block_mask=blocks, scale=scale)
        return output

    return forward


def call_of(contender: Implementation, shape: Shape, x: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Of one of our operators, whoever computes it."""
    if contender.backend == "flex":
        return expressed(contender, shape, x)
    return partial(attend, contender, shape, x, contender.backend)


def make(
    contender: Implementation, shape: Shape, device: str, dtype: torch.dtype, gradients: bool = True
) -> BenchmarkCase:
    if contender.variant == "softmax":
        return softmax(contender, shape, device, dtype, gradients)
    x = draw(contender, shape, device, dtype, gradients)
    return BenchmarkCase(call_of(contender, shape, x), list(x.values()))


@contextlib.contextmanager
def _kernels_of(contender: Implementation, shape: Shape) -> Iterator[None]:
    """A short call takes the kernels that one of `shape` takes: small calls have their own."""
    if contender.backend != "triton":
        yield
        return
    from mgk.kernels.mixture import launch

    limit = launch.SMALL_PAIRS
    small = shape.batch * contender.heads * shape.length**2 <= limit
    launch.SMALL_PAIRS = limit if small else 0
    try:
        yield
    finally:
        launch.SMALL_PAIRS = limit


def wrong(contender: Implementation, shape: Shape, device: str, dtype: torch.dtype) -> list[str]:
    """In words, which of the output and the gradients is not what the equations give in float64, on a short call."""
    # Linear attention has sums of 512 rows.
    timed, shape = shape, replace(shape, batch=2, length=min(shape.length, 700 if contender.variant in LINEAR else 333))
    x = draw(contender, shape, device, dtype)
    exact = {name: t.detach().double().requires_grad_() for name, t in x.items()}
    if "log_prior" in exact:
        # For each key by itself: its gradient has the terms of that of the one for all keys.
        exact["log_prior"] = x["log_prior"].detach().double().repeat(1, 1, shape.length).requires_grad_()
    decodes = shape.queries is not None  # forward only, by kernels that have no gradients
    with _kernels_of(contender, timed), torch.set_grad_enabled(not decodes):
        found = call_of(contender, shape, x)()
        grad = torch.randn_like(found)
        gradients = () if decodes else torch.autograd.grad(found, list(x.values()), grad)
    wanted = attend(contender, shape, exact, "eager")
    pairs = {"output": (found, wanted)}
    exact_gradients = () if decodes else torch.autograd.grad(wanted, list(exact.values()), grad.double())
    pairs |= dict(zip(() if decodes else x, zip(gradients, exact_gradients, strict=True), strict=True))
    limits = dict(LIMITS[dtype])
    if contender.variant in LINEAR and dtype == torch.bfloat16:
        limits["log_prior"] = LINEAR_PRIOR_LIMIT
    lines = []
    for name, (got, want) in pairs.items():
        rounding = 0.0
        if name == "log_prior":
            rounding, want = SUM_ROUNDING * want.norm().item(), want.sum(-1, keepdim=True)
        size, distance = want.norm().item(), (got.double() - want).norm().item()
        # Written so that NaN is wrong as well.
        if not (distance <= limits.get(name, limits[""]) * size + rounding or math.isclose(size, 0.0)):
            error = distance / size
            lines.append(f"{contender}, D {shape.width}, causal {shape.causal}: {name} is off by {error:.1e}")
    return lines
