"""A grid of a result as the front end draws it: the top row first, in blocks where there are too many cells."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphpatch_notebook.experiments.plotting.grids import IN_FULL, Grid, Numbers, Scale, Side
from graphpatch_notebook.experiments.plotting.labels import shown_labels, tick_text

SIDE = 256
"""The most rows and columns that are sent."""
_LARGEST = 1e30
"""From here on the front end takes a number for the fill value of a mask."""


@dataclass(frozen=True)
class ResultCells:
    """What is drawn of a grid.

    Attributes:
        grid: The grid.
        values: The number of each cell, of shape (rows, columns); of a block, the one farthest from the centre.
        places: Where in the grid each of these stands, of shape (rows, columns, 2).
        block: How many rows and columns of the grid are one cell.
        is_upward: Whether the first row of the grid is the lowest.
    """

    grid: Grid
    values: Numbers
    places: np.ndarray[Any, np.dtype[np.intp]]
    block: tuple[int, int]
    is_upward: bool

    @classmethod
    def of_grid(cls, grid: Grid, *, is_upward: bool) -> ResultCells:
        """Returns the cells of a grid."""
        rows, columns = grid.values.shape
        block = math.ceil(rows / SIDE), math.ceil(columns / SIDE)
        order = np.arange(rows)[:: -1 if is_upward else 1]
        values = np.where(np.abs(grid.values) < _LARGEST, grid.values, np.nan)[order]
        center = 0.0 if grid.scale.center is None else grid.scale.center.value
        strength = np.where(np.isnan(values), -1.0, np.abs(values - center))
        found = _strongest(strength, block)
        shown = values[found[..., 0], found[..., 1]]
        found[..., 0] = order[found[..., 0]]
        return cls(grid, shown, found, block, is_upward)

    def cell_of(self, row: int, column: int) -> list[int]:
        """Returns the cell in which a value of the grid is."""
        seen = len(self.grid.values) - 1 - row if self.is_upward else row
        return [seen // self.block[0], column // self.block[1]]

    def packed(self) -> bytes:
        """Returns the numbers as little-endian float32, row by row."""
        return self.values.astype("<f4").tobytes()

    def state(self, title: str | None, model_id: str) -> dict[str, Any]:
        """Returns the `ResultHeatmap` of the front end."""
        scale = self.grid.scale
        return {
            "title": title,
            "name": scale.name,
            "rows": self._side(self.grid.rows, self.block[0], is_reversed=self.is_upward),
            "columns": self._side(self.grid.columns, self.block[1], is_reversed=False),
            "full": list(self.grid.values.shape),
            "map": "sequential" if scale.center is None else "diverging",
            "low": scale.limits[0],
            "high": scale.limits[1],
            "center": str(scale.center) if scale.center is not None and scale.center.name else None,
            "missing": self._missing(scale),
            "reduced": self._reduced(scale),
            "model_id": model_id,
        }

    def _side(self, side: Side, block: int, *, is_reversed: bool) -> dict[str, Any]:
        step = -1 if is_reversed else 1
        values = [str(value) for value in side.values[::step]]
        state: dict[str, Any] = {"name": side.name, "title": side.title}
        if block > 1:
            parts = [values[start : start + block] for start in range(0, len(values), block)]
            values = [" to ".join(dict.fromkeys((part[0], part[-1]))) for part in parts]
            title = side.title.removesuffix(IN_FULL)
            return state | {"title": title, "values": values, "labels": None, "tokens": None}
        tokens = [tick_text(label, is_token=True) for label in side.labels[::step]] if side.is_tokens else None
        return state | {"values": values, "labels": shown_labels(side)[::step], "tokens": tokens}

    def _missing(self, scale: Scale) -> str | None:
        if (np.abs(self.grid.values) >= _LARGEST).any():
            return f"no finite value, or one beyond {_LARGEST:g}"
        return scale.missing

    def _reduced(self, scale: Scale) -> str | None:
        if self.block == (1, 1):
            return None
        rows, columns = self.grid.values.shape
        what = f"number farthest from {scale.center or 0}"
        return f"each cell is the {what} of {self.block[0]} x {self.block[1]} of {rows} x {columns}"


def _strongest(strength: Numbers, block: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Returns the place of the greatest number of each block, of shape (rows, columns, 2)."""
    rows, columns = (math.ceil(size / length) for size, length in zip(strength.shape, block, strict=True))
    padding = [(0, rows * block[0] - strength.shape[0]), (0, columns * block[1] - strength.shape[1])]
    padded = np.pad(strength, padding, constant_values=-np.inf)
    blocks = padded.reshape(rows, block[0], columns, block[1]).transpose(0, 2, 1, 3).reshape(rows, columns, -1)
    place = np.stack(np.unravel_index(blocks.argmax(-1), block), axis=-1)
    corners = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1) * np.array(block)
    found: np.ndarray[Any, np.dtype[np.intp]] = corners + place
    return found
