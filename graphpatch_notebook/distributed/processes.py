"""The processes that run one model together: exchanging objects, and choosing the one that writes files."""

from __future__ import annotations

import datetime
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.nn import Module

from graphpatch_notebook.errors import GraphError, warn_each_time
from graphpatch_notebook.patching.model_state import is_distributed
from graphpatch_notebook.torch_compat import default_store, is_fully_sharded

_T = TypeVar("_T")
_LIMIT = datetime.timedelta(minutes=10)
_PATIENCE = 6.0  # seconds, after which the processes that a call waits for are named
_calls: Counter[str] = Counter()  # how many calls of models this process made so far, by the processes that run them


class Processes:
    """Some processes that call a model together. All of them make it, and call its methods, in one order."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = sorted(ranks)  # the processes, sorted
        self._key = f"graphpatch {self.ranks}"

    @functools.cached_property
    def group(self) -> Any:
        """A group of their own, on the CPU."""
        # Other processes, with replicas of the model, make their own groups.
        return dist.new_group(self.ranks, _LIMIT, "gloo", use_local_synchronization=True)

    @property
    def is_first(self) -> bool:
        """Whether this is the first of them."""
        return bool(dist.get_rank() == self.ranks[0])

    def gathered(self, value: Any) -> list[Any]:
        """Returns the objects of all processes in their order. The objects are pickled."""
        found: list[Any] = [None] * len(self.ranks)
        try:
            dist.all_gather_object(found, value, group=self.group)
        except RuntimeError as error:
            raise GraphError(f"other processes did not make this call ({error})") from None
        return found

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Tells the others that this process is in a call of the model, which waits for them.

        If one of them does not make the call, or left it by an error, a warning names it after six seconds: torch only
        says so when the group gives up, and then names no process. That error becomes a `GraphError`.
        """
        count = _calls[self._key] = _calls[self._key] + 1
        store, own, absent, state = default_store(), f"{self._key} {dist.get_rank()}", list[str](), "returned"
        has_ended = threading.Event()

        def watch() -> None:
            while not absent and not has_ended.wait(_PATIENCE):
                if found := self._absent(count):
                    absent.append(f"{what}: process {dist.get_rank()} waits for {found}")
                    warn_each_time(f"{absent[0]}. All processes must make the same calls", "missing process")

        store.set(own, f"{count} runs")
        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        except BaseException as error:
            state = f"raised {type(error).__name__}"
            if absent and isinstance(error, (RuntimeError, GraphError)):
                raise GraphError(f"{absent[0]}, until its group of processes gave up") from error
            raise
        finally:
            has_ended.set()
            store.set(own, f"{count} {state}")

    def _absent(self, count: int) -> str:
        """Returns the processes that do not make this call, the how-many-th is given, as a text."""
        store, found = default_store(), []
        for rank in self.ranks:
            key = f"{self._key} {rank}"
            number, _, state = (store.get(key).decode() if store.check([key]) else "0 returned").partition(" ")
            if int(number) == count and state.startswith("raised"):
                found.append(f"process {rank}, which {state} in this call")
            elif int(number) < count and state != "runs":
                found.append(f"process {rank}, which has not made this call")
        return " and ".join(found)

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
    return [] if held is None else held.device_mesh.mesh.flatten().tolist()
