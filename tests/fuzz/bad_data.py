"""Bad source files of the tasks: texts, tokens, tables and archives."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

from tests.fuzz.damages import FILE_DAMAGES, GARBAGE, Damage, make_fifo, replace
from tests.fuzz.harness import Case

# Contents in place of a text.
TEXTS: dict[str, bytes] = {
    "one letter": b"a",
    "line breaks": b"\n" * 500,
    "spaces": b" " * 500,
    "zeros": bytes(500),
    "invalid UTF-8": b"text " * 100 + b"\xff\xfe" + b"text " * 100,
    "cut UTF-8": "é".encode()[:1],
    "byte order mark": b"\xef\xbb\xbf" + b"text " * 100,
    "UTF-16": ("text " * 100).encode("utf-16"),
    "carriage returns": b"text text\r" * 100,
    "one long line": b"x" * 2_000_000,
    "line separators": "a\u2028b\u0085c ".encode() * 100,
    "gzip": gzip.compress(b"text " * 1000),
}
# Contents in place of a table with tabs: ListOps (Source, Target) and AAN (label, two ids, two texts).
LISTOPS_LINES = ["Source\tTarget", *(f"( ( ( [MAX {n} ) 4 ) ] )\t{max(n, 4)}" for n in range(10))]
AAN_LINES = [f"{n % 2}.0\tid{n}\tid{n + 1}\tone paper {n}\tanother paper" for n in range(10)]


def _with(lines: list[str], number: int, line: str) -> bytes:
    return "\n".join([*lines[:number], line, *lines[number + 1 :], ""]).encode(errors="surrogateescape")


LISTOPS: dict[str, bytes] = {
    "no header": _with(LISTOPS_LINES, 0, "[MAX 1 4 ]\t4"),
    "other header": _with(LISTOPS_LINES, 0, "Target\tSource"),
    "header only": b"Source\tTarget\n",
    "no target": _with(LISTOPS_LINES, 3, "[MAX 1 4 ]"),
    "empty target": _with(LISTOPS_LINES, 3, "[MAX 1 4 ]\t"),
    "wrong target": _with(LISTOPS_LINES, 3, "[MAX 1 4 ]\t5"),
    "text as target": _with(LISTOPS_LINES, 3, "[MAX 1 4 ]\tfour"),
    "float as target": _with(LISTOPS_LINES, 3, "[MAX 1 4 ]\t4.0"),
    "huge target": _with(LISTOPS_LINES, 3, "[MAX 1 4 ]\t" + "9" * 5000),
    "three columns": _with(LISTOPS_LINES, 3, "[MAX 1 4 ]\t4\t4"),
    "open bracket": _with(LISTOPS_LINES, 3, "[MAX 1 4\t4"),
    "closing bracket": _with(LISTOPS_LINES, 3, "1 4 ]\t4"),
    "no arguments": _with(LISTOPS_LINES, 3, "[MAX ]\t4"),
    "unknown operator": _with(LISTOPS_LINES, 3, "[AVG 1 4 ]\t4"),
    "empty line": _with(LISTOPS_LINES, 3, ""),
    "empty source": _with(LISTOPS_LINES, 3, "\t4"),
    "not ASCII": _with(LISTOPS_LINES, 3, "[MAX é 4 ]\t4"),
    "NUL": _with(LISTOPS_LINES, 3, "[MAX \0 4 ]\t4"),
    "deep": _with(LISTOPS_LINES, 3, "[MAX " * 100_000 + "4" + " ]" * 100_000 + "\t4"),
    "one row less": "\n".join(LISTOPS_LINES[:-1]).encode(),
    "one row more": "\n".join([*LISTOPS_LINES, LISTOPS_LINES[-1]]).encode(),
    "commas": "\n".join(LISTOPS_LINES).replace("\t", ",").encode(),
}
AAN: dict[str, bytes] = {
    "label 2": _with(AAN_LINES, 3, "2.0\ta\tb\tone\ttwo"),
    "label nan": _with(AAN_LINES, 3, "nan\ta\tb\tone\ttwo"),
    "no label": _with(AAN_LINES, 3, "\ta\tb\tone\ttwo"),
    "four columns": _with(AAN_LINES, 3, "1.0\ta\tb\tone"),
    "six columns": _with(AAN_LINES, 3, "1.0\ta\tb\tone\ttwo\tthree"),
    "empty text": _with(AAN_LINES, 3, "1.0\ta\tb\t\ttwo"),
    "text of spaces": _with(AAN_LINES, 3, "1.0\ta\tb\t   \ttwo"),
    "invalid UTF-8": _with(AAN_LINES, 3, "1.0\ta\tb\t\udcff\ttwo"),
    "empty line": _with(AAN_LINES, 3, ""),
    "header": _with(AAN_LINES, 0, "label\tid1\tid2\ttext1\ttext2"),
    "one pair less": "\n".join(AAN_LINES[:-1]).encode(),
    "one pair more": "\n".join([*AAN_LINES, AAN_LINES[-1]]).encode(),
    "commas": "\n".join(AAN_LINES).replace("\t", ",").encode(),
    "long text": _with(AAN_LINES, 3, "1.0\ta\tb\tone\t" + "x" * 3_000_000),
}
COMMON = ("removed", "empty", "truncated", "garbage", "zeros", "directory", "link loop", "dangling link")
BOMB = 2 << 30  # bytes of the decompressed bomb, more than a case may use


def register_small_tasks() -> None:
    """Register the tasks with few examples, which are prepared quickly."""
    from mgk.tasks import TASKS

    for name, changes in (
        ("listops", {"counts": {"test": 10, "dev": 10, "train": 10}}),
        ("retrieval-aan", {"counts": {"test": 10, "dev": 10, "train": 10}}),
        ("text", {"reviews": 2, "dev": 1}),
        ("image", {"pictures": 20, "test_pictures": 10}),
    ):
        task: Any = TASKS.get(name)
        # Another checkout may not have the task.
        if task is not None:
            TASKS[f"small-{name}"] = replace_fields(task, name=f"small-{name}", **changes)


def _case(task: str, file: str, name: str, make: Callable[[Path], None], damage: Damage) -> Case:
    def prepare(directory: Path) -> None:
        make(directory / "data")
        damage(directory / "data" / file)

    mentions = (Path(file).name, "data:", "data has no", "data/aclImdb:")
    return Case(f"{task}: {file} {name}", ("data", task, "--data-dir", "data"), prepare, mentions)


def write_files(directory: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def _make_text(names: tuple[str, ...]) -> Callable[[Path], None]:
    return lambda directory: write_files(directory, dict.fromkeys(names, b"some words of text \n" * 60))


def _make_table(names: tuple[str, ...], lines: list[str]) -> Callable[[Path], None]:
    return lambda directory: write_files(directory, {name: ("\n".join(lines) + "\n").encode() for name in names})


def cases() -> Iterator[Case]:
    """Yield the cases of all tasks."""
    bytes_files = ("train.txt", "valid.txt", "test.txt")
    word_files = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
    listops_files = tuple(f"listops/basic_{split}.tsv" for split in ("train", "val", "test"))
    aan_files = tuple(f"aan/new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test"))
    sources: tuple[tuple[str, tuple[str, ...], Callable[[Path], None], dict[str, bytes]], ...] = (
        ("bytes", bytes_files, _make_text(bytes_files), TEXTS),
        ("words", word_files, _make_text(word_files), TEXTS),
        ("bpe", bytes_files[:1], _make_text(bytes_files), TEXTS),
        ("small-listops", listops_files, _make_table(listops_files, LISTOPS_LINES), LISTOPS),
        ("small-retrieval-aan", aan_files, _make_table(aan_files, AAN_LINES), AAN),
    )
    for task, files, make, contents in sources:
        for file in files:
            for name in COMMON:
                yield _case(task, file, name, make, FILE_DAMAGES[name])
            yield _case(task, file, "named pipe", make, make_fifo)
        for name, content in contents.items():
            for file in files if task != "words" else files[:1]:
                yield _case(task, file, name, make, replace(content))
    yield from _archives()
    yield from _prepared()


# Archives of the task text.


def make_tar(members: dict[str, bytes], mode: str = "w:gz", kind: bytes = tarfile.REGTYPE) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.type, member.linkname = len(content), kind, "/etc/hostname"
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


REVIEWS = {
    f"aclImdb/{split}/{label}/{n}_{9 if label == 'pos' else 2}.txt": f"review {n} {label}".encode()
    for split in ("train", "test")
    for label in ("neg", "pos")
    for n in range(2)
}
FIRST = next(iter(REVIEWS))


def write_bomb(path: Path, member: tarfile.TarInfo) -> None:
    """Write a gzip-compressed archive of one member with BOMB zeros, without compressing all of them."""
    block = 1 << 24
    compressor = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    head = compressor.compress(member.tobuf()) + compressor.flush(zlib.Z_FULL_FLUSH)
    zeros = compressor.compress(bytes(block)) + compressor.flush(zlib.Z_FULL_FLUSH)
    header = b"\x1f\x8b\x08" + bytes(6) + b"\xff"
    path.write_bytes(header + head + zeros * (BOMB // block) + compressor.flush())


def _bomb(path: Path) -> None:
    """Write an archive with one huge review."""
    member = tarfile.TarInfo(FIRST)
    member.size = BOMB
    write_bomb(path, member)


def _header_bomb(path: Path) -> None:
    """Write an archive with a huge extended header."""
    member = tarfile.TarInfo("././@PaxHeader")
    member.type, member.size = tarfile.XHDTYPE, BOMB
    write_bomb(path, member)


def _cut_stream(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _archives() -> Iterator[Case]:
    damages: dict[str, tuple[str, Damage]] = {
        "bomb": ("aclImdb_v1.tar.gz", _bomb),
        "header bomb": ("aclImdb_v1.tar.gz", _header_bomb),
        "not gzip": ("aclImdb_v1.tar.gz", replace(b"not an archive")),
        "nested gzip": ("aclImdb_v1.tar.gz", replace(gzip.compress(gzip.compress(make_tar(REVIEWS, "w"))))),
        "gzip of garbage": ("aclImdb_v1.tar.gz", replace(gzip.compress(GARBAGE))),
        "gzip of zeros": ("aclImdb_v1.tar.gz", replace(gzip.compress(bytes(100_000)))),
        "wrong checksum": ("aclImdb_v1.tar.gz", replace(make_tar(REVIEWS)[:-8] + bytes(8))),
        "no members": ("aclImdb_v1.tar.gz", replace(make_tar({}))),
        "one review less": ("aclImdb_v1.tar.gz", replace(make_tar(dict(list(REVIEWS.items())[1:])))),
        "traversal": (
            "aclImdb_v1.tar.gz",
            replace(make_tar({f"../../{name}": x for name, x in REVIEWS.items()})),
        ),
        "absolute names": (
            "aclImdb_v1.tar.gz",
            replace(make_tar({f"/{name}": x for name, x in REVIEWS.items()})),
        ),
        "empty review": ("aclImdb_v1.tar.gz", replace(make_tar({**REVIEWS, FIRST: b""}))),
        "not UTF-8": ("aclImdb_v1.tar.gz", replace(make_tar({**REVIEWS, FIRST: b"\xff"}))),
        "symbolic links": ("aclImdb_v1.tar.gz", replace(make_tar(dict.fromkeys(REVIEWS, b""), kind=tarfile.SYMTYPE))),
        "devices": ("aclImdb_v1.tar.gz", replace(make_tar(dict.fromkeys(REVIEWS, b""), kind=tarfile.CHRTYPE))),
        "cut xz": ("aclImdb_v1.tar.xz", replace(_cut_stream(make_tar(REVIEWS, "w:xz")))),
        "xz of garbage": ("aclImdb_v1.tar.xz", replace(lzma.compress(GARBAGE))),
        "cut tar": ("aclImdb_v1.tar", replace(make_tar(REVIEWS, "w")[:700])),
        "cut tgz": ("aclImdb_v1.tgz", replace(_cut_stream(make_tar(REVIEWS)))),
        "garbage tar": ("aclImdb_v1.tar", replace(GARBAGE)),
        "bzip2 as gz": ("aclImdb_v1.tar.gz", replace(make_tar(REVIEWS, "w:bz2")[:100])),
        "a directory": ("aclImdb_v1.tar.gz", lambda path: path.mkdir()),
        "unpacked, no reviews": ("aclImdb/train/neg/readme", replace(b"no review")),
        "unpacked, a file as directory": ("aclImdb", replace(b"a file")),
    }
    for name, (file, damage) in damages.items():
        yield _case("small-text", file, name, lambda directory: directory.mkdir(), damage)
    members = list(REVIEWS)
    for name in ("removed", "empty", "garbage", "directory", "link loop"):
        yield _case(
            "small-text", members[0], name, lambda directory: write_files(directory, REVIEWS), FILE_DAMAGES[name]
        )


# Prepared data, which is repaired or prepared again.


def _prepared() -> Iterator[Case]:
    from tests.fuzz import materials

    for file in ("cache.json", "verified.json", "train.ids.npy", "test.ids.npy"):
        for name, damage in FILE_DAMAGES.items():

            def prepare(directory: Path, file: str = file, damage: Damage = damage) -> None:
                materials.copy_prepared_text(directory / "data")
                damage(next((directory / "data/.mgk/bytes").glob("[0-9a-f]*")) / file)

            arguments = ("eval", str(materials.shared_run()), "--data-dir", "data")
            yield Case(f"prepared data: {file} {name}", arguments, prepare, (file, "data"), is_json=True)
