"""`mgk analyze` from the command line, and its report in a real browser."""

import csv
import dataclasses
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mgk import tasks
from mgk.analysis import analyse
from mgk.analysis.report import html
from mgk.analysis.report.curves import read_curves
from mgk.analysis.report.html import AnalyzedModel, write_report
from mgk.cli import commands, main
from mgk.models import Classifier, DecoderConfig, EncoderConfig, LanguageModel, save_model

TASK = dataclasses.replace(tasks.TASKS["listops-short"], name="tiny", counts={"test": 60, "dev": 4, "train": 4})


def make_run(directory: Path, variant: str, heads: int) -> Path:
    """What a training leaves behind, without the training."""
    config = EncoderConfig(
        vocab_size=32, num_classes=10, max_length=60, num_heads=heads, head_dim=8, variant=variant, embed_dim=16
    )
    save_model(Classifier(config), directory / "best")
    row = f"{variant}:{heads}"
    (directory / "run.json").write_text(json.dumps({"task": "tiny", "recipe": "tiny", "row": row, "seed": 0}))
    lines = ["step,split,loss,accuracy,lr,seconds"]
    for step in (10, 20, 30):
        lines += [f"{step},train,{3 / step:.3f},0.{step},1e-3,0", f"{step},dev,nan,0.{step + 5},1e-3,0"]
    (directory / "metrics.csv").write_text("\n".join(lines) + "\n")
    return directory


def call(*arguments):
    return CliRunner().invoke(commands.app, ["analyze", *map(str, arguments)])


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    """The report of two runs, made by the command."""
    folder = tmp_path_factory.mktemp("analysis")
    torch.manual_seed(0)
    runs = [make_run(folder / "a", "softmax", 4), make_run(folder / "b", "smgk", 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tasks.TASKS, "tiny", TASK)
        options = ["--data-dir", folder / "data", "--matrices", 20, "--removal", 4, "--map-size", 24]
        result = call(*runs, *options, "--out", folder / "out")
    assert result.exception is None, result.output
    return folder / "out", result.output


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_it_says_the_verdict_and_where_the_report_is(analysed):
    out, said = analysed
    assert re.search(r"softmax:4 tiny seed 0: About \d\.\d of 8 heads are effectively different", said)
    assert re.search(r"smgk:2 tiny seed 0: About \d\.\d of 4 heads", said)
    assert "Removing one head" in said
    assert re.search(r"smgk with 2 heads has \d+ % fewer parameters and \d+ % fewer FLOPs", said)
    assert "mixture components are" in said
    assert str(out / "report.html") in said


def test_figures_and_numbers_lie_beside_it(analysed):
    out, _ = analysed
    for name in ("maps-1", "maps-2", "similarity-1", "similarity-2", "ranks", "curves"):
        assert (out / f"{name}.png").stat().st_size > 1000
        assert "<svg" in (out / f"{name}.svg").read_text()
    layers = rows(out / "layers.csv")
    assert [(row["layer"], row["heads"]) for row in layers] == [("1", "4"), ("2", "4"), ("1", "2"), ("2", "2")]
    assert all(1 <= float(row["different_by_maps"]) <= int(row["heads"]) for row in layers)
    ranks = rows(out / "ranks.csv")
    assert len(ranks) == 2 * 20 + 2 * 20
    assert all(0 < int(row["rank"]) <= int(row["size"]) for row in ranks)
    assert len(rows(out / "pairs.csv")) == 2 * 6 + 2 * 1
    assert len(rows(out / "components.csv")) == 2 * 2 * 2
    assert {row["metric"] for row in rows(out / "curves.csv")} == {"loss", "accuracy"}
    assert {row["variant"] for row in rows(out / "costs.csv")} == {"softmax", "mgk", "smgk"}
    assert not list(out.glob(".*.tmp"))


def test_curves_leave_out_what_was_not_measured(tmp_path):
    curves = read_curves(make_run(tmp_path / "a", "softmax", 1), "a")
    found = {(curve.metric, curve.split): (curve.steps, curve.values) for curve in curves}
    assert found["accuracy", "dev"] == ([10, 20, 30], [0.15, 0.25, 0.35])
    assert ("loss", "dev") not in found
    (tmp_path / "a" / "metrics.csv").write_text("step,split,loss\n1,train,two\n")
    with pytest.raises(ValueError, match="line 2"):
        read_curves(tmp_path / "a", "a")
    assert read_curves(tmp_path, "none") == []


def test_the_page_needs_no_network(analysed):
    page = (analysed[0] / "report.html").read_text()
    for outside in ("http:", "https:", "<link", 'src="/', "@import", "fetch(", "XMLHttpRequest"):
        assert outside not in page.replace('"http://www.w3.org/2000/svg"', "")


def test_names_cannot_end_the_script(tmp_path):
    torch.manual_seed(0)
    config = EncoderConfig(vocab_size=8, num_classes=2, max_length=16, num_heads=2, head_dim=4)
    found = analyse(Classifier(config), [torch.randint(0, 8, (1, 12))], removal=0)
    evil = "</script><script>alert(1)</script>"
    write_report(tmp_path / "report.html", [AnalyzedModel(evil, evil, found, [evil], [])], [], [], evil)
    assert evil not in (tmp_path / "report.html").read_text()


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium; without one these tests are skipped, or fail where MGK_NEEDS_BROWSER says so."""
    try:
        from playwright import sync_api
    except ImportError as error:
        missing(str(error))
    with sync_api.sync_playwright() as playwright:
        installed = next(filter(None, map(shutil.which, BROWSERS)), None)
        if installed is None and not Path(playwright.chromium.executable_path).exists():
            missing("no Chromium is installed: make browser")
        # Chromium's own sandbox does not start for root, and nothing foreign is opened here.
        started = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        yield started
        started.close()


def missing(reason):
    (pytest.fail if os.environ.get("MGK_NEEDS_BROWSER") else pytest.skip)(reason)


@pytest.fixture
def open_page(browser):
    """Opens a file; any error of the page, and any request for anything but the file, fails the test."""
    pages, wrong = [], []

    def open_file(path, width=1280, height=900, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        pages.append(page)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("request", lambda asked: wrong.append(asked.url) if asked.url[:5] not in ("file:", "data:") else None)
        page.goto(path.resolve().as_uri())
        page.wait_for_selector("#map[data-painted]")
        return page

    yield open_file
    for page in pages:
        page.close()
    assert wrong == []


def painted(page):
    """The pixels of the large map, once the one wanted has been painted."""
    page.wait_for_function(
        "document.getElementById('map').dataset.requested === document.getElementById('map').dataset.painted"
    )
    return page.evaluate("document.getElementById('map').toDataURL()")


@pytest.mark.slow
def test_choosing_a_head_changes_what_is_shown(analysed, open_page, tmp_path):
    page = open_page(analysed[0] / "report.html")
    assert re.match(r"About \d\.\d of 8 heads are effectively different", page.inner_text("#headline"))
    assert page.inner_text("#map-title") == "Layer 1, head 1"
    before, facts = painted(page), page.inner_text("#facts")
    page.select_option("#head", label="3")
    assert page.inner_text("#map-title") == "Layer 1, head 3"
    assert painted(page) != before
    assert page.inner_text("#facts") != facts
    assert page.get_attribute("#thumbs button:nth-child(3)", "aria-pressed") == "true"
    similarity = page.inner_html("#similarity")
    page.select_option("#layer", label="2")
    assert page.inner_text("#map-title") == "Layer 2, head 3"
    assert page.inner_html("#similarity") != similarity
    page.click("#thumbs button:nth-child(2)")
    assert page.inner_text("#map-title") == "Layer 2, head 2"
    page.screenshot(path=tmp_path / "report.png", full_page=True)
    assert (tmp_path / "report.png").stat().st_size > 20_000


@pytest.mark.slow
def test_the_other_model_shows_its_mixture(analysed, open_page):
    page = open_page(analysed[0] / "report.html")
    assert not page.is_visible("#mixture-section")
    page.click("#models button:nth-child(2)")
    assert "of 4 heads" in page.inner_text("#headline")
    assert page.is_visible("#mixture-section")
    assert page.locator("#mixture-table tbody tr").count() == 2
    assert page.locator("#curves figure").count() == 3
    page.select_option("#measure", "outputs")
    assert "CKA" in page.inner_text("#measure")
    found = json.loads(page.evaluate("JSON.stringify(DATA.models[1].layers[0].cka)"))
    shown = page.inner_text("#similarity")
    assert f"{found[0][1]:.2f}" in shown


@pytest.mark.slow
def test_the_pixels_are_the_numbers(analysed, open_page):
    """A level of the pooled map, read by pointing at it, is the weight that the analysis found."""
    page = open_page(analysed[0] / "report.html")
    before = painted(page)
    page.select_option("#pooling", "max")
    assert painted(page) != before
    page.hover("#map", position={"x": 12, "y": 12})
    page.wait_for_function("document.getElementById('readout').textContent.startsWith('query')")
    text = page.inner_text("#readout")
    assert re.match(r"query 1–\d → key 1–\d: max weight", text), text


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(analysed, open_page, scheme):
    page = open_page(analysed[0] / "report.html", 390, 844, scheme)
    for model in (1, 2):
        page.click(f"#models button:nth-child({model})")
        painted(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.search(r"\d+", ground)[0]) < 60) == (scheme == "dark")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_tapping_a_large_map_shows_that_part_in_full(open_page, tmp_path, monkeypatch, inside):
    """Tiles lie in the page, or beside it where they are too large."""
    if not inside:
        monkeypatch.setattr(html, "MAX_EMBEDDED_BYTES", 0)
    torch.manual_seed(0)
    config = EncoderConfig(vocab_size=8, num_classes=2, max_length=1100, num_heads=1, num_layers=1, head_dim=4)
    found = analyse(
        Classifier(config), [torch.randint(0, 8, (1, 1100))], removal=0, tiles=tmp_path / "maps", threshold=1e-3
    )
    write_report(tmp_path / "report.html", [AnalyzedModel("m", "", found, [], [], tiles=tmp_path / "maps")], [], [], "")
    page = open_page(tmp_path / "report.html")
    assert page.inner_text("#tile-title") == "Full resolution: queries 1–512, keys 1–512"
    before = page.get_attribute("#tile", "src")
    assert before.startswith("data:") == inside
    box = page.locator("#map").bounding_box()
    page.click("#map", position={"x": 0.7 * box["width"], "y": 0.99 * box["height"]})
    page.wait_for_function("document.getElementById('tile-title').textContent.includes('queries 1025')")
    assert page.inner_text("#tile-title") == "Full resolution: queries 1025–1100, keys 513–1024"
    assert page.get_attribute("#tile", "src") != before
    size = "[document.getElementById('tile').naturalWidth, document.getElementById('tile').naturalHeight].join()"
    page.wait_for_function(f"{size} === '512,76'")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose analysis draws no figures: they are looked at above."""
    monkeypatch.setattr("mgk.analysis.report.figures.draw_all", lambda *arguments: [])
    monkeypatch.setitem(tasks.TASKS, "tiny", TASK)
    return make_run(tmp_path / "run", "smgk", 2)


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs the command as a shell would, and expects one line that says it, and exit code 2."""
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)

    def run_it(says, *arguments):
        monkeypatch.setattr(sys, "argv", ["mgk", "analyze", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("mgk: ")
        assert says in lines[0]

    return run_it


def test_user_ids_and_lengths(run, tmp_path):
    ids = tmp_path / "ids.txt"
    ids.write_text(" ".join(["3"] * 20) + "\n" + ",".join(["4"] * 30))
    assert call(run, "--ids", ids, "--removal", 0).exception is None
    found = rows(run / "analysis" / "ranks.csv")
    assert {row["size"] for row in found} == {"20", "30"}
    np.save(tmp_path / "ids.npy", np.full((2, 40), 5))
    assert call(run, "--ids", tmp_path / "ids.npy", "--length", 10, "--removal", 0).exception is None
    assert {row["size"] for row in rows(run / "analysis" / "ranks.csv")} == {"10"}


def test_options_arrive(run, tmp_path, refused):
    options = [run, "--data-dir", tmp_path / "data", "--removal", 0, "--matrices", 4]

    def ranks(*more):
        assert call(*options, *more).exception is None
        return [(row["size"], row["rank"]) for row in rows(run / "analysis" / "ranks.csv")]

    plain = ranks()
    assert ranks() == plain
    assert ranks("--seed", 1) != plain
    assert all(int(rank) == 1 for _, rank in ranks("--threshold", 0.9))
    assert call(*options, "--split", "dev").exception is None
    assert "2 examples of tiny, dev" in (run / "analysis" / "report.html").read_text()
    refused("must be one of", *options, "--split", "nothing")
    refused("memory is too little to rank a matrix", *options, "--memory", "1e-5")


def test_runs_of_the_same_kind_are_told_apart(run, tmp_path):
    other = make_run(tmp_path / "elsewhere" / "run", "smgk", 2)
    ids = tmp_path / "ids.txt"
    ids.write_text("3 " * 30)
    out = tmp_path / "out"
    # Left by an earlier analysis, and too many for the page.
    stale = out / "maps" / "1-run" / "layer9-head1-0000.png"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"x")
    result = call(run, other, "--ids", ids, "--removal", 0, "--map-size", 8, "--out", out)
    assert result.exception is None, result.output
    assert {row["model"] for row in rows(out / "layers.csv")} == {f"smgk:2 tiny seed 0 ({x})" for x in (run, other)}
    assert not stale.exists()
    for number in (1, 2):
        assert len(list((out / "maps" / f"{number}-run").glob("*.png"))) == 2 * 2


def test_length_of_a_runs_own_examples(run, tmp_path, refused):
    options = ["--data-dir", tmp_path / "data", "--removal", 0]
    assert call(run, *options, "--length", 12).exception is None
    assert {row["size"] for row in rows(run / "analysis" / "ranks.csv")} == {"12"}
    refused("--length finds no example", run, *options, "--length", 60)
    refused("is more than the model's 60 positions", run, *options, "--length", 61)


def test_a_language_model_on_its_text_and_on_the_users(tmp_path, monkeypatch, refused):
    monkeypatch.setattr("mgk.analysis.report.figures.draw_all", lambda *arguments: [])
    config = DecoderConfig(
        vocab_size=256, max_length=24, embed_dim=16, ffn_dim=16, num_layers=2, num_heads=2, head_dim=8, variant="smgk"
    )
    run = tmp_path / "run"
    save_model(LanguageModel(config), run / "best")
    (run / "run.json").write_text(json.dumps({"task": "bytes", "recipe": "bytes", "row": "smgk:2", "seed": 0}))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.txt").write_text("a text to model, over and over. " * 999)
    found = call(run, "--data-dir", tmp_path / "data", "--matrices", 6, "--removal", 2)
    assert found.exception is None, found.output
    assert "% fewer FLOPs" in found.output
    assert {row["size"] for row in rows(run / "analysis" / "ranks.csv")} == {"24"}
    assert call(run, "--text", "some words of mine", "--removal", 0).exception is None
    page = (run / "analysis" / "report.html").read_text()
    assert '"tokens":["s","o","m","e","␣","w"' in page
    refused("--text is 5 tokens long, and at least 8 are needed", run, "--text", "hello")


def test_what_is_wrong_with_a_run_is_one_line(run, tmp_path, refused):
    refused("is not a run directory (no run.json)", tmp_path / "nowhere")
    refused("give one or more run directories, or --hf MODEL")
    refused("--text does not fit this model, whose task has no text", run, "--text", "some text of mine")
    refused("--images requires --hf", run, "--images", "x.png")
    refused("--memory must be more than 0", run, "--memory", "0")
    ids = tmp_path / "ids.txt"
    for text, says in (
        ("1 2 3", "a sample of 3 tokens, and at least 8"),
        ("1 b", "integers"),
        ("99 " * 9, "ends at 31"),
    ):
        ids.write_text(text)
        refused(says, run, "--ids", ids)
    refused("--ids must name a file", run, "--ids", tmp_path / "none")
    weights = run / "best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    refused("is damaged", run, "--ids", ids)
    weights.unlink()
    refused("model.safetensors is missing", run, "--ids", ids)
    (run / "run.json").write_text("{")
    refused("run.json is damaged", run)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A GPT-2 with random weights and a tokeniser of words, on disk."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, **ends)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    words = {word: n for n, word in enumerate(["?", "<s>", "</s>", "the", "cat", "sat", "on", "mat"])}
    tokeniser = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokeniser.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokeniser, unk_token="?").save_pretrained(folder)
    return folder


def test_a_transformers_model_on_text_of_the_users(gpt2, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat " * 3)
    result = call("--hf", gpt2, "--text", tmp_path / "text.txt", "--text", "the mat " * 40, "--out", tmp_path / "out")
    assert result.exception is None, result.output
    assert "of 4 heads are effectively different" in result.output
    assert "Each head of each layer costs about" in result.output
    # 18 words, and 80 cut to the model's 32 positions.
    assert {row["size"] for row in rows(tmp_path / "out" / "ranks.csv")} == {"18", "32"}
    assert '"tokens":["the","cat","sat"' in (tmp_path / "out" / "report.html").read_text()


def test_a_vision_model_on_images(tmp_path, refused):
    transformers = pytest.importorskip("transformers")
    from matplotlib import image

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**small, image_size=16, patch_size=4)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    image.imsave(tmp_path / "x.png", np.random.default_rng(0).random((20, 24, 3)))
    result = call("--hf", tmp_path / "vit", "--images", tmp_path / "x.png", "--out", tmp_path / "out")
    assert result.exception is None, result.output
    assert {row["size"] for row in rows(tmp_path / "out" / "ranks.csv")} == {"17"}
    (tmp_path / "y.png").write_text("no image")
    refused("is not a readable image", "--hf", tmp_path / "vit", "--images", tmp_path / "y.png")


def test_what_is_wrong_with_a_transformers_model_is_one_line(gpt2, tmp_path, refused):
    transformers = pytest.importorskip("transformers")
    refused("--hf requires an input", "--hf", gpt2)
    refused("--text is 2 tokens long, and at least 8 are needed", "--hf", gpt2, "--text", "the cat")
    refused("18 tokens long, and at least 20 are needed", "--hf", gpt2, "--text", "the cat " * 9, "--length", 20)
    refused("give only one of --text, --ids and --images", "--hf", gpt2, "--text", "a", "--images", "b")
    refused("--images needs a vision model", "--hf", gpt2, "--images", "b")
    refused("cannot be loaded", "--hf", tmp_path, "--text", "a")
    refused("cannot be loaded", "--hf", tmp_path / "nothing", "--text", "a")
    ids = tmp_path / "ids.txt"
    ids.write_text("70 " * 9)
    refused("vocabulary ends at 63", "--hf", gpt2, "--ids", ids)
    ids.write_text("7 " * 9)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, **ends)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    refused("has no attention layers", "--hf", tmp_path / "mamba", "--ids", ids)
    refused("--text needs a tokenizer", "--hf", tmp_path / "mamba", "--text", "the cat " * 9)
    weights = tmp_path / "mamba" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    refused("cannot be loaded", "--hf", tmp_path / "mamba", "--ids", ids)
