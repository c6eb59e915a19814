"""Switch of the experimental kernels, which are slower than the ordinary ones and off by default."""

import contextlib
import os
from collections.abc import Iterator

import torch

from mgk.kernels.mixture.args import MixtureArgs

# Limits of the one-pass backward: a prototype was slower than two passes at D 64, and more components were not tried.
MAX_ONE_PASS_WIDTH, MAX_ONE_PASS_COMPONENTS = 32, 4


class Switch:
    """A process-wide switch, on by default if the environment variable is "1" at import."""

    def __init__(self, variable: str):
        self.enabled = os.environ.get(variable) == "1"

    @contextlib.contextmanager
    def __call__(self, enabled: bool = True) -> Iterator[None]:
        """Turn the switch on or off."""
        previous, self.enabled = self.enabled, enabled
        try:
            yield
        finally:
            self.enabled = previous


one_pass_backward = Switch("MGK_ONE_PASS_BACKWARD")


def one_pass_allowed() -> bool:
    """Return whether the one-pass backward, which is not deterministic, may run."""
    return one_pass_backward.enabled and not torch.are_deterministic_algorithms_enabled()


def _is_supported(args: MixtureArgs) -> bool:
    """Return whether a call has bf16 or fp16, soft assignment, one scale per head, and masks of keys only."""
    if args.query.dtype.itemsize > 2 or args.hard or args.dropout_p > 0:
        return False
    if args.mask is not None or args.cu_q is not None:
        return False
    return args.scale_t is None or args.scale_t.shape[1] == 1


def is_one_pass(args: MixtureArgs) -> bool:
    """Return whether the backward pass of a call takes one pass, unless the call is small."""
    if not one_pass_allowed() or args.shift is None or args.value_group or not _is_supported(args):
        return False
    width = max(args.query.shape[3], args.value.shape[3])
    return width <= MAX_ONE_PASS_WIDTH and args.components <= MAX_ONE_PASS_COMPONENTS
