"""Parts of exported code that both forms use: names, values, inputs of the call, results, comments."""

from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from graphpatch_notebook.capture.records import Frame, InputParameter, Node
from graphpatch_notebook.components.names import is_component_name
from graphpatch_notebook.errors import ExportError
from graphpatch_notebook.notebook.export.source_code import text_literal
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, names_used
from graphpatch_notebook.notebook.session.expressions import free_names, parse_arguments, parsed
from graphpatch_notebook.notebook.session.origin import Origin
from graphpatch_notebook.notebook.session.slices import SliceText
from graphpatch_notebook.paths import numbered, parse_path
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, UnknownSpec, is_same_plain

_LONGEST = 40


class Names:
    """The names that are taken in the exported code."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)

    def free(self, *wanted: str) -> str:
        """Returns the first of the names that is free, or else the first name with a number, and reserves it.

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
        """Returns names for the body of a function, which do not shadow the outer ones."""
        return Names(self._taken)


def is_reserved(name: str) -> bool:
    """Whether `name` is a keyword or a builtin of Python."""
    return keyword.iskeyword(name) or hasattr(builtins, name)


def as_name(*words: str) -> str:
    """Returns an identifier made of words.

    Example:
        >>> as_name("h_0", "mlp"), as_name("0", "a.b")
        ('h_0_mlp', 'sub_0_a_b')
    """
    text = re.sub(r"\W+", "_", "_".join(words), flags=re.ASCII).strip("_")[:_LONGEST].strip("_")
    return text if text and not text[0].isdigit() else f"sub_{text}".strip("_")


def in_order(expression: str) -> list[str]:
    """Returns the global names that an expression uses, in their order, including builtins."""
    # On separate lines, because an expression may end in a comment.
    free = set(free_names(f"(\n{expression}\n)"))
    nodes = [node for node in ast.walk(ast.parse(f"(\n{expression}\n)")) if isinstance(node, ast.Name)]
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))
    return [name for name in dict.fromkeys(node.id for node in nodes) if name in free]


@dataclass(frozen=True, slots=True)
class Needs:
    """The names that exported code needs."""

    names: tuple[str, ...]
    imports_torch: bool

    def comment(self) -> list[str]:
        """Returns the comment that lists the names, if there are any."""
        return [f"# Needs: {', '.join(self.names)}"] if self.names else []


def needs(patches: Sequence[ChosenPatch], first: Sequence[str], expressions: Sequence[str]) -> Needs:
    """Returns the names in `first`, and those that `expressions` and the patches use."""
    slice_names = [name for patch in patches if patch.index is not None for name in patch.index.names]
    # A function is called, also if it is a builtin.
    values = [
        f"({patch.value}\n)()" if patch.is_function else patch.value for patch in patches if patch.value is not None
    ]
    texts = [*expressions, *values]
    used = [*first, *(name for text in texts for name in in_order(text)), *slice_names]
    trees = [ast.parse(f"(\n{text}\n)") for text in texts]
    uses = [
        (n, by) for tree in trees for by in ast.walk(tree) for n in ast.iter_child_nodes(by) if isinstance(n, ast.Name)
    ]
    # A builtin function that is not called is a variable of the user, such as a tensor named `input`.
    not_called = {
        n.id for n, by in uses if not isinstance(getattr(builtins, n.id, int), type) and n is not getattr(by, "func", 0)
    }
    meant = {*first, *slice_names, *not_called}
    # `torch` is a module only if all its uses are attributes, such as `torch.ones`.
    is_module = all(isinstance(by, ast.Attribute) for n, by in uses if n.id == "torch")
    imports_torch = "torch" in used and "torch" not in meant and is_module
    names = [n for n in dict.fromkeys(used) if n in meant or not hasattr(builtins, n)]
    return Needs(tuple(n for n in names if n != "torch" or not imports_torch), imports_torch)


# --------------------------------------------------------------------------------------------------------------------
# The user's call of the graph


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of a call."""

    sources: tuple[str, ...]
    positional: int | None  # how many; `None` if `*` hides it
    keywords: frozenset[str | None]  # `None` for `**`

    @property
    def expression(self) -> str:
        """All arguments in one expression, to find the names that they use."""
        return f"dict({', '.join(self.sources)})"


def arguments_in(text: str, *, with_options: bool = False) -> CallArguments:
    """Returns the arguments of a call as a user wrote them, each on one line; with or without `extraction_options=`."""
    try:
        call = parse_arguments(text)
    except ValueError as problem:
        raise ExportError(f"the example inputs {problem}") from None
    keywords = [word for word in call.keywords if with_options or word.arg != "extraction_options"]
    sources = tuple(_on_one_line(node, "an example input") for node in (*call.args, *keywords))
    has_star = any(isinstance(arg, ast.Starred) for arg in call.args)
    names = frozenset(word.arg for word in keywords)
    return CallArguments(sources, None if has_star else len(call.args), names)


def as_source(expression: str, what: str) -> str:
    """Returns the source of an expression on one line."""
    return _on_one_line(parsed(expression), what)


def _on_one_line(node: ast.AST, what: str) -> str:
    with suppress(ValueError, RecursionError, MemoryError):
        if not {"\n", "\r"} & set(written := ast.unparse(node)):
            return written
    raise ExportError(f"{what} cannot be written on one line; put it in a variable, and use that")


def user_names(patches: Sequence[ChosenPatch], origin: Origin) -> set[str]:
    """Returns all names of the user, which the code must not use for something else."""
    return names_used(patches) | {patch.name for patch in patches if patch.name} | origin.names


def last_words(path: str) -> list[str]:
    """Returns the last names of a path, without `output`, as words for a variable."""
    if is_component_name(path):
        return [path]
    parsed = parse_path(path)
    names = parsed.names[:-1] if parsed.names[-1] == "output" and len(parsed.names) > 1 else parsed.names
    return [*names[-2:], *parsed.dig]


# --------------------------------------------------------------------------------------------------------------------
# Comments and results


_EMPTY = inspect.Parameter.empty


def is_name(text: str | None) -> bool:
    """Whether a text is the name of a variable."""
    return text is not None and text.strip().isidentifier()


def name_of_model(patches: Sequence[ChosenPatch], origin: Origin, names: Names) -> str:
    """Returns the user's expression for the model, or a name for it if it is not known."""
    if origin.model is not None:
        return origin.model.strip()
    # Values such as `model.lm_head.weight[3]` refer to this model.
    is_free = origin.graph != "model" and all(patch.name != "model" for patch in patches)
    return "model" if is_free else names.free("model")


def left_out(count: int) -> list[str]:
    """Returns the comment that says how many patches are not exported."""
    return [f"# Left out: {count} patch{'es' * (count != 1)} that {'is' if count == 1 else 'are'} off"] * (count > 0)


def unknown_inputs(origin: Origin) -> list[str]:
    """Returns the comment that asks for the inputs, if they are not known."""
    return ["# Fill in your inputs."] if origin.arguments is None else []


def result_lines(patches: Sequence[ChosenPatch], kept: Mapping[int, str], slices: Mapping[int, str]) -> list[str]:
    """Returns the statements that assign the results of probes to their variables."""
    found: list[str] = []
    for patch in patches:
        if patch.number not in kept:
            continue
        part = kept[patch.number]
        if patch.index is not None and not patch.definition.keeps_list:
            # This raises if the probe did not fire, after a warning.
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
    """The source of values and slices, by the numbers of the patches."""

    values: dict[int, str]  # the expression, or a variable that holds it
    slices: dict[int, str]
    lines: list[str] = field(default_factory=list)  # the statements that assign the variables


def looked_up(patches: Sequence[ChosenPatch], arguments: CallArguments, names: Names, *, in_hooks: bool) -> Lookups:
    """Returns the source of the values and slices.

    The session evaluates them patch by patch, before anything runs. The code uses the expressions in place if that
    makes no difference. Otherwise it assigns all of them to variables first, in the same order. Hooks run under the
    autograd and autocast modes of the model, so that only names and constants are used in place there.
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
    """Whether a value is the same each time it is evaluated: a literal, a function of torch, or a lambda."""
    node = parsed(value)
    if isinstance(node, ast.Lambda):  # its defaults are evaluated immediately
        defaults = [*node.args.defaults, *node.args.kw_defaults]
        return all(isinstance(default, (ast.Constant, type(None))) for default in defaults)
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _owner(node) == "torch"
    return True


def _may_assign(expression: str) -> bool:
    """Whether an expression assigns a variable, or calls a function other than torch's that may."""
    nodes = list(ast.walk(parsed(expression)))
    harmless = {"torch", "dict", *(node.arg for node in nodes if isinstance(node, ast.arg))}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return any(isinstance(node, ast.NamedExpr) for node in nodes) or any(_owner(c.func) not in harmless for c in calls)


def _owner(function: ast.expr) -> str | None:
    """Returns the variable at the start of `torch.nn.functional.relu`; `None` for other expressions."""
    while isinstance(function, ast.Attribute):
        function = function.value
    return function.id if isinstance(function, ast.Name) else None


# --------------------------------------------------------------------------------------------------------------------
# The inputs of the call


def call_arguments(origin: Origin, root: Frame, avoided: Container[str]) -> CallArguments:
    """Returns the arguments of the user's call, or names for the example inputs if the call is not known."""
    if origin.arguments is not None:
        return arguments_in(origin.arguments)
    nodes = {node.target: node for node in root.inputs()}
    given = [(p, nodes[p.name]) for p in root.parameters if p.name in nodes and _was_given(p, nodes[p.name])]
    by_position: set[object] = {inspect.Parameter.POSITIONAL_ONLY}
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p, _ in given):
        # Arguments before `*args` cannot be passed by keyword.
        by_position.add(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    sources: list[str] = []
    for parameter, node in given:
        sources += _argument(parameter, node, origin.names, avoided, parameter.kind in by_position)
    return arguments_in(", ".join(sources))


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
