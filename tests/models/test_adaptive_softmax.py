"""The adaptive softmax agrees with its definition."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from mgk.models import adaptive_softmax
from mgk.models.adaptive_softmax import TiedEmbedding, _OneHotEmbedding, round_capacity


def dense(table: TiedEmbedding, hidden: torch.Tensor) -> torch.Tensor:
    """Return log probabilities of all tokens, computed from the definition."""
    first = [*range(table.cutoffs[0])] if table.cutoffs else [*range(table.vocab_size)]
    weight = torch.cat([table.weight[first], table.cluster_weight])
    bias = torch.cat([table.bias[first], table.cluster_bias])
    head = (hidden @ weight.T + bias).log_softmax(-1)
    parts = [head[..., : len(first)]]
    edges = [*table.cutoffs, table.vocab_size]
    for n, low in enumerate(table.cutoffs):
        span = slice(low, edges[n + 1])
        tail = (hidden @ table.weight[span].T + table.bias[span]).log_softmax(-1)
        parts.append(head[..., len(first) + n, None] + tail)
    return torch.cat(parts, -1)


@pytest.mark.parametrize("cutoffs", [(), (7,), (7, 20, 33)])
@pytest.mark.parametrize("spare", [None, 0, 3])
def test_losses_and_logits_equal_definition(cutoffs, spare, monkeypatch):
    """Test default, exact and larger capacities."""
    # Three rows per chunk, so that the last chunk is smaller.
    monkeypatch.setattr(adaptive_softmax, "MAX_LOGITS", 40)
    table = TiedEmbedding(50, 6, cutoffs).double()
    with torch.no_grad():
        for parameter in table.parameters():
            parameter.copy_(torch.randn_like(parameter))
    hidden = torch.randn(2, 11, 6, dtype=torch.double, requires_grad=True)
    targets = torch.randint(50, (2, 11))
    upstream_grad = torch.rand(2, 11, dtype=torch.double)
    expected = -dense(table, hidden).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    edges = [*cutoffs, 50]
    capacities = [((targets >= low) & (targets < high)).sum().item() + (spare or 0) for low, high in pairwise(edges)]
    actual = table.losses(hidden, targets, None if spare is None else capacities)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(table.logits(hidden).log_softmax(-1), dense(table, hidden))
    inputs = [hidden, *table.parameters()] if cutoffs else [hidden, table.weight, table.bias]
    for ours, theirs in zip(
        torch.autograd.grad((actual * upstream_grad).sum(), inputs),
        torch.autograd.grad((expected * upstream_grad).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_exceeded_capacity_gives_nan():
    table = TiedEmbedding(50, 6, (7, 20))
    hidden, targets = torch.randn(9, 6), torch.tensor([1, 2, 8, 9, 10, 30, 31, 3, 4])
    assert table.cluster_capacities(targets) == [64, 64]
    assert table.losses(hidden, targets, (3, 2)).isfinite().all()
    for too_small in ((2, 2), (0, 2), (3, 0), (0, 0)):
        assert table.losses(hidden, targets, too_small).isnan().any()
    for wrong in ((9, 9, 9), 9, (9, -1), (9.0, 9)):
        with pytest.raises(ValueError, match="capacities must be 2 integers, one for each tail cluster"):
            table.losses(hidden, targets, wrong)


@pytest.mark.parametrize("cutoffs", [(), (7, 20)])
def test_invalid_targets(cutoffs, monkeypatch):
    table, hidden = TiedEmbedding(50, 6, cutoffs), torch.randn(2, 3, 6)
    targets = torch.tensor([[1, 2, 49], [8, 30, 0]])
    for wrong in (50, 1000, -1, -100):
        changed = targets.clone()
        changed[0, 1] = wrong
        with pytest.raises(ValueError, match=rf"targets must be token ids from 0 to 49 .* got {wrong}"):
            table.losses(hidden, changed)
        # The check does not run on a GPU.
        with monkeypatch.context() as patched:
            patched.setattr(TiedEmbedding, "_check", lambda *_: None)
            actual = table.losses(hidden, changed)
        assert actual.isnan().tolist() == [[False, True, False], [False, False, False]]
    for wrong in (targets.float(), targets.tolist(), targets.flatten(), targets[:, :2]):
        with pytest.raises(ValueError, match="targets must"):
            table.losses(hidden, wrong)


def test_round_capacity_has_few_values():
    assert [round_capacity(n) for n in (0, 1, 64, 65, 600, 1024, 1025)] == [0, 64, 64, 128, 640, 1024, 1280]
    assert all(n <= round_capacity(n) <= max(64, 1.25 * n + 1) for n in range(256, 5000))
    assert len({round_capacity(n) for n in range(256, 5000)}) < 20


def test_unused_cluster_gets_no_token_gradient():
    table = TiedEmbedding(50, 6, (7, 20))
    table.losses(torch.randn(9, 6), torch.randint(7, (9,))).sum().backward()
    assert table.weight.grad[7:].abs().max() == 0
    assert table.cluster_weight.grad.abs().min() > 0


def test_autocast_accumulates_gradient_in_fp32():
    table = TiedEmbedding(50, 8, (7, 20))
    hidden = torch.randn(400, 8)
    targets = torch.randint(50, (400,))
    gradients = []
    for enabled in (False, True):
        table.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses = table.losses(hidden, targets)
        assert losses.dtype == torch.float32
        losses.mean().backward()
        gradients.append(table.weight.grad.clone())
    torch.testing.assert_close(*gradients, atol=2e-4, rtol=0.05)


def test_invalid_cutoffs_raise():
    for cutoffs in ((20, 7), (50,), (0,), (7, 7)):
        with pytest.raises(ValueError, match="cutoffs"):
            TiedEmbedding(50, 6, cutoffs)


# torch.compile instantiates autograd functions.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_one_hot_embedding_gradient():
    """Test the GEMM that GPUs use."""
    tokens = torch.randint(0, 9, (4, 50))
    tokens[tokens == 3] = 4  # a token that does not occur
    weight = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    ours, theirs = _OneHotEmbedding.apply(tokens, weight), torch.nn.functional.embedding(tokens, weight)
    assert torch.equal(ours, theirs)
    upstream = torch.randn_like(ours)
    (actual,), (expected,) = (torch.autograd.grad(embedded, weight, upstream) for embedded in (ours, theirs))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert actual[3].abs().max() == 0
    compiled = torch.compile(lambda *args: _OneHotEmbedding.apply(*args), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(tokens, weight), weight, upstream)[0], expected)


def test_code_is_compiled_for_few_numbers_of_classes_and_any_number_of_rows(monkeypatch):
    """A third number of classes shares its code with all later ones."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(adaptive_softmax, "_compiled_classes", set())
    monkeypatch.setattr(adaptive_softmax, "MAX_COMPILED_CLASSES", 2)
    torch._dynamo.reset()
    compiled = adaptive_softmax._compiled.__wrapped__(adaptive_softmax._logits_gradient)
    for rows, classes, compilations in [(8, 64, 1), (5, 64, 1), (8, 96, 2), (7, 80, 3), (6, 112, 3), (9, 64, 3)]:
        columns = torch.randn(rows), torch.randint(classes, (rows,)), torch.randn(rows)
        logits = torch.randn(rows, classes)
        expected = adaptive_softmax._logits_gradient(logits, *columns)
        torch.testing.assert_close(compiled(logits, *columns), expected)
        assert counter.frame_count == compilations, (rows, classes)
