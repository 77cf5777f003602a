"""The stream, and the layers along it: a chain of additions, each of what is computed from the stream before it.

It does not matter which module adds. The layers are the steps of the list, or of the loop, that runs along the chain:
members of one list that add, pairs in a list, the n-th members of two lists, or what repeats in one list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from string import digits
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from graphpatch_notebook.capture.records import CallNode, Frame, Node
from graphpatch_notebook.components.flow import Axes, Flow, Place, Step, Trails, Value
from graphpatch_notebook.components.operations import ADDITIONS
from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.paths import format_path

if TYPE_CHECKING:
    from graphpatch_notebook.components.writes import Write

Said: TypeAlias = "Sequence[str | Sequence[str]]"
"""The layers, as a user says them: the paths of the modules of each."""


@dataclass(slots=True)
class Slice:
    """The nodes that compute a value, back to states of the stream and to what ran before."""

    inside: set[Node] = field(default_factory=set)
    outside: list[Value] = field(default_factory=list)
    states: set[Value] = field(default_factory=set)


def slice_of(flow: Flow, end: Value, is_state: Callable[[Value], bool], low: int) -> Slice:
    """Returns the nodes that compute a value, back to states, and to nodes that ran before the one numbered `low`."""
    found, waiting = Slice(), [end]
    while waiting:
        value = waiting.pop()
        if is_state(value):
            found.states.add(value)
        elif value.node in found.inside:
            continue
        elif value.node.kind in ("input", "constant") or flow.order[value.node] <= low:
            found.outside.append(value)
        else:
            found.inside.add(value.node)
            waiting += [*flow.reads(value.node), *flow.filled.get(value.node, ())]
    return found


@dataclass(eq=False)
class Layer:
    """One layer of a stack.

    Attributes:
        frame: The frame that is the layer, or that runs it as a step of a loop.
        start, end: The stream at its input and at its output.
        steps: The trail from `start` to `end`.
        low: The number of the node that it begins after.
        axes: What the dimensions of the stream are.
        name: What the names of its components begin with.
        writes: What it adds to the stream, by name.
    """

    frame: Frame
    start: Place
    end: Place
    steps: list[Step]
    low: int
    axes: Axes = ()
    name: str = ""
    writes: dict[str, Write] = field(default_factory=dict)

    @property
    def states(self) -> list[Value]:
        """The values of the stream in the layer, in order."""
        return [self.start.value, *(step.result for step in self.steps)]


@dataclass(slots=True, eq=False)
class Stack:
    """The layers along one stream, in order.

    Attributes:
        name: Its name; empty if the model has one stack.
        frame: The frame that calls the layers.
        container: The attribute path of the list in that frame's module.
        layers: The layers by their number.
        unlike: The members of the list that do not add to their input, by number.
        tokens, positions: The embeddings of tokens (or of patches) and of positions at the start of the stream: it is
            their sum, up to norms and scalings.
        norm: The norm after the last layer.
        logits: What the model returns: the result of a linear map of the stream.
    """

    name: str
    frame: Frame
    container: str
    layers: dict[int, Layer]
    unlike: dict[int, Frame] = field(default_factory=dict)
    tokens: list[Value] = field(default_factory=list)
    positions: list[Value] = field(default_factory=list)
    norm: Value | None = None
    logits: Place | None = None

    @property
    def prefix(self) -> str:
        """What names of its components begin with."""
        return f"{self.name}." if self.name else ""

    @property
    def first(self) -> Layer:
        """The first layer."""
        return next(iter(self.layers.values()))

    @property
    def last(self) -> Layer:
        """The last layer."""
        return next(reversed(self.layers.values()))


@dataclass(slots=True, eq=False)
class _Unit:
    """One addition to a stream, with the module that computes what is added.

    Attributes:
        steps: The steps from the addition before; the last one adds.
        call: The call of that module; `None` if there is none.
        adds: Whether that module also adds it.
        code: The operations that compute what is added.
    """

    steps: list[Step]
    call: CallNode | None
    adds: bool
    code: tuple[Any, ...]

    @property
    def frame(self) -> Frame:
        """The frame of that module."""
        assert self.call is not None
        return self.call.frame


_Group: TypeAlias = "list[_Unit]"
_Stem: TypeAlias = "tuple[str, type | None]"
_Item = TypeVar("_Item")


def stacks_of(trails: Trails, said: Said | None = None) -> list[Stack]:
    """Returns the stacks of layers, in order of execution; with `said`, the one whose layers the user names."""
    finder = _Finder(trails)
    found = [finder.said(said)] if said else finder.found()
    if len(found) > 1:  # each is named by the path of its frame, and by the list if a frame has several
        frames = Counter(id(stack.frame) for stack in found)
        for stack in found:
            own = [stack.container.replace(".", "_")] if frames[id(stack.frame)] > 1 else []
            stack.name = ".".join([*stack.frame.path, *own])
    return found


class _Finder:
    def __init__(self, trails: Trails) -> None:
        self._trails = trails
        self._flow: Flow = trails.flow
        self._begin: dict[Value, Value] = {}  # of each state, where its stream begins
        self._steps: dict[Value, list[Step]] = {}  # from the state before
        self._depth: dict[Value, int] = {}
        self._slices: dict[Step, Slice] = {}  # of what is added and computed from the stream
        self._members: dict[tuple[Frame, _Stem], dict[int, Layer]] = {}  # of lists
        self._loops: list[Stack] = []
        self._alone: list[Stack] = []
        for node in self._flow.order:
            if node.kind == "op" and node.op in ADDITIONS:
                self._follow(Value(node))

    def _follow(self, result: Value) -> None:
        """Notes an addition to a stream, or of something that is computed from what it is added to."""
        flow, order = self._flow, self._flow.order
        reads = flow.reads(result.node)[:2]
        pairs = [pair for pair in (reads, reads[::-1]) if len(reads) == 2 and pair[0].size == result.size]
        found = [self._addition(result, *pair) for pair in pairs if result.is_float and len(result.shape) > 1]
        additions = [each for each in found if each is not None]
        if not additions:
            return
        part, steps = max(additions, key=lambda each: (bool(each[0].inside), order[each[1][0].source.node]))
        begin = self._begin.setdefault(steps[0].source, steps[0].source)
        self._begin[result], self._steps[result] = begin, steps
        self._depth[result] = self._depth.get(steps[0].source, 0) + bool(part.inside)
        if part.inside:
            self._slices[steps[-1]] = part

    def _addition(self, result: Value, source: Value, other: Value) -> tuple[Slice, list[Step]] | None:
        """Returns how a sum continues a stream, or begins one: what is computed from it, and the steps."""
        order, behind = self._flow.order, dict[Value, list[Step]]()
        for value, steps in self._trails.back(source):
            behind[value] = steps
            if value in self._begin:
                break
        begin = self._begin.get(value)
        low = min(order[each.node] for each in behind) if begin is None else order[begin.node]
        part = slice_of(
            self._flow, other, lambda each: each in behind or (each in self._begin and self._begin[each] == begin), low
        )
        if not part.states and begin is None:
            return None
        if begin is None:
            value = max(part.states, key=lambda state: order[state.node])
        part = part if part.states else Slice()
        return part, [*behind[value], Step("add" if part.inside else "bias", result, source, other)]

    # -- chains --------------------------------------------------------------------------------------------------------

    def _chains(self) -> list[list[Step]]:
        """Returns the trails of the streams, in order: each as long as it can be, the deepest first."""
        order, taken, found = self._flow.order, set[Value](), list[list[Step]]()
        for end in sorted(self._steps, key=lambda end: (-self._depth[end], -order[end.node])):
            steps, state = list[Step](), end
            while state in self._steps and state not in taken:
                taken.add(state)
                steps = [*self._steps[state], *steps]
                state = steps[0].source
            if any(map(self._has_matrix, steps)):
                found.append(steps)
        return sorted(found, key=lambda steps: order[steps[0].source.node])

    def _has_matrix(self, step: Step) -> bool:
        nodes = self._slices[step].inside if step in self._slices else ()
        return any(node.kind == "call" or (node.kind == "parameter" and len(Value(node).shape) > 1) for node in nodes)

    # -- layers --------------------------------------------------------------------------------------------------------

    def found(self) -> list[Stack]:
        """Returns the stacks of lists and loops; if there are none, the longest chain in no list is one layer."""
        for steps in self._chains():  # but not what is in one layer of another trail
            members = {key for layers in self._members.values() for key in layers}
            if members.isdisjoint(map(id, self._around(steps).frames_above())):
                self._divide(steps)
        found = [*(self._stack(*key, members) for key, members in self._members.items()), *self._loops]
        found = found or sorted(self._alone, key=lambda stack: -len(stack.first.steps))[:1]
        return sorted(found, key=lambda stack: self._flow.order[stack.first.start.value.node])

    def said(self, layers: Said) -> Stack:
        """Returns the stack whose layers are modules with these paths, or several modules each.

        Raises:
            UnknownPathError: No module with such a path ran.
        """
        frames: dict[str, Frame] = {}
        for frame in self._flow.frames:
            frames.setdefault(frame.attribute_path_from_root, frame)
            frames.setdefault(format_path(frame.path), frame)
        found: dict[int, Layer] = {}
        for number, paths in enumerate([one] if isinstance(one, str) else one for one in layers):
            if unknown := [path for path in paths if path not in frames]:
                raise UnknownPathError(f"layers: no module {unknown[0]!r} ran on the example inputs")
            own = [frames[path] for path in paths]
            steps = [step for steps in self._steps.values() if self._is_of(own, steps[-1]) for step in steps]
            layer = self._cut(own[0], steps) if len(own) == 1 and steps else None
            given, returned = self._flow.inputs(own[0]), self._flow.outputs(own[-1])
            if layer is None and steps:
                layer = self._layer(own[0].parent or own[0], steps)
            elif layer is None and given and returned:
                layer = Layer(own[0], given[0], returned[0], [], self._flow.start(own[0]))
            found |= {} if layer is None else {number: layer}
        return Stack("", self._flow.root, "layers", found)

    def _is_of(self, frames: Sequence[Frame], step: Step) -> bool:
        """Whether one of some modules computes what a step adds."""
        known = step in self._slices and [(each, self._call(each.parent, step)) for each in frames if each.parent]
        return any(call is each.call is not None for each, call in known or ())

    def _divide(self, steps: Sequence[Step]) -> None:
        """Divides a chain into layers."""
        frame = self._around(steps)
        adding = _grouped((unit for unit in self._units(frame, steps) if unit.adds), lambda unit: id(unit.call))
        inner = [self._groups(group[0].frame, _steps_of(group)) for group in adding]
        groups = self._groups(frame, steps)
        calls = [group[0].call for group in groups]
        if any(map(_are_alike, inner)):  # such as the stages of a vision model
            for group in adding:
                self._divide(_steps_of(group))
        elif frame.call is not None and _container(frame.call) is not None and not _are_alike(groups):
            self._add(frame, steps)  # a member of a list
        elif all(_is_one(group) for group in groups) and all(call is not None and _stem(call) for call in calls):
            for group in groups:
                self._add(group[0].frame, steps)
        else:
            layers = self._layers(frame, groups)
            if len(layers) == 1 and (whole := self._cut(frame, steps)) is not None:
                layers = [whole]
            stems = {_number(call)[0] for call in calls if call is not None and _number(call)[1]}
            stack = Stack("", frame, min(stems, default=""), dict(enumerate(layers)))
            if len(layers) > 1 or stems:
                self._loops.append(stack)
            elif not any(each.call is not None and _container(each.call) for each in frame.frames_above()):
                self._alone.append(stack)  # else it is a part of a layer whose list was not found

    def _around(self, steps: Iterable[Step]) -> Frame:
        """Returns the innermost frame that all additions of computed values are in."""
        around = [list(self._flow.frames_around(step.result)) for step in steps if step in self._slices]
        return next(frame for frame in around[0] if all(frame in each for each in around))

    def _groups(self, frame: Frame, steps: Iterable[Step]) -> list[_Group]:
        """Returns the additions of each layer, as steps of what a frame runs."""
        units = self._units(frame, steps)
        units = [unit for unit in units if unit.adds and unit.call and _container(unit.call) is not None] or units
        calls = [unit.call for unit in units if unit.call is not None]
        if len(calls) < len(units):
            return _repeated(units)
        own = _grouped(units, lambda unit: id(unit.call if unit.adds else unit))
        if all(_number(call)[1] for call in calls):  # what one list has in it, or lists at one place
            numbered = _grouped(own, lambda group: group[0].call and _number(group[0].call)[1])
            if len(numbered) > 1 and any(
                len(each) > 1 and not (_is_one(each[0]) and _are_alike(each)) for each in numbered
            ):
                return [[unit for group in each for unit in group] for each in numbered]
        is_listed = any(_container(call) is not None for call in calls)
        return own if is_listed and all(unit.adds for unit in units) else _repeated(units)

    def _units(self, frame: Frame, steps: Iterable[Step]) -> list[_Unit]:
        units, own = list[_Unit](), list[Step]()
        for step in steps:
            own.append(step)
            if step in self._slices:
                units.append(self._unit(frame, own))
                own = []
        units[-1].steps += own
        return units

    def _unit(self, frame: Frame, steps: list[Step]) -> _Unit:
        step = steps[-1]
        call, adding = self._call(frame, step), self._child(frame, step.result.node)
        nodes = sorted(self._slices[step].inside, key=self._flow.order.__getitem__)
        code = tuple(node.op if node.kind == "op" else node.kind for node in nodes)
        return _Unit(steps, call, call is not None and adding is call.frame, code)

    def _call(self, frame: Frame, step: Step) -> CallNode | None:
        """Returns the last call in a frame that computes what a step adds."""
        nodes = sorted(self._slices[step].inside, key=self._flow.order.__getitem__, reverse=True)
        return next((child.call for node in nodes if (child := self._child(frame, node)) is not None), None)

    def _child(self, frame: Frame, node: Node) -> Frame | None:
        """Returns the frame called in a frame that a node is in."""
        return next((each for each in self._flow.frame_of[node].frames_above() if each.parent is frame), None)

    def _cut(self, frame: Frame, steps: Sequence[Step]) -> Layer | None:
        """Returns a frame as a layer, if a part of a chain lies between one of its inputs and one of its outputs."""
        places = {step.result: number + 1 for number, step in enumerate(steps)}
        before = dict(self._trails.back(steps[0].source))
        for end in self._flow.outputs(frame)[:3]:
            last, after = next(
                ((places[v], found) for v, found in self._trails.back(end.value) if v in places), (0, [])
            )
            for start in self._flow.inputs(frame)[:6]:
                if start.value in before:
                    own = [*before[start.value], *steps[:last], *after]
                else:
                    own = [*steps[places.get(start.value, len(steps)) : last], *after]
                if any(step in self._slices for step in own):
                    return Layer(frame, start, end, own, self._flow.start(frame))
        return None

    def _add(self, frame: Frame, steps: Sequence[Step]) -> None:
        """Adds a frame to the members of the list that it is in, if it is a layer."""
        layer, stem = self._cut(frame, steps), None if frame.call is None else _stem(frame.call)
        if layer is not None and stem is not None and frame.parent is not None:
            self._members.setdefault((frame.parent, stem), {}).setdefault(id(frame), layer)

    def _stack(self, frame: Frame, stem: _Stem, layers: dict[int, Layer]) -> Stack:
        """Returns the stack of a list; what is in front of its layers and behind them may be other parts."""
        members = [call.frame for call in frame.calls() if _stem(call) == stem]
        classes = {type(layer.frame.module) for layer in layers.values()}
        is_like = [each.opaque_reason is not None or type(each.module) in classes for each in members]
        members = members[is_like.index(True) : len(is_like) - is_like[::-1].index(True)]
        found = {number: layers[id(each)] for number, each in enumerate(members) if id(each) in layers}
        return Stack("", frame, stem[0], found, {n: each for n, each in enumerate(members) if n not in found})

    def _layers(self, frame: Frame, groups: Sequence[_Group]) -> list[Layer]:
        """Returns the layers that are steps of a loop in a frame."""
        parts = list(map(_steps_of, groups))
        for number, group in enumerate(groups[1:], 1):  # norms behind an addition belong to what was added
            lead = max((n + 1 for n, step in enumerate(group[0].steps) if step.kind == "norm"), default=0)
            parts[number - 1] += parts[number][:lead]
            del parts[number][:lead]
        if len(parts) > 1 and parts[0][-1].kind == "norm":
            last = parts[-1][-1].result
            norms = [norm for norm in self._trails.norms.values() if norm.given.value == last]
            parts[-1] += [Step("norm", norm.returned.value, last) for norm in norms[:1]]
        return [self._layer(frame, part) for part in parts]

    def _layer(self, frame: Frame, steps: list[Step]) -> Layer:
        start, end = (Place(self._trails.path(each, frame), each) for each in (steps[0].source, steps[-1].result))
        return Layer(frame, start, end, steps, self._flow.order[start.value.node])


def _steps_of(group: Iterable[_Unit]) -> list[Step]:
    return [step for unit in group for step in unit.steps]


def _grouped(items: Iterable[_Item], key: Callable[[_Item], Any]) -> list[list[_Item]]:
    return [list(group) for _, group in groupby(items, key)]


def _is_one(group: _Group) -> bool:
    """Whether all of a group is computed and added by one module."""
    return all(unit.adds and unit.call is group[0].call for unit in group)


def _are_alike(groups: Sequence[_Group]) -> bool:
    """Whether there are several groups, which run the same code: modules of one class, of which each adds twice."""
    is_each = all(map(_is_one, groups)) and max(map(len, groups)) > 1
    codes = {type(group[0].frame.module) if is_each else tuple(unit.code for unit in group) for group in groups}
    return len(groups) > 1 and len(codes) == 1


def _repeated(units: list[_Unit]) -> list[_Group]:
    """Returns units divided into groups of the same code, as many as possible; all of them if there are none."""
    codes, count = [unit.code for unit in units], len(units)
    size = next((n for n in range(1, count + 1) if count % n == 0 and codes == codes[:n] * (count // n)), count)
    return [units[start : start + size] for start in range(0, count, size)]


def _container(call: CallNode) -> str | None:
    """Returns the path of the list that a called module is in; its own if it is called several times."""
    above, _, last = str(call.target).rpartition(".")
    return above if last.isdigit() else str(call.target) if call.call_count > 1 else None


def _stem(call: CallNode) -> _Stem | None:
    """Returns the list of a called module, or its name without a number, with the class of the modules."""
    if (container := _container(call)) is not None:
        return container, None
    path = str(call.target)
    return None if path[-1] not in digits else (path.rstrip(digits), type(call.frame.module))


def _number(call: CallNode) -> tuple[str, str]:
    """Returns the first number in the path of a called module, after the path of the list that counts; or nothing."""
    found = re.search(r"(?:^|\.)(\d+)(?=\.|$)", str(call.target))
    return (str(call.target)[: found.start()], found[1]) if found else ("", "")
