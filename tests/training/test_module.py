"""Optimizer and schedules of a run."""

import math

import pytest
import torch
from torch import nn

from mgk.attention import Attention
from mgk.training.config import TrainConfig
from mgk.training.module import SCHEDULERS, parameter_groups


def learning_rates(**settings):
    config = TrainConfig(steps=10, lr=2.0, warmup=4, **settings)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], config.lr)
    schedule = SCHEDULERS[config.schedule](optimizer, config)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_cosine_decays_to_a_share_of_the_learning_rate():
    rates = learning_rates(schedule="cosine", final_lr=0.1)
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[7] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[10] == pytest.approx(0.2)
    assert learning_rates(schedule="cosine")[10] == pytest.approx(0, abs=1e-12)
    assert learning_rates(schedule="cosine")[8] == pytest.approx(1 + math.cos(math.pi * 4 / 6))


def test_weight_decay_of_matrices_alone():
    model = nn.ModuleDict({"attention": Attention(8, 2), "norm": nn.LayerNorm(8), "tokens": nn.Embedding(5, 8)})
    everything = {id(p) for p in model.parameters()}
    decayed, others = parameter_groups(model, TrainConfig(decay="matrices", weight_decay=0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == {
        f"attention.{name}.weight" for name in ("query", "keys.projection", "value", "out")
    }
    assert "weight_decay" not in decayed
    assert others["weight_decay"] == 0.0
    assert {id(p) for p in decayed["params"] + others["params"]} == everything
    assert {id(p) for p in parameter_groups(model, TrainConfig())} == everything


@pytest.mark.parametrize("setting", [{"beta2": 1.5}, {"final_lr": -0.1}, {"decay": "some"}, {"beta2": "x"}])
def test_wrong_settings(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        TrainConfig(**setting)
