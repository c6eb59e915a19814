"""Parameters and FLOPs against a count by hand, and `mgk flops`."""

import csv

import pytest
from typer.testing import CliRunner

from mgk.analysis.flops import count_costs, estimate_head_cost, fewer_heads
from mgk.cli import commands
from mgk.cli.flops import FIGURES
from mgk.models import EncoderConfig
from mgk.training.evaluate import count_parameters, forward_flops
from mgk.variants import VARIANTS

VOCABULARY, CLASSES, WIDTH, HEAD, INNER, HIDDEN, LAYERS = 40, 3, 24, 8, 20, 12, 2
COMPONENTS = 3
# Key projections, products of query and key for each pair (None: linear attention), shifts, and learned priors.
BY_HAND = {
    "softmax": (1, 1, 0, 0),
    "gaussian": (1, 1, 0, 0),
    "linear": (1, None, 0, 0),
    "mgk": (COMPONENTS, COMPONENTS, 0, COMPONENTS),
    "smgk": (1, 1, COMPONENTS, COMPONENTS),
    "mlk": (COMPONENTS, None, 0, COMPONENTS),
    "smlk": (1, None, COMPONENTS, COMPONENTS),
    "mgk-hard": (COMPONENTS, COMPONENTS, 0, 0),
    "mgk-em": (COMPONENTS, COMPONENTS, 0, 0),
    "smgk-hard": (1, 1, COMPONENTS, 0),
    "smgk-em": (1, 1, COMPONENTS, 0),
}


def count(config, length):
    return count_parameters(config), forward_flops(config, length)


def by_hand(variant, heads, length):
    keys, products, shifts, priors = BY_HAND[variant]
    inner = heads * HEAD
    projections = WIDTH * inner * (1 + keys + 1)  # query, keys, value
    attention = projections + inner * (1 + keys + 1) + inner * WIDTH + WIDTH + heads * (shifts * HEAD + priors)
    mlp = WIDTH * INNER + INNER + INNER * WIDTH + WIDTH
    head = WIDTH * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
    params = (VOCABULARY + length) * WIDTH + LAYERS * (attention + mlp + 4 * WIDTH) + 2 * WIDTH + head
    per_token = projections + inner * WIDTH + 2 * WIDTH * INNER
    if products is None:
        per_token += heads * (2 * HEAD * HEAD + HEAD)  # Z, φ(q)·Z, φ(q)·z
        pairs = 0
    else:
        pairs = heads * HEAD * (products + 1)  # q·k, and the weights with v
    flops = 2 * (LAYERS * (length * per_token + length**2 * pairs) + WIDTH * HIDDEN + HIDDEN * CLASSES)
    return params, flops


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_costs_equal_a_count_by_hand(variant):
    config = EncoderConfig(
        vocab_size=VOCABULARY, num_classes=CLASSES, max_length=1, embed_dim=WIDTH, ffn_dim=INNER, hidden_dim=HIDDEN,
        num_layers=LAYERS, head_dim=HEAD, num_components=COMPONENTS,
    )  # fmt: skip
    counted = count_costs(config, [variant], [1, 4], [16, 50], count)
    assert [(cost.heads, cost.length) for cost in counted] == [(1, 16), (1, 50), (4, 16), (4, 50)]
    for cost in counted:
        assert (cost.params, cost.flops) == by_hand(variant, cost.heads, cost.length)


def test_cost_of_a_head_is_the_difference_of_two_models():
    four_heads, three_heads = by_hand("softmax", 4, 50), by_hand("softmax", 3, 50)
    one = estimate_head_cost(WIDTH, HEAD, 1.0, 50)
    biases = 3 * HEAD
    assert LAYERS * (one.params + biases) == four_heads[0] - three_heads[0]
    assert LAYERS * one.flops == four_heads[1] - three_heads[1]


def test_fewer_heads():
    assert fewer_heads(8) == [1, 2, 4, 8]
    assert fewer_heads(6) == [1, 3, 6]
    assert fewer_heads(1) == [1]


def call(*arguments):
    return CliRunner().invoke(commands.app, ["flops", *arguments])


def test_command_prints_and_writes_the_counts(tmp_path):
    result = call("demo", "--variants", "softmax,smgk", "--heads", "2,4", "--lengths", "16,64", "--out", str(tmp_path))
    assert result.exception is None, result.output
    with (tmp_path / "flops.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["softmax"] * 4 + ["smgk"] * 4
    four = next(row for row in rows if (row["heads"], row["length"]) == ("4", "64"))
    assert f"{int(four['params']):,}" in result.output
    for name in ("flops-heads", "flops-length"):
        assert (tmp_path / f"{name}.png").exists()
        assert (tmp_path / f"{name}.svg").exists()


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_of_the_paper(tmp_path, figure):
    result = call("demo", "--heads", "2,4", "--figure", str(figure), "--out", str(tmp_path))
    assert result.exception is None, result.output
    for name in FIGURES[figure]:
        assert (tmp_path / f"{name}.png").exists()
    assert len(list(tmp_path.iterdir())) == 2 * len(FIGURES[figure])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "recipe must be one of"),
        (["--heads", "two"], "--heads must be positive integers"),
        (["--heads", "0"], "--heads must be positive integers"),
        (["--variants", "soft"], "--variants must be one of"),
        (["--figure", "4"], "--figure must be one of '3', '7'"),
    ],
)
def test_wrong_options_are_rejected(arguments, message):
    result = call(*arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
