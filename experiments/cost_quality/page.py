"""Page and picture of the study, made from results."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

from experiments.cost_quality.decoding import table as decoding_table
from experiments.cost_quality.picture import plotted_recipe
from experiments.cost_quality.plan import Arm, Plan
from experiments.cost_quality.profile import latest_table as profile_table
from experiments.cost_quality.summary import Answer, ArmSummary, answer, family_spread, summarize
from experiments.result_rows import Rows
from experiments.statistics import EQUIVALENCE, Interval, mean_interval
from mgk._core.markdown import format_number, format_signed, markdown_table
from mgk.training.config import load_recipe

DECODING_NOTE = (
    "One sequence in plain calls, with that many tokens in the cache; a decoding step is a CUDA graph. Median of five\n"
    "repetitions. A model without a finished run has random weights, which changes neither speed nor cache."
)
PROFILE_NOTE = (
    "Milliseconds of the kernels, by family; [the longest kernels](../results/cost-quality-profile.md). "
    '"Other" has norms,\nactivations and residuals.'
)


def write_page(plan: Plan, rows: Rows, folder: Path) -> str:
    """Return the page: answers, then one table per recipe."""
    summaries = summarize(plan, rows)
    parts = [f"# {plan.title}\n", *([f"{plan.scope}\n"] if plan.scope else []), *_introduction(plan, summaries)]
    parts.append(_answers(plan, summaries, folder))
    parts += [
        f"\n## {load_recipe(recipe).title}\n\n{_arms_table(plan, summaries, recipe)}"
        for recipe in judged_recipes(summaries)
    ]
    if rates := _selection_table(plan, summaries):
        parts.append(f"\n## Selection of settings\n\n{rates}")
    if questions := _open_questions(plan, summaries, folder):
        parts.append(f"\n## Open questions\n\n{questions}")
    if (times := decoding_table(rows)) and not plan.option:
        parts.append(f"\n## Prefill and decoding\n\n{DECODING_NOTE}\n\n{times}")
    if (times := profile_table(rows)) and not plan.option:
        parts.append(f"\n## Kernels of a training step\n\n{PROFILE_NOTE}\n\n{times}")
    return "\n".join(parts) + "\n"


def evidence_section(plan: Plan, rows: Rows, folder: Path, picture: str) -> str:
    """Return the study's part of the page of evidence: the number of runs, the answers, the picture and the arms.

    The page of the study has the rules, the open questions, and the other tables.

    Args:
        plan: The plan of the study.
        rows: Rows of all results files.
        folder: Results directory, for stored losses.
        picture: Path of the picture, relative to the page.
    """
    summaries = summarize(plan, rows)
    if not summaries:
        return (
            f"**The study has no results yet**: 0 of {sum(plan.arms.values())} planned runs are finished, and its "
            f"{len(plan.questions)} questions are open."
        )
    parts = [f"{_count_runs(plan, summaries)}.", _answers(plan, summaries, folder)]
    if plotted_recipe(summaries) is not None:
        parts.append(f"![Perplexity against training time, cache and parameters]({picture})")
    parts += [_arms_table(plan, summaries, recipe) for recipe in judged_recipes(summaries)[:1]]
    parts.append(
        "Rules, open questions, learning rates, prefill and decoding: [the page of the study](cost-quality.md)."
    )
    return "\n\n".join(parts)


def words_of(plan: Plan, rows: Rows, folder: Path, first: str, second: str) -> str:
    """Return the answer in words to the question about two arms; "" if they have no runs."""
    summaries = summarize(plan, rows)
    for question in plan.questions:
        if (str(question.first), str(question.second)) == (first, second):
            result = answer(question, plan, summaries, folder)
            return "" if result.interval is None else result.words
    return ""


def front_sentence(plan: Plan, rows: Rows, folder: Path) -> str:
    """Return the answers to the first two primary questions for the README: at equal steps and at equal time."""
    summaries = summarize(plan, rows)
    results = [answer(question, plan, summaries, folder) for question in plan.primary_questions[:2]]
    differences, words = zip(*((_format_difference(item), item.words) for item in results), strict=True)
    if len(set(words)) == 1:
        words = ("", f": {words[0]}")
    else:
        words = tuple(f" ({text})" for text in words)
    return textwrap.fill(
        "In a modern decoder (RoPE, length 1,024), the difference in perplexity of sMGK "
        f"from softmax is {differences[0]} after equal steps{words[0]} and {differences[1]} after equal training "
        f"time{words[1]}.",
        120,
    )


def judged_recipes(summaries: dict[Arm, ArmSummary]) -> list[str]:
    """Return the recipes of arms that are judged, in the order of the plan."""
    return list(dict.fromkeys(arm.recipe for arm, summary in summaries.items() if not summary.is_selection))


def _introduction(plan: Plan, summaries: dict[Arm, ArmSummary]) -> list[str]:
    return [
        f"{len(plan.arms)} arms (models with settings); {_count_runs(plan, summaries)}. This page is written from the "
        f"results by\n`python -m experiments.cost_quality{plan.option}`.\n",
        "The interval of a difference is a 95 % interval over seeds and text. The deviation over seeds is pooled over\n"
        "the arms (models) of a recipe. The deviation over text is that of blocks of 4,096 tokens of\n"
        f"`{plan.judged_split}`, which was not used for selection. ± of a perplexity or an accuracy is a 95 %\n"
        "interval over seeds alone. Perplexities are those of a sliding window; the column *segments* has those of\n"
        "segments without overlap.\n",
        *(f"{rule}\n" for rule in _rules(plan)),
    ]


def _count_runs(plan: Plan, summaries: dict[Arm, ArmSummary]) -> str:
    """Return the number of finished runs among the planned ones, and that of added seeds."""
    finished = sum(min(len(summary.values), plan.arms[arm]) for arm, summary in summaries.items())
    added = sum(len(summary.values) for summary in summaries.values()) - finished
    text = f"{finished} of {sum(plan.arms.values())} planned runs have results"
    if selecting := sum(len(summary.values) for summary in summaries.values() if summary.is_selection):
        text += f" ({selecting} of them select settings and are not judged)"
    return f"{text}, and {added} added seeds" if added else text


def _rules(plan: Plan) -> list[str]:
    """Return the rules of the answers, which were fixed before any result, one paragraph each."""
    rules = [
        f"Two arms are equal if the whole interval lies within ±{EQUIVALENCE:g} % of perplexity, or "
        f"±{EQUIVALENCE:g} points of accuracy.\nOtherwise an interval without 0 decides."
    ]
    for family in plan.families:
        names = " and ".join(f"`{name}`" for name in sorted(family))
        rules.append(f"The deviation over seeds is pooled over the arms of {names} together.")
    for stage in plan.stages:
        if stage.until_half_width is not None:
            names = ", ".join(f"`{arm}`" for arm in stage.arms)
            rules.append(
                f"{names} get one more seed at a time,\nuntil the half-width of every primary question is at most "
                f"{stage.until_half_width:g} %, or they have {max(stage.arms.values())}.\n"
                "This rule looks only at the widths of the intervals, and not at the differences."
            )
    return rules


def _answers(plan: Plan, summaries: dict[Arm, ArmSummary], folder: Path) -> str:
    """Format the answers to the primary questions, then to the others that have runs, and count the open ones."""
    answers = [answer(question, plan, summaries, folder) for question in plan.questions]
    primary = [item for item in answers if item.question.is_primary]
    others = [item for item in answers if not item.question.is_primary]
    if not primary:
        return _answers_table(others)
    answered = [item for item in others if item.interval is not None]
    parts = [f"Primary questions:\n\n{_answers_table(primary)}"]
    parts += [f"Other questions:\n\n{_answers_table(answered)}"] if answered else []
    if count := len(others) - len(answered):
        parts.append(f"{count} other questions have no runs yet.")
    return "\n\n".join(parts)


def _open_questions(plan: Plan, summaries: dict[Arm, ArmSummary], folder: Path) -> str:
    """List the questions that have no runs, if the table of answers omits them; "" without any."""
    if not plan.primary_questions:
        return ""
    answers = [answer(question, plan, summaries, folder) for question in plan.questions]
    return "\n".join(f"- {_question_title(item)}" for item in answers if item.interval is None)


def format_interval(interval: Interval) -> str:
    """Format a difference with the half-width of its interval, if that is known."""
    text = format_signed(interval.difference)
    return text if math.isnan(interval.half_width) else f"{text} ± {format_number(interval.half_width)}"


def _answers_table(answers: list[Answer]) -> str:
    lines = [["comparison", "first − second", "answer"]]
    for item in answers:
        lines.append([_question_title(item), _format_difference(item), item.words])
    return markdown_table(lines)


def _format_difference(item: Answer) -> str:
    return "–" if item.interval is None else f"{format_interval(item.interval)} {item.unit}"


def _question_title(item: Answer) -> str:
    """Return the title of a question with its two arms; arms of one recipe are named by their models alone."""
    pair = item.question.first, item.question.second
    is_one_recipe = len({arm.recipe for arm in pair}) == 1
    names = [f"`{arm}`" + ("" if is_one_recipe else f" of {arm.recipe}") for arm in pair]
    return f"{item.question.title} ({', '.join(names)})"


def _arms_table(plan: Plan, summaries: dict[Arm, ArmSummary], recipe: str) -> str:
    family = [summary for arm, summary in summaries.items() if arm.recipe == recipe and not summary.is_selection]
    spread = family_spread(plan, summaries, recipe)
    quality = ["perplexity", "segments"] if family[0].is_language_model else ["accuracy, %"]
    lines = [
        ["arm", "seeds", *quality, "step alone, ms", "steps × step, minutes", "parameters, M", "cache, bytes per token"]
    ]
    for summary in family:
        interval = mean_interval(list(summary.values.values()), spread)
        factor = summary.quality if summary.is_language_model else 100
        half_width = "" if math.isnan(interval.half_width) else f" ± {factor * interval.half_width:.2f}"
        settings = f" ({', '.join(summary.arm.overrides)})" if summary.arm.overrides else ""
        lines.append(
            [
                f"`{summary.arm}`{settings}",
                str(len(summary.values)),
                f"{summary.quality:.2f}{half_width}",
                *([format_number(summary.segments, 2)] if summary.is_language_model else []),
                format_number(summary.step_ms, 1),
                format_number(summary.minutes, 1),
                f"{summary.params / 1e6:.1f}",
                "–" if summary.cache_bytes is None else f"{summary.cache_bytes:,}",
            ]
        )
    return markdown_table(lines)


def _selection_table(plan: Plan, summaries: dict[Arm, ArmSummary]) -> str:
    """Format the arms that select settings, on the split that selects; "" without any."""
    lines = [["recipe", "settings", "arm", "split", "seeds", "quality", "recipe's settings"]]
    rates: dict[float, bool] = {}  # whether the recipe has this learning rate
    for arm, summary in summaries.items():
        if summary.is_selection:
            base = load_recipe(arm.recipe)
            chosen = base.with_settings([f"steps={summary.recipe.training.steps}"]) == summary.recipe
            rates[summary.recipe.training.lr] = chosen
            quality = f"{summary.quality:.2f}" + ("" if summary.is_language_model else " %")
            cells = [arm.recipe, ", ".join(arm.overrides), f"`{arm}`", f"`{plan.selection_split(arm)}`"]
            lines.append([*cells, str(len(summary.values)), quality, "yes" if chosen else ""])
    if len(lines) == 1:
        return ""
    at_edge = len(rates) > 1 and (rates[min(rates)] or rates[max(rates)])
    note = "\n\nThe selected rate is at the edge of those tried; rates beyond it were not." if at_edge else ""
    return f"{markdown_table(lines)}{note}"
