"""`analyse` on models: the weights are the layers' own, whatever the variant, the mask, the batch or the memory."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import mgk
from mgk._core.eval_mode import eval_mode
from mgk._core.priors import EMPrior, LearnedPrior
from mgk.analysis import analyse
from mgk.analysis.ablation import remove_heads
from mgk.analysis.capture import capture_attention
from mgk.analysis.ranks import max_matrices
from mgk.analysis.weights import sample_weights
from mgk.models import Classifier, EncoderConfig

LENGTH = 19


def layer_of(variant, **options):
    layer = mgk.Attention(24, 4, head_dim=8, variant=variant, **options).double().eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if "weight" in name else 1.0))
        if isinstance(layer.prior, EMPrior):
            layer.prior.prior.copy_(torch.rand_like(layer.prior.prior).softmax(1))
    return layer


def seen_weights(model, *inputs, memory=1 << 30, **options):
    """The weights of each sample of the (only) call, [B][H, L, S], put together from blocks."""
    found = []

    def look(name, call, output):
        for sample in range(call.query.shape[0]):
            weights = sample_weights(call, sample)
            found.append((weights, torch.cat([block.weights for block in weights.blocks(memory)], 1)))
        return output

    with eval_mode(model), capture_attention(model, look):
        model(*inputs, **options)
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", list(mgk.VARIANTS))
def test_weights_are_the_layers_own(variant, causal):
    layer = layer_of(variant, is_causal=causal, num_components=3)
    x = torch.randn(2, LENGTH, 24).double()
    found = seen_weights(layer, x)
    with torch.no_grad():
        expected = layer(x, need_weights=True)[1]
    for (sample, weights), own in zip(found, expected, strict=True):
        assert weights.allclose(own, rtol=1e-9, atol=1e-12)
        assert (weights @ sample.value).shape == (4, LENGTH, 8)


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_heads": 2},
        {"variant": mgk.Variant(variance="learned")},
        {"variant": mgk.Variant("between", "independent")},
        {"variant": "smgk", "preset": "ref-lra"},
        {"variant": "mgk", "preset": "ref-lm"},
        {"variant": "mlk", "feature_map": mgk.FAVOR(8)},
        {"variant": "smlk", "num_kv_heads": 2, "feature_map": "relu"},
        {"variant": "smgk", "rotary": 10000.0},
    ],
    ids=str,
)
def test_weights_of_other_layers(options):
    layer = layer_of(**{"variant": "smgk", **options})
    x = torch.randn(1, LENGTH, 24).double()
    ((_, weights),) = seen_weights(layer, x)
    with torch.no_grad():
        own = layer(x, need_weights=True)[1][0]
    assert weights.allclose(own, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("variant", ["softmax", "smgk", "mgk-hard", "mlk"])
def test_padding_is_left_out(variant):
    layer = layer_of(variant)
    x = torch.randn(2, LENGTH, 24).double()
    padding = torch.arange(LENGTH) >= torch.tensor([LENGTH, 11])[:, None]
    found = seen_weights(layer, x, key_padding_mask=padding)
    alone = seen_weights(layer, x[1:, :11])
    assert [sample.shape for sample, _ in found] == [(LENGTH, LENGTH), (11, 11)]
    assert found[1][1].allclose(alone[0][1], rtol=1e-9)


@pytest.mark.parametrize("variant", ["smgk", "mlk"])
@pytest.mark.parametrize("memory", [1 << 30, 20_000])
def test_padding_on_the_left_is_left_out(variant, memory):
    layer = layer_of(variant, is_causal=True)
    x = torch.randn(1, LENGTH, 24).double()
    padding = torch.arange(LENGTH)[None] < 8
    ((sample, weights),) = seen_weights(layer, x, key_padding_mask=padding, memory=memory)
    alone = seen_weights(layer, x[:, 8:])
    assert sample.shape == (11, 11)
    assert weights.allclose(alone[0][1], rtol=1e-9)


def test_float_and_bool_masks():
    layer = layer_of("smgk")
    x = torch.randn(1, LENGTH, 24).double()
    allowed = torch.rand(1, 1, LENGTH, LENGTH) < 0.7
    allowed[..., 0] = True
    for mask in (allowed, torch.randn(1, 4, LENGTH, LENGTH).double().masked_fill(~allowed, -math.inf)):
        ((_, weights),) = seen_weights(layer, x, attn_mask=mask)
        with torch.no_grad():
            own = layer(x, attn_mask=mask, need_weights=True)[1][0]
        assert weights.allclose(own, rtol=1e-9)


def test_multihead_layers_and_compiled_models_are_seen():
    inner = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dropout=0.0)
    inner.self_attn = mgk.MultiheadAttention(16, 2, batch_first=True, variant="mgk")
    found = analyse(torch.compile(inner), [torch.randn(1, 12, 16)], removal=0)
    assert [layer.name for layer in found.layers] == ["self_attn"]


def model_of(variant="smgk", **options):
    settings = {"vocab_size": 16, "num_classes": 4, "max_length": 48, "num_heads": 4, "head_dim": 8, **options}
    return Classifier(EncoderConfig(variant=variant, **settings))


def samples(count=3, length=30):
    return [torch.randint(1, 16, (1, length - n)) for n in range(count)]


@pytest.mark.parametrize("variant", ["softmax", "smgk", "mlk"])
def test_a_small_memory_changes_nothing(variant):
    """... but the size of the blocks: ranks head by head, rows a few at a time."""
    model, inputs = model_of(variant), samples()
    plenty, little = (analyse(model, inputs, memory=memory, map_size=8) for memory in (1 << 30, 200_000))
    assert max_matrices(30, 30, 100_000) < 4
    for one, other in zip(plenty.layers, little.layers, strict=True):
        assert one.ranks.rank.tolist() == other.ranks.rank.tolist()
        assert one.ranks.head.tolist() == other.ranks.head.tolist() == [0, 1, 2, 3] * 3
        assert np.allclose(one.similarity.divergence, other.similarity.divergence)
        assert np.allclose(one.similarity.cka, other.similarity.cka)
        for pooling in ("mean", "max"):
            assert (one.maps.pooled[pooling] == other.maps.pooled[pooling]).all()
        if one.mixture is not None:
            assert np.allclose(one.mixture.moved, other.mixture.moved)
            assert np.allclose(one.usage.keys, other.usage.keys)


def test_too_little_memory_is_said():
    with pytest.raises(ValueError, match="memory is too little to rank a matrix of 30 × 30"):
        analyse(model_of(), samples(), memory=10_000)


def test_the_model_is_left_as_it_was():
    model = model_of("smgk-em").train()
    model.layers[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    analyse(model, samples())
    assert model.training
    assert not model.layers[1].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert mgk.functional._call_handlers.get() == ()
    assert not model.layers[0].attention._forward_hooks


def test_an_error_leaves_nothing_behind():
    model = model_of()
    with pytest.raises(ValueError, match="positions"):
        analyse(model, [torch.zeros(1, 60, dtype=torch.long)])
    assert mgk.functional._call_handlers.get() == ()
    assert not model.layers[0].attention._forward_hooks


def test_copied_heads_are_found():
    """A model whose heads are copies: one is effectively different, in each layer."""
    model = model_of("softmax")
    with torch.no_grad():
        for block in model.layers:
            attention = block.attention
            for projection in (attention.query, attention.keys.projection, attention.value):
                weight = projection.weight.unflatten(0, (4, 8))
                weight[1:] = weight[:1]
    found = analyse(model, samples())
    assert found.heads == 8
    assert found.different["maps"] == pytest.approx(2, abs=1e-4)
    assert found.different["outputs"] == pytest.approx(2, abs=1e-4)
    assert found.layers[0].similarity.groups == [0, 0, 0, 0]


def test_linear_attention_has_at_most_the_rank_of_its_features():
    model = model_of("linear", head_dim=6)
    found = analyse(model, samples())
    assert max(found.layers[0].ranks.rank) <= 6 < min(found.layers[0].ranks.size)


def test_matrices_are_as_many_as_asked_for():
    found = analyse(model_of(), samples(5), matrices=6, removal=0)
    assert [len(layer.ranks.rank) for layer in found.layers] == [8, 8]
    assert found.samples == 5
    assert (found.shortest, found.longest) == (26, 30)


def test_progress_is_told_to_the_end():
    told = []
    analyse(model_of(), samples(3), removal=2, progress=lambda *stage: told.append(stage))
    assert [done for stage, done, total in told if (stage, total) == ("analyzing the heads", 3)] == [1, 2, 3]
    assert [done for stage, done, total in told if (stage, total) == ("removing one head at a time, 2 samples", 8)][
        -1
    ] == 8


def test_removal_is_what_the_models_answer_changes():
    """Against the model itself with the head's part of the output projection set to 0."""
    model, inputs = model_of(), samples(6)
    found = analyse(model, inputs, removal=6)
    with torch.no_grad():
        before = torch.cat([model.eval()(x) for x in inputs])
        model.layers[1].attention.out.weight[:, 8:16] = 0
        after = torch.cat([model(x) for x in inputs])
    removal = found.layers[1].removal
    assert removal.change[1] == pytest.approx(((before - after).norm() / before.norm()).item(), rel=1e-4)
    flipped = (before.argmax(-1) != after.argmax(-1)).double().mean()
    assert removal.flipped[1] == pytest.approx(flipped.item())
    assert analyse(model, inputs, removal=0).layers[0].removal is None


def test_samples_are_tried_together_and_as_many_as_there_is_memory_for():
    model, inputs = model_of().eval(), [torch.randint(1, 16, (1, n)) for n in (9, 12, 9, 9, 12, 7)]
    told, answer = [], 4 * 4  # bytes

    @torch.no_grad()
    def removal(inputs, **more):
        heads = {"layers.0.attention": 4, "layers.1.attention": 4}
        found = remove_heads(model, inputs, heads, capture_attention, lambda *stage: told.append(stage[0]), **more)
        return [found[name] for name in heads]

    wanted = removal(inputs, memory=1 << 20)
    for alone, joint in zip(wanted, removal(inputs, memory=1 << 20, together=2), strict=True):
        np.testing.assert_allclose(alone.change, joint.change, rtol=1e-5)
        np.testing.assert_array_equal(alone.flipped, joint.flipped)
    few = removal(inputs, memory=3 * 4 * answer)
    np.testing.assert_allclose(few[1].change, removal(inputs[:4], memory=1 << 20)[1].change, rtol=1e-5)
    assert set(told) == {f"removing one head at a time, {count} samples" for count in (6, 4)}


def mixture_layer(prior, shift):
    """One head whose two components differ by a shift along the first axis."""
    layer = layer_of("smgk").float()
    with torch.no_grad():
        assert isinstance(layer.prior, LearnedPrior)
        layer.prior.weights.copy_(torch.tensor(prior).log()[None, :, None].expand(4, -1, -1))
        layer.keys.shifts.zero_()
        layer.keys.shifts[:, 1, 0] = shift
    return layer


def test_a_component_with_all_the_prior_answers_alone():
    found = analyse(mixture_layer([1 - 1e-6, 1e-6], 0.5), [torch.randn(1, LENGTH, 24)], removal=0).layers[0]
    mixture = found.mixture
    assert np.allclose(mixture.prior, [[1, 0]] * 4, atol=1e-5)
    assert mixture.answered[:, 0].min() > 0.99
    assert mixture.decided.min() > 0.99
    # The hard choice knows no prior: it takes the second component where that is nearer.
    assert mixture.other_choice.min() > 0.05
    assert np.allclose(mixture.distance[:, 0, 1], 0.5 * 8**-0.25)
    assert np.allclose(found.usage.queries.sum(1), 1)
    assert np.allclose(found.usage.keys.sum(1), 1)


def test_equal_components_share_and_nothing_moves():
    mixture = analyse(mixture_layer([0.5, 0.5], 0.0), [torch.randn(1, LENGTH, 24)], removal=0).layers[0].mixture
    assert np.allclose(mixture.answered, 0.5)
    assert np.allclose(mixture.decided, 0.5)
    assert np.allclose(mixture.moved, 0, atol=1e-6)
    assert np.allclose(mixture.distance, 0)


def test_kinds_in_words():
    words = {
        "softmax": "softmax",
        "linear": "linear",
        "mgk": "2 independent components per key",
        "smgk-hard": "hard, 2 shifted components per key",
        "mlk": "linear, 2 independent components per key",
    }
    for variant, expected in words.items():
        assert analyse(model_of(variant), samples(1), removal=0).layers[0].kind == expected


def test_what_cannot_be_looked_at_is_said():
    with pytest.raises(ValueError, match="no attention layers"):
        analyse(nn.Linear(3, 3), [torch.randn(2, 3)])
    with pytest.raises(ValueError, match="at least one sample"):
        analyse(model_of(), [])
    with pytest.raises(ValueError, match="matrices must be a positive integer"):
        analyse(model_of(), samples(), matrices=0)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["softmax", "smgk", "mgk-hard", "mlk"])
def test_a_gpu_finds_the_same(variant):
    model, inputs = model_of(variant, max_length=200), samples(2, 190)
    there = analyse(model.cuda(), [x.cuda() for x in inputs], removal=1)
    here = analyse(model.cpu(), inputs, removal=1)
    for one, other in zip(here.layers, there.layers, strict=True):
        # Queries and keys come from an fp32 forward, which differs a little.
        assert np.abs(one.ranks.rank - other.ranks.rank).max() <= 3
        assert np.allclose(one.ranks.effective, other.ranks.effective, rtol=1e-3)
        assert np.allclose(one.similarity.divergence, other.similarity.divergence, atol=1e-4)
        assert np.allclose(one.similarity.cka, other.similarity.cka, atol=1e-3)
        assert np.allclose(one.removal.change, other.removal.change, rtol=0.05)
