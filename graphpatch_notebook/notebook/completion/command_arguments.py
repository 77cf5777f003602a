"""What follows `%graphpatch` on a line that is being typed: which argument of which command the cursor stands in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from graphpatch_notebook.notebook.session.patch_kinds import PATCH_KINDS, PatchKind

ArgumentKind: TypeAlias = Literal[
    "node",  # `PATH[slice]`, of something that can be patched
    "place",  # `PATH`, also of a graph
    "chosen",  # `#n`, or the path of a chosen patch
    "graph",  # a variable that holds a PatchableGraph
    "model",  # `NAME = MODEL(ARGS)`
    "value",  # a Python expression
    "query",  # terms of a search
    "steps",  # `prefill`, `decoding`, or numbers
    "file",
    "command",
    "name",  # the variable of a probe
    "slice",  # behind the bracket that closes a slice
    "new",  # whatever the user likes
]


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a command takes.

    Attributes:
        positional: The kinds of its arguments, in order; the last one may come any number of times.
        options: Its options, each with the kind of its argument; `None` for those that take none.
    """

    positional: tuple[ArgumentKind, ...] = ()
    options: Mapping[str, ArgumentKind | None] = field(default_factory=dict)

    def kind(self, words: list[str]) -> ArgumentKind | None:
        """Returns the kind of the argument behind these words; `None` where there is none any more."""
        if words and (kind := self.options.get(words[-1])) is not None:
            return kind
        count = len(self.given(words))
        return self.positional[min(count, len(self.positional) - 1)] if self.positional else None

    def given(self, words: list[str]) -> list[str]:
        """Returns those of the words that are neither options nor arguments of options."""
        found = []
        is_argument = False
        for word in words:
            if not is_argument and word not in self.options:
                found.append(word)
            is_argument = self.options.get(word) is not None
        return found


_WHEN: dict[str, ArgumentKind | None] = {
    "--steps": "steps",
    "--positions": "new",
    "--position-dim": "new",
    "--any-shape": None,
    "--allow-empty": None,
}
_CHOSEN = Arguments(("chosen",))
_COMMANDS: dict[str, Arguments] = {
    "wrap": Arguments(("model",)),
    "use": Arguments(("graph",)),
    "show": Arguments(("place", "new"), {"--tokenizer": "value", "--inputs": "value"}),
    "ls": Arguments(("place", "new")),
    "find": Arguments(("query",)),
    "code": Arguments(("place", "new")),
    "shape": Arguments(("place", "new")),
    "rm": _CHOSEN,
    "enable": _CHOSEN,
    "disable": _CHOSEN,
    "clear": Arguments(),
    "undo": Arguments(),
    "redo": Arguments(),
    "list": Arguments(),
    "export": Arguments((), {"-o": "file", "--cell": None, "--hooks": None, "--force": None}),
    "save": Arguments(("file", "new"), {"--force": None}),
    "load": Arguments(("file", "new"), {"--trust": None}),
    "help": Arguments(("command",)),
}
CELL = Arguments(("graph", "chosen"), {"--only": "chosen"})


def arguments_by_command() -> dict[str, Arguments]:
    """Returns what each command takes; one for each kind of patch is among them."""
    return _COMMANDS | {kind.name: _of_kind(kind) for kind in PATCH_KINDS.values()}


def _of_kind(kind: PatchKind) -> Arguments:
    if kind.keeps is not None:
        return Arguments(("node", "name", "new"), _WHEN)
    return Arguments(("node", "new" if kind.value is None else "value"), _WHEN)


@dataclass(frozen=True, slots=True)
class Argument:
    """The argument that the cursor stands in.

    Attributes:
        kind: What it is; `option` for the name of an option.
        typed: What is there of it.
        start: Where in the line it begins.
        options: The options that may stand here.
        path: The path that the command is about, with its slice, where that stands before.
    """

    kind: ArgumentKind | Literal["option"]
    typed: str
    start: int
    options: tuple[str, ...] = ()
    path: str = field(default="", repr=False)


_MAGIC = re.compile(r"\s*(?P<assigned>[^\s%!?\"'(\[{#][^%!?\"'(\[{#]*=\s*)?(?P<mark>%{0,2})graphpatch(?=\s)")
_IDENTIFIER = re.compile(r"(?<![\w.])(?:[^\W\d]\w*)?$")
_LAST_TERM = re.compile(r"\S*$")


def argument_at_end(line: str, *, is_first: bool, may_lack_mark: bool = False) -> Argument | None:
    """Returns the argument in which the cursor at the end of `line` stands; `None` where it is in none.

    Args:
        line: The line, up to the cursor.
        is_first: Whether it is the first of its cell, where `%%graphpatch` may stand.
        may_lack_mark: Whether `graphpatch` alone means the magic, too.

    Example:
        >>> argument_at_end("x = %graphpatch ls h_0.ml", is_first=True)
        Argument(kind='place', typed='h_0.ml', start=19, options=())
    """
    match = _MAGIC.match(line)
    if match is None or (match["mark"] == "%%" and not is_first):
        return None
    if not match["mark"] and (match["assigned"] or not may_lack_mark):
        return None
    words = list(_words(line, match.end()))
    start, typed = words.pop()
    texts = [text for _, text in words]
    if match["mark"] == "%%":
        return _argument(CELL, texts, typed, start, line)
    if not texts:
        return Argument("command", typed, start)
    command = arguments_by_command().get(texts[0])
    return None if command is None else _argument(command, texts[1:], typed, start, line)


def _argument(command: Arguments, words: list[str], typed: str, start: int, line: str) -> Argument | None:
    options = tuple(option for option in command.options if option not in words)
    kind = command.kind(words)
    is_behind_option = bool(words) and command.options.get(words[-1]) is not None
    if typed.startswith("-") and not is_behind_option and any(option.startswith(typed) for option in options):
        return Argument("option", typed, start, options)
    if kind is None or (kind == "new" and not typed and options and not is_behind_option):
        return Argument("option", typed, start, options) if not typed and options else None
    if kind == "node" and (bracket := _bracket(typed)) is not None:
        if typed.endswith("]") and typed.count("[") == typed.count("]"):
            return Argument("slice", typed, start)
        kind, start = "value", start + bracket + 1
    if kind == "model" and "=" not in line[: start + len(typed)].partition("wrap")[2]:
        return None
    if kind in ("value", "model"):
        identifier = _IDENTIFIER.search(line, start)
        return None if identifier is None else Argument(kind, identifier.group(), identifier.start(), options)
    if kind == "query":
        term = _LAST_TERM.search(line)
        assert term is not None  # it may be empty
        excluded = term.group().startswith("-")
        return Argument(kind, term.group()[excluded:], term.start() + excluded)
    return Argument(kind, typed, start, options, path=next(iter(command.given(words)), ""))


def _words(line: str, position: int) -> Iterator[tuple[int, str]]:
    """Yields the words behind `position` with where they begin; the last one, maybe empty, ends at the cursor."""
    while True:
        while position < len(line) and line[position].isspace():
            position += 1
        start = position
        position = _word_end(line, start)
        yield start, line[start:position]
        if position == len(line):
            return


def _word_end(line: str, position: int) -> int:
    quote, depth = "", 0
    while position < len(line):
        character = line[position]
        if quote:
            position += character == "\\"
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character.isspace() and depth <= 0:
            return position
        else:
            depth += (character in "([{") - (character in ")]}")
        position += 1
    return len(line)


def _bracket(typed: str) -> int | None:
    """Returns where the slice behind a path begins, outside of quotes."""
    match = re.match(r'(?:"(?:[^"\\]|\\.)*"|[^"\[])*', typed)
    end = match.end() if match else 0
    return end if typed.startswith("[", end) else None
