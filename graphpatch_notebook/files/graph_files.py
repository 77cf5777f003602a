"""Graph files: `save` writes the records of frames, their graphs and modules, and tensors; `load` reads them back.

The modules hold what the model's modules held, without their code. With a model, the modules of the file are found in
it: they share its parameters and buffers, which must be the same.

A graph is a snapshot of the model in the example: the root checks the structure of its inputs, plain values, dtypes,
fixed sizes and modes before a call; steps in the graphs check what the model's code read of sizes and values.

A frame whose graph may not equal its module is not stored, with the reason. Stored graphs check that what the model's
code read of sizes and values is the same again (`graphs.edits.guarded`).
"""

from __future__ import annotations

import collections
import inspect
import io
import keyword
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import IO, Any, cast

import torch
from torch import Tensor, fx
from torch.nn import Module, ModuleDict, ModuleList, Sequential

from graphpatch_notebook.capture import listed_doubts
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
from graphpatch_notebook.errors import GraphError, GraphPatchWarning, SerializationError, reading
from graphpatch_notebook.files.documents import (
    DimensionsPart,
    FramePart,
    FunctionPart,
    GraphDocument,
    ModulePart,
    Names,
    RecordPart,
    StepPart,
    TensorTable,
    check_attribute,
    check_method,
    checked_file,
    decoded,
    dtype_of,
    encoded,
    encoded_function,
    is_name,
    made_tensors,
    name_of,
    read_document,
    refused,
    write_document,
)
from graphpatch_notebook.graphs import CompiledGraphModule
from graphpatch_notebook.graphs.build import ForwardCodeGen, Targets, build
from graphpatch_notebook.graphs.edits import SnapshotCalls, guarded, unguarded_doubts
from graphpatch_notebook.graphs.generated_code import generate, weave
from graphpatch_notebook.graphs.modules import running_graph
from graphpatch_notebook.graphs.signatures import Aspect, Settings
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.patching.model_state import copied, copied_output, difference, owner_of, preserved
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import set_grad_enabled
from graphpatch_notebook.values import (
    ObjectSpec,
    TensorSpec,
    ValueSpec,
    dtype_name,
    tensor_specs,
)

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


_BOUNDARY = ("input", "parameter", "buffer", "attribute", "call", "output")
_LONGEST_LINE = 500


def save(
    root: Frame,
    own: Sequence[CompiledGraphModule],
    file: Any,
    check: Sequence[tuple[Sequence[Any], dict[str, Any]]],
    call: Callable[..., Any],
    runnable: Callable[[Module, Frame, ExtractionOptions], Callable[..., Any]],
) -> None:
    """Writes the graph of a root frame to `file`. See `PatchableGraph.save`.

    Args:
        root: The root frame.
        own: The graph modules whose graph replaces the module.
        file: As for `PatchableGraph.save`, and `check`, too.
        check: Calls on which to compare what is loaded with the model.
        call: Runs the graph as a user does, without patches.
        runnable: Returns a callable that runs a model with the graphs of a root frame.
    """
    target = checked_file(file, "write")
    writer = _Writer(root, own)
    document, tensors = writer.document(), writer.tensors.contents()
    if check:
        written = io.BytesIO()
        write_document(written, METADATA_KEY, document, tensors)
        written.seek(0)
        module, frame, _ = load(written, root.module if writer.unstored else None, None)
        graph = runnable(module, frame, ExtractionOptions())
        for number, (args, kwargs) in enumerate(check):
            try:
                found = _output_of(graph, (module, root.module), args, kwargs)
            except GraphError as error:
                raise SerializationError(f"check[{number}]: {error}") from error
            problem = difference(found, _output_of(call, (module, root.module), args, kwargs), "output")
            if problem is not None:
                raise SerializationError(f"check[{number}]: the graph does not equal the model: {problem}")
    if writer.unstored:
        warnings.warn(GraphPatchWarning(writer.warning(name_of(target)), "unstored frame"), stacklevel=3)
    hooks = (*root.module._forward_hooks.values(), *root.module._forward_pre_hooks.values())
    if "user" in map(owner_of, hooks):  # those of submodules are in the graphs that call these
        without = (
            f"the hooks of the model itself are not stored in {name_of(target)}: they do not run in a loaded graph"
        )
        warnings.warn(GraphPatchWarning(without, "unstored frame"), stacklevel=3)
    write_document(target, METADATA_KEY, document, tensors)


def _output_of(run: Callable[..., Any], modules: Sequence[Module], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns a copy of what `run` returns for copies of its arguments; modules and generators stay as they were."""
    with preserved(modules[0]), preserved(modules[1]):
        args, kwargs = copied((args, kwargs))
        return copied_output(run(*args, **kwargs))


class _Writer:
    """Writes the parts of a document.

    Attributes:
        frames: All frames of the capture.
        modules: The modules to write.
        tensors: The tensors to write.
        unstored: Why frames are not stored, by their ids.
        is_loaded: Whether the graphs were loaded from a file: they have their checks already.
        is_of_one_grad_mode: Whether graphs hold only if gradients are enabled, or disabled, as they were.
    """

    def __init__(self, root: Frame, own: Sequence[CompiledGraphModule]) -> None:
        self.root = root
        self.frames = list(root.walk())
        self.tensors = TensorTable()
        self.modules = _ModuleTable(root.module, (frame.module for frame in self.frames), self.tensors)
        self.edited = {id(m.frame): m for m in own if m.frame.is_edited and m.frame.custom_graph is None}
        self.unstored: dict[int, str] = {}
        self.is_loaded = self.is_of_one_grad_mode = isinstance(root.module, LoadedRoot)
        self._numbers = {id(frame): number for number, frame in enumerate(self.frames)}
        self._lines: dict[tuple[str, int, str, str], int] = {}
        self._site_lines: dict[int, list[int]] = {}
        self._specs: list[TensorSpec] = []
        self._encoded: dict[ValueSpec, dict[str, Any]] = {}

    def document(self) -> GraphDocument:
        """Returns the document, or raises an error if it would lack a graph that *is* its module."""
        graphs: dict[int, list[StepPart]] = {}
        for frame in self.frames:
            if id(frame) not in self.unstored:
                try:
                    graphs[id(frame)] = self._graph(frame)
                except GraphError as error:
                    self._omit(frame, str(error))
        for frame in self.frames:
            if id(frame) in self.unstored and self._is_own(frame):
                raise SerializationError(
                    f"the graph of {_where(frame)} replaces its module, as it was edited or is custom, and cannot be "
                    f"stored: {self.unstored[id(frame)]}. Nothing was written; save a PatchableGraph without this edit"
                )
        module, calls = self.root.module, calls_of(self.root.module)
        shapes = [spec.shape for node in self.root.inputs() for spec in tensor_specs(node.spec)]
        frames = [self._frame(frame, graphs) for frame in self.frames]
        has_sizes = not self.root.capture.is_program  # a program fixes its own
        known = dimensions_of(self.root) if has_sizes else None
        unseen = set() if known is None else known.unseen
        sizes: list[list[int | None]] = [
            [
                size if self.root.capture.has_escaped_sizes or (number, dim) in unseen else None
                for dim, size in enumerate(shape)
            ]
            for number, shape in enumerate(shapes)
        ]
        runs = None if known is None else known.stored(self._specs)
        return GraphDocument(
            default_dtype=dtype_name(calls.default_dtype if calls else torch.get_default_dtype()),
            sizes=list(
                map(list, calls.known_sizes if calls else getattr(module, "fixed_sizes", sizes))
            ),  # of an exported program
            frames=frames,
            dimensions=DimensionsPart() if runs is None else DimensionsPart(*runs),
            modules=self.modules.parts(),
            tensors=self.tensors.parts,
            lines=list(self._lines),
        )

    def _graph(self, frame: Frame) -> list[StepPart]:
        if frame.opaque_reason is not None:
            raise SerializationError(frame.opaque_reason)
        if unguarded_doubts(frame) and not frame.has_own_graph:
            raise SerializationError(listed_doubts(frame.doubts))
        encoded(frame.parameters)
        return _GraphWriter(self, frame).steps

    def _omit(self, frame: Frame, reason: str) -> None:
        """Notes that a frame is not stored, nor all below it, nor other calls of these modules."""
        for inner in frame.walk():
            if id(inner) not in self.unstored:
                self.unstored[id(inner)] = (
                    reason if inner is frame else f"it is inside {_where(frame)}, which is not stored"
                )
                for other in self.frames:
                    if other.module is inner.module and id(other) not in self.unstored:
                        self._omit(other, f"it is the module of {_where(inner)}, which is not stored")

    def _is_own(self, frame: Frame) -> bool:
        """Whether the graph of `frame` *is* its module, rather than a record of it, here and before it was loaded."""
        return frame.is_edited or (frame.has_own_graph and not self.is_loaded)

    def warning(self, file: str) -> str:
        """Returns what to say about frames that are not stored."""
        frames = [frame for frame in self.frames if id(frame) in self.unstored]
        topmost = [frame for frame in frames if frame.parent is None or id(frame.parent) not in self.unstored]
        listed = "".join(f"\n  {_where(frame)}: {self.unstored[id(frame)]}" for frame in topmost[:5])
        hint = "\nwithout caches, a model of transformers can be stored: PatchableGraph(..., use_cache=False)"
        return (
            f"{len(frames)} of {len(self.frames)} frames are not stored in {file}; to call these, load it with the "
            f"model (PatchableGraph.load(file, model=model)):{listed}{hint if 'Cache' in listed else ''}"
        )

    # -- records -------------------------------------------------------------------------------------------------------

    def _frame(self, frame: Frame, graphs: dict[int, list[StepPart]]) -> FramePart:
        reason, same_inputs = self.unstored.get(id(frame)), frame.conditions.same_inputs
        kept = frame.graph_nodes if reason is None else [node for node in frame.nodes if node.kind in _BOUNDARY]
        # `attention(x, x, x)`: the graph reads one of the three inputs, no matter which one the code reads. That is
        # right for all calls of this form, but a patch on one of them would change too much or nothing. And an output
        # is, in the graph of the caller, what `forward` returned: not what forward hooks made of it.
        same = {name for pair in same_inputs for name, _ in pair} if frame.custom_graph is None else ()
        hidden = {"input": same, "output": ("output",) if frame.is_changed_by_hooks else ()}
        return FramePart(
            module=self.modules.number(frame.module),
            attribute_path=frame.attribute_path,
            training=frame.conditions.training,
            grad_mode=frame.conditions.grad_mode if frame is self.root and self.is_of_one_grad_mode else None,
            parameters=encoded(frame.parameters, lambda _: None),
            records=[self._record(node, is_hidden=node.target in hidden.get(node.kind, ())) for node in kept],
            graph=graphs[id(frame)] if reason is None else [],
            unstored=reason,
            is_own=reason is None and self._is_own(frame),
            same_inputs=encoded(same_inputs),
        )

    def _record(self, node: Node, *, is_hidden: bool) -> RecordPart:
        flags = {"is_hidden": is_hidden or not node.is_live, "is_size": node.is_size}
        flags |= {"is_mutated_later": node.is_mutated_later, "is_view_filled_later": node.is_view_filled_later}
        call = node if isinstance(node, CallNode) else None
        return RecordPart(
            node.kind, node.name, node.op, self._spec(node.spec),
            target=None if node.kind in ("op", "constant", "output") else str(node.target),
            lines=[] if node.site is None else self._lines_of(node.site),
            flags=[flag for flag, is_set in flags.items() if is_set],  # type: ignore[misc]  # its names
            written_argument=node.written_argument,
            call=None if call is None else (self._numbers[id(call.frame)], call.call_index, call.call_count),
        )  # fmt: skip

    def _spec(self, spec: ValueSpec) -> dict[str, Any]:
        """Returns the entry of `spec`; a value that cannot be written becomes that of an object."""
        with suppress(GraphError):  # a key of a dict that is an object, say
            if spec not in self._encoded:  # layers have values of the same shapes
                self._encoded[spec] = encoded(spec)
            self._specs += tensor_specs(spec)
            return self._encoded[spec]
        return encoded(ObjectSpec(str(spec)))  # type: ignore[no-any-return]

    def _lines_of(self, site: Site) -> list[int]:
        if id(site) not in self._site_lines:  # layers share their sites
            lines = [(line.file, line.line, line.function, line.text[:_LONGEST_LINE]) for line in site.source_lines()]
            self._site_lines[id(site)] = [self._lines.setdefault(line, len(self._lines)) for line in lines]
        return self._site_lines[id(site)]


def _where(frame: Frame) -> str:
    return repr(format_path(frame.path)) if frame.parent is not None else "the root"


# -- graphs ------------------------------------------------------------------------------------------------------------

# The names in graphs for files: the attribute paths of the user's modules.
_PATHS = cast(Targets, SimpleNamespace(of_call=lambda node: str(node.target), of_attribute=str))


class _GraphWriter:
    """Writes the graph of one frame, over the attribute paths of its module, with checks of what the code read.

    Attributes:
        steps: The steps.
    """

    def __init__(self, writer: _Writer, frame: Frame) -> None:
        self.steps: list[StepPart] = []
        self._writer = writer
        self._frame = frame
        self._edited = writer.edited.get(id(frame))
        self._numbers: dict[fx.Node, int] = {}
        self._records = {id(node): number for number, node in enumerate(frame.graph_nodes)}
        self._built = build(frame, _PATHS) if self._edited is None else self._edited.built()
        graph = self._built.graph
        if self._edited is not None or (frame.custom_graph is not None and not writer.is_loaded):  # it changes below
            graph = weave(graph, ())  # a copy
        if frame.custom_graph is None:
            guarded(graph, frame)
        if not writer.is_loaded:
            writer.is_of_one_grad_mode |= _follow_grad_mode(graph, frame)
        for fx_node in graph.nodes:
            self._add(fx_node)

    def _add(self, fx_node: Any) -> None:
        step = StepPart(fx_node.op, fx_node.name, self._target(fx_node))
        if fx_node.op not in ("placeholder", "get_attr"):
            is_whole = fx_node.op != "output" or self._frame.custom_graph is not None
            given = fx_node.args if is_whole else ((fx_node.args[0],),)
            if fx_node.op == "call_function":
                check_attribute(fx_node.target, given)
            step.args = [encoded(value, self._leaf) for value in given]
            step.kwargs = {name: encoded(value, self._leaf) for name, value in fx_node.kwargs.items()}
        step.record = self._records.get(id(fx_node.meta.get(RECORD)))
        self._numbers[fx_node] = len(self.steps)
        self.steps.append(step)

    def _leaf(self, value: Any) -> Any:
        return {"step": self._numbers[value]} if isinstance(value, fx.Node) else refused(value)

    def _target(self, fx_node: fx.Node) -> Any:
        module, modules, target = self._frame.module, self._writer.modules, str(fx_node.target)
        if fx_node.op == "call_function":
            return encoded_function(fx_node.target)
        if fx_node.op == "call_method":
            check_method(target)
        if fx_node.op == "get_attr":
            return self._attribute(target)
        if fx_node.op != "call_module":
            return "" if fx_node.op == "output" else target
        record = fx_node.meta.get(RECORD)
        callee = record.frame.module if isinstance(record, CallNode) else None
        found = module_at(module, target) if self._frame.custom_graph is not None else None
        if callee is None or (found is not None and found is not callee):
            raise SerializationError(f"it calls {target!r}, which has no record, or was replaced since the capture")
        if is_writable(target) and module_at(module, target) is callee:
            return target
        return modules.alias(module, "module", modules.number(callee))

    def _attribute(self, path: str) -> str:
        """Returns the attribute by which the graph reads a tensor that its module has at `path`, or a constant."""
        module, modules, constants = self._frame.module, self._writer.modules, self._built.constants
        own = None if self._edited is None else self._edited.__dict__.get(path)  # the user set it on the graph module
        if path in constants:
            value = constants[path]()
        elif isinstance(own, Tensor):
            value = own
        else:
            path = path if self._edited is None else self._edited.original_path(path)
            value, (parents, _, name) = tensor_at(module, path), path.rpartition(".")
            holder = module_at(module, parents)
            if value is not None and holder is not None and name not in holder.__dict__ and is_writable(path):
                modules.tensor(holder, name, value)
                return path
        if not isinstance(value, Tensor):
            raise SerializationError(f"it reads {path!r}: an object, or a tensor that no module holds and that is gone")
        return modules.alias(module, "tensor", modules.tensor(module, "constant", value))


def _follow_grad_mode(graph: fx.Graph, frame: Frame) -> bool:
    """Makes `with torch.no_grad():` end in the mode of the caller. Returns whether the graph is for one mode only."""
    mode = now = frame.conditions.grad_mode
    callers, is_of_one = None, False
    for node in [node for node in graph.nodes if node.target is set_grad_enabled]:
        if callers is None:
            with graph.inserting_before(node):
                callers = graph.call_function(torch.is_grad_enabled)
        if node.args[0] and mode and not now:
            node.args, now = (callers,), True
        else:
            now = bool(node.args[0])
            is_of_one |= now or frame.root.conditions.grad_mode is not True
    if now is not mode:
        raise SerializationError("it changes the grad mode out of sight, as checkpoint(..., use_reentrant=True) does")
    return is_of_one


# -- modules -----------------------------------------------------------------------------------------------------------


class _ModuleTable:
    """The modules to write, each with a number: children before their parents.

    These are the modules in the registries of the model, and those that it calls, which may be elsewhere.
    """

    def __init__(self, root: Module, called: Iterator[Module], tensors: TensorTable) -> None:
        self._tensors = tensors
        self._modules: list[Module] = []
        self._numbers: dict[int, int] = {}
        self._paths = {id(module): name for name, module in root.named_modules()}
        self._names: dict[int, dict[str, tuple[Any, int]]] = {}
        for module in (*called, root):
            self._add(module)

    def _add(self, module: Module) -> None:
        if id(module) in self._numbers:
            return
        for child in module._modules.values():
            if child is not None:
                self._add(child)
        self._numbers[id(module)] = len(self._modules)
        self._modules.append(module)

    def number(self, module: Module) -> int:
        """Returns the number of `module`."""
        return self._numbers[id(module)]

    def alias(self, module: Module, kind: str, number: int) -> str:
        """Returns the name by which graphs of `module` use a module or a tensor that no attribute path leads to."""
        names = self._names.setdefault(id(module), {})
        alias = next((name for name, other in names.items() if other == (kind, number)), f"{ALIAS}{len(names)}")
        names[alias] = (kind, number)
        return alias

    def tensor(self, holder: Module, name: str, tensor: Tensor) -> int:
        """Returns the number of a tensor that a module holds under a name."""
        path = self._paths.get(id(holder))
        return self._tensors.add(tensor, f"{path}.{name}" if path else name)

    def parts(self) -> list[ModulePart]:
        """Returns the entries of the modules."""
        return [
            ModulePart(
                cls=type(module).__name__,
                path=self._paths.get(id(module)),
                training=getattr(module, "training", False),
                parameters={name: self._optional(module, name, tensor) for name, tensor in module._parameters.items()},
                buffers={name: self._optional(module, name, tensor) for name, tensor in module._buffers.items()},
                not_persistent=sorted(module._non_persistent_buffers_set),
                children={n: None if m is None else self._numbers[id(m)] for n, m in module._modules.items()},
                names=self._names.get(id(module), {}),
            )
            for module in self._modules
        ]

    def _optional(self, module: Module, name: str, tensor: Tensor | None) -> int | None:
        with suppress(GraphError):  # the frames that need it are not stored
            return None if tensor is None else self.tensor(module, name, tensor)
        return None
