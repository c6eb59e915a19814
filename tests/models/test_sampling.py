"""Sampling and text generation."""

import pytest
import torch

import experiments.paper  # noqa: F401  (adds its recipes)
from mgk.models.generation import Sampling, generate
from tests.models.test_decoder import tiny


@pytest.mark.parametrize("variant", ["softmax", "smgk", "mlk"])
@torch.no_grad()
def test_greedy_generation_past_the_context(variant):
    model = tiny(variant=variant)
    prompt = [3, 1, 4]
    drawn = list(generate(model, prompt, max_tokens=30, sampling=Sampling(temperature=0)))
    history, context = list(prompt), list(prompt)
    for token in drawn:
        assert token == int(model(torch.tensor([context]))[0, -1].argmax())
        history.append(token)
        # A full context of 24 continues from its last half.
        context = history[-12:] if len(context) == 24 else [*context, token]


def test_seed_determines_text():
    model = tiny()
    texts = [list(generate(model, [1], max_tokens=20, sampling=Sampling(seed=seed))) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(temperature=0), {2}),
        (Sampling(top_k=1), {2}),
        (Sampling(top_k=2), {2, 0}),
        (Sampling(top_p=0.4), {2}),
        (Sampling(top_p=0.6), {2, 0}),
        (Sampling(top_p=0.6, top_k=1), {2}),
        (Sampling(), {0, 1, 2, 3}),
        (Sampling(temperature=0.05), {2}),
    ],
)
def test_tokens_that_can_be_drawn(sampling, possible):
    scores = torch.tensor([0.3, 0.15, 0.5, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    assert {sampling.draw(scores, generator) for _ in range(200)} == possible


def test_draws_follow_probabilities():
    scores = torch.tensor([0.2, 0.8]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = [Sampling(temperature=2.0).draw(scores, generator) for _ in range(2000)]
    assert sum(drawn) / 2000 == pytest.approx(0.8**0.5 / (0.8**0.5 + 0.2**0.5), abs=0.03)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": 1.5}, {"seed": 2**63}],
    ids=lambda s: next(iter(s)),
)
def test_invalid_sampling_raises(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Sampling(**settings)


@pytest.mark.parametrize("logits", [[1.0, 3.0, 2.0], [-3.0, -1.0, -2.0]])
def test_tiny_temperature_draws_the_most_probable_token(logits):
    assert Sampling(temperature=1e-40).draw(torch.tensor(logits), torch.Generator()) == 1


def test_largest_seed():
    torch.Generator().manual_seed(Sampling(seed=2**63 - 1).seed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_raise(temperature, value):
    logits = torch.tensor([1.0, value, 2.0, -torch.inf])
    with pytest.raises(ValueError, match="the logits are not finite"):
        Sampling(temperature=temperature).draw(logits, torch.Generator())
    logits[1] = 3
    assert Sampling(temperature=0).draw(logits, torch.Generator()) == 1
