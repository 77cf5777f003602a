"""Graph modules: what runs graphs in place of the model's modules.

    hierarchy.py      frames -> the hierarchy of graph modules
    modules.py        the classes of graph modules; compiled_module.py: those with a graph (`running`: which one runs)
    mirror.py         what they share with the modules that they stand for
    build.py          frame -> `fx.Graph`; `targets.py`: how a torch call is written in it
    lazy_code.py      `fx.Graph` -> Python code
    verification.py   whether the graphs of a model do what their modules do
    interpretation.py graphs node by node, where an error names the node
    live_runs.py      the module itself runs in place of its graph
    copies.py         deepcopy and pickle
    postprocessing.py edits of graphs: whether they can run and in which calls (`edited_calls`), names of new nodes
                      (`edited_records`), the hooks below them (`hooks`)
    weaving.py        patches in the code of a graph
    plain_fx.py       the same as plain `torch.fx` modules

Only `hierarchy` and `modules` are needed to run graphs; capture needs none of them.
"""

from __future__ import annotations

from graphpatch_notebook.graph_modules.compiled_module import CompiledGraphModule, own_graphs
from graphpatch_notebook.graph_modules.hierarchy import build_hierarchy
from graphpatch_notebook.graph_modules.interpretation import GraphInterpreter
from graphpatch_notebook.graph_modules.lazy_code import code_generations
from graphpatch_notebook.graph_modules.modules import (
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
