"""A view of the tree browser in a page, found by the names that people with screen readers hear."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Sequence
from typing import Any, Literal

from playwright.sync_api import Locator, Page, Position, expect

from tests.browser.notebook_page import NotebookPage

# In the example notebook: what the four heads of the second layer found, side by side.
HEADS = "transformer.h_1.attn.c_proj.x"

_NAMES = """rows => rows
  .map((row) => [row.getBoundingClientRect().top, row.getAttribute("aria-label").split(/[ ,]/)[0]])
  .sort((a, b) => a[0] - b[0])
  .map(([_, name]) => name)"""


_VIOLATIONS = """async (root) => {
  const { violations } = await axe.run(root, { resultTypes: ["violations"], OPTIONS });
  return violations.map(({ id, help, nodes }) => ({ id, help, nodes: nodes.map((node) => [
    node.html, node.any.concat(node.all, node.none).map((check) => check.message).join("; ")]) }));
}"""


class TreeView:
    """One view: the first one in a part of a page."""

    def __init__(self, page: Page, place: Locator | Page) -> None:
        self.page = page
        self.place = place
        self.tree = self.place.get_by_role("tree", name="Graph")
        self.selected = self.tree.get_by_role("treeitem", selected=True)
        self.patches = self.place.get_by_role("region", name="Patches")
        self.chosen = self.patches.get_by_role("listitem")
        self.runs = self.place.get_by_role("region", name="Run", exact=True)
        self.search_box = self.place.get_by_label("Search nodes", exact=True)

    def row(self, name: str) -> Locator:
        """Returns the row of a node, by its own name."""
        return self.tree.get_by_role("treeitem", name=re.compile(rf"^{re.escape(name)}(?![\w.])")).first

    def rows(self) -> list[str]:
        """Returns the own names of the rows that are there, from top to bottom."""
        return self.tree.get_by_role("treeitem").evaluate_all(_NAMES)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def search(self, query: str) -> None:
        self.search_box.fill(query)

    def go_to(self, path: str) -> None:
        """Makes a node the selected one, by searching for its path; the keyboard's focus is on the tree then."""
        self.search(path)
        name = re.split(r"[.|]", path)[-1]
        self.row(name).click()
        expect(self.row(name)).to_have_attribute("aria-selected", "true")

    def dialog(self, name: str | re.Pattern[str]) -> Locator:
        return self.place.get_by_role("dialog", name=name)

    def patch(self, path: str, kind: str, slice: str = "", value: str = "") -> None:
        """Chooses a patch as one does with the mouse and the keyboard."""
        editor = self.open_editor(path)
        editor.get_by_label("Kind", exact=True).select_option(kind)
        editor.get_by_label("Slice", exact=True).fill(slice)
        if value:
            editor.get_by_label("Value", exact=True).fill(value)
        before = self.chosen.count()
        editor.get_by_role("button", name="Apply", exact=True).click()
        expect(editor).to_be_hidden()
        expect(self.chosen).to_have_count(before + 1)

    def open_editor(self, path: str) -> Locator:
        self.go_to(path)
        name = re.split(r"[.|]", path)[-1]
        self.row(name).get_by_role("button", name=re.compile("patch", re.IGNORECASE)).click()
        editor = self.dialog(re.compile(rf"Patch.*{re.escape(path)}"))
        expect(editor).to_be_visible()
        return editor

    def button(self, name: str) -> Locator:
        return self.place.get_by_role("button", name=name, exact=True)


def click_head(attention: Locator, layer: int, head: int, layers: int = 2, heads: int = 2) -> None:
    """Clicks on the small picture of a head in the attention view."""
    pictures = attention.get_by_role("group", name="Heads")
    pictures.click(position=place_of_head(pictures, layer, head, layers, heads))


def place_of_head(pictures: Locator, layer: int, head: int, layers: int = 2, heads: int = 2) -> Position:
    """Returns where in the small pictures of all heads, a row a layer, that of one head is."""
    box = pictures.bounding_box()
    assert box is not None
    return {"x": (head + 0.5) * box["width"] / heads, "y": (layer + 0.5) * box["height"] / layers}


class TreePage(TreeView):
    """The view in the output of a cell."""

    def __init__(self, notebook: NotebookPage, cell: int) -> None:
        self.notebook = notebook
        self.cell = cell
        super().__init__(notebook.page, notebook.cell(cell))

    def violations(self, themes: Sequence[Literal["light", "dark"]] = ("light",)) -> list[dict[str, Any]]:
        """Returns what axe-core says of the view in light and dark, where only the contrast is another."""
        axe = (importlib.resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf8")
        if not self.page.evaluate("Boolean(window.axe)"):
            self.page.evaluate(axe)
        found = []
        for theme in themes:
            self.notebook.use_theme(theme)
            options = 'runOnly: ["color-contrast"]' if theme == "dark" else ""
            root = self.place.locator(".gp-root").first
            found += root.evaluate(_VIOLATIONS.replace("OPTIONS", options))
        self.notebook.use_theme("light")
        return found
