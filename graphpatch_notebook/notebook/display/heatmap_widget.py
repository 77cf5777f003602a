"""The heatmap of a result, as the kernel has it. Its front end is js/src/result_heatmap.ts.

front end  -- cell ------>  checked; from it `selected`
`selected` -- cell ------>  front end
"""

from __future__ import annotations

import uuid
from typing import Any

import traitlets

from graphpatch_notebook.experiments.plotting.grids import Grid, Side
from graphpatch_notebook.notebook.display.displayed_widget import DisplayedWidget
from graphpatch_notebook.notebook.display.result_cells import ResultCells
from graphpatch_notebook.notebook.display.static_heatmap import static_heatmap, summary


class ResultHeatmap(DisplayedWidget):
    """A heatmap of a result to point at and to click: what `show_heatmap` returns.

    In a notebook it shows the widget, and beside it a table that lives without a kernel. Elsewhere it is one line.

    Args:
        grid: The result.
        title: What is written over it.
        is_upward: Whether the first row is the lowest.

    Attributes:
        selected: The coordinates of the cell that was clicked, in the order of the heatmap's rows and columns, such
            as `("transformer.h_3.mlp.output", 5)`; `None`: none is selected. Set it to select a cell; `observe` it to
            hear of clicks.

    Example:
        >>> import xarray
        >>> from graphpatch_notebook.experiments import show_heatmap
        >>> result = xarray.DataArray([[1.0, 2.0]], {"path": ["h_0"]}, ["path", "position"], name="effect")
        >>> heatmap = show_heatmap(result)
        >>> heatmap
        <Heatmap of effect, 1 x 2 (path x position), from 1 to 2>
        >>> heatmap.selected = ("h_0", 1)
        >>> result.sel(path="h_0").isel(position=heatmap.selected[1]).item()
        2.0
        >>> heatmap.close()
    """

    heatmap = traitlets.Dict(read_only=True).tag(sync=True, echo_update=False)
    values = traitlets.Bytes(read_only=True).tag(sync=True, echo_update=False)
    cell: Any = traitlets.List(traitlets.Int(), default_value=None, allow_none=True).tag(sync=True)
    selected: Any = traitlets.Tuple(traitlets.Any(), traitlets.Any(), default_value=None, allow_none=True)

    def __init__(self, grid: Grid, title: str | None = None, *, is_upward: bool = True) -> None:
        self._cells = ResultCells.of_grid(grid, is_upward=is_upward)
        self._title = title
        self._own_id = uuid.uuid4().hex
        self.set_trait("heatmap", self._cells.state(title, self._own_id))
        self.set_trait("values", self._cells.packed())
        super().__init__(self._static_html, self._own_id)

    @property
    def grid(self) -> Grid:
        """What is shown."""
        return self._cells.grid

    # -- the selected cell ---------------------------------------------------------------------------------------------

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Takes over the cell that the front end has set, if there is such a one; it may set nothing else."""
        accepted = {name: value for name, value in sync_data.items() if name == "cell" and self._is_cell(value)}
        super().set_state(accepted)
        self.put_right(sync_data.keys() - accepted.keys())

    def _is_cell(self, value: Any) -> bool:
        if value is None:
            return True
        if not isinstance(value, list) or [type(index) for index in value] != [int, int]:
            return False
        rows, columns = self._cells.values.shape
        return bool(0 <= value[0] < rows and 0 <= value[1] < columns)

    @traitlets.validate("cell")
    def _checked_cell(self, proposal: Any) -> Any:
        if not self._is_cell(proposal["value"]):
            rows, columns = self._cells.values.shape
            raise traitlets.TraitError(f"a cell is [row, column] of {rows} x {columns}, not {proposal['value']!r}")
        return proposal["value"]

    @traitlets.validate("selected")
    def _checked_selection(self, proposal: Any) -> Any:
        if proposal["value"] is not None:
            self._place(proposal["value"])
        return proposal["value"]

    @traitlets.observe("cell")
    def _follow_cell(self, change: Any) -> None:
        cell = change["new"]
        if cell is None:
            self.selected = None
        elif self.selected is None or self._cells.cell_of(*self._place(self.selected)) != cell:
            row, column = self._cells.places[cell[0], cell[1]]
            self.selected = (self.grid.rows.values[row], self.grid.columns.values[column])

    @traitlets.observe("selected")
    def _follow_selection(self, change: Any) -> None:
        chosen = change["new"]
        self.cell = None if chosen is None else self._cells.cell_of(*self._place(chosen))

    def _place(self, chosen: tuple[Any, Any]) -> tuple[int, int]:
        """Returns the row and the column of the grid that coordinates mean.

        Raises:
            TraitError: There are none such.
        """
        row, column = (_index(side, value) for side, value in zip(self._sides, chosen, strict=True))
        return row, column

    @property
    def _sides(self) -> tuple[Side, Side]:
        return self.grid.rows, self.grid.columns

    # -- where it is shown ---------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<Heatmap of {summary(self.grid)}>"

    def _static_html(self) -> str:
        return static_heatmap(self.grid, self._title, self._own_id, is_upward=self._cells.is_upward)


def _index(side: Side, value: Any) -> int:
    try:
        return side.values.index(str(value) if isinstance(side.values[0], str) else value)
    except ValueError:
        known = ", ".join(repr(one) for one in side.values[:3])
        message = f"{value!r} is no {side.name} of this heatmap, whose {len(side.values)} are {known}..."
        raise traitlets.TraitError(message) from None
