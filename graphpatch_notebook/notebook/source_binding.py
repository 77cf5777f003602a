"""When exported code looks names up: as early as the session does, wherever it could matter.

The session evaluates slices and values patch by patch, in order, before anything runs. Code may evaluate them where
they are used, which reads better, as long as nothing between these moments can make another thing of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from graphpatch_notebook.notebook.chosen import OBSERVING, ChosenPatch
from graphpatch_notebook.notebook.source_layout import lines
from graphpatch_notebook.notebook.source_names import Arguments, Names, as_name, last_words
from graphpatch_notebook.notebook.source_parts import as_value, by_path, is_plain

# Calls of these make no other thing of a variable, of an attribute, or of an item.
_HARMLESS = frozenset(
    {"abs", "bool", "complex", "dict", "float", "int", "len", "list", "max", "min", "pow", "range", "round", "slice",
     "str", "sum", "tuple", "zip"}
)  # fmt: skip


@dataclass(slots=True)
class Bound:
    """The variables in which code holds what it looks up early.

    Attributes:
        values: Those of values, by the numbers of the patches.
        slices: Those of slices.
        lines: The statements that assign them, in the order of the session.
    """

    values: dict[int, str] = field(default_factory=dict)
    slices: dict[int, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def hold_value(self, patch: ChosenPatch, names: Names) -> None:
        """Adds a variable for the value of a patch."""
        name = self.values[patch.number] = names.free(as_name(*last_words(patch.path), "value"))
        self.lines += lines(f"{name} = {as_value(patch)}")

    def hold_slice(self, patch: ChosenPatch, names: Names, *, is_bracketed: bool) -> None:
        """Adds a variable for the slice of a patch."""
        assert patch.index is not None
        name = self.slices[patch.number] = names.free(as_name(*last_words(patch.path), "slice"))
        self.lines += lines(f"{name} = {patch.index.source(is_bracketed=is_bracketed)}")


def bound_for_map(patches: Sequence[ChosenPatch], arguments: Arguments, names: Names) -> Bound:
    """Returns what code holds that has the patches in a patch map, which is evaluated path by path, before the run.

    Args:
        patches: The patches.
        arguments: The arguments of the call.
        names: The names of the code.
    """
    found = Bound()
    values = [patch for patch in patches if patch.value is not None]
    evaluated = [patch for patch in values if not is_plain(str(patch.value))]
    is_reordered = values != [patch for on_path in by_path(values).values() for patch in on_path]
    if any(_may_rebind(str(patch.value)) for patch in evaluated) and (is_reordered or _sliced_in_place(patches)):
        _hold_all(found, patches, names, is_bracketed=False)
    elif is_reordered and len(evaluated) > 1:
        for patch in evaluated:
            found.hold_value(patch, names)
    if _may_rebind(arguments.expression) or any(map(_is_custom_that_may_rebind, patches)):
        _hold_slices_of_results(found, patches, names)
    return found


def bound_for_hooks(patches: Sequence[ChosenPatch], arguments: Arguments, names: Names) -> Bound:
    """Returns what a script holds that looks up the rest while its hooks run, one after the other.

    Args:
        patches: The patches.
        arguments: The arguments of the call.
        names: The names of the script.
    """
    found = Bound()
    values = [patch for patch in patches if patch.value is not None]
    late = [patch for patch in values if _is_variable(patch) or _is_dotted_custom(patch)]
    with_names = _with_names(patches)
    before_the_run = [arguments.expression, *(str(patch.value) for patch in values)]
    # The name of a function is looked up before it can do anything; a slice is looked up again after that.
    may_run_between = any(
        with_names or any(other is not patch for other in late) for patch in filter(_is_custom_that_may_rebind, patches)
    )
    if (late or with_names) and (may_run_between or any(map(_may_rebind, before_the_run))):
        _hold_all(found, patches, names, is_bracketed=True)
        _hold_slices_of_results(found, patches, names)
        return found
    evaluated = [patch for patch in values if not is_plain(str(patch.value)) and not _is_of_torch(patch)]
    for patch in evaluated:
        if len(evaluated) > 1 or not _is_dotted_custom(patch):
            found.hold_value(patch, names)
    return found


def _hold_all(found: Bound, patches: Sequence[ChosenPatch], names: Names, *, is_bracketed: bool) -> None:
    sliced = _sliced_in_place(patches)
    for patch in patches:
        if patch in sliced:
            found.hold_slice(patch, names, is_bracketed=is_bracketed)
        if patch.value is not None and (_is_variable(patch) or not is_plain(patch.value)):
            found.hold_value(patch, names)


def _hold_slices_of_results(found: Bound, patches: Sequence[ChosenPatch], names: Names) -> None:
    for patch in _with_names(patches):
        if patch.kind in OBSERVING:
            found.hold_slice(patch, names, is_bracketed=True)


def _with_names(patches: Sequence[ChosenPatch]) -> list[ChosenPatch]:
    return [patch for patch in patches if patch.index is not None and patch.index.names]


def _sliced_in_place(patches: Sequence[ChosenPatch]) -> list[ChosenPatch]:
    return [patch for patch in _with_names(patches) if patch.kind not in OBSERVING]


def _is_variable(patch: ChosenPatch) -> bool:
    return isinstance(ast.parse(str(patch.value), mode="eval").body, ast.Name)


def _is_of_torch(patch: ChosenPatch) -> bool:
    """Whether it is a custom patch with a function of torch."""
    return _is_dotted_custom(patch) and not _is_custom_that_may_rebind(patch)


# --------------------------------------------------------------------------------------------------------------------
# What can make another thing of a name


def _is_custom_that_may_rebind(patch: ChosenPatch) -> bool:
    if patch.kind != "custom":
        return False
    function = ast.parse(str(patch.value), mode="eval").body
    if isinstance(function, ast.Lambda):
        own = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
        return not all(_is_harmless(call.func, own) for call in ast.walk(function) if isinstance(call, ast.Call))
    return not _is_harmless(function, set())


def _may_rebind(expression: str) -> bool:
    """Whether the evaluation of an expression assigns a name, or calls something that may do so."""
    nodes = list(_evaluated(ast.parse(f"(\n{expression}\n)", mode="eval").body))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    is_assignment = any(isinstance(node, ast.NamedExpr) for node in nodes)
    return is_assignment or not all(_is_harmless(call.func, set()) for call in calls)


def _is_harmless(function: ast.expr, own: set[str]) -> bool:
    """Whether it is a function of torch, a harmless builtin, or a method of one of the names in `own`."""
    is_method = False
    while isinstance(function, ast.Attribute):
        function, is_method = function.value, True
    if not isinstance(function, ast.Name):
        return False
    return function.id in own or function.id == "torch" if is_method else function.id in _HARMLESS - own


def _evaluated(top: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of an expression but for those that run when a function in it is called."""
    waiting = [top]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += ast.iter_child_nodes(node.args if isinstance(node, ast.Lambda) else node)


def _is_dotted_custom(patch: ChosenPatch) -> bool:
    if patch.kind != "custom":
        return False
    node = ast.parse(str(patch.value), mode="eval").body
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
