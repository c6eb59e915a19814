"""The six claims of the paper in six rows, and the advice that follows from the verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from experiments.paper import front_page, kernel_targets, speed_table, verdicts
from experiments.paper.claims import cost, heads, quality
from experiments.paper.claims.quality import ExperimentResults, Verdict
from experiments.paper.comparisons import Difference
from experiments.paper.text import wrap
from experiments.result_rows import Rows
from mgk._core.markdown import format_number, format_signed, markdown_table
from mgk.bench.timing import PASSES
from mgk.training.config import ModelSpec

# Experiments whose intervals are the narrowest of their kind, by recipe; the pages behind have the others.
TEXT, LISTOPS = "enwiki-lm-2", "listops-4e-4"
NAMES = {TEXT: "language model", LISTOPS: "ListOps"}
WORDS = {
    verdicts.HOLDS: "yes",
    verdicts.SO_FAR: "yes so far",
    verdicts.FAILS: "no",
    verdicts.OPEN: "undecided",
    verdicts.MISSING: "not measured",
}
BREAK = "<br>"  # between the lines of a cell
JOIN = "\u00a0"  # between words that stay on one line
# Experiments that would decide what is undecided.
SETTLE = (
    "a language model trained to convergence, three seeds each",
    "three seeds of every pair, and softmax given the training time of the mixture",
    "a second seed of the linear language models",
    "three seeds each, and ranks compared at equal loss",
    "times on other GPU generations",
    "a task on which models differ",
)


def find(experiments: Iterable[ExperimentResults], recipe: str) -> ExperimentResults:
    """Return the results of the experiment with a recipe."""
    return next(item for item in experiments if item.experiment.recipe == recipe)


def format_difference(item: ExperimentResults, difference: Difference) -> str:
    """Format a difference in points of accuracy, or as a change of perplexity in per cent."""
    if item.results.scale.sign > 0:
        text, unit = format_signed(difference.difference), " points"
    else:
        # The score is −100 × nats per token.
        text, unit = format_signed(100 * math.expm1(-difference.difference / 100)), " %"
    width = "" if difference.half_width is None else f" ± {format_number(difference.half_width)}"
    return f"{text}{width}{unit}".replace(" ", JOIN)


def evidence(item: ExperimentResults, judged: Sequence[Verdict]) -> str:
    """List the measured differences of an experiment, by baseline."""
    metric = "perplexity" if item.results.scale.sign < 0 else "accuracy"
    name, lines = NAMES[item.experiment.recipe], []
    for second in dict.fromkeys(verdict.second for verdict in judged):
        parts = [
            f"{verdict.first}{JOIN}{format_difference(item, verdict.difference)}"
            for verdict in judged
            if verdict.second == second and verdict.difference is not None
        ]
        if parts:
            lines += [f"{name}, {metric} against {second}:", *parts]
    return BREAK.join(lines) or f"{name}: {verdicts.MISSING}"


def answer(item: ExperimentResults, judged: Sequence[Verdict]) -> str:
    """Return the answers on an experiment in words; the models are named if their answers differ."""
    names: dict[str, list[str]] = {}
    for verdict in judged:
        names.setdefault(WORDS[verdict.verdict], []).append(str(verdict.first))
    words = next(iter(names), WORDS[verdicts.MISSING])
    if len(names) > 1:
        words = "; ".join(f"{word} for {', '.join(models)}" for word, models in names.items())
    return f"{NAMES[item.experiment.recipe]}: {words}"


def paper_numbers(item: ExperimentResults, models: str) -> str:
    """Return the paper's numbers of some models, as displayed."""
    rows = map(ModelSpec.parse, models.split())
    numbers = (f"{row}{JOIN}{format_number(item.results.paper(row))}" for row in rows)
    return BREAK.join([f"{NAMES[item.experiment.recipe]}:", *numbers])


def _half(text: ExperimentResults, listops: ExperimentResults) -> list[str]:
    measured, answers = [], []
    for item in (text, listops):
        judged = [verdict for verdict in quality.judge_half(item) if verdict.second == ModelSpec("softmax", 8)]
        measured.append(evidence(item, judged))
        words = answer(item, [verdict for verdict in judged if not verdict.control])
        if any(verdict.control and verdict.verdict == verdicts.HOLDS for verdict in judged):
            words += ", and softmax with half the heads suffices too: the task does not show that the mixture is needed"
        answers.append(words)
    return [
        "1. Half the heads suffice",
        BREAK.join([paper_numbers(text, "softmax:8 mgk:4"), paper_numbers(listops, "softmax:8 smgk:4 mgk:4")]),
        BREAK.join(measured),
        BREAK.join(answers),
    ]


def _range_of_differences(item: ExperimentResults, judged: Sequence[Verdict]) -> str:
    """Give the range of the differences of an experiment with many pairs, and the widest of their intervals."""
    known = [verdict.difference for verdict in judged if verdict.difference is not None]
    widths = [difference.half_width for difference in known if difference.half_width is not None]
    name = NAMES[item.experiment.recipe]
    if not known or not widths:
        return f"{name}: {verdicts.MISSING}"
    differences = [difference.difference for difference in known]
    values = f"{format_signed(min(differences))} to {format_signed(max(differences))} {item.results.scale.unit}"
    return f"{name}: {len(known)} pairs, {values}, each ± {format_number(max(widths))} or less"


def _same(text: ExperimentResults, listops: ExperimentResults) -> list[str]:
    in_text, in_listops = (
        [verdict for verdict in quality.judge_same(item) if verdict.second.variant == "softmax"]
        for item in (text, listops)
    )
    return [
        "2. With the same heads the mixture is better",
        BREAK.join([paper_numbers(text, "softmax:8 smgk:8 mgk:8"), paper_numbers(listops, "softmax:4 smgk:4 mgk:4")]),
        BREAK.join([evidence(text, in_text), _range_of_differences(listops, in_listops)]),
        BREAK.join([answer(text, in_text), answer(listops, in_listops)]),
    ]


def _linear(text: ExperimentResults) -> list[str]:
    gaps = quality.judge_gaps(text)
    words = answer(text, [gap.verdict for gap in gaps])
    remarks = dict.fromkeys(gap.verdict.remark for gap in gaps if gap.verdict.remark)
    return [
        "3. MLK narrows the gap of linear attention",
        paper_numbers(text, "softmax:8 linear:8 mlk:8"),
        evidence(text, [gap.verdict for gap in gaps]),
        words + "".join(f" ({remark})" for remark in remarks),
    ]


def _heads(analyses: dict[str, list[heads.HeadStats]]) -> list[str]:
    measure = next(iter(heads.MEASURES))
    parts, judged = [], []
    for name in ("retrieval-peerread-random-analysis", "enwiki-lm-2-analysis"):
        for item in heads.judge(analyses.get(name, [])):
            judged.append(item.verdict)
            if item.measure == measure:
                loss = heads.loss_difference(analyses[name], item.mixture, item.baseline, "dev")
                at = "" if loss is None else f" (dev loss {format_signed(loss)})"
                difference = format_signed(item.difference.difference, 1)
                parts.append(f"{item.mixture} against {item.baseline}: {difference}{at}")
    words = WORDS[verdicts.overall(judged)]
    return [
        "4. Ranks are higher, heads less alike",
        "figures only",
        BREAK.join([f"{measure}:", *(parts or [verdicts.MISSING])]),
        f"{words}: ranks change during training, and the models of a pair had equal steps but different losses",
    ]


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _cost(experiments: list[ExperimentResults], rows: Rows) -> list[str]:
    timed = [cost.experiment_costs(item, rows) for item in experiments if item.experiment.timed]
    parts, answers = [], []
    for variant in ("smgk", "mgk"):
        pairs = [pair for source in timed for pair in cost.pairs(source) if pair[0].row.variant == variant]
        ratios = [cost.ratios(*pair) for pair in pairs]
        judged = [cost.judge_all(*pair) for pair in pairs]
        numbers, counts = [], []
        for name in (*cost.COUNTS, *cost.TIMES):
            values = [ratio[name] for ratio in ratios if name in ratio]
            if values:
                lower, higher = (
                    sum(verdict.get(name) == kind for verdict in judged) for kind in (verdicts.HOLDS, verdicts.FAILS)
                )
                numbers.append(f"{name} {_range(values)}".replace(" ", JOIN))
                counts.append(f"{name} in {lower} of {len(values)} pairs" + (f", higher in {higher}" if higher else ""))
        if numbers:
            parts += [f"{variant}, over softmax with all heads:", *numbers]
            answers += [f"{variant} is lower:", *counts]
    return [
        "5. Parameters, FLOPs and time fall with half the heads",
        "figures of parameters and FLOPs, no times",
        BREAK.join(parts) or verdicts.MISSING,
        BREAK.join([*answers, "the other pairs: within the noise"]) if answers else WORDS[verdicts.MISSING],
    ]


def _hard(listops: ExperimentResults) -> list[str]:
    judged = [verdict for verdict in quality.judge_learning(listops) if not verdict.control]
    return [
        "6. sMGK with a hard assignment is as good as with a soft one",
        paper_numbers(listops, "smgk:1 smgk-hard:1"),
        evidence(listops, judged),
        answer(listops, judged),
    ]


def table(experiments: list[ExperimentResults], analyses: dict[str, list[heads.HeadStats]], rows: Rows) -> str:
    """Format the claims: the paper's number, the best evidence, the answer, and the experiment that would settle it."""
    text, listops = (find(experiments, recipe) for recipe in (TEXT, LISTOPS))
    claims = [
        _half(text, listops),
        _same(text, listops),
        _linear(text),
        _heads(analyses),
        _cost(experiments, rows),
        _hard(listops),
    ]
    header = ["claim", "the paper", "our best evidence", "answer", "what would settle it"]
    return markdown_table([header, *([*claim, settle] for claim, settle in zip(claims, SETTLE, strict=True))])


def first_sentence(equal_time: str) -> str:
    """State the study's answer to the comparison at equal training time.

    Args:
        equal_time: The answer in words, "" without runs.
    """
    answers = {
        "": "Whether mixture keys pay at equal training time is not known yet: the study of this question has no runs.",
        "better": "At equal training time, a decoder with mixture keys is better than softmax attention.",
        "worse": "Mixture keys do not pay at equal training time: the decoder with softmax attention is better.",
    }
    if equal_time.startswith("equal"):
        return f"Mixture keys do not pay at equal training time: the decoders are {equal_time} of perplexity."
    reason = equal_time.removeprefix(verdicts.OPEN)
    open_ = f"Whether mixture keys are better than softmax attention at equal training time is undecided{reason}."
    return answers.get(equal_time, open_)


def verdict_of_study(words: str) -> str:
    """Return the verdict of an answer of the study: equal quality is no reason to use mixture keys."""
    verdict_of = {"better": verdicts.HOLDS, "worse": verdicts.FAILS, "equal": verdicts.FAILS}
    return verdict_of.get(words.partition(" ")[0], verdicts.OPEN)


class Advice(NamedTuple):
    """A use of mixture keys, and the verdict on it."""

    verdict: str
    sentence: str


def _language_model_advice(text: ExperimentResults, rows: Rows) -> list[Advice]:
    """Return the uses in a language model, each decided by a pair of models."""
    same, half_keys, half = quality.judge_same(text), quality.judge_half_keys(text), quality.judge_half(text)
    share = front_page.cache_share(ModelSpec.parse("smgk:8/4"), ModelSpec.parse("softmax:8"))
    uses = (
        (
            "You want a lower perplexity from the same heads and the same cache, and accept a longer step",
            same, "smgk:8", "softmax:8",
        ),
        (
            "You train a decoder with grouped key heads and want a lower perplexity from the same cache",
            same, "smgk:8/4", "softmax:8/4",
        ),
        (f"You want the quality of all key heads at {share:.2f} of the cache", half_keys, "smgk:8/4", "softmax:8"),
        ("You want to halve all heads of a language model without a loss", half, "smgk:4", "softmax:8"),
    )  # fmt: skip
    steps = {entry.row: entry.values.get("training step") for entry in cost.experiment_costs(text, rows)}
    advices = []
    for use, judged, first, second in uses:
        pair = ModelSpec.parse(first), ModelSpec.parse(second)
        verdict = next((item for item in judged if (item.first, item.second) == pair), None)
        if verdict is None or verdict.difference is None:
            advices.append(Advice(verdicts.MISSING, f"{use}: {verdicts.MISSING}."))
            continue
        seeds = " and ".join(str(count) for count in verdict.difference.counts)
        words = f"perplexity {format_difference(text, verdict.difference)}, {seeds} seeds"
        times = [steps.get(row) for row in pair]
        if times[0] is not None and times[1] is not None:
            words += f", training step {times[0] / times[1]:.2f}"
        advices.append(Advice(verdict.verdict, f"{use}: {words} (`{first}` against `{second}`)."))
    return advices


def _control_advice(listops: ExperimentResults) -> list[Advice]:
    """Return the advice against mixtures if softmax with half the heads suffices."""
    judged = quality.judge_half(listops)
    controls = [item.verdict for item in judged if item.control and item.family == "softmax to MGK"]
    if verdicts.overall(controls) != verdicts.HOLDS:
        return []
    return [Advice(verdicts.FAILS, "Softmax with fewer heads is enough, as on ListOps: train that baseline first.")]


def _operator_advice(rows: Rows) -> list[Advice]:
    """Return the advice on saving time alone, if the times of sMGK and softmax with half the heads are known."""
    gpu = kernel_targets.on_gpu(rows)
    mixture = [kernel_targets.mean(kernel_targets.ratios(gpu, "smgk", pass_)) for pass_ in PASSES]
    softmax = [kernel_targets.mean(speed_table.half_softmax_ratios(gpu, pass_)) for pass_ in PASSES]
    times = [time for time in (*mixture, *softmax) if time is not None]
    if len(times) < len(mixture) + len(softmax):
        return []
    forward, both, softmax_forward, softmax_both = times
    sentence = (
        f"You only want to save time: the operator with half the heads takes {forward:.2f} and {both:.2f} of "
        f"softmax's time (forward; with gradients), softmax with half the heads {softmax_forward:.2f} and "
        f"{softmax_both:.2f}."
    )
    return [Advice(verdicts.FAILS if softmax_forward < forward else verdicts.OPEN, sentence)]


def advice(experiments: list[ExperimentResults], rows: Rows, equal_steps: str, equal_time: str) -> str:
    """Sort the uses by the verdicts: use it, do not use it, undecided.

    Args:
        experiments: Experiments with their results.
        rows: Rows of all results files, for the times.
        equal_steps: Answer of the study to the comparison at equal heads and steps, "" without runs.
        equal_time: Its answer at equal training time.
    """
    text, listops = (find(experiments, recipe) for recipe in (TEXT, LISTOPS))
    at_equal_time = Advice(
        verdict_of_study(equal_time),
        f"You compare at equal training time instead of equal steps: {equal_time or 'no run of the study yet'}.",
    )
    modern = Advice(
        verdict_of_study(equal_steps),
        f"You train a modern decoder (RoPE, RMSNorm, SwiGLU): {equal_steps or 'no run of the study yet'} with the same "
        "heads and steps.",
    )
    titles = {verdicts.HOLDS: "Use it when", verdicts.FAILS: "Do not use it when", verdicts.OPEN: "Not decided yet"}
    uses: dict[str, list[str]] = {title: [] for title in titles.values()}
    for item in (
        *_language_model_advice(text, rows), *_control_advice(listops), *_operator_advice(rows), modern, at_equal_time,
    ):  # fmt: skip
        verdict = verdicts.HOLDS if item.verdict == verdicts.SO_FAR else item.verdict
        uses[titles.get(verdict, titles[verdicts.OPEN])].append(wrap(f"- {item.sentence}", indent="  "))
    return "\n\n".join(f"**{title}**\n\n" + "\n".join(lines) for title, lines in uses.items() if lines)
