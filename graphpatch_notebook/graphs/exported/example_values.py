"""Example values of an exported program: fake tensors that tell shapes, which the program keeps at its nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.nn import Module

from graphpatch_notebook.capture.custom_graphs import map_arguments
from graphpatch_notebook.graphs.exported.groups import at
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, TensorSpec, ValueSpec, children, describe, key_text

_ABSENT = object()


class ExampleValues:
    """The example values of the nodes of one graph, on the way through it.

    A graph that serves several calls keeps the examples of the first. Where another one is given other shapes, they
    are found out again, with the fake tensors of the program.
    """

    def __init__(self, graph: fx.Graph, module: Module, given: dict[str, Any]) -> None:
        self._graph = graph
        self._module = module
        self._given = given
        self._values: dict[fx.Node, Any] = {}
        self._is_known = True

    def set(self, node: fx.Node, value: Any) -> None:
        """Notes the example value of a node."""
        self._values[node] = value

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a node, with example values for nodes."""
        return map_arguments(node.args, self._lookup), map_arguments(node.kwargs, self._lookup)

    def returned(self) -> Any:
        """Returns the example of what the graph returns, out of its tuple."""
        output = next(iter(reversed(self._graph.nodes)))
        return map_arguments(output.args[0], self._lookup)[0]

    def example(self, node: fx.Node) -> Any:
        """Finds, notes and returns the example value of a node."""
        value = self._example(node)
        self._values[node] = value
        return value

    def _lookup(self, leaf: Any) -> Any:
        return self._values[leaf] if isinstance(leaf, fx.Node) else leaf

    def _example(self, node: fx.Node) -> Any:
        known = node.meta.get("val", _ABSENT)
        if node.op == "placeholder":
            value = self._given.get(str(node.target), None if known is _ABSENT else known)
            self._is_known &= known is _ABSENT or _is_alike(value, known)
            return value
        if node.op == "get_attr":
            return at(self._module, str(node.target)) if known is _ABSENT else known
        if known is not _ABSENT and self._is_known:
            return known
        try:
            with torch.no_grad():
                return self._run(node)
        except Exception:  # an operator that fake tensors cannot run: what is known of the first call must do
            return None if known is _ABSENT else known

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = self.arguments(node)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Any = node.target
        return target(*args, **kwargs)


def _is_alike(value: Any, known: Any) -> bool:
    if isinstance(known, Tensor):
        return isinstance(value, Tensor) and _sizes(value) == _sizes(known)
    return True


def spec_of(value: Any) -> ValueSpec:
    """Returns what is known of an example value: sizes that are symbols are those of the example inputs."""
    if isinstance(value, Tensor):
        return TensorSpec(torch.Size(_sizes(value)), value.dtype, value.device)
    if isinstance(value, (SymInt, SymFloat, SymBool)):
        return ScalarSpec(_hint(value))
    inside = children(value) if not isinstance(value, torch.Size) else None
    if inside is not None:
        return ContainerSpec(type(value), tuple((key_text(key), key, spec_of(child)) for key, child in inside))
    return describe(value)


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    return tuple(int(_hint(size)) for size in tensor.shape)


def _hint(size: Any) -> Any:
    """Returns the number that a symbol had for the example inputs; some other one where the program forgot it."""
    if not isinstance(size, (SymInt, SymFloat, SymBool)):
        return size
    hint = getattr(size.node, "hint", None)
    return hint if hint is not None else {SymInt: 0, SymFloat: 0.0, SymBool: False}[type(size)]
