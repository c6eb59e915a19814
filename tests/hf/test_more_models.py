"""Conversion of models with position biases and attention sinks, and example inputs made from configurations."""

from functools import partial

import pytest
import torch

transformers = pytest.importorskip("transformers")

from mgk.hf import convert  # noqa: E402
from mgk.hf.example_inputs import make_example  # noqa: E402
from tests.support.hf_models import (  # noqa: E402
    assert_close,
    inputs,
    logits,
    mixtures,
    randomize,
    small,
    use_literal_attention,
)

T5 = {"d_model": 32, "d_kv": 8, "num_layers": 2, "d_ff": 32, "num_heads": 4, "decoder_start_token_id": 0,
      "initializer_factor": 3.0, "tie_word_embeddings": False}  # fmt: skip
GPT_OSS = {
    "head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
    "max_position_embeddings": 64,
}  # fmt: skip


def biased(name, **settings):
    """Return a model in fp64: T5 with position biases, or GPT-OSS with learned sinks and sliding windows."""
    if name == "t5":
        return small("T5ForConditionalGeneration", "T5Config", **T5, **settings).double().eval()
    model = small("GptOssForCausalLM", "GptOssConfig", **GPT_OSS, **settings).double().eval()
    model.set_experts_implementation("eager")  # others do not support fp64
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    return model


def batch_of(name, padding):
    batch = inputs(padding)
    return {**batch, "decoder_input_ids": torch.randint(3, 50, (2, 9))} if name == "t5" else batch


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", ["t5", "gpt_oss"])
def test_biases_and_sinks(name, padding):
    """Outputs stay equal at τ = 0; at other τ, outputs and gradients are those of the equations."""
    model, batch = biased(name), batch_of(name, padding)
    original = biased(name, attn_implementation="eager")
    original.load_state_dict(model.state_dict())
    before = logits(original, batch)
    convert(model, num_components=3)
    assert len(mixtures(model)) == (6 if name == "t5" else 2)
    assert_close(logits(model, batch), before)
    randomize(model)
    assert (logits(model, batch) - before).abs().max() > 0.1
    use_literal_attention(original, model)
    torch.testing.assert_close(logits(model, batch), logits(original, batch), rtol=1e-8, atol=1e-8)
    gradients = []
    for case in (original, model):
        case.zero_grad()
        (case(**batch).logits[batch["attention_mask"].bool()].square().sum()).backward()
        learned = [parameter.grad.clone() for mixture in mixtures(model) for parameter in mixture.parameters()]
        names = [key for key, _ in original.named_parameters() if ".mixture." not in key]
        parameters = dict(case.named_parameters())
        gradients.append([*learned, *(parameters[key].grad for key in names if parameters[key].grad is not None)])
        model.zero_grad()
    assert len(gradients[0]) == len(gradients[1]) > 20
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-8 * float(expected.abs().max()) + 1e-12)


@pytest.mark.parametrize("name", ["t5", "gpt_oss"])
def test_generate_with_biases_and_sinks(name):
    model, batch = biased(name), inputs("left")
    generate = partial(model.generate, **batch, max_new_tokens=6, do_sample=False, eos_token_id=None)
    before = generate()
    convert(model)
    assert torch.equal(generate(), before)
    randomize(model)
    cached, uncached = generate(num_beams=2), generate(num_beams=2, use_cache=False)
    assert torch.equal(cached, uncached)
    assert not torch.equal(generate(), before)


VISION = {"image_size": 16, "patch_size": 8, "num_channels": 3}
WHISPER = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8, "max_source_positions": 12,
    "max_target_positions": 16, "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
AUDIO = {
    "conv_dim": [8, 8], "conv_kernel": [10, 8], "conv_stride": [8, 8], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
# class, configuration, settings, inputs
INPUTS = [
    ("ViTModel", "ViTConfig", VISION, {"pixel_values": [2, 3, 16, 16]}),
    ("VideoMAEModel", "VideoMAEConfig", {**VISION, "num_frames": 4}, {"pixel_values": [1, 4, 3, 16, 16]}),
    ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER,
     {"input_features": [1, 8, 24], "decoder_input_ids": [2, 12]}),
    ("Wav2Vec2Model", "Wav2Vec2Config", AUDIO, {"input_values": [1, 16000]}),
    ("T5ForConditionalGeneration", "T5Config", T5, {"input_ids": [2, 12], "decoder_input_ids": [2, 12]}),
    ("GPT2LMHeadModel", "GPT2Config", {"n_positions": 8}, {"input_ids": [2, 8]}),
]  # fmt: skip


@pytest.mark.parametrize("model_class, config_class, settings, shapes", INPUTS, ids=[row[0] for row in INPUTS])
def test_example_is_made_from_the_configuration(model_class, config_class, settings, shapes):
    model = small(model_class, config_class, **settings).double().eval()
    example = make_example(model)
    assert {name: list(value.shape) for name, value in example.items()} == shapes
    assert all(torch.equal(value, make_example(model)[name]) for name, value in example.items())
    if "input_ids" in example:
        special = {model.config.pad_token_id, model.config.eos_token_id}
        assert not special & set(example["input_ids"].flatten().tolist())
    with torch.no_grad():
        before = model(**example)[0]
        assert_close(convert(model)(**example)[0], before)
    assert mixtures(model)
