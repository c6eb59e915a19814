"""The encoder: packed documents give what padded ones give, and are compiled once for every length."""

import numpy as np
import pytest
import torch

from mgk.batches import Examples
from mgk.models import Classifier, EncoderConfig
from mgk.tasks.store import Split
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
def test_packed_is_padded(variant, pooling, documents):
    examples = Examples(split(documents), LONGEST, torch.device("cpu"))
    model = classifier(variant, documents=documents, pooling=pooling).double()
    chosen = np.array([4, 1, 5, 0])
    tokens, edges, labels = examples.packed(chosen)
    padded, lengths, same_labels = examples.batch(torch.from_numpy(chosen), LONGEST)
    assert tokens.shape[0] % LONGEST == 0
    assert tokens.shape[0] > edges[-1]  # there is padding, and it must not count
    assert torch.equal(labels, same_labels)
    found, wanted = model(tokens, cu_seqlens=edges), model(padded, lengths)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    parameters = [p for p in model.parameters() if p.requires_grad]
    weight = torch.randn(found.shape, dtype=found.dtype)
    for ours, theirs in zip(
        torch.autograd.grad((found * weight).sum(), parameters),
        torch.autograd.grad((wanted * weight).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_padding_of_a_packed_batch_is_not_seen():
    examples = Examples(split(1), LONGEST, torch.device("cpu"))
    model = classifier("smgk").eval()
    tokens, edges, _ = examples.packed(np.array([4, 1, 5, 0]))
    other = tokens.clone()
    other[edges[-1] :] = 7
    assert torch.equal(model(tokens, cu_seqlens=edges), model(other, cu_seqlens=edges))


@pytest.mark.slow
def test_packed_batches_of_any_length_are_compiled_once():
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


def test_what_the_padding_would_enter_is_not_packed():
    """EM counts every key it sees, and linear attention pads anyway."""
    packs = {name: classifier(name).config.packs for name in VARIANTS}
    assert packs == {name: name not in ("linear", "mlk", "smlk", "mgk-em", "smgk-em") for name in VARIANTS}
