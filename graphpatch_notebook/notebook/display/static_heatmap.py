"""A result as HTML that lives without a kernel: what a saved notebook, nbconvert or GitHub shows of a heatmap.

A plain table: no script, no style sheet, no style attribute. The live widget hides it by its classes.
"""

from __future__ import annotations

import html
from collections.abc import Iterator

import numpy as np

from graphpatch_notebook.experiments.plotting.grids import Grid, Side
from graphpatch_notebook.experiments.plotting.labels import shown_labels, tick_text
from graphpatch_notebook.notebook.display.labels import escaped

MOST_BYTES = 30_000
_MOST_CELLS = 600
_STRONGEST = 30
_BOLD = 0.8


def static_heatmap(grid: Grid, title: str | None, model_id: str, *, is_upward: bool) -> str:
    """Returns the HTML, of at most about `MOST_BYTES`: all cells of a small result, the strongest of a large one.

    Args:
        grid: The result.
        title: What is written over it.
        model_id: The id of the widget that hides it.
        is_upward: Whether the first row is the lowest.
    """
    table = "\n".join(_lines(grid, title, model_id, _table(grid, is_upward=is_upward)))
    if grid.values.size <= _MOST_CELLS and len(table.encode()) <= MOST_BYTES:
        return table
    count = _STRONGEST
    while True:
        text = "\n".join(_lines(grid, title, model_id, _list(grid, count)))
        if len(text.encode()) <= MOST_BYTES or count == 1:
            return text
        count = count * 2 // 3


def summary(grid: Grid) -> str:
    """Returns what a result is, in a line."""
    rows, columns = grid.values.shape
    size = f"{rows:,} x {columns:,} ({grid.rows.name} x {grid.columns.name})"
    found = grid.values[~grid.is_missing]
    if not len(found):
        return f"{grid.scale.name}, {size}, no finite number"
    return f"{grid.scale.name}, {size}, from {found.min():.4g} to {found.max():.4g}"


def _lines(grid: Grid, title: str | None, model_id: str, body: Iterator[str]) -> Iterator[str]:
    name = f"{title}: {summary(grid)}" if title else summary(grid)
    yield f'<div class="gp-static gp-static-{html.escape(model_id)}">'
    yield f"<p><strong>{escaped(name)}</strong> (a picture of the heatmap; for the live one, run the cell)</p>"
    yield from body
    yield "</div>"


def _table(grid: Grid, *, is_upward: bool) -> Iterator[str]:
    strength = _strength(grid)
    least = _BOLD * strength.max(initial=0.0)
    order = range(len(grid.values))
    rows, columns = ([escaped(label) for label in shown_labels(side)] for side in (grid.rows, grid.columns))
    head = "".join(f"<th>{column}</th>" for column in columns)
    yield "<table>"
    yield f"<tr><th>{escaped(f'{grid.rows.title} / {grid.columns.title}')}</th>{head}</tr>"
    for row in reversed(order) if is_upward else order:
        is_bold = (strength[row] >= least) & (strength[row] > 0)
        cells = (_cell(value, is_bold=bold) for value, bold in zip(grid.values[row], is_bold, strict=True))
        yield f"<tr><th>{rows[row]}</th>{''.join(cells)}</tr>"
    yield "</table>"


def _cell(value: float, *, is_bold: bool) -> str:
    if np.isnan(value):
        return "<td>–</td>"
    return f"<td><strong>{value:.3g}</strong></td>" if is_bold else f"<td>{value:.3g}</td>"


def _list(grid: Grid, count: int) -> Iterator[str]:
    strength = _strength(grid)
    order = np.argsort(-strength, axis=None, kind="stable")[: min(count, int((strength >= 0).sum()))]
    if not len(order):
        return
    yield f"<p>The {len(order)} cells farthest from {escaped(str(grid.scale.center or 0))}:</p>"
    yield "<ol>"
    for place in order:
        row, column = np.unravel_index(place, grid.values.shape)
        where = f"{_place(grid.rows, int(row))}, {_place(grid.columns, int(column))}"
        yield f"<li><code>{escaped(where)}</code>: {grid.values[row, column]:.4g}</li>"
    yield "</ol>"


def _place(side: Side, index: int) -> str:
    value = f"{side.name} {side.values[index]}"
    return f"{value} ({tick_text(side.labels[index], is_token=True)})" if side.is_tokens else value


def _strength(grid: Grid) -> np.ndarray:
    center = 0.0 if grid.scale.center is None else grid.scale.center.value
    return np.where(grid.is_missing, -1.0, np.abs(grid.values - center))
