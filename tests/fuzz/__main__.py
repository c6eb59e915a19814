"""Run the fuzz tables: `python -m tests.fuzz` (make test-fuzz).

Every case must end with exit code 0, or with exit code 2 and one line that names what is wrong: without a traceback,
within limits of time and memory. See docs/robustness.md.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from tests.fuzz import bad_data, bad_files, bad_recipes, damaged_runs, materials, option_values
from tests.fuzz.damages import FILE_DAMAGES
from tests.fuzz.harness import Case, Outcome, preload, run_cases
from tests.fuzz.page import FUZZ_COLUMNS

TABLES = {
    "damaged runs": damaged_runs.cases,
    "bad files": bad_files.cases,
    "option values": option_values.cases,
    "options of upcycle": option_values.upcycle,
    "plugins": bad_recipes.plugins,
}


def classes(table: str, name: str) -> set[str]:
    """Return the classes of a case by its name.

    They are the file, the damage and the command of a damaged run; the kind of a bad file; the command and the value of
    an option; the fault of a plugin.
    """
    first, *words = name.split(" ")
    if table == "damaged runs":
        damage, _, command = name.removeprefix(f"{first} ").rpartition(", ")
        return {first, command, *({damage} & set(FILE_DAMAGES))}
    if table == "bad files":
        return {name.partition(":")[0]}
    if table == "plugins":
        return {first, words[0]}
    return {first, " ".join(words[1:])}


def one_of_each_class(table: str, cases: Iterable[Case]) -> list[Case]:
    """Return a small subset of a table that has every class."""
    seen: set[str] = set()
    chosen = []
    labelled = [(case, classes(table, case.name)) for case in cases]
    # Cases with several new classes first, so that few are needed.
    for count in (3, 2, 1):
        for case, names in labelled:
            if len(names - seen) >= count:
                chosen.append(case)
                seen |= names
    return chosen


def sample(cases: Sequence[Case], count: int | None, seed: int) -> list[Case]:
    """Return a random sample of the cases, or all of them. A new case replaces at most one of a sample."""
    if count is None:
        return list(cases)
    return sorted(cases, key=lambda case: hashlib.sha256(ascii((seed, case.name)).encode()).digest())[:count]


def main() -> int:
    """Run the tables, print the cases that do not end cleanly, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--table", choices=TABLES, action="append", help="table to run; default: all")
    parser.add_argument("--sample", type=int, help="number of cases drawn from each table; default: all")
    parser.add_argument("--classes", action="store_true", help="run a subset of each table that has every class")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--match", default="", help="only cases whose name contains this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--verbose", action="store_true", help="print every outcome")
    parser.add_argument("--package", type=Path, help="root of another checkout whose mgk is tested")
    parser.add_argument("--record", type=Path, help="append the result of one table to this file: results/fuzz.csv")
    parser.add_argument("--before", type=int, help="with --record: clean cases of commit aa005c7, see --package")
    options = parser.parse_args()
    if options.record and (len(options.table or []) != 1 or options.match or options.package or options.classes):
        parser.error("--record requires one --table, without --match, --package and --classes")
    preload(options.package)
    bad_data.register_small_tasks()
    # PYTHONPATH is for processes that the commands start.
    path = os.pathsep.join(filter(None, sys.path))
    os.environ.update(HF_HUB_OFFLINE="1", MGK_PLUGINS="", MGK_DATA="", PYTHONPATH=path)
    faults = 0
    try:
        for table in options.table or TABLES:
            matching = [case for case in TABLES[table]() if options.match in case.name]
            drawn = sample(matching, len(matching) if options.classes else options.sample, options.seed)
            cases = one_of_each_class(table, drawn) if options.classes else drawn
            clean = _run_table(cases, options.jobs, options.verbose)
            print(f"{table}: {clean} of {len(cases)} clean", flush=True)
            faults += len(cases) - clean
            if options.record is not None:
                _record(options.record, table, len(cases), options.before, clean)
    finally:
        materials.remove()
    return 1 if faults else 0


def _run_table(cases: Sequence[Case], jobs: int, verbose: bool) -> int:
    clean = 0
    with tempfile.TemporaryDirectory(prefix="mgk-fuzz-") as folder:
        for outcome in run_cases(cases, Path(folder), jobs):
            clean += not outcome.fault
            if outcome.fault or verbose:
                _print_outcome(outcome)
    return clean


def _print_outcome(outcome: Outcome) -> None:
    ending = f"exit code {outcome.status}, {outcome.seconds:.1f} s"
    print(f"{outcome.case.name!a}: {outcome.fault or 'clean'} ({ending})")
    for line in outcome.stderr.splitlines()[-1:] or outcome.stdout.splitlines()[-1:]:
        print(f"    {line[:300]!a}", flush=True)


def _record(path: Path, table: str, tried: int, before: int | None, clean: int) -> None:
    import torch

    from mgk.training.results import commit

    date, versions = datetime.now(timezone.utc).strftime("%Y-%m-%d"), (platform.python_version(), torch.__version__)
    command = shlex.join(["python", "-m", "tests.fuzz", *sys.argv[1:]])
    row = (table, tried, "" if before is None else before, clean, date, *versions, commit(), command)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(FUZZ_COLUMNS)
        writer.writerow(row)


if __name__ == "__main__":
    sys.exit(main())
