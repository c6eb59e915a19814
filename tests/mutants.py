"""Run tests against copies of the code with one wrong line each (mutants), and list the mutants that survive.

    python -m tests.mutants                      all mutants; writes results/mutants.csv and docs/mutants.md
    python -m tests.mutants --only cache.py      mutants whose file or text contains this; keeps the other results

A mutant is killed if its tests fail. The table is in `tests/support/mutant_table.py`.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

from mgk._core.io import write_atomically
from mgk._core.markdown import markdown_table
from tests.support.mutant_table import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
CSV, PAGE = ROOT / "results" / "mutants.csv", ROOT / "docs" / "mutants.md"
COLUMNS = ("file", "mutation", "result", "date", "commit")
TIMEOUT = 600  # seconds; a mutant that never ends is killed too
INTERPRETER = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}
TITLE = """# Mutants

A mutant is a copy of the code with one wrong line. The tests that cover the line must fail ("killed").
`make test-mutants` runs the mutants of `tests/support/mutant_table.py` and writes this page from `results/mutants.csv`.

"""


def copy_repository(target: Path) -> None:
    """Copy the tracked and new files of the package, the tests and their configuration."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "mgk", "tests", "pyproject.toml"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())


def run_tests(root: Path, tests: tuple[str, ...]) -> int:
    """Return pytest's exit code; 1 if the tests do not end."""
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    if tests[0].startswith("tests/kernels"):
        environment |= INTERPRETER
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return 1
    if done.returncode not in (0, 1, 2):
        raise SystemExit(f"pytest {' '.join(tests)} exits with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
    return done.returncode


def check_unchanged_code(root: Path, mutants: list[Mutant]) -> None:
    """Check that all tests pass without a mutation."""
    tests = {test: None for mutant in mutants for test in mutant.tests}
    for in_kernels in (False, True):
        part = tuple(test for test in tests if test.startswith("tests/kernels") == in_kernels)
        if part and run_tests(root, part):
            raise SystemExit(f"tests fail without a mutation: {' '.join(part)}")


def run_mutant(mutant: Mutant) -> str:
    """Return "killed", "equivalent" (survived for a known reason) or "survived"."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_repository(root)
        path = root / mutant.file
        source = path.read_text(encoding="utf-8")
        if source.count(mutant.original) != 1:
            raise SystemExit(f"{mutant.file} has {source.count(mutant.original)} occurrences of {mutant.original!r}")
        path.write_text(source.replace(mutant.original, mutant.mutated), encoding="utf-8")
        result = "killed" if run_tests(root, mutant.tests) else "equivalent" if mutant.equivalence else "survived"
    print(f"{result:10} {mutant.file}: {mutant.description}", flush=True)
    return result


def read_rows() -> list[dict[str, str]]:
    with CSV.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def page(rows: list[dict[str, str]]) -> str:
    """Return the text of the page: the number of mutants by folder, and those that survive."""
    folders: dict[str, list[str]] = {}
    for row in rows:
        parts = Path(row["file"]).parts
        folders.setdefault("/".join(parts[:2]) if len(parts) > 2 else parts[0], []).append(row["result"])
    table = [
        [folder, *(str(results.count(name)) for name in ("killed", "equivalent", "survived"))]
        for folder, results in sorted(folders.items())
    ]
    reasons = {(mutant.file, mutant.description): mutant.equivalence for mutant in MUTANTS}
    others = [
        [row["file"], f"`{row['mutation']}`", reasons.get((row["file"], row["mutation"])) or "not covered by a test"]
        for row in rows
        if row["result"] != "killed"
    ]
    text = TITLE + markdown_table([["folder", "killed", "equivalent", "survived"], *table])
    if len(rows) < len(MUTANTS):
        text += f"\n\n{len(MUTANTS) - len(rows)} more mutants of the table have no result for this state of the code."
    if others:
        text += "\n\nMutants that no test kills:\n\n" + markdown_table([["file", "mutation", "reason"], *others])
    return text.rstrip("\n") + "\n"


def write_results(results: list[tuple[Mutant, str]]) -> None:
    """Write the results of these mutants, and the recorded ones of the other mutants of the table."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    date = datetime.now(timezone.utc).date().isoformat()
    rows = {(row["file"], row["mutation"]): [*row.values()] for row in read_rows()}
    rows |= {(m.file, m.description): [m.file, m.description, result, date, commit] for m, result in results}
    keys = [(mutant.file, mutant.description) for mutant in MUTANTS]
    with tempfile.TemporaryFile("w+", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *(rows[key] for key in keys if key in rows)])
        file.seek(0)
        write_atomically(CSV, file.read())
    write_atomically(PAGE, page(read_rows()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the mutants whose file or text contains this")
    parser.add_argument("--page", action="store_true", help="write the page from results/mutants.csv and run nothing")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests on the unchanged code first")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of mutants at once")
    args = parser.parse_args()
    if args.page:
        write_atomically(PAGE, page(read_rows()))
        return
    mutants = [mutant for mutant in MUTANTS if args.only in f"{mutant.file} {mutant.description}"]
    if not args.unchecked:
        with tempfile.TemporaryDirectory() as folder:
            copy_repository(Path(folder))
            check_unchanged_code(Path(folder), mutants)
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(zip(mutants, pool.map(run_mutant, mutants), strict=True))
    write_results(results)
    survivors = sum(result == "survived" for _, result in results)
    print(f"{len(results)} mutants, {survivors} survived")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
