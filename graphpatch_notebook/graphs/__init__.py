"""Graph modules: what runs graphs in place of the model's modules.

`build` turns a frame into an `fx.Graph`, `lazy_code` generates its code when it first runs, `hierarchy` joins the
graph modules (`modules`, `compiled_module`) of all frames, and `interpretation` runs a graph node by node.
`verification` compares graphs with the modules they stand for. Edited graphs are checked in `edited_calls`;
`weaving` and `plain_fx` write patches into code; `exported/` makes hierarchies of `torch.export` programs.
"""

from __future__ import annotations

from graphpatch_notebook.graphs.compiled_module import CompiledGraphModule, own_graphs
from graphpatch_notebook.graphs.hierarchy import build_hierarchy
from graphpatch_notebook.graphs.interpretation import GraphInterpreter
from graphpatch_notebook.graphs.lazy_code import code_generations
from graphpatch_notebook.graphs.modules import (
    GraphModule,
    MultiplyInvokedModule,
    OpaqueGraphModule,
    UnusedModule,
)

__all__ = [
    "CompiledGraphModule",
    "GraphInterpreter",
    "GraphModule",
    "MultiplyInvokedModule",
    "OpaqueGraphModule",
    "UnusedModule",
    "build_hierarchy",
    "code_generations",
    "own_graphs",
]
