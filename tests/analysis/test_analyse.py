"""`analyse` on models: weights equal those of the layers for all variants, masks, batches and memory limits."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import mgk
from mgk._core.eval_mode import eval_mode
from mgk._core.priors import EMPrior, LearnedPrior
from mgk.analysis import analyse
from mgk.analysis.ablation import measure_removals
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


def captured_weights(model, *inputs, memory=1 << 30, **options):
    """Return weights [H, L, S] of each sample of a single call, concatenated from blocks."""
    captured = []

    def add_call(name, call, output):
        for sample in range(call.query.shape[0]):
            weights = sample_weights(call, sample)
            captured.append((weights, torch.cat([block.weights for block in weights.blocks(memory)], 1)))
        return output

    with eval_mode(model), capture_attention(model, add_call):
        model(*inputs, **options)
    return captured


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", list(mgk.VARIANTS))
def test_weights_equal_those_of_the_layer(variant, causal):
    layer = layer_of(variant, is_causal=causal, num_components=3)
    x = torch.randn(2, LENGTH, 24).double()
    captured = captured_weights(layer, x)
    with torch.no_grad():
        expected = layer(x, need_weights=True)[1]
    for (sample, weights), reference in zip(captured, expected, strict=True):
        assert weights.allclose(reference, rtol=1e-9, atol=1e-12)
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
def test_weights_with_other_options(options):
    layer = layer_of(**{"variant": "smgk", **options})
    x = torch.randn(1, LENGTH, 24).double()
    ((_, weights),) = captured_weights(layer, x)
    with torch.no_grad():
        expected = layer(x, need_weights=True)[1][0]
    assert weights.allclose(expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("variant", ["softmax", "smgk", "mgk-hard", "mlk"])
def test_padding_is_left_out(variant):
    layer = layer_of(variant)
    x = torch.randn(2, LENGTH, 24).double()
    padding = torch.arange(LENGTH) >= torch.tensor([LENGTH, 11])[:, None]
    padded = captured_weights(layer, x, key_padding_mask=padding)
    alone = captured_weights(layer, x[1:, :11])
    assert [sample.shape for sample, _ in padded] == [(LENGTH, LENGTH), (11, 11)]
    assert padded[1][1].allclose(alone[0][1], rtol=1e-9)


@pytest.mark.parametrize("variant", ["smgk", "mlk"])
@pytest.mark.parametrize("memory", [1 << 30, 20_000])
def test_left_padding_is_left_out(variant, memory):
    layer = layer_of(variant, is_causal=True)
    x = torch.randn(1, LENGTH, 24).double()
    padding = torch.arange(LENGTH)[None] < 8
    ((sample, weights),) = captured_weights(layer, x, key_padding_mask=padding, memory=memory)
    alone = captured_weights(layer, x[:, 8:])
    assert sample.shape == (11, 11)
    assert weights.allclose(alone[0][1], rtol=1e-9)


def test_float_and_bool_masks():
    layer = layer_of("smgk")
    x = torch.randn(1, LENGTH, 24).double()
    allowed = torch.rand(1, 1, LENGTH, LENGTH) < 0.7
    allowed[..., 0] = True
    for mask in (allowed, torch.randn(1, 4, LENGTH, LENGTH).double().masked_fill(~allowed, -math.inf)):
        ((_, weights),) = captured_weights(layer, x, attn_mask=mask)
        with torch.no_grad():
            expected = layer(x, attn_mask=mask, need_weights=True)[1][0]
        assert weights.allclose(expected, rtol=1e-9)


def test_multihead_layers_and_compiled_models_are_captured():
    inner = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dropout=0.0)
    inner.self_attn = mgk.MultiheadAttention(16, 2, batch_first=True, variant="mgk")
    analysis = analyse(torch.compile(inner), [torch.randn(1, 12, 16)], removal=0)
    assert [layer.name for layer in analysis.layers] == ["self_attn"]


def model_of(variant="smgk", **options):
    settings = {"vocab_size": 16, "num_classes": 4, "max_length": 48, "num_heads": 4, "head_dim": 8, **options}
    return Classifier(EncoderConfig(variant=variant, **settings))


def samples(count=3, length=30):
    return [torch.randint(1, 16, (1, length - n)) for n in range(count)]


@pytest.mark.parametrize("variant", ["softmax", "smgk", "mlk"])
def test_small_memory_gives_the_same_results(variant):
    """Heads are ranked one by one, and rows are computed in small blocks."""
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


def test_too_little_memory_is_an_error():
    with pytest.raises(ValueError, match="memory is too small to rank a 30 × 30 matrix"):
        analyse(model_of(), samples(), memory=10_000)


def test_message_about_memory_has_the_size_of_matrices_that_are_not_square():
    class CrossAttention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = mgk.MultiheadAttention(8, 2)

        def forward(self, query, key):
            return self.attention(query, key, key)[0]

    inputs = [(torch.randn(2, 1, 8), torch.randn(30_000, 1, 8))]
    with pytest.raises(ValueError, match=r"rank a 2 × 30000 matrix: about 0\.00 GiB"):
        analyse(CrossAttention(), inputs, memory=10_000)


def test_model_is_restored():
    model = model_of("smgk-em").train()
    model.layers[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    analyse(model, samples())
    assert model.training
    assert not model.layers[1].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert mgk.functional._call_handlers.get() == ()
    assert not model.layers[0].attention._forward_hooks


def test_hooks_are_removed_after_an_error():
    model = model_of()
    with pytest.raises(ValueError, match="max_length"):
        analyse(model, [torch.zeros(1, 60, dtype=torch.long)])
    assert mgk.functional._call_handlers.get() == ()
    assert not model.layers[0].attention._forward_hooks


def test_copied_heads_count_as_one():
    model = model_of("softmax")
    with torch.no_grad():
        for block in model.layers:
            attention = block.attention
            for projection in (attention.query, attention.keys.projection, attention.value):
                weight = projection.weight.unflatten(0, (4, 8))
                weight[1:] = weight[:1]
    analysis = analyse(model, samples())
    assert analysis.heads == 8
    assert analysis.different["maps"] == pytest.approx(2, abs=1e-4)
    assert analysis.different["outputs"] == pytest.approx(2, abs=1e-4)
    assert analysis.layers[0].similarity.groups == [0, 0, 0, 0]


def test_rank_of_linear_attention_is_at_most_the_number_of_features():
    model = model_of("linear", head_dim=6)
    ranks = analyse(model, samples()).layers[0].ranks
    assert max(ranks.rank) <= 6 < min(ranks.size)


def test_number_of_ranked_matrices():
    analysis = analyse(model_of(), samples(5), matrices=6, removal=0)
    assert [len(layer.ranks.rank) for layer in analysis.layers] == [8, 8]
    assert analysis.samples == 5
    assert (analysis.shortest, analysis.longest) == (26, 30)


def test_progress_is_reported():
    calls = []
    analyse(model_of(), samples(3), removal=2, progress=lambda *arguments: calls.append(arguments))
    assert [done for stage, done, total in calls if (stage, total) == ("analyzing the heads", 3)] == [1, 2, 3]
    assert [done for stage, done, total in calls if (stage, total) == ("removing one head at a time, 2 samples", 8)][
        -1
    ] == 8


def test_removal_equals_a_zeroed_output_projection():
    model, inputs = model_of(), samples(6)
    analysis = analyse(model, inputs, removal=6)
    with torch.no_grad():
        before = torch.cat([model.eval()(x) for x in inputs])
        model.layers[1].attention.out.weight[:, 8:16] = 0
        after = torch.cat([model(x) for x in inputs])
    removal = analysis.layers[1].removal
    assert removal.change[1] == pytest.approx(((before - after).norm() / before.norm()).item(), rel=1e-4)
    flipped = (before.argmax(-1) != after.argmax(-1)).double().mean()
    assert removal.flipped[1] == pytest.approx(flipped.item())
    assert analyse(model, inputs, removal=0).layers[0].removal is None


def test_removal_batches_samples_within_memory():
    model, inputs = model_of().eval(), [torch.randint(1, 16, (1, n)) for n in (9, 12, 9, 9, 12, 7)]
    stages, output_bytes = [], 4 * 4

    @torch.no_grad()
    def removal(inputs, **more):
        heads = {"layers.0.attention": 4, "layers.1.attention": 4}
        removals = measure_removals(
            model, inputs, heads, capture_attention, lambda *call: stages.append(call[0]), **more
        )
        return [removals[name] for name in heads]

    one_by_one = removal(inputs, memory=1 << 20)
    for alone, joint in zip(one_by_one, removal(inputs, memory=1 << 20, together=2), strict=True):
        np.testing.assert_allclose(alone.change, joint.change, rtol=1e-5)
        np.testing.assert_array_equal(alone.flipped, joint.flipped)
    few = removal(inputs, memory=3 * 4 * output_bytes)
    np.testing.assert_allclose(few[1].change, removal(inputs[:4], memory=1 << 20)[1].change, rtol=1e-5)
    assert set(stages) == {f"removing one head at a time, {count} samples" for count in (6, 4)}


def mixture_layer(prior, shift):
    """Return a layer whose two components differ by a shift along the first axis."""
    layer = layer_of("smgk").float()
    with torch.no_grad():
        assert isinstance(layer.prior, LearnedPrior)
        layer.prior.weights.copy_(torch.tensor(prior).log()[None, :, None].expand(4, -1, -1))
        layer.keys.shifts.zero_()
        layer.keys.shifts[:, 1, 0] = shift
    return layer


def test_component_with_all_the_prior_takes_all_attention():
    layer = analyse(mixture_layer([1 - 1e-6, 1e-6], 0.5), [torch.randn(1, LENGTH, 24)], removal=0).layers[0]
    mixture = layer.mixture
    assert np.allclose(mixture.prior, [[1, 0]] * 4, atol=1e-5)
    assert mixture.answered[:, 0].min() > 0.99
    assert mixture.decided.min() > 0.99
    # The hard choice ignores the prior: it is the second component where that is nearer.
    assert mixture.other_choice.min() > 0.05
    assert np.allclose(mixture.distance[:, 0, 1], 0.5 * 8**-0.25)
    assert np.allclose(layer.usage.queries.sum(1), 1)
    assert np.allclose(layer.usage.keys.sum(1), 1)


def test_equal_components_share_the_attention():
    mixture = analyse(mixture_layer([0.5, 0.5], 0.0), [torch.randn(1, LENGTH, 24)], removal=0).layers[0].mixture
    assert np.allclose(mixture.answered, 0.5)
    assert np.allclose(mixture.decided, 0.5)
    assert np.allclose(mixture.moved, 0, atol=1e-6)
    assert np.allclose(mixture.distance, 0)


def test_description_of_the_attention():
    descriptions = {
        "softmax": "softmax",
        "linear": "linear",
        "mgk": "2 independent components per key",
        "smgk-hard": "hard, 2 shifted components per key",
        "mlk": "linear, 2 independent components per key",
    }
    for variant, expected in descriptions.items():
        assert analyse(model_of(variant), samples(1), removal=0).layers[0].kind == expected


def test_wrong_arguments_are_rejected():
    with pytest.raises(ValueError, match="no attention layers"):
        analyse(nn.Linear(3, 3), [torch.randn(2, 3)])
    with pytest.raises(ValueError, match="at least one sample"):
        analyse(model_of(), [])
    with pytest.raises(ValueError, match="matrices must be a positive integer"):
        analyse(model_of(), samples(), matrices=0)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["softmax", "smgk", "mgk-hard", "mlk"])
def test_gpu_and_cpu_agree(variant):
    model, inputs = model_of(variant, max_length=200), samples(2, 190)
    on_gpu = analyse(model.cuda(), [x.cuda() for x in inputs], removal=1)
    on_cpu = analyse(model.cpu(), inputs, removal=1)
    for one, other in zip(on_cpu.layers, on_gpu.layers, strict=True):
        # Queries and keys come from an fp32 forward, which differs by rounding.
        assert np.abs(one.ranks.rank - other.ranks.rank).max() <= 3
        assert np.allclose(one.ranks.effective, other.ranks.effective, rtol=1e-3)
        assert np.allclose(one.similarity.divergence, other.similarity.divergence, atol=1e-4)
        assert np.allclose(one.similarity.cka, other.similarity.cka, atol=1e-3)
        assert np.allclose(one.removal.change, other.removal.change, rtol=0.05)


def test_layer_that_is_the_whole_model():
    """The name of the root module is empty; its hooks must not replace the output."""
    results = analyse(mgk.Attention(32, 4), [torch.randn(1, 20, 32)], removal=2)
    assert len(results.layers) == 1
    assert results.layers[0].heads == 4
