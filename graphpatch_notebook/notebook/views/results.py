"""The heatmap of a result: the widget, the cells that the front end draws, and static HTML.

front end  -- cell ------>  checked; sets `selected`
`selected` -- cell ------>  front end

The front end is js/src/plots/result_heatmap.ts. A saved notebook, nbconvert and GitHub show the static HTML. It is
a plain table without script, style sheet or style attribute; the live widget hides it by its classes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import traitlets
from msgspec import Meta

from graphpatch_notebook.components import Components
from graphpatch_notebook.components.names import parse_name
from graphpatch_notebook.experiments.circuits.attribution_graph import AttributionGraph
from graphpatch_notebook.experiments.circuits.circuit import READABLE, Circuit, summary_of
from graphpatch_notebook.experiments.datasets.feature_pages import page_html
from graphpatch_notebook.experiments.grids import FloatArray, Grid, Scale, Side, shown_labels, tick_text
from graphpatch_notebook.experiments.results import component_of
from graphpatch_notebook.notebook.display.displayed_widget import DisplayedWidget
from graphpatch_notebook.notebook.display.tables import escaped
from graphpatch_notebook.notebook.messages import Item, Natural
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.notebook.views.linked import LinkedView, session_for_view
from graphpatch_notebook.notebook.views.selection import item_of
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.paths import is_component_name

if TYPE_CHECKING:
    from xarray import DataArray

    from graphpatch_notebook.experiments.datasets.feature_pages import FeaturePage


class ResultHeatmap(DisplayedWidget):
    """An interactive heatmap of a result, which `show_heatmap` returns.

    In a notebook, it displays as a widget, with a table that replaces it without a kernel. Elsewhere, it is one line.

    Args:
        grid: The result.
        title: The title.
        is_upward: Whether the first row is at the bottom.

    Attributes:
        selected: The coordinates of the cell that was clicked, in the order of the heatmap's rows and columns, such
            as `("transformer.h_3.mlp.output", 5)`; `None` if no cell is selected. Use `observe` to react to clicks.

    Example:
        >>> import xarray
        >>> from graphpatch_notebook.experiments import show_heatmap
        >>> result = xarray.DataArray([[1.0, 2.0]], {"path": ["h_0"]}, ["path", "position"], name="effect")
        >>> heatmap = show_heatmap(result)
        >>> heatmap
        <Heatmap of effect, 1 x 2 (path x position), from 1 to 2>
        >>> heatmap.cell = [0, 1]  # what a click does
        >>> heatmap.selected
        ('h_0', 1)
        >>> heatmap.close()
    """

    heatmap = traitlets.Dict(read_only=True).tag(sync=True, echo_update=False)
    values = traitlets.Bytes(read_only=True).tag(sync=True, echo_update=False)
    cell: Any = traitlets.List(traitlets.Int(), default_value=None, allow_none=True).tag(sync=True)
    selected: Any = traitlets.Tuple(
        traitlets.Any(), traitlets.Any(), default_value=None, allow_none=True, read_only=True
    )

    FRONT_END: ClassVar[Mapping[str, Any]] = {"cell": tuple[Natural, Natural] | None}

    def __init__(self, grid: Grid, title: str | None = None, *, is_upward: bool = True) -> None:
        self._keep(grid, title, is_upward=is_upward)
        super().__init__()

    def _keep(self, grid: Grid, title: str | None, *, is_upward: bool) -> None:
        """Sets what is shown."""
        self._cells = ResultCells.of_grid(grid, is_upward=is_upward)
        self._title = title
        self.set_trait("heatmap", self._cells.state(title, self._own_id))
        self.set_trait("values", self._cells.packed())

    @property
    def grid(self) -> Grid:
        """The displayed result."""
        return self._cells.grid

    # -- the selected cell ---------------------------------------------------------------------------------------------

    def _check(self, name: str, value: Any) -> None:
        super()._check(name, value)
        rows, columns = self._cells.values.shape
        if name == "cell" and value is not None and not (value[0] < rows and value[1] < columns):
            raise traitlets.TraitError(f"a cell is [row, column] of {rows} x {columns}, but got {value!r}")

    _checked_cell = traitlets.validate("cell")(DisplayedWidget.checked)

    @traitlets.observe("cell")
    def _follow_cell(self, change: Any) -> None:
        chosen = None
        if change["new"] is not None:
            row, column = self._cells.places[tuple(change["new"])]
            chosen = self.grid.rows.values[row], self.grid.columns.values[column]
        self.set_trait("selected", chosen)

    @property
    def _sides(self) -> tuple[Side, Side]:
        return self.grid.rows, self.grid.columns

    # -- display ---------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<Heatmap of {summary(self.grid)}>"

    def _static_html(self) -> str:
        return static_heatmap(self.grid, self._title, is_upward=self._cells.is_upward)


# --------------------------------------------------------------------------------------------------------------------
# The cells that the front end draws


SIDE = 256
"""The maximum number of rows and columns that are sent."""
_LARGEST = 1e30
"""The front end treats larger numbers as the fill value of a mask."""


@dataclass(frozen=True)
class ResultCells:
    """The cells of a heatmap, from the top row down. Large grids are reduced to blocks.

    Attributes:
        grid: The grid.
        values: The value of each cell, of shape (rows, columns). For a block, the value farthest from the center.
        places: The row and the column in the grid of each value, of shape (rows, columns, 2).
        block: The number of rows and columns of the grid in one cell.
        is_upward: Whether the first row of the grid is at the bottom.
    """

    grid: Grid
    values: FloatArray
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

    def packed(self) -> bytes:
        """Returns the values as little-endian float32 in row-major order."""
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
            return state | {"values": values, "labels": None, "tokens": None}
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


def _strongest(strength: FloatArray, block: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Returns the position of the largest value of each block, of shape (rows, columns, 2)."""
    rows, columns = (math.ceil(size / length) for size, length in zip(strength.shape, block, strict=True))
    padding = [(0, rows * block[0] - strength.shape[0]), (0, columns * block[1] - strength.shape[1])]
    padded = np.pad(strength, padding, constant_values=-np.inf)
    blocks = padded.reshape(rows, block[0], columns, block[1]).transpose(0, 2, 1, 3).reshape(rows, columns, -1)
    place = np.stack(np.unravel_index(blocks.argmax(-1), block), axis=-1)
    corners = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1) * np.array(block)
    found: np.ndarray[Any, np.dtype[np.intp]] = corners + place
    return found


# --------------------------------------------------------------------------------------------------------------------
# The heatmap as HTML, without a kernel


MOST_BYTES = 30_000
_MOST_CELLS = 600
_STRONGEST = 30


def static_heatmap(grid: Grid, title: str | None, *, is_upward: bool) -> str:
    """Returns HTML of up to about `MOST_BYTES`: all cells of a small result, or the strongest cells of a large one."""
    name = f"{title}: {summary(grid)}" if title else summary(grid)
    head = f"<p><strong>{escaped(name)}</strong> (a picture of the heatmap; for the live one, run the cell)</p>"
    if grid.values.size <= _MOST_CELLS:
        table = "\n".join([head, *_table(grid, is_upward=is_upward)])
        if len(table.encode()) <= MOST_BYTES:
            return table
    return "\n".join([head, *_list(grid)])


def summary(grid: Grid) -> str:
    """Returns a description of a result in one line."""
    rows, columns = grid.values.shape
    size = f"{rows:,} x {columns:,} ({grid.rows.name} x {grid.columns.name})"
    found = grid.values[~grid.is_missing]
    if not len(found):
        return f"{grid.scale.name}, {size}, no finite number"
    return f"{grid.scale.name}, {size}, from {found.min():.4g} to {found.max():.4g}"


def _table(grid: Grid, *, is_upward: bool) -> Iterator[str]:
    order = range(len(grid.values))
    rows, columns = ([escaped(label) for label in shown_labels(side)] for side in (grid.rows, grid.columns))
    head = "".join(f"<th>{column}</th>" for column in columns)
    yield f"<table>\n<tr><th>{escaped(f'{grid.rows.title} / {grid.columns.title}')}</th>{head}</tr>"
    for row in reversed(order) if is_upward else order:
        cells = "".join("<td>–</td>" if np.isnan(value) else f"<td>{value:.3g}</td>" for value in grid.values[row])
        yield f"<tr><th>{rows[row]}</th>{cells}</tr>"
    yield "</table>"


def _list(grid: Grid) -> Iterator[str]:
    center = 0.0 if grid.scale.center is None else grid.scale.center.value
    strength = np.where(grid.is_missing, -1.0, np.abs(grid.values - center))
    order = np.argsort(-strength, axis=None, kind="stable")[: min(_STRONGEST, int((strength >= 0).sum()))]
    yield f"<p>The {len(order)} cells farthest from {escaped(str(grid.scale.center or 0))}:</p>\n<ol>"
    for place in order:
        row, column = np.unravel_index(place, grid.values.shape)
        where = f"{_place(grid.rows, int(row))}, {_place(grid.columns, int(column))}"
        yield f"<li><code>{escaped(where)}</code>: {grid.values[row, column]:.4g}</li>"
    yield "</ol>"


def _place(side: Side, index: int) -> str:
    value = f"{side.name} {side.values[index]}"
    return f"{value} ({tick_text(side.labels[index], is_token=True)})" if side.is_tokens else value


# --------------------------------------------------------------------------------------------------------------------
# The heatmap of a result that takes part in the selection of a graph: a cell is a layer, a head, a position


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


# --------------------------------------------------------------------------------------------------------------------
# The picture of a circuit: the widget, what the front end draws, and static HTML


_MOST_EDGES = 300
"""No more edges than this are sent, the strongest."""
_LISTED = 20


class GroupedView(DisplayedWidget):
    """A view with the picture of a circuit, in which nodes of an attribution graph become groups."""

    groups: Any = traitlets.Dict().tag(sync=True)

    GROUPS: ClassVar[Mapping[str, Any]] = {"groups": dict[str, Annotated[list[Natural], Meta(min_length=1)]]}
    _circuit: Any = None

    def _draw(self) -> None:
        """Sends the picture again."""
        raise NotImplementedError

    def show(self, circuit: Circuit | AttributionGraph | None) -> None:
        """Shows a circuit, with its groups."""
        self._circuit = circuit
        with self.hold_sync():
            groups = circuit.groups if isinstance(circuit, AttributionGraph) else {}
            self.groups = {name: list(members) for name, members in groups.items()}
            self._draw()

    def _check(self, name: str, value: Any) -> None:
        super()._check(name, value)
        if name == "groups" and value:
            count = len(self._circuit.nodes) if isinstance(self._circuit, AttributionGraph) else 0
            members = [member for own in value.values() for member in own]
            if max(members) >= count or len({*members}) < len(members):
                raise traitlets.TraitError("groups are numbers of nodes of an attribution graph, each in one group")

    _checked_groups = traitlets.validate("groups")(DisplayedWidget.checked)

    @traitlets.observe("groups")
    def _follow_groups(self, change: Any) -> None:
        if isinstance(self._circuit, AttributionGraph):
            self._circuit = replace(self._circuit, groups={name: tuple(own) for name, own in change["new"].items()})
            self._draw()


class CircuitView(GroupedView):
    """An interactive picture of a circuit, which `show_circuit` returns.

    In a notebook, it displays as a widget, with a picture that replaces it without a kernel. Elsewhere, it is one line.

    Args:
        circuit: The circuit.
        pages: Pages of features by their names, which their nodes open when they are pinned.

    Attributes:
        selected: What is pinned: the name of a component, such as `"layers[1].attn.heads[2].z"`, or the sender and
            receiver of an edge, as a tuple; `None` if nothing is. In circuits with positions, a tuple that ends with
            the position. Use `observe` to react to clicks.
        groups: The groups of an attribution graph, those that were made in the view, too (select nodes with Shift and
            clicks): `graph.grouped(**view.groups)`.

    Example:
        >>> from graphpatch_notebook.experiments import Circuit, Edge, show_circuit
        >>> feeds = {"layers[0].mlp": ("layers[0].mlp_out",), "@logits": ()}
        >>> edges = (Edge("@embed", "layers[0].mlp", 2.0), Edge("layers[0].mlp_out", "@logits", 1.5))
        >>> view = show_circuit(Circuit(edges, feeds, candidates=3, clean=2.0, corrupted=0.0))
        >>> view
        <CircuitView of 2 of 3 edges>
        >>> view.close()
    """

    circuit = traitlets.Dict(read_only=True).tag(sync=True, echo_update=False)
    model_id = traitlets.Unicode(read_only=True).tag(sync=True, echo_update=False)
    pinned: Any = traitlets.List(default_value=None, allow_none=True).tag(sync=True)
    selected: Any = traitlets.Any(default_value=None, read_only=True)

    FRONT_END: ClassVar[Mapping[str, Any]] = {**GroupedView.GROUPS, "pinned": tuple[str, Natural] | None}

    def __init__(self, circuit: Circuit | AttributionGraph, pages: Mapping[str, FeaturePage] | None = None) -> None:
        self._pages = pages or {}
        self.show(circuit)
        self.set_trait("model_id", self._own_id)
        super().__init__()

    def _draw(self) -> None:
        state = picture_of(self._circuit, self._pages)
        self.pinned = None  # its number is that of another node
        self.set_trait("circuit", state)
        self._names: dict[Any, Any] = {
            **{("node", number): _key(node, "name") for number, node in enumerate(state["nodes"])},
            **{("edge", number): _key(edge, "sender", "receiver") for number, edge in enumerate(state["edges"])},
        }

    # -- what is pinned ------------------------------------------------------------------------------------------------

    def _check(self, name: str, value: Any) -> None:
        super()._check(name, value)
        if name == "pinned" and value is not None and tuple(value) not in self._names:
            raise traitlets.TraitError(f"{value!r} is not in the picture")

    _checked_pinned = traitlets.validate("pinned")(DisplayedWidget.checked)

    @traitlets.observe("pinned")
    def _follow_pinned(self, change: Any) -> None:
        self.set_trait("selected", self._names.get(tuple(change["new"] or ())))

    # -- display -------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<CircuitView of {self._circuit.summary}>"

    def _static_html(self) -> str:
        return static_circuit(self._circuit)


def _key(item: dict[str, Any], *names: str) -> Any:
    """Returns what selects a node or an edge: a name, or a tuple."""
    words = tuple(item[name] for name in names)
    if item["position"] is not None:
        return (*words, item["position"])
    return words if len(words) > 1 else words[0]


def picture_of(
    circuit: Circuit | AttributionGraph,
    pages: Mapping[str, FeaturePage],
    row_of: Callable[[str], int | None] = lambda _: None,
) -> dict[str, Any]:
    """Returns the `CircuitPicture` of the front end."""
    picture = circuit.strongest(_MOST_EDGES).picture()
    rows = [row_of(node["name"]) for node in picture["nodes"]]
    if isinstance(circuit, AttributionGraph):
        own = {(node.name, node.position): [number] for number, node in enumerate(circuit.nodes)}
        for node in picture["nodes"]:
            node["members"] = own.get((node["name"], node["position"])) or list(circuit.groups[node["name"]])
    return {
        **picture,
        "nodes": [
            {**node, "row": -1 if row is None else row}
            | ({"page": page_html(pages[node["name"]])} if node["name"] in pages else {})
            for node, row in zip(picture["nodes"], rows, strict=True)
        ],
        "first": min(READABLE, len(picture["edges"])),
        "summary": summary_of(circuit, len(picture["edges"])),
        "python": circuit.to_python(),
        "json": circuit.to_json(),
    }


def _at(edge: Mapping[str, Any]) -> str:
    return "" if edge["position"] is None else f" at {edge['position']}"


def static_circuit(circuit: Circuit | AttributionGraph) -> str:
    """Returns HTML with the picture of a circuit, and a list of its strongest edges, which pages may show instead."""
    picture = base64.b64encode(circuit.to_svg(edges=READABLE).encode()).decode()
    edges = circuit.strongest(_LISTED).picture()["edges"]
    rows = "".join(
        f"<li><code>{escaped(edge['sender'])}</code> → <code>{escaped(edge['receiver'])}</code>"
        f"{_at(edge)}: {edge['score']:+.3g}</li>\n"
        for edge in edges
    )
    return (
        f"<p><strong>Circuit: {escaped(circuit.summary)}</strong> (a picture; for the live one, run the cell)</p>\n"
        f'<img alt="The circuit as a graph" src="data:image/svg+xml;base64,{picture}">\n'
        f"<details><summary>The strongest {len(edges)} edges</summary>\n<ol>\n{rows}</ol>\n</details>"
    )
