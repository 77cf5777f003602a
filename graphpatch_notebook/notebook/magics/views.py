"""The commands that look. They return what displays well, and change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphpatch_notebook.errors import ChosenPatchError, GraphError, SessionError, UnknownPathError
from graphpatch_notebook.inspection.node_path import NodePath, Shapes, place_of
from graphpatch_notebook.inspection.source_text import CodeText
from graphpatch_notebook.notebook.magics.choosing import refuse_arguments
from graphpatch_notebook.notebook.magics.command_line import split_options, without_comment, words
from graphpatch_notebook.notebook.magics.typed_paths import cut_place
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import undefined
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import ActiveGraph, Workspace, counted
from graphpatch_notebook.patchable_graph import captured

if TYPE_CHECKING:
    from graphpatch_notebook.notebook.browser.widget import Browser
    from graphpatch_notebook.notebook.display.tables import Table
    from graphpatch_notebook.notebook.magics.listing import Listing
    from graphpatch_notebook.notebook.search.search import FoundNodes


def status(workspace: Workspace) -> Table[ChosenPatch]:
    """Returns the active graph and the chosen patches, and how to go on."""
    active = workspace.find()
    if active is None:
        model = next(iter(workspace.models()), "MODEL")
        how = f"make one: %graphpatch wrap pg = {model}(EXAMPLE INPUTS); more: %graphpatch help"
        return _table((), "no PatchableGraph yet", how, [])
    chosen = active.session.chosen.patches
    notes = [
        "run a cell with them: %%graphpatch; as Python: %graphpatch export; all commands: %graphpatch help"
        if chosen
        else "look: %graphpatch show, find QUERY; choose: %graphpatch zero PATH; all commands: %graphpatch help"
    ]
    others = [name for name, graph in workspace.graphs().items() if graph is not active.graph]
    if others:
        notes.append(f"other graphs: {', '.join(others)}; %graphpatch use NAME")
    return _chosen_table(active, notes)


def listed(workspace: Workspace, text: str) -> Table[ChosenPatch]:
    """Returns the chosen patches, as a table."""
    refuse_arguments(text, "list")
    return _chosen_table(workspace.current(), [])


def _chosen_table(active: ActiveGraph, notes: list[str]) -> Table[ChosenPatch]:
    patches = active.session.chosen.patches
    title = f"{active.title}, {counted(len(patches))} chosen"
    files = dict.fromkeys(patch.untrusted for patch in patches if patch.untrusted)
    notes += [f"code from {file.name!r} is not run until you trust the file: {file.repair}" for file in files]
    return _table(patches, title, "no patch is chosen", notes, active.session)


def _table(
    patches: tuple[ChosenPatch, ...], title: str, empty: str, notes: list[str], session: Session | None = None
) -> Table[ChosenPatch]:
    from graphpatch_notebook.notebook.display.tables import Column, Table

    columns = [
        Column("#", "note"),
        Column("kind", "graph"),
        Column("path", "name", is_whole=True),
        Column("value", "number", is_cut=True),
        Column("shape", "tensor"),
        Column("", "note"),
    ]

    def cells(patch: ChosenPatch) -> list[str]:
        assert session is not None
        slice_text = "" if patch.slice is None else f"[{patch.slice}]"
        off = [] if patch.is_enabled else ["off"]
        notes = [*off, *(["not trusted"] if patch.untrusted else []), *patch.options()]
        value = patch.value or (f"as {patch.name}" if patch.name else "")
        return [str(patch.number), patch.kind, patch.path + slice_text, value, _shape(session, patch), " ".join(notes)]

    return Table(columns, patches, cells, title=title, empty=empty, notes=notes)


def _shape(session: Session, patch: ChosenPatch) -> str:
    try:
        sliced = session.check(patch, ()).sliced
    except ChosenPatchError:  # the graph was edited since
        return "?"
    return "" if sliced is None else str(sliced)


# --------------------------------------------------------------------------------------------------------------------
# The graph


def show(workspace: Workspace, text: str) -> Browser:
    """Returns a browser, opened at a path; where there are no widgets, it shows as the tree below that."""
    from graphpatch_notebook.notebook.browser.browsing import browser_of

    options, path = split_options(_without_note(text), {"--tokenizer": True, "--inputs": True})
    active = workspace.current()
    place = place_of(_place(workspace, path))
    tokenizer = None
    if (name := options.get("--tokenizer")) is not None:
        if name not in workspace.namespace:
            raise SessionError(f"--tokenizer takes the name of a variable: {undefined(name, workspace.namespace)}")
        tokenizer = workspace.namespace[name]
    if (typed := options.get("--inputs")) is not None:
        replace(active.session.origin, arguments=typed)  # says what is wrong with them
    try:
        return browser_of(active.graph, workspace, place.path, typed=typed, tokenizer=tokenizer)
    except (GraphError, TypeError) as problem:
        raise SessionError(str(problem)) from None


def _without_note(text: str) -> str:
    """Returns a line without the comment at its end; a path may hold the sign that one begins with."""
    found = (start for start, word in words(text) if word.startswith("#") and not word[1:2].isdigit())
    return text[: next(found, len(text))]


def ls(workspace: Workspace, text: str) -> Listing:
    """Returns a table of what is in a graph."""
    from graphpatch_notebook.notebook.magics.listing import listing

    active = workspace.current()
    path = _path(text, active)
    try:
        return listing(active.graph, path, _patched(active))
    except UnknownPathError as problem:
        raise SessionError(str(problem)) from None


def find(workspace: Workspace, text: str) -> FoundNodes:
    """Returns a table of the nodes that a query finds."""
    from graphpatch_notebook.notebook.search import search

    active = workspace.current()
    try:
        return search.find(active.graph, text.partition(" # ")[0].strip(), _patched(active))
    except ValueError as problem:
        raise SessionError(str(problem)) from None


def _patched(active: ActiveGraph) -> list[str]:
    return [patch.path for patch in active.session.chosen.enabled]


def code(workspace: Workspace, text: str) -> CodeText:
    """Returns the code of a graph, or the user's lines that made the value of a node."""
    return _place(workspace, text)._code


def shape(workspace: Workspace, text: str) -> Shapes | tuple[int, ...]:
    """Returns the recorded shape at a path, or of the part that a slice takes."""
    session = workspace.current().session
    place = cut_place(without_comment(text), captured(session.graph).root)
    if place.slice is None:
        return _place(workspace, text)._shape
    check = session.check(ChosenPatch(place.path, "zero", slice=place.slice))
    if check.warning:
        print(f"warning: {check.warning}")
    return check.sliced


def _place(workspace: Workspace, text: str) -> NodePath:
    active = workspace.current()
    root, path = active.graph.graph, _path(text, active)
    if path in ("", "<root>"):
        return root
    try:
        return root[path]
    except UnknownPathError as problem:
        raise SessionError(str(problem)) from None


def _path(text: str, active: ActiveGraph) -> str:
    place = cut_place(text, captured(active.graph).root)
    if place.slice is not None:
        raise SessionError(f"a slice means nothing here: {text.strip()!r}; give the path alone")
    if without_comment(place.rest):
        raise SessionError(f"{place.rest!r} is too much: one path is needed")
    return "" if place.path.startswith("#") else place.path
