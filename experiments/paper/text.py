"""Line breaks of generated sentences."""

from __future__ import annotations

import textwrap

WIDTH = 120  # characters per line


def wrap(sentences: str, indent: str = "") -> str:
    """Break sentences into lines, not at hyphens; lines after the first are indented."""
    return textwrap.fill(sentences, WIDTH, break_on_hyphens=False, subsequent_indent=indent)
