"""Cases of the operators, and the comparison of a backend with the oracle: the output and every gradient."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import mgk
from tests.support import oracle

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# `compare` takes the maximum error over draws of the inputs, and over orders of the sums in the reference's rounding.
DRAWS = {torch.float64: 1, torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
ORDERS = {torch.float64: 0, torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
MORE = 6


@dataclass(frozen=True)
class Shape:
    """Sizes of a case, and the options that need tensors."""

    B: int = 2
    H: int = 2
    Hk: int = 2
    M: int = 2
    L: int = 9
    S: int = 9
    D: int = 16
    E: int = 16
    mask: str | None = None  # bool, key, float, float-head (no gradient), rows (a row without keys)
    causal: str | None = None
    prior: str | None = "head"  # None (uniform), head, position, batch, component (shape [M, 1]), zeros (some are -inf)
    scale: str | None = None  # None (1 / sqrt D), number, component ([Hk, M]), position ([B, Hk, M, S])
    packed: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # lengths of the sequences in L and in S
    lse: bool = False
    Hv: int | None = None  # value heads; None is Hk


MIXTURE_SHAPES = {
    "plain": Shape(L=17, S=17, prior=None),
    "cross-m3": Shape(L=13, S=31, M=3, D=33, E=7, scale="number"),
    "d1": Shape(L=23, S=19, M=2, D=1, E=3, scale="component"),
    "d3-causal": Shape(L=23, S=23, D=3, E=5, causal="top-left", prior="position"),
    "d64-causal-m1": Shape(L=37, S=37, D=64, E=16, M=1, causal="top-left", prior="batch"),
    "d64": Shape(B=1, L=33, S=37, D=64, E=64, prior="position"),
    "top-left-short": Shape(L=19, S=5, M=3, causal="top-left"),
    "top-left-long": Shape(H=4, Hk=4, L=9, S=29, M=2, causal="top-left", scale="component"),
    "bottom-right-long": Shape(L=3, S=21, M=2, D=33, E=33, causal="bottom-right", prior="position", lse=True),
    "bottom-right-short": Shape(L=21, S=6, M=2, causal="bottom-right", prior="batch"),
    "gqa": Shape(H=4, Hk=2, L=15, S=18, M=2, D=3, E=4, prior="position", scale="component"),
    "gqa-causal-m8": Shape(B=1, H=6, Hk=2, L=25, S=25, M=8, D=16, E=33, causal="top-left", prior="position"),
    "scale-per-key": Shape(H=4, L=12, S=15, M=3, prior="position", scale="position", causal="bottom-right"),
    "mqa": Shape(H=4, Hk=1, L=9, S=14, M=3, prior="component"),
    "bool": Shape(L=14, S=11, mask="bool", prior="position", lse=True),
    "bool-causal": Shape(H=4, L=16, S=16, D=33, mask="bool", causal="top-left", scale="component"),
    "rows": Shape(L=7, S=12, M=3, mask="rows", prior="batch", lse=True),
    "key-mask-gqa": Shape(H=4, L=13, S=29, mask="key", prior="position"),
    "float": Shape(L=12, S=15, M=3, mask="float", prior="position"),
    "float-causal": Shape(
        B=1, H=3, Hk=3, L=20, S=20, D=64, E=32, mask="float", causal="bottom-right", scale="component"
    ),
    "float-constant": Shape(H=4, L=9, S=13, M=2, D=3, mask="float-head", prior="batch"),
    "zero-priors": Shape(L=8, S=10, M=3, prior="zeros", lse=True),
    "two-keys": Shape(L=9, S=2, M=2, D=16, E=3),
    "one-query": Shape(H=6, L=1, S=33, M=2, D=64, E=64, lse=True),
    "packed": Shape(B=1, L=20, S=26, M=2, packed=((7, 1, 12), (5, 9, 12)), prior="position"),
    "packed-causal": Shape(
        B=1, H=4, L=24, S=24, D=33, E=5, packed=((11, 0, 13), (11, 0, 13)), causal="top-left", lse=True
    ),
    "packed-bottom": Shape(
        B=1, M=3, L=12, S=26, packed=((3, 4, 5), (9, 4, 13)), causal="bottom-right", scale="component"
    ),
    "packed-no-keys": Shape(B=1, L=9, S=8, packed=((4, 3, 2), (5, 0, 3)), prior="head"),
}
# Numbers of query, key and value heads; the last two of (12, 4, 6) do not divide each other.
HEADS = {f"{H}-{Hk}-{Hv}": {"H": H, "Hk": Hk, "Hv": Hv} for H, Hk, Hv in [
    (4, 1, 4), (4, 2, 4), (4, 4, 1), (12, 4, 6), (4, 4, 2),
]}  # fmt: skip
SIMILARITIES = ["gaussian", "dot", 0.3, "per-head"]
TAU = {"gaussian": 1.0, "dot": 0.0}

LINEAR_SHAPES = {
    "plain": Shape(L=17, S=17, prior=None),
    "cross-m3": Shape(L=13, S=31, M=3, D=33, E=7),
    "d1-m8": Shape(L=11, S=7, M=8, D=1, E=3, prior="position"),
    "d3": Shape(H=4, L=16, S=25, D=3, E=5, prior="batch", mask="key"),
    "d64-causal-m1": Shape(B=1, L=37, S=37, D=64, E=64, M=1, causal="top-left", prior="batch"),
    "causal": Shape(L=25, S=25, M=3, D=3, E=6, causal="top-left", prior="position"),
    "causal-long": Shape(B=1, H=2, L=150, S=150, M=2, D=16, E=8, causal="top-left", prior="position"),
    "causal-gqa-m8": Shape(H=6, L=19, S=19, M=8, D=16, E=33, causal="top-left", prior="component"),
    "causal-mask": Shape(H=4, L=33, S=33, D=33, mask="key", causal="top-left"),
    "causal-zero-priors": Shape(L=15, S=15, M=3, prior="zeros", causal="top-left"),
    "packed": Shape(B=1, L=26, S=26, packed=((5, 9, 12), (5, 9, 12)), prior="position"),
    "packed-causal": Shape(B=1, H=4, L=24, S=24, M=3, D=16, E=5, packed=((11, 0, 13), (11, 0, 13)), causal="top-left"),
}


def draw(shape: Shape, op: str, dtype: torch.dtype, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draw the differentiable inputs and the constant tensors of a case, rounded to dtype and stored in float64."""
    g = torch.Generator().manual_seed(seed)
    B, H, Hk, M, L, S, D, E = (getattr(shape, n) for n in ("B", "H", "Hk", "M", "L", "S", "D", "E"))

    def randn(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64)

    def flat(*size):
        """Draw numbers of variance 1 without outliers, which would determine the maximum error."""
        return (torch.rand(*size, generator=g, dtype=torch.float64) - 0.5) * 12**0.5

    # A mean of 1 keeps the denominators of linear attention with relu, and its gradients, of order 1.
    mean = 1.0 if op.endswith("mlk") else 0.0
    inputs, constants = {"query": mean + flat(B, H, L, D)}, {}
    if op[0] == "s":
        inputs |= {"key": mean + flat(B, Hk, S, D), "shift": flat(Hk, M, D)}
    else:
        inputs["keys"] = mean + flat(B, Hk, M, S, D)
    inputs["value"] = flat(B, shape.Hv or Hk, S, E)
    prior_sizes = {
        "head": (Hk, M, 1),
        "position": (Hk, M, S),
        "batch": (B, Hk, M, 1),
        "component": (M, 1),
        "zeros": (Hk, M, S),
    }
    if shape.prior:
        inputs["log_prior"] = randn(*prior_sizes[shape.prior]).log_softmax(-2)
    if shape.prior == "zeros":
        inputs["log_prior"][:, 0, ::2] = -oracle.INF
        inputs["log_prior"][:, :, 1] = -oracle.INF
    if shape.scale == "component":
        inputs["scale"] = D**-0.5 * (0.5 + randn(Hk, M).sigmoid())
    if shape.scale == "position":
        inputs["scale"] = D**-0.5 * (0.5 + randn(B, Hk, M, S).sigmoid())
    inputs["tau"] = randn(Hk).sigmoid()
    if shape.mask in ("bool", "rows"):
        constants["attn_mask"] = randn(B, 1, L, S) > -0.5
    if shape.mask == "rows":
        constants["attn_mask"][:, :, ::3] = False
    if shape.mask == "key":
        constants["attn_mask"] = (randn(B, 1, 1, S) > -0.5).index_fill(3, torch.tensor([0]), True)
    if shape.mask == "float":
        inputs["attn_mask"] = randn(H, L, S)
    if shape.mask == "float-head":
        constants["attn_mask"] = randn(B, 1, 1, S).masked_fill(randn(B, 1, 1, S) > 1, -oracle.INF)
    if shape.packed:
        for name, lengths in zip("qk", shape.packed, strict=True):
            constants[f"cu_seqlens_{name}"] = torch.tensor([0, *lengths]).cumsum(0).int()
    rounded = {n: x.to(dtype).double() for n, x in inputs.items()}
    return rounded, {n: x.to(dtype).double() if x.is_floating_point() else x for n, x in constants.items()}


DIMS = {"query": "BHLD", "keys": "BHMSD", "key": "BHSD", "shift": "HMD", "value": "BHSE", "scale": "HM"}
DIMS |= {"log_prior": "BHMS", "attn_mask": "BHLS"}


def permuted(name: str, x: Tensor, order: dict[str, Tensor]) -> Tensor:
    """Permute the dimensions of x that have an order; a dimension of size 1 is broadcast."""
    dims = "BHMS" if name == "scale" and x.dim() == 4 else DIMS.get(name, "")
    for dim, letter in enumerate(reversed(dims), 1):
        if letter in order and dim <= x.dim() and x.shape[-dim] > 1:
            x = x.index_select(-dim, order[letter])
    return x


def visible(shape: Shape) -> Tensor:
    """Return which query may attend to which key, causal and packed, bool [L, S]."""
    lengths = zip(*shape.packed, strict=True) if shape.packed else [(shape.L, shape.S)]
    return torch.block_diag(*(oracle.allowed(n, m, shape.causal) for n, m in lengths)).bool()


def run_oracle(op, shape, inputs, constants, options, reorder=0):
    """Return the oracle's output and lse for a case, in the dtype of the inputs.

    `reorder`, a seed, permutes queries, keys, components and features: the results differ by the rounding of sums only.
    """
    x = {**inputs, **constants}
    causal, packed = shape.causal, shape.packed
    if reorder:
        g = torch.Generator().manual_seed(reorder)
        order = {n: torch.randperm(getattr(shape, n), generator=g) for n in "LSMD"}
        x = {n: permuted(n, tensor, order) for n, tensor in x.items()}
        causal, packed = visible(shape)[order["L"]][:, order["S"]], None
    keys = x["keys"] if "keys" in x else oracle.shifted(x["key"], x["shift"])
    common = {"causal": causal, "log_prior": x.get("log_prior")}
    mask = x.get("attn_mask")
    if op.endswith("mlk"):
        operator = oracle.linear
        common |= {"feature_map": options["feature_map"]} | ({} if mask is None else {"key_mask": mask[:, 0, 0]})
    else:
        operator, similarity = oracle.mixture, options["similarity"]
        common |= {"hard": options["assignment"] == "hard"} | ({} if mask is None else {"mask": mask})
        common["scale"] = 0.2 if shape.scale == "number" else x.get("scale")
        common["tau"] = x["tau"] if similarity == "per-head" else TAU.get(similarity, similarity)
    if packed:
        result = oracle.packed(operator, x["query"], keys, x["value"], x["cu_seqlens_q"], x["cu_seqlens_k"], **common)
    else:
        result = operator(x["query"], keys, x["value"], **common)
    out, lse = result[0], result[-1] if shape.lse else None
    if reorder:
        back = order["L"].argsort()
        out, lse = out[:, :, back], None if lse is None else lse[:, :, back]
    return out, lse


def arguments(op, shape, inputs, constants, options):
    """Return the positional and keyword arguments of the package's operator for a case."""
    x = {**inputs, **constants}
    args = [x["query"], x["key"], x["value"], x["shift"]] if op[0] == "s" else [x["query"], x["keys"], x["value"]]
    kwargs = {
        "log_prior": x.get("log_prior"),
        "is_causal": {None: False, "top-left": True}.get(shape.causal, shape.causal),
    }
    if op.endswith("mlk"):
        kwargs |= {"feature_map": options["feature_map"], "cu_seqlens": x.get("cu_seqlens_q")}
        kwargs["key_mask"] = x["attn_mask"][:, 0, 0] if "attn_mask" in x else None
        return args, kwargs
    kwargs |= {"attn_mask": x.get("attn_mask"), "return_lse": shape.lse, "assignment": options["assignment"]}
    kwargs["scale"] = 0.2 if shape.scale == "number" else x.get("scale")
    kwargs["similarity"] = x["tau"] if options["similarity"] == "per-head" else options["similarity"]
    if shape.packed:
        kwargs |= {name: x[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return args, kwargs


def run_package(backend, op, shape, inputs, constants, options):
    args, kwargs = arguments(op, shape, inputs, constants, options)
    result = getattr(mgk, f"{op}_attention")(*args, **kwargs, backend=backend)
    return result if shape.lse else (result, None)


def results(function, inputs, constants, dtype, rounding, seed):
    """Return the output, the lse and the gradient of every input by name, computed in dtype, stored in float64.

    `rounding` is the dtype that the incoming gradients are rounded to, as the inputs were.
    """
    inputs = {n: x.to(dtype).requires_grad_() for n, x in inputs.items()}
    constants = {n: x.to(dtype) if x.is_floating_point() else x for n, x in constants.items()}
    out, lse = function(inputs, constants)
    assert out.dtype == dtype
    g = torch.Generator().manual_seed(seed)
    upstream = torch.randn(out.shape, generator=g, dtype=torch.float64).to(rounding).to(dtype)
    loss = (out * upstream).sum(dtype=torch.float64)
    tensors = {"out": out}
    if lse is not None:
        tensors["lse"] = lse
        # A fully masked row has an lse of -inf, and no gradient.
        weight = torch.randn(lse.shape, generator=g, dtype=torch.float64).to(rounding).double()
        loss = loss + (weight * lse.double().masked_fill(lse == -oracle.INF, 0)).sum()
    grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True, materialize_grads=True)
    assert [grad.dtype for grad in grads] == [dtype] * len(grads)
    tensors |= {f"d {n}": grad for n, grad in zip(inputs, grads, strict=True)}
    return {n: x.detach().double() for n, x in tensors.items()}


def max_error(actual: Tensor, truth: Tensor) -> float:
    """Return the maximum error, inf if only one of the two is infinite or NaN somewhere."""
    same = (actual == truth) | (actual.isnan() & truth.isnan())
    error = torch.where(same, 0, (actual - truth).abs())
    return error.nan_to_num(oracle.INF).max().item() if error.numel() else 0.0


def measure(op, backend, shape, dtype, options, seeds) -> dict[str, tuple[float, str]]:
    """Return, for the output and each gradient, the maximum error over the limit, and a message."""
    errors: dict[str, list[tuple[float, float, float]]] = {}
    for seed in seeds:
        inputs, constants = draw(shape, op, dtype, seed)
        if options.get("similarity") != "per-head":
            del inputs["tau"]

        def by_oracle(x, c, reorder=0):
            return run_oracle(op, shape, x, c, options, reorder)

        def by_package(x, c):
            return run_package(backend, op, shape, x, c, options)

        actual = results(by_package, inputs, constants, dtype, dtype, seed)
        truth = results(by_oracle, inputs, constants, torch.float64, dtype, seed)
        references = [
            results(partial(by_oracle, reorder=n), inputs, constants, dtype, dtype, seed) for n in range(ORDERS[dtype])
        ]
        for name, true in truth.items():
            assert not true.isnan().any()
            size = true[true.isfinite()].abs().max().item() if true.isfinite().any() else 0.0
            allowance = max((max_error(reference[name], true) for reference in references), default=0.0)
            errors.setdefault(name, []).append((max_error(actual[name], true), allowance, size))
    report = {}
    for name, rows in errors.items():
        error, allowance, size = (max(column) for column in zip(*rows, strict=True))
        limit = 1e-10 * max(1, size) if dtype == torch.float64 else 2 * allowance + torch.finfo(dtype).eps * size
        # A reference that overflows allows any error, but no overflow.
        ratio = oracle.INF if error == oracle.INF else error / limit if error else 0.0
        report[name] = ratio, f"error {error:.3g} > {limit:.3g} (reference {allowance:.3g}, max {size:.3g})"
    return report


def compare(op, backend, shape, dtype, options):
    """Check a backend: 1e-10 in float64, else max error <= 2 x the reference's + eps x max|truth| (the 2x rule).

    The reference is the oracle computed in dtype. Its error may be small by chance where sums cancel: it is the maximum
    over a few orders of the sums, and both errors are maxima over a few draws of the inputs. If the limit is exceeded,
    they are measured again over MORE times the draws.
    """
    report = {}
    for draws in (DRAWS[dtype], MORE * DRAWS[dtype]):
        report = measure(op, backend, shape, dtype, options, range(draws))
        if all(ratio <= 1 for ratio, _ in report.values()) or dtype == torch.float64:
            break
    exceeding = {name: message for name, (ratio, message) in report.items() if ratio > 1}
    assert not exceeding, exceeding
