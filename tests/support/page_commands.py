"""Commands of documentation pages, changed to run with a small recipe on one machine."""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "train-distributed.md"
PLUGIN = """
from dataclasses import replace
from mgk.tasks import register_task
from mgk.tasks.listops import LISTOPS_SHORT
register_task(replace(LISTOPS_SHORT, name="tiny-listops", counts={"test": 40, "dev": 20, "train": 200}))
"""
RECIPE = """
title: a tiny sweep
task: tiny-listops
model: {embed_dim: 8, ffn_dim: 8, hidden_dim: 8, num_layers: 1, head_dim: 4}
training:
  {steps: STEPS, batch_size: 8, lr: 1.0e-3, warmup: 1, eval_every: EVERY, precision: fp32, compile: false}
rows: ["softmax:2", "smgk:1", "mgk-em:1"]
"""


def write_tiny_recipe(directory: Path, steps: int, eval_every: int, plugin: str = "") -> dict[str, str]:
    """Write the recipe tiny.yaml and the plugin with its task; return the environment variables that load the plugin.

    Args:
        directory: Directory of the files.
        steps: Steps of training.
        eval_every: Steps between two evaluations.
        plugin: Code to add to the plugin.
    """
    (directory / "tiny_plugin.py").write_text(PLUGIN + plugin)
    (directory / "tiny.yaml").write_text(RECIPE.replace("STEPS", str(steps)).replace("EVERY", str(eval_every)))
    path = os.pathsep.join([str(ROOT), str(directory)])
    return {"PYTHONPATH": path, "MGK_PLUGINS": "tiny_plugin", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command_of(heading: str, replacements: dict[str, str]) -> str:
    """Return the commands below a heading of the page, with parts replaced; programs are those of this interpreter."""
    section = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert section, f"{PAGE.name} has no section {heading}"
    [block] = re.findall(r"^```\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    for text, replacement in replacements.items():
        assert text in block, f"section {heading} of {PAGE.name} has no {text!r}"
        block = block.replace(text, replacement)
    block = re.sub(
        r"^((?:srun )?)torchrun ", rf"\1{sys.executable} -m torch.distributed.run ", block, flags=re.MULTILINE
    )
    return re.sub(r"^mgk ", f"{sys.executable} -m mgk ", block, flags=re.MULTILINE)
