"""Exact runs: a model as a circuit, and the effect of single edges.

In a run as a circuit, each receiver reads the corrupted stream plus, for each of its edges that is kept, what the
sender writes in this run minus what it writes in the corrupted one; at one position, if the edge has one. The patches
of `circuit_patches` do this: each replaces what a receiver reads, and reads the senders of the same run.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError, PatchValueError
from graphpatch_notebook.experiments.circuits.circuit import Circuit
from graphpatch_notebook.experiments.circuits.nodes import Nodes, Reader, nodes_of, writers_in
from graphpatch_notebook.experiments.circuits.positions import WrittenPositions
from graphpatch_notebook.experiments.circuits.stream import NormOfSum, Sum, Writer, index_of, rows_of
from graphpatch_notebook.experiments.engine.inputs import Inputs, inputs_of
from graphpatch_notebook.experiments.methods.arguments import check_graph
from graphpatch_notebook.experiments.methods.reference_runs import record
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import AddPatch, Patch
from graphpatch_notebook.torch_compat import without_torch_functions

Kept: TypeAlias = "Mapping[str, Mapping[str, frozenset[int] | None]]"
"""The senders that each receiver reads, and at which positions; `None`: at all."""


def circuit_patches(pg: PatchableGraph, circuit: Circuit, corrupted: Any) -> dict[str, Patch[Any]]:
    """Returns the patches that make a model run as a circuit.

    Under them, a call of `pg` on the clean inputs computes what the circuit computes: each receiver reads what it reads
    on the corrupted inputs, plus the changes that its edges pass on. With all edges, that is what the model computes;
    without any, what it computes on the corrupted inputs, to the last bit.

    Args:
        pg: The graph.
        circuit: The circuit.
        corrupted: The corrupted inputs: a tuple of arguments, a dict of keyword arguments, or one value. The model runs
            on them once. Inputs under the patches must have the same shapes.

    Returns:
        A patch map, for `pg.patch` and `pg.edit`.

    Raises:
        ExperimentError: The circuit has edges that the model does not have.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from graphpatch_notebook.experiments import attribute_edges, circuit
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(6)[None])
        >>> clean, corrupted = torch.arange(6)[None], torch.arange(6, 12)[None]
        >>> scores = attribute_edges(pg, lambda out: out.logits[0, -1, 3], clean, corrupted)
        >>> with torch.no_grad(), pg.patch(circuit_patches(pg, circuit(pg, scores, edges=46), corrupted)):
        ...     torch.allclose(pg(clean).logits, model(clean).logits, atol=1e-4)
        True

    Source:
        Conmy et al., Towards automated circuit discovery (2023); Mueller et al., MIB (2025).
    """
    check_graph(pg)
    nodes = nodes_like(pg, circuit.feeds)
    return CircuitRuns(pg, nodes, inputs_of(corrupted)).patches(kept_edges(nodes, circuit))


def nodes_like(pg: PatchableGraph, feeds: Mapping[str, Sequence[str]]) -> Nodes:
    """Returns the nodes of a model that match the nodes of a circuit: with attention heads as nodes, or without.

    Raises:
        ExperimentError: The model has other nodes.
    """
    wanted = {receiver: tuple(senders) for receiver, senders in feeds.items()}
    for heads in (True, False):
        nodes = nodes_of(pg.nodes.root, heads=heads)
        if nodes.feeds == wanted:
            return nodes
    other = next(iter(set(wanted.items()) ^ set(nodes.feeds.items())), ("", ""))[0]
    raise ExperimentError(f"the nodes are not those of this model: they differ in {other!r}")


def kept_edges(nodes: Nodes, circuit: Circuit) -> Kept:
    """Returns the senders that each receiver reads in a circuit.

    Raises:
        ExperimentError: The model has no such edge.
    """
    can = {
        name: {n for w in writers_in(reader.source) for n in w.names}
        for reader in nodes.readers
        for name in reader.names
    }
    found: dict[str, dict[str, frozenset[int] | None]] = {}
    for edge in circuit.edges:
        if edge.sender not in can.get(edge.receiver, ()):
            raise ExperimentError(
                f"the model has no edge from {edge.sender!r} to {edge.receiver!r}; the circuit is that of another model"
            )
        known = found.setdefault(edge.receiver, {})
        before = known.get(edge.sender) or frozenset()
        known[edge.sender] = None if edge.position is None else before | {edge.position}
    return found


class CircuitRuns:
    """Makes the patches of circuits, relative to one run on the corrupted inputs.

    Attributes:
        metric: The metric of that run; 0 if none is given.
    """

    def __init__(
        self, pg: PatchableGraph, nodes: Nodes, corrupted: Inputs, metric: Callable[[Any], float] | None = None
    ) -> None:
        run = record(pg, corrupted, list(dict.fromkeys([*nodes.recorded, *nodes.reads])), metric)
        run.warn_if_random()
        self._root = pg.nodes.root
        self._nodes = nodes
        self._stream = Stream(run.values, nodes.readers[-1])
        self.metric = float(run.measurement.values)

    @property
    def values(self) -> Mapping[str, Tensor]:
        """The values of the corrupted run, by path."""
        return self._stream.values

    def patches(self, kept: Kept) -> dict[str, Patch[Any]]:
        """Returns the patches of a circuit.

        Raises:
            ExperimentError: It has positions, and those of the model are not known, or it has fewer.
        """
        chosen = {at for senders in kept.values() for each in senders.values() if each is not None for at in each}
        positions = WrittenPositions(self._root, self._nodes, self.values, sorted(chosen)) if chosen else None
        by_path: dict[str, list[Reader]] = {}
        for reader in self._nodes.readers:
            for path in reader.paths:
                by_path.setdefault(path, []).append(reader)
        return {path: ReadPatch(self._stream, path, readers, kept, positions) for path, readers in by_path.items()}

    def edge(
        self,
        reader: Reader,
        receiver: str,
        changes: Mapping[int, Tensor],
        sender: str,
        position: int | None = None,
        *,
        positions: WrittenPositions | None = None,
    ) -> dict[str, Patch[Any]]:
        """Returns the patches on the corrupted run with which one receiver reads the clean value of one sender.

        Args:
            reader: What the receiver is part of.
            receiver: The name of the receiver.
            changes: What the senders of each writer write in the clean run, minus the same in the corrupted one.
            sender: The name of the sender.
            position: The position at which it does; `None` for all.
            positions: The positions of the run.
        """
        writer = next(writer for writer in writers_in(reader.source) if sender in writer.names)
        own = {sender: None if position is None else frozenset((position,))}
        kept = {id(writer): _mask(writer, [own], positions)}
        read = self._stream.changes(reader.source, kept, lambda each: changes[id(each)])
        assert read is not None
        shape = self._stream.values[reader.paths[0]].shape
        if reader.projection is None:
            return {path: AddPatch(value=read.reshape(shape)) for path in reader.paths}
        columns = index_of(reader.projection.heads[reader.names.index(receiver)])
        value = (read[0] @ reader.projection.weight()[:, columns]).reshape(*shape[:-1], -1)
        where = columns if isinstance(columns, slice) else columns.tolist()
        return {path: AddPatch(value=value, slice=(..., where)) for path in reader.paths}


class Stream:
    """The values of the corrupted run by path, and the effect of changes of senders on the inputs of receivers.

    After the `last` receivers, a run is over.
    """

    def __init__(self, values: Mapping[str, Tensor], last: Reader) -> None:
        self.values = values
        self.last = last
        self._written: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def written(self, writer: Writer, now: Mapping[str, Tensor]) -> Tensor:
        """Returns the values of senders in a run, minus those of the corrupted run; once for each run."""
        key = (threading.get_ident(), id(writer))
        known = self._written.get(key)
        if known is None or known[0] is not now[writer.path]:
            known = self._written[key] = (now[writer.path], writer.change(now, self.values))
        return known[1]

    def forget(self) -> None:
        """Frees what a run of this thread wrote."""
        own = threading.get_ident()
        for key in [key for key in self._written if key[0] == own]:
            del self._written[key]

    def changes(self, source: Sum, kept: Mapping[int, Tensor], written: Callable[[Writer], Tensor]) -> Tensor | None:
        """Returns the change of a sum for several receivers, of shape `(receivers, rows, channels)`.

        Args:
            source: The sum.
            kept: For each writer with senders that are kept, by its id, whether each receiver keeps each sender, and
                each of its rows if circuits have positions.
            written: Returns what the senders of a writer write, minus what they write in the corrupted run.
        """
        direct = [term.source for term in source if isinstance(term.source, Writer) and not term.steps]
        found = self._of_writers(direct, kept, written)
        for term in source:
            if isinstance(term.source, Writer) and not term.steps:
                continue
            if isinstance(term.source, NormOfSum):
                part = self._through(term.source, kept, written)
            else:
                part = self._of_writers([term.source], kept, written)
            if part is not None:
                part = term.on(part)
                found = part if found is None else found + part
        return found

    def _of_writers(
        self, writers: Sequence[Writer], kept: Mapping[int, Tensor], written: Callable[[Writer], Tensor]
    ) -> Tensor | None:
        used = [writer for writer in writers if id(writer) in kept]
        if not used:
            return None
        changes = torch.cat([written(writer) for writer in used])
        masks = torch.cat([kept[id(writer)] for writer in used], dim=1).to(changes)
        if masks.dim() == 3:  # by row
            return torch.einsum("esr,src->erc", masks, changes)
        return (masks @ changes.flatten(1)).reshape(len(masks), *changes.shape[1:])

    def _through(
        self, norm: NormOfSum, kept: Mapping[int, Tensor], written: Callable[[Writer], Tensor]
    ) -> Tensor | None:
        change = self.changes(norm.source, kept, written)
        if change is None:
            return None
        read = self.values[norm.path]
        count = len(change)
        stacked = (rows_of(read) + change).reshape(count * len(read), *read.shape[1:])
        after: Tensor = norm.function(stacked)
        return after.reshape(change.shape) - rows_of(norm.function(read))


def _mask(
    writer: Writer, wanted: Sequence[Mapping[str, frozenset[int] | None]], positions: WrittenPositions | None
) -> Tensor:
    """Returns whether each of several receivers reads each sender, `(receivers, senders)`; with positions, each row."""
    reads = torch.tensor([[name in own for name in writer.names] for own in wanted])
    if positions is None:
        return reads
    found = reads[..., None].repeat(1, 1, len(positions.of(writer)))
    for row, own in enumerate(wanted):
        for column, name in enumerate(writer.names):
            if (at := own.get(name)) is not None:
                found[row, column] = positions.are_kept(writer, at)
    return found


@dataclass(eq=False)
class ReadPatch(Patch[Any]):
    """Replaces the inputs of receivers by those of the corrupted run, plus the changes of the senders that they keep.

    Attributes:
        stream: The stream of the corrupted run.
        readers, kept: The receivers, and the senders that each of them reads.
        placed: The positions of the edges; `None` if they have none.
    """

    stream: Stream = field(repr=False)
    path: str = field(repr=False)
    readers: Sequence[Reader] = field(repr=False)
    kept: Kept = field(repr=False)
    placed: WrittenPositions | None = field(repr=False)
    _read: Mapping[str, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def sources(self) -> Sequence[str]:
        """The paths of what the senders write."""
        used = (writer for reader in self.readers for writer in self._used(reader))
        return list(dict.fromkeys(writer.path for writer in used))

    def reading(self, values: Sequence[Any]) -> ReadPatch:
        """Returns a copy with an `op` that uses these values of the senders."""
        result = copy.copy(self)
        result._read = dict(zip(self.sources, values, strict=True))
        return result

    def _used(self, reader: Reader) -> list[Writer]:
        wanted = frozenset[str]().union(*(self.kept.get(name, ()) for name in reader.names))
        found = [writer for writer in writers_in(reader.source) if not wanted.isdisjoint(writer.names)]
        return sorted(found, key=lambda writer: writer.names)

    def op(self, original_output: Any) -> Any:
        base = self.stream.values[self.path]
        if not isinstance(original_output, Tensor) or original_output.shape != base.shape:
            shown = tuple(original_output.shape) if isinstance(original_output, Tensor) else original_output
            raise PatchValueError(
                f"the value here is {shown}, and {tuple(base.shape)} on the corrupted inputs of the circuit: give "
                "inputs of the same shapes"
            )
        with without_torch_functions():
            value = base.clone()
            read = rows_of(value)  # a copy, if the channels are not the last in memory
            for reader in self.readers:
                for rows, columns in self._changes(reader):
                    read[:, columns] = read[:, columns] + rows  # `+=` of all columns fails with gradients
            value.copy_(read.view(value.shape))
            if self.stream.last in self.readers:
                self.stream.forget()
        return value

    def _changes(self, reader: Reader) -> Iterator[tuple[Tensor, Any]]:
        """Yields what is added to the value of a reader, and to which columns."""
        names = [name for name in reader.names if self.kept.get(name)]
        wanted = [self.kept[name] for name in names]
        kept = {id(writer): _mask(writer, wanted, self.placed) for writer in self._used(reader)}
        read = self.stream.changes(reader.source, kept, lambda writer: self.stream.written(writer, self._read))
        if read is None:
            return
        if reader.projection is None:
            yield read[0], slice(None)
            return
        weight = reader.projection.weight()
        for number, name in enumerate(names):
            columns = index_of(reader.projection.heads[reader.names.index(name)])
            yield read[number] @ weight[:, columns], columns
