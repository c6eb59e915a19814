"""Attention maps as uint8 images: pooled to a fixed size, and at full resolution as PNG tiles.

Level 0 is a weight of 0; levels 1 to 255 are a logarithmic scale from a tenth of the uniform weight 1/S up to 1. The
scale is the same for all heads, layers and models, so that maps can be compared.
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

TILE = 512  # pixels of a tile's side
LOWEST = -1.0  # log10 of weight × S at level 1


@dataclass(frozen=True)
class Maps:
    """Attention maps of a layer on one sample."""

    queries: int
    keys: int
    factor: int  # rows and columns pooled into one pixel
    pooled: dict[str, Levels]  # by pooling, "mean" or "max": [H, rows, columns]
    tiles: list[list[str]]  # file names of each head's tiles, row by row; "" for an empty tile
    tile_columns: int = 0


def levels(weights: Tensor, keys: int) -> Tensor:
    """Convert attention weights over `keys` keys to uint8 levels."""
    highest = math.log10(max(keys, 1))
    share = ((weights * keys).log10() - LOWEST) / (highest - LOWEST)
    return torch.where(weights > 0, 1 + (254 * share.clamp(0, 1)).round(), 0).to(torch.uint8)


class MapAccumulator:
    """Pool the rows of a layer's maps as they are computed, and write tiles if a directory is given.

    Args:
        name: Prefix of the tile file names.
        heads: Number of heads.
        queries: Number of rows.
        keys: Number of columns.
        size: Maximum side of a pooled map, in pixels.
        tiles: Directory for tiles of maps that are larger than `size`, or None.
        device: Device of the weights.
    """

    def __init__(
        self, name: str, heads: int, queries: int, keys: int, size: int, tiles: Path | None, device: torch.device
    ) -> None:
        self.name, self.heads, self.queries, self.keys = name, heads, queries, keys
        self.factor = max(1, math.ceil(max(queries, keys) / size))
        shape = (heads, math.ceil(queries / self.factor), math.ceil(keys / self.factor))
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self.peaks = torch.zeros_like(self.sums)
        self.directory = tiles if self.factor > 1 else None
        self.pending: list[Levels] = []
        self.files: list[list[str]] = [[] for _ in range(heads)]

    def add(self, rows: slice, weights: Tensor) -> None:
        """Add rows [H, R, S] of the maps, in order."""
        first = rows.start // self.factor
        before, after = rows.start - first * self.factor, -rows.stop % self.factor
        padded = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % self.factor, before, after))
        cells = padded.unflatten(-1, (-1, self.factor)).unflatten(1, (-1, self.factor))  # [H, r, factor, c, factor]
        pooled_rows = slice(first, first + cells.shape[1])
        self.sums[:, pooled_rows] += cells.sum((2, 4))
        self.peaks[:, pooled_rows] = torch.maximum(self.peaks[:, pooled_rows], cells.amax((2, 4)))
        if self.directory is not None:
            self.pending.append(levels(weights, self.keys).cpu().numpy())
            self._write_tiles(rows.stop == self.queries)

    def _write_tiles(self, last: bool) -> None:
        """Write complete rows of tiles and, if `last`, the remaining rows."""
        while sum(part.shape[1] for part in self.pending) >= TILE or (last and self.pending):
            strip = np.concatenate(self.pending, axis=1)
            complete, remaining = strip[:, :TILE], strip[:, TILE:]
            self.pending = [remaining] if remaining.shape[1] else []
            for head in range(self.heads):
                for start in range(0, self.keys, TILE):
                    tile = complete[head, :, start : start + TILE]
                    self.files[head].append(self._write_tile(head, len(self.files[head]), tile))

    def _write_tile(self, head: int, number: int, tile: Levels) -> str:
        assert self.directory is not None
        if not tile.any():
            return ""
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"{self.name}-head{head + 1}-{number:04d}.png"
        with replacing(self.directory / name) as temporary:
            temporary.write_bytes(png(tile, PALETTE))
        return name

    def maps(self) -> Maps:
        """Return the pooled maps and the names of the tiles."""
        # The last row and column of pixels may pool fewer rows and columns.
        heights, widths = (
            torch.tensor([min(self.factor, length - start) for start in range(0, length, self.factor)])
            for length in (self.queries, self.keys)
        )
        means = self.sums.cpu() / torch.outer(heights, widths)
        pooled = {
            "mean": levels(means, self.keys).numpy(),
            "max": levels(self.peaks.cpu(), self.keys).numpy(),
        }
        return Maps(
            queries=self.queries,
            keys=self.keys,
            factor=self.factor,
            pooled=pooled,
            tiles=self.files if any(map(any, self.files)) else [],
            tile_columns=math.ceil(self.keys / TILE),
        )


def _palette() -> bytes:
    """Return 256 RGB colours of increasing lightness: night blue, teal, amber, near white."""
    stops = np.array([(13, 15, 34), (32, 52, 110), (22, 112, 130), (74, 167, 110), (226, 183, 74), (255, 245, 214)])
    positions = np.linspace(0, len(stops) - 1, 256)
    colours = np.stack([np.interp(positions, np.arange(len(stops)), stops[:, c]) for c in range(3)], axis=-1)
    return colours.round().astype(np.uint8).tobytes()


PALETTE = _palette()


def png(pixels: Levels, palette: bytes | None = None) -> bytes:
    """Encode uint8 pixels [rows, columns] as PNG, grey or with a palette of 256 RGB colours."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if palette is None else 3, 0, 0, 0)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1)  # each line starts with filter type 0
    colours = b"" if palette is None else chunk(b"PLTE", palette)
    image = chunk(b"IDAT", zlib.compress(lines.tobytes(), 6))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + colours + image + chunk(b"IEND", b"")
