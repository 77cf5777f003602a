"""The heatmap of a result that takes part in the selection of a graph: a cell is a layer, a head, a position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import traitlets

from graphpatch_notebook.components import Components
from graphpatch_notebook.components.names import is_component_name, parse_name
from graphpatch_notebook.experiments.grids import Grid, Side
from graphpatch_notebook.experiments.results import component_of
from graphpatch_notebook.notebook.display.heatmap import ResultHeatmap
from graphpatch_notebook.notebook.messages import Item
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.notebook.views.linked import LinkedView, session_for_view
from graphpatch_notebook.notebook.views.selection import item_of
from graphpatch_notebook.patchable_graph import PatchableGraph

if TYPE_CHECKING:
    from xarray import DataArray

_NUMBERS = ("layer", "head", "position", "key")


class LinkedHeatmap(ResultHeatmap, LinkedView):
    """A heatmap whose cells are items of the selection of a graph, with the actions of its views."""

    cell_items = traitlets.Dict(read_only=True).tag(sync=True, echo_update=False)

    VIEW: ClassVar[str] = "result"
    FRONT_END: ClassVar[Mapping[str, Any]] = {**LinkedView.FRONT_END, **ResultHeatmap.FRONT_END}

    def __init__(
        self,
        result: DataArray,
        grid: Grid,
        title: str | None = None,
        *,
        is_upward: bool = True,
        graph: PatchableGraph,
        workspace: Workspace,
    ) -> None:
        self._keep(grid, title, is_upward=is_upward)
        session, _ = session_for_view(graph, workspace)
        components = graph.components
        paths = {component.path: name for name, component in components.items() if not component.index}
        rows, columns = (_items(side, paths, result, components) for side in self._sides)
        block = self._cells.block
        shown = {
            "rows": rows[:: -1 if is_upward else 1] if rows and block[0] == 1 else None,
            "columns": columns if block[1] == 1 else None,
            "all": _of_all_cells(result, components),
        }
        self.set_trait("cell_items", shown)
        LinkedView.__init__(self, graph, session, workspace)


def _of_all_cells(result: DataArray, components: Components) -> Item:
    """Returns what all cells select: the component, with `*` for numbers, and the numbers that were chosen before."""
    chosen = {name: _chosen(result, name) for name in _NUMBERS}
    numbers = {name: value for name, value in chosen.items() if _is_number(value)}
    name = None if "component" in result.dims else _component(result, components, _chosen(result, "component"))
    return item_of(name, **numbers)


def _chosen(result: DataArray, name: str) -> Any:
    """Returns what was chosen along a dimension that the result had: `result.sel(component="mlp_out")`."""
    return result.coords[name].item() if name in result.coords and result.coords[name].ndim == 0 else None


def _component(result: DataArray, components: Components, label: Any) -> str | None:
    """Returns the component that cells are of, with `*` for numbers; `None` if that is not known."""
    found = component_of(result, label)
    if found is None:
        # Users name their axes so, too: a cell of a layer and a head is that head's output.
        is_of_heads = {*result.dims} == {"layer", "head"} and "layers[0].attn.z" in components
        return "layers[*].attn.heads[*].z" if is_of_heads else None
    name = parse_name(found)
    if name.axis is None and "head" in {*result.dims, *result.coords} and "attn" in name.words:
        name = replace(name, words=(*name.words[:-1], "heads", name.words[-1]), members=slice(None))
    expert = _chosen(result, "expert")
    return str(name if expert is None else replace(name, members=expert))


def _items(side: Side, paths: Mapping[str, str], result: DataArray, components: Components) -> list[Item] | None:
    """Returns what each row or column selects; `None` if that is nothing."""
    if side.name in _NUMBERS and all(map(_is_number, side.values)):
        return [item_of(None, **{side.name: int(value)}) for value in side.values]
    if side.name == "component":
        return [item_of(_component(result, components, value)) for value in side.values]
    if side.name == "expert" and (name := _component(result, components, _chosen(result, "component"))) is not None:
        return [item_of(str(replace(parse_name(name), members=value))) for value in side.values]
    if side.name == "receiver" or not all(isinstance(value, str) for value in side.values):
        return None  # of an edge, the sender is selected
    found = [item_of(paths.get(value, value)) for value in side.values]
    is_known = [value in paths or is_component_name(value) for value in side.values]
    return found if all(is_known) or side.name in ("path", "node") else None


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0
