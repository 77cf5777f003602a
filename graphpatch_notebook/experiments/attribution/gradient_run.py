"""A run with gradients: where it begins to differ from the clean one, and the gradients of the metric from there on.

    root     a floating-point value that differs between the runs, though nothing differs that it is a function of
    slot     a difference (clean value - corrupted value) and the gradient edge of the value: what one score is made of

At a root a new leaf takes the place of the value: so autograd never comes to the weights, whether these require
gradients or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from graphpatch_notebook.experiments.attribution.clean_values import CleanValue, CleanValues
from graphpatch_notebook.experiments.attribution.scored_nodes import ScoredNode
from graphpatch_notebook.experiments.attribution.value_flow import ValueFlow

Occurrence: TypeAlias = "tuple[str, int]"
"""A path, and how often it came up before in the same run."""

_NO_GRADIENT = (
    "it differs between the runs, but by what cannot be differentiated (whole numbers, comparisons, .detach(), "
    "torch.no_grad)"
)
_SHARED = "the same tensor as under another name, which is used elsewhere too, and cannot be told apart from it here"


class Roots:
    """Where the runs begin to differ, and what is known of what follows from that.

    Attributes:
        clean: The clean values at the roots.
        tracked: The nodes (by id) that autograd traces back to a root.
        untracked: Those whose values differ, but were computed while gradients were switched off.
        flow: What the records tell.
    """

    def __init__(self) -> None:
        self.clean: dict[Occurrence, Tensor] = {}
        self.tracked: set[int] = set()
        self.untracked: set[int] = set()
        self.flow = ValueFlow()

    def may_begin_at(self, node: ScoredNode) -> bool:
        """Whether a value that differs without a gradient is to be a root.

        Not if it was computed from tracked values all the same: what a model detaches, counts or sorts must stay free
        of gradients, which such code does not expect. But where a part of the model is run under `torch.no_grad`, what
        comes of it is a root for the part behind it.
        """
        if not node.can_be_cut:
            return False
        if any(id(inner) in self.untracked for inner in self.flow.made_of(node)):
            return True
        return not self.flow.comes_from(node, self.tracked)


class Differences:
    """The differences of the values of a group of nodes, each tensor once.

    Attributes:
        tensors: Clean value - corrupted value; half-precision values in float32.
        by_path: For each path the numbers of its differences, each time that it came up; `None` where the values are
            the same in both runs, bit for bit.
        problems: Paths that can have no score, with the reason.
        rewritten: Paths whose clean value the model has written into later, without a mark of that in the records.
    """

    def __init__(self, clean: CleanValues, is_careful: bool) -> None:
        self.clean = clean
        self.is_careful = is_careful
        self.tensors: list[Tensor] = []
        self.by_path: dict[str, list[int | None]] = {}
        self.problems: dict[str, str] = {}
        self.rewritten: set[str] = set()
        self._known: dict[tuple[int, Any], int] = {}

    def add(self, clean: CleanValue, value: Tensor, origin: Any) -> int:
        """Returns the number of the difference; the same where both values came up before under another name.

        Args:
            clean: The value of the clean run.
            value: The value of the corrupted run.
            origin: The same object for all names of that value.
        """
        key = (id(clean), origin)
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.tensors)
            self.tensors.append(self._difference(clean.tensor.detach(), value.detach()))
        return number

    def settle(self) -> None:
        """Lets the values themselves go, and the graph of the corrupted run."""
        self.clean.release()
        self._known.clear()

    def _difference(self, clean: Tensor, value: Tensor) -> Tensor:
        if clean.element_size() < 4:
            clean, value = clean.float(), value.float()
        difference = clean - value
        # Infinities that both runs have (of masked scores) are no difference.
        return torch.where(clean == value, 0, difference) if self.is_careful else difference


class GradientRun:
    """What watches one run with gradients.

    Args:
        differences: Filled if `is_first`, else only read.
        roots: Where the runs begin to differ: added to if `is_first`.
        fraction: What is put at the roots: 0 for the corrupted value, 1 for the clean one.
        is_first: Whether this is the run whose values are compared with the clean ones.

    Attributes:
        counts: How often each path came up.
        edges: The gradient edges of the values.
        slots: For each edge, the difference that its gradient is for.
        by_path: For each path the numbers of its slots, each time that it came up; `None` where it has no gradient, or
            needs none.
    """

    def __init__(self, differences: Differences, roots: Roots, fraction: float = 0.0, *, is_first: bool = True) -> None:
        self._differences = differences
        self._clean: Mapping[str, list[CleanValue]] = differences.clean.by_path
        self._roots = roots
        self._fraction = fraction
        self._is_first = is_first
        self.counts: dict[str, int] = {}
        self._depends: dict[Any, bool] = {None: False}
        self._origins: dict[tuple[Any, int], tuple[Any, int]] = {}
        self._named: dict[tuple[Any, int], ScoredNode] = {}
        self._shared: set[tuple[Any, int]] = set()
        self._kept_alive: list[Tensor] = []
        self.is_over = False
        self._slots: dict[tuple[Any, int, int], int] = {}
        self.edges: list[GradientEdge] = []
        self.slots: list[int] = []
        self.by_path: dict[str, list[int | None]] = {}

    def __call__(self, node: ScoredNode, value: Any) -> Any:
        path = node.path
        if self.is_over:  # recomputed in backward
            is_root = (path, 0) in self._roots.clean
            return _written_into_at_will(value.detach()) if is_root else value
        occurrence = self.counts[path] = self.counts.get(path, -1) + 1
        if isinstance(value, Tensor) and value.requires_grad:
            value = self._under_own_name(node, value)
        is_root = (path, occurrence) in self._roots.clean
        known = self._clean if self._is_first else self._differences.by_path
        if not is_root and (path not in known or path in self._differences.problems):
            return value
        problem = self._problem(node, occurrence, value)
        if problem is not None:
            self._differences.problems.setdefault(path, problem)
            return value
        if is_root:
            value, edge = self._cut(node, value, self._roots.clean[path, occurrence])
            self._note(path, occurrence, value, edge)
            return value
        return self._compared(node, occurrence, value)

    def finish(self) -> None:
        """Says that the forward is over: what comes up from now on is recomputed in backward."""
        self.is_over = True
        self._depends.clear()
        self._origins.clear()
        self._named.clear()
        self._shared.clear()

    # -- values --------------------------------------------------------------------------------------------------------

    def _under_own_name(self, node: ScoredNode, value: Tensor) -> Tensor:
        """Returns the value, or a view of it where the same tensor came up before under another name.

        What a module is given may be used by others, too (the residual stream): a patch on the module's input would
        change it for the module only, and so its gradient is to be that of this one use.
        """
        edge = (value.grad_fn, value.output_nr)
        if edge[0] is None or node.node.op == "requires_grad_":  # which makes no value
            return value
        before, self._named[edge] = self._named.get(edge), node
        if before is None:
            self._origins[edge] = edge
            return value
        stays = node.node.is_mutated_later or node.node.is_in_place or value.layout is not torch.strided
        stays |= node.is_in_container  # which would have to be another one
        if stays or not node.can_be_cut or not torch.is_grad_enabled():
            # A view would keep the gradient of what the model writes into it to itself.
            if not torch.is_grad_enabled() or not self._roots.flow.has_one_use(before):
                self._shared.add(edge)
            if edge in self._shared:
                self._differences.problems.setdefault(node.path, _SHARED)
            return value
        alias = value.view_as(value)
        alias_edge = (alias.grad_fn, alias.output_nr)
        self._named[alias_edge] = node
        self._origins[alias_edge] = self._origins[edge]
        return alias

    def _compared(self, node: ScoredNode, occurrence: int, value: Tensor) -> Tensor:
        path, differences = node.path, self._differences
        if not self._is_first:
            if value.requires_grad and self._depends_on_root(value):
                self._note(path, occurrence, value, self._edge(value))
            else:
                self.by_path.setdefault(path, []).append(None)
            return value
        clean = self._clean[path]
        if occurrence >= len(clean):
            return value
        if not clean[occurrence].is_current:
            differences.rewritten.add(path)
        if value.requires_grad and self._depends_on_root(value):
            self._roots.tracked.add(id(node.node))
            self._note(path, occurrence, value, self._edge(value))
        elif torch.equal(clean[occurrence].tensor, value):
            differences.by_path.setdefault(path, []).append(None)
            self.by_path.setdefault(path, []).append(None)
        elif path in differences.rewritten:
            pass  # which of the two it is will be known when the value is copied in time
        elif not torch.is_grad_enabled():
            self._roots.untracked.add(id(node.node))
            differences.problems[path] = _NO_GRADIENT
        elif self._roots.may_begin_at(node):
            self._roots.tracked.add(id(node.node))
            self._roots.clean[path, occurrence] = clean[occurrence].tensor.detach()
            value, edge = self._cut(node, value, clean[occurrence].tensor)
            self._note(path, occurrence, value, edge)
        else:
            differences.problems[path] = _NO_GRADIENT
        return value

    def _problem(self, node: ScoredNode, occurrence: int, value: Any) -> str | None:
        clean = self._clean.get(node.path, ())
        if occurrence >= len(clean) or not isinstance(value, Tensor):
            return node.problem(value)
        mine = clean[occurrence].tensor  # in which nothing was wrong
        if mine.shape == value.shape and mine.dtype == value.dtype and mine.device == value.device:
            return None
        return node.problem(value) or _unlike(mine, value)

    def _cut(self, node: ScoredNode, value: Tensor, clean: Tensor) -> tuple[Tensor, GradientEdge]:
        """Returns a tensor that depends on a new leaf only, and the leaf's edge."""
        start = value.detach()
        if self._fraction:
            start = torch.where(start == clean, start, torch.lerp(start, clean.detach(), self._fraction))
        copied = _written_into_at_will(start)
        edge = GradientEdge(_node_of(copied), copied.output_nr)
        self._depends[copied.grad_fn] = True
        self._origins[edge.node, edge.output_nr] = (edge.node, edge.output_nr)
        self._named[edge.node, edge.output_nr] = node
        return copied, edge

    def _edge(self, value: Tensor) -> GradientEdge:
        node = _node_of(value)
        if BackwardCFunction in type(node).__mro__:
            # The Python object of such a node does not keep it alive; a view of the value does.
            self._kept_alive.append(value.view_as(value))
        return GradientEdge(node, value.output_nr)

    def _note(self, path: str, occurrence: int, value: Tensor, edge: GradientEdge) -> None:
        differences = self._differences
        if self._is_first:
            clean = self._clean.get(path)
            if clean is None or occurrence >= len(clean):  # a root of an earlier group
                return
            key = (edge.node, edge.output_nr)
            number: int | None = differences.add(clean[occurrence], value, self._origins.get(key, key))
            differences.by_path.setdefault(path, []).append(number)
        else:
            numbers = differences.by_path.get(path)
            if numbers is None:
                return
            number = numbers[occurrence] if occurrence < len(numbers) else None
        slot = None if number is None else self._slot(edge, number)
        self.by_path.setdefault(path, []).append(slot)

    def _slot(self, edge: GradientEdge, number: int) -> int:
        key = (edge.node, edge.output_nr, number)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = len(self.slots)
            self.edges.append(edge)
            self.slots.append(number)
        return slot

    def _depends_on_root(self, value: Tensor) -> bool:
        """Whether autograd leads from a value to a root. Each node of its graph is looked at once."""
        known = self._depends
        waiting: list[Any] = [value.grad_fn]
        while waiting:
            node = waiting[-1]
            if node in known:
                waiting.pop()
                continue
            inner = [other for other, _ in node.next_functions]
            if any(known.get(other, False) for other in inner):
                known[node] = True
            elif all(other in known for other in inner):
                known[node] = False
            else:
                waiting += [other for other in inner if other not in known]
        return known[value.grad_fn]


def _node_of(value: Tensor) -> Node:
    assert value.grad_fn is not None
    return value.grad_fn


def _written_into_at_will(value: Tensor) -> Tensor:
    """Returns a copy of a leaf with this value: the model may write into it, which it may not into a leaf."""
    if value.is_inference():  # from a part of the model that runs in inference mode
        value = value.clone()
    return value.requires_grad_().clone()


def _unlike(mine: Tensor, value: Tensor) -> str:
    if mine.shape != value.shape:
        return f"of shape {tuple(mine.shape)} in the clean run, of shape {tuple(value.shape)} in the corrupted one"
    return f"{mine.dtype} on {mine.device} in the clean run, {value.dtype} on {value.device} in the corrupted one"
