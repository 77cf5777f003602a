"""The processes that run one model together: exchanging objects, and choosing the one that writes files."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.nn import Module

from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.patching.sharding import is_distributed
from graphpatch_notebook.torch_compat import is_fully_sharded
from graphpatch_notebook.values import digest

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

    def check_call(self, what: str, inputs: Sequence[Any], patches: Sequence[tuple[str, Any]]) -> None:
        """Waits until all processes have called this with the same arguments.

        Args:
            what: The method that is called.
            inputs: Arguments that must be the same.
            patches: The patches, each with its path.

        Raises:
            GraphError: Another process makes another call, or none.
        """
        mine = {"methods": what, "inputs": digest(*inputs), "patches": digest(*patches)}
        try:
            everyone = self.gathered(mine)
        except RuntimeError as error:
            raise GraphError(f"{what}: other processes did not make this call ({error})") from None
        if differing := [name for name in mine if any(each[name] != mine[name] for each in everyone)]:
            listed = ", ".join(sorted({path for path, _ in patches})) or "none"
            raise GraphError(
                f"the {' and '.join(differing)} differ between the processes: process {dist.get_rank()} calls {what} "
                f"with patches on {listed}. All processes must make the same calls, with the same inputs, in the same "
                "contexts, with the same patches and the same tensors in them"
            )

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


def processes_over(model: Module) -> Processes | None:
    """Returns the processes over which FSDP distributes a model; `None` if this one has all of it."""
    ranks = next((_ranks_of(module) for module in model.modules() if is_fully_sharded(module)), ())
    return Processes(ranks) if len(ranks) > 1 else None


def _ranks_of(module: Module) -> Sequence[int]:
    """Returns the processes over which FSDP distributes the parameters of a module."""
    group = getattr(module, "process_group", None)  # of the older FSDP
    if group is not None:
        return dist.get_process_group_ranks(group)
    held: Any = next((each for each in module.parameters() if is_distributed(each)), None)
    ranks: list[int] = [] if held is None else held.device_mesh.mesh.flatten().tolist()
    return ranks
