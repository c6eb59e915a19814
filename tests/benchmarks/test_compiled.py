"""The kernels compile for GPUs that are not present and fit their resources, which the interpreter does not check."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from mgk._core.markdown import fill_marked_parts

ROOT = Path(__file__).parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compiled():
    return load("compiled")


@pytest.fixture(scope="module")
def check():
    return load("compile_check")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, call",
    [
        (90, ("smgk", "bf16", 64, 2, "causal")),
        (90, ("mgk-hard", "bf16", 128, 2, "plain")),
        (90, ("smgk", "bf16", 16, 4, "small")),
        (86, ("mgk", "fp16", 64, 2, "mask")),
        (86, ("smgk-hard", "fp32", 64, 2, "packed")),
        (86, ("smgk", "bf16", 256, 2, "plain")),
        (86, ("smlk", "bf16", 64, 2, "plain")),
        (86, ("mlk", "bf16", 64, 2, "causal")),
        (80, ("mgk", "bf16", 64, 4, "one query")),
        (90, ("smgk", "bf16", 128, 2, "shared keys")),
    ],
    ids=lambda x: "-".join(map(str, x)).replace(" ", "-") if isinstance(x, tuple) else f"sm_{x}",
)
def test_kernels_fit_the_gpu(compiled, arch, call):
    kernels = compiled.kernels(compiled.Call(*call), arch)
    assert kernels
    assert {kernel.name: kernel.misfit(arch) for kernel in kernels if kernel.misfit(arch)} == {}


def test_kernel_that_does_not_fit_reports_the_reason(compiled):
    assert "232449 bytes" in compiled.Kernel("some", 255, 0, 232_449).misfit(90)
    assert compiled.Kernel("some", 255, 0, 232_448).misfit(90) == ""
    assert compiled.Kernel("some", failure="no such register").misfit(90) == "no such register"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "86", "89", "90", "100", "120", "gfx942"])
def test_sample_compiles_for_every_architecture(check, arch):
    """In another process: the compiler of an unsupported instruction ends its process."""
    rows = check.compile_architecture(arch, sample=True)
    assert [row for row in rows if row["failure"]] == []
    kernels = {row["kernel"].split()[0] for row in rows}
    assert {"mixture_forward", "mixture_backward_dq", "mixture_backward_dkdv", "decode_row"} <= kernels


def test_architectures_of_the_check_are_those_with_a_memory_limit(check, compiled):
    assert tuple(map(str, compiled.SHARED)) == check.ARCHITECTURES


def row_of(check, **values):
    row = dict.fromkeys(check.COLUMNS, "") | {"arch": "80", "operator": "smgk", "head_dim": "64", "feature": "causal"}
    row |= {"kernel": "mixture_forward 1", "registers": 255, "spill_bytes": 0, "shared_bytes": 2048, "triton": "3.7.1"}
    return row | values


def test_spills_above_the_limit_are_a_failure(check, compiled, monkeypatch):
    kernels = [compiled.Kernel("some 1", 255, check.SPILL_LIMIT), compiled.Kernel("other", 255, check.SPILL_LIMIT + 4)]
    monkeypatch.setitem(sys.modules, "compiled", SimpleNamespace(Call=compiled.Call, kernels=lambda *_, **__: kernels))
    rows = list(check.compile_calls("80", sample=True))
    assert [row["failure"] for row in rows[:2]] == ["", "324 bytes of spills, the limit is 320"]
    assert not any(row["failure"] for row in check.compile_calls("90", sample=True))  # blocks are chosen by time


def test_process_that_dies_is_a_failure(check, monkeypatch):
    died = SimpleNamespace(returncode=-6, stdout='{"arch": "80"}\nnoise\n', stderr="LLVM ERROR: no such instruction\n")
    monkeypatch.setattr(check.subprocess, "run", lambda *_, **__: died)
    rows = check.compile_architecture("80", sample=True)
    assert rows[0] == {"arch": "80"}
    assert rows[1]["failure"] == "the process ended with code -6: LLVM ERROR: no such instruction"


def test_rows_of_an_architecture_are_replaced(check, tmp_path):
    path = tmp_path / "compiled.csv"
    environment = {"triton": "3.7.1", "torch": "2.13", "date": "2026-01-01", "commit": "abc"}
    check.write_rows(path, [row_of(check), row_of(check, arch="90")], environment)
    check.write_rows(path, [row_of(check, registers=128)], environment | {"commit": "def"})
    rows = check.read_rows(path)
    assert [(row["arch"], row["registers"], row["commit"]) for row in rows] == [
        ("80", "128", "def"),
        ("90", "255", "abc"),
    ]
    check.write_rows(path, [row_of(check, head_dim=256)], environment, width=256)
    check.write_rows(path, [row_of(check, head_dim=256, registers=64)], environment, width=256)
    rows = check.read_rows(path)
    assert [(row["arch"], row["head_dim"], row["registers"]) for row in rows] == [
        ("80", "64", "128"),
        ("80", "256", "64"),
        ("90", "64", "255"),
    ]


def test_table_has_a_column_per_architecture(check):
    rows = [row_of(check), row_of(check, arch="gfx942", spill_bytes=8), row_of(check, arch="90", kernel="add_parts")]
    rows.append(row_of(check, spill_bytes=4, registers=200))  # the second launch of a kernel, with more spills
    lines = check.table(rows).splitlines()
    assert lines[3] == "| call | kernel | sm_80 | sm_90 | gfx942 |"
    assert "| smgk D 64 | `mixture_forward` fast | 200 / 4 / 2 | – | 255 / 8 / 2 |" in lines
    assert "| smgk D 64 | `add_parts` | – | 255 / 0 / 2 | – |" in lines


def test_table_shows_the_failure_of_a_launch_with_more_spills(check):
    rows = [row_of(check, spill_bytes=500, failure="500 bytes of spills"), row_of(check, spill_bytes=4)]
    assert "| smgk D 64 | `mixture_forward` fast | 500 bytes of spills |" in check.table(rows)


def test_table_is_followed_by_the_processes_that_ended_early(check):
    row = dict.fromkeys(check.COLUMNS, "") | {"arch": "90", "failure": "the process ended with code -6: no memory"}
    text = check.table([row_of(check), row])
    assert text.splitlines()[3] == "| call | kernel | sm_80 |"
    assert text.endswith("\n\nsm_90: the process ended with code -6: no memory.")


def test_empty_file_of_block_sizes_gets_a_header(tmp_path, monkeypatch):
    block_sizes = load("block_sizes")
    file = tmp_path / "blocks.csv"
    file.touch()
    monkeypatch.setattr(sys, "argv", ["block_sizes.py", "--csv", str(file)])
    block_sizes.main()
    assert file.read_text() == ",".join(block_sizes.FIELDS) + "\n"


def test_page_has_the_table_of_the_results(check):
    rows = check.read_rows(ROOT / "results" / "compiled.csv")
    assert [row for row in rows if row["failure"]] == []
    assert {row["arch"] for row in rows} == set(check.ARCHITECTURES)
    page = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    assert fill_marked_parts(page, {"compiled": check.table(rows)}, keep_others=True) == page
