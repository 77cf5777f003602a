"""The attention view in JupyterLab, above the tree: a head is pointed at, selected in both, copied and zeroed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.browser.notebook_page import NotebookPage
from tests.browser.tree_page import TreePage, click_head, place_of_head

MODEL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from graphpatch_notebook import PatchableGraph

torch.manual_seed(0)
sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
config = GPT2Config(**sizes, use_cache=False, initializer_range=1.0)
pg = PatchableGraph(GPT2LMHeadModel(config).eval(), torch.arange(6)[None])
"""
HEAD = "layers[0].attn.heads[1].z"


def test_a_head_is_pointed_at_selected_and_zeroed(
    notebook: NotebookPage, write: Callable[..., str], take_picture: Callable[[str], Path]
) -> None:
    notebook.open(write(MODEL, 'browser = pg.browse(views=("attention",))\nbrowser'))
    notebook.run(0)
    notebook.run(1)
    view = notebook.cell(1).get_by_role("region", name="Attention")
    tree = TreePage(notebook, 1)
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
    take_picture("light")
    notebook.page.mouse.move(0, 0)
    found = Axe().run(notebook.page, ".gp-attention").response["violations"]
    assert [one["id"] for one in found] == []
    view.get_by_role("button", name="Undo").click()
    expect(view.get_by_text("Patched", exact=True)).to_be_hidden()
    # JupyterLab keeps Enter from text fields whose keys reach it.
    view.get_by_role("button", name="Steer …").click()
    view.get_by_label("What to add, as Python").fill("2.5")
    notebook.page.keyboard.press("Enter")
    expect(tree.chosen).to_contain_text("2.5")
    expect(view.get_by_text("Patched", exact=True)).to_be_visible()
    assert notebook.sources()[1:] == ['browser = pg.browse(views=("attention",))\nbrowser']
    notebook.use_theme("dark")
    take_picture("dark")
    notebook.use_theme("light")
