"""What the frames of a run returned, kept so that later runs need not compute it again.

    FrameTree        all frames that were ever seen, each told by its caller, its module and its number there
    ├── Recording     a run that notes when each frame ended, and keeps what some of them returned (`frame_recording`)
    └── Replay        a run in which some frames return what was kept, and do not run, or do only part of their work

A frame is told at run time, not by the capture: on other inputs a model may call its modules otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
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
        module: Its module; `None` for the one above the model.
        place: How it is reached: by module (its id) and number, from the model on.
        children: The frames that it calls, by module (its id) and number.
        is_open: Whether what it calls is to be told apart: it holds a value that will be patched.
        ended: When its `forward` returned, by the clock of the recording; `NEVER` for one that was not seen to.
        value: What it returned, if that was kept.
        pair: What it was given and what it returned, where both are one tensor, and that was kept.
        problem: Why it cannot be left out of a run, in words; `None` where it can.
        is_written_later: Whether somebody writes into what it returned: each run needs a copy of its own.
    """

    module: Module | None
    place: tuple[tuple[int, int], ...] = ()
    children: dict[tuple[int, int], FrameNode] = field(default_factory=dict)
    is_open: bool = False
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

    def walk(self) -> Iterator[FrameNode]:
        """Yields this frame and all below it."""
        yield self
        for child in self.children.values():
            yield from child.walk()


class FrameTree:
    """All frames of a model that were seen.

    Attributes:
        root: The frame above the model.
        clock: Counts what happens in a recording.
    """

    def __init__(self) -> None:
        self.root = FrameNode(None, is_open=True)
        self.clock = 0

    def tick(self) -> int:
        """Returns the time, which never comes twice."""
        self.clock += 1
        return self.clock

    def replayable(self, until: float, among: Container[FrameNode] | None = None) -> list[FrameNode]:
        """Returns the outermost frames that had ended by a time, and may be left out of a run (of those `among`)."""
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


class FrameStack:
    """The frames that run, innermost last."""

    def __init__(self, tree: FrameTree) -> None:
        self.running = [RunningFrame(tree.root)]

    def push(self, module: Module) -> RunningFrame:
        caller = self.running[-1]
        number = caller.counts.get(id(module), 0)
        caller.counts[id(module)] = number + 1
        running = RunningFrame(caller.node.child(module, number))
        self.running.append(running)
        return running


StandIn = Callable[..., Any]
"""What runs in place of a `forward`, which it is given first."""


class Replay:
    """Leaves frames out, in whole or in part.

    Args:
        tree: The frames.
        values: What each frame returns that is left out.
        stand_ins: What runs in place of others.
    """

    def __init__(
        self, tree: FrameTree, values: Mapping[FrameNode, Any], stand_ins: Mapping[FrameNode, StandIn] | None = None
    ) -> None:
        self._tree = tree
        self._stack = FrameStack(tree)
        self._values = values
        self._stand_ins = stand_ins or {}

    def modules(self) -> list[Module]:
        """Returns the modules of which calls need be seen: those of its frames, and all that call one of these."""
        ids = {id(node.module) for node in (*self._values, *self._stand_ins)}
        found: dict[int, Module] = {}
        _callers(self._tree.root, ids, found)
        return list(found.values())

    def begin(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        node = self._stack.push(module).node
        if node not in self._values:
            stand_in = self._stand_ins.get(node)
            return None if stand_in is None else partial(stand_in, forward)
        # The caller may put more into a list that it is given, or write into a dict.
        value = with_own_containers(self._values[node])
        return lambda *_args, **_kwargs: value

    def returned(self, output: Any) -> None:
        pass

    def end(self) -> None:
        self._stack.running.pop()


def _callers(node: FrameNode, ids: set[int], found: dict[int, Module]) -> bool:
    """Collects the modules of these ids, and those that call them; says whether there are some in this frame."""
    is_one = node.module is not None and id(node.module) in ids
    below = [_callers(child, ids, found) for child in node.children.values()]
    if (is_one or any(below)) and node.module is not None:
        found[id(node.module)] = node.module
    return is_one or any(below)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a value made of containers."""
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor))


def own_tensors(value: Any) -> Any:
    """Returns a value made of containers with copies of its tensors."""
    return mapped(value, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
