"""The page of mutants matches the recorded results."""

import pytest

from tests import mutants


def test_page_matches_the_results():
    rows = mutants.read_rows()
    assert [*rows[0]] == list(mutants.COLUMNS)
    assert mutants.PAGE.read_text(encoding="utf-8") == mutants.page(rows)


def test_results_are_killed_or_explained():
    reasons = {(mutant.file, mutant.description): mutant.equivalence for mutant in mutants.MUTANTS}
    for row in mutants.read_rows():
        assert row["result"] == "killed" or reasons[row["file"], row["mutation"]]


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.description)
def test_original_text_occurs_once(mutant):
    assert (mutants.ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.original) == 1
