"""`mgk.hf.upcycle` on language models of mgk.models: exactness, configuration, caches, messages."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from mgk.hf import MGKConfig, MGKForCausalLM, MGKForSequenceClassification, upcycle  # noqa: E402
from mgk.hf.upcycling.own_models import find_own_layers  # noqa: E402
from mgk.models import DecoderConfig, LanguageModel  # noqa: E402
from mgk.models.decoder import FORMS  # noqa: E402

HEADS, DIM = 8, 6


def make(positions="rotary", **changes):
    """Make a decoder whose weights and biases are large enough for distinct attention weights."""
    form = {**FORMS["modern"], "positions": positions}
    sizes = {"embed_dim": 24, "ffn_dim": 24, "num_layers": 2, "num_heads": HEADS, "head_dim": DIM}
    config = DecoderConfig(40, 16, **{**sizes, "variant": "softmax", "dropout": 0.0, **form, **changes})
    model = LanguageModel(config)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return MGKForCausalLM.of(model.eval())


def batches(count=10):
    return [{"input_ids": torch.randint(40, (4, 16))} for _ in range(count)]


@torch.no_grad()
def copy_heads(model):
    """Make heads 4 to 7 equivalent to heads 0 to 3: rotated and scaled keys, and linearly transformed values."""
    for layer in find_own_layers(model):
        half, pairs = HEADS // 2 * DIM, DIM // 2
        angles, scales = torch.rand(2, pairs)
        turn = torch.zeros(DIM, DIM)
        first, second = torch.arange(pairs), torch.arange(pairs, 2 * pairs)
        turn[first, first] = turn[second, second] = angles.cos() * (1 + scales)
        turn[first, second], turn[second, first] = -angles.sin() * (1 + scales), angles.sin() * (1 + scales)
        if not layer.planes.first:
            turn = torch.eye(DIM) + 0.3 * torch.randn(DIM, DIM)
        for part, matrix in ((layer.projections.key, turn), (layer.projections.value, torch.randn(DIM, DIM))):
            blocks = torch.block_diag(*[matrix] * (HEADS // 2))
            part.weight[half:] = blocks @ part.weight[:half]
            part.bias[half:] = blocks @ part.bias[:half]
    return model


@pytest.mark.parametrize("method", ["svd", "mean"])
def test_equal_numbers_change_nothing(method):
    model, tokens = make(), torch.randint(40, (2, 16))
    same, report = upcycle(
        model, num_key_heads=HEADS, num_value_heads=HEADS, calibration=batches(), method=method, refit=True
    )
    assert torch.equal(same(tokens).logits, model(tokens).logits)
    assert report.cache == 1
    assert same.model.config == model.model.config


@pytest.mark.parametrize("positions", ["rotary", "sinusoidal"])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(4, 8), (4, 4)])
def test_equivalent_heads_are_merged_without_loss(positions, key_heads, value_heads):
    model, tokens = copy_heads(make(positions)), torch.randint(40, (2, 16))
    settings = {"num_key_heads": key_heads, "num_value_heads": value_heads, "calibration": batches(), "refit": False}
    merged, report = upcycle(model, **settings)
    expected = model(tokens).logits
    assert (merged(tokens).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert max(max(layer.key_loss, layer.value_loss) for layer in report.layers) < 1e-9
    pooled, _ = upcycle(model, **settings, method="mean")
    assert (pooled(tokens).logits - expected).abs().max() > 1e-2 * expected.abs().max()


def test_merged_model_is_one_of_its_class(tmp_path):
    model = make()
    merged, report = upcycle(model, num_key_heads=1, num_value_heads=4, calibration=batches(), distil_steps=2)
    assert type(merged) is MGKForCausalLM
    assert report.cache == 5 / 16
    assert report.fidelity["distilled"]["original_perplexity"] > 0
    config = merged.model.config
    assert (config.num_heads, config.num_kv_heads, config.num_key_heads) == (HEADS, 4, 1)
    assert config == merged.config.settings()
    merged.save_pretrained(tmp_path)
    tokens = torch.randint(40, (2, 9))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens).logits, merged.eval()(tokens).logits)
    cached = loaded.generate(tokens, max_new_tokens=5, do_sample=False)
    assert torch.equal(cached, loaded.generate(tokens, max_new_tokens=5, do_sample=False, use_cache=False))
    assert loaded.make_cache(1, 8).nbytes == 2 * 8 * (1 + 4) * DIM * 4
    # The numbers are those of the model that is trained this way: equal ones are None.
    assert upcycle(model, num_key_heads=4, calibration=batches())[0].model.config == make(num_key_heads=4).model.config
    halved, _ = upcycle(model, num_key_heads=4, num_value_heads=4, calibration=batches())
    assert halved.model.config == make(num_kv_heads=4).model.config


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"variant": "smgk"}, {"num_key_heads": 4}, "model has layers of the variant smgk"),
        ({"num_key_heads": 4}, {"num_value_heads": 4}, "model has 4 key heads and 8 value heads: upcycle the original"),
        ({}, {"cache": 0.5}, "cache is not supported by MGKForCausalLM"),
        ({}, {"num_key_heads": 4, "mixture": True}, "mixture is not supported by MGKForCausalLM"),
        ({}, {"num_key_heads": 3}, "num_key_heads = 3 must divide the number of key heads, 8"),
    ],
)
def test_unsupported_models_and_settings(changes, options, message):
    with pytest.raises(ValueError, match=message):
        upcycle(make(**changes), calibration=batches(), **options)


def test_classifiers_are_refused():
    sizes = {"vocab_size": 40, "max_position_embeddings": 16, "hidden_size": 16, "num_attention_heads": 2}
    model = MGKForSequenceClassification(MGKConfig(kind="classifier", num_labels=2, variant="softmax", **sizes))
    with pytest.raises(ValueError, match="only language models can be upcycled"):
        upcycle(model, num_key_heads=1, calibration=batches())
