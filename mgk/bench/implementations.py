"""Implementations to compare: this package's operators, SDPA on each of its backends, FlashAttention, FlexAttention."""

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
    """A problem size, written BxHxNxD or BxHxNxDxcausal."""

    batch: int
    heads: int  # of softmax attention
    length: int
    width: int
    causal: bool
    queries: int | None = None  # number of queries for decoding; None: the same as keys

    def __str__(self) -> str:
        mask = "xcausal" if self.causal else ""
        return f"{self.batch}x{self.heads}x{self.length}x{self.width}{mask}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse a value of --shapes."""
        numbers = text.removesuffix("xcausal").split("x")
        if len(numbers) != 4 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
            fail("--shapes", f"must have the form 8x8x4096x64 or 8x8x4096x64xcausal (B, H, N, D), got {text!r}")
        batch, heads, length, width = map(int, numbers)
        if heads % 2:
            fail("--shapes", f"must have an even number of heads, which the operators halve, got {text!r}")
        return cls(batch, heads, length, width, text.endswith("xcausal"))


@dataclass(frozen=True)
class Implementation:
    """An attention variant on a backend, with its numbers of heads and components."""

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
    """A call to measure, and the inputs that require gradients."""

    forward: Callable[[], Tensor]
    inputs: list[Tensor]


@dataclass(frozen=True)
class Operator:
    """One of this package's operators, with its kind of keys and assignment."""

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
# Maximum permitted ‖result − fp64‖ / ‖fp64‖. The prior's gradient is a sum over keys that nearly cancels, especially in
# linear attention, where rounding the features to bf16 alone changes it by up to a tenth.
LIMITS = {torch.bfloat16: {"log_prior": 5e-2, "": 1e-2}, torch.float32: {"": 1e-4}}
LINEAR_PRIOR_LIMIT = 0.2
# Permitted rounding error of that sum in fp32, relative to the norm of its terms: the terms may cancel completely.
SUM_ROUNDING = 3e-6


def describe_error(error: Exception, length: int) -> str:
    """Return the class of an error and the first line of its message, truncated to `length` characters."""
    message = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {message[:length]}"


def parse_variant(text: str) -> tuple[str, int]:
    """Parse a value of --variants into variant and number of components: "smgk" has 2, "smgk:4" has 4."""
    name, _, components = text.partition(":")
    if components and not (components.isdecimal() and int(components) > 0):
        fail("--variants", f"must have the form smgk or smgk:4, got {text!r}")
    return one_of("--variants", name, OPERATORS), int(components or 2)


def random_inputs(
    implementation: Implementation, shape: Shape, device: str, dtype: torch.dtype, gradients: bool = True
) -> dict[str, Any]:
    """Return random inputs of an operator, by argument name."""
    B, N, D = shape.batch, shape.length, shape.width
    H, HK, M = implementation.heads, implementation.kv_heads, implementation.components
    operator = OPERATORS[implementation.variant]

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


def run_operator(implementation: Implementation, shape: Shape, x: dict[str, Tensor], backend: str) -> Tensor:
    """Run an operator on a backend of this package."""
    operator = OPERATORS[implementation.variant]
    options: dict[str, Any] = {"backend": backend, "is_causal": shape.causal}
    if operator.hard:
        options["assignment"] = "hard"
    output: Tensor = operator.call(**x, **options)
    return output


def make_sdpa_case(
    implementation: Implementation, shape: Shape, device: str, dtype: torch.dtype, gradients: bool = True
) -> BenchmarkCase:
    """Make a case of SDPA on one of its backends, with random inputs."""
    B, N, D = shape.batch, shape.length, shape.width
    H, HK = implementation.heads, implementation.kv_heads
    options: dict[str, Any] = {"device": device, "dtype": dtype, "requires_grad": gradients}
    query = torch.randn(B, H, shape.queries or N, D, **options)
    key, value = (torch.randn(B, HK, N, D, **options) for _ in range(2))

    def forward() -> Tensor:
        with sdpa_kernel(SDPA_BACKENDS[implementation.backend]):
            return scaled_dot_product_attention(query, key, value, is_causal=shape.causal, enable_gqa=HK < H)

    return BenchmarkCase(forward, [query, key, value])


def make_flex_forward(implementation: Implementation, shape: Shape, x: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Express sMGK as a score modification of FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    assert implementation.components == 2  # the score modification below is written for two
    scale, N, device = shape.width**-0.5, shape.length, x["query"].device.type
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device=device) if shape.causal else None
    attention = torch.compile(flex_attention, dynamic=False)

    def forward() -> Tensor:
        # Computed outside of the compiled function, in which score_mod can only read tensors from memory.
        keys = x["key"].float().unsqueeze(2) + x["shift"].unsqueeze(-2)  # [B, H, M, N, D]
        a = scale * x["query"].float() @ x["shift"].transpose(-1, -2)  # [B, H, N, M]
        c = x["log_prior"] - 0.5 * scale * keys.square().sum(-1)  # [B, H, M, N]
        # log(exp(a0 + c0) + exp(a1 + c1)) = a0 + c0 + softplus(a1 - a0 + c1 - c0). The softmax over the keys cancels
        # a0, which leaves three loads and one exponential per pair. FlexAttention differentiates only tensors that are
        # read once.
        first, row, column = c[:, :, 0].contiguous(), a[..., 1] - a[..., 0], c[:, :, 1] - c[:, :, 0]

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            difference = row[b, h, i] + column[b, h, j]
            softplus = torch.relu(difference) + torch.log(1 + torch.exp(-torch.abs(difference)))
            return s + first[b, h, j] + softplus

        output: Tensor = attention(x["query"], x["key"], x["value"], score_mod=score, block_mask=blocks, scale=scale)
        return output

    return forward


def make_forward(implementation: Implementation, shape: Shape, x: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Return the forward function of an operator, on a backend of this package or on FlexAttention."""
    if implementation.backend == "flex":
        return make_flex_forward(implementation, shape, x)
    return partial(run_operator, implementation, shape, x, implementation.backend)


def make_case(
    implementation: Implementation, shape: Shape, device: str, dtype: torch.dtype, gradients: bool = True
) -> BenchmarkCase:
    """Make a case of any implementation, with random inputs."""
    if implementation.variant == "softmax":
        from mgk.bench import flash_attention

        if implementation.backend in flash_attention.MODULES:
            return flash_attention.make_flash_case(implementation, shape, device, dtype, gradients)
        return make_sdpa_case(implementation, shape, device, dtype, gradients)
    x = random_inputs(implementation, shape, device, dtype, gradients)
    return BenchmarkCase(make_forward(implementation, shape, x), list(x.values()))


@contextlib.contextmanager
def _kernels_of(implementation: Implementation, shape: Shape) -> Iterator[None]:
    """Make small calls run the kernels of `shape` instead of those for small calls."""
    if implementation.backend != "triton":
        yield
        return
    from mgk.kernels.mixture import launch

    small = shape.batch * implementation.heads * shape.length**2 <= launch.SMALL_PAIRS
    with launch.small_call_limit(launch.SMALL_PAIRS if small else 0):
        yield


def find_errors(implementation: Implementation, shape: Shape, device: str, dtype: torch.dtype) -> list[str]:
    """Compare output and gradients with the equations in float64, on a call of at most 700 tokens.

    Args:
        implementation: The implementation to check.
        shape: The shape that is timed; the check runs its kernels.
        device: "cuda" or "cpu".
        dtype: Data type of the inputs.

    Returns:
        A message for each wrong tensor.
    """
    # Linear attention sums blocks of 512 rows: 700 covers two blocks.
    length = min(shape.length, 700 if implementation.variant in LINEAR else 333)
    timed_shape, shape = shape, replace(shape, batch=2, length=length)
    x = random_inputs(implementation, shape, device, dtype)
    exact = {name: t.detach().double().requires_grad_() for name, t in x.items()}
    if "log_prior" in exact:
        # One prior per key: its gradient holds the terms whose sum is the gradient of the shared prior.
        exact["log_prior"] = x["log_prior"].detach().double().repeat(1, 1, shape.length).requires_grad_()
    has_gradients = shape.queries is None  # the decoding kernels have none
    with _kernels_of(implementation, timed_shape), torch.set_grad_enabled(has_gradients):
        output = make_forward(implementation, shape, x)()
        grad = torch.randn_like(output)
        gradients = torch.autograd.grad(output, list(x.values()), grad) if has_gradients else ()
    exact_output = run_operator(implementation, shape, exact, "eager")
    pairs = {"output": (output, exact_output)}
    if has_gradients:
        exact_gradients = torch.autograd.grad(exact_output, list(exact.values()), grad.double())
        pairs |= dict(zip(x, zip(gradients, exact_gradients, strict=True), strict=True))
    limits = dict(LIMITS[dtype])
    if implementation.variant in LINEAR and dtype == torch.bfloat16:
        limits["log_prior"] = LINEAR_PRIOR_LIMIT
    errors = []
    for name, (actual, expected) in pairs.items():
        rounding = 0.0
        if name == "log_prior":
            rounding, expected = SUM_ROUNDING * expected.norm().item(), expected.sum(-1, keepdim=True)
        size, distance = expected.norm().item(), (actual.double() - expected).norm().item()
        # `not (… <= …)` so that NaN is an error.
        if not (distance <= limits.get(name, limits[""]) * size + rounding or math.isclose(size, 0.0)):
            error = distance / size
            errors.append(f"{implementation}, D {shape.width}, causal {shape.causal}: {name} is off by {error:.1e}")
    return errors
