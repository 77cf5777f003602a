"""Python code from graphs: generated when it is needed, shared by equal graphs, readable in tracebacks.

Patches are woven in: a copy of the graph calls `woven_patched` on the values of some nodes. Which patches apply is
looked up while the code runs, so that one piece of code serves all contexts in which the same nodes are patched.

    hidden = torch.relu(up)        ->    hidden = torch.relu(up)
    mul = hidden * 2                     patched = woven_patched(hidden, 'hidden')
                                         mul = patched * 2
"""

from __future__ import annotations

import itertools
import linecache
import re
import threading
import weakref
from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import fx

from graphpatch_notebook.capture.records import RECORD, Node
from graphpatch_notebook.graphs.build import OWNER_NAMES
from graphpatch_notebook.torch_compat import codegen_of

_lock = threading.Lock()
_generations = 0
_numbers = itertools.count(1)
_FILE = "<graphpatch code"


def code_generations() -> int:
    """Returns the number of times that code was generated since this package was imported."""
    return _generations


@dataclass(frozen=True)
class GeneratedCode:
    """The source of the `forward` of one graph, and the function, whose first argument is the graph module.

    `shared` keeps the code object, and its lines for tracebacks, alive.
    """

    text: str
    function: Callable[..., Any]
    shared: _SharedCode


class _SharedCode:
    """A code object, for all graphs with this source."""

    def __init__(self, text: str) -> None:
        file = f"{_FILE} {next(_numbers)}>"
        self.module_code = compile(text, file, "exec")
        # An entry without a modification time stays until it is removed.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        weakref.finalize(self, linecache.cache.pop, file, None)


_shared: weakref.WeakValueDictionary[str, _SharedCode] = weakref.WeakValueDictionary()


def generate(graph: fx.Graph) -> GeneratedCode:
    """Returns the code of the current `graph`.

    Graphs with equal source share one code object, even if their globals differ.

    Example:
        >>> graph = fx.Graph()
        >>> graph.output(graph.placeholder("x"))
        output
        >>> print(generate(graph).text)
        def forward(self, x):
            return x
    """
    global _generations  # noqa: PLW0603  # a counter of the whole process
    python = graph.python_code(name_of_module(graph))
    text = python.src.strip("\n ")
    with _lock:
        _generations += 1
        shared = _shared.get(text)
        if shared is None:
            shared = _shared[text] = _SharedCode(text)
    globals_ = dict(python.globals)
    exec(shared.module_code, globals_)
    function = globals_["forward"]
    assert isinstance(function, FunctionType)
    return GeneratedCode(text, function, shared)


def name_assigned_at(code: CodeType, line: int) -> str | None:
    """Returns the name of the node whose value a line of generated code computes; `None` for other code."""
    if not code.co_filename.startswith(_FILE):
        return None
    # The value of `x[i] = v` belongs to the node that the rest of the line names.
    found = re.match(r"\s*(?:\w+\[.*\] = .*;  )?(\w+)(?: : [^=]+)? = ", linecache.getline(code.co_filename, line))
    return found.group(1) if found else None


def name_of_module(graph: fx.Graph) -> str:
    """Returns what the code of a graph calls the module that it belongs to."""
    taken = {str(node.target) for node in graph.nodes if node.op == "placeholder"}
    return next(name for name in OWNER_NAMES if name not in taken)


# -- patches in graphs -------------------------------------------------------------------------------------------------


woven_patches: ContextVar[Callable[[str, Any], Any] | None] = ContextVar("graphpatch_woven_patches", default=None)
"""Returns the patched value of a node, given its name and its value."""


def woven_patched(value: Any, name: str) -> Any:
    """Returns the patched value of the node `name`. Called by generated code."""
    patched = woven_patches.get()
    return value if patched is None else patched(name, value)


def weave(graph: fx.Graph, names: Collection[str]) -> fx.Graph:
    """Returns a copy of `graph` in which the values of the nodes whose records have `names` go to `woven_patched`."""
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = result.output(result.graph_copy(graph, copies))
    output.meta = dict(next(reversed(graph.nodes)).meta)
    result.set_codegen(codegen_of(graph))
    for node, copied in copies.items():
        record = node.meta.get(RECORD)
        if isinstance(record, Node) and record.name in names:
            _insert(result, copied, record)
    return result


def _insert(graph: fx.Graph, node: fx.Node, record: Node) -> None:
    value = written_value(node, record)
    with graph.inserting_after(node):
        patched = graph.call_function(woven_patched, (value, record.name))
    if not record.is_in_place:  # else the patched value was written into the tensor itself
        node.replace_all_uses_with(patched, delete_user_cb=lambda user: user is not patched)


def written_value(node: fx.Node, record: Node) -> fx.Node:
    """Returns the node of the tensor that an in-place op wrote into; `x[i] = v` itself has no value."""
    if not record.is_in_place:
        return node
    value = record.written_of(node.args, node.kwargs)
    return value if isinstance(value, fx.Node) else node
