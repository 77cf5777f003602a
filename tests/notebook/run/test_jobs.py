"""Jobs in threads of their own: results, errors, interrupts at any moment, and what is seen from outside."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
import torch

from graphpatch_notebook.notebook.runs import Job, ThreadSettings


def run(work: Any) -> Job[Any]:
    job: Job[Any] = Job(work)
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


def test_an_interrupt_ends_the_running_job() -> None:
    has_ended: list[int] = []

    def work(job: Job[Any]) -> None:
        try:
            job.interruptibly(spin)
        finally:
            has_ended.append(1)

    job: Job[Any] = Job(work)
    until(lambda: job._is_open)
    job.interrupt()
    job.wait(60)
    assert (job.state, has_ended, job.is_interrupted) == ("interrupted", [1], True)
    job.interrupt()  # has no effect
    assert job.state == "interrupted"


def test_an_interrupt_that_waits_says_for_what() -> None:
    may_go_on = threading.Event()
    job: Job[Any] = Job(lambda job: job.interruptibly(lambda: may_go_on.wait() and spin()))
    until(lambda: job._is_open)
    assert job.waits_for is None
    job.interrupt()
    said = job.waits_for
    may_go_on.set()
    job.wait(60)
    assert re.fullmatch(r".*test_jobs\.py:\d+, in <lambda>: .*may_go_on\.wait\(\).*", str(said))
    assert job.waits_for is None


def test_an_interrupt_comes_before_what_is_interruptible_or_not_at_all() -> None:
    may_go_on = threading.Event()
    done: list[int] = []

    def work(job: Job[Any]) -> None:
        may_go_on.wait()
        done.append(0)
        job.interruptibly(lambda: done.append(1))

    job: Job[Any] = Job(work)
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

    job: Job[Any] = Job(work)
    end = time.perf_counter() + delay
    while time.perf_counter() < end:
        pass
    job.interrupt()
    job.wait(60)
    assert job.state in ("done", "interrupted")
    assert len(after) == 2000 or (job.state == "interrupted" and not after)
    assert job.state == "interrupted" or job.result == 20 * sum(range(50))


def test_the_default_device_goes_along() -> None:
    with torch.device("meta"):
        settings = ThreadSettings()

    def work(job: Job[Any]) -> Any:
        with settings.applied(job):
            return torch.zeros(2).device.type, torch.zeros(2, device="cpu").device.type

    assert run(work).result == ("meta", "cpu")
    assert run(lambda _: torch.zeros(2).device.type).result == "cpu"
