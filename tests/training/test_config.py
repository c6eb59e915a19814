"""Recipes, training settings and rows."""

import pytest

import experiments.paper  # noqa: F401  (adds its recipes)
from mgk.training import config
from mgk.training.config import ModelSpec, Recipe, TrainConfig


def test_all_recipes_load():
    for name in config.recipe_names():
        recipe = config.load_recipe(name)
        assert recipe.rows
        assert set(recipe.paper) <= {str(row) for row in recipe.rows}
    assert config.load_recipe("listops-4e-4").training.lr == 4e-4
    assert config.load_recipe("listops-4e-4").training.steps == config.load_recipe("listops").training.steps


def test_settings_change_the_recipe():
    recipe = config.load_recipe("listops").with_settings(
        ["lr=3e-4", "training.steps=10", "warmup=2", "model.dropout=0"]
    )
    assert (recipe.training.lr, recipe.training.steps, recipe.model["dropout"]) == (3e-4, 10, 0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("speed=3", "must set one of"),
        ("lr", "key=value"),
        ("lr=-1", "lr"),
        ("precision=fp8", "precision"),
        ("steps=1.5", "steps"),
    ],
)
def test_invalid_setting_raises(setting, message):
    with pytest.raises(ValueError, match=message):
        config.load_recipe("listops").with_settings([setting])


@pytest.mark.parametrize("text", ["smgk", "smgk:", "smgk:0", "smgk:x", "smgk:4/2/1/1", "smgk:4/3/4", "sgmk:4"])
def test_invalid_row_raises(text):
    with pytest.raises(ValueError, match="row"):
        ModelSpec.parse(text)


def test_row_text_round_trips():
    for text in ("smgk:4", "softmax:8/4", "softmax:8/1/8", "softmax:12/4/6"):
        assert str(ModelSpec.parse(text)) == text


def test_key_heads_of_a_row():
    assert ModelSpec.parse("smgk:12/4/6") == ModelSpec("smgk", 12, 6, 4)
    assert ModelSpec("smgk", 12, 6, 4).file_name == "smgk-12k4v6"
    # Equal numbers are one model, however they are written.
    assert ModelSpec.parse("smgk:8/1/8") == ModelSpec("smgk", 8, key_heads=1)
    assert ModelSpec.parse("smgk:8/4/4") == ModelSpec.parse("smgk:8/4") == ModelSpec("smgk", 8, 4)


def test_unknown_recipe_lists_known_ones():
    with pytest.raises(ValueError, match="listops"):
        config.load_recipe("listop")


def test_unknown_recipe_suggests_similar_name():
    with pytest.raises(ValueError, match=r"got 'listop'; did you mean 'listops'\?"):
        config.load_recipe("listop")


def test_settings_are_validated_together():
    with pytest.raises(ValueError, match="warmup"):
        TrainConfig(steps=10, warmup=10)
    with pytest.raises(ValueError, match="accumulate"):
        TrainConfig(batch_size=8, accumulate=3)
    assert Recipe("a", "b", "c").rows == ()


def test_exponents_without_a_point_are_numbers(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("title: mine\ntask: listops-short\nmodel: {dropout: 1e-1}\ntraining: {lr: 1e-3}\n")
    recipe = config.load_recipe(str(file))
    assert (recipe.model["dropout"], recipe.training.lr) == (0.1, 1e-3)
    file.with_name("changed.yaml").write_text(f"extends: {file}\nmodel: {{token_std: 2e-2}}\n")
    assert config.load_recipe(str(tmp_path / "changed.yaml")).model == {"dropout": 0.1, "token_std": 0.02}
