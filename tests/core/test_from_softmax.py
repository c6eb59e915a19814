"""Conversion from softmax layers: equal outputs, drop-in replacement of the source, trainable parameters."""

import pytest
import torch
from torch import nn

from mgk import Attention, MultiheadAttention, Variant
from mgk.variants import VARIANTS
from tests.support.exact import F64, close, randn

EMBED, H, L, S, B = 12, 4, 7, 9, 3


@torch.no_grad()
def trained_softmax(**options):
    source = nn.MultiheadAttention(EMBED, H, batch_first=True, dtype=F64, **options)
    for parameter in source.parameters():
        parameter.add_(0.4 * torch.randn_like(parameter))
    return source.eval()


EXACT = ["softmax", "smgk", "smgk-hard", "smgk-em", Variant(components=3), Variant(components=1)]


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 3}], ids=str)
@pytest.mark.parametrize("variant", EXACT)
def test_from_softmax_is_exact(variant, options):
    source = trained_softmax(**options)
    layer = Attention.from_softmax(source, variant, num_components=3)
    args = randn(B, L, EMBED), randn(B, S, options.get("kdim", EMBED)), randn(B, S, options.get("vdim", EMBED))
    close(layer(*args, need_weights=True), source(*args, average_attn_weights=False))
    assert not layer.training
    fixed = VARIANTS[variant].components if isinstance(variant, str) else variant.components
    assert layer.num_components == (fixed or 3)


def test_inexact_conversions_are_rejected():
    with pytest.raises(ValueError, match="variant must not normalize queries and keys"):
        Attention.from_softmax(trained_softmax(), Variant(normalise=True))


@pytest.mark.parametrize("variant", ["mgk", "mgk-em"])
def test_from_softmax_with_independent_keys_is_exact_up_to_the_noise_squared(variant):
    source, x = trained_softmax(), randn(B, L, EMBED)
    expected, errors = source(x, x, x)[0], []
    for noise in (0.1, 0.01):
        torch.manual_seed(1)
        layer = Attention.from_softmax(source, variant, noise=noise)
        errors.append((layer(x) - expected).abs().max())
        keys = layer.keys(x)
        assert (keys[:, :, 0] - keys[:, :, 1]).abs().max() > 0.1 * noise
    assert 0 < errors[1] < errors[0] / 50
    assert errors[1] < 1e-3


@pytest.mark.parametrize("variant", ["mgk", "smgk"])
def test_from_softmax_keeps_device_and_dtype(variant):
    """Use the meta device in place of a GPU."""
    layer = Attention.from_softmax(nn.MultiheadAttention(EMBED, H, batch_first=True, device="meta"), variant)
    assert {x.device.type for x in (*layer.parameters(), *layer.buffers())} == {"meta"}


def test_source_that_is_not_batch_first_warns():
    source = nn.MultiheadAttention(EMBED, H)
    with pytest.warns(UserWarning, match=r"source takes \[L, B, E\].* use mgk.MultiheadAttention.from_softmax"):
        Attention.from_softmax(source)
    # MultiheadAttention keeps the layout and does not warn.
    assert not MultiheadAttention.from_softmax(source).batch_first


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 7}, {"bias": False}])
def test_copies_of_frozen_weights_are_frozen(options):
    source = nn.MultiheadAttention(EMBED, H, batch_first=True, **options)
    assert all(parameter.requires_grad for parameter in Attention.from_softmax(source).parameters())
    source.requires_grad_(False)
    parameters = Attention.from_softmax(source).named_parameters()
    trainable = {name for name, parameter in parameters if parameter.requires_grad}
    assert trainable == {"tau", "keys.shifts", "prior.weights"}
    source.out_proj.requires_grad_(True)
    with torch.no_grad():
        layer = Attention.from_softmax(source)
    assert {name for name, parameter in layer.out.named_parameters() if parameter.requires_grad} == dict(
        source.out_proj.named_parameters()
    ).keys()
    assert not layer.query.weight.requires_grad


def test_from_softmax_with_is_causal():
    source, x = trained_softmax(), randn(B, L, EMBED)
    masked = torch.ones(L, L, dtype=torch.bool).triu(1)
    close(Attention.from_softmax(source, is_causal=True)(x), source(x, x, x, attn_mask=masked)[0])


@pytest.mark.parametrize(
    "variant", ["smgk", "mgk", Variant("gaussian", "shifted", "learned", variance="learned")], ids=str
)
def test_converted_layer_is_trainable(variant):
    """Check that ten steps change the components, the shifts, the prior and τ."""
    layer = Attention.from_softmax(trained_softmax().train(), variant)
    x, target = randn(8, L, EMBED), randn(8, L, EMBED)
    start = {name: p.detach().clone() for name, p in layer.named_parameters()}
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert layer.training
    for name, parameter in layer.named_parameters():
        assert (parameter - start[name]).abs().max() > 1e-3, name
    if layer.variant.keys == "shifted":
        assert not torch.equal(
            layer.keys.shifts[:, 0] - start["keys.shifts"][:, 0], layer.keys.shifts[:, 1] - start["keys.shifts"][:, 1]
        )
    prior = layer.prior(1, None)
    assert (prior[:, 0] - prior[:, 1]).abs().min() > 1e-4
    keys = layer.keys(x)
    if layer.variant.keys == "independent":
        assert (keys[:, :, 0] - keys[:, :, 1]).abs().max() > 0.05


@pytest.mark.parametrize("batch_first", [False, True])
def test_from_softmax_replaces_the_source(batch_first):
    """Convert every layer of torch's encoder, and call it with masks."""
    layer = nn.TransformerEncoderLayer(EMBED, H, 32, dropout=0.0, batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, padding = torch.randn(3, 7, EMBED), torch.arange(7) >= torch.tensor([[7], [5], [4]])
    x = x if batch_first else x.transpose(0, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(7) < 0
    expected = encoder(x, causal, padding)
    for block in encoder.layers:
        block.self_attn = MultiheadAttention.from_softmax(block.self_attn)
    close(encoder(x, causal, padding), expected, 1e-5)
    encoder(x).sum().backward()
    assert all(block.self_attn.attention.tau.grad.abs().sum() > 0 for block in encoder.layers)


WRONG_CALLS = [
    (lambda: Attention.from_softmax(nn.Linear(3, 3)), "source must be a torch.nn.MultiheadAttention, got torch.nn"),
    (
        lambda: Attention.from_softmax(nn.TransformerEncoderLayer(EMBED, H)),
        r"got .*TransformerEncoderLayer: convert its layers, of which the first is 'self_attn'",
    ),
    (lambda: Attention.from_softmax(nn.MultiheadAttention(EMBED, H, add_bias_kv=True)), "source has add_bias_kv"),
    (
        lambda: Attention.from_softmax(nn.MultiheadAttention(EMBED, H, add_zero_attn=True)),
        "source has add_bias_kv or add_zero",
    ),
    (lambda: Attention.from_softmax(trained_softmax(), "mlk"), "variant must not be linear"),
    (lambda: Attention.from_softmax(trained_softmax(), "nope"), "variant must be one of 'softmax'"),
]


@pytest.mark.parametrize("call_wrongly, message", WRONG_CALLS, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_errors(call_wrongly, message):
    with pytest.raises(ValueError, match=message):
        call_wrongly()
