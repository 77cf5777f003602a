"""`save`: checks the graphs of a model against it, and writes those that hold to one file.

Only the specs of the example inputs are kept, so the graphs are compared with the model on random inputs with these
specs, at the example's sizes, with gradients on and off. The records prove the other sizes (`forms`); the comparison is
needed, too, because a value may come from a source that is not recorded.

The document is everything that is written except the numbers in tensors:

{"schema": 1, "written_by": "0.1.0", "torch": "2.13.0", "options": {..}, "form": {..},
 "frames": [..], "modules": [..], "tensors": [..], "lines": [..]}
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook._version import __version__
from graphpatch_notebook.capture import Reason, chosen_decompositions, listed_doubts
from graphpatch_notebook.capture.inputs import UnknownInputError, call_like
from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.checks.call_signature import CallSignature
from graphpatch_notebook.checks.comparison import compared, first_line
from graphpatch_notebook.checks.model_state import copied
from graphpatch_notebook.errors import GraphError, SerializationError, UnstoredFrameWarning
from graphpatch_notebook.graphs import GraphModule
from graphpatch_notebook.graphs.verification import verify
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.serialization.codecs.tensors import TensorTable
from graphpatch_notebook.serialization.codecs.values import UnstorableError, encoded
from graphpatch_notebook.serialization.files import checked_target, name_of, write_document
from graphpatch_notebook.serialization.forms import Form, encoded_form, find_sizes, given_values
from graphpatch_notebook.serialization.frames import LineTable, boundary, encoded_nodes, encoded_parameters
from graphpatch_notebook.serialization.graphs import Builds, encoded_graph
from graphpatch_notebook.serialization.loading import METADATA_KEY, SCHEMA, assembled, guard_of
from graphpatch_notebook.serialization.modules import LoadedRoot, ModuleTable
from graphpatch_notebook.serialization.value_reads import has_only_reads
from graphpatch_notebook.values import ObjectSpec, TensorSpec


@dataclass(frozen=True)
class GraphToSave:
    """The graph to save.

    Attributes:
        call: Runs it as a user does, without patches.
        runnable: Returns a callable that runs a model with the graphs of a root frame.
    """

    graph_module: GraphModule
    options: ExtractionOptions
    call: Callable[..., Any]
    runnable: Callable[[Module, Frame, ExtractionOptions], Callable[..., Any]]

    @property
    def root(self) -> Frame:
        """The root frame."""
        return self.graph_module.frame


def save(
    source: GraphToSave,
    file: str | os.PathLike[str] | IO[bytes],
    check: Sequence[tuple[Sequence[Any], dict[str, Any]]],
) -> None:
    """Writes a graph to `file`. See `PatchableGraph.save`."""
    where = checked_target(file, "pg.save")
    _check_calls(check)
    calls: list[ModelCall] = [(tuple(args), dict(kwargs)) for args, kwargs in check]
    reasons = Reasons(source.root)
    _note_unstorable(source, reasons)
    _settle(source, reasons)
    found = _checked(source, reasons, calls)
    _warn(where, source.root, reasons, found.content["options"]["dropped"])
    write_document(where, METADATA_KEY, found.content, found.tensors.contents())


def _check_calls(check: Sequence[Any]) -> None:
    for call in check:
        parts = call if isinstance(call, tuple) and len(call) == 2 else (None, None)
        if not isinstance(parts[0], (tuple, list)) or not isinstance(parts[1], dict):
            raise TypeError("check is a list of calls, each a tuple of arguments and a dict: check=[((x,), {})]")


# -- checks ------------------------------------------------------------------------------------------------------------


def _checked(source: GraphToSave, reasons: Reasons, check: Sequence[ModelCall]) -> Document:
    """Returns the document of all graphs that equal their modules, with the form of the calls they are valid for."""
    root = source.root
    known = guard_of(root.module)
    if known is not None:  # it was loaded, without a model to compare it with
        return _with_form(_document(source, reasons), known.form)
    if reasons.of(root) is not None:
        return _document(source, reasons)
    first, bounds = _first_call(source, check)
    _verify(source, reasons, first)
    _settle(source, reasons)
    found = _document(source, reasons)
    if reasons.of(root) is not None:
        return found
    form = Form.of_example(root)
    trial = _Trial(source, found)
    problem = trial.find_modes(form, first)
    if problem is not None and (doubtful := [f for f in root.walk() if f.doubts and reasons.of(f) is None]):
        for frame in doubtful:
            reasons.add(frame, listed_doubts(frame.doubts))
        _settle(source, reasons)
        if reasons.of(root) is None:
            found = _document(source, reasons)
            trial = _Trial(source, found)
            problem = trial.find_modes(form, first)
    if problem is not None:
        reasons.add(root, f"compared with the model on inputs like the example's: {problem}")
        _settle(source, reasons)
        return _document(source, reasons)
    if form.same == list(range(len(form.same))):
        find_sizes(root, form)
    if bounds is not None:
        trial.find_layout(form, _made_call(root, bounds, is_strided=True))
    trial.check(form, check)
    return _with_form(found, form)


def _verify(source: GraphToSave, reasons: Reasons, call: ModelCall) -> None:
    """Compares the graph of each frame with its module; graphs that read values only as part of the whole model."""
    frames = {format_path(frame.path): frame for frame in source.root.walk()}
    mode = torch.is_grad_enabled()
    refused = _refused(source, call, mode)
    if "" in refused:  # it may have been captured without gradients
        refused = min(refused, _refused(source, call, not mode), key=len)
    for path, reason in refused.items():
        # Below graphs that are their module, only the whole can be compared.
        if not has_only_reads(frames[path]) and not frames[path].is_below_own_graph:
            reasons.add(frames[path], reason)
    _settle(source, reasons)


def _refused(source: GraphToSave, call: ModelCall, with_gradients: bool) -> dict[str, str]:
    with torch.set_grad_enabled(with_gradients):
        reports = verify(source.graph_module, *copied(call))
    return {
        report.path: report.reason or "the inputs that it was checked with do not reach it"
        for report in reports
        if report.status not in ("equal", "own graph", "opaque")
    }


def _first_call(source: GraphToSave, check: Sequence[ModelCall]) -> tuple[ModelCall, IntegerBounds | None]:
    """Returns the first call to check the graphs with, and the bounds to make similar calls with."""
    model, problem = source.root.module, ""
    found: tuple[ModelCall, IntegerBounds] | None = None
    devices = {spec.device.type for node in source.root.inputs() if isinstance(spec := node.spec, TensorSpec)}
    # A wrong index is fatal on other devices than the CPU.
    for bounds in _BOUNDS if devices <= {"cpu"} else _BOUNDS[2:]:
        try:
            call = _made_call(source.root, bounds)
            _difference_of(model, source.call, source.call, call)
            found = call, bounds
            break
        except UnstorableError as error:
            problem = str(error)
            break
        except ModelRaisesError as error:
            problem = f"{type(model).__name__} raises {error}"
    form = Form.of_example(source.root)
    # Made-up inputs are all different objects: if the example had one tensor twice, only the caller has such a call.
    if check and (found is None or list(_signature_of(form, check[0]).same) != form.same):
        return check[0], found[1] if found is not None else None
    if found is None:
        raise SerializationError(
            "the graph cannot be compared with the model on generated inputs that are like the example's: "
            f"{problem}; give inputs to compare them with: pg.save(file, check=[((x,), {{}})])"
        )
    return found


class _Trial:
    """Compares the graphs of a document with the model."""

    def __init__(self, source: GraphToSave, found: Document) -> None:
        loaded = assembled(found.content, found.tensors.tensors, dict(enumerate(found.modules)))
        self._model = source.root.module
        self._call = source.call
        self._graph = source.runnable(loaded.module, loaded.root, source.options)

    def compare(self, call: ModelCall) -> str | None:
        """Returns how graph and model differ, if they do."""
        return _difference_of(self._model, self._call, self._graph, call)

    def find_modes(self, form: Form, call: ModelCall) -> str | None:
        """Stores the memory layouts and gradient modes that the graph is valid for in `form`, or returns a problem."""
        form.same = list(_signature_of(form, call).same)
        problem: str | None = None
        for mode in (True, False):
            with torch.set_grad_enabled(mode):
                outcome = self._outcome(call)
            if outcome is None:
                form.grad_modes.append(mode)
            problem = problem or outcome
        return None if form.grad_modes else problem

    def find_layout(self, form: Form, strided: ModelCall) -> None:
        """Notes in the form whether inputs need to be contiguous: what code does with strides is not recorded."""
        with torch.set_grad_enabled(form.grad_modes[-1]):
            form.is_contiguous = self._outcome(strided) is not None

    def check(self, form: Form, check: Sequence[ModelCall]) -> None:
        """Compares graph and model on the user's calls, and widens the form to their sizes."""
        for number, (args, kwargs) in enumerate(check):
            call = tuple(args), kwargs
            with torch.set_grad_enabled(form.grad_modes[-1]):
                try:
                    outcome = self.compare(call)
                except ModelRaisesError as error:
                    raise SerializationError(f"check[{number}]: the model raises {error}") from error
            if outcome is not None:
                raise SerializationError(
                    f"check[{number}]: the graph gives other results than the model ({outcome}); make the "
                    "PatchableGraph with these inputs"
                )
            if not form.widen(_shapes(form, call)):
                raise SerializationError(
                    f"check[{number}]: {form.problem(*call) or 'its sizes differ from the example where they may not'}"
                )

    def _outcome(self, call: ModelCall) -> str | None:
        try:
            return self.compare(call)
        except ModelRaisesError as error:
            return str(error)


def _signature_of(form: Form, call: ModelCall) -> CallSignature:
    values = given_values(form.parameters, *call) or {}
    return CallSignature.of({name: values.get(name) for name, _ in form.specs})


def _shapes(form: Form, call: ModelCall) -> list[list[int]]:
    shapes = [[int(size) for size in tensor.sizes] for tensor in _signature_of(form, call).tensors]
    if [len(dims) for dims in form.dims] != [len(shape) for shape in shapes]:
        raise SerializationError(f"check: {form.problem(*call) or 'the inputs are not those of the example'}")
    return shapes


def _settle(source: GraphToSave, reasons: Reasons) -> None:
    """Settles the reasons, and refuses to leave out edited and custom graphs: the module's code would run instead."""
    reasons.settle()
    for frame in source.root.walk():
        reason = reasons.of(frame)
        if reason is None or not is_own_graph(frame, source.root):
            continue
        outermost = reasons.of_outermost(frame)
        reason = reason if outermost == reason else f"{reason} ({outermost})"
        raise SerializationError(
            f"the graph of {format_path(frame.path) or '<root>'!r} ({type(frame.module).__name__}) is its module, as "
            f"it was edited or is a custom one, and cannot be stored: {reason}. Without it, other code would run in "
            "its place, so nothing was written; remove the cause, or save a PatchableGraph without this "
            "edit or custom extraction function"
        )


# -- the file ----------------------------------------------------------------------------------------------------------


def _warn(file: Path | IO[bytes], root: Frame, reasons: Reasons, dropped: dict[str, str]) -> None:
    parts = [f"{path}: {reason}" for path, reason in reasons.topmost()]
    shown = [f"\n  {part}" for part in parts[:5]] + ([f"\n  ... and {len(parts) - 5} more"] if len(parts) > 5 else [])
    message = ""
    if parts:
        message = (
            f"{_frames(len(reasons))} not stored in {name_of(file)}; to call these, load it with the model "
            f"(PatchableGraph.load(file, model=model)):{''.join(shown)}"
        )
    if any(_uses_cache(frame) for frame in root.walk() if reasons.of(frame) is not None):
        message += (
            "\nwithout caches, a model of transformers can be stored: make the PatchableGraph with use_cache=False"
        )
    if dropped:
        names = "; ".join(f"{name} ({text})" for name, text in dropped.items())
        message += f"{chr(10) if message else ''}options that hold functions or classes are only named: {names}"
    if message:
        warnings.warn(message, UnstoredFrameWarning, stacklevel=4)


def _uses_cache(frame: Frame) -> bool:
    """Whether only a cache of transformers keeps a frame from being stored."""
    names = {doubt.what for doubt in frame.doubts if doubt.reason is Reason.USES_OBJECT}
    names |= {node.spec.type_name for node in frame.nodes if isinstance(node.spec, ObjectSpec)}
    return any(name.endswith("Cache") for name in names)


def _frames(count: int) -> str:
    return "1 frame is" if count == 1 else f"{count} frames are"


# -- inputs like the example's -----------------------------------------------------------------------------------------


ModelCall: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"

IntegerBounds: TypeAlias = "tuple[int, int]"
"""The smallest integer of made-up inputs, and the one after the largest."""

_BOUNDS = ((0, 50), (0, 3), (0, 2), (1, 2), (0, 1))
"""The first ones that the model accepts are used."""


class ModelRaisesError(Exception):
    """The model itself cannot run on inputs that were made up (caught in this file)."""


def _made_call(frame: Frame, bounds: IntegerBounds, *, is_strided: bool = False) -> ModelCall:
    """Returns a call like the example's, optionally with tensors that are not contiguous."""
    generator = torch.Generator().manual_seed(0)

    def tensor(name: str, spec: TensorSpec) -> Tensor:
        made = _made_tensor(name, spec, bounds, generator)
        # The same values, with the first dimension innermost in memory.
        return made.transpose(0, -1).contiguous().transpose(0, -1) if is_strided and made.dim() > 1 else made

    try:
        return call_like(frame, tensor)
    except UnknownInputError as error:
        raise UnstorableError(str(error)) from error


def _made_tensor(name: str, spec: TensorSpec, bounds: IntegerBounds, generator: torch.Generator) -> Tensor:
    if spec.type_name != "Tensor":
        raise UnstorableError(f"its input {name!r} is a {spec.type_name}, for which no values can be generated")
    shape = tuple(spec.shape)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        wide = torch.complex64 if spec.dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, dtype=wide).to(spec.device, spec.dtype)
    is_mask = spec.dtype is torch.bool or "mask" in name
    made = torch.randint(*((0, 2) if is_mask else bounds), shape, generator=generator)
    if is_mask and made.dim() and made.numel():
        made[..., 0] = 1  # a row that is masked completely gives NaN
    return made.to(spec.device, spec.dtype)


# -- runs --------------------------------------------------------------------------------------------------------------


def _difference_of(model: Module, run: Callable[..., Any], graph: Callable[..., Any], call: ModelCall) -> str | None:
    """Runs a model and its graph on copies of the same inputs, and returns how they differ, if they do."""

    def expected(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception as error:
            raise ModelRaisesError(first_line(error)) from error

    comparison = compared(model, expected, graph, *call)
    return None if comparison.is_equal else str(comparison)


# -- the document ------------------------------------------------------------------------------------------------------


@dataclass
class Document:
    """The written form of a graph: the JSON, and the tensors and modules that it refers to by number."""

    content: dict[str, Any]
    tensors: TensorTable
    modules: list[Module]


class Reasons:
    """Why frames are not stored."""

    def __init__(self, root: Frame) -> None:
        self._root = root
        self._found: dict[int, str] = {}

    def add(self, frame: Frame, reason: str) -> None:
        """Notes that `frame`, and with it all below, is not stored; the first reason counts."""
        for inner in frame.walk():
            if inner is frame:
                self._found.setdefault(id(inner), reason)
            else:
                self._found.setdefault(id(inner), f"it is inside {_where(frame)}, which is not stored")

    def of(self, frame: Frame) -> str | None:
        """Returns why `frame` is not stored; `None` if it is."""
        return self._found.get(id(frame))

    def of_outermost(self, frame: Frame) -> str | None:
        """Returns why the outermost frame around `frame`, or `frame` itself, is not stored."""
        while frame.parent is not None and self.of(frame.parent) is not None:
            frame = frame.parent
        return self.of(frame)

    def settle(self) -> None:
        """Stores a module with all of its frames or with none, as one module of the file runs them all."""
        before = -1
        while before != len(self._found):
            before = len(self._found)
            without = {id(frame.module): frame for frame in self._root.walk() if self.of(frame) is not None}
            for frame in self._root.walk():
                if (other := without.get(id(frame.module))) is not None and self.of(frame) is None:
                    self.add(frame, f"it is the module of {_where(other)}, which is not stored")

    def __len__(self) -> int:
        return len(self._found)

    def topmost(self) -> Iterator[tuple[str, str]]:
        """Yields paths and reasons of the frames that are not stored although those that call them are."""
        for frame in self._root.walk():
            reason = self.of(frame)
            if reason is not None and (frame.parent is None or self.of(frame.parent) is None):
                yield _where(frame), reason


def _where(frame: Frame) -> str:
    return repr(format_path(frame.path)) if frame.parent is not None else "the root"


def _note_unstorable(source: GraphToSave, reasons: Reasons) -> None:
    """Finds the frames that have no graph, or one that may differ from the module, or one that cannot be written."""
    frames, builds = list(source.root.walk()), Builds(source.graph_module)
    modules = ModuleTable(source.root.module, (frame.module for frame in frames), TensorTable())
    for frame in frames:
        if reasons.of(frame) is None and (reason := _problem(frame, builds, modules)) is not None:
            reasons.add(frame, reason)


def is_own_graph(frame: Frame, root: Frame) -> bool:
    """Whether the graph of `frame` *is* its module, rather than a record of it, here and before it was loaded."""
    # All loaded graphs are custom ones; those that were edited or custom before they were saved count as edited.
    return frame.is_edited or (frame.has_own_graph and not isinstance(root.module, LoadedRoot))


def _problem(frame: Frame, builds: Builds, modules: ModuleTable) -> str | None:
    if frame.opaque_reason is not None:
        return frame.opaque_reason
    if frame.doubts and not has_only_reads(frame) and not frame.has_own_graph:
        return listed_doubts(frame.doubts)
    try:
        encoded_parameters(frame.parameters)
        encoded_graph(frame, builds, modules)
    except (GraphError, UnstorableError) as error:
        return str(error)
    return None


def _document(source: GraphToSave, reasons: Reasons) -> Document:
    """Returns the document of a graph, without the form of its calls."""
    frames, builds = list(source.root.walk()), Builds(source.graph_module)
    numbers = {id(frame): number for number, frame in enumerate(frames)}
    tensors, lines = TensorTable(), LineTable()
    modules = ModuleTable(source.root.module, (frame.module for frame in frames), tensors)
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "written_by": __version__,
        "torch": str(torch.__version__),
        "options": encoded_options(source.options),
        "form": None,
        "frames": [_encoded_frame(frame, builds, numbers, modules, lines, reasons.of(frame)) for frame in frames],
    }
    for frame, entry in zip(frames, content["frames"], strict=True):
        if is_own_graph(frame, source.root) and reasons.of(frame) is None:
            entry["own_graph"] = True
    content["modules"] = modules.encoded()
    content["tensors"] = tensors.encoded()
    content["lines"] = lines.entries
    return Document(content, tensors, modules.modules)


def _encoded_frame(
    frame: Frame, builds: Builds, numbers: dict[int, int], modules: ModuleTable, lines: LineTable, reason: str | None
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "module": modules.number(frame.module),
        "attribute_path": frame.attribute_path,
        "training": frame.conditions.training,
        "unstored": reason,
    }
    if reason is None:
        entry["parameters"] = encoded_parameters(frame.parameters)
        entry["nodes"] = encoded_nodes(frame.graph_nodes, numbers, lines, _indistinct_inputs(frame))
        entry["graph"] = encoded_graph(frame, builds, modules)
        return entry
    try:
        entry["parameters"] = encoded_parameters(frame.parameters)
    except UnstorableError:  # the model's own module has them
        entry["parameters"] = []
    nodes = [n for n in boundary(frame) if n.kind != "input" or entry["parameters"]]
    entry["nodes"] = encoded_nodes(nodes, numbers, lines)
    return entry


def _indistinct_inputs(frame: Frame) -> list[Node]:
    """Returns the inputs of `frame` that were the same tensor as another input, which its graph cannot distinguish.

    `attention(x, x, x)`: the graph reads one of the three names, no matter which one the code reads. Without patches
    that is right for all calls of this form; a patch on one of them would change too much or nothing.
    """
    if frame.custom_graph is not None:  # which is not a record
        return []
    names = {name for pair in frame.conditions.same_inputs for name, _ in pair}
    return [node for node in frame.inputs() if node.target in names]


def _with_form(found: Document, form: Form) -> Document:
    """Returns the document with the form of the calls that its graphs are valid for."""
    return Document({**found.content, "form": encoded_form(form)}, found.tensors, found.modules)


def encoded_options(options: ExtractionOptions) -> dict[str, Any]:
    """Returns the JSON of options, with names in place of functions and classes."""
    kept: dict[str, Any] = {}
    dropped: dict[str, str] = {}
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        if option.name == "decompose" and value is not None:
            value = tuple(decomposition.name for decomposition in chosen_decompositions(value).values())
        try:
            kept[option.name] = {"set": sorted(map(str, value))} if _is_text_set(value) else encoded(value)
        except UnstorableError:
            dropped[option.name] = _named(value)
    return {"kept": kept, "dropped": {name: text for name, text in dropped.items() if text}}


def _is_text_set(value: Any) -> bool:
    return isinstance(value, (set, frozenset)) and all(isinstance(item, str) for item in value)


def _named(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_named(key)}: {_named(item)}" for key, item in value.items())
    if isinstance(value, (set, frozenset, list, tuple)):
        return ", ".join(sorted(map(_named, value)))
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
