"""Results of frames, kept so that later runs do not compute them again.

    FrameTree             all frames that were seen, each identified by its caller, its module and its number there
    ├── FrameRecording    a run that notes when each frame ended, and keeps what some of them returned
    └── FrameReplay       a run in which some frames return what was kept, or do only a part of their work

Frames are identified during the run, not by the capture: on other inputs a model may call its modules differently.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.execution.replay.frame_effects import GivenValues, leaves_of
from graphpatch_notebook.values import mapped, with_own_containers

NEVER = float("inf")


@dataclass(eq=False, slots=True)
class FrameNode:
    """One frame, the same one in all runs.

    Attributes:
        module: Its module; `None` for the frame above the model.
        place: The calls from the model down to it: module (its id) and number of each.
        children: The frames that it calls, by module (its id) and number.
        is_open: Whether the frames that it calls are recorded one by one: it holds a value that will be patched.
        began: When it was called, by the clock of the recording; `NEVER` if that was not seen.
        ended: When its `forward` returned.
        value: What it returned, if that was kept.
        pair: Its input and its output, if each is one tensor, and these were kept.
        problem: Why a run cannot leave it out; `None` if it can.
        is_written_later: Whether the model writes into what it returned: then each run needs a copy.
    """

    module: Module | None
    place: tuple[tuple[int, int], ...] = ()
    children: dict[tuple[int, int], FrameNode] = field(default_factory=dict)
    is_open: bool = False
    began: float = NEVER
    ended: float = NEVER
    value: Any = None
    pair: tuple[Tensor, Tensor] | None = None
    problem: str | None = "it was not recorded"
    is_written_later: bool = False

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
    """All observed frames of a model.

    Attributes:
        root: The frame above the model.
        clock: The number of events in the recording so far.
    """

    def __init__(self) -> None:
        self.root = FrameNode(None, is_open=True)
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
class RunningFrame:
    node: FrameNode
    counts: dict[int, int] = field(default_factory=dict)
    given: GivenValues | None = None
    change: str | None = None
    has_returned: bool = False
    is_paired: bool = False
    is_kept: bool = False


class SeenFrames:
    """The frames of a run that are running, innermost last."""

    def __init__(self, tree: FrameTree) -> None:
        self.running = [RunningFrame(tree.root)]

    def push(self, module: Module) -> RunningFrame:
        caller = self.running[-1]
        number = caller.counts.get(id(module), 0)
        caller.counts[id(module)] = number + 1
        running = RunningFrame(caller.node.child(module, number))
        self.running.append(running)
        return running


Substitute = Callable[..., Any]
"""What runs in place of a `forward`: it is given the `forward`, then the arguments."""


class FrameReplay:
    """Skips frames of a run, wholly or in part.

    Args:
        tree: The frames.
        values: What the frames that are left out return.
        substitutes: What runs in place of other frames.
    """

    def __init__(
        self,
        tree: FrameTree,
        values: Mapping[FrameNode, Any],
        substitutes: Mapping[FrameNode, Substitute] | None = None,
    ) -> None:
        self._tree = tree
        self._stack = SeenFrames(tree)
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


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a value made of containers."""
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor))


def own_tensors(value: Any) -> Any:
    """Returns a value made of containers, with copies of its tensors."""
    return mapped(value, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
