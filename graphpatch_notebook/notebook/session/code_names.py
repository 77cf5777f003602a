"""Names in exported code: what it needs from its reader, what it imports, and those that it makes up itself."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphpatch_notebook.errors import ExportError
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import as_argument, free_names, is_argument
from graphpatch_notebook.notebook.session.origin import Origin
from graphpatch_notebook.notebook.session.syntax_trees import parsed
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


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be there where the code runs.

    Attributes:
        names: The names, in the order in which a reader meets them.
        imports_torch: Whether the code imports torch itself.
    """

    names: tuple[str, ...]
    imports_torch: bool

    def comment(self) -> list[str]:
        """Returns the line that says so, if anything is needed."""
        return [f"# Needs: {', '.join(self.names)}"] if self.names else []


def needs(patches: Sequence[ChosenPatch], first: Sequence[str], expressions: Sequence[str]) -> Needs:
    """Returns what the code needs: the names in `first`, what `expressions` use, and what the patches do."""
    slice_names = [name for patch in patches if patch.index is not None for name in patch.index.names]
    # A variable as a function is called, also where it is a builtin.
    values = [
        f"({patch.value}\n)()" if patch.is_function else patch.value for patch in patches if patch.value is not None
    ]
    texts = [*expressions, *values]
    used = [*first, *(name for text in texts for name in in_order(text)), *slice_names]
    trees = [ast.parse(f"(\n{text}\n)") for text in texts]
    uses = [
        (n, by) for tree in trees for by in ast.walk(tree) for n in ast.iter_child_nodes(by) if isinstance(n, ast.Name)
    ]
    # Of builtin functions that are not called, somebody means a variable: a tensor called `input`.
    not_called = {
        n.id for n, by in uses if not isinstance(getattr(builtins, n.id, int), type) and n is not getattr(by, "func", 0)
    }
    meant = {*first, *slice_names, *not_called}
    # A module is used as `torch.ones`, never as `torch + 1`.
    is_module = all(isinstance(by, ast.Attribute) for n, by in uses if n.id == "torch")
    imports_torch = "torch" in used and "torch" not in meant and is_module
    names = [n for n in dict.fromkeys(used) if n in meant or not hasattr(builtins, n)]
    return Needs(tuple(n for n in names if n != "torch" or not imports_torch), imports_torch)


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

    def written(node: ast.expr) -> str:
        return as_source(ast.get_source_segment(source, node) or "\n", "an example input", node)

    keywords = [word for word in call.keywords if with_options or word.arg != "extraction_options"]
    names = [word.arg for word in keywords]
    sources = [f"*{written(a.value)}" if isinstance(a, ast.Starred) else written(a) for a in call.args]
    sources += [f"{'**' if word.arg is None else f'{word.arg}='}{written(word.value)}" for word in keywords]
    has_star = None in names or any(isinstance(arg, ast.Starred) for arg in call.args)
    return Arguments(tuple(sources), None if has_star else len(call.args), frozenset(filter(None, names)))


def as_source(expression: str, what: str, node: ast.expr | None = None) -> str:
    """Returns an expression as source that can stand anywhere in a line, unchanged where that is possible.

    Args:
        expression: The expression.
        what: What it is, for the message.
        node: What Python reads in it, where it stands in a longer text.

    Raises:
        ExportError: It cannot be written on one line.
    """
    try:
        node = parsed(expression) if node is None else node
        written = as_argument(expression, node)
        if not {"\n", "\r"} & set(written) and is_argument(written, node):
            return written
    except (ValueError, RecursionError, MemoryError):
        pass
    raise ExportError(f"{what} cannot be written on one line; put it in a variable, and name that")


def user_names(patches: Iterable[ChosenPatch], origin: Origin) -> set[str]:
    """Returns all names that are the user's: the code must not use them for something else."""
    mine = {name for patch in patches for name in (*names_in(patch), patch.name or "")}
    return mine | origin.names


def last_words(path: str) -> list[str]:
    """Returns the names at the end of a path that tell a person which node it is, without `output`."""
    parsed = parse_path(path)
    names = parsed.names[:-1] if parsed.names[-1] == "output" and len(parsed.names) > 1 else parsed.names
    return [*names[-2:], *parsed.dig]
