"""The commands of `%graphpatch`: their names, syntax and help, and the functions that run them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.display.progress import busy
from graphpatch_notebook.notebook.magics import choosing, files, views, wrapping
from graphpatch_notebook.notebook.magics.command_line import arguments
from graphpatch_notebook.notebook.session.patch_kinds import PATCH_KINDS, PatchKind
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.paths import nearest


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        name: Its name.
        usage: What follows the name.
        summary: What it does.
        run: Runs it on what follows the name; returns what is to be shown, or `None`.
        doing: What is said of it while it takes long; nothing, if it tells of its progress itself.
    """

    name: str
    usage: str
    summary: str
    run: Callable[[Workspace, str], Any]
    doing: str = ""

    @property
    def line(self) -> str:
        """How it is written."""
        return f"%graphpatch {self.name} {self.usage}".rstrip()


_OPTIONS = "[--steps STEPS] [--positions POSITIONS] [--position-dim DIM] [--any-shape] [--allow-empty]"
_LOOKING = [
    Command("wrap", "NAME = MODEL(ARGS)", "makes a PatchableGraph of a model, on example inputs", wrapping.wrap),
    Command("use", "NAME", "picks the graph that commands are about", wrapping.use),
    Command("show", "[PATH] [--tokenizer NAME] [--inputs ARGS]", "the tree, to patch by click", views.show),
    Command("ls", "[PATH]", "what is in a graph", views.ls, "Listing"),
    Command("find", "[QUERY]", "nodes: mul, op:linear, shape:8192, is:patched, h_*.mlp", views.find, "Searching"),
    Command("code", "PATH", "the code of a graph or a node", views.code, "Building code"),
    Command("shape", "PATH[slice]", "the recorded shape", views.shape),
]
_EDITING = [
    Command("rm", "PATH|#n ...", "removes patches", choosing.remove),
    Command("enable", "PATH|#n ...", "switches patches on", choosing.enable),
    Command("disable", "PATH|#n ...", "switches patches off, and keeps them", choosing.disable),
    Command("clear", "", "removes all patches", choosing.clear),
    Command("undo", "", "takes the last edit back", choosing.undo),
    Command("redo", "", "does again what was taken back", choosing.redo),
    Command("list", "", "the chosen patches", views.listed),
    Command(
        "export",
        "[-o NAME|FILE] [--cell] [--hooks] [--force]",
        "the chosen patches as Python",
        files.export,
        "Exporting",
    ),
    Command("save", "FILE [--force]", "writes the chosen patches to a file", files.save),
    Command("load", "FILE [--trust]", "reads them back", files.load),
]


def commands() -> dict[str, Command]:
    """Returns all commands by their names, in the order of the help; one for each kind of patch is among them."""
    return {command.name: command for command in (*_LOOKING, *map(_choosing, PATCH_KINDS.values()), *_EDITING)}


def _choosing(kind: PatchKind) -> Command:
    place = "PATH[slice]" if kind.has_slice else "PATH"
    behind = "[NAME] " if kind.keeps is not None else "" if kind.value is None else f"{kind.value.word} "
    return Command(kind.name, f"{place} {behind}{_OPTIONS}", kind.summary, partial(_choose, kind))


def _choose(kind: PatchKind, workspace: Workspace, text: str) -> None:
    choosing.choose(workspace, kind, text)


def run(workspace: Workspace, line: str) -> Any:
    """Runs what follows `%graphpatch` on a line; returns what is to be shown, or `None`.

    Raises:
        SessionError: The user's mistake, in words.
    """
    __tracebackhide__ = True
    workspace.notice_new_graphs()
    name, rest = (*line.split(None, 1), "", "")[:2]
    if not name or name.startswith("#"):
        return views.status(workspace)
    if name in ("help", "-h", "--help"):
        return help_on(rest)
    command = commands().get(name)
    if command is None:
        raise SessionError(_unknown(workspace, name))
    if rest.strip() in ("-h", "--help"):
        return help_on(name)
    with busy(command.doing) if command.doing else nullcontext():
        return command.run(workspace, rest)


def help_on(text: str) -> None:
    """Prints how a command is written and what its options mean, or how all of them are written."""
    asked = arguments(text)
    if not asked:
        print(overview())
        return
    for name in asked:
        if name == "%%graphpatch":
            print(CELLS)
            continue
        command = commands().get(name)
        if command is None:
            raise SessionError(f"there is no command {name!r}; nearest: {', '.join(nearest(name, list(commands())))}")
        usage = textwrap.wrap(command.line, 79, subsequent_indent=" " * 8, break_on_hyphens=False)
        print("\n".join([*usage, f"    {command.summary}", "", explained(name)]))


def overview() -> str:
    """Returns how each command is written and what it does, and how cells run; as wide as the terminal."""
    texts = [
        ("%graphpatch", "the active graph and the chosen patches"),
        *(
            (f"%graphpatch {c.name} {c.usage.replace(_OPTIONS, '[OPTIONS]')}".rstrip(), c.summary)
            for c in commands().values()
        ),
        ("%graphpatch help [COMMAND]", "how it is written"),
        ("%%graphpatch [NAME] [--only PATH|#n ...]", "runs the cell under the chosen patches"),
    ]
    width = shutil.get_terminal_size((100, 24)).columns - 1
    lines = [line for usage, summary in texts for line in _columns(usage, summary, width)]
    options = textwrap.fill(f"[OPTIONS] are {_OPTIONS}", width, break_on_hyphens=False)
    return "\n".join([*lines, "", options])


def _columns(usage: str, summary: str, width: int) -> list[str]:
    """Returns the lines of one command: what it does behind how it is written, or below where that is long."""
    first = f"{usage:<{_USAGE_WIDTH}}"
    room = max(20, width - _USAGE_WIDTH)
    below = textwrap.wrap(summary, room, break_on_hyphens=False)
    if len(usage) >= _USAGE_WIDTH:
        return [usage, *(" " * _USAGE_WIDTH + line for line in below)]
    return [first + below[0], *(" " * _USAGE_WIDTH + line for line in below[1:])]


_USAGE_WIDTH = 44


# What people type for these, to whom the nearest names would say nothing.
_OTHER_WORDS = {
    "delete": "%graphpatch rm PATH|#n ...",
    "remove": "%graphpatch rm PATH|#n ...",
    "del": "%graphpatch rm PATH|#n ...",
    "set": "%graphpatch replace PATH[slice] VALUE",
    "ablate": "%graphpatch zero PATH[slice]",
    "tree": "%graphpatch show [PATH]",
    "browse": "%graphpatch show [PATH]",
    "run": "%%graphpatch, as the first line of the cell to run",
    "off": "%graphpatch disable PATH|#n ...",
    "on": "%graphpatch enable PATH|#n ...",
}


def _unknown(workspace: Workspace, name: str) -> str:
    if name in workspace.graphs():
        return f"{name!r} is a graph, not a command; %graphpatch use {name} picks it"
    if name in _OTHER_WORDS:
        return f"there is no command {name!r}; it is written {_OTHER_WORDS[name]}"
    close = ", ".join(map(repr, nearest(name, list(commands()))))
    return f"there is no command {name!r}; nearest: {close}; %graphpatch help shows all"


# --------------------------------------------------------------------------------------------------------------------
# Help for one command


_PATH = """
PATH names a node: h_0.mlp.output. A value in a container follows a bar:
output|sub_0 is the first of a tuple, output|state.h leads on. Tab completes.
In a loop, {i} and $name stand for variables: h_{i}.output.
"""
_SLICE = """
[slice] is one of a tensor, directly behind the path: [:, -1], [0, 3:5],
[..., k]. Without it the whole value is meant.
"""
_WHEN = """
--steps STEPS          only in these steps of a generation: prefill, decoding,
                       or numbers: 0, "2, 4", 1:
--positions POSITIONS  only at these positions of the sequence: 3, "2, 40", 1:5
--position-dim DIM     the dimension that runs along the sequence, if it cannot
                       be told: 1, -2
--any-shape            also for values of other shapes than in the example
--allow-empty          the slice may select nothing
"""
_VARIABLE = """
NAME is the variable; without it one is chosen, after the path. It is filled
when a cell has run under the patches.
"""
_WHICH = """
PATH means all patches there, PATH[slice] those with this slice, h_*.output
those whose path looks so, and #n the one of this number, as list shows it.
"""
_PLACE = """
PATH is that of a graph, a node, or a value in a container: h_0, h_0.mlp.output,
output|sub_0. Without it the whole model is meant.
"""
_BROWSER = """
--tokenizer NAME  the variable with the tokenizer: Run shows tokens in words
--inputs ARGS     what Run runs on, as in a call: "ids, attention_mask=mask"
"""
_QUERY = """
QUERY holds terms, which must all hold:
  attn              this text is in the path or the torch function
  "mlp.act"         these whole names are in the path
  h_*.attn          these texts, in this order; * is any text
  op:mul            made by this torch function; * is any text: op:*norm
  shape:64          has a dimension of this size
  shape:[1,*,64]    is of this shape; * is any size, ... any number of them
  dtype:f16         is of this dtype
  is:parameter      also is:input, buffer, op, output, tensor, number, patched,
                    opaque, plumbing (only sizes: found only by this word)
  module:LlamaMLP   is in a module of this class
  -term             the term does not hold
"""

# What a command's forms and options mean, and two examples of it at least.
_TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "wrap": (
        """
MODEL(ARGS) is a call as you would write it, on example inputs: the model runs
once, and what it does is captured. NAME is the variable for the graph.
Patches that were chosen for a graph in NAME are carried over.
""",
        ("wrap pg = model(input_ids)", "wrap pg = model(**tokens)"),
    ),
    "use": (
        "\nNAME is a variable with a PatchableGraph. It is needed with several only.\n",
        ("use pg", "use small"),
    ),
    "show": (_PLACE + _BROWSER, ("show", "show h_0.mlp", "show --tokenizer tokenizer")),
    "ls": (_PLACE, ("ls", "ls h_0.attn")),
    "find": (_QUERY, ("find mlp op:linear -is:patched", "find shape:[1,*,768] is:output")),
    "code": (_PLACE, ("code h_0.mlp", "code h_0.mlp.mul")),
    "shape": (_PLACE + _SLICE, ("shape h_0.output", "shape h_0.output[:, -1]")),
    "rm": (_WHICH, ("rm #1 #3", "rm h_*.mlp.output")),
    "enable": (_WHICH, ("enable #1", "enable h_0.output")),
    "disable": (_WHICH, ("disable #1", "disable h_*.mlp.output")),
    "clear": ("\nIt can be undone.\n", ("clear", "undo")),
    "undo": ("\nEach command that changes what is chosen is one edit.\n", ("undo", "redo")),
    "redo": ("\nThat is, by undo.\n", ("redo", "undo")),
    "list": ("\nThe numbers are those that rm, enable and disable take.\n", ("list", "rm #1")),
    "export": (
        """
-o NAME   puts the code in a variable
-o FILE   writes it to a file, with what makes the graph: it runs by itself
--cell    puts it in a new cell
--hooks   writes plain torch with forward hooks, which needs no graphpatch
--force   overwrites what no export has put there
Without any of them the code is shown; code = %graphpatch export keeps it.
""",
        ("export --hooks", "export -o patched.py"),
    ),
    "save": (
        """
FILE is the name of a file, for load; one with spaces stands in quotes.
--force   overwrites a file that holds something else
""",
        ("save session.json", 'save "my patches.json" --force'),
    ),
    "load": (
        """
FILE is what save has written. It takes the place of what is chosen; undo brings
that back. In a file that you have not saved here, values that are more than
numbers, names, arithmetic and subscripts are code of somebody's: they are
shown, and not run until you trust the file.
--trust   runs them from now on, as long as the file stays as it is
""",
        ("load session.json", 'load "my patches.json" --trust'),
    ),
}

CELLS = """\
%%graphpatch [NAME] [--only PATH|#n ...]
    runs the cell under the chosen patches

It is the first line of the cell. NAME is the variable of the graph, if there
are several.
--only PATH|#n ...  under some of the patches: those there, or of these numbers

Examples:
    %%graphpatch
    %%graphpatch pg --only #1 h_0.mlp.output"""


def explained(name: str) -> str:
    """Returns what the forms and options of a command mean, with examples; no line is longer than 80 columns."""
    kind = PATCH_KINDS.get(name)
    text = _TEXTS[name][0] if kind is None else _of_kind(kind)
    parts = [text.strip("\n").replace("\n\n", "\n")]
    if typed := examples(name):
        parts.append("\n".join(["Examples:", *(f"    %graphpatch {example}" for example in typed)]))
    return "\n\n".join(parts)


def _of_kind(kind: PatchKind) -> str:
    given = _VARIABLE if kind.keeps is not None else "" if kind.value is None else f"{kind.value.help}\n"
    return given + _PATH + (_SLICE if kind.has_slice else "") + _WHEN


def examples(name: str) -> tuple[str, ...]:
    """Returns the examples of a command, as they follow `%graphpatch`."""
    return PATCH_KINDS[name].examples if name in PATCH_KINDS else _TEXTS[name][1]
