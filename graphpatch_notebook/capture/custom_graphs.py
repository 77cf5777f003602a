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

from graphpatch_notebook.capture.functions import function_name
from graphpatch_notebook.capture.records import (
    RECORD,
    Frame,
    InputParameter,
    Kind,
    Node,
    OpNode,
    map_leaves,
)
from graphpatch_notebook.errors import CaptureError
from graphpatch_notebook.paths import unique_name
from graphpatch_notebook.values import describe

_ABSENT = object()
MODULE_GETS_TENSOR = "the module: module.register_buffer({!r}, tensor)"
"""How a module gets a tensor for its custom graph, by name."""

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
        raise CaptureError(f"{who} must return a torch.fx.Graph, not {type(graph).__name__}{_hint(graph)}")
    _check_placeholders(graph, parameters, who)
    problems = [output_problem(graph, is_wrapped=True)]
    problems += [reference_problem(node, module, module, MODULE_GETS_TENSOR) for node in graph.nodes]
    for problem in filter(None, problems):
        raise CaptureError(f"{who} {problem}")
    try:
        graph.lint()
    except RuntimeError as error:
        raise CaptureError(f"{who} returned a graph that is not well formed: {error}") from error
    return graph


def _hint(value: Any) -> str:
    return "; return its .graph" if isinstance(value, fx.GraphModule) else "; make one with graph = torch.fx.Graph()"


def _check_placeholders(graph: fx.Graph, parameters: Sequence[InputParameter], who: str) -> None:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    wanted = [parameter.starred_name for parameter in parameters]
    found = [str(node.target) for node in placeholders]
    if found != wanted:
        repair = "; ".join(f"graph.placeholder({name!r})" for name in wanted) or "no placeholders"
        raise CaptureError(
            f"{who} must have the parameters of forward as placeholders, in their order: "
            f"{', '.join(wanted) or 'none'}; it has {', '.join(found) or 'none'}; write {repair}"
        )
    for node, parameter in zip(placeholders, parameters, strict=True):
        if not node.args and parameter.default is not inspect.Parameter.empty:
            node.args = (parameter.default,)


def output_problem(graph: fx.Graph, *, is_wrapped: bool) -> str | None:
    """Returns what is wrong with the output node; `None` if nothing is. `is_wrapped`: it is to be in a tuple."""
    outputs = [node for node in graph.nodes if node.op == "output"]
    if len(outputs) == 1 and not is_wrapped:
        return None
    value = outputs[0].args[0] if len(outputs) == 1 and outputs[0].args else None
    if len(outputs) == 1 and isinstance(value, tuple) and len(value) == 1:
        return None
    found = "no output" if not outputs else f"{len(outputs)} outputs" if len(outputs) > 1 else f"an output of {value!r}"
    if is_wrapped:
        return f"must wrap the output in a one-element tuple; it has {found}; write graph.output((value,))"
    return f"must have one output; it has {found}; write graph.output(value)"


def reference_problem(node: fx.Node, owner: Module, module: Module, put: str) -> str | None:
    """Returns why a node cannot have its target or its arguments; `None` if it can.

    Args:
        node: The node.
        owner: What the graph runs with: the user's `module`, or a replacement of it.
        module: The user's module.
        put: How the owner gets a tensor, with a place for its name.
    """
    return _target_problem(node, owner, module, put) or _literal_problem(node, put)


def _target_problem(node: fx.Node, owner: Module, module: Module, put: str) -> str | None:
    if node.op not in ("get_attr", "call_module"):
        return None
    found = _attribute(owner, str(node.target))
    is_read = node.op == "get_attr"
    if found is _ABSENT:
        hint = f"; a tensor that you want there, put on {put.format(str(node.target))}" if is_read else ""
        return (
            f"has a node {node.name!r} that {'reads' if is_read else 'calls'} self.{node.target}, but "
            f"{type(module).__name__} has no such attribute; it has "
            f"{', '.join(_names(owner)) or 'no tensors and submodules'}{hint}"
        )
    if not is_read and not callable(found):
        return f"has a node {node.name!r} that calls self.{node.target}, which cannot be called"
    return None


def _literal_problem(node: fx.Node, put: str) -> str | None:
    """Returns why the arguments of a node cannot be written as code."""
    found: list[Any] = []
    if node.op != "placeholder":
        map_arguments((node.args, node.kwargs), lambda leaf: None if _is_writable(leaf) else found.append(leaf))
    if not found:
        return None
    what = describe(found[0]) if isinstance(found[0], Tensor) else type(found[0]).__name__
    return (
        f"has a node {node.name!r} with an object ({what}) among its arguments, which code cannot hold; put it on "
        f"{put.format('NAME')}, and read it with graph.get_attr('NAME')"
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


def _names(module: Module) -> list[str]:
    return [name for registry in (module._parameters, module._buffers, module._modules) for name in registry]


def _attribute(module: Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, _ABSENT)
    return found


# -- runs --------------------------------------------------------------------------------------------------------------


def run_custom(
    graph: fx.Graph, module: Module, bound_inputs: dict[str, Any], on_value: Callable[[fx.Node, Any], Any]
) -> Any:
    """Runs a custom graph node by node on `module`, and returns the output of the module.

    `bound_inputs` are the inputs by parameter of `forward`. `on_value` is called with each node except the output and
    its value, and returns the value to use.
    """
    values: dict[fx.Node, Any] = {}
    last_uses = _last_uses(graph)

    def lookup(leaf: Any) -> Any:
        return values[leaf] if isinstance(leaf, fx.Node) else leaf

    for node in graph.nodes:
        if node.op == "output":
            return map_arguments(node.args[0], lookup)[0]
        values[node] = on_value(node, _value(node, module, bound_inputs, lookup))
        for dead in last_uses.get(node, ()):
            del values[dead]
    raise CaptureError("the graph has no output")


def _value(node: fx.Node, module: Module, bound_inputs: dict[str, Any], lookup: Callable[[Any], Any]) -> Any:
    if node.op == "placeholder":
        name = record_name(node)
        return bound_inputs[name] if name in bound_inputs else (node.args[0] if node.args else None)
    if node.op == "get_attr":
        return _attribute(module, str(node.target))
    args, kwargs = map_arguments(node.args, lookup), map_arguments(node.kwargs, lookup)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = _attribute(module, str(node.target)) if node.op == "call_module" else node.target
    return target(*args, **kwargs)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Returns, for each node, the nodes whose values are not needed after it."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for used in (*node.all_input_nodes, node):
            if used not in seen:
                seen.add(used)
                found.setdefault(node, []).append(used)
    return found


map_arguments = partial(map_leaves, with_subclasses=True)
"""Returns the arguments of an fx node with other leaves, in plain containers."""


# -- records -----------------------------------------------------------------------------------------------------------


def custom_frame_nodes(graph: fx.Graph, frame: Frame, bound_inputs: dict[str, Any]) -> Any:
    """Runs a custom graph, records its nodes in `frame`, and returns the output of the module.

    The nodes have the names that they have in the graph. The output node is left to the caller, and so are calls of
    submodules: what the caller has added to `frame` by the time that such a call returns gets the name of its node.
    """
    frame.custom_graph = graph
    taken = {node.name for node in frame.nodes if node.name}

    def record(fx_node: fx.Node, value: Any) -> Any:
        node = _call_added_for(fx_node, frame)
        if node is None:
            node = custom_record(fx_node, frame.module)
            frame.nodes.append(node)
        node.name = unique_name(record_name(fx_node), taken)
        taken.add(node.name)
        node.spec = describe(value)
        fx_node.meta[RECORD] = node
        return value

    frame.nodes = [node for node in frame.nodes if node.kind != "input"]
    return run_custom(graph, frame.module, bound_inputs, record)


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
    holder = _attribute(module, ".".join(parents)) if parents else module
    if name in getattr(holder, "_parameters", ()):
        return "parameter"
    return "buffer" if name in getattr(holder, "_buffers", ()) else "attribute"
