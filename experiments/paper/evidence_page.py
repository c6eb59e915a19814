"""The pages of evidence: parts between markers are generated from results/, the rest is written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from experiments.cost_quality import page as study_page
from experiments.cost_quality import picture as study_picture
from experiments.cost_quality.plan import load_plan
from experiments.cost_quality.summary import summarize
from experiments.paper import answers, figures, front_page, group_table, lra_averages, plan, speed_table, verdicts
from experiments.paper.claims import cost as costs
from experiments.paper.claims import heads, plateau, quality
from experiments.paper.claims.quality import ExperimentResults
from experiments.paper.peerread import probe_table
from experiments.paper.recipe_results import read_recipe, split_by_settings
from experiments.paper.text import wrap
from experiments.pictures import Picture
from experiments.result_rows import Rows, read_results
from mgk._core.markdown import format_number, format_signed, markdown_table


@dataclass(frozen=True)
class Evidence:
    """Generated texts by marker, and the figures."""

    texts: dict[str, str]
    pictures: list[Picture]
    excluded: list[str]  # runs whose settings differ from their recipe


def gather(results: Path) -> Evidence:
    """Compute all texts and figures from a results directory."""
    measured = [row for row in read_results(results) if "recipe" in row]
    rows, excluded = split_by_settings(measured, [item.recipe for item in plan.EXPERIMENTS])
    experiments = [ExperimentResults(item, read_recipe(rows, item.recipe, results)) for item in plan.EXPERIMENTS]
    folders = sorted(path.parent for path in results.glob("*/pairs.csv"))
    analyses = {folder.name: heads.read(folder) for folder in folders}
    analyses = {name: models for name, models in analyses.items() if heads.judge(models)}
    study = load_plan()
    equal_steps = study_page.words_of(study, rows, results, "smgk:8", "softmax:8")
    equal_time = study_page.words_of(study, rows, results, "smgk:8", "softmax:8@time=smgk:8")
    texts = {
        "modern": study_page.front_sentence(study, rows, results),
        "first": answers.first_sentence(equal_time),
        "answers": answers.table(experiments, analyses, rows),
        "study": study_page.evidence_section(study, rows, results, f"figures/{study_picture.PICTURE}.png"),
        "advice": answers.advice(experiments, rows, equal_steps, equal_time),
        "rules": verdicts.rules(),
        "headline": headline(experiments[0], rows),
        "gain": front_page.language_model(experiments[-1], rows),
        "perplexities": front_page.perplexities(experiments[-1]),
        "fast": "\n\n".join(filter(None, [speed_table.sentence(rows), front_page.equal_heads(experiments[-1], rows)])),
        "speed": speed_table.table(rows),
        "shapes": front_page.shapes(rows),
        "groups": group_table.table(rows),
        "host": front_page.host_time(rows),
        "cpu": front_page.cpu_times(rows),
        "decoder-steps": front_page.decoder_steps(rows),
        "inference": front_page.inference(experiments[-1], rows),
        "summary": summary(experiments, analyses, rows),
        "runs": _join([*map(quality.runs_table, experiments), *_describe_excluded(excluded)]),
        "averages": lra_averages.table(experiments),
        "half": half_section(experiments),
        "same": same_section(experiments),
        "observation": _join([plateau.sentences(experiments)]),
        "plateau": plateau.table(experiments),
        "linear": linear_section(experiments),
        "heads": _join(
            [
                quality.sentence("ranks and heads", head_verdicts(analyses)),
                *(f"**{name}**\n\n{heads.table(models)}" for name, models in analyses.items()),
            ]
        ),
        "cost": cost_section(experiments, rows),
        "ways": learning_section(experiments),
        "retrieval": probe_table.text(rows),
        "queue": plan.table(rows, results),
    }
    pictures = [figures.differences(experiments), figures.endpoints(experiments), figures.curves(experiments, results)]
    pictures += study_picture.pictures(study, summarize(study, rows))
    return Evidence(texts, pictures, excluded)


def _describe_excluded(names: list[str]) -> list[str]:
    return [f"Excluded, because their settings differ from the recipe's: {', '.join(names)}."] if names else []


def _join(texts: Iterable[str]) -> str:
    """Join texts with blank lines; sentences are wrapped, tables are not."""
    lines = "\n\n".join(texts).splitlines()
    wrapped = [line if line.startswith("|") else wrap(line) for line in lines]
    return "\n".join(wrapped) or verdicts.MISSING_SENTENCE


def headline(item: ExperimentResults, rows: Rows) -> str:
    """Format the largest baseline of a task, and the models with half its heads, as a table."""
    results, full = item.results, item.rows[0]
    judged = {verdict.first: verdict for verdict in quality.judge_half(item) if verdict.second == full}
    judged = {row: verdict for row, verdict in judged.items() if verdict.difference}
    steps = {cost.row: cost.values.get("training step") for cost in costs.experiment_costs(item, rows)}
    lines = [["model", "accuracy, %", f"minus {full}", "as good", "parameters", "GFLOPs", "training step"]]
    for row in (row for row in results.rows if row == full or row in judged):
        cells = [str(row), format_number(results.mean(row), results.scale.digits), "", ""]
        if row in judged:
            difference = judged[row].difference
            assert difference is not None
            interval = f"{format_signed(difference.difference)} ± {format_number(difference.half_width)}"
            cells[2:] = [interval, judged[row].verdict]
        step = "–" if steps[row] is None else f"{steps[row]:.1f} ms"
        run = results.runs_of(row)[0]
        lines.append([*cells, f"{run.params:,}", f"{run.flops / 1e9:.2f}", step])
    return markdown_table(lines)


def half_section(experiments: list[ExperimentResults]) -> str:
    """Write the verdicts and tables on mixtures with half the heads, and with half the key heads."""
    judged = {item.title: quality.judge_half(item) for item in experiments}
    texts = []
    for baseline, family in quality.FAMILIES.items():
        texts.append(quality.sentence(f"{family} with half the heads", _family_verdicts(judged, family)))
        controls = _family_verdicts(judged, family, control=True)
        passed = [
            title
            for title, results in controls.items()
            if verdicts.overall(results) in (verdicts.HOLDS, verdicts.SO_FAR)
        ]
        if passed:
            texts[-1] += (
                f" But {baseline} with half the heads passes the same rule on {', '.join(passed)}: "
                "these tasks do not show that the mixture is needed."
            )
    tables = [quality.table(item, judged[item.title]) for item in experiments if judged[item.title]]
    keys = {item.title: results for item in experiments if (results := quality.judge_half_keys(item))}
    if keys:
        texts.append(quality.sentence("half the key heads, which is not in the paper", _verdicts(keys, False)))
        tables.append("All query heads and half the key heads:")
        tables += [quality.table(item, keys[item.title]) for item in experiments if item.title in keys]
    return _join([*texts, *tables])


def same_section(experiments: list[ExperimentResults]) -> str:
    """Write the verdicts and tables on mixtures with the same number of heads."""
    judged = {item.title: quality.judge_same(item) for item in experiments}
    texts = [
        quality.sentence(f"{family} with the same number of heads", _family_verdicts(judged, family))
        for family in quality.FAMILIES.values()
    ]
    return _join([*texts, *(quality.table(item, judged[item.title]) for item in experiments if judged[item.title])])


def linear_section(experiments: list[ExperimentResults]) -> str:
    """Write the verdict and tables on mixtures of linear attention."""
    gaps = {item.title: quality.judge_gaps(item) for item in experiments}
    judged = {title: [gap.verdict.verdict for gap in results] for title, results in gaps.items() if results}
    tables = (quality.gap_table(item, gaps[item.title]) for item in experiments if gaps[item.title])
    return _join([quality.sentence("MLK narrows the gap", judged), *tables])


def learning_section(experiments: list[ExperimentResults]) -> str:
    """Write the verdicts and tables on other ways to learn a mixture."""
    judged = {item.title: results for item in experiments if (results := quality.judge_learning(item))}
    texts = [
        quality.sentence(claim, _verdicts(judged, control))
        for claim, control in (("sMGK + Hard-E is as good as sMGK", False), ("the other rows of Table 4", True))
    ]
    tables = (quality.table(item, judged[item.title], "not claimed") for item in experiments if item.title in judged)
    return _join([*texts, *tables])


def _verdicts(judged: dict[str, list[quality.Verdict]], control: bool) -> dict[str, list[str]]:
    """Return the verdicts on claims or on controls by task, for tasks that have any."""
    selected = {title: [item.verdict for item in items if item.control == control] for title, items in judged.items()}
    return {title: results for title, results in selected.items() if results}


def _family_verdicts(
    judged: dict[str, list[quality.Verdict]], family: str, *, control: bool = False
) -> dict[str, list[str]]:
    selected = {title: [item for item in items if item.family == family] for title, items in judged.items()}
    return _verdicts(selected, control)


def cost_section(experiments: list[ExperimentResults], rows: Rows) -> str:
    """Write the verdicts and tables on costs."""
    measured = {item.title: costs.experiment_costs(item, rows) for item in experiments if item.experiment.timed}
    texts = [f"**{title}**\n\n{costs.table(values)}" for title, values in measured.items() if costs.pairs(values)]
    steps = costs.step_costs(rows)
    if costs.pairs(steps):
        machine = costs.machine(costs.step_rows(rows))
        texts.append(
            f"**A training step of the LRA encoder, length 4,096, batch 32** ({machine})\n\n{costs.table(steps)}"
        )
    sentences = [
        f"{variant}: {quality.group_by_verdict(cost_verdicts(experiments, rows, variant))}"
        for variant in quality.BASELINES
    ]
    text = "Verdict, half the heads cost less. " + ". ".join(sentences) + "."
    return _join([text, *texts, costs.operator_table(rows)])


def summary(experiments: list[ExperimentResults], analyses: dict[str, list[heads.HeadStats]], rows: Rows) -> str:
    """Format all verdicts by claim and task.

    Parentheses hold the number of measured and of planned pairs, and the counts of verdicts if they differ.
    """
    half = {item.title: quality.judge_half(item) for item in experiments}
    same = {item.title: quality.judge_same(item) for item in experiments}
    lines = [["claim", *(item.title for item in experiments)]]

    def add(claim: str, judged: dict[str, list[str]]) -> None:
        lines.append([claim, *(quality.format_cell(judged.get(item.title, [])) for item in experiments)])

    for baseline, family in quality.FAMILIES.items():
        add(f"1. half the heads suffice, {family}", _family_verdicts(half, family))
        add(f"1. control: {baseline} with half the heads", _family_verdicts(half, family, control=True))
    keys = {item.title: quality.judge_half_keys(item) for item in experiments}
    add("1. not in the paper: half the key heads suffice for a mixture", _verdicts(keys, False))
    add("1. control: softmax with half the key heads", _verdicts(keys, True))
    for family in quality.FAMILIES.values():
        add(f"2. better with the same number of heads, {family}", _family_verdicts(same, family))
    gaps = {item.title: quality.judge_gaps(item) for item in experiments}
    add("3. MLK narrows the gap", {title: [gap.verdict.verdict for gap in results] for title, results in gaps.items()})
    learned = {item.title: quality.judge_learning(item) for item in experiments}
    add("6. sMGK + Hard-E is as good as sMGK", _verdicts(learned, False))
    add("6. not claimed: Soft-E, and MGK + Hard-E", _verdicts(learned, True))
    analysed = [["claim", "analysis", "verdict"]]
    analysed += [
        ["4. ranks are higher, heads less alike", name, quality.format_cell(judged)]
        for name, judged in head_verdicts(analyses).items()
    ]
    names = [*costs.COUNTS, *costs.MEASURED.values()]
    lower = [["claim", *names]]
    for variant in quality.BASELINES:
        judged = cost_verdicts(experiments, rows, variant)
        cells = (quality.format_cell(judged[name]) for name in names)
        lower.append([f"5. {variant} with half the heads costs less", *cells])
    return _join([markdown_table(lines), markdown_table(analysed), markdown_table(lower)])


def head_verdicts(analyses: dict[str, list[heads.HeadStats]]) -> dict[str, list[str]]:
    """Return the verdicts of each analysis; planned analyses without results are missing."""
    judged = {name: [item.verdict for item in heads.judge(models)] for name, models in analyses.items()}
    planned = [analysis.folder for analysis in plan.ANALYSES]
    return judged | {name: [verdicts.MISSING] for name in planned if name not in judged}


def cost_verdicts(experiments: list[ExperimentResults], rows: Rows, variant: str) -> dict[str, list[str]]:
    """Return the verdicts on each cost over all timed experiments; a cost without measurements is missing once."""
    timed = [item for item in experiments if item.experiment.timed]
    sources = [*(costs.experiment_costs(item, rows) for item in timed), costs.step_costs(rows)]
    pairs = [pair for source in sources for pair in costs.pairs(source) if pair[0].row.variant == variant]
    judged = [costs.judge_all(*pair) for pair in pairs]
    names = (*costs.COUNTS, *costs.MEASURED.values())
    by_name = {name: [results[name] for results in judged if name in results] for name in names}
    return {name: results or [verdicts.MISSING] for name, results in by_name.items()}
