"""The values of the clean run: as many of them, in order of execution, as memory is granted for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphpatch_notebook.experiments.attribution.scored_nodes import ScoredNode
from graphpatch_notebook.torch_compat import version_of


@dataclass(slots=True, eq=False)
class CleanValue:
    """One value of the clean run.

    Attributes:
        tensor: The value.
        version: How often it had been written into; `None` where nobody else can write into it.
    """

    tensor: Tensor
    version: int | None

    @property
    def is_current(self) -> bool:
        """Whether it is still as it came up: the model may write into it through another tensor."""
        return self.version is None or version_of(self.tensor) == self.version


class CleanValues:
    """What watches the clean run.

    Args:
        wanted: The paths whose values are to be kept.
        copied: Those of them that the model writes into later, by whatever way: they are copied.
        max_bytes: How many bytes the values, and as many for their gradients, may take; one value is kept in any case.

    Attributes:
        by_path: The values that are kept, each time that they came up.
        left: Paths whose values did not fit.
        problems: Paths whose values can have no score, with the reason.
    """

    def __init__(self, wanted: Collection[str], copied: Collection[str], max_bytes: int) -> None:
        self._wanted = wanted
        self._copied = copied
        self._available = max_bytes
        self._by_id: dict[int, CleanValue] = {}
        self.by_path: dict[str, list[CleanValue]] = {}
        self.left: set[str] = set()
        self.problems: dict[str, str] = {}

    def __call__(self, node: ScoredNode, value: Any) -> Any:
        path = node.path
        if path not in self._wanted or path in self.left or path in self.problems:
            return value
        problem = node.problem(value)
        if problem is not None:
            self.problems[path] = problem
            self.by_path.pop(path, None)
            return value
        kept = self._kept(node, value)
        if kept is not None:
            self.by_path.setdefault(path, []).append(kept)
        else:
            self.left.add(path)
            self.by_path.pop(path, None)
        return value

    def _kept(self, node: ScoredNode, value: Tensor) -> CleanValue | None:
        known = self._by_id.get(id(value))
        if known is not None and known.tensor is value and known.is_current:
            return known
        cost = value.numel() * max(value.element_size(), 4) * 2
        if cost > self._available and self._by_id:
            return None
        self._available -= cost
        if node.is_state or node.node.is_mutated_later or node.path in self._copied:
            kept = CleanValue(value.clone(), None)
        elif value.numel() * value.element_size() * 2 < value.untyped_storage().nbytes():
            kept = CleanValue(value.clone(), None)  # else all of that storage would be kept for a part of it
        else:
            kept = CleanValue(value, version_of(value))  # the very tensor: its id is its own as long as it lives
        self._by_id[id(kept.tensor)] = kept
        return kept

    def release(self) -> None:
        """Lets all values go."""
        self.by_path.clear()
        self._by_id.clear()
