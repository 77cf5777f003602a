"""Groups of forked processes that run one function together, with a limit of time; none is left behind."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


class ProcessesFailed(Exception):
    """A process died, raised an error, or did not end in time."""


def run_on_ranks(
    count: int, function: Callable[..., Any], *args: Any, seconds: float, patience: float | None = None
) -> list[Any]:
    """Returns what `function` returns on each of `count` ranks, which are forked from this process.

    A rank waits for others in a collective for `patience` seconds.

    Raises:
        ProcessesFailed: One of them failed, with its traceback. All have ended.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        receivers, processes = [], []
        for rank in range(count):
            receiver, sender = context.Pipe(duplex=False)
            given = (rank, count, f"file://{folder}/store", patience or seconds, sender, function, args)
            process = context.Process(target=_work, args=given, daemon=True)
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        try:
            return _received(receivers, time.monotonic() + seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _received(receivers: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(enumerate(receivers))
    while waiting:
        ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise ProcessesFailed(f"ranks {sorted(waiting)} did not end in time")
        for rank, receiver in [(rank, receiver) for rank, receiver in waiting.items() if receiver in ready]:
            try:
                is_right, result = receiver.recv()
            except EOFError:
                raise ProcessesFailed(f"rank {rank} died") from None
            if not is_right:
                raise ProcessesFailed(f"rank {rank}: {result}")
            results[rank] = result
            del waiting[rank]
    return [results[rank] for rank in range(len(receivers))]


def _work(
    rank: int, count: int, store: str, patience: float, sender: Connection, function: Callable[..., Any], args: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}  # transformers reads these
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=patience)
    try:
        dist.init_process_group("gloo", store, rank=rank, world_size=count, timeout=limit)
        sender.send((True, function(*args)))
    except BaseException as error:
        sender.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)  # what was forked is the parent's to clean up
