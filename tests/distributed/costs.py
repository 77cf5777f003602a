"""What a call of a sharded model takes besides the model: what two ranks compare before and after it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from graphpatch_notebook import AddPatch
from graphpatch_notebook.sharded import Agreement, Processes
from graphpatch_notebook.sharded.placements import AlikeValues
from tests.distributed.processes import run_on_ranks

_ROUNDS = 300


def costs() -> dict[str, tuple[float, float]]:
    """Returns the least and the median time in seconds of each, on two ranks of this machine."""
    found: dict[str, tuple[float, float]] = run_on_ranks(2, _measured, seconds=300)[0]
    return found


def _measured() -> dict[str, tuple[float, float]]:
    agreement, alike = Agreement(Processes([0, 1])), AlikeValues()
    one = [("layers[0].resid_post", AddPatch(value=torch.ones(4096)))]
    many = one * 100
    value = torch.randn(1, 128, 4096)

    def compare(count: int) -> None:
        paths = [str(number) for number in range(count)]
        agreement.check_values("forward", paths, alike.taken(paths))

    works: dict[str, Callable[[], object]] = {
        "each call: a digest of one patch with 4,096 numbers": lambda: agreement.check("forward", one),
        "each call: a digest of 100 such patches": lambda: agreement.check("forward", many),
        "each call with a patched value that each process holds whole: compare it": lambda: compare(1),
        "the same with 64 such values": lambda: compare(64),
        "each visit of such a value: a sketch of 128 x 4,096 numbers": lambda: (alike.add("", value), alike.taken(())),
    }
    return {what: _times(work) for what, work in works.items()}


def _times(work: Callable[[], object]) -> tuple[float, float]:
    times = []
    for _ in range(_ROUNDS):
        dist.barrier()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times), statistics.median(times)
