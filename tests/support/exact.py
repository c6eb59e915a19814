"""Helpers of tests in float64."""

import torch

F64 = torch.float64


def randn(*size):
    return torch.randn(*size, dtype=F64)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
