"""The answer in words: are the heads redundant, and what would fewer cost?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mgk.analysis.analyse import Analysis, Layer
from mgk.analysis.flops import ModelCost, PerHead

# Of all heads, the share that is effectively different, and what it is called.
GRADES = ((0.85, "little redundancy"), (0.6, "some redundancy"), (0.35, "clear redundancy"), (0.0, "strong redundancy"))

# It is worth a remark when few maps are different, but by this share of all heads more outputs.
APART = 0.15
FEW = 0.6
# Layers whose shares of different heads are this close are the same.
SAME = 0.02
# Below this share of the predictions a head is hardly missed.
UNMISSED = 0.01


def grade(analysis: Analysis) -> str:
    share = analysis.different["maps"] / analysis.heads
    return next(words for least, words in GRADES if share >= least)


def headline(analysis: Analysis) -> str:
    if all(layer.heads == 1 for layer in analysis.layers):
        return "One head a layer: there are no two to be alike."
    different = analysis.different["maps"]
    return f"About {different:.1f} of {analysis.heads} heads are effectively different: {grade(analysis)}."


def sentences(
    analysis: Analysis, costs: Sequence[ModelCost], own: ModelCost | None, one_head: PerHead | None
) -> list[str]:
    """What follows the headline; `own` is the model itself among `costs`, `one_head` an estimate without them."""
    layers = analysis.layers
    several = any(layer.heads > 1 for layer in layers)
    said = [_layers(analysis), _outputs(analysis), _groups(analysis)] if several else []
    said += [_ranks(layers), _removal(layers), _mixtures(layers)]
    if own is not None:
        said.append(_savings(costs, own))
    elif one_head is not None:
        said.append(
            f"Each head of each layer costs about {one_head.params:,} parameters and {one_head.flops / 1e6:,.0f} "
            f"million FLOPs at {analysis.longest} tokens (from the widths)."
        )
    if several:
        said.append(
            "Alike is measured here, accuracy is not: heads that look alike can often go, but only training the "
            "smaller model shows what it loses."
        )
    return [sentence for sentence in said if sentence]


def _layers(analysis: Analysis) -> str:
    each = [
        (layer.similarity.different["maps"] / layer.heads, number, layer)
        for number, layer in enumerate(analysis.layers)
        if layer.heads > 1
    ]
    if len(each) < 2:
        return ""
    (least_share, a, least), (most_share, b, most) = min(each)[:3], max(each)[:3]
    fewest, most_of_all = (f"{one.similarity.different['maps']:.1f} of {one.heads}" for one in (least, most))
    if most_share - least_share < SAME:
        return f"It is the same in every layer: {100 * least_share:.0f} % of its heads are different."
    # What is behind the last digit that is told ranks nothing.
    if fewest == most_of_all:
        return f"It is about the same in every layer: {fewest} heads are different."
    return (
        f"The heads of layer {a + 1} are most alike ({fewest} different), those of layer {b + 1} least ({most_of_all})."
    )


def _outputs(analysis: Analysis) -> str:
    outputs, maps = analysis.different.get("outputs"), analysis.different["maps"]
    if outputs is None:
        return ""
    said = f"That is by where they look; by what they pass on (CKA of their outputs) it is {outputs:.1f}"
    if maps < FEW * analysis.heads and outputs - maps > APART * analysis.heads:
        return f"{said}: heads that look at the same places read different things there. They could share a map."
    return f"{said}."


def _groups(analysis: Analysis) -> str:
    found, layers = [], analysis.layers
    for number, layer in enumerate(layers):
        groups: dict[int, list[int]] = {}
        for head, group in enumerate(layer.similarity.groups):
            groups.setdefault(group, []).append(head + 1)
        found += [(-len(heads), number + 1, heads) for heads in groups.values() if len(heads) > 1]
    if not found:
        if analysis.different["maps"] < FEW * analysis.heads:
            return "Yet no two heads of a layer have nearly the same map: they overlap in part."
        return "No two heads of a layer have nearly the same map."
    whole = [f"all {layer.heads} heads" for layer in layers]
    named = [
        f"{whole[number - 1] if len(heads) == layers[number - 1].heads else _listed(heads)} of layer {number}"
        for _, number, heads in sorted(found)[:3]
    ]
    left = len(found) - len(named)
    more = f"; and {left} more group{'s' if left > 1 else ''}" if left else ""
    return f"Nearly the same maps: {'; '.join(named)}{more}."


def _listed(numbers: list[int]) -> str:
    words = [str(number) for number in numbers]
    return f"heads {', '.join(words[:-1])} and {words[-1]}"


def _ranks(layers: Sequence[Layer]) -> str:
    shares = [float(np.median(layer.ranks.rank / layer.ranks.size)) for layer in layers if len(layer.ranks.rank)]
    if not shares:
        return ""
    span = f"{100 * min(shares):.0f} %"
    if round(100 * max(shares)) != round(100 * min(shares)):
        span += f" to {100 * max(shares):.0f} %, by layer,"
    return f"The rank of an attention matrix is {span} of the highest possible (medians)."


def _removal(layers: Sequence[Layer]) -> str:
    each = [
        (float(removal.flipped[head] if removal.flipped is not None else removal.change[head]), number + 1, head + 1)
        for number, layer in enumerate(layers)
        if (removal := layer.removal) is not None
        for head in range(layer.heads)
    ]
    if not each:
        return ""
    first = layers[0].removal
    predicts = first is not None and first.flipped is not None
    changes, what = ("changes", " of the predictions") if predicts else ("changes the output by", "")
    (least, a, b), (most, c, d) = min(each), max(each)
    any_one = f"silencing any one of them, without retraining, {changes}"
    if most == 0:
        return f"No head is missed: {any_one} 0 %{what} on these samples."
    if most < UNMISSED:
        return f"Hardly a head is missed: {any_one} {100 * most:.1f} %{what} at most (layer {c}, head {d})."
    if len(each) == 1:
        return f"Silencing its only head, without retraining, {changes} {100 * most:.1f} %{what}."
    return (
        f"Silencing one head, without retraining, {changes} {100 * least:.1f} %{what} at least (layer {a}, head {b}) "
        f"and {100 * most:.1f} % at most (layer {c}, head {d})."
    )


def _mixtures(layers: Sequence[Layer]) -> str:
    mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
    if not mixtures:
        return ""
    smallest = min(float(mixture.answered.min()) for mixture in mixtures)
    moved = float(np.mean([mixture.moved.mean() for mixture in mixtures]))
    use = "every component is used" if smallest > 0.05 else "some component is hardly used"
    return (
        f"Of the mixtures, {use} (the least answers for {100 * smallest:.0f} % of its head's attention); between soft "
        f"and hard assignment {100 * moved:.0f} % of the attention moves to other keys."
    )


def _savings(costs: Sequence[ModelCost], own: ModelCost) -> str:
    half = own.heads // 2
    named = [
        f"{cost.variant} with {half} has {_change(own.params, cost.params)} parameters and "
        f"{_change(own.flops, cost.flops)} FLOPs"
        for cost in costs
        if (cost.length, cost.heads) == (own.length, half) and cost.variant in (own.variant, "smgk", "smlk")
    ]
    if not named:
        return ""
    size = f"{own.params:,} parameters, {own.flops / 1e9:.3f} GFLOPs at {own.length} tokens"
    return f"Half the heads of the same width, against this model ({own.row}, {size}): {'; '.join(named)}."


def _change(before: int, after: int) -> str:
    percent = round(100 * (after - before) / before)
    return f"{abs(percent)} % {'fewer' if percent < 0 else 'more'}" if percent else "as many"
