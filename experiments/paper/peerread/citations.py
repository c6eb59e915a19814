"""Removal of citations, so that the text of a paper does not name the papers that it cites."""

from __future__ import annotations

import re
from collections.abc import Iterable

# A surname with its particles, and a list of surnames: "Kingma and Ba", "van den Oord et al."
NAME = r"(?:\b(?:[Vv]an|[Vv]on|[Dd]e|den|der|del|la|le|di|da) )*\b[^\W\d_a-z][\w'’\-\u0300-\u036f]+"
ET_AL = r",?\s+et\.?\s+al\b\.?(?:['’]s)?"
NAMES = rf"{NAME}(?:(?:,|,?\s+(?:and|&))\s+{NAME}){{0,6}}(?:{ET_AL})?"
YEAR = r"(?:19|20)\d\d[a-z]?"
POSITION = r"(?:\d{1,3}|[A-Z][a-z]{2,}\.? [\d.]+)"  # a number, or a section as in [7, Section 4]

CITATIONS = [
    re.compile(pattern)
    for pattern in (
        r"https?://\S+|www\.[\w./\-]+",
        # arXiv:1412.6980, and the stamp on the first page, which may have spaces between its characters
        r"(?i:\bar\s?x\s?iv(?:\s+preprint)?\s?:?\s?(?:[a-z\-]+(?:\.[a-z]{2})?/)?\s?[\d\s.]*(?:v\s?\d+)?\s*(?:\[[\w\s.\-]{2,20}\])?)",
        r"\babs/\d{4}\.\d{4,5}(?:v\d+)?|\b\d{4}\.\d{4,5}v\d+\b",
        # Kingma and Ba (2014), van den Oord et al. [2016b]
        rf"{NAMES}\s*[(\[]\s*{YEAR}[^()\[\]]{{0,80}}[)\]]",
        # (Kingma and Ba, 2014; Lu et al. 2013), (2016b): any brackets that contain a year
        rf"\([^()]{{0,400}}\b{YEAR}\b[^()]{{0,400}}\)",
        rf"\[[^\[\]]{{0,400}}\b{YEAR}\b[^\[\]]{{0,400}}\]",
        # Lu et al., Kingma and Ba, 2014
        rf"{NAME}(?:{ET_AL}|\s+(?:and|&)\s+{NAME}(?={ET_AL}|,?\s+{YEAR}\b))(?:{ET_AL})?(?:,?\s+{YEAR}\b)?",
        # [12], [3, 7-9], [7, Section 4], [KB14], [Mik+13]
        rf"\[\s*[1-9]\d{{0,2}}(?:\s*[,;–—\-]\s*{POSITION})*\s*\]",
        r"\[\s*[A-Z][A-Za-z]*\+?\d\d[a-z]?(?:\s*[,;]\s*[A-Z][A-Za-z]*\+?\d\d[a-z]?)*\s*\]",
        # Remainder of (Fishburn (1970); Machina (1988))
        r"[(\[](?:[\s,;.&]|\band\b|\bsee\b|\be\.g\.|\balso\b|\bcf\.)*[)\]]",
    )
]
REFERENCES = re.compile(r"\n\s*(?:\d+\.?\s*)?(?:references|bibliography)\s*\n.*", re.IGNORECASE | re.DOTALL)
WORD = re.compile(r"[A-Za-z0-9]+")


class TitleIndex:
    """Index of titles, for finding them in texts regardless of case and punctuation."""

    def __init__(self, titles: Iterable[str]) -> None:
        self.by_start: dict[tuple[str, str, str], list[tuple[str, ...]]] = {}
        for title in titles:
            words = tuple(title.split())
            if len(words) >= 3:  # shorter titles are common phrases
                self.by_start.setdefault((words[0], words[1], words[2]), []).append(words)

    def strip(self, text: str) -> str:
        """Return the text without the titles. The first line, the title of the paper itself, is unchanged."""
        heading = len(text.split("\n", 1)[0])
        tokens = [match for match in WORD.finditer(text) if match.start() >= heading]
        words = [token.group().lower() for token in tokens]
        parts, position, next_index = [], 0, 0
        for index, start in enumerate(zip(words, words[1:], words[2:], strict=False)):
            if index < next_index or start not in self.by_start:
                continue
            matches = [title for title in self.by_start[start] if tuple(words[index : index + len(title)]) == title]
            if matches:
                next_index = index + max(map(len, matches))
                parts.append(text[position : tokens[index].start()])
                position = tokens[next_index - 1].end()
        return "".join([*parts, text[position:]])


def strip_citations(text: str, titles: TitleIndex) -> str:
    """Return the text without citations, arXiv numbers, URLs, titles of other papers and the list of references."""
    heading, newline, body = text.partition("\n")
    body = REFERENCES.sub("", body)
    # Titles first: the patterns of citations may remove a part of a title, such as a year in brackets.
    body = titles.strip(f"\n{body}")[1:]
    for pattern in CITATIONS:
        body = pattern.sub("", body)
    body = re.sub(r"[ \t]+", " ", body)
    body = re.sub(r" +([,.;:)])", r"\1", body)
    return heading + newline + body
