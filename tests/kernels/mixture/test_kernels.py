"""Compare the mixture kernels with the oracle by the 2x rule.

Without a GPU they run under Triton's interpreter in fp32 and fp16, on one in bf16, fp16 and fp32.
"""

import itertools

import pytest
import torch
import torch._dynamo.testing

from tests.support import oracle

pytest.importorskip("triton")

from mgk._core.calls import MixtureCall, Packed
from mgk.backends import triton
from mgk.kernels.mixture import launch
from mgk.kernels.mixture.block_config import BlockConfig

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])
pytestmark = [pytest.mark.gpu] if GPU else []
BLOCKS = launch.select_block


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several tiles in each direction at the lengths of the tests; on a GPU the sizes that users get. No call is small:
    the tests are for the kernels that large ones take."""
    monkeypatch.setattr(launch, "_small_pairs", 0)
    if not GPU:
        monkeypatch.setattr(
            launch,
            "_select_block",
            lambda key, *_: (
                BlockConfig(32, 16, 4, 1)
                if key.pass_ in ("dkdv", "dv")
                else BlockConfig(16, 32, 4, 1, operand_in_registers=True)
            ),
        )


def case(
    variant="smgk", B=1, H=1, Hk=1, M=2, L=37, S=37, D=16, E=16, std=1.0, prior=True, seed=0, Hv=None, shift_std=0.7,
    prior_std=1.0, **options
):  # fmt: skip
    """Return the float64 tensors of a call by argument name, and the options that are not tensors."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        """Draw uniform numbers of variance 1: without outliers, the maximal error varies little between draws."""
        return 12**0.5 * (torch.rand(*shape, generator=g, dtype=torch.float64) - 0.5)

    leaves = {"query": std * randn(B, H, L, D), "value": randn(B, Hv or Hk, S, E)}
    leaves["keys"] = std * (randn(B, Hk, S, D) if variant == "smgk" else randn(B, Hk, M, S, D))
    if variant == "smgk":
        leaves["shift"] = shift_std * randn(Hk, M, D)
    if prior:
        shape = prior if isinstance(prior, tuple) else (1, Hk, M, 1)
        leaves["log_prior"] = torch.log_softmax(prior_std * randn(*shape), 2)
    for name, shape in (("scale", options.pop("scale_shape", None)), ("tau", options.pop("tau_shape", None))):
        if shape:
            leaves[name] = 0.2 + torch.rand(*shape, generator=g, dtype=torch.float64)
    if uneven := options.pop("uneven", None):
        # Scale the later rows of the last head: some tiles are then out of the range of the fast form.
        leaves["query"][:, -1, L // 2 :] *= uneven
    if padding := options.pop("padding", None):
        # Valid keys of each batch entry, as (start, end).
        options["attn_mask"] = torch.stack([(torch.arange(S) >= a) & (torch.arange(S) < b) for a, b in padding])
        options["attn_mask"] = options["attn_mask"].view(B, 1, 1, S)
    mask = options.pop("mask_shape", None)
    if mask and options.pop("bool_mask", False):
        options["attn_mask"] = torch.rand(*mask, generator=g) > 0.3
    elif mask:
        leaves["attn_mask"] = randn(*mask)
    return leaves, options


def truth(leaves, dtype, lengths=None, **options):
    """Return the oracle's output and lse. lengths: queries and keys of packed sequences, computed one by one."""
    if lengths is None:
        return _truth(leaves, dtype, **options)
    pieces = []
    for (q_begin, q_end), (k_begin, k_end) in zip(*map(bounds, zip(*lengths, strict=True)), strict=True):
        bounds_by_name = {"query": (q_begin, q_end), "keys": (k_begin, k_end), "value": (k_begin, k_end)}
        part = {
            name: t[..., slice(*bounds_by_name[name]), :] if name in bounds_by_name else t for name, t in leaves.items()
        }
        pieces.append(_truth(part, dtype, **options))
    return tuple(torch.cat(parts, 2) for parts in zip(*pieces, strict=True))


def bounds(lengths):
    ends = list(itertools.accumulate(lengths, initial=0))
    return list(itertools.pairwise(ends))


def _truth(leaves, dtype, causal=None, hard=False, attn_mask=None, reverse=False):
    x = {name: t.to(dtype) for name, t in leaves.items()}
    if reverse:
        # Reverse the order of the sums over features.
        x |= {name: x[name].flip(-1) for name in ("query", "keys", "shift") if name in x}
    keys = x["keys"]
    if "shift" in x:
        keys = keys.unsqueeze(2) + x["shift"].unsqueeze(-2)
    tau = x.get("tau", 1.0)
    mask = x.get("attn_mask", attn_mask)
    out, _, lse = oracle.mixture(
        x["query"],
        keys,
        x["value"],
        log_prior=x.get("log_prior"),
        scale=x.get("scale"),
        tau=tau,
        mask=mask,
        causal=causal,
        hard=hard,
    )
    return out, lse


def make_call(x, causal=None, hard=False, attn_mask=None, dropout_p=0.0, packed=None, lengths=None, return_lse=True):
    attn_mask = x.get("attn_mask", attn_mask)
    if lengths is not None:
        starts = [[0, *itertools.accumulate(n)] for n in zip(*lengths, strict=True)]
        packed = Packed(*(torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in starts), None, None)
    return MixtureCall(
        query=x["query"], keys=x["keys"], value=x["value"], shift=x.get("shift"),
        attn_mask=attn_mask if attn_mask is None else attn_mask.to(DEVICE),
        causal=causal, dropout_p=dropout_p, scale=x.get("scale", x["query"].shape[-1] ** -0.5),
        log_prior=x.get("log_prior"), tau=x.get("tau", 1.0),
        hard=hard, packed=packed, return_weights=False, return_lse=return_lse,
    )  # fmt: skip


def gradients(function, leaves, weights):
    """Return output, lse and the gradient of every leaf, for a loss that uses both outputs."""
    x = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    out, lse = function(x)
    finite = torch.isfinite(lse)
    loss = (out * weights[0].to(out)).sum() + (torch.where(finite, lse, 0) * weights[1].to(lse)).sum()
    grads = torch.autograd.grad(loss, list(x.values()), allow_unused=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(x, grads, strict=True))}


def measure(leaves, options, dtype, yardstick=True):
    """Return by name of output, lse and gradient: our maximal error, the oracle's in `dtype`, and the largest value.

    The oracle's error is the larger of two, one with reversed features, which changes the order of its sums.
    """
    rounded = {name: t.to(dtype).double() for name, t in leaves.items()}
    out, lse = truth(rounded, torch.float64, **options)
    g = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=g).to(dtype), 0.3 * torch.randn(lse.shape, generator=g).to(dtype)
    exact = gradients(lambda x: truth(x, torch.float64, **options), rounded, weights)
    half = {n: t.to(dtype) for n, t in rounded.items()}
    rough = (
        [gradients(lambda x, n=n: truth(x, dtype, reverse=n, **options), half, weights) for n in (False, True)]
        if yardstick
        else []
    )

    def ours(x):
        call = make_call(x, **options)
        assert triton.mixture_unsupported_reason(call) is None
        return triton.run_mixture(call)[:2]

    got = gradients(ours, {n: t.to(DEVICE, dtype) for n, t in rounded.items()}, weights)
    report = {}
    for name, want in exact.items():
        if want is None:
            assert got[name] is None or not got[name].any(), name
            continue
        finite = torch.isfinite(want)
        assert torch.equal(torch.isfinite(got[name].cpu()), finite), f"{name}: not finite"
        distances = [(x[name].cpu().double() - want)[finite].abs() for x in (got, *rough)]
        error, *oracle_errors = (d.max().item() if d.numel() else 0.0 for d in distances)
        report[name] = error, max(oracle_errors, default=0.0), want[finite].abs().max().item() if finite.any() else 0.0
    return report


def check(dtype, **shape):
    """Check the 2x rule: the maximal error is at most twice the oracle's in that dtype, plus one rounding.

    Both are maxima over a few draws and, if the rule fails, over more: few roundings of the oracle may be exact.
    """
    rows = {}
    for seeds in (range(2), range(2, 16)):
        for seed in seeds:
            leaves, options = case(seed=seed, **shape)
            for name, row in measure(leaves, options, dtype).items():
                rows.setdefault(name, []).append(row)
        exceeding = {}
        for name, row in rows.items():
            error, rough, size = map(max, zip(*row, strict=True))
            if not error <= 2 * rough + torch.finfo(dtype).eps * size:
                exceeding[name] = f"error {error:.3e}, the oracle's {rough:.3e}, size {size:.3e}"
        if not exceeding:
            return
    assert not exceeding, exceeding


CASES = {
    "smgk": {},
    "smgk-causal-gqa": {"H": 4, "Hk": 2, "causal": "top-left", "D": 24, "E": 20, "B": 2},
    "smgk-cross": {"L": 21, "S": 67, "prior": (2, 1, 2, 67), "B": 2},
    "smgk-bottom-right": {"L": 21, "S": 50, "causal": "bottom-right"},
    "smgk-empty-rows": {"L": 50, "S": 21, "causal": "bottom-right"},
    "smgk-m1": {"M": 1},
    "smgk-m4-tau-scale": {"M": 4, "H": 2, "Hk": 2, "tau_shape": (2,), "scale_shape": (1, 2, 1, 1)},
    "smgk-unequal": {"M": 3, "H": 2, "Hk": 2, "tau_shape": (2,), "scale_shape": (1, 2, 3, 1), "causal": "top-left"},
    "smgk-hard": {"hard": True, "prior": False, "causal": "top-left"},
    "smgk-hard-m3-unequal": {"hard": True, "prior": False, "M": 3, "scale_shape": (1, 1, 3, 1)},
    "smgk-key-padding": {"B": 2, "mask_shape": (2, 1, 1, 37), "bool_mask": True},
    # Key tiles of 128 masked keys: at the end, at the start, all of them.
    "smgk-padded-tiles": {"B": 3, "L": 9, "S": 270, "padding": ((0, 120), (128, 260), (3, 3))},
    "mgk-padded-tiles": {
        "variant": "mgk",
        "B": 2,
        "L": 140,
        "S": 140,
        "padding": ((0, 128), (128, 129)),
        "causal": "top-left",
    },
    "smgk-key-bias": {"B": 2, "mask_shape": (2, 1, 1, 37)},
    "smgk-bool": {"B": 2, "H": 4, "Hk": 2, "mask_shape": (1, 4, 37, 37), "bool_mask": True, "causal": "top-left"},
    "smgk-bias": {"B": 2, "H": 4, "Hk": 2, "mask_shape": (1, 4, 37, 37), "causal": "top-left"},
    "smgk-packed": {"H": 2, "L": 58, "S": 58, "causal": "top-left", "lengths": ((20, 20), (1, 1), (37, 37))},
    "smgk-packed-cross": {"H": 2, "Hk": 2, "L": 44, "S": 58, "lengths": ((20, 37), (23, 1), (1, 20))},
    "smgk-packed-hard": {"L": 44, "S": 58, "hard": True, "prior": False, "lengths": ((20, 21), (24, 37))},
    "mgk-packed": {
        "variant": "mgk",
        "L": 44,
        "S": 58,
        "causal": "bottom-right",
        "lengths": ((20, 37), (23, 1), (1, 20)),
    },
    "mgk": {"variant": "mgk"},
    "mgk-causal-gqa": {"variant": "mgk", "H": 4, "Hk": 2, "causal": "top-left", "D": 24, "E": 20, "L": 40, "S": 50},
    "mgk-m3-unequal-tau": {"variant": "mgk", "M": 3, "H": 2, "Hk": 2, "tau_shape": (2,), "scale_shape": (1, 2, 3, 1)},
    "mgk-scale-tau": {
        "variant": "mgk",
        "H": 2,
        "Hk": 2,
        "tau_shape": (2,),
        "scale_shape": (1, 1, 1, 1),
        "prior": (1, 2, 2, 37),
    },
    "mgk-hard": {"variant": "mgk", "hard": True, "prior": False},
    "mgk-wide": {"variant": "mgk", "D": 72, "E": 72, "L": 33, "S": 20, "causal": "bottom-right"},
    "mgk-hard-wide": {"variant": "mgk", "hard": True, "prior": False, "D": 72, "E": 16, "L": 20, "S": 33},
    "mgk-hard-bias": {
        "variant": "mgk",
        "hard": True,
        "prior": False,
        "mask_shape": (1, 1, 37, 37),
        "causal": "top-left",
    },
    "mgk-bool-padding": {"variant": "mgk", "B": 2, "mask_shape": (2, 1, 1, 37), "bool_mask": True},
}

if GPU:
    # The largest supported sizes, limited by registers and shared memory.
    CASES |= {
        "smgk-m4": {"M": 4, "H": 2, "Hk": 2, "L": 130, "S": 130, "D": 32, "causal": "top-left"},
        "smgk-m8": {"M": 8, "L": 20, "S": 33},
        "smgk-d256": {"D": 256, "E": 256, "L": 20, "S": 33},
        "mgk-m8": {"variant": "mgk", "M": 8, "L": 20, "S": 33},
        "mgk-d256": {"variant": "mgk", "D": 256, "E": 256, "L": 20, "S": 33},
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_two_times_rule(name, dtype, poisoned):
    check(dtype, **CASES[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_key_whose_factors_underflow_keeps_its_weight(dtype, monkeypatch):
    monkeypatch.setattr(launch, "BOUNDED", DTYPES if dtype != torch.float16 else ())
    n, D = 4096 if GPU else 512, 32
    e = torch.eye(D, dtype=torch.float64)
    query = 60 * e[0].view(1, 1, 1, D)
    near = 60 * e[0] + 55.3 * e[1]
    keys = torch.cat([near[None], (-0.01 * e[0]).expand(n, D)]).view(1, 1, n + 1, D)
    x = {"query": query, "keys": keys, "shift": torch.stack([4 * e[0], -4 * e[0]])[None]}
    x["value"] = torch.zeros(1, 1, n + 1, 16, dtype=torch.float64)
    x["value"][0, 0, 0] = 1.0
    rounded = {name: t.to(dtype).double() for name, t in x.items()}
    want, _ = truth(rounded, torch.float64)
    got = triton.run_mixture(make_call({name: t.to(DEVICE, dtype) for name, t in x.items()}))[0]
    assert 0.01 < want[0, 0, 0, 0] < 1 or dtype != torch.float32
    torch.testing.assert_close(got.cpu().double(), want, atol=0.02, rtol=0.02)


def test_dropout_drops_weights():
    """With the identity as values, the output is the dropped weights. The same seed gives the expected gradients."""
    leaves, _ = case(L=24, S=32, H=2, Hk=1, E=32)
    x = {name: t.to(DEVICE, torch.float32).requires_grad_() for name, t in leaves.items()}
    eye = {**x, "value": torch.eye(32, device=DEVICE).view(1, 1, 32, 32)}
    plain = triton.run_mixture(make_call(eye))[0]
    torch.manual_seed(3)
    dropped = triton.run_mixture(make_call(eye, dropout_p=0.25))[0]
    keep = dropped != 0
    torch.testing.assert_close(dropped, torch.where(keep, plain / 0.75, 0), atol=1e-6, rtol=1e-5)
    assert 0.7 < keep.float().mean() < 0.8
    torch.manual_seed(3)
    out = triton.run_mixture(make_call(x, dropout_p=0.25))[0]
    keys = x["keys"].unsqueeze(2) + x["shift"].unsqueeze(-2)
    weights = oracle.mixture(x["query"].cpu(), keys.cpu(), x["value"].cpu(), log_prior=x["log_prior"].cpu())[1]
    expected = (weights.to(DEVICE) * keep / 0.75) @ x["value"]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    g = torch.randn_like(out)
    for name, a, b in zip(
        x,
        torch.autograd.grad(out, list(x.values()), g),
        torch.autograd.grad(expected, list(x.values()), g),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
@pytest.mark.parametrize("variant", ["smgk", "mgk"])
def test_results_are_bitwise_reproducible(variant, hard):
    leaves, options = case(variant, L=65, S=65, H=4, Hk=2, causal="top-left", hard=hard, prior=not hard)
    x = {name: t.to(DEVICE, DTYPES[-1]) for name, t in leaves.items()}
    weights = torch.randn(1, 4, 65, 16), torch.randn(1, 4, 65)
    repeats = range(1000 if GPU else 2)
    runs = [gradients(lambda x: triton.run_mixture(make_call(x, **options))[:2], x, weights) for _ in repeats]
    for run in runs[1:]:
        for name, t in run.items():
            assert torch.equal(t, runs[0][name]), name


def test_hard_ties_split_the_gradient_evenly():
    """Equal components get half of the gradient each, as in the gradient of a maximum."""
    for variant in ("smgk", "mgk"):
        leaves, options = case(variant, hard=True, prior=False, causal="top-left")
        if variant == "smgk":
            leaves["shift"][:, 1] = leaves["shift"][:, 0]
        else:
            leaves["keys"][:, :, 1] = leaves["keys"][:, :, 0]
        for name, (error, _, size) in measure(leaves, options, torch.float32, yardstick=False).items():
            assert error <= 1e-5 * max(size, 1.0), f"{variant} {name}: {error:.3e} of {size:.3e}"
