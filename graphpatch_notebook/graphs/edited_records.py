"""The records of a graph that somebody edited: nodes that are gone, nodes that are new, and what is known of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphpatch_notebook.capture.custom_graphs import RECORD, custom_record, map_arguments, record_name
from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.graphs.build import AUXILIARY
from graphpatch_notebook.paths import unique_name
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, TensorSpec, UnknownSpec, ValueSpec, describe, rebuilt

Fingerprint = list[tuple[Any, ...]]


def fingerprint(graph: fx.Graph) -> Fingerprint:
    """Returns what tells the graph from an edited one."""
    return [(node, node.op, node.target, node.args, node.kwargs) for node in graph.nodes]


def update_records(frame: Frame, graph: fx.Graph, attribute: Callable[[str], Any]) -> None:
    """Makes the records of `frame` those of its edited graph: each node of it has one, under a name of its own.

    What new nodes hold, and what may have changed behind them, is found out on tensors without data (of the device
    `meta`); where that does not work, it is not known.

    Args:
        frame: The frame.
        graph: Its graph as it is now.
        attribute: Returns what `get_attr` nodes read, by its path.
    """
    output = frame.output_node
    kept = {id(node) for node in frame.nodes}
    specs = _Specs(attribute, is_wrapped=frame.custom_graph is not None)
    nodes: list[Node] = []
    taken = {record.name for node in graph.nodes if (record := _record_of(node, kept)) is not None}
    for node in graph.nodes:
        record = _record_of(node, kept)
        if node.op == "output":
            record = output
        elif record is not None:
            kept.discard(id(record))  # a copied node has the record of the one that it was copied from
        elif not node.meta.get(AUXILIARY):
            record = custom_record(node, frame.module)
            record.name = unique_name(record_name(node), taken)
            taken.add(record.name)
        specs.infer(node, record, is_new=node.op != "output" and node.meta.get(RECORD) is not record)
        if record is not None:
            node.meta[RECORD] = record
            nodes.append(record)
    frame.nodes = nodes
    frame.names = {record.name: record for record in nodes}
    frame.output = None
    frame.capture.findings.clear()


def _record_of(node: fx.Node, kept: set[int]) -> Node | None:
    record = node.meta.get(RECORD)
    return record if isinstance(record, Node) and id(record) in kept else None


class _Specs:
    """What is known of the values of a graph, node by node.

    Args:
        attribute: Returns what `get_attr` nodes read, by its path.
        is_wrapped: Whether the output is in a tuple of its own, as in custom graphs.
    """

    def __init__(self, attribute: Callable[[str], Any], *, is_wrapped: bool) -> None:
        self._attribute = attribute
        self._is_wrapped = is_wrapped
        self._specs: dict[fx.Node, ValueSpec] = {}
        self._changed: set[fx.Node] = set()

    def infer(self, node: fx.Node, record: Node | None, *, is_new: bool) -> None:
        """Notes the spec of `node`, in its record too; that of a node that is not new only where it has changed."""
        is_changed = is_new or record is None or not self._changed.isdisjoint(node.all_input_nodes)
        spec = self._computed(node) if is_changed else None
        if spec is None:
            spec = UnknownSpec() if record is None or is_new else record.spec
        self._specs[node] = spec
        if record is None:
            if not self._changed.isdisjoint(node.all_input_nodes):
                self._changed.add(node)
        elif is_new or spec != record.spec:
            record.spec = spec
            self._changed.add(node)

    def _computed(self, node: fx.Node) -> ValueSpec | None:
        devices: list[torch.device] = []

        def value(leaf: Any) -> Any:
            return _without_data(self._specs[leaf], devices) if isinstance(leaf, fx.Node) else leaf

        try:
            if node.op == "output":
                result = map_arguments(node.args[0], value)
                return _on(describe(result[0] if self._is_wrapped else result), devices)
            if node.op == "get_attr":
                return describe(self._attribute(str(node.target)))
            args, kwargs = map_arguments(node.args, value), map_arguments(node.kwargs, value)
            if node.op == "call_method":
                return _on(describe(getattr(args[0], str(node.target))(*args[1:], **kwargs)), devices)
            if node.op == "call_function" and callable(node.target):
                return _on(describe(node.target(*args, **kwargs)), devices)
        except Exception:  # whatever the user's function says to tensors without data
            return None
        return None


class _UnknownValueError(Exception):
    """The value of a node cannot be made up (caught here)."""


def _without_data(spec: ValueSpec, devices: list[torch.device]) -> Any:
    if isinstance(spec, TensorSpec):
        devices.append(spec.device)
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    if isinstance(spec, ScalarSpec):
        return spec.value
    if isinstance(spec, ContainerSpec):
        keys = [key for _, key, _ in spec.children]
        return rebuilt(spec.type, keys, [_without_data(child, devices) for _, _, child in spec.children])
    raise _UnknownValueError


def _on(spec: ValueSpec, devices: list[torch.device]) -> ValueSpec:
    """Returns `spec` with the device that the arguments were on in place of `meta`."""
    if isinstance(spec, TensorSpec) and spec.device.type == "meta" and devices:
        return TensorSpec(spec.shape, spec.dtype, devices[0], spec.type_name)
    if isinstance(spec, ContainerSpec):
        return ContainerSpec(spec.type, tuple((text, key, _on(child, devices)) for text, key, child in spec.children))
    return spec
