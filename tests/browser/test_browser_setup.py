"""What the other tests stand on: nothing leaves the machine, and what would is seen."""

from __future__ import annotations

import pytest
from playwright.sync_api import BrowserContext, Error

from tests.browser.chromium import opened
from tests.browser.server import Server


def test_other_machines_are_out_of_reach_and_watched(context: BrowserContext, server: Server) -> None:
    with opened(context, is_silent=False) as (page, watch):
        page.goto(f"{server.url}/api/status")
        assert not watch.offsite
        page.goto("about:blank")
        with pytest.raises(Error, match="fetch"):
            page.evaluate("fetch('http://example.org/picture.png', { mode: 'no-cors' })")
        assert watch.offsite == ["http://example.org/picture.png"]
