"""What `%graphpatch ls` shows: the children of a graph or container, one level deep."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.inspection.locations import Location
from graphpatch_notebook.inspection.resolution import graph_class
from graphpatch_notebook.inspection.tree import unused_modules, used_modules
from graphpatch_notebook.notebook.display.labels import op_label, spec_label
from graphpatch_notebook.notebook.display.tables import Column, Table
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, ValueSpec

_COLUMNS = (
    Column("name", is_whole=True),
    Column("what", "graph"),
    Column("value", "tensor"),
    Column("", "note", is_cut=True),
)


@dataclass(frozen=True, slots=True)
class Child:
    """A child of a place in a capture, or a submodule of its module that the example did not reach.

    Attributes:
        path: The path from the root; empty for a submodule that was not reached.
        name: Its name, as a path writes it; of a submodule that was not reached, its attribute path.
        what: The class of the graph module, the name of the torch function, or the kind of node.
        value: What was recorded of the value; of a graph, the class of its module.
        remark: What else there is to say: patched, opaque, unused.
    """

    path: str
    name: str
    what: str
    value: str
    remark: str


class Listing(Table[Child]):
    """The children of a place, as a table; the place itself, where it is a value without children."""

    def __init__(self, place: Location, patched_paths: Collection[str]) -> None:
        children = [_child(place.below(name), patched_paths) for name in place.children()]
        if place.graph is not None:
            children += _unused(place.graph)
        elif not children:
            children = [_child(place, patched_paths)]
        super().__init__(
            _COLUMNS,
            children,
            lambda child: [child.name, child.what, child.value, child.remark],
            title=_title(place),
            empty="nothing in it",
            how_to_narrow=f"list({place.python()}) has them all",
            max_rows=200,
        )


def listing(pg: PatchableGraph, path: str = "", patched_paths: Collection[str] = ()) -> Listing:
    """Returns the children of what stands at `path`; plumbing is left out.

    Args:
        pg: The graph.
        path: The path of a graph, a node or a value inside a container; empty for the root graph.
        patched_paths: The paths to mark as patched.

    Raises:
        UnknownChildError: There is no such path; the message names the nearest.

    Example:
        >>> import torch
        >>> listing(PatchableGraph(torch.nn.ReLU(), torch.ones(2)), patched_paths=["relu"])
        <root>: CompiledGraphModule of ReLU
        name    what    value
        input   input   [2] f32
        relu    relu    [2] f32  patched
        output  output  [2] f32
    """
    return Listing(Location.of_root(pg.nodes.root).at(path), patched_paths)


def _title(place: Location) -> str:
    if place.graph is not None:
        return f"{place.path or '<root>'}: {graph_class(place.graph)} of {type(place.graph.module).__name__}"
    return f"{place.path}: {place.spec}"


def _child(place: Location, patched_paths: Collection[str]) -> Child:
    remarks = [*_patched(place, patched_paths), *_state(place)]
    if place.graph is not None:
        what, value = graph_class(place.graph), type(place.graph.module).__name__
    else:
        assert place.node is not None  # only the root has no node, and it is a graph
        what = "" if place.dig else op_label(place.node.kind, place.node.op)
        value = "" if place.spec is None or _is_none(place.spec) else spec_label(place.spec)
    return Child(place.path, place.last_name, what, value, "; ".join(remarks))


def _patched(place: Location, patched_paths: Collection[str]) -> Iterator[str]:
    if place.path in patched_paths:
        yield "patched"
    inside = (f"{place.path}.", f"{place.path}|")
    if count := sum(path.startswith(inside) for path in patched_paths):
        yield f"{count} patched inside"


def _state(place: Location) -> Iterator[str]:
    if place.graph is not None and place.graph.opaque_reason is not None:
        yield f"opaque: {place.graph.opaque_reason}"
    if place.node is not None and place.node.kind == "input" and _is_none(place.spec):
        yield "not given in the example"
    elif isinstance(place.spec, ContainerSpec) and not place.spec.children:
        yield "empty in the example"


def _is_none(spec: ValueSpec | None) -> bool:
    return isinstance(spec, ScalarSpec) and spec.value is None


def _unused(frame: Frame) -> Iterator[Child]:
    """Yields the submodules of the frame's module that the example did not reach, the outermost of each."""
    root = frame
    while root.parent is not None:
        root = root.parent
    used = used_modules(root)
    for names, module in unused_modules(frame.module, used):
        yield Child("", ".".join(names), "UnusedModule", type(module).__name__, "the example did not reach it")
