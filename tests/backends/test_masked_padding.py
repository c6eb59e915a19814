"""Large finite numbers in masked keys and values do not change the results of the backends on a CPU."""

import pytest
import torch

import mgk
from mgk._core.calls import mixture_call
from mgk.backends import em_statistics
from tests.support.padding_cases import KEYS, MASKS, PADDED, SIMILARITIES, check_unchanged

SOFT_AND_HARD = [("eager", "soft"), ("eager", "hard"), ("sdpa", "soft")]
FEATURE_MAPS = {"elu": "elu", "relu": "relu", "favor": mgk.FAVOR(4, 16), "dpfp": mgk.DPFP()}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("similarity", SIMILARITIES, ids=str)
@pytest.mark.parametrize("backend, assignment", SOFT_AND_HARD)
@pytest.mark.parametrize("op", ["mgk", "smgk"])
def test_large_padding_changes_nothing(op, backend, assignment, similarity, mask):
    """Padding may be as large as fp32 allows; a causal mask needs finite products, as SDPA does."""
    sizes = (1e20, 1e30) if mask == "causal" else (3e38, 3e38)
    for scales in ("equal", "unequal"):
        for size, value_size, dtype in ((*sizes, torch.float32), (3e4, 3e4, torch.float16)):
            check_unchanged(
                op, size, value_size=value_size, dtype=dtype, mask=mask, similarity=similarity, assignment=assignment,
                scales=scales, backend=backend,
            )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("backend", ["eager", "chunked"])
@pytest.mark.parametrize("op", ["mlk", "smlk"])
def test_large_padding_changes_nothing_in_linear_attention(op, backend, feature_map, causal):
    shapes = (2, 2, KEYS, 4), (2, 1, 2, KEYS, 4), (2, 1, KEYS, 4), (1, 2, 4)
    tensors = [torch.randn(*shape) for shape in shapes]
    log_prior, attend = torch.randn(1, 2, 1), torch.ones(2, KEYS, dtype=torch.bool)
    attend[0, PADDED:] = False
    results = []
    for size in (0.0, 3e38):
        query, keys, value, shift = (x.clone() for x in tensors)
        keys[0, ..., PADDED:, :] = value[0, ..., PADDED:, :] = size
        inputs = (query, keys[:, :, 0].clone(), value, shift) if op == "smlk" else (query, keys, value)
        leaves = [x.requires_grad_() for x in (*inputs, log_prior.clone())]
        out = getattr(mgk, f"{op}_attention")(
            *leaves[:-1], log_prior=leaves[-1], key_mask=attend, is_causal=causal, backend=backend,
            feature_map=FEATURE_MAPS[feature_map],
        )  # fmt: skip
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        results.append((out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_large_padding_changes_no_em_statistics(tau):
    query, keys, value = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 3, KEYS, 4), torch.randn(2, 2, KEYS, 4)
    attend = (torch.arange(KEYS) < PADDED).expand(2, 1, 5, KEYS)
    expected = em_statistics(mixture_call(query, keys, value, attend, similarity=tau))
    for size in (1e20, 3e38):
        keys[..., PADDED:, :] = size
        statistics = em_statistics(mixture_call(query, keys, value, attend, similarity=tau))
        for name in ("count", "pairs", "spread"):
            torch.testing.assert_close(getattr(statistics, name), getattr(expected, name))
            assert not getattr(statistics, name)[..., PADDED:].any()
