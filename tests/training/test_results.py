"""Files of results: rows, and the latest measurement."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from mgk.training import results
from tests.support.result_rows import result_row


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


def test_appended_rows_are_read_back_and_unknown_columns_raise(tmp_path):
    path = tmp_path / "a" / "results.csv"
    results.append(path, [result_row("smgk:4", 0, 0.37)])
    results.append(path, [result_row("smgk:4", 1, 0.38)])
    rows = results.read([path, tmp_path / "missing.csv"])
    assert [float(row["value"]) for row in rows] == [0.37, 0.38]
    assert list(rows[0]) == results.COLUMNS
    with pytest.raises(ValueError, match="speed"):
        results.append(path, [{"speed": 1}])
    assert len(results.read([path])) == 2


def test_concurrent_appends_lose_no_row(tmp_path):
    path = tmp_path / "results.csv"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: results.append(path, [result_row("smgk:4", seed, 0.1)]), range(24)))
    assert sorted(int(row["seed"]) for row in results.read([path])) == list(range(24))


def test_latest_value_is_the_median_over_seeds_of_the_last_day(tmp_path):
    """Files are read in the order of their names, which is not that of the measurements."""

    def timed(value, date, commit, seed=0):
        return result_row("smgk:4", seed, value, "train", "step_ms_alone") | {"date": date, "commit": commit}

    results.append(tmp_path / "a.csv", [timed(seed + 5, "2026-11-16", "new", seed) for seed in range(3)])
    results.append(tmp_path / "b.csv", [timed(99, "2026-01-01", "old")])
    rows = results.read(sorted(tmp_path.glob("*.csv")))
    assert results.latest_value(rows, "step_ms_alone") == 6
    assert results.latest_value(rows, "peak_mem_mb_alone") is None
