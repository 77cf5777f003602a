"""`save`: writes the records of frames, their graphs and modules as one document, and the tensors as safetensors.

A frame whose graph may not equal its module is not stored, with the reason. What the model's Python code made of sizes
and values is not in its graph, so the stored graph checks that it is the same again:

    if x.shape[1] > 512:        ->        gt = operator.gt(size_shape[1], 512)
                                          unchanged(gt, False)
"""

from __future__ import annotations

import inspect
import io
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Module

from graphpatch_notebook.capture import listed_doubts
from graphpatch_notebook.capture.held_values import module_at
from graphpatch_notebook.capture.records import (
    RECORD,
    CallNode,
    Frame,
    InputParameter,
    Node,
    Ref,
    Site,
    SizeGuard,
)
from graphpatch_notebook.checks.equality import difference
from graphpatch_notebook.checks.model_state import copied, preserved
from graphpatch_notebook.errors import GraphError, GraphPatchWarning
from graphpatch_notebook.graphs import CompiledGraphModule
from graphpatch_notebook.graphs.build import BuiltGraph, build
from graphpatch_notebook.graphs.edits import guards_of, unguarded_doubts
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.serialization.documents import checked_file, name_of, write_document
from graphpatch_notebook.serialization.functions import (
    check_attribute,
    check_method,
    class_name,
    encoded_function,
    known_classes,
    unchanged,
)
from graphpatch_notebook.serialization.loaded_modules import ALIAS, LoadedRoot, check_of, is_writable, tensor_at
from graphpatch_notebook.serialization.loading import METADATA_KEY, load
from graphpatch_notebook.serialization.plain_values import UnstorableError, encoded, encoded_key
from graphpatch_notebook.serialization.schema import (
    FramePart,
    GraphDocument,
    ModulePart,
    ParameterPart,
    RecordPart,
    SpecPart,
    StepPart,
)
from graphpatch_notebook.serialization.tensors import TensorTable
from graphpatch_notebook.torch_compat import set_grad_enabled
from graphpatch_notebook.values import (
    ContainerSpec,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    dtype_name,
    tensor_specs,
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
        loaded = load(written, root.module if writer.unstored else None, None)
        if isinstance(loaded.module, LoadedRoot):  # not the model itself, whose graph is not stored
            loaded.module.answer_all()
        graph = runnable(loaded.module, loaded.root, ExtractionOptions())
        _compare(_without_trace(graph, loaded.module, root.module), _without_trace(call, root.module), check)
    if writer.unstored:
        warnings.warn(GraphPatchWarning(writer.warning(name_of(target)), "unstored frame"), stacklevel=3)
    write_document(target, METADATA_KEY, document, tensors)


def _without_trace(run: Callable[..., Any], *modules: Module) -> Callable[..., Any]:
    """Returns a function that calls `run` on copies of its arguments; modules and generators stay as they were."""

    def result(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            snapshots = [stack.enter_context(preserved(module)) for module in modules]
            args, kwargs = copied((args, kwargs))
            output = run(*args, **kwargs)
            for snapshot in snapshots:
                output = snapshot.separated(output)
            return output

    return result


def _compare(graph: Callable[..., Any], model: Callable[..., Any], calls: Iterable[Any]) -> None:
    for number, (args, kwargs) in enumerate(calls):
        try:
            found = graph(*args, **kwargs)
        except GraphError as error:
            raise GraphError(f"check[{number}]: {error}") from error
        problem = difference(found, model(*args, **kwargs), "output")
        if problem is not None:
            raise GraphError(f"check[{number}]: the graph does not equal the model: {problem}")


class _Writer:
    """Writes the parts of a document.

    Attributes:
        unstored: Why frames are not stored, by their ids.
    """

    def __init__(self, root: Frame, own: Sequence[CompiledGraphModule]) -> None:
        self._root = root
        self._frames = list(self._root.walk())
        self._numbers = {id(frame): number for number, frame in enumerate(self._frames)}
        self.tensors = TensorTable()
        self._modules = _ModuleTable(self._root.module, (frame.module for frame in self._frames), self.tensors)
        self._graphs = _GraphWriter(root, own, self._modules)
        self._lines: dict[tuple[str, int, str, str], int] = {}
        self._site_lines: dict[int, list[int]] = {}
        self.unstored: dict[int, str] = {}

    def document(self) -> GraphDocument:
        """Returns the document, or raises an error if it would lack a graph that *is* its module."""
        parts: dict[int, tuple[list[ParameterPart], list[StepPart]]] = {}
        for frame in self._frames:
            if id(frame) not in self.unstored:
                try:
                    parts[id(frame)] = self._stored(frame)
                except (GraphError, UnstorableError) as error:
                    self._leave_out(frame, str(error))
        for frame in self._frames:
            if id(frame) in self.unstored and self._is_own(frame):
                raise GraphError(
                    f"the graph of {_where(frame)} replaces its module, as it was edited or is custom, and cannot be "
                    f"stored: {self.unstored[id(frame)]}. Nothing was written; save a PatchableGraph without this edit"
                )
        module, specs = self._root.module, [spec for node in self._root.inputs() for spec in tensor_specs(node.spec)]
        sizes: list[list[int | None]] = [
            list(spec.shape) if self._root.capture.has_escaped_sizes else [None] * len(spec.shape) for spec in specs
        ]
        default_dtype = torch.get_default_dtype()
        if (check := check_of(module)) is not None:  # it was loaded
            sizes, default_dtype = list(map(list, check.sizes)), check.default_dtype
        return GraphDocument(
            default_dtype=dtype_name(default_dtype),
            sizes=getattr(module, "fixed_sizes", sizes),  # of an exported program
            frames=[self._frame(frame, *parts.get(id(frame), ([], []))) for frame in self._frames],
            modules=self._modules.parts(),
            tensors=self.tensors.parts,
            lines=list(self._lines),
        )

    # -- frames that are not stored ------------------------------------------------------------------------------------

    def _leave_out(self, frame: Frame, reason: str) -> None:
        """Notes that a frame is not stored, nor all below it, nor other calls of these modules."""
        for inner in frame.walk():
            if id(inner) not in self.unstored:
                self.unstored[id(inner)] = (
                    reason if inner is frame else f"it is inside {_where(frame)}, which is not stored"
                )
                for other in self._frames:
                    if other.module is inner.module and id(other) not in self.unstored:
                        self._leave_out(other, f"it is the module of {_where(inner)}, which is not stored")

    def _is_own(self, frame: Frame) -> bool:
        """Whether the graph of `frame` *is* its module, rather than a record of it, here and before it was loaded."""
        return frame.is_edited or (frame.has_own_graph and not isinstance(self._root.module, LoadedRoot))

    def warning(self, file: str) -> str:
        """Returns what to say about frames that are not stored."""
        frames = [frame for frame in self._frames if id(frame) in self.unstored]
        topmost = [frame for frame in frames if frame.parent is None or id(frame.parent) not in self.unstored]
        listed = "".join(f"\n  {_where(frame)}: {self.unstored[id(frame)]}" for frame in topmost[:5])
        hint = "\nwithout caches, a model of transformers can be stored: PatchableGraph(..., use_cache=False)"
        return (
            f"{len(frames)} of {len(self._frames)} frames are not stored in {file}; to call these, load it with the "
            f"model (PatchableGraph.load(file, model=model)):{listed}{hint if 'Cache' in listed else ''}"
        )

    # -- frames --------------------------------------------------------------------------------------------------------

    def _stored(self, frame: Frame) -> tuple[list[ParameterPart], list[StepPart]]:
        if frame.opaque_reason is not None:
            raise UnstorableError(frame.opaque_reason)
        if unguarded_doubts(frame) and not frame.has_own_graph:
            raise UnstorableError(listed_doubts(frame.doubts))
        return list(map(_encoded_parameter, frame.parameters)), self._graphs.steps(frame)

    def _frame(self, frame: Frame, parameters: list[ParameterPart], graph: list[StepPart]) -> FramePart:
        reason, records, same_inputs = self.unstored.get(id(frame)), frame.graph_nodes, frame.conditions.same_inputs
        if reason is not None:
            with suppress(UnstorableError):  # where a default is an object, the model's module has the parameters
                parameters = list(map(_encoded_parameter, frame.parameters))
            same_inputs = same_inputs if parameters else ()
            records = [node for node in frame.nodes if node.kind in _BOUNDARY and (parameters or node.kind != "input")]
        # `attention(x, x, x)`: the graph reads one of the three inputs, no matter which one the code reads. That is
        # right for all calls of this form, but a patch on one of them would change too much or nothing.
        same = {name for pair in same_inputs for name, _ in pair} if frame.custom_graph is None else ()
        return FramePart(
            module=self._modules.number(frame.module),
            attribute_path=frame.attribute_path,
            training=frame.conditions.training,
            grad_mode=frame.conditions.grad_mode if frame is self._root and self._graphs.is_of_one_grad_mode else None,
            parameters=parameters,
            records=[self._record(node, is_hidden=node.kind == "input" and node.target in same) for node in records],
            graph=graph,
            unstored=reason,
            is_own=reason is None and self._is_own(frame),
            same_inputs=[[(name, list(map(encoded_key, dig))) for name, dig in pair] for pair in same_inputs],
        )

    def _record(self, node: Node, *, is_hidden: bool) -> RecordPart:
        part = RecordPart(node.kind, node.name, node.op, _encoded_spec(node.spec))
        if node.kind not in ("op", "constant", "output"):
            part.target = str(node.target)
        if node.site is not None:
            part.lines = self._lines_of(node.site)
        flags = {"is_hidden": is_hidden or not node.is_live, "is_size": node.is_size}
        flags |= {"is_mutated_later": node.is_mutated_later, "is_view_filled_later": node.is_view_filled_later}
        part.flags = [flag for flag, is_set in flags.items() if is_set]  # type: ignore[misc]  # its names
        part.written_argument = node.written_argument
        if isinstance(node, CallNode):
            part.frame, part.call_index, part.call_count = (
                self._numbers[id(node.frame)],
                node.call_index,
                node.call_count,
            )
        return part

    def _lines_of(self, site: Site) -> list[int]:
        if id(site) not in self._site_lines:  # layers share their sites
            lines = [(line.file, line.line, line.function, line.text[:_LONGEST_LINE]) for line in site.source_lines()]
            self._site_lines[id(site)] = [self._lines.setdefault(line, len(self._lines)) for line in lines]
        return self._site_lines[id(site)]


def _where(frame: Frame) -> str:
    return repr(format_path(frame.path)) if frame.parent is not None else "the root"


def _encoded_parameter(parameter: InputParameter) -> ParameterPart:
    try:
        default = [] if parameter.default is inspect.Parameter.empty else [encoded(parameter.default)]
    except UnstorableError as error:
        raise UnstorableError(f"the default of its parameter {parameter.name!r}: {error}") from None
    return ParameterPart(parameter.name, int(parameter.kind), default)


def _encoded_spec(spec: ValueSpec) -> SpecPart:
    """Returns the entry of `spec`; a value that cannot be written becomes that of an object."""
    if isinstance(spec, TensorSpec):
        shape, dtype, device = list(spec.shape), dtype_name(spec.dtype), str(spec.device)
        return SpecPart("tensor", spec.type_name, shape, dtype, device)
    try:
        if isinstance(spec, ContainerSpec):
            kinds = {"tuple": tuple, "list": list, "mapping": Mapping, "object": object}
            kind = next(name for name, base in kinds.items() if issubclass(spec.type, base))
            children = [(encoded_key(key), _encoded_spec(child)) for _, key, child in spec.children]
            known: Any = "" if spec.type in known_classes().values() else kind
            return SpecPart("container", class_name(spec.type), container=known, children=children)
        if isinstance(spec, ScalarSpec):
            return SpecPart("value", value=encoded(spec.value))
    except UnstorableError:  # a key of a dict that is an object, say
        return SpecPart("object", str(spec))
    return SpecPart("unknown") if isinstance(spec, UnknownSpec) else SpecPart("object", str(spec))


# -- graphs ------------------------------------------------------------------------------------------------------------


class _Paths:
    """The names in graphs for files: the attribute paths of the user's modules."""

    def of_call(self, node: CallNode) -> str:
        return str(node.target)

    def of_attribute(self, path: str) -> str:
        return path


class _GraphWriter:
    """Writes graphs over the attribute paths of their modules.

    Attributes:
        is_of_one_grad_mode: Whether graphs hold only if gradients are enabled, or disabled, as they were.
    """

    def __init__(self, root: Frame, own: Sequence[CompiledGraphModule], modules: _ModuleTable) -> None:
        self._root = root
        self.is_of_one_grad_mode = isinstance(root.module, LoadedRoot)  # it says itself
        self._edited = {id(m.frame): m for m in own if m.frame.is_edited and m.frame.custom_graph is None}
        self._modules = modules

    def steps(self, frame: Frame) -> list[StepPart]:
        """Returns the steps of the graph of `frame`, with checks of what the module's code read."""
        edited = self._edited.get(id(frame))
        built = build(frame, _Paths()) if edited is None else edited.built()
        writer = _Steps(frame, self._ends_of_no_grad(frame, built.graph))
        for fx_node in built.graph.nodes:
            args = ((fx_node.args[0],),) if fx_node.op == "output" and frame.custom_graph is None else fx_node.args
            step = StepPart(fx_node.op, fx_node.name)
            if fx_node.op == "call_function":
                check_attribute(fx_node.target, args)
                step.target = encoded_function(fx_node.target)
            elif fx_node.op != "output":
                step.target = self._target(fx_node, frame, built)
            writer.add(fx_node, step, args)
        return writer.steps

    def _ends_of_no_grad(self, frame: Frame, graph: fx.Graph) -> set[fx.Node]:
        """Returns the steps that enable gradients again after `with torch.no_grad():`, if they were enabled before."""
        mode = now = frame.conditions.grad_mode
        ends: set[fx.Node] = set()
        if mode is None or isinstance(self._root.module, LoadedRoot):
            return ends
        is_plain = self._root.conditions.grad_mode is True
        for fx_node in graph.nodes:
            if fx_node.target is set_grad_enabled:
                if fx_node.args[0] and mode and not now:
                    ends.add(fx_node)
                elif fx_node.args[0] or not is_plain:
                    self.is_of_one_grad_mode = True
                now = bool(fx_node.args[0])
        if now is not mode:
            raise UnstorableError("it changes the grad mode out of sight, as checkpoint(..., use_reentrant=True) does")
        return ends

    def _target(self, fx_node: fx.Node, frame: Frame, built: BuiltGraph) -> str:
        target, modules = str(fx_node.target), self._modules
        if fx_node.op == "placeholder":
            return target
        if fx_node.op == "call_method":
            check_method(target)
            return target
        if fx_node.op == "call_module":
            record = fx_node.meta.get(RECORD)
            if not isinstance(record, CallNode):
                raise UnstorableError(f"it calls {target!r}, which has no record")
            found = module_at(frame.module, target) if frame.custom_graph is not None else None
            if found is not None and found is not record.frame.module:
                raise UnstorableError(f"it calls {target!r}, which was replaced by another module since the capture")
            return modules.reach_module(frame.module, target, record.frame.module)
        if (edited := self._edited.get(id(frame))) is not None:
            own = edited.__dict__.get(target)
            if isinstance(own, Tensor):  # the user set it on the graph module
                return modules.hold(frame.module, own)
            target = target if target in built.constants else edited.original_path(target)
        if target not in built.constants:
            return modules.reach_tensor(frame.module, target)
        value = built.constants[target]()
        if value is None:
            raise UnstorableError("it uses a tensor that no longer exists: the graph and its module do not hold it")
        if not isinstance(value, Tensor):
            raise UnstorableError(f"it uses an object of type {type(value).__name__}")
        return modules.hold(frame.module, value)


class _Steps:
    """The steps of one graph."""

    def __init__(self, frame: Frame, ends_of_no_grad: set[fx.Node]) -> None:
        self.steps: list[StepPart] = []
        self._ends_of_no_grad = ends_of_no_grad
        self._grad_mode: Any = None
        self._numbers: dict[fx.Node, int] = {}
        self._records = {id(node): number for number, node in enumerate(frame.graph_nodes)}
        self._step_of: dict[int, int] = {}
        self._site: Site | None = None
        self._guards: dict[int, list[SizeGuard]] = {}  # by the last record that they are about
        for guard in guards_of(frame) if frame.custom_graph is None else ():
            records = [self._records.get(id(ref.node), -1) for ref in guard.operands if isinstance(ref, Ref)]
            if min(records, default=-1) >= 0:  # not one of the steps of a fused call, which runs itself
                self._guards.setdefault(max(records), []).append(guard)

    def add(self, fx_node: fx.Node, step: StepPart, args: Sequence[Any]) -> None:
        """Adds a step, and checks of what Python found out about its value."""
        if self._ends_of_no_grad and self._grad_mode is None and fx_node.target is set_grad_enabled:
            self._grad_mode = self._call(torch.is_grad_enabled)  # that of each call, not that of the capture
        if fx_node.op not in ("placeholder", "get_attr"):
            step.args = [encoded(value, self._leaf) for value in args]
            if fx_node in self._ends_of_no_grad:
                step.args = [self._grad_mode]
            step.kwargs = {name: encoded(value, self._leaf) for name, value in fx_node.kwargs.items()}
        number = self._numbers[fx_node] = len(self.steps)
        self.steps.append(step)
        record = fx_node.meta.get(RECORD)
        step.record = self._records.get(id(record))
        if record is not None and step.record is not None:
            self._step_of[step.record] = number
            self._site = record.site or self._site  # arithmetic on sizes has none: it is near the operation before
            for guard in self._guards.get(step.record, ()):
                refs = [operand for operand in guard.operands if isinstance(operand, Ref)]
                if all(self._records[id(ref.node)] in self._step_of for ref in refs):  # the user may have erased one
                    self._add_check(guard)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"step": self._numbers[value]}
        raise UnstorableError(f"it uses an object of type {type(value).__name__}")

    def _add_check(self, guard: SizeGuard) -> None:
        operands = [self._operand(operand) if isinstance(operand, Ref) else operand for operand in guard.operands]
        found = operands[0] if guard.func is None else self._call(guard.func, *operands)
        line = None if self._site is None else self._site.source_lines()[-1]
        where = "its start" if line is None else f"{Path(line.file).name}:{line.line}"
        self._call(unchanged, found, encoded(guard.result), where)

    def _operand(self, ref: Ref) -> Any:
        value = {"step": self._step_of[self._records[id(ref.node)]]}
        for key in ref.dig:
            value = self._call(operator.getitem, value, key)
        return value

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.steps.append(StepPart("call_function", f"check_{len(self.steps)}", encoded_function(function), list(args)))
        return {"step": len(self.steps) - 1}


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

    def reach_module(self, module: Module, path: str, callee: Module) -> str:
        """Returns the attribute path by which a graph of `module` calls `callee`, which the model has at `path`."""
        is_there = is_writable(path) and module_at(module, path) is callee
        return path if is_there else self._alias(module, ("module", self.number(callee)))

    def reach_tensor(self, module: Module, path: str) -> str:
        """Returns the attribute path by which a graph of `module` reads the tensor that the model has at `path`."""
        tensor, (parents, _, name) = tensor_at(module, path), path.rpartition(".")
        holder = module_at(module, parents)
        if tensor is None or holder is None:
            raise UnstorableError(f"it reads {path!r}, which is not a tensor that a module holds")
        if name in holder.__dict__ or not is_writable(path):
            return self.hold(module, tensor)
        self._tensor(holder, name, tensor)
        return path

    def hold(self, module: Module, tensor: Tensor) -> str:
        """Returns the name by which a graph of `module` reads a tensor that cannot be reached by an attribute path."""
        return self._alias(module, ("tensor", self._tensor(module, "constant", tensor)))

    def _alias(self, module: Module, what: tuple[Any, int]) -> str:
        names = self._names.setdefault(id(module), {})
        alias = next((name for name, other in names.items() if other == what), f"{ALIAS}{len(names)}")
        names[alias] = what
        return alias

    def _tensor(self, holder: Module, name: str, tensor: Tensor) -> int:
        path = self._paths.get(id(holder))
        return self._tensors.add(tensor, f"{path}.{name}" if path else name)

    def parts(self) -> list[ModulePart]:
        """Returns the entries of the modules."""
        return [
            ModulePart(
                cls=type(module).__name__,
                path=self._paths.get(id(module)),
                training=module.training,
                parameters={name: self._number_of(module, name, tensor) for name, tensor in module._parameters.items()},
                buffers={name: self._number_of(module, name, tensor) for name, tensor in module._buffers.items()},
                not_persistent=sorted(module._non_persistent_buffers_set),
                children={n: None if m is None else self._numbers[id(m)] for n, m in module._modules.items()},
                names=self._names.get(id(module), {}),
            )
            for module in self._modules
        ]

    def _number_of(self, module: Module, name: str, tensor: Tensor | None) -> int | None:
        try:
            return None if tensor is None else self._tensor(module, name, tensor)
        except UnstorableError:  # the frames that need it are not stored
            return None
