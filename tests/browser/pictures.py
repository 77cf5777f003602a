"""Makes the pictures of the README and of the guide: `python -m tests.browser.pictures`."""

from __future__ import annotations

import io
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from PIL import Image
from playwright.sync_api import Locator, Page, expect, sync_playwright

from tests.browser.chromium import context_of, launch, opened
from tests.browser.notebook_page import NotebookPage, notebook_of
from tests.browser.server import CHECKOUT, serving
from tests.browser.tree_page import TreePage

MODEL = f"""
import torch
from transformers import GPT2LMHeadModel
from graphpatch import PatchableGraph

WORDS = '''^ a quick brown fox jumps over the lazy dog while nobody watched red blue green grey white black north
south east west left right up down one two three four five six seven milk bread tea wine salt gold iron
wood sun moon star rain snow wind sea hill lake tree bird fish cat cow book song door bell road ship king'''.split()

class tokenizer:
    decode = staticmethod(lambda tokens: " ".join(WORDS[token] for token in tokens))

model = GPT2LMHeadModel.from_pretrained({str(CHECKOUT / "examples" / "induction_model")!r}).eval()
ids = torch.tensor([[*range(13), 1, 2, 3, 4]])
"""
BROWSE = """
pg = PatchableGraph(model, ids, tokenizer=tokenizer)
pg.browse(views=("attention",))
"""
# Screenshots do not have the pointer.
POINTER = """
const arrow = document.createElement("div");
arrow.innerHTML = '<svg width="18" height="24"><path d="M1 1v18l4.5-4 3.5 8 3-1.3-3.5-7.7h6z" stroke="#fff"/></svg>';
arrow.style = "position: fixed; z-index: 99999; pointer-events: none";
document.body.append(arrow);
document.addEventListener("mousemove", (event) => {
  arrow.style.left = `${event.clientX}px`;
  arrow.style.top = `${event.clientY}px`;
}, true);
"""
SIZE = {"width": 1290, "height": 1130}
GIF_WIDTH = 954
COLORS = 80


@dataclass
class Film:
    """What a notebook shows, frame by frame."""

    page: Page
    frames: list[Image.Image] = field(default_factory=list)
    milliseconds: list[int] = field(default_factory=list)

    def shot(self) -> Image.Image:
        self.page.wait_for_timeout(400)  # until transitions have ended
        return Image.open(io.BytesIO(self.page.locator(".jp-WindowedPanel-outer").first.screenshot())).convert("RGB")

    def take(self, milliseconds: int) -> None:
        frame = self.shot()
        height = GIF_WIDTH * frame.height // frame.width
        self.frames.append(frame.resize((GIF_WIDTH, height), Image.Resampling.LANCZOS))
        self.milliseconds.append(milliseconds)

    def click(self, place: Locator, x: float = 0.5, y: float = 0.5) -> None:
        """Moves to a place, given as shares of the width and the height, and clicks."""
        self.point(place, x, y)
        self.take(600)
        self.page.mouse.down()
        self.page.mouse.up()

    def point(self, place: Locator, x: float = 0.5, y: float = 0.5) -> None:
        box = place.bounding_box()
        assert box is not None
        self.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=4)

    def save(self, file: Path) -> None:
        # One palette for all, so that each frame holds only what is not as before.
        width, height = self.frames[0].size
        strip = Image.new("RGB", (width, height * len(self.frames)))
        for number, frame in enumerate(self.frames):
            strip.paste(frame, (0, number * height))
        palette = strip.quantize(COLORS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        colors = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self.frames]
        colors[0].save(file, save_all=True, append_images=colors[1:], duration=self.milliseconds, loop=0, optimize=True)
        print(file.name, self.frames[0].size, f"{len(colors)} frames, {file.stat().st_size:,} bytes")


def film(notebook: NotebookPage, folder: Path) -> None:
    page = notebook.page
    page.set_viewport_size(SIZE)
    notebook.run(0)
    notebook.run(1)
    page.evaluate(POINTER)
    attention = notebook.cell(1).get_by_role("region", name="Attention")
    heads = attention.get_by_role("group", name="Heads")
    tree, made = TreePage(notebook, 1), Film(page)
    expect(tree.tree).to_be_visible()

    notebook.scroll_to(1)
    made.take(1500)
    for head, milliseconds in ((1, 900), (3, 1500)):
        made.point(heads, (head + 0.5) / 4, 0.75)
        made.take(milliseconds)
    made.click(heads, 0.875, 0.25)
    expect(tree.selected).to_contain_text("attn.z")
    made.take(1200)
    made.click(attention.get_by_role("button", name="Zero"))
    expect(attention.get_by_text("Patched", exact=True)).to_be_visible()
    made.take(1200)
    made.click(heads, 0.875, 0.75)
    made.take(2500)
    made.click(heads, 0.875, 0.25)  # so that the tree shows the patch
    tree.runs.scroll_into_view_if_needed()
    made.take(1200)
    made.click(tree.button("Run"))
    expect(tree.runs).to_contain_text("ran with patch")
    tree.runs.scroll_into_view_if_needed()
    made.take(3000)
    made.click(tree.button("Insert cell"))
    expect(tree.button("Insert cell")).to_contain_text("Inserted")
    notebook.cell(2).scroll_into_view_if_needed()
    made.take(2500)
    made.save(folder / "browser.gif")

    page.set_viewport_size({"width": 1290, "height": 1240})
    notebook.scroll_to(1)
    made.click(heads, 0.875, 0.75)
    still = made.shot()
    still.quantize(256, dither=Image.Dither.NONE).save(folder / "browser.png", optimize=True)
    print("browser.png", still.size)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server, sync_playwright() as playwright:
        nbformat.write(notebook_of([MODEL, BROWSE]), server.folder / "pictures.ipynb")
        browser = launch(playwright)
        with context_of(browser) as context, opened(context) as (page, _):
            notebook = NotebookPage(page, server)
            notebook.open("pictures.ipynb")
            film(notebook, CHECKOUT / "examples")
        browser.close()


if __name__ == "__main__":
    main()
