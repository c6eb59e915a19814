"""Test the timing of the study's trained decoders, with tiny ones on a CPU."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from experiments.cost_quality import decoding, page
from experiments.cost_quality.plan import Arm, load_plan
from mgk.models import DecoderConfig, LanguageModel, save_model
from mgk.training import results
from mgk.training.config import ModelSpec
from mgk.training.runs import run_path

ROOT = Path(__file__).parents[3]
PLAN = """
judged_split: test
stages:
  - {name: tiny, recipe: bytes, arms: {"softmax:2": 1, "smgk:2/1": 1, "smgk:1": 1, "softmax:2@time=smgk:1": 1}}
questions: []
"""


@pytest.fixture
def trained(tmp_path):
    """Make finished runs of two of the three models of a plan."""
    (tmp_path / "plan.yaml").write_text(PLAN)
    for name in ("softmax:2", "smgk:2/1"):
        model = ModelSpec.parse(name)
        directory = run_path(tmp_path / "runs", "bytes", model, "paper", 0)
        config = DecoderConfig(
            20, 16, embed_dim=8, ffn_dim=8, num_layers=1, head_dim=4, positions="rotary", variant=model.variant,
            num_heads=model.heads, num_kv_heads=model.kv_heads,
        )  # fmt: skip
        save_model(LanguageModel(config), directory / "best")
        (directory / "result.json").write_text("[]")
    return tmp_path


def test_command_times_all_decoders(trained, monkeypatch):
    monkeypatch.setattr(decoding, "CHUNK", 16)  # a prompt of several chunks
    options = ["--plan", str(trained / "plan.yaml"), "--runs", str(trained / "runs"), "--results", str(trained / "out")]
    result = CliRunner().invoke(decoding.app, [*options, "--lengths", "8,40", "--device", "cpu"])
    assert result.exception is None, result.output
    rows = results.read([trained / "out" / "cost-quality-decoding.csv"])
    assert len(rows) == 3 * 2 * 3
    weights = {f"{row['variant']}:{row['heads']}": row["weights"] for row in rows}
    # smgk:1 has no run.
    assert weights == {"softmax:2": "trained", "smgk:2": "trained", "smgk:1": "random"}
    caches = {
        (row["variant"], row["length"]): row["value"]
        for row in rows
        if row["metric"] == decoding.CACHE and row["weights"] == "trained"
    }
    # Keys and values of width 4 in fp32: two heads, or one.
    assert caches == {("softmax", "8"): "512", ("softmax", "40"): "2560", ("smgk", "8"): "256", ("smgk", "40"): "1280"}
    assert all(float(row["value"]) > 0 for row in rows)
    lines = decoding.table(rows).splitlines()[2:]
    assert [line.split(" | ")[1:3] for line in lines] == [
        ["`softmax:2`", "8"], ["`softmax:2`", "40"], ["`smgk:2/1`", "8"], ["`smgk:2/1`", "40"],
        ["`smgk:1`", "8"], ["`smgk:1`", "40"],
    ]  # fmt: skip
    # The rows alone are no runs of the study.
    assert "The study has no results" in page.evidence_section(load_plan(), rows, trained, "")


def test_wrong_arguments(trained):
    for options, message in (
        (["--lengths", "8,x"], "--lengths must be positive integers"),
        (["--lengths", "0"], "--lengths must be positive integers"),
        (["--lengths", ""], "--lengths must have at least one number"),
    ):
        result = CliRunner().invoke(decoding.app, options)
        with pytest.raises(ValueError, match=message):
            raise result.exception


def test_random_weights_have_the_shapes_of_the_study():
    arm = Arm.parse("study", "smgk:8/4")
    model = decoding.load_decoder(arm, None, torch.device("meta"))
    assert (model.config.vocab_size, model.config.max_length) == (16_384, 1024)
    assert sum(parameter.numel() for parameter in model.parameters()) == 32_006_720  # as in results/study.csv
    arms = decoding.decoders(load_plan(), ROOT)
    assert arm in arms
    assert not any(arm.overrides or arm.time_of for arm in arms)
    assert not {arm.model.variant for arm in arms} & {"diff", "mla"}
    # Recipes with the models of an earlier one are not timed again.
    assert {arm.recipe for arm in arms} == {"study", "study-m4"}


def test_table_separates_numbers_of_key_and_value_heads():
    numbers = {"softmax:8": (8, ""), "softmax:8/1": (1, ""), "softmax:8/1/8": (8, 1), "softmax:8/1/4": (4, 1)}
    common = {"recipe": decoding.RECIPE, "task": "t", "variant": "softmax", "heads": "8", "length": "4", "gpu": "cpu"}
    rows = [
        {**common, "kv_heads": str(values), "key_heads": str(keys), "metric": decoding.CACHE, "value": f"{index}00000"}
        for index, (values, keys) in enumerate(numbers.values(), 1)
    ]
    lines = decoding.table(rows).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == [f"`{name}`" for name in numbers]
    assert [line.split(" | ")[5] for line in lines] == ["0.1", "0.2", "0.3", "0.4"]


def test_table_without_rows():
    assert decoding.table([]) == ""
