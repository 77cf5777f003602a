"""Runs the cells of a sweep on one `PatchableGraph`, in one process, without repeating computations they share.

Each cell has the numbers of `with pg.patch(...): metric(pg(...))`. `CellRunner` runs impure patch maps exactly like
that. The others start with the setup, in one of three ways, each of which returns the same numbers or raises an error
with the reason. The runner then falls back to a simpler setup; a remark gives the reason.

    Plain      one cell, as in a plain loop
    Replayed   one cell; frames that end before its first patched value return recorded results
    Batched    several cells in the rows of one forward, also with recorded results

`Batched` checks that a batch returns the same numbers as single cells, once for each kind of inputs and paths.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.held_values import plain_tensors
from graphpatch_notebook.checks.equality import difference
from graphpatch_notebook.checks.model_state import ModuleState
from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.execution import (
    Entry,
    FrameNode,
    FrameReplay,
    PatchContext,
    frames_seen,
    leaves_of,
    own_tensors,
)
from graphpatch_notebook.experiments.engine.batching import Batching, RunCost, chunked
from graphpatch_notebook.experiments.engine.cells import Cell, CellResult, PatchMap
from graphpatch_notebook.experiments.engine.changed_positions import Place, read_at_last_only
from graphpatch_notebook.experiments.engine.clean_run import CleanRun
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import Measurement, measurement
from graphpatch_notebook.experiments.engine.purity import is_pure
from graphpatch_notebook.experiments.engine.rows import (
    RowsError,
    RowsPatch,
    is_close,
    parted,
    perturbed_cells,
    repeated,
    repeated_inputs,
    taken,
)
from graphpatch_notebook.experiments.engine.side_effects import ReferredValues
from graphpatch_notebook.experiments.engine.sweep_setup import SweepRequest, SweepSetup, sweep_setup
from graphpatch_notebook.experiments.engine.trimming import ReadElsewhereError, is_part, paired, watched_metric
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.values import readable_children
from graphpatch_notebook.warning_places import warn_each_time

_DEPENDS_ON_ORDER = (
    "the metric gives another number for the same output than before the cells ran: it depends on what it was given "
    "before, and cells that share forwards run in another order than in the loop; reset it, and use batch=None"
)
_READS_OTHERS = "the metric reads other positions for some of them than without patches"


class CellRunner:
    """Runs cells: one for each thread of a sweep.

    Args:
        pg: The graph.
        request: What is asked of the pure cells.
        look: A look at the model, if nothing has changed since.
        baseline: The metric without patches, if it is known.

    Raises:
        UnknownPathError: Some paths do not exist.
        ExperimentError: The metric does not return numbers.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        request: SweepRequest,
        *,
        look: ModuleState | None = None,
        baseline: Measurement | None = None,
    ) -> None:
        self._known_entries: dict[int, tuple[PatchMap, list[Entry]]] = {}
        self._metric_before: ReferredValues | None = None
        with torch.inference_mode(False), torch.set_grad_enabled(request.backward):
            self._follow(sweep_setup(pg, request, look, baseline))

    def _follow(self, setup: SweepSetup) -> None:
        """Switches to this setup."""
        self._setup = setup
        self._plain = Plain(setup)
        self._replays = Replays(setup) if setup.clean is not None and setup.replays else None
        self._replayed = Replayed(setup, self._replays) if self._replays is not None and setup.has_same_bits else None
        self._batched = Batched(setup) if setup.batching is not None else None

    @property
    def baseline(self) -> Measurement:
        """The metric without patches."""
        return self._setup.baseline

    @property
    def remarks(self) -> Sequence[str]:
        """Messages for the user about how the cells run."""
        return self._setup.remarks

    def chunks(self, cells: Sequence[Cell], entries_by_number: Mapping[int, list[Entry]]) -> list[list[Cell]]:
        """Groups pure cells into chunks for `run`, in the order in which to run them."""
        self._known_entries = {id(cell.patches): (cell.patches, entries_by_number[cell.number]) for cell in cells}
        clean, batching = self._setup.clean, self._setup.batching
        entries = [entries_by_number[cell.number] for cell in cells]
        if clean is None or batching is None:
            if self._replayed is not None:
                self._replayed.expect(entries)
            return [[cell] for cell in cells]
        problems = {n: why for n, own in enumerate(entries) if (why := batching.problem(own)) is not None}
        if problems:
            first = min(problems)
            self._setup = self._setup.remarked(
                f"{len(problems):,} of {len(cells):,} cells ran one by one: {problems[first]} (first {cells[first]})"
            )
        self._metric_before = ReferredValues(self._setup.request.metric)
        fitting = [number for number in range(len(cells)) if number not in problems]
        cuts = [clean.first_of(entry.target.path for entry in entries[number]) for number in fitting]
        groups = chunked(cuts, batching.cost, batching.most, batching.overhead)
        return [
            *([cells[fitting[i]] for i in group] for group in groups),
            *([cells[number]] for number in sorted(problems)),
        ]

    def run(self, cells: Sequence[tuple[int, PatchMap]]) -> list[CellResult]:
        """Returns the result of each cell, given by number and patch map. A cell that fails does not affect the others.

        Several cells at once must be pure (see `is_pure`); an impure cell runs as in a plain loop.
        """
        # Tensors made in inference mode have no version counter.
        with torch.inference_mode(False), torch.set_grad_enabled(self._setup.request.backward):
            if len(cells) > 1 and self._batched is not None:
                try:
                    return self._together(cells, self._batched)
                except ReadElsewhereError:
                    self._follow(self._setup.plain(_READS_OTHERS))
                except RowsError as reason:
                    self._follow(self._setup.without_batch(str(reason)))
                except torch.OutOfMemoryError:
                    half = len(cells) // 2
                    return [*self.run(cells[:half]), *self.run(cells[half:])]
                except Exception as error:  # one cell alone may be the cause
                    remark = f"some cells ran one by one: together they raised {type(error).__name__}"
                    self._setup = self._setup.remarked(remark)
            return [self._result(number, patches, is_whole=False) for number, patches in cells]

    def check_order(self, cell: Cell, result: CellResult | None) -> None:
        """Warns if the metric depends on what it was given before, after cells have shared forwards in another order.

        That it changes something need not be seen without patches, as of the best number so far, and need not matter.

        Args:
            cell: The cell that ran first.
            result: Its result; `None` if it did not run.
        """
        setup, before = self._setup, self._metric_before
        if before is None or before.has_same_marks(ReferredValues(setup.request.metric)):
            return
        now = self.run_whole(cell.number, cell.patches).measurement
        earlier = now if result is None else result.measurement
        is_same = now is None or earlier is None or now.is_close(earlier)
        with torch.inference_mode(False), torch.no_grad(), setup.pg.patch({}).quiet():
            is_same = is_same and setup.request.baseline(setup.pg).is_close(setup.baseline)
        if not is_same:
            self._setup = setup.remarked(_DEPENDS_ON_ORDER)
            warn_each_time(_DEPENDS_ON_ORDER, ExperimentWarning)

    @property
    def clean(self) -> CleanRun | None:
        """The run without patches; `None` if its results are not used again."""
        return None if self._replays is None else self._setup.clean

    @contextmanager
    def resumed(self, since: float) -> Iterator[Inputs]:
        """Yields inputs for runs in the block, which take the results of the clean run up to a time as they are.

        Args:
            since: The time; 0 for runs that compute everything.
        """
        replays = self._replays
        with torch.inference_mode(False), torch.set_grad_enabled(self._setup.request.backward):
            frames = frozenset[FrameNode]() if replays is None else replays.worthwhile(since)
            is_right = replays is not None and replays.are_equal_without(frames)
        with replays.without(frames) if replays is not None and is_right else nullcontext():
            yield self._setup.inputs

    def run_whole(self, number: int, patches: PatchMap) -> CellResult:
        """Runs a cell as in a plain loop, even if it is pure, and returns its result."""
        with torch.inference_mode(False), torch.set_grad_enabled(self._setup.request.backward):
            return self._result(number, patches, is_whole=True)

    def _together(self, cells: Sequence[tuple[int, PatchMap]], batched: Batched) -> list[CellResult]:
        """Runs cells in one forward; if the assumed batch dimension is wrong, looks it up and tries again."""
        entries = [self._entries(patches) for _, patches in cells]
        try:
            return batched.results(cells, entries)
        except (ReadElsewhereError, torch.OutOfMemoryError):
            raise
        except Exception:
            batching = self._setup.batching
            if batching is None or not batching.is_assumed:
                raise
            setup = self._setup.with_batch_looked_up()
        self._follow(setup)
        assert self._batched is not None
        return self._batched.results(cells, entries)

    def _result(self, number: int, patches: PatchMap, *, is_whole: bool) -> CellResult:
        try:
            if is_whole or not is_pure(patches):
                return CellResult(number, self._plain.measured(patches))
            if self._replayed is None:
                return CellResult(number, self._plain.measured(patches, self._entries(patches)))
            try:
                return CellResult(number, self._replayed.measured(patches, self._entries(patches)))
            except NotReplayableError:
                self._follow(self._setup.without_replay())
                return CellResult(number, self._plain.measured(patches))
        except Exception as error:
            return CellResult(number, None, f"{type(error).__name__}: {error}")

    def _entries(self, patches: PatchMap) -> list[Entry]:
        known = self._known_entries.get(id(patches))
        if known is None or known[0] is not patches:
            entries = captured(self._setup.pg).entries_of(patches)
            known = self._known_entries[id(patches)] = (patches, entries)
        return known[1]


# -- the three ways ----------------------------------------------------------------------------------------------------

_LITTLE_WORK = 0.05


class NotReplayableError(Exception):
    """With recorded results, the model returns something else (caught inside the package)."""


class Plain:
    """Runs a cell as in a plain loop.

    Args:
        setup: How the cells of the sweep run.
    """

    def __init__(self, setup: SweepSetup) -> None:
        self._setup = setup

    def measured(
        self, patches: PatchMap, entries: Sequence[Entry] | None = None, inputs: Inputs | None = None
    ) -> Measurement:
        """Returns the metric of a cell, given by its patch map, and by its entries if they are known.

        Args:
            patches: The patch map.
            entries: Its entries.
            inputs: Inputs in place of those of the sweep.
        """
        setup = self._setup
        graph = captured(setup.pg)
        with PatchContext(graph, patches, entries=entries):
            value = setup.request.metric((inputs or setup.request.inputs).run(setup.pg))
            if setup.request.backward:
                _backward(value)
        return measurement(value)


class Replays:
    """Runs in which some frames return the results of the clean run.

    Args:
        setup: How the cells of the sweep run; it has a clean run.
    """

    def __init__(self, setup: SweepSetup) -> None:
        assert setup.clean is not None
        self._setup, self._clean = setup, setup.clean
        self._modules: dict[frozenset[FrameNode], list[Module]] = {}
        self._are_equal: dict[frozenset[FrameNode], bool] = {frozenset(): True}

    @functools.cached_property
    def cost(self) -> RunCost:
        """The cost of the clean run."""
        return RunCost.of(self._clean.tree)

    def worthwhile(self, until: float) -> frozenset[FrameNode]:
        """Returns the frames that ended before a time; none if they do little: the comparison costs a run."""
        work = 1 - self.cost.fraction_after(until)
        return frozenset(self._clean.tree.replayable(until) if work > _LITTLE_WORK else ())

    def are_equal_without(self, frames: frozenset[FrameNode]) -> bool:
        """Whether the model returns the same where these frames return what they returned; compared once."""
        known = self._are_equal.get(frames)
        if known is None:
            known = self._are_equal[frames] = self._is_equal_without(frames)
        return known

    def _is_equal_without(self, frames: frozenset[FrameNode]) -> bool:
        with self.without(frames), self._setup.pg.patch({}).quiet():
            output = self._setup.inputs.run(self._setup.pg)
        expected, found = list(_tensors_inside(self._clean.output)), list(_tensors_inside(output))
        return len(expected) == len(found) and all(
            difference(a, b, "") is None for a, b in zip(expected, found, strict=True)
        )

    def without(self, frames: frozenset[FrameNode]) -> AbstractContextManager[None]:
        """Replays frames in the block."""
        values = {frame: own_tensors(frame.value) if frame.is_written_later else frame.value for frame in frames}
        replay = FrameReplay(self._clean.tree, values)
        modules = self._modules.get(frames)
        if modules is None:
            modules = self._modules[frames] = replay.modules()
        return frames_seen(replay, modules)


class Replayed:
    """Runs a cell, and replays the frames that end before its first patched value.

    Args:
        setup: How the cells of the sweep run; it has a clean run, with the bits of one on the whole inputs.
        replays: The replays of this run.
    """

    def __init__(self, setup: SweepSetup, replays: Replays) -> None:
        assert setup.clean is not None
        self._setup, self._clean, self._replays = setup, setup.clean, replays
        self._plain = Plain(setup)
        self._cells: Counter[float] = Counter()
        self._runs: Counter[float] = Counter()

    def expect(self, cells: Sequence[Sequence[Entry]]) -> None:
        """Notes which cells there are, given by their entries; without this, the decisions follow from those so far."""
        self._cells = Counter(map(self._first_of, cells))

    def measured(self, patches: PatchMap, entries: Sequence[Entry]) -> Measurement:
        """Returns the metric of a pure cell.

        Raises:
            NotReplayableError: With recorded results, the model returns something else.
        """
        until = self._first_of(entries)
        self._runs[until] += 1
        frames = frozenset(self._clean.tree.replayable(until))
        saved = self._replays.cost.fraction_of(frames)
        # A comparison is one more run, and replays the same frames.
        if max(self._cells[until], self._runs[until]) * saved <= 1 - saved:
            return self._plain.measured(patches, entries)
        if not self._replays.are_equal_without(frames):
            raise NotReplayableError
        try:
            with self._replays.without(frames):
                return self._plain.measured(patches, entries, self._setup.inputs)
        except Exception:
            if not self._setup.is_trimmed:
                raise
        return self._plain.measured(patches, entries)  # the metric may read an output that was skipped

    def _first_of(self, entries: Sequence[Entry]) -> float:
        return self._clean.first_of(entry.target.path for entry in entries)


class Batched:
    """Runs several cells in one forward.

    Args:
        setup: How the cells of the sweep run; it has a clean run, and a batching.
    """

    def __init__(self, setup: SweepSetup) -> None:
        assert setup.clean is not None
        assert setup.batching is not None
        self._setup, self._clean, self._batching = setup, setup.clean, setup.batching
        # By the places of frames, since these are the same in all sweeps.
        key = _key("rows without patches", self._clean, self._batching)
        self._checked_frames: set[frozenset[Place]] = self._clean.known.setdefault(key, set())
        self._never_meet = self._has_compared = False

    def results(self, cells: Sequence[tuple[int, PatchMap]], entries: Sequence[Sequence[Entry]]) -> list[CellResult]:
        """Returns the results of pure cells, which are given by number and patch map, and by their entries.

        Raises:
            RowsError: They cannot share a forward.
            ReadElsewhereError: For some cells, the metric reads logits that were not computed.
        """
        setup, batching = self._setup, self._batching
        problem = next(filter(None, map(batching.problem, entries)), None)
        if problem is not None:
            raise RowsError(problem)
        if not self._never_meet:
            _assure_rows_never_meet(setup, self._clean, batching)
            self._never_meet = True
        paths = list(dict.fromkeys(entry.target.path for own in entries for entry in own))
        until = self._clean.first_of(paths)
        frames = frozenset(self._clean.tree.replayable(until, batching.layouts) if setup.replays else ())
        # An extra row without patches is compared with the clean run.
        places = frozenset(frame.place for frame in frames)
        own_rows = [*entries, *([[]] if places not in self._checked_frames else [])]
        patches: PatchMap = {
            path: RowsPatch([[e for e in own if e.target.path == path] for own in own_rows], batching.of_paths[path])
            for path in paths
        }
        outputs: list[Any] | None = None
        if not self._has_compared:
            # Before the metric runs and gradients accumulate, which cannot be undone.
            with torch.no_grad(), setup.pg.patch(patches):
                outputs = self._outputs(frames, len(cells), len(own_rows))
            maps = [patch_map for _, patch_map in cells]
            self._has_compared = _assure_same_alone(setup, self._clean, batching, maps, outputs)
        with setup.pg.patch(patches):
            if outputs is None or setup.request.backward:
                outputs = self._outputs(frames, len(cells), len(own_rows))
            pairs = [self._result(number, output) for (number, _), output in zip(cells, outputs, strict=True)]
            values = [value for result, value in pairs if result.error is None]
            if setup.request.backward and values:
                _backward(torch.stack([_number(value) for value in values]).sum())
        self._checked_frames.add(places)
        return [result for result, _ in pairs]

    def _outputs(self, frames: frozenset[FrameNode], cells: int, rows: int) -> list[Any]:
        """Runs the model, under patches, and returns its output for each cell."""
        batching = self._batching
        inputs = repeated_inputs(self._setup.inputs.fresh(), batching.inputs, rows)
        with self._without(frames, rows):
            output = self._setup.pg(*inputs.args, **inputs.kwargs)
        _check_rows(output, self._clean, batching, rows)
        if rows > cells:
            _check_control(taken(output, batching.output, cells), self._clean)
        return parted(output, batching.output, cells)

    def _without(self, frames: frozenset[FrameNode], count: int) -> AbstractContextManager[None]:
        """Replays frames, and positions that patches do not change, in the block."""
        batching = self._batching
        values = {
            frame: repeated(frame.value, batching.layouts[frame], count, may_share=not frame.is_written_later)
            for frame in frames
        }
        at_last = read_at_last_only(batching.substitutes, self._clean.last_only)
        replay = FrameReplay(self._clean.tree, values, {**batching.substitutes, **at_last})
        return frames_seen(replay, replay.modules())

    def _result(self, number: int, output: Any) -> tuple[CellResult, Any]:
        metric = self._setup.request.metric
        try:
            value = watched_metric(metric, output) if self._setup.keeps_last_logits else metric(output)
            return CellResult(number, measurement(value)), value
        except (RowsError, ReadElsewhereError):
            raise
        except Exception as error:
            return CellResult(number, None, f"{type(error).__name__}: {error}"), None


# -- gradients, and what is in an output -------------------------------------------------------------------------------


def _backward(value: Any) -> None:
    number = _number(value)
    if number.requires_grad:
        number.backward()


def _number(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ExperimentError("backward=True needs a metric that gives one number, as a tensor")
    return value.reshape(())


def _tensors_inside(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yields the tensors in an output, those in objects such as caches too."""
    if isinstance(value, Tensor):
        yield value
        return
    seen = set() if seen is None else seen
    if id(value) in seen or callable(value) or isinstance(value, type):
        return
    seen.add(id(value))
    inside = readable_children(value)
    children = getattr(value, "__dict__", {}).values() if inside is None else [child for _, child in inside]
    for child in children:
        yield from _tensors_inside(child, seen)


# -- checks of batches -------------------------------------------------------------------------------------------------


def _key(test: str, clean: CleanRun, batching: Batching) -> Hashable:
    """Returns the key of a test: everything that its outcome depends on, except for the model."""
    return (test, clean.kind, frozenset(batching.of_paths), batching.is_assumed)


def _assure_rows_never_meet(setup: SweepSetup, clean: CleanRun, batching: Batching) -> None:
    """Checks that perturbed rows do not change a row without patches: all paths of the sweep are perturbed at once.

    The check is skipped if an earlier sweep passed it.

    Raises:
        RowsError: The row without patches differs from the clean run, or the model changes.
    """
    pg, known, test = setup.pg, clean.known, _key("rows never meet", clean, batching)
    if test in known:
        return
    assert setup.state is not None
    count = perturbed_cells(min(place.size for place in batching.of_paths.values()))
    patches: PatchMap = {path: RowsPatch([[]], place, perturbed=count) for path, place in batching.of_paths.items()}
    frames = clean.tree.replayable(clean.first_of(batching.of_paths), batching.layouts)
    replay = FrameReplay(
        clean.tree, {frame: repeated(frame.value, batching.layouts[frame], 1 + count) for frame in frames}
    )
    many = repeated_inputs(setup.inputs.fresh(), batching.inputs, 1 + count)
    try:
        with torch.no_grad(), frames_seen(replay, replay.modules()), pg.patch(patches).quiet():
            output = pg(*many.args, **many.kwargs)
    except (RowsError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        setup.state.restore()
        raise RowsError(f"on several rows it raises {type(error).__name__}: {error}") from None
    change = next(setup.state.changes(), None)
    if change is not None:  # such as a mask that is made for that many rows
        setup.state.restore()
        raise RowsError(f"on several rows it changes itself, as it does not on those of the inputs: {change}")
    _check_rows(output, clean, batching, 1 + count)
    _check_control(taken(output, batching.output, 0), clean)
    known[test] = True


def _check_rows(output: Any, clean: CleanRun, batching: Batching, count: int) -> None:
    """Raises a `RowsError` unless the output has the rows of `count` cells."""
    leaves = list(leaves_of(output))
    if len(leaves) != len(batching.output):
        raise RowsError("the model returned a value of another structure")
    for leaf, place, single in zip(leaves, batching.output, leaves_of(clean.output), strict=True):
        if place is None:
            if leaf is not single and leaf != single:
                raise RowsError(f"the output has {leaf!r} where it has {single!r} for one cell")
        elif place.dim is not None and leaf.shape[place.dim] != place.size * count:
            raise RowsError(f"the output has a tensor of shape {tuple(leaf.shape)} for {count} cells")


def _check_control(output: Any, clean: CleanRun) -> None:
    """Raises a `RowsError` unless the rows without patches are what the model returns without patches."""
    expected, found = _floats(clean.output), _floats(output)
    if not all(is_close(a, b) for a, b in zip(found, expected, strict=True)):
        raise RowsError("in one forward, patches of one cell reach the rows of another")


def _assure_same_alone(
    setup: SweepSetup, clean: CleanRun, batching: Batching, maps: Sequence[PatchMap], outputs: Sequence[Any]
) -> bool:
    """Compares the cell that changes the output most with the same cell in a plain loop, unless an earlier sweep did.

    If outputs are trimmed because the metric does not seem to read them, the metric is compared, too.

    Args:
        setup: How the cells of the sweep run.
        clean: The run without patches.
        batching: How cells share a forward.
        maps: The patch maps of cells that shared a forward.
        outputs: The output of each.

    Returns:
        Whether a patch had an effect; without one, the comparison proves nothing.

    Raises:
        RowsError: The outputs or metrics differ.
    """
    metric = setup.request.metric
    passed: WeakSet[Any] = clean.known.setdefault(_key("same alone", clean, batching), WeakSet())
    with suppress(TypeError):  # the metric has no hash, or cannot be referred to weakly
        if metric in passed:
            return True
    expected = _floats(clean.output)
    effects = [_distance(_floats(output), expected) for output in outputs]
    most = effects.index(max(effects))
    with setup.pg.patch(maps[most]).quiet():
        alone = setup.request.inputs.run(setup.pg)
        is_last = setup.keeps_last_logits
        is_same = is_part(outputs[most], alone, is_close, is_last=is_last)
        if is_same and setup.is_trimmed:
            # Of the same numbers: rounding may be more than a small difference of logits.
            trimmed = own_tensors(outputs[most])
            for own, whole in paired(trimmed, alone, is_last=is_last):
                if isinstance(own, Tensor):
                    own.copy_(whole)
            is_same = measurement(metric(alone)).is_close(measurement(metric(trimmed)))
    if not is_same:
        raise RowsError("in one forward with others, a cell has other numbers than in a forward of its own")
    with suppress(TypeError):
        if effects[most] > 0:
            passed.add(metric)
    return effects[most] > 0


def _distance(values: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    differences = [(a - b).abs() for a, b in zip(values, expected, strict=True)]
    total = sum(difference.sum().item() for difference in differences)
    if math.isfinite(total):
        return total
    return sum(difference.nan_to_num(0, 0, 0).sum().item() for difference in differences)


def _floats(output: Any) -> Sequence[Tensor]:
    return [tensor for tensor in plain_tensors(output) if tensor.is_floating_point()]
