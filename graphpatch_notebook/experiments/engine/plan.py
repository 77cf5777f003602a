"""The plan of cells that share forwards, found by running the model without patches, also at twice the batch.

rows          where each value holds the rows of the batch, so that each cell has rows of its own
frames        what modules return that end before the first patched value of a cell: it is not computed again
instead       modules that compute only the positions that patches have changed
groups        cells whose first patched values occur at about the same time: each group is one forward
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.capture.held_values import all_modules
from graphpatch_notebook.checks.sharding import sharding_of
from graphpatch_notebook.execution import (
    FUSED_MODULES,
    NEVER,
    Entry,
    FrameNode,
    FrameReplay,
    FrameTree,
    caches_of,
    frames_seen,
    has_hooks,
    innermost,
    leaves_of,
)
from graphpatch_notebook.experiments.engine.changed_positions import ChangedPositions, position_wise
from graphpatch_notebook.experiments.engine.clean_run import CleanRun, recorded
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.rows import (
    BatchRows,
    CannotShareError,
    DoubledValue,
    Layout,
    RowsPatch,
    layout_of,
    parted,
    repeated,
)
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.torch_compat import has_global_hooks, is_any_compiled, may_compile
from graphpatch_notebook.values import ABSENT, IMMUTABLE

_TOKENS = {"cpu": 512, "other": 8192}
_MOST_ROWS = 64


def check_may_share(pg: PatchableGraph) -> None:
    """Checks that cells may share forwards at all.

    Raises:
        CannotShareError: They may not.
    """
    modules, graph = all_modules(captured(pg).module), captured(pg)
    reasons = {
        "there are hooks on modules, which may keep what they see": has_global_hooks() or any(map(has_hooks, modules)),
        "graphs of their own run in place of modules": graph.runs_own_graphs,
        "other patches are active": bool(graph.permanent) or innermost(graph) is not None,
        "parts of the model are compiled": may_compile() and is_any_compiled(modules),
        "the model is sharded over processes": sharding_of(graph.root) is not None,
    }
    if why := next((reason for reason, holds in reasons.items() if holds), None):
        raise CannotShareError(why)


@dataclass(frozen=True)
class SharedPlan:
    """How cells share forwards.

    Attributes:
        pg: The graph.
        clean: The run without patches.
        input_rows: Where the rows are in the inputs.
        output_rows: Where the rows are in the output.
        rows: Where the rows are in patched values, by path; without those that have none.
        frames: Where the rows are in the results of frames that need not be computed again.
        instead: Replacements for position-wise frames.
        most: The number of cells in one forward, at most.
    """

    pg: PatchableGraph
    clean: CleanRun
    input_rows: Layout
    output_rows: Layout
    rows: Mapping[str, BatchRows]
    frames: Mapping[FrameNode, Layout]
    instead: Mapping[FrameNode, ChangedPositions]
    most: int

    def fits(self, entries: Sequence[Entry]) -> bool:
        """Whether a cell can share a forward: each of its values has rows, and is patched as a whole, or in them."""
        paths: dict[int, str] = {}
        for entry in entries:
            path, where = entry.target.path, entry.restriction
            if path not in self.rows or paths.setdefault(id(entry.target.node), path) != path:
                return False
            if where is not None:
                dim, shape = self.rows[path].dim, self.clean.marks[path].value.shape
                has_cache = caches_of(captured(self.pg).root, self.clean.inputs.args, self.clean.inputs.kwargs)
                is_along_rows = where.positions is not None and where.dim == dim
                if has_cache or is_along_rows or where.row_dim not in (None, dim) or not where.is_whole_in(shape):
                    return False
        return True

    def groups(self, cells: Sequence[Sequence[Entry]]) -> list[list[int]]:
        """Returns the numbers of cells, given by their entries, in groups that each run in one forward.

        The groups whose cells are patched last come first: these use the most recorded results, and are checked.
        """
        costs = Costs.of(self.clean.tree, self.instead)
        extra = costs.overhead(*_size(self.clean.inputs))
        return costs.groups([self._first(entries) for entries in cells], self.most, extra)[::-1]

    def patches(self, cells: Sequence[Sequence[Entry]]) -> dict[Any, RowsPatch]:
        """Returns one patch map for cells, given by their entries, each in its rows."""
        paths = dict.fromkeys(entry.target.path for entries in cells for entry in entries)
        return {
            path: RowsPatch([[e for e in entries if e.target.path == path] for entries in cells], self.rows[path])
            for path in paths
        }

    def outputs(self, cells: Sequence[Sequence[Entry]]) -> list[Any]:
        """Runs cells, given by their entries, in one forward, and returns the output of each.

        Their `patches` must be active.
        """
        count, inputs, tree = len(cells), self.clean.inputs.fresh(), self.clean.tree
        args, kwargs = repeated((inputs.args, inputs.kwargs), self.input_rows, count)
        frames = tree.replayable(min(map(self._first, cells)), self.frames)
        values = {frame: repeated(frame.value, self.frames[frame], count) for frame in frames}
        replay = FrameReplay(tree, values, self.instead)
        with frames_seen(replay, replay.modules()):
            output = self.pg(*args, **kwargs)
        return parted(output, self.output_rows, count)

    def _first(self, entries: Sequence[Entry]) -> float:
        return min((self.clean.marks[entry.target.path].occurred for entry in entries), default=NEVER)


def shared_plan(pg: PatchableGraph, clean: CleanRun, targets: Mapping[str, Target], batch: int | str) -> SharedPlan:
    """Returns how cells share forwards; at first runs the model a few times. The caller restores the model.

    Args:
        pg: The graph.
        clean: The run without patches.
        targets: The values that are patched, by path.
        batch: The number of cells in one forward, at most, or `"auto"`.

    Raises:
        CannotShareError: Cells cannot share forwards.
    """
    modules = all_modules(captured(pg).module)
    if any(isinstance(one, FUSED_MODULES) for one in modules) and any(t.node.kind == "op" for t in targets.values()):
        raise CannotShareError("torch computes the model by other kernels where operations are patched")
    rows = input_rows(clean.inputs)
    output_rows, path_rows, frames = _rows_at_twice_the_batch(pg, clean, targets, rows)
    with torch.no_grad():
        instead = {node: ChangedPositions(module, call) for node, module, call in position_wise(clean.tree)}
    for node in clean.tree.root.walk():
        node.call = None  # frees the tensors of others
    most = most_rows(clean.inputs, batch)
    if instead and batch == "auto":
        most = min(2 * most, _MOST_ROWS)
    return SharedPlan(pg, clean, rows, output_rows, path_rows, frames, instead, most)


def _rows_at_twice_the_batch(
    pg: PatchableGraph, clean: CleanRun, targets: Mapping[str, Target], rows: Layout
) -> tuple[Layout, dict[str, BatchRows], dict[FrameNode, Layout]]:
    """Returns where the rows are in the output, in patched values, and in the results of frames.

    The second half of the batch has wild numbers at all paths, and must change nothing in the first.
    """
    args, kwargs = repeated((clean.inputs.args, clean.inputs.kwargs), rows, 2)
    tree = FrameTree()
    patches = {path: DoubledValue(mark.value) for path, mark in clean.marks.items() if mark.occurred < NEVER}
    try:
        output = recorded(pg, Inputs(args, kwargs), targets, tree, patches)
    except CannotShareError:
        raise
    except Exception as error:
        raise CannotShareError(f"on several rows it raises {type(error).__name__}: {error}") from None
    output_rows = layout_of(clean.output, output)
    if any(own is not None and own.dim is None for own in output_rows):
        raise CannotShareError("the output has a tensor that is one for all rows")
    frames = {}
    doubled = {node.place: node.value for node in tree.root.walk()}
    for node in clean.tree.root.walk():
        if node.value is not ABSENT:
            with suppress(CannotShareError):  # else it is computed in each run
                frames[node] = layout_of(node.value, doubled.get(node.place))
    return output_rows, {path: patch.rows for path, patch in patches.items() if patch.rows}, frames


def most_rows(inputs: Inputs, batch: int | str) -> int:
    """Returns the number of cells in one forward, at most: `batch`, unless this is `"auto"`.

    Raises:
        CannotShareError: The inputs have no rows.
    """
    input_rows(inputs)
    return int(batch) if batch != "auto" else rows_at_once(*_size(inputs))


def input_rows(inputs: Inputs) -> Layout:
    """Returns the position of the rows in the inputs: dimension 0 of all tensors with the size of the first one there.

    Raises:
        CannotShareError: No input has rows, or one is an object (such as a cache) that cannot be repeated.
    """
    leaves = list(leaves_of((inputs.args, inputs.kwargs)))
    if other := next((leaf for leaf in leaves if not isinstance(leaf, (Tensor, *IMMUTABLE))), None):
        raise CannotShareError(f"an input is of type {type(other).__name__}, which cannot be repeated")
    size = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    if size is None:
        raise CannotShareError("no input has a batch dimension")
    return tuple(
        (BatchRows(0, size) if leaf.dim() and leaf.shape[0] == size else BatchRows(None))
        if isinstance(leaf, Tensor)
        else None
        for leaf in leaves
    )


def _size(inputs: Inputs) -> tuple[int, str]:
    """Returns the number of tokens (or similar units) in the inputs, and the type of the device."""
    first = next(leaf for leaf in leaves_of((inputs.args, inputs.kwargs)) if isinstance(leaf, Tensor) and leaf.dim())
    is_vectors = first.is_floating_point() and first.dim() > 1
    return first.numel() // (first.shape[-1] or 1 if is_vectors else 1), first.device.type


# -- which cells run together ------------------------------------------------------------------------------------------

# Rough costs: only the order of magnitude of their ratio matters. Nothing is timed, so that the groups of a sweep, and
# its rounding errors, are the same in each run.
_WORK_OF_A_CALL = 20_000
_IDLE_WORK = 10_000
_REPLAYED_CALL = 0.25
"""What a call that returns a recorded result costs beside its kernels, as a fraction of another call."""
_OPERATIONS_PER_CALL_TIME = {"cpu": 5e6, "other": 5e8}


def rows_at_once(tokens: int, device: str) -> int:
    """Returns the number of cells to run in one forward, for the number of tokens of one cell."""
    return max(1, min(_MOST_ROWS, _TOKENS["cpu" if device == "cpu" else "other"] // max(1, tokens)))


@dataclass(frozen=True)
class Costs:
    """The estimated cost of a run.

    Attributes:
        ends: For each frame, without the frames that it calls: the time when it ended, its work per row, and its work
            for a row that no patch has changed.
    """

    ends: Sequence[tuple[float, int, int]]

    @classmethod
    def of(cls, tree: FrameTree, changed_only: Iterable[FrameNode] = ()) -> Costs:
        """Returns the cost of a recorded run; frames in `changed_only` compute only positions that patches change."""
        idle = {inner: 0 for node in changed_only for inner in node.walk()} | dict.fromkeys(changed_only, _IDLE_WORK)
        ends = []
        for node in tree.root.walk():
            if node.module is not None and node.ended < NEVER:
                is_table = isinstance(node.module, torch.nn.Embedding)
                own = 0 if is_table else sum(p.numel() for p in node.module._parameters.values() if p is not None)
                whole = own + _WORK_OF_A_CALL
                ends.append((node.ended, whole, idle.get(node, whole)))
        return cls(ends)

    @functools.cached_property
    def total(self) -> int:
        """The work of all frames."""
        return sum(work for _, work, _ in self.ends) or 1

    def after(self, since: float) -> float:
        """Returns the fraction of the work that is done after a time."""
        return sum(work for ended, work, _ in self.ends if ended >= since) / self.total

    def idle(self, since: float, until: float) -> float:
        """Returns the fraction of the work that an unchanged row costs between two times."""
        return sum(idle for ended, _, idle in self.ends if since <= ended < until) / self.total

    def overhead(self, tokens: int, device: str) -> float:
        """Returns the fixed cost of a run, as a number of rows."""
        speed = _OPERATIONS_PER_CALL_TIME["cpu" if device == "cpu" else "other"]
        return len(self.ends) * speed / (2 * self.total * max(1, tokens))

    def groups(self, cuts: Sequence[float], most: int, extra: float) -> list[list[int]]:
        """Returns the numbers of cells, grouped.

        Args:
            cuts: The time at which the first patched value of each cell occurs.
            most: The maximum number of cells in a group.
            extra: The fixed cost of a run, as a number of rows.
        """
        by_cut: dict[float, list[int]] = {}
        for number, cut in enumerate(cuts):
            by_cut.setdefault(cut, []).append(number)
        groups: list[list[int]] = []
        since = 0.0
        for cut in sorted(by_cut):
            cells, rest = by_cut[cut], self.after(cut)
            run = rest + extra * (rest + (1 - rest) * _REPLAYED_CALL)
            # Joining an earlier group saves a run, but these cells then compute frames that they could have replayed.
            is_small = groups and len(groups[-1]) + len(cells) <= most
            if is_small and len(cells) * self.idle(since, cut) <= run:
                groups[-1] += cells
                continue
            groups += [cells[start : start + most] for start in range(0, len(cells), most)]
            since = cut
        return groups
