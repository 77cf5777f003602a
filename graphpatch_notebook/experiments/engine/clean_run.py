"""Runs without patches: when each patched value occurs, what the frames before it return, and which outputs it skips.

Language models of transformers have arguments to compute only the logits of the last positions (`logits_to_keep`), and
to return no cache (`use_cache`). Whether a metric reads the last position only is found by running it on an output
with other logits at all earlier positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphpatch_notebook.capture.held_values import all_modules
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.rows import wild
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patching import (
    NEVER,
    FrameNode,
    FrameRecording,
    FrameTree,
    does_nothing,
    frames_seen,
    own_tensors,
)
from graphpatch_notebook.values import mapped

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
