"""FlashAttention-3 and -4 as peers of `mgk bench`, where they are installed.

FlashAttention-3 is the module `flash_attn_interface`, FlashAttention-4 the package `flash_attn.cute`. Both take tensors
[B, N, H, D].
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mgk.bench.implementations import BenchmarkCase, Implementation, Shape, describe_error

# Modules with a function flash_attn_func(query, key, value, causal=...), by backend name.
MODULES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
# Maximum permitted ‖output − SDPA in fp32‖ / ‖SDPA in fp32‖.
LIMIT = 2e-2


def find_function(backend: str) -> Callable[..., Any] | None:
    """Return flash_attn_func of a backend, or None if it is not installed."""
    try:
        function: Callable[..., Any] = importlib.import_module(MODULES[backend]).flash_attn_func
    except (ImportError, AttributeError, OSError, RuntimeError):  # also a build for another version of CUDA or torch
        return None
    return function


def make_flash_case(
    implementation: Implementation, shape: Shape, device: str, dtype: torch.dtype, gradients: bool = True
) -> BenchmarkCase:
    """Make a case of FlashAttention, with random inputs."""
    function = find_function(implementation.backend)
    if function is None:
        raise ImportError(f"{MODULES[implementation.backend]} is not installed")
    B, N, D = shape.batch, shape.length, shape.width
    options: dict[str, Any] = {"device": device, "dtype": dtype, "requires_grad": gradients}
    query = torch.randn(B, shape.queries or N, implementation.heads, D, **options)
    key, value = (torch.randn(B, N, implementation.kv_heads, D, **options) for _ in range(2))

    def forward() -> Tensor:
        output = function(query, key, value, causal=shape.causal)
        # Some versions also return lse.
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    return BenchmarkCase(forward, [query, key, value])


def find_error(backend: str, device: str, dtype: torch.dtype) -> str | None:
    """Compare a causal call with SDPA in fp32; return an error message, or None if the output is correct."""
    case = make_flash_case(Implementation("softmax", backend, 4, 2), Shape(2, 4, 256, 64, True), device, dtype)
    query, key, value = (x.detach().float().transpose(1, 2) for x in case.inputs)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
    error = ((case.forward().float() - expected).norm() / expected.norm()).item()
    return None if error <= LIMIT else f"{backend}: the output is off by {error:.1e}"


def flash_backends(device: str, dtype: torch.dtype, log: Callable[[str], None]) -> tuple[str, ...]:
    """Return the installed backends that run on this device and are correct; log the others that are installed."""
    backends = []
    for backend in MODULES:
        if find_function(backend) is None:
            continue
        try:
            error = find_error(backend, device, dtype)
        except Exception as failure:
            error = f"{backend}: {describe_error(failure, 100)}"
        if error is None:
            backends.append(backend)
        else:
            log(f"not timed: {error}")
    return tuple(backends)
