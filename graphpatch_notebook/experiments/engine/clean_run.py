"""The run without patches: records when each patched value occurs, and what the frames before it return."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor

from graphpatch_notebook.capture.held_values import all_modules, plain_tensors
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.checks.call_signature import CallSignature
from graphpatch_notebook.checks.model_state import ModuleState
from graphpatch_notebook.execution import (
    NEVER,
    FrameFlow,
    FrameNode,
    FrameRecording,
    FrameTree,
    FrameWatch,
    does_nothing,
    frames_seen,
    own_tensors,
    storage_of,
)
from graphpatch_notebook.experiments.engine.cells import PatchMap
from graphpatch_notebook.experiments.engine.changed_positions import (
    Place,
    PositionFlow,
    RecordedFlow,
    SameSteps,
    ValueReads,
)
from graphpatch_notebook.experiments.engine.inputs import Inputs, SameInputs
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch

_known: WeakKeyDictionary[PatchableGraph, tuple[ModuleState, dict[Hashable, Any]]] = WeakKeyDictionary()


def shown_earlier(pg: PatchableGraph, state: ModuleState) -> dict[Hashable, Any]:
    """Returns the cached test results of a graph. The cache is cleared when its model has changed.

    Args:
        pg: The graph.
        state: The current state of its model.
    """
    known = _known.get(pg)
    if known is None or next(known[0].changes(), None) is not None:
        known = _known[pg] = (state, {})
    return known[1]


def kind_of_run(inputs: Inputs) -> Hashable:
    """Returns a key that is equal for runs that take the same steps, unless Python reads values."""
    signature = CallSignature.of({**{str(i): value for i, value in enumerate(inputs.args)}, **inputs.kwargs})
    return object() if signature.objects else signature


@dataclass(kw_only=True, eq=False)
class Mark(Patch[Any]):
    """Records the first value of its node, and when it occurs."""

    observes_only: ClassVar[bool] = True
    tree: FrameTree
    any_shape: bool = True
    occurred: float = field(default=NEVER, init=False)
    value: Any = field(default=None, init=False)
    noticed: Callable[[Any], None] | None = None

    def op(self, original_output: Any) -> Any:
        if self.occurred == NEVER:
            self.occurred = self.tree.tick()
            self.value = original_output
        if self.noticed is not None:
            self.noticed(original_output)
        return original_output


@dataclass(frozen=True)
class CleanRun:
    """The results of a run without patches.

    Attributes:
        returned: The output, for one call of the metric, which may write into it; `None` after that.
        output: A copy of the output.
        tree: The frames, with the results of some of them.
        marks: The value of each path, and when it occurred.
        state_change: What the run changed in the model, as a message; `None` for nothing.
        kind: A key that is equal for runs that take the same steps.
        known: The cached test results of earlier sweeps.
        last_only: The places of frames whose results are read at the last position only.
        last_read: When Python last read values; `NEVER` if reads were not recorded.
    """

    returned: Any
    output: Any
    tree: FrameTree
    marks: Mapping[str, Mark]
    state_change: str | None
    kind: Hashable
    known: dict[Hashable, Any]
    last_only: Container[Place] = frozenset()
    last_read: float = NEVER

    def first_of(self, paths: Iterable[str]) -> float:
        """Returns the time at which the first of `paths` occurred."""
        return min((self.marks[path].occurred for path in paths), default=NEVER)

    def span_of(self, target: Target) -> tuple[float, float]:
        """Returns when the outermost frame began and ended that holds a value and was recorded as a whole.

        If this is not known for a value, the time is from 0 to `NEVER`.
        """
        node: FrameNode | None = self.tree.root
        for frame in _chain(target):
            node = None if node is None else node.children.get((id(frame.module), _call_index(frame)))
            if node is not None and not node.is_open and node.ended != NEVER:
                return node.began, node.ended
        return 0, NEVER


def clean_run(
    pg: PatchableGraph,
    inputs: Inputs,
    targets: Sequence[Target],
    *,
    notes_reads: bool = False,
    keeps_pairs: bool = False,
    state: ModuleState | None = None,
) -> CleanRun:
    """Runs the model without patches, in the grad mode of the caller, and returns the recorded results.

    Args:
        pg: The graph.
        inputs: The inputs of the model.
        targets: The values that are patched.
        notes_reads: Whether to record when Python reads values.
        keeps_pairs: Whether to keep the inputs and results of position-wise frames.
        state: The current state of the model, if there is a snapshot of it.
    """
    state = ModuleState(captured(pg).module) if state is None else state
    known, kind = shown_earlier(pg, state), kind_of_run(inputs)
    if not notes_reads:
        run = _recorded(pg, inputs, targets, lambda _tree, _given: _Watch(state=state))
        return run.shown(kind, known)
    key = ("flow", kind, keeps_pairs, frozenset(target.path for target in targets))
    earlier: RecordedFlow | None = known.get(key)
    if earlier is not None:
        pairs = earlier if keeps_pairs else None
        run = _recorded(pg, inputs, targets, lambda _tree, _given: _Watch(SameSteps(earlier.steps), pairs))
        if run.took_same_steps():
            return run.shown(kind, known, earlier.last_only, last_read=0)
        del known[key]
    weights = (*captured(pg).module.parameters(), *captured(pg).module.buffers())

    def following(tree: FrameTree, given: Iterable[Tensor]) -> _Watch:
        mode = PositionFlow(tree, weights, given)
        return _Watch(mode, mode if keeps_pairs else None, state)

    run = _recorded(pg, inputs, targets, following)
    mode = run.watch.mode
    assert isinstance(mode, PositionFlow)
    found = RecordedFlow(
        mode.steps,
        frozenset(node.place for node in run.tree.root.walk() if node.pair is not None),
        frozenset(node.place for node in mode.read_at_last_only(run.output)),
    )
    is_after = all(mark.occurred > mode.last_of_all for mark in run.marks.values())
    if mode.last == 0 and is_after and run.state_change is None:
        # All values that Python reads are constants, so a run that takes the same steps has the same flow.
        known[key] = found
    return run.shown(kind, known, found.last_only, mode.last_of_all)


@dataclass(frozen=True)
class _Watch:
    """The observers of a run.

    Attributes:
        mode: Receives the calls of torch.
        pairs: Determines which frames are position-wise; `None` if that is not needed.
        state: The model before the run, to detect changes of its state; `None` if that is not needed.
    """

    mode: SameSteps | PositionFlow | None = None
    pairs: FrameFlow | None = None
    state: ModuleState | None = None


@dataclass(frozen=True)
class _Recorded:
    watch: _Watch
    tree: FrameTree
    marks: Mapping[str, Mark]
    output: Any
    state_change: str | None

    def took_same_steps(self) -> bool:
        return isinstance(self.watch.mode, SameSteps) and self.watch.mode.is_same

    def shown(
        self,
        kind: Hashable,
        known: dict[Hashable, Any],
        last_only: Container[Place] = frozenset(),
        last_read: float = NEVER,
    ) -> CleanRun:
        _keep_from_metric(self.tree, self.output)
        copy = own_tensors(self.output)
        return CleanRun(self.output, copy, self.tree, self.marks, self.state_change, kind, known, last_only, last_read)


def _recorded(
    pg: PatchableGraph,
    inputs: Inputs,
    targets: Sequence[Target],
    make_watch: Callable[[FrameTree, Iterable[Tensor]], _Watch],
) -> _Recorded:
    """Records a run; repeats it if something wrote into the recorded result of a frame."""
    tree, is_spoilt = _opened(targets), True
    while is_spoilt:
        fresh = SameInputs.of(inputs.fresh())
        watch = make_watch(tree, plain_tensors((fresh.args, fresh.kwargs)))
        recording = FrameRecording(tree, captured(pg).module, watch.pairs, watch.state)
        with watch.mode or nullcontext():
            marks, output = watched_run(pg, fresh, targets, tree, recording)
        is_spoilt = recording.close()
    return _Recorded(watch, tree, marks, output, recording.state_change)


def _opened(targets: Sequence[Target]) -> FrameTree:
    tree = FrameTree()
    for target in targets:
        _open(tree, target)
    return tree


def paths_read_after(pg: PatchableGraph, inputs: Inputs, targets: Sequence[Target]) -> set[str]:
    """Returns the paths after which Python reads values that may derive from patched ones."""
    tree = FrameTree()
    inputs = SameInputs.of(inputs.fresh())
    given = plain_tensors((inputs.args, inputs.kwargs))
    reads = ValueReads(tree, [*captured(pg).module.parameters(), *captured(pg).module.buffers(), *given])
    with reads:
        marks, _ = watched_run(pg, inputs, targets, tree, FrameRecording(tree, captured(pg).module), reads.notice)
    return {path for path, mark in marks.items() if mark.occurred < reads.last}


def _keep_from_metric(tree: FrameTree, output: Any) -> None:
    """Copies recorded values that share memory with the output, into which a metric may write."""
    shared = set(map(storage_of, plain_tensors(output)))
    for node in tree.root.walk():
        if node.value is not None and not shared.isdisjoint(map(storage_of, plain_tensors(node.value))):
            node.value, node.is_written_later = own_tensors(node.value), True
        if node.pair is not None and not shared.isdisjoint(map(storage_of, node.pair)):
            node.pair = own_tensors(node.pair)


def watched_run(
    pg: PatchableGraph,
    inputs: Inputs,
    targets: Sequence[Target],
    tree: FrameTree,
    watch: FrameWatch,
    noticed: Callable[[Any], None] | None = None,
) -> tuple[dict[str, Mark], Any]:
    """Runs the model without patches, and returns the marks and the output."""
    marks = {target.path: Mark(tree=tree, noticed=noticed) for target in targets}
    patches: PatchMap = marks
    fresh = inputs.fresh()
    patched = {frame.module for target in targets for frame in _chain(target)}
    # To record a dropout costs more than to repeat it.
    seen = [one for one in all_modules(captured(pg).module) if not does_nothing(one) or one in patched]
    with frames_seen(watch, seen), pg.patch(patches).quiet():
        return marks, pg(*fresh.args, **fresh.kwargs)


def _open(tree: FrameTree, target: Target) -> None:
    """Opens the frames that contain a value, so that the frames they call are kept."""
    node = tree.root
    for frame in _chain(target):
        node = node.child(frame.module, _call_index(frame))
        node.is_open = node.is_open or frame is not target.frame or target.node.kind != "output"


def _chain(target: Target) -> list[Frame]:
    """Returns the frames that contain a value, the outermost first."""
    frame: Frame | None = target.frame
    chain: list[Frame] = []
    while frame is not None:
        chain.append(frame)
        frame = frame.parent
    return chain[::-1]


def _call_index(frame: Frame) -> int:
    return 0 if frame.call is None else frame.call.call_index
