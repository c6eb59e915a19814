"""One line for each kind of invalid data, and no prepared data."""

import tarfile

import pytest

from mgk.tasks import DataError
from tests.support.task_data import (
    GENERATED,
    PAIRS,
    PAPERS,
    TEXT,
    TRAIN_PAIRS,
    make_aan,
    make_archive,
    make_imdb,
    make_peerread,
    prepared_directories,
)


def edit(path, change):
    return lambda data: (data / path).write_bytes(change((data / path).read_bytes()))


def rewrite_line(number, change):
    def changed(content):
        lines = content.split(b"\n")
        lines[number] = change(lines[number])
        return b"\n".join(lines)

    return changed


def archive_without(name):
    def make(data):
        make_archive(data)
        (data / "made" / "aclImdb" / name).unlink()
        with tarfile.open(data / "aclImdb_v1.tar.gz", "w:gz") as archive:
            archive.add(data / "made" / "aclImdb", "aclImdb")

    return make


REVIEW = "aclImdb/test/neg/0_2.txt"
ARCHIVE = "aclImdb_v1.tar.gz"
DOCS, LINKS = "peerread/docs.jsonl", "peerread/citation_links.tsv"


CUT = "damaged or incomplete|reviews instead of 8"  # the cut may be between two reviews


def nothing(data):
    pass


DAMAGE = {
    "no imdb": (TEXT, nothing, nothing, "no aclImdb directory or archive: download https://ai.stanford.edu"),
    "a review missing": (TEXT, make_imdb, lambda d: (d / REVIEW).unlink(), "test/neg has 7 reviews instead of 8: down"),
    "a folder missing": (TEXT, make_imdb, lambda d: (d / "aclImdb/train").rename(d / "x"), "train/neg has 0 reviews"),
    "a review empty": (TEXT, make_imdb, edit(REVIEW, lambda _: b""), "test/neg/0_2.txt is empty"),
    "a review not UTF-8": (TEXT, make_imdb, edit(REVIEW, lambda c: c + b"\xff"), "test/neg/0_2.txt is not UTF-8"),
    "half an archive": (TEXT, make_archive, edit(ARCHIVE, lambda c: c[: len(c) // 2]), CUT),
    "half an xz archive": (
        TEXT,
        lambda data: make_archive(data, ".tar.xz", "w:xz"),
        edit("aclImdb_v1.tar.xz", lambda c: c[: len(c) // 2]),
        CUT,
    ),
    "a damaged archive": (
        TEXT,
        make_archive,
        edit(ARCHIVE, lambda c: c[:300] + bytes(200) + c[500:]),
        CUT,
    ),
    "no archive": (TEXT, make_archive, edit(ARCHIVE, lambda c: b"<html>404</html>"), "damaged or incomplete"),
    "an empty archive": (TEXT, make_archive, edit(ARCHIVE, lambda c: b""), "damaged or incomplete"),
    "an archive short of a review": (TEXT, archive_without("train/pos/0_9.txt"), nothing, "train/pos has 7 reviews"),
    "no aan": (PAIRS, nothing, nothing, "aan has no new_aan_pairs.train.tsv, .*long-range-arena"),
    "some of aan": (PAIRS, make_aan, lambda d: (d / TRAIN_PAIRS).unlink(), "no aan/new_aan_pairs.train.tsv beside"),
    "aan columns": (PAIRS, make_aan, edit(TRAIN_PAIRS, rewrite_line(2, lambda c: c[:9])), "line 3 has 3 columns"),
    "aan label": (PAIRS, make_aan, edit(TRAIN_PAIRS, rewrite_line(1, lambda c: b"7" + c)), "line 2 has label b'71.0'"),
    "aan UTF-8": (
        PAIRS,
        make_aan,
        edit(TRAIN_PAIRS, rewrite_line(1, lambda c: c + b"\xc3")),
        "line 2, text is not UTF",
    ),
    "aan no text": (
        PAIRS,
        make_aan,
        edit(TRAIN_PAIRS, rewrite_line(1, lambda c: b"1\ta\tb\t\ttext")),
        "line 2, text is empty",
    ),
    "aan short": (PAIRS, make_aan, edit(TRAIN_PAIRS, lambda c: c[: c.rindex(b"1.0")]), "has 3 pairs instead of 4"),
    "aan empty": (PAIRS, make_aan, edit(TRAIN_PAIRS, lambda c: b""), "has 0 pairs instead of 4"),
    "no peerread": (PAPERS, nothing, nothing, "no peerread/docs.jsonl, peerread/citation_links.tsv: .*PeerRead"),
    "no links": (PAPERS, make_peerread, lambda d: (d / LINKS).unlink(), "no peerread/citation_links.tsv"),
    "bad JSON": (
        PAPERS,
        make_peerread,
        edit(DOCS, rewrite_line(4, lambda c: c[:-9])),
        "docs.jsonl, line 5 is not a JSON",
    ),
    "not an object": (PAPERS, make_peerread, edit(DOCS, rewrite_line(4, lambda c: b"3")), "docs.jsonl, line 5 is not"),
    "no year": (
        PAPERS,
        make_peerread,
        edit(DOCS, rewrite_line(0, lambda c: b'{"key": "a", "text": "b"}')),
        "line 1 .*year",
    ),
    "no text": (
        PAPERS,
        make_peerread,
        edit(DOCS, rewrite_line(0, lambda c: b'{"key": "a", "year": 1, "text": ""}')),
        "line 1 has a key, year or text that is empty",
    ),
    "a text that is a number": (
        PAPERS,
        make_peerread,
        edit(DOCS, rewrite_line(0, lambda c: b'{"key": "a", "year": 1, "text": 5}')),
        "line 1 has a key, year or text",
    ),
    "docs not UTF-8": (
        PAPERS,
        make_peerread,
        edit(DOCS, rewrite_line(7, lambda c: c[:30] + b"\xff" + c[30:])),
        "line 8",
    ),
    "papers short": (
        PAPERS,
        make_peerread,
        edit(DOCS, lambda c: c[: c.rindex(b"\n")]),
        "has 239 papers instead of 240",
    ),
    "a paper twice": (
        PAPERS,
        make_peerread,
        edit(DOCS, lambda c: b"\n".join([*c.split(b"\n")[:-1], c.split(b"\n")[0]])),
        "twice",
    ),
    "link columns": (
        PAPERS,
        make_peerread,
        edit(LINKS, rewrite_line(3, lambda c: c + b"\tx")),
        "tsv, line 4 has 3 columns",
    ),
    "unknown paper": (
        PAPERS,
        make_peerread,
        edit(LINKS, rewrite_line(3, lambda c: c + b"x")),
        "line 4 has .*not in docs",
    ),
    "links not UTF-8": (
        PAPERS,
        make_peerread,
        edit(LINKS, rewrite_line(3, lambda c: b"\xff" + c)),
        "line 4 is not UTF-8",
    ),
    "links short": (
        PAPERS,
        make_peerread,
        edit(LINKS, lambda c: c[: c.rindex(b"\n", 0, -1)]),
        "links 731 pairs of papers instead of 732",
    ),
    "data directory not writable": (
        GENERATED,
        nothing,
        lambda d: (d / ".mgk").write_text(""),
        "must be readable and .*writable",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_invalid_data_reports_one_line_and_prepares_nothing(tmp_path, damage):
    task, make, spoil, message = DAMAGE[damage]
    make(tmp_path)
    spoil(tmp_path)
    for use in (lambda: task.prepare(tmp_path), lambda: task.split(tmp_path, "train")):
        with pytest.raises(DataError, match=message) as error:
            use()
        assert "\n" not in str(error.value)
        assert str(tmp_path) in str(error.value)
        assert prepared_directories(tmp_path, task) == []
