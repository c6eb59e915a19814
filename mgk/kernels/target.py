"""The GPU that a kernel is compiled for, as constexprs of the kernels.

Triton versions without `triton.language.target_info` compile the code of Hopper for all NVIDIA GPUs, and the build of
torch decides between CUDA and ROCm.
"""

import torch
import triton
import triton.language as tl

try:
    from triton.language.target_info import cuda_capability_geq, is_hip
except ImportError:
    IS_HIP = tl.constexpr(torch.version.hip is not None)

    @triton.jit
    def is_hip():
        """Return whether the kernel is compiled for an AMD GPU."""
        return IS_HIP

    @triton.jit
    def cuda_capability_geq(major: tl.constexpr, minor: tl.constexpr):
        """Return False: the kernels are not compiled for Blackwell by these versions."""
        return False


__all__ = ["cuda_capability_geq", "is_hip"]
