"""Names in exported code: what it needs from its reader, what it imports, and those that it makes up itself."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from graphpatch_notebook.errors import ExportError
from graphpatch_notebook.notebook.chosen import ChosenPatch
from graphpatch_notebook.notebook.expressions import free_names
from graphpatch_notebook.notebook.origin import Origin
from graphpatch_notebook.paths import numbered, parse_path

_LONGEST = 40


class Names:
    """The names that are taken, and those that the code may take besides.

    Args:
        taken: The names of the user's: what the expressions use, and what the probes are put in.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)

    def free(self, *wanted: str) -> str:
        """Returns the first of the names that is free, else the first of them with a number; takes it.

        Example:
            >>> names = Names({"output"})
            >>> names.free("output", "result"), names.free("output", "result")
            ('result', 'output_1')
        """
        numbers = numbered(wanted[0])
        candidates = iter((*wanted, *(next(numbers) for _ in range(len(self._taken) + 1))))
        found = next(name for name in candidates if name not in self._taken and not is_reserved(name))
        self._taken.add(found)
        return found

    def inner(self) -> Names:
        """Returns names for the inside of a function, which hide none of those outside."""
        return Names(self._taken)


def is_reserved(name: str) -> bool:
    """Whether Python itself has a use for `name`."""
    return keyword.iskeyword(name) or hasattr(builtins, name)


def as_name(*words: str) -> str:
    """Returns an identifier made of words of any kind.

    Example:
        >>> as_name("h_0", "mlp"), as_name("0", "a.b")
        ('h_0_mlp', 'sub_0_a_b')
    """
    text = re.sub(r"\W+", "_", "_".join(words), flags=re.ASCII).strip("_")[:_LONGEST].strip("_")
    return text if text and not text[0].isdigit() else f"sub_{text}".strip("_")


def names_in(patch: ChosenPatch) -> list[str]:
    """Returns the variables that the texts of a patch use, in their order."""
    found = [] if patch.value is None else in_order(patch.value)
    return [*found, *(patch.index.names if patch.index is not None else ())]


def in_order(expression: str) -> list[str]:
    """Returns the global names that an expression uses, builtins included, in the order in which they come up."""
    # On a line of its own each: an expression may end in a comment.
    free = set(free_names(f"(\n{expression}\n)"))
    nodes = [node for node in ast.walk(ast.parse(f"(\n{expression}\n)")) if isinstance(node, ast.Name)]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))
    return [name for name in dict.fromkeys(node.id for node in nodes) if name in free]


@dataclass(slots=True)
class Needs:
    """What must be there where the code runs.

    Attributes:
        names: The names, in the order in which a reader meets them.
        imports: The modules among them that the code imports itself.
    """

    names: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)

    def comment(self) -> list[str]:
        """Returns the line that says so, if anything is needed."""
        return [f"# Needs: {', '.join(self.names)}"] if self.names else []


def needs(first: Iterable[str], expressions: Iterable[str], slice_names: Iterable[str]) -> Needs:
    """Returns what code needs.

    Args:
        first: Names that are needed in any case.
        expressions: The expressions in it.
        slice_names: The variables in its slices.
    """
    texts = list(expressions)
    used = [*first, *(name for text in texts for name in in_order(text)), *slice_names]
    meant = {name for text in texts for name in _misleading_builtins(text)} | {*first, *slice_names}
    imports = ["torch"] if "torch" in used and "torch" not in meant and all(map(_is_module, texts)) else []
    names = [
        name for name in dict.fromkeys(used) if name not in imports and (name in meant or not hasattr(builtins, name))
    ]
    return Needs(names, imports)


def _is_module(expression: str) -> bool:
    """Whether `torch` is used in an expression as one uses a module: `torch.ones`, never `torch + 1`."""
    tree = ast.parse(f"(\n{expression}\n)")
    attributes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return all(id(n) in attributes for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "torch")


def _misleading_builtins(expression: str) -> list[str]:
    """Returns the builtin functions that an expression uses like a variable: somebody's tensor is called `input`."""
    tree = ast.parse(f"(\n{expression}\n)")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    plain = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in called]
    return [name for name in plain if hasattr(builtins, name) and not isinstance(getattr(builtins, name), type)]


# --------------------------------------------------------------------------------------------------------------------
# The user's call of the graph


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call.

    Attributes:
        sources: Each as it is written.
        positional: How many of them are positional; `None` where `*` or `**` hides that.
        keywords: The names of the others.
    """

    sources: tuple[str, ...]
    positional: int | None
    keywords: frozenset[str]

    @property
    def expression(self) -> str:
        """All of them in one expression, for asking which names they use."""
        return f"dict({', '.join(self.sources)})"


def parse_arguments(text: str, *, with_options: bool = False) -> Arguments:
    """Returns the arguments of a call as a user wrote them, each on one line.

    Args:
        text: What stands between the parentheses.
        with_options: Keep `extraction_options=...`, which is no input of the model.

    Raises:
        ExportError: They are no arguments.
    """
    source = f"_(\n{text}\n)"
    try:
        call = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "_":
        raise ExportError(f"the example inputs {text!r} are no arguments of a call")
    given: list[tuple[int, int, str, str | None]] = [
        (arg.lineno, arg.col_offset, _one_line(source, arg), None) for arg in call.args
    ]
    has_star = any(isinstance(arg, ast.Starred) for arg in call.args)
    for word in call.keywords:
        if word.arg == "extraction_options" and not with_options:
            continue
        value = _one_line(source, word.value)
        written = f"**{value}" if word.arg is None else f"{word.arg}={value}"
        given.append((word.value.lineno, word.value.col_offset, written, word.arg))
        has_star |= word.arg is None
    given.sort(key=lambda item: item[:2])
    names = frozenset(word for *_, word in given if word is not None)
    return Arguments(tuple(item[2] for item in given), None if has_star else len(call.args), names)


def _one_line(source: str, node: ast.expr) -> str:
    segment = ast.get_source_segment(source, node)
    is_plain = segment is not None and not {"\n", "\r", "#"} & set(segment)
    if not is_plain:
        return ast.unparse(node)
    # A segment leaves the parentheses around it out, which belong to what is a generator, a tuple, or a conditional.
    try:
        call = ast.parse(f"_({segment}, _)", mode="eval").body
    except SyntaxError:
        return ast.unparse(node)
    is_same = isinstance(call, ast.Call) and len(call.args) == 2 and ast.dump(call.args[0]) == ast.dump(node)
    return str(segment) if is_same else ast.unparse(node)


def user_names(patches: Iterable[ChosenPatch], origin: Origin) -> set[str]:
    """Returns all names that are the user's: the code must not use them for something else."""
    mine = {name for patch in patches for name in (*names_in(patch), patch.name or "")}
    return mine | origin.names


def last_words(path: str) -> list[str]:
    """Returns the names at the end of a path that tell a person which node it is, without `output`."""
    parsed = parse_path(path)
    names = parsed.names[:-1] if parsed.names[-1] == "output" and len(parsed.names) > 1 else parsed.names
    return [*names[-2:], *parsed.dig]
