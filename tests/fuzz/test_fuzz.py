"""A case of every class of the fuzz tables; `make test-fuzz` runs all of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import page
from tests.fuzz.__main__ import TABLES, classes, one_of_each_class
from tests.fuzz.harness import Case

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each case runs in a fork")
def test_a_case_of_every_class_ends_cleanly():
    command = [sys.executable, "-m", "tests.fuzz", "--classes", "--jobs", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    counts = dict(re.findall(r"^(.+): (\d+) of \2 clean$", result.stdout, re.MULTILINE))
    assert list(counts) == list(TABLES), result.stdout
    assert min(map(int, counts.values())) > 9


def test_a_subset_has_every_class():
    names = ["run.json empty, eval", "run.json empty, resume", "run.json removed, eval", "last.ckpt removed, resume"]
    subset = one_of_each_class("damaged runs", [Case(name, ()) for name in names])
    assert [case.name for case in subset] == [names[0], names[3]]
    assert classes("bad files", "recipe: title null") == {"recipe"}
    assert classes("option values", "train --seed null byte") == {"train", "null byte"}
    assert classes("option values", "train recipe nan") == {"train", "nan"}
    assert classes("plugins", "plugin: exits with text") == {"plugin:", "exits"}


def test_page_agrees_with_the_results():
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.render(text) == text, "run: python -m tests.fuzz.page"
