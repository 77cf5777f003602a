"""How a browser is displayed in a notebook: the widget, and beside it a tree that lives without a kernel.

The tree is displayed under an id of its own, and again whenever the chosen patches have changed: after a request of the
front end at once, else when the cell that changed them has ended.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display, update_display

# They have no types.
_display: Callable[..., Any] = display
_update_display: Callable[..., Any] = update_display


def has_front_end() -> bool:
    """Whether what is displayed now goes to a front end, which may show more than text."""
    return getattr(get_ipython(), "kernel", None) is not None


def is_terminal() -> bool:
    """Whether what is displayed now is text in a terminal."""
    return get_ipython() is not None and not has_front_end()


class BrowserDisplay:
    """The displayed trees of one browser.

    Args:
        html: Returns the tree; `None` where there is none any more. Asked as long as its object lives.
    """

    def __init__(self, html: Callable[[], str | None]) -> None:
        self._html = weakref.WeakMethod(html)
        self._id: str | None = None
        self._shown: str | None = None
        self._stop_listening: Callable[[], None] = lambda: None

    def show(self, bundle: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Displays the widget, and the tree."""
        _display(bundle, metadata=metadata, raw=True)
        html = self._current()
        if html is None:
            return
        if self._id is None:
            self._id = uuid.uuid4().hex
            self._stop_listening = _after_cells(weakref.WeakMethod(self.renew))
        self._shown = html
        _display({"text/html": html}, raw=True, display_id=self._id)

    def renew(self) -> None:
        """Displays the tree again, wherever it is displayed, if it has changed."""
        if self._id is None:
            return
        html = self._current()
        if html is not None and html != self._shown:
            self._shown = html
            _update_display({"text/html": html}, raw=True, display_id=self._id)

    def stop(self) -> None:
        """Leaves what is displayed as it is."""
        self._stop_listening()
        self._id = None

    def _current(self) -> str | None:
        html = self._html()
        return html() if html is not None else None


def _after_cells(method: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    """Has a method called after each cell, as long as its object lives; returns what stops that."""
    events = getattr(get_ipython(), "events", None)
    if events is None:
        return lambda: None

    def renew() -> None:
        function = method()
        if function is not None:
            function()
        else:
            stop()

    def stop() -> None:
        try:
            events.unregister("post_execute", renew)
        except ValueError:  # it was stopped before
            return

    events.register("post_execute", renew)
    return stop
