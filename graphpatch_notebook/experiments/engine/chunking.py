"""Which cells share a forward: those whose first patched values come up at about the same time."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch

from graphpatch_notebook.execution.replay import NEVER, FrameNode, FrameTree

# Rough costs: only their ratio matters, and only to the order of magnitude. Nothing is timed, so that a sweep that is
# run again is divided, and rounded, in the same way.
_WORK_OF_A_CALL = 20_000
_IDLE_WORK_OF_A_CALL = 10_000
_OPERATIONS_PER_CALL_TIME = {"cpu": 5e6, "other": 5e8}
_TOKENS = {"cpu": 512, "other": 8192}
_MOST_ROWS = 64


@dataclass(frozen=True)
class Work:
    """What a run costs, as far as it is known without running.

    Attributes:
        ends: For each frame, but for those that it calls: when it ended, its work, and its idle work, which a row costs
            that is as without patches.
        total: All work.
        calls: How many frames there are.
    """

    ends: tuple[tuple[float, int, int], ...]
    total: int
    calls: int

    @classmethod
    def of(cls, tree: FrameTree, changed_only: Container[FrameNode] = ()) -> Work:
        """Returns the work of the frames of a recording, of which some compute only what patches change."""
        ends = []
        for node, is_idle in _frames(tree.root, changed_only):
            if node.module is None or node.ended == NEVER:
                continue
            is_table = isinstance(node.module, torch.nn.Embedding)
            own = 0 if is_table else sum(p.numel() for p in node.module._parameters.values() if p is not None)
            whole = own + _WORK_OF_A_CALL
            ends.append((node.ended, whole, _IDLE_WORK_OF_A_CALL if node in changed_only else 0 if is_idle else whole))
        return cls(tuple(ends), sum(work for _, work, _ in ends) or 1, len(ends))

    def rest(self, since: float) -> float:
        """Returns the share of the work that is left after a time."""
        return sum(work for ended, work, _ in self.ends if ended >= since) / self.total

    def idle(self, since: float, until: float) -> float:
        """Returns the work of a row that is as without patches, between two times, as a share of all work."""
        return sum(idle for ended, _, idle in self.ends if since <= ended < until) / self.total


def _frames(
    node: FrameNode, changed_only: Container[FrameNode], is_idle: bool = False
) -> Iterator[tuple[FrameNode, bool]]:
    """Yields a frame and those below, with whether they are within one of those that compute only what changes."""
    yield node, is_idle
    for child in node.children.values():
        yield from _frames(child, changed_only, is_idle or node in changed_only)


def rows_at_once(tokens: int, device: str, *, is_sparse: bool = False) -> int:
    """Returns how many interventions are best put into one forward.

    Args:
        tokens: Of how many tokens each is.
        device: The type of the device.
        is_sparse: Whether most of the work is done only for tokens that patches change.
    """
    at_once = _TOKENS["cpu" if device == "cpu" else "other"] * (2 if is_sparse else 1)
    return max(1, min(_MOST_ROWS, at_once // max(1, tokens)))


def overhead(work: Work, tokens: int, device: str) -> float:
    """Returns what a run costs besides computing, in rows."""
    speed = _OPERATIONS_PER_CALL_TIME["cpu" if device == "cpu" else "other"]
    return work.calls * speed / (2 * work.total * max(1, tokens))


def chunked(cuts: Sequence[float], work: Work, most: int, extra: float) -> list[list[int]]:
    """Returns numbers of cells in chunks.

    Args:
        cuts: For each cell, when its first patched value comes up.
        work: What a run costs, from a time on.
        most: How many cells a chunk may hold.
        extra: What a run costs besides, in rows.
    """
    by_cut: dict[float, list[int]] = {}
    for number, cut in enumerate(cuts):
        by_cut.setdefault(cut, []).append(number)
    chunks: list[list[int]] = []
    open_chunk: list[int] = []
    since = 0.0
    for cut in sorted(by_cut):
        cells, rest = by_cut[cut], work.rest(cut)
        # Joining costs these cells a longer way, and saves a run.
        is_joined = open_chunk and len(open_chunk) + len(cells) <= most
        if is_joined and len(cells) * work.idle(since, cut) <= rest * (1 + extra):
            open_chunk += cells
            continue
        if open_chunk:
            chunks.append(open_chunk)
        for start in range(0, len(cells), most):
            open_chunk, since = cells[start : start + most], cut
            if start + most < len(cells):
                chunks.append(open_chunk)
    return [*chunks, open_chunk] if open_chunk else chunks
