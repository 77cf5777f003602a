"""Runs without patches: when each patched value occurs, and what the frames before it return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from graphpatch_notebook.capture.held_values import all_modules
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.execution import (
    NEVER,
    FrameNode,
    FrameRecording,
    FrameTree,
    does_nothing,
    frames_seen,
    own_tensors,
)
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch


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
            targets: The values that are patched, by path.
            is_kept: Whether to keep the call of a frame with one tensor.
        """
        tree = FrameTree()
        marks = {path: Mark(tree=tree) for path in targets}
        return cls(inputs, recorded(pg, inputs, targets, tree, marks, is_kept), tree, marks)


def recorded(
    pg: PatchableGraph,
    inputs: Inputs,
    targets: Mapping[str, Target],
    tree: FrameTree,
    patches: Mapping[Any, Patch[Any]],
    is_kept: Callable[[FrameNode, Tensor], bool] = lambda *_: False,
) -> Any:
    """Runs the model with patches, records its frames into a tree, and returns the output."""
    for target in targets.values():
        _open(tree, target)
    fresh = inputs.fresh()
    patched = {frame.module for target in targets.values() for frame in _chain(target)}
    # To record a dropout costs more than to repeat it.
    seen = [one for one in all_modules(captured(pg).module) if not does_nothing(one) or one in patched]
    with frames_seen(FrameRecording(tree, is_kept), seen), pg.patch(patches).quiet():
        return pg(*fresh.args, **fresh.kwargs)


def _open(tree: FrameTree, target: Target) -> None:
    """Opens the frames that contain a value, so that the frames they call are kept."""
    node = tree.root
    for frame in _chain(target):
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
