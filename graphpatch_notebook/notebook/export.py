"""The chosen patches as Python source that uses graphpatch. Pure text: nothing is evaluated, nothing runs.

ChosenPatches, Origin, records of the capture -> "with pg.patch({...}): output = pg(ids)"
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Sequence
from typing import Any

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.inspection.tree import css_color, is_color_terminal
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, ChosenPatches, names_used
from graphpatch_notebook.notebook.session.expressions import (
    Origin,
    free_names,
    numbers_text,
    parse_arguments,
    parse_slice,
    parsed,
)
from graphpatch_notebook.notebook.session.session import Session, by_value, is_reserved, name_of_path
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.paths import numbered

_GRAPH = ("graphpatch", "PatchableGraph")
_FILL_IN = "# Fill in your inputs."
_WIDTH = 88
_COLORS = {
    "Comment": "#808080",
    "Keyword": "#2c7fb8",
    "Name.Function": "#a05aa8",
    "String": "#3a8a4d",
    "Number": "#a06a1c",
}


class SourceCode(str):
    r"""Python source: a `str` for `exec`, `print` and files; its repr is the code itself, in colors where possible.

    Example:
        >>> SourceCode("x = 1\n")
        x = 1
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return self.rstrip("\n")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from pygments.formatters import TerminalFormatter

        printer.text(_highlighted(repr(self), TerminalFormatter()) if is_color_terminal() else repr(self))

    def _repr_html_(self) -> str:
        """Returns escaped HTML without a style sheet."""
        from pygments.formatters import HtmlFormatter

        shown = _highlighted(repr(self), HtmlFormatter(style=_style(), noclasses=True, nowrap=True))
        shown = re.sub(r"color: (#\w{6})", lambda color: css_color(color[1].lower()), shown.rstrip("\n"))
        return f'<pre style="line-height:1.4;white-space:pre;overflow-x:auto">{shown}</pre>'


def _style() -> Any:
    from pygments.style import Style
    from pygments.token import string_to_tokentype

    return type("Colors", (Style,), {"styles": {string_to_tokentype(name): color for name, color in _COLORS.items()}})


def _highlighted(text: str, formatter: Any) -> str:
    from pygments import highlight
    from pygments.lexers import PythonLexer

    return str(highlight(text, PythonLexer(stripnl=False, ensurenl=False), formatter))


def export(
    session: Session, *, wrap: bool = False, chosen: ChosenPatches | None = None, origin: Origin | None = None
) -> SourceCode:
    """Returns the enabled patches of a session as Python. Runs and evaluates nothing.

    Args:
        session: The session.
        wrap: Also make the `PatchableGraph` in the code, for a file that runs by itself. If its model is not known, the
            code uses the name `model`.
        chosen: The patches; by default those of the session now.
        origin: The names of graph, model and inputs; by default those of the session.

    Raises:
        SessionError: No patch is enabled, or a value cannot be written on one line.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Linear(2, 3), torch.ones(1, 2))
        >>> session = Session(pg, Origin("pg", "model", "torch.ones(1, 2)"))
        >>> _ = session.add(ChosenPatch("linear", "zero", slice=":, -1"))
        >>> export(session)
        # Needs: pg
        import torch
        from graphpatch import ZeroPatch
        <BLANKLINE>
        with pg.patch({"linear": ZeroPatch(slice=(slice(None), -1))}):
            output = pg(torch.ones(1, 2))
    """
    patches = session.chosen if chosen is None else chosen
    off = len(patches.patches) - len(patches.enabled)
    if not patches.enabled:
        there = f"; all {off} are disabled: enable one" if off else ": choose one"
        raise SessionError(f"nothing to export{there} first")
    graph = captured(session.graph)
    if paths := graph.permanent_paths:
        raise SessionError(
            f"this graph has permanent patches ({', '.join(paths)}), which are not chosen ones: export those of the "
            "graph that edit() was called on"
        )
    return _Export(patches.enabled, session.origin if origin is None else origin, graph.root, wrap).source(off)


class _Export:
    """One export.

    In a fresh interpreter with the names in its first line, the code computes the same values, bit for bit, as
    `with pg.patch(session.resolve(...).patch_map)`.
    """

    def __init__(self, patches: tuple[ChosenPatch, ...], origin: Origin, root: Frame, wrap: bool) -> None:
        self.patches, self.origin, self.root, self.wrap = patches, origin, root, wrap
        self.arguments = _arguments("..." if origin.arguments is None else origin.arguments)
        self._taken = names_used(patches) | {str(patch.name) for patch in patches} | origin.names | {"torch"}
        self.model = origin.model.strip() if origin.model else self._free("model")
        used = {_import_of(patch.definition.patch) for patch in patches} | ({_GRAPH} if wrap else set())
        self.classes = {one: self._free(one[1]) if one[0] else one[1] for one in sorted(used)}
        self.result = self._free("output", "result")
        self.observers = {p.number: self._free(f"{p.name}_{p.kind}") for p in patches if p.definition.keeps}
        self.values = {p.number: _one_line(p.value, f"#{p.number} {p.path!r}: its value") for p in patches if p.value}
        self.slices = {p.number: _slice_source(p) for p in patches if p.slice is not None}
        self.assignments = list(self._assigned_first())

    def _free(self, *wanted: str) -> str:
        """Returns the first of the names that is free, or else the first name with a number, and reserves it."""
        names = numbered(wanted[0])
        found = next((name for name in wanted if name not in self._taken and not is_reserved(name)), "")
        while not found or found in self._taken:
            found = next(names)
        self._taken.add(found)
        return found

    def _assigned_first(self) -> Iterable[str]:
        """Yields assignments of slices to variables, which the code then uses: before probes fill what is in them."""
        filled = {patch.name for patch in self.patches}
        for patch in self.patches:
            if patch.index is not None and filled & {*patch.index.names}:
                source = patch.index.source(
                    is_bracketed=bool(patch.definition.keeps or patch.definition.is_elementwise)
                )
                self.slices[patch.number] = self._free(f"{name_of_path(patch.path)}_slice")
                yield f"{self.slices[patch.number]} = {source}"

    def source(self, off: int) -> SourceCode:
        """Returns the code; `off` is the number of disabled patches."""
        body = [*self._preparations(), self._context()]
        results = {str(patch.name): self._result(patch) for patch in self.patches if patch.number in self.observers}
        imports = list(self._imports())
        needed, imports_torch = self._needed("\n".join([*imports, *body, *results.values()]))
        head = [f"# Needs: {', '.join(needed)}"] if needed else []
        if off:
            head.append(f"# Left out: {off} patch{'es' * (off != 1)} that {'is' if off == 1 else 'are'} off")
        blocks = [
            [*head, *["import torch"] * imports_torch, *imports],
            body,
            [f"{name} = {kept}" for name, kept in results.items()],
        ]
        return SourceCode("\n\n".join("\n".join(statements) for statements in blocks if statements) + "\n")

    def _needed(self, code: str) -> tuple[list[str], bool]:
        """Returns the names that code needs, in order, and whether it imports torch."""
        nodes = list(ast.walk(ast.parse(code)))
        uses = sorted((n for n in nodes if isinstance(n, ast.Name)), key=lambda n: (n.lineno, n.col_offset))
        # A builtin function that is not called is a variable of the user, such as a tensor named `input`.
        functions = {p.definition.value.field for p in self.patches if p.definition.value and p.is_function}
        called = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
        called |= {id(n.value) for n in nodes if isinstance(n, ast.keyword) and n.arg in functions}
        own = [n.id for n in uses if not hasattr(builtins, n.id)]
        own += [n.id for n in uses if id(n) not in called and not isinstance(getattr(builtins, n.id, int), type)]
        free = {*free_names(code)} & {*own}
        names = [name for name in dict.fromkeys(n.id for n in uses) if name in free]
        # `torch` is a module only if all its uses are attributes, such as `torch.ones`.
        attributes = {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
        imports_torch = "torch" in names and all(id(n) in attributes for n in uses if n.id == "torch")
        return [name for name in names if name != "torch" or not imports_torch], imports_torch

    def _imports(self) -> Iterable[str]:
        items: dict[str, list[str]] = {}
        for (module, name), own in self.classes.items():
            items.setdefault(module, []).append(name if name == own else f"{name} as {own}")
        for module, names in items.items():
            flat = f"from {module} import {', '.join(names)}"
            if module:
                yield flat if len(flat) <= _WIDTH else bracketed(f"from {module} import (", names, ")", 0)

    def _preparations(self) -> Iterable[str]:
        """Yields the statements before the patch context: the graph, values and probes."""
        if self.wrap:
            # The call that makes the graph may have options.
            arguments = _arguments(self.origin.arguments, True) if self.origin.arguments else self.arguments
            items = [_one_line(self.model, "the model"), *arguments]
            yield from self._reminder()
            yield bracketed(f"{self.origin.graph} = {self.classes[_GRAPH]}(", items, ")")
        yield from self.assignments
        for patch in self.patches:
            if patch.number in self.observers:
                yield self._construction(patch, f"{self.observers[patch.number]} = ")

    def _context(self) -> str:
        """Returns the `with` statement with the call in it."""
        entries = [self._entry(path, patches) for path, patches in by_value(self.root, self.patches).items()]
        call = bracketed(f"{self.result} = {self.origin.graph}(", self.arguments, ")", _WIDTH - 4)
        head = bracketed(f"with {self.origin.graph}.patch({{", entries, "}):")
        return "\n".join([head, *map(_indented, [*self._reminder(), call])])

    def _reminder(self) -> list[str]:
        return [_FILL_IN] if self.origin.arguments is None else []

    def _entry(self, path: str, patches: Sequence[ChosenPatch]) -> str:
        start = f"{text_literal(path)}: "
        if len(patches) == 1:
            return self._item(patches[0], start)
        return bracketed(f"{start}[", [self._item(patch) for patch in patches], "]", _WIDTH - 5)

    def _item(self, patch: ChosenPatch, start: str = "") -> str:
        observer = self.observers.get(patch.number)
        return start + observer if observer else self._construction(patch, start)

    def _construction(self, patch: ChosenPatch, start: str) -> str:
        """Returns the source of the patch, with `start` before it."""
        kind = patch.definition
        items = [] if kind.value is None else [f"{kind.value.field}={self.values[patch.number]}"]
        if patch.slice is not None and kind.keeps is None:
            items.append(f"slice={self.slices[patch.number]}")
        items += [f"{what}={_literal(given)}" for what, given in patch.restrictions().items()]
        return bracketed(f"{start}{self.classes[_import_of(kind.patch)]}(", items, ")", _WIDTH - 5)

    def _result(self, patch: ChosenPatch) -> str:
        """Returns the value for the variable of a probe."""
        kept = f"{self.observers[patch.number]}.{patch.definition.keeps}"
        index = self.slices.get(patch.number)
        if index is None:
            return kept
        if not patch.definition.keeps_list:
            return f"{kept}[{index}]"
        item = "a" if patch.index is None or "a" not in {*patch.index.names, index} else "activation"
        return f"[{item}[{index}] for {item} in {kept}]"


def _import_of(patch: type[Patch[Any]]) -> tuple[str, str]:
    """Returns the module and the name of a patch class; no module for one that cannot be imported."""
    if patch.__module__ == "__main__" or "<locals>" in patch.__qualname__:
        return "", patch.__name__
    package = patch.__module__.partition(".")[0]
    return "graphpatch" if package == "graphpatch_notebook" else patch.__module__, patch.__name__


def _slice_source(patch: ChosenPatch) -> str:
    """Returns a slice outside of brackets; for what a probe kept, between brackets."""
    index = parse_slice(str(patch.slice))
    return str(index) if patch.definition.keeps else index.source(is_bracketed=patch.definition.is_elementwise)


# --------------------------------------------------------------------------------------------------------------------
# Expressions and statements, as texts without a final line break


def _one_line(expression: str | ast.AST, what: str) -> str:
    """Returns the source of an expression on one line."""
    try:
        written = ast.unparse(parsed(expression) if isinstance(expression, str) else expression)
    except (RecursionError, MemoryError):
        written = "\n"
    if {"\n", "\r"} & set(written):
        raise SessionError(f"{what} cannot be written on one line; put it in a variable, and use that")
    return written


def _arguments(text: str, has_options: bool = False) -> list[str]:
    """Returns the arguments of a call as a user wrote them, each on one line; without `extraction_options=`."""
    try:
        call = parse_arguments(text)
    except ValueError as problem:
        raise SessionError(f"the example inputs: {problem}") from None
    keywords = [word for word in call.keywords if has_options or word.arg != "extraction_options"]
    return [_one_line(node, "an example input") for node in (*call.args, *keywords)]


def _literal(value: Any) -> str:
    """Returns the source of a restriction: a name, a flag, steps or positions."""
    if isinstance(value, str):
        return text_literal(value)
    return parse_slice(numbers_text(value)).source() if isinstance(value, slice) else repr(value)


def bracketed(opening: str, items: Sequence[str], closing: str, width: int = _WIDTH) -> str:
    """Returns items between brackets: on one line if they fit, or else one item a line.

    Example:
        >>> print(bracketed("f(", ["one", "two"], ")", width=8))
        f(
            one,
            two,
        )
    """
    flat = f"{opening}{', '.join(items)}{closing}"
    if not items or (len(flat) <= width and "\n" not in flat):
        return flat
    return "\n".join([opening, *(_indented(f"{item},") for item in items), closing])


def _indented(statement: str) -> str:
    # Not with `textwrap`, which breaks lines at characters that do not end a line in Python.
    return "    " + statement.replace("\n", "\n    ")


def text_literal(text: str) -> str:
    """Returns a string literal for `text`, in double quotes unless single quotes need fewer backslashes.

    Example:
        >>> print(text_literal("it's"), text_literal('output|"a.b"'))
        "it's" 'output|"a.b"'
    """
    body = "".join(letter if letter in "'\"" else repr(letter)[1:-1] for letter in text)
    quote = "'" if text.count('"') > text.count("'") else '"'
    return quote + body.replace(quote, "\\" + quote) + quote
