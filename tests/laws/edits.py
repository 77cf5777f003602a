"""The oracles of laws 3 and 6: edits of a model's values by what torch itself offers, and the patches that equal them.

Each edit is said twice: once as a patch on a node path, once as a context manager that does the same to a model that
the package never saw (by forward hooks, by overwriting a parameter, by wrapping a forward).
"""

from __future__ import annotations

import copy
import inspect
import random
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from graphpatch_notebook import AddPatch, Patch, ReplacePatch, ZeroPatch
from graphpatch_notebook.capture.records import Frame, Node, Ref, Structure
from graphpatch_notebook.inspection.resolution import NodeMeta
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.paths import parse_path
from graphpatch_notebook.values import TensorSpec
from tests.laws.captures import Capture, capture_of, outcome, run
from tests.zoo import Call, Case


@dataclass(frozen=True)
class Change:
    """What is done to a tensor: set to zero, added to, or replaced; with a number or a tensor, whole or in a slice."""

    kind: str
    value: Tensor | float = 0.0
    slice: Any = None

    def patch(self, **settings: Any) -> Patch:
        if self.kind == "zero":
            return ZeroPatch(slice=self.slice, **settings)
        kind = AddPatch if self.kind == "add" else ReplacePatch
        return kind(value=self.value, slice=self.slice, **settings)

    def edit(self, tensor: Tensor) -> Tensor:
        """What a person would write into a hook."""
        result = tensor.clone()
        self.write(result)
        return result

    def write(self, tensor: Tensor) -> None:
        index = ... if self.slice is None else self.slice
        if self.kind == "zero":
            tensor[index] = 0
        elif self.kind == "add" and self.slice is None:
            tensor += self.value  # written into a view, its gradient would be laid out, and so rounded, in another way
        elif self.kind == "add":
            tensor[index] += self.value
        else:
            tensor[index] = self.value

    def again(self) -> Change:
        """The same change with a value tensor of its own, which requires a gradient where it can have one."""
        if not isinstance(self.value, Tensor) or not self.value.dtype.is_floating_point:
            return self
        return Change(self.kind, self.value.detach().clone().requires_grad_(), self.slice)


def random_change(shape: torch.Size, dtype: torch.dtype, rng: random.Random) -> Change:
    """A change that a tensor of this shape and dtype can take; indices and lengths keep a valid value."""
    if dtype == torch.bool:
        return Change("zero")
    if not (dtype.is_floating_point or dtype.is_complex):
        return Change("replace", 1)
    kind = rng.choice(["zero", "add", "replace"])
    if kind == "zero":
        return Change(kind)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return Change(
        kind, torch.randn(shape, generator=generator, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
    )


Oracle: TypeAlias = Callable[[Change], AbstractContextManager[None]]


@dataclass(frozen=True)
class Edit:
    """One edit: where it is (as a node path), what it is, and how to make it in a model without the package."""

    path: str
    change: Change
    oracle: Oracle

    def by_patch(self, capture: Capture, call: Call, change: Change | None = None, **settings: Any) -> Any:
        with capture.pg.patch({self.path: (change or self.change).patch(**settings)}):
            return outcome(capture.pg, call)

    def by_torch(self, capture: Capture, call: Call, change: Change | None = None) -> Any:
        with self.oracle(change or self.change):
            return outcome(capture.reference, call)


# -- how to edit a model without the package --------------------------------------------------------------------------


def edited(value: Any, dig: tuple[str, ...], edit: Callable[[Tensor], Tensor]) -> Any:
    """Returns a container like `value` in which the tensor at `dig` (`sub_0`, keys, field names) is edited."""
    if not dig:
        return edit(value)
    key, rest = dig[0], dig[1:]
    if isinstance(value, (tuple, list)):
        items: Any = list(value)
        position = int(key.removeprefix("sub_"))
        items[position] = edited(items[position], rest, edit)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    result = copy.copy(value)
    if isinstance(value, deque):
        position = int(key.removeprefix("sub_"))
        result[position] = edited(value[position], rest, edit)
    elif isinstance(value, Mapping):
        result[next(k for k in value if str(k) == key)] = edited(
            value[key] if key in value else value[int(key)], rest, edit
        )
    else:
        object.__setattr__(result, key, edited(getattr(value, key), rest, edit))
    return result


def output_edited(module: nn.Module, dig: tuple[str, ...], change: Change) -> RemovableHandle:
    """By a forward hook, registered last."""
    return module.register_forward_hook(lambda module, args, output: edited(output, dig, change.edit))


def input_edited(module: nn.Module, name: str, dig: tuple[str, ...], change: Change) -> RemovableHandle:
    """By a forward pre-hook, registered last, on the parameter `name` of the module's forward."""

    def edit_argument(module: nn.Module, args: Any, kwargs: Any) -> Any:
        parameters = inspect.signature(module.forward).parameters
        position = list(parameters).index(name)
        if name in kwargs:
            kwargs = {**kwargs, name: edited(kwargs[name], dig, change.edit)}
        elif parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            kwargs = edited(kwargs, dig, change.edit)
        elif parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            args = (*args[:position], *edited(args[position:], dig, change.edit))
        else:
            args = edited(args, (f"sub_{position}", *dig), change.edit)
        return args, kwargs

    return module.register_forward_pre_hook(edit_argument, with_kwargs=True)


@contextmanager
def tensor_edited(tensor: Tensor, change: Change) -> Iterator[None]:
    """By overwriting a parameter or buffer of a copy of the model; it gets its values back afterwards."""
    before = tensor.detach().clone()
    try:
        with torch.no_grad():
            change.write(tensor.data)
        yield
    finally:
        with torch.no_grad():
            tensor.data.copy_(before)


@contextmanager
def return_edited(module: nn.Module, is_in_place: bool, change: Change) -> Iterator[None]:
    """By a forward on the instance that edits what the module's own forward returns."""
    had_own = "forward" in module.__dict__
    forward = module.forward

    def edited_forward(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if not is_in_place:
            return change.edit(output)
        output.copy_(change.edit(output))
        return output

    module.__dict__["forward"] = edited_forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if had_own:
            module.__dict__["forward"] = forward


def each_edit(case: Case, make: Callable[[Capture], Iterable[Edit]]) -> Iterator[tuple[Capture, Edit]]:
    """Yields the edits that `make` finds, each with the capture to make it on."""
    capture = capture_of(case)
    edits = list(make(capture))
    for index in range(len(edits)):
        yield capture, edits[index]
        if case.mutates_state:
            capture = capture_of(case)
            edits = list(make(capture))


# -- which edits can be made of a captured model ----------------------------------------------------------------------


def calls_of_modules(capture: Capture, call: Call) -> Counter[int]:
    """How often each module of the reference is called to an end (by `Module.__call__`), by the id of the module."""
    counts: Counter[int] = Counter()
    with register_module_forward_hook(lambda module, args, output: counts.update([id(module)])):
        run(capture.reference, call)
    run(capture.pg, call)  # model and reference stay equal where runs change them
    return counts


def frames_with_hooks(capture: Capture, call: Call) -> list[Frame]:
    """The frames whose modules are called once in all, by a call that runs hooks."""
    counts = calls_of_modules(capture, call)
    return [
        frame
        for frame in capture.frames_called_once()
        if not isinstance(frame.module, torch.jit.ScriptModule) and counts[id(capture.counterpart(frame.module))] == 1
    ]


def boundary_edits(capture: Capture, frame_count: int) -> Iterator[Edit]:
    """Edits of an output and of up to two inputs of some frames, the whole model among them, by hooks."""
    rng = capture.random("boundary")
    frames = frames_with_hooks(capture, capture.case.example())
    chosen = [frame for frame in frames if frame.parent is None] + rng.sample(frames, min(frame_count, len(frames)))
    for frame in {id(frame): frame for frame in chosen}.values():
        for meta, oracle in _at_boundary(capture, frame, rng):
            yield Edit(meta.path, random_change(meta.shape, meta.dtype, rng), oracle)


def variant_edits(capture: Capture, call_name: str, frame_count: int) -> Iterator[Edit]:
    """The same on a call other than the example: of floating-point values only, and by numbers, in slices."""
    rng = capture.random(call_name)
    frames = frames_with_hooks(capture, capture.call(call_name))
    for frame in rng.sample(frames, min(frame_count, len(frames))):
        for meta, oracle in _at_boundary(capture, frame, rng):
            if meta.dtype.is_floating_point:
                index = rng.choice([None, (..., 0), 0])
                yield Edit(meta.path, Change(rng.choice(["zero", "add", "replace"]), 0.5, index), oracle)


def input_edits(capture: Capture, frame_count: int) -> Iterator[tuple[str, Oracle]]:
    """Inputs of some frames that hold floating-point tensors, and the hooks that edit these."""
    rng = capture.random("inputs")
    frames = frames_with_hooks(capture, capture.case.example())
    for frame in rng.sample(frames, min(frame_count, len(frames))):
        for meta, oracle in _at_boundary(capture, frame, rng):
            if meta.kind == "input" and meta.dtype.is_floating_point and not frame.names[meta.name].is_mutated_later:
                yield meta.path, oracle


def _at_boundary(capture: Capture, frame: Frame, rng: random.Random) -> Iterator[tuple[NodeMeta, Oracle]]:
    module = capture.counterpart(frame.module)
    where = ".".join(frame.path)
    metas = [meta for meta in capture.pg.nodes.values() if meta.frame_path == where and meta.shape is not None]
    outputs = [meta for meta in metas if meta.kind == "output"]
    inputs = [meta for meta in metas if meta.kind == "input"]
    for meta in rng.sample(outputs, min(1, len(outputs))):
        yield meta, partial(output_edited, module, parse_path(meta.path).dig)
    for meta in rng.sample(inputs, min(2, len(inputs))):
        yield meta, partial(input_edited, module, frame.names[meta.name].target, parse_path(meta.path).dig)


def tensor_edits(capture: Capture, count: int) -> Iterator[Edit]:
    """Edits of parameters and buffers that are used in one frame only, and that it does not hand out."""
    rng = capture.random("tensors")
    every = [(frame, node) for frame in captured(capture.pg).root.walk() for node in frame.nodes]
    nodes = [(frame, node) for frame, node in every if node.kind in _HELD]
    uses = Counter(id(_held(frame.module, node)) for frame, node in nodes)
    # Some modules are given another one, and read its parameters: they use them, too, and have no node for them.
    uses.update(id(node.target()) for _, node in every if isinstance(node.target, weakref.ref))
    once = [
        (frame, node)
        for frame, node in nodes
        if uses[id(_held(frame.module, node))] == 1 and not _count(frame.output, node)
    ]
    for frame, node in rng.sample(once, min(count, len(once))):
        tensor = _held(capture.counterpart(frame.module), node)
        yield _edit(capture, _path(frame, node), rng, partial(tensor_edited, tensor))


def returned_op_edits(capture: Capture, count: int) -> Iterator[Edit]:
    """Edits of ops that are the very output of their frame and nothing else, by wrapping the forward."""
    rng = capture.random("returned ops")
    found = []
    for frame in capture.frames_called_once():
        ref = frame.output
        if isinstance(ref, Ref) and not ref.dig and ref.node.kind == "op" and _uses(frame, ref.node) == 1:
            found.append((frame, ref.node))
    for frame, node in rng.sample(found, min(count, len(found))):
        module = capture.counterpart(frame.module)
        yield _edit(capture, _path(frame, node), rng, partial(return_edited, module, node.is_in_place))


def argument_op_edits(capture: Capture, count: int) -> Iterator[Edit]:
    """Edits of ops whose value is an argument of one submodule call and nothing else, by a pre-hook of that one."""
    rng = capture.random("argument ops")
    found = []
    for frame in frames_with_hooks(capture, capture.case.example()):
        if frame.parent is None or frame.call is None:
            continue
        for node in frame.inputs():
            given = _argument(frame, node)
            is_op = isinstance(given, Ref) and not given.dig and given.node.kind == "op" and not given.node.is_in_place
            if is_op and isinstance(given.node.spec, TensorSpec) and _uses(frame.parent, given.node) == 1:
                found.append((frame, node, given.node))
    for frame, node, op in rng.sample(found, min(count, len(found))):
        module = capture.counterpart(frame.module)
        yield _edit(capture, _path(frame.parent, op), rng, partial(input_edited, module, node.target, ()))


_HELD = ("parameter", "buffer")


def _edit(capture: Capture, path: str, rng: random.Random, oracle: Oracle) -> Edit:
    meta = capture.pg.nodes[path]
    assert meta.shape is not None
    assert meta.dtype is not None
    return Edit(meta.path, random_change(meta.shape, meta.dtype, rng), oracle)


def _path(frame: Frame | None, node: Node) -> str:
    assert frame is not None
    return ".".join((*frame.path, node.name))


def _held(module: nn.Module, node: Node) -> Tensor:
    value: Any = module
    for name in node.target.split("."):
        value = getattr(value, name)
    return value


def _uses(frame: Frame | None, node: Node) -> int:
    """How often the frame uses the value of a node: in arguments, and in its output."""
    assert frame is not None
    found = sum(_count(other.args, node) + _count(other.kwargs, node) for other in frame.nodes)
    return found + _count(frame.output, node)


def _count(value: Any, node: Node) -> int:
    if isinstance(value, Ref):
        return int(value.node is node)
    if isinstance(value, Mapping):
        return sum(_count(item, node) for item in value.values())
    if isinstance(value, slice):
        return _count((value.start, value.stop, value.step), node)
    if isinstance(value, (tuple, list)):
        return sum(_count(item, node) for item in value)
    if isinstance(value, Structure):
        return _count([child for _, child in value.children], node)
    return 0


def _argument(frame: Frame, node: Node) -> Any:
    """What the calling frame gave for an input: a `Ref` to one of its nodes, or something else."""
    assert frame.call is not None
    bound = inspect.signature(frame.module.forward).bind(*frame.call.args, **frame.call.kwargs)
    return bound.arguments.get(node.target)
