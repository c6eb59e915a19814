"""Files of results: rows, and the latest measurement."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mgk._core.io import DataError, locked
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
    same_day = [row(9000, commit="c", gpu=""), row(68, commit="c", gpu="NVIDIA H200")]
    assert results.latest_value(same_day, "step_ms") == 68
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


def our_file(folder):
    path = folder / "target.csv"
    results.append(path, [result_row("smgk:4", 0, 0.37)])
    return path


def text_file(path):
    path.write_text("notes of a user\n")


def foreign_columns(path):
    path.write_text(",".join([*results.COLUMNS, "speed"]) + "\n")


def other_csv(path):
    path.write_text("seed,value\n0,1\n")


def damaged_file(path):
    results.append(path, [result_row("smgk:4", 0, 0.37)])
    path.write_text(path.read_text() + "," * 50 + "\n")


def binary_file(path):
    path.write_bytes(b"\xff\xfe\x00")


def read_only_file(path):
    results.append(path, [result_row("smgk:4", 0, 0.37)])
    path.chmod(0o444)


def link_to_itself(path):
    path.symlink_to(path)


def linked_lock(path):
    (path.parent / "target").write_text("notes of a user\n")
    (path.parent / f".{path.name}.lock").symlink_to("target")


REFUSED = {
    text_file: "is not a results file",
    other_csv: "is not a results file",
    foreign_columns: "has the columns of another kind of results (speed)",
    damaged_file: "is damaged",
    binary_file: "is not a results file",
    read_only_file: "is read-only: make it writable",
    os.mkfifo: "is not a regular file",
    Path.mkdir: "is a directory",
    link_to_itself: "symbolic links",
    linked_lock: ".lock must be a regular, writable file: remove it",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_other_files_are_refused_and_unchanged(tmp_path, make):
    path = tmp_path / "results.csv"
    make(path)
    before = {file: (os.lstat(file), file.is_file() and file.read_bytes()) for file in tmp_path.iterdir()}
    for call in (lambda: results.check_file("--results", path), lambda: results.append(path, [{"seed": 1}])):
        with pytest.raises(ValueError, match=re.escape(REFUSED[make])) as raised:
            call()
        assert str(path) in str(raised.value)
        after = {file: (os.lstat(file), file.is_file() and file.read_bytes()) for file in tmp_path.iterdir()}
        assert [(stat.st_ino, stat.st_mode, text) for stat, text in after.values()] == [
            (stat.st_ino, stat.st_mode, text) for stat, text in before.values()
        ]
        assert list(after) == list(before)


def test_devices_are_refused():
    # Only checked: a failure of `append` as root would replace the device.
    with pytest.raises(ValueError, match="--results /dev/null is not a regular file"):
        results.check_file("--results", Path("/dev/null"))


def test_symbolic_links_are_followed(tmp_path):
    target, new = our_file(tmp_path), tmp_path / "new" / "new.csv"
    for number, end in enumerate((target, new)):
        link = tmp_path / f"link-{number}.csv"
        link.symlink_to(end)
        results.check_file("--results", link)
        results.append(link, [result_row("smgk:4", 1, 0.38)])
        assert link.is_symlink()
        assert not end.is_symlink()
    assert [len(results.read([path])) for path in (target, new)] == [2, 1]


def test_files_of_results_are_accepted(tmp_path):
    path = tmp_path / "results.csv"
    results.check_file("--results", path)
    path.touch()
    results.check_file("--results", path)
    results.append(path, [result_row("smgk:4", 0, 0.37)])
    results.check_file("--results", path)
    results.check_file("--out", path, ["speed"])
    # A file of an earlier version, without the setup.
    path.write_text("\n".join(line.rpartition(",")[0] for line in path.read_text().splitlines()))
    results.append(path, [{**result_row("smgk:4", 1, 0.38), "speed": 3}], ["speed"])
    assert [row["speed"] for row in results.read([path])] == ["", "3"]


def test_lock_keeps_the_contents_of_its_file(tmp_path):
    (tmp_path / "lock").write_text("a")
    with locked(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text() == "a"
    (tmp_path / "link").symlink_to("lock")
    with (
        pytest.raises(DataError, match="link is a symbolic link, not a lock file: remove it"),
        locked(tmp_path / "link"),
    ):
        pass
