"""Which cells run in one forward, and where their rows are.

Batching   where the rows are in patched values, frame results and the output, and how many cells fit
chunked    groups cells whose first patched values occur at about the same time; each group is one forward
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from graphpatch_notebook.capture.records import HELD_KINDS, Frame
from graphpatch_notebook.checks.dimensions import Dimensions, NoBatchError, dimensions_of
from graphpatch_notebook.execution import (
    NEVER,
    Entry,
    FrameNode,
    FrameTree,
    caches_of,
    leaves_of,
)
from graphpatch_notebook.experiments.engine.changed_positions import ChangedPositions, substitutes
from graphpatch_notebook.experiments.engine.clean_run import CleanRun, paths_read_after
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.rows import BatchRows, Layout, RowsError, row_inputs
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.values import (
    IMMUTABLE,
    ContainerSpec,
    TensorSpec,
    ValueSpec,
    key_text,
    readable_children,
)

# -- chunks ------------------------------------------------------------------------------------------------------------

# Rough costs: only the order of magnitude of their ratio matters. Nothing is timed, so that the chunks of a sweep, and
# its rounding errors, are the same in each run.
_WORK_OF_A_CALL = 20_000
_IDLE_WORK_OF_A_CALL = 10_000
_REPLAYED_CALL = 0.25
"""What a call that returns a recorded result costs beside its kernels, as a fraction of another call."""
_OPERATIONS_PER_CALL_TIME = {"cpu": 5e6, "other": 5e8}
_TOKENS = {"cpu": 512, "other": 8192}
_MOST_ROWS = 64


@dataclass(frozen=True)
class RunCost:
    """The estimated cost of a run.

    Attributes:
        ends: For each frame, without the frames that it calls: the time when it ended, its work per row, and its work
            for a row that no patch has changed.
        works: The work of each frame, without the frames that it calls.
        total: The sum of the work.
        calls: The number of frames.
    """

    ends: tuple[tuple[float, int, int], ...]
    works: Mapping[FrameNode, int]
    total: int
    calls: int

    @classmethod
    def of(cls, tree: FrameTree, changed_only: Container[FrameNode] = ()) -> RunCost:
        """Returns the cost of a recorded run; frames in `changed_only` compute only positions that patches change."""
        ends, works = [], {}
        for node, is_idle in _frames(tree.root, changed_only):
            if node.module is None or node.ended == NEVER:
                continue
            is_table = isinstance(node.module, torch.nn.Embedding)
            own = 0 if is_table else sum(p.numel() for p in node.module._parameters.values() if p is not None)
            whole = works[node] = own + _WORK_OF_A_CALL
            ends.append((node.ended, whole, _IDLE_WORK_OF_A_CALL if node in changed_only else 0 if is_idle else whole))
        return cls(tuple(ends), works, sum(works.values()) or 1, len(ends))

    def fraction_after(self, since: float) -> float:
        """Returns the fraction of the work that is done after a time."""
        return sum([work for ended, work, _ in self.ends if ended >= since]) / self.total

    def fraction_of(self, frames: Iterable[FrameNode]) -> float:
        """Returns the fraction of the work that is done in frames, and in those that they call."""
        return sum([self.works.get(node, 0) for frame in frames for node in frame.walk()]) / self.total

    def idle(self, since: float, until: float) -> float:
        """Returns the fraction of the work that an unchanged row costs between two times."""
        return sum([idle for ended, _, idle in self.ends if since <= ended < until]) / self.total


def _frames(root: FrameNode, changed_only: Container[FrameNode]) -> list[tuple[FrameNode, bool]]:
    """Returns a frame and those below it, with whether each is inside a frame of `changed_only`."""
    found = [(root, False)]
    for node, is_idle in found:
        is_inside = is_idle or node in changed_only
        found += [(child, is_inside) for child in node.children.values()]
    return found


def rows_at_once(tokens: int, device: str, *, is_sparse: bool = False) -> int:
    """Returns the number of cells to run in one forward.

    Args:
        tokens: The number of tokens of one cell.
        device: The type of the device.
        is_sparse: Whether most of the work is done only for tokens that patches change.
    """
    at_once = _TOKENS["cpu" if device == "cpu" else "other"] * (2 if is_sparse else 1)
    return max(1, min(_MOST_ROWS, at_once // max(1, tokens)))


def overhead(cost: RunCost, tokens: int, device: str) -> float:
    """Returns the fixed cost of a run, as a number of rows."""
    speed = _OPERATIONS_PER_CALL_TIME["cpu" if device == "cpu" else "other"]
    return cost.calls * speed / (2 * cost.total * max(1, tokens))


def chunked(cuts: Sequence[float], cost: RunCost, most: int, extra: float) -> list[list[int]]:
    """Returns the numbers of cells, grouped into chunks.

    Args:
        cuts: The time at which the first patched value of each cell occurs.
        cost: The cost of a run.
        most: The maximum number of cells in a chunk.
        extra: The fixed cost of a run, as a number of rows.
    """
    by_cut: dict[float, list[int]] = {}
    for number, cut in enumerate(cuts):
        by_cut.setdefault(cut, []).append(number)
    chunks: list[list[int]] = []
    open_chunk: list[int] = []
    since = 0.0
    for cut in sorted(by_cut):
        cells, rest = by_cut[cut], cost.fraction_after(cut)
        run = rest + extra * (rest + (1 - rest) * _REPLAYED_CALL)
        # Joining an earlier chunk saves a run, but these cells then compute frames that they could have replayed.
        is_joined = open_chunk and len(open_chunk) + len(cells) <= most
        if is_joined and len(cells) * cost.idle(since, cut) <= run:
            open_chunk += cells
            continue
        if open_chunk:
            chunks.append(open_chunk)
        for start in range(0, len(cells), most):
            open_chunk, since = cells[start : start + most], cut
            if start + most < len(cells):
                chunks.append(open_chunk)
    return [*chunks, open_chunk] if open_chunk else chunks


def most_cells(inputs: Inputs, batch: int | str) -> int:
    """Returns the number of cells to run in one forward, at least 2.

    Raises:
        RowsError: One cell is enough work for a forward, or the inputs have no rows.
    """
    row_inputs(inputs)
    tokens, device = _size(inputs)
    most = rows_at_once(tokens, device) if batch == "auto" else int(batch)
    if most < 2:
        raise RowsError(f"one forward has {tokens:,} tokens already")
    return most


# -- where the rows are ------------------------------------------------------------------------------------------------

RowLayouts: TypeAlias = "tuple[Layout, dict[FrameNode, Layout], dict[str, BatchRows], dict[str, str]]"
"""The rows in the output, in frame results and in patched values, and why some patched values have none."""

_SHARED = "its value is one for all rows"
_ONE_FOR_ALL = "the output has a tensor of shape {} that is one for all rows"
_UNREACHED = "the model does not reach it on these inputs"


@dataclass(frozen=True)
class Batching:
    """How cells share a forward.

    Attributes:
        inputs: Where the rows are in the inputs.
        output: Where the rows are in the output.
        layouts: Where the rows are in what frames returned.
        of_paths: Where the rows are in patched values.
        shapes: The shapes of patched values in the clean run; `None` if the model is given a cache, so that rows do not
            begin at position 0.
        problems: Why some paths cannot be patched in a batch, by path.
        most: The maximum number of cells in one forward.
        cost: The cost of a run.
        overhead: The fixed cost of a run, as a number of rows.
        substitutes: Replacements for frames, which compute only positions that patches change.
        is_assumed: Whether dimension 0 is assumed to be the batch because of its size.
    """

    inputs: Layout
    output: Layout
    layouts: Mapping[FrameNode, Layout]
    of_paths: Mapping[str, BatchRows]
    shapes: Mapping[str, Sequence[int]] | None
    problems: Mapping[str, str]
    most: int
    cost: RunCost
    overhead: float
    substitutes: Mapping[FrameNode, ChangedPositions]
    is_assumed: bool = False

    def problem(self, entries: Sequence[Entry]) -> str | None:
        """Returns why a cell cannot share a forward, as a message; `None` if it can."""
        nodes: dict[int, str] = {}
        for entry in entries:
            path = entry.target.path
            if path in self.problems:
                return f"{path!r}: {self.problems[path]}"
            if nodes.setdefault(id(entry.target.node), path) != path:
                return f"{path!r}: other patches of the cell are on parts of the same value"
            where = entry.restriction
            if where is not None and (
                self.shapes is None
                or not where.is_whole_in(self.shapes[path])
                or (where.positions is not None and where.dim == self.of_paths[path].dim)
                or where.row_dim not in (None, self.of_paths[path].dim)
            ):
                return f"{path!r}: the patch is for some steps, for rows, or for positions that are not there"
        return None


def batching_of(
    pg: PatchableGraph,
    inputs: Inputs,
    clean: CleanRun,
    targets: Sequence[Target],
    batch: int | str,
    *,
    may_assume: bool = True,
) -> Batching:
    """Returns how cells share a forward.

    If dimension 0 of every relevant value has the size of the batch, it is assumed to be the batch until a run shows
    otherwise. If not, `checks.dimensions` determines the dimension.

    Raises:
        RowsError: Cells cannot share a forward.
    """
    layout = row_inputs(inputs)
    tokens, device = _size(inputs)
    most = most_cells(inputs, batch)
    for leaf in leaves_of(clean.output):
        if not isinstance(leaf, (Tensor, *IMMUTABLE)):
            kind = type(leaf).__name__
            raise RowsError(
                f"the output holds a {kind}, which has no rows; some models leave it out with use_cache=False"
            )
        if isinstance(leaf, Tensor) and leaf.dim() == 0:
            raise RowsError(_ONE_FOR_ALL.format(()))
    instead = substitutes(clean.tree, most)
    if instead and batch == "auto":
        most = rows_at_once(tokens, device, is_sparse=True)
    cost = RunCost.of(clean.tree, instead)
    extra = overhead(cost, tokens, device)
    unreached = {path: _UNREACHED for path, mark in clean.marks.items() if mark.occurred == NEVER}
    held = {target.path: _SHARED for target in targets if target.node.kind in HELD_KINDS}
    more = {**_read_after(pg, inputs, clean, targets), **_asks_for_identity(targets), **unreached, **held}
    size = next(rows.size for rows in layout if rows is not None and rows.dim is not None)
    moving = [target.path for target in targets if target.path not in {**unreached, **held}]
    assumed = _assumed(clean, moving, size) if may_assume else None
    output, layouts, of_paths, problems = assumed or _looked_up(pg, clean, [t for t in targets if t.path in moving])
    problems = {**problems, **more}
    shapes = {path: mark.value.shape for path, mark in clean.marks.items() if isinstance(mark.value, Tensor)}
    has_cache = bool(caches_of(captured(pg).root, inputs.args, inputs.kwargs))
    is_assumed = assumed is not None
    return Batching(
        layout,
        output,
        layouts,
        of_paths,
        None if has_cache else shapes,
        problems,
        most,
        cost,
        extra,
        instead,
        is_assumed,
    )


def _asks_for_identity(targets: Sequence[Target]) -> dict[str, str]:
    """Returns the paths in modules that check whether two inputs are the same object: batching breaks that identity."""
    why = "nn.MultiheadAttention treats inputs that are the same object differently"
    return {target.path: why for target in targets if _is_within(target.frame, nn.MultiheadAttention)}


def _is_within(frame: Frame | None, kind: type[nn.Module]) -> bool:
    while frame is not None and not isinstance(frame.module, kind):
        frame = frame.parent
    return frame is not None


def _read_after(pg: PatchableGraph, inputs: Inputs, clean: CleanRun, targets: Sequence[Target]) -> dict[str, str]:
    """Returns the paths after which Python reads values: the model may then take different branches for each cell."""
    why = "the model reads values, and may behave differently in each cell"
    if clean.last_read == NEVER:
        # This run did not record reads, but the capture did.
        has_doubts = any(frame.doubts for frame in captured(pg).root.walk())
        return dict.fromkeys(clean.marks, why) if has_doubts else {}
    if all(mark.occurred > clean.last_read for mark in clean.marks.values()):
        return {}
    return dict.fromkeys(paths_read_after(pg, inputs, targets), why)


def _assumed(clean: CleanRun, paths: Sequence[str], size: int) -> RowLayouts | None:
    """Returns the rows if dimension 0 of patched values and of the output has the size of the batch, else `None`."""

    def layout_of(value: Any) -> Layout | None:
        leaves = list(leaves_of(value))
        if all(leaf.dim() > 0 and leaf.shape[0] == size for leaf in leaves if isinstance(leaf, Tensor)):
            return tuple(BatchRows(0, size) if isinstance(leaf, Tensor) else None for leaf in leaves)
        return None

    output = layout_of(clean.output)
    if any(not isinstance(leaf, Tensor) and leaf is not None for leaf in leaves_of(clean.output)):
        return None  # it may be the batch size
    values = [clean.marks[path].value for path in paths]
    if output is None or any(not isinstance(value, Tensor) or layout_of(value) is None for value in values):
        return None
    layouts = {node: layout_of(node.value) for node in _kept(clean)}
    return output, {node: own for node, own in layouts.items() if own}, dict.fromkeys(paths, BatchRows(0, size)), {}


def _kept(clean: CleanRun) -> list[FrameNode]:
    return [node for node in clean.tree.root.walk() if node.problem is None and node.value is not None]


def _looked_up(pg: PatchableGraph, clean: CleanRun, targets: Sequence[Target]) -> RowLayouts:
    """Returns the rows as derived from the dimensions of captured values."""
    root = captured(pg).root
    known = dimensions_of(root)
    output = _layout(known, clean.output, root.output_node.spec)
    for leaf, place in zip(leaves_of(clean.output), output, strict=True):
        if place is not None and place.dim is None and leaf.numel() > 0:
            raise RowsError(_ONE_FOR_ALL.format(tuple(leaf.shape)))
    frames = _captured_frames(clean.tree.root, root)
    layouts = {}
    for node in _kept(clean):
        with suppress(RowsError):
            if node in frames:
                layouts[node] = _layout(known, node.value, frames[node].output_node.spec)
    of_paths: dict[str, BatchRows] = {}
    problems: dict[str, str] = {}
    for target in targets:
        value = clean.marks[target.path].value
        try:
            rows = _rows(known, value, target.spec) if isinstance(value, Tensor) else None
        except RowsError as problem:
            problems[target.path] = str(problem)
            continue
        if rows is not None and rows.dim is not None:
            of_paths[target.path] = rows
        else:
            problems[target.path] = "it is not a tensor" if rows is None else _SHARED
    return output, layouts, of_paths, problems


def _captured_frames(node: FrameNode, frame: Frame) -> dict[FrameNode, Frame]:
    """Returns the captured frame of each frame below `node`, which is the root or corresponds to `frame`."""
    found: dict[FrameNode, Frame] = {}
    calls = [frame] if node.module is None else [call.frame for call in frame.calls()]
    by_key = {(id(own.module), 0 if own.call is None else own.call.call_index): own for own in calls}
    for key, child in node.children.items():
        if key in by_key:
            found |= {child: by_key[key], **_captured_frames(child, by_key[key])}
    return found


def _layout(known: Dimensions, value: Any, spec: ValueSpec | None) -> Layout:
    """Returns the rows in a nested container, derived from the spec of the captured value.

    Raises:
        RowsError: The batch dimension of a tensor is unknown.
    """
    inside = None if isinstance(value, (Tensor, *IMMUTABLE)) else readable_children(value)
    if inside is None:
        return (_rows(known, value, spec) if isinstance(value, Tensor) else None,)
    found: list[BatchRows | None] = []
    for key, child in inside:
        own = spec.child(key_text(key)) if isinstance(spec, ContainerSpec) else None
        found += _layout(known, child, None if own is None else own[1])
    return tuple(found)


def _rows(known: Dimensions, value: Tensor, spec: ValueSpec | None) -> BatchRows:
    if not isinstance(spec, TensorSpec) or len(spec.shape) != value.dim():
        raise RowsError(
            f"the capture had no value like one of shape {tuple(value.shape)}, so which of its dimensions is the batch "
            "is not known; make the PatchableGraph with inputs and flags like those of the sweep"
        )
    try:
        dim = known.batch_dim(spec)
    except NoBatchError as problem:
        raise RowsError(str(problem)) from None
    return BatchRows(None) if dim is None else BatchRows(dim, value.shape[dim])


def _size(inputs: Inputs) -> tuple[int, str]:
    """Returns the number of tokens (or similar units) in the inputs, and the type of the device."""
    first = next(leaf for leaf in leaves_of((inputs.args, inputs.kwargs)) if isinstance(leaf, Tensor) and leaf.dim())
    is_vectors = first.is_floating_point() and first.dim() > 1
    return first.numel() // (first.shape[-1] or 1 if is_vectors else 1), first.device.type
