"""Try all faults, print those that a run does not survive, and write the numbers to a CSV file.

python -m tests.faults [--results results/faults.csv] [--kind TEXT] [--jobs N]
"""

import argparse
import csv
import os
import platform
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mgk._core.io import replacing
from mgk.training import results
from tests.faults import cases
from tests.faults.laboratory import laboratory

COLUMNS = ("kind", "tried", "survived_before", "survived", "date", "python", "torch", "commit", "command")
KINDS = (cases.KILL, cases.STOP, cases.FULL, cases.LIMIT, cases.READ_ONLY, cases.DAMAGED)
# Counts of an earlier version by a table of other cases, with their number.
BEFORE = {cases.KILL: "83 of 83", cases.DAMAGED: "25 of 34"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="CSV file to write")
    parser.add_argument("--kind", default="", help="only kinds that contain this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at the same time")
    options = parser.parse_args()
    start = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        parts = list(pool.map(lambda job: run_cases(options.kind, job, options.jobs), range(options.jobs)))
    tried, survived = (sum(counts, Counter()) for counts in zip(*parts, strict=True))
    tried = {kind: tried[kind] for kind in KINDS if kind in tried}
    for kind in tried:
        print(f"{kind}: {survived[kind]} of {tried[kind]}")
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    if options.results is not None:
        environment = results.environment()
        common = {
            "date": environment["date"],
            "python": platform.python_version(),
            "torch": environment["torch"],
            "commit": environment["commit"],
            "command": "make test-faults",
        }
        with replacing(options.results) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            for kind in tried:
                numbers = {"tried": tried[kind], "survived": survived[kind], "survived_before": BEFORE.get(kind, "")}
                writer.writerow({"kind": kind, **numbers, **common})
    return int(any(survived[kind] != tried[kind] for kind in tried))


def run_cases(text: str, job: int, jobs: int) -> tuple[Counter[str], Counter[str]]:
    """Try the cases of one of several jobs; return their number and that of the survived ones by kind.

    Args:
        text: Part of the kinds to try.
        job: Number of the job.
        jobs: Number of jobs.
    """
    tried: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    with laboratory() as lab:
        bench = cases.Bench(lab)
        bench.prepare()
        for case in [case for case in cases.cases(bench.operations) if text in case.kind][job::jobs]:
            problem = case.run(bench)
            tried[case.kind] += 1
            survived[case.kind] += problem is None
            if problem is not None:
                print(f"{case.kind}, {case.name}: {problem}", flush=True)
    return tried, survived


if __name__ == "__main__":
    sys.exit(main())
