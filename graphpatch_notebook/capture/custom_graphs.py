"""Graphs of custom extraction functions: checked, run node by node, and recorded as a frame.

Such a graph runs in place of its module. Its placeholders are the parameters of `forward`, its output is a one-element
tuple, and its nodes keep their names.
"""

from __future__ import annotations

import builtins
import enum
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx
from torch.nn import Module

from graphpatch_notebook.capture.frame_recorder import function_name
from graphpatch_notebook.capture.modules import held_at
from graphpatch_notebook.capture.records import (
    RECORD,
    Frame,
    InputParameter,
    Kind,
    Node,
    OpNode,
    map_leaves,
)
from graphpatch_notebook.errors import CaptureError, GraphError
from graphpatch_notebook.paths import unique_name
from graphpatch_notebook.values import ABSENT, describe

_WRITABLE = frozenset({*dir(builtins), "inf", "nan", "torch", "device"})


def record_name(node: fx.Node) -> str:
    """Returns the name of a node of a custom graph in node paths; for a placeholder, the name of the input."""
    return str(node.target).lstrip("*") if node.op == "placeholder" else node.name


# -- checks ------------------------------------------------------------------------------------------------------------


def extracted_graph(
    function: Callable[[Module], fx.Graph], module: Module, parameters: Sequence[InputParameter], path: str
) -> fx.Graph:
    """Returns the graph that a custom extraction function makes of `module`, if it can run in its place.

    Placeholders get the defaults of the parameters of `forward` where they have none.

    Raises:
        CaptureError: The graph cannot be used; the message gives the reason and the repair.
    """
    graph = function(module)
    who = f"the custom extraction function for {type(module).__name__} ({path or '<root>'!r})"
    if not isinstance(graph, fx.Graph):
        raise CaptureError(
            f"{who} must return a torch.fx.Graph, such as graph_module.graph, not {type(graph).__name__}"
        )
    wanted = {parameter.starred_name: parameter for parameter in parameters}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    found = [str(node.target) for node in placeholders]
    if sorted(found) != sorted(wanted):
        raise CaptureError(f"{who} must have the parameters of forward as placeholders: {[*wanted]}; it has {found}")
    for node in sorted(placeholders, key=lambda node: [*wanted].index(node.target), reverse=True):
        next(iter(graph.nodes)).prepend(node)
        parameter = wanted[str(node.target)]
        if not node.args and parameter.default is not inspect.Parameter.empty:
            node.args = (parameter.default,)
    try:
        check_graph(graph, module, module, is_wrapped=True)
        graph.lint()
    except RuntimeError as error:
        raise CaptureError(f"{who} returned a graph that cannot run: {error}") from error
    return graph


def check_graph(
    graph: fx.Graph,
    owner: Module,
    module: Module,
    *,
    is_wrapped: bool,
    is_known: Callable[[fx.Node], bool] = lambda _: False,
) -> None:
    """Raises a `GraphError` if a graph that replaces the user's `module` has what code cannot hold, or is not there.

    Args:
        graph: The graph.
        owner: What it runs with: the module, or a graph module in place of it.
        module: The user's module.
        is_wrapped: Whether the output is to be in a tuple.
        is_known: Whether a node reads what the module itself read, which may exist only during calls.
    """
    repair = "put tensors on the module (module.register_buffer), or on a graph module (graph_module.NAME = tensor)"
    outputs = [node.args[0] for node in graph.nodes if node.op == "output"]
    if len(outputs) != 1 or (is_wrapped and not (isinstance(outputs[0], tuple) and len(outputs[0]) == 1)):
        written = "graph.output((value,)), in a one-element tuple" if is_wrapped else "graph.output(value)"
        raise GraphError(f"it must have one output, not {outputs}; write {written}")
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module") and not is_known(node):
            held = held_at(owner, str(node.target))
            if held is ABSENT or (node.op == "call_module" and not callable(held)):
                raise GraphError(
                    f"its node {node.name!r} uses self.{node.target}, which {type(module).__name__} does not have, or "
                    f"which cannot be called; {repair}"
                )
        literals: list[Any] = []
        if node.op != "placeholder":
            map_arguments((node.args, node.kwargs), literals.append)
        for literal in literals:
            if not _is_writable(literal):
                raise GraphError(
                    f"its node {node.name!r} has an object ({type(literal).__name__}) among its arguments, which code "
                    f"cannot hold; {repair}, and read it with graph.get_attr('NAME')"
                )


def _is_writable(value: Any) -> bool:
    """Whether the code that fx writes for an argument evaluates to the argument."""
    if isinstance(value, Tensor):
        return False
    if isinstance(value, (fx.Node, enum.Enum)) or type(value) in fx.node.base_types:
        return True
    try:
        code = compile(repr(value), "<argument>", "eval")
    except (SyntaxError, ValueError):
        return False
    return _WRITABLE.issuperset(code.co_names)


# -- runs --------------------------------------------------------------------------------------------------------------


class GraphRun(fx.Interpreter):
    """Runs a graph node by node on a module, with `inputs` by parameter of `forward`; values are freed on the way."""

    def __init__(self, module: Module, graph: fx.Graph, inputs: dict[str, Any]) -> None:
        super().__init__(module, graph=graph)
        self.extra_traceback = False  # it would change the error's arguments
        self._inputs = inputs
        for node in graph.nodes:
            if not node.users and node.op != "output":
                self.user_to_last_uses.setdefault(node, []).append(node)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Returns the value of an input."""
        name = target.lstrip("*")
        return self._inputs[name] if name in self._inputs else next(iter(args), None)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a node, in plain containers: those of fx cannot be changed."""

        def lookup(leaf: Any) -> Any:
            return self.env[leaf] if isinstance(leaf, fx.Node) else leaf

        return map_arguments(n.args, lookup), map_arguments(n.kwargs, lookup)


map_arguments = partial(map_leaves, with_subclasses=True)
"""Returns the arguments of an fx node with other leaves, in plain containers."""


# -- records -----------------------------------------------------------------------------------------------------------


class CustomRun(GraphRun):
    """Runs a custom graph in place of its module, and records its nodes in a frame, with their names in the graph.

    The output node is left to the caller, and so are calls of submodules: what the caller has added to the frame by
    the time that such a call returns gets the name of its node.
    """

    def __init__(self, graph: fx.Graph, frame: Frame, inputs: dict[str, Any]) -> None:
        super().__init__(frame.module, graph, inputs)
        self._frame = frame
        frame.custom_graph = graph
        self._taken = {node.name for node in frame.nodes if node.name}
        frame.nodes = [node for node in frame.nodes if node.kind != "input"]

    def run_node(self, n: fx.Node) -> Any:
        """Runs and records one node. The output is in a tuple."""
        value = super().run_node(n)
        if n.op == "output":
            return value[0]
        node = _call_added_for(n, self._frame)
        if node is None:
            node = custom_record(n, self._frame.module)
            self._frame.nodes.append(node)
        node.name = unique_name(record_name(n), self._taken)
        self._taken.add(node.name)
        node.spec = describe(value)
        n.meta[RECORD] = node
        return value


def _call_added_for(fx_node: fx.Node, frame: Frame) -> Node | None:
    last = frame.nodes[-1] if frame.nodes else None
    is_call = fx_node.op == "call_module" and last is not None and last.kind == "call" and not last.name
    return last if is_call else None


def custom_record(fx_node: fx.Node, module: Module) -> Node:
    """Returns the record of a node of a custom graph of `module`, or of an added node, without name and spec."""
    target = str(fx_node.target)
    if fx_node.op == "placeholder":
        return Node(kind="input", op=record_name(fx_node), target=record_name(fx_node))
    if fx_node.op == "get_attr":
        return Node(kind=_kind(module, target), op=target, target=target)
    op = function_name(fx_node.target) if callable(fx_node.target) else target.rsplit(".", 1)[-1]
    return OpNode(op=op, target=fx_node.name, base_name=fx_node.name)


def _kind(module: Module, path: str) -> Kind:
    *parents, name = path.split(".")
    holder = held_at(module, ".".join(parents)) if parents else module
    if name in getattr(holder, "_parameters", ()):
        return "parameter"
    return "buffer" if name in getattr(holder, "_buffers", ()) else "attribute"
