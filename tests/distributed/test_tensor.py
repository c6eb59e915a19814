"""Tensor parallelism: outputs and all gradients of 2 and 4 ranks equal those of one process."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import mgk
from mgk.distributed import HeadParallel, context_parallel, reduce_gradients, shard, tensor_parallel
from mgk.models import Classifier, DecoderConfig, EncoderConfig, LanguageModel
from tests.distributed.context_cases import (
    EMBED,
    F64,
    LAYERS,
    LENGTH,
    error_of,
    is_linear,
    make_inputs,
    make_layer,
    run,
)
from tests.support.workers import run_workers

CASES = [name for name in LAYERS if name not in ("one-key-head", "four-key-heads")]


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def tensor_errors(module, reference):
    """Return the errors of the gradients of all parameters, and of all buffers."""
    errors = {}
    for (name, parameter), (_, true) in zip(module.named_parameters(), reference.named_parameters(), strict=True):
        errors[name] = error_of(full(parameter.grad), true.grad)
    for (name, buffer), (_, true) in zip(module.named_buffers(), reference.named_buffers(), strict=True):
        errors[name] = error_of(full(buffer), true)
    return errors


def compare_layers(mesh):
    """Return the errors of every variant, with one kind of input each."""
    errors = {}
    kinds = ("padding", "packed", "mask")
    for n, name in enumerate(CASES):
        is_causal, kind = bool(n % 2), kinds[n % 3] if not is_linear(name) else kinds[n % 2]
        torch.manual_seed(3)
        weight = torch.randn(2, LENGTH, EMBED, dtype=F64)[: 1 if kind == "packed" else 2]
        x, options = make_inputs(kind, F64)
        # Numbers of key and value heads that differ, if there are enough heads.
        sizes = {"num_kv_heads": mesh.size(), "num_key_heads": 4}
        one, many = (make_layer(name, is_causal, F64, **sizes) for _ in range(2))
        expected = run(one, x, weight, options)
        actual = run(tensor_parallel(many, mesh), x, weight, options)
        case = f"{name}-{is_causal}-{kind}"
        errors |= {f"{case} {key}": error_of(actual[key], expected[key]) for key in expected}
        errors |= {f"{case} {key}": error for key, error in tensor_errors(many, one).items()}
    return errors


def decoders(**options):
    """Return two equal language models."""
    config = DecoderConfig(
        11, embed_dim=8, ffn_dim=16, num_layers=2, num_heads=4, head_dim=4, dropout=0.0, variant=("smgk-em", "mlk"),
        **{"norm": "rms", "norm_place": "pre", "positions": "rotary", "mlp": "swiglu", **options},
    )  # fmt: skip
    torch.manual_seed(0)
    models = [LanguageModel(config).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    return models


def losses(model, tokens):
    return model.losses(tokens[:, :-1], tokens[:, 1:])


def split_gate_and_up(state):
    """Return tensors by name, with the fused weight of SwiGLU as two."""
    result = {}
    for name, x in state.items():
        if "gate_and_up" in name:
            result[name.replace("gate_and_up", "gate")], result[name.replace("gate_and_up", "up")] = x.chunk(2)
        else:
            result[name] = x
    return result


def gradient_errors(many, one):
    expected = split_gate_and_up({name: x.grad for name, x in one.named_parameters() if x.grad is not None})
    actual = {name: full(x.grad) for name, x in many.named_parameters() if x.grad is not None}
    assert expected.keys() == actual.keys()
    buffers = dict(one.named_buffers())
    errors = {name: error_of(actual[name], x) for name, x in expected.items()}
    return errors | {name: error_of(full(x), buffers[name]) for name, x in many.named_buffers()}


def compare_models(mesh):
    """Return the errors of a language model with SwiGLU, one with an MLP, and a classifier."""
    errors = {}
    tokens = torch.randint(11, (2, 17), generator=torch.Generator().manual_seed(1))
    for options in ({}, {"mlp": "gelu", "norm": "layer", "norm_place": "post"}):
        one, many = decoders(**options)
        tensor_parallel(many, mesh)
        for model in (one, many):
            losses(model, tokens).mean().backward()
        errors |= {f"{options} {name}": error for name, error in gradient_errors(many, one).items()}
    torch.manual_seed(0)
    config = EncoderConfig(11, 3, 17, num_heads=4, head_dim=4, dropout=0.0, attention_dropout=0.0, preset="ref-lra")
    one, many = Classifier(config).double(), Classifier(config).double()
    many.load_state_dict(one.state_dict())
    outputs = [model(tokens) for model in (one, tensor_parallel(many, mesh))]
    for output in outputs:
        output.square().sum().backward()
    errors["classifier"] = error_of(outputs[1], outputs[0])
    return errors | {f"classifier {name}": error for name, error in gradient_errors(many, one).items()}


def compare_two_dimensions(mesh):
    """Return the errors of sequences × heads, and of data × heads with FSDP."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    tokens = torch.randint(11, (2, 17), generator=torch.Generator().manual_seed(1))
    one, many = decoders()
    losses(one, tokens).mean().backward()
    context_parallel(tensor_parallel(many, mesh["tp"]), mesh["other"])
    inputs, targets = (shard(x, mesh["other"]) for x in (tokens[:, :-1], tokens[:, 1:]))
    (many.losses(inputs, targets).mean() / 2).backward()
    reduce_gradients(many, mesh["other"])
    errors = {f"cp × tp {name}": error for name, error in gradient_errors(many, one).items()}
    if not hasattr(torch.cpu.Stream, "record_event"):
        return errors
    one, many = decoders()
    losses(one, tokens).mean().backward()
    tensor_parallel(many, mesh["tp"])
    for module in (*many.layers, many):
        fully_shard(module, mesh=mesh["other"])
    register_fsdp_forward_method(many, "losses")
    row = mesh["other"].get_local_rank()
    losses(many, tokens[row : row + 1]).mean().backward()
    return errors | {f"fsdp × tp {name}": error for name, error in gradient_errors(many, one).items()}


def compare_weights(mesh):
    """Return the errors of attention weights with all heads and of their gradients, and of a copied layer."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    one = mgk.MultiheadAttention(16, 4, batch_first=True).double()
    many = tensor_parallel(copy.deepcopy(one), mesh)
    probe, errors = torch.randn(2, 4, 6, 6, dtype=torch.float64), {}
    for name, layer in (("one", one), ("many", many), ("copy", copy.deepcopy(many))):
        output, weights = layer(x, x, x, average_attn_weights=False)
        (weights * probe).sum().backward()
        gradient = full(layer.attention.query.weight.grad)
        found = output, weights, gradient, layer(x, x, x)[1]
        if name == "one":
            expected = found
        else:
            errors |= {f"{name} {n}": error_of(a, b) for n, (a, b) in enumerate(zip(found, expected, strict=True))}
    return errors


def refusals(mesh):
    """Return the messages of layers whose heads cannot be sharded."""
    options = {
        "num_heads": {"num_heads": 3, "num_kv_heads": 1},
        "num_key_heads": {"num_heads": 4, "num_key_heads": 1},
        "num_kv_heads": {"num_heads": 4, "num_kv_heads": 1, "num_key_heads": 4},
    }
    calls = {name: lambda sizes=sizes: mgk.Attention(12, head_dim=4, **sizes) for name, sizes in options.items()}
    features = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softplus())
    calls["feature_map"] = lambda: mgk.Attention(16, 4, variant="mlk", feature_map=features)
    calls["module"] = lambda: torch.nn.Linear(2, 2)
    messages = {}
    for name, make in calls.items():
        try:
            tensor_parallel(make(), mesh)
        except ValueError as error:
            messages[name] = str(error)
    try:
        HeadParallel()._apply(torch.nn.Linear(2, 2), mesh)
    except ValueError as error:
        messages["module must be an mgk.Attention"] = str(error)
    return messages


def work(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    errors = compare_layers(mesh) | compare_models(mesh) | compare_weights(mesh)
    if ranks == 4:
        errors |= compare_two_dimensions(init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "tp")))
    return errors, refusals(mesh)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_variant_and_model_equals_one_process(tmp_path, ranks):
    for errors, messages in run_workers(work, ranks, tmp_path):
        assert len(errors) > 200
        assert {name: error for name, error in errors.items() if not error <= 1e-10} == {}
        assert len(messages) == 6
        assert all(message.startswith(name) for name, message in messages.items()), messages
