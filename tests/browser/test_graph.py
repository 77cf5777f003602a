"""The dataflow of a module in JupyterLab: entered and left by clicks and keys, moved, searched, patched and saved."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.notebook_page import NotebookPage
from tests.browser.test_accessibility import violations
from tests.browser.tree_page import TreePage

MODEL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.notebook.session.session import session_of

torch.manual_seed(0)
config = GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2, use_cache=False)
pg = PatchableGraph(GPT2LMHeadModel(config).eval(), torch.arange(6)[None])
"""
CHOSEN = "[str(patch) for patch in session_of(pg).chosen.patches]"


@pytest.fixture
def view(notebook: NotebookPage, write: Callable[..., str]) -> TreePage:
    notebook.open(write(MODEL, 'browser = pg.browse("transformer.h_0", views=("graph",))\nbrowser'))
    notebook.run(0)
    notebook.run(1)
    notebook.scroll_to(1)
    return TreePage(notebook, 1)


def graph_of(view: TreePage) -> Locator:
    return view.place.get_by_role("region", name="Graph")


def node(view: TreePage, name: str) -> Locator:
    return graph_of(view).get_by_role("button", name=re.compile(rf"^{name}\b")).first


def names(view: TreePage) -> list[str]:
    texts = graph_of(view).locator(".gp-flow-node .gp-flow-name").all_text_contents()
    return sorted(texts)


def here(view: TreePage) -> Locator:
    return graph_of(view).get_by_role("navigation", name="Modules").locator("[aria-current]")


BLOCK = sorted("hidden_states ln_1 attn hidden_states_1 ln_2 mlp hidden_states_2 output kwargs".split())


def test_modules_are_entered_by_a_click_and_left_by_the_path(
    view: TreePage, take_picture: Callable[[str], Path]
) -> None:
    expect(here(view)).to_have_text("h_0")
    assert set(names(view)) <= {*BLOCK}
    take_picture("block")
    node(view, "attn").click()
    expect(here(view)).to_have_text("attn")
    expect(view.selected).to_have_accessible_name(re.compile("^attn "))
    expect(node(view, "scores")).to_be_attached()
    take_picture("attention")
    graph_of(view).get_by_role("navigation").get_by_role("button", name="transformer").click()
    expect(here(view)).to_have_text("transformer")
    node(view, "h_1").click()
    node(view, "mlp").click()
    node(view, "c_fc").click()
    # Parameters are in the box of the only node that reads them.
    expect(node(view, "x_1")).to_contain_text("weight [16, 64]")
    view.notebook.wait_for_value("browser.selected_path", "transformer.h_1.mlp.c_fc")


def test_a_selected_node_is_that_of_the_tree_and_of_python_and_is_patched(
    view: TreePage, take_picture: Callable[[str], Path]
) -> None:
    expect(node(view, "hidden_states_1")).to_contain_text("stream")  # the kernel has found the components
    node(view, "hidden_states_1").click()
    expect(node(view, "hidden_states_1")).to_have_class(re.compile("gp-in-tree"))
    expect(view.selected).to_have_accessible_name(re.compile("^hidden_states_1 "))
    view.notebook.wait_for_value("browser.selection[0]['name']", "layers[0].resid_mid")
    graph_of(view).get_by_role("button", name="Zero").click()
    expect(node(view, "hidden_states_1")).to_contain_text("zero")
    assert view.notebook.value(CHOSEN) == ["zero layers[0].resid_mid"]
    node(view, "ln_2").hover()
    graph_of(view).locator(".gp-flow-add").click()
    expect(view.dialog(re.compile("ln_2"))).to_be_visible()
    take_picture("patched")
    view.press("Escape")
    view.notebook.use_theme("dark")
    take_picture("patched-dark")
    view.notebook.use_theme("light")
    # The tree and Python lead the graph to other modules.
    view.notebook.execute("browser.select('transformer.h_1.attn.scores')")
    expect(here(view)).to_have_text("attn")
    expect(node(view, "scores")).to_have_class(re.compile("gp-in-tree"))
    view.go_to("transformer.ln_f")
    expect(here(view)).to_have_text("ln_f")


def test_what_is_found_stands_out_and_enter_goes_there(view: TreePage, take_picture: Callable[[str], Path]) -> None:
    view.search("op:softmax")
    expect(node(view, "attn")).to_contain_text("1 found")
    expect(node(view, "mlp")).to_have_class(re.compile("gp-faint"))
    view.search_box.press("Enter")
    expect(here(view)).to_have_text("attn")
    expect(node(view, "pattern")).to_have_class(re.compile("gp-found"))
    take_picture("found")


def test_the_picture_is_zoomed_and_dragged(view: TreePage) -> None:
    window = graph_of(view).locator(".gp-zoom-window")
    picture = graph_of(view).locator("svg[role=group]")
    expect(node(view, "hidden_states_1")).to_contain_text("stream")
    for _ in range(6):
        graph_of(view).get_by_role("button", name="Zoom in").click()
    assert picture.evaluate("svg => svg.width.baseVal.value / svg.viewBox.baseVal.width") == pytest.approx(3)
    window.scroll_into_view_if_needed()
    box = window.bounding_box()
    assert box is not None
    window.evaluate("window => { window.scrollTop = 300; }")
    view.page.mouse.move(box["x"] + 20, box["y"] + 200)
    view.page.mouse.down()
    view.page.mouse.move(box["x"] + 60, box["y"] + 150, steps=3)
    view.page.mouse.up()
    assert window.evaluate("window => window.scrollTop") == 350
    graph_of(view).get_by_role("button", name="Fit the picture").click()
    assert window.evaluate("window => window.scrollHeight <= window.clientHeight + 1")
    view.page.mouse.move(box["x"] + 200, box["y"] + 100)
    view.page.keyboard.down("Control")
    view.page.mouse.wheel(0, -200)
    view.page.keyboard.up("Control")
    assert picture.evaluate("svg => svg.width.baseVal.value / svg.viewBox.baseVal.width") > 1


def test_everything_is_reached_by_keys(view: TreePage) -> None:
    node(view, "ln_1").focus()
    view.press("ArrowDown")
    expect(node(view, "attn")).to_be_focused()
    view.press("Enter")
    expect(here(view)).to_have_text("attn")
    view.press("Alt+ArrowUp")
    expect(here(view)).to_have_text("h_0")
    expect(node(view, "attn")).to_be_focused()
    view.press("ArrowDown", "Space")
    expect(view.selected).to_have_accessible_name(re.compile("^hidden_states_1 "))
    view.press("+")
    editor = view.dialog(re.compile("hidden_states_1"))
    editor.get_by_role("button", name="Apply").click()
    view.notebook.wait_for_value(f"len({CHOSEN})", 1)
    node(view, "hidden_states_1").focus()
    view.press("Delete")
    view.notebook.wait_for_value(CHOSEN, [])
    view.press("Enter")
    expect(view.dialog("transformer.h_0.hidden_states_1")).to_be_visible()


def test_the_notebook_walks_through_it(notebook: NotebookPage, take_picture: Callable[[str], Path]) -> None:
    notebook.open("09_by_clicks.ipynb")
    cell = notebook.position("dataflow = pg.browse(")
    for number in notebook.code_cells():
        if number <= cell:
            notebook.run(number)
    notebook.scroll_to(cell)
    view = TreePage(notebook, cell)
    for name in ("c_attn", "scores", "pattern"):
        expect(node(view, name)).to_be_attached()
    expect(node(view, "attn_output")).to_contain_text("z")
    node(view, "attn_output").click()
    graph_of(view).get_by_role("button", name="Zero").click()
    expect(node(view, "attn_output")).to_contain_text("zero")
    take_picture("zeroed")
    view.patches.get_by_role("button", name="Undo").click()
    expect(node(view, "attn_output")).not_to_contain_text("zero")
    graph_of(view).get_by_role("navigation").get_by_role("button", name="h_1").click()
    node(view, "mlp").click()
    expect(here(view)).to_have_text("mlp")
    view.search("op:softmax")
    view.search_box.press("Enter")
    expect(node(view, "pattern")).to_have_class(re.compile("gp-found"))


def test_axe_finds_nothing_in_it(view: TreePage) -> None:
    axe = (importlib.resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf8")
    node(view, "attn").click()
    node(view, "scores").click()
    graph_of(view).get_by_role("button", name="Zero").click()
    view.search("attn")
    expect(node(view, "scores")).to_contain_text("zero")
    for theme in ("light", "dark"):
        view.notebook.use_theme(theme)  # type: ignore[arg-type]
        assert violations(view, axe, theme) == []


def test_the_picture_is_saved_as_a_file_that_stands_by_itself(view: TreePage, tmp_path: Path) -> None:
    expect(node(view, "hidden_states_1")).to_contain_text("stream")
    with view.page.expect_download() as saved:
        graph_of(view).get_by_role("button", name="SVG").click()
    assert saved.value.suggested_filename == "pg.transformer.h_0.svg"
    saved.value.save_as(tmp_path / "block.svg")
    picture = ElementTree.parse(tmp_path / "block.svg").getroot()
    texts = {"".join(text.itertext()) for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {"attn", "GPT2Attention", "add stream", "[1, 6, 16]"} <= texts
    assert "var(" not in (tmp_path / "block.svg").read_text("utf8")
