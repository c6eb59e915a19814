"""The switch for the kernels of short sequences. They are experimental: not yet timed on a GPU, and off by default."""

import contextlib
import os
from collections.abc import Iterator

from mgk.kernels.mixture.args import MixtureArgs

# Longest sequence of queries or keys.
MAX_LENGTH = 2048
_enabled = os.environ.get("MGK_SHORT_KERNELS") == "1"


@contextlib.contextmanager
def short_kernels(enabled: bool = True) -> Iterator[None]:
    """Use, or do not use, the kernels of short sequences; process-wide. The default is $MGK_SHORT_KERNELS == "1"."""
    global _enabled
    previous, _enabled = _enabled, enabled
    try:
        yield
    finally:
        _enabled = previous


def enabled() -> bool:
    """Return whether calls use the kernels of short sequences where those support them."""
    return _enabled


def is_short(args: MixtureArgs) -> bool:
    """Return whether the kernels of short sequences run a call.

    They take bf16 and fp16, soft assignment, one scale per head, and masks of keys only.
    """
    if not _enabled or max(args.max_q, args.max_k) > MAX_LENGTH or args.query.dtype.itemsize > 2:
        return False
    if args.hard or args.dropout_p > 0 or args.mask is not None or args.cu_q is not None:
        return False
    return args.scale_t is None or args.scale_t.shape[1] == 1
