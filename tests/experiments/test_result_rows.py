"""Models of the rows in results/."""

import pytest

from experiments.result_rows import model_of


@pytest.mark.parametrize(
    ("numbers", "model"),
    [
        ({"heads": "8", "kv_heads": "8"}, "smgk:8"),
        ({"heads": "8", "kv_heads": "4"}, "smgk:8/4"),
        ({"heads": "8", "kv_heads": "8", "key_heads": "1"}, "smgk:8/1/8"),
        ({"heads": "8", "kv_heads": "", "key_heads": ""}, "smgk:8"),
    ],
    ids=str,
)
def test_model_of_a_row(numbers, model):
    assert str(model_of({"variant": "smgk", **numbers})) == model


@pytest.mark.parametrize("heads", [{}, {"heads": ""}, {"heads": "eight"}], ids=str)
def test_row_without_heads_is_an_error(heads):
    """A model with 0 heads would match no arm, and its runs would be missing from every mean."""
    with pytest.raises(ValueError, match="has a row of study, smgk, without heads"):
        model_of({"recipe": "study", "variant": "smgk", **heads})
