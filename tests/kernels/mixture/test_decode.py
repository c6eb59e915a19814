"""Test the decode kernels: few queries against many keys, by the 2x rule."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import mgk
from mgk.backends import MIXTURE_BACKENDS, triton
from mgk.kernels.mixture import launch as triton_launch
from mgk.kernels.mixture import ops
from mgk.models import DecoderConfig, LanguageModel
from mgk.models.generation import DecodingStep
from tests.kernels.mixture.test_kernels import DEVICE, DTYPES, GPU, case, make_call, truth

pytestmark = [pytest.mark.gpu] if GPU else []

CASES = {
    "shifted": {"S": 300, "B": 2},
    "bottom-right-row": {"S": 70, "causal": "bottom-right", "D": 24, "E": 20, "tau_shape": (1,)},
    "gqa-bottom-right": {"H": 4, "Hk": 2, "L": 3, "S": 290, "causal": "bottom-right", "D": 24, "E": 20, "M": 3},
    "top-left": {"L": 5, "S": 70, "causal": "top-left"},
    "hard": {"S": 300, "hard": True, "prior": False},
    "unequal": {"S": 150, "M": 3, "scale_shape": (1, 1, 3, 1), "tau_shape": (1,), "prior": (1, 1, 3, 150)},
    "padding": {"B": 3, "S": 300, "padding": ((0, 20), (290, 300), (4, 4))},
    "mask": {"H": 2, "L": 4, "S": 140, "mask_shape": (1, 2, 4, 140), "bool_mask": True},
    "bias": {"H": 2, "L": 4, "S": 140, "mask_shape": (1, 2, 4, 140)},
    "independent": {"variant": "mgk", "S": 300, "H": 2, "Hk": 2},
    "independent-hard": {"variant": "mgk", "B": 4, "L": 4, "S": 200, "hard": True, "prior": False},
    # The number of keys per block is rounded to a power of two.
    "independent-m5": {"variant": "mgk", "L": 4, "S": 200, "M": 5, "D": 32, "E": 32},
    "large": {"S": 300, "std": 20.0},
}
# One query per head, heads that share keys. The last case has too many heads for `decode_row`.
GROUPS = {
    "two": {"H": 4, "Hk": 2, "S": 300, "B": 2},
    "two-unequal": {"H": 4, "Hk": 2, "S": 150, "M": 3, "D": 24, "E": 20, "scale_shape": (1, 2, 3, 1),
                    "tau_shape": (2,), "prior": (1, 2, 3, 150), "causal": "bottom-right"},
    "three-hard": {"H": 3, "Hk": 1, "S": 300, "hard": True, "prior": False},
    "four-independent": {"variant": "mgk", "H": 8, "Hk": 2, "S": 300, "D": 32, "E": 64},
    "four-padding": {"H": 4, "Hk": 1, "B": 3, "S": 300, "padding": ((0, 20), (290, 300), (4, 4))},
    "two-large": {"H": 2, "Hk": 1, "S": 300, "std": 20.0},
    "eight": {"H": 8, "Hk": 1, "S": 300},
}  # fmt: skip


def splits(monkeypatch, *kernels):
    """Return a list that receives the number of splits of each launch of these kernels."""
    counts = []

    def launch(step, *args):
        if step.kernel.__name__ in (kernels or ("decode_split", "decode_row")):
            counts.append(step.grid[0])
        original(step, *args)

    original = triton_launch.launch
    monkeypatch.setattr(triton_launch, "launch", launch)
    return counts


# bf16 is loaded in pairs if rows are multiples of 64 bytes; those of the last case are not.
PAIRS = {
    "pairs": {"S": 300, "B": 2, "D": 32, "E": 64},
    "pairs-padded": {"S": 290, "D": 96, "E": 32, "M": 3, "prior": (1, 1, 3, 290)},
    "pairs-independent": {"variant": "mgk", "S": 300, "D": 64, "E": 64},
    "pairs-group": {"S": 300, "H": 4, "Hk": 2, "D": 64, "E": 32},
    "not-in-pairs": {"S": 300, "D": 24, "E": 64},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_two_times_rule(name, dtype, monkeypatch, poisoned):
    check(CASES[name], dtype, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_two_times_rule_of_heads_that_share_keys(name, dtype, monkeypatch, poisoned):
    check(GROUPS[name], dtype, monkeypatch, "decode_split" if name == "eight" else "decode_row")


@pytest.mark.parametrize("name", PAIRS)
def test_two_times_rule_of_loads_in_pairs(name, monkeypatch, poisoned):
    dtypes, original = [], triton_launch.view_as_int32_pairs

    def record(*tensors):
        dtypes.extend(x.dtype for x in original(*tensors))
        return original(*tensors)

    monkeypatch.setattr(triton_launch, "view_as_int32_pairs", record)
    check(PAIRS[name], torch.bfloat16, monkeypatch)
    assert set(dtypes) == {torch.int32 if name.startswith("pairs") else torch.bfloat16}


def test_odd_width_is_not_loaded_in_pairs():
    """Even if the rows start at multiples of 64 bytes."""
    keys, value = (torch.randn(1, 2, 40, 32, device=DEVICE).bfloat16()[..., :31] for _ in range(2))
    query, shift = torch.randn(1, 2, 1, 31, device=DEVICE).bfloat16(), torch.randn(2, 2, 31, device=DEVICE)
    with torch.no_grad():
        got = mgk.smgk_attention(query, keys, value, shift, backend="triton")
        want = mgk.smgk_attention(query, keys.contiguous(), value.contiguous(), shift, backend="triton")
    assert torch.equal(got, want)


def check(shape, dtype, monkeypatch, *kernels):
    monkeypatch.setattr(triton_launch, "_num_sms", lambda device: 4)
    counts = splits(monkeypatch, *kernels)
    errors = {"out": [], "lse": []}
    for seed in range(4):
        leaves, options = case(**{"L": 1, **shape}, seed=seed)
        rounded = {n: t.to(dtype).double() for n, t in leaves.items()}
        exact = truth(rounded, torch.float64, **options)
        rough = truth({n: t.to(dtype) for n, t in rounded.items()}, dtype, **options)
        got = triton.run_mixture(make_call({n: t.to(DEVICE, dtype) for n, t in rounded.items()}, **options))
        for key, x, y, want in zip(errors, got, rough, exact, strict=False):
            finite = torch.isfinite(want)
            assert torch.equal(torch.isfinite(x.cpu()), finite), key
            ours, theirs, size = (
                z.abs().max().item() if z.numel() else 0.0
                for z in ((x.cpu().double() - want)[finite], (y.double() - want)[finite], want[finite])
            )
            errors[key].append((ours, theirs, size))
    for key, rows in errors.items():
        ours, theirs, size = map(max, zip(*rows, strict=True))
        assert ours <= 2 * theirs + torch.finfo(dtype).eps * size, f"{key}: {ours:.3e}, the oracle's {theirs:.3e}"
    assert len(counts) == 4
    assert shape["S"] < 290 or min(counts) > 1, "the keys were not split"


def test_call_with_gradients_does_not_decode(monkeypatch):
    counts = splits(monkeypatch)
    leaves, _ = case(L=1, S=40)
    x = {name: t.to(DEVICE, torch.float32) for name, t in leaves.items()}
    plain = triton.run_mixture(make_call(x))[0]
    assert len(counts) == 1
    x["shift"].requires_grad_()
    out = triton.run_mixture(make_call(x))[0]
    assert len(counts) == 1
    assert torch.autograd.grad(out.sum(), x["shift"])[0].any()
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)


def pad_keys(x, axis, padding=57):
    """Pad x along the keys with NaN (a mask: True), which must not be read."""
    if x is None or x.shape[axis] == 1:
        return x
    shape = list(x.shape)
    shape[axis] = padding
    unusable = x.new_ones(shape) if x.dtype == torch.bool else x.new_full(shape, torch.nan)
    return torch.cat([x, unusable], axis)


@pytest.mark.parametrize(
    "name", ["shifted", "bottom-right-row", "gqa-bottom-right", "unequal", "mask", "independent", "two-unequal"]
)
def test_keys_beyond_num_valid_keys_are_not_read(name, monkeypatch, poisoned):
    monkeypatch.setattr(triton_launch, "_num_sms", lambda device: 4)
    leaves, options = case(**{"L": 1, **(CASES | GROUPS)[name]})
    x = {key: t.to(DEVICE, torch.float32) for key, t in leaves.items()}
    call = make_call(x, **options)
    expected = triton.run_mixture(call)[:2]
    length = call.value.shape[2]
    longer = replace(
        call,
        keys=pad_keys(call.keys, -2),
        value=pad_keys(call.value, 2),
        log_prior=pad_keys(call.log_prior, 3),
        attn_mask=pad_keys(call.attn_mask, 3),
        num_valid_keys=torch.tensor([length], dtype=torch.int32, device=DEVICE),
    )
    assert triton.mixture_unsupported_reason(longer) is None
    for got, want in zip(triton.run_mixture(longer), expected, strict=False):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    unpadded = replace(longer, keys=call.keys, value=call.value, log_prior=call.log_prior, attn_mask=call.attn_mask)
    torch.testing.assert_close(
        triton.run_mixture(unpadded.with_valid_keys_mask())[0], expected[0], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("variant, kv_heads", [("softmax", None), ("smgk", None), ("mgk", 2), ("mlk", None)])
def test_decoding_step_passes_num_valid_keys_instead_of_a_mask(variant, kv_heads, monkeypatch):
    calls, run = [], triton.run_mixture

    def record(call):
        calls.append(call)
        return run(call)

    monkeypatch.setitem(MIXTURE_BACKENDS, "triton", MIXTURE_BACKENDS["triton"]._replace(run=record))
    config = DecoderConfig(20, 9, 16, 16, 1, 4, kv_heads, 16, variant)
    model = LanguageModel(config).to(DEVICE).eval()
    text = torch.randint(20, (2, 9), device=DEVICE)
    with torch.no_grad():
        caches, reference_caches = (model.make_caches(2, 9) for _ in range(2))
        for prefilled in (caches, reference_caches):
            model.hidden(text[:, :6], caches=prefilled)
        calls.clear()
        step = DecodingStep(model, caches)
        for n in range(6, 9):
            want = model(text[:, n : n + 1], caches=reference_caches)[:, 0]
            torch.testing.assert_close(step(text[:, n : n + 1]), want, atol=1e-4, rtol=1e-4)
    counted = [call for call in calls if call.num_valid_keys is not None]
    assert counted or variant == "mlk"
    assert all(call.attn_mask is None and call.keys.shape[-2] == 9 for call in counted)


def test_operator_is_registered():
    leaves, _ = case(L=1)
    x = {name: t.to(DEVICE, torch.float32) for name, t in leaves.items()}
    arguments = (x["query"], x["keys"], x["value"], x["shift"], x["log_prior"], *(None,) * 3, 0.25, 1.0, 0.0, 0, False)
    torch.library.opcheck(ops.decode_op, arguments, test_utils=("test_schema", "test_faketensor"))
