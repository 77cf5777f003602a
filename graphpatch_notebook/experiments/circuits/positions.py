"""The sequence position of each row of the values that senders write, and whether later positions are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.checks.model_state import preserved
from graphpatch_notebook.components import find
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.circuits.nodes import Nodes
from graphpatch_notebook.experiments.circuits.stream import Move, Writer
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.methods.positions import (
    Positions,
    RowPositions,
    are_of_rows,
    counted_positions,
    counts_from_end,
    rows_of,
)
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import CustomPatch


class WrittenPositions:
    """The positions of the rows of the values that senders write, among the chosen positions.

    Attributes:
        labels: The chosen positions, counted from the start; numbers of columns, if each row of the batch has its own.

    Raises:
        ExperimentError: The positions of a stream are not known, or a position is out of range.
    """

    def __init__(
        self, root: Frame, nodes: Nodes, values: Mapping[str, Tensor], given: Positions | RowPositions
    ) -> None:
        shapes = {stream: tuple(values[path].shape[:-1]) for stream, path in nodes.streams.items()}
        self._numbers: dict[str, Tensor] = {}
        self._known: dict[Writer, Tensor] = {}
        dims = {stream: _dims(root, stream, shape) for stream, shape in shapes.items()}
        lost = next((writer for writer in nodes.writers if writer.stream not in dims), None)
        if lost is not None:
            raise ExperimentError(
                f"the positions of {lost.names[0]!r} are not known: its stack begins with what another one computes"
            )
        lengths = {stream: shapes[stream][dim] for stream, (dim, _) in dims.items()}
        longest = max(lengths.values())
        if not are_of_rows(given):
            if len(set(lengths.values())) > 1 and counts_from_end(given):
                raise ExperimentError(
                    f"positions={given!r} counts from the end, but stacks have {sorted(set(lengths.values()))} "
                    "positions: count from the start"
                )
            self.labels = counted_positions(given, longest)
            by_row = None
        else:
            if len(shapes) > 1:
                raise ExperimentError("positions of each row are those of one sequence, but the model has two stacks")
            by_row = rows_of(given, longest)
            self.labels = list(range(len(by_row[0])))
        for stream, shape in shapes.items():
            self._numbers[stream] = self._numbered(shape, *dims[stream], by_row)

    def _numbered(self, shape: tuple[int, ...], dim: int, batch: int | None, by_row: list[list[int]] | None) -> Tensor:
        """Returns for each row of a stream the number of its position among the chosen ones, or -1."""
        found = torch.full(shape, -1)
        if by_row is None:
            for number, position in enumerate(self.labels):
                if position < shape[dim]:
                    found.select(dim, position).fill_(number)
        elif batch is None or shape[batch] != len(by_row):
            count = "no" if batch is None else shape[batch]
            raise ExperimentError(f"positions has {len(by_row)} rows, but the batch has {count}")
        else:
            ordered = found.movedim((batch, dim), (0, 1))
            for row, positions in enumerate(by_row):
                ordered[row, positions] = torch.arange(len(positions)).view(-1, *[1] * (ordered.dim() - 2))
        return found.reshape(-1, 1)

    def of(self, writer: Writer) -> Tensor:
        """Returns for each row of a sender's value the number of its position in `labels`, or -1."""
        known = self._known.get(writer)
        if known is None:
            known = self._numbers[writer.stream]
            for step in reversed(writer.steps):
                known = step.back(known) if isinstance(step, Move) else known
            self._known[writer] = known = known.reshape(-1)
        return known

    def are_kept(self, writer: Writer, positions: Iterable[int]) -> Tensor:
        """Returns which rows of a sender's value are at some positions, as booleans."""
        numbers = [number for number, label in enumerate(self.labels) if label in positions]
        return torch.isin(self.of(writer), torch.tensor(numbers, dtype=torch.long))


def _dims(root: Frame, stream: str, shape: tuple[int, ...]) -> tuple[int, int | None]:
    """Returns the dimensions of the positions and of the batch in the stream of a stack."""
    component = find(root).get(f"{stream}layers[0].resid_pre")
    axes = () if component is None else component.axes
    if len(axes) != len(shape) + 1 or axes.count("position") != 1:
        raise ExperimentError(
            f"the positions of the stream {stream}layers[0].resid_pre are not known: "
            f"its dimensions are {', '.join(axes) or 'unknown'}"
        )
    return axes.index("position"), axes.index("batch") if "batch" in axes else None


def read_ahead(pg: PatchableGraph, inputs: Inputs) -> list[str]:
    """Returns the attention whose queries read later keys in a run, such as `layers[2].attn`: it is not causal."""
    found: list[str] = []

    def looking(name: str, axes: tuple[str, ...]) -> CustomPatch:
        def look(pattern: Tensor) -> Tensor:
            rows = pattern.movedim((axes.index("query"), axes.index("key")), (-2, -1))
            if bool(rows.triu(1).any()):
                found.append(name.removesuffix(".pattern"))
            return pattern

        return CustomPatch(look, requires_clone=False)

    patterns = {name: each.axes for name, each in pg.components.items() if name.endswith("attn.pattern")}
    patches: dict[str | NodePath, CustomPatch] = {
        name: looking(name, axes) for name, axes in patterns.items() if {"query", "key"} <= {*axes}
    }
    with preserved(captured(pg).module), torch.no_grad(), pg.patch(patches).quiet():
        inputs.run(pg)
    return found
