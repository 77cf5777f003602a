"""The processes that run one model together: exchanging objects, and choosing the one that writes files.

In a pipeline, each process has a graph of its own stage. It writes the paths of its modules into the store through
which the processes found each other, so that no process waits for another one.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.nn import Module

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.checks.sharding import is_distributed
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import default_store, is_fully_sharded

_T = TypeVar("_T")
_LIMIT = datetime.timedelta(minutes=10)


class Processes:
    """Some processes, with a group of their own on the CPU. All of them make it, and call its methods, in one order."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = sorted(ranks)  # the processes, sorted
        # Other processes, with replicas of the model, make their own groups.
        self.group: Any = dist.new_group(self.ranks, _LIMIT, "gloo", use_local_synchronization=True)  # the group

    @property
    def is_first(self) -> bool:
        """Whether this is the first of them."""
        return bool(dist.get_rank() == self.ranks[0])

    def gathered(self, value: Any) -> list[Any]:
        """Returns the objects of all processes in their order. The objects are pickled."""
        found: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(found, value, group=self.group)
        return found

    def are_same(self, value: Any) -> bool:
        """Returns whether the objects of all processes are equal."""
        return all(each == value for each in self.gathered(value))

    def on_first(self, make: Callable[[], _T]) -> _T:
        """Runs `make` on the first process only, and returns its result, or raises its error, on all processes."""
        made: Any = None
        if self.is_first:
            try:
                made = make(), None
            except Exception as error:
                made = None, error
        result, problem = self.gathered(made)[0]
        if problem is not None:
            raise problem
        return result  # type: ignore[no-any-return]


def processes_of(root: Frame) -> Processes | None:
    """Returns the processes that run the model of a capture together, under tensor parallelism or FSDP.

    The first call is made by all of them. `None` if this one runs it alone.
    """
    findings = root.capture.findings
    if processes_of not in findings:
        ranks = next((_ranks_of(module) for module in root.module.modules() if is_fully_sharded(module)), ())
        findings[processes_of] = Processes(ranks) if len(ranks) > 1 else None
    found: Processes | None = findings[processes_of]
    return found


def _ranks_of(module: Module) -> Sequence[int]:
    """Returns the processes over which FSDP distributes the parameters of a module."""
    group = getattr(module, "process_group", None)  # of the older FSDP
    if group is not None:
        return dist.get_process_group_ranks(group)
    held: Any = next((each for each in module.parameters() if is_distributed(each)), None)
    ranks: list[int] = [] if held is None else held.device_mesh.mesh.flatten().tolist()
    return ranks


# -- pipelines: which process has the stage that a path leads to -------------------------------------------------------

_KEY = "graphpatch_notebook/stages/{}"


def publish_stage(root: Frame) -> None:
    """Publishes the modules of this process for the other processes; does nothing if there are none."""
    if not _are_several():
        return
    own = sorted({format_path(frame.path) for frame in root.walk()})
    default_store().set(_KEY.format(dist.get_rank()), json.dumps(own))


def other_stage(root: Frame, path: str) -> str:
    """Returns a sentence that names the process whose stage has an unknown path; empty if no process has it."""
    if not _are_several():
        return ""
    store, here = default_store(), dist.get_rank()
    mine = {format_path(frame.path) for frame in root.walk()}
    for rank in range(dist.get_world_size()):
        if rank == here or not store.check([_KEY.format(rank)]):
            continue
        theirs = set(json.loads(store.get(_KEY.format(rank)))) - mine
        found = [name for name in theirs if path == name or path.startswith((f"{name}.", f"{name}|"))]
        if found:
            stage = max(found, key=len)
            return f". {stage!r} is in the stage of process {rank}, and this is process {here}: patch it there"
    return ""


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
