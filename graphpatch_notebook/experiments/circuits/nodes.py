"""The senders and receivers of a model, and which receiver reads which sender."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile

from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.components import Component, Components, NoWeightError, Projection, find, projection
from graphpatch_notebook.components.chain import Layer, Stack, Trails
from graphpatch_notebook.components.flow import Value, walk
from graphpatch_notebook.components.proofs import NamedLayer, NamedWrite
from graphpatch_notebook.components.writes import Write
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.circuits.stream import (
    LinearPaths,
    NoPathError,
    NormOfSum,
    StreamStep,
    Sum,
    Writer,
    in_order,
)

_LETTERS = "qkv"


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """What reads the residual stream: one receiver, or one for each head.

    Attributes:
        paths: The paths at which it is patched, and at which gradients are taken: those of a value that only this
            receiver reads, or of the result of a linear map.
        source: What it reads, as a sum.
        projection: The linear map, whose outputs belong to heads; `None` if the value itself is read.
        number: Its place in order of execution.
    """

    names: tuple[str, ...]
    paths: tuple[str, ...]
    source: Sum
    number: int
    projection: Projection | None = None


@dataclass(slots=True)
class Nodes:
    """The senders and receivers of a model.

    Attributes:
        writers, readers: The senders and receivers, in order of execution.
        feeds: For each receiver, the senders that are computed from it.
        streams: The paths of what streams begin with, by what the names of the layers of their stack begin with.
        skipped: Why there are no edges to, or from, a component.
    """

    writers: list[Writer] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    feeds: dict[str, tuple[str, ...]] = field(default_factory=dict)
    streams: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def senders(self) -> list[str]:
        """The names of all senders."""
        return [name for writer in self.writers for name in writer.names]

    @property
    def receivers(self) -> list[str]:
        """The names of all receivers."""
        return [name for reader in self.readers for name in reader.names]

    @property
    def missing(self) -> dict[str, str]:
        """Why there are no edges to, or from, whole components."""
        return {name: why for name, why in self.skipped.items() if "[*]." not in name and not name.endswith("heads[*]")}

    @property
    def reads(self) -> list[str]:
        """The paths of the values that receivers read."""
        return list(dict.fromkeys(path for reader in self.readers for path in reader.paths))

    @property
    def recorded(self) -> list[str]:
        """The paths of values that senders write, that norms read, and that receivers read without a linear map."""
        paths = [writer.path for writer in self.writers]
        paths += [norm.path for reader in self.readers for norm in norms_in(reader.source)]
        paths += [path for reader in self.readers if reader.projection is None for path in reader.paths]
        return list(dict.fromkeys(paths))


def nodes_of(root: Frame, *, heads: bool = True) -> Nodes:
    """Returns the senders and receivers of a captured model; each capture is searched once.

    With `heads`, heads of attention are nodes of their own.

    Raises:
        ExperimentError: The model has no layers with a residual stream that can be followed.
    """
    known: dict[bool, Nodes] = root.capture.findings.setdefault(nodes_of, {})
    if heads not in known:
        known[heads] = _NodeFinder(root, find(root), heads).found
    found = known[heads]
    if not found.readers or not found.writers:
        where, why = next(iter({**find(root).missing, **found.skipped}.items()), ("layers[*]", "nothing was found"))
        raise ExperimentError(f"the model has no edges between components: {where}: {why}")
    return found


def norms_in(source: Sum) -> list[NormOfSum]:
    """Returns all norms that a sum passes through, in order of execution."""

    def direct(each: Sum) -> list[NormOfSum]:
        return [term.source for term in each if isinstance(term.source, NormOfSum)]

    return sorted(walk(direct(source), lambda norm: direct(norm.source)), key=lambda norm: norm.number)


def writers_in(source: Sum) -> set[Writer]:
    """Returns the writers that are the terms of a sum, also through norms."""
    sums = [source, *(norm.source for norm in norms_in(source))]
    return {term.source for each in sums for term in each if isinstance(term.source, Writer)}


_Cut = Callable[[Node, Value], bool]


class _NodeFinder:
    """Finds senders and receivers in what `components` found."""

    def __init__(self, root: Frame, components: Components, heads: bool) -> None:
        evidence = components.evidence
        self._root = root
        self._components = components
        self._trails: Trails = evidence.trails
        self._flow = evidence.trails.flow
        self._has_heads = heads
        self._by_value: dict[Value, Writer] = {}
        self._written: dict[str, tuple[str, ...]] = {}
        self.found = Nodes()
        order = self._flow.order
        self._stacks = sorted(evidence.stacks, key=lambda each: order[each[0].layers[0].start.value.node])
        for stack, layers in self._stacks:
            self._add_start(stack)
            for layer in layers:
                for write in layer.writes:
                    self._add_writer(stack.prefix, layer, write)
        self._paths = LinearPaths(self._trails, self._by_value)
        for stack, layers in self._stacks:
            self._add_link(stack)
            for layer in layers:
                for write in layer.writes:
                    self._add_readers(layer, write)
        self._add_end()
        self.found.writers = sorted(self._by_value.values(), key=lambda writer: order[writer.value.node])
        self.found.readers.sort(key=lambda reader: reader.number)

    # -- senders -------------------------------------------------------------------------------------------------------

    def _add_start(self, stack: Stack) -> None:
        value = stack.layers[0].start.value
        before = LinearPaths(self._trails, dict(self._by_value))
        if before.depends(value):  # such as the stages of a vision model
            with suppress(NoPathError):
                before.of(value)
                return
        path = self._flow.boundary_path(value)
        stream = stack.prefix
        self._by_value[value] = Writer((f"{stream}@embed",), value, path, stream=stream)
        self.found.streams[stream] = path

    def _add_writer(self, stream: str, named: NamedLayer, each: NamedWrite) -> None:
        writer = self._of_heads(named, each) if self._has_heads else None
        if writer is None:
            path = self._flow.boundary_path(each.write.value)
            writer = Writer((f"{named.name}{each.kind}_out",), each.write.value, path)
        self._by_value[writer.value] = replace(writer, stream=stream, steps=self._steps_to(each.write.value, writer))
        self._written[f"{named.name}{each.kind}"] = writer.names

    def _steps_to(self, written: Value, writer: Writer) -> tuple[StreamStep, ...]:
        """Returns the operations on the value of a sender before it is added to the stream."""
        term, steps = LinearPaths(self._trails, {writer.value: writer}).of(written)[0], tuple[StreamStep, ...]()
        while isinstance(term.source, NormOfSum):
            steps = (*term.steps, *steps)
            term = term.source.source[0]
        return (*term.steps, *steps)

    def _of_heads(self, named: NamedLayer, each: NamedWrite) -> Writer | None:
        """Returns the writer of attention by heads, if its heads are summed by a linear map."""
        if each.parts is None or (output := each.parts.output) is None:
            return None
        start = f"{named.name}{each.kind}"
        try:
            found = projection(self._root, f"{start}.z")
            if found.linear != output:
                raise NoWeightError("another linear map reads it")
            found.weight()
            names = tuple(f"{start}.heads[{head}].z" for head in range(len(found.heads)))
            writer = Writer(names, output, self._input_path(output), found)
            if not LinearPaths(self._trails, {output: writer}).of(each.write.value):
                raise NoPathError("its linear map does not lead to what is written")
        except (NoWeightError, NoPathError, ValueError) as problem:
            self.found.skipped[f"{start}.heads[*].z"] = str(problem)
            return None
        return writer

    def _input_path(self, linear: Value) -> str:
        """Returns the path of the input of a linear map: the input of its module, if it is a module."""
        value = self._flow.moving(linear.node)[0]
        frame = self._flow.frame_of[linear.node]
        while True:
            place = next((place for place in self._flow.inputs(frame) if place.value == value), None)
            if place is not None:
                return place.path
            reads = self._flow.reads(value.node) if self._flow.frame_of[value.node] is frame else []
            if not reads or not in_order(value, reads[0]):
                return self._flow.boundary_path(value)
            value = reads[0]

    # -- receivers -----------------------------------------------------------------------------------------------------

    def _add_readers(self, named: NamedLayer, each: NamedWrite) -> None:
        name = f"{named.name}{each.kind}"
        problems: dict[str, str] = {}
        if each.parts is not None and self._has_heads:
            try:
                self._add_heads(name, each)
                return
            except (NoWeightError, ExperimentError, ValueError) as error:
                problems = {f"{name}.heads[*]": str(error)}
        try:
            self._add_whole(name, named.layer, each.write)
        except NoPathError as error:
            problems = {name: str(error)}
        self.found.skipped |= problems

    def _add_heads(self, name: str, each: NamedWrite) -> None:
        """Adds the receivers of queries, keys and values.

        Raises:
            NoWeightError, ExperimentError, ValueError: They cannot be separated from what else reads the stream.
        """
        found: dict[str, Projection] = {}
        for letter in _LETTERS:
            found[letter] = projection(self._root, f"{name}.{letter}")
            found[letter].weight()
        linears = {each.linear.node for each in found.values()}
        other = self._other_read(each.write.value, lambda node, _: node in linears, self._paths, each.write.inside)
        if other is not None:
            raise NoPathError(f"it also reads {self._flow.path(other)} in another way")
        self._check_outputs(list(found.values()))
        sources = {letter: self._paths.of(self._flow.moving(each.linear.node)[0]) for letter, each in found.items()}
        for letter, made in found.items():
            names = [f"{name}.heads[{head}].{letter}" for head in range(len(made.heads))]
            if not made.are_separate:
                names = [f"{name}.{letter}"]
                self.found.skipped[f"{name}.heads[*].{letter}"] = "a norm over all heads makes them one receiver"
            path = self._output_path(made.linear)
            number = self._flow.order[made.linear.node]
            self.found.readers.append(Reader(tuple(names), (path,), sources[letter], number, made))
            self._note_fed(name, names, self._components[f"{name}.{letter}"])

    def _note_fed(self, name: str, receivers: Sequence[str], read: Component) -> None:
        senders = self._written[name]
        is_by_head = len(senders) % len(receivers) == 0 and len(senders) > 1
        for number, receiver in enumerate(receivers):
            own = (each for head, each in enumerate(senders) if read.head_of(head, len(senders)) == number)
            self.found.feeds[receiver] = tuple(own) if is_by_head and len(receivers) > 1 else senders

    def _check_outputs(self, found: Sequence[Projection]) -> None:
        """Checks that all outputs of the linear maps belong to queries, keys or values."""
        for node in {each.linear.node for each in found}:
            numbers = {int(n) for each in found if each.linear.node is node for n in each.heads.reshape(-1)}
            if len(numbers) != Value(node).shape[-1]:
                raise NoPathError(f"{self._flow.path(Value(node))} has outputs that are not queries, keys or values")

    def _output_path(self, linear: Value) -> str:
        """Returns the path of the result of a linear map: the output of its module, if it is a module."""
        value = linear
        while True:
            path = self._flow.boundary_path(value, is_unread=True)
            users = self._flow.users.get(value.node, [])
            inside = [user for user in users if self._flow.frame_of[user] is self._flow.frame_of[value.node]]
            if path != self._flow.path(value) or len(inside) != 1 or not in_order(Value(inside[0]), value):
                return path
            value = Value(inside[0])

    def _add_whole(self, name: str, layer: Layer, write: Write) -> None:
        """Adds a receiver for all that a component reads."""
        problem = NoPathError("no module reads the stream for it alone, so that what it reads cannot be replaced")
        for paths, value in self._read_alone(layer, write):
            try:
                self._add_reader(name, paths, value)
            except NoPathError as error:
                problem = error
                continue
            return
        raise problem

    def _read_alone(self, layer: Layer, write: Write) -> Iterator[tuple[tuple[str, ...], Value]]:
        """Yields the values through which a component alone reads the stream, with their paths."""
        flow, candidates = self._flow, [write.state]
        if write.norm is not None:
            normed = write.norm.returned
            candidates.insert(0, normed.value)
            is_alone = set(flow.users[normed.value.node]) <= write.inside
            if is_alone and self._is_covered(write, self._reading(normed.value)):
                yield (normed.path,), normed.value
        around = (frame for node in write.inside for frame in self._frames_in(layer, node))
        frames = sorted(
            {id(frame): frame for frame in around}.values(), key=lambda each: (len(each.path), flow.start(each))
        )
        for value in candidates:
            for frame in frames:
                places = tuple(place.path for place in flow.inputs(frame) if place.value == value)
                if places and self._is_covered(write, self._reading(value, frame)):
                    yield places, value

    def _frames_in(self, layer: Layer, node: Node) -> Iterator[Frame]:
        """Yields the frames in a layer that a node is in."""
        return takewhile(lambda frame: frame is not layer.frame, self._flow.frames_around(Value(node)))

    def _add_reader(self, name: str, paths: tuple[str, ...], value: Value) -> None:
        """Adds a receiver; raises a `NoPathError` if what it reads is not a sum of what components write."""
        source = self._paths.of(value)
        if not value.shape or not source:
            raise NoPathError(f"what it reads, {self._flow.path(value)}, does not come from the stream")
        self.found.readers.append(Reader((name,), paths, source, self._flow.order[value.node]))
        self.found.feeds[name] = self._written.get(name, ())

    def _reading(self, value: Value, frame: Frame | None = None) -> _Cut:
        """Returns whether an operation (in a frame, if one is given) reads a value."""
        order = self._flow.order
        inside = range(len(order))
        if frame is not None:
            inside = range(self._flow.start(frame), order[frame.output_node] + 1)
        return lambda node, read: read == value and order[node] in inside

    def _is_covered(self, write: Write, is_cut: _Cut) -> bool:
        """Whether a component reads the stream only where `is_cut` says."""
        return self._other_read(write.value, is_cut, self._paths, write.inside) is None

    def _other_read(
        self, start: Value, is_cut: _Cut, paths: LinearPaths, inside: frozenset[Node] | None = None
    ) -> Value | None:
        """Returns a value that depends on the stream and from which a value is computed, but not by reads in `is_cut`.

        Args:
            start: The value.
            is_cut: Whether an operation may read a value.
            paths: What depends on the stream.
            inside: The operations that compute the value; `None` for all, up to what components write.
        """

        def is_outside(value: Value) -> bool:
            return value in paths.writers if inside is None else value.node not in inside

        def before(value: Value) -> list[Value]:
            reads = [] if is_outside(value) else self._flow.reads(value.node)
            return [read for read in reads if not is_cut(value.node, read)]

        return next((value for value in walk([start], before) if is_outside(value) and paths.depends(value)), None)

    # -- both ends -----------------------------------------------------------------------------------------------------

    def _add_link(self, stack: Stack) -> None:
        """Adds a receiver for the start of a stack, if it is computed from the end of another stack."""
        value = stack.layers[0].start.value
        writer = self._by_value.get(value)
        others = {own: each for own, each in self._by_value.items() if each is not writer}
        before = LinearPaths(self._trails, others)
        if writer is None or not before.depends(value):
            return
        for other, layers in self._stacks:
            end, name = other.layers[-1].end, f"{layers[-1].name}resid_post"
            is_alone = other is not stack and self._other_read(value, self._reading(end.value), before) is None
            with suppress(NoPathError):
                if is_alone:
                    self._add_reader(name, (end.path,), end.value)
                    self.found.feeds[name] = writer.names
                    return
        self.found.skipped[writer.names[0]] = "it is computed from components of the model, but not from one value"

    def _add_end(self) -> None:
        """Adds the receiver at the end of the last stack: the logits."""
        evidence = self._components.evidence
        # If no stack leads to logits, that of other logits comes last.
        ends = [(stack, end) for (stack, _), (_, end) in zip(reversed(evidence.stacks), evidence.ends, strict=False)]
        if not ends:
            return
        stack, end = next(((stack, end) for stack, end in ends if end.logits is not None), ends[0])
        place = self._trails.norms[end.norm].returned if end.norm is not None else stack.layers[-1].end
        name = "@logits" if end.logits is not None else f"{stack.prefix}@final_norm"
        if end.logits is None and end.norm is None:
            name = f"{stack.prefix}layers[{len(stack.layers) + len(stack.unlike) - 1}].resid_post"
        try:
            self._add_reader(name, (place.path,), place.value)
        except NoPathError as error:
            self.found.skipped[name] = str(error)
