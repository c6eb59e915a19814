"""Recipes: one YAML file per experiment, loaded into validated dataclasses."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgk._core.validation import fail, flag, number, one_of, positive_integer, spelling_hint
from mgk.models.attention_layer import known_variants
from mgk.tasks import PLUGIN_HINT

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

SCHEDULES = ("one-cycle", "constant", "cosine")
PRECISIONS = ("bf16", "fp32")
DECAYS = ("all", "matrices")
PADDINGS = ("packed", "full", "longest")
# Checkpoints that a run keeps by default: the newest, and the one before it in case the newest is damaged.
KEEP_CHECKPOINTS = 2
# Recipes of experiments/paper, which are not installed.
PAPER_RECIPES = frozenset(
    "enwiki-lm enwiki-lm-2 enwiki-lm-2-m4 listops-4e-4 retrieval-peerread retrieval-peerread-30k "
    "retrieval-peerread-random text-5k".split()
)
# Model settings that the task determines.
TASK_SETTINGS = frozenset({"vocab_size", "num_classes", "max_length", "documents"})
# Model settings determined by the model spec and the preset, and the options to use instead of --set.
OPTIONS_OF_SETTINGS = {
    "variant": "--variant or --rows (models with a variant per layer are built in Python, by the config's variant)",
    "num_heads": "--heads or --rows",
    "num_kv_heads": "--kv-heads or --rows",
    "num_key_heads": "--key-heads or --rows",
    "preset": "--preset",
}


@dataclass(frozen=True)
class ModelSpec:
    """A model of a sweep: "smgk:4" is sMGK with 4 heads.

    "softmax:8/4" has 8 query heads and 4 key and value heads; "softmax:8/1/4" has 8 query, 1 key and 4 value heads.

    Examples:
        >>> from mgk.training.config import ModelSpec
        >>> str(ModelSpec("smgk", heads=8, kv_heads=4))
        'smgk:8/4'
    """

    variant: str
    heads: int
    kv_heads: int | None = None  # value heads, and key heads unless key_heads is set
    key_heads: int | None = None

    def __post_init__(self) -> None:
        # Different spellings of the same numbers are one model.
        if self.key_heads is not None and self.key_heads == (self.kv_heads or self.heads):
            object.__setattr__(self, "key_heads", None)
        elif self.key_heads is not None and self.kv_heads == self.heads:
            object.__setattr__(self, "kv_heads", None)

    @classmethod
    def parse(cls, text: str, name: str = "row") -> ModelSpec:
        """Parse "variant:heads" or "variant:heads/key-heads[/value-heads]".

        Args:
            text: The model.
            name: Start of the error messages.

        Examples:
            >>> from mgk.training.config import ModelSpec
            >>> ModelSpec.parse("smgk:8/4")
            ModelSpec(variant='smgk', heads=8, kv_heads=4, key_heads=None)
        """
        variant, colon, heads = text.strip().partition(":")
        if colon:
            one_of(name, variant, known_variants())
        counts = heads.split("/")
        # At most 18 digits: int() also accepts digits of other scripts, and any number of them.
        if len(counts) > 3 or not all(re.fullmatch("0*[1-9][0-9]{0,17}", count) for count in counts):
            form = "variant:heads or variant:heads/key-heads[/value-heads]"
            fail(name, f"must have the form {form}, as in smgk:4, got {text!r}")
        numbers = [int(count) for count in counts]
        for count, kind in zip(numbers[1:], ("key", "value"), strict=False):
            if numbers[0] % count:
                fail(name, f"{text}: {count} {kind} heads do not divide {numbers[0]} heads")
        kv_heads = numbers[-1] if len(numbers) > 1 else None
        return cls(variant, numbers[0], kv_heads, numbers[1] if len(numbers) == 3 else None)

    def __str__(self) -> str:
        counts = [self.heads]
        if self.key_heads is not None:
            counts += [self.key_heads, self.kv_heads or self.heads]
        elif self.kv_heads is not None:
            counts.append(self.kv_heads)
        return f"{self.variant}:{'/'.join(map(str, counts))}"

    @property
    def file_name(self) -> str:
        """The spec as used in file names: smgk-4, softmax-8kv4, softmax-8k1v4."""
        if self.key_heads is not None:
            return f"{self.variant}-{self.heads}k{self.key_heads}v{self.kv_heads or self.heads}"
        return str(self).replace(":", "-").replace("/", "kv")


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Attributes:
        steps: Number of optimizer steps.
        batch_size: Examples per step, in total over processes and accumulated micro-batches.
        lr: Peak of the learning rate.
        warmup: Steps in which the learning rate rises to its peak.
        schedule: Learning rate after the warm-up: "one-cycle", "constant" or "cosine".
        weight_decay: Weight decay of AdamW.
        eps: Epsilon of AdamW.
        clip: Maximum norm of the gradient; 0 does not clip.
        eval_every: Steps between evaluations on the development set.
        eval_batch_size: Examples per batch of an evaluation.
        accumulate: Micro-batches per step.
        precision: "bf16" (autocast) or "fp32".
        compile: Whether to compile the model. GPUs only.
        stride: Stride of the sliding window in the final evaluation of a language model. The paper uses 1; larger
            strides are cheaper but give each token less context.
        padding: "packed", "full" or "longest". "packed" concatenates documents without padding; the same as "full" on
            a CPU and for linear attention, which have no varlen kernels. "full" pads to the maximum length of the task,
            "longest" to the longest document in the batch.
        beta2: Second coefficient of AdamW; 0.95 is common for language models.
        final_lr: Learning rate at the end of the schedule "cosine", as a share of lr.
        decay: Parameters with weight decay: "all", or "matrices", the weights of linear layers.

    Examples:
        >>> from mgk.training.config import TrainConfig
        >>> TrainConfig(steps=2000, warmup=200).schedule
        'one-cycle'
    """

    steps: int = 5000
    batch_size: int = 32
    lr: float = 1e-4
    warmup: int = 1000
    schedule: str = "one-cycle"
    weight_decay: float = 0.0
    eps: float = 1e-6
    clip: float = 0.0
    eval_every: int = 250
    eval_batch_size: int = 64
    accumulate: int = 1
    precision: str = "bf16"
    compile: bool = True
    stride: int = 1
    padding: str = "packed"
    beta2: float = 0.999
    final_lr: float = 0.0
    decay: str = "all"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every", "eval_batch_size", "accumulate", "stride"):
            positive_integer(name, getattr(self, name))
        for name in ("lr", "eps", "weight_decay", "clip", "warmup"):
            value: Any = getattr(self, name)
            # The optimizer takes integers of 64 bits.
            number(name, value, 0, 2**63 if isinstance(value, int) else math.inf, above=name in ("lr", "eps"))
        number("beta2", self.beta2, 0, 1)
        number("final_lr", self.final_lr, 0, 1)
        one_of("decay", self.decay, DECAYS)
        flag("compile", self.compile)
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("precision", self.precision, PRECISIONS)
        one_of("padding", self.padding, PADDINGS)
        if self.warmup >= self.steps and self.schedule != "constant":
            fail("warmup", f"must be below steps = {self.steps}, got {self.warmup}")
        if self.batch_size % self.accumulate:
            fail("accumulate", f"= {self.accumulate} must divide batch_size = {self.batch_size}")


@dataclass(frozen=True)
class Recipe:
    """An experiment: task, model settings, training settings, models to compare, and the paper's numbers.

    Examples:
        >>> from mgk.training.config import ModelSpec, Recipe
        >>> recipe = Recipe("mine", "Short ListOps", task="listops-short", rows=(ModelSpec("smgk", 2),))
        >>> recipe.training.steps
        5000
    """

    name: str
    title: str
    task: str
    model: dict[str, Any] = field(default_factory=dict)
    training: TrainConfig = field(default_factory=TrainConfig)
    rows: tuple[ModelSpec, ...] = ()
    paper: dict[str, float] = field(default_factory=dict)
    # Accuracy on the development set, in per cent, above which a run has left the initial plateau of the task.
    plateau: float | None = None

    def __post_init__(self) -> None:
        for key, option in OPTIONS_OF_SETTINGS.items():
            if key in self.model:
                fail(f"model.{key}", f"(from --set or the recipe) is not a setting: use {option}")

    def with_settings(self, settings: list[str]) -> Recipe:
        """Return a copy with changed settings.

        Args:
            settings: "key=value" for a field of TrainConfig, "model.key=value" for a model setting.

        Examples:
            >>> from mgk.training.config import load_recipe
            >>> changed = load_recipe("demo").with_settings(["lr=5e-4", "model.num_layers=3"])
            >>> changed.training.lr, changed.model["num_layers"]
            (0.0005, 3)
        """
        import yaml

        training, model = {}, dict(self.model)
        known = {field.name for field in dataclasses.fields(TrainConfig)}
        for setting in settings:
            key, separator, text = setting.partition("=")
            key = key.strip().removeprefix("training.")
            if not separator:
                fail("--set", f"must have the form key=value, got {setting!r}")
            try:
                value = _as_number(yaml.safe_load(text))
            except (yaml.YAMLError, ValueError, RecursionError):
                fail("--set", f"{key}: {text!r} is not valid YAML")
            if key.startswith("model."):
                model[key.removeprefix("model.")] = value
            elif key in known:
                training[key] = value
            else:
                hint = spelling_hint(key, known)
                fail("--set", f"must set one of {', '.join(sorted(known))} or model.*, got {key!r}{hint}")
        try:
            changed = dataclasses.replace(self.training, **training)
        except ValueError as error:
            steps_only = "steps" in training and "warmup" not in training and str(error).startswith("warmup ")
            hint = "; use --steps, which also scales the warm-up" if steps_only else ""
            raise ValueError(f"--set: {error}{hint}") from None
        return dataclasses.replace(self, model=model, training=changed)


def settable_names(config_class: type) -> list[str]:
    """Return the fields of a model configuration that --set and recipes may set."""
    names = {field.name for field in dataclasses.fields(config_class)}
    return sorted(names - OPTIONS_OF_SETTINGS.keys() - TASK_SETTINGS)


def _as_number(value: Any) -> Any:
    """Convert text to a number if possible: YAML reads 1e-4 as text, because floats need a point, as in 1.0e-4."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


# Directories searched for recipes by name; plugins append theirs.
RECIPE_DIRECTORIES: list[Traversable] = [resources.files("mgk.training") / "recipes"]


def recipe_files() -> dict[str, Traversable]:
    """Map each known recipe name to its YAML file."""
    for directory in RECIPE_DIRECTORIES:
        if not hasattr(directory, "iterdir"):
            fail("RECIPE_DIRECTORIES", f"must hold paths of directories, got {directory!r}")
    files = (path for directory in RECIPE_DIRECTORIES for path in directory.iterdir())
    return {path.name.removesuffix(".yaml"): path for path in files if path.name.endswith(".yaml")}


def recipe_names() -> list[str]:
    """Return the names of all known recipes."""
    return sorted(recipe_files())


# Keys of a recipe file: type, and its description in error messages.
FIELD_TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "title": (str, "text"),
    "task": (str, "the name of a task"),
    "extends": (str, "the name of a recipe"),
    "model": (dict, "a mapping"),
    "training": (dict, "a mapping"),
    "paper": (dict, "a mapping of rows to numbers"),
    "rows": (list, "a list"),
    "plateau": ((int, float), "a number"),
}


def recipe_text(name: str) -> str:
    """Return the YAML text of a recipe, given its name or the path of a YAML file."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            fail("recipe", f"file {name} does not exist")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            fail("recipe", f"{name} is not UTF-8 text")
    files = recipe_files()
    if name not in files and name in PAPER_RECIPES:
        fail("recipe", f"{name} is part of experiments.paper: in a clone of the repository, {PLUGIN_HINT}")
    return files[one_of("recipe", name, sorted(files))].read_text(encoding="utf-8")


def _read_fields(name: str) -> dict[str, Any]:
    """Read the fields of a recipe file and check their types."""
    import yaml

    try:
        fields = yaml.safe_load(recipe_text(name))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = "" if mark is None else f", line {mark.line + 1}: {getattr(error, 'problem', '')}"
        fail("recipe", f"{name} is not valid YAML{position}")
    except (ValueError, RecursionError) as error:
        if str(error).startswith("recipe "):
            raise
        # A number with too many digits, or brackets nested too deeply.
        fail("recipe", f"{name} is not valid YAML: {error}")
    if not isinstance(fields, dict):
        fail("recipe", f"{name} must be a mapping")
    for key, value in fields.items():
        field_type, type_name = FIELD_TYPES[one_of(f"recipe {name}: key", key, FIELD_TYPES)]
        if not isinstance(value, field_type):
            fail(f"recipe {name}: {key}", f"must be {type_name}, got {value!r}")
    for row, value in fields.get("paper", {}).items():
        if not isinstance(row, str):
            fail(f"recipe {name}: paper", f"must map rows to numbers, got the row {row!r}")
        number(f"recipe {name}: paper {row}", value)
    if "plateau" in fields:
        number(f"recipe {name}: plateau", fields["plateau"], 0, 100)
    for key in fields.get("training", {}):
        one_of(f"recipe {name}: training key", key, [field.name for field in dataclasses.fields(TrainConfig)])
    return fields


def load_recipe(name: str, extending: tuple[str, ...] = ()) -> Recipe:
    """Load a recipe.

    Args:
        name: Name of a known recipe, or path of a YAML file.
        extending: Recipes that extend this one, to detect cycles.

    Examples:
        >>> from mgk.training.config import load_recipe
        >>> recipe = load_recipe("demo")
        >>> recipe.task, [str(row) for row in recipe.rows]
        ('listops-short', ['softmax:4', 'smgk:2'])
    """
    if name in extending:
        fail("recipe", f"{name} extends itself")
    fields = _read_fields(name)
    base = load_recipe(fields.pop("extends"), (*extending, name)) if "extends" in fields else None
    for key in ("title", "task"):
        if base is None and key not in fields:
            fail(f"recipe {name}", f"has no {key}")
    settings = {key: _as_number(value) for key, value in fields.pop("training", {}).items()}
    model = {key: _as_number(value) for key, value in fields.pop("model", {}).items()}
    try:
        training = TrainConfig(**settings) if base is None else dataclasses.replace(base.training, **settings)
    except ValueError as error:
        raise ValueError(f"recipe {name}: {error}") from None
    rows = tuple(ModelSpec.parse(str(row), f"recipe {name}: row") for row in fields.pop("rows", []))
    stem = Path(name).stem
    if base is None:
        return Recipe(name=stem, model=model, training=training, rows=rows, **fields)
    model = {**base.model, **model}
    return dataclasses.replace(base, name=stem, model=model, training=training, rows=rows or base.rows, **fields)
