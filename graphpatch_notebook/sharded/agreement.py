"""Makes sure that all processes call a sharded model, and with the same patches: otherwise they wait for each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphpatch_notebook.errors import MissingProcessWarning, ShardedCallError
from graphpatch_notebook.sharded.digests import digest
from graphpatch_notebook.sharded.placements import SKETCH, is_same_sketch
from graphpatch_notebook.sharded.processes import Processes
from graphpatch_notebook.torch_compat import default_store
from graphpatch_notebook.warning_places import level_of_caller, warn

_PAUSE = 0.002
_ROWS = 64
"""How many values one message has: all messages have one size, so that processes that differ can still compare them."""


class Agreement:
    """Compares what some processes are about to do."""

    def __init__(self, processes: Processes) -> None:
        self._group, self._ranks = processes.group, processes.ranks
        self.patience = 5.0  # after how many seconds processes that have not called are named
        self._calls = 0
        self._store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"graphpatch_notebook/{self._ranks[0]}", default_store()
        )

    def check(self, what: str, patches: Sequence[tuple[str, Any]]) -> None:
        """Waits until all processes have called this with the same arguments: what is called, and the patches by path.

        If another process makes another call, all of them raise a `ShardedCallError`.
        """
        header = _header(what, patches)
        headers, _ = self._exchanged(what, header)
        if all(torch.equal(header, each) for each in headers):
            return
        rank = dist.get_rank()
        self._check_same_calls(what, headers)
        listed = ", ".join(sorted({path for path, _ in patches})) or "none"
        raise ShardedCallError(
            f"the patches differ between the processes: process {rank} has patches on {listed}. All processes must "
            "enter the same contexts, with the same patches and the same tensors in them"
        )

    def check_values(self, what: str, paths: Sequence[str], values: Tensor) -> None:
        """Waits until all processes have called this; `values` must be the same on all of them, up to rounding.

        For each of the paths, the same on all processes, they have a row: the number of visits, and a sketch. All
        processes that did not fail raise a `ShardedCallError` if a value differs, or if another one failed.
        """
        for first in range(0, len(paths), _ROWS):
            mine = values[first : first + _ROWS]
            headers, rows = self._exchanged(what, _header(f"the end of {what}", []), mine)
            self._check_same_calls(f"the end of {what}", headers)
            for path, one, *others in zip(paths[first : first + _ROWS], *rows, strict=False):
                if not all(one[0] == each[0] and is_same_sketch(one[1:], each[1:]) for each in others):
                    raise ShardedCallError(
                        f"{path!r} differs between the processes, and is patched, so it is not known what that "
                        "means here: do the processes have the same inputs, do functions in patches give the same on "
                        "all of them (random numbers, too), and is the model in evaluation mode?"
                    )

    def leave(self, what: str, paths: Sequence[str]) -> None:
        """Lets the others know that the call failed here, without waiting for them."""
        for _ in range(0, len(paths), _ROWS):
            self._send(_header(f"the failure of {what}", []), None)

    def _check_same_calls(self, what: str, headers: Sequence[Tensor]) -> None:
        if len({each[0].item() for each in headers}) > 1:
            raise ShardedCallError(
                f"the processes call different methods, or one of them failed: process {dist.get_rank()} calls {what}"
            )

    def _send(self, header: Tensor, values: Tensor | None) -> tuple[Any, list[Tensor]]:
        self._calls += 1
        body = torch.zeros(_ROWS, 1 + SKETCH, dtype=torch.float64)
        if values is not None:
            body[: len(values)] = values
        message = torch.cat([header, body.view(torch.int64).flatten()])
        found = [torch.empty_like(message) for _ in range(dist.get_world_size(self._group))]
        return dist.all_gather(found, message, group=self._group, async_op=True), found

    def _exchanged(self, what: str, header: Tensor, values: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the headers and the rows of all processes."""
        try:
            work, found = self._send(header, values)
            self._wait(work)
        except RuntimeError as error:
            raise ShardedCallError(f"{what}: other processes did not make this call ({error})") from None
        bodies = [each[len(header) :].view(torch.float64).view(_ROWS, -1) for each in found]
        return [each[: len(header)] for each in found], bodies

    def _wait(self, work: Any) -> None:
        begin = time.monotonic()
        pause = 0.0
        while not work.is_completed():
            waited = time.monotonic() - begin
            if waited > self.patience:
                self._name_missing(begin)
                break
            time.sleep(pause)
            pause = min(_PAUSE, waited / 10)
        work.wait()

    def _name_missing(self, begin: float) -> None:
        """Warns of the processes that have not called: those that wait as long as this one have written that down."""
        here = dist.get_rank()
        self._store.set(f"{self._calls}/{here}", "waiting")
        time.sleep(min(0.5, self.patience))
        missing = [rank for rank in self._ranks if not self._store.check([f"{self._calls}/{rank}"])]
        if missing:
            warn(
                f"process {here} has waited for {time.monotonic() - begin:.0f} s: process "
                f"{', '.join(map(str, missing))} has not called the model, as all processes must",
                MissingProcessWarning,
                stacklevel=level_of_caller(),
            )


def _header(what: str, patches: Sequence[tuple[str, Any]]) -> Tensor:
    """Returns what all processes must have in common: digests of the call, and of its patches."""
    return torch.tensor([int(digest(value)[:14], 16) for value in (what, list(patches))])
