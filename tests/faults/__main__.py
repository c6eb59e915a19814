"""Try all faults, print those that a run does not survive, and write the numbers to a CSV file.

python -m tests.faults [--results results/faults.csv] [--kind TEXT]
"""

import argparse
import csv
import platform
import sys
import time
from collections import Counter
from pathlib import Path

from mgk._core.io import replacing
from mgk.training import results
from tests.faults import cases
from tests.faults.laboratory import laboratory

COLUMNS = ("kind", "tried", "survived_before", "survived", "date", "python", "torch", "commit", "command")
# Counts of an earlier version by a table of other cases, with their number.
BEFORE = {cases.KILL: "83 of 83", cases.DAMAGED: "25 of 34"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="CSV file to write")
    parser.add_argument("--kind", default="", help="only kinds that contain this text")
    options = parser.parse_args()
    tried: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    start = time.monotonic()
    with laboratory() as lab:
        bench = cases.Bench(lab)
        bench.prepare()
        table = [case for case in cases.cases(bench.operations) if options.kind in case.kind]
        for case in table:
            problem = case.run(bench)
            tried[case.kind] += 1
            survived[case.kind] += problem is None
            if problem is not None:
                print(f"{case.kind}, {case.name}: {problem}", flush=True)
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
    return int(survived != tried)


if __name__ == "__main__":
    sys.exit(main())
