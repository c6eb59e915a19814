"""Models whose layers cannot be merged, are easily missed, or have limits of their own."""

from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from mgk.hf import upcycle  # noqa: E402
from mgk.hf.upcycling.fidelity import max_positions, run_model  # noqa: E402
from tests.hf.upcycling.test_upcycle import MODELS, calibration  # noqa: E402
from tests.support.hf_models import make, small  # noqa: E402


def test_models_that_cannot_be_merged():
    merged, _ = upcycle(MODELS["bert"](), num_key_heads=2, calibration=calibration())
    with pytest.raises(ValueError, match="upcycle the original model"):
        upcycle(merged, num_key_heads=1, calibration=calibration())
    model = MODELS["bert"]()
    model.config.quantization_config = {"quant_method": "int8"}
    with pytest.raises(ValueError, match="is quantized: upcycle it before quantizing it"):
        upcycle(model, num_key_heads=1, calibration=calibration())
    with pytest.raises(ValueError, match="must be a Transformers model, got Linear"):
        upcycle(torch.nn.Linear(2, 2), num_key_heads=1, calibration=calibration())
    model = small("GPTJForCausalLM", "GPTJConfig", rotary_dim=4).eval()
    with pytest.raises(ValueError, match="none of whose layers uses Transformers' AttentionInterface"):
        upcycle(model, num_key_heads=1, calibration=calibration())
    model = small("OPTForCausalLM", "OPTConfig", ffn_dim=32, word_embed_proj_dim=32).eval()
    fixed = "is a OPTForCausalLM, whose attention layers fix the number of key heads"
    with pytest.raises(ValueError, match=fixed):
        upcycle(model, num_key_heads=1, calibration=calibration())
    # With as many value heads it reshapes without an error, and each position mixes two tokens.
    even = [{name: tensor[:, :8] for name, tensor in batch.items()} for batch in calibration()]
    with pytest.raises(ValueError, match=f"{fixed}: .*reshapes 2 key and 2 value heads to 4 and 4"):
        upcycle(model, num_key_heads=2, num_value_heads=2, calibration=even)
    model = small("GPTNeoXForCausalLM", "GPTNeoXConfig").eval()
    with pytest.raises(ValueError, match="without separate query, key, value and output projections"):
        upcycle(model, num_key_heads=1, calibration=calibration())


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, .* are deprecated")
def test_dynamically_quantized_model_is_not_upcycled():
    """Its configuration does not describe the quantization."""
    model = torch.ao.quantization.quantize_dynamic(MODELS["bert"](), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match="is quantized in its BertSelfAttention: upcycle it before quantizing it"):
        upcycle(model, num_key_heads=1, calibration=calibration())


def test_layers_that_layer_dropout_could_leave_out_are_merged():
    model = make("bart", encoder_layerdrop=0.9).train()
    _, report = upcycle(model, num_key_heads=1, calibration=calibration())
    assert len(report.layers) == 3
    assert model.training


def test_the_cache_of_an_encoder_decoder_is_that_of_its_decoder():
    model = MODELS["bart"]()
    merged, report = upcycle(model, cache=0.5, calibration=calibration())
    tokens = torch.tensor([[5, 6, 7]])
    sizes = []
    for each in (model, merged):
        caches = each(input_ids=tokens, decoder_input_ids=tokens).past_key_values
        layers = [*caches.self_attention_cache.layers, *caches.cross_attention_cache.layers]
        sizes.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) // tokens.shape[1])
    assert report.cache_bytes == tuple(sizes)
    assert sizes[1] <= 0.5 * sizes[0]
    encoder = [layer for layer in report.layers if "encoder.layers" in layer.name and "decoder" not in layer.name]
    assert len(encoder) == 1
    assert all(layer.key_heads[1] == layer.key_heads[0] for layer in encoder)


def test_positions_of_models_that_number_them_after_the_padding_token():
    model = small("RobertaModel", "RobertaConfig", max_position_embeddings=34, pad_token_id=1).eval()
    assert max_positions(model) == 32
    assert model(input_ids=torch.full((1, 32), 5)).last_hidden_state.shape[1] == 32
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(input_ids=torch.full((1, 33), 5))
    assert max_positions(MODELS["bert"]()) == MODELS["bert"]().config.max_position_embeddings


def test_models_without_text_or_hidden_states_are_refused():
    vision = make_vision()
    with pytest.raises(ValueError, match=r"is text, but a ViTModel needs pixel_values: call mgk.hf.upcycle with its"):
        upcycle(vision, num_key_heads=1, calibration=["a text", "another"])
    model = MODELS["bert"]()
    model.forward = lambda **inputs: SimpleNamespace(logits=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"is a Bert.*, which returns no hidden states: upcycle its parts one by one"):
        run_model(model, {})


def make_vision():
    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    return transformers.ViTModel(transformers.ViTConfig(**settings, image_size=16, patch_size=8)).eval()
