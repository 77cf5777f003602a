"""How fast the tree browser is in a real JupyterLab and Chromium: `python -m tests.benchmarks.browser [--quick]`.

Times are those that a user waits, up to the paint, in milliseconds on a clock: another program that wants the cores
makes them longer.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Browser, sync_playwright

import graphpatch_notebook
from graphpatch_notebook.notebook.display.displayed_widget import packed
from tests.benchmarks.report import Row, report, row
from tests.browser.chromium import context_of, launch, opened
from tests.browser.notebook_page import NotebookPage, notebook_of
from tests.browser.server import Server, serving

KILOBYTE = 1000
STATIC = Path(graphpatch_notebook.__file__).parent / "static"
FIFTY_THOUSAND = "from tests.benchmarks.notebook import deep\n\npg = deep()"
GPT2 = """
import torch

from graphpatch_notebook import PatchableGraph
from tests.benchmarks.models import GPT2_124M

with torch.no_grad():
    pg = PatchableGraph(GPT2_124M.build(), GPT2_124M.inputs())
"""
SHOW = "browser = pg.browse()\nbrowser"
TREE = '[role="tree"][aria-label="Graph"] [role="treeitem"]'
ATTENTION = """
from graphpatch_notebook.experiments import show_attention

view = show_attention(pg, torch.arange({tokens})[None])
view
"""
LENS = """
from graphpatch_notebook.experiments import show_lens

view = show_lens(pg, torch.arange(16)[None])
view.selection = [{"name": "layers[5].attn.heads[3].z", "layer": 5, "head": 3, "position": None, "key": None}]
view
"""
SEARCHES = ("mlp", "op:mul", "layers_12", "q_proj", "shape:16", "layers_1*weight", "nothing like this", "")

# A frame is painted when the first task after its animation callbacks runs. `until` returns in such a callback: what it
# waits for is painted in the same frame.
_PAINTED = """
const endOfFrame = () => new Promise((done) => {
  const channel = new MessageChannel();
  channel.port1.onmessage = () => done(performance.now());
  channel.port2.postMessage(null);
});
const painted = async () => {
  await new Promise(requestAnimationFrame);
  return endOfFrame();
};
const tree = () => document.querySelector('[role="tree"][aria-label="Graph"]');
const rows = () => tree()?.querySelectorAll('[role="treeitem"]') ?? [];
const elements = () => document.querySelectorAll(".gp-root *").length;
"""

# What is sent for a widget: the messages that open it, with their binary parts.
_SHOW = f"""
{_PAINTED}
const kernel = app.shell.currentWidget.sessionContext.session.kernel;
const bytes = (message) => new TextEncoder().encode(JSON.stringify(message.content)).length
  + (message.buffers ?? []).reduce((sum, buffer) => sum + buffer.byteLength, 0);
let sent = 0, frontEnd = 0, shown = null, ended = null;
const listen = (_, {{ msg, direction }}) => {{
  if (direction !== "recv") return;
  if (msg.header.msg_type === "comm_open") {{
    const {{ state, buffer_paths }} = msg.content.data;
    sent += bytes(msg);
    frontEnd += bytes({{ content: [state._esm, state._css] }});
    buffer_paths.forEach(([name], index) => {{
      if (name === "bundle") frontEnd += msg.buffers[index].byteLength;
    }});
  }}
  if (msg.header.msg_type === "display_data") shown ??= performance.now();
  if (msg.header.msg_type === "execute_reply") ended = performance.now();
}};
kernel.anyMessage.connect(listen);
const content = app.shell.currentWidget.content;
content.activeCellIndex = argument.cell;
void app.commands.execute("notebook:run-cell");
await until(() => document.querySelector(argument.selector) !== null);
const seen = await endOfFrame();
await until(() => ended !== null);
kernel.anyMessage.disconnect(listen);
return {{ milliseconds: Math.max(0, seen - ended), fromDisplay: seen - shown, sent, frontEnd, elements: elements() }};
"""

# Where the tree scrolls: the nearest element around it, or itself, that is higher inside than outside.
_SCROLL = f"""
{_PAINTED}
let area = tree();
while (area.scrollHeight <= area.clientHeight + 1 || !/auto|scroll/.test(getComputedStyle(area).overflowY)) {{
  area = area.parentElement;
}}
const covered = () => {{
  const box = area.getBoundingClientRect();
  return [2, box.height / 2, box.height - 2].every((y) =>
    document.elementFromPoint(box.left + box.width / 3, box.top + y)?.closest('[role="treeitem"]'));
}};
area.scrollIntoView({{ block: "center" }});
await painted();
const taken = [];
for (const share of argument) {{
  const target = Math.round(share * (area.scrollHeight - area.clientHeight));
  const started = performance.now();
  area.scrollTop = target;
  await painted();
  await until(covered);
  taken.push({{ milliseconds: performance.now() - started, elements: elements() }});
  await painted();
}}
return {{ taken, rows: area.scrollHeight / rows()[0].offsetHeight }};
"""

# The time ends with the paint of the last frame in which the tree changed.
_SEARCH = f"""
{_PAINTED}
const box = document.querySelector('[aria-label="Search nodes"]');
const taken = [];
for (const query of argument) {{
  let changed = null;
  const observer = new MutationObserver(() => {{ changed = performance.now(); }});
  const everything = {{ subtree: true, childList: true, characterData: true, attributes: true }};
  observer.observe(box.closest(".gp-root"), everything);
  const started = performance.now();
  box.value = query;
  box.dispatchEvent(new InputEvent("input", {{ bubbles: true }}));
  await until(() => changed !== null);
  let seen = await endOfFrame();
  while (performance.now() < started + 300) {{
    const before = changed;
    await painted();
    if (changed !== before) seen = performance.now();
  }}
  observer.disconnect();
  taken.push({{ query, milliseconds: seen - started, elements: elements() }});
}}
return taken;
"""


@contextmanager
def notebook(browser: Browser, server: Server, file: str) -> Iterator[NotebookPage]:
    """The notebook in a fresh page; its kernel goes on from page to page."""
    with context_of(browser) as context, opened(context) as (page, _):
        shown = NotebookPage(page, server)
        shown.open(file)
        yield shown


def written(server: Server, name: str, build: str, *shows: str) -> str:
    """Writes a notebook whose first cell makes `pg`, and whose others show it."""
    nbformat.write(notebook_of((build, *(shows or (SHOW,)))), server.folder / name)
    return name


def median(found: list[dict[str, Any]]) -> float:
    return statistics.median(one["milliseconds"] for one in found)


def under(what: str, measured: float, limit: float, unit: str) -> Row:
    return row(what, f"{measured:.0f} {unit}".strip(), f"under {limit:.0f} {unit}".strip(), measured < limit)


def showing(
    browser: Browser, server: Server, file: str, name: str, rounds: int, limits: tuple[float, float]
) -> Iterator[Row]:
    """First paints, each in a page that has shown no widget yet."""
    found = []
    for number in range(rounds):
        with notebook(browser, server, file) as shown:
            if number == 0:
                shown.run(0)
            found.append(shown.measure(_SHOW, {"cell": 1, "selector": TREE}))
    milliseconds, kilobytes = limits
    yield under(f"{name}: first paint after the cell ends", median(found), milliseconds, "ms")
    from_display = statistics.median(one["fromDisplay"] for one in found)
    yield row(f"{name}: first paint after the message that displays it", f"{from_display:.0f} ms", "", True)
    sent, front_end = (max(one[what] for one in found) / KILOBYTE for what in ("sent", "frontEnd"))
    yield under(f"{name}: what is sent to show it, without the front end", sent - front_end, kilobytes, "KB")
    yield under(f"{name}: what is sent to show it, with the front end", sent, kilobytes, "KB")


def using(browser: Browser, server: Server, file: str, name: str, rounds: int) -> Iterator[Row]:
    """Scrolling and searching, with every row open."""
    with notebook(browser, server, file) as shown:
        elements = [shown.measure(_SHOW, {"cell": 1, "selector": TREE})["elements"]]
        shown.page.get_by_role("button", name="Expand all").click()
        shares = [((7 * number) % 11) / 11 for number in range(1, rounds + 1)]
        jumps = shown.measure(_SCROLL, shares)
        elements += [one["elements"] for one in jumps["taken"]]
        rows = f"{jumps['rows']:,.0f} rows open"
        yield under(f"{name}, {rows}: scroll jump", median(jumps["taken"]), 50, "ms")
        searches = [one for _ in range(rounds // 3) for one in shown.measure(_SEARCH, list(SEARCHES))]
        elements += [one["elements"] for one in searches]
        yield under(f"{name}, {rows}: search redraw", median(searches), 30, "ms")
        slowest = max(SEARCHES, key=lambda query: median([one for one in searches if one["query"] == query]))
        time = median([one for one in searches if one["query"] == slowest])
        yield row(f"{name}, {rows}: search redraw, the slowest: {slowest!r}", f"{time:.0f} ms", "", True)
        yield under(f"{name}: DOM elements, at most", max(elements), 400, "")


# From the click to the paint of the patched lens beside the other; then the patch is taken back.
_ZERO = f"""
{_PAINTED}
const buttons = () => [...document.querySelectorAll(".gp-lens button")];
const button = (name) => buttons().find((one) => one.textContent.trim() === name);
const taken = [];
for (let round = 0; round < argument; round += 1) {{
  await until(() => button("Zero") && !button("Zero").disabled);
  const started = performance.now();
  button("Zero").click();
  await until(() => document.querySelectorAll(".gp-lens-figure").length > 1);
  taken.push({{ milliseconds: (await endOfFrame()) - started }});
  button("Undo").click();
  await until(() => document.querySelectorAll(".gp-lens-figure").length === 1);
}}
return taken;
"""


def linked_views(browser: Browser, server: Server, rounds: int) -> Iterator[Row]:
    """The attention view and the lens of GPT-2 124M, with random weights."""
    file = written(server, "views.ipynb", GPT2, ATTENTION.format(tokens=64), ATTENTION.format(tokens=512))
    for cell, tokens in ((1, 64), (2, 512)):
        found = []
        for number in range(rounds):
            with notebook(browser, server, file) as shown:
                if number == 0 and cell == 1:
                    shown.run(0)
                found.append(shown.measure(_SHOW, {"cell": cell, "selector": ".gp-attention canvas"}))
        from_display = statistics.median(one["fromDisplay"] for one in found)
        name = f"GPT-2 124M, attention of 144 heads x {tokens} tokens"
        yield under(f"{name}: first paint after the message that displays it", from_display, 300, "ms")
        sent, front_end = (max(one[what] for one in found) / KILOBYTE for what in ("sent", "frontEnd"))
        yield under(f"{name}: what is sent, without the front end", sent - front_end, 1000, "KB")
    # With a kernel of its own: views of the other one would follow the patch, too.
    with notebook(browser, server, written(server, "lens.ipynb", GPT2, LENS, ATTENTION.format(tokens=512))) as shown:
        shown.run(0)
        shown.measure(_SHOW, {"cell": 1, "selector": ".gp-lens canvas"})
        name = "GPT-2 124M, 16 tokens: a click on *Zero* for a head of layer 5 to the updated lens"
        yield under(name, median(shown.measure(_ZERO, rounds)), 500, "ms")
        shown.measure(_SHOW, {"cell": 2, "selector": ".gp-attention canvas"})
        name += ", beside an attention view of 512 tokens"
        yield under(name, median(shown.measure(_ZERO, rounds)), 500, "ms")


def bundle() -> Iterator[Row]:
    size = sum(file.stat().st_size for file in STATIC.glob("widget.*")) / KILOBYTE
    yield row("bundle: script and style, unpacked", f"{size:.0f} KB", "", True)
    yield under("bundle: script and style, as they are sent", len(packed()) / KILOBYTE, 100, "KB")


def sections(quick: bool) -> Iterator[Iterator[Row]]:
    rounds = 3 if quick else 9
    yield bundle()
    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as playwright,
        serving(Path(folder)) as server,
    ):
        browser = launch(playwright)
        file = written(server, "gpt2.ipynb", GPT2)
        yield showing(browser, server, file, "GPT-2 124M", rounds, (150, 100))
        file = written(server, "fifty_thousand.ipynb", FIFTY_THOUSAND)
        yield showing(browser, server, file, "50,000 nodes", rounds, (300, 250))
        yield using(browser, server, file, "50,000 nodes", rounds)
        yield linked_views(browser, server, rounds)
        browser.close()


if __name__ == "__main__":
    report("graphpatch-notebook in the browser", __doc__, sections)
