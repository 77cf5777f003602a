"""Which cells share a forward: those whose first patched values come up at about the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphpatch_notebook.execution.frame_results import NEVER, FrameTree

# Rough costs: only their ratio matters, and only to the order of magnitude. Nothing is timed, so that a sweep that is
# run again is divided, and rounded, in the same way.
_WORK_OF_A_CALL = 20_000
_OPERATIONS_PER_CALL_TIME = {"cpu": 2.5e6, "other": 2.5e8}
_TOKENS = {"cpu": 512, "other": 8192}
_MOST_ROWS = 64


@dataclass(frozen=True)
class Work:
    """What a run costs, as far as it is known without running.

    Attributes:
        ends: For each frame without frames below it: when it ended, and its work.
        total: All work.
        calls: How many frames there are.
    """

    ends: tuple[tuple[float, int], ...]
    total: int
    calls: int

    @classmethod
    def of(cls, tree: FrameTree) -> Work:
        """Returns the work of the frames of a recording."""
        ends = []
        calls = 0
        for node in tree.root.walk():
            if node.module is None or node.ended == NEVER:
                continue
            calls += 1
            is_table = isinstance(node.module, torch.nn.Embedding)
            own = 0 if is_table else sum(p.numel() for p in node.module._parameters.values() if p is not None)
            ends.append((node.ended, own + _WORK_OF_A_CALL))
        return cls(tuple(ends), sum(work for _, work in ends) or 1, calls)

    def rest(self, since: float) -> float:
        """Returns the share of the work that is left after a time."""
        return sum(work for ended, work in self.ends if ended >= since) / self.total


def rows_at_once(tokens: int, device: str) -> int:
    """Returns how many interventions are best put into one forward, each of so many tokens."""
    return max(1, min(_MOST_ROWS, _TOKENS["cpu" if device == "cpu" else "other"] // max(1, tokens)))


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
    open_rest = 0.0
    for cut in sorted(by_cut):
        cells, rest = by_cut[cut], work.rest(cut)
        # Joining costs these cells a longer way, and saves a run.
        is_joined = open_chunk and len(open_chunk) + len(cells) <= most
        if is_joined and len(cells) * (open_rest - rest) <= rest * (1 + extra):
            open_chunk += cells
            continue
        if open_chunk:
            chunks.append(open_chunk)
        for start in range(0, len(cells), most):
            open_chunk, open_rest = cells[start : start + most], rest
            if start + most < len(cells):
                chunks.append(open_chunk)
    return [*chunks, open_chunk] if open_chunk else chunks
