"""Tokenizers of training runs."""

import json

import pytest

transformers = pytest.importorskip("transformers")

from mgk.hf import MGKForCausalLM, tokenizer_of_run  # noqa: E402
from mgk.models import load_model, save_model  # noqa: E402
from mgk.models.vocabulary import ByteVocabulary, WordVocabulary  # noqa: E402
from tests.support.hf_wrappers import classifier, lm, same  # noqa: E402

WORDS = ["<eos>", "the", ",", "Ünïcode", "<unk>", "=", "@-@", *(f"w{n}" for n in range(23))]
TEXTS = ["the w3 , \n = w1 =\n\n the Ünïcode @-@ what", "\n", " two\t  spaces ", "w1\n"]


@pytest.mark.parametrize("task", ["wikitext-103", "bytes"])
def test_run_to_folder_and_back(task, tmp_path, prompts):
    vocabulary = WordVocabulary(WORDS) if task == "wikitext-103" else ByteVocabulary()
    model = lm("modern", vocab_size=len(vocabulary), variant="smgk").model
    run, folder = tmp_path / "run", tmp_path / "folder"
    save_model(model, run / "best")
    vocabulary.save(run)
    (run / "run.json").write_text(json.dumps({"task": task}))

    wrapper = MGKForCausalLM.from_run(run)
    wrapper.save_pretrained(folder)
    tokenizer_of_run(run).save_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    save_model(loaded.model, tmp_path / "back" / "best")
    restored = load_model(tmp_path / "back" / "best")
    assert restored.config == model.config
    same(restored(prompts[0][None]), model(prompts[0][None]))

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "".join(map(chr, range(1, 700)))]:
        assert tokenizer(text)["input_ids"] == vocabulary.encode(text)[0].tolist()
    if task == "bytes":
        assert tokenizer.decode(tokenizer("ä\n\U0001f642")["input_ids"]) == "ä\n\U0001f642"
    else:
        batch = tokenizer(["the w3", "the w3 , w1"], padding=True, return_tensors="pt")
        assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
        assert loaded.generate(**batch, max_new_tokens=2, do_sample=False).shape == (2, 6)


def test_tokenizer_of_unsuitable_run_raises(tmp_path):
    (tmp_path / "run.json").write_text('{"task": "wikitext-103"}')
    save_model(lm("modern", vocab_size=30).model, tmp_path / "best")
    with pytest.raises(ValueError, match=r"vocabulary\.txt cannot be read"):
        tokenizer_of_run(tmp_path)
    save_model(classifier().model, tmp_path / "best")
    with pytest.raises(ValueError, match="holds a Classifier, not a language model"):
        tokenizer_of_run(tmp_path)
