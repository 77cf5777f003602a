"""A Dask cluster, whose futures never end once nobody is left to work on them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphpatch_notebook.errors import ExperimentError

_LONGEST_LOOK = 10.0  # seconds
_PATIENCE = 5.0  # seconds without a worker
_PATIENCE_WITH_NANNIES = 60.0  # which start a worker again


class WorkersLostError(Exception):
    """No worker is left.

    Attributes:
        keys: Those of the tasks that were on a worker when it was lost.
    """

    def __init__(self, workers: Sequence[str], keys: set[str]) -> None:
        names = f" ({', '.join(workers)})" if workers else ""
        super().__init__(f"all its workers were lost{names}")
        self.keys = keys


@dataclass
class Cluster:
    """What a sweep must know of a cluster besides its futures.

    Args:
        client: The client.
        options: Those of `client.submit`.
    """

    client: Any
    options: dict[str, Any]
    _workers: dict[str, bool] = field(default_factory=dict)  # the last ones, by address: whether they have a nanny
    _lost: float | None = None  # since when there is none

    @classmethod
    def of(cls, executor: Any) -> Cluster | None:
        """Returns the cluster that an executor is of; `None` for other ones.

        In distributed (seen in 2026.8) a future of `Client.get_executor()` never ends where the result is lost with its
        worker and the scheduler gives up on the task: the error escapes from what transmits it. The futures of the
        client itself do end, so these are used; `test_executors` kills workers at all times.
        """
        if type(executor).__module__ == "distributed.cfexecutor" and hasattr(executor, "_client"):
            return cls(executor._client, getattr(executor, "_kwargs", {}))
        return cls(executor, {}) if hasattr(executor, "run_on_scheduler") else None

    @property
    def submit(self) -> Callable[..., Any]:
        """What submits a task."""
        return functools.partial(self.client.submit, **self.options)

    def check(self, keys: Sequence[str]) -> None:
        """Makes sure that tasks may still be worked on. To be asked again and again: it remembers the workers.

        Where there never was a worker, somebody may be waiting for the first one.

        Args:
            keys: The keys of tasks.

        Raises:
            WorkersLostError: Nobody is left.
            ExperimentError: The client is closed: by somebody, or since the scheduler is gone.
        """
        if self.client.status in ("closed", "closing"):
            raise ExperimentError(
                "the client of the cluster was closed, or lost its scheduler, before all cells were run; what is done "
                "is in the file of checkpoint=, if you gave one"
            )
        try:
            # The limit is that of `Client.sync`, which may wait for ever where somebody closes the client meanwhile.
            workers, suspects = self.client.run_on_scheduler(_look(), list(keys), callback_timeout=_LONGEST_LOOK)
        except Exception:  # it has lost the scheduler, which the next look may tell
            return
        if workers or not (self._workers or suspects):
            self._workers, self._lost = workers, None
            return
        self._lost = time.monotonic() if self._lost is None else self._lost
        if time.monotonic() - self._lost > (_PATIENCE_WITH_NANNIES if any(self._workers.values()) else _PATIENCE):
            raise WorkersLostError(list(self._workers), set(suspects))


def _look() -> Callable[..., tuple[dict[str, bool], list[str]]]:
    # A function in a function is sent by its code: the scheduler may lack this package.
    def look(keys: list[str], dask_scheduler: Any) -> tuple[dict[str, bool], list[str]]:
        tasks = dask_scheduler.tasks
        workers = {address: worker.nanny is not None for address, worker in dask_scheduler.workers.items()}
        return workers, [key for key in keys if key in tasks and tasks[key].suspicious]

    return look
