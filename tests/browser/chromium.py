"""Chromium, which reaches nothing but this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from playwright.sync_api import Browser, Page, Playwright, Request

# A busy machine is no failure.
TIMEOUT_SECONDS = 120

_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_ON_THIS_MACHINE = ("http://127.0.0.1:", "ws://127.0.0.1:", "file:", "data:", "blob:", "about:")


def launch(playwright: Playwright) -> Browser:
    """Starts Debian's Chromium, or the one that the variable CHROMIUM names."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not found:
        raise RuntimeError(
            "these tests drive a browser: install chromium (Debian: apt-get install chromium), or say where one is "
            "in the variable CHROMIUM; -m 'not browser and not gpu' leaves them out"
        )
    return playwright.chromium.launch(executable_path=found, headless=True, args=list(_FLAGS))


@dataclass
class Watch:
    """What must not have happened in a page: requests to other machines, errors that nobody caught, dialogs."""

    offsite: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def on(self, page: Page) -> None:
        page.on("request", self._look_at)
        page.on("websocket", lambda socket: self._look_at_address(socket.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))

    def _look_at(self, request: Request) -> None:
        self._look_at_address(request.url)

    def _look_at_address(self, address: str) -> None:
        if not address.startswith(_ON_THIS_MACHINE):
            self.offsite.append(address)


@contextmanager
def opened(
    browser: Browser, color_scheme: Literal["light", "dark"] = "light", is_silent: bool = True
) -> Iterator[tuple[Page, Watch]]:
    """A fresh page with all that it keeps to itself, and the watch over it.

    Args:
        browser: The browser.
        color_scheme: What the system is said to prefer.
        is_silent: Whether to check at the end that nothing happened that the watch is for.
    """
    context = browser.new_context(
        viewport={"width": 1280, "height": 1000},
        color_scheme=color_scheme,
        permissions=["clipboard-read", "clipboard-write"],
    )
    context.set_default_timeout(1000 * TIMEOUT_SECONDS)
    watch = Watch()
    try:
        page = context.new_page()
        watch.on(page)
        yield page, watch
        if is_silent:
            assert watch == Watch()
    finally:
        context.close()
