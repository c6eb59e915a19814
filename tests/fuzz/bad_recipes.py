"""Recipe files with wrong syntax, keys and values, and plugin modules that fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.fuzz import materials
from tests.fuzz.damages import GARBAGE
from tests.fuzz.harness import Case

# Values in YAML of a kind that hardly any key takes.
VALUES: dict[str, str] = {
    "null": "null",
    "list": "[]",
    "nested list": "[[1]]",
    "mapping": "{}",
    "mapping of lists": "{a: [1]}",
    "text": "abc",
    "empty text": '""',
    "negative": "-1",
    "zero": "0",
    "float": "1.5",
    "nan": ".nan",
    "inf": ".inf",
    "1e400": "1e400",
    "huge": str(10**30),
    "true": "true",
    "date": "2026-01-01",
    "dollar": '"a$b$c"',
    "newline": '"a\\nb"',
    "traversal": '"../../x"',
}
# Values for the settings in the sections of a recipe.
SETTING_VALUES = "null list mapping text negative zero float nan inf huge true dollar".split()
KEYS = ("title", "task", "extends", "model", "training", "paper", "rows", "plateau")
TRAINING = (
    *("batch_size", "lr", "warmup", "schedule", "weight_decay", "eps", "clip", "eval_every", "eval_batch_size"),
    *("accumulate", "precision", "compile", "stride", "padding", "unknown"),
)
MODEL = (
    *("embed_dim", "ffn_dim", "num_layers", "head_dim", "num_components", "feature_map", "norm", "norm_place"),
    *("positions", "mlp", "cutoffs", "head_bias", "dropout", "attention_dropout", "backend", "unknown"),
)
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "binary": GARBAGE,
    "nul": b"title: a\0b\ntask: bytes\n",
    "byte-order-mark": b"\xef\xbb\xbf" + materials.RECIPE.encode(),
    "utf-16": materials.RECIPE.encode("utf-16"),
    "tab": b"title: a\n\ttask: bytes\n",
    "open-bracket": b"title: [",
    "open-quote": b'title: "a\ntask: bytes',
    "list": b"- title: a\n- task: bytes\n",
    "number": b"5",
    "text": b"bytes",
    "two-documents": b"title: a\n---\ntask: bytes\n",
    "duplicate-key": b"title: a\ntitle: b\ntask: nothing\n",
    "unknown-key": b"title: a\ntask: bytes\nsteps: 5\n",
    "number-as-key": b"title: a\ntask: bytes\n5: 6\n",
    "list-as-key": b"title: a\ntask: bytes\n? [1, 2]\n: 3\n",
    "null-as-key": b"title: a\ntask: bytes\nnull: 3\n",
    "no-title": b"task: bytes\n",
    "no-task": b"title: a\n",
    "python-object": b"title: !!python/object/apply:os.getcwd []\ntask: bytes\n",
    "unknown-tag": b"title: !thing a\ntask: bytes\n",
    "unknown-alias": b"title: *a\ntask: bytes\n",
    "anchor-cycle": b"title: a\ntask: bytes\nmodel: &a {b: *a}\n",
    "merge": b"<<: {title: a}\ntask: bytes\ntraining: {<<: 5}\n",
    "deep-list": b"title: a\ntask: bytes\nrows: " + b"[" * 20_000,
    "deep-mapping": b"title: a\ntask: bytes\nmodel: " + b"{a: " * 20_000,
    "deep-closed-list": b"title: a\ntask: bytes\nrows: " + b"[" * 5_000 + b"]" * 5_000 + b"\n",
    "alias-bomb": b"title: a\ntask: bytes\nmodel:\n  a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    + b"".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n".encode() for n in range(1, 9)),
    "alias-bomb-rows": b"title: a\ntask: bytes\npaper:\n  a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    + b"".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n".encode() for n in range(1, 9)),
    "long-integer": b"title: a\ntask: bytes\nplateau: " + b"9" * 10_000 + b"\n",
    "long-line": b"title: " + b"x" * 1_000_000 + b"\ntask: nothing\n",
    "extends-itself": b"extends: recipe.yaml\n",
    "extends-nothing": b"extends: nothing\n",
    "extends-missing": b"extends: missing.yaml\n",
    "extends-directory": b"extends: folder.yaml\n",
    "row-without-heads": b"title: a\ntask: bytes\nrows: [smgk]\n",
    "row-of-zero": b"title: a\ntask: bytes\nrows: ['smgk:0']\n",
    "row-of-many": b"title: a\ntask: bytes\nrows: ['smgk:" + b"9" * 30 + b"']\n",
    "row-of-other-digits": "title: a\ntask: bytes\nrows: ['smgk:²']\n".encode(),
    "row-as-mapping": b"title: a\ntask: bytes\nrows: [smgk: 4]\n",
    "row-null": b"title: a\ntask: bytes\nrows: [null]\n",
    "heads-in-model": b"title: a\ntask: bytes\nmodel: {num_heads: 2}\n",
    "paper-text": b"title: a\ntask: bytes\npaper: {'smgk:1': much}\n",
    "paper-of-numbers": materials.RECIPE.encode() + b"paper: {5: 6}\n",
}
PLUGINS: dict[str, str] = {
    "raises": "raise RuntimeError('a fault of the plugin')",
    "raises without text": "raise RuntimeError",
    "raises several lines": "raise RuntimeError('first\\nsecond')",
    "assertion": "assert False",
    "division": "1 / 0",
    "syntax": "def f(:",
    "indentation": "def f():\nreturn 5",
    "null byte": "a = '\0'",
    "not UTF-8": "a = '\udcff'",
    "missing import": "import no_such_package",
    "missing name": "from mgk.tasks import no_such_task",
    "missing attribute": "import mgk.tasks\nmgk.tasks.no_such_function()",
    "recursion": "def f():\n    f()\nf()",
    "memory": "raise MemoryError",
    "operating system": "open('no_such_file')",
    "wrong task": "from mgk.tasks import register_task\nregister_task(5)",
    "exits": "import sys\nsys.exit(7)",
    "exits with text": "import sys\nsys.exit('stop here')",
    "wrong recipe directory": "from mgk.training.config import RECIPE_DIRECTORIES\nRECIPE_DIRECTORIES.append(5)",
    "missing recipe directory": (
        "from pathlib import Path\nfrom mgk.training.config import RECIPE_DIRECTORIES\n"
        "RECIPE_DIRECTORIES.append(Path('no_such_directory'))"
    ),
}
PLUGIN_NAMES = "no_such_plugin no.such.plugin .plugin .. a-b plugin.py plugin.x $a é folder".split()


def recipes() -> Iterator[Case]:
    """Yield the cases of recipe files."""
    for name, text in TEXTS.items():
        yield _recipe(f"recipe: {name}", text)
    for key in KEYS:
        for name, value in VALUES.items():
            if (key, name) == ("training", "mapping"):  # valid: 5,000 steps
                continue
            lines = [line for line in _lines() if not line.startswith(f"{key}:")]
            yield _recipe(f"recipe: {key} {name}", "\n".join([*lines, f"{key}: {value}\n"]).encode())
    for section, keys in (("training", TRAINING), ("model", MODEL)):
        for key in keys:
            for name in SETTING_VALUES:
                if (key, name) != ("compile", "true"):  # valid, and takes a minute
                    text = f"extends: tiny.yaml\n{section}: {{{key}: {VALUES[name]}}}\n"
                    yield _recipe(f"recipe: {section}.{key} {name}", text.encode())


def _lines() -> list[str]:
    """Return the recipe with one key per line."""
    return materials.RECIPE.replace(",\n", ",").splitlines()


def _recipe(name: str, text: bytes) -> Case:
    def prepare(directory: Path) -> None:
        (directory / "tiny.yaml").write_text(materials.RECIPE)
        (directory / "folder.yaml").mkdir()
        (directory / "recipe.yaml").write_bytes(text)

    arguments = ("train", "recipe.yaml", "--data-dir", str(materials.text()), "--out", "out", "--accelerator", "cpu")
    key = name.removeprefix("recipe: ").split(" ")[0].rpartition(".")[2]
    return Case(name, arguments, prepare, ("recipe", "task", key))


def plugins() -> Iterator[Case]:
    """Yield the cases of MGK_PLUGINS."""
    for name, text in PLUGINS.items():

        def prepare(directory: Path, text: str = text) -> None:
            (directory / "fuzz_plugin.py").write_bytes(text.encode(errors="surrogateescape"))

        yield Case(
            f"plugin: {name}",
            ("recipes",),
            prepare,
            ("fuzz_plugin", "no_such", "RECIPE_DIRECTORIES"),
            {"MGK_PLUGINS": "fuzz_plugin"},
            True,
        )
    for name in PLUGIN_NAMES:

        def prepare_names(directory: Path) -> None:
            (directory / "plugin.py").write_text("")
            (directory / "folder").mkdir()

        yield Case(f"named {name}", ("recipes",), prepare_names, ("MGK_PLUGINS",), {"MGK_PLUGINS": name})
