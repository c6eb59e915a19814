"""Pretrained Transformers models with mixture keys: the same at first, and able to learn."""

import copy
import json
import os
from functools import partial

import pytest
import torch

# Nothing may be asked of a server.
os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import eager_mask, flash_attention_mask, sdpa_mask  # noqa: E402

import mgk.analysis.hf_models  # noqa: E402
from mgk.hf import MGKConfig, MGKForCausalLM, convert, load_converted  # noqa: E402
from mgk.hf.mixture_keys import MixtureKeys  # noqa: E402

LENGTH = 9
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Weights large enough that attention is far from uniform, where every error hides.
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.3, **TOKENS,
}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 50, "decoder_start_token_id": 2, "init_std": 0.3,
    "forced_eos_token_id": None, **TOKENS,
}  # fmt: skip
# name -> class, configuration, settings
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SIZES, "num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SIZES, "num_key_value_heads": 2, "sliding_window": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**SIZES, "scale_attn_by_inverse_layer_idx": True}),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
}
DECODERS = ("llama", "qwen2", "mistral", "gpt2")


def make(name, **settings):
    model_class, config_class, usual = MODELS[name]
    config = getattr(transformers, config_class)(**{**usual, **settings})
    return getattr(transformers, model_class)(config).eval()


def inputs(padding=None):
    """Two sequences, the second with three tokens less."""
    real = torch.ones(2, LENGTH, dtype=torch.long)
    if padding is not None:
        real[1, slice(3) if padding == "left" else slice(-3, None)] = 0
    return {"input_ids": torch.randint(3, 50, (2, LENGTH)) * real, "attention_mask": real}


def mixtures(model):
    return [module for module in model.modules() if isinstance(module, MixtureKeys)]


def move(model):
    """Away from softmax attention, to somewhere random."""
    with torch.no_grad():
        for mixture in mixtures(model):
            mixture.tau.uniform_(0.2, 1)
            mixture.prior.weights.normal_()
    return model


def logits(model, given):
    with torch.no_grad():
        return model(**given).logits[given["attention_mask"].bool()]


def assert_close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_it_starts_as_the_model_it_was(name, implementation):
    model = make(name)
    model.set_attn_implementation(implementation)
    given = [inputs(padding) for padding in (None, "left", "right")]
    before = [logits(model, each) for each in given]
    assert convert(model, num_components=3) is model
    for each, want in zip(given, before, strict=True):
        assert_close(logits(model, each), want)
    # ... and not because nothing depends on the mixture keys.
    move(model)
    assert all((logits(model, each) - want).abs().max() > 0.1 for each, want in zip(given, before, strict=True))


def literal(module, query, key, value, attention_mask, scaling=None, **extras):
    """Eq. 9 and 10 with τ, typed out, by the parameters of a converted layer."""
    mixture = module.mixture
    group = query.shape[1] // key.shape[1]
    keys = (key.unsqueeze(2) + mixture.shift.unsqueeze(-2)).repeat_interleave(group, 1)  # [B, H, M, S, D]
    prior = mixture.prior.weights.softmax(1).repeat_interleave(group, 0)  # [H, M, 1]
    tau = mixture.tau.repeat_interleave(group)[:, None, None]
    norms = tau * keys.square().sum(-1)  # [B, H, M, S]
    products = torch.einsum("bhld,bhmsd->bhlms", query, keys)
    weights = (prior.unsqueeze(1) * torch.exp(scaling * (products - 0.5 * norms.unsqueeze(2)))).sum(3)
    if attention_mask is not None:
        weights = weights * (attention_mask == 0)
    output = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ value.repeat_interleave(group, 1)
    return output.transpose(1, 2), None


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_it_computes_the_mixture(name, padding):
    """Of the model's own queries, keys and masks; causal, windowed and padded as they were."""
    original, given = make(name).double(), inputs(padding)
    model = move(convert(copy.deepcopy(original), layers=[0, -1]))
    transformers.AttentionInterface.register("literal", literal)
    transformers.AttentionMaskInterface.register("literal", eager_mask)
    for path in model.config.mgk["layers"]:
        layer = original.base_model.get_submodule(path)
        layer.config = copy.copy(layer.config)
        layer.config._attn_implementation_internal = "literal"
        layer.mixture = model.base_model.get_submodule(path).mgk
    original.set_attn_implementation("eager")
    torch.testing.assert_close(logits(model, given), logits(original, given), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, cache):
    """The tokens of the original at first; later those that are found without a cache."""
    model, given = make(name), inputs("left")
    generate = partial(
        transformers.GenerationMixin.generate, **given, max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    before = generate(model)
    assert torch.equal(generate(convert(model), cache_implementation=cache), before)
    tokens, real = given["input_ids"], given["attention_mask"]
    move(model)
    for _ in range(6):
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            scores = model(tokens, attention_mask=real, position_ids=positions, use_cache=False).logits[:, -1]
        tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], 1)
        real = torch.cat([real, real.new_ones(2, 1)], 1)
    assert torch.equal(generate(model, cache_implementation=cache), tokens)
    assert not torch.equal(tokens, before)


def test_an_encoder_and_decoder_generate_as_before():
    """Cross attention is converted too; its keys are cached once."""
    model, given = make("bart"), inputs("right")
    generate = partial(model.generate, **given, max_new_tokens=6, do_sample=False, num_beams=2)
    before = generate()
    assert {name.split(".")[-1] for name in convert(model).config.mgk["layers"]} == {"self_attn", "encoder_attn"}
    assert torch.equal(generate(), before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_it_learns_from_there(name):
    """At τ = 0 the loss depends on τ alone; what τ leads to, shifts and priors, learns as soon as it has moved."""
    model, given = convert(make(name)), inputs("right")
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    learned = [parameter for mixture in mixtures(model) for parameter in mixture.parameters()]
    assert len(learned) == 2 * 3
    assert all(any(parameter is other for other in model.parameters()) for parameter in learned)

    def loss():
        return model(**given, labels=labels).loss

    start = loss()
    start.backward()
    assert all((mixture.tau.grad.abs() > 1e-4).all() for mixture in mixtures(model))
    optimiser = torch.optim.Adam(learned, lr=0.02)
    for _ in range(8):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
    assert loss() < start - 0.02
    for mixture in mixtures(model):
        assert mixture.shift.grad.abs().max() > 1e-4
        assert mixture.prior.weights.grad.abs().max() > 1e-5
    # With the dropout of their training, where they have one.
    model.train()
    assert loss().isfinite()


def test_gradient_checkpointing():
    model, given = move(convert(make("llama"))).train(), inputs("left")

    def gradients():
        model.zero_grad()
        model(**given, labels=given["input_ids"]).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    want = gradients()
    model.gradient_checkpointing_enable()
    for got, expected in zip(gradients(), want, strict=True):
        assert_close(got, expected)


def test_attention_dropout():
    model, given = convert(make("llama", attention_dropout=0.5)), inputs()
    want = logits(model, given)
    assert torch.equal(logits(model, given), want)
    assert (logits(model.train(), given) - want).abs().max() > 0.1


def test_a_caller_may_say_what_is_causal():
    model, given = make("llama"), inputs()
    freely = {**given, "is_causal": False}
    want = logits(model, freely)
    assert_close(logits(convert(model), freely), want)
    assert (logits(model, given) - want).abs().max() > 0.1


@pytest.mark.slow
def test_it_compiles_whole():
    model, given = move(convert(make("llama"))), inputs()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**given, use_cache=False).logits, model(**given).logits)


@pytest.mark.parametrize(
    "layers, numbers", [(None, [0, 1, 2]), (1, [1]), ([0, -1], [0, 2]), ("layers.1.*", [1]), (["*.2.*", 0], [0, 2])]
)
def test_the_layers_that_are_asked_for(layers, numbers):
    model = convert(make("llama", num_hidden_layers=3), layers=layers)
    converted = [hasattr(layer.self_attn, "mgk") for layer in model.model.layers]
    assert converted == [number in numbers for number in range(3)]
    for layer, is_converted in zip(model.model.layers, converted, strict=True):
        assert (layer.self_attn.config is model.config) != is_converted
    assert list(model.config.mgk["layers"]) == [f"layers.{number}.self_attn" for number in numbers]


def test_it_follows_the_attention_that_the_model_is_set_to():
    """Its masks change with it: the mixture keys stay, or say that they cannot read them."""
    model, given = move(convert(make("mistral"), layers=0)), inputs("left")
    want = logits(model, given)
    model.set_attn_implementation("eager")
    assert_close(logits(model, given), want)
    weights = model(**given, output_attentions=True).attentions
    assert len(weights) == 2
    assert_close(weights[0][0].sum(-1), torch.ones(4, LENGTH))
    assert not weights[0][1, :, :3].any()  # a query that may see nothing
    model.set_attn_implementation("mgk")
    with pytest.raises(ValueError, match=r"has a MistralAttention without mixture keys: use mgk.hf.convert"):
        model(**given)
    with pytest.raises(ValueError, match=r"'other masks' attention, .*set_attn_implementation"):
        with_other_masks(model)(**given)


def test_our_name_makes_masks_too():
    model, given = move(convert(make("mistral"))), inputs("left")
    want = logits(model, given)
    model.set_attn_implementation("mgk")
    assert_close(logits(model, given), want)


def test_what_is_added_has_the_place_and_type_of_the_rest():
    model, modes = make("llama").to(torch.bfloat16).train(), []
    model.model.norm.eval()
    watched = model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    state = torch.get_rng_state()
    convert(model, num_components=4, shift_std=0.1)
    watched.remove()
    assert not any(modes)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.training
    assert not model.model.norm.training
    assert mixtures(model)[0].shift.shape == (2, 4, 8)
    assert 0.05 < mixtures(model)[0].shift.std() < 0.2
    for begin_with, is_same in ((state, True), (torch.get_rng_state(), False)):
        again = make("llama").to(torch.bfloat16)
        torch.set_rng_state(begin_with)
        convert(again, num_components=4, shift_std=0.1)
        assert torch.equal(mixtures(again)[1].shift, mixtures(model)[1].shift) == is_same


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


def test_saved_and_loaded(folder):
    model, given = move(convert(make("mistral"), layers=1)), inputs("left")
    model.save_pretrained(folder)
    assert not [path for path in folder.iterdir() if path.suffix not in (".json", ".safetensors")]
    again = load_converted(folder)
    assert type(again) is type(model)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(logits(again.eval(), given), logits(model, given))
    again.save_pretrained(folder)
    half = load_converted(folder, dtype=torch.float16, attn_implementation="eager")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float16}
    assert half.config._attn_implementation == "eager"
    # Without its head, or with another.
    base = load_converted(folder, model_class=transformers.MistralModel).eval()
    with torch.no_grad():
        assert torch.equal(base(**given).last_hidden_state, model.model(**given).last_hidden_state)


def test_a_folder_that_does_not_hold_it_all(folder):
    convert(make("llama")).save_pretrained(folder)
    weights = folder / "model.safetensors"
    held = load_file(weights)
    tau = "model.layers.1.self_attn.mgk.tau"
    for broken in (
        {name: tensor for name, tensor in held.items() if name != tau},
        {**held, tau: torch.zeros(3)},
        {**held, "model.layers.0.self_attn.mgk.other": torch.zeros(3)},
    ):
        save_file(broken, weights, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"has weights that do not match its config.json: .*mgk\."):
            load_converted(folder)
    settings = json.loads((folder / "config.json").read_text())
    for wrong in ({"variant": "smgk"}, {"variant": "smgk", "layers": {"layers.7.self_attn": [2, 2, 8]}}, "smgk"):
        (folder / "config.json").write_text(json.dumps({**settings, "mgk": wrong}))
        with pytest.raises(ValueError, match=r"config.json whose 'mgk' does not fit LlamaForCausalLM"):
            load_converted(folder)


def test_loaded_by_others_it_is_not_taken_for_converted(folder):
    convert(make("llama")).save_pretrained(folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"loaded without them: use mgk.hf.load_converted"):
        convert(plain)
    with pytest.raises(ValueError, match=r"has the mixture keys of mgk.hf.convert"):
        mgk.analysis.hf_models.load(str(folder))
    make("llama").save_pretrained(folder / "plain")
    with pytest.raises(ValueError, match="holds no converted model"):
        load_converted(folder / "plain")


def small(model_class, config_class, **settings):
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**{**SIZES, **settings}))


def capped(module, query, key, value, attention_mask, scaling=None, **extras):
    """Not softmax alone, and nobody is told."""
    scores = torch.tanh(query @ key.repeat_interleave(2, 1).mT * scaling)
    return (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2), None


def with_other_masks(model):
    """As flash attention has them: of two dimensions, and none where it has a window."""
    transformers.AttentionInterface.register("other masks", sdpa_attention_forward)
    transformers.AttentionMaskInterface.register("other masks", flash_attention_mask)
    model.set_attn_implementation("other masks")
    return model


def own_attention():
    transformers.AttentionInterface.register("capped", capped)
    transformers.AttentionMaskInterface.register("capped", sdpa_mask)
    model = make("llama")
    model.set_attn_implementation("capped")
    return model


REFUSED = {
    "softcap": (
        lambda: small("Gemma2ForCausalLM", "Gemma2Config", head_dim=8),
        "capped logits .softcap. in its Gemma2",
    ),
    "position bias": (
        lambda: small("T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, num_layers=1, d_ff=32),
        "a position bias .position_bias. in its T5Attention",
    ),
    "sinks": (
        lambda: small(
            "GptOssForCausalLM",
            "GptOssConfig",
            head_dim=8,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        "learned sinks .s_aux. in its GptOssAttention",
    ),
    "alibi": (lambda: small("BloomForCausalLM", "BloomConfig"), "BloomForCausalLM, none of whose layers"),
    "ours": (
        lambda: MGKForCausalLM(MGKConfig(vocab_size=50, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)),
        "MGKForCausalLM, none of whose layers",
    ),
    "images": (lambda: small("ViTModel", "ViTConfig", image_size=16, patch_size=8), "example is needed: ViTModel"),
    "something else": (own_attention, "attention is not pure softmax"),
    "other masks": (lambda: with_other_masks(make("llama")), "runs 'other masks' attention"),
    "converted": (lambda: convert(make("llama")), "converted already"),
    "no model": (lambda: torch.nn.Linear(2, 2), "model must be a Transformers model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused(name):
    """... stay as they were."""
    build, message = REFUSED[name]
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
        ({"variant": "softmax"}, "already is a softmax model"),
        ({"variant": "sgmk"}, "did you mean 'smgk'"),
        ({"num_components": 0}, "num_components must be a positive integer"),
        ({"shift_std": 0}, "shift_std must be more than 0"),
        ({"layers": 2}, "layers has 2; the model has 2, from 'layers.0.self_attn' to 'layers.1.self_attn'"),
        ({"layers": "h.*"}, r"layers has 'h\.\*'"),
        ({"layers": []}, "at least one"),
        ({"example": {"pixels": torch.zeros(2)}}, "example is not an input that LlamaForCausalLM accepts"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        convert(make("llama"), **settings)


def test_models_of_images():
    model = small("ViTModel", "ViTConfig", image_size=16, patch_size=8).eval()
    example = {"pixel_values": torch.randn(2, 3, 16, 16)}
    with torch.no_grad():
        before = model(**example).last_hidden_state
        assert_close(convert(model, example=example)(**example).last_hidden_state, before)
    assert len(mixtures(model)) == 2
