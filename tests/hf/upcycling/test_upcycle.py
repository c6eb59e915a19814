"""`mgk.hf.upcycle` on tiny random models: exactness, losses, report, caches, saving and loading."""

import copy
import math

import pytest
import torch

transformers = pytest.importorskip("transformers")

from mgk.hf import load_converted, upcycle  # noqa: E402
from mgk.hf.upcycling.algebra import merge_svd  # noqa: E402
from mgk.hf.upcycling.layers import find_layers  # noqa: E402
from mgk.hf.upcycling.weights import read_weights  # noqa: E402
from tests.support.hf_models import assert_close, inputs, logits, make, small  # noqa: E402

FOUR = {"num_key_value_heads": 4}
# All key heads before: 4, in groups of one query head, except for llama with 8 query heads.
MODELS = {
    "bert": lambda: make("bert"),
    "gpt2": lambda: make("gpt2"),
    "llama": lambda: make("llama", num_attention_heads=8, hidden_size=64, **FOUR),
    "qwen2": lambda: make("qwen2", **FOUR),
    "bart": lambda: make("bart", decoder_attention_heads=4),
}
AUTO = {
    "bert": "AutoModelForMaskedLM",
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "qwen2": "AutoModelForCausalLM",
    "bart": "AutoModelForSeq2SeqLM",
}


def calibration(count=12):
    return [inputs("right") for _ in range(count)]


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def randomize_biases(model):
    """Biases of new models are 0, which would hide errors."""
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def copy_heads(model):
    """Make heads 2 and 3 equivalent to heads 0 and 1: transformed copies, or scaled ones before a rotary embedding."""
    for layer in find_layers(model, inputs()):
        weights = read_weights(layer)
        for part, dim in (("key", layer.key_dim), ("value", layer.value_dim)):
            transform = torch.eye(dim, dtype=torch.float64) * 1.5
            if part == "value" or not layer.planes.first:
                transform = transform + 0.3 * torch.randn(dim, dim, dtype=torch.float64)
            matrix, bias = getattr(weights, part), getattr(weights, f"{part}_bias")
            matrix[2:] = transform @ matrix[:2]
            if bias is not None:
                bias[2:] = bias[:2] @ transform.T
        _write_full(layer, weights)
    return model


@torch.no_grad()
def _write_full(layer, weights):
    modules = (layer.projections.query, layer.projections.key, layer.projections.value)
    parts = [(weights.query, weights.query_bias), (weights.key, weights.key_bias), (weights.value, weights.value_bias)]
    if layer.projections.is_fused:
        modules[0].weight.copy_(torch.cat([weight.flatten(0, 1) for weight, _ in parts]).T)
        modules[0].bias.copy_(torch.cat([bias.flatten() for _, bias in parts]))
        return
    for module, (weight, bias) in zip(modules, parts, strict=True):
        module.weight.copy_(weight.flatten(0, 1))
        if bias is not None:
            module.bias.copy_(bias.flatten())


@pytest.mark.parametrize("refit", [True, False])
def test_equivalent_heads_merge_without_loss(name, refit):
    model = copy_heads(randomize_biases(MODELS[name]()))
    state = copy.deepcopy(model.state_dict())
    merged, report = upcycle(model, num_key_heads=2, num_value_heads=2, calibration=calibration(), refit=refit)
    assert max(max(layer.key_loss, layer.value_loss) for layer in report.layers) < 1e-9
    for padding in (None, "left", "right"):
        batch = inputs(padding)
        expected = logits(model, batch)
        torch.testing.assert_close(logits(merged, batch), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert report.cache == 0.5
    # The original model is not changed.
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_present_numbers_change_nothing(name):
    model, batch = MODELS[name](), inputs("right")
    merged, report = upcycle(model, num_key_heads=4, num_value_heads=4, calibration=calibration())
    assert torch.equal(logits(merged, batch), logits(model, batch))
    assert (report.cache, report.parameters[0]) == (1, report.parameters[1])
    assert report.fidelity["merged"]["hidden_error"] == 0


def expand(merged, original):
    """Give the original architecture the weights of a merged model: every head gets a copy of its key and value."""
    full = copy.deepcopy(original)
    state = full.state_dict()
    for key, value in merged.state_dict().items():
        if value.shape != state[key].shape:
            # Outputs are the last dimension of GPT-2's weights, and the first of those of other models.
            is_fused = "c_attn" in key
            outputs = value.movedim(-1, 0) if is_fused else value
            sizes = [len(outputs)]
            if is_fused:
                sizes = merged.base_model.get_submodule(".".join(key.split(".")[1:-2])).split_size
            width = state[key].shape[-1 if is_fused else 0] // len(sizes)
            parts = [
                part.unflatten(0, (-1, 8)).repeat_interleave(width // len(part), 0).flatten(0, 1)
                for part in outputs.split(sizes)
            ]
            value = torch.cat(parts).movedim(0, -1) if is_fused else torch.cat(parts)
        state[key] = value
    full.load_state_dict(state)
    return full


@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 4), (4, 2), (2, 1), (2, 2)])
def test_shared_heads_equal_copied_heads(name, key_heads, value_heads):
    """Compare with the original architecture, whose heads get copies of the shared keys and values."""
    model = randomize_biases(MODELS[name]())
    merged, _ = upcycle(model, num_key_heads=key_heads, num_value_heads=value_heads, calibration=calibration())
    full = expand(merged, model)
    for padding in (None, "left", "right"):
        batch = inputs(padding)
        assert_close(logits(merged, batch), logits(full, batch))
    merged.set_attn_implementation("eager")
    assert_close(logits(merged, batch), logits(full, batch))


def test_svd_and_refit_lose_less_than_the_mean(name):
    model, batches = randomize_biases(MODELS[name]()), calibration(40)
    # Merged rotary keys of a random model lose so much that the errors of its outputs are hardly comparable.
    numbers = {"num_key_heads": 4 if name in ("llama", "qwen2") else 2, "num_value_heads": 2}
    errors = {}
    for method, refit in (("svd", True), ("svd", False), ("mean", False)):
        _, report = upcycle(model, **numbers, calibration=batches, method=method, refit=refit)
        errors[method, refit] = report.fidelity["merged"]["hidden_error"]
    assert errors["svd", True] < errors["svd", False] < errors["mean", False]


def test_losses_of_keys_and_values_are_below_those_of_the_mean(name):
    model, batches = randomize_biases(MODELS[name]()), calibration()
    _, svd = upcycle(model, num_key_heads=2, num_value_heads=2, calibration=batches)
    _, mean = upcycle(model, num_key_heads=2, num_value_heads=2, calibration=batches, method="mean")
    for best, other in zip(svd.layers, mean.layers, strict=True):
        assert 0 < best.key_loss < min(other.key_loss, 1)
        assert 0 < best.value_loss < min(other.value_loss, 1)


@pytest.mark.parametrize("name", ["bert", "llama", "qwen2"])
def test_losses_are_those_of_the_text(name):
    """Constants of keys cost nothing without a rotary embedding, those of values if the output has a bias."""
    model, batches = randomize_biases(MODELS[name]()), calibration()
    _, report = upcycle(model, num_key_heads=1, num_value_heads=1, calibration=batches)
    for layer, losses in zip(find_layers(model, batches[0]), report.layers, strict=True):
        outputs = {}
        parts = (layer.projections.query, layer.projections.key, layer.projections.value)
        hooks = [
            part.register_forward_hook(
                lambda module, args, output, outputs=outputs: outputs.setdefault(module, []).append(output)
            )
            for part in parts
        ]
        for batch in batches[:-1]:
            logits(model, batch)
        for hook in hooks:
            hook.remove()
        masks = [batch["attention_mask"].bool() for batch in batches[:-1]]
        query, key, value = (
            torch.cat([x[mask] for x, mask in zip(outputs[part], masks, strict=True)]).double() for part in parts
        )
        per_head = query.unflatten(-1, (4, -1, layer.key_dim))
        weights = torch.einsum("nugi,nugj->uij", per_head, per_head) / len(query)
        key = key if layer.planes.first else key - key.mean(0)
        expected = merge_svd(key.T @ key / len(key), weights, layer.planes)
        assert losses.key_loss == pytest.approx(expected.loss / expected.energy, rel=1e-3)
        value = value - value.mean(0) if layer.projections.output.bias is not None else value
        output = layer.projections.output.weight.double().unflatten(1, (4, -1, layer.value_dim))
        weights = torch.einsum("ougi,ougj->uij", output, output).detach()
        expected = merge_svd(value.T @ value / len(value), weights)
        assert losses.value_loss == pytest.approx(expected.loss / expected.energy, rel=1e-3)


def test_report_holds_the_numbers_of_the_model():
    model, batches = MODELS["llama"](), calibration()
    merged, report = upcycle(model, num_key_heads=1, num_value_heads=2, calibration=batches)
    for index, item in enumerate((model, merged)):
        assert report.parameters[index] == sum(parameter.numel() for parameter in item.parameters())
        cache = item(**inputs(), use_cache=True).past_key_values
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        assert report.cache_bytes[index] == sum(tensor.nbytes for tensor in tensors) // inputs()["input_ids"].numel()
    assert report.cache == 3 / 8
    assert report.calibration_tokens == sum(int(batch["attention_mask"].sum()) for batch in batches[:-1])
    held_out = batches[-1]
    mask = held_out["attention_mask"].bool()
    with torch.no_grad():
        old, new = (item(**held_out, output_hidden_states=True) for item in (model, merged))
    before, after = old.hidden_states[-1], new.hidden_states[-1]
    values = report.fidelity["merged"]
    assert values["hidden_error"] == pytest.approx(
        float((after - before)[mask].square().sum() / before[mask].square().sum()), rel=1e-4
    )
    pooled = [torch.stack([row[keep].mean(0) for row, keep in zip(x, mask, strict=True)]) for x in (before, after)]
    assert values["cosine"] == pytest.approx(float(torch.cosine_similarity(*pooled).mean()), rel=1e-4)
    log_probabilities = [item.logits[mask].log_softmax(-1) for item in (old, new)]
    divergence = torch.nn.functional.kl_div(
        log_probabilities[1], log_probabilities[0], log_target=True, reduction="sum"
    )
    assert values["kl"] == pytest.approx(float(divergence) / int(mask.sum()), rel=1e-4)
    losses = [
        model(**{**held_out, "labels": held_out["input_ids"].masked_fill(~mask, -100)}).loss.item(),
        merged(**{**held_out, "labels": held_out["input_ids"].masked_fill(~mask, -100)}).loss.item(),
    ]
    assert values["original_perplexity"] == pytest.approx(math.exp(losses[0]), rel=1e-3)
    assert values["perplexity"] == pytest.approx(math.exp(losses[1]), rel=1e-3)
    text = report.to_markdown()
    assert "| layers.0.self_attn | 8 | 4 → 1 | 4 → 2 |" in text
    assert f"{report.parameters[1]:,}" in text
    assert report.to_dict()["cache"] == 3 / 8


def test_base_model_returns_hidden_states(tmp_path):
    model = make("bert").bert
    merged, _ = upcycle(model, num_key_heads=1, calibration=calibration())
    merged.save_pretrained(tmp_path)
    for item in (merged, transformers.AutoModel.from_pretrained(tmp_path)):
        assert len(item(**inputs(), output_hidden_states=True).hidden_states) == 3


@pytest.mark.parametrize("mixture", [False, True])
def test_saved_model_loads_with_the_auto_classes(name, mixture, tmp_path):
    model = randomize_biases(MODELS[name]())
    merged, _ = upcycle(model, num_key_heads=1, num_value_heads=2, calibration=calibration(), mixture=mixture)
    merged.save_pretrained(tmp_path)
    batch = inputs("right")
    loaded = getattr(transformers, AUTO[name]).from_pretrained(tmp_path).eval()
    assert type(loaded) is type(merged)
    assert loaded.config.model_type == f"mgk-{model.config.model_type}"
    assert torch.equal(logits(loaded, batch), logits(merged, batch))
    assert torch.equal(logits(load_converted(tmp_path).eval(), batch), logits(merged, batch))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"cache_implementation": "static"},
        {"num_beams": 3, "cache_implementation": "static"},
        {"prefill_chunk_size": 4},
        {"prefill_chunk_size": 4, "num_beams": 3, "cache_implementation": "static"},
    ],
    ids=str,
)
def test_generate_equals_generation_with_copied_heads(name, options):
    model = randomize_biases(MODELS[name]())
    merged, _ = upcycle(model, num_key_heads=1, num_value_heads=2, calibration=calibration())
    batch = inputs("left")
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, **options}
    expected = expand(merged, model).generate(**batch, **settings)
    assert torch.equal(merged.generate(**batch, **settings), expected)
    # Transformers' chunked prefill changes the texts of encoder-decoders.
    if "prefill_chunk_size" in options and name != "bart":
        del settings["prefill_chunk_size"]
        assert torch.equal(expand(merged, model).generate(**batch, **settings), expected)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_mixture_is_exact_at_the_start(name):
    model = MODELS[name]()
    settings = {"num_key_heads": 2, "num_value_heads": 4, "calibration": calibration()}
    plain, _ = upcycle(model, **settings)
    mixed, report = upcycle(model, **settings, mixture=True, num_components=3)
    batch = inputs("right")
    assert_close(logits(mixed, batch), logits(plain, batch))
    shape = next(parameter.shape for key, parameter in mixed.named_parameters() if key.endswith("mgk.shift"))
    assert shape[:2] == (2, 3)
    assert report.settings["mixture"]
    with torch.no_grad():
        for key, parameter in mixed.named_parameters():
            if key.endswith("tau"):
                parameter.fill_(1)
    assert (logits(mixed, batch) - logits(plain, batch)).abs().max() > 1e-3


def test_budget_prefers_heads_that_lose_little():
    model = MODELS["bert"]()
    layers = find_layers(model, inputs())
    # The keys of the first layer are copies; all others differ.
    with torch.no_grad():
        weight = layers[0].projections.key.weight
        weight.copy_(weight[:8].repeat(4, 1))
    _, report = upcycle(model, cache=0.8, calibration=calibration())
    assert report.cache <= 0.8
    assert report.layers[0].key_heads == (4, 1)
    assert report.cache == sum(layer.key_heads[1] + layer.value_heads[1] for layer in report.layers) / 16
    _, smaller = upcycle(model, cache=0.4, calibration=calibration())
    assert smaller.cache <= 0.4


def test_a_cache_size_leaves_the_modes_of_the_model():
    model = MODELS["bert"]().train()
    model.base_model.encoder.layer[0].eval()
    before = [module.training for module in model.modules()]
    upcycle(model, cache=0.8, calibration=calibration())
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("numbers", [{"cache": 0.7}, {"num_key_heads": 2}], ids=str)
def test_merges_of_a_model_in_train_mode_have_no_dropout(numbers):
    model, batches = MODELS["bert"](), calibration()
    states = []
    for mode in (True, False):
        merged, _ = upcycle(model.train(mode), calibration=batches, **numbers)
        states.append(merged.state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def test_samples_are_at_most_as_long_as_the_tokenizer_permits():
    """RoBERTa has two positions more than tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 3, "b": 4, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32)
    model = small("RobertaModel", "RobertaConfig", max_position_embeddings=34, pad_token_id=1).eval()
    _, report = upcycle(model, num_key_heads=2, calibration=["a b " * 50] * 20, tokenizer=tokenizer)
    assert report.calibration_tokens == 18 * 32


def test_heads_of_normalized_keys_are_not_merged():
    model = small("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **FOUR).eval()
    with pytest.raises(ValueError, match="num_key_heads cannot change: Qwen3Attention normalizes"):
        upcycle(model, num_key_heads=2, calibration=calibration())
    _, report = upcycle(model, num_value_heads=2, calibration=calibration())
    assert [layer.key_heads for layer in report.layers] == [(4, 4)] * 2
    _, report = upcycle(model, cache=0.7, calibration=calibration())
    assert report.cache <= 0.7
    assert [layer.key_heads for layer in report.layers] == [(4, 4)] * 2


def test_images():
    """The number of tokens is that of the layers, not that of the inputs."""
    model = small("ViTForImageClassification", "ViTConfig", image_size=16, patch_size=4).eval()
    batches = [{"pixel_values": torch.randn(2, 3, 16, 16)} for _ in range(4)]
    merged, report = upcycle(model, num_key_heads=1, num_value_heads=2, calibration=batches)
    assert report.calibration_tokens == 3 * 2 * 17
    with torch.no_grad():
        assert_close(merged(**batches[0]).logits, expand(merged, model)(**batches[0]).logits)


def test_partly_rotated_keys():
    """The dimensions that are not rotated merge freely."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = small("PhiForCausalLM", "PhiConfig", **FOUR, rope_parameters=rope).eval()
    (layer, _) = find_layers(model, inputs())
    assert (layer.planes.first, layer.planes.second) == ((0, 1), (2, 3))
    merged, report = upcycle(model, num_key_heads=1, calibration=calibration())
    batch = inputs("right")
    assert_close(logits(merged, batch), logits(expand(merged, model), batch))
    assert 0 < report.layers[0].key_loss < 1


ERRORS = {
    "num_key_heads = 3 must divide the number of key heads, 4": {"num_key_heads": 3},
    "num_value_heads = 8 must divide the number of value heads, 4": {"num_value_heads": 8},
    "num_key_heads must be a positive integer": {"num_key_heads": 0},
    "num_key_heads is required, or num_value_heads or cache": {},
    "cache chooses the numbers of heads": {"cache": 0.5, "num_key_heads": 2},
    "cache must be above 0 and at most 1": {"cache": 1.5},
    "cache = 0.1 is too small": {"cache": 0.1},
    "method must be one of": {"num_key_heads": 2, "method": "median"},
    "calibration has 15 tokens, and at least 64 are needed": {"num_key_heads": 2, "calibration": 2},
    "calibration must have at least 2 batches": {"num_key_heads": 2, "calibration": 1},
    "tokenizer is required": {"num_key_heads": 2, "calibration": ["a text", "another"]},
    "calibration must be texts": {"num_key_heads": 2, "calibration": [1, 2]},
    "distil_steps must be a positive integer": {"num_key_heads": 2, "distil_steps": -1},
    "trainable must be one of": {"num_key_heads": 2, "trainable": "none"},
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_input(message):
    settings = {"calibration": calibration(), **ERRORS[message]}
    if isinstance(settings["calibration"], int):
        settings["calibration"] = calibration(settings["calibration"])
    with pytest.raises(ValueError, match=message):
        upcycle(MODELS["bert"](), **settings)
