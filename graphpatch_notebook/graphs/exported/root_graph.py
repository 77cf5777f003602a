"""The graph of a whole program: with the inputs and the output of the `forward` that was exported.

An unflattened program takes flat inputs and returns flat outputs; what they are parts of is told apart from it:

    x, d_k_0, d_k_1 -> (down, mul)    becomes    x, d -> {"y": down, "z": (mul, x)}
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from graphpatch_notebook.graphs.exported.inputs import ProgramInput
from graphpatch_notebook.torch_compat import leaves_of, parts_of, structured


def root_graph(source: fx.Graph, inputs: Sequence[ProgramInput], output_structure: Any) -> fx.Graph:
    """Returns a graph like `source` that takes `inputs`, and returns the output in a one-element tuple."""
    graph = fx.Graph()
    flat = [node for node in source.nodes if node.op == "placeholder"]
    given = [
        graph.create_node("placeholder", known.parameter.name, name=known.parameter.name)
        for known in inputs
    ]  # fmt: skip
    made: dict[fx.Node, fx.Node] = {}
    for known, node in zip(inputs, given, strict=True):
        parts = flat[known.start : known.start + known.size]
        if known.is_leaf:
            node.meta = dict(parts[0].meta)
            made[parts[0]] = node
            continue
        node.meta["val"] = structured([part.meta.get("val") for part in parts], known.structure)
        _take_apart(graph, node, known.structure, parts, made)
    results = copied_into(graph, source, made)
    graph.output((_put_together(graph, list(results), output_structure),))
    return graph


def _take_apart(
    graph: fx.Graph, node: fx.Node, structure: Any, parts: Sequence[fx.Node], made: dict[fx.Node, fx.Node]
) -> None:
    """Adds nodes for the flat values in the container that `node` holds, as far as the program uses them."""
    if not any(part.users for part in parts):
        return
    if not _is_plain(structure):
        leaves = graph.create_node("call_function", leaves_of, (node,), name=f"{node.name}_leaves")
        for position, part in enumerate(parts):
            _add_part(graph, leaves, position, part, made)
        return
    start = 0
    for key, child in zip(_keys(structure), parts_of(structure), strict=True):
        inside = parts[start : start + child.num_leaves]
        start += child.num_leaves
        if child.is_leaf():
            _add_part(graph, node, key, inside[0], made)
        elif any(part.users for part in inside):
            name = f"{node.name}_{key}"
            inner = graph.create_node("call_function", operator.getitem, (node, key), name=name)
            _take_apart(graph, inner, child, inside, made)


def _add_part(graph: fx.Graph, node: fx.Node, key: Any, part: fx.Node, made: dict[fx.Node, fx.Node]) -> None:
    if part.users:
        made[part] = graph.create_node("call_function", operator.getitem, (node, key), name=part.name)
        made[part].meta = dict(part.meta)


def copied_into(graph: fx.Graph, source: fx.Graph, made: dict[fx.Node, fx.Node]) -> Any:
    """Copies all but the placeholders of `source`, and returns what it returns, over nodes of `graph`.

    Args:
        graph: Where to.
        source: Where from.
        made: What stands for the placeholders of `source`; the copies are added.
    """
    for node in source.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], lambda n: made[n])
        if node.op != "placeholder":
            made[node] = graph.node_copy(node, lambda n: made[n])
    raise AssertionError("a graph has an output")


class Structured:
    """Puts values together as a program does; a function that generated code can call."""

    def __init__(self, structure: Any) -> None:
        self.structure = structure
        self.__name__ = self.__qualname__ = f"make_{getattr(structure.type, '__name__', 'output')}"
        self.__module__ = __name__

    def __call__(self, *leaves: Any) -> Any:
        return structured(list(leaves), self.structure)

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


def _put_together(graph: fx.Graph, leaves: list[Any], structure: Any) -> Any:
    """Returns the output as it stands in a graph: plain containers as they are, others as calls."""
    if structure.is_leaf():
        return leaves[0]
    if not _is_plain(structure):
        return graph.create_node("call_function", Structured(structure), tuple(leaves))
    children: list[Any] = []
    start = 0
    for part in parts_of(structure):
        children.append(_put_together(graph, leaves[start : start + part.num_leaves], part))
        start += part.num_leaves
    if structure.type is dict:
        return dict(zip(structure.context, children, strict=True))
    return structure.type(children)


def _is_plain(structure: Any) -> bool:
    """Whether graphs can hold such a container as it is: a tuple, a list, a dict with text for keys."""
    if structure.type is dict:
        return all(type(key) is str for key in structure.context)
    return structure.type in (tuple, list)


def _keys(structure: Any) -> Sequence[Any]:
    return list(structure.context) if structure.type is dict else range(structure.num_children)
