"""`load`: reads a document into plain modules and records whose graphs are these modules.

The modules hold what the model's modules held, without their code. With a model, the modules of the file are found in
it: they share its parameters and buffers, which must be the same.

A graph is a snapshot of the model in the example: the root checks the structure of its inputs, plain values, dtypes,
fixed sizes and modes before a call; steps in the graphs check what the model's code read of sizes and values.
"""

from __future__ import annotations

import collections
import inspect
import keyword
import os
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import count
from typing import IO, Any

import torch
from torch import Tensor, fx
from torch.nn import Module, ModuleDict, ModuleList, Sequential

from graphpatch_notebook.capture.inputs import signature_with
from graphpatch_notebook.capture.modules import module_at
from graphpatch_notebook.capture.records import (
    RECORD,
    CallNode,
    Conditions,
    Frame,
    InputParameter,
    Node,
    OpNode,
    Site,
    SourceLine,
)
from graphpatch_notebook.components.dimensions import Dimensions, StoredRuns, dimensions_of
from graphpatch_notebook.errors import GraphError, SerializationError, reading
from graphpatch_notebook.files.documents import (
    FramePart,
    FunctionPart,
    GraphDocument,
    ModulePart,
    Names,
    RecordPart,
    StepPart,
    check_attribute,
    check_method,
    decoded,
    dtype_of,
    is_name,
    made_tensors,
    read_document,
)
from graphpatch_notebook.graphs.build import ForwardCodeGen
from graphpatch_notebook.graphs.edits import SnapshotCalls
from graphpatch_notebook.graphs.generated_code import generate
from graphpatch_notebook.graphs.modules import running_graph
from graphpatch_notebook.graphs.signatures import Aspect, Settings
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import set_grad_enabled
from graphpatch_notebook.values import TensorSpec, tensor_specs

METADATA_KEY = "graphpatch_notebook"
"""The key of the document in the metadata of a safetensors file."""

ALIAS = "_graphpatch_"
"""The prefix of names that graphs use for what Python cannot reach by its own name."""

# These keep their class where they only hold modules. One that runs has a graph, with what hooks of its modules did.
_CONTAINERS: dict[str, type[Module]] = {cls.__name__: cls for cls in (ModuleDict, ModuleList, Sequential)}
_FLAGS = ("is_size", "is_mutated_later", "is_view_filled_later")


def load(
    file: str | os.PathLike[str] | IO[bytes], model: Module | None, allow: Iterable[str] | None
) -> tuple[Module, Frame, dict[str, str]]:
    """Returns the module in a file, its root frame, and why some frames have no graph, by path."""
    if model is not None and not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    names = Names(allow)
    name, document, contents = read_document(file, METADATA_KEY, GraphDocument, "pg.save(file)")
    with reading(name, SerializationError):
        steps = (step.target for part in document.frames for step in part.graph)
        names.check(target for target in steps if isinstance(target, FunctionPart))
        return _Reader(document, made_tensors(document.tensors, contents), model, names).loaded()


# -- modules -----------------------------------------------------------------------------------------------------------


class StoredForward:
    """`forward` of a loaded module: runs its graph, or says for what `reason` it has none that it could run alone.

    It has the signature of the original.
    """

    def __init__(
        self, module: Module, parameters: Sequence[InputParameter], reason: str, graph: fx.Graph | None
    ) -> None:
        self._module = module
        self._reason = reason
        # Generated when it first runs, and shared with copies, which do not copy functions.
        self._code = None if graph is None else cache(lambda: generate(graph).function)
        self.__signature__ = signature_with(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph."""
        if self._code is None:
            raise GraphError(f"this {type(self._module).__name__} cannot run: {self._reason}")
        had_gradients = torch.is_grad_enabled()
        try:
            return self._code()(self._module, *args, **kwargs)[0]
        finally:  # the end of `with torch.no_grad():` is a step, which did not run if there was an error
            if torch.is_grad_enabled() is not had_gradients:
                set_grad_enabled(had_gradients)


class LoadedModule(Module):
    """A module of the saved model, without its code: its parameters, buffers and children."""

    is_loaded = True  # for the tree, which says of other modules that their graph is not the captured one

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raises an error: a module with a graph has another `forward`."""
        raise GraphError("the example inputs did not reach this module, so the file has no graph: run it in the model")


class LoadedRoot(LoadedModule):
    """The root of a loaded graph.

    Attributes:
        runs_its_graphs: Whether it runs by itself as its graphs do: no module has several graphs, for several calls.
    """

    runs_its_graphs: bool = False
    _stored_calls: LoadedCalls


class LoadedCalls(SnapshotCalls):
    """Which calls the graph of the first frame holds for; a forward pre-hook.

    Attributes:
        known_sizes: The sizes of each tensor among the inputs, `None` where they may be others.
        default_dtype: The default dtype of torch when the graph was saved.
    """

    def __init__(
        self, frames: Sequence[Frame], known_sizes: Sequence[Sequence[int | None]], default_dtype: torch.dtype
    ) -> None:
        frame, free = frames[0], count()
        sizes = tuple(tuple(f"size_{next(free)}" if size is None else size for size in known) for known in known_sizes)
        settings: Settings = ((Aspect.DEFAULT_DTYPE, default_dtype), (Aspect.AUTOCAST, None))
        if frame.conditions.grad_mode is not None:
            settings += ((Aspect.GRAD_MODE, frame.conditions.grad_mode),)
        super().__init__(frame, frame.custom_graph, sizes=sizes, settings=settings, any_size=False)
        self.modes = {each.module: each.module.training for each in frames if each.opaque_reason is None}
        self.known_sizes = known_sizes
        self.default_dtype = default_dtype

    def __call__(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Checks a call, but not those that a graph makes: the root may call itself."""
        if running_graph.get() is None:
            self.check(args, kwargs)


def calls_of(module: Module) -> LoadedCalls | None:
    """Returns which calls a loaded graph accepts, by its root; `None` for other modules."""
    return module.__dict__.get("_stored_calls") if isinstance(module, LoadedRoot) else None


def tensor_at(module: Module, path: str) -> Tensor | None:
    """Returns the tensor at an attribute path, even if names on it are not identifiers; or `None`."""
    parents, _, name = path.rpartition(".")
    holder = module_at(module, parents)
    if holder is None:
        return None
    held = (holder._parameters.get(name), holder._buffers.get(name), holder.__dict__.get(name))
    return next((found for found in held if isinstance(found, Tensor)), None)


@cache
def _loaded_class(name: str, is_root: bool) -> type[LoadedModule]:
    """Returns the class of loaded modules with the name of the original class."""
    return type(name, (LoadedRoot if is_root else LoadedModule,), {"__module__": __name__})


_OWN_NAMES = frozenset({*dir(Module), *vars(LoadedModule()), *LoadedRoot.__annotations__})


def is_writable(path: str) -> bool:
    """Whether graphs can write `path` in Python: its names are not keywords, nor attributes that all modules have."""
    parts = path.split(".")
    return all(part.isidentifier() or part.isdecimal() for part in parts) and not any(
        keyword.iskeyword(part) or part in _OWN_NAMES or part.startswith(("__", ALIAS)) for part in parts
    )


# -- the document ------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads the parts of a document. No text of the file gets into code but names and literals."""

    def __init__(self, document: GraphDocument, tensors: Sequence[Tensor], model: Module | None, names: Names) -> None:
        self._document = document
        self._tensors = tensors
        self._model = model
        self._names = names
        self._lines = [SourceLine(*line) for line in document.lines]
        self._sites: dict[tuple[int, ...], Site] = {}
        self._modules: list[Module] = []
        self._frames: list[Frame] = []
        self._graph_counts = collections.Counter(part.module for part in document.frames)

    def loaded(self) -> tuple[Module, Frame, dict[str, str]]:
        """Returns what the document holds."""
        document, parts, frames = self._document, self._document.frames, self._frames
        live = {part.module for part in parts if part.unstored is not None}
        for number, held in enumerate(document.modules):
            self._modules.append(self._module(number, held, number in live))
        for module, held in zip(self._modules, document.modules, strict=True):  # calls between modules may have cycles
            for name, (kind, number) in held.names.items():
                if not name.startswith(ALIAS) or not name.isidentifier():
                    raise ValueError(f"{name[:60]!r} is not a name for graphs")
                module.__dict__[name] = (self._tensors if kind == "tensor" else self._modules)[number]
        for part in parts:
            conditions = Conditions(part.training, grad_mode=part.grad_mode)
            frames.append(Frame(self._modules[part.module], part.attribute_path, conditions=conditions))
        for number, part in enumerate(parts):
            self._fill(number, part)
        for frame, part in zip(frames, parts, strict=True):
            self._add_graph(frame, part)
        root = frames[0].module
        if frames[0].opaque_reason is None and isinstance(root, LoadedRoot):
            calls = LoadedCalls(frames, document.sizes, dtype_of(document.default_dtype))
            root.__dict__.update(_stored_calls=calls, runs_its_graphs=max(self._graph_counts.values()) == 1)
            root.register_forward_pre_hook(calls, with_kwargs=True)
        frames[0].capture.findings[dimensions_of] = self._dimensions(frames)
        unstored = {format_path(f.path): f.opaque_reason for f in frames if f.opaque_reason is not None}
        return root, frames[0], unstored

    def _dimensions(self, frames: Sequence[Frame]) -> Dimensions:
        """Returns what is known about the sizes of values."""
        part = self._document.dimensions
        specs = [spec for frame in frames for node in frame.nodes for spec in tensor_specs(node.spec)]
        for spec, number in zip(specs, part.tensors, strict=bool(part.groups)):
            ranks = [len(spec.shape) if shape is None else len(shape) for shape in part.shapes[number]]
            if ranks != [len(spec.shape)] * len(part.runs):
                raise ValueError("it has sizes of other values")
        known = Dimensions(frames[0], StoredRuns(part.groups, part.runs, part.shapes, part.tensors))
        known.group_sizes()  # which raises an error if there are no such inputs
        return known

    def _module(self, number: int, part: ModulePart, is_live: bool) -> Module:
        """Returns a module, after its children. If it is live, it is that of the model, if there is one."""
        original = self._original(part)
        if original is not None and is_live:
            return original
        is_root = number == self._document.frames[0].module
        only_holds = part.cls in _CONTAINERS and not part.names and number not in self._graph_counts
        module = _CONTAINERS[part.cls]() if only_holds else _loaded_class(part.cls, is_root)()
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

    def _original(self, part: ModulePart) -> Module | None:
        """Returns the module of the model, which must be as it was."""
        if self._model is None or part.path is None:
            return None
        module, where = module_at(self._model, part.path), f"{part.path!r} of the model"
        if type(module).__name__ != part.cls or module is None:
            raise SerializationError(f"{where} is not a {part.cls}, as in the file: give the model whose graph it is")
        if part.training is not module.training:
            was = "train" if part.training else "eval"
            raise GraphError(f"{where} was in {was} mode when the graph was saved; call model.{was}()")
        return module

    def _fill(self, number: int, part: FramePart) -> None:
        """Adds the records; a frame calls only frames after it."""
        frame = self._frames[number]
        frame.parameters = decoded(part.parameters)
        frame.conditions.same_inputs = decoded(part.same_inputs)
        frame.opaque_reason = part.unstored
        for record in part.records:
            node = self._record(number, record)
            if (key := tuple(record.lines)) and isinstance(node, (OpNode, CallNode)):
                node.site = self._sites.setdefault(key, Site((), tuple(self._lines[line] for line in key)))
            frame.nodes.append(node)
            frame.names[node.name] = node

    def _record(self, number: int, part: RecordPart) -> Node:
        common: dict[str, Any] = {
            "op": part.op, "spec": decoded(part.spec), "name": part.name, "base_name": part.name,
            "target": part.name if part.target is None else part.target, "is_live": "is_hidden" not in part.flags,
            **{flag: flag in part.flags for flag in _FLAGS},
        }  # fmt: skip
        if part.kind == "op":
            return OpNode(written_argument=part.written_argument, **common)
        if part.kind != "call":
            common["target"] = _no_value if part.kind == "constant" else common["target"]
            return Node(kind=part.kind, **common)
        called, index, calls = part.call or (0, 0, 0)
        callee, caller = self._frames[called], self._frames[number]
        if called <= number or callee.call is not None:
            raise ValueError(f"a frame calls the frame {called}, which comes before it, or is called already")
        callee.parent, callee.capture = caller, caller.capture
        callee.call = CallNode(frame=callee, call_index=index, call_count=calls, **common)
        return callee.call

    def _add_graph(self, frame: Frame, part: FramePart) -> None:
        reason = "it has several graphs, which run in a call of the PatchableGraph only"
        if frame.opaque_reason is None:
            frame.custom_graph = self._graph(frame, part.graph)
            # All loaded graphs are custom ones. These were edited or custom before they were saved, too.
            frame.is_edited = part.is_own
        else:
            where = format_path(frame.path) or "<root>"
            reason = (
                f"the file has no graph of {where!r}: {frame.opaque_reason}; give the model whose graph it is: "
                "PatchableGraph.load(file, model=model)"
            )
        if isinstance(frame.module, LoadedModule):
            graph = frame.custom_graph if self._graph_counts[part.module] == 1 else None
            frame.module.__dict__["forward"] = StoredForward(frame.module, frame.parameters, reason, graph)

    def _graph(self, frame: Frame, steps: Sequence[StepPart]) -> fx.Graph:
        """Returns the graph of a frame, whose records are known."""
        graph, codegen, parameters = fx.Graph(), ForwardCodeGen(frame.parameters), collections.deque(frame.parameters)
        made: list[fx.Node] = []
        for step in steps:
            if step.op == "placeholder":
                made.append(_placeholder(graph, step, parameters.popleft(), frame, codegen))
            else:
                leaves = {"step": made.__getitem__}
                args = tuple(decoded(value, leaves) for value in step.args)
                kwargs = {name: decoded(value, leaves) for name, value in step.kwargs.items()}
                if not all(map(is_name, kwargs)) or isinstance(step.target, str) is (step.op == "call_function"):
                    raise ValueError(f"a {step.op} has no such target, or an argument no valid name")
                made.append(graph.create_node(step.op, self._target(step, frame, args), args, kwargs, step.name))
            if step.record is not None:
                made[-1].meta[RECORD] = frame.nodes[step.record]
        if codegen.is_needed:
            graph.set_codegen(codegen)
        graph.lint()
        return graph

    def _target(self, step: StepPart, frame: Frame, args: tuple[Any, ...]) -> Any:
        target, module = step.target, frame.module
        if isinstance(target, FunctionPart):
            function = self._names.function(target)
            check_attribute(function, args)
            return function
        if step.op == "call_method":
            check_method(target)
        elif step.op != "output":
            is_alias = target.startswith(ALIAS) and target.isidentifier()
            of_call = module.__dict__.get(target) if is_alias else module_at(module, target)
            found = tensor_at(module, target) if step.op == "get_attr" else of_call
            if found is None or not (is_alias or is_writable(target)):
                raise ValueError(f"a graph cannot use the name {target[:80]!r}")
        return target


def _no_value() -> None:
    """Returns `None`, for a constant that is not stored."""


def _placeholder(
    graph: fx.Graph, step: StepPart, parameter: InputParameter, frame: Frame, codegen: ForwardCodeGen
) -> fx.Node:
    if step.target != parameter.starred_name:
        raise ValueError("the placeholders of a graph are not the parameters of forward")
    default = () if parameter.default is inspect.Parameter.empty else (codegen.default(parameter),)
    record = frame.names.get(parameter.name)
    is_tensor = record is not None and isinstance(record.spec, TensorSpec) and record.spec.type_name == "Tensor"
    return graph.create_node(
        "placeholder", step.target, default, name=step.name, type_expr=Tensor if is_tensor else None
    )
