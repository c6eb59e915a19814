"""mgk.MultiheadAttention as a replacement for torch.nn.MultiheadAttention."""

import inspect
import itertools

import pytest
import torch
from torch import nn

import mgk
from mgk import Attention, MultiheadAttention
from tests.support.exact import F64, close, randn

EMBED, H, L, S, B = 12, 4, 7, 9, 3


def parameters(function):
    return list(inspect.signature(function).parameters.values())


def test_constructor_extends_torch_by_keywords():
    expected, actual = parameters(nn.MultiheadAttention.__init__), parameters(MultiheadAttention.__init__)
    assert [(p.name, p.default, p.kind) for p in actual[: len(expected)]] == [
        (p.name, p.default, p.kind) for p in expected
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in actual[len(expected) :])


def test_constructor_takes_all_arguments_of_attention():
    mine, layers = (
        {parameter.name for parameter in parameters(kind.__init__)} for kind in (MultiheadAttention, Attention)
    )
    assert layers - mine == {"is_causal"}
    torch.manual_seed(0)
    options = {"variant": "mlk", "feature_map": "relu", "num_kv_heads": 1}
    module = MultiheadAttention(EMBED, H, batch_first=True, dtype=F64, rotary=100.0, **options)
    torch.manual_seed(0)
    layer = Attention(EMBED, H, dropout=0.0, bias=True, dtype=F64, rotary=100.0, **options)
    x = torch.randn(2, 5, EMBED, dtype=F64)
    torch.testing.assert_close(module(x, x, x, need_weights=False)[0], layer(x))


def test_forward_has_the_signature_of_torch():
    expected, actual = parameters(nn.MultiheadAttention.forward), parameters(MultiheadAttention.forward)
    assert [(p.name, p.default, p.kind) for p in actual] == [(p.name, p.default, p.kind) for p in expected]


@torch.no_grad()
def pair(**options):
    """Return a module of torch, and the replacement with its weights."""
    torch_module = nn.MultiheadAttention(EMBED, H, dtype=F64, **options)
    for parameter in torch_module.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    module = MultiheadAttention(EMBED, H, dtype=F64, variant="softmax", **options)
    if torch_module.in_proj_weight is None:
        weights = torch_module.q_proj_weight, torch_module.k_proj_weight, torch_module.v_proj_weight
    else:
        weights = torch_module.in_proj_weight.chunk(3)
    layer = module.attention
    for n, projection in enumerate((layer.query, layer.keys.projection, layer.value)):
        projection.weight.copy_(weights[n])
        if torch_module.in_proj_bias is not None:
            projection.bias.copy_(torch_module.in_proj_bias.chunk(3)[n])
    module.out_proj.load_state_dict(torch_module.out_proj.state_dict())
    return torch_module, module


def inputs(batch_first=True, batched=True, length=L, size=S):
    shapes = [(length, B, EMBED), (size, B, EMBED), (size, B, EMBED)]
    if not batched:
        shapes = [(n, e) for n, _, e in shapes]
    elif batch_first:
        shapes = [(b, n, e) for n, b, e in shapes]
    return [randn(*shape) for shape in shapes]


def masks(kind, batched=True):
    """Return masks as keyword arguments; every query attends to at least one key."""
    masked, masked_3d = torch.rand(L, S) > 0.6, torch.rand((B if batched else 1) * H, L, S) > 0.6
    padding = torch.arange(S).expand(B, -1) >= torch.tensor([[S], [5], [7]])
    padding = padding if batched else padding[1]
    masked[:, 0] = masked_3d[:, :, 0] = False
    added = randn(L, S).masked_fill(masked, -torch.inf)
    return {
        "none": {},
        "bool": {"attn_mask": masked},
        "bool-3d": {"attn_mask": masked_3d},
        "float": {"attn_mask": added},
        "float-3d": {"attn_mask": randn(*masked_3d.shape)},
        "padding": {"key_padding_mask": padding},
        "float-padding": {"key_padding_mask": randn(*padding.shape).masked_fill(padding, -torch.inf)},
        "bool-and-padding": {"attn_mask": masked, "key_padding_mask": padding},
        "floats": {
            "attn_mask": added,
            "key_padding_mask": torch.zeros(padding.shape, dtype=F64).masked_fill(padding, -torch.inf),
        },
    }[kind]


KINDS = ["none", "bool", "bool-3d", "float", "float-3d", "padding", "float-padding", "bool-and-padding", "floats"]


@pytest.mark.parametrize("need_weights, average", [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("batched, batch_first", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_softmax_equals_torch(kind, batched, batch_first, need_weights, average):
    torch_module, module = pair(batch_first=batch_first)
    args, options = inputs(batch_first, batched), masks(kind, batched)
    options |= {"need_weights": need_weights, "average_attn_weights": average}
    expected, actual = torch_module(*args, **options), module(*args, **options)
    close(actual[0], expected[0])
    assert (actual[1] is None) == (expected[1] is None) == (not need_weights)
    if need_weights:
        close(actual[1], expected[1])


@pytest.mark.parametrize(
    "options", [{"bias": False}, {"kdim": 5, "vdim": 3}, {"kdim": 5, "vdim": 3, "bias": False}], ids=str
)
def test_softmax_equals_torch_with_other_widths(options):
    torch_module, module = pair(batch_first=True, **options)
    args = randn(B, L, EMBED), randn(B, S, options.get("kdim", EMBED)), randn(B, S, options.get("vdim", EMBED))
    close(module(*args), torch_module(*args))


@pytest.mark.parametrize("kind", ["none", "padding"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_is_causal(need_weights, kind):
    torch_module, module = pair(batch_first=True)
    args = inputs(length=S)
    options = masks(kind) | {"need_weights": need_weights}
    masked = torch.ones(S, S, dtype=torch.bool).triu(1)
    expected = torch_module(*args, attn_mask=masked, is_causal=True, **options)
    close(module(*args, attn_mask=masked, is_causal=True, **options), expected)
    close(module(*args, attn_mask=masked, **options), expected)
    close(module(*args, is_causal=True, **options), expected)


def test_mask_overrides_is_causal_with_need_weights():
    torch_module, module = pair(batch_first=True)
    args = inputs(length=S)
    window = torch.ones(S, S, dtype=torch.bool).triu(1) | torch.ones(S, S, dtype=torch.bool).tril(-2)
    close(module(*args, attn_mask=window, is_causal=True), torch_module(*args, attn_mask=window, is_causal=True))
    for need_weights in (False, True):
        with pytest.raises(ValueError, match="attn_mask must have shape"):
            module(*args, attn_mask=window[:-1], is_causal=True, need_weights=need_weights)


def test_attributes_of_torch_module():
    options = {"kdim": 5, "vdim": 3, "dropout": 0.25, "batch_first": True}
    torch_module, module = nn.MultiheadAttention(EMBED, H, **options), MultiheadAttention(EMBED, H, **options)
    names = "embed_dim kdim vdim num_heads dropout batch_first head_dim bias_k bias_v add_zero_attn".split()
    assert {name: getattr(module, name) for name in names} == {name: getattr(torch_module, name) for name in names}


@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_equals_attention_with_converted_masks(variant):
    """Check that True = masked in both masks, and the default layout [L, B, E]."""
    module = MultiheadAttention(EMBED, 2, head_dim=5, dtype=F64, variant=variant, num_components=3)
    assert module.attention.variant is mgk.VARIANTS[variant]
    query, key, value = inputs(batch_first=False)
    padding = masks("padding")["key_padding_mask"]
    batch = [x.transpose(0, 1) for x in (query, key, value)]
    out, weights = module(query, key, value, key_padding_mask=padding)
    module.eval()
    expected, expected_weights = module.attention(*batch, key_padding_mask=padding, need_weights=True)
    if "em" not in variant:
        close(out, expected.transpose(0, 1))
        close(weights, expected_weights.mean(1))
    assert not weights[padding.unsqueeze(1).expand_as(weights)].any()


def encoder_layer(variant="smgk", **options):
    layer = nn.TransformerEncoderLayer(EMBED, H, 16, dropout=0.0, batch_first=True, dtype=F64, **options)
    layer.self_attn = MultiheadAttention(EMBED, H, batch_first=True, dtype=F64, variant=variant)
    return layer


def padding_mask():
    return torch.arange(L).expand(B, -1) >= torch.tensor([[L], [3], [5]])


def attention_parameters(module):
    """Return the parameters that softmax attention does not have, which torch's fast path would ignore."""
    return [p for name, p in module.named_parameters() if name.endswith(("keys.shifts", "prior.weights"))]


@torch.no_grad()
def perturb(module):
    for parameter in attention_parameters(module):
        parameter.add_(randn(*parameter.shape))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_in_an_encoder_layer(padded, norm_first):
    layer, x = encoder_layer(norm_first=norm_first), randn(B, L, EMBED)
    mask = {"src_key_padding_mask": padding_mask()} if padded else {}
    trained = layer(x, **mask)
    trained.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    with torch.no_grad():
        before = layer.eval()(x, **mask)
        close(before, trained.detach())
        perturb(layer)
        assert (layer(x, **mask) - before).abs().max() > 1e-4


def test_encoder_layer_with_softmax_equals_torch():
    torch_module, module = pair(batch_first=True)
    layer = nn.TransformerEncoderLayer(EMBED, H, 16, dropout=0.0, batch_first=True, dtype=F64)
    x, outs = randn(B, L, EMBED), []
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=F64)
    padding = torch.zeros(B, L, dtype=F64).masked_fill(padding_mask(), -torch.inf)
    for attention in (torch_module, module):
        layer.self_attn = attention
        for mode, grad in itertools.product((True, False), repeat=2):
            layer.train(mode)
            with torch.set_grad_enabled(grad):
                outs.append(layer(x, causal, padding, is_causal=True))
                outs.append(layer(x, causal, padding))
                outs.append(layer(x, src_key_padding_mask=padding))
    half = len(outs) // 2
    for expected, actual in zip(outs[:half], outs[half:], strict=True):
        real = ~padding_mask()
        close(actual[real], expected[real])


@pytest.mark.parametrize("replaced_later", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_in_an_encoder(padded, replaced_later):
    """Replace layers after construction too: the encoder was then made for nested tensors."""
    if replaced_later:
        plain = nn.TransformerEncoderLayer(EMBED, H, 16, dropout=0.0, batch_first=True, dtype=F64)
        encoder = nn.TransformerEncoder(plain, 2)
        for layer in encoder.layers:
            layer.self_attn = MultiheadAttention(EMBED, H, batch_first=True, dtype=F64)
    else:
        encoder = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
    x, mask = randn(B, L, EMBED), {"src_key_padding_mask": padding_mask()} if padded else {}
    trained = encoder(x, **mask)
    with torch.no_grad():
        before = encoder.eval()(x, **mask)
        close(before, trained.detach())
        perturb(encoder)
        assert (encoder(x, **mask) - before).abs().max() > 1e-4
    if padded:
        for row, length in enumerate((L, 3, 5)):
            close(encoder(x, **mask)[row, :length], encoder(x[row : row + 1, :length])[0])


def test_encoder_with_mixed_layers():
    encoder = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
    encoder.layers[1].self_attn = MultiheadAttention(
        EMBED, 2, head_dim=3, variant="mgk-hard", batch_first=True, dtype=F64
    )
    assert [layer.self_attn.attention.variant for layer in encoder.layers] == [
        mgk.VARIANTS[n] for n in ("smgk", "mgk-hard")
    ]
    assert encoder(randn(B, L, EMBED)).shape == (B, L, EMBED)


@pytest.mark.parametrize("variant", ["mlk", "smlk", "linear"])
def test_linear_attention_in_an_encoder_layer_with_padding(variant):
    """Check the floating-point masks that nn.TransformerEncoderLayer makes of bool ones."""
    layer, x = encoder_layer(variant), randn(B, L, EMBED)
    for mode in (True, False):
        out = layer.train(mode)(x, src_key_padding_mask=padding_mask())
        for row, length in enumerate((L, 3, 5)):
            close(out[row, :length], layer(x[row : row + 1, :length])[0])
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=F64)
    close(layer(x, causal, is_causal=True)[:, :4], layer(x[:, :4], causal[:4, :4], is_causal=True))


def test_in_a_decoder_layer():
    layer = nn.TransformerDecoderLayer(EMBED, H, 16, dropout=0.0, batch_first=True, dtype=F64)
    layer.self_attn = MultiheadAttention(EMBED, H, batch_first=True, dtype=F64, variant="smgk")
    layer.multihead_attn = MultiheadAttention(EMBED, H, batch_first=True, dtype=F64, variant="mgk")
    x, memory = randn(B, L, EMBED), randn(B, S, EMBED)
    masked = torch.arange(S).expand(B, -1) >= torch.tensor([[S], [3], [5]])
    options = {"tgt_mask": torch.ones(L, L, dtype=torch.bool).triu(1), "tgt_is_causal": True}
    options |= {"memory_key_padding_mask": masked}
    trained = layer(x, memory, **options)
    with torch.no_grad():
        before = layer.eval()(x, memory, **options)
        close(before, trained.detach())
        changed = torch.cat([x[:, :4], randn(B, L - 4, EMBED)], 1)
        close(layer(changed, memory, **options)[:, :4], before[:, :4])
        close(layer(x, memory.masked_fill(masked[..., None], 9.0), **options), before)
        perturb(layer)
        assert (layer(x, memory, **options) - before).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["", "self_attn."])
def test_loading_torch_weights_raises(name):
    weights = {f"{name}{key}": value for key, value in nn.MultiheadAttention(EMBED, H).state_dict().items()}
    module = MultiheadAttention(EMBED, H)
    model = nn.ModuleDict({"self_attn": module}) if name else module
    with pytest.raises(ValueError, match=r"weights of torch.nn.MultiheadAttention.*from_softmax"):
        model.load_state_dict(weights)


WRONG_CALLS = [
    (lambda: MultiheadAttention(EMBED, H, add_bias_kv=True), "add_bias_kv is not supported"),
    (lambda: MultiheadAttention(EMBED, H, add_zero_attn=True), "add_zero_attn is not supported"),
    (lambda: MultiheadAttention(EMBED, 5), "num_heads = 5 does not divide embed_dim"),
    (lambda: call(randn(L, B, EMBED), randn(S, EMBED)), "key has 2 dimensions, but query has 3"),
    (lambda: call(randn(EMBED)), r"query must be a tensor \[L, B, E\], or \[L, E\]"),
    (
        lambda: call(randn(L, B, EMBED), attn_mask=torch.ones(S, L) > 0),
        r"attn_mask must have shape \[L, S\] = \[7, 9\]",
    ),
    (
        lambda: call(randn(L, B, EMBED), key_padding_mask=torch.ones(B, L) > 0),
        r"key_padding_mask must have shape \[B, S\] = \[3, 9\]",
    ),
    (lambda: call(randn(L, B, EMBED), attn_mask=torch.ones(L, S, dtype=torch.long)), "attn_mask must be a bool"),
]


def call(query, key=None, **options):
    key = randn(S, B, EMBED) if key is None else key
    return MultiheadAttention(EMBED, H, dtype=F64)(query, key, key, **options)


@pytest.mark.parametrize("call_wrongly, message", WRONG_CALLS, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_errors(call_wrongly, message):
    with pytest.raises(ValueError, match=message):
        call_wrongly()
