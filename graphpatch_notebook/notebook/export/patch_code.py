"""Chosen patches as Python source that uses graphpatch. Pure text: nothing is evaluated, nothing runs.

ChosenPatches, Origin, records of the capture -> "with pg.patch({...}): output = pg(ids)"
"""

from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components.names import is_component_name
from graphpatch_notebook.errors import ExportError
from graphpatch_notebook.notebook.export.source_code import WIDTH, SourceCode, block, bracketed, text_literal
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, ChosenPatches, names_used
from graphpatch_notebook.notebook.session.expressions import (
    free_names,
    parse_arguments,
    parsed,
    without_syntax_warnings,
)
from graphpatch_notebook.notebook.session.origin import Origin
from graphpatch_notebook.notebook.session.session import Session, by_value
from graphpatch_notebook.notebook.session.slices import SliceText
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.paths import numbered, parse_path
from graphpatch_notebook.values import ContainerSpec, ScalarSpec

_GRAPH = ("graphpatch", "PatchableGraph")
_LONGEST = 40
_FILL_IN = "# Fill in your inputs."


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
        ExportError: No patch is enabled, or a value cannot be written on one line.

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
        raise ExportError(f"nothing to export{there} first")
    graph = captured(session.graph)
    if paths := graph.permanent_paths:
        raise ExportError(
            f"this graph has permanent patches ({', '.join(paths)}), which are not chosen ones: export those of the "
            "graph that edit() was called on"
        )
    with without_syntax_warnings():
        return _Export(patches.enabled, session.origin if origin is None else origin, graph.root, wrap).source(off)


class _Export:
    """One export.

    In a fresh interpreter with the names in its first line, the code computes the same values, bit for bit, as
    `with pg.patch(session.resolve(...).patch_map)`.
    """

    def __init__(self, patches: tuple[ChosenPatch, ...], origin: Origin, root: Frame, wrap: bool) -> None:
        self.patches = patches
        self.origin = origin
        self.root = root
        self.wrap = wrap
        self.arguments = _arguments(_example(root) if origin.arguments is None else origin.arguments)
        # The call that makes the graph, which may have options.
        self.first_call = _arguments(origin.arguments, True) if wrap and origin.arguments else self.arguments
        names = names_used(patches) | {patch.name for patch in patches if patch.name} | origin.names
        self._taken = {*names, *_in_order(_tuple_of(self.first_call)), "torch"}
        self.model = origin.model.strip() if origin.model else self._free("model")
        used = {_import_of(patch.definition.patch) for patch in patches} | ({_GRAPH} if wrap else set())
        self.classes = {one: self._free(one[1]) if one[0] else one[1] for one in sorted(used)}
        self.result = self._free("output", "result")
        self.observers = {p.number: self._free(f"{p.name}_{p.kind}") for p in patches if p.definition.keeps}
        self.values = {p.number: _one_line(p.value, f"#{p.number} {p.path!r}: its value") for p in patches if p.value}
        self.slices = {
            p.number: str(p.index) if p.definition.keeps else p.index.source(is_bracketed=p.definition.is_elementwise)
            for p in patches
            if p.index is not None
        }
        self.assignments = list(self._assigned_first())

    def _free(self, *wanted: str) -> str:
        """Returns the first of the names that is free, or else the first name with a number, and reserves it."""
        candidates = (
            *wanted,
            *(name for name, _ in zip(numbered(wanted[0]), range(len(self._taken) + 1), strict=False)),
        )
        found = next(name for name in candidates if name not in self._taken and not _is_reserved(name))
        self._taken.add(found)
        return found

    def _assigned_first(self) -> Iterable[str]:
        """Yields assignments of values and slices to variables, which the code then uses in their place.

        The session evaluates values patch by patch, and the code path by path. That makes a difference if several of
        them are more than names and constants, and for slices that are used after a probe has filled their variables.
        """
        changing = [value for value in self.values.values() if not value.isidentifier() and not _is_fixed(value)]
        in_slices = {name for patch in self.patches if patch.index is not None for name in patch.index.names}
        if len(changing) < 2 and not any(patch.name in in_slices for patch in self.patches):
            return
        for patch in self.patches:
            if patch.index is not None and patch.index.names:
                source = patch.index.source(
                    is_bracketed=patch.definition.is_elementwise or bool(patch.definition.keeps)
                )
                self.slices[patch.number] = self._free(_as_name(patch.path, "slice"))
                yield f"{self.slices[patch.number]} = {source}"
            value = self.values.get(patch.number)
            if value is not None and not _is_fixed(value):
                self.values[patch.number] = self._free(_as_name(patch.path, "value"))
                yield f"{self.values[patch.number]} = {value}"

    def source(self, off: int) -> SourceCode:
        """Returns the code; `off` is the number of disabled patches."""
        needed, imports_torch = self._needed()
        head = [f"# Needs: {', '.join(needed)}"] if needed else []
        if off:
            head.append(f"# Left out: {off} patch{'es' * (off != 1)} that {'is' if off == 1 else 'are'} off")
        blocks = [
            [*head, *["import torch"] * imports_torch, *self._imports()],
            [*self._preparations(), self._context()],
            [self._result(patch) for patch in self.patches if patch.number in self.observers],
        ]
        return SourceCode("\n\n".join("\n".join(statements) for statements in blocks if statements) + "\n")

    def _needed(self) -> tuple[list[str], bool]:
        """Returns the names that the code needs, and whether it imports torch."""
        made_here = [own for (module, _), own in self.classes.items() if not module]
        in_slices = [name for p in self.patches if p.index is not None for name in p.index.names]
        # A function is called, also if it is a builtin.
        values = [f"({p.value}\n)()" if p.is_function else p.value for p in self.patches if p.value is not None]
        texts = [*[self.model] * self.wrap, _tuple_of(self.first_call), *values]
        trees = [ast.parse(f"(\n{text}\n)") for text in texts]
        parents = [(n, by) for tree in trees for by in ast.walk(tree) for n in ast.iter_child_nodes(by)]
        uses = [(node, by) for node, by in parents if isinstance(node, ast.Name)]
        # A builtin function that is not called is a variable of the user, such as a tensor named `input`.
        not_called = {
            n.id
            for n, by in uses
            if not isinstance(getattr(builtins, n.id, int), type) and n is not getattr(by, "func", 0)
        }
        first = [*([] if self.wrap else [self.origin.graph]), *made_here]
        used = dict.fromkeys([*first, *(name for text in texts for name in _in_order(text)), *in_slices])
        meant = {*first, *in_slices, *not_called}
        names = [name for name in used if name in meant or not hasattr(builtins, name)]
        if self.wrap and self.origin.graph not in {*_in_order(self.model), *_in_order(_tuple_of(self.first_call))}:
            names = [name for name in names if name != self.origin.graph]
        # `torch` is a module only if all its uses are attributes, such as `torch.ones`.
        is_module = all(isinstance(by, ast.Attribute) for n, by in uses if n.id == "torch")
        imports_torch = "torch" in used and "torch" not in {*first, *in_slices} and is_module
        return [name for name in names if name != "torch" or not imports_torch], imports_torch

    def _imports(self) -> Iterable[str]:
        items: dict[str, list[str]] = {}
        for (module, name), own in self.classes.items():
            items.setdefault(module, []).append(name if name == own else f"{name} as {own}")
        for module, names in items.items():
            flat = f"from {module} import {', '.join(names)}"
            if module:
                yield flat if len(flat) <= WIDTH else bracketed(f"from {module} import (", names, ")", 0)

    def _preparations(self) -> Iterable[str]:
        """Yields the statements before the patch context: the graph, values and probes."""
        if self.wrap:
            yield from self._reminder()
            items = [_one_line(self.model, "the model"), *self.first_call]
            yield bracketed(f"{self.origin.graph} = {self.classes[_GRAPH]}(", items, ")")
        yield from self.assignments
        for patch in self.patches:
            if patch.number in self.observers:
                yield self._construction(patch, f"{self.observers[patch.number]} = ")

    def _context(self) -> str:
        """Returns the `with` statement with the call in it."""
        entries = [self._entry(path, patches) for path, patches in by_value(self.root, self.patches).items()]
        call = bracketed(f"{self.result} = {self.origin.graph}(", self.arguments, ")", WIDTH - 4)
        return block(bracketed(f"with {self.origin.graph}.patch({{", entries, "}):"), [*self._reminder(), call])

    def _reminder(self) -> list[str]:
        return [_FILL_IN] if self.origin.arguments is None else []

    def _entry(self, path: str, patches: Sequence[ChosenPatch]) -> str:
        start = f"{text_literal(path)}: "
        if len(patches) == 1:
            return self._item(patches[0], start)
        return bracketed(f"{start}[", [self._item(patch) for patch in patches], "]", WIDTH - 5)

    def _item(self, patch: ChosenPatch, start: str = "") -> str:
        observer = self.observers.get(patch.number)
        return start + observer if observer else self._construction(patch, start)

    def _construction(self, patch: ChosenPatch, start: str) -> str:
        """Returns the source of the patch, with `start` before it."""
        items: list[str] = []
        kind = patch.definition
        if kind.value is not None:
            items.append(f"{kind.value.field}={self.values[patch.number]}")
        if patch.index is not None and kind.keeps is None:
            items.append(f"slice={self.slices[patch.number]}")
        items += [f"{what}={_literal(given)}" for what, given in patch.restrictions().items()]
        return bracketed(f"{start}{self.classes[_import_of(kind.patch)]}(", items, ")", WIDTH - 5)

    def _result(self, patch: ChosenPatch) -> str:
        """Returns the statement that assigns the result of a probe to its variable."""
        kept = f"{self.observers[patch.number]}.{patch.definition.keeps}"
        index = self.slices.get(patch.number)
        if index is None:
            return f"{patch.name} = {kept}"
        if not patch.definition.keeps_list:
            return f"{patch.name} = {kept}[{index}]"
        item = "a" if patch.index is None or "a" not in {*patch.index.names, index} else "activation"
        return f"{patch.name} = [{item}[{index}] for {item} in {kept}]"


def _import_of(patch: type[Patch[Any]]) -> tuple[str, str]:
    """Returns the module and the name of a patch class; no module for one that cannot be imported."""
    if patch.__module__ == "__main__" or "<locals>" in patch.__qualname__:
        return "", patch.__name__
    package = patch.__module__.partition(".")[0]
    return "graphpatch" if package == "graphpatch_notebook" else patch.__module__, patch.__name__


def _literal(value: Any) -> str:
    return text_literal(value) if isinstance(value, str) else SliceText((value,)).source()


# --------------------------------------------------------------------------------------------------------------------
# Names and expressions


def _is_reserved(name: str) -> bool:
    return keyword.iskeyword(name) or hasattr(builtins, name)


def _as_name(path: str, end: str) -> str:
    """Returns an identifier made of the last names of a path, without `output`, and a word.

    Example:
        >>> _as_name("h_0.mlp.output", "value"), _as_name('0."a.b"', "slice")
        ('h_0_mlp_value', 'sub_0_a_b_slice')
    """
    words = [path]
    if not is_component_name(path):
        parsed_path = parse_path(path)
        names = parsed_path.names
        names = names[:-1] if names[-1] == "output" and len(names) > 1 else names
        words = [*names[-2:], *parsed_path.dig]
    text = re.sub(r"\W+", "_", "_".join([*words, end]), flags=re.ASCII).strip("_")[-_LONGEST:].strip("_")
    return f"sub_{text}" if text[0].isdigit() else text


def _in_order(expression: str) -> list[str]:
    """Returns the global names that an expression uses, in their order, including builtins."""
    # On separate lines, because an expression may end in a comment.
    free = set(free_names(f"(\n{expression}\n)"))
    nodes = [node for node in ast.walk(ast.parse(f"(\n{expression}\n)")) if isinstance(node, ast.Name)]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))
    return [name for name in dict.fromkeys(node.id for node in nodes) if name in free]


def _one_line(expression: str | ast.AST, what: str) -> str:
    """Returns the source of an expression on one line."""
    with suppress(RecursionError, MemoryError):
        written = ast.unparse(parsed(expression) if isinstance(expression, str) else expression)
        if not {"\n", "\r"} & set(written):
            return written
    raise ExportError(f"{what} cannot be written on one line; put it in a variable, and use that")


def _is_fixed(value: str) -> bool:
    """Whether a value is the same each time it is evaluated: a literal, a function of torch, or a lambda."""
    node = parsed(value)
    while isinstance(node, ast.Attribute):
        node = node.value
    if isinstance(node, ast.Name):
        return node.id == "torch"
    if isinstance(node, ast.Lambda):  # its defaults are evaluated immediately
        return not node.args.defaults and not any(node.args.kw_defaults)
    with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        ast.literal_eval(node)
        return True
    return False


# --------------------------------------------------------------------------------------------------------------------
# The call of the graph


def _arguments(text: str, has_options: bool = False) -> list[str]:
    """Returns the arguments of a call as a user wrote them, each on one line; without `extraction_options=`."""
    try:
        call = parse_arguments(text)
    except ValueError as problem:
        raise ExportError(f"the example inputs {problem}") from None
    keywords = [word for word in call.keywords if has_options or word.arg != "extraction_options"]
    return [_one_line(node, "an example input") for node in (*call.args, *keywords)]


def _tuple_of(arguments: Sequence[str]) -> str:
    """Returns all arguments in one expression, to find the names that they use."""
    return f"dict({', '.join(arguments)})"


def _example(root: Frame) -> str:
    """Returns names for the inputs that the example had, as the arguments of a call."""
    specs = {node.target: node.spec for node in root.inputs()}
    given = [p for p in root.parameters if p.name in specs and not isinstance(specs[p.name], ScalarSpec)]
    given = [p for p in given if not (isinstance(s := specs[p.name], ContainerSpec) and not s.children)]
    has_rest = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in given)
    texts = []
    for p in given:
        is_first = p.kind is inspect.Parameter.POSITIONAL_ONLY or (
            has_rest and p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(p.kind)
        texts.append(f"{stars or ''}{p.name}" if stars or is_first else f"{p.name}={p.name}")
    return ", ".join(texts)
