"""Load artefacts that commit aa005c7 wrote, and compare the numbers computed from them.

FIXTURES holds state dicts, run directories, results and save_pretrained folders; its README.md says how they were made.
"""

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mgk
import mgk.models
from mgk.models.sliding_window import sliding_losses

FIXTURES = Path(__file__).parents[1] / "fixtures" / "aa005c7"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))
CONTRACT = json.loads((FIXTURES / "contract.json").read_text(encoding="utf-8"))
STATES = load_file(FIXTURES / "attention_state.safetensors")
TENSORS = load_file(FIXTURES / "expected.safetensors")
SIZES = {"embed_dim": 8, "num_heads": 2, "head_dim": 4}
MAPS = {"favor": lambda: mgk.FAVOR(SIZES["head_dim"]), "dpfp": mgk.DPFP}
# Settings of the run and of the comparison.
SETTINGS = "eval_every=150 batch_size=32 lr=1e-2 model.embed_dim=8 model.ffn_dim=8 model.hidden_dim=8 model.head_dim=4"
SET = [part for setting in SETTINGS.split() for part in ("--set", setting)]
TRAIN = ["train", "demo", "--variant", "smgk", "--heads", "2", "--seed", "3", "--steps", "300", *SET]


def assert_matches(output, name, **tolerance):
    torch.testing.assert_close(output, TENSORS[name], **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))


def shapes(module):
    return {key: list(value.shape) for key, value in module.state_dict().items()}


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def assert_same_rows(actual, expected):
    """Compare two tables: equal columns and texts, numbers up to rounding."""
    assert len(actual) == len(expected)
    for new, old in zip(actual, expected, strict=True):
        assert list(new) == list(old)
        for column, text in old.items():
            if column == "kind":  # a description in words
                continue
            try:
                number = float(text)
            except ValueError:
                assert new[column] == text, column
            else:
                assert float(new[column]) == pytest.approx(number, rel=1e-3, abs=1e-3), column


# Layers.


def layer(settings, make=mgk.Attention):
    """Build a layer from its JSON settings: feature maps by name, variants by their axes."""
    options = {**SIZES, **settings}
    if isinstance(options["variant"], dict):
        options["variant"] = mgk.Variant(**options["variant"])
    if "feature_map" in options:
        options["feature_map"] = MAPS[options["feature_map"]]()
    return make(**options)


def state(name):
    return {key.partition("/")[2]: value for key, value in STATES.items() if key.partition("/")[0] == name}


def test_every_variant_has_a_state():
    assert set(mgk.VARIANTS) >= set(CONTRACT["variants"])
    assert set(EXPECTED["attention"]) >= set(CONTRACT["variants"])


@pytest.mark.parametrize("name", EXPECTED["attention"])
def test_layer_state_loads_with_equal_output(name):
    module = layer(EXPECTED["attention"][name]["settings"])
    assert shapes(module) == EXPECTED["attention"][name]["keys"]
    module.load_state_dict(state(name))
    with torch.no_grad():
        assert_matches(module.eval()(TENSORS["attention.input"]), f"attention.{name}")


def test_multihead_state_loads_with_equal_output():
    module = layer(EXPECTED["multihead"]["settings"], mgk.MultiheadAttention)
    assert shapes(module) == EXPECTED["multihead"]["keys"]
    module.load_state_dict(state("multihead"))
    x = TENSORS["attention.input"]
    with torch.no_grad():
        assert_matches(module.eval()(x, x, x)[0], "multihead")


# Models.


@pytest.mark.parametrize(
    ("run", "inputs"), [("run", ("tokens.classes", "tokens.lengths")), ("run-lm", ("tokens.text",))]
)
def test_model_of_a_run_has_equal_logits(run, inputs):
    model = mgk.models.load_model(FIXTURES / run / "best")
    assert shapes(model) == EXPECTED["models"][run]
    with torch.no_grad():
        assert_matches(model(*(TENSORS[name] for name in inputs)), f"{run}.logits")


@pytest.mark.parametrize("run", ["run", "run-lm"])
def test_saved_model_is_unchanged(run, tmp_path):
    mgk.models.save_model(mgk.models.load_model(FIXTURES / run / "best"), tmp_path)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (FIXTURES / run / "best", tmp_path))
    assert {key: after.get(key) for key in before} == before
    old, new = (load_file(folder / "model.safetensors") for folder in (FIXTURES / run / "best", tmp_path))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[key], new[key]) for key in old)


@pytest.fixture
def hf():
    return pytest.importorskip("mgk.hf")


def test_pretrained_language_model_has_equal_logits(hf):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FIXTURES / "hf-lm").eval()
    assert isinstance(model, hf.MGKForCausalLM)
    assert shapes(model) == EXPECTED["models"]["hf-lm"]
    text, mask = TENSORS["tokens.text"], TENSORS["tokens.mask"]
    with torch.no_grad():
        logits = model(text, attention_mask=mask).logits
    # The logits of padding are undefined.
    torch.testing.assert_close(logits[mask == 1], TENSORS["hf-lm.logits"][mask == 1], rtol=1e-4, atol=1e-5)
    generated = model.generate(text[:1, :5], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, TENSORS["hf-lm.generated"])


def test_pretrained_classifier_has_equal_logits(hf):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(FIXTURES / "hf-classifier").eval()
    assert isinstance(model, hf.MGKForSequenceClassification)
    assert shapes(model) == EXPECTED["models"]["hf-classifier"]
    with torch.no_grad():
        logits = model(TENSORS["tokens.pair"], attention_mask=TENSORS["tokens.pair_mask"]).logits
    assert_matches(logits, "hf-classifier.logits")


def test_converted_model_has_equal_logits(hf):
    model = hf.load_converted(FIXTURES / "hf-converted").eval()
    assert shapes(model) == EXPECTED["models"]["hf-converted"]
    mask = TENSORS["tokens.mask"]
    with torch.no_grad():
        logits = model(TENSORS["tokens.text"], attention_mask=mask).logits
    torch.testing.assert_close(logits[mask == 1], TENSORS["hf-converted.logits"][mask == 1], rtol=1e-4, atol=1e-5)


def test_run_loads_as_transformers_model_and_tokenizer(hf):
    model = hf.MGKForCausalLM.from_run(FIXTURES / "run-lm")
    with torch.no_grad():
        assert_matches(model(TENSORS["tokens.text"]).logits, "run-lm.logits")
    assert hf.tokenizer_of_run(FIXTURES / "run-lm")("key")["input_ids"] == [*b"key"]
    classifier = hf.MGKForSequenceClassification.from_run(FIXTURES / "run")
    classes, lengths = TENSORS["tokens.classes"], TENSORS["tokens.lengths"]
    mask = (torch.arange(classes.shape[1]) < lengths[:, None]).long()
    with torch.no_grad():
        assert_matches(classifier(classes, attention_mask=mask).logits, "run.logits")


# Commands.


def command(*arguments, cwd):
    """Run a command of mgk and return its standard output and error."""
    line = [sys.executable, "-m", "mgk", *map(str, arguments)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MGK_")}
    # The package under test comes before an installed one.
    folders = [str(Path(mgk.__file__).parents[1]), *filter(None, [inherited.get("PYTHONPATH")])]
    environment = {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Directory in which the first command that needs it generates the demo data."""
    return tmp_path_factory.mktemp("data")


def json_lines(printed):
    return [json.loads(line) for line in printed.splitlines()]


def recorded(run, metric):
    """Return the results stored in the run by split."""
    results = json.loads((FIXTURES / run / "result.json").read_text())
    return {row["split"]: row["value"] for row in results if row["metric"] == metric}


@pytest.mark.slow
def test_eval_of_a_run(data, tmp_path):
    (line,) = json_lines(command("eval", FIXTURES / "run", "--data-dir", data, cwd=tmp_path)[0])
    assert line["same_data"]
    # Rounding may change the prediction of one example of 5,000.
    assert line["accuracy"] == pytest.approx(recorded("run", "accuracy")["test"], abs=3e-4)


@pytest.mark.slow
def test_eval_of_a_language_model(tmp_path):
    shutil.copytree(FIXTURES / "text", tmp_path / "text")
    reports = json_lines(command("eval", FIXTURES / "run-lm", "--data-dir", "text", cwd=tmp_path)[0])
    assert all(line["same_data"] for line in reports)
    measured = {line["split"]: line["perplexity_stride_64"] for line in reports}
    model = mgk.models.load_model(FIXTURES / "run-lm" / "best")
    losses, former = {}, {}
    for split, name in (("dev", "valid"), ("test", "test")):
        tokens = torch.tensor([*(FIXTURES / "text" / f"{name}.txt").read_bytes()])
        losses[split] = sliding_losses(model, tokens, stride=64)
        # aa005c7 scored the last 64 positions in the last window, also those that the window before had scored.
        former[split] = torch.cat([losses[split][:-64], sliding_losses(model, tokens[-257:], window=256)[-64:]])
        saved = torch.from_numpy(np.load(FIXTURES / "run-lm" / f"losses-{split}.npy"))
        torch.testing.assert_close(former[split], saved, rtol=1e-4, atol=1e-4)
    perplexities = {split: math.exp(x.double().mean()) for split, x in former.items()}
    assert perplexities == pytest.approx(recorded("run-lm", "perplexity_stride_64"), rel=1e-4)
    assert measured == pytest.approx({split: math.exp(x.double().mean()) for split, x in losses.items()}, rel=1e-4)


@pytest.mark.slow
def test_analyze_of_a_run(data, tmp_path):
    options = ("--matrices", 4, "--removal", 4, "--out", tmp_path / "analysis")
    command("analyze", FIXTURES / "run", "--data-dir", data, *options, cwd=tmp_path)
    assert (tmp_path / "analysis/report.html").stat().st_size > 10_000
    for path in sorted((FIXTURES / "analysis").glob("*.csv")):
        assert_same_rows(rows(tmp_path / "analysis" / path.name), rows(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("likeliest", ("--temperature", 0)), ("drawn", ("--top-k", 8, "--seed", 1))]
)
def test_generate_from_a_run(name, options, tmp_path):
    text, _ = command(
        "generate", FIXTURES / "run-lm", "--prompt", "The key", "--max-tokens", 32, *options, cwd=tmp_path
    )
    assert text == EXPECTED["generated"][name]


@pytest.mark.slow
def test_stopped_run_resumes_to_the_same_end(data, tmp_path):
    """Restore last steps, optimizer moments and example order from the checkpoint."""
    shutil.copytree(FIXTURES / "run-stopped", tmp_path / "run")
    options = ("--accelerator", "cpu", "--out", "run", "--resume", "auto", "--data-dir", data)
    command(*TRAIN, *options, cwd=tmp_path)
    files = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert set(CONTRACT["run"]) <= files
    assert_same_rows(
        [{**row, "unix_time": ""} for row in rows(tmp_path / "run/metrics.csv")],
        [{**row, "unix_time": ""} for row in rows(FIXTURES / "run/metrics.csv")],
    )
    resumed, whole = (load_file(folder / "best/model.safetensors") for folder in (tmp_path / "run", FIXTURES / "run"))
    for key, value in whole.items():
        torch.testing.assert_close(resumed[key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_finished_run_writes_its_stored_results(data, tmp_path):
    shutil.copytree(FIXTURES / "run", tmp_path / "run")
    options = ("--accelerator", "cpu", "--out", "run", "--resume", "auto", "--data-dir", data)
    command(*TRAIN, *options, "--results", "results.csv", cwd=tmp_path)
    written = rows(tmp_path / "results.csv")
    # Later versions append columns.
    assert list(written[0]) == [*CONTRACT["results"], "key_heads"]
    stored = json.loads((FIXTURES / "run/result.json").read_text())
    assert [row["value"] for row in written] == [str(row["value"]) for row in stored]
    assert {row["setup"] for row in written} == {row["setup"] for row in stored}


@pytest.mark.slow
def test_finished_language_model_is_accepted_for_resume(tmp_path):
    """Settings, data, vocabulary and checkpoint match those of the run."""
    shutil.copytree(FIXTURES / "run-lm", tmp_path / "run")
    shutil.copytree(FIXTURES / "text", tmp_path / "text")
    sizes = "eval_every=100 batch_size=4 lr=3e-2 model.embed_dim=8 model.ffn_dim=8 model.head_dim=4"
    settings = [part for setting in sizes.split() for part in ("--set", setting)]
    row = ("--variant", "smgk", "--heads", 2, "--seed", 0, "--steps", 200)
    options = ("--accelerator", "cpu", "--out", "run", "--resume", "auto", "--data-dir", "text")
    command("train", "bytes", *row, *settings, *options, cwd=tmp_path)


@pytest.fixture
def results(tmp_path):
    """Results folder of a finished comparison."""
    folder = tmp_path / "results"
    for part in ("answers", "curves"):
        shutil.copytree(FIXTURES / part, folder / part)
    shutil.copy(FIXTURES / "results.csv", folder / "demo.csv")
    return folder


@pytest.mark.slow
def test_compare_skips_stored_runs(results, data, tmp_path):
    """The setups are equal, so nothing is trained again and the table is the same."""
    options = ("--rows", "softmax:2,smgk:2", "--steps", 300, *SET, "--data-dir", data, "--no-alone")
    _, log = command("compare", "demo", *options, cwd=tmp_path)
    assert "2 of 2 runs are already in results" in log
    table = (results / "demo.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in table if line.startswith(("| softmax:2", "| smgk:2"))] == EXPECTED["table"]


@pytest.mark.slow
def test_compare_redraws_the_table(results, tmp_path):
    command("compare", "demo", "--rows", "softmax:2,smgk:2", "--steps", 300, *SET, "--redraw", cwd=tmp_path)
    table = (results / "demo.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in table if line.startswith(("| softmax:2", "| smgk:2"))] == EXPECTED["table"]
