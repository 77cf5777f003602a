"""axe-core finds nothing in a view, in whichever state, in light and dark."""

from __future__ import annotations

import importlib.resources
from typing import Any, Literal

import pytest
from playwright.sync_api import expect

from tests.browser.tree_page import HEADS, TreePage


@pytest.fixture(scope="module")
def axe() -> str:
    return (importlib.resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf8")


def violations(view: TreePage, axe: str, theme: str) -> list[dict[str, Any]]:
    """Returns what axe-core says of the view: the rule, and the elements. Only the contrast depends on the theme."""
    if not view.page.evaluate("Boolean(window.axe)"):
        view.page.evaluate(axe)
    script = """
    const root = document.querySelector(argument).closest(".gp-root");
    const { violations } = await axe.run(root, { resultTypes: ["violations"], ...OPTIONS });
    return violations.map(({ id, help, nodes }) => ({ id, help, nodes: nodes.map((node) => [
      node.html, node.any.concat(node.all, node.none).map((check) => check.message).join("; ")]) }));
    """
    script = script.replace("OPTIONS", '{ runOnly: ["color-contrast"] }' if theme == "dark" else "{}")
    tree = view.tree.get_attribute("id") or view.tree.evaluate("tree => (tree.id = 'tree-under-test')")
    return view.notebook.measure(script, f"#{tree}")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(example: TreePage, axe: str, theme: Literal["light", "dark"]) -> None:
    example.notebook.use_theme(theme)
    assert violations(example, axe, theme) == []
    editor = example.open_editor(HEADS)
    editor.get_by_label("Slice", exact=True).fill("0, 0, 0, 0")
    expect(editor.get_by_label("Slice", exact=True)).to_have_attribute("aria-invalid", "true")
    assert violations(example, axe, theme) == []
    example.press("Escape")
    example.patch(HEADS, "zero", "..., 48:64")
    example.patch("transformer.h_1.attn.attn_weights_2", "probe")
    example.button("Run").click()
    # What an earlier run of the session found is there until this one has finished, and that has a picture, too.
    expect(example.place.get_by_text("The run finished")).to_be_attached()
    expect(example.runs.get_by_role("img").first).to_be_visible()
    assert violations(example, axe, theme) == []
    example.go_to("transformer.h_1.attn.attn_weights_2")
    example.tree.focus()
    example.press("Enter")
    popup = example.dialog("transformer.h_1.attn.attn_weights_2")
    popup.get_by_role("button", name="Show").click()
    expect(popup.get_by_role("img").first).to_be_visible()
    assert violations(example, axe, theme) == []
    example.press("Escape")
    example.notebook.run(example.notebook.position("browser.set_scores("))
    expect(example.place.get_by_text("probability of the right answer").first).to_be_visible()
    assert violations(example, axe, theme) == []
