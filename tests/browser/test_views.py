"""The views in JupyterLab, above the tree or alone: what is clicked there is selected, patched and heard in Python.

What a view does by itself has its tests in js/tests/browser.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.tree_page import TreePage, click_head, place_of_head

MODEL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from graphpatch import PatchableGraph, ZeroPatch
from graphpatch.experiments import Circuit, Edge, attribution_graph, show_circuit
from graphpatch.experiments import show_generation, show_heatmap, show_lens
from graphpatch.notebook.session.session import session_of

torch.manual_seed(0)
sizes = {"vocab_size": 20, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
config = GPT2Config(**sizes, use_cache=False, initializer_range=INITIAL)
model = GPT2LMHeadModel(config).eval()
ids = torch.arange(6)[None]
pg = PatchableGraph(model, ids)
"""
LARGE_WEIGHTS, SMALL_WEIGHTS = MODEL.replace("INITIAL", "1.0"), MODEL.replace("INITIAL", "0.02")
CHOSEN = "[str(patch) for patch in session_of(pg).chosen.patches]"
HEAD = "layers[0].attn.heads[1].z"


def test_attention_a_head_is_pointed_at_selected_and_zeroed(show: Callable[..., TreePage]) -> None:
    source = 'browser = pg.browse(views=("attention",))\nbrowser'
    tree = show(LARGE_WEIGHTS, source)
    notebook, view = tree.notebook, tree.place.get_by_role("region", name="Attention")
    heads = view.get_by_role("group", name="Heads")
    heads.hover(position=place_of_head(heads, 0, 1))
    expect(view.get_by_role("heading")).to_have_text("Layer 0, head 1")
    assert notebook.value("browser.selection") == []
    click_head(view, 0, 1)
    expect(tree.selected).to_contain_text("attn_output")
    notebook.wait_for_value("[item['name'] for item in browser.views[0].selection]", [HEAD])

    view.get_by_role("group", name="Tokens, looks at").get_by_text("3", exact=True).click()
    expect(view.get_by_text(f"{HEAD}[:, 3]")).to_be_visible()
    view.get_by_role("button", name="Copy path").click()
    assert notebook.page.evaluate("navigator.clipboard.readText()") == f"{HEAD}[:, 3]"
    view.get_by_role("button", name="Zero").click()
    expect(tree.chosen).to_contain_text(HEAD)
    expect(tree.chosen).to_contain_text("positions 3")
    expect(view.get_by_text("Patched", exact=True)).to_be_visible()
    assert notebook.value("browser.views[0].attention['runs']") == ["clean", "patched"]
    view.get_by_role("button", name="Difference").click()
    assert tree.violations(("light", "dark")) == []
    view.get_by_role("button", name="Undo").click()
    expect(view.get_by_text("Patched", exact=True)).to_be_hidden()
    # JupyterLab keeps Enter from text fields whose keys reach it.
    view.get_by_role("button", name="Steer …").click()
    view.get_by_label("What to add, as Python").fill("2.5")
    notebook.page.keyboard.press("Enter")
    expect(tree.chosen).to_contain_text("2.5")
    expect(view.get_by_text("Patched", exact=True)).to_be_visible()
    assert notebook.sources()[1:] == [source]


CIRCUIT = f"""
second = "layers[1].attn.heads[0]"
heads = ("{HEAD[:-2]}", second)
feeds = {{f"{{head}}.{{part}}": (f"{{head}}.z",) for head in heads for part in "qkv"}} | {{"@logits": ()}}
pairs = [("@embed", "{HEAD[:-2]}.v"), ("{HEAD}", f"{{second}}.k"), (f"{{second}}.z", "@logits"), ("@embed", "@logits")]
edges = tuple(Edge(*pair, score) for pair, score in zip(pairs, [2.0, -1.5, 1.2, 0.3]))
pg.browse(circuit=Circuit(edges, feeds, candidates=39, clean=2.0, corrupted=-1.0, faithfulness=0.91))
"""


def test_circuit_a_node_is_pinned_and_patched(show: Callable[..., TreePage]) -> None:
    tree = show(SMALL_WEIGHTS, CIRCUIT)
    circuit = tree.place.get_by_role("region", name="Circuit")
    head = circuit.get_by_role("button", name="head 0.1")
    expect(circuit).to_contain_text("4 of 39 edges, faithfulness 0.91")
    head.click()
    expect(head).to_have_attribute("aria-pressed", "true")
    expect(circuit.get_by_role("table", name="Passes on to")).to_contain_text("layers[1].attn.heads[0].k−1.5")
    circuit.get_by_role("button", name="Patch …").click()
    editor = tree.dialog(f"Patch {HEAD}")
    editor.get_by_role("button", name="Apply").click()
    expect(editor).to_be_hidden()
    assert tree.notebook.value(CHOSEN) == [f"zero {HEAD}"]
    expect(circuit.locator(".gp-patched-node")).to_have_accessible_name(
        re.compile("head 0.1: .*, 1 edge in, 1 edge out")
    )


def test_attribution_graph_nodes_are_grouped(show: Callable[..., TreePage]) -> None:
    graph = "graph = attribution_graph(pg, ids[:, :4], target=3).pruned(0.6, 0.8)"
    view = show(SMALL_WEIGHTS, f"{graph}\nview = show_circuit(graph)\nview")
    circuit = view.place.get_by_role("region", name="Circuit")
    expect(circuit).to_contain_text("most influence first")
    circuit.get_by_role("button", name="Fit to width").click()
    nodes = circuit.locator(".gp-circuit-node:not(.gp-circuit-hidden)")
    count = nodes.count()
    for number in (0, 1):
        nodes.nth(number).click(modifiers=["Shift"])
    circuit.get_by_role("textbox", name="Name of the group").fill("both of them")
    circuit.get_by_role("button", name="Group", exact=True).click()
    expect(circuit.get_by_role("button", name="both of them at")).to_be_visible()
    expect(nodes).to_have_count(count - 1)
    assert view.notebook.value("sorted(map(len, view.groups.values()))") == [2]
    same = "graph.grouped(**view.groups).groups == {k: tuple(v) for k, v in view.groups.items()}"
    assert view.notebook.value(same)


def graph_of(view: TreePage) -> Locator:
    return view.place.get_by_role("region", name="Graph")


def node(view: TreePage, name: str) -> Locator:
    return graph_of(view).get_by_role("button", name=re.compile(rf"^{name}\b")).first


def here(view: TreePage) -> Locator:
    return graph_of(view).get_by_role("navigation", name="Modules").locator("[aria-current]")


def test_graph_modules_are_entered_and_left_and_nodes_are_those_of_tree_and_python(
    show: Callable[..., TreePage], tmp_path: Path
) -> None:
    view = show(SMALL_WEIGHTS, 'browser = pg.browse("transformer.h_0", views=("graph",))\nbrowser')
    notebook, graph = view.notebook, graph_of(view)
    expect(here(view)).to_have_text("h_0")
    # A picture that is dragged, zoomed, and saved as a file that stands by itself.
    expect(node(view, "hidden_states_1")).to_contain_text("stream")  # the kernel has found the components
    with view.page.expect_download() as saved:
        graph.get_by_role("button", name="SVG").click()
    assert saved.value.suggested_filename == "pg.transformer.h_0.svg"
    saved.value.save_as(tmp_path / "block.svg")
    picture = ElementTree.parse(tmp_path / "block.svg").getroot()
    texts = {"".join(text.itertext()) for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {"attn", "GPT2Attention", "add stream", "[1, 6, 16]"} <= texts
    assert "var(" not in (tmp_path / "block.svg").read_text("utf8")
    window = graph.locator(".gp-zoom-window")
    for _ in range(6):
        graph.get_by_role("button", name="Zoom in").click()
    window.scroll_into_view_if_needed()
    box = window.bounding_box()
    assert box is not None
    window.evaluate("window => { window.scrollTop = 300; }")
    view.page.mouse.move(box["x"] + 20, box["y"] + 200)
    view.page.mouse.down()
    view.page.mouse.move(box["x"] + 60, box["y"] + 150, steps=3)
    view.page.mouse.up()
    assert window.evaluate("window => window.scrollTop") == 350
    graph.get_by_role("button", name="Fit the picture").click()
    # A node is that of the tree and of Python, and is patched.
    node(view, "hidden_states_1").click()
    expect(node(view, "hidden_states_1")).to_have_class(re.compile("gp-in-tree"))
    expect(view.selected).to_have_accessible_name(re.compile("^hidden_states_1 "))
    notebook.wait_for_value("[item['name'] for item in browser.selection]", ["layers[0].resid_mid"])
    graph.get_by_role("button", name="Zero").click()
    expect(node(view, "hidden_states_1")).to_contain_text("zero")
    assert notebook.value(CHOSEN) == ["zero layers[0].resid_mid"]
    node(view, "hidden_states_1").focus()
    view.press("Delete")
    notebook.wait_for_value(CHOSEN, [])
    # By clicks, keys, the tree, Python and the search one comes to other modules.
    node(view, "ln_1").focus()
    view.press("ArrowDown", "Enter")
    expect(here(view)).to_have_text("attn")
    view.press("Alt+ArrowUp")
    expect(node(view, "attn")).to_be_focused()
    graph.get_by_role("navigation").get_by_role("button", name="transformer").click()
    for name in ("h_1", "mlp", "c_fc"):
        node(view, name).click()
    # Parameters are in the box of the only node that reads them.
    expect(node(view, "x_1")).to_contain_text("weight [16, 64]")
    notebook.wait_for_value("browser.selected_path", "transformer.h_1.mlp.c_fc")
    notebook.execute("browser.select('transformer.h_1.attn.scores')")
    expect(here(view)).to_have_text("attn")
    expect(node(view, "scores")).to_have_class(re.compile("gp-in-tree"))
    view.go_to("transformer.h_0.ln_2")
    expect(here(view)).to_have_text("ln_2")
    view.search("op:softmax")
    view.search_box.press("Enter")
    expect(node(view, "pattern")).to_have_class(re.compile("gp-found"))
    assert view.violations(("light", "dark")) == []


RESULT = """
import numpy as np
import xarray as xr

paths = [f"transformer.h_{layer}.mlp.output" for layer in range(12)]
rows, columns = np.mgrid[:12, :16]
values = np.exp(-((rows - 4) ** 2 + (columns - 7) ** 2) / 12)
values[10, 2] = -0.3
result = xr.DataArray(values, {"path": paths}, ["path", "position"], name="LogitDifference", attrs={"baseline": 0.0})
heatmap = show_heatmap(result, tokens=["The", " Space", " Need", "le"] * 4)
heatmap
"""


def point_at(canvas: Locator, row: float, column: float, rows: int, columns: int, *, is_click: bool = False) -> None:
    """Points at a cell, counted from the top left one."""
    box = canvas.bounding_box()
    assert box is not None
    position = {"x": (column + 0.5) * box["width"] / columns, "y": (row + 0.5) * box["height"] / rows}
    canvas.click(position=position) if is_click else canvas.hover(position=position)


def test_heatmap_cells_are_read_and_selected_by_mouse_and_keyboard(show: Callable[..., TreePage]) -> None:
    view = show(SMALL_WEIGHTS, RESULT)
    notebook, heatmap = view.notebook, view.place.get_by_role("region", name="Heatmap")
    canvas = heatmap.get_by_role("img")
    point_at(canvas, 11 - 4, 7, 12, 16)
    expect(heatmap).to_contain_text("path transformer.h_4.mlp.output, position 7 (le): 1")
    point_at(canvas, 11 - 10, 2, 12, 16, is_click=True)
    expect(heatmap).to_contain_text("Selected: path transformer.h_10.mlp.output, position 2 (␣Need)")
    notebook.wait_for_value("heatmap.selected", ["transformer.h_10.mlp.output", 2])
    assert notebook.value("float(result.sel(path=heatmap.selected[0])[heatmap.selected[1]])") == pytest.approx(-0.3)
    canvas.focus()
    view.press("ArrowDown", "Enter")
    expect(heatmap).to_contain_text("Selected: path transformer.h_9.mlp.output")
    notebook.wait_for_value("heatmap.selected", ["transformer.h_9.mlp.output", 2])


LENS = "lens = show_lens(pg, ids, target=7)\nlens"
GENERATE = "generation = show_generation(pg, ids, max_new_tokens=5)\ngeneration"
SWEEP = """
result = pg.sweep(
    {"path": [f"layers[{layer}].resid_post" for layer in range(2)], "position": range(6)},
    lambda path, position: {path: ZeroPatch(slice=(slice(None), position))},
    ids, metric=lambda output: output.logits[0, -1, 7], progress=False,
)
show_heatmap(result, pg=pg)
"""

# Log-probabilities of greedy tokens by plain torch: each step runs the whole text, in which position 4 of the first
# block's output is zero.
BY_HOOKS = """
def said_by_hooks(is_patched):
    def zero(block, args, output):
        if is_patched:
            (output[0] if isinstance(output, tuple) else output)[:, 4] = 0
    handle, text, said = model.transformer.h[0].register_forward_hook(zero), ids, []
    with torch.no_grad():
        for _ in range(5):
            best = model(text).logits[:, -1:].log_softmax(-1).max(-1)
            said.append(best.values.item())
            text = torch.cat([text, best.indices], 1)
    handle.remove()
    return said
"""


def test_lens_generation_and_result_follow_a_patch_of_either(show: Callable[..., TreePage]) -> None:
    notebook = show(LARGE_WEIGHTS.replace("1.0", "0.4"), LENS, GENERATE, BY_HOOKS, SWEEP).notebook
    notebook.scroll_to(1)
    lens = notebook.cell(1).get_by_role("region", name="Logit lens")
    # The lowest row is that of the embeddings.
    point_at(lens.get_by_role("img").first, 1, 4, 3, 6, is_click=True)
    expect(lens).to_contain_text("layers[0].resid_post[:, 4]")
    lens.get_by_role("button", name="Zero").click()
    expect(lens.get_by_text("With the patches").first).to_be_visible()
    expect(lens.get_by_role("img")).to_have_count(3)
    notebook.wait_for_value("[lens.lens['runs'], lens.selection[0]['layer'], lens.selection[0]['position']]", [2, 0, 4])
    generation = notebook.cell(2).get_by_role("region", name="Generation")
    # The patch is for a position of the text, which only the step of the prompt computes.
    patched = generation.get_by_role("group", name="With the patches")
    for line, is_patched in ((generation.get_by_role("group", name="Without patches"), False), (patched, True)):
        expect(line.get_by_role("button")).to_have_count(5)
        labels = [token.get_attribute("aria-label") or "" for token in line.get_by_role("button").all()]
        said = [float(label.split()[-1].strip("<>%")) / 100 for label in labels]
        logs = notebook.value(f"said_by_hooks({is_patched})")
        assert said == pytest.approx([math.exp(log) for log in logs], abs=0.001)
    lens.get_by_role("button", name="Undo").click()
    expect(patched).not_to_be_visible()
    generation.get_by_role("button", name=re.compile("^step 2:")).first.click()
    generation.get_by_role("button", name=re.compile("^Branch with .* at step 2$")).first.click()
    expect(generation.get_by_role("group", name=re.compile("^Branch at step 2"))).to_be_visible()
    assert notebook.value("len(generation.generation['lines'])") == 2
    # A cell of a result over a component of each layer is patched like one of the lens, which follows.
    notebook.scroll_to(4)
    result = notebook.cell(4).get_by_role("region", name="Heatmap")
    point_at(result.get_by_role("img"), 1, 4, 2, 6, is_click=True)
    expect(result.get_by_role("toolbar", name="Selection")).to_contain_text("layers[0].resid_post[:, 4]")
    result.get_by_role("button", name="Zero").click()
    notebook.wait_for_value("lens.lens['runs']", 2)
    patch = "lens.session['patches'][0]"
    expected = ["zero", "layers[0].resid_post", "4"]
    assert notebook.value(f"[{patch}['kind'], {patch}['path'], {patch}['positions']]") == expected


HOSTILE = "<img src=x onerror=alert(1)>"
HOSTILE_MODEL = f"""
import torch
from torch import nn
from graphpatch import PatchableGraph

class Layer(nn.Module):
    def forward(self, x):
        return x + 1  # {HOSTILE}

Layer.__name__ = Layer.__qualname__ = {HOSTILE!r}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module({HOSTILE!r}, Layer())

    def forward(self, x):
        return {{{HOSTILE!r}: getattr(self, {HOSTILE!r})(x)}}

class Tokenizer:
    def decode(self, tokens):
        return {HOSTILE!r}

PatchableGraph(Model(), torch.ones(2), tokenizer=Tokenizer()).browse()
"""


def test_hostile_names_are_shown_and_nothing_of_them_runs(show: Callable[..., TreePage]) -> None:
    # That no dialog came up, and that nothing was fetched, is checked for every page at its end.
    view = show(HOSTILE_MODEL)
    row = view.tree.get_by_role("treeitem").filter(has_text=HOSTILE).first
    row.click()
    view.press("Enter")
    expect(view.place.get_by_role("dialog")).to_contain_text(HOSTILE)
    view.press("Escape")
    view.search(HOSTILE)
    view.search("add")
    view.row("add").click()
    view.press("+")
    editor = view.place.get_by_role("dialog")
    editor.get_by_label("Slice", exact=True).fill(HOSTILE)
    expect(editor.get_by_label("Slice", exact=True)).to_have_attribute("aria-invalid", "true")
    editor.get_by_label("Slice", exact=True).fill("")
    editor.get_by_label("Kind", exact=True).select_option("add")
    editor.get_by_label("Value", exact=True).fill(f"len({HOSTILE!r})")
    editor.get_by_role("button", name="Apply", exact=True).click()
    expect(view.chosen).to_contain_text(HOSTILE)
    view.button("Run").click()
    expect(view.runs).to_contain_text(HOSTILE)
    assert view.place.locator("img").count() == 0
