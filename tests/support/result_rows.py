"""Rows of results for tests, of the recipe listops."""

from mgk.training import config
from mgk.training.config import ModelSpec


def result_row(row: str, seed: int, value: float, split: str = "test", metric: str = "accuracy") -> dict:
    recipe, model = config.load_recipe("listops"), ModelSpec.parse(row)
    settings = recipe.training
    return {
        "recipe": "listops",
        "task": "listops",
        "variant": model.variant,
        "preset": "paper",
        "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads,
        "seed": seed,
        "steps": settings.steps,
        "lr": settings.lr,
        "batch": settings.batch_size,
        "split": split,
        "n_examples": 2000,
        "metric": metric,
        "value": value,
        "params": 1000,
        "flops": 2_000_000_000,
        "step_ms": 5,
        "peak_mem_mb": 100,
    }


def plateau_row(row: str, seed: int, step: int) -> dict:
    return result_row(row, seed, step, "dev", "plateau_left_at_step")
