"""The layer with other parts of PyTorch: compile, export, ONNX, autocast, checkpointing, copies; bounded memory."""

import copy
import io

import onnxruntime
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mgk
from mgk import Attention, equations
from mgk._core import query_blocks

EMBED, H, HK, D = 16, 4, 2, 8
LENGTHS = [7, 2, 3, 5, 8, 13, 16, 31, 33, 48, 63, 64, 65, 100, 128, 130, 200, 256, 257, 300]


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


COMPILED = {
    "smgk": {"variant": "smgk"},
    "smgk-causal": {"variant": "smgk", "is_causal": True, "rotary": 100.0},
    "mgk": {"variant": "mgk", "num_kv_heads": HK},
    "smgk-key-heads": {"variant": "smgk", "num_key_heads": HK},
    "softmax": {"variant": "softmax", "is_causal": True},
    "smgk-hard": {"variant": "smgk-hard", "is_causal": True},
    "mlk": {"variant": "mlk", "is_causal": True},
    "smgk-eager": {"variant": "smgk", "backend": "eager", "is_causal": True},
}


def gradients(layer, x):
    x = x.clone().requires_grad_()
    out = layer(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_twenty_lengths_need_at_most_two_compilations(options, training):
    layer = Attention(EMBED, H, head_dim=D, **options).train(training)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    assert len(LENGTHS) == len(set(LENGTHS)) == 20
    for length in LENGTHS:
        x = torch.randn(2, length, EMBED)
        if training:
            actual, expected = gradients(compiled, x), gradients(layer, x)
        else:
            with torch.no_grad():
                actual, expected = compiled(x), layer(x)
        close(actual, expected, 1e-4)
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_compiled_by_inductor():
    layer, x = Attention(EMBED, H, head_dim=D, is_causal=True), torch.randn(2, 33, EMBED)
    close(gradients(torch.compile(layer, fullgraph=True), x), gradients(layer, x), 1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_compiled_em(masked):
    layer, x = Attention(EMBED, H, head_dim=D, variant="smgk-em", is_causal=True), torch.randn(2, 12, EMBED)
    masks = {"key_padding_mask": torch.arange(12).expand(2, -1) >= torch.tensor([[9], [12]])} if masked else {}
    other = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        actual, expected = compiled(x, **masks), other(x, **masks)
        close(actual, expected)
        actual.sum().backward()
        close(layer.prior.prior, other.prior.prior)
    start = layer.prior.prior.clone()
    compiled.eval()
    compiled(x, **masks)
    assert torch.equal(layer.prior.prior, start)


EXPORTED = ["softmax", "mgk", "smgk", "smgk-hard", "mgk-em", "mlk", "smlk"]


def exportable(variant, backend="eager"):
    layer = Attention(
        EMBED, H, head_dim=D, num_kv_heads=HK, variant=variant, is_causal=True, rotary=100.0, backend=backend
    )
    return layer.eval()


class Padded(torch.nn.Module):
    """A wrapper with positional arguments, which ONNX and export need."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, padding):
        return self.layer(x, key_padding_mask=padding)


def example(batch, length):
    return torch.randn(batch, length, EMBED), torch.arange(length).expand(batch, -1) >= length - torch.arange(batch)[
        :, None
    ]


def dynamic():
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=512)
    return {"x": {0: batch, 1: length}, "padding": {0: batch, 1: length}}


@pytest.mark.parametrize("variant", EXPORTED)
def test_export_with_any_length(variant):
    module = Padded(exportable(variant)).eval()
    program = torch.export.export(module, example(3, 10), dynamic_shapes=dynamic(), strict=False)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for batch, length in ((3, 10), (2, 2), (5, 77)):
        args = example(batch, length)
        close(loaded(*args), module(*args))


@pytest.mark.parametrize("variant", ["linear", "mlk", "smlk"])
def test_export_of_causal_linear_attention(variant):
    """Export the default backend; lengths are below, at and above multiples of the chunk."""
    layer = Attention(EMBED, H, head_dim=D, variant=variant, is_causal=True).eval()
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(layer, (torch.randn(2, 130, EMBED),), dynamic_shapes={"query": {1: length}})
    for length in (2, 63, 64, 130, 512):
        x = torch.randn(2, length, EMBED)
        close(program.module()(x), layer(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:# The axis name:UserWarning")
@pytest.mark.parametrize("variant", ["softmax", "mgk", "smgk-hard", "smgk-em", "smlk"])
def test_onnx_with_any_length(variant):
    """Export the default backend, which is "eager" in ONNX export."""
    module = Padded(exportable(variant, backend="auto")).eval()
    with torch.no_grad():
        program = torch.onnx.export(module, example(3, 10), dynamic_shapes=dynamic(), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    for batch, length in ((3, 10), (2, 2), (5, 77)):
        args = example(batch, length)
        (actual,) = session.run(None, dict(zip(names, (x.numpy() for x in args), strict=True)))
        close(torch.from_numpy(actual), module(*args).detach(), 1e-4)


@pytest.mark.parametrize("options", [{}, {"rotary": 100.0, "num_kv_heads": HK, "is_causal": True}], ids=str)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_autocast(variant, options):
    layer, x = Attention(EMBED, H, head_dim=D, variant=variant, **options), torch.randn(2, 20, EMBED)
    expected = layer.eval()(x)
    layer.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert (out - expected).abs().max() < 0.05 * expected.abs().max()
    out.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any(), name
    assert all(buffer.dtype == torch.float32 for buffer in layer.buffers())


@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_activation_checkpointing(variant):
    """Compare with the plain layer; for EM see test_em_checkpointing.py."""
    layer = Attention(EMBED, H, head_dim=D, variant=variant, is_causal=True, dropout=0.2).train("em" not in variant)
    x, results = torch.randn(2, 20, EMBED, requires_grad=True), []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(1)
        out = call(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    close(*results, tolerance=1e-6)


@pytest.mark.parametrize(
    "options", [{"variant": "smgk-em", "max_positions": 30}, {"variant": "mlk", "feature_map": mgk.FAVOR(D)}], ids=str
)
def test_copy_is_equal_and_independent(options):
    layer, x = Attention(EMBED, H, head_dim=D, rotary=100.0, **options), torch.randn(2, 20, EMBED)
    other = copy.deepcopy(layer)
    expected = layer.eval()(x)
    assert torch.equal(other.eval()(x), expected)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.add_(0.5)
    assert torch.equal(layer(x), expected)
    assert not torch.equal(other(x), expected)
    drop_in = mgk.MultiheadAttention(EMBED, H, batch_first=True).eval()
    assert torch.equal(copy.deepcopy(drop_in)(x, x, x)[0], drop_in(x, x, x)[0])


BLOCKED = {
    "soft": ({"log_prior": True}, {}),
    "hard": ({"assignment": "hard"}, {}),
    "hard-causal": ({"assignment": "hard", "is_causal": True}, {}),
    "float-mask": ({"assignment": "hard"}, {"attn_mask": torch.randn(1, H, 50, 70)}),
    "key-mask": ({}, {"attn_mask": torch.rand(2, 1, 1, 70) > 0.3}),
    "bottom-right": ({"is_causal": "bottom-right"}, {"attn_mask": torch.rand(50, 70) > 0.3}),
}


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("options, masks", BLOCKED.values(), ids=BLOCKED)
def test_query_blocks_do_not_change_results(options, masks, shifted, monkeypatch):
    """Compare output, lse, weights and gradients of the eager backend in blocks with those of one block."""
    inputs = [
        torch.randn(2, H, 50, D),
        torch.randn(2, HK, 70, D) if shifted else torch.randn(2, HK, 3, 70, D),
        torch.randn(2, HK, 70, 5),
    ]
    inputs += [torch.randn(HK, 3, D)] if shifted else []
    inputs = [x.double().requires_grad_() for x in inputs]
    options = dict(options)
    if options.pop("log_prior", False):
        options["log_prior"] = torch.randn(HK, 3, 70).double().log_softmax(1).requires_grad_()
    if "attn_mask" in masks and masks["attn_mask"].is_floating_point():
        options["attn_mask"] = masks["attn_mask"].double().requires_grad_()
    elif masks:
        options |= masks
    leaves = inputs + [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    op = mgk.smgk_attention if shifted else mgk.mgk_attention
    sizes = []
    logits = equations.component_logits

    def measured(*args, **kwargs):
        result = logits(*args, **kwargs)
        sizes.append(result[0].numel())
        return result

    monkeypatch.setattr(equations, "component_logits", measured)

    def everything(**extra):
        out, lse = op(*inputs, backend="eager", return_lse=True, **options, **extra)[:: 2 if extra else 1]
        return [out, lse, *torch.autograd.grad(out.square().sum() + lse.masked_fill(lse.isinf(), 0).sum(), leaves)]

    expected, whole = everything(), max(sizes)
    for limit in (whole // 7, 1):
        monkeypatch.setattr(query_blocks, "BLOCK_ELEMENTS", limit)
        sizes.clear()
        close(everything(), expected, 1e-10)
        assert max(sizes) <= max(limit, whole // 50)
        assert len(sizes) >= 2 * (whole // max(limit, whole // 50))  # once in the forward, once in the backward
        close(everything(return_weights=True), expected, 1e-10)


class Largest(TorchDispatchMode):
    """Dispatch mode that records the size of the largest tensor created, views excluded."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.slow
@pytest.mark.parametrize("assignment", ["hard", "soft"])
def test_long_sequences_form_no_full_matrix(assignment):
    """Run L = S = 4096 with two heads and M = 2: 67 million logits, in blocks of queries in both passes."""
    query, key, value, shift = (torch.randn(*s, requires_grad=True) for s in [(1, 2, 4096, D)] * 3 + [(2, 2, D)])
    with Largest() as largest:
        out = mgk.smgk_attention(query, key, value, shift, assignment=assignment, backend="eager")
        out.sum().backward()
    assert 4096 * 4096 // 4 < largest.elements <= query_blocks.BLOCK_ELEMENTS
    assert out.isfinite().all()


def test_weights_of_hard_assignment_are_computed_in_blocks():
    """Check that only the weights are L x S; tensors with a component axis are blocks."""
    query, key, value, shift = (torch.randn(*s) for s in [(1, 1, 4096, D)] * 3 + [(1, 8, D)])
    with Largest() as largest:
        _, weights = mgk.smgk_attention(query, key, value, shift, assignment="hard", return_weights=True)
    assert weights.shape == (1, 1, 4096, 4096)
    assert largest.elements <= max(query_blocks.BLOCK_ELEMENTS, weights.numel())


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("variant", ["softmax", "smgk", "mgk"])
def test_traced_layer_at_other_lengths(variant):
    layer = mgk.Attention(16, 2, variant=variant, is_causal=True).eval()
    traced = torch.jit.trace(layer, torch.randn(2, 7, 16))
    x = torch.randn(3, 11, 16)
    torch.testing.assert_close(traced(x), layer(x))
