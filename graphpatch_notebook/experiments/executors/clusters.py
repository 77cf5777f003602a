"""Support for the clusters of Dask and Ray: submitting tasks, and finding out which workers were lost."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.warning_places import warn_each_time

_LONGEST_LOOK = 10.0  # seconds
_PATIENCE = 5.0  # seconds without a worker
_LONG_PATIENCE = 60.0  # if lost workers are restarted, or the first one starts
_HEAD_PATIENCE = 20.0  # seconds without the head of Ray, which ends this process after 60


class WorkersLostError(Exception):
    """No worker is left.

    Attributes:
        keys: The keys of the tasks that were on a worker when it was lost.
    """

    def __init__(self, workers: Sequence[str], keys: set[str]) -> None:
        names = f" ({', '.join(workers)})" if workers else ""
        super().__init__(f"all its workers were lost{names}")
        self.keys = keys


@dataclass
class _Absence:
    """Notices that no worker is left. If there never was one, the first one may still start: that is a warning."""

    what: str  # the cluster lacks
    _seen: dict[str, bool] = field(default_factory=dict)
    _since: float | None = None
    _is_told: bool = False

    def check(self, workers: dict[str, bool], suspects: Sequence[str] = ()) -> None:
        """Call it repeatedly: it compares with the workers seen before.

        Args:
            workers: The workers by name, with whether something restarts them.
            suspects: The keys of tasks that were on a worker when it was lost.

        Raises:
            WorkersLostError: No worker is left.
        """
        if workers:
            self._seen, self._since = workers, None
            return
        self._since = time.monotonic() if self._since is None else self._since
        waited, was_there = time.monotonic() - self._since, bool(self._seen or suspects)
        if waited <= (_PATIENCE if was_there and not any(self._seen.values()) else _LONG_PATIENCE):
            return
        if was_there:
            raise WorkersLostError(list(self._seen), set(suspects))
        if not self._is_told:
            self._is_told = True
            warn_each_time(f"the cluster has no {self.what} yet, and the call waits for one", ExperimentWarning)


# -- Dask --------------------------------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """Submits tasks to a Dask cluster, and checks for lost workers.

    Args:
        client: The client.
        options: Keyword arguments for `client.submit`.
    """

    client: Any
    options: dict[str, Any]
    _absence: _Absence = field(default_factory=lambda: _Absence("worker"))

    @classmethod
    def of(cls, executor: Any) -> Cluster | None:
        """Returns the cluster of an executor; `None` for executors of other kinds.

        In distributed (seen in 2026.8) a future of `Client.get_executor()` never completes if its result is lost
        with a worker and the scheduler gives up on the task: the future does not receive the error. The futures of the
        client itself do complete, so these are used; `test_executors` kills workers at various times.
        """
        if type(executor).__module__ == "distributed.cfexecutor" and hasattr(executor, "_client"):
            return cls(executor._client, getattr(executor, "_kwargs", {}))
        return cls(executor, {}) if hasattr(executor, "run_on_scheduler") else None

    @property
    def submit(self) -> Callable[..., Any]:
        """The function that submits a task."""
        return functools.partial(self.client.submit, **self.options)

    def check(self, keys: Sequence[str]) -> None:
        """Checks that the cluster can still run tasks. Call it repeatedly.

        Args:
            keys: The keys of the tasks that are submitted.

        Raises:
            WorkersLostError: No worker is left.
            ExperimentError: The client is closed, by its user or because the scheduler is gone.
        """
        if self.client.status in ("closed", "closing"):
            raise ExperimentError(
                "the client of the cluster was closed, or lost its scheduler, before all was run; what is done "
                "is in the file of checkpoint=, if you gave one"
            )
        try:
            # A timeout for `Client.sync`, which may wait forever if the client is closed during the call.
            workers, suspects = self.client.run_on_scheduler(_look(), list(keys), callback_timeout=_LONGEST_LOOK)
        except Exception:  # the scheduler may be lost, which the next check reports
            return
        self._absence.check(workers, suspects)


def _look() -> Callable[..., tuple[dict[str, bool], list[str]]]:
    # A nested function is pickled by its code: the scheduler may lack this package.
    def look(keys: list[str], dask_scheduler: Any) -> tuple[dict[str, bool], list[str]]:
        tasks = dask_scheduler.tasks
        workers = {address: worker.nanny is not None for address, worker in dask_scheduler.workers.items()}
        return workers, [key for key in keys if key in tasks and tasks[key].suspicious]

    return look


# -- Ray ---------------------------------------------------------------------------------------------------------------


class RayExecutor(Executor):
    """An executor for `executor=` that runs tasks on a Ray cluster.

    Connect with `ray.init(...)` first. Each worker builds the model once. A task whose worker dies is not run again by
    Ray, but by the call, once.

    Args:
        **options: What a task needs, as for `ray.remote`: `num_gpus=1` gives each worker a GPU of its own
            (`CUDA_VISIBLE_DEVICES`), and so one model for each GPU; `num_cpus`, `memory`, `resources`.

    Raises:
        ExperimentError: Ray is not installed.

    Example:
        >>> import ray  # doctest: +SKIP
        >>> ray.init("auto")  # doctest: +SKIP
        >>> pg.sweep(..., executor=RayExecutor(num_gpus=1), recipe=build)  # doctest: +SKIP
    """

    def __init__(self, **options: Any) -> None:
        self._ray = extra("ray", "RayExecutor", ": pip install ray")
        # Workers with GPUs would end after each task, and the model with them.
        given = {"num_cpus": 1, "max_retries": 0, "max_calls": 0} | options
        self._run = self._ray.remote(**given)(_call)
        amounts = {"CPU": given["num_cpus"], "GPU": given.get("num_gpus"), "memory": given.get("memory")}
        self._needed = {name: amount for name, amount in (amounts | given.get("resources", {})).items() if amount}
        self._absence = _Absence(f"node with {', '.join(f'{amount} {name}' for name, amount in self._needed.items())}")
        self._headless_since: float | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Returns a future of `fn(*args, **kwargs)`."""
        self._check_connection()
        return _RayFuture(self._ray, self._run.remote(fn, args, kwargs))

    def check(self) -> None:
        """Checks that the cluster can still run tasks. Call it repeatedly.

        If the head is lost, this disconnects from Ray, which would end this process.

        Raises:
            WorkersLostError: No node is left that could run a task, or the head is lost.
            ExperimentError: Ray is not connected, or was shut down.
        """
        self._check_connection()
        if not self._has_head():
            return
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        fit = [
            node for node in alive if all(node["Resources"].get(name, 0) >= self._needed[name] for name in self._needed)
        ]
        self._absence.check({node["NodeManagerAddress"]: True for node in fit})  # Ray may start others

    def _has_head(self) -> bool:
        """Returns whether the head answers: what asks Ray would wait for it.

        Raises:
            WorkersLostError: It has not answered for long.
        """
        if self._ray.util.client.ray.is_connected():  # "ray://...", which loses its connection with the head
            return True
        host, _, port = self._ray.get_runtime_context().gcs_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
        except OSError as error:
            self._headless_since = self._headless_since or time.monotonic()
            if time.monotonic() - self._headless_since < _HEAD_PATIENCE:  # it may be restarted
                return False
            self._ray.shutdown()
            raise WorkersLostError([f"the head of the Ray cluster does not answer: {error}"], set()) from None
        self._headless_since = None
        return True

    def _check_connection(self) -> None:
        if not self._ray.is_initialized():
            raise ExperimentError(
                "Ray is not connected, or was shut down before all was run: call ray.init(); what is done is in the "
                "file of checkpoint=, if you gave one"
            )


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


class _RayFuture(Future[Any]):
    """The future of a Ray task. Errors of the task are those that it raised, and not Ray's wrappers."""

    def __init__(self, ray: Any, reference: Any) -> None:
        super().__init__()
        self._ray, self._reference = ray, reference
        reference.future().add_done_callback(self._finish)

    def _finish(self, done: Future[Any]) -> None:
        if not self.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is None:
            self.set_result(done.result())
        else:
            cause = getattr(error, "cause", None)
            self.set_exception(cause if isinstance(cause, BaseException) else error)

    def cancel(self) -> bool:
        if self._ray.is_initialized():  # or Ray would start a new cluster
            self._ray.cancel(self._reference)
        return super().cancel()


def is_end_of_ray(error: BaseException) -> bool:
    """Whether an error of a `RayExecutor` says that this process cannot submit anything any more."""
    return type(error).__name__ == "LocalRayletDiedError"


def is_of_ray(error: BaseException) -> bool:
    """Whether an error of a `RayExecutor` is Ray's own, such as `WorkerCrashedError`: the worker was lost."""
    return type(error).__module__ == "ray.exceptions"
