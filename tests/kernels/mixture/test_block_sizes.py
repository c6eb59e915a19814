"""Block sizes of the mixture kernels: those of the tables, and variants of the code forced by other blocks."""

import hashlib
import itertools

import pytest
import torch

pytest.importorskip("triton")

from mgk._core.calls import Packed
from mgk.backends import triton
from mgk.bench import implementations
from mgk.kernels.mixture import launch as triton_launch
from mgk.kernels.mixture import launch_config
from mgk.kernels.mixture.block_config import BlockConfig, BlockKey
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

SMALL_PAIRS = triton_launch.SMALL_PAIRS  # `small_blocks` sets the limit to 0

# No multiple of any block, and too short for a block's stages; and whole blocks.
TABLE_LENGTHS = (37, 130, 192)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("M", [2, 4])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("variant", ["smgk", "mgk"])
def test_blocks_of_the_tables(variant, hard, M, D, poisoned):
    """With the blocks that users get, at lengths that the benchmarks do not have."""
    for length in TABLE_LENGTHS:
        sizes = {"M": M, "D": D, "E": D, "L": length, "S": length, "H": 2, "Hk": 2}
        check(torch.bfloat16, variant=variant, hard=hard, prior=not hard, causal="top-left", **sizes)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("M", [2, 4])
@pytest.mark.parametrize("variant", ["smgk", "smgk-hard", "mgk", "mgk-hard"])
def test_loops_longer_than_the_pipeline(variant, M, D):
    """Without causality nearly all steps are unmasked; missing waits in the pipeline show here."""
    shape = implementations.Shape(8, 8, 4096, D, False)
    assert not implementations.find_errors(
        implementations.Implementation(variant, "triton", 4, 4, M), shape, DEVICE, torch.bfloat16
    )


# Dtype on which paths are forced: on a GPU bf16 uses them anyway and fp32 would compile for minutes; the interpreter
# uses fp32, which shows more digits.
FORCED, SLACK = (torch.bfloat16, 3e-2) if GPU else (torch.float32, 0.0)


def check_within(limit, leaves, options, dtype=FORCED, at=""):
    """Output, lse and gradients, relative to their size if that is above 1."""
    for which, (error, _, size) in measure(leaves, options, dtype, yardstick=False).items():
        assert error <= limit * max(size, 1.0), f"{which}{at}: {error:.3e} of {size:.3e}"


BOUNDED_CASES = {
    "smgk": {},
    "mgk": {"variant": "mgk"},
    # dk and dv in two launches.
    "mgk-wide": {"variant": "mgk", "D": 72, "E": 72, "causal": "top-left"},
    "smgk-hard": {"hard": True, "prior": False, "causal": "top-left"},
    "smgk-hard-m3": {"hard": True, "prior": False, "M": 3},
    "mgk-hard-wide": {"variant": "mgk", "hard": True, "prior": False, "D": 72, "E": 72},
}


@pytest.mark.parametrize("name", BOUNDED_CASES)
def test_fast_and_fallback_paths(name, monkeypatch, poisoned):
    """FAST alone and, for large inputs, with the tiles that it leaves to FALLBACK."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    for std, limit in ((1.0, 1e-5), (4.0, 2e-4), (20.0, 2e-3), (50.0, 2e-2)):
        leaves, options = case(**{"std": std, "L": 40, "S": 50, **BOUNDED_CASES[name]})
        check_within(limit + SLACK, leaves, options, at=f" at std {std}")


BLOCK_VARIANTS = {
    "per-component": (("per_component",), {"variant": "mgk", "D": 72, "E": 72, "causal": "top-left"}),
    "per-component-padding": (
        ("per_component",), {"variant": "mgk", "B": 2, "D": 72, "E": 72, "padding": ((0, 40), (3, 21))},
    ),
    "per-component-bool": (
        ("per_component",), {"variant": "mgk", "D": 72, "mask_shape": (1, 1, 40, 50), "bool_mask": True},
    ),
    "tma-rows": (("tma_rows",), {"H": 2, "L": 37, "causal": "top-left"}),
    "tma-rows-hard": (("tma_rows",), {"hard": True, "prior": False, "B": 2, "H": 2, "L": 37}),
    "tma-rows-per-component": (
        ("per_component", "tma_rows"),
        {"variant": "mgk", "D": 80, "E": 80, "H": 2, "Hk": 2, "L": 37, "causal": "bottom-right"},
    ),
}  # fmt: skip


def force_block(monkeypatch, **variants):
    """Give every launch the same small block with these variants of the code."""
    block = BlockConfig(32, 32, 4, 1, **variants)
    monkeypatch.setattr(triton_launch, "_select_block", lambda *_: block)


@pytest.mark.parametrize("M", [2, 4, 5])
def test_component_gemm_matches_the_sum(M, monkeypatch, poisoned):
    """High and low bf16 parts keep 16 bits of the weights; FALLBACK computes tiles out of range."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    for std, limit in ((1.0, 1e-4), (20.0, 2e-3)):
        leaves, options = case(M=M, L=40, S=50, H=2, std=std, causal="top-left")
        x = {name: t.to(DEVICE, torch.float32) for name, t in leaves.items()}
        results = []
        for component_gemm in (False, True):
            force_block(monkeypatch, operand_in_registers=True, component_gemm=component_gemm)
            results.append(triton.run_mixture(make_call(x, **options)))
        assert std > 1 or not torch.equal(results[0][0], results[1][0])
        torch.testing.assert_close(results[1][0], results[0][0], atol=limit, rtol=limit)
        torch.testing.assert_close(results[1][1], results[0][1], atol=limit, rtol=limit)


COMPONENT_GEMM_CASES = {
    "m3": {"M": 3, "B": 2, "H": 4, "Hk": 2, "causal": "top-left"},
    "m4-prior-per-key": {"M": 4, "B": 2, "prior": (2, 1, 4, 50), "causal": "bottom-right"},
    "m4-bias": {"M": 4, "mask_shape": (1, 1, 40, 50)},
    "m5-tau-scale-padding": {
        "M": 5, "B": 2, "H": 2, "Hk": 2, "tau_shape": (2,), "scale_shape": (1, 2, 1, 1), "padding": ((0, 40), (3, 21)),
    },
}  # fmt: skip


@pytest.mark.parametrize("launch_type", ["pointers", "tma", "small"])
@pytest.mark.parametrize("name", COMPONENT_GEMM_CASES)
def test_gradients_with_the_component_gemm(name, launch_type, monkeypatch, poisoned):
    """Score gradients use weights of 16 bits; their sums over keys and rows use bf16."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    tma = launch_type == "tma"
    if launch_type == "small":
        monkeypatch.setattr(triton_launch, "_small_pairs", SMALL_PAIRS)
    if not (tma and GPU):
        monkeypatch.setattr(triton_launch, "supports_tma", lambda *_: tma)
    force_block(monkeypatch, component_gemm=True)
    leaves, options = case(**{"L": 40, "S": 50, **COMPONENT_GEMM_CASES[name]})
    report = measure(leaves, options, torch.float32, yardstick=False)
    for which, (error, _, size) in report.items():
        limit = 1e-4 if which in ("out", "lse", "value", "attn_mask") else 1e-2
        assert error <= limit * max(size, 1.0), f"{which}: {error:.3e} of {size:.3e}"
    # Without the GEMM they would be as exact as fp32.
    assert min(report[which][0] for which in ("query", "keys", "shift")) > 2e-4


def test_component_gemm_with_packed_sequences(monkeypatch, poisoned):
    """TMA reads whole sequences; the last positions belong to none, and their row vectors are not written."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    if not GPU:
        monkeypatch.setattr(triton_launch, "supports_tma", lambda *_: True)
    leaves, _ = case(M=4, H=2, Hk=1, L=60, S=60)
    x = {name: t.to(DEVICE, torch.float32).requires_grad_() for name, t in leaves.items()}
    cu = torch.tensor([0, 20, 21, 57], dtype=torch.int32, device=DEVICE)
    results = []
    for component_gemm in (False, True):
        force_block(monkeypatch, component_gemm=component_gemm)
        out = triton.run_mixture(make_call(x, causal="top-left", packed=Packed(cu, cu, None, None)))[0][:, :, :57]
        results.append(torch.autograd.grad(out.square().sum(), list(x.values())))
    for name, want, got in zip(x, *results, strict=True):
        want, got = (g[..., :57, :] if name in ("query", "keys", "value") else g for g in (want, got))
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("variants", [("component_gemm",), ("tma_rows",), ("component_gemm", "tma_rows")], ids="-".join)
def test_tma_reads_rows_of_the_next_head(variants, monkeypatch, poisoned):
    """TMA reads a head's last rows with the next head's first, whose factors may overflow."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    force_block(monkeypatch, **dict.fromkeys(variants, True))
    if not GPU:
        monkeypatch.setattr(triton_launch, "supports_tma", lambda *_: True)
    leaves, options = case(M=3, H=2, Hk=2, L=40, S=50)
    leaves["shift"][1, 0] -= 40.0 * leaves["query"][0, 1, 0].sign()
    leaves["log_prior"][:, 0] += 20.0
    check_within(3e-2, leaves, options, torch.float32)


@pytest.mark.parametrize("name", BLOCK_VARIANTS)
def test_block_variants_give_the_same_gradients(name, monkeypatch, poisoned):
    """Also those that no table uses at the moment."""
    variants, options = BLOCK_VARIANTS[name]
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    force_block(monkeypatch, **dict.fromkeys(variants, True))
    if "tma_rows" in variants and not GPU:
        monkeypatch.setattr(triton_launch, "supports_tma", lambda *_: True)
    leaves, options = case(**{"L": 40, "S": 50, **options})
    check_within(1e-5 + SLACK, leaves, options)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("variant", ["smgk", "mgk"])
def test_masked_keys_may_be_large(variant, hard, monkeypatch, poisoned):
    """lse does not bound the exponents of masked keys."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    leaves, options = case(variant, D=72, E=72, L=40, S=50, padding=((0, 21),), prior=not hard, hard=hard)
    leaves["keys"][..., 21:, :] *= 200
    check_within(1e-5 + SLACK, leaves, options)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("variant", ["smgk", "mgk"])
def test_packed_sequence_without_keys(variant, hard, monkeypatch, poisoned):
    """It has no preprocessed keys, and none may be read."""
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
def test_small_calls_take_one_launch_per_pass(variant, monkeypatch, poisoned):
    """Check the GENERAL path instead of FAST and FALLBACK, in all dtypes."""
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
        # Four exponentials per pair cost more than the choice per tile; fp16 has the fast form in the backward pass.
        leaves, options = case(variant, causal="top-left", M=4)
        check_within(1e-2, leaves, options, torch.float16)
        assert set(paths) == {(None,), (0,), (3,)}


def flagged(leaves, options, dtype, monkeypatch):
    """Return the fraction of tiles left to FALLBACK, for kernels that are launched as FAST and FALLBACK."""
    flags, original = {}, triton_launch.launch

    def launch(step, tensors, floats=()):
        original(step, tensors, floats)
        if step.paths == (1, 2):
            # Launches may run later, at the end of `compiled_together`.
            flags[step.kernel.__name__] = tensors[step.kernel.arg_names.index("flags_ptr")][: step.grid[0]]

    with monkeypatch.context() as patch:
        patch.setattr(triton_launch, "launch", launch)
        patch.setattr(triton_launch, "_small_pairs", 0)
        measure(leaves, options, dtype, yardstick=False)
    return {name: values.mean().item() for name, values in flags.items()}


UNEVEN = {"H": 2, "Hk": 2, "L": 150 if GPU else 50, "S": 150 if GPU else 50, "causal": "top-left", "uneven": 60.0}


def same_in_two_launches(leaves, options, dtype, monkeypatch):
    """Compare one launch with two.

    Inputs this large exceed the accuracy of bf16 and fp16, but a tile takes the same path and so the same rounding.
    """
    x = {name: t.to(DEVICE, dtype) for name, t in leaves.items()}
    output, lse = (t.shape for t in triton.run_mixture(make_call(x, **options))[:2])
    g = torch.Generator().manual_seed(1)
    weights = torch.randn(output, generator=g).to(dtype), 0.3 * torch.randn(lse, generator=g).to(dtype)
    results = []
    for pairs in (0, SMALL_PAIRS):
        monkeypatch.setattr(triton_launch, "_small_pairs", pairs)
        results.append(gradients(lambda y: triton.run_mixture(make_call(y, **options))[:2], x, weights))
    for name, want in results[0].items():
        want, got = (t.float().cpu() for t in (want, results[1][name]))
        finite = torch.isfinite(want)
        assert torch.equal(torch.isfinite(got), finite), name
        error, size = ((t[finite].abs().max().item()) for t in (got - want, want))
        assert error <= 1e-2 * max(size, 1.0), f"{name}: {error:.3e} of {size:.3e}"


@pytest.mark.parametrize("dtype", DTYPES[GPU:], ids=str)
@pytest.mark.parametrize("D, M", [(16, 3), (16, 4), (64, 4)])
def test_both_paths_in_one_launch(D, M, dtype, monkeypatch, poisoned):
    """In small calls every program selects the path of its tile. fp32 is forced to under the interpreter."""
    monkeypatch.setattr(triton_launch, "BOUNDED", (torch.bfloat16, torch.float32))
    shape = {"D": D, "E": D, "M": M, **UNEVEN}
    fractions = flagged(*case(**shape), dtype, monkeypatch)
    assert set(fractions) == {"mixture_forward", "mixture_backward_dq", "mixture_backward_dkdv"} - (
        {"mixture_forward"} if dtype == torch.float16 else set()
    )
    assert all(0 < fraction < 1 for fraction in fractions.values()), fractions
    same_in_two_launches(*case(**shape), dtype, monkeypatch)
    if dtype == torch.float32:
        check(dtype, **shape)


@pytest.mark.skipif(GPU, reason="compiled, a form may be rounded in other places beside the other")
@pytest.mark.parametrize("M", [3, 4])
def test_safe_tiles_take_the_fast_path(M, monkeypatch, poisoned):
    """BOTH has the bits of FAST, not those of GENERAL."""
    leaves, options = case(M=M, L=50, S=50, causal="top-left")
    x = {name: t.float() for name, t in leaves.items()}
    results = {}
    for name, dtypes, pairs in (("fast", DTYPES, 0), ("both", DTYPES, SMALL_PAIRS), ("general", (), 0)):
        monkeypatch.setattr(triton_launch, "BOUNDED", dtypes)
        monkeypatch.setattr(triton_launch, "_small_pairs", pairs)
        weights = torch.ones(1, 1, 50, 16), torch.ones(1, 1, 50)
        results[name] = gradients(lambda y: triton.run_mixture(make_call(y, **options))[:2], x, weights)
    for which in ("out", "query", "keys"):
        assert torch.equal(results["both"][which], results["fast"][which]), which
        assert not torch.equal(results["both"][which], results["general"][which]), which


@pytest.mark.parametrize("M", [3, 4])
def test_both_paths_with_the_component_gemm(M, monkeypatch, poisoned):
    """Only the fast path reads the operands; they round the sums to bf16."""
    monkeypatch.setattr(triton_launch, "BOUNDED", DTYPES)
    force_block(monkeypatch, operand_in_registers=True, component_gemm=True)
    leaves, options = case(D=64, E=64, M=M, **UNEVEN)
    same_in_two_launches(leaves, options, FORCED, monkeypatch)
    if not GPU:
        check_within(1e-2, leaves, options)


PASS_KEYS = {
    "fwd": [
        BlockKey("fwd", small=small, hard=hard, capped=capped, no_component_gemm=no_gemm, short=short)
        for small, hard, no_gemm, short in (
            (0, 0, 0, 0), (1, 0, 0, 0), (1, 0, 0, 1), (0, 1, 0, 0), (0, 1, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1),
        )
        for capped in ((False,) if small else (False, True))
    ],
    "dq": [
        BlockKey("dq", small=small, tma=tma, hard=hard, capped=capped, short=short)
        for small, tma, capped in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1))
        for hard in (False, True) for short in (False, True)
    ],
}  # fmt: skip
PASS_KEYS |= {
    name: [
        BlockKey(name, small=small, tma=tma, hard=hard, capped=capped, short=short)
        for small, tma, capped in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)) for hard in (False, True)
        for short in (False, True)
    ]
    for name in ("dkdv", "dv")
}  # fmt: skip


def block_cases(shifted):
    """All cases that a launch can look up: key, width, number of components, bytes per element."""
    for name, keys in PASS_KEYS.items():
        widths = (16, 32, 64, 128, 256)
        if name == "dv":
            widths = () if shifted else [width for width in widths if width > launch_config.SPLIT_WIDTH]
        yield from itertools.product(keys, widths, (1, 2, 3, 8), (2, 4))


@pytest.mark.parametrize("shifted", [True, False])
def test_every_call_has_blocks(shifted):
    """The keys of a block divide a tile of preprocessed keys; rows that TMA reads divide those of a head."""
    for key, width, components, itemsize in block_cases(shifted):
        at = (key, width, components)
        block = BLOCKS(key, width, components, shifted, itemsize)
        assert block.maxnreg is None or key.capped, at
        assert launch_config.KEYS_PER_TILE % block.block_n == 0, at
        assert block.block_m % 16 == 0, at
        # The rows that TMA reads beyond a head's last one were written by the dq kernel.
        writers = [
            BlockKey("dq", tma=tma, hard=key.hard, capped=capped, short=short)
            for tma, capped, short in itertools.product((False, True), repeat=3)
        ]
        written = [BLOCKS(writer, width, components, shifted, itemsize).block_m for writer in writers]
        readable = key.tma and not any(n % block.block_m for n in (launch_config.ROWS_PER_TILE, *written))
        # TMA copies begin at multiples of 128 bytes.
        assert not block.tma_rows or (readable and block.block_m >= 32), at
        assert not (key.no_component_gemm and shifted and components < 3 and block.component_gemm), at
        assert not (block.component_gemm if not shifted else block.per_component), at


@pytest.mark.parametrize(("shifted", "digest"), [(True, "647395eafcb0808f"), (False, "0b27409078c775a5")])
def test_selected_blocks_are_those_that_were_measured(shifted, digest):
    """Changes to the tables or to the fallback order change the digest: update it with new measurements only.

    Widths above 128 with elements of 2 bytes: with a new results/wide_blocks.csv.
    """
    blocks = [(case, BLOCKS(*case[:3], shifted, case[3])) for case in block_cases(shifted)]
    text = "\n".join(" ".join(map(str, (*key, *sizes, *block))) for (key, *sizes), block in blocks)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize(("key", "width", "components", "shifted", "itemsize", "block"), [
    (BlockKey("fwd"), 64, 2, True, 2, BlockConfig(64, 64, 4, 3, None, True, True)),
    (BlockKey("fwd", capped=True, no_component_gemm=True), 64, 2, True, 2, BlockConfig(64, 64, 4, 3, 128, True)),
    # A register limit of soft assignment is not used for hard assignment.
    (BlockKey("dq", tma=True, hard=True, capped=True), 32, 2, True, 2, BlockConfig(64, 128, 4, 3, None, True)),
    (BlockKey("dq", tma=True, capped=True), 32, 2, True, 2, BlockConfig(64, 64, 4, 3, 128, True)),
    # Blocks of short sequences are those of the others where nothing else was measured.
    (BlockKey("dq", tma=True, capped=True, short=True), 64, 2, True, 2, BlockConfig(64, 64, 4, 3, 168, True)),
    (BlockKey("dq", tma=True, short=True), 64, 2, True, 2, BlockConfig(64, 128, 4, 3, None, True)),
    (BlockKey("dkdv", tma=True, hard=True, capped=True, short=True), 64, 2, True, 2,
     BlockConfig(64, 64, 4, 3, tma_rows=True)),
    # Wider than any entry of the key itself.
    (BlockKey("fwd", small=True), 32, 2, False, 2, BlockConfig(64, 64, 4, 3, None, True)),
    (BlockKey("dkdv", tma=True), 128, 2, False, 2, BlockConfig(64, 64, 4, 2, per_component=True, tma_rows=True)),
    (BlockKey("dkdv"), 64, 3, False, 4, BlockConfig(64, 16, 4, 2)),
])  # fmt: skip
def test_fallback_order(key, width, components, shifted, itemsize, block):
    assert BLOCKS(key, width, components, shifted, itemsize) == block
