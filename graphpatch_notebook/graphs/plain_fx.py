"""A hierarchy of plain `torch.fx.GraphModule`s, with patches as parts of the graphs: for compilers and exporters.

    hidden = torch.relu(up)        ->    hidden = torch.relu(up)
    mul = hidden * 2                     patch_hidden = self.patch_hidden(hidden)
                                         mul = patch_hidden * 2

The modules have the same names as in the model, share its parameters and buffers, and depend on this package only for
the patches. A graph is a record of one run: the root graph checks that its inputs look like those of that run, and that
the modules are in the same modes.
"""

from __future__ import annotations

import dataclasses
import keyword
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.nn import Module

from graphpatch_notebook.capture import unpacked
from graphpatch_notebook.capture.inputs import passed_on
from graphpatch_notebook.capture.records import RECORD, CallNode, Frame, Node, Ref
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.graphs.build import Container, printable
from graphpatch_notebook.graphs.compiled_module import CompiledGraphModule
from graphpatch_notebook.graphs.generated_code import written_value
from graphpatch_notebook.graphs.modules import GraphModule
from graphpatch_notebook.graphs.signatures import Aspect, CallSignature, Difference, has_child
from graphpatch_notebook.patches.kinds import Patch, selects_nothing
from graphpatch_notebook.paths import format_path, unique_name
from graphpatch_notebook.torch_compat import codegen_of
from graphpatch_notebook.values import (
    Key,
    ObjectSpec,
    ScalarSpec,
    TensorSpec,
    ValueSpec,
    children,
    describe,
    is_same_plain,
    key_text,
    replaced,
    take,
)

if TYPE_CHECKING:
    from graphpatch_notebook.components.components import Layout


@dataclass(frozen=True, slots=True)
class PatchedPart:
    """Patches on the part of a value at `index` (`()` for all of it), as a layout sees it, if one is given."""

    index: tuple[Any, ...]
    patches: Sequence[Patch[Any]]
    layout: Layout | None = None


Patched = Mapping[Node, Sequence[tuple[tuple[Key, ...], PatchedPart]]]
"""The patches of each node, in order, by the keys that lead to the value that they are on a part of."""


def plain_fx_module(
    root: GraphModule, patched: Patched, examples: Mapping[str, Any], *, any_size: bool
) -> fx.GraphModule:
    """Returns the modules from `root` down as plain fx modules, with patches inserted, and a check of the inputs.

    `examples` are the known example inputs by parameter; `any_size` is as for `InputCheck`. A `GraphError` names all
    frames without a graph.
    """
    opaque = [graph for graph in root.walk() if graph.frame.opaque_reason is not None]
    if opaque:
        listed = "; ".join(f"{graph.path or '<root>'!r}: {graph.frame.opaque_reason}" for graph in opaque)
        raise GraphError(f"some parts of the model have no graph, so it cannot be written as one graph: {listed}")
    woven: set[Node] = set()
    check, given = InputCheck(root.frame, any_size=any_size), GivenObjects(examples)
    result = _Writer(root, patched, woven, check, given).module()
    check.objects = {name: [(keys, describe(value)) for keys, value in held] for name, held in given.held.items()}
    if missing := [node.name for node in patched if node not in woven]:
        raise GraphError(f"these patched nodes are not in the graphs: {', '.join(map(repr, missing))}")
    return result


class PatchedValue(Module):
    """Applies patches to a value of the model. The graph calls it at patched nodes.

    Args:
        part: The patches.
        dig: The keys that lead from the value to the one that they are on.
        is_written: Whether the value was written into a tensor that others hold: so is the patched value.
        is_shown_copied: Whether patches that only read the value get a copy, as the model writes into it later.
        is_shown_alias: Whether they get an alias that replaces the value: it is an input of the module.
    """

    def __init__(
        self,
        part: PatchedPart,
        dig: tuple[Key, ...],
        *,
        is_written: bool,
        is_shown_copied: bool,
        is_shown_alias: bool,
    ) -> None:
        super().__init__()
        self.index, self.layout = part.index, part.layout
        self.patches = list(part.patches)
        self.dig = dig
        self.is_written = is_written
        self.is_shown_copied = is_shown_copied
        self.is_shown_alias = is_shown_alias

    def forward(self, value: Any) -> Any:
        """Returns the patched value; containers on the way to it are copied, never written into."""
        given = unpacked(value)
        result = self._at(given, self.dig)
        if self.is_written and result is not given:
            value.copy_(result)
            return value
        return value if result is given else result

    def _at(self, value: Any, dig: tuple[Key, ...]) -> Any:
        if not dig:
            return self._with_part(value)
        child = self._at(take(value, dig[0]), dig[1:])
        if isinstance(value, Mapping) and hasattr(value, "__dataclass_fields__"):  # a `ModelOutput`, for compilers
            return type(value)(**{**value, dig[0]: child})
        return replaced(value, dig[0], child)

    def _with_part(self, value: Any) -> Any:
        seen = value if self.layout is None else self.layout.view(value)
        part = seen[self.index] if self.index else seen
        patched = self._patched(part)
        if patched is part:
            return value
        if not self.index:
            return patched if self.layout is None else self.layout.back(patched)
        whole = value.clone()
        (whole if self.layout is None else self.layout.view(whole))[self.index] = patched
        return whole

    def _patched(self, value: Any) -> Any:
        for patch in self.patches:
            is_tensor = isinstance(value, Tensor)
            if patch.observes_only:
                if self.is_shown_alias and is_tensor and value.requires_grad and torch.is_grad_enabled():
                    value = value.view_as(value)  # its gradient is only the one of this use of the tensor
                patch.op(value.clone() if self.is_shown_copied and is_tensor else value)
            elif not selects_nothing(patch, value):
                value = patch.op(value.clone() if patch.requires_clone and is_tensor else value)
        return value


class _Writer:
    """Writes the module of one frame, and those of the frames below it. The root module checks its inputs first."""

    def __init__(
        self, graph_module: GraphModule, patched: Patched, woven: set[Node], check: InputCheck, given: GivenObjects
    ) -> None:
        assert isinstance(graph_module, CompiledGraphModule)
        self._source = graph_module
        self._frame: Frame = graph_module.frame
        self._patched = patched
        self._woven = woven
        self._input_check = check
        self._given = given
        self._held: dict[str, Any] = {}
        self._graph = fx.Graph()

    def module(self) -> fx.GraphModule:
        """Returns the module, in the mode (train or eval) that the model's module had at capture."""
        copies: dict[fx.Node, fx.Node] = {}
        returned = self._graph.graph_copy(self._source.built().graph, copies)
        if self._frame.custom_graph is not None:
            returned = returned[0]  # type: ignore[index]  # such a graph returns a one-element tuple
        self._graph.set_codegen(codegen_of(self._source.built().graph))
        output = self._graph.output(returned)
        placeholders = [copies[node] for node in self._source.built().graph.nodes if node.op == "placeholder"]
        _bring_together(placeholders)
        self._last_input = placeholders[-1] if placeholders else output
        for old, new in copies.items():
            self._hold(old, new)
            record = old.meta.get(RECORD)
            new.meta = {}
            if isinstance(record, Node) and record.kind != "output":
                self._weave(new, record)
        with self._graph.inserting_before(output):
            for dig, part in self._patched.get(self._frame.output_node, ()):
                output.args = (self._with_patched(output.args[0], dig, part),)
        _drop_unused_reads(copies)
        if self._frame.parent is None:
            self._check(placeholders)
        self._graph.lint()
        result = fx.GraphModule(self._held, self._graph, type(self._frame.module).__name__)
        result.training = self._frame.conditions.training
        return result

    # -- what the graph refers to --------------------------------------------------------------------------------------

    def _hold(self, old: fx.Node, new: fx.Node) -> None:
        """Stores the value that a node refers to on the plain module."""
        record: Node | None = old.meta.get(RECORD)
        if new.op == "call_module":
            callee = self._source.callee_of(record) if isinstance(record, CallNode) else None
            path = str(old.target if record is None else record.target)
            if isinstance(record, CallNode) and record.call_index > 0:
                path = f"{path}_call_{record.call_index}"
            below = (
                old
                if callee is None
                else _Writer(callee, self._patched, self._woven, self._input_check, self._given).module()
            )
            new.target = self._put(path, below)
        elif new.op == "get_attr":
            try:
                value = operator.attrgetter(str(old.target))(self._source)
            except AttributeError:
                raise GraphError(
                    f"{self._source.path or '<root>'!r} does not have {str(old.target)!r} any more, which it used when "
                    "it was captured; if the model deletes it while it runs, no graph does the same, and if it was "
                    "deleted since, make a PatchableGraph of the model as it is now"
                ) from None
            if record is not None and record.kind == "constant" and self._given.has(value):
                parameter, keys = self._given.place_in(self._frame, value)
                held = next(n for n in self._graph.nodes if n.op == "placeholder" and n.target.lstrip("*") == parameter)
                with self._graph.inserting_before(new):
                    for key in keys[:-1]:
                        held = self._graph.call_function(take, (held, key))
                new.op, new.target, new.args = "call_function", take, (held, keys[-1])
                return
            held = record if record is not None and record.kind in ("parameter", "buffer", "attribute") else None
            new.target = self._put(str(old.target if held is None else held.target), value)
        elif isinstance(new.target, Container) and new.target.is_by_name and dataclasses.is_dataclass(new.target.type):
            new.target = printable(new.target.type)  # compilers can trace it, unlike the container

    def _put(self, path: str, value: Any) -> str:
        if isinstance(value, fx.Node):  # a module without a graph, called by an edited graph
            value = operator.attrgetter(str(value.target))(self._source)
        safe = ".".join(map(_safe_name, path.split(".")))
        if self._held.get(safe, value) is not value:
            safe = unique_name(safe, self._held)
        self._held[safe] = value
        return safe

    # -- patches -------------------------------------------------------------------------------------------------------

    def _weave(self, node: fx.Node, record: Node) -> None:
        last = value = written_value(node, record)
        is_input = node.op == "placeholder"
        for dig, part in self._patched.get(record, ()):
            with self._graph.inserting_after(self._last_input if is_input else node if last is value else last):
                patched = self._call(value if record.is_in_place else last, dig, part, record)
            if not record.is_in_place:  # else the patched value was written into the tensor itself
                last.replace_all_uses_with(patched, delete_user_cb=partial(operator.is_not, patched))
            last = patched
            if is_input:
                self._last_input = patched

    def _call(self, value: Any, dig: tuple[Key, ...], part: PatchedPart, record: Node) -> fx.Node:
        self._woven.add(record)
        name = unique_name(f"patch_{_safe_name(record.name)}", self._held)
        with_others = {name for pair in self._frame.conditions.same_inputs for name, _ in pair}
        self._held[name] = PatchedValue(
            part,
            dig,
            is_written=record.is_in_place,
            is_shown_copied=record.is_mutated_later,
            is_shown_alias=record.kind == "input" and not record.is_mutated_later and record.target not in with_others,
        )
        return self._graph.create_node("call_module", name, (value,), name=name)

    def _with_patched(self, value: Any, dig: tuple[Key, ...], part: PatchedPart) -> Any:
        """Returns the output as the graph holds it, with patches on a part of it."""
        if isinstance(value, fx.Node) or not dig:
            return self._call(value, dig, part, self._frame.output_node)
        key, *rest = dig
        if isinstance(value, dict):
            return {k: self._with_patched(v, tuple(rest), part) if k == key else v for k, v in value.items()}
        return type(value)([self._with_patched(v, tuple(rest), part) if i == key else v for i, v in enumerate(value)])

    def _check(self, placeholders: list[fx.Node]) -> None:
        with self._graph.inserting_after(placeholders[-1]) if placeholders else self._graph.inserting_before():
            self._held["check_inputs"] = self._input_check
            self._graph.create_node("call_module", "check_inputs", tuple(placeholders), name="check_inputs")


def _bring_together(placeholders: list[fx.Node]) -> None:
    """Moves reads of parts of inputs behind the last parameter, as patches of the inputs have to run first."""
    for before, placeholder in pairwise(placeholders):
        if before.next is not placeholder:
            before.append(placeholder)


def _drop_unused_reads(copies: dict[fx.Node, fx.Node]) -> None:
    """Removes reads of values that only decided the control flow of the recorded run: compilers cannot trace them."""
    for old, new in reversed(copies.items()):
        record: Node | None = old.meta.get(RECORD)
        if record is None or record.kind != "op" or record.is_in_place or new.users:
            continue
        if isinstance(record.spec, ScalarSpec) and record.spec.value is not None:
            new.graph.erase_node(new)


_TAKEN = frozenset(dir(fx.GraphModule({}, fx.Graph()))) | {"check_inputs"}


def _safe_name(name: str) -> str:
    """Returns a name that generated code can use, and that a `GraphModule` does not have already."""
    text = re.sub(r"\W", "_", name)
    return f"{text}_" if keyword.iskeyword(text) or text in _TAKEN else text


def listed_doubts(root: GraphModule) -> str:
    """Returns the doubts about the graphs on other inputs, frame by frame; empty if there are none."""
    found = ((graph.path or "<root>", str(doubt)) for graph in root.walk() for doubt in graph.frame.doubts)
    return "; ".join(f"{path!r} {doubt}" for path, doubt in found)


# -- objects among the inputs ------------------------------------------------------------------------------------------


class GivenObjects:
    """The objects among the example inputs, such as caches. Graphs read the tensors of those that they are given."""

    def __init__(self, examples: Mapping[str, Any]) -> None:
        self.held = {name: [*_held_in(value, (), ())] for name, value in examples.items() if _is_object(value)}
        self._places = {id(value): (name, keys) for name, held in self.held.items() for keys, value in held}

    def has(self, value: Any) -> bool:
        """Whether one of the objects holds this tensor."""
        return isinstance(value, Tensor) and id(value) in self._places

    def place_in(self, frame: Frame, tensor: Tensor) -> tuple[str, tuple[Key, ...]]:
        """Returns the parameter of a frame that receives the object, and the keys from there to the tensor."""
        name, keys = self._places[id(tensor)]
        found = next((str(node.target) for node in frame.inputs() if _input_of_model(frame, node) == name), None)
        if found is None:
            where = format_path(frame.path) or "<root>"
            raise GraphError(f"{where!r} uses a tensor of an object that it is not given as an input")
        return found, keys


def _is_object(value: Any) -> bool:
    return isinstance(describe(value), ObjectSpec) and not isinstance(value, (Tensor, Module, type))


def _held_in(value: Any, keys: tuple[Key, ...], above: tuple[int, ...]) -> Iterator[tuple[tuple[Key, ...], Any]]:
    """Yields the tensors and plain values in the attributes of an object, and in objects and containers in these."""
    if id(value) in above:  # an object may hold itself
        return
    inside = [*vars(value).items()] if _is_object(value) and hasattr(value, "__dict__") else children(value) or []
    for key, child in inside:
        if isinstance(describe(child), (TensorSpec, ScalarSpec)):
            yield (*keys, key), child
        else:
            yield from _held_in(child, (*keys, key), (*above, id(value)))


def _input_of_model(frame: Frame, node: Node) -> str | None:
    """Returns the parameter of the model whose value an input of a frame is."""
    while (found := passed_on(node, frame)) is not None:
        value, frame = found
        if not isinstance(value, Ref) or value.dig or value.node.kind != "input":
            return None
        node = value.node
    return str(node.target)


# -- which calls it holds for -----------------------------------------------------------------------------------------


class InputCheck(Module):
    """Raises an error if a call does not have the form of the recorded one. Compilers can trace it.

    The modules must also be in the modes of the recorded run. With `any_size`, tensors may have other sizes, but not
    another number of dimensions. `maker` is what makes another graph, for messages.
    """

    def __init__(self, frame: Frame, *, any_size: bool) -> None:
        super().__init__()
        self.signature = replace(CallSignature.of_frame(frame), any_size=any_size)
        self.training = self.was_training = frame.conditions.training
        self.objects: dict[str, list[tuple[tuple[Key, ...], ValueSpec]]] = {}
        self.maker = "pg.to_fx"

    def forward(self, *values: Any) -> None:
        """Raises a `GraphError` if an input (in the order of the parameters) or a mode is not as in the example."""
        if self.training is not self.was_training:  # `train()` and `eval()` of the whole reach this module
            was, now = ("train", "eval") if self.was_training else ("eval", "train")
            raise GraphError(
                f"this graph was captured in {was} mode, and is in {now} mode now, which does not change it: call "
                f"{was}() on it, or make another graph, with {self.maker}(...) of a PatchableGraph in {now} mode"
            )
        differences = self.signature.differences(values)
        if differences:
            raise GraphError(f"{differences[0]}; {self._repair(differences[0])}")
        if self.objects:
            self._check_objects(values)

    def _check_objects(self, values: tuple[Any, ...]) -> None:
        """Checks that objects hold tensors of the same shapes, and the same numbers: graphs may read them."""
        for number, (name, _) in enumerate(self.signature.inputs):
            for keys, spec in self.objects.get(name, ()):
                value = values[number]
                for key in keys:
                    value = take(value, key) if has_child(value, key) else None
                if not _is_like(spec, value):
                    path = format_path((name,), map(key_text, keys))
                    raise GraphError(f"{path!r} is {describe(value)}, and was {spec} in the example; {self._other()}")

    def _repair(self, difference: Difference) -> str:
        if difference.aspect is Aspect.SIZE:
            return f"{self.maker}(..., any_size=True) makes a graph for inputs of other sizes"
        was, now = difference.was, difference.now
        if difference.aspect is Aspect.VALUE and isinstance(was, ScalarSpec) and now == ScalarSpec(None):
            return f"call it with {difference.name}={was.value!r}"
        return self._other()

    def _other(self) -> str:
        return f"make another graph, with {self.maker}(...) of a PatchableGraph that has such inputs as its example"


def _is_like(spec: ValueSpec, value: Any) -> bool:
    if isinstance(spec, TensorSpec):
        return isinstance(value, Tensor) and value.shape == spec.shape and value.dtype == spec.dtype
    return isinstance(spec, ScalarSpec) and is_same_plain(spec.value, value)
