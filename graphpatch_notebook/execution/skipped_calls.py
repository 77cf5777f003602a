"""Calls of modules that a patch replaces: which path names one, what passes through, and where that is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from graphpatch_notebook.capture.records import CallNode, Frame
from graphpatch_notebook.checks.dimensions import dimensions_of, shape_problem
from graphpatch_notebook.errors import GraphPatchError
from graphpatch_notebook.execution.plan import Plan
from graphpatch_notebook.execution.steps import CACHES, caches_of
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, parse, resolve
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, TensorSpec, ValueSpec, leaves


def target_of_call(root: Frame, text: str) -> Target | None:
    """Returns the output of the call that `text` names: the path of a module, or of an output that is a container.

    A module that returns several tensors, or none, is `Unresolvable`.
    """
    frame = _frame_at(root, text)
    if frame is None:
        return None
    node = frame.output_node
    digs = [dig for dig, spec in leaves(node.spec) if isinstance(spec, TensorSpec)]
    if len(digs) != 1:
        raise Unresolvable(
            f"{text!r} returns {len(digs)} tensors ({node.spec}), and a patch that replaces its call makes one: patch "
            "the modules in it, or what follows"
        )
    return resolve(root, format_path((*frame.path, node.name), digs[0]))


def are_for_calls(given: Any) -> bool:
    """Whether a patch, or all in a sequence of patches, replace calls: then a path may be that of a module."""
    patches = given if isinstance(given, (list, tuple)) else [given]
    return bool(patches) and all(isinstance(patch, Patch) and patch.replaces_call for patch in patches)


def _frame_at(root: Frame, text: str) -> Frame | None:
    frame, parsed = root, parse(text)
    if parsed.dig:
        return None
    for name in parsed.names:
        node = frame.names.get(name)
        if node is frame.output_node:
            return frame
        if not isinstance(node, CallNode):
            return None
        frame = node.frame
    return frame


def call_problem(target: Target, patch: Patch[Any]) -> str | None:
    """Returns why a patch cannot replace the call that returns a value, or `None` if it can."""
    frame, whole = target.frame, target.frame.output_node.spec
    if target.node.kind != "output" or target.index:
        return "it replaces a call of a module: give the path of the module, or of its output"
    if frame.parent is None:
        return "the model itself cannot be skipped"
    others = [spec for spec in _leaves(whole) if spec is not target.whole]
    if not isinstance(target.whole, TensorSpec) or any(
        not isinstance(spec, ScalarSpec) or spec.value is not None for spec in others
    ):
        return f"the module returns {whole}, of which more than one tensor would be needed: patch the modules in it"
    value = getattr(patch, "value", None)
    if not isinstance(value, Tensor):
        return None if passing_input(target) is not None else (
            "its first input does not have the shape and dtype of its output at all sizes, so it cannot pass through: "
            "give value="
        )  # fmt: skip
    if value.dtype != target.whole.dtype:
        return f"the module returns {target.whole.dtype}, and value is {value.dtype}: use value.to(...)"
    problem = None if patch.any_shape else shape_problem(frame, target.whole, value.shape)
    return None if problem is None else f"value, of shape {tuple(value.shape)}, cannot be its output: {problem}"


def _leaves(spec: ValueSpec) -> Sequence[ValueSpec]:
    if isinstance(spec, ContainerSpec):
        return [leaf for _, _, child in spec.children for leaf in _leaves(child)]
    return [spec]


def passing_input(target: Target) -> str | None:
    """Returns the first tensor among the inputs of the frame, if it has the form of the value at all sizes."""
    first = next((node for node in target.frame.inputs() if isinstance(node.spec, TensorSpec)), None)
    if first is None or not isinstance(first.spec, TensorSpec) or not isinstance(target.whole, TensorSpec):
        return None
    known = dimensions_of(target.frame.root)
    is_alike = first.spec.dtype == target.whole.dtype and known.profiles(first.spec) == known.profiles(target.whole)
    return first.target if is_alike else None


def refuse_with_cache(plan: Plan, function: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises a `GraphPatchError` if a call is to be skipped that fills the cache of a generation."""
    if function is plan.root.frame.module and not caches_of(plan.root.frame, args, kwargs):
        return
    for entry in plan.skips:
        if any(parameter.name in CACHES for frame in entry.target.frame.walk() for parameter in frame.parameters):
            raise GraphPatchError(
                f"{format_path(entry.target.frame.path)!r} fills a cache, which would lack its keys if skipped in a "
                "generation: say use_cache=False, or skip modules that take no cache"
            )
