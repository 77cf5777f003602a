"""Graph modules: they run graphs in place of the modules of the model.

`build` turns the records of a frame into an `fx.Graph`, and `generated_code` makes its code when it first runs.
`compiled_module` joins the graph modules (`modules`) of all frames. `edits` and `signatures` say for
which calls a graph holds. `plain_fx` writes a hierarchy of plain `fx.GraphModule`s, `exported` makes one from a
`torch.export` program.
"""

from __future__ import annotations

from graphpatch_notebook.graphs.compiled_module import CompiledGraphModule, build_hierarchy, own_graphs
from graphpatch_notebook.graphs.generated_code import code_generations
from graphpatch_notebook.graphs.interpretation import GraphInterpreter
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
