"""Recorded results of module calls ("frames"), which later runs reuse instead of computing them again.

    FrameTree             all frames that were seen, each identified by its caller, its module and its number there
    ├── FrameRecording    a run that notes when each frame ended, and keeps what some of them returned
    └── FrameReplay       a run in which some frames return what was kept, or do only a part of their work

Frames are identified during the run, not by the capture: on other inputs a model may call its modules differently.
`frames_seen` gives one of the two to a run.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import Module

from graphpatch_notebook.capture.held_values import all_modules, memory_of, plain_tensors
from graphpatch_notebook.capture.inputs import ExampleInputs
from graphpatch_notebook.capture.observers import original_forward
from graphpatch_notebook.checks.hooks import is_inert
from graphpatch_notebook.checks.model_state import ModuleState
from graphpatch_notebook.torch_compat import version_of, without_torch_functions
from graphpatch_notebook.values import IMMUTABLE, mapped, readable_children, with_own_containers

NEVER = float("inf")


@dataclass(eq=False, slots=True)
class FrameNode:
    """One frame, the same one in all runs."""

    module: Module | None  # its module; `None` for the frame above the model
    place: tuple[tuple[int, int], ...] = ()  # the calls from the model down to it: module (its id) and number of each
    # The frames that it calls, by module (its id) and number.
    children: dict[tuple[int, int], FrameNode] = field(default_factory=dict)
    # Whether the frames that it calls are recorded one by one: it holds a value that will be patched.
    is_open: bool = False
    began: float = NEVER  # when it was called, by the clock of the recording; `NEVER` if that was not seen
    ended: float = NEVER  # when its `forward` returned
    value: Any = None  # what it returned, if that was kept
    pair: tuple[Tensor, Tensor] | None = None  # its input and its output, if each is one tensor, and these were kept
    problem: str | None = "it was not recorded"  # why a run cannot leave it out; `None` if it can
    is_written_later: bool = False  # whether the model writes into what it returned: then each run needs a copy

    def child(self, module: Module, number: int) -> FrameNode:
        """Returns the frame of the call of `module` with that number in this frame."""
        key = (id(module), number)
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = FrameNode(module, (*self.place, key))
        return found

    def walk(self) -> list[FrameNode]:
        """Returns this frame and all below it, each before those that it calls."""
        found = [self]
        for node in found:
            found += node.children.values()
        return found


class FrameTree:
    """All observed frames of a model."""

    def __init__(self) -> None:
        self.root = FrameNode(None, is_open=True)  # above the model
        self.clock = 0  # the number of events in the recording so far

    def tick(self) -> int:
        """Returns a time that is later than all earlier ones."""
        self.clock += 1
        return self.clock

    def modules_around(self, nodes: Iterable[FrameNode]) -> list[Module]:
        """Returns the modules whose calls must be observed to identify some frames: their modules, and all callers."""
        ids = {id(node.module) for node in nodes}
        found: dict[int, Module] = {}
        for node in self.root.walk()[:0:-1]:  # callees first
            if id(node.module) in ids or any(key[0] in found for key in node.children):
                assert node.module is not None
                found[id(node.module)] = node.module
        return list(found.values())

    def replayable(self, until: float, among: Container[FrameNode] | None = None) -> list[FrameNode]:
        """Returns the outermost frames (of those `among`) that ended before a time and that a run can skip."""
        found: list[FrameNode] = []
        frames = list(self.root.children.values())
        while frames:
            frame = frames.pop()
            is_wanted = among is None or frame in among
            if frame.problem is None and frame.ended < until and is_wanted:
                found.append(frame)
            elif frame.is_open:
                frames += frame.children.values()
        return found


@dataclass(eq=False, slots=True)
class _RunningFrame:
    node: FrameNode
    counts: dict[int, int] = field(default_factory=dict)
    given: ExampleInputs | None = None
    change: str | None = None
    has_returned: bool = False
    is_paired: bool = False
    is_kept: bool = False


class _SeenFrames:
    """The frames of a run that are running, innermost last."""

    def __init__(self, tree: FrameTree) -> None:
        self.running = [_RunningFrame(tree.root)]

    def push(self, module: Module) -> _RunningFrame:
        caller = self.running[-1]
        number = caller.counts.get(id(module), 0)
        caller.counts[id(module)] = number + 1
        running = _RunningFrame(caller.node.child(module, number))
        self.running.append(running)
        return running


# -- recording ---------------------------------------------------------------------------------------------------------


class FrameFlow(Protocol):
    """Observes frames with one tensor as input, and decides for which of them input and output are kept."""

    def begins(self, node: FrameNode, value: Tensor) -> bool:
        """Called when a frame with one tensor as input begins; returns whether to call `returns` or `fails`, too."""

    def returns(self, node: FrameNode, given: Tensor, output: Any) -> bool:
        """Called when such a frame returns; returns whether to keep its input and output."""

    def fails(self, node: FrameNode) -> None:
        """Called when such a frame ends in another way."""


class FrameRecording:
    """Records when each frame ends, what it changes, and the results of frames that a running frame calls.

    `tree` is where results are written to; its open frames must be marked already. `flow` decides for which frames, of
    those with one input tensor and one output tensor, both are kept. Changes by modules are found by `state`, if it is
    given: a snapshot of the model before.
    """

    def __init__(
        self, tree: FrameTree, model: Module, flow: FrameFlow | None = None, state: ModuleState | None = None
    ) -> None:
        self._tree = tree
        self._model = model
        self._flow = flow
        self._state = state
        self._stack = _SeenFrames(tree)
        self._kept: list[tuple[FrameNode, list[tuple[Tensor, int | None]]]] = []
        self._given: list[tuple[FrameNode, Tensor, int | None]] = []
        self.state_change: str | None = None  # what the run changes in the model; `None` for nothing

    def begin(self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_kept = self._stack.running[-1].node.is_open
        running = self._stack.push(module)
        running.node.began = self._tree.tick()
        with without_torch_functions():
            value = self._only_tensor(module, args, kwargs)
            if self._flow is not None and value is not None and not running.node.is_open:
                running.is_paired = True  # also if an interrupt arrives now
                running.is_paired = self._flow.begins(running.node, value)
            if is_kept or running.is_paired:
                running.given = ExampleInputs(args, kwargs)
            running.is_kept = is_kept

    def returned(self, output: Any) -> None:
        running = self._stack.running[-1]
        if not running.has_returned:
            running.has_returned = True
            with without_torch_functions():
                self._note(running, output)

    def _note(self, running: _RunningFrame, output: Any) -> None:
        node = running.node
        assert node.module is not None
        change = running.change
        if change is None and self._state is not None and not _is_stateless(node.module):
            found = next(self._state.changes(node.module), None)
            change = running.change = None if found is None else str(found)
        self.state_change = self.state_change or change
        node.ended = self._tree.tick()
        node.problem = change
        node.pair = None
        is_paired = self._is_paired(running, output)
        if running.given is None or change is not None:
            return
        problem = _problem_of_result(running.given, output)
        if running.is_kept:
            node.problem = problem
        if problem is not None:
            return
        kept = with_own_containers(own_tensors(output) if node.is_written_later else output)
        if running.is_kept:
            node.value = kept
        if is_paired:
            (tensor,) = running.given.values
            node.pair = (tensor, kept)
            self._given.append((node, tensor, version_of(tensor)))
            for inner in node.walk():
                inner.pair = inner.pair if inner is node else None
        if running.is_kept or is_paired:
            self._kept.append((node, [(tensor, version_of(tensor)) for tensor in plain_tensors(output)]))

    def _only_tensor(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Returns the input of a module with weights, if that is one tensor of floats."""
        if self._flow is None or len(args) + len(kwargs) != 1:
            return None
        (value,) = args or kwargs.values()
        if type(value) is not Tensor or value.dim() < 2 or not value.is_floating_point():
            return None
        return value if _holds_weights(module) else None

    def _is_paired(self, running: _RunningFrame, output: Any) -> bool:
        if not running.is_paired:
            return False
        assert self._flow is not None
        assert running.given is not None
        running.is_paired = False
        return self._flow.returns(running.node, running.given.values[0], output)

    def end(self) -> None:
        running = self._stack.running.pop()
        if running.is_paired and self._flow is not None:
            self._flow.fails(running.node)
        caller = self._stack.running[-1]
        caller.change = caller.change or running.change

    def close(self) -> bool:
        """Ends the recording; returns whether the model wrote into the result of a frame: if so, record again."""
        is_spoilt = False
        hooked = [module for module in all_modules(self._model) if has_hooks(module)]
        if self.state_change is None and self._state is not None:
            found = next(self._state.changes(), None)
            self.state_change = None if found is None else str(found)
        for node, marks in self._kept:
            if not node.is_written_later and any(version_of(tensor) != version for tensor, version in marks):
                node.is_written_later = is_spoilt = True
            inside = all_modules(node.module) if hooked and node.module is not None else ()
            if any(module is not node.module and module in hooked for module in inside):
                node.problem, node.value, node.pair = "there are hooks on modules inside it", None, None
        for node, tensor, version in self._given:
            if version_of(tensor) != version:
                node.pair = None
        return is_spoilt


def _holds_weights(module: Module) -> bool:
    if any(weight is not None for weight in module._parameters.values()):
        return True
    return any(_holds_weights(child) for child in module._modules.values() if child is not None)


# -- side effects: a run can only skip frames without any --------------------------------------------------------------

_STATELESS = (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Softmax)


def _is_stateless(module: Module) -> bool:
    """Whether a module is one of torch's own that never changes when it runs."""
    if type(module) not in _STATELESS:
        return False
    return getattr(original_forward(module), "__func__", None) is type(module).forward  # not replaced


def does_nothing(module: Module) -> bool:
    """Whether a module is one of torch's own that returns what it is given."""
    return type(module) in (nn.Dropout, nn.Identity) and not module.training and _is_stateless(module)


def _problem_of_result(given: ExampleInputs, output: Any) -> str | None:
    """Returns why a run cannot skip a frame with these inputs and this result; `None` if it can.

    Hooks of modules inside it are another reason: see `close`.
    """
    storages = set()
    for value in given.values:
        if isinstance(value, Tensor):
            storages.add(storage_of(value))
            if value.is_inference():
                return "it is given a tensor of inference mode, for which torch does not count writes"
        elif not isinstance(value, IMMUTABLE) and readable_children(value) is None and not callable(value):
            return f"it may change the {type(value).__name__} that it is given"
    if (change := given.change()) is not None or not given.are_all_seen:
        return f"it changes what it is given: {change or 'too many values to compare'}"
    for leaf in leaves_of(output):
        if isinstance(leaf, Tensor):
            # If the sweep needs no gradients, the model itself uses them.
            if leaf.requires_grad:
                return "gradients flow through it"
            if leaf.is_inference() or storage_of(leaf) in storages:
                return "it returns what it is given"
        elif not isinstance(leaf, IMMUTABLE):
            return f"it returns an object of type {type(leaf).__name__}"
    return None


def has_hooks(module: Module) -> bool:
    """Whether a module has forward hooks that may have an effect."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    return bool(before or after) and not all(map(is_inert, (*before.values(), *after.values())))


# -- replaying ---------------------------------------------------------------------------------------------------------


Substitute = Callable[..., Any]
"""What runs in place of a `forward`: it is given the `forward`, then the arguments."""


class FrameReplay:
    """Skips frames of a run, which return known values, or runs substitutes in place of their `forward`."""

    def __init__(
        self,
        tree: FrameTree,
        values: Mapping[FrameNode, Any],
        substitutes: Mapping[FrameNode, Substitute] | None = None,
    ) -> None:
        self._tree = tree
        self._stack = _SeenFrames(tree)
        self._values = values
        self._substitutes = substitutes or {}

    def modules(self) -> list[Module]:
        """Returns the modules whose calls must be observed: those of its frames, and all callers of these."""
        return self._tree.modules_around((*self._values, *self._substitutes))

    def begin(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        node = self._stack.push(module).node
        if node not in self._values:
            substitute = self._substitutes.get(node)
            return None if substitute is None else partial(substitute, forward)
        # The caller may append to a list that it is given, or write into a dict.
        value = with_own_containers(self._values[node])
        return lambda *_args, **_kwargs: value

    def returned(self, output: Any) -> None:
        pass

    def end(self) -> None:
        self._stack.running.pop()


# -- values made of containers -----------------------------------------------------------------------------------------

_LEAVES = (Tensor, *IMMUTABLE)


def leaves_of(value: Any) -> Iterator[Any]:
    """Yields what a value made of containers holds: tensors, and everything else that is not a container."""
    inside = None if isinstance(value, _LEAVES) else readable_children(value)
    if inside is None:
        yield value
        return
    for _, child in inside:
        yield from leaves_of(child)


def storage_of(tensor: Tensor) -> Any:
    """Returns a key that identifies the memory of a tensor."""
    return memory_of(tensor) or id(tensor)


def own_tensors(value: Any) -> Any:
    """Returns a value made of containers, with copies of its tensors."""
    return mapped(value, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
