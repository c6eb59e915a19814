"""Cases of context parallelism, and the comparison of a sharded layer with the same layer in one process."""

import itertools

import torch
from torch.distributed.device_mesh import init_device_mesh

import mgk
from mgk.distributed import context_parallel, reduce_gradients, shard
from tests.support.layers import scrambled

F64 = torch.float64
EMBED, HEADS, KV_HEADS, WIDTH, LENGTH = 12, 4, 2, 6, 24
PACKED = [0, 1, 6, 6, 19, 24]  # an empty sequence, one token, and sequences that cross the edges of chunks

VARIANTS = {
    **mgk.VARIANTS,
    "between": mgk.Variant("between", "shifted", "learned"),
    "learned-variance": mgk.Variant("gaussian", "independent", "learned", variance="learned"),
    "em-variance": mgk.Variant("gaussian", "shifted", "em", variance="em", em_momentum=0.3),
    "normalized": mgk.Variant("gaussian", "shifted", "learned", normalise=True),
}
INPUTS = ("plain", "padding", "packed", "mask", "bias")
LAYERS = {
    **{name: {"variant": variant} for name, variant in VARIANTS.items()},
    "ref-lm": {"variant": "smgk", "preset": "ref-lm"},
    "ref-lm-linear": {"variant": "smlk", "preset": "ref-lm"},
    "em-positions": {"variant": "mgk-em", "max_positions": LENGTH},
    "one-key-head": {"variant": "smgk", "num_key_heads": 1},
    "four-key-heads": {"variant": "mlk", "num_key_heads": 4},
    "favor": {"variant": "mlk", "feature_map": "favor"},
}


def is_linear(name):
    variant = LAYERS[name]["variant"]
    return (VARIANTS[variant] if isinstance(variant, str) else variant).similarity == "linear"


def cases(ranks):
    """Return (layer, is_causal, inputs): every layer with and without causality, every kind of input in turn."""
    turn = itertools.cycle(INPUTS)
    for _ in range(ranks):
        next(turn)
    result = []
    for name, is_causal in itertools.product(LAYERS, (True, False)):
        kind = next(turn)
        while is_linear(name) and kind in ("mask", "bias"):
            kind = next(turn)
        result.append((name, is_causal, kind))
    everything = itertools.product(("smgk", "mgk"), (True, False), INPUTS)
    linear = itertools.product(("smlk",), (True, False), INPUTS[:3])
    return sorted({*result, *everything, *linear})


def make_layer(name, is_causal, dtype, **sizes):
    """Return a layer with random parameters; those of all dtypes are the same numbers."""
    torch.manual_seed(1)
    options = dict(LAYERS[name])
    if options.get("feature_map") == "favor":
        options["feature_map"] = mgk.FAVOR(WIDTH, 8)
    options = {"head_dim": WIDTH, "num_kv_heads": KV_HEADS, **sizes, **options}
    layer = mgk.Attention(EMBED, HEADS, is_causal=is_causal, rotary=100.0, dropout=0.0, **options)
    return scrambled(layer.float()).to(dtype).train()


def make_inputs(kind, dtype):
    """Return the inputs of a layer in one process: x, and keyword arguments of forward."""
    torch.manual_seed(2)
    batch = 1 if kind == "packed" else 2
    x = torch.randn(batch, LENGTH, EMBED, dtype=dtype)
    padding = torch.arange(LENGTH) >= torch.tensor([LENGTH - 5, LENGTH])[:, None]
    if kind == "padding":
        return x, {"key_padding_mask": padding}
    if kind == "packed":
        return x, {"cu_seqlens": torch.tensor(PACKED, dtype=torch.int32), "max_seqlen": 13}
    if kind == "mask":
        mask = torch.rand(2, 1, LENGTH, LENGTH) < 0.6
        mask[0, 0, 3] = False  # a fully masked query
        return x, {"attn_mask": mask, "key_padding_mask": padding}
    if kind == "bias":
        return x, {"attn_mask": torch.randn(1, HEADS, LENGTH, LENGTH, dtype=dtype)}
    return x, {}


def run(layer, x, weight, options):
    """Return output, gradients and EM buffers of a layer, by name."""
    x = x.clone().requires_grad_()
    output = layer(x, **options)
    (output * weight).sum().backward()
    results = {"output": output.detach(), "x": x.grad}
    if "attn_mask" in options and options["attn_mask"].requires_grad:
        results["attn_mask"] = options["attn_mask"].grad
    return results


def shard_options(options, mesh):
    """Return the arguments of a rank: its rows of padding and masks."""
    local = dict(options)
    if "key_padding_mask" in options:
        local["key_padding_mask"] = shard(options["key_padding_mask"], mesh)
    if "attn_mask" in options:
        local["attn_mask"] = shard(options["attn_mask"].detach(), mesh, dim=2)
    return local


def error_of(actual, expected):
    """Return the largest error relative to the largest entry."""
    actual, expected = actual.detach(), expected.detach()
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


def run_one_process(name, is_causal, kind, dtype, weight):
    """Return the layer and its results for the whole sequence."""
    x, options = make_inputs(kind, torch.float32)
    layer = make_layer(name, is_causal, dtype)
    if kind == "bias":
        options["attn_mask"] = options["attn_mask"].to(dtype).requires_grad_()
    return layer, run(layer, x.to(dtype), weight.to(dtype), options)


def run_sharded(name, is_causal, kind, dtype, weight, mesh):
    """Return the layer and its results for the rows of this rank."""
    x, options = make_inputs(kind, torch.float32)
    layer = context_parallel(make_layer(name, is_causal, dtype), mesh)
    options = shard_options(options, mesh)
    if kind == "bias":
        options["attn_mask"] = options["attn_mask"].to(dtype).requires_grad_()
    results = run(layer, shard(x, mesh).to(dtype), shard(weight, mesh).to(dtype), options)
    reduce_gradients(layer, mesh)
    return layer, results


def errors_of(layer, results, reference, expected, mesh=None):
    """Return the errors of all results relative to a reference, of which a rank has the rows of its mesh."""
    local = (lambda x, dim: x) if mesh is None else (lambda x, dim: shard(x, mesh, dim))
    errors = {key: error_of(x, local(expected[key], 2 if key == "attn_mask" else 1)) for key, x in results.items()}
    for (key, parameter), true in zip(layer.named_parameters(), reference.parameters(), strict=True):
        errors[key] = error_of(parameter.grad, true.grad)
    for (key, buffer), true in zip(layer.named_buffers(), reference.buffers(), strict=True):
        errors[key] = error_of(buffer, true)
    return errors


def compare(name, is_causal, kind, dtype, mesh):
    """Return the errors of a sharded layer and, except in fp64, those of one process in the same dtype."""
    torch.manual_seed(3)
    weight = torch.randn(2, LENGTH, EMBED)[: 1 if kind == "packed" else 2]
    truth = run_one_process(name, is_causal, kind, F64, weight)
    errors = errors_of(*run_sharded(name, is_causal, kind, dtype, weight, mesh), *truth, mesh)
    if dtype == F64:
        return errors, None
    return errors, errors_of(*run_one_process(name, is_causal, kind, dtype, weight), *truth)


def work(rank, ranks):
    """Return case, whether it is in fp64, and the errors, of all cases in fp64 and of some in fp32."""
    mesh = init_device_mesh("cpu", (ranks,))
    results = [("-".join(map(str, case)), True, *compare(*case, F64, mesh)) for case in cases(ranks)]
    some = cases(ranks)[ranks // 4 :: 4]
    results += [("-".join(map(str, case)), False, *compare(*case, torch.float32, mesh)) for case in some]
    return results
