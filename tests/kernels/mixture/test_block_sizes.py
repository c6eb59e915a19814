"""Block sizes of the fused kernels and what they switch: the tables' as users get them, and others by force."""

import pytest
import torch

pytest.importorskip("triton")

from mgk._core.calls import Packed
from mgk.backends import triton
from mgk.bench import implementations
from mgk.kernels.mixture import launch as triton_launch
from mgk.kernels.mixture import launch_config
from tests.kernels.mixture.test_kernels import (  # noqa: F401
    BLOCKS,
    DEVICE,
    DTYPES,
    GPU,
    case,
    check,
    gradients,
    make_call,
    measure,
    small_blocks,
)

pytestmark = [pytest.mark.gpu] if GPU else []

SMALL_PAIRS = 1 << 25  # as users have it; `small_blocks` sets it to 0

# No multiple of any block, and too short for a block's stages; and whole blocks.
TABLE_LENGTHS = (37, 130, 192)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("M", [2, 4])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("variant", ["smgk", "mgk"])
def test_blocks_of_the_tables(variant, hard, M, D, poisoned):
    """As users get them, at lengths that benchmarks do not have."""
    for length in TABLE_LENGTHS:
        sizes = {"M": M, "D": D, "E": D, "L": length, "S": length, "H": 2, "Hk": 2}
        check(torch.bfloat16, variant=variant, hard=hard, prior=not hard, causal="top-left", **sizes)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("M", [2, 4])
@pytest.mark.parametrize("variant", ["smgk", "smgk-hard", "mgk", "mgk-hard"])
def test_walks_of_more_steps_than_stages(variant, M, D):
    """Not causal, where nearly all steps are whole: what a block gets wrong by waiting too little shows here."""
    shape = implementations.Shape(8, 8, 4096, D, False)
    assert not implementations.find_errors(
        implementations.Implementation(variant, "triton", 4, 4, M), shape, DEVICE, torch.bfloat16
    )


# What kernels are forced on: bf16 takes them by itself on a GPU, where fp32's would compile for minutes; the
# interpreter has fp32, which shows more digits.
FORCED, SLACK = (torch.bfloat16, 3e-2) if GPU else (torch.float32, 0.0)


def check_within(limit, leaves, options, dtype=FORCED, at=""):
    """Output, lse and gradients, relative to their size if that is above 1."""
    for which, (error, _, size) in measure(leaves, options, dtype, yardstick=False).items():
        assert error <= limit * max(size, 1.0), f"{which}{at}: {error:.3e} of {size:.3e}"


BOUNDED_CASES = {
    "smgk": {},
    "mgk": {"variant": "mgk"},
    # dk and dv apart.
    "mgk-wide": {"variant": "mgk", "D": 72, "E": 72, "causal": "top-left"},
    "smgk-hard": {"hard": True, "prior": False, "causal": "top-left"},
    "smgk-hard-m3": {"hard": True, "prior": False, "M": 3},
    "mgk-hard-wide": {"variant": "mgk", "hard": True, "prior": False, "D": 72, "E": 72},
}


@pytest.mark.parametrize("name", BOUNDED_CASES)
def test_first_and_second_kernel(name, monkeypatch, poisoned):
    """The bounded forward and the factored form on their own, and the tiles they leave to the second kernel when
    inputs are large."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    for std, limit in ((1.0, 1e-5), (4.0, 2e-4), (20.0, 2e-3), (50.0, 2e-2)):
        leaves, options = case(**{"std": std, "L": 40, "S": 50, **BOUNDED_CASES[name]})
        check_within(limit + SLACK, leaves, options, at=f" at std {std}")


WAYS = {
    # The ways of a block: components in turn (2), rows' vectors by the copy engine (4).
    "in-turn": (2, {"variant": "mgk", "D": 72, "E": 72, "causal": "top-left"}),
    "in-turn-padding": (2, {"variant": "mgk", "B": 2, "D": 72, "E": 72, "padding": ((0, 40), (3, 21))}),
    "in-turn-bool": (2, {"variant": "mgk", "D": 72, "mask_shape": (1, 1, 40, 50), "bool_mask": True}),
    "engine": (4, {"H": 2, "L": 37, "causal": "top-left"}),
    "engine-hard": (4, {"hard": True, "prior": False, "B": 2, "H": 2, "L": 37}),
    "engine-in-turn": (6, {"variant": "mgk", "D": 80, "E": 80, "H": 2, "Hk": 2, "L": 37, "causal": "bottom-right"}),
}


@pytest.mark.parametrize("M", [2, 4, 5])
def test_blend_as_a_product(M, monkeypatch, poisoned):
    """High and low parts in bf16 keep 16 bits of the weights; the general kernel takes what is out of range."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    for std, limit in ((1.0, 1e-4), (20.0, 2e-3)):
        leaves, options = case(M=M, L=40, S=50, H=2, std=std, causal="top-left")
        x = {name: t.to(DEVICE, torch.float32) for name, t in leaves.items()}
        found = []
        for way in (1, 3):
            monkeypatch.setattr(triton_launch, "blocks", lambda *_, way=way: (32, 32, 4, 1, None, way))
            found.append(triton.run_mixture(make_call(x, **options)))
        assert std > 1 or not torch.equal(found[0][0], found[1][0])
        torch.testing.assert_close(found[1][0], found[0][0], atol=limit, rtol=limit)
        torch.testing.assert_close(found[1][1], found[0][1], atol=limit, rtol=limit)


BLENDED = {
    "m3": {"M": 3, "B": 2, "H": 4, "Hk": 2, "causal": "top-left"},
    "m4-each-prior": {"M": 4, "B": 2, "prior": (2, 1, 4, 50), "causal": "bottom-right"},
    "m4-bias": {"M": 4, "mask_shape": (1, 1, 40, 50)},
    "m5-tau-scale-padding": {
        "M": 5, "B": 2, "H": 2, "Hk": 2, "tau_shape": (2,), "scale_shape": (1, 2, 1, 1), "padding": ((0, 40), (3, 21)),
    },
}  # fmt: skip


@pytest.mark.parametrize("way_in", ["pointers", "engine", "small"])
@pytest.mark.parametrize("name", BLENDED)
def test_gradients_of_the_blend_as_a_product(name, way_in, monkeypatch, poisoned):
    """The score gradients have the blend to 16 bits; the sums over keys and rows take them rounded to bf16."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    engine = way_in == "engine"
    if way_in == "small":
        monkeypatch.setattr(triton_launch, "SMALL_PAIRS", SMALL_PAIRS)
    if not (engine and GPU):
        monkeypatch.setattr(triton_launch, "_bulk", lambda *_: engine)
    monkeypatch.setattr(triton_launch, "blocks", lambda *_: (32, 32, 4, 1, None, 2))
    leaves, options = case(**{"L": 40, "S": 50, **BLENDED[name]})
    report = measure(leaves, options, torch.float32, yardstick=False)
    for which, (error, _, size) in report.items():
        limit = 1e-4 if which in ("out", "lse", "value", "attn_mask") else 1e-2
        assert error <= limit * max(size, 1.0), f"{which}: {error:.3e} of {size:.3e}"
    # Without products they would be as exact as fp32.
    assert min(report[which][0] for which in ("query", "keys", "shift")) > 2e-4


def test_blend_as_a_product_of_packed_sequences(monkeypatch, poisoned):
    """The bulk copy engine reads whole sequences; the last positions belong to none, and what the rows left for them is
    not written."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    if not GPU:
        monkeypatch.setattr(triton_launch, "_bulk", lambda *_: True)
    leaves, _ = case(M=4, H=2, Hk=1, L=60, S=60)
    x = {name: t.to(DEVICE, torch.float32).requires_grad_() for name, t in leaves.items()}
    cu = torch.tensor([0, 20, 21, 57], dtype=torch.int32, device=DEVICE)
    found = []
    for way in (0, 2):
        monkeypatch.setattr(triton_launch, "blocks", lambda *_, way=way: (32, 32, 4, 1, None, way))
        out = triton.run_mixture(make_call(x, causal="top-left", packed=Packed(cu, cu, None, None)))[0][:, :, :57]
        found.append(torch.autograd.grad(out.square().sum(), list(x.values())))
    for name, want, got in zip(x, *found, strict=True):
        want, got = (g[..., :57, :] if name in ("query", "keys", "value") else g for g in (want, got))
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("way", [2, 4, 6])
def test_rows_of_the_next_head(way, monkeypatch, poisoned):
    """By the copy engine a head's last rows come with the next head's first, whose blend may overflow."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    monkeypatch.setattr(triton_launch, "blocks", lambda *_: (32, 32, 4, 1, None, way))
    if not GPU:
        monkeypatch.setattr(triton_launch, "_bulk", lambda *_: True)
    leaves, options = case(M=3, H=2, Hk=2, L=40, S=50)
    leaves["shift"][1, 0] -= 40.0 * leaves["query"][0, 1, 0].sign()
    leaves["log_prior"][:, 0] += 20.0
    check_within(3e-2, leaves, options, torch.float32)


@pytest.mark.parametrize("name", WAYS)
def test_ways_of_a_block(name, monkeypatch, poisoned):
    """What no table may have at the moment gives the same gradients."""
    way, options = WAYS[name]
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    monkeypatch.setattr(triton_launch, "blocks", lambda *_: (32, 32, 4, 1, None, way))
    if way >= 4 and not GPU:
        monkeypatch.setattr(triton_launch, "_bulk", lambda *_: True)
    leaves, options = case(**{"L": 40, "S": 50, **options})
    check_within(1e-5 + SLACK, leaves, options)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("variant", ["smgk", "mgk"])
def test_masked_keys_of_any_size(variant, hard, monkeypatch, poisoned):
    """No lse bounds the exponents of a key that is not in it."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    leaves, options = case(variant, D=72, E=72, L=40, S=50, padding=((0, 21),), prior=not hard, hard=hard)
    leaves["keys"][..., 21:, :] *= 200
    check_within(1e-5 + SLACK, leaves, options)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("variant", ["smgk", "mgk"])
def test_a_packed_sequence_without_keys(variant, hard, monkeypatch, poisoned):
    """Nothing was prepared for it, and nothing of that may be read."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    leaves, _ = case(variant, H=2, Hk=2, L=48, S=40, prior=False)
    x = {name: t.to(DEVICE, FORCED).requires_grad_() for name, t in leaves.items()}
    rows, columns = (torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([0, 16, 32, 48], [0, 20, 20, 40]))
    out = triton.run_mixture(make_call(x, hard=hard, packed=Packed(rows, columns, 16, 20)))[0]
    gradients = torch.autograd.grad(out.float().square().sum(), list(x.values()))
    assert not out[:, :, 16:32].any()
    assert not gradients[list(x).index("query")][:, :, 16:32].any()
    for name, g in zip(x, gradients, strict=True):
        assert torch.isfinite(g).all(), name


@pytest.mark.parametrize("variant", ["smgk", "mgk"])
def test_small_calls(variant, monkeypatch, poisoned):
    """One launch of the general kernels instead of two, in whatever type."""
    monkeypatch.undo()
    paths, original = [], triton_launch.launch

    def launch(step, *args):
        paths.append(step.paths)
        original(step, *args)

    monkeypatch.setattr(triton_launch, "launch", launch)
    leaves, options = case(variant, causal="top-left")
    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 1e-2)):
        check_within(limit, leaves, options, dtype)
    assert set(paths) == {(None,), (0,)}
    if variant == "smgk":
        # Four exponentials a pair cost more than the choice; fp16 has its first form in the backward passes.
        leaves, options = case(variant, causal="top-left", M=4)
        check_within(1e-2, leaves, options, torch.float16)
        assert set(paths) == {(None,), (0,), (3,)}


def flagged(leaves, options, dtype, monkeypatch):
    """Of the kernels that come in a first and a second one: the share of tiles that were left to the second."""
    shares, original = {}, triton_launch.launch

    def launch(step, tensors, floats=()):
        original(step, tensors, floats)
        if step.paths == (1, 2):
            flags = tensors[step.kernel.arg_names.index("flags_ptr")]
            shares[step.kernel.__name__] = flags[: step.grid[0]].mean().item()

    with monkeypatch.context() as patch:
        patch.setattr(triton_launch, "launch", launch)
        patch.setattr(triton_launch, "SMALL_PAIRS", 0)
        measure(leaves, options, dtype, yardstick=False)
    return shares


UNEVEN = {"H": 2, "Hk": 2, "L": 150 if GPU else 50, "S": 150 if GPU else 50, "causal": "top-left", "uneven": 60.0}


def same_in_two_launches(leaves, options, dtype, monkeypatch):
    """Such large numbers are beyond what bf16 and fp16 tell right from wrong; but a tile takes the same form, and so
    the same roundings, in one launch as in two."""
    x = {name: t.to(DEVICE, dtype) for name, t in leaves.items()}
    output, lse = (t.shape for t in triton.run_mixture(make_call(x, **options))[:2])
    g = torch.Generator().manual_seed(1)
    weights = torch.randn(output, generator=g).to(dtype), 0.3 * torch.randn(lse, generator=g).to(dtype)
    found = []
    for pairs in (0, SMALL_PAIRS):
        monkeypatch.setattr(triton_launch, "SMALL_PAIRS", pairs)
        found.append(gradients(lambda y: triton.run_mixture(make_call(y, **options))[:2], x, weights))
    for name, want in found[0].items():
        want, got = (t.float().cpu() for t in (want, found[1][name]))
        finite = torch.isfinite(want)
        assert torch.equal(torch.isfinite(got), finite), name
        error, size = ((t[finite].abs().max().item()) for t in (got - want, want))
        assert error <= 1e-2 * max(size, 1.0), f"{name}: {error:.3e} of {size:.3e}"


@pytest.mark.parametrize("dtype", DTYPES[GPU:], ids=str)
@pytest.mark.parametrize("D, M", [(16, 3), (16, 4), (64, 4)])
def test_either_form_in_one_launch(D, M, dtype, monkeypatch, poisoned):
    """Small calls: each program takes the form that its tile allows. fp32 is forced to, under the interpreter."""
    monkeypatch.setattr(triton_launch, "BOUNDED", (torch.bfloat16, torch.float32))
    shape = {"D": D, "E": D, "M": M, **UNEVEN}
    shares = flagged(*case(**shape), dtype, monkeypatch)
    assert set(shares) == {"mixture_forward", "mixture_backward_dq", "mixture_backward_dkdv"} - (
        {"mixture_forward"} if dtype == torch.float16 else set()
    )
    assert all(0 < share < 1 for share in shares.values()), shares
    same_in_two_launches(*case(**shape), dtype, monkeypatch)
    if dtype == torch.float32:
        check(dtype, **shape)


@pytest.mark.skipif(GPU, reason="compiled, a form may be rounded in other places beside the other")
@pytest.mark.parametrize("M", [3, 4])
def test_safe_tiles_take_the_fast_form(M, monkeypatch, poisoned):
    """Bit for bit what the first kernel gives, and the general one does not."""
    leaves, options = case(M=M, L=50, S=50, causal="top-left")
    x = {name: t.float() for name, t in leaves.items()}
    found = {}
    for name, dtypes, pairs in (("first", DTYPES, 0), ("either", DTYPES, SMALL_PAIRS), ("general", (), 0)):
        monkeypatch.setattr(triton_launch, "BOUNDED", dtypes)
        monkeypatch.setattr(triton_launch, "SMALL_PAIRS", pairs)
        weights = torch.ones(1, 1, 50, 16), torch.ones(1, 1, 50)
        found[name] = gradients(lambda y: triton.run_mixture(make_call(y, **options))[:2], x, weights)
    for which in ("out", "query", "keys"):
        assert torch.equal(found["either"][which], found["first"][which]), which
        assert not torch.equal(found["either"][which], found["general"][which]), which


@pytest.mark.parametrize("M", [3, 4])
def test_either_form_with_the_blend_as_a_product(M, monkeypatch, poisoned):
    """Of the two, only the fast form reads the operands; they round what is summed to bf16."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    monkeypatch.setattr(triton_launch, "blocks", lambda *_: (32, 32, 4, 1, None, 3))
    leaves, options = case(D=64, E=64, M=M, **UNEVEN)
    same_in_two_launches(leaves, options, FORCED, monkeypatch)
    if not GPU:
        check_within(1e-2, leaves, options)


@pytest.mark.parametrize("shifted", [True, False])
def test_every_call_has_blocks(shifted):
    """Keys of a block divide the tiles that they are prepared in; where the copy engine reads the rows' vectors, a
    block's rows divide those of a head."""
    passes = ("forward", "hard forward", "unblended forward", "queries", "hard queries", "keys", "hard keys")
    passes += () if shifted else ("values", "hard values")
    before = {
        "forward": ("", "small ", "capped "),
        "hard forward": ("", "capped "),
        "unblended forward": ("", "capped "),
    }
    before |= dict.fromkeys(("queries", "hard queries"), ("", "small ", "bulk ", "capped ", "capped bulk "))
    kinds = [prefix + kind for kind in passes for prefix in before.get(kind, ("", "small ", "bulk "))]
    for kind in kinds:
        for width in (16, 32, 64, 128, 256):
            for components in (1, 2, 3, 8):
                for itemsize in (2, 4):
                    if kind.endswith("values") and width <= launch_config.SPLIT_WIDTH:
                        continue
                    rows, keys, *_, registers, way = BLOCKS(kind, width, components, shifted, itemsize)
                    assert registers is None or kind.startswith("capped "), (kind, width, components)
                    assert launch_config.SLOT % keys == 0, (kind, width, components)
                    assert rows % 16 == 0, (kind, width, components)
                    # What the engine reads beyond a head's last row the pass along the keys has written.
                    hardness = "hard " if "hard" in kind else ""
                    writers = [before + hardness + "queries" for before in ("", "bulk ", "capped ", "capped bulk ")]
                    written = [BLOCKS(writer, width, components, shifted, itemsize)[0] for writer in writers]
                    read = kind.startswith("bulk") and not any(n % rows for n in (launch_config.HEAD_ROWS, *written))
                    # Its copies begin at multiples of 128 bytes.
                    assert way < 4 or (read and rows >= 32), (kind, width, components)
                    assert not (kind.endswith("unblended forward") and shifted and components < 3 and way & 2), width
