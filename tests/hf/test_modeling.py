"""Transformers wrappers compute the same as the models they wrap."""

import copy

import pytest
import torch
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

import mgk  # noqa: E402
from mgk.hf import MGKConfig, MGKForCausalLM, MGKForSequenceClassification  # noqa: E402
from mgk.models import DecoderConfig, LanguageModel  # noqa: E402
from mgk.models.decoder import FORMS  # noqa: E402
from tests.support.hf_wrappers import FEW, SIZES, classifier, left_padded, lm, same  # noqa: E402


@pytest.mark.parametrize("make", [lm, classifier])
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_save_and_load_round_trip(make, variant, tmp_path, prompts):
    wrapper = make(variant=variant)
    wrapper.save_pretrained(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".json", ".md", ".safetensors")]
    auto = {lm: "AutoModelForCausalLM", classifier: "AutoModelForSequenceClassification"}[make]
    loaded, report = getattr(transformers, auto).from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(wrapper)
    assert not any(report.values())
    assert not loaded.training
    assert loaded.model.config == wrapper.model.config
    assert loaded.state_dict().keys() == wrapper.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in wrapper.state_dict().items())
    # Not bitwise: the alignment of the weights can change the order of summation.
    same(loaded(prompts[0][None]).logits, wrapper(prompts[0][None]).logits)


def test_every_trainable_parameter_of_a_loaded_model_has_a_gradient(tmp_path):
    """DDP waits for each; the empty parameters of a full softmax stay frozen on loading."""
    lm().save_pretrained(tmp_path)
    loaded = MGKForCausalLM.from_pretrained(tmp_path)
    loaded(input_ids=torch.arange(8)[None]).logits.logsumexp(-1).sum().backward()
    trainable = {name: weight for name, weight in loaded.named_parameters() if weight.requires_grad}
    assert [name for name, weight in trainable.items() if weight.grad is None] == []


@pytest.mark.parametrize("preset", ["ref-lra", "ref-lm"])
def test_saved_folder_keeps_preset(preset, tmp_path, prompts):
    wrapper = lm(preset=preset, variant=("smgk", "softmax"))
    wrapper.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.variant == ["smgk", "softmax"]
    same(loaded(prompts[0][None]).logits, wrapper(prompts[0][None]).logits)


def test_config_round_trip(tmp_path):
    ours = DecoderConfig(99, 32, embed_dim=8, num_layers=2, variant=("mgk", "mlk"), cutoffs=(10, 50), dropout=0.3)
    config = MGKConfig.of(ours)
    assert config.settings() == ours
    assert (config.hidden_size, config.max_position_embeddings) == (8, 32)
    config.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).settings() == ours
    assert MGKConfig.of(classifier().model.config).settings() == classifier().model.config


def test_same_seed_initializes_same_weights():
    config = MGKConfig(vocab_size=30, **SIZES, num_hidden_layers=1, variant="smgk")
    torch.manual_seed(3)
    ours = LanguageModel(config.settings())
    torch.manual_seed(3)
    wrapper = MGKForCausalLM(config)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), wrapper.parameters(), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_loss_of_labels(form, prompts):
    wrapper = lm(form, variant="smgk", dropout=0.0).train()
    tokens = torch.stack([prompts[0], prompts[0].flip(0)])
    labels = tokens.clone()
    labels[1, 5:] = -100  # padding on the right
    mask = (labels != -100).long()
    output = wrapper(tokens, attention_mask=mask, labels=labels)
    assert output.logits is None
    by_hand = [
        wrapper.model.losses(tokens[:1, :-1], tokens[:1, 1:]),
        wrapper.model.losses(tokens[1:, :4], tokens[1:, 1:5]),
    ]
    expected = torch.cat([part.flatten() for part in by_hand])
    same(output.loss, expected.mean())
    same(wrapper(tokens, attention_mask=mask, labels=labels, num_items_in_batch=5).loss, expected.sum() / 5)
    evaluated = wrapper.eval()(tokens, labels=tokens)
    same(evaluated.loss, F.cross_entropy(evaluated.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
    assert wrapper(tokens, labels=torch.full_like(tokens, -100)).loss == 0


@pytest.mark.parametrize("make", [lm, classifier])
@pytest.mark.parametrize("variant", FEW)
def test_gradient_checkpointing_keeps_gradients(make, variant, prompts):
    wrapper = make(variant=variant, dropout=0.0, attention_dropout=0.0)
    twin, calls = copy.deepcopy(wrapper).train(), []
    twin.gradient_checkpointing_enable()
    twin.model.layers[0].attention.register_forward_pre_hook(lambda *_: calls.append(1))
    labels = {lm: prompts[0][None], classifier: torch.tensor([1])}[make]
    for model in (wrapper.train(), twin):
        model(prompts[0][None], labels=labels).loss.backward()
    assert len(calls) == 2
    for one, other in zip(wrapper.parameters(), twin.parameters(), strict=True):
        same(other.grad, one.grad)
    twin.gradient_checkpointing_disable()
    twin(prompts[0][None], labels=labels).loss.backward()
    assert len(calls) == 3


def test_hidden_states_and_logits_to_keep(prompts):
    wrapper = lm("modern")
    output = wrapper(prompts[0][None], output_hidden_states=True, logits_to_keep=2)
    assert len(output.hidden_states) == 3
    same(output.hidden_states[0], wrapper.model.embed(prompts[0][None]))
    same(output.hidden_states[-1], wrapper.model.hidden(prompts[0][None]))
    same(output.logits, wrapper.model(prompts[0][None])[:, -2:])
    same(
        wrapper(prompts[0][None], logits_to_keep=torch.tensor([0, 4])).logits,
        wrapper.model(prompts[0][None])[:, [0, 4]],
    )
    assert wrapper(prompts[0][None], return_dict=False)[0].shape == (1, 9, 30)


@pytest.mark.parametrize("form", FORMS)
def test_resize_token_embeddings(form, tmp_path, prompts):
    wrapper = lm(form, variant="smgk")
    before = wrapper(prompts[0][None]).logits
    wrapper.resize_token_embeddings(33, pad_to_multiple_of=8)
    assert wrapper.config.vocab_size == wrapper.model.config.vocab_size == 40
    assert wrapper.get_input_embeddings().weight.shape == (40, 16)
    after = wrapper(prompts[0][None]).logits
    # With an adaptive softmax, tokens outside the last cluster keep their probability.
    unchanged = slice(0, 30) if form == "modern" else slice(0, 20)
    same(after[..., unchanged], before[..., unchanged])
    assert torch.isfinite(wrapper(torch.tensor([[39, 31]]), labels=torch.tensor([[39, 31]])).loss)
    same(wrapper.model.table.weight[35], wrapper.model.table.weight[:30].mean(0))
    wrapper.save_pretrained(tmp_path)
    same(MGKForCausalLM.from_pretrained(tmp_path)(prompts[0][None]).logits, after)
    wrapper.resize_token_embeddings(30)
    same(wrapper(prompts[0][None]).logits, before)
    if form == "paper":
        with pytest.raises(ValueError, match="cutoffs"):
            wrapper.resize_token_embeddings(20)


def test_classifier_resizes_tokens_and_labels(tmp_path, prompts):
    wrapper = classifier()
    before = wrapper(prompts[0][None]).logits
    wrapper.resize_token_embeddings(33, mean_resizing=False)
    assert wrapper.config.vocab_size == wrapper.model.config.vocab_size == 33
    same(wrapper(prompts[0][None]).logits, before)
    wrapper.save_pretrained(tmp_path)
    other = MGKForSequenceClassification.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    # Missing weights are initialized as in a new model: bias 0, weights within Xavier's bound.
    assert torch.equal(other.model.head[2].bias, torch.zeros(5))
    assert 0 < other.model.head[2].weight.abs().max() <= (6 / (12 + 5)) ** 0.5
    assert torch.equal(other.model.head[0].weight, wrapper.model.head[0].weight)


@pytest.mark.parametrize("variant", FEW)
def test_classifier_accepts_padding_anywhere(variant, prompts):
    wrapper = classifier(variant=variant)
    alone = torch.cat([wrapper(prompt[None]).logits for prompt in prompts])
    tokens, mask = left_padded(*prompts)
    same(wrapper(tokens, attention_mask=mask).logits, alone)
    same(
        wrapper(tokens.flip(-1), attention_mask=mask.flip(-1)).logits,
        torch.cat([wrapper(p.flip(0)[None]).logits for p in prompts]),
    )
    output = wrapper(tokens, attention_mask=mask, labels=torch.tensor([2, 0, 1]))
    same(output.loss, F.cross_entropy(alone, torch.tensor([2, 0, 1])))


def test_two_documents_and_multiple_labels(prompts):
    wrapper = classifier(documents=2, problem_type="multi_label_classification")
    tokens, mask = left_padded(*prompts[:2])
    pair = wrapper(tokens[None], attention_mask=mask[None], labels=torch.tensor([[1.0, 0.0, 1.0]]))
    lengths = torch.tensor([[9, 4]])
    flushed = torch.stack([prompts[0], F.pad(prompts[1], (0, 5))])[None]
    same(pair.logits, wrapper.model(flushed, lengths))
    same(pair.loss, F.binary_cross_entropy_with_logits(pair.logits, torch.tensor([[1.0, 0.0, 1.0]])))


WRONG = {
    "nope is not a run directory": lambda: MGKForCausalLM.from_run("nope"),
    "folder nope is neither a folder nor": lambda: mgk.hf.load_converted("nope"),
    "hidden_size": lambda: MGKConfig(vocab_size=30, embed_dim=16),
    "vocab_size": lambda: MGKConfig(hidden_size=16),
    "kind must": lambda: MGKConfig(kind="encoder", vocab_size=30),
    "variant must": lambda: lm(variant="smkg"),
    "config is for a classifier": lambda: MGKForCausalLM(classifier().config),
    "config is for a language-model": lambda: MGKForSequenceClassification(lm().config),
    "tie_word_embeddings": lambda: lm(tie_word_embeddings=False),
    "past_key_values must": lambda: lm()(torch.ones(1, 2).long(), past_key_values=transformers.DynamicCache()),
    "output_attentions": lambda: lm()(torch.ones(1, 2).long(), output_attentions=True),
    "attention_mask must have shape": lambda: lm()(torch.ones(1, 2).long(), attention_mask=torch.ones(1, 3)),
    "attention_mask must have the shape of input": lambda: classifier()(
        torch.ones(1, 2).long(), attention_mask=torch.ones(1, 3)
    ),
    "cache is for inference": lambda: lm().train()(torch.ones(1, 2).long(), use_cache=True),
}


def test_misspelled_setting_warns():
    message = "num_atention_heads is not a setting of MGKConfig; did you mean 'num_attention"
    with pytest.warns(UserWarning, match=message):
        MGKConfig(vocab_size=30, num_atention_heads=4)
    # No warning for settings of Transformers and of users.
    MGKConfig(vocab_size=30, num_labels=3, id2label={0: "a"}, output_hidden_states=True, my_own_setting=1)


@pytest.mark.parametrize("message", WRONG)
def test_invalid_input_raises(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_reduces_loss(checkpointing, tmp_path):
    pytest.importorskip("accelerate")
    wrapper = lm("modern", variant=("smgk", "mlk"), dropout=0.0)
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
    trainer = transformers.Trainer(wrapper, arguments, collator, train_dataset=data, eval_dataset=data[:5])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < before / 2
    loaded = MGKForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), wrapper.parameters(), strict=True))


def _numbers():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({str(n): n for n in range(30)}, unk_token="29"))
