"""What a run without patches tells: when each patched value comes up, and what the frames before it return."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.checks.model_state import ModuleState
from graphpatch_notebook.execution import FrameWatch, frames_seen
from graphpatch_notebook.execution.replay import (
    NEVER,
    FrameFlow,
    FrameRecording,
    FrameTree,
    all_modules,
    own_tensors,
    storage_of,
    tensors_in,
)
from graphpatch_notebook.experiments.engine.cells import PatchMap
from graphpatch_notebook.experiments.engine.earlier_sweeps import kind_of_run, shown_earlier
from graphpatch_notebook.experiments.engine.inputs import Inputs, SameInputs
from graphpatch_notebook.experiments.engine.position_flow import Flow, Place, PositionFlow
from graphpatch_notebook.experiments.engine.steps import SameSteps
from graphpatch_notebook.experiments.engine.value_reads import ValueReads
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch


@dataclass(kw_only=True, eq=False)
class Mark(Patch[Any]):
    """Notes when its node comes up first, and the value."""

    observes_only: ClassVar[bool] = True
    tree: FrameTree
    any_shape: bool = True
    came_up: float = field(default=NEVER, init=False)
    value: Any = field(default=None, init=False)
    noticed: Callable[[Any], None] | None = None

    def op(self, original_output: Any) -> Any:
        if self.came_up == NEVER:
            self.came_up = self.tree.tick()
            self.value = original_output
        if self.noticed is not None:
            self.noticed(original_output)
        return original_output


@dataclass
class Survey:
    """What one run told.

    Attributes:
        returned: What the model returned, for the metric: it may write into it.
        output: A copy of that.
        tree: The frames, with what some of them returned.
        marks: When each path came up, and what value.
        state_change: What the run changed in the model, in words; `None` for nothing.
        kind: What other runs have in common with it that do the same.
        known: What other sweeps have shown.
        last_only: The places of frames whose results are read at the last position only.
        last_read: When Python looked at values last; `NEVER` where nobody took note of that.
    """

    returned: Any
    output: Any
    tree: FrameTree
    marks: dict[str, Mark]
    state_change: str | None
    kind: Hashable
    known: dict[Hashable, Any]
    last_only: Container[Place]
    last_read: float = NEVER

    def take_returned(self) -> Any:
        """Returns what the model returned, once."""
        returned, self.returned = self.returned, None
        return returned

    def came_up(self, paths: Sequence[str]) -> float:
        """Returns when the first of `paths` came up."""
        return min((self.marks[path].came_up for path in paths), default=NEVER)


def survey(
    pg: PatchableGraph,
    inputs: Inputs,
    targets: Sequence[Target],
    *,
    notes_reads: bool = False,
    keeps_pairs: bool = False,
    state: ModuleState | None = None,
) -> Survey:
    """Runs the model without patches, and returns what that told; gradients are as the caller has them.

    Args:
        pg: The graph.
        inputs: What it runs on.
        targets: The values that are patched.
        notes_reads: Whether to note when Python looks at values.
        keeps_pairs: Whether to keep what frames are given and return that work on each position alone.
        state: The model as it is, if there is a snapshot of it.
    """
    state = ModuleState(captured(pg).module, is_look=True) if state is None else state
    known, kind = shown_earlier(pg, state), kind_of_run(inputs)
    key = ("flow", kind, keeps_pairs, frozenset(target.path for target in targets))
    flow: Flow | None = known.get(key) if notes_reads else None
    tree = _opened(targets)
    while True:
        fresh = SameInputs.of(inputs.fresh())
        mode: SameSteps | PositionFlow | None = None
        pairs: FrameFlow | None = flow
        if flow is not None:
            mode = SameSteps(flow.steps)
        elif notes_reads:
            weights = (*captured(pg).module.parameters(), *captured(pg).module.buffers())
            pairs = mode = PositionFlow(tree, weights, tensors_in((fresh.args, fresh.kwargs)))
        seen_state = state if flow is None else None
        recording = FrameRecording(tree, captured(pg).module, pairs if keeps_pairs else None, seen_state)
        with mode or nullcontext():
            marks, output = watched_run(pg, fresh, targets, tree, recording)
        if isinstance(mode, SameSteps) and not mode.is_same:
            known.pop(key, None)
            flow, tree = None, _opened(targets)
        elif not recording.close():
            break
    last_only = flow.last_only if flow is not None else frozenset[Place]()
    last_read = 0 if flow is not None else NEVER
    if isinstance(mode, PositionFlow):
        found = Flow(
            mode.steps,
            frozenset(node.place for node in tree.root.walk() if node.pair is not None),
            frozenset(node.place for node in mode.read_at_last_only(output)),
        )
        last_only, last_read = found.last_only, mode.last_of_all
        is_after = all(mark.came_up > last_read for mark in marks.values())
        if mode.last == 0 and is_after and recording.state_change is None:
            # What Python looks at is made of constants: another run that takes the same steps does the same.
            known[key] = found
    _keep_from_metric(tree, output)
    return Survey(output, own_tensors(output), tree, marks, recording.state_change, kind, known, last_only, last_read)


def _opened(targets: Sequence[Target]) -> FrameTree:
    tree = FrameTree()
    for target in targets:
        _open(tree, target)
    return tree


def paths_read_after(pg: PatchableGraph, inputs: Inputs, targets: Sequence[Target]) -> set[str]:
    """Returns the paths after whose values Python looks at what may derive from patched ones."""
    tree = FrameTree()
    inputs = SameInputs.of(inputs.fresh())
    given = tensors_in((inputs.args, inputs.kwargs))
    reads = ValueReads(tree, [*captured(pg).module.parameters(), *captured(pg).module.buffers(), *given])
    with reads:
        marks, _ = watched_run(pg, inputs, targets, tree, FrameRecording(tree, captured(pg).module), reads.notice)
    return {path for path, mark in marks.items() if mark.came_up < reads.last}


def _keep_from_metric(tree: FrameTree, output: Any) -> None:
    """Sees to it that a metric that writes into the output does not write into what is recorded."""
    shared = {storage_of(leaf) for leaf in tensors_in(output)}
    for node in tree.root.walk():
        if node.value is not None and any(storage_of(leaf) in shared for leaf in tensors_in(node.value)):
            node.value, node.is_written_later = own_tensors(node.value), True
        if node.pair is not None and any(storage_of(leaf) in shared for leaf in node.pair):
            node.pair = own_tensors(node.pair)


def watched_run(
    pg: PatchableGraph,
    inputs: Inputs,
    targets: Sequence[Target],
    tree: FrameTree,
    watch: FrameWatch,
    noticed: Callable[[Any], None] | None = None,
) -> tuple[dict[str, Mark], Any]:
    """Returns the marks of a run without patches, and its output."""
    marks = {target.path: Mark(tree=tree, noticed=noticed) for target in targets}
    patches: PatchMap = marks
    fresh = inputs.fresh()
    with frames_seen(watch, all_modules(captured(pg).module)), pg.patch(patches).quiet():
        return marks, pg(*fresh.args, **fresh.kwargs)


def _open(tree: FrameTree, target: Target) -> None:
    """Opens the frames on the way to a value, so that what they call is kept."""
    frame: Frame | None = target.frame
    chain: list[Frame] = []
    while frame is not None:
        chain.append(frame)
        frame = frame.parent
    node = tree.root
    for frame in reversed(chain):
        node = node.child(frame.module, 0 if frame.call is None else frame.call.call_index)
        node.is_open = node.is_open or frame is not target.frame or target.node.kind != "output"
