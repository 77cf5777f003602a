"""The plan of cells that share forwards: each cell has rows of its own in a batch.

Cells whose first patched values occur at about the same time run in one forward. What modules return that end before
these values is not computed again, and modules compute only the positions that patches have changed. Where the rows
are in each value is found by the first forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.held_values import all_modules
from graphpatch_notebook.capture.records import HELD_KINDS, Frame
from graphpatch_notebook.experiments.engine.changed_positions import ChangedPositions
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.rows import (
    BatchRows,
    CannotShareError,
    Layout,
    RowsPatch,
    layout_of,
    layout_of_output,
    parted,
    repeated,
    wild,
)
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patching import (
    FUSED_MODULES,
    NEVER,
    Entry,
    FrameNode,
    FrameRecording,
    FrameReplay,
    FrameTree,
    caches_of,
    does_nothing,
    frames_seen,
    has_hooks,
    innermost,
    leaves_of,
    own_tensors,
)
from graphpatch_notebook.patching.sharding import sharding_of
from graphpatch_notebook.torch_compat import has_global_hooks, is_any_compiled, may_compile
from graphpatch_notebook.values import ABSENT, IMMUTABLE, mapped

_LAST = 3
"""Behind the last mixing of positions there are the projection of the attention, the MLP and the head."""

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


class SharedPlan:
    """How cells share forwards. The first forward finds where the rows are; the caller restores the model.

    Args:
        pg: The graph.
        clean: The run without patches.
        targets: The values that cells patch, by path.
        batch: The number of cells in one forward, at most, or `"auto"`.
        count: The number of cells.
        is_by_entry: Whether patches change each entry of a value by itself: then no patch reads other positions.

    Raises:
        CannotShareError: Cells cannot share forwards.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        clean: CleanRun,
        targets: Mapping[str, Target],
        batch: int | str,
        count: int,
        *,
        is_by_entry: bool,
    ) -> None:
        if any(target.node.kind == "op" for target in targets.values()) and any(
            isinstance(module, FUSED_MODULES) for module in all_modules(captured(pg).module)
        ):
            raise CannotShareError("torch computes the model by other kernels where operations are patched")
        self._pg, self._clean, self._count = pg, clean, count
        self._input_rows = input_rows(clean.inputs)
        self._batch = next(rows.size for rows in self._input_rows if rows is not None and rows.dim is not None)
        nodes = clean.tree.root.walk()
        # Modules that compute only the positions that patches have changed.
        self._instead = {node: ChangedPositions(node.module, node.call) for node in nodes if node.module and node.call}
        for node in nodes:
            node.call = None
        self._most = most_rows(clean.inputs, batch)
        if self._instead and batch == "auto":
            self._most = min(2 * self._most, _MOST_ROWS)
        # Of the last modules of a language model, usually only the last position is read, if the metric reads no other.
        self._last: list[ChangedPositions] = []
        if is_by_entry and clean.inputs.kwargs.get(LOGITS) == 1:
            inner = {below for node in self._instead for below in node.walk()[1:]}
            outer = [node for node in nodes if node not in inner and (node in self._instead or _is_matrix(node.module))]
            last = sorted(outer, key=lambda node: node.ended)[-_LAST:]
            self._last = [own for node in last if (own := self._instead.get(node)) and own.has_positions]
        for own in self._last:
            own.only_last = False
        # What the first forward finds: where the rows are in the output, in patched values (without those that have
        # none), and in what frames return that need not be computed again.
        self._is_first = True
        self._output_rows: Layout = ()
        self._rows: dict[str, BatchRows] = {}
        self._frames: dict[FrameNode, Layout] = {}

    def first(self, cells: Sequence[Sequence[Entry]]) -> list[int]:
        """Returns the numbers of the cells, given by their entries, for the first forward; there may be none.

        It is for cells that are patched early: those that are patched late use what it finds.
        """
        plain = [
            number for number, own in enumerate(cells) if self._may_fit(own) and not any(e.restriction for e in own)
        ]
        return [plain[number] for number in self._grouped([cells[number] for number in plain], is_first=True)[0]]

    def groups(self, cells: Sequence[Sequence[Entry]]) -> list[list[int]]:
        """Returns the numbers of cells in groups that each run in one forward; those patched last come first."""
        return self._grouped(cells)[::-1]

    def _grouped(self, cells: Sequence[Sequence[Entry]], *, is_first: bool = False) -> list[list[int]]:
        costs = Costs.of(self._clean.tree, self._instead)
        extra = costs.overhead(*_size(self._clean.inputs))
        return costs.groups([self._occurred(entries) for entries in cells], self._most, extra, is_first=is_first)

    def _may_fit(self, entries: Sequence[Entry]) -> bool:
        paths: dict[int, str] = {}
        return all(
            entry.target.node.kind not in HELD_KINDS
            and entry.target.path in self._clean.marks
            and self._clean.marks[entry.target.path].occurred < NEVER
            and paths.setdefault(id(entry.target.node), entry.target.path) == entry.target.path
            for entry in entries
        )

    def fits(self, entries: Sequence[Entry]) -> bool:
        """Whether a cell can share a forward: each of its values has rows, and is patched as a whole, or in them."""
        clean = self._clean
        if not self._may_fit(entries) or any(entry.target.path not in self._rows for entry in entries):
            return False
        restricted = [(entry.target.path, entry.restriction) for entry in entries if entry.restriction is not None]
        if restricted and caches_of(captured(self._pg).root, clean.inputs.args, clean.inputs.kwargs):
            return False
        return all(
            where.is_whole_in(clean.marks[path].value.shape)
            and where.row_dim in (None, self._rows[path].dim)
            and (where.positions is None or where.dim != self._rows[path].dim)
            for path, where in restricted
        )

    @contextmanager
    def run(self, cells: Sequence[Sequence[Entry]]) -> Iterator[list[Any]]:
        """Runs cells, given by their entries, in one forward; yields their outputs. In the block, patches are active.

        In the first forward, the run without patches, and wild numbers at all paths, have rows of their own: the former
        must come out as it did.

        Raises:
            CannotShareError: It did not, or outputs have no rows.
        """
        count = len(cells) + 2 * self._is_first
        patches = self._patches(cells)
        with self._pg.patch(patches).quiet() if self._is_first else self._pg.patch(patches):
            output = self._forward(cells, count)
            if self._is_first:
                try:
                    self._learn(output, count, patches)
                except CannotShareError:
                    if not self._last:
                        raise
                    for own in self._last:
                        own.only_last = None
                    self._last = []
                    output = self._forward(cells, count)
                    self._learn(output, count, patches)
            yield parted(output, self._output_rows, count)[: len(cells)]

    def _forward(self, cells: Sequence[Sequence[Entry]], count: int) -> Any:
        tree, fresh = self._clean.tree, self._clean.inputs.fresh()
        args, kwargs = repeated((fresh.args, fresh.kwargs), self._input_rows, count)
        compared: set[FrameNode] = set()
        if self._is_first and len(cells) < self._count:
            compared = {node for node in tree.root.walk() if node.value is not ABSENT}
        replayable = () if self._is_first else tree.replayable(min(map(self._occurred, cells)), self._frames)
        values = {frame: repeated(frame.value, self._frames[frame], count) for frame in replayable}

        def compare(node: FrameNode, output: Any) -> None:
            with suppress(CannotShareError):  # else it is computed in each run
                self._frames[node] = layout_of(node.value, output, count, self._batch)

        replay = FrameReplay(tree, values, self._instead, compared, compare)
        with frames_seen(replay, tree.modules_around((*values, *self._instead, *compared))):
            return self._pg(*args, **kwargs)

    def _learn(self, output: Any, count: int, patches: Mapping[str, RowsPatch]) -> None:
        """Finds the rows in what the first forward returned.

        Raises:
            CannotShareError: There are none, or those without patches are not as they were.
        """
        self._output_rows = layout_of_output(self._clean.output, output, count, self._batch)
        self._is_first = False
        self._rows = {path: patch.rows for path, patch in patches.items() if patch.rows}
        for own in self._last:
            own.only_last = True
        found: dict[FrameNode, ChangedPositions] = {}
        frames = list(self._clean.tree.root.children.values())
        while frames:  # the outermost position-wise frames, and those of which this is not known yet
            node = frames.pop()
            known = self._instead.get(node)
            if known is not None and known.is_position_wise is not False:
                found[node] = known
            if known is None or not known.is_position_wise:
                frames += node.children.values()
        self._instead = found

    def _patches(self, cells: Sequence[Sequence[Entry]]) -> dict[Any, RowsPatch]:
        """Returns one patch map for cells, each in its rows; for all paths in the first forward."""
        marks = self._clean.marks
        paths = dict.fromkeys(entry.target.path for entries in cells for entry in entries)
        if self._is_first:
            paths = dict.fromkeys(path for path, mark in marks.items() if mark.occurred < NEVER)
        return {
            path: RowsPatch(
                [[entry for entry in entries if entry.target.path == path] for entries in cells],
                marks[path].value,
                None if self._is_first else self._rows[path],
                self._batch,
            )
            for path in paths
        }

    def _occurred(self, entries: Sequence[Entry]) -> float:
        return min((self._clean.marks[entry.target.path].occurred for entry in entries), default=NEVER)


def _is_matrix(module: Module | None) -> bool:
    return module is not None and any(p is not None and p.dim() > 1 for p in module._parameters.values())


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

    def groups(self, cuts: Sequence[float], most: int, extra: float, *, is_first: bool = False) -> list[list[int]]:
        """Returns the numbers of cells, grouped.

        Args:
            cuts: The time at which the first patched value of each cell occurs.
            most: The maximum number of cells in a group.
            extra: The fixed cost of a run, as a number of rows.
            is_first: Whether there is a run anyway, of which all frames are computed: it is the first group.
        """
        by_cut: dict[float, list[int]] = {}
        for number, cut in enumerate(cuts):
            by_cut.setdefault(cut, []).append(number)
        groups: list[list[int]] = [[]] if is_first else []
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


# -- the run without patches -------------------------------------------------------------------------------------------

LOGITS, _CACHE = "logits_to_keep", "use_cache"
_EARLY = ("input", "parameter", "buffer", "attribute")


@dataclass(kw_only=True, eq=False)
class Mark(Patch[Any]):
    """Records the first value of its node, and when it occurs."""

    observes_only: ClassVar[bool] = True
    tree: FrameTree
    any_shape: bool = True
    occurred: float = field(default=NEVER, init=False)
    value: Any = field(default=None, init=False)

    def op(self, original_output: Any) -> Any:
        if self.occurred == NEVER:
            self.occurred = self.tree.tick()
            self.value = own_tensors(original_output)  # the model may write into it later
        return original_output


@dataclass(frozen=True)
class CleanRun:
    """A run without patches.

    Attributes:
        inputs: The inputs of the model.
        output: What the model returned.
        tree: The frames, with the results of some of them.
        marks: The value of each path, and when it occurred.
    """

    inputs: Inputs
    output: Any
    tree: FrameTree
    marks: Mapping[str, Mark]

    @classmethod
    def of(
        cls,
        pg: PatchableGraph,
        inputs: Inputs,
        targets: Mapping[str, Target],
        is_kept: Callable[[FrameNode, Tensor], bool] = lambda *_: False,
    ) -> CleanRun:
        """Runs the model in the grad mode of the caller.

        Args:
            pg: The graph.
            inputs: The inputs of the model.
            targets: The values that are patched, by path; if there are none, no frame is recorded.
            is_kept: Whether to keep the call of a frame with one tensor.
        """
        tree = FrameTree()
        if not targets:
            return cls(inputs, inputs.run(pg), tree, {})
        chains = [_chain(target) for target in targets.values()]
        for chain, target in zip(chains, targets.values(), strict=True):
            _open(tree, chain, target)
        patched = {frame.module for chain in chains for frame in chain}
        # To record a dropout costs more than to repeat it.
        seen = [one for one in all_modules(captured(pg).module) if not does_nothing(one) or one in patched]
        marks: dict[Any, Mark] = {path: Mark(tree=tree) for path in targets}
        with frames_seen(FrameRecording(tree, is_kept), seen), pg.patch(marks).quiet():
            output = inputs.run(pg)
        return cls(inputs, output, tree, marks)


def _open(tree: FrameTree, chain: Iterable[Frame], target: Target) -> None:
    """Opens the frames that contain a value, so that the frames they call are kept."""
    node = tree.root
    for frame in chain:
        node = node.child(frame.module, 0 if frame.call is None else frame.call.call_index)
        node.is_open = node.is_open or frame is not target.frame or target.node.kind != "output"


def _chain(target: Target) -> list[Frame]:
    """Returns the frames that contain a value, the outermost first."""
    frame: Frame | None = target.frame
    chain: list[Frame] = []
    while frame is not None:
        chain.append(frame)
        frame = frame.parent
    return chain[::-1]


# -- outputs that the metric does not read -----------------------------------------------------------------------------


def trimmed_inputs(root: Frame, inputs: Inputs, targets: Iterable[Target]) -> list[Inputs]:
    """Returns inputs with arguments that make a run skip outputs; those that skip most are first, the same are last.

    Args:
        root: The root frame of the capture.
        inputs: The inputs of the model; arguments that they contain are not replaced.
        targets: The values that are patched.
    """
    given = {*inputs.kwargs, *(parameter.name for parameter in root.parameters[: len(inputs.args)])}
    free = {parameter.name for parameter in root.parameters} - given
    has_cache = any("past" in name or "cache" in name for name in given)
    without_cache: dict[str, Any] = {_CACHE: False} if _CACHE in free and not has_cache else {}
    found: list[dict[str, Any]] = [without_cache, {}] if without_cache else [{}]
    if LOGITS in free and "labels" not in given and not any(_is_late(root, target) for target in targets):
        found.insert(0, {**without_cache, LOGITS: 1})
    return [replace(inputs, kwargs={**inputs.kwargs, **extra}) for extra in found]


def _is_late(root: Frame, target: Target) -> bool:
    """Whether a value may occur after `logits_to_keep` is applied: in the model's own forward, or in its head."""
    if target.frame is root:
        return target.node.kind not in _EARLY
    frame = target.frame
    while frame.parent is not None and frame.parent is not root:
        frame = frame.parent
    first = next(root.calls(), None)
    return first is None or first.frame is not frame


def reads_no_more(metric: Callable[[Any], Any], clean: CleanRun, is_same: Callable[[Any, Any], bool]) -> bool:
    """Whether a metric reads none of the outputs that a run skipped.

    Args:
        metric: The metric.
        clean: A run on trimmed inputs.
        is_same: Compares two results of the metric.
    """
    output = clean.output
    logits = getattr(output, "logits", None)
    try:
        value = metric(own_tensors(output))
        if LOGITS not in clean.inputs.kwargs:
            return True
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            return False
        longer = torch.cat([wild(logits), logits], 1)
        return is_same(value, metric(mapped(output, lambda leaf: longer if leaf is logits else own_tensors(leaf))))
    except Exception:  # it reads an output that was skipped
        return False
