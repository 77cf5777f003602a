"""Parts of exported code that both of its forms have: values, inputs of the call, results, comments."""

from __future__ import annotations

import ast
import inspect
import keyword
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from graphpatch_notebook.capture.records import Frame, InputParameter, Node
from graphpatch_notebook.notebook.export.source_code import text_literal
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.code_names import (
    Arguments,
    Names,
    as_name,
    as_source,
    is_reserved,
    last_words,
    parse_arguments,
)
from graphpatch_notebook.notebook.session.origin import Origin
from graphpatch_notebook.notebook.session.slices import SliceText
from graphpatch_notebook.notebook.session.syntax_trees import parsed
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, UnknownSpec, is_same_plain

_EMPTY = inspect.Parameter.empty


def by_path(patches: Sequence[ChosenPatch]) -> dict[str, list[ChosenPatch]]:
    """Returns the patches by their paths, as a patch map has them."""
    found: dict[str, list[ChosenPatch]] = {}
    for patch in patches:
        found.setdefault(patch.path, []).append(patch)
    return found


def is_name(text: str | None) -> bool:
    """Whether a text is a variable, and no more."""
    return text is not None and text.strip().isidentifier()


def name_of_model(patches: Sequence[ChosenPatch], origin: Origin, names: Names) -> str:
    """Returns the user's expression for the model; a name for it where that is not known."""
    if origin.model is not None:
        return origin.model.strip()
    # Values such as `model.lm_head.weight[3]` mean the very same model.
    is_free = origin.graph != "model" and all(patch.name != "model" for patch in patches)
    return "model" if is_free else names.free("model")


def left_out(count: int) -> list[str]:
    """Returns the comment that says how many patches are not exported."""
    return [f"# Left out: {count} patch{'es' * (count != 1)} that {'is' if count == 1 else 'are'} off"] * (count > 0)


def unknown_inputs(origin: Origin) -> list[str]:
    """Returns the comment for a reader who has to write the inputs down."""
    return ["# Fill in your inputs."] if origin.arguments is None else []


def result_lines(patches: Sequence[ChosenPatch], kept: Mapping[int, str], slices: Mapping[int, str]) -> list[str]:
    """Returns the statements that put what was kept in its variables.

    Args:
        patches: The patches.
        kept: For each that keeps something, by its number, the source of that.
        slices: What goes between the brackets behind it.
    """
    found: list[str] = []
    for patch in patches:
        if patch.number not in kept:
            continue
        part = kept[patch.number]
        if patch.index is not None and not patch.definition.keeps_list:
            # Where the probe did not fire, which a warning says, this raises.
            part = f"{part}[{slices[patch.number]}]"
        elif patch.index is not None:
            index = slices[patch.number]
            item = Names([*patch.index.names, index]).free("a", "activation")
            part = f"[{item}[{index}] for {item} in {part}]"
        found.append(f"{patch.name} = {part}")
    return found


# --------------------------------------------------------------------------------------------------------------------
# Values and slices


@dataclass(slots=True)
class Lookups:
    """Where the code takes values and slices from, by the numbers of the patches.

    Attributes:
        values: The source of each value: the expression itself, or a variable that holds it.
        slices: The same for each slice.
        lines: The statements that assign the variables.
    """

    values: dict[int, str]
    slices: dict[int, str]
    lines: list[str] = field(default_factory=list)


def looked_up(patches: Sequence[ChosenPatch], arguments: Arguments, names: Names, *, in_hooks: bool) -> Lookups:
    """Returns the source of the values and slices.

    The session evaluates them patch by patch, before anything runs. The code writes them where they are used if it
    makes no difference; else it evaluates all of them first, in the same order.

    Args:
        patches: The patches.
        arguments: The arguments of the call.
        names: The names of the code.
        in_hooks: Whether they are used in hooks, while the model runs, with its own modes of autograd and autocast.

    Raises:
        ExportError: A value cannot be written on one line.
    """
    found = Lookups(
        {p.number: as_source(p.value, f"#{p.number} {p.path!r}: its value") for p in patches if p.value is not None},
        {p.number: _slice_source(p, p.index, in_hooks) for p in patches if p.index is not None},
    )
    values = {number: value for number, value in found.values.items() if not _is_fixed(value)}
    slices = {p.number: p.index for p in patches if p.index is not None and p.index.names}
    used_in_slices = {name for index in slices.values() for name in index.names}
    if (
        sum(not is_name(value) for value in values.values()) > (0 if in_hooks else 1)
        or any(map(_may_assign, [arguments.expression, *found.values.values()]))
        or any(p.is_function and p.number in values and len(values) + len(slices) > 1 for p in patches)
        or any(p.name in used_in_slices for p in patches)
    ):
        for patch in patches:
            start = last_words(patch.path)
            if patch.number in slices:
                source = slices[patch.number].source(is_bracketed=in_hooks or patch.definition.keeps is not None)
                name = found.slices[patch.number] = names.free(as_name(*start, "slice"))
                found.lines.append(f"{name} = {source}")
            if patch.number in values:
                name = found.values[patch.number] = names.free(as_name(*start, "value"))
                found.lines.append(f"{name} = {values[patch.number]}")
    return found


def _slice_source(patch: ChosenPatch, index: SliceText, in_hooks: bool) -> str:
    if in_hooks or patch.definition.keeps is not None:
        return str(index)
    return index.source(is_bracketed=patch.definition.is_elementwise)


def _is_fixed(value: str) -> bool:
    """Whether a value is the same whenever it is evaluated: a literal, a function of torch, or a lambda."""
    node = parsed(value)
    if isinstance(node, ast.Lambda):  # its defaults are evaluated where it is written
        defaults = [*node.args.defaults, *node.args.kw_defaults]
        return all(isinstance(default, (ast.Constant, type(None))) for default in defaults)
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _owner(node) == "torch"
    return True


def _may_assign(expression: str) -> bool:
    """Whether an expression assigns a variable, or calls what may: more than torch and methods of its own arguments."""
    nodes = list(ast.walk(parsed(expression)))
    harmless = {"torch", "dict", *(node.arg for node in nodes if isinstance(node, ast.arg))}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return any(isinstance(node, ast.NamedExpr) for node in nodes) or any(_owner(c.func) not in harmless for c in calls)


def _owner(function: ast.expr) -> str | None:
    """Returns the variable at the start of `torch.nn.functional.relu`; `None` for what does not look like that."""
    while isinstance(function, ast.Attribute):
        function = function.value
    return function.id if isinstance(function, ast.Name) else None


# --------------------------------------------------------------------------------------------------------------------
# The inputs of the call


def call_arguments(origin: Origin, root: Frame, avoided: Container[str]) -> Arguments:
    """Returns the arguments of the user's call; where they are not known, names for what the example had.

    Args:
        origin: How the user made the graph.
        root: The root frame of its capture.
        avoided: Names that these must not be.
    """
    if origin.arguments is not None:
        return parse_arguments(origin.arguments)
    nodes = {node.target: node for node in root.inputs()}
    given = [(p, nodes[p.name]) for p in root.parameters if p.name in nodes and _was_given(p, nodes[p.name])]
    by_position: set[object] = {inspect.Parameter.POSITIONAL_ONLY}
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p, _ in given):
        # What stands before `*args` cannot be given by keyword.
        by_position.add(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    sources: list[str] = []
    for parameter, node in given:
        sources += _argument(parameter, node, origin.names, avoided, parameter.kind in by_position)
    return parse_arguments(", ".join(sources))


def _was_given(parameter: InputParameter, node: Node) -> bool:
    spec, default = node.spec, parameter.default
    if default is _EMPTY:
        return True
    if isinstance(spec, ScalarSpec):
        return not is_same_plain(spec.value, default)
    return bool(spec.children) if isinstance(spec, ContainerSpec) else default is None or isinstance(spec, UnknownSpec)


def _argument(
    parameter: InputParameter, node: Node, mine: Container[str], avoided: Container[str], is_positional: bool
) -> list[str]:
    def variable(name: str) -> str:
        return f"{name}_input" if name in mine or name in avoided or is_reserved(name) else name

    name, spec = parameter.name, node.spec
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return [f"*{variable(name)}"]
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        keys = [text for text, *_ in spec.children] if isinstance(spec, ContainerSpec) else []
        are_names = all(key.isidentifier() and not keyword.iskeyword(key) for key in keys)
        return [f"{key}={variable(key)}" for key in keys] if are_names else [f"**{variable(name)}"]
    if isinstance(spec, ScalarSpec) and type(spec.value) in (bool, int, str, type(None)):
        value = text_literal(spec.value) if isinstance(spec.value, str) else repr(spec.value)
    else:
        value = variable(name)
    return [value if is_positional else f"{name}={value}"]
