"""The heatmap of a result that takes part in the selection of a graph: a cell is a layer, a head, a position."""

from __future__ import annotations

from typing import Any

import traitlets

from graphpatch_notebook.components.names import is_component_name
from graphpatch_notebook.experiments.plotting.grids import Grid, Side
from graphpatch_notebook.notebook.display.heatmap import ResultHeatmap
from graphpatch_notebook.notebook.views.selection import Item, item_of, problem_of, selection_of
from graphpatch_notebook.patchable_graph import PatchableGraph

_NUMBERS = ("layer", "head", "position", "key")


class LinkedHeatmap(ResultHeatmap):
    """A heatmap whose cells are items of the selection of a graph.

    Args:
        grid: The result.
        title: The title.
        is_upward: Whether the first row is at the bottom.
        graph: The graph that the result is of.

    Attributes:
        group: Identifies the views that share a selection.
        selection: What is selected, in all views of the graph.
    """

    group = traitlets.Unicode(read_only=True).tag(sync=True, echo_update=False)
    cell_items = traitlets.Dict(read_only=True).tag(sync=True, echo_update=False)
    selection: Any = traitlets.List().tag(sync=True)

    def __init__(self, grid: Grid, title: str | None = None, *, is_upward: bool = True, graph: PatchableGraph) -> None:
        self._selection = selection_of(graph)
        self.set_trait("group", self._selection.group)
        self.set_trait("cell_items", {"rows": None, "columns": None, "is_of_heads": False})
        super().__init__(grid, title, is_upward=is_upward)
        names = {component.path: name for name, component in graph.components.items() if not component.index}
        rows, columns = (_items(side, names) for side in self._sides)
        block = self._cells.block
        # A cell of a layer and a head is that head's output.
        is_of_heads = {"layer", "head"} == {
            side.name for side in self._sides
        } and "layers[0].attn.z" in graph.components
        shown = {
            "is_of_heads": is_of_heads,
            "rows": rows[:: -1 if is_upward else 1] if rows and block[0] == 1 else None,
            "columns": columns if block[1] == 1 else None,
        }
        self.set_trait("cell_items", shown)
        self.selection = [*self._selection.items]
        self._selection.add(self)

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Validates the cell and the selection that the front end sets."""
        chosen = sync_data.get("selection")
        if "selection" in sync_data and problem_of(chosen) is None:
            self.selection = chosen
        super().set_state({name: value for name, value in sync_data.items() if name != "selection"})

    @traitlets.validate("selection")
    def _checked_items(self, proposal: Any) -> Any:
        if (problem := problem_of(proposal["value"])) is not None:
            raise traitlets.TraitError(problem)
        return proposal["value"]

    @traitlets.observe("selection")
    def _share_selection(self, change: Any) -> None:
        self._selection.set(change["new"])

    def follow_selection(self) -> None:
        """Called after each change of the selection."""
        self.selection = [*self._selection.items]

    def close(self) -> None:
        """Removes the widget from the notebook. The displayed HTML remains."""
        if "_selection" in self.__dict__:
            self._selection.remove(self)
        super().close()


def _items(side: Side, names: dict[str, str]) -> list[Item] | None:
    """Returns what each row or column selects; `None` if that is nothing.

    Args:
        side: The rows or columns.
        names: The names of components, by path.
    """
    if side.name in _NUMBERS and all(isinstance(value, int) and value >= 0 for value in side.values):
        return [item_of(None, **{side.name: int(value)}) for value in side.values]
    if not all(isinstance(value, str) for value in side.values):
        return None
    found = [item_of(names.get(value, value)) for value in side.values]
    is_known = [value in names or is_component_name(value) for value in side.values]
    return found if all(is_known) or side.name in ("path", "node") else None
