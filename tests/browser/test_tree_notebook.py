"""The story of the tree browser, in the example notebook that tells it: what it says one can do, done."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.tree_page import HEADS, TreePage

SOFTMAX = "transformer.h_1.attn.attn_weights_2"
HEAD_3 = "..., 48:64"

# Without graphpatch: the same head, switched off by a hook of torch.
ORACLE = """
def without_head_3(module, args):
    found = args[0].clone()
    found[..., 48:64] = 0
    return (found,)

hook = model.transformer.h[1].attn.c_proj.register_forward_pre_hook(without_head_3)
by_hook = right(model)
said_by_hook = pg.to_str_tokens(model(asked).logits[0, -1].argmax())
hook.remove()
"""


def test_what_is_typed_at_any_speed_is_all_there(example: TreePage) -> None:
    """The host's echo of what was sent a moment ago takes no letter back, and no step of the selection."""
    query = "h_1.attn op:softmax shape:36"
    for delay in (0, 15, 80):
        example.search_box.fill("")
        expect(example.place.get_by_text(re.compile(r"^1 of \d+ nodes"))).to_have_count(0)
        example.search_box.press_sequentially(query, delay=delay)
        expect(example.place.get_by_text(re.compile(r"^1 of \d+ nodes")).first).to_be_visible()
        expect(example.search_box).to_have_value(query)
    example.search_box.fill("")
    expect(example.place.get_by_text(re.compile(r"^1 of \d+ nodes"))).to_have_count(0)
    example.tree.focus()
    reached = []
    for delay in (0, 70):
        example.press("Home")
        for _ in range(12):
            example.page.keyboard.press("ArrowDown", delay=delay)
        reached.append(example.selected.get_attribute("aria-label"))
    assert len(set(reached)) == 1


def test_activation_looks_like_an_attention_pattern(example: TreePage, take_picture: Callable[[str], Path]) -> None:
    example.go_to(SOFTMAX)
    example.tree.focus()
    example.press("Enter")
    activation = example.dialog(SOFTMAX).get_by_role("region", name="Activation")
    activation.get_by_role("button", name="Show").click()
    expect(activation.get_by_role("img")).to_be_visible()
    take_picture("activation")


def test_patch_is_chosen_run_and_taken_along(example: TreePage, take_picture: Callable[[str], Path]) -> None:
    notebook = example.notebook
    example.patch(HEADS, "zero", HEAD_3)
    expect(example.chosen).to_contain_text(HEADS)
    example.button("Undo").click()
    expect(example.chosen).to_have_count(0)
    example.button("Redo").click()
    expect(example.chosen).to_have_count(1)

    notebook.run(notebook.position("without_head ="))
    patched = notebook.value("without_head")
    notebook.execute(ORACLE)
    assert notebook.value("right(pg)") == 1
    assert patched == notebook.value("by_hook") < 0.1

    example.button("Run").click()
    expect(example.runs).to_contain_text("ran with patch")
    expect(example.runs).to_contain_text(str(notebook.value("pg.to_str_tokens(answers[0])")))
    expect(example.runs).to_contain_text(str(notebook.value("said_by_hook")))
    expect(example.runs).to_contain_text("logits")
    take_picture("run")

    example.button("Copy as Python").click()
    expect(example.button("Copy as Python")).to_contain_text("Copied")
    code = example.page.evaluate("navigator.clipboard.readText()")
    assert "ZeroPatch(slice=(..., slice(48, 64)))" in code
    cells = notebook.sources()
    example.button("Insert cell").click()
    expect(example.button("Insert cell")).to_contain_text("Inserted")
    inserted = example.cell + 1
    assert notebook.sources() == [*cells[:inserted], code.rstrip("\n"), *cells[inserted:]]
    notebook.run(inserted)
    assert notebook.value("right(lambda _: output)") == patched


def test_keys_over_the_tree_never_reach_the_notebook(example: TreePage) -> None:
    cells = example.notebook.sources()
    example.tree.focus()
    example.press(*"xddabycvmrkj0", "Delete", "Backspace", "Shift+M", "Shift+V")
    example.press("Enter", "Escape", "ArrowUp", "ArrowDown", "Space", "Home", "End", "PageUp", "PageDown", "*", "F3")
    expect(example.tree).to_be_focused()
    assert example.notebook.sources() == cells
    assert example.notebook.value("1 + 1") == 2


def test_scores_color_and_sort_the_tree(example: TreePage, take_picture: Callable[[str], Path]) -> None:
    notebook = example.notebook
    notebook.run(notebook.position("browser.set_scores("))
    expect(example.place.get_by_text("probability of the right answer").first).to_be_visible()
    example.go_to("transformer.h_1.attn.attn_output_1")
    expect(example.selected).to_have_attribute("aria-label", re.compile(r"^attn_output_1 0\.99"))
    example.search("")
    take_picture("light")
    notebook.use_theme("dark")
    take_picture("dark")


def test_components_are_named_and_found(example: TreePage, take_picture: Callable[[str], Path]) -> None:
    badge = example.tree.get_by_text("layers[1].attn.z", exact=True)
    example.search("layers[1].attn.z")
    expect(badge).to_be_visible()
    expect(badge).to_have_attribute("title", "layers[1].attn.z: batch, head, query, channel")
    example.search("layers[1]")
    expect(badge).to_be_visible()
    for theme in ("light", "dark"):
        example.notebook.use_theme(theme)
        example.notebook.scroll_to(example.cell)
        take_picture(theme)
    example.search("")
    example.button("Components").click()
    example.row("layers[1]").click()
    example.row("attn.pattern").click()
    for theme in ("dark", "light"):
        example.notebook.use_theme(theme)
        example.notebook.scroll_to(example.cell)
        take_picture(f"view-{theme}")
    example.row("attn.pattern").get_by_role("button", name="Patch attn.pattern").click()
    expect(example.dialog(re.compile(r"Patch.*transformer.h_1.attn.attn_weights_4"))).to_be_visible()
