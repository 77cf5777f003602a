"""The senders and receivers of a model: which receiver reads which sender, and at which positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.capture.records import CallNode, Frame, Node, spliced_calls
from graphpatch_notebook.components import Components, NoWeightError, Projection, find, projection
from graphpatch_notebook.components.flow import Trails, Value, walk
from graphpatch_notebook.components.stacks import Layer, Stack
from graphpatch_notebook.components.writes import Write
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.circuits.stream import Decoder, LinearPaths, NoPathError, Sum, Writer, in_order
from graphpatch_notebook.experiments.engine.inputs import Positions, are_of_rows, counted_positions, counts_from_end
from graphpatch_notebook.paths import format_path


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """What reads the residual stream: one receiver, or one for each head.

    Attributes:
        paths: The paths at which it is patched, and at which gradients are taken: those of a value that only this
            receiver reads, or of the result of a linear map.
        source: What it reads.
        number: Its place in order of execution.
        projection: The linear map, whose outputs belong to heads; `None` if the value itself is read.
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
    def sums(self) -> dict[str, Sum]:
        """By path, the values that norms read, and those that receivers read without a linear map."""
        found: dict[str, Sum] = {}
        for reader in self.readers:
            found |= reader.source.norms
            found |= dict.fromkeys(reader.paths, reader.source) if reader.projection is None else {}
        return found

    @property
    def recorded(self) -> list[str]:
        """The paths of `sums`, and of the values that senders write."""
        return list(dict.fromkeys([*(writer.path for writer in self.writers), *self.sums]))


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
        self._parts: dict[Value, tuple[Value, ...]] = {}  # of what an SAE writes as latents and error
        self._splices = {call.target: call for call in spliced_calls(root) if "latents" in call.frame.names}
        self._numbers: dict[Value, int] = {}
        self.found = Nodes()
        order = self._flow.order
        stacks = sorted(evidence.stacks, key=lambda each: order[each.first.start.value.node])
        for stack in stacks:
            self._add_start(stack)
            for layer in stack.layers.values():
                for kind, write in layer.writes.items():
                    self._add_writer(stack.prefix, f"{layer.name}{kind}", write)
        self._paths = LinearPaths(self._trails, self._by_value, self._parts)
        for stack in stacks:
            for layer in stack.layers.values():
                for kind, write in layer.writes.items():
                    self._add_readers(layer, f"{layer.name}{kind}", write)
        self._add_end()
        numbers = self._numbers
        self.found.writers = sorted(self._by_value.values(), key=lambda writer: numbers[writer.value])
        self.found.readers.sort(key=lambda reader: reader.number)

    # -- senders -------------------------------------------------------------------------------------------------------

    def _add_start(self, stack: Stack) -> None:
        value, stream = stack.first.start.value, stack.prefix
        before = LinearPaths(self._trails, self._by_value)
        if before.depends(value):  # such as the stages of a vision model
            with suppress(NoPathError):
                before.of(value)
                return
            self.found.skipped[f"{stream}@embed"] = "it is computed from components of another stack"
        self.found.streams[stream] = self._flow.boundary_path(value)
        self._add(Writer((f"{stream}@embed",), value, self.found.streams[stream], stream=stream))

    def _add(self, writer: Writer, after: Value | None = None) -> None:
        self._by_value[writer.value] = writer
        self._numbers[writer.value] = self._flow.order[(after or writer.value).node]

    def _add_latents(self, stream: str, name: str, written: Value, call: CallNode) -> None:
        """Adds what an SAE writes in place of a component: each latent, and the rest."""
        names, module = call.frame.names, call.frame.module
        start, path = f"{name}.{call.op}", format_path(call.frame.path)
        latents, rest = names["latents"], [names[part] for part in ("skipped", "error") if part in names]
        spec: Any = latents.spec
        count = self._components[f"{start}.latents"].shape[-1]
        numbers, every = torch.arange(count)[None], [f"{start}.latents"]
        if self._has_heads:
            numbers, every = numbers.T, [f"{start}.latents[{number}]" for number in range(count)]
        like = torch.empty(0, dtype=spec.dtype, device=spec.device)
        decoder = Decoder(module.sae.decode, numbers, count, like)  # type: ignore[union-attr, arg-type]
        decoder.weight()
        self._add(Writer(tuple(every), Value(latents), f"{path}.latents", decoder, stream), written)
        for node in rest:
            self._add(Writer((f"{start}.{node.name}",), Value(node), f"{path}.{node.name}", stream=stream), written)
        self._parts[written] = tuple(map(Value, (latents, *rest)))

    def _add_writer(self, stream: str, start: str, write: Write) -> None:
        written = write.value
        component = self._components.get(f"{start}_out")
        if component is not None and (call := self._splices.get(component.path)) is not None:
            self._add_latents(stream, component.name, written, call)
            self._written[start] = tuple(n for part in self._parts[written] for n in self._by_value[part].names)
            return
        writer = Writer((f"{start}_out",), written, self._flow.boundary_path(written))
        if self._has_heads and len(write.attentions) == 1:
            try:
                writer = self._of_heads(start, written)
            except (NoWeightError, ValueError) as problem:
                self.found.skipped[f"{start}.heads[*].z"] = str(problem)
        self._add(replace(writer, stream=stream))
        self._written[start] = writer.names

    def _of_heads(self, start: str, written: Value) -> Writer:
        """Returns the writer of attention by heads, if its heads are summed by a linear map."""
        found = projection(self._root, f"{start}.z")
        output = found.linear
        found.weight()
        names = tuple(f"{start}.heads[{head}].z" for head in range(len(found.heads)))
        writer = Writer(names, output, self._input_path(output), found)
        if not LinearPaths(self._trails, {output: writer}).of(written).terms:
            raise NoPathError("its linear map does not lead to what is written")
        return writer

    def _input_path(self, linear: Value) -> str:
        """Returns the path of the input of a linear map: the input of its module, if it is a module."""
        flow, frame = self._flow, self._flow.frame_of[linear.node]

        def before(value: Value) -> list[Value]:
            reads = flow.reads(value.node)[:1] if flow.frame_of[value.node] is frame else []
            return [read for read in reads if in_order(value, read)]

        values = list(walk([flow.moving(linear.node)[0]], before))
        paths = (place.path for value in values for place in flow.inputs(frame) if place.value == value)
        return next(paths, flow.boundary_path(values[-1]))

    # -- receivers -----------------------------------------------------------------------------------------------------

    def _add_readers(self, layer: Layer, name: str, write: Write) -> None:
        if len(write.attentions) == 1 and self._has_heads:
            try:
                self._add_heads(name, write)
                return
            except (NoWeightError, ExperimentError, ValueError) as error:
                self.found.skipped[f"{name}.heads[*]"] = str(error)
        self._add_whole(name, layer, write)

    def _add_heads(self, name: str, write: Write) -> None:
        """Adds the receivers of queries, keys and values.

        Raises:
            NoWeightError, ExperimentError, ValueError: They cannot be separated from what else reads the stream.
        """
        found: dict[str, Projection] = {letter: projection(self._root, f"{name}.{letter}") for letter in "qkv"}
        for made in found.values():
            made.weight()
        linears = {made.linear.node: made.channels for made in found.values()}
        if other := self._other_read(write, lambda node, _: node in linears):
            raise NoPathError(f"it also reads {self._flow.path(other)} in another way")
        for node, channels in linears.items():
            numbers = {int(n) for made in found.values() if made.linear.node is node for n in made.heads.reshape(-1)}
            if len(numbers) != channels:
                raise NoPathError(f"{self._flow.path(Value(node))} has outputs that are not queries, keys or values")
        sources = {letter: self._paths.of(self._flow.moving(made.linear.node)[0]) for letter, made in found.items()}
        for letter, made in found.items():
            names = tuple(f"{name}.heads[{head}].{letter}" for head in range(len(made.heads)))
            if not made.are_separate:
                names = (f"{name}.{letter}",)
                self.found.skipped[f"{name}.heads[*].{letter}"] = "a norm over all heads makes them one receiver"
            number = self._flow.order[made.linear.node]
            self.found.readers.append(Reader(names, (self._output_path(made.linear),), sources[letter], number, made))
            senders, read = self._written[name], self._components[f"{name}.{letter}"]
            is_by_head = len(names) > 1 and len(senders) > 1 and len(senders) % len(names) == 0
            for number, receiver in enumerate(names):
                own = (sender for head, sender in enumerate(senders) if read.head_of(head, len(senders)) == number)
                self.found.feeds[receiver] = tuple(own) if is_by_head else senders

    def _output_path(self, linear: Value) -> str:
        """Returns the path of the result of a linear map: the output of its module, if it is a module."""
        flow = self._flow

        def after(value: Value) -> list[Value]:
            inside = [
                user for user in flow.users.get(value.node, ()) if flow.frame_of[user] is flow.frame_of[value.node]
            ]
            return [Value(user) for user in inside if len(inside) == 1 and in_order(Value(user), value)]

        values = list(walk([linear], after))
        paths = {flow.boundary_path(value, is_unread=True): flow.path(value) for value in values}
        return next((path for path, own in paths.items() if path != own), flow.path(values[-1]))

    def _add_whole(self, name: str, layer: Layer, write: Write) -> None:
        """Adds a receiver for all that a component reads."""
        problem = "no module reads the stream for it alone, so that what it reads cannot be replaced"
        for paths, value, numbers in self._reads_of(layer, write):
            if self._other_read(write, self._cut(value, numbers)) is None:
                try:
                    self._add_reader(name, paths, value)
                    return
                except NoPathError as error:
                    problem = str(error)
        self.found.skipped[name] = problem

    def _reads_of(self, layer: Layer, write: Write) -> Iterator[tuple[tuple[str, ...], Value, range]]:
        """Yields where a component may read the stream: the paths of a value, and the operations that read it there."""
        flow, values = self._flow, [write.state]
        if write.norm is not None:
            path, normed = write.norm.returned
            values.insert(0, normed)
            if set(flow.users[normed.node]) <= write.inside:
                yield (path,), normed, range(len(flow.order))
        around = (
            frame
            for node in write.inside
            for frame in takewhile(lambda frame: frame is not layer.frame, flow.frames_around(Value(node)))
        )
        frames = sorted(
            {id(each): each for each in around}.values(), key=lambda each: (len(each.path), flow.start(each))
        )
        for value in values:
            for frame in frames:
                if paths := tuple(place.path for place in flow.inputs(frame) if place.value == value):
                    yield paths, value, range(flow.start(frame), flow.order[frame.output_node] + 1)

    def _add_reader(self, name: str, paths: tuple[str, ...], value: Value) -> None:
        """Adds a receiver; raises a `NoPathError` if what it reads is not a sum of what components write."""
        source = self._paths.of(value)
        if not value.shape or not source.terms:
            raise NoPathError(f"what it reads, {self._flow.path(value)}, does not come from the stream")
        self.found.readers.append(Reader((name,), paths, source, self._flow.order[value.node]))
        self.found.feeds[name] = self._written.get(name, ())

    def _cut(self, value: Value, numbers: range) -> Callable[[Node, Value], bool]:
        """Returns whether an operation among some reads a value."""
        return lambda node, read: read == value and self._flow.order[node] in numbers

    def _other_read(self, write: Write, is_cut: Callable[[Node, Value], bool]) -> Value | None:
        """Returns a value that depends on the stream, and that a component reads in other ways than by `is_cut`."""

        def before(value: Value) -> list[Value]:
            reads = self._flow.reads(value.node) if value.node in write.inside else []
            return [read for read in reads if not is_cut(value.node, read)]

        outside = (value for value in walk([write.value], before) if value.node not in write.inside)
        return next(filter(self._paths.depends, outside), None)

    # -- both ends -----------------------------------------------------------------------------------------------------

    def _add_end(self) -> None:
        """Adds the receiver at the end of the last stack: the logits."""
        # If no stack leads to logits, that of other logits comes last.
        stacks = self._components.evidence.stacks[::-1]
        if not stacks:
            return
        stack = next((stack for stack in stacks if stack.logits is not None), stacks[0])
        place = self._trails.norms[stack.norm].returned if stack.norm is not None else stack.last.end
        name = "@logits" if stack.logits is not None else f"{stack.prefix}@final_norm"
        if stack.logits is None and stack.norm is None:
            name = f"{stack.prefix}layers[{len(stack.layers) + len(stack.unlike) - 1}].resid_post"
        try:
            self._add_reader(name, (place.path,), place.value)
        except NoPathError as error:
            self.found.skipped[name] = str(error)


# -- positions ---------------------------------------------------------------------------------------------------------


class WrittenPositions:
    """The positions of the rows of the values that senders write, among the chosen positions.

    Attributes:
        labels: The chosen positions, counted from the start.
        of: By the name of a stream, for each row of what is written to it, the number of its position in `labels`, or
            -1.

    Raises:
        ExperimentError: The positions of a stream are not known, or a position is out of range.
    """

    def __init__(self, root: Frame, nodes: Nodes, values: Mapping[str, Tensor], given: Positions) -> None:
        if are_of_rows(given):
            raise ExperimentError(f"positions are the same for all rows of the batch here, not {given!r}")
        shapes = {stream: values[path].shape[:-1] for stream, path in nodes.streams.items()}
        dims = {stream: _position_dim(root, stream, len(shape)) for stream, shape in shapes.items()}
        if lost := [writer.names[0] for writer in nodes.writers if writer.stream not in dims]:
            raise ExperimentError(
                f"the positions of {lost[0]!r} are not known: its stack begins with what another one computes"
            )
        lengths = {stream: shapes[stream][dim] for stream, dim in dims.items()}
        if len(set(lengths.values())) > 1 and counts_from_end(given):
            raise ExperimentError(
                f"positions={given!r} counts from the end, but stacks have different lengths ({lengths}): count from "
                "the start"
            )
        self.labels = counted_positions(given, max(lengths.values()))
        self.of: dict[str, Tensor] = {}
        for stream, shape in shapes.items():
            numbers = torch.full(shape, -1)
            for number, position in enumerate(self.labels):
                if position < lengths[stream]:
                    numbers.select(dims[stream], position).fill_(number)
            self.of[stream] = numbers.reshape(-1)


def _position_dim(root: Frame, stream: str, dims: int) -> int:
    """Returns the dimension of the positions in the stream of a stack."""
    component = find(root).get(f"{stream}layers[0].resid_pre")
    axes = () if component is None else component.path_axes
    if len(axes) != dims + 1 or axes.count("position") != 1:
        raise ExperimentError(
            f"the positions of the stream {stream}layers[0].resid_pre are not known: "
            f"its dimensions are {', '.join(map(str, axes)) or 'unknown'}"
        )
    return axes.index("position")
