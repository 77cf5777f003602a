"""The picture of a circuit in JupyterLab, above the tree of its model: a pinned head is selected there, and patched."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.notebook_page import NotebookPage
from tests.browser.tree_page import TreePage

MODEL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import Circuit, Edge

torch.manual_seed(0)
config = GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False)
model = GPT2LMHeadModel(config).eval()
pg = PatchableGraph(model, torch.arange(6)[None])
first, second = "layers[0].attn.heads[1]", "layers[1].attn.heads[0]"
feeds = {f"{head}.{part}": (f"{head}.z",) for head in (first, second) for part in "qkv"} | {"@logits": ()}
pairs = [("@embed", f"{first}.v"), (f"{first}.z", f"{second}.k"), (f"{second}.z", "@logits"), ("@embed", "@logits")]
edges = tuple(Edge(*pair, score) for pair, score in zip(pairs, [2.0, -1.5, 1.2, 0.3]))
circuit = Circuit(edges, feeds, candidates=39, clean=2.0, corrupted=-1.0, faithfulness=0.91)
"""


def test_a_circuit_is_seen_pinned_and_patched(
    notebook: NotebookPage,
    write: Callable[..., str],
    take_picture: Callable[[str], Path],
) -> None:
    notebook.open(write(MODEL, "pg.browse(circuit=circuit)"))
    notebook.run(0)
    notebook.run(1)
    circuit = notebook.cell(1).get_by_role("region", name="Circuit")
    head = circuit.get_by_role("button", name="head 0.1")
    head.hover()
    expect(circuit).to_contain_text("4 of 39 edges, faithfulness 0.91")
    head.click()
    expect(head).to_have_attribute("aria-pressed", "true")
    expect(circuit.get_by_role("table", name="Passes on to")).to_contain_text("layers[1].attn.heads[0].k−1.5")
    take_picture("light")

    circuit.get_by_role("button", name="Patch …").click()
    editor = TreePage(notebook, 1).dialog("Patch layers[0].attn.heads[1].z")
    editor.get_by_role("button", name="Apply").click()
    expect(editor).to_be_hidden()
    code = "from graphpatch_notebook.notebook.session.session import session_of\n"
    notebook.execute(code)
    assert notebook.value("[str(patch) for patch in session_of(pg).chosen.patches]") == [
        "zero layers[0].attn.heads[1].z"
    ]
    expect(circuit.locator(".gp-patched-node")).to_have_accessible_name(
        re.compile("head 0.1: .*, 1 edge in, 1 edge out")
    )
    notebook.use_theme("dark")
    take_picture("dark")
    notebook.use_theme("light")


GRAPH = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import attribution_graph, show_circuit

torch.manual_seed(0)
config = GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False)
model = GPT2LMHeadModel(config).eval()
pg = PatchableGraph(model, torch.arange(4)[None])
graph = attribution_graph(pg, torch.arange(4)[None], target=3).pruned(0.6, 0.8)
"""


def test_an_attribution_graph_is_grouped_by_clicks(
    notebook: NotebookPage,
    write: Callable[..., str],
    take_picture: Callable[[str], Path],
) -> None:
    notebook.open(write(GRAPH, "view = show_circuit(graph)\nview"))
    notebook.run(0)
    notebook.run(1)
    circuit = notebook.cell(1).get_by_role("region", name="Circuit")
    expect(circuit).to_contain_text("most influence first")
    circuit.get_by_role("button", name="Fit to width").click()
    nodes = circuit.locator(".gp-circuit-node:not(.gp-circuit-hidden)")
    count = nodes.count()
    for number in (0, 1):
        nodes.nth(number).click(modifiers=["Shift"])
    take_picture("selected")
    circuit.get_by_role("textbox", name="Name of the group").fill("both of them")
    circuit.get_by_role("button", name="Group", exact=True).click()
    expect(circuit.get_by_role("button", name="both of them at")).to_be_visible()
    expect(nodes).to_have_count(count - 1)
    take_picture("grouped")
    assert notebook.value("sorted(map(len, view.groups.values()))") == [2]
    assert notebook.value("graph.grouped(**view.groups).groups == {k: tuple(v) for k, v in view.groups.items()}")
