"""Test the table of groups: latest ratios, geometric means, missing shapes."""

from experiments.paper import group_table
from mgk.bench import groups, suite
from mgk.bench.implementations import Implementation, Shape

ENVIRONMENT = {"dtype": "bf16", "gpu": "NVIDIA H200", "torch": "2.13", "commit": "abc", "triton": "3.7"}


def rows_of(shape, ratio, variant="smgk", share=2, task="groups", date="2026-11-17", components=2, backend="triton"):
    shape = Shape.parse(shape)
    implementation = Implementation(variant, backend, shape.heads // share, shape.heads // share, components)
    return [
        {
            column: str(value)
            for column, value in (
                suite.result_row(task, implementation, shape, which, "device_ms", 1.0, ratio=value)
                | ENVIRONMENT
                | {"date": date}
            ).items()
        }
        for which, value in zip(("forward", "forward+backward"), ratio, strict=True)
    ]


def line(rows, name):
    lines = group_table.table(rows).splitlines()
    (cells,) = [
        [cell.strip() for cell in text.strip("|").split("|")] for text in lines if text.startswith(f"| {name} |")
    ]
    return cells


def test_groups_without_rows_are_not_measured():
    cells = line([], "training lengths")
    assert cells[2:] == [
        "not measured", "0.65 / 0.70", "0.55 / 0.60", "not measured", "0.95 / 0.95", "not measured", "– / 1.30",
        "– / 1.15", "–",
    ]  # fmt: skip
    text = group_table.table([])
    assert len(text.splitlines()) == 2 + len(groups.GROUPS) + 2
    assert "More than 15% above the needed number of their group: none." in text


def test_geometric_mean_of_a_group_and_number_of_missing_shapes():
    rows = rows_of("32x8x2048x32", (0.4, 0.5))
    assert line(rows, "D 32")[2] == "0.40 (1 of 2 shapes) / 0.50 (1 of 2 shapes)"
    rows += rows_of("32x8x4096x32", (0.9, 0.5))
    assert line(rows, "D 32")[2] == "0.60 / 0.50"
    assert "| 32x8x4096x32 | sMGK | forward | 0.90 | 0.48 |" in group_table.table(rows)


def test_latest_row_of_both_parts_is_used():
    rows = rows_of("64x12x128x64", (0.8, 0.7), date="2026-11-18")
    rows += rows_of("64x12x128x64", (1.4, 1.1), task="speed", date="2026-11-15")
    assert line(rows, "short")[2] == "0.80 / 0.70"
    assert line(rows, "short")[-1] == "abc"


def test_rows_of_other_heads_variants_and_devices_are_left_out():
    shape = "2x8x4096x256xcausal"
    rows = rows_of(shape, (1.0, 1.5), share=1) + rows_of(shape, (2.0, 2.0), components=4)
    rows += rows_of(shape, (1.0, 1.0), variant="softmax", backend="cudnn") + rows_of(shape, (3.0, 3.0), backend="flex")
    rows += [row | {"gpu": "cpu x86"} for row in rows_of(shape, (9.0, 9.0))]
    assert line(rows, "D 256")[2:] == [
        "not measured", "0.80 / 0.85", "–", "not measured", "1.10 / 1.20", "1.00 / 1.50", "–", "–", "abc"
    ]  # fmt: skip
