"""A notebook that is open in JupyterLab or Notebook 7, and what people do with it."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Sequence
from typing import Any, Literal

import nbformat
from nbformat import NotebookNode
from playwright.sync_api import Locator, Page, expect

from tests.browser.chromium import TIMEOUT_SECONDS
from tests.browser.server import Server

expect.set_options(timeout=1000 * TIMEOUT_SECONDS)

# Every promise in the page has an end: one that does not settle would hang the test, not fail it.
_BOUNDED = """
const limit = SECONDS * 1000;
const bounded = (promise, what) => Promise.race([promise,
  new Promise((_, fail) => setTimeout(() => fail(new Error(`${what}: not within ${limit / 1000} s`)), limit))]);
const app = window.jupyterapp;
const until = async (condition) => {
  let found;
  while (!(found = condition())) await new Promise(requestAnimationFrame);
  return found;
};
"""

# The status bar says "idle" before the kernel is connected. What tells is the session.
_READY = """
await app.restored;
const panel = await until(() => app.shell.currentWidget?.sessionContext && app.shell.currentWidget);
await panel.revealed;
await panel.sessionContext.ready;
await panel.sessionContext.session.kernel.info;
await until(() => panel.sessionContext.session.kernel.status === "idle");
"""

# The kernel answers in order: after this, each widget has the subshell that it asked for. JupyterLab throws where a
# kernel ends before.
_SETTLED = """
const context = app.shell.currentWidget.sessionContext;
const kernel = context.session.kernel;
if (kernel.supportsSubshells) await kernel.requestListSubshell({}).done;
"""

# A click in an output makes its cell the active one, so every run says which cell it means.
_RUN = """
const content = app.shell.currentWidget.content;
content.activeCellIndex = argument;
await app.commands.execute("notebook:run-cell");
"""

_SET_CELLS = """
const notebook = app.shell.currentWidget.content.model.sharedModel;
const before = notebook.cells.length;
notebook.insertCells(before, argument.map((source) => ({ cell_type: "code", source, metadata: { trusted: true } })));
notebook.deleteCellRange(0, before);
await until(() => app.shell.currentWidget.content.widgets.length === argument.length);
"""

_EXECUTE = """
const kernel = app.shell.currentWidget.sessionContext.session.kernel;
let content;
do {  // after an interrupt, the kernel aborts what was asked of it meanwhile
  content = (await kernel.requestExecute({ code: argument, store_history: false }).done).content;
} while (content.status === "aborted");
return content;
"""

_EVALUATE = """
const kernel = app.shell.currentWidget.sessionContext.session.kernel;
const reply = await kernel.requestExecute({
  code: "", silent: true, store_history: false, user_expressions: { value: argument } }).done;
return reply.content.user_expressions?.value ?? reply.content;
"""


def notebook_of(sources: Sequence[str]) -> NotebookNode:
    """Returns a notebook with these code cells."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


class NotebookPage:
    """A notebook in a page of JupyterLab or Notebook 7. Cells are counted from 0."""

    def __init__(self, page: Page, server: Server) -> None:
        self.page = page
        self._server = server

    def open(self, file: str, has_kernel: bool = True, host: Literal["doc/tree", "notebooks"] = "doc/tree") -> None:
        """Opens a notebook of the server's folder; returns when it is there, and its kernel."""
        self.page.goto(self._server.address(file, host))
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        if has_kernel:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        self._do("the kernel", _READY)

    def run(self, cell: int) -> None:
        """Runs a cell to its end."""
        self._do(f"cell {cell}", _RUN, cell)

    def start(self, cell: int) -> None:
        """Runs a cell, and returns at once."""
        self._do(f"cell {cell}", _RUN.replace("await app", "void app"), cell)

    def run_all(self) -> None:
        for cell in self.code_cells():
            self.run(cell)

    def set_cells(self, sources: Sequence[str]) -> None:
        """Replaces all cells."""
        self._do("the cells", _SET_CELLS, list(sources))

    def cell(self, number: int) -> Locator:
        return self.page.locator(f'.jp-Notebook .jp-Cell[data-windowed-list-index="{number}"]')

    def sources(self) -> list[str]:
        """Returns what stands in the cells."""
        return self._do(
            "the cells", "return app.shell.currentWidget.content.widgets.map(w => w.model.sharedModel.getSource());"
        )

    def code_cells(self) -> list[int]:
        kinds = self._do("the cells", "return app.shell.currentWidget.content.widgets.map(w => w.model.type);")
        return [number for number, kind in enumerate(kinds) if kind == "code"]

    def scroll_to(self, cell: int) -> None:
        self._do(f"cell {cell}", "await app.shell.currentWidget.content.scrollToItem(argument, 'start', 0);", cell)

    def value(self, expression: str) -> Any:
        """Returns the value of an expression as the kernel has it: numbers, texts, lists and dicts of them."""
        found = self._do(expression, _EVALUATE, f"__import__('json').dumps({expression})")
        if found.get("status") != "ok":
            raise RuntimeError(f"{expression}: {found.get('evalue', found)}")
        return json.loads(ast.literal_eval(found["data"]["text/plain"]))

    def wait_for_value(self, expression: str, value: Any) -> None:
        """Waits until an expression has a value in the kernel: changes of a widget come there one after the other."""
        end = time.monotonic() + TIMEOUT_SECONDS
        while (found := self.value(expression)) != value:
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} is {found}, not {value}")
            self.page.wait_for_timeout(50)

    def execute(self, code: str) -> None:
        """Runs code in the kernel that stands in no cell."""
        reply = self._do(code, _EXECUTE, code)
        if reply["status"] != "ok":
            raise RuntimeError(f"{code}: {reply.get('evalue', reply)}")

    def position(self, beginning: str) -> int:
        """Returns the position of the first cell with a line that begins so."""
        sources = self.sources()
        return next(
            i for i, source in enumerate(sources) if re.search(f"^{re.escape(beginning)}", source, re.MULTILINE)
        )

    def measure(self, script: str, argument: Any = None) -> Any:
        """Returns what a script of the caller's returns; `app`, `until` and `argument` are there for it."""
        return self._do("the measurement", script, argument)

    def save(self) -> None:
        self._do("saving", 'await app.commands.execute("docmanager:save");')

    def revert(self) -> None:
        """Shows the notebook as it was saved last."""
        self._do("reverting", "await app.shell.currentWidget.context.revert();")

    def interrupt_kernel(self) -> None:
        """Interrupts what runs, and waits until the kernel is idle: until then, it drops what it is asked to run."""
        self._do(
            "interrupting",
            """
            const kernel = app.shell.currentWidget.sessionContext.session.kernel;
            await kernel.interrupt();
            await until(() => kernel.status === "idle");
            """,
        )

    def restart_kernel(self) -> None:
        self._do("restarting", f"{_SETTLED} await context.restartKernel();")
        self.wait_until_ready()

    def shut_down_kernel(self) -> None:
        self._do("shutting down", f"{_SETTLED} await context.shutdown();")

    def use_theme(self, theme: Literal["light", "dark"]) -> None:
        name = f"JupyterLab {theme.capitalize()}"
        self._do(
            f"the theme {name}",
            """
            await app.commands.execute("apputils:change-theme", { theme: argument[0] });
            await until(() => document.body.dataset.jpThemeLight === argument[1]);
            await until(() => !document.getElementById("jupyterlab-splash"));
            """,
            [name, "true" if theme == "light" else "false"],
        )

    def _do(self, what: str, script: str, argument: Any = None) -> Any:
        """Runs a script in the page. Its last statement may return something; `argument` is given to it."""
        bounded = _BOUNDED.replace("SECONDS", str(TIMEOUT_SECONDS))
        body = f"return bounded((async () => {{ {script} }})(), what);"
        return self.page.evaluate(f"async ([what, argument]) => {{ {bounded} {body} }}", [what, argument])
