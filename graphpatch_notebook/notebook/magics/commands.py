"""The commands of `%graphpatch`: the parser of each, which is also its help, and the function that runs it."""

from __future__ import annotations

import functools
import shutil
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.display.progress import busy
from graphpatch_notebook.notebook.magics import actions
from graphpatch_notebook.notebook.magics.command_line import CommandParser, Variables, expanded, unquoted
from graphpatch_notebook.notebook.session.patch_kinds import PATCH_KINDS, PatchKind
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.paths import nearest


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        parser: Its arguments and its help. What Tab completes is one of: `node` (a value that can be patched), `place`
            (any path), `chosen` (a chosen patch), `graph`, `model`, `value` (Python), `query`, `steps`, `file`,
            `command`, `name` (of a new variable), `text` (nothing).
        run: Runs the command. Returns the value to display, or `None`.
        doing: The text of the progress line during a long command; empty if the command shows its own progress.
    """

    parser: CommandParser
    run: Callable[[Workspace, Namespace], Any]
    doing: str = ""


# --------------------------------------------------------------------------------------------------------------------
# The commands, with their help


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


def _parser(name: str, usage: str, summary: str, notes: str = "", examples: tuple[str, ...] = ()) -> CommandParser:
    shown = "\n".join(["examples:", *(f"  %graphpatch {example}" for example in examples)]) if examples else ""
    return CommandParser(f"%graphpatch {name}", usage, summary, f"{notes.strip()}\n\n{shown}".strip())


def _view(parser: CommandParser, inputs: str) -> CommandParser:
    parser.add("--tokenizer", metavar="NAME", completes="value", help="the variable of a tokenizer: tokens are texts")
    return parser.add("--inputs", metavar="ARGS", type=unquoted, completes="value", help=inputs)


def _chosen(parser: CommandParser) -> CommandParser:
    return parser.add("specs", metavar="PATH|#n", nargs="+", completes="chosen", help=_WHICH)


def _place(parser: CommandParser, nargs: str | None = "?") -> CommandParser:
    return parser.add("path", metavar="PATH", nargs=nargs, completes="place", help=_PLACE)


def _file(parser: CommandParser, flag: str, does: str) -> CommandParser:
    parser.add("file", metavar="FILE", type=unquoted, completes="file", help="its name; in quotes if it has spaces")
    return parser.add(flag, action="store_true", help=does)


def _token(text: str) -> int | str:
    return int(text) if text.strip().isdecimal() else unquoted(text)


@functools.cache
def _own_commands() -> dict[str, Command]:
    """Returns all commands but those of patch kinds."""
    inputs = 'the inputs, as in a call: "ids, attention_mask=mask"'
    export = _parser(
        "export",
        "[-o NAME|FILE] [--cell] [--force]",
        "shows the chosen patches as Python code",
        "By default, the code is shown. To keep it, use code = %graphpatch export.",
        ("export --cell", "export -o patched.py"),
    )
    export.add(
        "-o", metavar="NAME|FILE", type=unquoted, completes="file", help="put it in a variable or write a script"
    )
    export.add("--cell", action="store_true", help="put the code in a new cell")
    export.add("--force", action="store_true", help="overwrite what export did not write")
    lens = _parser("lens", "[TOKEN] [--stream STREAM] [--tokenizer NAME] [--inputs ARGS]",
                   "shows what each layer says at each position", examples=("lens 464 --stream mlp",))  # fmt: skip
    lens.add("token", metavar="TOKEN", nargs="?", type=_token, help="whose probability is shown: a number, or a text")
    lens.add("--stream", metavar="STREAM", default="residual", help="residual (default), attention or mlp")
    generation = _parser("generation", "[COUNT] [--tokenizer NAME] [--inputs ARGS]",
                         "shows generated tokens; a click branches at one",
                         examples=("generation 5 --tokenizer tokenizer",))  # fmt: skip
    generation.add("count", metavar="COUNT", nargs="?", type=int, default=20, help="of tokens at most; default: 20")
    commands = [
        Command(
            _parser("wrap", "NAME = MODEL(ARGS)", "captures a model on example inputs", """
MODEL(ARGS) is a call of the model on example inputs. The model runs once and
is captured. NAME is the variable that receives the PatchableGraph. If NAME
holds a graph already, its chosen patches are carried over.
""", ("wrap pg = model(input_ids)", "wrap pg = model(**tokens)")).add("text", nargs="*", completes="model"),
            actions.wrap,
        ),
        Command(
            _parser("use", "NAME", "selects the graph that commands apply to", examples=("use pg",))
            .add("name", metavar="NAME", completes="graph", help="the variable of a PatchableGraph"),
            actions.use,
        ),
        Command(
            _view(_place(_parser("show", "[PATH] [--tokenizer NAME] [--inputs ARGS]",
                                 "shows the tree; a click patches a node",
                                 examples=("show h_0.mlp", "show --tokenizer tokenizer"))), inputs),
            actions.show,
        ),
        Command(
            _view(_parser("attention", "[--tokenizer NAME] [--inputs ARGS]",
                          "shows attention patterns; a click selects a head"), inputs),
            actions.attention, "Running",
        ),
        Command(_view(lens, inputs), actions.lens, "Reading the layers"),
        Command(_view(generation, "the arguments of generate, in quotes"), actions.generation, "Generating"),
        Command(
            _place(_parser("ls", "[PATH]", "lists the contents of a graph", examples=("ls h_0.attn",))),
            actions.ls, "Listing",
        ),
        Command(
            _parser("find", "[QUERY]", "finds nodes: mul, op:linear, shape:8192, h_*.mlp", _QUERY,
                    ("find mlp op:linear -is:patched", "find shape:[1,*,768] is:output"))
            .add("text", metavar="QUERY", nargs="*", completes="query"),
            actions.find, "Searching",
        ),
        Command(
            _place(_parser("code", "PATH", "shows the code of a graph or a node", examples=("code h_0.mlp",))),
            actions.code, "Building code",
        ),
        Command(
            _place(_parser("shape", "[PATH[slice]]", "shows the recorded shape", examples=("shape h_0.output[0]",))),
            actions.shape,
        ),
        Command(_chosen(_parser("rm", "PATH|#n ...", "removes patches", examples=("rm #1 #3", "rm h_*.mlp.output"))),
                actions.remove),
        Command(_chosen(_parser("enable", "PATH|#n ...", "enables patches", examples=("enable #1",))),
                functools.partial(actions.switch, is_enabled=True)),
        Command(_chosen(_parser("disable", "PATH|#n ...", "disables patches, without removing them",
                                examples=("disable h_*.mlp.output",))),
                functools.partial(actions.switch, is_enabled=False)),
        Command(_parser("clear", "", "removes all patches", "Use undo to restore them."), actions.clear),
        Command(_parser("undo", "", "undoes the last edit of the chosen patches"),
                functools.partial(actions.step, is_undo=True)),
        Command(_parser("redo", "", "redoes the last edit that was undone"),
                functools.partial(actions.step, is_undo=False)),
        Command(_parser("list", "", "lists the chosen patches"), actions.listed),
        Command(export, actions.export, "Exporting"),
        Command(
            _file(_parser("save", "FILE [--force]", "saves the chosen patches to a file",
                          examples=("save session.json", 'save "my patches.json" --force')),
                  "--force", "overwrite a file that is not a session file"),
            actions.save,
        ),
        Command(
            _file(_parser("load", "FILE [--trust]", "loads chosen patches from a file", """
The patches of the file replace the chosen patches; use undo to restore those.
In a file that you did not save yourself, a value can be code that someone else
wrote: anything except numbers, names, arithmetic and subscripts. Such values
are shown, but do not run until you trust the file.
""", ("load session.json", 'load "my patches.json" --trust')),
                  "--trust", "trust the file until its content changes"),
            actions.load,
        ),
        Command(
            _parser("help", "[COMMAND]", "shows help for all commands, or for one", examples=("help zero",))
            .add("names", metavar="COMMAND", nargs="*", completes="command"),
            lambda _, args: print("\n".join(map(help_on, args.names)) if args.names else overview()),
        ),
    ]  # fmt: skip
    return {command.parser.prog.split()[1]: command for command in commands}


def commands() -> dict[str, Command]:
    """Returns all commands by name, in the order of the help. Each kind of patch is a command."""
    own = list(_own_commands().items())
    editing = next(at for at, (name, _) in enumerate(own) if name == "rm")
    kinds = [(name, _choosing(kind)) for name, kind in PATCH_KINDS.items()]
    return dict([*own[:editing], *kinds, *own[editing:]])


@functools.cache
def _choosing(kind: PatchKind) -> Command:
    word = f" {kind.value.word}" if kind.value is not None else " [NAME]" if kind.keeps is not None else ""
    place = "PATH[slice]" if kind.has_slice else "PATH"
    parser = _parser(
        kind.name, f"{place}{word} [OPTIONS]", kind.summary, _PATH + _SLICE * kind.has_slice, kind.examples
    )
    parser.add("path", metavar="PATH", completes="node", help="which value: PATH[slice]" if kind.has_slice else _PLACE)
    if kind.value is not None:
        parser.add(
            "value", metavar=kind.value.word, nargs="*", completes="value", help=kind.value.help.replace("%", "%%")
        )
    elif kind.keeps is not None:
        help_text = "the variable that receives the value when a cell runs; default: a name from the path"
        parser.add("name", metavar="NAME", nargs="*", completes="name", help=help_text)
    parser.add("--steps", metavar="STEPS", type=unquoted, completes="steps",
               help='only in these steps of a generation: prefill, decoding, or numbers: 0, "2, 4", 1:')  # fmt: skip
    if kind.has_positions:
        parser.add("--positions", metavar="POSITIONS", type=unquoted, completes="text",
                   help='only at these sequence positions: 3, "2, 40", 1:5')  # fmt: skip
        parser.add("--position-dim", metavar="DIM", type=int, completes="text",
                   help="the sequence dimension, if it cannot be inferred: 1, -2")  # fmt: skip
    parser.add("--any-shape", action="store_true", help="allow values whose shape differs from the example")
    parser.add("--allow-empty", action="store_true", help="allow a slice that selects nothing")
    return Command(parser, lambda workspace, args: actions.choose(workspace, kind, args))


# --------------------------------------------------------------------------------------------------------------------
# Running a line


_EXPANDED = ("path", "specs", "name", "steps", "positions")  # the arguments in which variables are expanded


def run(workspace: Workspace, line: str, variables: Variables) -> Any:
    """Runs one line after `%graphpatch`, and returns the value to display, or `None`."""
    __tracebackhide__ = True
    workspace.notice_new_graphs()
    name, rest = (*line.split(None, 1), "", "")[:2]
    if not name or name.startswith("#"):
        return actions.status(workspace)
    command = commands().get("help" if name in ("-h", "--help") else name)
    if command is None:
        raise SessionError(_unknown(workspace, name))
    if rest.strip() in ("-h", "--help"):
        print(help_on(name))
        return None
    arguments = command.parser.parse_line(rest)
    for argument in _EXPANDED:
        given = getattr(arguments, argument, None)
        if isinstance(given, list):
            setattr(arguments, argument, [expanded(word, variables) for word in given])
        elif given is not None:
            setattr(arguments, argument, expanded(given, variables))
    with busy(command.doing) if command.doing else nullcontext():
        return command.run(workspace, arguments)


def help_on(name: str) -> str:
    """Returns the help for a command, or for the cell magic."""
    if name == "%%graphpatch":
        return CELL.format_help()
    command = commands().get(name)
    if command is None:
        raise SessionError(f"unknown command {name!r}; nearest: {', '.join(nearest(name, list(commands())))}")
    return command.parser.format_help()


def overview() -> str:
    """Returns the overview of all commands and the cell magic: the summary is right of the usage, or below it."""
    texts = [("%graphpatch", "shows the active graph and the chosen patches")]
    texts += [(one.line, str(one.description)) for one in (*(c.parser for c in commands().values()), CELL)]
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
