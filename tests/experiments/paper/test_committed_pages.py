"""Test the answers of the page of evidence, and the committed pages against results/."""

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from experiments.paper import __main__, answers, verdicts
from experiments.paper.evidence_page import gather
from experiments.pictures import DRAWN_FROM
from mgk._core.markdown import MARKED, fill_marked_parts
from tests.experiments.paper.test_evidence_page import record

ROOT = Path(__file__).parents[3]


def test_answers_and_advice_follow_from_the_runs(tmp_path):
    def rows() -> tuple[str, str]:
        made = gather(tmp_path).texts
        return next(line for line in made["answers"].splitlines() if line.startswith("| 1.")), made["advice"]

    for seed in range(2):
        record(tmp_path, "listops-4e-4", "softmax:8", seed, 0.37 + 0.0001 * seed, plateau_step=500)
        record(tmp_path, "listops-4e-4", "smgk:4", seed, 0.37 + 0.0001 * seed, plateau_step=500)
    row, advice = rows()
    assert "ListOps: yes for smgk:4; not measured for mgk:4 |" in row
    assert "Softmax with fewer heads is enough" not in advice
    assert "no run of the study yet" in advice.partition("**Not decided yet**")[2]
    for seed in range(2):
        record(tmp_path, "listops-4e-4", "mgk:4", seed, 0.34 + 0.0001 * seed, plateau_step=500)
        for heads_of_control in (4, 2, 1):
            record(
                tmp_path, "listops-4e-4", f"softmax:{heads_of_control}", seed, 0.37 + 0.0001 * seed, plateau_step=500
            )
    row, advice = rows()
    assert "ListOps: yes for smgk:4; no for mgk:4, and softmax with half the heads suffices too" in row
    assert "Softmax with fewer heads is enough" in advice.partition("**Do not use it when**")[2]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "is not known yet"),
        ("better", "is better than softmax"),
        ("worse", "do not pay at equal training time"),
        ("equal within 0.5 %", "do not pay at equal training time: the decoders are equal within 0.5 % of perplexity."),
        ("undecided (no blocks)", "at equal training time is undecided (no blocks)."),
    ],
)
def test_first_sentence_has_the_answer_at_equal_time(words, sentence):
    assert sentence in answers.first_sentence(words)


def test_equal_quality_at_equal_time_is_no_reason():
    words = ("better", "worse", "equal within 0.5 %", "undecided", "undecided (no blocks)", "")
    assert [answers.verdict_of_study(text) for text in words] == [
        verdicts.HOLDS, verdicts.FAILS, verdicts.FAILS, verdicts.OPEN, verdicts.OPEN, verdicts.OPEN,
    ]  # fmt: skip


def test_prose_stays_and_unknown_markers_are_errors():
    page = "# By hand\n<!-- made: rules -->\nold\n<!-- end -->\nand so on\n"
    assert fill_marked_parts(page, {"rules": "new"}) == page.replace("old", "new")
    with pytest.raises(ValueError, match="'rules'"):
        fill_marked_parts(page, {"summary": "new"})
    with pytest.raises(ValueError, match="no markers"):
        fill_marked_parts("# By hand\n", {"rules": "new"})


@pytest.fixture(scope="module")
def generated():
    return gather(ROOT / "results")


def test_committed_pages_match_the_results(generated):
    paths = ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/evidence").glob("*.md")
    pages = {path: path.read_text(encoding="utf-8") for path in paths}
    for path, page in pages.items():
        # docs/upcycling.md and docs/distributed.md have markers of other generators, with tests of their own.
        names = {match["name"] for match in MARKED.finditer(page)}
        if names & generated.texts.keys():
            assert fill_marked_parts(page, generated.texts) == page, (
                f"run python -m experiments.paper --page {path.name}"
            )
    markers = {name: f"<!-- made: {name} -->" for name in generated.texts}
    assert all(any(marker in page for page in pages.values()) for marker in markers.values())
    evidence = pages[ROOT / "docs" / "evidence.md"]
    assert len(evidence.splitlines()) <= 200
    assert {match["name"] for match in MARKED.finditer(evidence)} == {
        "first",
        "answers",
        "observation",
        "study",
        "advice",
    }


def test_committed_figures_match_the_results(generated):
    for picture in generated.pictures:
        with Image.open(ROOT / "docs" / "figures" / f"{picture.name}.png") as image:
            assert image.text[DRAWN_FROM] == picture.digest, (
                f"{picture.name} is out of date: run python -m experiments.paper"
            )


def test_command_writes_page_and_figures(tmp_path):
    for seed in range(2):
        for row in ("smgk:4", "softmax:8"):
            record(tmp_path / "results", "listops", row, seed, 0.36 + 0.001 * seed, plateau_step=500)
    page = tmp_path / "new" / "evidence.md"
    arguments = ["--results", str(tmp_path / "results"), "--page", str(page)]
    result = CliRunner().invoke(__main__.app, arguments)
    assert result.exception is None, result.output
    assert "| smgk:4 − softmax:8 |" in page.read_text(encoding="utf-8")
    # The pages of the folder with the page's name are filled too.
    behind = tmp_path / "new" / "evidence" / "rules.md"
    behind.parent.mkdir()
    behind.write_text("# Rules\n<!-- made: rules -->\n<!-- end -->\n")
    CliRunner().invoke(__main__.app, arguments)
    assert "**Margin.**" in behind.read_text(encoding="utf-8")
    assert len(list((tmp_path / "new" / "figures").glob("evidence-*.png"))) == 3
    wrong = CliRunner().invoke(__main__.app, [*arguments[:1], str(tmp_path / "nowhere")])
    assert "has no CSV files" in str(wrong.exception)
