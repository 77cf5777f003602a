"""Python as users type it, kept as text: values, arguments, slices, positions, and how a graph was made.

Nothing here is evaluated before a patch context is entered (`evaluate`, `SliceText.index`).
"""

from __future__ import annotations

import ast
import builtins
import functools
import keyword
import symtable
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from graphpatch_notebook.errors import SessionError, cut
from graphpatch_notebook.patches.slices import (
    LARGEST_INDEX,
    NAMED_STEPS,
    index_text,
    indexed_dimensions,
    selection_problem,
)
from graphpatch_notebook.paths import nearest

# These nodes run no code except that of the objects that the names refer to.
_PLAIN = (
    *(ast.Constant, ast.Name, ast.expr_context, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop),
    *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Subscript, ast.Slice),
)
_CALL = "<graphpatch>"  # not a name that a user can define
_OF_IPYTHON = frozenset({"In", "Out", "exit", "quit", "open", "get_ipython"})


def parsed(text: str, what: str = "a Python expression", shown: str | None = None) -> ast.expr:
    """Returns the syntax tree of an expression.

    Raises:
        ValueError: It is not an expression, or is nested too deeply. The message says that `shown` is not `what`.

    Example:
        >>> ast.unparse(parsed("a+1"))
        'a + 1'
    """
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{cut(repr(text if shown is None else shown))} is not {what} ({reason})") from None


def parse_expression(text: str) -> str:
    """Returns the text of an expression, stripped. Nothing is evaluated.

    Raises:
        ValueError: The text is not a Python expression, or awaits, yields or assigns.

    Example:
        >>> parse_expression(" 0.5 * steering[2] ")
        '0.5 * steering[2]'
    """
    if not text.strip():
        raise ValueError("a value is empty; write a number, the name of a variable, or a Python expression")
    _check_runs_anywhere(parsed(text.strip()), text)
    return text.strip()


def parse_arguments(text: str) -> ast.Call:
    """Returns a call with these arguments, parsed.

    Raises:
        ValueError: The text is not the arguments of a call, or awaits, yields or assigns.

    Example:
        >>> len(parse_arguments("ids, mask=m").keywords)
        1
    """
    what = "the arguments of a call"
    # On lines of its own, so that a comment or an extra parenthesis cannot end the call.
    call = parsed(f"_(\n{text}\n)", what, text)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):  # `f(a) + f(b)` or `f(a)(b)`
        raise ValueError(f"{cut(repr(text))} is not {what}")
    _check_runs_anywhere(call, text)
    return call


def _check_runs_anywhere(tree: ast.AST, text: str) -> None:
    if any(isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)) for node in ast.walk(tree)):
        raise ValueError(f"{cut(repr(text))} cannot await, yield or assign; do that in a cell, and name the variable")


def is_plain(text: str) -> bool:
    """Whether an expression holds only literals, names, arithmetic, containers of these, and subscripts.

    Such an expression calls no function and reads no attribute, so it runs only the code of the user's own objects. It
    may still take a long time (`9**9**9`).

    Example:
        >>> is_plain("0.5 * steering[2, :3]"), is_plain("().__class__"), is_plain("torch.ones(3)")
        (True, False, False)
    """
    return all(isinstance(node, _PLAIN) for node in ast.walk(parsed(text)))


_MAKERS = frozenset("tensor zeros ones full eye arange linspace rand randn".split())


def is_quick(text: str, namespace: Mapping[str, Any]) -> bool:
    """Whether an expression only computes with numbers and tensors: it may be evaluated while it is typed.

    These are in variables, or torch makes them.

    Example:
        >>> variables = {"torch": torch, "x": torch.ones(3), "model": torch.nn.ReLU()}
        >>> is_quick("0.5 * x[0] + torch.ones(3)", variables), is_quick("model(x)", variables)
        (True, False)
    """

    def is_allowed(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            value = namespace.get(node.id)
            return value is torch or type(value) in (torch.Tensor, torch.nn.Parameter, int, float, bool, complex)
        made = node.func if isinstance(node, ast.Call) else node
        if isinstance(made, ast.Attribute):
            is_of_torch = isinstance(made.value, ast.Name) and namespace.get(made.value.id) is torch
            return is_of_torch and (made.attr in _MAKERS or isinstance(getattr(torch, made.attr, None), torch.dtype))
        return isinstance(node, (*_PLAIN, ast.keyword))

    return all(map(is_allowed, ast.walk(parsed(text))))


def evaluate(text: str, namespace: dict[str, Any], title: str) -> Any:
    """Returns the value of an expression in the user's namespace, not in a copy: functions in it see later changes."""
    return eval(compile(ast.Expression(parsed(text)), f"<{title}>", "eval"), namespace)


def evaluated_call(call: ast.Call, namespace: dict[str, Any], title: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call, evaluated in the user's namespace. The function is not called."""
    make: Callable[..., Any] = lambda *args, **kwargs: (args, kwargs)  # noqa: E731
    function = ast.copy_location(ast.Name(_CALL, ast.Load()), call.func)
    tree = ast.Expression(ast.copy_location(ast.Call(function, call.args, call.keywords), call))
    args, kwargs = eval(compile(ast.fix_missing_locations(tree), f"<{title}>", "eval"), namespace, {_CALL: make})
    return args, kwargs


def free_names(source: str) -> list[str]:
    """Returns the global names that source code uses but does not bind, sorted, including builtins.

    Example:
        >>> free_names("x = f(lambda a: a + b)")
        ['b', 'f']
    """
    top = symtable.symtable(textwrap.dedent(source), "<source>", "exec")
    used, bound = set(), set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is top and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(symbol.get_name())
            elif symbol.is_referenced() and (table is top or symbol.is_global()):
                used.add(symbol.get_name())
    return sorted(used - bound)


# --------------------------------------------------------------------------------------------------------------------
# Variables


def undefined(name: str | None, namespace: Iterable[str]) -> str:
    """Returns the message for an undefined name, with the nearest variables.

    Example:
        >>> undefined("stear", ["steer", "_", "In"])
        "unknown variable 'stear'; nearest: steer"
    """
    mine = [other for other in namespace if not other.startswith("_") and other not in _OF_IPYTHON]
    close = nearest(name or "", mine)
    return f"unknown variable {name!r}" + (f"; nearest: {', '.join(close)}" if close else "")


def variable_name(text: str) -> str:
    """Returns the name of a variable of the user, as Python reads it.

    Raises:
        ValueError: It is not an identifier, or that of a variable of Python or IPython.
    """
    name = unicodedata.normalize("NFKC", text)  # exported code would use that variable
    why = "is a builtin of Python" if hasattr(builtins, name) else ""
    if not name.isidentifier() or keyword.iskeyword(name):
        why = "cannot be the name of a variable"
    elif name.startswith("_") or name in _OF_IPYTHON:
        why = "is like the variables of IPython"
    if why:
        raise ValueError(f"{cut(repr(name))} {why}: choose another name")
    return name


@dataclass(frozen=True, slots=True)
class Origin:
    """The Python with which a user made a `PatchableGraph`, as text.

    Attributes:
        graph: The name of the variable that holds the `PatchableGraph`.
        model: The expression for the model; `None` if it is not known.
        arguments: The example inputs, as text between the parentheses of the call; `None` if they are not known.
    """

    graph: str = "pg"
    model: str | None = None
    arguments: str | None = None

    def __post_init__(self) -> None:
        try:
            if not self.graph.isidentifier():
                raise ValueError(f"{self.graph!r} cannot be the name of a variable")
            if self.model is not None:
                parse_expression(self.model)
            if self.arguments is not None:
                parse_arguments(self.arguments)
        except ValueError as problem:
            raise SessionError(str(problem)) from None

    @property
    def names(self) -> set[str]:
        """The variables that it uses. A probe must not overwrite them."""
        call = f"(\n{self.model or None}\n)(\n{self.arguments or ''}\n)"
        return {self.graph, *free_names(call)}


def written_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], namespace: Mapping[str, Any]) -> str | None:
    """Returns inputs as the text of a call's arguments; `None` if a variable is missing for one of them.

    Example:
        >>> ids, inputs = object(), {"mask": object()}
        >>> written_arguments((ids, True), inputs, {"ids": ids, "inputs": inputs})
        'ids, True, **inputs'
    """
    mine = {name: value for name, value in list(namespace.items()) if name.isidentifier() and name[0] != "_"}
    names = {id(value): name for name, value in reversed(mine.items())}

    def is_part(value: Any) -> bool:  # such as the output of a tokenizer
        return isinstance(value, Mapping) and bool(value) and all(kwargs.get(key, mine) is value[key] for key in value)

    whole = next((name for name, value in mine.items() if is_part(value)), None)
    left = {key: value for key, value in kwargs.items() if whole is None or key not in mine[whole]}
    found = []
    for start, value in [*(("", value) for value in args), *((f"{key}=", value) for key, value in left.items())]:
        is_literal = type(value) in (bool, int, float, str, type(None))
        if not is_literal and id(value) not in names:
            return None
        found.append(start + (repr(value) if is_literal else names[id(value)]))
    return ", ".join([*found, *([f"**{whole}"] if whole else [])])


# --------------------------------------------------------------------------------------------------------------------
# Slices, as between brackets: `:, -1, 3:5, ...`


_WHAT_A_SLICE_IS = (
    f"integers up to {LARGEST_INDEX}, slices such as 3:5 (whose step is 1 or more), `...`, None, names of variables "
    "and lists of integers"
)
_KEY = "__s_"


@dataclass(frozen=True, slots=True)
class SliceText:
    """A slice that was typed.

    Attributes:
        text: The canonical text.
        parts: Its parts, between the commas.
    """

    text: str
    parts: tuple[ast.expr, ...] = field(compare=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The variables in the slice, each once, in order."""
        return tuple(dict.fromkeys(name for part in self.parts for name in _names_in(part)))

    def index(self, namespace: Mapping[str, Any]) -> Any:
        """Returns the index: one part, or a tuple of several.

        A new dimension is `(None,)` and never `None`, which for a patch means the whole value.
        """
        known = {name: namespace[name] for name in self.names if name in namespace}
        parts = eval(f"{_KEY}[{self.text},]", {**known, _KEY: np.s_, "__builtins__": {}})
        return parts[0] if len(parts) == 1 and parts[0] is not None else parts

    def source(self, *, is_bracketed: bool = False) -> str:
        """Returns the index as Python source outside of brackets; with `is_bracketed`, for use between brackets later.

        Example:
            >>> parse_slice(":, -1, 3:, ...").source()
            '(slice(None), -1, slice(3, None), ...)'
            >>> parse_slice("None").source(), parse_slice("tok").source()
            ('(None,)', '(None,) if tok is None else tok')
        """
        parts = [_source(part) for part in self.parts]
        if len(parts) > 1 or parts == ["None"]:
            return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
        is_variable = isinstance(self.parts[0], ast.Name) and not is_bracketed
        return f"(None,) if {parts[0]} is None else {parts[0]}" if is_variable else parts[0]

    def __str__(self) -> str:
        return self.text


@functools.lru_cache(1000)
def parse_slice(text: str) -> SliceText:
    """Parses the text between brackets.

    Raises:
        ValueError: The text is not a slice.

    Example:
        >>> str(parse_slice(":,-1 , start:"))
        ':, -1, start:'
    """
    what = f"a slice; write {_WHAT_A_SLICE_IS}, with commas between"
    if text.strip() in ("", "()"):
        raise ValueError("a slice is empty; for the whole value, leave the brackets out")
    # On a line of its own, so that line breaks are allowed and the text cannot close the brackets.
    source = f"_[\n{text}\n]"
    index = parsed(source, what, text)
    if not (isinstance(index, ast.Subscript) and isinstance(index.value, ast.Name)):
        raise ValueError(f"{cut(repr(text))} is not {what}")
    parts = index.slice.elts if isinstance(index.slice, ast.Tuple) else [index.slice]
    if wrong := next((part for part in parts if not _is_part(part)), None):
        shown = cut(str(ast.get_source_segment(source, wrong)))  # which Python does not refuse to write as a text
        raise ValueError(f"{shown!r} is not allowed in a slice: write {_WHAT_A_SLICE_IS}")
    if sum(ast.unparse(part) == "..." for part in parts) > 1:
        raise ValueError(f"{cut(repr(text))} is a slice with more than one `...`; write `:` for single dimensions")
    return SliceText(", ".join(map(ast.unparse, parts)), tuple(parts))


def _is_part(node: ast.expr) -> bool:
    if isinstance(node, ast.Slice):
        bounds = [bound for bound in (node.lower, node.upper, node.step) if bound is not None]
        if not all(map(_is_atom, bounds)):
            return False
        step = "1" if node.step is None else ast.unparse(node.step)
        return not step.startswith("-") and step != "0"  # as torch supports
    if isinstance(node, ast.List):
        return bool(node.elts) and all(_is_atom(one) and ast.unparse(one) != "None" for one in node.elts)
    return _is_atom(node) or (isinstance(node, ast.Constant) and node.value is Ellipsis)


def _is_atom(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        node = node.operand
        return isinstance(node, ast.Constant) and type(node.value) is int and node.value <= LARGEST_INDEX
    value = node.value if isinstance(node, ast.Constant) else node
    return isinstance(value, ast.Name) or value is None or (type(value) is int and value <= LARGEST_INDEX)


def _names_in(node: ast.expr) -> list[str]:
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]


def _source(part: ast.expr) -> str:
    if not isinstance(part, ast.Slice):
        return ast.unparse(part)
    lower, upper, step = ("None" if one is None else ast.unparse(one) for one in (part.lower, part.upper, part.step))
    if lower == upper == step == "None":
        return "slice(None)"
    return f"slice({lower}, {upper}{'' if step == 'None' else f', {step}'})"


def sliced_shape(
    typed: SliceText,
    shape: torch.Size,
    fixed: Callable[[], Sequence[int | None] | None] = lambda: None,
    *,
    allow_empty: bool = False,
) -> tuple[tuple[int, ...] | None, str | None]:
    """Returns the shape of the part of a value that `typed` selects, and a warning if it does not fit this value.

    Parts with variables are not checked; with any, the shape is not known, and `None`. `shape` is the recorded one;
    `fixed` returns the sizes that are the same for all inputs, with `None` for the others.

    Raises:
        ValueError: The slice has more dimensions than the value, or does not fit the value for any inputs.

    Example:
        >>> sliced_shape(parse_slice(":, -1, 3:5"), torch.Size([2, 4, 8]))
        ((2, 2), None)
    """
    texts = [":" if _names_in(part) else ast.unparse(part) for part in typed.parts]
    index = parse_slice(", ".join(texts)).index({})
    used = indexed_dimensions(index)
    if used > len(shape):
        raise ValueError(
            f"slice [{typed}] has {used} dimensions, but the value recorded here has {len(shape)}: shape {tuple(shape)}"
        )
    shown = f"the value recorded here, of shape {tuple(shape)},"
    if (warning := selection_problem(index, shape, shown, allow_empty=allow_empty)) is None:
        return None if typed.names else tuple(torch.empty(shape, device="meta")[index].shape), None
    if problem := selection_problem(index, fixed(), shown, allow_empty=allow_empty):
        raise ValueError(problem)
    return None, f"{warning.partition('; ')[0]}; the slice does not fit inputs of the example's sizes"


# --------------------------------------------------------------------------------------------------------------------
# Steps and positions


def parse_positions(text: str) -> Any:
    """Returns positions as a `Patch` takes them: an integer, a slice, a list, or a list for each row of the batch.

    Raises:
        ValueError: The text is not a list of numbers.

    Example:
        >>> parse_positions("2,40"), parse_positions("1:"), parse_positions("[3], [5], [2]")
        ([2, 40], slice(1, None, None), [[3], [5], [2]])
    """
    stripped = text.strip()
    is_nested = stripped.startswith("[[") and stripped.endswith("]]")
    typed = parse_slice(stripped[1:-1] if is_nested else stripped)
    if not typed.names:
        found = typed.index({})
        if isinstance(found, (int, slice)):
            return found
        rows = list(found) if isinstance(found, tuple) else [found]
        kinds = {type(row) for row in rows}
        if kinds == {int} or (kinds == {list} and (is_nested or len(rows) > 1)):
            return rows
    raise ValueError(
        f"{cut(repr(text))} is not a list of whole numbers; write 3, or 2, 40, or 1:5; for each row of the batch, "
        "[3], [5]"
    )


def parse_steps(text: str) -> Any:
    """Returns steps as a `Patch` takes them: a name, an integer, a slice, or a list.

    Raises:
        ValueError: The text is not a list of numbers, nor a name.
    """
    if text.strip() in NAMED_STEPS:
        return text.strip()
    try:
        found = parse_positions(text)
    except ValueError as error:
        raise ValueError(f"{error}; steps are also named {' and '.join(NAMED_STEPS)}") from None
    if _is_rows(found):
        raise ValueError(f"{cut(repr(text))}: steps are the same for each row of the batch")
    return found


def numbers_text(value: Any) -> str:
    """Returns steps or positions as the text that is parsed to them."""
    if isinstance(value, str) or _is_rows(value):
        return str(value)
    return index_text(tuple(value) if isinstance(value, list) else (value,))


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, list) for part in value)
