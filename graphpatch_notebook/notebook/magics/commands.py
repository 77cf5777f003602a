"""The commands of `%graphpatch`: their names, their syntax, their help, and the functions that run them."""

from __future__ import annotations

import functools
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.display.progress import busy
from graphpatch_notebook.notebook.magics import choosing, files, views, wrapping
from graphpatch_notebook.notebook.magics.command_line import (
    OPTIONS,
    Variables,
    arguments,
    expanded_patch,
    expanded_words,
    leading_options,
)
from graphpatch_notebook.notebook.session.patch_kinds import PATCH_KINDS, PatchKind
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.paths import nearest

_SHORT = re.compile(r"\[--steps .*--allow-empty\]")
_COMMAND = re.compile(r"\s*(\S+)\s*")


ArgumentKind: TypeAlias = Literal[
    "node",  # `PATH[slice]` of a value that can be patched
    "place",  # `PATH`, including graphs
    "chosen",  # `#n`, or the path of a chosen patch
    "graph",  # a variable that holds a PatchableGraph
    "model",  # `NAME = MODEL(ARGS)`
    "value",  # a Python expression
    "query",  # terms of a search
    "steps",  # `prefill`, `decoding`, or numbers
    "file",
    "command",
    "name",  # the variable of a probe
    "slice",  # after the bracket that closes a slice
    "new",  # any text
]


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a command."""

    positional: tuple[ArgumentKind, ...] = ()  # in order; the last one can be repeated
    options: Mapping[str, ArgumentKind | None] = field(default_factory=dict)  # `None` for one without an argument

    def kind(self, words: list[str]) -> ArgumentKind | None:
        """Returns the kind of the argument after these words, or `None` if there is no further argument."""
        if words and (kind := self.options.get(words[-1])) is not None:
            return kind
        count = len(self.given(words))
        return self.positional[min(count, len(self.positional) - 1)] if self.positional else None

    def given(self, words: list[str]) -> list[str]:
        """Returns the words that are neither options nor arguments of options."""
        found = []
        is_argument = False
        for word in words:
            if not is_argument and word not in self.options:
                found.append(word)
            is_argument = self.options.get(word) is not None
        return found


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        name: The name.
        usage: The syntax of the arguments, as the help shows it.
        summary: One line that says what the command does.
        run: Runs the command on the text after its name. Returns the value to display, or `None`.
        arguments: What Tab completes.
        help: What the help says about the arguments and options.
        examples: At least two, without `%graphpatch`.
        doing: The text of the progress line during a long command; empty if the command shows its own progress.
    """

    name: str
    usage: str
    summary: str
    run: Callable[[Workspace, str], Any]
    arguments: Arguments
    help: str
    examples: tuple[str, ...]
    doing: str = ""

    @property
    def line(self) -> str:
        """The syntax of the command."""
        return f"%graphpatch {self.name} {self.usage}".rstrip()

    @property
    def has_paths(self) -> bool:
        """Whether its arguments are paths of nodes, in which variables are expanded."""
        return not {"place", "chosen"}.isdisjoint(self.arguments.positional)


# --------------------------------------------------------------------------------------------------------------------
# The commands, with their help


_PATH = """
PATH is the path of a node: h_0.mlp.output, or the name of a component:
layers[0].attn.heads[5].z, @embed. A bar selects a value inside a container:
output|sub_0 is the first item of a tuple, output|state.h is nested.
Tab completes paths. In a loop, use variables as {i} or $name: h_{i}.output.
"""
_SLICE = """
[slice] selects a part of a tensor. It directly follows the path: [:, -1],
[0, 3:5], [..., k]. Default: the whole value.
"""
_STEPS = """
--steps STEPS          apply only in these steps of a generation: prefill,
                       decoding, or numbers: 0, "2, 4", 1:
"""
_POSITIONS = """\
--positions POSITIONS  apply only at these sequence positions: 3, "2, 40", 1:5
--position-dim DIM     the sequence dimension, if it cannot be inferred: 1, -2
"""
_SHAPES = """\
--any-shape            allow values whose shape differs from the example
--allow-empty          allow a slice that selects nothing
"""
_VARIABLE = """
NAME is the variable that receives the value when a cell runs under the
patches. Default: a name derived from the path.
"""
_WHICH = """
PATH selects all patches at a path, PATH[slice] those with this slice,
h_*.output those whose path matches, and #n the patch with this number in list.
"""
_PLACE = """
PATH is the path of a graph, a node, or a value in a container: h_0,
h_0.mlp.output, output|sub_0. Default: the whole model.
"""
_BROWSER = """
--tokenizer NAME  the variable of a tokenizer: Run shows tokens as text
--inputs ARGS     the inputs of Run, as in a call: "ids, attention_mask=mask"
"""
_QUERY = """
QUERY is a list of terms. A node is found if it matches all of them:
  attn              the path or the torch function contains this text
  "mlp.act"         the path contains these whole names
  h_*.attn          contains these texts in this order; * is any text
  op:mul            the torch function; * is any text: op:*norm
  shape:64          a dimension has this size
  shape:[1,*,64]    the whole shape; * is any size, ... any number of sizes
  dtype:f16         the dtype
  is:parameter      also is:input, buffer, op, output, tensor, number, patched,
                    opaque, size (only carries sizes; other terms never find it)
  module:LlamaMLP   the class of the module that the node is in
  -term             does not match the term
"""

_USAGES = {name: f"[{name} {word}]" if word else f"[{name}]" for name, word in OPTIONS.items()}
_OPTIONS = " ".join(_USAGES.values())
_INPUTS: dict[str, ArgumentKind | None] = {"--tokenizer": "value", "--inputs": "value"}
_ONE_PLACE = Arguments(("place", "new"))
_CHOSEN = Arguments(("chosen",))
_NONE = Arguments()
CELL = Arguments(("graph", "chosen"), {"--only": "chosen"})
_LOOKING = [
    Command(
        "wrap",
        "NAME = MODEL(ARGS)",
        "captures a model on example inputs",
        wrapping.wrap,
        Arguments(("model",)),
        """
MODEL(ARGS) is a call of the model on example inputs. The model runs once and
is captured. NAME is the variable that receives the PatchableGraph. If NAME
holds a graph already, its chosen patches are carried over.
""",
        ("wrap pg = model(input_ids)", "wrap pg = model(**tokens)"),
    ),
    Command(
        "use",
        "NAME",
        "selects the graph that commands apply to",
        wrapping.use,
        Arguments(("graph",)),
        "\nNAME is the variable of a PatchableGraph. Only needed if there are several.\n",
        ("use pg", "use small"),
    ),
    Command(
        "show",
        "[PATH] [--tokenizer NAME] [--inputs ARGS]",
        "shows the tree; a click patches a node",
        views.show,
        Arguments(("place", "new"), _INPUTS),
        _PLACE + _BROWSER,
        ("show", "show h_0.mlp", "show --tokenizer tokenizer"),
    ),
    Command(
        "attention",
        "[--tokenizer NAME] [--inputs ARGS]",
        "shows attention patterns; a click selects a head",
        views.attention,
        Arguments((), _INPUTS),
        """
--tokenizer NAME  the variable of a tokenizer: positions have their tokens
--inputs ARGS     other inputs than the example: "ids, attention_mask=mask"
""",
        ("attention", "attention --tokenizer tokenizer"),
        "Running",
    ),
    Command(
        "lens",
        "[TOKEN] [--stream STREAM] [--tokenizer NAME] [--inputs ARGS]",
        "shows what each layer says at each position",
        views.lens,
        Arguments(("new",), {"--stream": "new", **_INPUTS}),
        """
TOKEN is the token whose probability is shown: a number, or a text in quotes.
Default: what the model itself finds most probable at each position.
--stream STREAM   residual (the states after each layer), attention or mlp
"""
        + _BROWSER.lstrip("\n"),
        ("lens", "lens 464 --stream mlp"),
        "Reading the layers",
    ),
    Command(
        "generation",
        "[COUNT] [--tokenizer NAME] [--inputs ARGS]",
        "shows generated tokens; a click branches at one",
        views.generation,
        Arguments(("new",), _INPUTS),
        """
COUNT is how many tokens are generated at most. Default: 20.
--tokenizer NAME  the variable of a tokenizer: tokens are shown as text
--inputs ARGS     the arguments of generate: "ids, eos_token_id=50256"
""",
        ("generation", "generation 5 --tokenizer tokenizer"),
        "Generating",
    ),
    Command(
        "ls", "[PATH]", "lists the contents of a graph", views.ls, _ONE_PLACE, _PLACE, ("ls", "ls h_0.attn"), "Listing"
    ),
    Command(
        "find",
        "[QUERY]",
        "finds nodes: mul, op:linear, shape:8192, h_*.mlp",
        views.find,
        Arguments(("query",)),
        _QUERY,
        ("find mlp op:linear -is:patched", "find shape:[1,*,768] is:output"),
        "Searching",
    ),
    Command(
        "code",
        "PATH",
        "shows the code of a graph or a node",
        views.code,
        _ONE_PLACE,
        _PLACE,
        ("code h_0.mlp", "code h_0.mlp.mul"),
        "Building code",
    ),
    Command(
        "shape",
        "PATH[slice]",
        "shows the recorded shape",
        views.shape,
        _ONE_PLACE,
        _PLACE + _SLICE,
        ("shape h_0.output", "shape h_0.output[:, -1]"),
    ),
]
_EDITING = [
    Command(
        "rm", "PATH|#n ...", "removes patches", choosing.remove, _CHOSEN, _WHICH, ("rm #1 #3", "rm h_*.mlp.output")
    ),
    Command(
        "enable", "PATH|#n ...", "enables patches", choosing.enable, _CHOSEN, _WHICH, ("enable #1", "enable h_0.output")
    ),
    Command(
        "disable",
        "PATH|#n ...",
        "disables patches, without removing them",
        choosing.disable,
        _CHOSEN,
        _WHICH,
        ("disable #1", "disable h_*.mlp.output"),
    ),
    Command(
        "clear", "", "removes all patches", choosing.clear, _NONE, "\nUse undo to restore them.\n", ("clear", "undo")
    ),
    Command(
        "undo",
        "",
        "undoes the last edit",
        choosing.undo,
        _NONE,
        "\nEach command that changes the chosen patches is one edit.\n",
        ("undo", "redo"),
    ),
    Command(
        "redo",
        "",
        "redoes the last edit that was undone",
        choosing.redo,
        _NONE,
        "\nA new edit clears the edits that redo could restore.\n",
        ("redo", "undo"),
    ),
    Command(
        "list",
        "",
        "lists the chosen patches",
        views.listed,
        _NONE,
        "\nThe commands rm, enable and disable take the numbers shown in the list.\n",
        ("list", "rm #1"),
    ),
    Command(
        "export",
        "[-o NAME|FILE] [--cell] [--force]",
        "shows the chosen patches as Python code",
        files.export,
        Arguments((), {"-o": "file", "--cell": None, "--force": None}),
        """
-o NAME   put the code in a variable
-o FILE   write a complete script to a file, including the code for the graph
--cell    put the code in a new cell
--force   overwrite a variable or file that export did not write
By default, the code is shown. To keep it, use code = %graphpatch export.
""",
        ("export --cell", "export -o patched.py"),
        "Exporting",
    ),
    Command(
        "save",
        "FILE [--force]",
        "saves the chosen patches to a file",
        files.save,
        Arguments(("file", "new"), {"--force": None}),
        """
FILE is the file to write. Put a name with spaces in quotes.
--force   overwrite a file that is not a session file
""",
        ("save session.json", 'save "my patches.json" --force'),
    ),
    Command(
        "load",
        "FILE [--trust]",
        "loads chosen patches from a file",
        files.load,
        Arguments(("file", "new"), {"--trust": None}),
        """
FILE is a file written by save. Its patches replace the chosen patches; use
undo to restore those. In a file that you did not save yourself, a value can be
code that someone else wrote: anything except numbers, names, arithmetic and
subscripts. Such values are shown, but do not run until you trust the file.
--trust   trust the file until its content changes
""",
        ("load session.json", 'load "my patches.json" --trust'),
    ),
    Command(
        "help",
        "[COMMAND]",
        "shows help for all commands, or for one",
        lambda _, text: help_on(text),
        Arguments(("command",)),
        "\nCOMMAND is the name of a command. Default: an overview of all commands.\n",
        ("help", "help zero"),
    ),
]


def commands() -> dict[str, Command]:
    """Returns all commands by name, in the order of the help. Each kind of patch is a command."""
    return {command.name: command for command in (*_LOOKING, *map(_choosing, PATCH_KINDS.values()), *_EDITING)}


@functools.cache
def _choosing(kind: PatchKind) -> Command:
    place, sliced = ("PATH[slice]", _SLICE) if kind.has_slice else ("PATH", "")
    positional: tuple[ArgumentKind, ...] = ("node", "new")
    word = what = ""
    if kind.keeps is not None:
        word, what, positional = "[NAME] ", _VARIABLE, ("node", "name", "new")
    elif kind.value is not None:
        word, what, positional = f"{kind.value.word} ", f"{kind.value.help}\n", ("node", "value")
    known = [name for name in OPTIONS if kind.has_positions or not name.startswith("--position")]
    options: dict[str, ArgumentKind | None] = {name: "new" if OPTIONS[name] else None for name in known}
    return Command(
        kind.name,
        f"{place} {word}{' '.join(_USAGES[name] for name in known)}",
        kind.summary,
        lambda workspace, text: choosing.choose(workspace, kind, text),
        Arguments(positional, {**options, "--steps": "steps"}),
        what + _PATH + sliced + _STEPS + (_POSITIONS if kind.has_positions else "") + _SHAPES,
        kind.examples,
    )


def run(workspace: Workspace, line: str, variables: Variables) -> Any:
    """Runs one line after `%graphpatch`, and returns the value to display, or `None`."""
    __tracebackhide__ = True
    line = expanded(line, variables)
    workspace.notice_new_graphs()
    name, rest = (*line.split(None, 1), "", "")[:2]
    if not name or name.startswith("#"):
        return views.status(workspace)
    command = commands().get("help" if name in ("-h", "--help") else name)
    if command is None:
        raise SessionError(_unknown(workspace, name))
    if rest.strip() in ("-h", "--help"):
        return help_on(name)
    with busy(command.doing) if command.doing else nullcontext():
        return command.run(workspace, rest)


def help_on(text: str) -> None:
    """Prints the help for the commands in `text`, or an overview of all commands."""
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
            raise SessionError(f"unknown command {name!r}; nearest: {', '.join(nearest(name, list(commands())))}")
        usage = textwrap.wrap(command.line, 79, subsequent_indent=" " * 8, break_on_hyphens=False)
        print("\n".join([*usage, f"    {command.summary}", "", _explained(command)]))


def overview() -> str:
    """Returns the overview of all commands and the cell magic, fitted to the width of the terminal."""
    texts = [
        ("%graphpatch", "shows the active graph and the chosen patches"),
        *(
            (f"%graphpatch {c.name} {_SHORT.sub('[OPTIONS]', c.usage)}".rstrip(), c.summary)
            for c in commands().values()
        ),
        ("%%graphpatch [NAME] [--only PATH|#n ...]", "runs the cell under the chosen patches"),
    ]
    width = shutil.get_terminal_size((100, 24)).columns - 1
    lines = [line for usage, summary in texts for line in _columns(usage, summary, width)]
    options = textwrap.fill(f"[OPTIONS] are {_OPTIONS}", width, break_on_hyphens=False)
    return "\n".join([*lines, "", options])


def _columns(usage: str, summary: str, width: int) -> list[str]:
    """Returns the lines of one command: the summary is to the right of the usage, or below a long usage."""
    first = f"{usage:<{_USAGE_WIDTH}}"
    room = max(20, width - _USAGE_WIDTH)
    below = textwrap.wrap(summary, room, break_on_hyphens=False)
    if len(usage) >= _USAGE_WIDTH:
        return [usage, *(" " * _USAGE_WIDTH + line for line in below)]
    return [first + below[0], *(" " * _USAGE_WIDTH + line for line in below[1:])]


_USAGE_WIDTH = 44


# Common words from other tools, for which the most similar command names would not help.
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
        return f"{name!r} is a graph, not a command; %graphpatch use {name} selects it"
    if name in _OTHER_WORDS:
        return f"unknown command {name!r}; use {_OTHER_WORDS[name]}"
    close = ", ".join(map(repr, nearest(name, list(commands()))))
    return f"unknown command {name!r}; nearest: {close}; %graphpatch help shows all"


def expanded(line: str, variables: Variables) -> str:
    """Returns a line of the magic, with variables in its paths and variable names replaced by their values.

    Example:
        >>> expanded("add h_{i}.output[:, 0] {'a': 1}['a']", lambda: {"i": 3})
        "add h_3.output[:, 0] {'a': 1}['a']"
    """
    match = _COMMAND.match(line)
    if match is None or not ("{" in line or "$" in line):
        return line
    rest, command = line[match.end() :].rstrip(), commands().get(match[1])
    if (kind := PATCH_KINDS.get(match[1])) is not None:
        after = leading_options(rest)[1]
        front = rest[: len(rest) - len(after)]
        return line[: match.end()] + front + expanded_patch(after, variables, has_name=kind.keeps is not None)
    return line[: match.end()] + expanded_words(rest, variables) if command is not None and command.has_paths else line


CELLS = """\
%%graphpatch [NAME] [--only PATH|#n ...]
    runs the cell under the chosen patches

Write it as the first line of a cell. NAME is the variable of the graph. Only
needed if there are several.
--only PATH|#n ...  use only the patches at these paths or with these numbers

Examples:
    %%graphpatch
    %%graphpatch pg --only #1 h_0.mlp.output"""


def _explained(command: Command) -> str:
    """Returns the meaning of the arguments and options, with examples, in lines of up to 80 columns."""
    parts = [command.help.strip("\n").replace("\n\n", "\n")]
    if command.examples:
        parts.append("\n".join(["Examples:", *(f"    %graphpatch {example}" for example in command.examples)]))
    return "\n\n".join(parts)
