"""Chromium: found or fetched, and started so that it reaches nothing but this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, BrowserContext, Error, Page, Playwright, Request, sync_playwright

# A busy machine is no failure.
TIMEOUT_SECONDS = 300

_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_ON_THIS_MACHINE = ("http://127.0.0.1:", "ws://127.0.0.1:", "file:", "data:", "blob:", "about:")


# The same browser, as Debian, Ubuntu and Google call it.
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_DOWNLOAD_SECONDS = 300
_LONG = 100


class NoBrowserError(RuntimeError):
    """No browser starts on this machine, and none can be fetched."""


def launch(playwright: Playwright) -> Browser:
    """Starts the browser that the variable CHROMIUM names, or else the first that starts: installed, or Playwright's.

    Playwright's own is downloaded into its cache if it is not there yet.

    Raises:
        NoBrowserError: None of them starts.
    """
    problems = {}
    for executable in _executables():
        try:
            return playwright.chromium.launch(executable_path=executable, headless=True, args=list(_FLAGS))
        except Error as error:  # a second at least goes into each start
            text = re.sub(r"[\s═║╔╗╚╝]+", " ", error.message)
            problems[executable or "Playwright's"] = text.removeprefix("BrowserType.launch: ").strip()[:_LONG]
    tried = "; ".join(f"{executable}: {text}" for executable, text in problems.items())
    raise NoBrowserError(
        "no browser starts: install Chromium (Debian: apt-get install chromium), or name one by the variable CHROMIUM "
        f"(tried {tried})"
    )


def problem() -> str:
    """Returns why no browser starts; empty where one does."""
    try:
        with sync_playwright() as playwright:
            launch(playwright).close()
    except NoBrowserError as error:
        return str(error)
    return ""


def _executables() -> Iterator[str | None]:
    """Yields what may be started, one after the other; `None` is Playwright's own browser."""
    if named := os.environ.get("CHROMIUM"):
        yield named
        return
    yield from filter(None, map(shutil.which, _NAMES))
    yield None
    if _has_downloaded():
        yield None


def _has_downloaded() -> bool:
    """Whether Playwright could download its browser; needs no rights of an administrator."""
    command = [sys.executable, "-m", "playwright", "install", "--only-shell", "chromium"]
    environment = {"PLAYWRIGHT_DOWNLOAD_CONNECTION_TIMEOUT": "10000", **os.environ}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


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
def context_of(browser: Browser) -> Iterator[BrowserContext]:
    """A context: its pages share a cache, and share nothing with pages of other contexts."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 1000},
        color_scheme="light",
        permissions=["clipboard-read", "clipboard-write"],
    )
    context.set_default_timeout(1000 * TIMEOUT_SECONDS)
    try:
        yield context
    finally:
        context.close()


@contextmanager
def opened(context: BrowserContext, is_silent: bool = True) -> Iterator[tuple[Page, Watch]]:
    """A new page, and the watch over it.

    Args:
        context: Where the page is.
        is_silent: Whether to check at the end that nothing happened that the watch is for.
    """
    watch = Watch()
    page = context.new_page()
    try:
        watch.on(page)
        yield page, watch
        if is_silent:
            assert watch == Watch(), watch
    finally:
        page.close()
