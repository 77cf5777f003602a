"""Chosen patches as a script with plain forward hooks of torch, without graphpatch. Pure text: nothing runs.

ChosenPatch -> Target -> Edit, in the HookPlan of its module     or the reason why a hook cannot do it
HookPlan    -> HookFunction                                      the source of the hook
HooksExport                                                      the script with all hooks
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.nn import Module

from graphpatch_notebook.capture.held_values import registered_modules
from graphpatch_notebook.capture.inputs import inputs_of_call
from graphpatch_notebook.capture.records import Frame, Node, Ref, at_keys
from graphpatch_notebook.errors import ExportError
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, resolve
from graphpatch_notebook.notebook.export.source_code import WIDTH, SourceCode, block, bracketed, text_literal
from graphpatch_notebook.notebook.export.source_parts import (
    CallArguments,
    Names,
    Needs,
    as_name,
    as_source,
    call_arguments,
    in_order,
    is_name,
    last_words,
    left_out,
    looked_up,
    name_of_model,
    needs,
    result_lines,
    unknown_inputs,
    user_names,
)
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.origin import Origin
from graphpatch_notebook.notebook.session.session import by_value
from graphpatch_notebook.patches.slices import index_text
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import is_compiled
from graphpatch_notebook.values import ContainerSpec, TensorSpec, key_text, leaves, plain_dict_key


class HooksExport:
    """One export in the hooks form.

    With the names in its first line, the script computes the same values, bit for bit, as
    `with pg.patch(session.resolve(...).patch_map)`. It raises if a module is not called as often as in the example.

    Raises:
        ExportError: Some patches cannot be written as hooks; the message names them, and what to patch instead.
    """

    def __init__(self, patches: tuple[ChosenPatch, ...], origin: Origin, root: Frame) -> None:
        self.patches = patches
        self.origin = origin
        probes = {str(patch.name) for patch in patches}
        self.arguments = call_arguments(origin, root, probes)
        self.names = Names({*user_names(patches, origin), *in_order(self.arguments.expression)})
        made = origin.model is not None and not is_name(origin.model)
        self.model = self.names.free("model") if made else name_of_model(patches, origin, self.names)
        self.plans = hook_plans(patches, root, self.model, self.arguments)
        self.calls, self.kept = self.names.free("calls"), self.names.free("kept")
        self.counter = self.names.free("Counter")
        self.lookups = looked_up(patches, self.arguments, self.names, in_hooks=True)
        self.functions = {self.names.free(_function_name(plan)): plan for plan in self.plans}

    def needed(self) -> Needs:
        """Returns the names that the script needs."""
        first = [self.model] if self.origin.model is None or is_name(self.origin.model) else []
        made = [] if first else [str(self.origin.model)]
        return needs(self.patches, first, [*made, self.arguments.expression])

    def source(self, off: int) -> SourceCode:
        """Returns the script; `off` is the number of disabled patches."""
        functions = [HookFunction(plan, name, self).source() for name, plan in self.functions.items()]
        head = [*self.needed().comment(), *left_out(off), *self._imports()]
        sections = ["\n".join([*head, "", *self._preparations()]), *functions, "\n".join(self._run())]
        return SourceCode("\n\n\n".join(sections) + "\n")

    def _imports(self) -> list[str]:
        alias = "" if self.counter == "Counter" else f" as {self.counter}"
        return [f"from collections import Counter{alias}", *["", "import torch"] * self.needed().imports_torch]

    def _preparations(self) -> list[str]:
        found: list[str] = []
        if self.origin.model is not None and not is_name(self.origin.model):
            found.append(f"{self.model} = {as_source(self.origin.model, 'the model')}")
        found += [*self.lookups.lines, f"{self.calls} = {self.counter}()"]
        if any(patch.definition.keeps for patch in self.patches):
            records = [f"{text_literal(str(p.name))}: []" for p in self.patches if p.definition.keeps_list]
            found.append(bracketed(f"{self.kept} = {{", records, "}"))
        return found

    def _run(self) -> list[str]:
        hooks, hook = self.names.free("hooks"), self.names.free("hook")
        result = self.names.free("output", "result")
        call = bracketed(f"{result} = {self.model}(", self.arguments.sources, ")", WIDTH - 4)
        body = [self._registration(hooks, name, plan) for name, plan in self.functions.items()]
        kept = {
            patch.number: f"{self.kept}[{text_literal(str(patch.name))}]"
            for patch in self.patches
            if patch.definition.keeps
        }
        results = result_lines(self.patches, kept, self.lookups.slices)
        return [
            f"{hooks} = []",
            block("try:", [*body, *unknown_inputs(self.origin), call]),
            block("finally:", [block(f"for {hook} in {hooks}:", [f"{hook}.remove()"])]),
            "",
            *self._check(),
            *([""] if results else []),
            *results,
        ]

    def _registration(self, hooks: str, name: str, plan: HookPlan) -> str:
        side = "" if plan.side == "output" else "pre_"
        options = ", with_kwargs=True" if plan.takes_kwargs else ""
        handle = f"{plan.module}.register_forward_{side}hook({name}{options})"
        return bracketed(f"{hooks}.append(", [handle], ")", WIDTH - 4)

    def _check(self) -> list[str]:
        """Returns the statements that raise if a module was not called as often as in the example."""
        expected = self.names.free("expected")
        counts = [f"{text_literal(name)}: {plan.count}" for name, plan in self.functions.items()]
        message = f'f"the hooks ran {{dict({self.calls})}} times, not {{{expected}}}"'
        is_counted = any(plan.count > 1 for plan in self.plans)
        return [
            *["# Calls are identified by their number, so there must be as many as in the example."] * is_counted,
            bracketed(f"{expected} = {{", counts, "}"),
            block(f"if {self.calls} != {expected}:", [f"raise RuntimeError({message})"]),
        ]


def _function_name(plan: HookPlan) -> str:
    """Returns the name of a hook function."""
    kinds = {patch.kind for edit in plan.edits for patch in edit.patches}
    verb = kinds.pop() if len(kinds) == 1 else "patch"
    paths: Sequence[str] = list(dict.fromkeys(edit.target.path for edit in plan.edits))
    if len(paths) == 1:
        return f"{verb}_{as_name(*last_words(paths[0]))}"
    inside = plan.edits[0].target.frame.attribute_path_from_root.split(".")[-2:]
    return f"{verb}_{as_name(*inside) if any(inside) else 'model'}_{plan.side}"


# --------------------------------------------------------------------------------------------------------------------
# Plans: which hook does what, in which call


HookSide: TypeAlias = Literal["inputs", "output"]


@dataclass(frozen=True, slots=True)
class Edit:
    """The patches on one value, in one call of a module."""

    target: Target
    patches: tuple[ChosenPatch, ...]
    dig: tuple[Any, ...]  # the keys from the input or output to the value
    place: int | str | None  # where the call passes the input: position or keyword; `None` for an output

    @property
    def containers(self) -> list[tuple[Any, ContainerSpec]]:
        """Each key of `dig`, with the container that it belongs to."""
        found: list[tuple[Any, ContainerSpec]] = []
        spec = self.target.node.spec
        for key in self.target.dig:
            assert isinstance(spec, ContainerSpec)
            found.append((key, spec))
            spec = next(child for _, other, child in spec.children if other == key)
        return found[len(found) - len(self.dig) :]


@dataclass(slots=True)
class HookPlan:
    """The edits of one hook."""

    module: str  # its source
    side: HookSide
    count: int  # of the calls of the module in one run
    calls: dict[int, list[Edit]] = field(default_factory=dict)  # by the call, from zero

    @property
    def takes_kwargs(self) -> bool:
        """Whether a hook before `forward` needs the keyword arguments."""
        return any(isinstance(edit.place, str) for edit in self.edits)

    @property
    def edits(self) -> list[Edit]:
        """All edits, in the order of the calls."""
        return [edit for _, edits in sorted(self.calls.items()) for edit in edits]


def hook_plans(patches: Sequence[ChosenPatch], root: Frame, model: str, arguments: CallArguments) -> list[HookPlan]:
    """Returns the hooks for the patches."""
    problems: list[str] = list(_problems_of_graph(root))
    plans: dict[tuple[int, HookSide], HookPlan] = {}
    for path, on_path in by_value(root, patches).items():
        try:
            target = resolve(root, path)
        except Unresolvable as problem:
            problems.append(problem.message)
            continue
        found = list(_problems(target, on_path, root))
        if not found:
            edit = _edit(target, tuple(on_path), root, arguments)
            found = list(_edit_problems(edit))
        problems += found
        if found:
            continue
        side: HookSide = "output" if target.node.kind == "output" else "inputs"
        calls = _calls(root, target.frame.module, side)
        plan = plans.setdefault(
            (id(target.frame.module), side), HookPlan(str(module_source(root, target.frame, model)), side, len(calls))
        )
        plan.calls.setdefault(calls.index(target.frame), []).append(edit)
    if problems:
        more = "the graphpatch form can" if len(problems) == 1 else "the graphpatch form can do all of it"
        raise ExportError(f"this cannot be written as hooks: {'; '.join(problems)} ({more})")
    return list(plans.values())


def module_source(root: Frame, frame: Frame, model: str) -> str | None:
    """Returns the source of the module of a frame, from the variable `model`; `None` if there is none."""
    if frame.module is root.module:
        return model
    registered = [path for path, module in registered_modules(root.module) if module is frame.module]
    for path in (frame.attribute_path_from_root, *registered):
        with suppress(AttributeError):
            if root.module.get_submodule(path) is frame.module:
                return f"{model}.get_submodule({text_literal(path)})"
    # `get_submodule` may fail, because it looks up attributes and finds methods first.
    named = next((path for path, module in root.module.named_modules() if module is frame.module), None)
    return None if named is None else f"dict({model}.named_modules())[{text_literal(named)}]"


def _calls(root: Frame, module: Module, side: HookSide) -> list[Frame]:
    """Returns the calls of a module in the order in which its hooks run: a module may call itself."""
    return [frame for frame in (root.walk() if side == "inputs" else _ends(root)) if frame.module is module]


def _ends(frame: Frame) -> Iterator[Frame]:
    for call in frame.calls():
        yield from _ends(call.frame)
    yield frame


def _edit(target: Target, patches: tuple[ChosenPatch, ...], root: Frame, arguments: CallArguments) -> Edit:
    if target.node.kind == "output":
        return Edit(target, patches, target.dig, None)
    frame = target.frame
    index, parameter = next((i, p) for i, p in enumerate(frame.parameters) if p.name == target.node.target)
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return Edit(target, patches, target.dig[1:], index + int(target.dig[0]))
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return Edit(target, patches, target.dig[1:], str(target.dig[0]))
    positional, keywords = arguments.positional, arguments.keywords
    if frame is not root and frame.call is not None:
        positional, keywords = len(frame.call.args), frozenset(frame.call.kwargs)
    if positional is not None and index < positional:
        return Edit(target, patches, target.dig, index)
    is_passed = positional is not None and not keywords.isdisjoint({parameter.name, None})
    return Edit(target, patches, target.dig, parameter.name if is_passed else None)


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
        yield f"{title} has steps or positions, which a hook cannot know: use a slice instead"
    without = next((patch for patch in patches if not patch.definition.has_hook), None)
    if without is not None:
        yield f"{title} is a {without.kind} patch, a kind that cannot be written as a hook"
    if node.kind == "op":
        kind = f"an operation ({node.op}) inside {type(frame.module).__name__}, which hooks do not see"
        merged = _merged_head(target)
        instead = (
            f"nearest: {_nearest_boundary(target, root)!r}" if merged is None else f"patch {merged}, the same value"
        )
        yield f"{title} is {kind}; {instead}"
    elif node.kind not in ("input", "output"):
        near = _boundary_paths(frame, frame.output_node)
        result = f"; its result is in {near[0]!r}" if near else ""
        yield f"{title} is a {node.kind}, and hooks see inputs and outputs only{result}"
    if module_source(root, frame, "model") is None:
        yield f"{title}: this {type(frame.module).__name__} is not a registered submodule, so it cannot have a hook"
    elif isinstance(frame.module, torch.jit.ScriptModule):
        yield f"{title}: this is a TorchScript module, which does not support hooks"
    elif (layer := _fused_layer(frame)) is not None:
        where = format_path(layer.path) or "the model"
        yield f"{title}: a hook here disables the fused kernel of {where!r}: the last bits would differ"
    odd = [key for key in map(plain_dict_key, target.dig) if not _is_literal(key)]
    if odd:
        yield f"{title}: the key {odd[0]!r} cannot be written as a literal"


def _title(target: Target, patches: Sequence[ChosenPatch]) -> str:
    return f"{'#' + str(patches[0].number) + ' ' if patches[0].number else ''}{target.text!r}"


def _edit_problems(edit: Edit) -> Iterator[str]:
    """Yields why a value cannot be read or replaced. Hooks change tensors, and tensors in tuples."""
    if edit.place is None and edit.target.node.kind == "input":
        yield f"{_title(edit.target, edit.patches)}: the call does not pass this input by position or by name"
        return
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
    """Returns a path at the boundary of a module that holds the value of an op, or else a result of it."""
    frame = target.frame
    outputs = _boundary_paths(frame, frame.output_node)
    for path in outputs:
        if _is_value_of(target.node, at_keys(frame.output, resolve(root, path).dig)):
            return path
    for call in frame.calls():
        for name, given in inputs_of_call(call.frame, call.args, call.kwargs).items():
            if _is_value_of(target.node, given):
                return format_path((*call.frame.path, name))
    return next(iter(outputs), format_path((*frame.path, "output")))


def _merged_head(target: Target) -> str | None:
    """Returns the columns of a module's input that are the head at `target`, with heads one after the other."""
    axes, whole = target.component.axes if target.component else (), target.whole
    dim = axes.index("head") if "head" in axes else -1
    number = target.index[dim] if 0 <= dim == len(target.index) - 1 else None
    if not isinstance(number, int) or not isinstance(whole, TensorSpec) or axes[-1] != "channel" or len(axes) != 4:
        return None
    width = whole.shape[-1]
    for call in target.frame.calls():
        for name, given in inputs_of_call(call.frame, call.args, call.kwargs).items():
            if isinstance(given, Ref) and not given.dig and _merges(given.node, target.node, dim):
                number %= whole.shape[dim]
                return f"{format_path((*call.frame.path, name))}[..., {number * width}:{(number + 1) * width}]"
    return None


def _merges(result: Node, node: Node, dim: int) -> bool:
    """Whether an operation puts the heads in dimension `dim` of a value side by side, and changes nothing else."""
    steps: list[Node] = []
    while result is not node:
        source = result.args[0] if result.kind == "op" and result.args else None
        if not isinstance(source, Ref) or source.dig or result.is_in_place:
            return False
        is_same = result.op == "contiguous" or (result.op in _RESHAPES and result.spec == source.node.spec)
        steps += [] if is_same else [result]
        result = source.node
    swaps = [step for step in steps[1:] if step.op == "transpose" and set(step.args[1:]) == {1, 2}]
    if not steps or steps[0].op not in _RESHAPES or not len(swaps) == len(steps) - 1 == (1 if dim == 1 else 0):
        return False
    before, after = steps[0].args[0].node.spec, steps[0].spec
    if not isinstance(before, TensorSpec) or not isinstance(after, TensorSpec):
        return False
    rows, length, heads, width = before.shape
    return after.shape == (rows, length, heads * width)


_RESHAPES = ("reshape", "view", "flatten")


def _is_value_of(node: Node, given: Any) -> bool:
    return isinstance(given, Ref) and given.node is node and not given.dig


def _boundary_paths(frame: Frame, node: Node) -> list[str]:
    return [format_path((*frame.path, node.name), dig) for dig, _ in leaves(node.spec)]


# --------------------------------------------------------------------------------------------------------------------
# Functions: the source of the hooks


class HookFunction:
    """The source of a hook."""

    def __init__(self, plan: HookPlan, name: str, export: HooksExport) -> None:
        self.plan = plan
        self.name = name
        self.export = export
        self.names = export.names.inner()
        self.module, self.args = self.names.free("module"), self.names.free("args")
        self.kwargs = self.names.free("kwargs") if plan.side == "inputs" else ""
        self.output = self.names.free("output") if plan.side == "output" else ""
        self.has_changed = False

    def source(self) -> str:
        """Returns the definition of the function."""
        own = f"{self.export.calls}[{text_literal(self.name)}]"
        body = [f"{own} += 1"]
        for index, edits in sorted(self.plan.calls.items()):
            statements = [statement for edit in edits for statement in self._edit(edit)]
            body += statements if self.plan.count == 1 else [block(f"if {own} == {index + 1}:", statements)]
        return block(f"def {self.name}({', '.join(self._parameters())}):", self._with_return(body))

    def _parameters(self) -> list[str]:
        if self.plan.side == "output":
            return [self.module, self.args, self.output]
        return [self.module, self.args, *([self.kwargs] if self.plan.takes_kwargs else [])]

    def _with_return(self, body: list[str]) -> list[str]:
        if not self.has_changed:
            return body
        if self.plan.side == "inputs" and self.plan.takes_kwargs:
            return [*body, f"return {self.args}, {self.kwargs}"]
        result = self.output or self.args
        if body[-1].startswith(start := f"{result} = "):
            return [*body[:-1], f"return {body[-1].removeprefix(start)}"]
        return [*body, f"return {result}"]

    # -- one value ---------------------------------------------------------------------------------------------------

    def _edit(self, edit: Edit) -> list[str]:
        """Returns the statements that read a value, patch it and write it back."""
        found: list[str] = []
        whole = self.output
        if edit.place is not None:
            whole = f"{self.args}[{edit.place}]"
            if isinstance(edit.place, str):
                whole = f"{self.kwargs}[{text_literal(edit.place)}]"
        source = whole
        for key, inside in edit.containers:
            source = _child(source, key, inside)
        variable = self.output if not edit.dig and edit.place is None else self._variable(edit)
        value = _Value(source, variable, edit, self.export)
        for patch in edit.patches:
            value.apply(patch)
        found += value.lines
        if not value.is_changed:
            return found
        self.has_changed = True
        rebuilt = self._rebuilt(whole, edit.containers, value.source)
        if edit.place is not None:
            return [*found, self._write(edit.place, rebuilt)]
        if rebuilt != self.output:
            found.append(f"{self.output} = {rebuilt}")
        elif any(patch.definition.hook_result and patch.slice is None for patch in edit.patches):
            # For torch, a hook that returns None changes nothing.
            message = text_literal(f"{edit.target.text}: the function returned None")
            found.append(block(f"if {self.output} is None:", [f"raise TypeError({message})"]))
        return found

    def _variable(self, edit: Edit) -> str:
        last = key_text(edit.target.dig[-1]) if edit.target.dig else str(edit.target.node.target)
        return self.names.free(as_name(last))

    def _write(self, place: int | str, source: str) -> str:
        """Returns the statement that replaces an input."""
        if isinstance(place, str):
            return f"{self.kwargs} = {{**{self.kwargs}, {text_literal(place)}: {source}}}"
        before = f"*{self.args}[:{place}], " if place else ""
        return f"{self.args} = ({before}{source}, *{self.args}[{place + 1}:])"

    def _rebuilt(self, whole: str, path: list[tuple[Any, ContainerSpec]], new: str) -> str:
        """Returns the source of a copy of the tuple `whole`, with `new` at the end of `path`."""
        if not path:
            return new
        (key, spec), *rest = path
        before = [f"*{whole}[:{key}]"] if key else []
        after = [] if key == len(spec.children) - 1 else [f"*{whole}[{key + 1}:]"]
        items = [*before, self._rebuilt(_child(whole, key, spec), rest, new), *after]
        return f"({', '.join(items)})" if len(items) > 1 else f"({items[0]},)"


# --------------------------------------------------------------------------------------------------------------------
# Patches as statements


class _Value:
    """A value to which patches are applied one by one."""

    def __init__(self, source: str, variable: str, edit: Edit, export: HooksExport) -> None:
        self.source = source  # of its current value
        self.variable = variable  # for a changed value
        self.lines: list[str] = []  # the statements so far
        self.is_changed = False  # whether it is another object than at first
        self._edit = edit
        self._export = export
        self._is_own = False
        index = edit.target.index
        self._index = f"[{index_text(index)}]" if index else ""

    def apply(self, patch: ChosenPatch) -> None:
        """Adds the statements of one patch."""
        kind, value = patch.definition, self._export.lookups.values.get(patch.number, "")
        if kind.keeps is not None:
            self._keep(patch)
        elif kind.hook_result is not None:
            self._compute(patch, kind.hook_result, f"({value})" if value.startswith("lambda") else value)
        else:
            self._own()
            part = self._part(patch)
            target = part if self._index or patch.slice is not None else self.variable
            self.lines.append(str(kind.hook_statement).format(target=target, part=part, value=value))

    def _keep(self, patch: ChosenPatch) -> None:
        place = f"{self._export.kept}[{text_literal(str(patch.name))}]"
        # Copy the value if the model overwrites it later.
        target = self._edit.target
        is_copied = target.node.is_mutated_later and isinstance(target.spec, TensorSpec)
        source = f"{self.source}{self._index}" + (".clone()" if is_copied else "")
        self.lines.append(f"{place}.append({source})" if patch.definition.keeps_list else f"{place} = {source}")
        self._is_own = False

    def _assign(self, source: str) -> None:
        if source != self.variable:
            self.lines.append(f"{self.variable} = {source}")
        self.source = self.variable
        self.is_changed = True

    def _own(self) -> None:
        if not self._is_own:
            self._assign(f"{self.source}.clone()")
            self._is_own = True

    def _part(self, patch: ChosenPatch) -> str:
        slice_text = self._export.lookups.slices.get(patch.number)
        if slice_text is None:
            return f"{self.variable}{self._index or '[...]'}"
        return f"{self.variable}{self._index}[{slice_text}]"

    def _compute(self, patch: ChosenPatch, result: str, value: str) -> None:
        if self._index or patch.slice is not None:
            self._own()
            part = self._part(patch)
            self.lines.append(f"{part} = {result.format(value=value, input=f'{part}.clone()')}")
            return
        given = self.source if self._is_own else f"{self.source}.clone()"
        self._assign(result.format(value=value, input=given))
        self._is_own = False


# --------------------------------------------------------------------------------------------------------------------
# Containers


def _child(source: str, key: Any, spec: ContainerSpec) -> str:
    if dataclasses.is_dataclass(spec.type) and isinstance(key, str) and key.isidentifier():
        return f"{source}.{key}"
    plain = plain_dict_key(key)
    return f"{source}[{text_literal(plain) if isinstance(plain, str) else repr(plain)}]"
