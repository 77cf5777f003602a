"""Parts of exported code that both of its forms have: values, inputs of the call, results, comments."""

from __future__ import annotations

import ast
import inspect
import keyword
from collections.abc import Container, Mapping, Sequence

from graphpatch_notebook.capture.records import Frame, InputParameter, Node
from graphpatch_notebook.errors import ExportError
from graphpatch_notebook.notebook.chosen import ChosenPatch, ChosenPatches
from graphpatch_notebook.notebook.expressions import as_argument
from graphpatch_notebook.notebook.origin import Origin
from graphpatch_notebook.notebook.source_code import SourceCode
from graphpatch_notebook.notebook.source_layout import WIDTH, Group, columns, lines, text_literal
from graphpatch_notebook.notebook.source_names import Arguments, Names, Needs, is_reserved, needs, parse_arguments
from graphpatch_notebook.values import ContainerSpec, ObjectSpec, ScalarSpec, TensorSpec

_EMPTY = inspect.Parameter.empty


def enabled_of(chosen: ChosenPatches) -> tuple[ChosenPatch, ...]:
    """Returns the patches that are exported.

    Raises:
        ExportError: There are none.
    """
    if not chosen.enabled:
        there = f"; all {len(chosen.patches)} are switched off: switch one on" if chosen.patches else ": choose one"
        raise ExportError(f"there is no patch to export{there} first")
    return chosen.enabled


def by_path(patches: Sequence[ChosenPatch]) -> dict[str, list[ChosenPatch]]:
    """Returns the patches by their paths, as a patch map has them."""
    found: dict[str, list[ChosenPatch]] = {}
    for patch in patches:
        found.setdefault(patch.path, []).append(patch)
    return found


def as_value(patch: ChosenPatch) -> str:
    """Returns the value of a patch as source that can stand anywhere in a line.

    Raises:
        ExportError: It cannot be written on one line.
    """
    return as_source(str(patch.value), f"#{patch.number} {patch.path!r}: its value")


def as_source(expression: str, what: str) -> str:
    """Returns an expression as source that can stand anywhere in a line, unchanged where that is possible.

    Raises:
        ExportError: It cannot be written on one line; `what` says in the message what it is.
    """
    try:
        # For Python, a carriage return ends a line, too.
        written = as_argument(expression) if "\r" not in expression else ast.unparse(_parsed(expression))
        if not {"\n", "\r"} & set(written) and ast.dump(_parsed(written)) == ast.dump(_parsed(expression)):
            return written
    except (ValueError, RecursionError, MemoryError):
        pass
    raise ExportError(f"{what} cannot be written on one line; put it in a variable, and name that")


def _parsed(expression: str) -> ast.Expression:
    return ast.parse(expression, mode="eval")


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


def is_plain(expression: str) -> bool:
    """Whether an expression is a variable, a number or a function, so that it does not matter when it is evaluated."""
    body = ast.parse(expression, mode="eval").body
    if isinstance(body, ast.UnaryOp) and isinstance(body.operand, ast.Constant):
        body = body.operand
    if isinstance(body, ast.Lambda):  # its defaults are evaluated where it stands
        return all(isinstance(d, ast.Constant) for d in (*body.args.defaults, *body.args.kw_defaults) if d is not None)
    return isinstance(body, (ast.Name, ast.Constant))


def needed_by(patches: Sequence[ChosenPatch], first: Sequence[str], expressions: Sequence[str]) -> Needs:
    """Returns what the code needs: `first`, what `expressions` use, and what the patches do."""
    values: list[str] = []
    for patch in patches:
        if patch.value is not None and not (patch.kind == "custom" and is_name(patch.value)):
            values.append(patch.value)
        elif patch.value is not None:
            values.append(f"{patch.value}()")  # a function, also where it is a builtin
    slices = [name for patch in patches if patch.index is not None for name in patch.index.names]
    return needs(first, [*expressions, *values], slices)


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
        slices: The variables that hold slices, where they had to be looked up before.
    """
    pairs = [
        (str(patch.name), _part(patch, kept[patch.number], slices.get(patch.number)))
        for patch in patches
        if patch.number in kept
    ]
    assigned: set[str | None] = set()
    for patch in patches:
        if patch.number in kept:
            if patch.index is not None and patch.number not in slices and assigned & set(patch.index.names):
                # A slice means the variable as it was before: all are looked up before any is assigned.
                targets = ", ".join(name for name, _ in pairs)
                return lines(Group(f"{targets} = (", tuple(source for _, source in pairs), ")"))
            assigned.add(patch.name)
    return [line for name, source in pairs for line in _assigned(name, source)]


def _part(patch: ChosenPatch, kept: str, held: str | None) -> str:
    if patch.index is None:
        return kept
    index = held or str(patch.slice)
    if patch.kind == "probe":
        # Where the probe did not fire, of which a warning tells, there is nothing to take a part of: that raises.
        return f"{kept}[{index}]"
    item = Names([*patch.index.names, index]).free("a", "activation")
    return f"[{item}[{index}] for {item} in {kept}]"


def _assigned(name: str, source: str) -> list[str]:
    flat = f"{name} = {source}"
    if columns(flat) <= WIDTH or not source.startswith("["):
        return [flat]
    return [f"{name} = [", f"    {source[1:-1]}", "]"]


def joined(blocks: Sequence[Sequence[str]]) -> SourceCode:
    """Returns blocks of lines with an empty line between each two."""
    return SourceCode("\n\n".join("\n".join(block) for block in blocks if block) + "\n")


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
    spec = node.spec
    if isinstance(spec, ContainerSpec):
        return bool(spec.children) or parameter.default is _EMPTY
    if isinstance(spec, (TensorSpec, ObjectSpec)):
        return parameter.default is _EMPTY or parameter.default is None
    if isinstance(spec, ScalarSpec) and parameter.default is not _EMPTY:
        return type(spec.value) is not type(parameter.default) or bool(spec.value != parameter.default)
    return True


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
        return [f"{k}={variable(k)}" for k in keys] if all(map(_is_keyword, keys)) else [f"**{variable(name)}"]
    if isinstance(spec, ScalarSpec) and type(spec.value) in (bool, int, str, type(None)):
        value = text_literal(spec.value) if isinstance(spec.value, str) else repr(spec.value)
    else:
        value = variable(name)
    return [value if is_positional else f"{name}={value}"]


def _is_keyword(name: str) -> bool:
    """Whether an argument can be given by this name."""
    return is_name(name) and not keyword.iskeyword(name)
