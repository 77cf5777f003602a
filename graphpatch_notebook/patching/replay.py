"""Recorded results of module calls ("frames"), which later runs reuse instead of computing them again.

    FrameTree             all frames that were seen, each identified by its caller, its module and its number there
    ├── FrameRecording    a run that keeps when each frame ended, and what some of them returned
    └── FrameReplay       a run in which some frames return what was kept, or do only a part of their work

Frames are identified during the run, not by the capture: on other inputs a model may call its modules differently.
`frames_seen` gives one of the two to a run.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import Module

from graphpatch_notebook.patching.model_state import is_inert
from graphpatch_notebook.torch_compat import version_of, without_torch_functions
from graphpatch_notebook.values import ABSENT, IMMUTABLE, mapped, readable_children, with_own_containers

NEVER = float("inf")


class TensorCall(NamedTuple):
    """A call of a module with one tensor, which returned one."""

    given: Tensor
    returned: Tensor
    keyword: str | None  # the name of the argument, if it was given by keyword


@dataclass(eq=False, slots=True)
class FrameNode:
    """One frame, the same one in all runs."""

    module: Module | None  # `None` for the frame above the model
    # The calls from the model down to it: the id of each module, and the number of its call in its caller.
    place: tuple[tuple[int, int], ...] = ()
    children: dict[tuple[int, int], FrameNode] = field(default_factory=dict)
    # Whether the frames that it calls are recorded one by one: it holds a value that will be patched.
    is_open: bool = False
    ended: float = NEVER  # when its `forward` returned, by the clock of the recording
    value: Any = ABSENT  # what it returned, if runs may return that instead of computing it
    call: TensorCall | None = None  # for frames that may be computed in parts

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
        self.clock = 0

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

    def replayable(self, until: float, among: Container[FrameNode]) -> list[FrameNode]:
        """Returns the outermost frames of those `among` that ended before a time."""
        found: list[FrameNode] = []
        frames = list(self.root.children.values())
        while frames:
            frame = frames.pop()
            if frame.ended < until and frame in among:
                found.append(frame)
            elif frame.is_open:
                frames += frame.children.values()
        return found


@dataclass(eq=False, slots=True)
class _RunningFrame:
    node: FrameNode
    counts: dict[int, int] = field(default_factory=dict)
    given: Any = None  # what it was given
    versions: list[tuple[int, int | None]] | None = None  # the same, with how often each had been written into
    call: tuple[Tensor, str | None] | None = None
    has_returned: bool = False


class _RunningFrames:
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


class FrameRecording:
    """Records when frames end, and what those return that an open frame calls.

    Args:
        tree: Receives the records; its open frames must be marked already.
        is_kept: Whether to keep the call of a frame with one tensor, too, if no frame in it holds a patched value.
    """

    def __init__(self, tree: FrameTree, is_kept: Callable[[FrameNode, Tensor], bool] = lambda *_: False) -> None:
        self._tree, self._is_kept = tree, is_kept
        self._stack = _RunningFrames(tree)

    def begin(self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_replayable = self._stack.running[-1].node.is_open
        running = self._stack.push(module)
        with without_torch_functions():
            if is_replayable:
                running.given, running.versions = (args, kwargs), _versions((args, kwargs))
            if not running.node.is_open and len(args) + len(kwargs) == 1:
                (value,) = args or kwargs.values()
                if type(value) is Tensor and self._is_kept(running.node, value):
                    running.call = value.clone(), next(iter(kwargs), None)

    def returned(self, output: Any) -> None:
        running = self._stack.running[-1]
        if running.has_returned:  # this is the output after patches
            return
        running.has_returned = True
        node = running.node
        node.ended = self._tree.tick()
        with without_torch_functions():
            # Copies, since the model may write into these later.
            if running.versions is not None and _is_replayable(running, output):
                node.value = own_tensors(output)
            if running.call is not None and type(output) is Tensor:
                given, keyword = running.call
                if output.shape[:-1] == given.shape[:-1]:
                    node.call = TensorCall(given, output.clone(), keyword)

    def end(self) -> None:
        self._stack.running.pop()


def _versions(given: Any) -> list[tuple[int, int | None]]:
    return [(id(leaf), version_of(leaf) if isinstance(leaf, Tensor) else None) for leaf in leaves_of(given)]


def _is_replayable(frame: _RunningFrame, output: Any) -> bool:
    """Whether a frame only computes its result from what it is given: it writes into none of that."""
    returned = leaves_of(output)
    return (
        _versions(frame.given) == frame.versions
        and all(isinstance(leaf, _LEAVES) or callable(leaf) for leaf in leaves_of(frame.given))  # else perhaps a cache
        and all(isinstance(leaf, _LEAVES) for leaf in returned)
        and not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in returned)
    )


def does_nothing(module: Module) -> bool:
    """Whether a module is one of torch's own that returns what it is given."""
    return type(module) in (nn.Dropout, nn.Identity) and not module.training


def has_hooks(module: Module) -> bool:
    """Whether a module has forward hooks that may have an effect."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    return bool(before or after) and not all(map(is_inert, (*before.values(), *after.values())))


Substitute = Callable[..., Any]
"""What runs in place of a `forward`: it is given the `forward`, the same for other values than those of the frame, then
the arguments."""


class FrameReplay:
    """Skips frames of a run, which return known values, or runs substitutes in place of their `forward`.

    Args:
        tree: All frames.
        values: What some frames return.
        substitutes: What runs in place of the `forward` of others.
        compared: Frames of which `on_return` is given what they return in this run.
        on_return: Is called when one of these returns.
    """

    def __init__(
        self,
        tree: FrameTree,
        values: Mapping[FrameNode, Any],
        substitutes: Mapping[FrameNode, Substitute],
        compared: Container[FrameNode] = (),
        on_return: Callable[[FrameNode, Any], None] = lambda *_: None,
    ) -> None:
        self._stack = _RunningFrames(tree)
        self._values, self._substitutes = values, substitutes
        self._compared, self._on_return = compared, on_return
        self._is_apart = False  # whether a substitute computes other values than those of its frame

    def begin(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        running = self._stack.push(module)
        node = running.node
        if self._is_apart:
            return None
        if node not in self._values:
            substitute = self._substitutes.get(node)
            return None if substitute is None else partial(substitute, forward, partial(self._apart, running, forward))
        # The caller may append to a list that it is given, or write into a dict.
        value = with_own_containers(self._values[node])
        return lambda *_args, **_kwargs: value

    def _apart(self, running: _RunningFrame, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a `forward` for other values than those of its frame: the frames in it do not count."""
        self._is_apart = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._is_apart = False
            running.counts.clear()

    def returned(self, output: Any) -> None:
        running = self._stack.running[-1]
        if running.has_returned or self._is_apart:
            return
        running.has_returned = True
        if running.node in self._compared:
            self._on_return(running.node, output)

    def end(self) -> None:
        self._stack.running.pop()


# -- values made of containers -----------------------------------------------------------------------------------------

_LEAVES = (Tensor, *IMMUTABLE)


def leaves_of(value: Any) -> list[Any]:
    """Returns what a value made of containers holds: tensors, and everything else that is not a container."""
    if isinstance(value, _LEAVES):
        return [value]
    inside = value if type(value) in (tuple, list) else value.values() if type(value) is dict else None
    if inside is None:
        children = readable_children(value)
        if children is None:
            return [value]
        inside = [child for _, child in children]
    found: list[Any] = []
    for child in inside:
        if isinstance(child, _LEAVES):  # the usual case, without another call
            found.append(child)
        else:
            found += leaves_of(child)
    return found


def own_tensors(value: Any) -> Any:
    """Returns a value made of containers, with copies of its tensors."""
    return mapped(value, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
