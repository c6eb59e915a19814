"""mgk.Attention as a module: state dicts, devices, dropout, precision, repr."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import mgk
from mgk import Attention, Variant
from tests.support.exact import F64, close, randn
from tests.support.layers import EMBED, HK, D, H, L, make

STATEFUL = [
    ("mgk", {}),
    ("smgk", {"preset": "ref-lm"}),
    ("smgk-em", {"max_positions": 11}),
    ("mlk", {}),
    (Variant("between", "shifted", "em", variance="em"), {}),
    (Variant("gaussian", "independent", "learned", variance="learned"), {"rotary": 100.0}),
]


@pytest.mark.parametrize("variant, options", STATEFUL, ids=lambda x: str(x)[:30])
def test_weights_are_saved_and_loaded(variant, options, tmp_path):
    layer, x = make(variant, **options), randn(2, L, EMBED)
    other = make(variant, **options)
    assert (other(x) - layer(x)).abs().max() > 1e-3
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(other(x), layer(x))
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    third = make(variant, **options)
    third.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(third(x), layer(x))


def test_favor_directions_are_saved_and_loaded():
    layer, x = make("mlk", feature_map=mgk.FAVOR(D)), randn(2, L, EMBED)
    other = make("mlk", feature_map=mgk.FAVOR(D))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("variant, options", STATEFUL, ids=lambda x: str(x)[:30])
def test_weights_loaded_into_a_layer_made_on_the_meta_device(variant, options):
    layer, x = make(variant, **options), randn(2, L, EMBED)
    empty = Attention(EMBED, H, head_dim=D, variant=variant, device="meta", dtype=F64, **options).eval()
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    empty.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), layer(x))


@pytest.mark.parametrize("options", [{}, {"rotary": 100.0, "is_causal": True, "num_kv_heads": HK}], ids=str)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_shapes_on_the_meta_device(variant, options):
    layer = Attention(EMBED, H, variant=variant, device="meta", **options)
    x = torch.empty(2, L, EMBED, device="meta")
    assert layer(x).shape == layer.eval()(x).shape == x.shape
    assert layer(x, need_weights=True)[1].shape == (2, H, L, L)


def test_repr_lists_sizes_and_axes():
    text = repr(Attention(EMBED, H, head_dim=D, variant="mgk-hard", num_components=3))
    for part in (
        "12, heads=4, head_dim=5",
        "components=3",
        "'gaussian'",
        "'independent'",
        "'uniform'",
        "'hard'",
        "'fixed'",
    ):
        assert part in text


@pytest.mark.parametrize("variant", ["smgk", "mlk", "softmax"])
def test_dropout_acts_in_training_only(variant):
    layer, x = make(variant, dropout=0.5), randn(1, L, EMBED)
    expected = layer(x)
    assert torch.equal(layer(x), expected)
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    draws = layer(x.expand(4000, -1, -1))
    close(draws.mean(0, keepdim=True), expected, 0.25)


def test_width_and_heads():
    with pytest.raises(ValueError, match="num_heads = 5 does not divide embed_dim = 12: pass head_dim"):
        Attention(EMBED, 5)
    with pytest.raises(ValueError, match="num_kv_heads = 3 must divide num_heads = 4"):
        Attention(EMBED, H, num_kv_heads=3)
    assert Attention(EMBED, 5, head_dim=3)(torch.randn(2, L, EMBED)).shape == (2, L, EMBED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_lower_precision_layers(variant, dtype):
    layer, x = make(variant, is_causal=True, num_kv_heads=HK), randn(2, L, EMBED)
    expected = layer(x)
    out = layer.to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    assert (out - expected).abs().max() < 40 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("preset", ["paper", "ref-lra", "ref-lm"])
@pytest.mark.parametrize("variant", [*mgk.VARIANTS, Variant("between", variance="learned", prior="learned")], ids=str)
def test_reset_parameters_initializes_everything(variant, preset):
    """Start from uninitialized memory, as after to_empty() of a layer on the meta device."""
    options = {"preset": preset, "max_positions": 8} if preset == "ref-lm" else {"preset": preset}
    torch.manual_seed(3)
    fresh = Attention(EMBED, H, head_dim=D, variant=variant, **options)
    layer = Attention(EMBED, H, head_dim=D, variant=variant, **options, device="meta").to_empty(device="cpu")
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.data.fill_(77)
    layer.reset_parameters()
    for (name, actual), (_, expected) in zip(layer.state_dict().items(), fresh.state_dict().items(), strict=True):
        assert actual.abs().max() < 77, name
        close(actual.std(correction=0), expected.std(correction=0), 0.25 * float(expected.std(correction=0)) + 1e-7)


@pytest.mark.parametrize("preset", ["paper", "ref-lm"])
def test_reset_parameters_redraws_favor_directions(preset):
    layer = Attention(EMBED, H, head_dim=D, variant="mlk", preset=preset, feature_map=mgk.FAVOR(D), device="meta")
    layer = layer.to_empty(device="cpu")
    for buffer in layer.buffers():
        buffer.fill_(77)
    layer.reset_parameters()
    assert all(buffer.abs().max() < 77 for buffer in layer.buffers())


def test_replaced_projections():
    x = torch.randn(2, L, EMBED)
    layer = Attention(EMBED, H, head_dim=D)
    expected = layer(x)
    layer.query = torch.nn.Sequential(layer.query)
    close(layer(x), expected)

    class Packed(torch.nn.Module):
        """Linear layer with a weight of bytes, like the 4-bit layers of quantization libraries."""

        def __init__(self, linear):
            super().__init__()
            self.linear = linear
            self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)

        def forward(self, x):
            return self.linear(x)

    layer.value = Packed(layer.value)
    close(layer(x), expected)
