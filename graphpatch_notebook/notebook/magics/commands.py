"""The commands of `%graphpatch`: their names, how each is written, and which function runs it."""

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


_WHEN = "[--steps STEPS] [--positions POSITIONS] [--position-dim DIM] [--any-shape] [--allow-empty]"
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
    return Command(kind.name, f"{place} {behind}{_WHEN}", kind.summary, partial(_choose, kind))


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
    from graphpatch_notebook.notebook.magics.command_help import CELLS, explained

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
            (f"%graphpatch {c.name} {c.usage.replace(_WHEN, '[OPTIONS]')}".rstrip(), c.summary)
            for c in commands().values()
        ),
        ("%graphpatch help [COMMAND]", "how it is written"),
        ("%%graphpatch [NAME] [--only PATH|#n ...]", "runs the cell under the chosen patches"),
    ]
    width = shutil.get_terminal_size((100, 24)).columns - 1
    lines = [line for usage, summary in texts for line in _columns(usage, summary, width)]
    options = textwrap.fill(f"[OPTIONS] are {_WHEN}", width, break_on_hyphens=False)
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
