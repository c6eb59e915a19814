"""Findings of an analysis in sentences: redundancy of the heads, and savings with fewer heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mgk.analysis.analyse import Analysis
from mgk.analysis.flops import HeadCost, ModelCost
from mgk.analysis.layer import Layer
from mgk.analysis.report.verdicts import Verdict, describe_keys, describe_values, judge_keys

# Heads count as redundant below this share of different maps.
FEW_DIFFERENT = 0.6
# Layers whose shares of different heads differ by less than this count as equal.
EQUAL_LAYERS = 0.02
# A head is negligible if its removal changes a smaller share of the predictions.
NEGLIGIBLE = 0.01
# A component is hardly used if its share of the head's attention is smaller.
HARDLY_USED = 0.05


def sentences(
    analysis: Analysis, costs: Sequence[ModelCost], cost: ModelCost | None, one_head: HeadCost | None
) -> list[str]:
    """Return the findings that follow the headline of `verdicts`.

    Args:
        analysis: The analysis of a model.
        costs: Counted costs of the model with other variants and numbers of heads.
        cost: Counted cost of the model itself, or None.
        one_head: Estimated cost of a head, used without `cost`.
    """
    layers = analysis.layers
    several = any(layer.heads > 1 for layer in layers)
    findings = [describe_keys(analysis), describe_values(analysis)] if several else []
    # Uniform maps are alike whatever the heads compute: layers and groups are not compared.
    if several and judge_keys(analysis) is not Verdict.UNIFORM:
        findings += [_layers(analysis), _groups(analysis)]
    findings += [_ranks(layers, several), _removal(layers), _mixtures(layers)]
    if cost is not None:
        findings.append(_savings(costs, cost))
    elif one_head is not None:
        findings.append(
            f"Each head of each layer costs about {one_head.params:,} parameters and {one_head.flops / 1e6:,.0f} "
            f"million FLOPs at {analysis.longest} tokens (estimated from the widths)."
        )
    if several:
        findings.append(
            "These numbers measure similarity, not accuracy: similar heads can often be removed, but only training the "
            "smaller model shows the cost in accuracy."
        )
    return [sentence for sentence in findings if sentence]


def _layers(analysis: Analysis) -> str:
    """Name the layers with the most and the least similar heads."""
    shares = [
        (layer.similarity.different["maps"] / layer.heads, number, layer)
        for number, layer in enumerate(analysis.layers, 1)
        if layer.heads > 1
    ]
    if len(shares) < 2:
        return ""
    (low, low_number, low_layer), (high, high_number, high_layer) = min(shares), max(shares)
    if high - low < EQUAL_LAYERS:
        return f"The layers do not differ: {100 * low:.0f} % of the heads are different in each layer."
    fewest, most = (f"{layer.similarity.different['maps']:.1f} of {layer.heads}" for layer in (low_layer, high_layer))
    # Differences below the printed precision are ties.
    if fewest == most:
        return f"The layers hardly differ: {fewest} heads are different in each layer."
    return (
        f"The heads are most similar in layer {low_number} ({fewest} different), least in layer {high_number} ({most})."
    )


def _groups(analysis: Analysis) -> str:
    """List the largest groups of heads with nearly identical maps."""
    groups, layers = [], analysis.layers
    for number, layer in enumerate(layers):
        members: dict[int, list[int]] = {}
        for head, group in enumerate(layer.similarity.groups):
            members.setdefault(group, []).append(head + 1)
        groups += [(-len(heads), number + 1, heads) for heads in members.values() if len(heads) > 1]
    if not groups:
        if analysis.different["maps"] < FEW_DIFFERENT * analysis.heads:
            return "No two heads of a layer have nearly identical maps, but their maps overlap in part."
        return "No two heads of a layer have nearly identical maps."
    names = []
    for _, number, heads in sorted(groups)[:3]:
        count = layers[number - 1].heads
        names.append(f"{f'all {count} heads' if len(heads) == count else _listed(heads)} of layer {number}")
    remaining = len(groups) - len(names)
    more = f"; and {remaining} more group{'s' if remaining > 1 else ''}" if remaining else ""
    return f"Nearly identical maps: {'; '.join(names)}{more}."


def _listed(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return f"heads {', '.join(words[:-1])} and {words[-1]}"


def _ranks(layers: Sequence[Layer], several: bool) -> str:
    shares = [float(np.median(layer.ranks.rank / layer.ranks.size)) for layer in layers if len(layer.ranks.rank)]
    if not shares:
        return ""
    lowest, highest = (round(100 * extreme(shares)) for extreme in (min, max))
    numbers = f"{lowest} % of the maximum"
    if lowest != highest:
        numbers = f"{lowest} % to {highest} % of the maximum, depending on the layer"
    finding = f"The median rank of the attention matrices is {numbers}."
    if not several:
        return finding
    return (
        f"{finding} Rank describes the map of one head, redundancy compares heads: heads of full rank can be copies of "
        "each other, and heads of low rank can all be different."
    )


def _removal(layers: Sequence[Layer]) -> str:
    """State the effect of removing single heads."""
    effects = [
        (float(removal.flipped[head] if removal.flipped is not None else removal.change[head]), number + 1, head + 1)
        for number, layer in enumerate(layers)
        if (removal := layer.removal) is not None
        for head in range(layer.heads)
    ]
    if not effects:
        return ""
    first = layers[0].removal
    predicts = first is not None and first.flipped is not None
    changes, unit = ("changes", " of the predictions") if predicts else ("changes the output by", "")
    (least, a, b), (most, c, d) = min(effects), max(effects)
    any_head = f"removing any one of them, without retraining, {changes}"
    if most == 0:
        return f"No single head matters: {any_head} 0 %{unit} on these samples."
    if most < NEGLIGIBLE:
        return f"Single heads hardly matter: {any_head} at most {100 * most:.1f} %{unit} (layer {c}, head {d})."
    if len(effects) == 1:
        return f"Removing the only head, without retraining, {changes} {100 * most:.1f} %{unit}."
    return (
        f"Removing one head, without retraining, {changes} at least {100 * least:.1f} %{unit} (layer {a}, head {b}) "
        f"and at most {100 * most:.1f} % (layer {c}, head {d})."
    )


def _mixtures(layers: Sequence[Layer]) -> str:
    """State the use of the mixture components."""
    mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
    if not mixtures:
        return ""
    smallest = min(float(mixture.answered.min()) for mixture in mixtures)
    moved = float(np.mean([mixture.moved.mean() for mixture in mixtures]))
    use = "All mixture components are used" if smallest > HARDLY_USED else "Some mixture components are hardly used"
    return (
        f"{use} (the smallest share of a head's attention is {100 * smallest:.0f} %). Switching between soft and hard "
        f"assignment moves {100 * moved:.0f} % of the attention to other keys."
    )


def _savings(costs: Sequence[ModelCost], cost: ModelCost) -> str:
    """Compare parameters and FLOPs with half the heads."""
    half = cost.heads // 2
    heads = f"{half} head{'s' if half > 1 else ''}"
    changes = [
        f"{other.variant} with {heads} has {_change(cost.params, other.params)} parameters and "
        f"{_change(cost.flops, other.flops)} FLOPs"
        for other in costs
        if (other.length, other.heads) == (cost.length, half) and other.variant in (cost.variant, "smgk", "smlk")
    ]
    if not changes:
        return ""
    size = f"{cost.params:,} parameters, {cost.flops / 1e9:.3f} GFLOPs at {cost.length} tokens"
    return f"Half the heads of the same width, compared with this model ({cost.row}, {size}): {'; '.join(changes)}."


def _change(before: int, after: int) -> str:
    percent = round(100 * (after - before) / before)
    return f"{abs(percent)} % {'fewer' if percent < 0 else 'more'}" if percent else "the same number of"
