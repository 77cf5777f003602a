from __future__ import annotations

from typing import Any

import pytest

from graphpatch_notebook.notebook.views.linked import HANDLERS, answer
from tests.notebook.shells import Shell

pytestmark = pytest.mark.hosts


def exported(browser: Any, inputs: str | None = None) -> str:
    message = {"id": 1, "request": "export", "payload": {"inputs": inputs}}
    reply, _ = answer(browser._request_context, message, HANDLERS)
    return str(reply["result"]["code"])


def test_what_is_exported_calls_the_graph_as_run_does(pg: Shell) -> None:
    pg.ok("%graphpatch zero up.linear")
    pg.ok("y = torch.zeros(2, 4); browser = pg.browse()")
    browser = pg.namespace["browser"]
    assert "output = pg(x)" in exported(browser)
    assert "output = pg(2 * y)" in exported(browser, "2 * y")
    pg.ok("pg.browse(inputs=y)")
    assert browser.about["has_given_inputs"]
    assert browser.about["arguments"] == "y"
    assert "output = pg(y)" in exported(browser)
    pg.ok("pg.browse(inputs=torch.ones(5, 4))")
    assert browser.about["arguments"] is None
    assert "# Fill in your inputs." in exported(browser)
    pg.ok("%graphpatch show --inputs x+1")
    assert "output = pg(x + 1)" in exported(browser)
