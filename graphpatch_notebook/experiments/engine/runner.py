"""Runs the cells of a sweep on one `PatchableGraph`, in one process, without computing what they have in common.

    CellRunner
    ├── alone      one cell in one forward, in which frames before its first patched value return recorded results
    └── together   several cells in the rows of one forward, likewise; one row more has no patches, and is looked at

Each cell has the numbers of `with pg.patch(...): metric(pg(...))`. Patch maps that are not pure run just like that;
so does all else where it is not certain that one of the two gives these numbers, and a remark says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.checks.equality import difference
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.execution import Entry, frames_seen
from graphpatch_notebook.execution.replay import FrameNode, FrameReplay, own_tensors
from graphpatch_notebook.experiments.engine.batch_rows import (
    RowsError,
    RowsPatch,
    parted,
    repeated,
    repeated_inputs,
    taken,
)
from graphpatch_notebook.experiments.engine.batching import row_work
from graphpatch_notebook.experiments.engine.batching_checks import (
    assure_rows_never_meet,
    assure_same_alone,
    check_control,
    check_rows,
)
from graphpatch_notebook.experiments.engine.cells import Cell, CellResult, PatchMap
from graphpatch_notebook.experiments.engine.changed_positions import read_at_last_only
from graphpatch_notebook.experiments.engine.chunking import chunked
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import Measurement, baseline_of, measurement
from graphpatch_notebook.experiments.engine.purity import is_pure
from graphpatch_notebook.experiments.engine.shared_setup import CommonWork, common_work
from graphpatch_notebook.experiments.engine.trimming import ReadElsewhereError, watched_metric
from graphpatch_notebook.inspection.resolution import resolve
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.values import readable_children

_READS_OTHERS = "the metric reads other positions for some of them than without patches"
_UNVERIFIED_RUNS = 2


class CellRunner:
    """What runs cells: made once for a sweep in each thread that takes part.

    Args:
        pg: The graph.
        inputs: What the model runs on.
        metric: From the output of the model to numbers.
        paths: All paths that pure cells patch.
        batch: `"auto"`, the number of cells in one forward, or `None` for one after the other.
        backward: Whether gradients of the metric are accumulated.

    Attributes:
        baseline: What the metric gives without patches.
        remarks: What is to be known of how the cells are run, in words.

    Raises:
        UnknownPathError: Some paths do not exist.
        ExperimentError: The metric gives no numbers.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        inputs: Inputs,
        metric: Callable[[Any], Any],
        paths: Sequence[str],
        *,
        batch: int | str | None = "auto",
        backward: bool = False,
    ) -> None:
        self._pg = pg
        self._metric = metric
        self._backward = backward
        self._batch = None if batch == 1 else batch
        with torch.inference_mode(False), torch.set_grad_enabled(backward):
            self._common: CommonWork = common_work(pg, inputs, metric, paths, batch=self._batch, backward=backward)
        self.baseline: Measurement = self._common.baseline
        self.remarks: list[str] = self._common.remarks
        self._runs_until: dict[frozenset[FrameNode], int] = {}
        self._checked_frames: set[frozenset[FrameNode]] = set()
        self._has_compared = False
        self._known_entries: dict[int, tuple[PatchMap, list[Entry]]] = {}

    def chunks(self, cells: Sequence[Cell], entries_by_number: Mapping[int, list[Entry]]) -> list[list[Cell]]:
        """Returns pure cells in the portions in which they are best given to `run`, in the best order."""
        self._known_entries = {id(cell.patches): (cell.patches, entries_by_number[cell.number]) for cell in cells}
        common = self._common
        if common.survey is None or common.rows is None:
            return [[cell] for cell in cells]
        entries = [self._entries(cell.patches) for cell in cells]
        problems = {n: why for n, own in enumerate(entries) if (why := common.rows.problem(own)) is not None}
        if problems:
            self._remark(f"{len(problems):,} of {len(cells):,} cells ran one by one: {problems[min(problems)]}")
        fitting = [number for number in range(len(cells)) if number not in problems]
        cuts = [self._cut(entries[number]) for number in fitting]
        groups = chunked(cuts, common.rows.work, common.rows.most, common.rows.overhead)
        return [
            *([cells[fitting[i]] for i in group] for group in groups),
            *([cells[number]] for number in sorted(problems)),
        ]

    def run(self, cells: Sequence[tuple[int, PatchMap]]) -> list[CellResult]:
        """Returns a result for each cell (given by number and patch map); none keeps the others from theirs.

        Several at once are pure (see `purity`); what is not runs as in a plain loop.
        """
        # Tensors of inference mode do not tell whether somebody writes into them.
        with torch.inference_mode(False), torch.set_grad_enabled(self._backward):
            if len(cells) > 1 and self._common.rows is not None:
                try:
                    return self._in_rows(cells)
                except ReadElsewhereError:
                    self._give_up_all(_READS_OTHERS)
                except RowsError as reason:
                    self._give_up_rows(str(reason))
                except torch.OutOfMemoryError:
                    half = self._common.rows.most = len(cells) // 2
                    return [*self.run(cells[:half]), *self.run(cells[half:])]
                except Exception as error:  # of one cell, perhaps
                    self._remark(f"some cells ran one by one: together they raised {type(error).__name__}")
            return [self._result(number, patches) for number, patches in cells]

    def run_whole(self, number: int, patches: PatchMap) -> CellResult:
        """Returns the result of a cell that runs as in a plain loop, whatever its patches are."""
        with torch.inference_mode(False), torch.set_grad_enabled(self._backward):
            return self._result(number, patches, is_whole=True)

    def _entries(self, patches: PatchMap) -> list[Entry]:
        known = self._known_entries.get(id(patches))
        if known is None or known[0] is not patches:
            entries = captured(self._pg).entries_of(patches)
            known = self._known_entries[id(patches)] = (patches, entries)
        return known[1]

    def _cut(self, entries: Sequence[Entry]) -> float:
        assert self._common.survey is not None
        return self._common.survey.came_up([entry.target.path for entry in entries])

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    def _give_up_rows(self, why: str) -> None:
        self._common.rows = None
        if self._common.inputs is self._common.full_inputs:
            self._remark(f"cells ran one by one: {why}")
        else:
            self._give_up_all(why)

    def _give_up_all(self, why: str) -> None:
        common = self._common
        common.inputs, common.keeps_last_logits = common.full_inputs, False
        common.rows = common.survey = None
        self._remark(f"cells ran one by one, each as a whole: {why}")
        # What was left out of its run may have mattered.
        with self._pg.patch({}).quiet():
            output = common.full_inputs.run(self._pg)
        self.baseline = common.baseline = baseline_of(self._metric, output)

    # -- one cell ------------------------------------------------------------------------------------------------------

    def _result(self, number: int, patches: PatchMap, *, is_whole: bool = False) -> CellResult:
        try:
            return CellResult(number, self._alone(patches, is_whole=is_whole or not is_pure(patches)))
        except Exception as error:
            return CellResult(number, None, f"{type(error).__name__}: {error}")

    def _alone(self, patches: PatchMap, *, is_whole: bool) -> Measurement:
        common = self._common
        # Where others share forwards, this one is no part of what was compared: nothing is left out of its run.
        is_whole = is_whole or common.survey is None or common.inputs is not common.full_inputs
        frames = frozenset() if is_whole else self._left_out(patches)
        with self._without(frames), self._pg.patch(patches):
            value = self._metric(common.full_inputs.run(self._pg))
            if self._backward:
                _backward(value)
        return measurement(value)

    def _measured(self, output: Any) -> Any:
        """Returns what the metric gives for the output of a run, which may be one that leaves out earlier logits."""
        return watched_metric(self._metric, output) if self._common.keeps_last_logits else self._metric(output)

    def _left_out(self, patches: PatchMap) -> frozenset[FrameNode]:
        """Returns the frames whose results a run under these patches can take from the record."""
        frames = self._frames_before(patches)
        if not frames:
            return frames
        count = self._runs_until[frames] = self._runs_until.get(frames, 0) + 1
        if count <= _UNVERIFIED_RUNS:  # to compare costs a run: not where it would not pay
            return frozenset()
        if count == _UNVERIFIED_RUNS + 1 and not self._is_replay_equal(frames):
            self._common.replays = False
            self._remark("every cell ran as a whole: with recorded results the model does not return the same")
            return frozenset()
        return frames

    def _frames_before(self, patches: PatchMap) -> frozenset[FrameNode]:
        """Returns the frames that are over before the first patched value comes up."""
        assert self._common.survey is not None
        if not self._common.replays:
            return frozenset()
        return frozenset(self._common.survey.tree.replayable(self._cut(self._entries(patches))))

    def _is_replay_equal(self, frames: frozenset[FrameNode]) -> bool:
        assert self._common.survey is not None
        with self._without(frames), self._pg.patch({}).quiet():
            output = self._common.inputs.run(self._pg)
        expected, found = list(_tensors_inside(self._common.survey.output)), list(_tensors_inside(output))
        return len(expected) == len(found) and all(
            difference(a, b, "") is None for a, b in zip(expected, found, strict=True)
        )

    def _without(self, frames: frozenset[FrameNode]) -> AbstractContextManager[None]:
        """Leaves frames out of the run in the block."""
        if not frames:
            return nullcontext()
        survey = self._common.survey
        assert survey is not None
        values = {frame: own_tensors(frame.value) if frame.is_written_later else frame.value for frame in frames}
        replay = FrameReplay(survey.tree, values)
        return frames_seen(replay, replay.modules())

    def _without_in_rows(self, frames: frozenset[FrameNode], count: int) -> AbstractContextManager[None]:
        """Leaves frames, and positions that are as without patches, out of a run of several interventions."""
        survey, rows = self._common.survey, self._common.rows
        assert rows is not None
        assert survey is not None
        values = {
            frame: repeated(frame.value, rows.layouts[frame], count, may_share=not frame.is_written_later)
            for frame in frames
        }
        at_last = read_at_last_only(rows.stand_ins, survey)
        replay = FrameReplay(survey.tree, values, {**rows.stand_ins, **at_last})
        return frames_seen(replay, replay.modules())

    # -- several cells in rows -----------------------------------------------------------------------------------------

    def _in_rows(self, cells: Sequence[tuple[int, PatchMap]]) -> list[CellResult]:
        """Runs cells together; where it was only assumed where rows are, and that fails, looks, and tries once more."""
        common = self._common
        assert common.rows is not None
        assert common.survey is not None
        try:
            return self._together(cells)
        except (ReadElsewhereError, torch.OutOfMemoryError):
            raise
        except Exception:
            if not common.rows.is_assumed or self._batch is None:
                raise
            targets = [resolve(captured(self._pg).root, path) for path in common.survey.marks]
            common.rows = row_work(self._pg, common.inputs, common.survey, targets, self._batch, may_assume=False)
            return self._together(cells)

    def _together(self, cells: Sequence[tuple[int, PatchMap]]) -> list[CellResult]:
        common = self._common
        rows, survey = common.rows, common.survey
        assert rows is not None
        assert survey is not None
        entries = [self._entries(patches) for _, patches in cells]
        problem = next(filter(None, map(rows.problem, entries)), None)
        if problem is not None:
            raise RowsError(problem)
        paths = list(dict.fromkeys(entry.target.path for own in entries for entry in own))
        frames = frozenset(survey.tree.replayable(survey.came_up(paths), rows.layouts) if common.replays else ())
        assure_rows_never_meet(self._pg, common.inputs, survey, rows)
        with_control = frames not in self._checked_frames
        own_rows = [*entries, *([[]] if with_control else [])]
        patches: PatchMap = {
            path: RowsPatch([[e for e in own if e.target.path == path] for own in own_rows], rows.of_paths[path])
            for path in paths
        }

        def outputs() -> list[Any]:
            inputs = repeated_inputs(common.inputs.fresh(), rows.inputs, len(own_rows))
            with self._without_in_rows(frames, len(own_rows)):
                output = self._pg(*inputs.args, **inputs.kwargs)
            check_rows(output, survey, rows, len(own_rows))
            if with_control:
                check_control(taken(output, rows.output, len(cells)), survey)
            return parted(output, rows.output, len(cells))

        found: list[Any] | None = None
        if not self._has_compared:
            # Before the metric is asked, and before there are gradients, which cannot be taken back.
            with torch.no_grad(), self._pg.patch(patches):
                found = outputs()
            self._has_compared = assure_same_alone(self._pg, common, self._metric, [p for _, p in cells], found)
        with self._pg.patch(patches):
            if found is None or self._backward:
                found = outputs()
            pairs = [self._row_result(number, own) for (number, _), own in zip(cells, found, strict=True)]
            if self._backward:
                self._backpropagate([value for result, value in pairs if result.error is None])
        self._checked_frames.add(frames)
        return [result for result, _ in pairs]

    def _backpropagate(self, values: Sequence[Any]) -> None:
        if values:
            _backward(torch.stack([_number(value) for value in values]).sum())

    def _row_result(self, number: int, output: Any) -> tuple[CellResult, Any]:
        try:
            value = self._measured(output)
            return CellResult(number, measurement(value)), value
        except (RowsError, ReadElsewhereError):
            raise
        except Exception as error:
            return CellResult(number, None, f"{type(error).__name__}: {error}"), None


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


def _number(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ExperimentError("backward=True needs a metric that gives one number, as a tensor")
    return value.reshape(())


def _backward(value: Any) -> None:
    number = _number(value)
    if number.requires_grad:
        number.backward()
