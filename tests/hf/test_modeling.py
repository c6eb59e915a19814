"""The Transformers shells: our models' numbers, whatever `generate`, a folder or the Trainer does to them."""

import copy
import itertools
import json
import os

import pytest
import torch
from torch.nn import functional as F

# Nothing may be asked of a server.
os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

import mgk  # noqa: E402
from mgk.hf import MGKConfig, MGKForCausalLM, MGKForSequenceClassification, tokenizer_of_run  # noqa: E402
from mgk.models import DecoderConfig, LanguageModel, load_model, save_model  # noqa: E402
from mgk.models.decoder import FORMS  # noqa: E402
from mgk.models.vocabulary import ByteVocabulary, WordVocabulary  # noqa: E402

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
CUTOFFS = {"paper": (8, 20), "modern": ()}
FEW = ("softmax", "smgk", "mgk-em", "mlk")  # one of each kind of cache, prior and key layout


def drawn(shell):
    """With parameters that are nowhere 0, 1 or equal."""
    with torch.no_grad():
        for parameter in shell.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return shell.eval()


def lm(form="paper", **settings):
    fixed = {"vocab_size": 30, "max_position_embeddings": 40, "num_hidden_layers": 2, "cutoffs": CUTOFFS[form]}
    return drawn(MGKForCausalLM(MGKConfig(**{**fixed, **SIZES, **FORMS[form], **settings})))


def classifier(**settings):
    fixed = {"vocab_size": 30, "max_position_embeddings": 24, "num_hidden_layers": 2, "hidden_dim": 12, "num_labels": 3}
    return drawn(MGKForSequenceClassification(MGKConfig(kind="classifier", **{**fixed, **SIZES, **settings})))


def left_padded(*prompts):
    """Prompts side by side, ended on the right, and their mask."""
    length = max(map(len, prompts))
    tokens = torch.stack([F.pad(prompt, (length - len(prompt), 0), value=1) for prompt in prompts])
    mask = torch.stack([F.pad(torch.ones_like(prompt), (length - len(prompt), 0)) for prompt in prompts])
    return tokens, mask


@pytest.fixture
def prompts():
    return torch.randint(30, (9,)), torch.randint(30, (4,)), torch.randint(30, (6,))


def same(a, b):
    torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_generate_with_padding_on_the_left_is_each_prompt_by_itself(form, variant, prompts):
    """... and on the caches the same as our model over the whole text at once."""
    shell = lm(form, variant=variant)
    tokens, mask = left_padded(*prompts)
    options = {"max_new_tokens": 7, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = shell.generate(tokens, attention_mask=mask, **options)
    for row, prompt in enumerate(prompts):
        text = out.sequences[row, tokens.shape[1] - len(prompt) :]
        assert torch.equal(text[: len(prompt)], prompt)
        with torch.no_grad():
            scores = shell.model(text[None, :-1])[0, len(prompt) - 1 :]
        same(torch.stack(out.logits)[:, row], scores)
        assert torch.equal(scores.argmax(-1), text[len(prompt) :])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", FEW)
@torch.no_grad()
def test_positions_count_the_real_tokens(form, variant, prompts):
    """... where none are given, on the left and on the right of padding."""
    shell = lm(form, variant=variant)
    tokens, mask = left_padded(*prompts)
    left, right = (shell(x, attention_mask=m).logits for x, m in ((tokens, mask), (tokens.flip(-1), mask.flip(-1))))
    for row, prompt in enumerate(prompts):
        same(left[row, 9 - len(prompt) :], shell.model(prompt[None])[0])
        same(right[row, : len(prompt)], shell.model(prompt.flip(0)[None])[0])


@pytest.mark.parametrize("variant", FEW)
def test_generate_reads_each_token_once(variant, prompts, monkeypatch):
    shell, seen = lm(variant=variant), []
    hidden = LanguageModel.hidden
    monkeypatch.setattr(LanguageModel, "hidden", lambda *a, **k: seen.append(a[1].shape[1]) or hidden(*a, **k))
    cached = shell.generate(prompts[0][None], max_new_tokens=5, do_sample=False)
    assert seen == [9, 1, 1, 1, 1]
    assert torch.equal(shell.generate(prompts[0][None], max_new_tokens=5, do_sample=False, use_cache=False), cached)
    assert seen[5:] == [9, 10, 11, 12, 13]


@torch.no_grad()
def all_continuations(shell, prompt, steps):
    """Every text that goes on from a prompt, the likeliest first, and the mean log probability of its new tokens."""
    ends = torch.tensor(list(itertools.product(range(shell.config.vocab_size), repeat=steps)))
    texts = torch.cat([prompt.expand(len(ends), -1), ends], 1)
    scores = shell.model(texts[:, :-1])[:, len(prompt) - 1 :].log_softmax(-1)
    mean, order = scores.gather(-1, ends.unsqueeze(-1)).squeeze(-1).mean(-1).sort(descending=True)
    return texts[order], mean


@pytest.mark.parametrize("variant", FEW)
def test_enough_beams_find_the_best_of_all_continuations(variant):
    shell = lm(variant=variant, vocab_size=5, cutoffs=())
    prompts = torch.randint(5, (6,)), torch.randint(5, (3,))
    tokens, mask = left_padded(*prompts)
    # As many beams as there are texts of two more tokens: none is lost, and each step reorders them.
    options = {"num_beams": 25, "num_return_sequences": 25, "max_new_tokens": 3, "return_dict_in_generate": True}
    out = shell.generate(tokens, attention_mask=mask, output_scores=True, **options)
    for row, prompt in enumerate(prompts):
        texts, scores = all_continuations(shell, prompt, 3)
        assert torch.equal(out.sequences.view(2, 25, -1)[row, :, 6 - len(prompt) :], texts[:25])
        same(out.sequences_scores.view(2, 25)[row], scores[:25])


@pytest.mark.parametrize("variant", FEW)
def test_beams_and_samples_on_the_caches_are_those_without(variant, prompts):
    shell = lm("modern", variant=variant)
    tokens, mask = left_padded(*prompts)
    for options in (
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"do_sample": True, "temperature": 1.3, "top_k": 12, "top_p": 0.9},
    ):
        texts = []
        for use_cache in (True, False):
            torch.manual_seed(7)
            texts.append(shell.generate(tokens, attention_mask=mask, max_new_tokens=6, use_cache=use_cache, **options))
        assert torch.equal(*texts)


@pytest.mark.parametrize("variant", FEW)
def test_a_cache_goes_on_grows_and_changes_its_rows(variant, prompts):
    shell = lm("modern", variant=variant)
    tokens, mask = left_padded(*prompts)
    with torch.no_grad():
        whole = shell(tokens, attention_mask=mask)
        cache = shell.make_cache(3, max_length=2)
        shell(tokens[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
        part = shell(tokens[:, 5:8], attention_mask=mask[:, :8], past_key_values=cache)
        same(part.logits, whole.logits[:, 5:8])
        rows = torch.tensor([2, 0])
        cache.batch_select_indices(rows)
        cache.batch_repeat_interleave(2)
        rows = rows.repeat_interleave(2)
        last = shell(tokens[rows, 8:], attention_mask=mask[rows], past_key_values=cache)
        same(last.logits, whole.logits[rows, 8:])
        assert last.past_key_values is cache
        assert cache.get_seq_length() == 9
        cache.reset()
        same(shell(tokens[rows], attention_mask=mask[rows], past_key_values=cache).logits, whole.logits[rows])


@pytest.mark.parametrize("variant", ["softmax", "mgk", "smgk-hard"])
def test_speculative_decoding_is_greedy_decoding(variant):
    """What was guessed wrong is forgotten again."""
    shell = drawn(drawn(drawn(lm("modern", variant=variant))))
    prompt = torch.randint(30, (1, 6)).repeat(1, 2)
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    greedy = shell.generate(prompt, **options)
    cache = shell.make_cache(1)
    guessed = shell.generate(prompt, prompt_lookup_num_tokens=4, past_key_values=cache, **options)
    assert torch.equal(guessed.sequences, greedy.sequences)
    same(torch.stack(guessed.logits), torch.stack(greedy.logits))
    assert cache.get_seq_length() == 12 + 12 - 1


def test_a_state_cannot_forget_some_tokens():
    shell = lm(variant="linear")
    cache = shell.make_cache(1)
    with torch.no_grad():
        shell(torch.randint(30, (1, 6)), past_key_values=cache)
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(-2)
    assert cache.nbytes == lm(variant="linear").make_cache(1, 1000).nbytes


@pytest.mark.parametrize("make", [lm, classifier])
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_a_folder_gives_the_same_model_back(make, variant, tmp_path, prompts):
    shell = make(variant=variant)
    shell.save_pretrained(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".json", ".safetensors")]
    auto = {lm: "AutoModelForCausalLM", classifier: "AutoModelForSequenceClassification"}[make]
    again, report = getattr(transformers, auto).from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is type(shell)
    assert not any(report.values())
    assert not again.training
    assert again.model.config == shell.model.config
    assert again.state_dict().keys() == shell.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], value) for name, value in shell.state_dict().items())
    # Not to the last bit: where the weights lie in memory may decide in which order they are summed.
    same(again(prompts[0][None]).logits, shell(prompts[0][None]).logits)


@pytest.mark.parametrize("preset", ["ref-lra", "ref-lm"])
def test_a_folder_keeps_the_presets_of_the_authors(preset, tmp_path, prompts):
    shell = lm(preset=preset, variant=("smgk", "softmax"))
    shell.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.variant == ["smgk", "softmax"]
    same(again(prompts[0][None]).logits, shell(prompts[0][None]).logits)


def test_configurations_are_ours_under_other_names(tmp_path):
    ours = DecoderConfig(99, 32, embed_dim=8, num_layers=2, variant=("mgk", "mlk"), cutoffs=(10, 50), dropout=0.3)
    config = MGKConfig.of(ours)
    assert config.settings() == ours
    assert (config.hidden_size, config.max_position_embeddings) == (8, 32)
    config.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).settings() == ours
    assert MGKConfig.of(classifier().model.config).settings() == classifier().model.config


def test_the_same_seed_begins_with_the_same_weights():
    shell_config = MGKConfig(vocab_size=30, **SIZES, num_hidden_layers=1, variant="smgk")
    torch.manual_seed(3)
    ours = LanguageModel(shell_config.settings())
    torch.manual_seed(3)
    shell = MGKForCausalLM(shell_config)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), shell.parameters(), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_labels_give_the_loss_of_our_model(form, prompts):
    shell = lm(form, variant="smgk", dropout=0.0).train()
    tokens = torch.stack([prompts[0], prompts[0].flip(0)])
    labels = tokens.clone()
    labels[1, 5:] = -100  # padding on the right
    mask = (labels != -100).long()
    output = shell(tokens, attention_mask=mask, labels=labels)
    assert output.logits is None
    by_hand = [shell.model.losses(tokens[:1, :-1], tokens[:1, 1:]), shell.model.losses(tokens[1:, :4], tokens[1:, 1:5])]
    expected = torch.cat([part.flatten() for part in by_hand])
    same(output.loss, expected.mean())
    same(shell(tokens, attention_mask=mask, labels=labels, num_items_in_batch=5).loss, expected.sum() / 5)
    evaluated = shell.eval()(tokens, labels=tokens)
    same(evaluated.loss, F.cross_entropy(evaluated.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
    assert shell(tokens, labels=torch.full_like(tokens, -100)).loss == 0


@pytest.mark.parametrize("make", [lm, classifier])
@pytest.mark.parametrize("variant", FEW)
def test_checkpointing_recomputes_and_changes_nothing(make, variant, prompts):
    shell = make(variant=variant, dropout=0.0, attention_dropout=0.0)
    twin, calls = copy.deepcopy(shell).train(), []
    twin.gradient_checkpointing_enable()
    twin.model.layers[0].attention.register_forward_pre_hook(lambda *_: calls.append(1))
    labels = {lm: prompts[0][None], classifier: torch.tensor([1])}[make]
    for each in (shell.train(), twin):
        each(prompts[0][None], labels=labels).loss.backward()
    assert len(calls) == 2
    for one, other in zip(shell.parameters(), twin.parameters(), strict=True):
        same(other.grad, one.grad)
    twin.gradient_checkpointing_disable()
    twin(prompts[0][None], labels=labels).loss.backward()
    assert len(calls) == 3


def test_hidden_states_and_which_logits(prompts):
    shell = lm("modern")
    output = shell(prompts[0][None], output_hidden_states=True, logits_to_keep=2)
    assert len(output.hidden_states) == 3
    same(output.hidden_states[0], shell.model.embed(prompts[0][None]))
    same(output.hidden_states[-1], shell.model.hidden(prompts[0][None]))
    same(output.logits, shell.model(prompts[0][None])[:, -2:])
    same(shell(prompts[0][None], logits_to_keep=torch.tensor([0, 4])).logits, shell.model(prompts[0][None])[:, [0, 4]])
    assert shell(prompts[0][None], return_dict=False)[0].shape == (1, 9, 30)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_can_be_added_and_left_out(form, tmp_path, prompts):
    shell = lm(form, variant="smgk")
    before = shell(prompts[0][None]).logits
    shell.resize_token_embeddings(33, pad_to_multiple_of=8)
    assert shell.config.vocab_size == shell.model.config.vocab_size == 40
    assert shell.get_input_embeddings().weight.shape == (40, 16)
    after = shell(prompts[0][None]).logits
    # An adaptive softmax: what is not in the last cluster keeps its probability.
    kept = slice(0, 30) if form == "modern" else slice(0, 20)
    same(after[..., kept], before[..., kept])
    assert torch.isfinite(shell(torch.tensor([[39, 31]]), labels=torch.tensor([[39, 31]])).loss)
    same(shell.model.table.weight[35], shell.model.table.weight[:30].mean(0))
    shell.save_pretrained(tmp_path)
    same(MGKForCausalLM.from_pretrained(tmp_path)(prompts[0][None]).logits, after)
    shell.resize_token_embeddings(30)
    same(shell(prompts[0][None]).logits, before)
    if form == "paper":
        with pytest.raises(ValueError, match="cutoffs"):
            shell.resize_token_embeddings(20)


def test_a_classifier_takes_more_tokens_and_other_labels(tmp_path, prompts):
    shell = classifier()
    before = shell(prompts[0][None]).logits
    shell.resize_token_embeddings(33, mean_resizing=False)
    assert shell.config.vocab_size == shell.model.config.vocab_size == 33
    same(shell(prompts[0][None]).logits, before)
    shell.save_pretrained(tmp_path)
    other = MGKForSequenceClassification.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    # What the file lacks starts as in a new model: the bias at 0, the weights within Xavier's bound.
    assert torch.equal(other.model.head[2].bias, torch.zeros(5))
    assert 0 < other.model.head[2].weight.abs().max() <= (6 / (12 + 5)) ** 0.5
    assert torch.equal(other.model.head[0].weight, shell.model.head[0].weight)


@pytest.mark.parametrize("variant", FEW)
def test_a_classifier_takes_padding_anywhere(variant, prompts):
    shell = classifier(variant=variant)
    alone = torch.cat([shell(prompt[None]).logits for prompt in prompts])
    tokens, mask = left_padded(*prompts)
    same(shell(tokens, attention_mask=mask).logits, alone)
    same(
        shell(tokens.flip(-1), attention_mask=mask.flip(-1)).logits,
        torch.cat([shell(p.flip(0)[None]).logits for p in prompts]),
    )
    output = shell(tokens, attention_mask=mask, labels=torch.tensor([2, 0, 1]))
    same(output.loss, F.cross_entropy(alone, torch.tensor([2, 0, 1])))


def test_two_documents_and_several_labels(prompts):
    shell = classifier(documents=2, problem_type="multi_label_classification")
    tokens, mask = left_padded(*prompts[:2])
    pair = shell(tokens[None], attention_mask=mask[None], labels=torch.tensor([[1.0, 0.0, 1.0]]))
    lengths = torch.tensor([[9, 4]])
    flushed = torch.stack([prompts[0], F.pad(prompts[1], (0, 5))])[None]
    same(pair.logits, shell.model(flushed, lengths))
    same(pair.loss, F.binary_cross_entropy_with_logits(pair.logits, torch.tensor([[1.0, 0.0, 1.0]])))


WORDS = ["<eos>", "the", ",", "Ünïcode", "<unk>", "=", "@-@", *(f"w{n}" for n in range(23))]
TEXTS = ["the w3 , \n = w1 =\n\n the Ünïcode @-@ what", "\n", " two\t  spaces ", "w1\n"]


@pytest.mark.parametrize("task", ["wikitext-103", "bytes"])
def test_a_run_becomes_a_folder_and_comes_back(task, tmp_path, prompts):
    vocabulary = WordVocabulary(WORDS) if task == "wikitext-103" else ByteVocabulary()
    ours = lm("modern", vocab_size=len(vocabulary), variant="smgk").model
    run, folder = tmp_path / "run", tmp_path / "folder"
    save_model(ours, run / "best")
    vocabulary.save(run)
    (run / "run.json").write_text(json.dumps({"task": task}))

    shell = MGKForCausalLM.from_run(run)
    shell.save_pretrained(folder)
    tokenizer_of_run(run).save_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    save_model(loaded.model, tmp_path / "back" / "best")
    back = load_model(tmp_path / "back" / "best")
    assert back.config == ours.config
    same(back(prompts[0][None]), ours(prompts[0][None]))

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


WRONG = {
    "nope is not a run directory": lambda: MGKForCausalLM.from_run("nope"),
    "folder nope is neither a folder nor": lambda: mgk.hf.load_converted("nope"),
    "hidden_size": lambda: MGKConfig(vocab_size=30, embed_dim=16),
    "vocab_size": lambda: MGKConfig(hidden_size=16),
    "kind must": lambda: MGKConfig(kind="encoder", vocab_size=30),
    "variant must": lambda: lm(variant="smkg"),
    "config is of a classifier": lambda: MGKForCausalLM(classifier().config),
    "config is of a language-model": lambda: MGKForSequenceClassification(lm().config),
    "tie_word_embeddings": lambda: lm(tie_word_embeddings=False),
    "past_key_values must": lambda: lm()(torch.ones(1, 2).long(), past_key_values=transformers.DynamicCache()),
    "output_attentions": lambda: lm()(torch.ones(1, 2).long(), output_attentions=True),
    "attention_mask must have shape": lambda: lm()(torch.ones(1, 2).long(), attention_mask=torch.ones(1, 3)),
    "attention_mask must have input": lambda: classifier()(torch.ones(1, 2).long(), attention_mask=torch.ones(1, 3)),
    "cache is for inference": lambda: lm().train()(torch.ones(1, 2).long(), use_cache=True),
}


def test_a_setting_that_is_nearly_ours_is_asked_about():
    message = "num_atention_heads is not a setting of MGKConfig; did you mean 'num_attention"
    with pytest.warns(UserWarning, match=message):
        MGKConfig(vocab_size=30, num_atention_heads=4)
    # Transformers' own, and anybody's.
    MGKConfig(vocab_size=30, num_labels=3, id2label={0: "a"}, output_hidden_states=True, my_own_setting=1)


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_named(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_trains_it(checkpointing, tmp_path):
    pytest.importorskip("accelerate")
    shell = lm("modern", variant=("smgk", "mlk"), dropout=0.0)
    texts = [torch.arange(start, start + 10 + start % 3) % 7 for start in range(24)]
    collator = transformers.DataCollatorForLanguageModeling(
        transformers.PreTrainedTokenizerFast(tokenizer_object=_numbers(), pad_token="29"), mlm=False
    )
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=12,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = [{"input_ids": text.tolist()} for text in texts]
    trainer = transformers.Trainer(shell, arguments, collator, train_dataset=data, eval_dataset=data[:5])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < before / 2
    again = MGKForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), shell.parameters(), strict=True))


def _numbers():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({str(n): n for n in range(30)}, unk_token="29"))
