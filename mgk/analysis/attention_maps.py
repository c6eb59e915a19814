"""Attention maps as pictures of bytes: pooled to a size that can be looked at, and in full as tiles.

A level of 0 is no attention at all; 1 to 255 is the weight in a logarithmic scale from a tenth of what uniform
attention would give, 1/S, up to 1. It is the same for all heads, layers and models, so that maps can be compared.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mgk._core.io import replacing

Levels = NDArray[np.uint8]

TILE = 512
POOLINGS = ("mean", "max")
LOWEST = -1.0  # log10 of weight × S at level 1


@dataclass(frozen=True)
class Maps:
    """The maps of a layer on one sample."""

    queries: int
    keys: int
    factor: int  # so many rows and columns make one of the pooled maps
    pooled: dict[str, Levels]  # by pooling, [H, rows, columns]
    tiles: list[list[str]]  # for each head the names of its tiles' files, row by row; "" where a tile is empty
    tile_columns: int = 0


def levels(weights: Tensor, keys: int) -> Tensor:
    """Weights as uint8, see above."""
    highest = math.log10(max(keys, 1))
    share = ((weights * keys).log10() - LOWEST) / (highest - LOWEST)
    return torch.where(weights > 0, 1 + (254 * share.clamp(0, 1)).round(), 0).to(torch.uint8)


def weight_of(level: int, keys: int) -> float:
    """The weight in the middle of a level."""
    return 0.0 if level == 0 else 10 ** (LOWEST + (level - 1) / 254 * (math.log10(max(keys, 1)) - LOWEST)) / keys


class MapSums:
    """Pools the rows of the maps as they come, and writes tiles where a directory for them is given."""

    def __init__(
        self, name: str, heads: int, queries: int, keys: int, size: int, tiles: Path | None, device: torch.device
    ) -> None:
        self.name, self.heads, self.queries, self.keys = name, heads, queries, keys
        self.factor = max(1, math.ceil(max(queries, keys) / size))
        shape = (heads, math.ceil(queries / self.factor), math.ceil(keys / self.factor))
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self.peaks = torch.zeros_like(self.sums)
        self.directory = tiles if self.factor > 1 else None
        self.waiting: list[Levels] = []
        self.files: list[list[str]] = [[] for _ in range(heads)]

    def add(self, rows: slice, weights: Tensor) -> None:
        """Rows [H, R, S] of the maps, in order."""
        first = rows.start // self.factor
        before, after = rows.start - first * self.factor, -rows.stop % self.factor
        padded = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % self.factor, before, after))
        cells = padded.unflatten(-1, (-1, self.factor)).unflatten(1, (-1, self.factor))  # [H, r, factor, c, factor]
        places = slice(first, first + cells.shape[1])
        self.sums[:, places] += cells.sum((2, 4))
        self.peaks[:, places] = torch.maximum(self.peaks[:, places], cells.amax((2, 4)))
        if self.directory is not None:
            self.waiting.append(levels(weights, self.keys).cpu().numpy())
            self._write(rows.stop == self.queries)

    def _write(self, last: bool) -> None:
        """Full rows of tiles, and at the end the rest."""
        while sum(part.shape[1] for part in self.waiting) >= TILE or (last and self.waiting):
            strip = np.concatenate(self.waiting, axis=1)
            now, later = strip[:, :TILE], strip[:, TILE:]
            self.waiting = [later] if later.shape[1] else []
            for head in range(self.heads):
                for start in range(0, self.keys, TILE):
                    self.files[head].append(self._tile(head, len(self.files[head]), now[head, :, start : start + TILE]))

    def _tile(self, head: int, number: int, tile: Levels) -> str:
        assert self.directory is not None
        if not tile.any():
            return ""
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"{self.name}-head{head + 1}-{number:04d}.png"
        with replacing(self.directory / name) as temporary:
            temporary.write_bytes(png(tile, PALETTE))
        return name

    def maps(self) -> Maps:
        rows = torch.full((self.queries,), 1.0, dtype=torch.float64).split(self.factor)
        columns = torch.full((self.keys,), 1.0, dtype=torch.float64).split(self.factor)
        heights, widths = (torch.stack([part.sum() for part in parts]) for parts in (rows, columns))
        means = self.sums.cpu() / torch.outer(heights, widths)
        pooled = {
            "mean": levels(means, self.keys).numpy(),
            "max": levels(self.peaks.cpu(), self.keys).numpy(),
        }
        return Maps(
            self.queries, self.keys, self.factor, pooled, self.files if any(map(any, self.files)) else [],
            math.ceil(self.keys / TILE),
        )  # fmt: skip


def _palette() -> bytes:
    """256 colours from night blue over teal and amber to near white, dark to light evenly."""
    stops = np.array([(13, 15, 34), (32, 52, 110), (22, 112, 130), (74, 167, 110), (226, 183, 74), (255, 245, 214)])
    places = np.linspace(0, len(stops) - 1, 256)
    colours = np.stack([np.interp(places, np.arange(len(stops)), stops[:, c]) for c in range(3)], axis=-1)
    return colours.round().astype(np.uint8).tobytes()


PALETTE = _palette()


def png(pixels: Levels, palette: bytes | None = None) -> bytes:
    """A PNG of bytes [rows, columns]: grey, or in the colours of a palette of 256."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if palette is None else 3, 0, 0, 0)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1)  # filter 0 before each line
    colours = b"" if palette is None else chunk(b"PLTE", palette)
    image = chunk(b"IDAT", zlib.compress(lines.tobytes(), 6))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + colours + image + chunk(b"IEND", b"")
