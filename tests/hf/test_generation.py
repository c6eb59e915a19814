"""`generate` and the caches of the wrappers agree with the wrapped models."""

import itertools

import pytest
import torch

transformers = pytest.importorskip("transformers")

import mgk  # noqa: E402
from mgk.models import LanguageModel  # noqa: E402
from mgk.models.decoder import FORMS  # noqa: E402
from tests.support.hf_wrappers import FEW, drawn, left_padded, lm, same  # noqa: E402


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
def test_generate_left_padded_equals_single_prompts(form, variant, prompts):
    """Logits of cached decoding equal those of the wrapped model over the whole text."""
    wrapper = lm(form, variant=variant)
    tokens, mask = left_padded(*prompts)
    options = {"max_new_tokens": 7, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = wrapper.generate(tokens, attention_mask=mask, **options)
    for row, prompt in enumerate(prompts):
        text = output.sequences[row, tokens.shape[1] - len(prompt) :]
        assert torch.equal(text[: len(prompt)], prompt)
        with torch.no_grad():
            scores = wrapper.model(text[None, :-1])[0, len(prompt) - 1 :]
        same(torch.stack(output.logits)[:, row], scores)
        assert torch.equal(scores.argmax(-1), text[len(prompt) :])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", FEW)
@torch.no_grad()
def test_default_positions_skip_padding(form, variant, prompts):
    """Test padding on the left and on the right."""
    wrapper = lm(form, variant=variant)
    tokens, mask = left_padded(*prompts)
    left, right = (wrapper(x, attention_mask=m).logits for x, m in ((tokens, mask), (tokens.flip(-1), mask.flip(-1))))
    for row, prompt in enumerate(prompts):
        same(left[row, 9 - len(prompt) :], wrapper.model(prompt[None])[0])
        same(right[row, : len(prompt)], wrapper.model(prompt.flip(0)[None])[0])


@pytest.mark.parametrize("variant", FEW)
def test_generate_with_cache_encodes_each_token_once(variant, prompts, monkeypatch):
    wrapper, lengths = lm(variant=variant), []
    hidden = LanguageModel.hidden
    monkeypatch.setattr(LanguageModel, "hidden", lambda *a, **k: lengths.append(a[1].shape[1]) or hidden(*a, **k))
    cached = wrapper.generate(prompts[0][None], max_new_tokens=5, do_sample=False)
    assert lengths == [9, 1, 1, 1, 1]
    assert torch.equal(wrapper.generate(prompts[0][None], max_new_tokens=5, do_sample=False, use_cache=False), cached)
    assert lengths[5:] == [9, 10, 11, 12, 13]


@torch.no_grad()
def all_continuations(wrapper, prompt, steps):
    """Return all continuations by decreasing mean log probability of the new tokens, with that probability."""
    ends = torch.tensor(list(itertools.product(range(wrapper.config.vocab_size), repeat=steps)))
    texts = torch.cat([prompt.expand(len(ends), -1), ends], 1)
    scores = wrapper.model(texts[:, :-1])[:, len(prompt) - 1 :].log_softmax(-1)
    mean, order = scores.gather(-1, ends.unsqueeze(-1)).squeeze(-1).mean(-1).sort(descending=True)
    return texts[order], mean


@pytest.mark.parametrize("variant", FEW)
def test_beam_search_finds_best_continuations(variant):
    wrapper = lm(variant=variant, vocab_size=5, cutoffs=())
    prompts = torch.randint(5, (6,)), torch.randint(5, (3,))
    tokens, mask = left_padded(*prompts)
    # One beam for each continuation of two tokens: none is lost, and each step reorders them.
    options = {"num_beams": 25, "num_return_sequences": 25, "max_new_tokens": 3, "return_dict_in_generate": True}
    output = wrapper.generate(tokens, attention_mask=mask, output_scores=True, **options)
    for row, prompt in enumerate(prompts):
        texts, scores = all_continuations(wrapper, prompt, 3)
        assert torch.equal(output.sequences.view(2, 25, -1)[row, :, 6 - len(prompt) :], texts[:25])
        same(output.sequences_scores.view(2, 25)[row], scores[:25])


@pytest.mark.parametrize("variant", FEW)
def test_beams_and_samples_equal_without_cache(variant, prompts):
    wrapper = lm("modern", variant=variant)
    tokens, mask = left_padded(*prompts)
    for options in (
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"do_sample": True, "temperature": 1.3, "top_k": 12, "top_p": 0.9},
    ):
        texts = []
        for use_cache in (True, False):
            torch.manual_seed(7)
            texts.append(
                wrapper.generate(tokens, attention_mask=mask, max_new_tokens=6, use_cache=use_cache, **options)
            )
        assert torch.equal(*texts)


@pytest.mark.parametrize("variant", FEW)
def test_cache_grows_and_selects_rows(variant, prompts):
    wrapper = lm("modern", variant=variant)
    tokens, mask = left_padded(*prompts)
    with torch.no_grad():
        whole = wrapper(tokens, attention_mask=mask)
        cache = wrapper.make_cache(3, max_length=2)
        wrapper(tokens[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
        part = wrapper(tokens[:, 5:8], attention_mask=mask[:, :8], past_key_values=cache)
        same(part.logits, whole.logits[:, 5:8])
        rows = torch.tensor([2, 0])
        cache.batch_select_indices(rows)
        cache.batch_repeat_interleave(2)
        rows = rows.repeat_interleave(2)
        last = wrapper(tokens[rows, 8:], attention_mask=mask[rows], past_key_values=cache)
        same(last.logits, whole.logits[rows, 8:])
        assert last.past_key_values is cache
        assert cache.get_seq_length() == 9
        cache.reset()
        same(wrapper(tokens[rows], attention_mask=mask[rows], past_key_values=cache).logits, whole.logits[rows])


@pytest.mark.parametrize("variant", ["softmax", "mgk", "smgk-hard"])
def test_speculative_decoding_equals_greedy(variant):
    """Wrong guesses are removed from the cache."""
    wrapper = drawn(drawn(drawn(lm("modern", variant=variant))))
    prompt = torch.randint(30, (1, 6)).repeat(1, 2)
    options = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    greedy = wrapper.generate(prompt, **options)
    cache = wrapper.make_cache(1)
    guessed = wrapper.generate(prompt, prompt_lookup_num_tokens=4, past_key_values=cache, **options)
    assert torch.equal(guessed.sequences, greedy.sequences)
    same(torch.stack(guessed.logits), torch.stack(greedy.logits))
    assert cache.get_seq_length() == 12 + 12 - 1


def test_state_cache_cannot_be_cropped():
    wrapper = lm(variant="linear")
    cache = wrapper.make_cache(1)
    with torch.no_grad():
        wrapper(torch.randint(30, (1, 6)), past_key_values=cache)
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(-2)
    assert cache.nbytes == lm(variant="linear").make_cache(1, 1000).nbytes
