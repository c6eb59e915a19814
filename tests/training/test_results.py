"""Files of results: the latest measurement."""

from mgk.training import results


def row(value, **columns):
    return {"variant": "smgk", "heads": "4", "metric": "step_ms", "seed": "0", "date": "2026-11-16", "commit": "a"} | {
        "value": str(value),
        **columns,
    }


def test_latest_is_the_last_row_of_each_key():
    rows = [row(1), row(2, heads="8"), row(3), row(4, variant="mgk"), row(5, heads="8")]
    assert [entry["value"] for entry in results.latest(rows, ("variant", "heads"))] == ["3", "5", "4"]
    assert [entry["value"] for entry in results.latest(iter(rows), ["variant"])] == ["5", "4"]
    assert results.latest([], ["variant"]) == []


def test_latest_value_is_of_the_last_date_and_its_last_commit():
    rows = [
        row(10, date="2026-11-17", commit="b"),
        row(20, date="2026-11-17", commit="c"),
        row(30, date="2026-11-17", commit="c", seed="1"),
        row(40, date="2026-11-17", commit="c"),  # repeats seed 0
        row(50, date="2026-11-01", commit="d"),
    ]
    assert results.latest_value(rows, "step_ms") == 35
    assert results.latest_value(rows, "memory") is None
