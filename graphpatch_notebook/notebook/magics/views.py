"""The commands that show something, and change no chosen patch: the tree, lists, `find`, code, shapes and views."""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import ChosenPatchError, ExperimentError, GraphError, SessionError, UnknownPathError
from graphpatch_notebook.inspection.locations import Location
from graphpatch_notebook.inspection.node_path import NodePath, ValueShapes, location_of
from graphpatch_notebook.inspection.resolution import graph_class
from graphpatch_notebook.inspection.source_text import CodeText
from graphpatch_notebook.inspection.tree import unused_modules, used_modules
from graphpatch_notebook.notebook.display.labels import op_label, spec_label
from graphpatch_notebook.notebook.display.tables import Column, Table
from graphpatch_notebook.notebook.magics.command_line import TypedPath
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import undefined
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import ActiveGraph, Workspace, counted
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, ValueSpec

if TYPE_CHECKING:
    from graphpatch_notebook.notebook.browser.widget import Browser
    from graphpatch_notebook.notebook.display.tables import Table
    from graphpatch_notebook.notebook.search.search import FoundNodes
    from graphpatch_notebook.notebook.views.attention import AttentionView
    from graphpatch_notebook.notebook.views.generation import GenerationView
    from graphpatch_notebook.notebook.views.lens import LensView


def status(workspace: Workspace) -> Table[ChosenPatch]:
    """Returns the active graph and the chosen patches as a table, with suggestions for the next commands."""
    active = workspace.find()
    if active is None:
        model = next(iter(workspace.models()), "MODEL")
        how = f"create one: %graphpatch wrap pg = {model}(EXAMPLE INPUTS); more: %graphpatch help"
        return Table((), (), lambda _: [], title="no PatchableGraph yet", empty=how)
    notes = [
        "run a cell with them: %%graphpatch; show as Python: %graphpatch export; all commands: %graphpatch help"
        if active.session.chosen.patches
        else "find nodes: %graphpatch show, find QUERY; patch: %graphpatch zero PATH; all commands: %graphpatch help"
    ]
    others = [name for name, graph in workspace.graphs().items() if graph is not active.graph]
    if others:
        notes.append(f"other graphs: {', '.join(others)}; %graphpatch use NAME")
    return _chosen_table(active, notes)


def listed(workspace: Workspace, _: Namespace) -> Table[ChosenPatch]:
    """Returns the chosen patches as a table."""
    return _chosen_table(workspace.current(), [])


_CHOSEN = (
    Column("#", "note"),
    Column("kind", "graph"),
    Column("path", "name", is_whole=True),
    Column("value", "number", is_cut=True),
    Column("shape", "tensor"),
    Column("", "note"),
)


def _chosen_table(active: ActiveGraph, notes: list[str]) -> Table[ChosenPatch]:
    patches = active.session.chosen.patches
    files = dict.fromkeys(patch.untrusted for patch in patches if patch.untrusted)
    notes += [f"code from {file.name!r} does not run until you trust the file: {file.repair}" for file in files]

    def cells(patch: ChosenPatch) -> list[str]:
        off = [] if patch.is_enabled else ["off"]
        remarks = [*off, *(["not trusted"] if patch.untrusted else []), *patch.options()]
        value = patch.value or (f"as {patch.name}" if patch.name else "")
        return [str(patch.number), patch.kind, patch.place, value, _shape(active.session, patch), " ".join(remarks)]

    title = f"{active.title}, {counted(len(patches))} chosen"
    return Table(_CHOSEN, patches, cells, title=title, empty="no patch is chosen", notes=notes)


def _shape(session: Session, patch: ChosenPatch) -> str:
    try:
        sliced = session.check(patch, ()).sliced
    except ChosenPatchError:  # the graph was edited since
        return "?"
    return "" if sliced is None else str(sliced)


# --------------------------------------------------------------------------------------------------------------------
# The graph


def show(workspace: Workspace, args: Namespace) -> Browser:
    """Returns a browser opened at a path. Without widgets, it displays as the tree below this path."""
    from graphpatch_notebook.notebook.browser.widget import browser_of

    graph, options = _view(workspace, args)
    place = location_of(_place(workspace, args.path))
    with _problems_as_messages():
        return browser_of(graph, workspace, place.path, **options)


def attention(workspace: Workspace, args: Namespace) -> AttentionView:
    """Returns the attention view of the active graph."""
    from graphpatch_notebook.notebook.views.attention import attention_of

    graph, options = _view(workspace, args)
    with _problems_as_messages():
        return attention_of(graph, workspace, **options)


def lens(workspace: Workspace, args: Namespace) -> LensView:
    """Returns a lens view of the active graph."""
    from graphpatch_notebook.notebook.views.lens import lens_of

    graph, options = _view(workspace, args, "tokens")
    with _problems_as_messages():
        return lens_of(graph, workspace, target=_token(args.token), stream=args.stream, **options)


def generation(workspace: Workspace, args: Namespace) -> GenerationView:
    """Returns a view of the tokens that the active graph generates."""
    from graphpatch_notebook.notebook.views.generation import generation_of

    graph, options = _view(workspace, args, "tokens")
    with _problems_as_messages():
        return generation_of(graph, workspace, max_new_tokens=args.count, **options)


def _view(workspace: Workspace, args: Namespace, key: str = "tokenizer") -> tuple[PatchableGraph, dict[str, Any]]:
    """Returns the active graph, and the options that each view has: a tokenizer, under `key`, and typed inputs."""
    active, namespace = workspace.current(), workspace.namespace
    if args.tokenizer is not None and args.tokenizer not in namespace:
        raise SessionError(f"--tokenizer takes a variable: {undefined(args.tokenizer, namespace)}")
    if args.inputs is not None:
        replace(active.session.origin, arguments=args.inputs)  # raises an error if they are not valid
    return active.graph, {"typed": args.inputs, key: namespace.get(args.tokenizer)}


@contextmanager
def _problems_as_messages() -> Iterator[None]:
    """Shows errors about the user's request without their traceback."""
    try:
        yield
    except (GraphError, ExperimentError, TypeError) as problem:
        raise SessionError(str(problem)) from None


def _token(text: str | None) -> int | str | None:
    """Returns the token that was typed: a number, or a text in quotes."""
    if text is None:
        return None
    token: object = None
    with suppress(ValueError, SyntaxError):
        token = ast.literal_eval(text)
    if not isinstance(token, (int, str)) or isinstance(token, bool):
        raise SessionError(f"TOKEN is a number, or a text in quotes, not {text!r}")
    return token


def ls(workspace: Workspace, args: Namespace) -> Listing:
    """Returns a table of the contents of a graph."""
    active = workspace.current()
    return Listing(location_of(_place(workspace, args.path)), _patched(active))


def find(workspace: Workspace, args: Namespace) -> FoundNodes:
    """Returns a table of the nodes that match a query."""
    from graphpatch_notebook.notebook.search import search

    active = workspace.current()
    try:
        return search.find(active.graph, " ".join(args.text), _patched(active))
    except ValueError as problem:
        raise SessionError(str(problem)) from None


def _patched(active: ActiveGraph) -> list[str]:
    return [patch.path for patch in active.session.chosen.enabled]


def code(workspace: Workspace, args: Namespace) -> CodeText:
    """Returns the code of a graph, or the source lines that compute a node."""
    return _place(workspace, args.path)._code


def shape(workspace: Workspace, args: Namespace) -> ValueShapes | tuple[int, ...] | None:
    """Returns the recorded shape at a path, or the shape of its slice."""
    session = workspace.current().session
    place = TypedPath.parse(args.path or "", captured(session.graph).root)
    if place.slice is None:
        return _place(workspace, args.path)._shape
    check = session.check(ChosenPatch(place.path, "zero", slice=place.slice))
    if check.warning:
        print(f"warning: {check.warning}")
    return check.sliced


def _place(workspace: Workspace, word: str | None) -> NodePath:
    root = workspace.current().graph.graph
    if word in (None, "", "<root>"):
        return root
    place = TypedPath.parse(str(word), captured(workspace.current().graph).root)
    if place.slice is not None:
        raise SessionError(f"this command does not take a slice: {word!r}; write only the path")
    try:
        return root[place.path]
    except UnknownPathError as problem:
        raise SessionError(str(problem)) from None


# --------------------------------------------------------------------------------------------------------------------
# The table of %graphpatch ls


_COLUMNS = (
    Column("name", is_whole=True),
    Column("what", "graph"),
    Column("value", "tensor"),
    Column("", "note", is_cut=True),
)


@dataclass(frozen=True, slots=True)
class Child:
    """One row: a child of a graph, node or container, or a submodule that did not run on the example."""

    path: str  # from the root; empty for a submodule that did not run
    name: str
    what: str  # the class of a graph, the torch function, or the kind
    value: str  # for a graph, the class of its module
    remark: str  # patched, opaque, unused


class Listing(Table[Child]):
    """A table of the children of a graph, node or container. A value without children is its own single row."""

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
            empty="no children",
            how_to_narrow=f"list({place.python()}) returns all of them",
            max_rows=200,
        )


def listing(pg: PatchableGraph, path: str = "", patched_paths: Collection[str] = ()) -> Listing:
    """Returns the children of the graph, node or container at `path`, without values that only carry sizes.

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
    remarks = [*_patches_in(place, patched_paths), *_state(place)]
    if place.graph is not None:
        what, value = graph_class(place.graph), type(place.graph.module).__name__
    else:
        assert place.node is not None  # only the root has no node, and it is a graph
        what = "" if place.dig else op_label(place.node.kind, place.node.op)
        value = "" if place.spec is None or _is_none(place.spec) else spec_label(place.spec)
    return Child(place.path, place.last_name, what, value, "; ".join(remarks))


def _patches_in(place: Location, patched_paths: Collection[str]) -> Iterator[str]:
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
    """Yields the submodules of the frame's module that did not run on the example, without their own submodules."""
    root = frame
    while root.parent is not None:
        root = root.parent
    used = used_modules(root)
    for names, module in unused_modules(frame.module, used):
        yield Child("", ".".join(names), "UnusedModule", type(module).__name__, "did not run on the example")
