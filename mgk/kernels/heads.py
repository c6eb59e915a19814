"""Head indices in the kernels of mixture and linear attention."""

import triton
import triton.language as tl


@triton.jit
def shared_head(i_p, REPEAT: tl.constexpr):
    """Return the head of which i_p is one of REPEAT repetitions."""
    if REPEAT == 1:
        return i_p
    else:
        return i_p // REPEAT
