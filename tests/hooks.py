"""Hooks of plain torch, the oracle of many tests. A single handle is a context manager by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def registered(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Removes several hooks at the end of a block."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield
