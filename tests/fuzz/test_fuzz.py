"""A sample of the fuzz tables; `make test-fuzz` runs all of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import page
from tests.fuzz.__main__ import TABLES

ROOT = Path(__file__).parents[2]
# Cases of the sample from each table, drawn with SEED.
COUNT, SEED = 25, 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each case runs in a fork")
def test_sample_of_every_table_ends_cleanly():
    command = [sys.executable, "-m", "tests.fuzz", "--sample", str(COUNT), "--seed", str(SEED), "--jobs", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(f"{COUNT} of {COUNT} clean") == len(TABLES), result.stdout


def test_page_agrees_with_the_results():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.render(text) == text, "run: python -m tests.fuzz.page"
