"""Jobs in threads of their own: results, errors, interrupts at any moment, and what is seen from outside."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from graphpatch_notebook.notebook.run.model_calls import Job, ThreadSettings


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def run(work: Any) -> Job[Any]:
    job: Job[Any] = Job(work, words)
    job.wait(60)
    assert job.state != "running"
    return job


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def spin() -> None:
    while True:
        time.sleep(0.0005)


def test_a_job_gives_its_result() -> None:
    job = run(lambda job: job.interruptibly(lambda: 5))
    assert (job.state, job.result, job.error) == ("done", 5, None)
    assert 0 <= job.seconds < 10


def test_an_error_is_reported_as_text() -> None:
    job = run(lambda _: 1 / 0)
    assert (job.state, job.result, job.error) == ("failed", None, "ZeroDivisionError: division by zero")


def test_a_job_runs_in_another_thread_without_the_context_variables_of_its_caller() -> None:
    variable: ContextVar[int] = ContextVar("variable", default=0)
    variable.set(1)
    job = run(lambda _: (variable.get(), threading.get_ident(), torch.is_grad_enabled()))
    assert job.result[0] == 0
    assert job.result[1] != threading.get_ident()
    with torch.no_grad():
        assert run(lambda _: torch.is_grad_enabled()).result


def test_an_interrupt_ends_the_running_job() -> None:
    has_ended: list[int] = []

    def work(job: Job[Any]) -> None:
        try:
            job.interruptibly(spin)
        finally:
            has_ended.append(1)

    job: Job[Any] = Job(work, words)
    until(lambda: job._is_open)
    job.interrupt()
    job.wait(60)
    assert (job.state, has_ended, job.is_interrupted) == ("interrupted", [1], True)
    job.interrupt()  # has no effect
    assert job.state == "interrupted"


def test_an_interrupt_comes_before_what_is_interruptible_or_not_at_all() -> None:
    may_go_on = threading.Event()
    done: list[int] = []

    def work(job: Job[Any]) -> None:
        may_go_on.wait()
        done.append(0)
        job.interruptibly(lambda: done.append(1))

    job: Job[Any] = Job(work, words)
    job.interrupt()
    may_go_on.set()
    job.wait(60)
    assert (job.state, done) == ("interrupted", [0])


@pytest.mark.parametrize("delay", [n * 2e-6 for n in range(60)])
def test_interrupts_at_any_moment_leave_no_other_trace(delay: float) -> None:
    after: list[int] = []

    def work(job: Job[Any]) -> int:
        total = 0
        try:
            for _ in range(20):
                total += job.interruptibly(lambda: sum(range(50)))
        finally:
            after.extend(i for i in range(2000))
        return total

    job: Job[Any] = Job(work, words)
    end = time.perf_counter() + delay
    while time.perf_counter() < end:
        pass
    job.interrupt()
    job.wait(60)
    assert job.state in ("done", "interrupted")
    assert len(after) == 2000 or (job.state == "interrupted" and not after)
    assert job.state == "interrupted" or job.result == 20 * sum(range(50))


PROFILED = """
import cProfile, time
from graphpatch_notebook.notebook.run.model_calls import Job

def work(job):
    return job.interruptibly(lambda: [time.sleep(0.001) for _ in range(1000)] and 1)

for is_interrupted in (False, True, True):
    job = Job(work, str)
    if is_interrupted:
        time.sleep(0.02)
        job.interrupt()
    else:
        job = Job(lambda job: job.interruptibly(lambda: 1), str)
    job.wait()
    print(job.state)
profile = cProfile.Profile()
profile.runcall(lambda: [(lambda: i)() for i in range(1000)])
print("profiled")
"""


def test_the_default_device_goes_along() -> None:
    with torch.device("meta"):
        settings = ThreadSettings()

    def work(_: Any) -> Any:
        with settings.applied():
            return torch.zeros(2).device.type, torch.zeros(2, device="cpu").device.type

    assert run(work).result == ("meta", "cpu")
    assert run(lambda _: torch.zeros(2).device.type).result == "cpu"
