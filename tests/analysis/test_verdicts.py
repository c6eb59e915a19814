"""Verdicts of `mgk analyze`: untrained models, copied heads, and the numbers of heads that they lead to."""

import math

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

import mgk.hf  # noqa: E402
from mgk.analysis import analyse, hf_models  # noqa: E402
from mgk.analysis.report import verdicts  # noqa: E402
from mgk.analysis.report.findings import sentences  # noqa: E402
from mgk.analysis.report.verdicts import Suggestion, Verdict  # noqa: E402
from mgk.analysis.similarity import SimilarityAccumulator  # noqa: E402
from tests.support.hf_models import copy_heads, make  # noqa: E402


def analyze(model, samples=3, length=40):
    torch.manual_seed(1)
    inputs = [{"input_ids": torch.randint(3, 50, (1, length))} for _ in range(samples)]
    return analyse(model.eval(), inputs, removal=0, matrices=4, map_size=8, capture=hf_models.capture_attention)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_untrained_model_gets_no_verdict(name):
    """Transformers' initialization gives nearly uniform attention, so that all maps are alike."""
    analysis = analyze(make(name, initializer_range=0.02))
    assert analysis.different["maps"] < 0.3 * analysis.heads
    assert verdicts.judge_keys(analysis) is verdicts.judge_values(analysis) is Verdict.UNIFORM
    assert verdicts.headline(analysis) == "All 8 heads attend nearly uniformly: no verdict on redundancy."
    lines = sentences(analysis, [], None, None)
    assert lines[0].startswith("Keys: no verdict. 8 of 8 heads are within 0.2 bits of uniform attention")
    assert lines[1].startswith("Values: no verdict.")
    assert not any("identical maps" in line or "most similar" in line for line in lines)
    assert verdicts.suggest_heads(analysis) == Suggestion()


@pytest.mark.parametrize("scale", [0.2, 0.3])
def test_unrelated_heads_are_not_redundant(scale):
    """With larger random weights the attention is not uniform, and maps overlap no more than by chance."""
    analysis = analyze(make("bert", initializer_range=scale))
    assert verdicts.count_uniform_heads(analysis) == 0
    assert analysis.different["maps"] < verdicts.LITTLE * analysis.heads
    assert analysis.different["maps"] == pytest.approx(analysis.different_by_chance["maps"], rel=0.05)
    assert verdicts.judge_keys(analysis) is Verdict.CHANCE
    assert verdicts.headline(analysis).endswith("as with unrelated heads: no redundancy beyond chance.")
    assert verdicts.judge_values(analysis) is not Verdict.REDUNDANT
    assert verdicts.suggest_heads(analysis) == Suggestion()


def test_copied_maps_are_redundant_keys():
    analysis = analyze(copy_heads(make("bert"), ("query", "key")))
    assert analysis.different["maps"] < 4.01 < analysis.different_by_chance["maps"]
    assert verdicts.judge_keys(analysis) is Verdict.REDUNDANT
    assert verdicts.suggest_heads(analysis) == Suggestion(key_heads=2)
    assert verdicts.suggest_heads(analysis, keys_are_fixed=True) == Suggestion()
    keys, values = sentences(analysis, [], None, None)[:2]
    assert keys.startswith("Keys: clear redundancy. 8 heads form about ")
    assert keys.endswith("Heads with the same map can share a key head.")
    assert values.startswith("Values: some redundancy.")
    assert values.endswith("Values are less redundant than keys: merge keys first.")
    ranks = next(line for line in sentences(analysis, [], None, None) if "rank" in line)
    assert "heads of full rank can be copies of each other" in ranks


def test_copied_heads_are_redundant_values_too():
    analysis = analyze(copy_heads(make("bert"), ("query", "key", "value")))
    assert verdicts.judge_values(analysis) is Verdict.REDUNDANT
    assert verdicts.suggest_heads(analysis) == Suggestion(key_heads=2, value_heads=2)


def test_layers_that_differ_are_merged_by_the_size_of_the_cache():
    model = make("bert")
    copy_heads(model.bert.encoder.layer[0], ("query", "key"))
    assert verdicts.suggest_heads(analyze(model)) == Suggestion(cache=0.88)


def test_few_tokens_give_no_verdict():
    """The shortest text of `mgk analyze` has 8 tokens."""
    for seed in range(3):
        torch.manual_seed(seed)
        analysis = analyze(make("bert"), samples=1, length=8)
        assert Verdict.REDUNDANT not in (verdicts.judge_keys(analysis), verdicts.judge_values(analysis))


def test_present_numbers_of_heads():
    analysis = analyze(make("llama"))
    assert [(layer.heads, layer.key_heads, layer.value_heads) for layer in analysis.layers] == [(4, 2, 2)] * 2


def test_concentration_by_hand():
    """One uniform head, one with a single key; in the second row two keys are visible, in the third one."""
    weights = torch.tensor([[[0.25] * 4, [0.5, 0.5, 0, 0], [1, 0, 0, 0]], [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]])
    statistics = SimilarityAccumulator(2, None, torch.device("cpu"))
    statistics.add_maps(weights.double())
    np.testing.assert_allclose(statistics.similarity().concentration, [0, (2 + 1) / 2], atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spread", [0.2, 1, 3])
def test_chance_is_the_divergence_of_unrelated_heads(spread, causal):
    """Identical maps, shuffled, are as different as maps with independent logits, and shuffling keeps the mask."""
    torch.manual_seed(0)
    logits = spread * torch.randn(6, 64, 64, dtype=torch.float64)
    if causal:
        logits.masked_fill_(torch.ones(64, 64).triu(1).bool(), -math.inf)
    unrelated, copies = (SimilarityAccumulator(6, None, torch.device("cpu")) for _ in range(2))
    unrelated.add_maps(logits.softmax(-1))
    copies.add_maps(logits[:1].expand(6, -1, -1).softmax(-1))
    expected = unrelated.similarity().different["maps"]
    assert unrelated.similarity().different_by_chance["maps"] == pytest.approx(expected, rel=0.05)
    assert copies.similarity().different["maps"] == pytest.approx(1)
    assert copies.similarity().different_by_chance["maps"] == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("tokens", [30, 300])
def test_expected_similarity_of_unrelated_outputs(tokens):
    torch.manual_seed(0)
    statistics = SimilarityAccumulator(12, 8, torch.device("cpu"))
    statistics.add_outputs(torch.randn(12, tokens, 8, dtype=torch.float64))
    similarity, pairs = statistics.similarity(), ~np.eye(12, dtype=bool)
    assert similarity.cka[pairs].mean() == pytest.approx(similarity.chance_cka[pairs].mean(), rel=0.1)


def test_models_that_cannot_be_merged():
    sample = {"input_ids": torch.randint(3, 50, (1, 12))}
    assert hf_models.check_mergeable(make("bert"), sample) == ("", False)
    reason, _ = hf_models.check_mergeable(mgk.hf.convert(make("bert")), sample)
    assert "upcycle the original model" in reason
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 50}
    normalized = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings, intermediate_size=32)).eval()
    assert hf_models.check_mergeable(normalized, sample) == ("", True)
