"""EM under activation checkpointing: a recomputed forward uses the state of the first one."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mgk._core import em_checkpointing
from tests.core.test_em import EMBED, VARIANCE, B, L, em_state, make, same
from tests.support.exact import F64, close, randn


@pytest.mark.parametrize("variant", ["mgk-em", VARIANCE], ids=["prior", "variance"])
def test_checkpointed_layer_is_updated_once(variant):
    layer, x = make(variant), randn(B, L, EMBED).requires_grad_()
    plain = copy.deepcopy(layer)
    plain(x)
    out = checkpoint(layer, x, use_reentrant=False)
    assert same(em_state(layer), em_state(plain))
    out.square().sum().backward()
    assert same(em_state(layer), em_state(plain))


@pytest.mark.parametrize("variant", ["mgk-em", VARIANCE], ids=["prior", "variance"])
def test_checkpointed_gradients_use_the_prior_before_the_update(variant):
    layer, x = make(variant), randn(B, L, EMBED).requires_grad_()
    plain = copy.deepcopy(layer)
    expected = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
    out = checkpoint(layer, x, use_reentrant=False)
    close(torch.autograd.grad(out.square().sum(), [x, *layer.parameters()]), expected)


def after_two_forwards(layer, run, order, same_input):
    """Return the gradients of two forwards whose backwards run in this order."""
    torch.manual_seed(2)
    x = randn(B, L, EMBED).requires_grad_()
    outs = [run(layer, x), run(layer, x if same_input else 3 * x)]
    for which in order:
        ((which + 1) * outs[which].square().sum()).backward(retain_graph=True)
    return [x.grad, *(p.grad for p in layer.parameters())]


class Block(torch.nn.Module):
    """A block that applies an attention layer twice, after another operation."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.norm = layer, torch.nn.LayerNorm(EMBED, dtype=F64)

    def forward(self, x):
        return self.layer(self.norm(x)) + self.layer(x).sin()


def checkpointed(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def nested(layer, x):
    return checkpoint(lambda x: checkpointed(layer, x.sin()).cos(), x, use_reentrant=False)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0,), (1, 0, 1)], ids=str)
@pytest.mark.parametrize("same_input", [False, True])
@pytest.mark.parametrize("variant", ["mgk-em", VARIANCE], ids=["prior", "variance"])
def test_each_recomputed_forward_uses_its_first_state(variant, same_input, order):
    block = Block(make(variant))
    plain = copy.deepcopy(block)
    actual = after_two_forwards(block, checkpointed, order, same_input)
    close(actual, after_two_forwards(plain, lambda layer, x: layer(x), order, same_input))
    assert same(em_state(block), em_state(plain))


def test_nested_checkpoints():
    layer = make()
    plain = copy.deepcopy(layer)
    actual = after_two_forwards(layer, nested, (0, 1), True)
    close(actual, after_two_forwards(plain, lambda layer, x: layer(x.sin()).cos(), (0, 1), True))
    assert same(em_state(layer), em_state(plain))


def test_frozen_layer_in_a_checkpoint_uses_its_first_state():
    layer, last, x = make().requires_grad_(False), torch.nn.Linear(EMBED, 2, dtype=F64), randn(B, L, EMBED)
    plain = copy.deepcopy(layer)
    expected = torch.autograd.grad(last(plain(x)).square().sum(), last.parameters())
    out = checkpoint(lambda x: last(layer(x)).square(), x, use_reentrant=False)
    close(torch.autograd.grad(out.sum(), last.parameters()), expected)


def test_states_are_freed_with_their_graph():
    layer, x = make(), randn(B, L, EMBED)
    out = layer(x)
    assert len(layer.prior.state_log) == 0
    outs = [checkpointed(layer, x) for _ in range(3)]
    assert len(layer.prior.state_log) == 3
    outs[1].sum().backward()
    assert len(layer.prior.state_log) == 2
    del out, outs
    assert len(layer.prior.state_log) == 0
    with torch.autograd.graph.save_on_cpu():
        for _ in range(70):
            layer(x).sum().backward()
        assert len(layer.prior.state_log) == em_checkpointing.MAX_STATES


def test_torch_without_queryable_hooks(monkeypatch):
    monkeypatch.setattr(em_checkpointing, "_top_hooks", None)
    layer = make()
    plain = copy.deepcopy(layer)
    actual = after_two_forwards(layer, checkpointed, (0, 1), True)
    close(actual, after_two_forwards(plain, lambda layer, x: layer(x), (0, 1), True))
    for _ in range(70):
        layer(randn(1, 2, EMBED))
    assert len(layer.prior.state_log) == em_checkpointing.MAX_STATES


def test_copied_layer_has_no_states():
    layer, x = make(), randn(B, L, EMBED)
    out = checkpointed(layer, x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert len(other.prior.state_log) == 0
    out.sum().backward()


def without_random_state(layer, x):
    out = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
    return out.sum()


def with_repeated_seed(layer, x):
    outs = []
    for _ in range(2):
        torch.manual_seed(0)
        outs.append(checkpointed(layer, x).sum())
    return sum(outs)


@pytest.mark.parametrize("run", [without_random_state, with_repeated_seed])
def test_unmatched_recomputation_raises(run):
    out = run(make(), randn(B, L, EMBED))
    with pytest.raises(RuntimeError, match="use_reentrant=False and preserve_rng_state=True"):
        out.backward()


@pytest.mark.parametrize("has_hooks", [True, False])
def test_reentrant_checkpointing_raises(has_hooks, monkeypatch):
    if not has_hooks:
        monkeypatch.setattr(em_checkpointing, "_top_hooks", None)
    layer, x = make(), randn(B, L, EMBED).requires_grad_()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        checkpoint(layer, x, use_reentrant=True).sum().backward()


def test_reentrant_checkpointing_in_eval_mode():
    layer, x = make().eval(), randn(B, L, EMBED).requires_grad_()
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    close(x.grad, expected)


@pytest.mark.skipif(em_checkpointing._top_hooks is None, reason="this torch cannot query saved-tensor hooks")
def test_compiled_layer_in_a_checkpoint_raises():
    """Check the error, without which the prior would be updated twice."""
    layer = torch.compile(make("mgk-em"), backend="aot_eager")
    x = randn(B, L, EMBED)
    with pytest.raises(
        Exception, match="compiled EM layer cannot be trained in a checkpointed region: checkpoint with"
    ):
        checkpoint(layer, x, use_reentrant=False)
    torch.compiler.reset()
    layer(x).sum().backward()
