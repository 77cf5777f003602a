"""The user's postprocessing function: edits graphs in place, right after capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from graphpatch_notebook.errors import CaptureError
from graphpatch_notebook.graphs.compiled_module import CompiledGraphModule
from graphpatch_notebook.graphs.edited_records import fingerprint
from graphpatch_notebook.graphs.modules import GraphModule
from graphpatch_notebook.paths import format_path


def postprocess(graph_module: GraphModule, function: Callable[[Any, Module], None]) -> None:
    """Calls `function(graph_module, module)` for each graph module that has a graph, innermost first.

    Where it edited the graph, the edited graph is the module from then on; where it did not, nothing changes.

    Raises:
        CaptureError: An edited graph is not well formed, or needs what is no longer there.
        Exception: Whatever `function` raises.
    """
    for callee in graph_module.callees():
        postprocess(callee, function)
    if not isinstance(graph_module, CompiledGraphModule):
        return
    before = fingerprint(graph_module.graph)
    function(graph_module, graph_module.frame.module)
    if fingerprint(graph_module.graph) == before:
        return
    try:
        graph_module.recompile()
    except RuntimeError as error:
        frame = graph_module.frame
        raise CaptureError(
            f"the postprocessing function left the graph of {format_path(frame.path) or '<root>'!r} "
            f"({type(frame.module).__name__}) not fit to run: {error}"
        ) from error
