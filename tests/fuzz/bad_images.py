"""Bad pictures: files and archives of the task image, and images for a vision model."""

from __future__ import annotations

import functools
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tests.fuzz import materials
from tests.fuzz.bad_data import BOMB, COMMON, make_tar, write_bomb, write_files
from tests.fuzz.damages import FILE_DAMAGES, GARBAGE, Damage, make_fifo, npy, npy_with_header, replace
from tests.fuzz.harness import Case

ARCHIVE, GREY = "cifar-10-binary.tar.gz", "cifar10-grey/cifar10-grey.npz"
FOLDER = "cifar-10-batches-bin"
NAMES = (*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin")
# Two pictures of each class in the training batches, one in the test batch; `register_small_tasks` agrees.
RECORD = 1 + 3 * 32 * 32


def _records(labels: range) -> bytes:
    return b"".join(bytes([label % 10]) + bytes(range(256)) * 12 for label in labels)


BATCHES = {name: _records(range(4 * n, 4 * n + 4) if n < 5 else range(10)) for n, name in enumerate(NAMES)}
MEMBERS = {f"{FOLDER}/{name}": content for name, content in BATCHES.items()}
FIRST = next(iter(MEMBERS))
ARRAYS = {
    "train_images": npy(np.zeros((20, 32, 32), np.uint8)),
    "train_labels": npy(np.arange(20) % 10),
    "test_images": npy(np.zeros((10, 32, 32), np.uint8)),
    "test_labels": npy(np.arange(10)),
}


def _zip(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def _write_zip_bomb(path: Path) -> None:
    """Write an archive of arrays whose first one has BOMB zeros."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("train_images.npy", "w", force_zip64=True) as file:
            file.write(npy_with_header("'|u1'", f"({BOMB // 1024}, 32, 32)")[:128])
            for _ in range(BOMB >> 24):
                file.write(bytes(1 << 24))
        for name, content in list(ARRAYS.items())[1:]:
            archive.writestr(f"{name}.npy", content)


def _tar_bomb(kind: bytes, name: str) -> Damage:
    def write(path: Path) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.size = kind, BOMB
        write_bomb(path, member)

    return write


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(byte ^ 255 for byte in content[middle : middle + 40]) + content[middle + 40 :]


def _case(file: str, name: str, make: Callable[[Path], None], damage: Damage) -> Case:
    def prepare(directory: Path) -> None:
        make(directory / "data")
        (directory / "data" / file).parent.mkdir(parents=True, exist_ok=True)
        damage(directory / "data" / file)

    mentions = (Path(file).name, "data:", "data has no")
    return Case(f"small-image: {file} {name}", ("data", "small-image", "--data-dir", "data"), prepare, mentions)


def _sources() -> Iterator[Case]:
    archives: dict[str, Damage] = {
        "bomb": _tar_bomb(tarfile.REGTYPE, FIRST),
        "header bomb": _tar_bomb(tarfile.XHDTYPE, "././@PaxHeader"),
        "long name bomb": _tar_bomb(tarfile.GNUTYPE_LONGNAME, "././@LongLink"),
        "not gzip": replace(b"not an archive"),
        "flipped": replace(_flipped(make_tar(MEMBERS))),
        "wrong checksum": replace(make_tar(MEMBERS)[:-8] + bytes(8)),
        "cut": replace(make_tar(MEMBERS)[:500]),
        "no members": replace(make_tar({})),
        "one batch less": replace(make_tar(dict(list(MEMBERS.items())[1:]))),
        "short batch": replace(make_tar({**MEMBERS, FIRST: MEMBERS[FIRST][:-1]})),
        "empty batch": replace(make_tar({**MEMBERS, FIRST: b""})),
        "label 10": replace(make_tar({**MEMBERS, FIRST: b"\x0a" + MEMBERS[FIRST][1:]})),
        "symbolic links": replace(make_tar(dict.fromkeys(MEMBERS, b""), kind=tarfile.SYMTYPE)),
        "devices": replace(make_tar(dict.fromkeys(MEMBERS, b""), kind=tarfile.CHRTYPE)),
        "cut xz": replace(make_tar(MEMBERS, "w:xz")[:500]),
        "cut bzip2": replace(make_tar(MEMBERS, "w:bz2")[:200]),
        "traversal": replace(make_tar({f"../../{name}": content for name, content in MEMBERS.items()})),
    }
    for name, damage in archives.items():
        yield _case(ARCHIVE, name, lambda directory: directory.mkdir(), damage)
    for name in (*COMMON, "named pipe"):
        damage = make_fifo if name == "named pipe" else FILE_DAMAGES[name]
        for file in (FIRST, f"{FOLDER}/test_batch.bin"):
            yield _case(file, name, lambda directory: write_files(directory, MEMBERS), damage)
        yield _case(GREY, name, lambda directory: write_files(directory, {GREY: _zip(ARRAYS)}), damage)
    header = npy_with_header("'|u1'", "(99999999999, 32, 32)")
    arrays: dict[str, Damage] = {
        "bomb": _write_zip_bomb,
        "huge shape": replace(_zip({**ARRAYS, "train_images": header})),
        "overflow": replace(_zip({**ARRAYS, "train_images": npy_with_header("'<i8'", "(9223372036854775807, 32)")})),
        "open header": replace(_zip({**ARRAYS, "train_images": b"\x93NUMPY\x01\x00\xff\xff{'descr'"})),
        "code in the header": replace(_zip({**ARRAYS, "train_images": npy_with_header("__import__('os')", "(8,)")})),
        "no array": replace(_zip({**ARRAYS, "train_images": b"text"})),
        "objects": replace(_zip({**ARRAYS, "train_images": npy(np.array([1, None], dtype=object))})),
        "one array less": replace(_zip(dict(list(ARRAYS.items())[1:]))),
        "scalar": replace(_zip({**ARRAYS, "test_labels": npy(np.array(5))})),
        "flipped": replace(_flipped(_zip({**ARRAYS, "train_images": npy(np.frombuffer(GARBAGE * 99, np.uint8))}))),
        "LZMA, cut": replace(_zip(ARRAYS, zipfile.ZIP_LZMA)[:200]),
        "encrypted": replace(
            _zip(ARRAYS).replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01")
        ),
        "unknown method": replace(_zip(ARRAYS).replace(b"\x14\x00\x00\x00\x08\x00", b"\x14\x00\x00\x00\x63\x00")),
        "a plain array": replace(npy(np.zeros((20, 32, 32), np.uint8))),
    }
    for name, damage in arrays.items():
        yield _case(GREY, name, lambda directory: directory.mkdir(), damage)


# Images of `analyze --images`.


def _png(width: int, height: int, data: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


SMALL = _png(8, 8, zlib.compress((b"\0" + bytes(24)) * 8))
IMAGES: dict[str, Damage] = {
    "good.png": replace(SMALL),
    "empty.png": replace(b""),
    "garbage.png": replace(GARBAGE),
    "cut.png": replace(SMALL[:-30]),
    "header-only.png": replace(SMALL[:33]),
    "bad-checksum.png": replace(SMALL[:30] + b"\0\0\0\0" + SMALL[34:]),
    "no-pixels.png": replace(_png(0, 8, zlib.compress(b""))),
    "few-pixels.png": replace(_png(64, 64, zlib.compress(b"\0" * 10))),
    "not-compressed.png": replace(_png(8, 8, GARBAGE)),
    "bomb.png": replace(_png(60_000, 60_000, zlib.compress(bytes(1 << 20)))),
    "overflow.png": replace(_png(2**31 - 1, 2**31 - 1, zlib.compress(b""))),
    "text.svg": replace(b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
    "bitmap.bmp": replace(b"BM" + bytes(60)),
    "pages.tiff": replace(b"II*\0" + b"\xff" * 40),
    "directory.png": FILE_DAMAGES["directory"],
    "removed.png": FILE_DAMAGES["removed"],
    "loop.png": FILE_DAMAGES["link loop"],
    "pipe.png": make_fifo,
}


@functools.cache
def _vision_model() -> Path:
    import transformers

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**small, image_size=16, patch_size=4)
    transformers.ViTModel(config).save_pretrained(materials.folder() / "vit")
    return materials.folder() / "vit"


def _images() -> Iterator[Case]:
    for name, damage in IMAGES.items():

        def prepare(directory: Path, name: str = name, damage: Damage = damage) -> None:
            damage(directory / name)

        arguments = ("analyze", "--hf", str(_vision_model()), "--images", name, "--matrices", "2", "--out", "out")
        yield Case(
            f"images: {name}", arguments, prepare, (name,), must_fail=name not in ("good.png", "bad-checksum.png")
        )


def cases() -> Iterator[Case]:
    """Yield the cases of pictures."""
    yield from _sources()
    yield from _images()
