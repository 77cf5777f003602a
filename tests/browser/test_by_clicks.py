"""The notebook that finds a head by clicks: what it says one can click and see, clicked and seen."""

from __future__ import annotations

from playwright.sync_api import Locator, expect

from tests.browser.notebook_page import NotebookPage
from tests.browser.test_views import graph_of, here, node
from tests.browser.tree_page import TreePage, click_head

# The word that the model predicts without a head, by a hook of torch instead of graphpatch.
ORACLE = """
def predicts_without(layer, head):
    def zero(module, args):
        found = args[0].clone()
        found[..., 16 * head : 16 * head + 16] = 0
        return (found,)

    hook = model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(zero)
    try:
        return Words().decode([model(ids).logits[0, -1].argmax()])
    finally:
        hook.remove()
"""


def test_the_notebook_finds_the_head_by_clicks_and_walks_through_the_graph(notebook: NotebookPage) -> None:
    page = notebook.page
    notebook.open("09_by_clicks.ipynb")
    attention_cell, lens_cell = notebook.position("browser = pg.browse("), notebook.position("lens = show_lens(")
    dataflow_cell = notebook.position("dataflow = pg.browse(")
    for cell in notebook.code_cells():
        if cell <= dataflow_cell:
            notebook.run(cell)
    notebook.execute(ORACLE)
    attention = notebook.cell(attention_cell).get_by_role("region", name="Attention")
    lens = notebook.cell(lens_cell).get_by_role("region", name="Logit lens")
    tree = TreePage(notebook, attention_cell)

    needed = {}
    for layer, head in ((layer, head) for layer in range(2) for head in (0, 3)):
        name = f"layers[{layer}].attn.heads[{head}].z"
        click_head(attention, layer, head, heads=4)
        expect(attention).to_contain_text(name)
        expect(tree.selected).to_contain_text(f"layers[{layer}].attn.z")
        attention.get_by_role("button", name="Zero").click()
        expect(tree.chosen).to_contain_text(name)
        expect(attention.get_by_text("Patched", exact=True)).to_be_visible()
        expect(lens.get_by_role("img")).to_have_count(3)
        clean, patched = (predicted(lens, run) for run in ("Without the patches", "With the patches"))
        assert clean == "jumps"
        assert patched == notebook.value(f"predicts_without({layer}, {head})")
        needed[layer, head] = patched != clean
        if (layer, head) == (1, 3):
            tree.button("Copy as Python").click()
            expect(tree.button("Copy as Python")).to_contain_text("Copied")
            copied = page.evaluate("navigator.clipboard.readText()")
            assert copied.strip() == notebook.sources()[notebook.position("# Needs: pg, ids")]
        attention.get_by_role("button", name="Undo").click()
        expect(attention.get_by_text("Patched", exact=True)).to_be_hidden()
        expect(lens.get_by_role("img")).to_have_count(1)
    assert [head for head, is_needed in needed.items() if is_needed] == [(0, 3), (1, 3)]

    notebook.scroll_to(dataflow_cell)
    view = TreePage(notebook, dataflow_cell)
    for name in ("c_attn", "scores", "pattern"):
        expect(node(view, name)).to_be_attached()
    node(view, "attn_output").click()
    graph_of(view).get_by_role("button", name="Zero").click()
    expect(node(view, "attn_output")).to_contain_text("zero")
    view.patches.get_by_role("button", name="Undo").click()
    expect(node(view, "attn_output")).not_to_contain_text("zero")
    graph_of(view).get_by_role("navigation").get_by_role("button", name="h_1").click()
    node(view, "mlp").click()
    expect(here(view)).to_have_text("mlp")


def predicted(lens: Locator, run: str) -> str:
    """Returns the most probable token of the last layer and position."""
    canvas = lens.get_by_role("img").first
    box = canvas.bounding_box()
    assert box is not None
    canvas.hover(position={"x": box["width"] - 4, "y": 4})
    return lens.get_by_role("table", name=run).get_by_role("cell").first.locator("code").inner_text()
