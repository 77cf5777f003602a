"""A graph whose model runs in an engine, in JupyterLab: the tree, *Run*, an activation, and the attention view."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from tests.browser.tree_page import TreePage, click_head

MODEL = """
import ipyparallel, torch
from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import remote, show_attention

def build():
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, initializer_range=1.0)).eval()

cluster = ipyparallel.Cluster(n=1, engine_timeout=300, send_engines_connection_env=False)
client = cluster.start_and_connect_sync(n=1)
pg = remote(client, build, torch.arange(6)[None])
here = PatchableGraph(build(), torch.arange(6)[None])
"""
HEAD = "layers[0].attn.heads[1].z"
# What the view has of both runs, and what the same model here gives.
SAME = f"""
pattern = "layers[1].attn.pattern"
clean = here.record(pattern, torch.arange(6)[None])[pattern]
with here.patch({{"{HEAD}": __import__("graphpatch_notebook").ZeroPatch()}}):
    patched = here.record(pattern, torch.arange(6)[None])[pattern]
view = browser.views[0]
near = [
    float(((run[1].cells.cells[0] / 255) ** 2 * run[1].cells.scales[0].view(-1, 1, 1) - right[0]).abs().max()) < 0.005
    for run, right in ((view._clean, clean), (view._patched, patched))
]
apart = float((clean - patched).abs().max()) > 0.01
"""


def test_a_remote_graph_is_browsed_run_and_patched(show: Callable[..., TreePage]) -> None:
    tree = show(MODEL, 'browser = pg.browse(views=("attention",))\nbrowser')
    notebook, view = tree.notebook, tree.place.get_by_role("region", name="Attention")
    try:
        click_head(view, 0, 1)
        expect(tree.selected).to_contain_text("attn.z")
        view.get_by_role("button", name="Zero").click()
        expect(view.get_by_text("Patched", exact=True)).to_be_visible()
        notebook.execute(SAME)
        assert notebook.value("[near, apart]") == [[True, True], True]
        tree.button("Run").click()
        expect(tree.runs).to_contain_text("ran with patch")
        tree.tree.focus()
        tree.press("Enter")
        activation = tree.place.get_by_role("region", name="Activation")
        activation.get_by_role("button", name="Show").click()
        expect(activation.get_by_role("img")).to_be_visible()
    finally:
        notebook.execute("browser.close(); cluster.stop_cluster_sync()")
