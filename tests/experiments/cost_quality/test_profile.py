"""The profile of training steps by kernel family, with a tiny recipe on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from typer.testing import CliRunner

from experiments.cost_quality import profile
from mgk.training import results

RECIPE = """
extends: bytes
title: tiny
model: {num_layers: 1, embed_dim: 8}
training: {steps: 60, warmup: 1, batch_size: 2, eval_every: 30, eval_batch_size: 8, stride: 256}
"""


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("mixture_forward", "attention forward"),
        ("mixture_backward_dkdv", "attention backward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_f16_knob", "attention backward"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention forward"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention forward"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention backward"),
        ("mgk::sdpa_mixture_backward", "attention backward"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "GEMM"),
        ("aten::mm", "GEMM"),
        ("aten::mmul_like", "other"),
        ("triton_red_fused__log_softmax_nll_loss_forward_3", "loss"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_poi_fused_mul_silu_5", "other"),
    ],
)
def test_families(name, family):
    assert profile.family_of(name) == family


def test_kernels_are_counted_on_a_gpu():
    kernel = SimpleNamespace(key="gemm", device_type=DeviceType.CUDA, self_device_time_total=3000.0)
    operator = SimpleNamespace(
        key="aten::mm", device_type=DeviceType.CPU, self_device_time_total=8, self_cpu_time_total=9
    )
    times = profile.kernel_milliseconds([kernel, operator], 2, is_cuda=True)
    assert times == {"gemm": 1.5}
    assert profile.milliseconds_by_family(times) == {**dict.fromkeys([*profile.FAMILIES, "other"], 0.0), "GEMM": 1.5}


def test_longest_kernels_are_first():
    events = [SimpleNamespace(key=name, self_cpu_time_total=us) for name, us in [("aten::mul", 1000), ("gemm", 5000)]]
    table = profile.kernel_table(profile.kernel_milliseconds(events, 1, is_cuda=False), 1)
    assert table.splitlines()[2:] == ["| 5.00 | GEMM | `gemm` |"]


def test_command_profiles_a_tiny_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog sat on the log ; " * 200)
    options = ["--recipe", str(tmp_path / "tiny.yaml"), "--rows", "softmax:2,smgk:2/1/2", "--steps", "2"]
    result = CliRunner().invoke(
        profile.app, [*options, "--results", str(tmp_path / "out"), "--data-dir", str(tmp_path)]
    )
    assert result.exception is None, result.output
    rows = results.read([tmp_path / "out" / "cost-quality-profile.csv"])
    assert len(rows) == 2 * (len(profile.FAMILIES) + 1)
    assert {row["recipe"] for row in rows} == {"cost-quality-profile"}
    # Every family is found in the names of a CPU.
    assert all(float(row["value"]) > 0 for row in rows), [(row["variant"], row["metric"], row["value"]) for row in rows]
    longest = (tmp_path / "out" / "cost-quality-profile.md").read_text(encoding="utf-8")
    assert longest.startswith("# Longest kernels of a training step\n\n`softmax:2` of tiny, commit ")
    assert "\n`smgk:2/1/2` of tiny, commit " in longest
    lines = [line for line in result.output.splitlines() if line.startswith("| tiny")]
    assert [line.split(" | ")[1] for line in lines] == ["`softmax:2`", "`smgk:2/1/2`"]


def test_table_has_the_latest_profile_of_each_model_and_recipe():
    families = [*profile.FAMILIES, profile.OTHER]

    def rows(variant, commit, first, task="study"):
        common = {"recipe": profile.RECIPE, "task": task, "variant": variant, "commit": commit, "gpu": "NVIDIA H200"}
        common |= {"heads": "8", "kv_heads": "8", "key_heads": ""}
        values = [first, *[1] * (len(families) - 1)]
        return [
            {**common, "metric": f"{family}, ms per step", "value": str(value)}
            for family, value in zip(families, values, strict=True)
        ]

    old = [row for row in rows("smgk", "a", 6) if not row["metric"].startswith("rotary")]
    lines = profile.latest_table(
        [*rows("softmax", "a", 9), *old, *rows("softmax", "b", 4), *rows("smgk", "b", 1, "study-8")]
    ).split("\n")
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| study")]
    assert [line[:3] for line in cells] == [
        ["study", "`softmax:8`", "4.00 (40 %)"], ["study", "`smgk:8`", "6.00 (55 %)"],
        ["study-8", "`smgk:8`", "1.00 (14 %)"],
    ]  # fmt: skip
    rotary = 2 + families.index("rotary embedding")
    assert [line[rotary] for line in cells] == ["1.00 (10 %)", "–", "1.00 (14 %)"]
    assert "`smgk:8` of study on NVIDIA H200 at a, " in lines[-1]
    assert profile.latest_table([]) == ""
