"""The list of Transformers models: measured rows of a sample, and the page made from the stored rows."""

import csv
import json

import pytest

pytest.importorskip("transformers")

from benchmarks import transformers_models

# Auto class, model type, class -> reason, or None if it converts
SAMPLE = {
    ("AutoModelForMaskedLM", "roberta", "RobertaForMaskedLM"): None,
    ("AutoModelForSeq2SeqLM", "t5", "T5ForConditionalGeneration"): None,
    ("AutoModelForCausalLM", "jamba", "JambaForCausalLM"): None,
    ("AutoModelForImageClassification", "vit", "ViTForImageClassification"): None,
    ("AutoModelForCausalLM", "bloom", "BloomForCausalLM"): "no layer uses Transformers' AttentionInterface",
    ("AutoModelForCausalLM", "gemma2", "Gemma2ForCausalLM"): "has capped logits (softcap) in its Gemma2Attention",
    ("AutoModelForMaskedLM", "perceiver", "PerceiverForMaskedLM"): "no small model: its smallest configuration",
}


@pytest.mark.filterwarnings("ignore")  # the models warn about their settings
def test_measured_rows_of_a_sample():
    known = set(transformers_models.architectures([model_type for _, model_type, _ in SAMPLE]))
    for names, reason in SAMPLE.items():
        assert names in known
        row = transformers_models.measure(*names)
        assert tuple(row) == transformers_models.COLUMNS
        assert row["converts"] == ("yes" if reason is None else "no")
        assert row["reason"].startswith(reason or "")
        assert bool(row["reason"]) != (reason is None)
        assert (row["layers"] > 0) == (reason is None)


def test_page_is_made_from_the_results():
    with transformers_models.RESULTS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    text = transformers_models.PAGE.read_text(encoding="utf-8")
    assert text == transformers_models.page(rows)
    assert len({json.dumps([row["auto_class"], row["model_type"]]) for row in rows}) == len(rows) > 300
    # The stored rows agree with those of the sample above.
    stored = {(row["auto_class"], row["model_type"], row["model_class"]): row for row in rows}
    assert all((stored[names]["converts"] == "yes") == (reason is None) for names, reason in SAMPLE.items())
    for title in transformers_models.AUTO_CLASSES.values():
        assert f"## {title}" in text
