"""The encoder: packed and padded documents agree, and compile once for all lengths."""

import numpy as np
import pytest
import torch

from mgk.models import Classifier, EncoderConfig
from mgk.tasks.base import Split
from mgk.training.data import DeviceDataset
from mgk.variants import VARIANTS

LONGEST = 32


def split(documents: int) -> Split:
    draw = np.random.default_rng(documents)
    lengths = draw.integers(1, 2 * LONGEST, 6 * documents)  # some are cut
    tokens = draw.integers(1, 16, lengths.sum()).astype(np.uint8)
    return Split(tokens, np.concatenate([[0], lengths.cumsum()]), draw.integers(0, 3, 6), documents)


def classifier(variant: str, **settings) -> Classifier:
    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "head_dim": 8, "num_heads": 2, "dropout": 0.0}
    return Classifier(EncoderConfig(16, 3, LONGEST, variant=variant, **sizes, **settings))


@pytest.mark.parametrize("documents", [1, 2])
@pytest.mark.parametrize("pooling", ["mean", "mean-padded"])
@pytest.mark.parametrize("variant", ["softmax", "mgk", "smgk", "mgk-hard", "smgk-hard"])
def test_packed_equals_padded(variant, pooling, documents):
    examples = DeviceDataset(split(documents), LONGEST, torch.device("cpu"))
    model = classifier(variant, documents=documents, pooling=pooling).double()
    chosen = np.array([4, 1, 5, 0])
    tokens, edges, labels = examples.packed(chosen)
    padded, lengths, same_labels = examples.batch(torch.from_numpy(chosen), LONGEST)
    assert tokens.shape[0] % LONGEST == 0
    assert tokens.shape[0] > edges[-1]  # there is padding, and it must not count
    assert torch.equal(labels, same_labels)
    actual, expected = model(tokens, cu_seqlens=edges), model(padded, lengths)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    parameters = [p for p in model.parameters() if p.requires_grad]
    weight = torch.randn(actual.shape, dtype=actual.dtype)
    for ours, theirs in zip(
        torch.autograd.grad((actual * weight).sum(), parameters),
        torch.autograd.grad((expected * weight).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("pooling", ["mean", "mean-padded"])
def test_prediction_is_independent_of_batch_width(pooling):
    model, tokens = classifier("smgk", pooling=pooling).double(), torch.randint(1, 16, (2, 7))
    expected, lengths = model(tokens), torch.tensor([7, 7])
    for width in (7, 9, LONGEST):
        padded = torch.nn.functional.pad(tokens, (0, width - 7))
        torch.testing.assert_close(model(padded, lengths), expected, rtol=0, atol=1e-12)


def test_packed_padding_is_ignored():
    examples = DeviceDataset(split(1), LONGEST, torch.device("cpu"))
    model = classifier("smgk").eval()
    tokens, edges, _ = examples.packed(np.array([4, 1, 5, 0]))
    other = tokens.clone()
    other[edges[-1] :] = 7
    assert torch.equal(model(tokens, cu_seqlens=edges), model(other, cu_seqlens=edges))


@pytest.mark.slow
def test_packed_batches_compile_once():
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph

    torch.compiler.reset()
    model = torch.compile(classifier("smgk").eval(), backend=count, fullgraph=True)
    with torch.no_grad():
        for total in (90, 85, 96, 81):
            tokens = torch.randint(1, 16, (total,))
            torch._dynamo.maybe_mark_dynamic(tokens, 0)
            model(tokens, cu_seqlens=torch.tensor([0, 20, 40, 60, total - 5], dtype=torch.int32))
    assert len(compiled) == 1


def test_variants_that_support_packing():
    """EM counts every key it sees, and linear attention pads anyway."""
    packs = {name: classifier(name).config.supports_packing for name in VARIANTS}
    assert packs == {name: name not in ("linear", "mlk", "smlk", "mgk-em", "smgk-em") for name in VARIANTS}


@pytest.mark.parametrize(
    ("documents", "tokens", "message"),
    [
        (1, torch.zeros(2, 0).long(), r"at least one token, got \[2, 0\]"),
        (1, torch.zeros(2, 4), r"an int32 or int64 tensor \[B, L\], got torch.float32 \[2, 4\]"),
        (1, torch.zeros(4).long(), r"an int32 or int64 tensor \[B, L\], got torch.int64 \[4\]"),
        (2, torch.zeros(2, 4).long(), r"an int32 or int64 tensor \[B, 2, L\]"),
        (2, torch.zeros(2, 4, 8).long(), r"an int32 or int64 tensor \[B, 2, L\], got torch.int64 \[2, 4, 8\]"),
        (1, [[1, 2]], "got list"),
        (1, torch.tensor([[1, 16]]), "tokens must hold ids from 0 to vocab_size - 1 = 15"),
        (1, torch.tensor([[1, -1]]), "tokens must hold ids from 0 to vocab_size - 1 = 15"),
    ],
)
def test_invalid_tokens_raise(documents, tokens, message):
    with pytest.raises(ValueError, match=message):
        classifier("smgk", documents=documents)(tokens)


@pytest.mark.parametrize(
    ("documents", "ends", "message"),
    [
        (2, [0, 10, 20, 30], "cu_seqlens must have two documents for each example, got 3 documents"),
        (1, [0, 35, 40], "max_length = 32 is less than the longest packed sequence, 35"),
    ],
)
def test_invalid_packed_documents_raise(documents, ends, message):
    with pytest.raises(ValueError, match=message):
        classifier("smgk", documents=documents)(
            torch.ones(ends[-1]).long(), cu_seqlens=torch.tensor(ends, dtype=torch.int32)
        )
