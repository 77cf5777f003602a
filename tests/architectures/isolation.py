"""Each architecture in a process of its own, with a limit of time and of memory: none takes the others down.

The processes are forked from one that has imported torch and transformers, which takes longer than most models do.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeAlias

import torch

from graphpatch_notebook import PatchableGraph
from tests.architectures.families import Architecture
from tests.architectures.findings import Finding, examine
from tests.frozen_imports import freeze

MEMORY = 6 << 30
Look: TypeAlias = Callable[[Architecture], Finding]


def examined(
    architectures: Sequence[Architecture], *, processes: int = 2, seconds: float = 120, look: Look = examine
) -> Iterator[Finding]:
    """Yields the findings for the architectures, each as soon as it is there, so many of them at a time."""
    waiting, running = list(reversed(architectures)), list[_Process]()
    _import_what_all_need()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                running.append(_Process(waiting.pop(), seconds, look))
            first_deadline = min(process.deadline for process in running)
            wait([process.receiver for process in running], max(0.0, first_deadline - time.monotonic()))
            for process in [process for process in running if process.is_over()]:
                running.remove(process)
                yield process.finding()
    finally:
        for process in running:
            process.end()


def _import_what_all_need() -> None:
    """Imports what a first run imports, and leaves all of it where the collector does not write on shared pages."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    ids = torch.ones(1, 2, dtype=torch.long)
    with torch.no_grad():
        PatchableGraph(BertForMaskedLM(config), ids).verify(ids)
    freeze()


class _Process:
    """One process, at work on one architecture."""

    def __init__(self, architecture: Architecture, seconds: float, look: Look) -> None:
        context = multiprocessing.get_context("fork")
        self.architecture, self.seconds = architecture, seconds
        self.receiver, sender = context.Pipe(duplex=False)
        self.deadline = time.monotonic() + seconds
        self._process = context.Process(target=_work, args=(architecture, look, sender), daemon=True)
        self._process.start()
        sender.close()

    def is_over(self) -> bool:
        return self.receiver.poll() or time.monotonic() >= self.deadline

    def finding(self) -> Finding:
        """Returns what it found, or in words that it did not get to an end; the process is gone afterwards."""
        try:
            if not self.receiver.poll():
                return _unfinished(self.architecture, f"did not end within {self.seconds:.0f} s")
            finding: Finding = self.receiver.recv()
            return finding
        except EOFError:
            self._process.join(5)
            return _unfinished(self.architecture, f"its process died (exit code {self._process.exitcode})")
        finally:
            self.end()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.receiver.close()


def _work(architecture: Architecture, look: Look, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)
    try:
        finding = look(architecture)
    except MemoryError:
        finding = _unfinished(architecture, f"needs more than {MEMORY >> 30} GiB")
    except Exception as error:
        finding = _unfinished(architecture, f"fails: {_in_words(error)}")
        finding.broken = {"0": [finding.missing or ""]}
    sender.send(finding)
    sender.close()


def _in_words(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__} {text} at {Path(where.filename).name}:{where.lineno}"


def _unfinished(architecture: Architecture, why: str) -> Finding:
    finding = Finding.of(architecture)
    finding.missing = why
    return finding
