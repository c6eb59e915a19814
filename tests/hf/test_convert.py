"""Converted Transformers models compute the same at first, and learn."""

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import flash_attention_mask, sdpa_mask  # noqa: E402

from mgk.hf import MGKConfig, MGKForCausalLM, convert, load_converted  # noqa: E402
from tests.support.hf_models import (  # noqa: E402
    LENGTH,
    MODELS,
    assert_close,
    inputs,
    logits,
    make,
    mixtures,
    randomize,
    small,
    use_literal_attention,
)
from tests.support.remote_code import make_repository  # noqa: E402

DECODERS = ("llama", "qwen2", "mistral", "gpt2")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_converted_model_keeps_logits(name, implementation):
    model = make(name)
    model.set_attn_implementation(implementation)
    batches = [inputs(padding) for padding in (None, "left", "right")]
    before = [logits(model, batch) for batch in batches]
    assert convert(model, num_components=3) is model
    for batch, expected in zip(batches, before, strict=True):
        assert_close(logits(model, batch), expected)
    # The logits depend on the mixture keys.
    randomize(model)
    for batch, expected in zip(batches, before, strict=True):
        assert (logits(model, batch) - expected).abs().max() > 0.1


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_converted_layers_compute_mixture(name, padding):
    """Test causal, windowed and padded attention with the model's queries, keys and masks."""
    original, batch = make(name).double(), inputs(padding)
    model = randomize(convert(copy.deepcopy(original), layers=[0, -1]))
    use_literal_attention(original, model)
    torch.testing.assert_close(logits(model, batch), logits(original, batch), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, cache):
    """Test the original model's tokens at τ = 0, and those without a cache at other τ."""
    model, batch = make(name), inputs("left")
    generate = partial(
        transformers.GenerationMixin.generate, **batch, max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    before = generate(model)
    assert torch.equal(generate(convert(model), cache_implementation=cache), before)
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    randomize(model)
    for _ in range(6):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            scores = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
        tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
    assert torch.equal(generate(model, cache_implementation=cache), tokens)
    assert not torch.equal(tokens, before)


def test_encoder_decoder_generates_same_text():
    """Cross attention is converted as well; its keys are cached once."""
    model, batch = make("bart"), inputs("right")
    generate = partial(model.generate, **batch, max_new_tokens=6, do_sample=False, num_beams=2)
    before = generate()
    assert {name.split(".")[-1] for name in convert(model).config.mgk["layers"]} == {"self_attn", "encoder_attn"}
    assert torch.equal(generate(), before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_converted_model_learns(name):
    """At τ = 0 only τ has a gradient; shifts and priors have one as soon as τ is not 0."""
    model, batch = convert(make(name)), inputs("right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    learned = [parameter for mixture in mixtures(model) for parameter in mixture.parameters()]
    assert len(learned) == 2 * 3
    assert all(any(parameter is other for other in model.parameters()) for parameter in learned)

    def loss():
        return model(**batch, labels=labels).loss

    start = loss()
    start.backward()
    assert all((mixture.tau.grad.abs() > 1e-4).all() for mixture in mixtures(model))
    optimizer = torch.optim.Adam(learned, lr=0.02)
    for _ in range(8):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss() < start - 0.02
    for mixture in mixtures(model):
        assert mixture.shift.grad.abs().max() > 1e-4
        assert mixture.prior.weights.grad.abs().max() > 1e-5
    # With dropout, if the model has one.
    model.train()
    assert loss().isfinite()


def test_gradient_checkpointing():
    model, batch = randomize(convert(make("llama"))).train(), inputs("left")

    def gradients():
        model.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    before = gradients()
    model.gradient_checkpointing_enable()
    for actual, expected in zip(gradients(), before, strict=True):
        assert_close(actual, expected)


def test_attention_dropout():
    model, batch = convert(make("llama", attention_dropout=0.5)), inputs()
    expected = logits(model, batch)
    assert torch.equal(logits(model, batch), expected)
    assert (logits(model.train(), batch) - expected).abs().max() > 0.1


def test_is_causal_argument():
    model, batch = make("llama"), inputs()
    full_batch = {**batch, "is_causal": False}
    expected = logits(model, full_batch)
    assert_close(logits(convert(model), full_batch), expected)
    assert (logits(model, batch) - expected).abs().max() > 0.1


@pytest.mark.slow
def test_compiles_without_graph_breaks():
    model, batch = randomize(convert(make("llama"))), inputs()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch, use_cache=False).logits, model(**batch).logits)


@pytest.mark.parametrize(
    "layers, numbers", [(None, [0, 1, 2]), (1, [1]), ([0, -1], [0, 2]), ("layers.1.*", [1]), (["*.2.*", 0], [0, 2])]
)
def test_layers_argument_selects_layers(layers, numbers):
    model = convert(make("llama", num_hidden_layers=3), layers=layers)
    converted = [hasattr(layer.self_attn, "mgk") for layer in model.model.layers]
    assert converted == [number in numbers for number in range(3)]
    for layer, is_converted in zip(model.model.layers, converted, strict=True):
        assert (layer.self_attn.config is model.config) != is_converted
    assert list(model.config.mgk["layers"]) == [f"layers.{number}.self_attn" for number in numbers]


def test_follows_attention_implementation_of_model():
    """Masks change with the implementation; unsupported ones raise an error."""
    model, batch = randomize(convert(make("mistral"), layers=0)), inputs("left")
    expected = logits(model, batch)
    model.set_attn_implementation("eager")
    assert_close(logits(model, batch), expected)
    weights = model(**batch, output_attentions=True).attentions
    assert len(weights) == 2
    assert_close(weights[0][0].sum(-1), torch.ones(4, LENGTH))
    assert not weights[0][1, :, :3].any()  # a fully masked query
    model.set_attn_implementation("mgk")
    with pytest.raises(ValueError, match=r"has a MistralAttention without mixture keys: use mgk.hf.convert"):
        model(**batch)
    with pytest.raises(ValueError, match=r"'other masks' attention, .*set_attn_implementation"):
        with_other_masks(model)(**batch)


def test_sharded_key_heads_raise():
    """With tensor parallelism a layer has some of its heads; the mixture keys are not sharded."""
    model, batch = convert(make("llama")), inputs()
    layer = model.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        projection = getattr(layer, name)
        weight = projection.weight.data
        projection.weight.data = weight[:, :16] if name == "o_proj" else weight[: len(weight) // 2]
    with pytest.raises(ValueError, match=r"mixture keys for 2 key heads and a layer with 1: tensor parallelism"):
        model(**batch)


def test_mgk_implementation_makes_masks():
    model, batch = randomize(convert(make("mistral"))), inputs("left")
    expected = logits(model, batch)
    model.set_attn_implementation("mgk")
    assert_close(logits(model, batch), expected)


def test_new_parameters_match_device_dtype_and_seed():
    model, modes = make("llama").to(torch.bfloat16).train(), []
    model.model.norm.eval()
    hook = model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    state = torch.get_rng_state()
    convert(model, num_components=4, shift_std=0.1)
    hook.remove()
    assert not any(modes)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.training
    assert not model.model.norm.training
    assert mixtures(model)[0].shift.shape == (2, 4, 8)
    assert 0.05 < mixtures(model)[0].shift.std() < 0.2
    for begin_with, is_same in ((state, True), (torch.get_rng_state(), False)):
        loaded = make("llama").to(torch.bfloat16)
        torch.set_rng_state(begin_with)
        convert(loaded, num_components=4, shift_std=0.1)
        assert torch.equal(mixtures(loaded)[1].shift, mixtures(model)[1].shift) == is_same


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


def test_converted_model_save_and_load(folder):
    model, batch = randomize(convert(make("mistral"), layers=1)), inputs("left")
    model.save_pretrained(folder)
    assert not [path for path in folder.iterdir() if path.suffix not in (".json", ".md", ".safetensors")]
    loaded = load_converted(folder)
    assert type(loaded) is type(model)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(logits(loaded.eval(), batch), logits(model, batch))
    loaded.save_pretrained(folder)
    half = load_converted(folder, dtype=torch.float16, attn_implementation="eager")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float16}
    assert half.config._attn_implementation == "eager"
    # Without the head.
    base = load_converted(folder, model_class=transformers.MistralModel).eval()
    with torch.no_grad():
        assert torch.equal(base(**batch).last_hidden_state, model.model(**batch).last_hidden_state)


def test_incomplete_folder_raises(folder):
    convert(make("llama")).save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights_by_name = load_file(weights)
    tau = "model.layers.1.self_attn.mgk.tau"
    for broken in (
        {name: tensor for name, tensor in weights_by_name.items() if name != tau},
        {**weights_by_name, tau: torch.zeros(3)},
        {**weights_by_name, "model.layers.0.self_attn.mgk.other": torch.zeros(3)},
    ):
        save_file(broken, weights, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"has weights that do not match its config.json: .*mgk\."):
            load_converted(folder)
    settings = json.loads((folder / "config.json").read_text())
    for wrong in ({"variant": "smgk"}, {"variant": "smgk", "layers": {"layers.7.self_attn": [2, 2, 8]}}, "smgk"):
        (folder / "config.json").write_text(json.dumps({**settings, "mgk": wrong}))
        with pytest.raises(ValueError, match=r"config.json whose 'mgk' does not match LlamaForCausalLM"):
            load_converted(folder)


def test_code_of_a_folder_runs_only_with_the_argument(folder, tmp_path, monkeypatch):
    marker = make_repository(folder, mgk={"variant": "smgk", "layers": {}})
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load_converted(folder, model_class=transformers.BertModel)
    assert not marker.exists()
    load_converted(folder, model_class=transformers.BertModel, trust_remote_code=True)
    assert marker.exists()


def test_from_pretrained_model_is_not_converted(folder):
    # Folders of earlier versions have the original model type, and the original class loads them.
    old_folder = Path(__file__).parents[1] / "fixtures" / "aa005c7" / "hf-converted"
    plain = transformers.LlamaForCausalLM.from_pretrained(old_folder)
    with pytest.raises(ValueError, match=r"loaded without them: use mgk.hf.load_converted"):
        convert(plain)
    make("llama").save_pretrained(folder / "plain")
    with pytest.raises(ValueError, match="has no converted model"):
        load_converted(folder / "plain")


def capped(module, query, key, value, attention_mask, scaling=None, **extras):
    """Compute attention with capped logits, without passing `softcap`."""
    scores = torch.tanh(query @ key.repeat_interleave(2, 1).mT * scaling)
    return (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2), None


def with_other_masks(model):
    """Use flash attention's masks: two dimensions, and none for a window."""
    transformers.AttentionInterface.register("other masks", sdpa_attention_forward)
    transformers.AttentionMaskInterface.register("other masks", flash_attention_mask)
    model.set_attn_implementation("other masks")
    return model


def with_capped_attention():
    transformers.AttentionInterface.register("capped", capped)
    transformers.AttentionMaskInterface.register("capped", sdpa_mask)
    model = make("llama")
    model.set_attn_implementation("capped")
    return model


UNSUPPORTED = {
    "softcap": (
        lambda: small("Gemma2ForCausalLM", "Gemma2Config", head_dim=8),
        "capped logits .softcap. in its Gemma2",
    ),
    "alibi": (lambda: small("BloomForCausalLM", "BloomConfig"), "BloomForCausalLM, none of whose layers"),
    "ours": (
        lambda: MGKForCausalLM(MGKConfig(vocab_size=50, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)),
        "MGKForCausalLM, none of whose layers",
    ),
    "no tokens": (
        lambda: small("TimesFmModelForPrediction", "TimesFmConfig", head_dim=8, horizon_length=8),
        "example is required: TimesFmModelForPrediction takes past_values",
    ),
    "something else": (with_capped_attention, "attention is not pure softmax"),
    "other masks": (lambda: with_other_masks(make("llama")), "runs 'other masks' attention"),
    "converted": (lambda: convert(make("llama")), "already been converted"),
    "no model": (lambda: torch.nn.Linear(2, 2), "model must be a Transformers model"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_model_raises(name):
    """The model stays unchanged."""
    build, message = UNSUPPORTED[name]
    model = build()
    before, configs = list(model.state_dict()), [getattr(module, "config", None) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        convert(model)
    assert list(model.state_dict()) == before
    assert all(getattr(m, "config", None) is config for m, config in zip(model.modules(), configs, strict=True))
    assert name == "converted" or not hasattr(getattr(model, "config", None), "mgk")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"variant": "mgk"}, "variant must be 'smgk', got 'mgk': .* projections"),
        ({"variant": "smlk"}, "no exact linear form"),
        ({"variant": "smgk-hard"}, "hard assignment"),
        ({"variant": "smgk-em"}, "prior from EM"),
        ({"variant": "softmax"}, "already uses softmax attention"),
        ({"variant": "sgmk"}, "did you mean 'smgk'"),
        ({"num_components": 0}, "num_components must be a positive integer"),
        ({"shift_std": 0}, "shift_std must be more than 0"),
        ({"layers": 2}, "layers has no match for 2: the 2 layers are 'layers.0.self_attn' to 'layers.1.self_attn'"),
        ({"layers": "h.*"}, r"layers has no match for 'h\.\*'"),
        ({"layers": []}, "at least one"),
        ({"example": {"pixels": torch.zeros(2)}}, "example is not an input that LlamaForCausalLM accepts"),
    ],
)
def test_invalid_setting_raises(settings, message):
    with pytest.raises(ValueError, match=message):
        convert(make("llama"), **settings)
