"""Writes recipes/*.json: sessions with many kinds of paths, chosen with the transformers that is installed.

`python -m tests.notebook.session.recipes`, with transformers 4, made those that the tests load with transformers 5.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import transformers

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.notebook.session import session_file
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.session import Session
from tests.zoo import Call, case_by_name

FOLDER = Path(__file__).parent / "recipes"
CASES = ("gpt2-eager", "mixtral-eager")
_CHOSEN = re.compile(r"_0\.(attn|attention|block_sparse_moe|self_attn)\.|_0\.[^.]*$")


def graph_of(name: str) -> PatchableGraph:
    """Returns the graph of a model of the zoo."""
    call = call_of(name)
    return PatchableGraph(case_by_name(name).build(), *call.args, **call.kwargs)


def call_of(name: str) -> Call:
    """Returns what the model is called with."""
    return case_by_name(name).example()


def write(name: str) -> None:
    """Writes the recipe of one model: zeros for tensors of its first layer."""
    graph = graph_of(name)
    session, nodes = Session(graph), graph.nodes
    paths = [path for path in nodes if _CHOSEN.search(path) and nodes[path].shape is not None]
    session.extend([ChosenPatch(path, "zero") for path in paths])
    FOLDER.mkdir(exist_ok=True)
    session_file.save(session, FOLDER / f"{name}.json")


if __name__ == "__main__":
    assert transformers.__version__.startswith("4."), transformers.__version__
    torch.set_num_threads(1)
    for case in CASES:
        write(case)
