"""Last lines of `mgk analyze`: the command that acts on its verdicts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mgk.analysis.analyse import Analysis
    from mgk.analysis.report.verdicts import Advice, Suggestion


def advise_run(analysis: Analysis, recipe: str, row: str) -> Advice:
    """Return the training command of a model with fewer key heads and value heads.

    Args:
        analysis: Analysis of a run.
        recipe: Name of the run's recipe.
        row: Spec of the model, such as "smgk:8/4".
    """
    from mgk.analysis.report.verdicts import Advice, Verdict, judge_keys, no_merge_reason, suggest_heads

    if judge_keys(analysis) is Verdict.SINGLE:
        return Advice("Nothing should be merged: each layer has one head.")
    suggestion = suggest_heads(analysis)
    if suggestion.key_heads is None and suggestion.value_heads is None:
        return Advice(no_merge_reason(analysis))
    key_heads, value_heads = _numbers(analysis, suggestion)
    heads = max(layer.heads for layer in analysis.layers)
    options = ["--variant", row.partition(":")[0], "--heads", heads]
    options += ["--kv-heads", value_heads, "--key-heads", key_heads]
    command = shlex.join(map(str, ["mgk", "train", recipe, *options]))
    return Advice("To train the model with fewer key heads (the heads of a run are not merged):", command)


def advise_transformers(
    analysis: Analysis, model: str, texts: Sequence[str], reason: str, *, keys_are_fixed: bool, is_trusted: bool
) -> Advice:
    """Return the command that merges the heads of a Transformers model.

    Args:
        analysis: Analysis of the model.
        model: Directory or name of the model.
        texts: Text files of the analysis; empty if its inputs were no text.
        reason: Reason why heads cannot be merged, or "".
        keys_are_fixed: Only values can be merged.
        is_trusted: Python code of the model's repository is run.
    """
    from mgk.analysis.report.verdicts import Advice, Verdict, judge_keys, no_merge_reason, suggest_heads

    if judge_keys(analysis) is Verdict.SINGLE:
        return Advice("Nothing should be merged: each layer has one head.")
    if reason:
        return Advice(f"mgk upcycle cannot merge heads of this model: {reason}.")
    suggestion = suggest_heads(analysis, keys_are_fixed=keys_are_fixed)
    if suggestion.cache is not None:
        options: list[object] = ["--cache", suggestion.cache]
    elif suggestion.key_heads is None and suggestion.value_heads is None:
        return Advice(no_merge_reason(analysis))
    else:
        key_heads, value_heads = _numbers(analysis, suggestion)
        options = [] if keys_are_fixed else ["--key-heads", key_heads]
        options += ["--value-heads", value_heads]
    for text in texts or ["corpus.txt"]:
        options += ["--text", text]
    options += ["--out", f"{Path(model).name}-small", *(["--trust-remote-code"] if is_trusted else [])]
    command = shlex.join(map(str, ["mgk", "upcycle", model, *options]))
    text = "the text" if texts else "corpus.txt, text of the model's domain,"
    return Advice(
        f"To merge the redundant heads and measure what is lost ({text} needs a few hundred lines, one sample each):",
        command,
    )


def _numbers(analysis: Analysis, suggestion: Suggestion) -> tuple[int, int]:
    """Return the numbers of key heads and value heads of a suggestion, or the present ones where nothing changes."""
    layer = analysis.layers[0]
    return suggestion.key_heads or layer.key_heads, suggestion.value_heads or layer.value_heads
