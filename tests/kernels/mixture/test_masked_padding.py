"""Large finite numbers in masked keys and values do not change the results of the kernels."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import mgk
from mgk._core.calls import mixture_call
from mgk._core.em import statistics_by_equations
from mgk.backends import triton
from mgk.kernels.mixture import launch
from tests.kernels.mixture.test_kernels import DEVICE, GPU, small_blocks  # noqa: F401
from tests.support.padding_cases import KEYS, PADDED, check_unchanged

pytestmark = [pytest.mark.gpu] if GPU else []


@pytest.fixture(autouse=True)
def silent_overflow():
    """Let NumPy overflow without a warning, as a GPU does: the squared norms of the keys are infinite."""
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize(
    "op, assignment, similarity, mask, scales",
    [
        ("mgk", "soft", "dot", "key", "equal"),
        ("mgk", "soft", "tau", "causal", "unequal"),
        ("mgk", "hard", "tau", "key", "unequal"),
        ("mgk", "hard", "dot", "causal", "equal"),
        ("smgk", "soft", "dot", "causal", "equal"),
        ("smgk", "soft", "tau", "key", "unequal"),
        ("smgk", "soft", 0.5, "float", "equal"),
        ("smgk", "soft", "gaussian", "key", "equal"),
        ("smgk", "hard", "dot", "key", "equal"),
        ("smgk", "hard", "tau", "pair", "unequal"),
    ],
)
def test_large_padding_changes_nothing(op, assignment, similarity, mask, scales):
    sizes = {"size": 1e20} if mask == "causal" else {"size": 1e36, "value_size": 1e36}
    check_unchanged(
        op, similarity=similarity, mask=mask, assignment=assignment, scales=scales, backend="triton", device=DEVICE,
        **sizes,
    )  # fmt: skip


@pytest.mark.parametrize("path", ["fast", "small"])
@pytest.mark.parametrize("op, assignment, similarity", [("smgk", "soft", "dot"), ("mgk", "hard", 0.5)])
def test_large_padding_changes_nothing_in_the_fast_form(op, assignment, similarity, path, monkeypatch):
    """Tiles with large keys are left to the fallback."""
    monkeypatch.setattr(launch, "BOUNDED", (torch.float32, torch.float16))
    monkeypatch.setattr(launch, "_small_pairs", 1 << 25 if path == "small" else 0)
    check_unchanged(
        op, 3e4, value_size=3e4, similarity=similarity, mask="key", assignment=assignment, scales="equal",
        dtype=torch.float16, backend="triton", device=DEVICE,
    )  # fmt: skip
    check_unchanged(
        op, 1e20, similarity=similarity, mask="key", assignment=assignment, scales="equal", backend="triton",
        device=DEVICE,
    )  # fmt: skip


@pytest.mark.parametrize("similarity", ["dot", "tau", "gaussian"])
@pytest.mark.parametrize("assignment", ["soft", "hard"])
@pytest.mark.parametrize("op", ["mgk", "smgk"])
def test_large_padding_changes_nothing_in_decoding(op, assignment, similarity):
    for queries, mask, scales in ((1, "key", "equal"), (1, "pair", "equal"), (3, "key", "unequal")):
        check_unchanged(
            op, 1e36, value_size=1e36, similarity=similarity, mask=mask, assignment=assignment, scales=scales,
            queries=queries, gradients=False, backend="triton", device=DEVICE,
        )  # fmt: skip


def test_reference_exponent_excludes_masked_keys():
    """c is relative to a sample of keys. A reference of masked keys, which are far away, would round c to 0."""
    # Of 256 keys the even ones are sampled, and masked.
    query, key, value = torch.randn(1, 1, 17, 4), torch.randn(1, 1, 256, 4), torch.randn(1, 1, 256, 4)
    key[:, :, ::2] = 1e5
    attend = (torch.arange(256) % 2 == 1).expand(1, 1, 1, 256)
    tensors = [x.to(DEVICE) for x in (query, key, value, torch.randn(1, 2, 4))]
    out = mgk.smgk_attention(*tensors, attn_mask=attend.to(DEVICE), backend="triton")
    torch.testing.assert_close(out, mgk.smgk_attention(*tensors, attn_mask=attend.to(DEVICE), backend="eager"))


@pytest.mark.parametrize("op", ["mgk", "smgk"])
def test_large_padding_changes_no_em_counts(op):
    query, keys, value, shift = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 2, KEYS, 4), torch.randn(1, 1, KEYS, 4), None
    if op == "smgk":
        keys, shift = keys[:, :, 0].clone(), torch.randn(1, 2, 4).to(DEVICE)
    for queries in (1, 5):
        attend = (torch.arange(KEYS) < PADDED).expand(1, 1, queries, KEYS)
        options = {"shift": shift, "shifted": op == "smgk", "similarity": 0.0, "attn_mask": attend.to(DEVICE)}
        expected = statistics_by_equations(mixture_call(*(x.to(DEVICE) for x in (query, keys, value)), **options))
        large = keys.clone()
        large[..., PADDED:, :] = 1e20
        counts = triton.count_components(mixture_call(*(x.to(DEVICE) for x in (query, large, value)), **options))
        torch.testing.assert_close(counts, (expected.count, expected.pairs), rtol=1e-5, atol=1e-5)
