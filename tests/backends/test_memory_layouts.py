"""Compare every backend, with inputs and gradients of any strides, with the oracle on contiguous copies."""

import pytest
import torch

import mgk
from mgk.backends import cpu_flash
from tests.support import operator_cases
from tests.support.exact import F64, close, randn
from tests.support.operator_cases import Shape


def outside(x):
    """Return the number that fills memory between and around the elements of x."""
    return torch.nan if x.is_floating_point() else 0


def in_order(x, dims):
    """Return x with its dimensions in this order in memory, the last one innermost."""
    back = sorted(range(x.dim()), key=dims.__getitem__)
    return x.permute(dims).contiguous().permute(back)


def transposed(x):
    dims = list(range(x.dim()))
    return in_order(x, [*dims[:-2], *dims[:-3:-1]])


def heads_last(x):
    """Return x in the channels-last format of its 4 or 5 dimensions."""
    heads = 1 if x.dim() >= 4 else 0
    return in_order(x, [dim for dim in range(x.dim()) if dim != heads] + [heads])


def projected(x):
    """Return x with positions before heads in memory, the layout of a linear layer's output."""
    dims = list(range(x.dim()))
    return in_order(x, [*dims[:1], *dims[-2:-1], *dims[1:-2], *dims[-1:]] if x.dim() >= 4 else dims)


def reversed_order(x):
    return in_order(x, list(range(x.dim()))[::-1])


def stepped(x):
    """Return x as every second element of the last dimension of a longer tensor."""
    longer = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), outside(x))
    longer[..., ::2] = x
    return longer[..., ::2]


def offset(x):
    """Return x as the middle of a tensor that is larger in every dimension."""
    larger = x.new_full([n + 3 for n in x.shape], outside(x))
    middle = larger[(slice(1, -2),) * x.dim()]
    return middle.copy_(x)


def expanded(*dims):
    def layout(x):
        first = x
        for dim in dims or range(x.dim()):
            first = first.narrow(dim, 0, 1)
        return first.expand_as(x)

    return layout


# Layouts that hold any values, and those with a stride of 0, which hold equal ones.
PLACED = {
    "transposed": transposed,
    "heads-last": heads_last,
    "projected": projected,
    "reversed": reversed_order,
    "stepped": stepped,
    "offset": offset,
}
EXPANDED = {
    "expanded-first": expanded(0),
    "expanded-last": expanded(-1),
    "zero-stride": expanded(),
}
LAYOUTS = PLACED | EXPANDED
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")


class Relaid(torch.autograd.Function):
    """Lay out a tensor; its gradient is passed on unchanged."""

    @staticmethod
    def forward(ctx, x, layout):
        return layout(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class RelaidGradient(torch.autograd.Function):
    """Lay out the gradient of a tensor."""

    @staticmethod
    def forward(ctx, x, layout):
        ctx.layout = layout
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.layout(grad), None


@pytest.fixture
def compare(monkeypatch):
    """Run `operator_cases.compare` with the named arguments laid out; without names all of them, "grad" included."""

    def run(op, backend, shape, dtype, options, name, arguments=None, device="cpu"):
        draw, run_oracle, run_package = operator_cases.draw, operator_cases.run_oracle, operator_cases.run_package
        layout = LAYOUTS[name]

        def chosen(argument):
            # Offsets of packed sequences have one dimension and are not equal.
            fits = argument not in OFFSETS or name in ("stepped", "offset")
            return fits and (arguments is None or argument in arguments)

        def values(x):
            return layout(x).contiguous()

        def drawn(*args):
            inputs, constants = draw(*args)
            if backend == "sdpa" and "attn_mask" in inputs:
                constants["attn_mask"] = inputs.pop("attn_mask")
            return tuple({n: values(x) if chosen(n) else x for n, x in group.items()} for group in (inputs, constants))

        def with_gradient(results, gradient_layout):
            if not chosen("grad"):
                return results
            return tuple(x if x is None else RelaidGradient.apply(x, gradient_layout) for x in results)

        def by_oracle(*args):
            return with_gradient(run_oracle(*args), values)

        def by_package(backend, op, shape, inputs, constants, options):
            relaid = [
                {n: Relaid.apply(x.to(device), layout) if chosen(n) else x.to(device) for n, x in group.items()}
                for group in (inputs, constants)
            ]
            results = with_gradient(run_package(backend, op, shape, *relaid, options), layout)
            return tuple(x if x is None else x.cpu() for x in results)

        with monkeypatch.context() as patch:
            # A misread element is wrong in the first draw.
            patch.setitem(operator_cases.DRAWS, dtype, 1)
            patch.setattr(operator_cases, "draw", drawn)
            patch.setattr(operator_cases, "run_oracle", by_oracle)
            patch.setattr(operator_cases, "run_package", by_package)
            operator_cases.compare(op, backend, shape, dtype, options)

    return run


# Odd and even widths of keys (D) and values (E). The width of sdpa's query and keys, D + 1 or with a scale for each
# component D + 2, needs no padding in the first two.
MIXTURE_SHAPES = {
    "odd": Shape(L=9, S=7, D=5, E=4, M=3, prior="position", lse=True),
    "even": Shape(L=8, S=9, D=4, E=5, mask="bool", prior="batch", scale="component"),
    "odd-values": Shape(H=4, L=6, S=9, D=6, E=9, mask="float", causal="bottom-right", lse=True),
    "packed": Shape(B=1, L=9, S=10, D=7, E=6, packed=((4, 5), (7, 3)), causal="top-left", prior="position"),
}
MIXTURE_ARGUMENTS = {
    "odd": ("query", "keys", "value", "log_prior", "tau", "grad"),
    "even": ("query", "keys", "value", "log_prior", "scale", "tau", "attn_mask", "grad"),
    "odd-values": ("query", "keys", "value", "log_prior", "tau", "attn_mask", "grad"),
    "packed": ("query", "keys", "value", "grad"),
}
PER_HEAD = {"similarity": "per-head", "assignment": "soft"}


def arguments_of(op, names):
    """Return the argument names of an operator: key and shift instead of keys for shifted ones."""
    return tuple(name for n in names for name in (("key", "shift") if n == "keys" and op[0] == "s" else (n,)))


def cases(ops, argument_table):
    return [
        pytest.param(op, shape, argument, id=f"{op}-{shape}-{argument}")
        for op in ops
        for shape, names in argument_table.items()
        for argument in arguments_of(op, names)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op", "shape", "argument"), cases(("mgk", "smgk"), MIXTURE_ARGUMENTS))
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_mixture(backend, op, shape, argument, layout, compare, poisoned):
    compare(op, backend, MIXTURE_SHAPES[shape], F64, PER_HEAD, layout, (argument,))


@pytest.mark.parametrize("layout", ["stepped", "offset"])
@pytest.mark.parametrize("op", ["mgk", "smgk"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_offsets_of_packed_sequences(backend, op, layout, compare, poisoned):
    compare(op, backend, MIXTURE_SHAPES["packed"], F64, PER_HEAD, layout, OFFSETS)


SOFTMAX_SHAPES = {
    "odd": Shape(M=1, L=9, S=7, D=5, E=5, prior=None),
    "even": Shape(M=1, L=8, S=9, D=4, E=4, mask="bool", prior=None),
    "different": Shape(M=1, H=4, L=8, S=9, D=4, E=5, mask="float", prior=None),
}
SOFTMAX_ARGUMENTS = {
    "odd": ("query", "keys", "value", "grad"),
    "even": ("query", "keys", "value", "attn_mask", "grad"),
    "different": ("query", "keys", "value", "attn_mask", "grad"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op", "shape", "argument"), cases(("mgk",), SOFTMAX_ARGUMENTS))
def test_softmax(op, shape, argument, layout, compare, poisoned):
    options = {"similarity": "dot", "assignment": "soft"}
    compare(op, "plain", SOFTMAX_SHAPES[shape], F64, options, layout, (argument,))


LINEAR_SHAPES = {
    "odd": Shape(L=9, S=7, D=5, E=4, M=3, prior="position", mask="key"),
    "even": Shape(H=4, L=70, S=70, D=4, E=5, prior="batch", mask="key", causal="top-left"),
    "packed": Shape(B=1, L=9, S=9, D=3, E=6, packed=((4, 5), (4, 5)), causal="top-left"),
}
LINEAR_ARGUMENTS = {
    "odd": ("query", "keys", "value", "log_prior", "attn_mask", "grad"),
    "even": ("query", "keys", "value", "log_prior", "attn_mask", "grad"),
    "packed": ("query", "keys", "value", "cu_seqlens_q", "grad"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op", "shape", "argument"), cases(("mlk", "smlk"), LINEAR_ARGUMENTS))
@pytest.mark.parametrize("backend", ["eager", "chunked"])
def test_linear(backend, op, shape, argument, layout, compare, poisoned):
    """Compare linear attention; attn_mask of the cases is key_mask here, [B, S]."""
    compare(op, backend, LINEAR_SHAPES[shape], F64, {"feature_map": "elu"}, layout, (argument,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["heads-last", "stepped", "expanded-first"])
@pytest.mark.parametrize("op", ["mgk", "smgk"])
@pytest.mark.parametrize("shape", MIXTURE_SHAPES)
def test_sdpa_by_the_two_times_rule(shape, op, layout, dtype, compare, poisoned):
    """Lay out all arguments at once, in types in which `auto` takes this backend."""
    compare(op, "sdpa", MIXTURE_SHAPES[shape], dtype, PER_HEAD, layout)


@pytest.mark.parametrize("backend", ["factored", "sdpa"])
def test_strides_of_einops_match_contiguous(backend):
    """Attend with the strides of 'b l (d h) -> b h l d' and an odd width, by the backends for CPUs."""
    query, key = (torch.randn(2, 9, 21).view(2, 9, 7, 3).permute(0, 3, 1, 2) for _ in range(2))
    value, shift = torch.randn(2, 3, 9, 4), torch.randn(3, 2, 7)
    assert mgk.explain_backend("smgk_attention", query, key, value, shift).backend == "factored"
    actual = mgk.smgk_attention(query, key, value, shift, backend=backend)
    expected = mgk.smgk_attention(query.contiguous(), key.contiguous(), value, shift, backend=backend)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("layout", PLACED)
@pytest.mark.parametrize("which", range(8))
def test_flash_operators_take_any_strides(which, layout, poisoned):
    """Call the operators themselves, whose inputs a compiler may lay out.

    In order: query, keys, value, mask; for the backward the gradients of output and lse, the output and the lse.
    """
    B, H, M, L, S, F = 2, 3, 2, 9, 7, 6
    value = randn(B, H, S, F).index_fill(-1, torch.tensor([F - 1]), 0)
    tensors = [randn(B, H, L, F), randn(B, H, M, S, F), value, randn(B, H, L, S)]
    options = ("top-left", None, None)
    output, lse = cpu_flash.mixture_forward(*tensors, *options)
    tensors += [randn(B, H, L, F), randn(B, H, L), output, lse]

    def run(query, keys, value, mask, grad_output, grad_lse, output, lse):
        inputs = (query, keys, value, mask, *options)
        return *cpu_flash.mixture_forward(*inputs), *cpu_flash.mixture_backward(
            grad_output, grad_lse, *inputs, output, lse
        )

    expected = run(*tensors)
    tensors[which] = PLACED[layout](tensors[which])
    for actual, reference in zip(run(*tensors), expected, strict=True):
        close(actual, reference)
        assert actual.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("backend", ["eager", "chunked"])
def test_state(backend, is_causal, layout):
    B, H, S, D, E = 2, 3, 7, 5, 4
    query, key, value, shift = randn(B, H, S, D), randn(B, H, S, D), randn(B, H, S, E), randn(H, 2, D)
    numerator, denominator = (LAYOUTS[layout](x) for x in (randn(B, H, D, E), 1 + randn(B, H, D).abs()))
    results = []
    for state in ((numerator, denominator), (numerator.contiguous(), denominator.contiguous())):
        start = tuple(x.detach().requires_grad_() for x in state)
        options = {"is_causal": is_causal, "initial_state": start, "return_state": True, "backend": backend}
        out, last = mgk.smlk_attention(query, key, value, shift, **options)
        loss = out.square().sum() + sum(x.square().sum() for x in last)
        results.append((out, *last, *torch.autograd.grad(loss, start)))
    for strided, contiguous in zip(*results, strict=True):
        close(strided, contiguous)


def components_last(x):
    return in_order(x, [0, 1, 3, 4, 2])


def components_first(x):
    return in_order(x, [2, 0, 1, 3, 4])


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("similarity", ["gaussian", "dot"])
@pytest.mark.parametrize("sizes", [(2, 2, 3, 14, 5), (1, 1, 3, 9, 8), (1, 2, 4, 33, 16), (1, 1, 2, 77, 17)], ids=str)
def test_hard_ties_are_split_evenly_in_any_layout(sizes, similarity, dtype):
    keys = torch.randn(*sizes[:2], 1, *sizes[3:], dtype=dtype).expand(sizes)
    query, value = (torch.randn(*sizes[:2], n, sizes[-1], dtype=dtype) for n in (11, sizes[3]))
    layouts = (torch.Tensor.contiguous, transposed, heads_last, projected, reversed_order, stepped, offset)
    for layout in (*layouts, components_last, components_first):
        equal = layout(keys).requires_grad_()
        out = mgk.mgk_attention(query, equal, value, assignment="hard", similarity=similarity)
        (grad,) = torch.autograd.grad((out * torch.randn_like(out)).sum(), equal)
        assert grad.abs().max() > 1e-3
        torch.testing.assert_close(grad, grad[:, :, :1].expand_as(grad))
