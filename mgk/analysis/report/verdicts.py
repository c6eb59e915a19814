"""Verdicts of an analysis: whether the key heads and the value heads of a model are redundant, and what to do.

Similar maps are evidence of redundancy only if unrelated heads, whose attention is as concentrated, would be less
similar (`Similarity.chance_divergence`). Attention that is nearly uniform allows no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mgk.analysis.analyse import Analysis
from mgk.analysis.similarity import SAME_GROUP

# Minimum share of effectively different heads for each grade.
GRADES = ((0.85, "little redundancy"), (0.6, "some redundancy"), (0.35, "clear redundancy"), (0.0, "strong redundancy"))
LITTLE = GRADES[0][0]
# A head attends nearly uniformly if its rows are closer to uniform attention, in bits. Two such heads with unrelated
# logits are closer to each other than SAME_GROUP: for small logits their divergence is half of this.
NEARLY_UNIFORM = 2 * SAME_GROUP
# Heads are redundant if they close at least this share of the gap between unrelated heads (0) and identical ones (1).
# Randomly initialized models are at most at 0.10, and at 0.23 with a single sample of 8 tokens; MiniLM is at 0.6.
MIN_EXCESS = 0.25
# A smaller saving of the cache is not worth a merge.
MIN_SAVING = 0.05


class Verdict(Enum):
    """Verdict on the redundancy of keys or values."""

    SINGLE = "one head per layer"
    UNIFORM = "nearly uniform attention"
    CHANCE = "as similar as unrelated heads"
    DIFFERENT = "different"
    REDUNDANT = "redundant"


@dataclass(frozen=True)
class Suggestion:
    """Numbers of heads that a merge could keep; None where nothing changes."""

    key_heads: int | None = None  # of every layer
    value_heads: int | None = None
    cache: float | None = None  # share of the cache, if no single number of heads suits all layers


@dataclass(frozen=True)
class Advice:
    """Last line of the findings: a sentence, and the command that acts on the verdicts, or ""."""

    sentence: str
    command: str = ""


def grade(share: float) -> str:
    """Return the grade of redundancy of a share of effectively different heads."""
    return next(name for least, name in GRADES if share >= least)


def count_uniform_heads(analysis: Analysis) -> int:
    """Return the number of heads that attend nearly uniformly."""
    return sum(
        int((layer.similarity.concentration < NEARLY_UNIFORM).sum())
        for layer in analysis.layers
        if layer.similarity.concentration is not None
    )


def excess_similarity(analysis: Analysis, measure: str) -> float | None:
    """Return the similarity beyond chance: 0 for unrelated heads, 1 for identical ones; None if not measured."""
    chance = analysis.different_by_chance.get(measure)
    if chance is None:
        return None
    # Identical heads count as one in each layer.
    gap = chance - len(analysis.layers)
    return (chance - analysis.different[measure]) / gap if gap > 0 else 0.0


def judge_keys(analysis: Analysis) -> Verdict:
    """Return the verdict on the keys, by the attention maps."""
    if all(layer.heads == 1 for layer in analysis.layers):
        return Verdict.SINGLE
    if 2 * count_uniform_heads(analysis) >= analysis.heads:
        return Verdict.UNIFORM
    if analysis.different["maps"] >= LITTLE * analysis.heads:
        return Verdict.DIFFERENT
    excess = excess_similarity(analysis, "maps")
    return Verdict.CHANCE if excess is not None and excess < MIN_EXCESS else Verdict.REDUNDANT


def judge_values(analysis: Analysis) -> Verdict | None:
    """Return the verdict on the values, by the outputs of the heads; None if outputs were not compared."""
    outputs = analysis.different.get("outputs")
    if outputs is None:
        return None
    keys = judge_keys(analysis)
    if keys in (Verdict.SINGLE, Verdict.UNIFORM):
        return keys
    if outputs >= LITTLE * analysis.heads:
        return Verdict.DIFFERENT
    excess = excess_similarity(analysis, "outputs")
    # Outputs of unrelated heads overlap too, because the heads read the same tokens.
    is_chance = keys is Verdict.CHANCE or (excess is not None and excess < MIN_EXCESS)
    return Verdict.CHANCE if is_chance else Verdict.REDUNDANT


def headline(analysis: Analysis) -> str:
    """Return the main finding in one sentence."""
    verdict = judge_keys(analysis)
    if verdict is Verdict.SINGLE:
        return "Each layer has one head: there are no heads to compare."
    if verdict is Verdict.UNIFORM:
        count = count_uniform_heads(analysis)
        heads = f"All {count}" if count == analysis.heads else f"{count} of {analysis.heads}"
        return f"{heads} heads attend nearly uniformly: no verdict on redundancy."
    different = analysis.different["maps"]
    about = f"About {different:.1f} of {analysis.heads} heads are effectively different"
    if verdict is Verdict.CHANCE:
        return f"{about}, as with unrelated heads: no redundancy beyond chance."
    return f"{about}: {grade(different / analysis.heads)}."


def describe_keys(analysis: Analysis) -> str:
    """Return the verdict on the keys in plain words."""
    verdict, heads, different = judge_keys(analysis), analysis.heads, analysis.different["maps"]
    uniform = count_uniform_heads(analysis)
    if verdict is Verdict.UNIFORM:
        return (
            f"Keys: no verdict. {uniform} of {heads} heads are within {NEARLY_UNIFORM:.1f} bits of uniform attention, "
            "so their maps are alike whatever they compute. The model is untrained, or these samples leave it nothing "
            "to select."
        )
    chance = analysis.different_by_chance.get("maps")
    unrelated = f"; unrelated heads whose attention is as concentrated would form {chance:.1f}" if chance else ""
    counted = f"{heads} heads form about {different:.1f} different attention maps{unrelated}"
    flat = ""
    if uniform:
        flat = f" {uniform} head{'s attend' if uniform > 1 else ' attends'} nearly uniformly."
    if verdict is Verdict.REDUNDANT:
        return f"Keys: {grade(different / heads)}. {counted}. Heads with the same map can share a key head.{flat}"
    if verdict is Verdict.CHANCE:
        return f"Keys: no redundancy beyond chance. {counted}.{flat}"
    return f"Keys: little redundancy. {counted}.{flat}"


def describe_values(analysis: Analysis) -> str:
    """Return the verdict on the values in plain words; "" if outputs were not compared."""
    verdict = judge_values(analysis)
    if verdict in (None, Verdict.SINGLE):
        return ""
    outputs = analysis.different["outputs"]
    if verdict is Verdict.UNIFORM:
        return "Values: no verdict. Nearly uniform attention averages all values, whatever the head."
    counted = f"The outputs of about {outputs:.1f} of {analysis.heads} heads are different (CKA)"
    if verdict is Verdict.CHANCE:
        return (
            f"Values: no redundancy beyond chance. {counted}; unrelated heads overlap too, because they read the same "
            "tokens, and most of all on short samples."
        )
    if verdict is Verdict.REDUNDANT:
        ending = "Heads with the same output can share a value head."
        if judge_keys(analysis) is Verdict.REDUNDANT and outputs > analysis.different["maps"]:
            ending = "Values are less redundant than keys: merge keys first."
        return f"Values: {grade(outputs / analysis.heads)}. {counted}. {ending}"
    return f"Values: little redundancy. {counted}. Keep the value heads."


def suggest_heads(analysis: Analysis, *, keys_are_fixed: bool = False) -> Suggestion:
    """Return numbers of heads that serve the different maps and outputs of every layer.

    Each layer keeps at least its rounded effective number of different maps as key heads, and one value head for each
    group of heads with nearly the same outputs, raised to a divisor of the present number. Merged values lose more than
    merged keys, so that outputs that overlap in part are not merged.

    Args:
        analysis: The analysis.
        keys_are_fixed: The keys cannot be merged, for example because they are normalized.
    """
    layers = analysis.layers
    merge_keys = judge_keys(analysis) is Verdict.REDUNDANT and not keys_are_fixed
    merge_values = judge_values(analysis) is Verdict.REDUNDANT
    key_heads, value_heads = [layer.key_heads for layer in layers], [layer.value_heads for layer in layers]
    maps = [round(layer.similarity.different["maps"]) for layer in layers]
    outputs = [len(set(layer.similarity.output_groups or range(layer.heads))) for layer in layers]
    keys = _raise_to_divisors(maps, key_heads) if merge_keys else key_heads
    values = _raise_to_divisors(outputs, value_heads) if merge_values else value_heads
    common_keys, common_values = _common(keys, key_heads), _common(values, value_heads)
    if common_keys is not None or common_values is not None:
        return Suggestion(common_keys, common_values)
    cache = (sum(keys) + sum(values)) / (sum(key_heads) + sum(value_heads))
    return Suggestion(cache=math.ceil(100 * cache) / 100) if cache <= 1 - MIN_SAVING else Suggestion()


def _raise_to_divisors(needed: Sequence[int], present: Sequence[int]) -> list[int]:
    """Return the smallest divisor of each present number that is not below the needed one."""
    return [
        next((d for d in range(1, count + 1) if count % d == 0 and d >= least), count)
        for least, count in zip(needed, present, strict=True)
    ]


def _common(needed: Sequence[int], present: Sequence[int]) -> int | None:
    """Return the smallest number that divides all present ones and suits all layers; None if it saves nothing."""
    divisors = range(1, min(present) + 1)
    common = [d for d in divisors if d >= max(needed) and not any(count % d for count in present)]
    return common[0] if common and sum(present) > common[0] * len(present) else None


def no_merge_reason(analysis: Analysis) -> str:
    """Return the sentence that advises against a merge."""
    verdict = judge_keys(analysis)
    if verdict is Verdict.UNIFORM:
        return "Nothing should be merged: train the model first, or analyze it on text of its domain."
    if verdict is Verdict.REDUNDANT:
        return "Nothing should be merged: every layer needs nearly all of its present key and value heads."
    return "Nothing should be merged: the heads attend to different keys."
