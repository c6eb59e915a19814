"""bf16 arithmetic for Triton's interpreter, which rounds to bf16 by truncation and has no bf16 GEMM."""

import numpy as np
import pytest
import torch


def enable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round casts to bf16 to nearest, and compute GEMMs of bf16 operands in fp32, as GPUs do."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_rounded(self, source, target):
        if target.scalar != tl.bfloat16 or source.dtype.scalar == tl.bfloat16:
            return cast(self, source, target)
        numbers = np.ascontiguousarray(source.data, dtype=np.float32)
        bits = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(bits.reshape(source.data.shape), tl.bfloat16)

    def dot_in_fp32(self, a, b, *args):
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *args)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_rounded)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_in_fp32)
