"""What makes an edited graph unfit to run, found when it is edited rather than when it runs."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from torch.nn import Module

from graphpatch_notebook.capture.custom_graphs import MODULE_GETS_TENSOR, RECORD, output_problem, reference_problem
from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.paths import format_path

_GRAPH_MODULE_GETS_TENSOR = "the graph module: graph_module.{} = tensor"


def check_edited(graph: fx.Graph, frame: Frame, owner: Module, path_meant: Callable[[str], str]) -> None:
    """Makes sure that an edited graph can be written down as code, and that there is all that it refers to.

    Args:
        graph: The graph.
        frame: Its frame.
        owner: The graph module, which has what the graph refers to.
        path_meant: Returns the attribute path of the user's module that the graph has as some other one.

    Raises:
        GraphError: It cannot; the message says which node it is, and how to put it right.
    """
    # Custom graphs are run with the user's module, which has to have what they refer to.
    is_custom = frame.custom_graph is not None
    owner, put = (frame.module, MODULE_GETS_TENSOR) if is_custom else (owner, _GRAPH_MODULE_GETS_TENSOR)
    nodes = [node for node in graph.nodes if not _reads_as_recorded(node, path_meant)]
    problems = [output_problem(graph, is_wrapped=is_custom)]
    problems += [reference_problem(node, owner, frame.module, put) for node in nodes]
    for problem in filter(None, problems):
        where = format_path(frame.path) or "<root>"
        raise GraphError(f"the graph of {where!r} ({type(frame.module).__name__}) {problem}")


def _reads_as_recorded(node: fx.Node, path_meant: Callable[[str], str]) -> bool:
    """Whether a node reads what the module read: that may be there during calls only."""
    record = node.meta.get(RECORD)
    return node.op == "get_attr" and isinstance(record, Node) and path_meant(str(node.target)) == record.target
