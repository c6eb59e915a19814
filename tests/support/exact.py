"""What the tests in float64 share: inputs, and agreement to the last digits."""

import torch

F64 = torch.float64


def randn(*size):
    return torch.randn(*size, dtype=F64)


def close(found, wanted, tolerance=1e-10):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
