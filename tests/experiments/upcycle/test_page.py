"""Merged sentence encoders: plan, measurements, page."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from PIL import Image

from experiments.pictures import DRAWN_FROM
from experiments.upcycle import arms, page
from mgk.training import results

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results" / "upcycle.csv"


def rows_of(arm, **metrics):
    common = dict.fromkeys((*results.COLUMNS, *arms.EXTRA_COLUMNS), "")
    return [
        {**common, **arm.key(), "metric": metric, "value": str(value), "params": "1000", "cache": str(arm.cache)}
        for metric, value in metrics.items()
    ]


def test_plan_has_every_arm_once():
    plan = arms.plan()
    assert len(plan) == len(set(plan))
    fixed = [arm for arm in plan if arm.budget is None]
    assert {(arm.key_heads, arm.value_heads) for arm in fixed} == {(12, 12), *arms.NUMBERS}
    assert all(12 % arm.key_heads == 12 % arm.value_heads == 0 for arm in fixed)
    assert [arm.budget for arm in plan if arm.budget] == list(arms.BUDGETS)
    trained = [arm for arm in plan if arm.steps]
    assert {arm.seed for arm in trained} == set(arms.SEEDS)
    assert arms.Arm("svd", 1, 12).cache == pytest.approx(13 / 24)


def test_measured_arms_are_not_repeated():
    arm = arms.Arm("svd", 6, 6, steps=arms.STEPS, seed=1)
    rows = rows_of(arm, cosine=0.9)
    assert arms.is_measured(arm, rows)
    for other in (arms.Arm("svd", 6, 6), arms.Arm("mean", 6, 6, steps=arms.STEPS, seed=1)):
        assert not arms.is_measured(other, rows)
    assert not arms.is_measured(arm, rows_of(arm, spearman=0.9))


def test_spearman_uses_mean_ranks_of_ties():
    assert arms.spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert arms.spearman([4, 3, 2, 1], [10, 20, 30, 40]) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
    assert arms.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_missing_data_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"sts-dev.csv is missing: unpack the STS benchmark"):
        arms.read_pairs(tmp_path, "dev")
    (tmp_path / "stsb").mkdir()
    (tmp_path / "stsb" / "sts-dev.csv").write_text("g\tf\ty\t0\t4.5\tA cat.\tA dog.\n", encoding="utf-8")
    assert arms.read_pairs(tmp_path, "dev") == ([4.5], ["A cat."], ["A dog."])


def test_tables_have_means_of_seeds_and_gaps():
    trained = [arms.Arm("svd", 6, 6, steps=arms.STEPS, seed=seed) for seed in (0, 1)]
    rows = rows_of(arms.Arm("none", 12, 12), cosine=1.0) + rows_of(arms.Arm("svd", 6, 6), cosine=0.9, latency_ms=7)
    rows += rows_of(trained[0], cosine=0.94) + rows_of(trained[1], cosine=0.96)
    text = page.table(rows, "cosine")
    assert "| 12 / 12 | 1.00 | 1.000 | – |" in text
    assert "| 6 / 6 | 0.50 | 0.900 | – | – | 0.950 ± 0.014 (2) | – | – |" in text
    assert "| 6 / 6 | 1,000 | 9,216 | 7 |" in page.sizes(rows)
    assert page.picture(rows).data["SVD, trained"] == [[0.5, "6/6", pytest.approx(0.95)]]
    rows += rows_of(arms.Arm("svd", 0, 0, budget=0.5), cosine=0.99)
    assert "| 0.5 | 0.500 | 1,000 | 0.990 | – |" in page.budget_table(rows)
    assert page.picture(rows).data[page.PER_LAYER] == [[0.5, "", 0.99]]
    missing = len(arms.plan()) - 5
    assert f"{missing} of {len(arms.plan())} planned measurements are missing" in page.source(
        [{**row, "torch": "2", "transformers": "5", "gpu": "cpu", "commit": "a", "date": "today"} for row in rows]
    )


def test_page_is_made_from_the_results(tmp_path):
    """Check that the marked parts of the page and its figure are those of results/upcycle.csv."""
    text = (ROOT / "docs" / "upcycling.md").read_text(encoding="utf-8")
    copy = tmp_path / "upcycling.md"
    copy.write_text(
        re.sub(r"(<!-- made: \w+ -->\n).*?(<!-- end -->)", r"\1\2", text, flags=re.DOTALL), encoding="utf-8"
    )
    page.write_page(RESULTS, copy)
    assert copy.read_text(encoding="utf-8") == text
    digest = Image.open(ROOT / "docs" / "figures" / "upcycling.png").text[DRAWN_FROM]
    assert digest == page.picture(page.read_results(RESULTS)).digest


def test_measurements_of_a_study(monkeypatch, tmp_path):
    """Measure a tiny model instead of the pretrained one."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=48, intermediate_size=32, num_hidden_layers=1, num_attention_heads=12,
        initializer_range=0.3,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    monkeypatch.setattr(arms, "load_teacher", lambda: (model, fast))
    folder = tmp_path / "stsb"
    folder.mkdir()
    for split, count in (("train", 60), ("dev", 12)):
        draws = torch.randint(2, 28, (count, 2, 8)).tolist()
        lines = [
            "\t".join(["g", "f", "y", str(i), str(float(i % 6)), *(" ".join(words[w] for w in row) for row in pair)])
            for i, pair in enumerate(draws)
        ]
        (folder / f"sts-{split}.csv").write_text("\n".join(lines), encoding="utf-8")
    study = arms.Study(tmp_path)
    original = {row["metric"]: float(row["value"]) for row in study.measure(arms.Arm("none", 12, 12))}
    assert original["cosine"] == 1
    merged = study.measure(arms.Arm("svd", 1, 12))
    measured = {row["metric"]: float(row["value"]) for row in merged}
    assert 0.5 < measured["cosine"] < 1
    assert set(measured) == {"cosine", "spearman"}
    assert int(merged[0]["params"]) < sum(parameter.numel() for parameter in model.parameters())
    chosen = study.measure(arms.Arm("svd", 0, 0, budget=0.6))
    assert 0.1 < float(chosen[0]["cache"]) <= 0.6
    latencies = study.measure_latencies(1)
    assert [(row["key_heads"], row["kv_heads"]) for row in latencies] == [
        tuple(map(str, numbers)) for numbers in ((12, 12), *arms.NUMBERS)
    ]
    assert all(float(row["value"]) > 0 for row in latencies)
    (same,) = (row for row in latencies if (row["key_heads"], row["kv_heads"]) == ("1", "12"))
    assert same["params"] == merged[0]["params"]
    results.append(tmp_path / "upcycle.csv", [*merged, *latencies], arms.EXTRA_COLUMNS)
    assert arms.is_measured(arms.Arm("svd", 1, 12), results.read([tmp_path / "upcycle.csv"]))
