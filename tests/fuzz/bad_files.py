"""Bad files that users pass to commands: ids, texts, results, vocabularies, Transformers models."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.fuzz import bad_data, bad_images, bad_recipes, materials
from tests.fuzz.damaged_runs import SIZES, WRONG_SIZES, drop_key, set_key
from tests.fuzz.damages import (
    FILE_DAMAGES,
    GARBAGE,
    WRONG_JSON,
    Damage,
    make_fifo,
    npy,
    npy_with_header,
    replace,
    wrong_json,
)
from tests.fuzz.harness import Case

ANALYSIS = ("--matrices", "2", "--removal", "0", "--map-size", "16", "--out", "out")
IDS = np.arange(16) % 7
# Files of ids that must be refused, and valid ones.
WRONG_IDS: dict[str, bytes] = {
    "float.npy": npy(IDS.astype(np.float64)),
    "fraction.npy": npy(IDS + 0.5),
    "nan.npy": npy(np.full(16, np.nan)),
    "inf.npy": npy(np.full(16, np.inf)),
    "half.npy": npy(IDS.astype(np.float16)),
    "complex.npy": npy(IDS.astype(np.complex64)),
    "bool.npy": npy(IDS.astype(bool)),
    "text.npy": npy(np.array(["a"] * 16)),
    "bytes.npy": npy(np.array([b"a"] * 16)),
    "date.npy": npy(IDS.astype("datetime64[s]")),
    "record.npy": npy(np.zeros(16, dtype=[("a", "i4"), ("b", "i4")])),
    "object.npy": npy(np.array([1, "a", None], dtype=object)),
    "negative.npy": npy(IDS - 1),
    "large.npy": npy(IDS + 256),
    "huge.npy": npy(np.full(16, 2**62)),
    "unsigned.npy": npy(np.full(16, 2**64 - 1, dtype=np.uint64)),
    "empty.npy": npy(np.zeros(0, dtype=np.int64)),
    "no-rows.npy": npy(np.zeros((0, 16), dtype=np.int64)),
    "no-columns.npy": npy(np.zeros((4, 0), dtype=np.int64)),
    "scalar.npy": npy(np.array(5)),
    "three-dimensions.npy": npy(np.zeros((2, 3, 16), dtype=np.int64)),
    "short.npy": npy(IDS[:3]),
    "truncated.npy": npy(IDS)[:-9],
    "magic.npy": b"\x93NUMPX" + npy(IDS)[6:],
    "version.npy": b"\x93NUMPY\x09\x00" + npy(IDS)[8:],
    "header.npy": npy_with_header("'<i8'", "(99999999999999,)"),
    "overflow.npy": npy_with_header("'<i8'", "(9223372036854775807, 9223372036854775807)"),
    "negative-shape.npy": npy_with_header("'<i8'", "(-1,)"),
    "code-header.npy": npy_with_header("__import__('os').getcwd()", "(8,)"),
    "dtype.npy": npy_with_header("'<x9'", "(8,)"),
    "open-header.npy": b"\x93NUMPY\x01\x00\xff\xff{'descr'",
    "zero.npy": b"",
    "garbage.npy": GARBAGE,
    "zip.npy": b"PK\x03\x04" + GARBAGE,
    "pickle.npy": b"\x80\x04K\x05.",
    "float.txt": b"1.0 2.0 3.0 4.0 5.0 6.0 7.0 8.0\n",
    "words.txt": b"a b c d e f g h\n",
    "nan.txt": b"nan " * 8,
    "negative.txt": b"1 2 3 4 5 6 7 -8\n",
    "large.txt": b"1 2 3 4 5 6 7 256\n",
    "huge.txt": b"1 2 3 4 5 6 7 " + b"9" * 30,
    "endless.txt": b"1 2 3 4 5 6 7 " + b"9" * 10_000,
    "short.txt": b"1 2 3\n",
    "empty.txt": b"",
    "blank.txt": b"\n \n",
    "binary.txt": GARBAGE,
    "nul.txt": b"1 2 3 4 5 6 7 \0\n",
    "utf-16.txt": "1 2 3 4 5 6 7 8".encode("utf-16"),
    "hexadecimal.txt": b"0x1 " * 8,
    "commas.txt": b",,,,\n",
    "npy.txt": npy(IDS),
}
RIGHT_IDS: dict[str, bytes] = {
    "int8.npy": npy(IDS.astype(np.int8)),
    "big-endian.npy": npy(IDS.astype(">i4")),
    "fortran.npy": npy(np.asfortranarray(IDS.reshape(2, 8))),
    "underscore.txt": b"1_0 2 3 4 5 6 7 8\n",
    "tabs.txt": b"1\t2\t3\t4\t5\t6\t7\t8\r\n",
}
TEXTS: dict[str, bytes] = {
    "empty.txt": b"",
    "short.txt": b"a",
    "binary.txt": GARBAGE,
    "latin.txt": "é".encode("latin-1") * 20,
    "utf-16.txt": ("text " * 20).encode("utf-16"),
    "nul.txt": bytes(100),
    "spaces.txt": b" " * 100,
    "mark.txt": b"\xef\xbb\xbf" + b"text " * 20,
    "surrogates.txt": b"\xed\xa0\x80" * 20,
    "combining.txt": "e\u0301\u202e".encode() * 20,
    "long.txt": b"x" * 3_000_000,
    "dollar.txt": b"$a$ \\frac{ $$ " * 20,
    "markup.txt": b"<script>alert(1)</script> & \" ' " * 8,
}


def _ids() -> Iterator[Case]:
    for contents, must_fail in ((WRONG_IDS, True), (RIGHT_IDS, False)):
        for name, content in contents.items():
            yield _file_case("ids", "--ids", name, replace(content), must_fail)
    for name in ("removed", "directory", "link loop"):
        for suffix in ("npy", "txt"):
            yield _file_case("ids", "--ids", f"{name}.{suffix}", FILE_DAMAGES[name], True)


def _texts() -> Iterator[Case]:
    for name, content in TEXTS.items():
        yield _file_case("text", "--text", name, replace(content), False)
    for name in ("removed", "directory", "link loop", "dangling link"):
        yield _file_case("text", "--text", f"{name}.txt", FILE_DAMAGES[name], False)


def _file_case(kind: str, option: str, name: str, damage: Damage, must_fail: bool) -> Case:
    arguments = ("analyze", str(materials.shared_run()), option, name, "--length", "8", *ANALYSIS)

    def prepare(directory: Path) -> None:
        damage(directory / name)

    return Case(f"{kind}: {name}", arguments, prepare, (name, option), must_fail=must_fail)


# Results files.

HEADER, FIRST, *_ = (materials.FIXTURES / "results.csv").read_text(encoding="utf-8").splitlines()


def _change_cells(**cells: str) -> bytes:
    columns, *rows = [line.split(",") for line in (materials.FIXTURES / "results.csv").read_text().splitlines()]
    for row in rows:
        for name, text in cells.items():
            row[columns.index(name)] = text
    return "\n".join(",".join(row) for row in (columns, *rows)).encode()


RESULTS: dict[str, bytes] = {
    "empty": b"",
    "blank": b"\n\n",
    "header only": HEADER.encode(),
    "no header": FIRST.encode(),
    "other columns": b"a,b\n1,2\n",
    "one column": b"recipe\ndemo\n",
    "column twice": (HEADER + ",recipe\n" + FIRST + ",x\n").encode(),
    "garbage": GARBAGE,
    "zeros": bytes(3000),
    "UTF-16": (HEADER + "\n" + FIRST).encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + (HEADER + "\n" + FIRST + "\n").encode(),
    "NUL": (HEADER + "\n" + FIRST.replace("demo", "d\0mo") + "\n").encode(),
    "open quote": (HEADER + "\n" + '"' + FIRST + "\n").encode(),
    "short row": (HEADER + "\ndemo,listops-short\n").encode(),
    "long row": (HEADER + "\n" + FIRST + ",x,y\n").encode(),
    "huge field": (HEADER + "\n" + FIRST.replace("demo", "x" * 300_000) + "\n").encode(),
    "semicolons": (HEADER + "\n" + FIRST + "\n").replace(",", ";").encode(),
    **{
        f"{column} = {text[:9] or 'empty'}": _change_cells(**{column: text})
        for column in ("value", "seed", "heads", "params", "flops", "step_ms", "n_examples", "variant")
        for text in ("", "abc", "nan", "inf", "-1", "1e400", "9" * 400)
    },
}


def _tables() -> Iterator[Case]:
    settings = tuple(part for setting in materials.DEMO_SETTINGS for part in ("--set", setting))
    options = ("--rows", "softmax:2,smgk:2", "--steps", "300", "--redraw", "--out", "table")
    redraw = ("compare", "demo", *options, *settings)
    train = ("train", "tiny.yaml", "--data-dir", str(materials.text()), "--out", "out", "--accelerator", "cpu")
    bench = ("bench", "--shapes", "1x2x16x8")
    for name, content in RESULTS.items():

        def prepare(directory: Path, content: bytes = content) -> None:
            (directory / "table").mkdir()
            (directory / "table" / "demo.csv").write_bytes(content)

        yield Case(f"results: {name}, compare", redraw, prepare, ("demo.csv", "table"))
        if "=" not in name:
            for command, option in ((train, "--results"), (bench, "--out")):

                def prepare_file(directory: Path, content: bytes = content) -> None:
                    (directory / "tiny.yaml").write_text(materials.RECIPE)
                    (directory / "table.csv").write_bytes(content)

                arguments = (*command, option, "table.csv")
                yield Case(f"results: {name}, {command[0]}", arguments, prepare_file, ("table.csv",))
    for name in ("directory", "link loop"):

        def prepare_damage(directory: Path, damage: Damage = FILE_DAMAGES[name]) -> None:
            (directory / "table").mkdir()
            damage(directory / "table" / "demo.csv")

        yield Case(f"results: {name}, compare", redraw, prepare_damage, ("demo.csv", "table"))


# Vocabularies: vocabulary.txt of a run of words.

VOCABULARIES: dict[str, bytes] = {
    "no <eos>": b"the\n<unk>\n",
    "no <unk>": b"<eos>\nthe\n",
    "a word twice": b"<eos>\n<unk>\nthe\nthe\n",
    "too short": b"<eos>\n<unk>\n",
    "too long": b"<eos>\n<unk>\n" + b"".join(b"w%d\n" % n for n in range(5000)),
    "invalid UTF-8": b"<eos>\n<unk>\n\xff\n",
    "UTF-16": "<eos>\n<unk>\n".encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf<eos>\n<unk>\nthe\n",
    "carriage returns": b"<eos>\r\n<unk>\r\nthe\r\n",
    "JSON": b'{"<eos>": 0, "<unk>": 1}',
    "blank lines": b"<eos>\n<unk>\n\n\n",
}


def _vocabularies() -> Iterator[Case]:
    damages = {**FILE_DAMAGES, **{name: replace(content) for name, content in VOCABULARIES.items()}}
    commands = {
        "generate": ("generate", "run", "--prompt", "the cat", "--max-tokens", "3"),
        "analyze": ("analyze", "run", "--text", "the cat sat on the mat and it slept", "--length", "8", *ANALYSIS),
    }
    for name, damage in damages.items():
        for command, arguments in commands.items():

            def prepare(directory: Path, damage: Damage = damage) -> None:
                materials.copy_word_run(directory / "run")
                damage(directory / "run" / "vocabulary.txt")

            yield Case(f"vocabulary: {name}, {command}", arguments, prepare, ("vocabulary.txt",))


# Models of Transformers.


def _transformers() -> Iterator[Case]:
    damages: dict[str, tuple[str, Damage]] = {
        **{f"config.json {name}": ("config.json", damage) for name, damage in FILE_DAMAGES.items()},
        **{f"model.safetensors {name}": ("model.safetensors", damage) for name, damage in FILE_DAMAGES.items()},
        **{f"config.json {name}": ("config.json", wrong_json(name)) for name in WRONG_JSON},
        **{f"without {key}": ("config.json", drop_key(key)) for key in ("model_type", "architectures", "vocab_size")},
        **{
            f"{key} {name}": ("config.json", set_key(key, value=value))
            for key in ("vocab_size", *SIZES[2:3])
            for name, value in WRONG_SIZES.items()
        },
        "model_type unknown": ("config.json", set_key("model_type", value="unknown")),
        "header beyond the end": ("model.safetensors", replace(struct.pack("<Q", 1 << 40) + b"{}")),
        "header not JSON": ("model.safetensors", replace(struct.pack("<Q", 8) + b"notjson!")),
        "no tensors": ("model.safetensors", replace(struct.pack("<Q", 2) + json.dumps({}).encode())),
    }
    for name, (file, damage) in damages.items():

        def prepare(directory: Path, file: str = file, damage: Damage = damage) -> None:
            materials.copy("hf-lm", directory / "model")
            damage(directory / "model" / file)
            (directory / "ids.txt").write_text("1 2 3 4 5 6 7 8 9 10")

        arguments = ("analyze", "--hf", "model", "--ids", "ids.txt", "--length", "8", *ANALYSIS)
        yield Case(f"transformers: {name}", arguments, prepare, ("--hf",))


def _pipes() -> Iterator[Case]:
    """Yield named pipes without a writer, which would be read without end."""

    def prepare(directory: Path) -> None:
        make_fifo(directory / "pipe.yaml")
        make_fifo(directory / "pipe.npy")
        make_fifo(directory / "pipe.csv")

    run, text = str(materials.shared_run()), str(materials.text())
    tails = ("--data-dir", text, "--out", "out")
    yield Case("pipe as recipe", ("train", "pipe.yaml", *tails), prepare, ("pipe.yaml",), must_fail=True)
    yield Case("pipe as ids", ("analyze", run, "--ids", "pipe.npy", *tails), prepare, ("pipe.npy",), must_fail=True)
    yield Case("pipe as text", ("analyze", run, "--text", "pipe.npy", *tails), prepare, ("pipe.npy",), must_fail=True)
    yield Case("pipe as results", ("bench", "--out", "pipe.csv"), prepare, ("pipe.csv",), must_fail=True)


def cases() -> Iterator[Case]:
    """Yield the table."""
    yield from bad_recipes.recipes()
    yield from bad_data.cases()
    yield from bad_images.cases()
    for part in (_ids, _texts, _tables, _vocabularies, _transformers, _pipes):
        yield from part()
