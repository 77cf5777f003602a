"""The commands of `%graphpatch`: each with its parser, which is also its help, and the function that runs it.

The functions take the workspace and the parsed arguments. Those that change something print what they changed; those
that show something return it.
"""

from __future__ import annotations

import ast
import functools
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.nn import Module

from graphpatch_notebook.components.names import parse_name
from graphpatch_notebook.errors import (
    CaptureError,
    ChosenPatchError,
    GraphError,
    SessionError,
    UnknownPathError,
    cut,
)
from graphpatch_notebook.inspection.node_path import CodeText, NodePath, location_of
from graphpatch_notebook.inspection.resolution import Unresolvable, resolve
from graphpatch_notebook.notebook.display.tables import Column, Table, visible
from graphpatch_notebook.notebook.magics.command_line import (
    CommandParser,
    TypedPath,
    Variables,
    expanded,
    one_line,
    unquoted,
)
from graphpatch_notebook.notebook.session import session_file
from graphpatch_notebook.notebook.session.chosen_patch import (
    FLAGS,
    PATCH_KINDS,
    ChosenPatch,
    ChosenPatches,
    PatchKind,
    unknown_names,
)
from graphpatch_notebook.notebook.session.expressions import Origin, evaluate, evaluated_call, variable_name
from graphpatch_notebook.notebook.session.session import session_of
from graphpatch_notebook.notebook.session.workspace import ActiveGraph, Workspace, counted
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.paths import is_component_name, nearest, parse_path

if TYPE_CHECKING:
    from graphpatch_notebook.notebook.export import SourceCode
    from graphpatch_notebook.notebook.search import FoundNodes

Action: TypeAlias = Callable[[Workspace, Namespace], Any]
"""Runs a command. Returns the value to display, or `None`."""
Argument: TypeAlias = tuple[tuple[str, ...], dict[str, Any]]

_commands: dict[str, tuple[CommandParser, Action]] = {}


def argument(*names: str, **settings: Any) -> Argument:
    """Returns an argument of a command, as `CommandParser.add` takes it.

    What Tab completes is one of: `node` (a value that can be patched), `place` (any path), `chosen` (a chosen patch),
    `graph`, `model`, `value` (Python), `query`, `steps`, `file`, `command`, `name` (of a new variable), `text`
    (nothing).
    """
    return names, settings


def parser_of(
    name: str, usage: str, summary: str, *arguments: Argument, notes: str = "", examples: Sequence[str] = ()
) -> CommandParser:
    """Returns the parser of a command."""
    shown = "\n".join(["examples:", *(f"  %graphpatch {example}" for example in examples)]) if examples else ""
    parser = CommandParser(f"%graphpatch {name}", usage, summary, f"{notes.strip()}\n\n{shown}".strip())
    for names, settings in arguments:
        parser.add(*names, **settings)
    return parser


def command(name: str, *parts: Any, **more: Any) -> Callable[[Action], Action]:
    """Makes a function a command: `parser_of` has the other arguments."""

    def add(run: Action) -> Action:
        _commands[name] = parser_of(name, *parts, **more), run
        return run

    return add


def commands() -> dict[str, tuple[CommandParser, Action]]:
    """Returns all commands by name, in the order of the help. Each kind of patch is a command."""
    kinds = {name: _choosing(kind) for name, kind in PATCH_KINDS.items()}
    return {**{name: _commands[name] for name in _BEFORE_KINDS}, **kinds, **_commands}


_BEFORE_KINDS = ("wrap", "use", "show", "find", "code", "shape")
_PATH = """
PATH is the path of a node: h_0.mlp.output, or the name of a component:
layers[0].attn.heads[5].z, @embed. A bar selects a value inside a container:
output|sub_0 is the first item of a tuple, output|state.h is nested.
In a loop, use variables as {i} or $name: h_{i}.output.
"""
_SLICE = "[slice] directly follows the path: [:, -1], [0, 3:5]. Default: the whole value."
_WHICH = "#n, the number in list; or PATH, PATH[slice], or a pattern such as h_*.output"
_PLACE = "a graph, a node, or a value in a container: h_0, h_0.mlp.output, output|sub_0"
_QUERY = """
QUERY is a list of terms. A node is found if it matches all of them:
  attn              the path, torch function or component name contains this text
  h_*.attn          contains these texts in this order; * is any text
  op:mul            the torch function; * is any text: op:*norm
  shape:64          a dimension has this size
  shape:[1,*,64]    the whole shape; * is any size
  is:parameter      also is:input, buffer, op, output, tensor, number, patched,
                    opaque, size (only carries sizes; other terms never find it)
  -term             does not match the term
"""
CELL = CommandParser("%%graphpatch", "[NAME] [--only PATH|#n ...]", "runs the cell under the chosen patches")
CELL.add("name", metavar="NAME", nargs="?", completes="graph", help="the variable of the graph, if there are several")
CELL.add("--only", metavar="PATH|#n", nargs="+", completes="chosen", help=_WHICH)
_SPECS = argument("specs", metavar="PATH|#n", nargs="+", completes="chosen", help=_WHICH)
_AT = argument("path", metavar="PATH", nargs="?", completes="place", help=_PLACE)
_FILE = argument("file", metavar="FILE", type=unquoted, completes="file", help="its name; in quotes if it has spaces")
_INPUTS = argument(
    "--inputs",
    metavar="ARGS",
    type=unquoted,
    completes="value",
    help='the inputs, as in a call: "ids, attention_mask=mask"',
)


# --------------------------------------------------------------------------------------------------------------------
# Graphs


@command(
    "wrap",
    "NAME = MODEL(ARGS)",
    "captures a model on example inputs",
    argument("text", nargs="*", completes="model"),
    notes="""
MODEL(ARGS) is a call of the model on example inputs. The model runs once and
is captured. NAME is the variable that receives the PatchableGraph. If NAME
holds a graph already, its chosen patches are carried over.
""",
    examples=("wrap pg = model(input_ids)", "wrap pg = model(**tokens)"),
)
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
        graph = PatchableGraph(module, *inputs, **keywords)
    except CaptureError as error:
        raise SessionError(str(error)) from None
    seconds = time.perf_counter() - start
    texts = [ast.unparse(argument) for argument in (*call.args, *call.keywords)]
    if inputs and isinstance(inputs[0], ExtractionOptions):  # they are not an input
        texts = [*texts[1:], f"extraction_options={texts[0]}"]
    session_of(graph).origin = Origin(name, model, ", ".join(texts))
    namespace[name] = graph
    print(f"{workspace.use(name).title} ({seconds:.1f} s)")
    workspace.notice_new_graphs()


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


@command(
    "use",
    "NAME",
    "selects the graph that commands apply to",
    argument("name", metavar="NAME", completes="graph", help="the variable of a PatchableGraph"),
    examples=("use pg",),
)
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
    note = workspace.results.overwritten([added])
    print(f"#{added.number} {visible(str(added), 200)}{shape}" + (f"; {note}" if note else ""))
    warnings = [check.warning]
    try:
        session.try_out(added)
    except ChosenPatchError as problem:
        warnings.append(str(problem))
    for warning in filter(None, warnings):
        print(f"warning: {one_line(warning)}")
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
    raise SessionError(f"no chosen patch matches {cut(repr(spec))}; {hint}")


@command("rm", "PATH|#n ...", "removes patches", _SPECS, examples=("rm #1 #3", "rm h_*.mlp.output"))
def remove(workspace: Workspace, args: Namespace) -> None:
    """Removes patches from the chosen ones."""
    session = workspace.current().session
    for patch in session.remove(numbers_of(session.chosen, args.specs)):
        print(f"removed #{patch.number} {patch}")


def _switch(workspace: Workspace, args: Namespace, is_enabled: bool) -> None:
    session = workspace.current().session
    for number in numbers_of(session.chosen, args.specs):
        patch = session.change(number, is_enabled=is_enabled)
        print(f"{'enabled' if is_enabled else 'disabled'} #{number} {patch}")


@command("enable", "PATH|#n ...", "enables patches", _SPECS, examples=("enable #1",))
def enable(workspace: Workspace, args: Namespace) -> None:
    """Enables patches."""
    _switch(workspace, args, True)


@command(
    "disable",
    "PATH|#n ...",
    "disables patches, without removing them",
    _SPECS,
    examples=("disable h_*.mlp.output",),
)
def disable(workspace: Workspace, args: Namespace) -> None:
    """Disables patches without removing them."""
    _switch(workspace, args, False)


@command("clear", "", "removes all patches", notes="Use undo to restore them.")
def clear(workspace: Workspace, _: Namespace) -> None:
    """Removes all chosen patches."""
    removed = workspace.current().session.clear()
    them = "it" if len(removed) == 1 else "them"
    print(f"removed {counted(len(removed))}; use undo to restore {them}" if removed else "no patch was chosen")


def _step(workspace: Workspace, what: str) -> None:
    """Undoes the last edit, or redoes the last one that was undone, and prints the difference."""
    session = workspace.current().session
    before = session.chosen.patches
    if not (session.undo() if what == "undo" else session.redo()):
        print(f"there is nothing to {what}")
        return
    after = session.chosen.patches
    old, new = set(before), set(after)
    lines = [("-", patch) for patch in before if patch not in new]
    lines += [("+", patch) for patch in after if patch not in old]
    texts = [f"{sign} #{patch.number} {'' if patch.is_enabled else '(off) '}{patch}" for sign, patch in lines]
    more = " ..." if len(texts) > 4 else ""
    print(f"{'; '.join(texts[:4]) or 'new order'}{more} ({counted(len(after))} chosen now)")


command("undo", "", "undoes the last edit of the chosen patches")(lambda workspace, _: _step(workspace, "undo"))
command("redo", "", "redoes the last edit that was undone")(lambda workspace, _: _step(workspace, "redo"))


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


@command("list", "", "lists the chosen patches")
def listed(workspace: Workspace, _: Namespace) -> Table[ChosenPatch]:
    """Returns the chosen patches as a table."""
    return _chosen_table(workspace.current(), [])


def _chosen_table(active: ActiveGraph, notes: list[str]) -> Table[ChosenPatch]:
    patches = active.session.chosen.patches

    def cells(patch: ChosenPatch) -> list[str]:
        try:
            sliced = active.session.check(patch, ()).sliced
            shape = "" if sliced is None else str(tuple(sliced))
        except ChosenPatchError:  # the graph was edited since
            shape = "?"
        remarks = ["off"] * (not patch.is_enabled) + patch.options()
        value = patch.value or (f"as {patch.name}" if patch.name else "")
        return [str(patch.number), patch.kind, patch.place, value, shape, " ".join(remarks)]

    title = f"{active.title}, {counted(len(patches))} chosen"
    return Table(_CHOSEN, patches, cells, title=title, empty="no patch is chosen", notes=notes)


# --------------------------------------------------------------------------------------------------------------------
# Files


@command(
    "export",
    "[-o FILE] [--cell] [--force]",
    "shows the chosen patches as Python code",
    argument("-o", metavar="FILE", type=unquoted, completes="file", help="write a script"),
    argument("--cell", action="store_true", help="put the code in a new cell"),
    argument("--force", action="store_true", help="overwrite a file"),
    notes="By default, the code is shown. To keep it, use code = %graphpatch export.",
    examples=("export --cell", "export -o patched.py"),
)
def export(workspace: Workspace, args: Namespace) -> SourceCode | None:
    """Returns the chosen patches as Python code; `None` if it is written to a file or a cell instead."""
    from graphpatch_notebook.notebook import export as patch_code

    session, file = workspace.current().session, args.o
    # A file runs on its own, so it also contains the code that creates the graph.
    code = patch_code.export(session, wrap=file is not None)
    if file is not None:
        session_file.write_text(file, code, None if args.force else _refuse)
        print(f"the code is in {file}")
    if args.cell:
        workspace.put_in_new_cell(code.rstrip("\n"))
        print("the code is in a new cell")
    return code if file is None and not args.cell else None


def _refuse(_: bytes) -> None:
    raise SessionError("it exists")


@command(
    "save",
    "FILE [--force]",
    "saves the chosen patches to a file",
    _FILE,
    argument("--force", action="store_true", help="overwrite a file that is not a session file"),
    examples=("save session.json", 'save "my patches.json" --force'),
)
def save(workspace: Workspace, args: Namespace) -> None:
    """Saves the chosen patches to a file."""
    session = workspace.current().session
    session_file.save(session, args.file, force=args.force)
    print(f"saved {counted(len(session.chosen.patches))} to {args.file}")


@command(
    "load",
    "FILE [--trust]",
    "loads chosen patches from a file",
    _FILE,
    argument("--trust", action="store_true", help="trust the file until its content changes"),
    notes="""
The patches of the file replace the chosen patches; use undo to restore those.
In a file that you did not save yourself, a value can be code that someone else
wrote: anything except numbers, names, arithmetic and subscripts. Such a file
is not loaded until you trust it.
""",
    examples=("load session.json", 'load "my patches.json" --trust'),
)
def load(workspace: Workspace, args: Namespace) -> None:
    """Replaces the chosen patches by those in a file."""
    session = workspace.current().session
    before = len(session.chosen.patches)
    patches = session_file.load(session, args.file, is_trusted=args.trust)
    instead = f", replacing {counted(before)}; use undo to restore those" if before else ""
    print(f"loaded {counted(len(patches))} from {args.file}{instead}")
    if note := workspace.results.overwritten(patches):
        print(note)
    for one in patches:
        if is_component_name(one.path):
            print(f"#{one.number}: {one.path} is {resolve(captured(session.graph).root, one.path).path} here")


# --------------------------------------------------------------------------------------------------------------------
# The graph


@command(
    "show",
    "[PATH] [--inputs ARGS]",
    "shows the tree; a click patches a node",
    _AT,
    _INPUTS,
    examples=("show h_0.mlp",),
)
def show(workspace: Workspace, args: Namespace) -> Any:
    """Returns a browser opened at a path. Without widgets, it displays as the tree below this path."""
    from graphpatch_notebook.notebook.views.browser import browser_of

    active, path = workspace.current(), location_of(_place(workspace, args.path)).path
    if args.inputs is not None:
        replace(active.session.origin, arguments=args.inputs)  # raises an error if they are not valid
    try:
        return browser_of(active.graph, workspace, path, typed=args.inputs)
    except (GraphError, TypeError) as problem:  # about the user's request: without a traceback
        raise SessionError(str(problem)) from None


@command(
    "find",
    "[QUERY]",
    "finds nodes: mul, op:linear, shape:8192, h_*.mlp",
    argument("text", metavar="QUERY", nargs="*", completes="query"),
    notes=_QUERY,
    examples=("find mlp op:linear -is:patched", "find shape:[1,*,768] is:output"),
)
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


@command("code", "PATH", "shows the code of a graph or a node", _AT, examples=("code h_0.mlp",))
def code(workspace: Workspace, args: Namespace) -> CodeText:
    """Returns the code of a graph, or the source lines that compute a node."""
    return _place(workspace, args.path)._code


@command("shape", "[PATH[slice]]", "shows the recorded shape", _AT, examples=("shape h_0.output[0]",))
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


@functools.cache
def _choosing(kind: PatchKind) -> tuple[CommandParser, Action]:
    word = f" {kind.value.word}" if kind.value is not None else " [NAME]" if kind.keeps is not None else ""
    place = "PATH[slice]" if kind.has_slice else "PATH"
    where = "which value: PATH[slice]" if kind.has_slice else _PLACE
    arguments = [argument("path", metavar="PATH", completes="node", help=where)]
    if kind.value is not None:
        how = kind.value.help.replace("%", "%%")
        arguments.append(argument("value", metavar=kind.value.word, nargs="*", completes="value", help=how))
    elif kind.keeps is not None:
        how = "the variable that receives the value when a cell runs; default: a name from the path"
        arguments.append(argument("name", metavar="NAME", nargs="*", completes="name", help=how))
    parser = parser_of(
        kind.name,
        f"{place}{word} [OPTIONS]",
        kind.summary,
        *arguments,
        _STEPS,
        *(_POSITIONS if kind.has_positions else ()),
        argument("--any-shape", action="store_true", help="allow values whose shape differs from the example"),
        argument("--allow-empty", action="store_true", help="allow a slice that selects nothing"),
        notes=_PATH + _SLICE * kind.has_slice,
        examples=kind.examples,
    )
    return parser, lambda workspace, args: choose(workspace, kind, args)


_STEPS = argument(
    "--steps",
    metavar="STEPS",
    type=unquoted,
    completes="steps",
    help='only in these steps of a generation: prefill, decoding, or numbers: 0, "2, 4", 1:',
)
_POSITIONS = (
    argument(
        "--positions",
        metavar="POSITIONS",
        type=unquoted,
        completes="text",
        help='only at these sequence positions: 3, "2, 40", 1:5',
    ),
    argument(
        "--position-dim",
        metavar="DIM",
        type=int,
        completes="text",
        help="the sequence dimension, if it cannot be inferred: 1, -2",
    ),
)


# --------------------------------------------------------------------------------------------------------------------
# Running a line


_EXPANDED = ("path", "specs", "name", "steps", "positions")  # the arguments in which variables are expanded


def run(workspace: Workspace, line: str, variables: Variables) -> Any:
    """Runs one line after `%graphpatch`, and returns the value to display, or `None`."""
    __tracebackhide__ = True
    workspace.notice_new_graphs()
    name, rest = (*line.split(None, 1), "", "")[:2]
    if not name or name.startswith("#"):
        return status(workspace)
    name = "help" if name in ("-h", "--help") else name
    if name not in commands():
        raise SessionError(_unknown(workspace, name))
    if rest.strip() in ("-h", "--help"):
        print(help_on(name))
        return None
    parser, act = commands()[name]
    arguments = parser.parse_line(rest)
    for argument in _EXPANDED:
        given = getattr(arguments, argument, None)
        if isinstance(given, list):
            setattr(arguments, argument, [expanded(word, variables) for word in given])
        elif given is not None:
            setattr(arguments, argument, expanded(given, variables))
    return act(workspace, arguments)


def help_on(name: str) -> str:
    """Returns the help for a command, or for the cell magic."""
    if name == "%%graphpatch":
        return CELL.format_help()
    if name not in commands():
        raise SessionError(f"unknown command {name!r}; nearest: {', '.join(nearest(name, list(commands())))}")
    return commands()[name][0].format_help()


@command(
    "help",
    "[COMMAND]",
    "shows help for all commands, or for one",
    argument("names", metavar="COMMAND", nargs="*", completes="command"),
    examples=("help zero",),
)
def show_help(_: Workspace, args: Namespace) -> None:
    """Prints the help of commands, or the overview."""
    print("\n".join(map(help_on, args.names)) if args.names else overview())


def overview() -> str:
    """Returns the overview of all commands and the cell magic: the summary is right of the usage, or below it."""
    texts = [("%graphpatch", "shows the active graph and the chosen patches")]
    texts += [(one.line, str(one.description)) for one in (*(parser for parser, _ in commands().values()), CELL)]
    width = shutil.get_terminal_size((100, 24)).columns
    lines = [
        f"{usage:<44}{summary}" if len(usage) < 44 and len(summary) < width - 44 else f"{usage}\n{'':8}{summary}"
        for usage, summary in texts
    ]
    return "\n".join([*lines, "", "[OPTIONS] are explained by %graphpatch help COMMAND"])


# Common words from other tools, for which the most similar command names would not help.
_OTHER_WORDS = {
    **dict.fromkeys(("delete", "remove", "del"), "%graphpatch rm PATH|#n ..."),
    **dict.fromkeys(("tree", "browse"), "%graphpatch show [PATH]"),
    "set": "%graphpatch replace PATH[slice] VALUE",
    "ablate": "%graphpatch zero PATH[slice]",
    "run": "%%graphpatch, as the first line of the cell to run",
    "off": "%graphpatch disable PATH|#n ...",
    "on": "%graphpatch enable PATH|#n ...",
}


def _unknown(workspace: Workspace, name: str) -> str:
    if name in workspace.graphs():
        return f"{name!r} is a graph, not a command; %graphpatch use {name} selects it"
    if name in _OTHER_WORDS:
        return f"unknown command {name!r}; use {_OTHER_WORDS[name]}"
    close = ", ".join(map(repr, nearest(name, list(commands()))))
    return f"unknown command {name!r}; nearest: {close}; %graphpatch help shows all"
