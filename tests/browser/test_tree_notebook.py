"""The story of the tree browser, in the example notebook that tells it: what it says one can do, done."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.browser.tree_page import HEADS, TreePage

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


def test_patch_is_chosen_run_and_taken_along(example: TreePage) -> None:
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


def test_components_are_named_and_found(example: TreePage) -> None:
    badge = example.tree.get_by_text("layers[1].attn.z", exact=True)
    example.search("layers[1].attn.z")
    expect(badge).to_have_attribute("title", "layers[1].attn.z: batch, head, query, channel")
    example.search("")
    example.button("Components").click()
    example.row("layers[1]").click()
    example.row("attn.pattern").get_by_role("button", name="Patch attn.pattern").click()
    expect(example.dialog(re.compile(r"Patch.*transformer.h_1.attn.attn_weights_4"))).to_be_visible()


def test_axe_finds_nothing_in_whichever_state(example: TreePage) -> None:
    assert example.violations() == []
    editor = example.open_editor(HEADS)
    editor.get_by_label("Slice", exact=True).fill("0, 0, 0, 0")
    expect(editor.get_by_label("Slice", exact=True)).to_have_attribute("aria-invalid", "true")
    assert example.violations(("light", "dark")) == []
    example.press("Escape")
    example.patch(HEADS, "zero", HEAD_3)
    example.patch("transformer.h_1.attn.attn_weights_2", "probe")
    example.button("Run").click()
    # What an earlier run of the session found is there until this one has finished, and that has a picture, too.
    expect(example.place.get_by_text("The run finished")).to_be_attached()
    expect(example.runs.get_by_role("img").first).to_be_visible()
    example.go_to("transformer.h_1.attn.attn_weights_2")
    example.tree.focus()
    example.press("Enter")
    popup = example.dialog("transformer.h_1.attn.attn_weights_2")
    popup.get_by_role("button", name="Show").click()
    expect(popup.get_by_role("img").first).to_be_visible()
    for facts in popup.locator("dl").all():  # side by side, whatever the host's style of lists is
        assert len({fact.bounding_box()["y"] for fact in facts.locator("dt").all()[:3]}) == 1
    assert example.violations(("light", "dark")) == []
    example.press("Escape")
    example.notebook.run(example.notebook.position("browser.set_scores("))
    expect(example.place.get_by_text("probability of the right answer").first).to_be_visible()
    example.go_to("transformer.h_1.attn.attn_output_1")
    expect(example.selected).to_have_attribute("aria-label", re.compile(r"^attn_output_1 0\.99"))
    example.search("")
    assert example.violations(("light", "dark")) == []
