"""Damaged run directories, and the commands that read them."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file

from tests.fuzz import materials
from tests.fuzz.damages import FILE_DAMAGES, WRONG_JSON, Damage, replace, wrong_json
from tests.fuzz.harness import Case

# The run directory is "my-run"; TEXT stands for the data directory.
COMMANDS: dict[str, tuple[str, ...]] = {
    "eval": ("eval", "my-run", "--data-dir", "TEXT"),
    "generate": ("generate", "my-run", "--prompt", "the", "--max-tokens", "3"),
    "analyze": (
        *("analyze", "my-run", "--data-dir", "TEXT", "--out", "out"),
        *("--matrices", "2", "--removal", "0", "--length", "8", "--map-size", "16"),
    ),
    "resume": (*materials.LM_TRAIN, "--resume", "auto", "--out", "my-run", "--data-dir", "TEXT"),
    "append": (*materials.LM_TRAIN, *"--resume auto --out my-run --data-dir TEXT --results table.csv".split()),
}
READERS: dict[str, tuple[str, ...]] = {
    "run.json": ("eval", "generate", "analyze", "resume"),
    "best": ("eval", "generate", "analyze", "resume"),
    "best/config.json": ("eval", "generate", "analyze", "resume"),
    "best/model.safetensors": ("eval", "generate", "analyze", "resume"),
    "last.ckpt": ("resume",),
    "metrics.csv": ("analyze", "resume", "append"),
    "result.json": ("resume", "append"),
    "environment.json": ("resume",),
    "losses-test.npy": ("append",),
    "losses-dev.npy": ("append",),
}
DIRECTORY_DAMAGES = ("removed", "empty", "garbage", "link loop", "dangling link")


def cases() -> Iterator[Case]:
    """Yield the table: every damage of every file, and contents that are valid in their format."""
    for file, commands in READERS.items():
        names = DIRECTORY_DAMAGES if file == "best" else FILE_DAMAGES
        for name in names:
            yield from _of_file(file, name, FILE_DAMAGES[name], commands)
    # Contents are read in one place: the commands take turns.
    for file, commands in READERS.items():
        table = {name: wrong_json(name) for name in WRONG_JSON} if file.endswith(".json") else {}
        table |= CONTENTS.get(file, {})
        for (name, damage), command in zip(table.items(), itertools.cycle(commands), strict=False):
            yield from _of_file(file, name, damage, (command,))
    for name in ("removed", "garbage", "truncated"):
        yield _of_stopped("last.ckpt", name)
    for name in ("NaN", "infinite"):
        yield _of_classifier(name)
    yield from _compared()


def _fill(arguments: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(materials.text()) if argument == "TEXT" else argument for argument in arguments)


def _of_file(file: str, name: str, damage: Damage, commands: tuple[str, ...]) -> Iterator[Case]:
    def prepare(directory: Path) -> None:
        run = materials.copy("run-lm", directory / "my-run")
        if "result.json" not in file and not file.endswith(".npy"):
            (run / "result.json").unlink()
        damage(run / file)

    mentions = (*Path(file).parts, "my-run", "out of memory", "not finite")
    for command in commands:
        arguments = _fill(COMMANDS[command])
        yield Case(f"{file} {name}, {command}", arguments, prepare, mentions, is_json=command == "eval")


def _of_stopped(file: str, name: str) -> Case:
    """Return a case of a stopped run, whose training continues."""

    def prepare(directory: Path) -> None:
        run = materials.copy("run-stopped", directory / "my-run")
        FILE_DAMAGES[name](run / file)

    arguments = (*materials.DEMO_TRAIN, "--resume", "auto", "--out", "my-run", "--data-dir", str(materials.demo_data()))
    return Case(f"stopped run, {file} {name}, resume", arguments, prepare, (file,))


def _of_classifier(name: str) -> Case:
    """Return a case of a classifier whose logits are not finite: it has no accuracy."""
    file = "best/model.safetensors"

    def prepare(directory: Path) -> None:
        run = materials.copy("run", directory / "my-run")
        CONTENTS[file][name](run / file)

    arguments = ("eval", "my-run", "--data-dir", str(materials.demo_data()))
    return Case(f"classifier, {file} {name}, eval", arguments, prepare, ("my-run",), must_fail=True, is_json=True)


def _compared() -> Iterator[Case]:
    """Yield cases of mgk compare, which starts the training in another process."""
    run = Path("runs/bytes/smgk-2-paper-s0")
    settings = tuple(part for setting in materials.LM_SETTINGS for part in ("--set", setting))
    arguments = (
        *("compare", "bytes", "--rows", "smgk:2", "--steps", "200", "--no-alone"),
        *("--runs", "runs", "--out", "results", "--data-dir", str(materials.text()), *settings),
    )
    for file, name in (("run.json", "garbage"), ("last.ckpt", "truncated"), ("best/config.json", "empty")):

        def prepare(directory: Path, file: str = file, name: str = name) -> None:
            materials.copy("run-lm", directory / run)
            (directory / run / "result.json").unlink()
            FILE_DAMAGES[name](directory / run / file)

        yield Case(f"{file} {name}, compare", arguments, prepare, ("log.txt",))


# Contents that are valid in their format.


def change_json(change: Callable[[Any], Any]) -> Damage:
    """Return a damage that changes the content of a JSON file in place, or replaces it by what `change` returns."""

    def damage(path: Path) -> None:
        content = json.loads(path.read_text(encoding="utf-8"))
        changed = change(content)
        path.write_text(json.dumps(content if changed is None else changed), encoding="utf-8")

    return damage


def set_key(*keys: str, value: Any) -> Damage:
    """Return a damage that sets an entry of a JSON file."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change_json(change)


def drop_key(key: str) -> Damage:
    """Return a damage that removes an entry of a JSON file."""
    return change_json(lambda content: {name: value for name, value in content.items() if name != key})


def change_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    """Return a damage that changes the tensors of a safetensors file."""

    def damage(path: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, path)

    return damage


def _fill_weights(value: float) -> Damage:
    return change_weights(lambda tensors: [tensor.fill_(value) for tensor in tensors.values()] and None)


def _cast_weights(dtype: torch.dtype) -> Damage:
    return change_weights(lambda tensors: tensors.update({name: x.to(dtype) for name, x in tensors.items()}))


def _rename_first(tensors: dict[str, torch.Tensor]) -> None:
    tensors["another.name"] = tensors.pop(next(iter(tensors)))


def _flatten(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: tensor.flatten() for name, tensor in tensors.items()})


def save_checkpoint(content: Any) -> Damage:
    """Return a damage that replaces a checkpoint."""
    return lambda path: torch.save(content, path)


def change_checkpoint(change: Callable[[dict[str, Any]], None]) -> Damage:
    """Return a damage that changes the content of a checkpoint."""

    def damage(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)

    return damage


def _flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


class _Pickled:
    def __reduce__(self) -> Any:
        return print, ("executed",)


SIZES = ("vocab_size", "max_length", "embed_dim", "ffn_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim")
WRONG_SIZES: dict[str, Any] = {"negative": -1, "zero": 0, "float": 1.5, "text": "x", "huge": 10**12, "endless": 10**30}
CONTENTS: dict[str, dict[str, Damage]] = {
    "run.json": {
        **{f"without {key}": drop_key(key) for key in ("task", "row", "seed", "recipe", "training", "model", "data")},
        **{
            f"{key} = {value!r}": set_key(key, value=value)
            for key in ("task", "row", "seed", "recipe", "training", "data", "data_dir")
            for value in (None, 5, [], {}, "nothing", "a$b")
        },
        **{f"steps = {value!r}": set_key("training", "steps", value=value) for value in (-1, "x", None, 10**30)},
        "unknown setting": set_key("training", "unknown", value=1),
        "another recipe": set_key("recipe", value="listops"),
        "a classifier's task": set_key("task", value="listops"),
    },
    "best/config.json": {
        **{f"{key} {name}": set_key(key, value=value) for key in SIZES for name, value in WRONG_SIZES.items()},
        **{f"variant = {value!r}": set_key("variant", value=value) for value in (None, 5, [], ["smgk"], "x", {})},
        **{f"kind = {value!r}": set_key("kind", value=value) for value in (None, 5, [], "classifier")},
        **{f"cutoffs = {value!r}": set_key("cutoffs", value=value) for value in (None, 5, [-1], [9999], ["x"], [5, 5])},
        **{f"dropout = {value!r}": set_key("dropout", value=value) for value in (None, -1, 2, "x", float("nan"))},
        **{f"{key} = 'zz'": set_key(key, value="zz") for key in ("norm", "positions", "mlp", "head_bias", "backend")},
        "unknown field": set_key("unknown", value=1),
        "other sizes": set_key("embed_dim", value=16),
    },
    "best/model.safetensors": {
        "NaN": _fill_weights(float("nan")),
        "infinite": _fill_weights(float("inf")),
        "1e38": _fill_weights(1e38),
        "float16": _cast_weights(torch.float16),
        "int8": _cast_weights(torch.int8),
        "bool": _cast_weights(torch.bool),
        "a name changed": change_weights(_rename_first),
        "flattened": change_weights(_flatten),
        "no tensors": replace(save({})),
        "header beyond the end": replace((1 << 40).to_bytes(8, "little") + b"{}"),
        "header not JSON": replace((8).to_bytes(8, "little") + b"notjson!"),
        "offsets beyond the end": replace(
            (len(b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}')).to_bytes(8, "little")
            + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'
        ),
        "a pickle": replace(pickle.dumps(_Pickled())),
    },
    "last.ckpt": {
        "a pickle": replace(pickle.dumps(_Pickled())),
        "pickled by torch": save_checkpoint(_Pickled()),
        "a list": save_checkpoint([1]),
        "empty mapping": save_checkpoint({}),
        "a tensor": save_checkpoint(torch.zeros(3)),
        "no weights": change_checkpoint(lambda content: content.pop("state_dict") and None),
        "no optimizer": change_checkpoint(lambda content: content.pop("optimizer_states") and None),
        "no loops": change_checkpoint(lambda content: content.pop("loops") and None),
        "no step": change_checkpoint(lambda content: content.pop("global_step") and None),
        "empty weights": change_checkpoint(lambda content: content.update(state_dict={})),
        "weights of another shape": change_checkpoint(
            lambda content: content.update(state_dict={k: torch.zeros(3) for k in content["state_dict"]})
        ),
        "step = text": change_checkpoint(lambda content: content.update(global_step="x")),
        "a bit flipped": _flip_byte,
    },
    "metrics.csv": {
        "header only": replace("step,split,loss,perplexity,lr,unix_time\n"),
        "text as step": replace("step,split,loss,perplexity,lr,unix_time\nx,dev,1,1,1,1\n"),
        "short row": replace("step,split,loss,perplexity,lr,unix_time\n100\n"),
        "no header": replace("100,dev,1,1,1,1\n"),
        "other columns": replace("a,b\n1,2\n"),
        "NaN": replace("step,split,loss,perplexity,lr,unix_time\n100,dev,nan,nan,nan,nan\n"),
        "NUL": replace("step,split,loss,perplexity,lr,unix_time\n100,dev,\0,1,1,1\n"),
        "open quote": replace('step,split,loss,perplexity,lr,unix_time\n100,"dev,1,1,1,1\n'),
        "huge field": replace("step,split,loss,perplexity,lr,unix_time\n100,dev," + "1" * 200_000 + ",1,1,1\n"),
    },
    "result.json": {
        "list of numbers": replace("[5, 6]"),
        "list of mappings": replace("[{}]"),
        "value = text": change_json(lambda rows: [{**row, "value": "x"} for row in rows]),
        "value = null": change_json(lambda rows: [{**row, "value": None} for row in rows]),
        "value = NaN": change_json(lambda rows: [{**row, "value": float("nan")} for row in rows]),
        "unknown column": change_json(lambda rows: [{**row, "unknown": 1} for row in rows]),
    },
    "environment.json": {"list of numbers": replace("[5]")},
    "losses-test.npy": {"a pickle": replace(pickle.dumps(_Pickled()))},
}
