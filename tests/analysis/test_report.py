"""The report of `mgk analyze`: its files, and the page in a real browser."""

import base64
import hashlib
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from mgk import tasks
from mgk._core.palette import colour_of
from mgk.analysis import analyse
from mgk.analysis.report import html
from mgk.analysis.report.curves import Curve, read_curves
from mgk.analysis.report.figures import draw_all
from mgk.analysis.report.html import AnalyzedModel, write_report
from mgk.models import Classifier, EncoderConfig
from tests.support.analyzed_runs import TASK, make_run, read_csv, run_analyze


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory):
    """Folder and printed output of the report of two runs."""
    folder = tmp_path_factory.mktemp("analysis")
    torch.manual_seed(0)
    runs = [make_run(folder / "a", "softmax", 4, scale=8), make_run(folder / "b", "smgk", 2, scale=8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tasks.TASKS, "tiny", TASK)
        options = ["--data-dir", folder / "data", "--matrices", 20, "--removal", 4, "--map-size", 24]
        result = run_analyze(*runs, *options, "--out", folder / "out")
    assert result.exception is None, result.output
    return folder / "out", result.output


def test_command_prints_findings_and_path_of_the_report(analyzed):
    out, printed = analyzed
    assert re.search(r"softmax:4 tiny seed 0: About \d\.\d of 8 heads are effectively different", printed)
    assert re.search(r"smgk:2 tiny seed 0: About \d\.\d of 4 heads", printed)
    assert "Removing one head" in printed
    assert re.search(r"smgk with 2 heads has \d+ % fewer parameters and \d+ % fewer FLOPs", printed)
    assert "mixture components are" in printed
    assert str(out / "report.html") in printed


def test_figures_and_tables_are_written_beside_the_page(analyzed):
    out, _ = analyzed
    for name in ("maps-1", "maps-2", "similarity-1", "similarity-2", "ranks", "curves"):
        assert (out / f"{name}.png").stat().st_size > 1000
        assert "<svg" in (out / f"{name}.svg").read_text()
    layers = read_csv(out / "layers.csv")
    assert [(row["layer"], row["heads"]) for row in layers] == [("1", "4"), ("2", "4"), ("1", "2"), ("2", "2")]
    assert all(1 <= float(row["different_by_maps"]) <= int(row["heads"]) for row in layers)
    ranks = read_csv(out / "ranks.csv")
    assert len(ranks) == 2 * 20 + 2 * 20
    assert all(0 < int(row["rank"]) <= int(row["size"]) for row in ranks)
    assert len(read_csv(out / "pairs.csv")) == 2 * 6 + 2 * 1
    assert len(read_csv(out / "components.csv")) == 2 * 2 * 2
    assert {row["metric"] for row in read_csv(out / "curves.csv")} == {"loss", "accuracy"}
    assert {row["variant"] for row in read_csv(out / "costs.csv")} == {"softmax", "mgk", "smgk"}
    assert not list(out.glob(".*.tmp"))


def test_figures_have_the_colours_of_the_variants(analyzed):
    out, _ = analyzed
    for name in ("ranks", "curves"):
        drawn = set(re.findall(r"stroke: (#[0-9a-f]{6})", (out / f"{name}.svg").read_text()))
        assert {colour_of("softmax"), colour_of("smgk")} <= drawn


def test_curves_leave_out_missing_values(tmp_path):
    curves = read_curves(make_run(tmp_path / "a", "softmax", 1), "a")
    points = {(curve.metric, curve.split): (curve.steps, curve.values) for curve in curves}
    assert points["accuracy", "dev"] == ([10, 20, 30], [0.15, 0.25, 0.35])
    assert ("loss", "dev") not in points
    (tmp_path / "a" / "metrics.csv").write_text("step,split,loss\n1,train,two\n")
    with pytest.raises(ValueError, match="line 2"):
        read_curves(tmp_path / "a", "a")
    (tmp_path / "a" / "metrics.csv").write_text("step,loss\n1,2.0\n")
    with pytest.raises(ValueError, match="is damaged: line 2"):
        read_curves(tmp_path / "a", "a")
    assert read_curves(tmp_path, "none") == []


def test_page_needs_no_network(analyzed):
    page = (analyzed[0] / "report.html").read_text()
    for outside in ("http:", "https:", "<link", 'src="/', "@import", "fetch(", "XMLHttpRequest"):
        assert outside not in page.replace('"http://www.w3.org/2000/svg"', "")


def test_policy_allows_the_scripts_of_the_page_and_no_network(analyzed):
    page = (analyzed[0] / "report.html").read_text()
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*)">', page)
    sources = {directive.split()[0]: directive.split()[1:] for directive in policy.split("; ")}
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == page.count("<script") == 3
    assert sources.pop("script-src") == [f"'sha256-{digest}'" for digest in digests]
    assert sources == {
        "default-src": ["'none'"],
        "style-src": ["'unsafe-inline'"],
        "img-src": ["data:", "'self'", "file:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }


def test_names_cannot_end_the_script(tmp_path):
    torch.manual_seed(0)
    config = EncoderConfig(vocab_size=8, num_classes=2, max_length=16, num_heads=2, head_dim=4)
    analysis = analyse(Classifier(config), [torch.randint(0, 8, (1, 12))], removal=0)
    evil = "</script><script>alert(1)</script>"
    write_report(tmp_path / "report.html", [AnalyzedModel(evil, evil, analysis, [evil], [])], [], [], evil)
    assert evil not in (tmp_path / "report.html").read_text()


def test_dollar_signs_in_names_are_not_tex(tmp_path):
    torch.manual_seed(0)
    config = EncoderConfig(vocab_size=8, num_classes=2, max_length=16, num_heads=2, head_dim=4)
    analysis = analyse(Classifier(config), [torch.randint(0, 8, (1, 12))], removal=0)
    name = r"a$\frac{$b$_$"
    curve = Curve(name, "$dev$", "$loss_$", [1, 2], [3.0, 4.0])
    assert "curves.png" in draw_all(tmp_path, {name: analysis}, [curve])
    assert name in re.sub("&[a-z]+;", "", (tmp_path / "curves.svg").read_text())


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser():
    """Start a headless Chromium; without one these tests are skipped, or fail if MGK_NEEDS_BROWSER is set."""
    try:
        from playwright import sync_api
    except ImportError as error:
        missing(str(error))
    with sync_api.sync_playwright() as playwright:
        installed = next(filter(None, map(shutil.which, BROWSERS)), None)
        if installed is None and not Path(playwright.chromium.executable_path).exists():
            missing("no Chromium is installed: make browser")
        # Chromium's sandbox does not start for root; only local files are opened.
        started = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        yield started
        started.close()


def missing(reason):
    (pytest.fail if os.environ.get("MGK_NEEDS_BROWSER") else pytest.skip)(reason)


@pytest.fixture
def open_page(browser):
    """Open a file in the browser; page errors and requests beyond the file fail the test."""
    pages, errors = [], []

    def open_file(path, width=1280, height=900, scheme="light"):
        touch = {"has_touch": True, "is_mobile": True} if width < 500 else {}
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, **touch)
        pages.append(page)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda sent: errors.append(sent.url) if sent.url[:5] not in ("file:", "data:") else None)
        page.goto(path.resolve().as_uri())
        page.wait_for_selector("#map[data-painted]")
        return page

    yield open_file
    for page in pages:
        page.close()
    assert errors == []


def painted(page):
    """Return the pixels of the large map after it has been painted."""
    page.wait_for_function(
        "document.getElementById('map').dataset.requested === document.getElementById('map').dataset.painted"
    )
    return page.evaluate("document.getElementById('map').toDataURL()")


@pytest.mark.slow
def test_selecting_a_head_updates_the_page(analyzed, open_page, tmp_path):
    page = open_page(analyzed[0] / "report.html")
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
def test_model_with_mixture_shows_its_components(analyzed, open_page):
    page = open_page(analyzed[0] / "report.html")
    assert not page.is_visible("#mixture-section")
    page.click("#models button:nth-child(2)")
    assert "of 4 heads" in page.inner_text("#headline")
    assert page.is_visible("#mixture-section")
    assert page.locator("#mixture-table tbody tr").count() == 2
    assert page.locator("#curves figure").count() == 3
    page.select_option("#measure", "outputs")
    assert "CKA" in page.inner_text("#measure")
    cka = json.loads(page.evaluate("JSON.stringify(DATA.models[1].layers[0].cka)"))
    assert f"{cka[0][1]:.2f}" in page.inner_text("#similarity")


@pytest.mark.slow
def test_pointing_at_the_map_shows_the_weight(analyzed, open_page):
    page = open_page(analyzed[0] / "report.html")
    before = painted(page)
    page.select_option("#pooling", "max")
    assert painted(page) != before
    page.hover("#map", position={"x": 12, "y": 12})
    page.wait_for_function("document.getElementById('readout').textContent.startsWith('query')")
    text = page.inner_text("#readout")
    assert re.match(r"query 1–\d → key 1–\d: max weight", text), text


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone(analyzed, open_page, scheme):
    page = open_page(analyzed[0] / "report.html", 390, 844, scheme)
    for model in (1, 2):
        page.click(f"#models button:nth-child({model})")
        painted(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    # Columns beyond the edge are announced, and the rows keep their names while they scroll.
    for table in ("#mixture-table", "#cost-table"):
        assert page.is_visible(f"{table} .hint")
        page.evaluate(f"document.querySelector('{table} .scroll').scrollLeft = 999")
        name, box = (page.locator(f"{table} {part}").bounding_box() for part in ("td >> nth=0", ".scroll"))
        assert name["x"] == pytest.approx(box["x"], abs=1)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.search(r"\d+", ground)[0]) < 60) == (scheme == "dark")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground


@pytest.mark.slow
def test_tapping_on_a_phone_shows_numbers(analyzed, open_page):
    """Touch screens have no pointer: a tap reads a weight of the map, and the value of a bar or a point."""
    page = open_page(analyzed[0] / "report.html", 390, 844)
    assert page.inner_text("#readout") == "Tap the map, or point at it, to read a weight."
    page.tap("#map", position={"x": 12, "y": 12})
    page.wait_for_function("document.getElementById('readout').textContent.startsWith('query 1')")
    page.tap("#moved rect[rx] >> nth=1")
    assert re.fullmatch(r"head 2: \d+\.\d %", page.inner_text("figure:has(#moved) .picked"))
    page.tap("#flops circle[fill=transparent] >> nth=-1")
    assert re.match(r"heads 4: softmax \S+; smgk \S+", page.inner_text("figure:has(#flops) .picked"))


@pytest.mark.slow
def test_axes_and_curves_can_be_told_apart(analyzed, open_page):
    page = open_page(analyzed[0] / "report.html")
    assert page.evaluate("tickLabels(ticks(100.0011, 100.0019))") == [f"100.00{n}" for n in (12, 14, 16, 18)]
    assert page.evaluate("tickLabels([0, 0.025, 0.05], ' %')") == ["0 %", "2.5 %", "5.0 %"]
    assert page.evaluate("tickLabels([0, 500000, 1000000])") == ["0", "0.5M", "1.0M"]
    labels = page.evaluate(
        "[...document.querySelectorAll('figure svg[role=img]')].filter((svg) => svg.querySelector('line.grid'))"
        ".map((svg) => [...svg.querySelectorAll('text[text-anchor=end]')].map((text) => text.textContent))"
    )
    assert labels
    assert all(len(set(names)) == len(names) > 1 for names in labels)
    # softmax and sMGK have the same FLOPs: their lines differ in width and dashes, and each has its name at its end.
    styles = page.evaluate(
        "[...document.querySelectorAll('#flops path')].map((path) => "
        "[path.getAttribute('stroke-width'), path.getAttribute('stroke-dasharray')])"
    )
    assert len({width for width, _ in styles}) == len({dashes for _, dashes in styles}) == 3
    ends = page.evaluate(
        "[...document.querySelectorAll('#flops .end-label')].map((text) => [text.textContent, +text.getAttribute('y')])"
    )
    assert {name for name, _ in ends} == {"softmax", "mgk", "smgk"}
    heights = sorted(height for _, height in ends)
    assert all(below - above >= 12 for above, below in itertools.pairwise(heights))
    colours = page.evaluate("DATA.colours")
    assert {name: colours[name] for name in ("softmax", "mgk", "smgk")} == {
        name: colour_of(name) for name in ("softmax", "mgk", "smgk")
    }


@pytest.mark.slow
@pytest.mark.parametrize("embedded", [True, False])
def test_tapping_a_large_map_shows_full_resolution(open_page, tmp_path, monkeypatch, embedded):
    """Tiles are embedded in the page, or are files beside it if they are large."""
    if not embedded:
        monkeypatch.setattr(html, "MAX_EMBEDDED_BYTES", 0)
    torch.manual_seed(0)
    config = EncoderConfig(vocab_size=8, num_classes=2, max_length=1100, num_heads=1, num_layers=1, head_dim=4)
    analysis = analyse(
        Classifier(config), [torch.randint(0, 8, (1, 1100))], removal=0, tiles=tmp_path / "maps", threshold=1e-3
    )
    write_report(
        tmp_path / "report.html", [AnalyzedModel("m", "", analysis, [], [], tiles=tmp_path / "maps")], [], [], ""
    )
    page = open_page(tmp_path / "report.html")
    assert page.inner_text("#tile-title") == "Full resolution: queries 1–512, keys 1–512"
    before = page.get_attribute("#tile", "src")
    assert before.startswith("data:") == embedded
    box = page.locator("#map").bounding_box()
    page.click("#map", position={"x": 0.7 * box["width"], "y": 0.99 * box["height"]})
    page.wait_for_function("document.getElementById('tile-title').textContent.includes('queries 1025')")
    assert page.inner_text("#tile-title") == "Full resolution: queries 1025–1100, keys 513–1024"
    assert page.get_attribute("#tile", "src") != before
    size = "[document.getElementById('tile').naturalWidth, document.getElementById('tile').naturalHeight].join()"
    page.wait_for_function(f"{size} === '512,76'")
