"""The nodes whose values an attribution looks at."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.capture.records import HELD_KINDS, Frame, Node, refs_in
from graphpatch_notebook.checks.dimensions import shape_problem
from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.inspection.nodes import NodeMap, NodeRows
from graphpatch_notebook.values import TensorSpec, ValueSpec, leaves


@dataclass(eq=False)
class ScoredNode:
    """A value that is compared between the runs.

    Attributes:
        path: Its path.
        node: The node.
        frame: The frame that the node is in.
        spec: What was recorded of the value.
        is_wanted: Whether it gets a score.
        is_compared: Whether its values are compared between the runs: it gets a score, or the runs may begin to differ
            there. Others are only looked at, to tell tensors that come up under several names.
    """

    path: str
    node: Node
    frame: Frame
    spec: TensorSpec
    is_wanted: bool = True
    is_compared: bool = True

    @property
    def is_parameter(self) -> bool:
        """Whether it is a weight: the same in all runs."""
        return self.node.kind == "parameter"

    @property
    def is_state(self) -> bool:
        """Whether it is a tensor that the model holds: its values in different runs are one tensor."""
        return self.node.kind in HELD_KINDS

    @property
    def is_in_container(self) -> bool:
        """Whether the value of the node is a container, with this value in it."""
        return self.spec is not self.node.spec

    @functools.cached_property
    def can_be_cut(self) -> bool:
        """Whether another tensor may take the place of the value in a run.

        The state of a module is left alone, and so are a view through which the model fills in another tensor, and a
        container that a module is given: it may write into it.
        """
        if self.is_state or self.node.is_view_filled_later:
            return False
        return not (self.is_in_container and self.node.kind == "input" and self.frame.parent is not None)

    def problem(self, value: Any) -> str | None:
        """Returns in words why the value that came up is none that can have a score, or `None`."""
        if not isinstance(value, Tensor):
            return f"a tensor when it was captured, of type {type(value).__name__} now"
        if not value.is_floating_point():
            return _not_floating(value.dtype)
        if value.element_size() < 2:
            return f"of dtype {str(value.dtype).removeprefix('torch.')}, which knows no arithmetic"
        if value.layout is not torch.strided:
            return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
        if not has_storage(value):
            return "inside of torch.func or vmap, where it stands for several values"
        if value.shape != self.spec.shape:
            problem = shape_problem(self.frame, self.spec, value.shape)
            if problem is not None:
                return f"its name may mean another value for these inputs: {problem}"
        return None


@dataclass(frozen=True)
class Selected:
    """What an attribution is about.

    Attributes:
        paths: The paths that the result has, in order.
        nodes: All nodes that hold floating-point tensors, in order of execution.
        skipped: Paths that can have no score, with the reason.
    """

    paths: list[str]
    nodes: list[ScoredNode]
    skipped: dict[str, str]


def selected_nodes(nodes: NodeMap, paths: Iterable[Any] | None) -> Selected:
    """Returns what to look at for scores of `paths`, or of all floating-point values.

    Raises:
        UnknownPathError: There is no such path, or it leads to no single value.
    """
    wanted = None if paths is None else list(dict.fromkeys(_known(nodes, paths)))
    of_interest = set(wanted or ())
    found: list[ScoredNode] = []
    skipped: dict[str, str] = {}
    for path, node, frame, spec in _rows(nodes.root, with_plumbing=wanted is not None):
        is_wanted = path in of_interest if wanted is not None else not node.is_plumbing
        if not is_wanted and node.is_plumbing:
            continue
        if isinstance(spec, TensorSpec) and spec.dtype.is_floating_point:
            found.append(ScoredNode(path, node, frame, spec, is_wanted, is_wanted or _is_source(node, frame)))
        elif path in of_interest or (isinstance(spec, TensorSpec) and spec.dtype.is_complex and is_wanted):
            skipped[path] = _not_floating(spec.dtype) if isinstance(spec, TensorSpec) else f"no tensor, but {spec}"
    if wanted is None:
        wanted = [node.path for node in found if node.is_wanted]
    return Selected(wanted, found, skipped)


def has_storage(value: Tensor) -> bool:
    """Whether a tensor has memory of its own: not one that stands for others."""
    try:
        value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _known(nodes: NodeMap, paths: Iterable[Any]) -> Iterator[str]:
    if isinstance(paths, (str, bytes)):
        paths = [paths]
    unknown = []
    for path in paths:
        try:
            yield nodes[path].path
        except UnknownPathError as problem:  # noqa: PERF203  # all of them are told
            unknown.append(str(problem))
    if unknown:
        raise UnknownPathError("; ".join(unknown))


def _rows(root: Frame, *, with_plumbing: bool) -> Iterator[tuple[str, Node, Frame, ValueSpec]]:
    rows = NodeRows.of(root, with_plumbing=with_plumbing)
    return zip(rows.paths, rows.nodes, rows.frames, rows.specs, strict=True)


def _not_floating(dtype: torch.dtype) -> str:
    return f"of dtype {str(dtype).removeprefix('torch.')}: scores are of floating-point values"


def _is_source(node: Node, frame: Frame) -> bool:
    """Whether a value is, as far as is recorded, made of no other floating-point value but the model's own."""
    if node.kind == "input":
        return frame.parent is None
    if node.kind == "output":
        return frame.opaque_reason is not None
    if node.kind != "op":
        return False
    made = node.whole
    arguments = (*refs_in(made.args), *refs_in(made.kwargs))
    return frame.has_own_graph or not any(_is_computed_float(ref.node) for ref in arguments)


def _is_computed_float(node: Node) -> bool:
    if node.kind in HELD_KINDS:
        return False
    return any(isinstance(leaf, TensorSpec) and leaf.dtype.is_floating_point for _, leaf in leaves(node.spec))
