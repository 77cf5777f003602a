"""Results that are read at the last position only: where the metric reads the logits there, nobody needs the others.

Behind the last attention of a language model, each position is on its own. A test shows which modules stand there:
with wild values at all positions of their results but the last, the model returns the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.execution.frame_results import FrameNode, FramesSeen, Replay, tensors_in
from graphpatch_notebook.execution.plan import Entry
from graphpatch_notebook.experiments.earlier_sweeps import shown_earlier
from graphpatch_notebook.experiments.inputs import Inputs
from graphpatch_notebook.experiments.position_wise import ChangedPositions
from graphpatch_notebook.experiments.rows import is_close, wild
from graphpatch_notebook.experiments.survey import Survey
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches import AddPatch, ReplacePatch, ZeroPatch

_Place = tuple[tuple[int, int], ...]

_AT_EACH_POSITION = (ZeroPatch, AddPatch, ReplacePatch)
"""Patches that make what is at a position of what was there."""


def read_at_last_only(
    pg: PatchableGraph, inputs: Inputs, survey: Survey, among: Mapping[FrameNode, ChangedPositions]
) -> dict[FrameNode, ChangedPositions]:
    """Returns what can stand in for those of some frames whose results are read at the last position only.

    Args:
        pg: The graph.
        inputs: What it runs on; they have it return what is read, and nothing else.
        survey: What a run on these told.
        among: What stands in for frames whose modules work on each position alone.
    """
    places = {node: place for place, node in _places(survey.tree.root)}
    known, key = shown_earlier(pg), ("read at last only", survey.kind)
    candidates = [node for node in among if _has_positions(node)]
    if key not in known:
        known[key] = frozenset(places[node] for node in _unread(pg, inputs, survey, candidates))
    return {node: among[node].at_last_only() for node in candidates if places[node] in known[key]}


def allowed(nodes: Iterable[FrameNode], survey: Survey, entries: Iterable[Entry]) -> list[FrameNode]:
    """Returns those of some frames behind which no patch looks at other positions than it changes."""
    looking = [entry for entry in entries if any(type(patch) not in _AT_EACH_POSITION for patch in entry.patches)]
    last = max((survey.marks[entry.target.path].came_up for entry in looking), default=0.0)
    return [node for node in nodes if node.ended > last]


def _places(node: FrameNode, place: _Place = ()) -> Iterator[tuple[_Place, FrameNode]]:
    yield place, node
    for key, child in node.children.items():
        yield from _places(child, (*place, key))


def _has_positions(node: FrameNode) -> bool:
    return node.pair is not None and node.pair[0].dim() == 3 and node.pair[0].shape[1] > 1


def _unread(pg: PatchableGraph, inputs: Inputs, survey: Survey, candidates: list[FrameNode]) -> list[FrameNode]:
    found: list[FrameNode] = []
    for node in sorted(candidates, key=lambda node: -node.ended):
        if not _is_unread(pg, inputs, survey, [*found, node]):
            break
        found.append(node)
    return found


def _is_unread(pg: PatchableGraph, inputs: Inputs, survey: Survey, nodes: list[FrameNode]) -> bool:
    """Whether the model returns the same with wild values at all positions but the last of what these frames return."""
    before = survey.tree.replayable(min(node.ended for node in nodes))
    values = {frame: frame.value for frame in before if not frame.is_written_later}
    replay = Replay(survey.tree, values, dict.fromkeys(nodes, _wild_but_last))
    fresh = inputs.fresh()
    with torch.no_grad(), FramesSeen(pg._module, replay), pg.patch({}).quiet():
        output = pg(*fresh.args, **fresh.kwargs)
    expected, found = list(tensors_in(survey.output)), list(tensors_in(output))
    return len(expected) == len(found) and all(map(is_close, found, expected))


def _wild_but_last(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = forward(*args, **kwargs)
    return torch.cat([wild(result[:, :-1], 1), result[:, -1:]], 1)
