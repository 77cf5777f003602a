"""What the other tests stand on: a notebook runs, a click reaches the kernel, nothing leaves the machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Error, expect

from tests.browser.chromium import opened
from tests.browser.notebook_page import NotebookPage
from tests.browser.server import Server

COUNTER = '''
import anywidget, traitlets

class Counter(anywidget.AnyWidget):
    _esm = """
    function render({ model, el }) {
      const button = document.createElement("button");
      const paint = () => { button.textContent = `count is ${model.get("value")}`; };
      button.onclick = () => { model.set("value", model.get("value") + 1); model.save_changes(); };
      model.on("change:value", paint);
      paint();
      el.append(button);
    }
    export default { render };
    """
    value = traitlets.Int(0).tag(sync=True)

counter = Counter()
counter
'''


def test_a_notebook_runs_a_click_reaches_its_kernel_and_pictures_show_it(
    notebook: NotebookPage, write: Callable[..., str], take_picture: Callable[[str], Path]
) -> None:
    import graphpatch_notebook

    notebook.open(write(COUNTER, "seen = counter.value", "import graphpatch_notebook"))
    notebook.run(0)
    button = notebook.cell(0).get_by_role("button", name="count is")
    button.click()
    button.click()
    expect(button).to_have_text("count is 2")
    notebook.wait_for_value("counter.value", 2)  # the second change waits until the kernel has answered the first
    notebook.run(1)
    assert notebook.value("seen") == notebook.value("counter.value") == 2
    assert notebook.sources()[1] == "seen = counter.value"
    notebook.run(2)
    assert notebook.value("graphpatch_notebook.__file__") == graphpatch_notebook.__file__  # that of the checkout
    notebook.use_theme("dark")
    dark = take_picture("dark").read_bytes()
    notebook.use_theme("light")
    assert len({dark, take_picture("light").read_bytes()}) == 2


def test_kernel_restarts_and_can_be_interrupted(notebook: NotebookPage, write: Callable[..., str]) -> None:
    notebook.open(write("x = 1", "print('runs')\nwhile True:\n    pass", "y = 2"))
    notebook.run(0)
    notebook.start(1)
    # An interrupt that comes before the kernel has begun with the cell is lost.
    expect(notebook.cell(1).locator(".jp-OutputArea-output")).to_contain_text("runs")
    notebook.interrupt_kernel()
    expect(notebook.cell(1).locator(".jp-OutputArea-output").last).to_contain_text("KeyboardInterrupt")
    notebook.run(2)
    assert notebook.value("(x, y)") == [1, 2]
    notebook.restart_kernel()
    with pytest.raises(RuntimeError, match="name 'x' is not defined"):
        notebook.value("x")


def test_restarts_wait_until_the_widgets_have_their_subshells(
    notebook: NotebookPage, write: Callable[..., str]
) -> None:
    notebook.open(write(COUNTER))
    notebook.execute("import time; get_ipython().kernel.control_thread.io_loop.add_callback(time.sleep, 2)")
    notebook.run(0)  # its button asks for a subshell, and gets it after these seconds
    notebook.restart_kernel()
    notebook.run(0)
    expect(notebook.cell(0).get_by_role("button", name="count is 0")).to_be_visible()


def test_other_machines_are_out_of_reach_and_watched(context: BrowserContext, server: Server) -> None:
    with opened(context, is_silent=False) as (page, watch):
        page.goto(f"{server.url}/api/status")
        assert not watch.offsite
        page.goto("about:blank")
        with pytest.raises(Error, match="fetch"):
            page.evaluate("fetch('http://example.org/picture.png', { mode: 'no-cors' })")
        assert watch.offsite == ["http://example.org/picture.png"]
