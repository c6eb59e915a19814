"""Every argument of every public callable with wrong values: a ValueError names it and lists the valid names.

The rows come from the signatures: an argument without rows fails `test_every_argument_has_rows`.
"""

import inspect
import re

import pytest
import torch

import mgk

B, H, HK, M, L, S, D, E = 2, 4, 2, 3, 5, 6, 8, 7
EMBED = 16


def integers(*sizes):
    return torch.tensor(sizes, dtype=torch.int32)


def tensor(valid, dtypes=(torch.int64,), **more):
    """Return wrong variations of a valid tensor."""
    rows = {"type": valid.tolist(), "text": "tensor", "dimensions": valid[(None,) * (6 - valid.dim())]}
    rows |= {"size": torch.cat([valid, valid[..., :1]], -1), "device": valid.to("meta")}
    rows |= {f"dtype {dtype}": valid.to(dtype) for dtype in dtypes}
    return rows | more


def offsets(valid):
    """Return wrong offsets of packed sequences."""
    wrong = {"start": valid + 1, "end": torch.cat([valid[:-1], valid[-1:] + 1]), "falls": valid[[0, 2, 1, 3]]}
    return tensor(valid, (torch.int64, torch.float32), **wrong)


def number(*out_of_range):
    return {"type": "0.1", "list": [0.1], "nan": float("nan"), "inf": float("inf")} | {f"{x}": x for x in out_of_range}


def integer(*out_of_range):
    return {"type": "2", "fraction": 2.5, "zero": 0, "negative": -1} | {f"{x}": x for x in out_of_range}


def flag():
    return {"text": "yes", "number": 2, "none": None}


def name(known):
    return {"unknown": Unknown("nonsense", known), "empty": Unknown("", known), "type": 3}


class Unknown:
    """An unknown name, and the names that the message must list."""

    def __init__(self, value, known):
        self.value, self.known = value, known


def wrong_batch(x):
    return torch.cat([x, x])


QUERY, KEYS, KEY = torch.randn(B, H, L, D), torch.randn(B, HK, M, S, D), torch.randn(B, HK, S, D)
VALUE, SHIFT, PRIOR = torch.randn(B, HK, S, E), torch.randn(HK, M, D), torch.randn(HK, M, S)


def main_tensor(valid, **more):
    """Return wrong variations of query, keys, key or value, which share a dtype and a batch."""
    return tensor(valid, (torch.int64, torch.complex64, torch.float64, torch.float16), batch=wrong_batch(valid), **more)


SHARED = {
    "query": main_tensor(QUERY, heads=QUERY[:, :3], width=QUERY[..., :0]),
    "value": main_tensor(VALUE, heads=VALUE[:, [0, 1, 0]], length=VALUE[:, :, :5]),
    "log_prior": tensor(PRIOR, (torch.int64, torch.bool), components=PRIOR[:, :2]),
    "return_weights": flag(),
}
SHARED["value"].pop("size")  # any value width is valid
KEYS_ROWS = {"keys": main_tensor(KEYS, heads=KEYS[:, [0, 1, 1]], components=KEYS[:, :, :0], no_heads=KEYS[:, :0])}
SHIFTED_ROWS = {
    "key": main_tensor(KEY, heads=KEY[:, [0, 1, 1]], no_heads=KEY[:, :0]),
    "shift": tensor(SHIFT, heads=SHIFT[:1], components=SHIFT[:, :0], none=None),
}
MIXTURE = SHARED | {
    "attn_mask": tensor(
        torch.ones(B, 1, L, S, dtype=torch.bool), (torch.int64, torch.uint8), rows=torch.ones(L + 1, S).bool()
    ),
    "is_causal": {"unknown": "top-right", "number": 1, "none": None},
    "dropout_p": number(-0.1, 1.0, 1.5) | {"none": None},
    "scale": number(0, -0.5) | tensor(torch.rand(HK, M), (torch.int64, torch.bool)),
    "similarity": name(["gaussian", "dot"]) | number() | tensor(torch.rand(HK), (torch.int64, torch.bool)),
    "assignment": name(["soft", "hard"]),
    "backend": name(["auto", "eager", "sdpa", "factored"]),
    "return_lse": flag(),
    "cu_seqlens_q": offsets(integers(0, 2, 4, 5)),
    "cu_seqlens_k": offsets(integers(0, 3, 4, 6)) | {"count": integers(0, 6)},
    "max_seqlen_q": integer(1),
    "max_seqlen_k": integer(2),
}
MIXTURE["similarity"].pop("type")  # 3 is a valid number
LINEAR = SHARED | {
    "feature_map": name(["elu", "relu"]),
    "key_mask": tensor(torch.ones(B, S, dtype=torch.bool), (torch.int64, torch.float32), batch=torch.ones(1, S).bool()),
    "is_causal": {"unknown": "top-right", "number": 1, "none": None},
    "cu_seqlens": offsets(integers(0, 3, 4, 6)),
    "initial_state": {
        "type": "state",
        "tensor": torch.zeros(B, HK, D, E),
        "one": (torch.zeros(B, HK, D, E),),
        "width": (torch.zeros(B, HK, D + 1, E), torch.zeros(B, HK, D + 1)),
        "size": (torch.zeros(B, HK, D, E + 1), torch.zeros(B, HK, D)),
        "heads": (torch.zeros(B, HK + 1, D, E), torch.zeros(B, HK + 1, D)),
        "dtype": (torch.zeros(B, HK, D, E).long(), torch.zeros(B, HK, D).long()),
        "device": (torch.zeros(B, HK, D, E, device="meta"), torch.zeros(B, HK, D, device="meta")),
    },
    "return_state": flag(),
    "backend": name(["auto", "eager", "chunked", "triton"]),
}
OPERATORS = {
    "mgk_attention": ({"query": QUERY, "keys": KEYS, "value": VALUE}, MIXTURE | KEYS_ROWS),
    "smgk_attention": ({"query": QUERY, "key": KEY, "value": VALUE, "shift": SHIFT}, MIXTURE | SHIFTED_ROWS),
    "mlk_attention": ({"query": QUERY, "keys": KEYS, "value": VALUE}, LINEAR | KEYS_ROWS),
    "smlk_attention": ({"query": QUERY, "key": KEY, "value": VALUE, "shift": SHIFT}, LINEAR | SHIFTED_ROWS),
}

X = torch.randn(B, L, EMBED)
PADDING = torch.zeros(B, L, dtype=torch.bool)
ATTENTION = {
    "embed_dim": integer(15) | {"none": None},
    "num_heads": integer(3) | {"none": None},
    "head_dim": integer(),
    "num_kv_heads": integer(3),
    "num_key_heads": integer(3),
    "kdim": integer(),
    "vdim": integer(),
    "variant": name(mgk.VARIANTS) | {"none": None},
    "num_components": integer() | {"none": None},
    "preset": name(mgk.PRESETS) | {"none": None},
    "feature_map": name(["elu", "relu"]) | {"none": None},
    "dropout": number(-0.1, 1.0, 1.5),
    "bias": {"text": "yes", "number": 2},  # None is the preset's, as for dropout
    "is_causal": flag(),
    "max_positions": integer(),
    "rotary": {"text": "rotary", "list": [3], "zero": 0, "negative": -1.0},
    "backend": name(["auto", "eager", "sdpa", "factored"]) | {"none": None},
    "device": {"unknown": "nowhere", "type": [3]},
    "dtype": {"text": "float32", "integer": torch.int64, "type": 3},
}
FORWARD = {
    "query": tensor(X, (torch.int64, torch.float64, torch.float16)),
    "key": tensor(X, (torch.int64, torch.float64), batch=X[:1]),
    "value": tensor(X, (torch.int64, torch.float64), batch=X[:1], length=X[:, :3]),
    "key_padding_mask": tensor(PADDING, (torch.int64, torch.float32), batch=PADDING[:1]),
    "attn_mask": tensor(torch.ones(L, L, dtype=torch.bool), (torch.int64,), rows=torch.ones(L + 1, L).bool()),
    "position_ids": tensor(torch.arange(L).expand(B, L), (torch.float32, torch.bool)),
    "cu_seqlens": offsets(integers(0, 3, 4, 5)),
    "max_seqlen": integer(2),
    "cache": {"type": 3, "text": "cache", "tuple": (X, X)},
    "need_weights": flag(),
}
MULTIHEAD = {
    "add_bias_kv": flag(),
    "add_zero_attn": flag(),
    "batch_first": flag(),
} | {n: ATTENTION[n] for n in ("embed_dim", "num_heads", "dropout", "bias", "kdim", "vdim", "device", "dtype")}
# Arguments beyond those of torch's constructor have the names and rows of mgk.Attention.
MULTIHEAD_EXTRA = {n: rows for n, rows in ATTENTION.items() if n not in MULTIHEAD}
MULTIHEAD_FORWARD = {n: FORWARD[n] for n in ("query", "key", "value", "attn_mask", "need_weights")} | {
    "key_padding_mask": tensor(PADDING, (torch.int64,), batch=PADDING[:1]),
    "average_attn_weights": flag(),
    "is_causal": flag(),
}


def operator_call(operator, valid):
    def call(argument, value):
        arguments = dict(valid)
        if argument.startswith(("cu_seqlens", "max_seqlen")):
            arguments = {n: x if n == "shift" else x[:1] for n, x in arguments.items()}
            if argument == "cu_seqlens":
                arguments["query"] = QUERY[:1, :, [0, 1, 2, 3, 4, 4]]
            else:
                arguments |= {"cu_seqlens_q": integers(0, 2, 4, 5), "cu_seqlens_k": integers(0, 3, 4, 6)}
        return getattr(mgk, operator)(**(arguments | {argument: value}))

    return call


def constructor_call(cls):
    def call(argument, value):
        arguments = {"embed_dim": EMBED, "num_heads": 4}
        if argument in ("num_kv_heads", "num_key_heads"):
            arguments["head_dim"] = 4
        return cls(**(arguments | {argument: value}))

    return call


def forward_call(cls, **options):
    def call(argument, value):
        module = cls(EMBED, 4, **options)
        arguments = {"query": X, "key": X, "value": X}
        if argument in ("cu_seqlens", "max_seqlen"):
            arguments = {"query": X[:1], "cu_seqlens": integers(0, 3, 4, 5)}
        return module(**(arguments | {argument: value}))

    return call


def parameter_names(function):
    return [n for n in inspect.signature(function).parameters if n != "self"]


# Arguments and rows of each callable, and a function that calls it with one wrong argument.
CALLABLES = {
    operator: (parameter_names(getattr(mgk, operator)), rows, operator_call(operator, valid))
    for operator, (valid, rows) in OPERATORS.items()
} | {
    "Attention": (parameter_names(mgk.Attention.__init__), ATTENTION, constructor_call(mgk.Attention)),
    "Attention.forward": (parameter_names(mgk.Attention.forward), FORWARD, forward_call(mgk.Attention)),
    "MultiheadAttention": (
        parameter_names(mgk.MultiheadAttention.__init__),
        MULTIHEAD | MULTIHEAD_EXTRA,
        constructor_call(mgk.MultiheadAttention),
    ),
    "MultiheadAttention.forward": (
        parameter_names(mgk.MultiheadAttention.forward),
        MULTIHEAD_FORWARD,
        forward_call(mgk.MultiheadAttention, batch_first=True),
    ),
}
ROWS = [
    pytest.param(function, argument, value, id=f"{function}-{argument}-{fault}")
    for function, (arguments, rows, _) in CALLABLES.items()
    for argument in arguments
    for fault, value in rows.get(argument, {}).items()
]


@pytest.mark.parametrize("function", CALLABLES)
def test_every_argument_has_rows(function):
    arguments, rows, _ = CALLABLES[function]
    assert [argument for argument in arguments if not rows.get(argument)] == []


@pytest.mark.parametrize("function, argument, value", ROWS)
def test_error_names_the_wrong_argument(function, argument, value):
    known = value.known if isinstance(value, Unknown) else []
    value = value.value if isinstance(value, Unknown) else value
    with pytest.raises(ValueError, match=rf"\b{argument}\b") as caught:
        CALLABLES[function][2](argument, value)
    message = str(caught.value)
    assert all(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", message) for name in known), message


def valid_values():
    """Yield calls with the valid values that the rows were made from."""
    for operator, (valid, _) in OPERATORS.items():
        yield lambda operator=operator, valid=valid: getattr(mgk, operator)(**valid)
    mask = torch.ones(B, 1, L, S, dtype=torch.bool)
    options = {"attn_mask": mask, "scale": torch.rand(HK, M), "similarity": torch.rand(HK), "log_prior": PRIOR}
    yield lambda: mgk.mgk_attention(QUERY, KEYS, VALUE, **options)
    lengths = {
        "cu_seqlens_q": integers(0, 2, 4, 5),
        "cu_seqlens_k": integers(0, 3, 4, 6),
        "max_seqlen_q": 2,
        "max_seqlen_k": 3,
    }
    yield lambda: mgk.mgk_attention(QUERY[:1], KEYS[:1], VALUE[:1], **lengths)
    state = (torch.zeros(B, HK, D, E), torch.zeros(B, HK, D))
    key_mask = torch.ones(B, S, dtype=torch.bool)
    yield lambda: mgk.mlk_attention(QUERY, KEYS, VALUE, key_mask=key_mask, initial_state=state)
    query = QUERY[:1, :, [0, 1, 2, 3, 4, 4]]
    yield lambda: mgk.mlk_attention(query, KEYS[:1], VALUE[:1], cu_seqlens=integers(0, 3, 4, 6))
    yield lambda: mgk.Attention(EMBED, 4)(
        X, X, X, key_padding_mask=PADDING, attn_mask=torch.ones(L, L, dtype=torch.bool)
    )
    yield lambda: mgk.MultiheadAttention(EMBED, 4, batch_first=True)(X, X, X, key_padding_mask=PADDING)


@pytest.mark.parametrize("call", list(valid_values()))
def test_valid_values_are_accepted(call):
    call()


def test_explain_backend_rejects_layers():
    with pytest.raises(ValueError, match="got a layer, Attention"):
        mgk.explain_backend(mgk.Attention(8, 2), QUERY)


def test_explain_backend_with_a_named_backend():
    call = mgk.mgk_attention, QUERY, KEYS, VALUE
    assert mgk.explain_backend(*call, backend="eager").backend == "eager"
    for backend, message in (("nonsense", "backend must be one of"), ("triton", "'triton' does not support this call")):
        with pytest.raises(ValueError, match=message):
            mgk.explain_backend(*call, backend=backend)
    with pytest.raises(ValueError, match="args of smgk_attention: missing a required argument: 'shift'"):
        mgk.explain_backend("smgk_attention", QUERY, QUERY, QUERY)


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
def test_explain_backend_validates_arguments(backend):
    assert "eager" in str(mgk.explain_backend(mgk.mgk_attention, QUERY, KEYS, VALUE, backend=backend))
    with pytest.raises(ValueError, match="keys"):
        mgk.explain_backend(mgk.mgk_attention, QUERY, KEYS[:, :, 0], VALUE, backend=backend)
    with pytest.raises(ValueError, match=r"\bop\b"):
        mgk.explain_backend(torch.softmax, QUERY, KEYS, VALUE)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_error_for_nested_tensors_suggests_packing():
    nested = torch.nested.nested_tensor([torch.randn(3, 64), torch.randn(5, 64)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"query is a nested tensor: .* pass cu_seqlens"):
        mgk.Attention(64, 2)(nested)
