"""The packages that pages fetch to show widgets, from this machine in place of a content delivery network."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from playwright.sync_api import BrowserContext, Route

from tests.browser.server import CHECKOUT

NODE_MODULES = CHECKOUT / "node_modules"
_AMD = next(
    file for file in importlib.metadata.files("anywidget") or () if file.match("nbextensions/anywidget/index.js")
)
_FILES = {
    r"/require(\.min)?\.js$": NODE_MODULES / "requirejs" / "require.js",
    r"/@jupyter-widgets/html-manager@[^/]*/dist/embed-amd\.js$": (
        NODE_MODULES / "@jupyter-widgets" / "html-manager" / "dist" / "embed-amd.js"
    ),
    r"/@jupyter-widgets/html-manager/dist/libembed-amd\.js$": (
        NODE_MODULES / "@jupyter-widgets" / "html-manager" / "dist" / "libembed-amd.js"
    ),
    r"/anywidget@[^/]*/dist/index\.js$": Path(str(_AMD.locate())),
}


def are_installed() -> bool:
    """Whether `npm ci` has installed them."""
    return all(file.exists() for file in _FILES.values())


def serve_packages(context: BrowserContext) -> None:
    """Answers the requests of pages for RequireJS, the widget manager and anywidget; all others fail."""
    context.route(re.compile("^https://"), _answer)


def _answer(route: Route) -> None:
    for pattern, file in _FILES.items():
        if re.search(pattern, route.request.url):
            route.fulfill(path=file, content_type="text/javascript", headers={"Access-Control-Allow-Origin": "*"})
            return
    route.abort()
