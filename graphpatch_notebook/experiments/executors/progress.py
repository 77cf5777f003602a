"""How far a sweep is: a bar with the rate in cells and an estimate of the time that remains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from graphpatch_notebook.experiments.extras import extra


class Progress(Protocol):
    """Is told of cells that are done."""

    def update(self, n: int) -> object:
        """Says that `n` more cells are done."""


class _Silent:
    def update(self, n: int) -> None:
        """Shows nothing."""


@contextlib.contextmanager
def shown_progress(total: int, done: int, is_wanted: bool) -> Iterator[Progress]:
    """Shows a bar for the length of the block: a widget in a notebook, a line on stderr elsewhere.

    Args:
        total: How many cells there are.
        done: How many of them were done before: the rate, and so the estimate, leaves these out.
        is_wanted: Whether there is to be a bar.

    Raises:
        ExperimentError: A bar is wanted, and tqdm is not installed. Who asked for progress would otherwise sit before
            a sweep of hours that says nothing; it costs one line, before anything has run.
    """
    if not is_wanted:
        yield _Silent()
        return
    tqdm = extra("tqdm.auto", "the progress of a sweep", ", or say progress=False").tqdm
    with tqdm(total=total, initial=done, desc="sweep", unit="cell") as bar:
        yield bar
