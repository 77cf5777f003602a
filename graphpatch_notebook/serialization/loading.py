"""`load`: reads a document into plain modules and records whose graphs are these modules.

With a model, the modules of the file are found in it: they share its parameters and buffers, which must be the same.
"""

from __future__ import annotations

import collections
import inspect
import keyword
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import IO, Any

import torch
from torch import Tensor, fx
from torch.nn import Module

from graphpatch_notebook.capture.held_values import module_at
from graphpatch_notebook.capture.records import (
    RECORD,
    CallNode,
    Conditions,
    Frame,
    InputParameter,
    Node,
    OpNode,
    SavedSite,
    SourceLine,
)
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.graphs.build import ForwardCodeGen
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.serialization.documents import read_document
from graphpatch_notebook.serialization.functions import (
    Allowed,
    check_attribute,
    check_method,
    decoded_function,
    known_classes,
)
from graphpatch_notebook.serialization.loaded_modules import (
    ALIAS,
    CONTAINERS,
    CallCheck,
    LoadedModule,
    LoadedRoot,
    StoredForward,
    is_writable,
    loaded_class,
    tensor_at,
)
from graphpatch_notebook.serialization.plain_values import UnstorableError, decoded, decoded_key, dtype_of
from graphpatch_notebook.serialization.schema import (
    FramePart,
    FunctionPart,
    GraphDocument,
    ModulePart,
    ParameterPart,
    RecordPart,
    SpecPart,
    StepPart,
)
from graphpatch_notebook.serialization.tensors import made_tensors
from graphpatch_notebook.values import (
    ContainerSpec,
    ObjectSpec,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    key_text,
    tensor_bytes,
)

METADATA_KEY = "graphpatch_notebook"
"""The key of the document in the metadata of a safetensors file."""


@dataclass(frozen=True)
class Loaded:
    """The contents of a file; `unstored` says why it has no graph of some frames, by path."""

    module: Module
    root: Frame
    unstored: dict[str, str]


def load(file: str | os.PathLike[str] | IO[bytes], model: Module | None, allow: Iterable[str] | None) -> Loaded:
    """Reads a file. See `PatchableGraph.load`."""
    if model is not None and not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    allowed = Allowed(allow)
    name, document, contents = read_document(file, METADATA_KEY, GraphDocument, "pg.save(file)")
    try:
        loaded = _Reader(document, made_tensors(document.tensors, contents), model, allowed).loaded()
    except GraphError:
        raise
    except (UnstorableError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise GraphError(f"{name} is damaged: {error}") from error
    allowed.check(name)
    return loaded


class _Reader:
    """Reads the parts of a document."""

    def __init__(
        self, document: GraphDocument, tensors: Sequence[Tensor], model: Module | None, allowed: Allowed
    ) -> None:
        self._document = document
        self._tensors = tensors
        self._model = model
        self._allowed = allowed
        self._lines = [SourceLine(*line) for line in document.lines]
        self._modules: list[Module] = []
        self._counts = collections.Counter(part.module for part in document.frames)

    def loaded(self) -> Loaded:
        """Returns what the document holds."""
        document, parts = self._document, self._document.frames
        live = {part.module for part in parts if part.unstored is not None}
        for number, held in enumerate(document.modules):
            self._modules.append(self._module(held, number in live, number == parts[0].module))
        for module, held in zip(self._modules, document.modules, strict=True):  # calls between modules may have cycles
            self._add_names(module, held)
        frames = [
            Frame(self._modules[p.module], p.attribute_path, conditions=Conditions(p.training, grad_mode=p.grad_mode))
            for p in parts
        ]
        for number, (frame, part) in enumerate(zip(frames, parts, strict=True)):
            self._fill(frame, part, frames[number + 1 :])
        for frame, part in zip(frames, parts, strict=True):
            self._add_graph(frame, part)
        first = frames[0]
        if first.opaque_reason is None and isinstance(first.module, LoadedRoot):
            stored = list({id(f.module): f.module for f in frames if f.opaque_reason is None}.values())
            check = CallCheck(first, document.sizes, dtype_of(document.default_dtype), stored)
            has_edits = any(frame.is_edited for frame in frames)
            first.module.set_calls(
                check, self._model, has_edits=has_edits, runs_its_graphs=max(self._counts.values()) == 1
            )
        unstored = {format_path(f.path): f.opaque_reason for f in frames if f.opaque_reason is not None}
        return Loaded(first.module, first, unstored)

    # -- modules -------------------------------------------------------------------------------------------------------

    def _module(self, part: ModulePart, is_live: bool, is_root: bool) -> Module:
        """Returns a module, after its children. If it is live, it is that of the model, if there is one."""
        original = self._original(part, is_live)
        if original is not None and is_live:
            return original
        is_container = part.cls in CONTAINERS and not part.names and not is_root
        module = CONTAINERS[part.cls]() if is_container else loaded_class(part.cls, is_root)()
        module.training = part.training
        module._modules.update({name: None if n is None else self._modules[n] for name, n in part.children.items()})
        for registry, numbers in ((module._parameters, part.parameters), (module._buffers, part.buffers)):
            held: Any = registry
            held.update({name: None if n is None else self._tensors[n] for name, n in numbers.items()})
        module._non_persistent_buffers_set.update(part.not_persistent)
        if original is not None:
            for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
                module.__dict__[name] = original.__dict__[name]
        return module

    def _original(self, part: ModulePart, is_live: bool) -> Module | None:
        """Returns the module of the model, which must be as it was."""
        if self._model is None or part.path is None:
            return None
        module, where = module_at(self._model, part.path), f"{part.path!r} of the model"
        if type(module).__name__ != part.cls or module is None:
            raise GraphError(f"{where} is not a {part.cls}, as in the file: give the model whose graph it is")
        if not is_live and part.training is not module.training:
            was = "train" if part.training else "eval"
            raise GraphError(f"{where} was in {was} mode when the graph was saved; call model.{was}()")
        for name, number in (part.parameters | part.buffers).items():
            found = (module._parameters | module._buffers).get(name)
            if number is not None and (found is None or not _is_same(found, self._tensors[number])):
                raise GraphError(
                    f"{name!r} of {where} is not what it was when the graph was saved; load these weights first: "
                    "model.load_state_dict(safetensors.torch.load_file(file), strict=False)"
                )
        return module

    def _add_names(self, module: Module, part: ModulePart) -> None:
        for name, (kind, number) in part.names.items():
            if not name.startswith(ALIAS) or not name.isidentifier():
                raise ValueError(f"{name[:60]!r} is not a name for graphs")
            module.__dict__[name] = (self._tensors if kind == "tensor" else self._modules)[number]

    # -- frames --------------------------------------------------------------------------------------------------------

    def _fill(self, frame: Frame, part: FramePart, later: Sequence[Frame]) -> None:
        """Adds the records; a frame calls only frames after it."""
        frame.parameters = [_parameter(each) for each in part.parameters]
        frame.opaque_reason = part.unstored
        pairs = [[(name, tuple(map(decoded_key, dig))) for name, dig in pair] for pair in part.same_inputs]
        frame.conditions.same_inputs = tuple((one, other) for one, other in pairs)
        sites: dict[tuple[int, ...], SavedSite] = {}
        for record in part.records:
            node = self._record(record, frame, later, len(self._document.frames) - len(later))
            key = tuple(record.lines)
            if key and isinstance(node, (OpNode, CallNode)):
                node.site = sites.setdefault(key, SavedSite((), tuple(self._lines[number] for number in key)))
            frame.nodes.append(node)
            frame.names[node.name] = node

    def _record(self, part: RecordPart, frame: Frame, later: Sequence[Frame], start: int) -> Node:
        common: dict[str, Any] = {
            "op": part.op, "spec": _spec(part.spec), "name": part.name, "base_name": part.name,
            "target": part.name if part.target is None else part.target, "is_live": "is_hidden" not in part.flags,
        }  # fmt: skip
        common |= {flag: flag in part.flags for flag in ("is_size", "is_mutated_later", "is_view_filled_later")}
        if part.kind == "op":
            return OpNode(written_argument=part.written_argument, **common)
        if part.kind != "call":
            common["target"] = _no_value if part.kind == "constant" else common["target"]
            return Node(kind=part.kind, **common)
        if part.frame < start or later[part.frame - start].call is not None:
            raise ValueError(f"a frame calls the frame {part.frame}, which comes before it, or is called already")
        callee = later[part.frame - start]
        callee.parent, callee.capture = frame, frame.capture
        callee.call = CallNode(frame=callee, call_index=part.call_index, call_count=part.call_count, **common)
        return callee.call

    def _add_graph(self, frame: Frame, part: FramePart) -> None:
        reason = "it has several graphs, which run in a call of the PatchableGraph only"
        if frame.opaque_reason is None:
            frame.custom_graph = _GraphReader(frame, self._allowed).graph(part.graph)
            # All loaded graphs are custom ones. These were edited or custom before they were saved, too.
            frame.is_edited = part.is_own
        else:
            where = format_path(frame.path) or "<root>"
            reason = (
                f"the file has no graph of {where!r}: {frame.opaque_reason}; give the model whose graph it is: "
                "PatchableGraph.load(file, model=model)"
            )
        if isinstance(frame.module, LoadedModule):
            forward = StoredForward(frame.module, frame.parameters, reason)
            forward.set_graph(frame.custom_graph if self._counts[part.module] == 1 else None)
            frame.module.__dict__["forward"] = forward


def _is_same(one: Tensor, other: Tensor) -> bool:
    is_alike = one.shape == other.shape and one.dtype == other.dtype
    return is_alike and bool((tensor_bytes(one) == tensor_bytes(other)).all())


def _parameter(part: ParameterPart) -> InputParameter:
    if not part.name.isidentifier() or keyword.iskeyword(part.name):
        raise ValueError(f"{part.name[:60]!r} is not the name of a parameter")
    default = decoded(part.default[0]) if part.default else inspect.Parameter.empty
    return InputParameter(part.name, inspect._ParameterKind(part.kind), default)


def _no_value() -> None:
    """Returns `None`, for a constant that is not stored."""


def _spec(part: SpecPart) -> ValueSpec:
    if part.kind == "tensor":
        return TensorSpec(torch.Size(part.shape), dtype_of(part.dtype), torch.device(part.device), part.name)
    if part.kind == "container":
        keyed = [(decoded_key(key), _spec(child)) for key, child in part.children]
        cls = _stand_in(part.name, part.container) if part.container else known_classes()[part.name]
        return ContainerSpec(cls, tuple((key_text(key), key, child) for key, child in keyed))
    if part.kind == "value":
        return ScalarSpec(decoded(part.value))
    return ObjectSpec(part.name) if part.kind == "object" else UnknownSpec()


@cache
def _stand_in(name: str, kind: str) -> type:
    """Returns a class in place of one that is not imported: its instances are never made."""
    bases: dict[str, type] = {"tuple": tuple, "list": list, "mapping": collections.UserDict, "object": object}
    module, _, qualified = name.rpartition(":")
    return type(qualified.rsplit(".", 1)[-1], (bases[kind],), {"__module__": module, "__qualname__": qualified})


# -- graphs ------------------------------------------------------------------------------------------------------------


class _GraphReader:
    """Reads the graph of a frame whose records are known. No text of the file gets into code but names and literals."""

    def __init__(self, frame: Frame, allowed: Allowed) -> None:
        self._frame = frame
        self._allowed = allowed
        self._graph = fx.Graph()
        self._made: list[fx.Node] = []

    def graph(self, steps: Sequence[StepPart]) -> fx.Graph:
        """Returns the graph."""
        codegen, parameters = ForwardCodeGen(self._frame.parameters), iter(self._frame.parameters)
        for step in steps:
            if step.op == "placeholder":
                fx_node = self._placeholder(step, next(parameters), codegen)
            else:
                fx_node = self._node(step)
            if step.record is not None:
                fx_node.meta[RECORD] = self._frame.nodes[step.record]
            self._made.append(fx_node)
        if codegen.is_needed:
            self._graph.set_codegen(codegen)
        self._graph.lint()
        return self._graph

    def _placeholder(self, step: StepPart, parameter: InputParameter, codegen: ForwardCodeGen) -> fx.Node:
        if step.target != parameter.starred_name:
            raise ValueError("the placeholders of a graph are not the parameters of forward")
        default = () if parameter.default is inspect.Parameter.empty else (codegen.default(parameter),)
        record = self._frame.names.get(parameter.name)
        is_tensor = record is not None and isinstance(record.spec, TensorSpec) and record.spec.type_name == "Tensor"
        kind = Tensor if is_tensor else None
        return self._graph.create_node("placeholder", step.target, default, name=step.name, type_expr=kind)

    def _node(self, step: StepPart) -> fx.Node:
        leaves = {"step": self._made.__getitem__}
        args = tuple(decoded(value, leaves) for value in step.args)
        kwargs = {name: decoded(value, leaves) for name, value in step.kwargs.items()}
        if not all(name.isidentifier() and not keyword.iskeyword(name) for name in kwargs):
            raise ValueError("a keyword argument has no valid name")
        target: Any = step.target
        if isinstance(target, FunctionPart):
            target = decoded_function(target, self._allowed)
            check_attribute(target, args)
        if isinstance(target, str) is (step.op == "call_function"):
            raise ValueError(f"a {step.op} has no such target")
        if step.op == "call_method":
            check_method(target)
        elif step.op in ("get_attr", "call_module"):
            self._check_path(step, target)
        return self._graph.create_node(step.op, target, args, kwargs, step.name)

    def _check_path(self, step: StepPart, path: str) -> None:
        module, is_alias = self._frame.module, path.startswith(ALIAS) and path.isidentifier()
        if not is_alias and not is_writable(path):
            raise ValueError(f"a graph cannot use the name {path[:80]!r}")
        if step.op == "get_attr":
            found: Any = tensor_at(module, path)
        else:
            found = module.__dict__.get(path) if is_alias else module_at(module, path)
        if found is None:
            raise ValueError(f"{path[:80]!r} leads to nothing that the graph could use")
