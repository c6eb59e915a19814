"""Compare the fused kernels, with inputs and gradients of any strides, with the oracle by the 2x rule."""

import pytest
import torch

pytest.importorskip("triton")

import mgk
from tests.backends.test_memory_layouts import LAYOUTS, OFFSETS, PER_HEAD, PLACED, compare  # noqa: F401  (a fixture)
from tests.kernels.linear.test_linear import small_blocks as small_linear_blocks  # noqa: F401  (for every test)
from tests.kernels.mixture.test_em_counts import compare as compare_counts
from tests.kernels.mixture.test_kernels import DEVICE, GPU, case, make_call, small_blocks  # noqa: F401  (for every test)
from tests.support.operator_cases import Shape

pytestmark = [pytest.mark.gpu] if GPU else []

F32 = torch.float32
# Rows of the second are multiples of 16 bytes, which the bulk copy engine of a GPU reads.
SHAPES = {
    "mgk": Shape(H=2, Hk=1, L=5, S=6, D=5, E=4, mask="bool", prior="position", scale="component", lse=True),
    "smgk": Shape(L=5, S=6, D=16, E=8, mask="float", prior="batch"),
    "mlk": Shape(H=2, Hk=1, L=5, S=6, D=4, E=5, mask="key", prior="position"),
    "smlk": Shape(L=18, S=18, D=5, E=4, mask="key", prior="batch", causal="top-left"),
}


@pytest.mark.parametrize("layout", [*PLACED, "expanded-first"])
@pytest.mark.parametrize("op", SHAPES)
def test_two_times_rule(op, layout, compare, poisoned):  # noqa: F811
    """Lay out all arguments and the gradients at once."""
    options = {"feature_map": "elu"} if op.endswith("mlk") else PER_HEAD
    compare(op, "triton", SHAPES[op], F32, options, layout, device=DEVICE)


@pytest.mark.parametrize("layout", ["stepped", "offset"])
@pytest.mark.parametrize("op", ["smgk", "smlk"])
def test_offsets_of_packed_sequences(op, layout, compare, poisoned):  # noqa: F811
    shape = Shape(B=1, L=6, S=6, D=5, E=4, packed=((2, 4), (2, 4)), causal="top-left")
    options = {"feature_map": "elu"} if op == "smlk" else PER_HEAD
    compare(op, "triton", shape, F32, options, layout, OFFSETS, DEVICE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("op", ["mgk", "smgk"])
def test_decoding(op, queries, layout):
    """Attend with few queries and no gradients, by the kernels for one query and for several."""
    x = case(op, B=2, H=2, Hk=1, L=queries, S=40, D=6, E=5, prior=(2, 1, 2, 40))[0]
    strided = {name: LAYOUTS[layout](t.to(DEVICE, F32)) for name, t in x.items()}
    contiguous = {name: tensor.contiguous() for name, tensor in strided.items()}
    torch.testing.assert_close(decoded(op, strided), decoded(op, contiguous))


def decoded(op, x):
    keys = (x["keys"], x["value"], x["shift"]) if op == "smgk" else (x["keys"], x["value"])
    with torch.no_grad():
        return getattr(mgk, f"{op}_attention")(x["query"], *keys, log_prior=x["log_prior"], backend="triton")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_token_of_linear_attention(layout):
    """Attend by the kernel for one token, with the state laid out too."""
    shapes = {"query": (2, 2, 1, 5), "keys": (2, 1, 2, 1, 5), "value": (2, 1, 1, 4), "prior": (1, 2, 1)}
    shapes |= {"numerator": (2, 1, 5, 4), "denominator": (2, 1, 5)}
    strided = {name: LAYOUTS[layout](torch.rand(shape, device=DEVICE)) for name, shape in shapes.items()}
    outputs = []
    for x in (strided, {name: t.contiguous() for name, t in strided.items()}):
        options = {"is_causal": True, "return_state": True, "log_prior": x["prior"]}
        state = (x["numerator"], x["denominator"])
        with torch.no_grad():
            out, last = mgk.mlk_attention(
                x["query"], x["keys"], x["value"], initial_state=state, backend="triton", **options
            )
        outputs.append((out, *last))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("layout", PLACED)
@pytest.mark.parametrize("variant", ["mgk", "smgk"])
def test_counts_of_components(variant, layout, poisoned):
    leaves, options = case(
        variant, B=2, H=2, Hk=1, L=9, S=7, D=5, prior=(2, 1, 2, 7), mask_shape=(2, 2, 9, 7), bool_mask=True
    )
    options["attn_mask"] = PLACED[layout](options["attn_mask"])
    compare_counts(make_call({n: PLACED[layout](t.to(DEVICE, F32)) for n, t in leaves.items()}, **options))
