"""The language model: one token at a time is the full forward, and the adaptive softmax is a softmax."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

import mgk
from mgk.models import DecoderConfig, LanguageModel, adaptive_softmax, decoder, load_model, save_model
from mgk.models.adaptive_softmax import TiedEmbedding, round_capacity
from mgk.models.decoder import FORMS

CUTOFFS = {"paper": (10, 30), "modern": ()}


def tiny(form="paper", **settings) -> LanguageModel:
    """With parameters that are nowhere 0, 1 or equal."""
    sizes = {"embed_dim": 16, "ffn_dim": 24, "num_layers": 3, "num_heads": 4, "head_dim": 6, "cutoffs": CUTOFFS[form]}
    model = LanguageModel(DecoderConfig(50, 24, **{**sizes, **FORMS[form], **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def tokens():
    return torch.randint(50, (2, 17))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
@torch.no_grad()
def test_one_token_at_a_time_is_the_full_forward(form, variant, tokens):
    model = tiny(form, variant=variant, num_kv_heads=2)
    caches = model.make_caches(2, 17)
    prefix = model(tokens[:, :5], caches=caches)
    steps = [model(tokens[:, n : n + 1], caches=caches) for n in range(5, 17)]
    torch.testing.assert_close(torch.cat([prefix, *steps], 1), model(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("preset", ["paper", "ref-lm"])
@pytest.mark.parametrize("feature_map", ["relu", "favor", "dpfp"])
@torch.no_grad()
def test_every_named_feature_map_decodes_and_comes_back_from_disk(feature_map, preset, tokens, tmp_path):
    model = tiny(variant="mlk", feature_map=feature_map, preset=preset)
    caches = model.make_caches(2, 17)
    steps = [model(tokens[:, n : n + 1], caches=caches) for n in range(17)]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(tokens), tiny(variant="mlk", preset=preset)(tokens), atol=1e-3)
    save_model(model, tmp_path)
    torch.testing.assert_close(load_model(tmp_path)(tokens), model(tokens), atol=0, rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", mgk.VARIANTS)
@torch.no_grad()
def test_the_last_position_alone_is_that_of_the_full_forward(form, variant, tokens):
    model = tiny(form, variant=variant)
    torch.testing.assert_close(model.last_hidden(tokens), model.hidden(tokens)[:, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_padding_on_the_left_changes_nothing(form, tokens):
    model = tiny(form, variant="smgk")
    padded = F.pad(tokens, (3, 0))
    padding = torch.arange(20).expand(2, 20) < 3
    positions = (torch.arange(20) - 3).clamp(min=0).expand(2, 20)
    full = model(padded, key_padding_mask=padding, position_ids=positions)[:, 3:]
    torch.testing.assert_close(full, model(tokens), atol=1e-5, rtol=1e-5)
    caches = model.make_caches(2, 20)
    model(padded[:, :12], key_padding_mask=padding[:, :12], position_ids=positions[:, :12], caches=caches)
    rest = model(padded[:, 12:], key_padding_mask=padding, position_ids=positions[:, 12:], caches=caches)
    torch.testing.assert_close(rest, full[:, 9:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_later_token_changes_nothing_before_it(tokens):
    model = tiny(variant=("softmax", "smgk", "mlk"))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(-1).min() > 1e-6


def dense(table: TiedEmbedding, hidden: torch.Tensor) -> torch.Tensor:
    """Log probabilities of every token, word by word from the definition."""
    first = [*range(table.cutoffs[0])] if table.cutoffs else [*range(table.vocab_size)]
    weight = torch.cat([table.weight[first], table.cluster_weight])
    bias = torch.cat([table.bias[first], table.cluster_bias])
    head = (hidden @ weight.T + bias).log_softmax(-1)
    parts = [head[..., : len(first)]]
    edges = [*table.cutoffs, table.vocab_size]
    for n, low in enumerate(table.cutoffs):
        span = slice(low, edges[n + 1])
        tail = (hidden @ table.weight[span].T + table.bias[span]).log_softmax(-1)
        parts.append(head[..., len(first) + n, None] + tail)
    return torch.cat(parts, -1)


@pytest.mark.parametrize("cutoffs", [(), (7,), (7, 20, 33)])
@pytest.mark.parametrize("room", [None, 0, 3])
def test_adaptive_softmax_against_the_definition(cutoffs, room, monkeypatch):
    """With the room that it finds, with just enough, and with some to spare."""
    # Three rows at a time, so that chunks end inside.
    monkeypatch.setattr(adaptive_softmax, "MAX_LOGITS", 40)
    table = TiedEmbedding(50, 6, cutoffs).double()
    with torch.no_grad():
        for parameter in table.parameters():
            parameter.copy_(torch.randn_like(parameter))
    hidden = torch.randn(2, 11, 6, dtype=torch.double, requires_grad=True)
    targets = torch.randint(50, (2, 11))
    slope = torch.rand(2, 11, dtype=torch.double)
    wanted = -dense(table, hidden).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    edges = [*cutoffs, 50]
    rooms = [((targets >= low) & (targets < high)).sum().item() + (room or 0) for low, high in pairwise(edges)]
    found = table.losses(hidden, targets, None if room is None else rooms)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(table.logits(hidden).log_softmax(-1), dense(table, hidden))
    inputs = [hidden, *table.parameters()] if cutoffs else [hidden, table.weight, table.bias]
    for ours, theirs in zip(
        torch.autograd.grad((found * slope).sum(), inputs),
        torch.autograd.grad((wanted * slope).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_no_target_is_lost_for_want_of_room():
    table = TiedEmbedding(50, 6, (7, 20))
    hidden, targets = torch.randn(9, 6), torch.tensor([1, 2, 8, 9, 10, 30, 31, 3, 4])
    assert table.cluster_capacities(targets) == [64, 64]
    assert table.losses(hidden, targets, (3, 2)).isfinite().all()
    for too_small in ((2, 2), (0, 2), (3, 0), (0, 0)):
        assert table.losses(hidden, targets, too_small).isnan().any()
    for wrong in ((9, 9, 9), 9, (9, -1), (9.0, 9)):
        with pytest.raises(ValueError, match="capacities must be 2 integers, one for each tail cluster"):
            table.losses(hidden, targets, wrong)


@pytest.mark.parametrize("cutoffs", [(), (7, 20)])
def test_targets_that_are_no_tokens(cutoffs, monkeypatch):
    table, hidden = TiedEmbedding(50, 6, cutoffs), torch.randn(2, 3, 6)
    targets = torch.tensor([[1, 2, 49], [8, 30, 0]])
    for wrong in (50, 1000, -1, -100):
        changed = targets.clone()
        changed[0, 1] = wrong
        with pytest.raises(ValueError, match=rf"targets must be token ids from 0 to 49 .* got {wrong}"):
            table.losses(hidden, changed)
        # On a GPU the host does not wait to see it.
        with monkeypatch.context() as patched:
            patched.setattr(TiedEmbedding, "_check", lambda *_: None)
            found = table.losses(hidden, changed)
        assert found.isnan().tolist() == [[False, True, False], [False, False, False]]
    for wrong in (targets.float(), targets.tolist(), targets.flatten(), targets[:, :2]):
        with pytest.raises(ValueError, match="targets must"):
            table.losses(hidden, wrong)


def test_room_is_one_of_few_numbers_and_no_more_than_a_quarter_stays_empty():
    assert [round_capacity(n) for n in (0, 1, 64, 65, 600, 1024, 1025)] == [0, 64, 64, 128, 640, 1024, 1280]
    assert all(n <= round_capacity(n) <= max(64, 1.25 * n + 1) for n in range(256, 5000))
    assert len({round_capacity(n) for n in range(256, 5000)}) < 20


def test_a_cluster_without_targets_has_no_gradient_but_its_own_output():
    table = TiedEmbedding(50, 6, (7, 20))
    table.losses(torch.randn(9, 6), torch.randint(7, (9,))).sum().backward()
    assert table.weight.grad[7:].abs().max() == 0
    assert table.cluster_weight.grad.abs().min() > 0


def test_mixed_precision_keeps_the_gradient_of_the_table_in_fp32():
    table = TiedEmbedding(50, 8, (7, 20))
    hidden = torch.randn(400, 8)
    targets = torch.randint(50, (400,))
    gradients = []
    for enabled in (False, True):
        table.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses = table.losses(hidden, targets)
        assert losses.dtype == torch.float32
        losses.mean().backward()
        gradients.append(table.weight.grad.clone())
    torch.testing.assert_close(*gradients, atol=2e-4, rtol=0.05)


def test_wrong_cutoffs():
    for cutoffs in ((20, 7), (50,), (0,), (7, 7)):
        with pytest.raises(ValueError, match="cutoffs"):
            TiedEmbedding(50, 6, cutoffs)


def test_paper_model_parameter_counts():
    with torch.device("meta"):
        model = LanguageModel(DecoderConfig(267_735, variant="softmax", cutoffs=(20_000, 40_000, 200_000)))

    def count(*modules):
        return sum(p.numel() for module in modules for p in module.parameters())

    assert count(model.table) == 267_735 * 128 + 267_735 + 3 * 129
    assert count(*(layer.attention for layer in model.layers)) == 16 * 4 * (128 * 128 + 128)
    assert count(*(layer.mlp for layer in model.layers)) == 16 * (2 * 128 * 2048 + 2048 + 128)
    assert count(model) == 44_026_586


def test_it_comes_back_from_disk(tmp_path, tokens):
    model = tiny(variant=("softmax", "smgk", "mlk"))
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"norm": "batch"}, "norm must be one of"),
        ({"norm_place": "middle"}, "norm_place must be one of"),
        ({"positions": "learned"}, "positions must be one of"),
        ({"mlp": "tanh"}, "mlp must be one of"),
        ({"variant": ("softmax", "smgk")}, "variant names 2 layers of 16"),
        ({"variant": "soft"}, "variant must be one of"),
        ({"cutoffs": (60,)}, "cutoffs must increase"),
        ({"embed_dim": 0}, "embed_dim must be a positive integer"),
    ],
)
def test_wrong_settings(settings, says):
    with pytest.raises(ValueError, match=says):
        DecoderConfig(50, **settings)


def test_wrong_input():
    model = tiny()
    with pytest.raises(ValueError, match="tokens"):
        model(torch.rand(2, 3))
    with pytest.raises(ValueError, match="caches must be 3"):
        model(torch.zeros(1, 1, dtype=torch.long), caches=model.make_caches(1, 4)[:1])


# The compiler's own look at a group's input.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("variant", ["softmax", "smgk", "mlk"])
def test_one_compiled_group_of_layers_serves_all(variant, monkeypatch):
    monkeypatch.setattr(decoder, "GROUP_SIZE", 2)
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = tiny(variant=variant, num_layers=6, dropout=0.0).train()
    text = torch.randint(50, (2, 18))
    wanted = model.losses(text[:, :-1], text[:, 1:])
    model.compile_layers(count)
    for _ in range(2):
        found = model.losses(text[:, :-1], text[:, 1:])
        found.mean().backward()
    torch.compiler.reset()
    assert len(graphs) == 1
    torch.testing.assert_close(found, wanted)
