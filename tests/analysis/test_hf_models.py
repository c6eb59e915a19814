"""Transformers models with random weights, built from a configuration without a network."""

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

import mgk.hf  # noqa: E402
from mgk.analysis import analyse, hf_models  # noqa: E402
from mgk.analysis.weights import sample_weights  # noqa: E402

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=64, scale_attn_by_inverse_layer_idx=True, **TEXT
        )
    )


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL, max_position_embeddings=64, **TEXT))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2, **TEXT))


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, image_size=32, patch_size=8))


def tokens(length=21):
    return {"input_ids": torch.randint(3, 64, (1, length))}


MODELS = {
    "gpt2": (gpt2, tokens),
    "bert": (bert, tokens),
    "llama": (llama, tokens),
    "vit": (vit, lambda: {"pixel_values": torch.randn(1, 3, 32, 32)}),
}


@pytest.fixture(params=MODELS)
def model_and_input(request):
    build, make = MODELS[request.param]
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # makes the attention less uniform
    return model, make()


def test_weights_equal_those_of_the_model(model_and_input):
    """Compare with output_attentions in fp64; the output is the same as without capture."""
    model, sample = model_and_input
    model.double()
    sample = {name: x.double() if x.is_floating_point() else x for name, x in sample.items()}
    captured = []

    def add_call(name, call, output):
        weights = sample_weights(call, 0)
        captured.append(torch.cat([block.weights for block in weights.blocks(10_000)], 1))
        return output

    with torch.no_grad():
        with hf_models.capture_attention(model, add_call):
            output = model(**sample)
        model.set_attn_implementation("eager")
        reference = model(**sample, output_attentions=True)
    assert len(captured) == len(reference.attentions) == 2
    for weights, expected in zip(captured, reference.attentions, strict=True):
        assert weights.allclose(expected[0].double(), rtol=1e-5, atol=1e-7)
    # Llama computes its softmax in fp32.
    assert output[0].allclose(reference[0], rtol=1e-5, atol=1e-5)


def test_analyse(model_and_input):
    model, sample = model_and_input
    before = model.config._attn_implementation
    analysis = analyse(model, [sample], capture=hf_models.capture_attention)
    assert model.config._attn_implementation == before
    assert [layer.heads for layer in analysis.layers] == [4, 4]
    assert 2 < analysis.different["maps"] < 8
    assert all("attn" in layer.name or "attention" in layer.name for layer in analysis.layers)
    assert all((layer.removal.change > 0).all() for layer in analysis.layers)


def test_causal_maps_are_empty_above_the_diagonal():
    analysis = analyse(gpt2(), [tokens()], capture=hf_models.capture_attention, removal=0)
    for layer in analysis.layers:
        levels = layer.maps.pooled["mean"]
        assert (np.triu(levels, 1) == 0).all()
        assert (levels[:, -1] > 0).all()


def test_padding_is_left_out():
    model, ids = bert().eval(), tokens(12)["input_ids"]
    padded = {
        "input_ids": torch.nn.functional.pad(ids, (0, 5)),
        "attention_mask": (torch.arange(17) < 12).long()[None],
    }
    alone, together = (
        analyse(model, [x], capture=hf_models.capture_attention, removal=0) for x in ({"input_ids": ids}, padded)
    )
    assert together.longest == 12
    assert np.allclose(alone.layers[1].similarity.divergence, together.layers[1].similarity.divergence, atol=1e-6)


def test_model_without_attention_is_rejected():
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, bos_token_id=1, eos_token_id=2
    )
    model = transformers.MambaForCausalLM(config)
    with pytest.raises(ValueError, match="no attention layers"):
        analyse(model, [tokens()], capture=hf_models.capture_attention)


@pytest.mark.parametrize("kind", ["MGKForCausalLM", "MGKForSequenceClassification"])
def test_models_of_this_package(kind, tmp_path):
    """Models of mgk.hf load like any other, and each layer is captured once."""
    from mgk import hf
    from mgk.models import DecoderConfig, EncoderConfig

    sizes = {"vocab_size": 64, "max_length": 32, "embed_dim": 16, "ffn_dim": 16, "num_layers": 2, "num_heads": 2}
    decoder = kind == "MGKForCausalLM"
    config = DecoderConfig(**sizes, variant="mgk") if decoder else EncoderConfig(**sizes, num_classes=3, variant="mgk")
    getattr(hf, kind)(hf.MGKConfig.of(config)).save_pretrained(tmp_path)
    model = hf_models.load(str(tmp_path))
    assert type(model).__name__ == kind
    analysis = analyse(model, [tokens()], capture=hf_models.capture_attention)
    assert [layer.name for layer in analysis.layers] == [f"model.layers.{n}.attention" for n in range(2)]
    assert all(layer.mixture is not None for layer in analysis.layers)


def test_converted_model_shows_its_components(tmp_path):
    """One layer with mixture keys, one without; weights are those of the converted model."""
    model = llama().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    mgk.hf.convert(model, num_components=3, layers=1)
    mixture = model.model.layers[1].self_attn.mgk
    with torch.no_grad():
        mixture.tau.fill_(0.5)
        mixture.prior.weights.normal_()
    model.save_pretrained(tmp_path)
    loaded, sample = hf_models.load(str(tmp_path)), tokens()
    analysis = analyse(loaded, [sample], capture=hf_models.capture_attention)
    assert [layer.name for layer in analysis.layers] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert analysis.layers[0].mixture is None
    prior = mixture.prior.weights.softmax(1).squeeze(-1).repeat_interleave(2, 0).detach().numpy()
    np.testing.assert_allclose(analysis.layers[1].mixture.prior, prior, rtol=1e-5)
    np.testing.assert_allclose(analysis.layers[1].mixture.answered.sum(1), np.ones(4), rtol=1e-5)
    test_weights_equal_those_of_the_model((loaded, sample))
    assert not loaded.model.layers[1].self_attn._forward_pre_hooks


def test_attention_to_selected_keys_raises():
    sizes = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    index = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16, "first_k_dense_replace": 2}
    config = transformers.DeepseekV32Config(**SMALL, **TEXT, **sizes, **index, num_key_value_heads=4)
    model = transformers.AutoModel.from_config(config).eval()
    with pytest.raises(ValueError, match="--hf names a model whose attention uses indices"):
        analyse(model, [tokens()], capture=hf_models.capture_attention, removal=0)


def test_parts_of_a_model_keep_their_attention_functions():
    config = transformers.CLIPConfig(
        text_config={**SMALL, **TEXT, "max_position_embeddings": 64},
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
    )
    model = transformers.CLIPModel(config).eval()
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    sample = {**tokens(), "pixel_values": torch.randn(1, 3, 32, 32)}
    analysis = analyse(model, [sample], capture=hf_models.capture_attention, removal=0)
    assert len(analysis.layers) == 4
    assert model.config.text_config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_converted_model_with_sinks_raises():
    sizes = {**SMALL, **TEXT, "head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = mgk.hf.convert(transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes)).eval())
    with pytest.raises(ValueError, match="--hf names a model whose attention uses s_aux"):
        analyse(model, [tokens()], capture=hf_models.capture_attention)


@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("mixture", [False, True])
def test_upcycled_model_shows_its_heads_and_components(kind, mixture, tmp_path):
    """Unequal numbers of key heads and value heads, saved and loaded; weights are those of the merged model."""
    model = MODELS[kind][0]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    batches = [{"input_ids": torch.randint(3, 64, (4, 20))} for _ in range(6)]
    merged, _ = mgk.hf.upcycle(model, num_key_heads=1, num_value_heads=2, calibration=batches, mixture=mixture)
    for layer in merged.modules():
        if mixture and hasattr(layer, "mgk"):
            torch.nn.init.constant_(layer.mgk.tau, 0.5)
    merged.save_pretrained(tmp_path)
    loaded, sample = hf_models.load(str(tmp_path)), tokens()
    analysis = analyse(loaded, [sample], capture=hf_models.capture_attention)
    assert [(layer.heads, layer.key_heads, layer.value_heads) for layer in analysis.layers] == [(4, 1, 2)] * 2
    assert [layer.components for layer in analysis.layers] == [2 if mixture else 1] * 2
    assert [layer.mixture is not None for layer in analysis.layers] == [mixture] * 2
    assert all((layer.removal.change > 0).all() for layer in analysis.layers)
    assert hf_models.variant_of(loaded.config) == ("smgk" if mixture else "softmax")
    test_weights_equal_those_of_the_model((loaded, sample))
