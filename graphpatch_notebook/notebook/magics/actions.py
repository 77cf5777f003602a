"""What the commands of `%graphpatch` do: each function takes the workspace and the parsed arguments.

Those that change something print what they changed; those that show something return it.
"""

from __future__ import annotations

import ast
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from graphpatch_notebook.components.names import is_component_name, parse_name
from graphpatch_notebook.errors import (
    CaptureError,
    ChosenPatchError,
    ExperimentError,
    GraphError,
    SessionError,
    SessionFileError,
    UnknownPathError,
)
from graphpatch_notebook.inspection.node_path import CodeText, Location, NodePath, location_of
from graphpatch_notebook.inspection.resolution import Unresolvable, graph_class, resolve
from graphpatch_notebook.notebook.display.progress import capture_progress
from graphpatch_notebook.notebook.display.tables import Column, Table, op_label, spec_label, visible
from graphpatch_notebook.notebook.magics.command_line import TypedPath, one_line, unquoted
from graphpatch_notebook.notebook.session import session_file
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, ChosenPatches, unknown_names
from graphpatch_notebook.notebook.session.expressions import Origin, evaluate, evaluated_call, undefined, variable_name
from graphpatch_notebook.notebook.session.patch_kinds import FLAGS, PatchKind
from graphpatch_notebook.notebook.session.session import Session, session_of
from graphpatch_notebook.notebook.session.workspace import ActiveGraph, Workspace, counted, is_a, transfer
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.paths import nearest, parse_path

if TYPE_CHECKING:
    from graphpatch_notebook.notebook.export import SourceCode
    from graphpatch_notebook.notebook.search import FoundNodes

# --------------------------------------------------------------------------------------------------------------------
# Graphs


def wrap(workspace: Workspace, args: Namespace) -> None:
    """Assigns a new `PatchableGraph` to a variable. Patches that were chosen for the graph before are carried over."""
    __tracebackhide__ = True
    name, call = parsed_assignment(" ".join(args.text))
    namespace, model = workspace.namespace, ast.unparse(call.func)
    start = time.perf_counter()
    module = evaluate(model, namespace, "%graphpatch wrap")
    if isinstance(module, PatchableGraph) or not isinstance(module, Module):
        kind = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise SessionError(f"{model!r} must be a torch.nn.Module, but is {kind}")
    inputs, keywords = evaluated_call(call, namespace, "%graphpatch wrap")
    try:
        with capture_progress(module):
            graph = PatchableGraph(module, *inputs, **keywords)
    except CaptureError as error:
        raise SessionError(str(error)) from None
    seconds = time.perf_counter() - start
    texts = [ast.unparse(argument) for argument in (*call.args, *call.keywords)]
    if inputs and isinstance(inputs[0], ExtractionOptions):  # they are not an input
        texts = [*texts[1:], f"extraction_options={texts[0]}"]
    before, session = namespace.get(name), session_of(graph)
    session.origin = Origin(name, model, ", ".join(texts))
    namespace[name] = graph
    print(f"{workspace.use(name).title} ({seconds:.1f} s)")
    if is_a(before, PatchableGraph):
        transfer(session_of(before).chosen.patches, session)


def parsed_assignment(text: str) -> tuple[str, ast.Call]:
    """Returns the name and the call in `NAME = MODEL(ARGS)`."""
    text, usage = text.strip(), "NAME = MODEL(EXAMPLE INPUTS)"
    reason = ""
    try:
        for statement in ast.parse(text).body[:1]:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                usage = f"pg = {text}"
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
                (target,) = statement.targets
                name = variable_name(ast.unparse(target))
                if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement.value)):
                    raise ValueError(f"{name!r} is used to make the graph: choose another name")
                return name, statement.value
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = f" ({error.msg if isinstance(error, SyntaxError) else error})"
    raise SessionError(f"{text!r} does not assign a call of a model{reason}; write %graphpatch wrap {usage}")


def use(workspace: Workspace, args: Namespace) -> None:
    """Selects the graph that commands apply to."""
    active = workspace.use(args.name)
    print(f"{active.title}, {counted(len(active.session.chosen.patches))} chosen")


# --------------------------------------------------------------------------------------------------------------------
# Choosing patches


def choose(workspace: Workspace, kind: PatchKind, args: Namespace) -> None:
    """Adds a patch to the chosen ones, unless the same patch is there: a cell can run again."""
    session = workspace.current().session
    root = captured(session.graph).root
    place = TypedPath.parse(args.path, root)
    if "*" in place.path.partition('"')[0]:
        pattern = place.path.replace("*", "{i}") if place.path.count("*") == 1 else "{path}"
        raise SessionError(
            f"{place.path!r} is a pattern for several nodes, but a patch has one node: choose them in a loop, "
            f"with %graphpatch {kind.name} {pattern} in its body"
        )
    # The path first: with a wrong path, the messages about the other arguments would be misleading. Any value can be
    # set to zero; a call is replaced only where a module is called.
    asked = kind.name if kind.patch.replaces_call and kind.value is None else "zero"
    path = session.check(ChosenPatch(place.path, asked, any_shape=True)).patch.path
    options = ("steps", "positions", "position_dim", *FLAGS)
    fields: dict[str, Any] = {"slice": place.slice, **{name: getattr(args, name) for name in options if name in args}}
    variable = None
    if kind.keeps is not None:
        words = args.name[1:] if len(args.name) > 1 and args.name[0] == "as" else args.name
        variable = " ".join(words) or None
        fields["name"] = variable or session.free_name(path, workspace.results.names_of_others())
    elif kind.value is not None:
        value = " ".join(args.value)
        if kind.value.is_text and value not in workspace.namespace:
            with suppress(Unresolvable):  # a path is taken as a text, except if it may be meant as a variable
                resolve(root, value)
                value = repr(value)
        fields["value"] = value or None
    wanted = ChosenPatch(path, kind.name, **fields)
    for patch in [patch for patch in session.chosen.patches if patch.kind == kind.name]:
        name = wanted.name if variable is None else patch.name
        if patch.with_fields(number=0, is_enabled=True, name=name) == wanted:
            how = "" if patch.is_enabled else f", but disabled: %graphpatch enable #{patch.number}"
            print(f"#{patch.number} {patch} is already chosen{how}")
            return
    check = session.check(wanted)
    added = session.add(wanted)
    shape = "" if check.sliced is None else f" -> {'list of ' * added.definition.keeps_list}{tuple(check.sliced)}"
    is_other = added.name in workspace.namespace and not workspace.results.is_own(str(added.name))
    print(f"#{added.number} {added}{shape}" + f"; the next run overwrites the variable {added.name}" * is_other)
    if check.warning:
        print(f"warning: {one_line(check.warning)}")
    if unknown := unknown_names(added, workspace.namespace):
        print(f"note: {unknown}")


def numbers_of(chosen: ChosenPatches, specs: Sequence[str]) -> list[int]:
    """Returns the numbers of the patches that match `#n`, a path, a path with a slice, or a glob pattern of paths."""
    found = {number for spec in specs for number in _numbers_of(chosen, unquoted(spec))}
    return [patch.number for patch in chosen.patches if patch.number in found]


def _numbers_of(chosen: ChosenPatches, spec: str) -> list[int]:
    numbers = [part.strip().removeprefix("#") for part in spec.split(",")]
    if all(number.isdecimal() for number in numbers):
        return [chosen.find(int(number)).number for number in numbers]
    here: list[ChosenPatch] = []
    with suppress(ValueError):  # a pattern
        place = TypedPath.cut(spec)
        path = str(parse_name(place.path) if is_component_name(place.path) else parse_path(place.path))
        index = None if place.slice is None else ChosenPatch(path, "zero", slice=place.slice).slice
        here = [patch for patch in chosen.patches if patch.path == path and index in (None, patch.slice)]
    here = here or [patch for patch in chosen.patches if fnmatchcase(patch.path, spec)]
    if here:
        return [patch.number for patch in here]
    paths = list(dict.fromkeys(patch.path for patch in chosen.patches))
    hint = f"nearest: {', '.join(map(repr, nearest(spec.partition('[')[0], paths)))}" if paths else "no patch is chosen"
    raise SessionError(f"no chosen patch matches {spec!r}; {hint}")


def remove(workspace: Workspace, args: Namespace) -> None:
    """Removes patches from the chosen ones."""
    session = workspace.current().session
    for patch in session.remove(numbers_of(session.chosen, args.specs)):
        print(f"removed #{patch.number} {patch}")


def switch(workspace: Workspace, args: Namespace, *, is_enabled: bool) -> None:
    """Enables patches, or disables them without removing them."""
    session = workspace.current().session
    for number in numbers_of(session.chosen, args.specs):
        patch = session.change(number, is_enabled=is_enabled)
        print(f"{'enabled' if is_enabled else 'disabled'} #{number} {patch}")


def clear(workspace: Workspace, _: Namespace) -> None:
    """Removes all chosen patches."""
    removed = workspace.current().session.clear()
    them = "it" if len(removed) == 1 else "them"
    print(f"removed {counted(len(removed))}; use undo to restore {them}" if removed else "no patch was chosen")


def step(workspace: Workspace, _: Namespace, *, is_undo: bool) -> None:
    """Undoes the last edit, or redoes the last one that was undone, and prints the difference."""
    session = workspace.current().session
    before = session.chosen.patches
    if not (session.undo() if is_undo else session.redo()):
        print(f"there is nothing to {'undo' if is_undo else 'redo'}")
        return
    after = session.chosen.patches
    lines = [("-", patch) for patch in before if patch not in after]
    lines += [("+", patch) for patch in after if patch not in before]
    texts = [f"{sign} #{patch.number} {'' if patch.is_enabled else '(off) '}{patch}" for sign, patch in lines]
    more = " ..." if len(texts) > 4 else ""
    print(f"{'; '.join(texts[:4]) or 'new order'}{more} ({counted(len(after))} chosen now)")


# --------------------------------------------------------------------------------------------------------------------
# Files


# The first line of an exported file, followed by a hash of the rest. A file whose hash matches may be overwritten.
MARK = "# Written by %graphpatch export, sha256 "


def export(workspace: Workspace, args: Namespace) -> SourceCode | None:
    """Returns the chosen patches as Python code. With a target, writes the code there instead, and returns `None`."""
    from graphpatch_notebook.notebook import export as patch_code

    session, target, namespace = workspace.current().session, args.o, workspace.namespace
    is_variable = target is not None and target.isidentifier()
    # A file runs on its own, so it also contains the code that creates the graph.
    code = patch_code.export(session, wrap=target is not None and not is_variable)
    if is_variable:
        there = namespace.get(target, code)
        if not is_a(there, patch_code.SourceCode) and not args.force:
            raise SessionError(
                f"the variable {target!r} holds an object of type {type(there).__name__} that export did not create; "
                "choose another name, or add --force"
            )
        namespace[target] = code
        print(f"the code is in the variable {target}")
    elif target is not None:
        text = f"{MARK}{session_file.digest(code.encode())}\n{code}"
        session_file.write_text(target, text, None if args.force else _check_exported)
        print(f"the code is in {target}")
    if args.cell:
        workspace.put_in_new_cell(code.rstrip("\n"))
        print("the code is in a new cell")
    return code if target is None and not args.cell else None


def _check_exported(content: bytes) -> None:
    first, _, rest = content.replace(b"\r\n", b"\n").partition(b"\n")
    if first != f"{MARK}{session_file.digest(rest)}".encode():
        raise SessionFileError("it was not written by %graphpatch export, or was changed since")


def save(workspace: Workspace, args: Namespace) -> None:
    """Saves the chosen patches to a file."""
    session = workspace.current().session
    session_file.save(session, args.file, force=args.force)
    print(f"saved {counted(len(session.chosen.patches))} to {args.file}")


def load(workspace: Workspace, args: Namespace) -> None:
    """Replaces the chosen patches by those in a file."""
    session = workspace.current().session
    before = len(session.chosen.patches)
    patches = session_file.load(session, args.file, is_trusted=args.trust)
    instead = f", replacing {counted(before)}; use undo to restore those" if before else ""
    print(f"loaded {counted(len(patches))} from {args.file}{instead}")
    for one in patches:
        if is_component_name(one.path):
            print(f"#{one.number}: {one.path} is {resolve(captured(session.graph).root, one.path).path} here")
    code = {f"#{one.number} {visible(str(one.value), None)}": one.untrusted for one in patches if one.untrusted}
    for file in dict.fromkeys(code.values()):
        print(f"these values are code, which does not run until you trust the file: {'; '.join(code)}")
        print(f"after you have read them, trust the file: {file.repair}")


# --------------------------------------------------------------------------------------------------------------------
# Tables of the chosen patches


_CHOSEN = (
    Column("#", "note"),
    Column("kind", "graph"),
    Column("path"),
    Column("value", "number", is_cut=True),
    Column("shape", "tensor"),
    Column("", "note"),
)


def status(workspace: Workspace) -> Table[ChosenPatch]:
    """Returns the active graph and the chosen patches as a table, with suggestions for the next commands."""
    if not workspace.graphs():
        return Table(
            (), (), lambda _: [], title="no PatchableGraph yet", empty=f"{workspace.first_step}; %graphpatch help"
        )
    active = workspace.current()
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


def _chosen_table(active: ActiveGraph, notes: list[str]) -> Table[ChosenPatch]:
    patches = active.session.chosen.patches
    files = dict.fromkeys(patch.untrusted for patch in patches if patch.untrusted)
    notes += [f"code from {file.name!r} does not run until you trust the file: {file.repair}" for file in files]

    def cells(patch: ChosenPatch) -> list[str]:
        remarks = ["off"] * (not patch.is_enabled) + ["not trusted"] * (patch.untrusted is not None) + patch.options()
        value = patch.value or (f"as {patch.name}" if patch.name else "")
        return [str(patch.number), patch.kind, patch.place, value, _shape(active.session, patch), " ".join(remarks)]

    title = f"{active.title}, {counted(len(patches))} chosen"
    return Table(_CHOSEN, patches, cells, title=title, empty="no patch is chosen", notes=notes)


def _shape(session: Session, patch: ChosenPatch) -> str:
    try:
        sliced = session.check(patch, ()).sliced
    except ChosenPatchError:  # the graph was edited since
        return "?"
    return "" if sliced is None else str(tuple(sliced))


# --------------------------------------------------------------------------------------------------------------------
# The graph


def show(workspace: Workspace, args: Namespace) -> Any:
    """Returns a browser opened at a path. Without widgets, it displays as the tree below this path."""
    from graphpatch_notebook.notebook.browser.widget import browser_of

    return _opened(browser_of, workspace, args, path=location_of(_place(workspace, args.path)).path)


def attention(workspace: Workspace, args: Namespace) -> Any:
    """Returns the attention view of the active graph."""
    from graphpatch_notebook.notebook.views.attention import attention_of

    return _opened(attention_of, workspace, args)


def lens(workspace: Workspace, args: Namespace) -> Any:
    """Returns a lens view of the active graph."""
    from graphpatch_notebook.notebook.views.lens import lens_of

    return _opened(lens_of, workspace, args, "tokens", target=args.token, stream=args.stream)


def generation(workspace: Workspace, args: Namespace) -> Any:
    """Returns a view of the tokens that the active graph generates."""
    from graphpatch_notebook.notebook.views.generation import generation_of

    return _opened(generation_of, workspace, args, "tokens", max_new_tokens=args.count)


def _opened(
    view_of: Callable[..., Any], workspace: Workspace, args: Namespace, key: str = "tokenizer", **options: Any
) -> Any:
    """Returns a view of the active graph, with a tokenizer under `key`, and typed inputs."""
    active, namespace = workspace.current(), workspace.namespace
    if args.tokenizer is not None and args.tokenizer not in namespace:
        raise SessionError(f"--tokenizer takes a variable: {undefined(args.tokenizer, namespace)}")
    if args.inputs is not None:
        replace(active.session.origin, arguments=args.inputs)  # raises an error if they are not valid
    options[key] = namespace.get(args.tokenizer)
    try:
        return view_of(active.graph, workspace, typed=args.inputs, **options)
    except (GraphError, ExperimentError, TypeError) as problem:  # about the user's request: without a traceback
        raise SessionError(str(problem)) from None


def find(workspace: Workspace, args: Namespace) -> FoundNodes:
    """Returns a table of the nodes that match a query."""
    from graphpatch_notebook.notebook import search

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


def shape(workspace: Workspace, args: Namespace) -> tuple[Any, ...] | dict[str, Any] | None:
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


_CHILDREN = (
    Column("name"),
    Column("what", "graph"),
    Column("value", "tensor"),
    Column("", "note", is_cut=True),
)


def ls(workspace: Workspace, args: Namespace) -> Table[Location]:
    """Returns a table of the children of a graph, node or container, without values that only carry sizes."""
    place, patched = location_of(_place(workspace, args.path)), _patched(workspace.current())

    def cells(child: Location) -> list[str]:
        inside = (f"{child.path}.", f"{child.path}|")
        count = sum(path == child.path or path.startswith(inside) for path in patched)
        notes = [f"{count} patched"] * bool(count)
        if child.graph is not None:
            notes += [f"opaque: {child.graph.opaque_reason}"] * (child.graph.opaque_reason is not None)
            return [child.last_name, graph_class(child.graph), type(child.graph.module).__name__, "; ".join(notes)]
        what = op_label(child.node.kind, child.node.op) if child.node is not None and not child.dig else ""
        return [child.last_name, what, "" if child.spec is None else spec_label(child.spec), "; ".join(notes)]

    title = str(place.spec)
    if place.graph is not None:
        title = f"{graph_class(place.graph)} of {type(place.graph.module).__name__}"
    return Table(
        _CHILDREN,
        [place.below(name) for name in place.children()] or [place],
        cells,
        title=f"{place.path or '<root>'}: {title}",
        how_to_narrow=f"list({place.python()}) returns all of them",
        max_rows=200,
    )
