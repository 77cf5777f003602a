"""What of the chosen patches plain forward hooks can do, and where: which module, which side, which call.

ChosenPatch -> Target (`resolution`) -> Edit, in the HookPlan of its module     or a sentence: why hooks cannot
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.nn import Module

from graphpatch_notebook.capture.records import Frame, InputParameter, Node, Ref
from graphpatch_notebook.capture.tensor_sources import registered_modules
from graphpatch_notebook.errors import ExportError
from graphpatch_notebook.inspection.data_flow import at_keys, bound_arguments
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, resolve
from graphpatch_notebook.notebook.export.source_code import text_literal
from graphpatch_notebook.notebook.export.source_parts import by_path
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.code_names import Arguments
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import is_compiled
from graphpatch_notebook.values import ContainerSpec, TensorSpec, leaves, plain_dict_key

Side: TypeAlias = Literal["inputs", "output"]


@dataclass(frozen=True, slots=True)
class Form:
    """How a call gives an input, if that is known.

    Attributes:
        position: Where it stands among the positional arguments, if it may.
        name: Its name among the keyword arguments, if it may be there.
        is_sure: Whether it is where `position` says, or else where `name` says, in each call like the example's.
        default: The source of its default, where the call may leave it out; `None` where none can be written.
    """

    position: int | None
    name: str | None
    is_sure: bool
    default: str | None = None


@dataclass(frozen=True, slots=True)
class Edit:
    """The patches on one value, in one call of a module.

    Attributes:
        target: The value.
        patches: What is done with it, in order.
        dig: The keys that lead to it, from the input or the output.
        form: How the call gives the input; `None` for an output.
    """

    target: Target
    patches: tuple[ChosenPatch, ...]
    dig: tuple[Any, ...]
    form: Form | None

    @property
    def containers(self) -> list[tuple[Any, ContainerSpec]]:
        """Each key of `dig`, with the container that it leads into."""
        found: list[tuple[Any, ContainerSpec]] = []
        spec = self.target.node.spec
        for key in self.target.dig:
            assert isinstance(spec, ContainerSpec)
            found.append((key, spec))
            spec = next(child for _, other, child in spec.children if other == key)
        return found[len(found) - len(self.dig) :]


@dataclass(slots=True)
class HookPlan:
    """What one hook does.

    Attributes:
        module: The source of the module.
        side: Which hook it is: the one before `forward`, or the one after.
        count: How often the module is called in one run of the model.
        calls: What is done in which of these calls, from zero.
    """

    module: str
    side: Side
    count: int
    calls: dict[int, list[Edit]] = field(default_factory=dict)

    @property
    def edits(self) -> list[Edit]:
        """All that it does, by call."""
        return [edit for _, edits in sorted(self.calls.items()) for edit in edits]


def hook_plans(
    patches: Sequence[ChosenPatch], root: Frame, model: str, arguments: Arguments, *, knows_call: bool
) -> list[HookPlan]:
    """Returns the hooks that do what the patches do.

    Args:
        patches: The patches.
        root: The root frame of the capture.
        model: The variable that holds the model.
        arguments: The arguments of the call of the model.
        knows_call: Whether that is how it is called, rather than a suggestion.

    Raises:
        ExportError: Hooks cannot do what some of them do; the message names them all.
    """
    problems: list[str] = list(_problems_of_graph(root))
    plans: dict[tuple[int, Side], HookPlan] = {}
    for path, on_path in by_path(patches).items():
        try:
            target = resolve(root, path)
        except Unresolvable as problem:
            problems.append(problem.message)
            continue
        found = list(_problems(target, on_path, root))
        if not found:
            edit = _edit(target, tuple(on_path), root, arguments if knows_call else None)
            found = list(_write_problems(edit))
        problems += found
        if found:
            continue
        side: Side = "output" if target.node.kind == "output" else "inputs"
        calls = _calls(root, target.frame.module, side)
        plan = plans.setdefault(
            (id(target.frame.module), side), HookPlan(str(module_source(root, target.frame, model)), side, len(calls))
        )
        plan.calls.setdefault(calls.index(target.frame), []).append(edit)
    if problems:
        more = "the graphpatch form can do it" if len(problems) == 1 else "the graphpatch form can do them all"
        raise ExportError(f"hooks cannot do this: {'; '.join(problems)} ({more})")
    return list(plans.values())


def module_source(root: Frame, frame: Frame, model: str) -> str | None:
    """Returns what leads from the variable `model` to the module of a frame; `None` where nothing does."""
    if frame.module is root.module:
        return model
    registered = [path for path, module in registered_modules(root.module) if module is frame.module]
    for path in (frame.attribute_path_from_root, *registered):
        with suppress(AttributeError):
            if root.module.get_submodule(path) is frame.module:
                return f"{model}.get_submodule({text_literal(path)})"
    # `get_submodule` looks attributes up, and finds methods first.
    named = next((path for path, module in root.module.named_modules() if module is frame.module), None)
    return None if named is None else f"dict({model}.named_modules())[{text_literal(named)}]"


def _calls(root: Frame, module: Module, side: Side) -> list[Frame]:
    """Returns the calls of a module in the order in which they begin, or end: a module may call itself."""
    return [frame for frame in (root.walk() if side == "inputs" else _ends(root)) if frame.module is module]


def _ends(frame: Frame) -> Iterator[Frame]:
    for call in frame.calls():
        yield from _ends(call.frame)
    yield frame


def _edit(target: Target, patches: tuple[ChosenPatch, ...], root: Frame, arguments: Arguments | None) -> Edit:
    if target.node.kind == "output":
        return Edit(target, patches, target.dig, None)
    frame = target.frame
    index, parameter = next((i, p) for i, p in enumerate(frame.parameters) if p.name == target.node.target)
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return Edit(target, patches, target.dig[1:], Form(index + int(target.dig[0]), None, True))
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return Edit(target, patches, target.dig[1:], Form(None, str(target.dig[0]), True))
    return Edit(target, patches, target.dig, _form(frame, index, parameter, arguments if frame is root else None))


def _form(frame: Frame, index: int, parameter: InputParameter, arguments: Arguments | None) -> Form:
    if arguments is not None:
        positional, keywords = arguments.positional, arguments.keywords
    elif frame.call is not None:
        positional, keywords = len(frame.call.args), frozenset(frame.call.kwargs)
    else:
        positional, keywords = None, frozenset()
    may_be_positional = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    may_be_keyword = parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
    if positional is not None and may_be_positional and index < positional:
        return Form(index, None, True)
    if parameter.name in keywords and may_be_keyword:
        return Form(None, parameter.name, True)
    default = parameter.default
    return Form(
        index if may_be_positional else None,
        parameter.name if may_be_keyword else None,
        not (may_be_positional and may_be_keyword),
        repr(default) if default is None or type(default) in (bool, int) else None,
    )


# --------------------------------------------------------------------------------------------------------------------
# What hooks cannot do


def _problems_of_graph(root: Frame) -> Iterator[str]:
    own = next((frame for frame in root.walk() if frame.has_own_graph), None)
    if own is not None:
        where = format_path(own.path) or "the whole model"
        yield f"{where!r} runs as a graph (edited, custom, or from a file), and hooks run the model's own code"
    compiled = next((frame for frame in root.walk() if is_compiled(frame.module)), None)
    if compiled is not None:
        where = format_path(compiled.path) or "the whole model"
        yield f"{where!r} is compiled, and its patched run is not: the last bits would differ"


def _problems(target: Target, patches: Sequence[ChosenPatch], root: Frame) -> Iterator[str]:
    title = _title(target, patches)
    node, frame = target.node, target.frame
    if any(patch.steps is not None or patch.positions is not None for patch in patches):
        yield f"{title} has steps or positions, which a hook does not know: choose a part with a slice instead"
    without = next((patch for patch in patches if not patch.definition.has_hook), None)
    if without is not None:
        yield f"{title} is a {without.kind} patch, a kind that cannot be written as a hook"
    if node.kind == "op":
        kind = f"an operation ({node.op}) inside of {type(frame.module).__name__}, which hooks do not see"
        yield f"{title} is {kind}; nearest: {_nearest_boundary(target, root)!r}"
    elif node.kind not in ("input", "output"):
        near = _boundary_paths(frame, frame.output_node)
        instead = f"; what is made of it is in {near[0]!r}" if near else ""
        yield f"{title} is a {node.kind}, and hooks see inputs and outputs only{instead}"
    if module_source(root, frame, "model") is None:
        yield f"{title}: this {type(frame.module).__name__} is no registered submodule: a hook cannot be put on it"
    elif isinstance(frame.module, torch.jit.ScriptModule):
        yield f"{title}: this is a TorchScript module, which takes no hooks"
    elif (layer := _fused_layer(frame)) is not None:
        where = format_path(layer.path) or "the model"
        yield f"{title}: a hook here switches the fused kernel of {where!r} off: the last bits would differ"
    odd = [key for key in map(plain_dict_key, target.dig) if not _is_literal(key)]
    if odd:
        yield f"{title}: the key {odd[0]!r} has no literal in Python"


def _title(target: Target, patches: Sequence[ChosenPatch]) -> str:
    return f"{'#' + str(patches[0].number) + ' ' if patches[0].number else ''}{target.path!r}"


def _write_problems(edit: Edit) -> Iterator[str]:
    """Yields why a value cannot be put back where it was. Hooks change tensors, and tensors in tuples."""
    if all(patch.definition.keeps is not None for patch in edit.patches):
        return
    title = _title(edit.target, edit.patches)
    other = next((spec for _, spec in edit.containers if spec.type is not tuple), None)
    if other is not None:
        yield f"{title} is in a {other.type.__name__}, and hooks change tensors and tuples only: patch what it holds"
    elif not isinstance(edit.target.spec, TensorSpec):
        yield f"{title} is not a tensor ({edit.target.spec}), and hooks change tensors only"


def _is_literal(key: Any) -> bool:
    return key is None or type(key) in (bool, int, str, bytes) or (type(key) is tuple and all(map(_is_literal, key)))


def _fused_layer(frame: Frame | None) -> Frame | None:
    while frame is not None and not isinstance(frame.module, torch.nn.TransformerEncoderLayer):
        frame = frame.parent
    return frame


def _nearest_boundary(target: Target, root: Frame) -> str:
    """Returns a path at the boundary of a module where the value of an op is, or else what becomes of it."""
    frame = target.frame
    outputs = _boundary_paths(frame, frame.output_node)
    for path in outputs:
        if _is_value_of(target.node, at_keys(frame.output, resolve(root, path).dig)):
            return path
    for called in (call.frame for call in frame.calls()):
        for name, given in bound_arguments(called).items():
            if _is_value_of(target.node, given):
                return format_path((*called.path, name))
    return next(iter(outputs), format_path((*frame.path, "output")))


def _is_value_of(node: Node, given: Any) -> bool:
    return isinstance(given, Ref) and given.node is node and not given.dig


def _boundary_paths(frame: Frame, node: Node) -> list[str]:
    return [format_path((*frame.path, node.name), dig) for dig, _ in leaves(node.spec)]
