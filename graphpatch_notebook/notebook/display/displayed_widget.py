"""The base class of widgets, and the bundled front end that they send to the page.

static/widget.js, widget.css  -> compressed, in `FrontEnd`: once in a kernel, and so in a saved notebook
static/loader.js              -> `_esm`: unpacks them
static/saved_page.js          -> in pages that `save_html` writes: shows the widget without a kernel

With ANYWIDGET_HMR=1, anywidget reads the files themselves and reloads them when they change.

A widget also displays HTML that works without a kernel, and its text, under a display id of its own. The HTML is
updated when the widget changes: at once after a request of the front end, otherwise when the cell that changed the
widget ends.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import uuid
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import anywidget
import msgspec
import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import display, update_display
from ipywidgets import widget_serialization
from ipywidgets.embed import dependency_state, embed_data

from graphpatch_notebook.errors import GraphError, whole_file
from graphpatch_notebook.notebook.display.tables import escaped

# These functions have no types.
_display: Callable[..., Any] = display
_update_display: Callable[..., Any] = update_display

_STATIC = Path(__file__).parents[2] / "static"

# The page can load nothing: the policy allows what is in it.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 16px; background: light-dark(#ffffff, #1b1d21); font: 14px/1.5 system-ui, sans-serif; }}
</style>
</head>
<body>
<script type="application/vnd.jupyter.widget-state+json">{state}</script>
<script type="application/vnd.jupyter.widget-view+json">{view}</script>
{html}
<script type="module">{script}</script>
</body>
</html>
"""


def for_anywidget() -> tuple[Path | str, Path | str]:
    """Returns the script and the style sheet for anywidget."""
    if _is_watched():
        # anywidget keeps every widget alive whose script is a file.
        return _file("widget.js"), _file("widget.css")
    return _file("loader.js").read_text("utf8"), ""


@functools.cache
def packed() -> bytes:
    """Returns the bundle for the loader: compressed JSON of `css` and `js`; empty if anywidget reads the files."""
    if _is_watched():
        return b""
    parts = {"css": _file("widget.css").read_text("utf8"), "js": _file("widget.js").read_text("utf8")}
    return zlib.compress(json.dumps(parts, ensure_ascii=False).encode(), 9)


def _is_watched() -> bool:
    return os.environ.get("ANYWIDGET_HMR") == "1"


def _file(name: str) -> Path:
    file = _STATIC / name
    if not file.is_file():
        raise GraphError(
            f"the front end of the tree browser is not built: {file} is missing. In a checkout, run "
            "`npm ci --ignore-scripts && npm run build` (node >= 20); else install graphpatch-notebook again"
        )
    return file


def has_front_end() -> bool:
    """Whether displayed objects go to a front end, which can show more than text."""
    return getattr(get_ipython(), "kernel", None) is not None


def is_terminal() -> bool:
    """Whether displayed objects go to a terminal."""
    return get_ipython() is not None and not has_front_end()


class FrontEnd(anywidget.AnyWidget):
    """The bundled front end, to which the views of a kernel refer: pages and saved notebooks have it once.

    It is a widget of anywidget, since others lose their bytes when JupyterLab saves a notebook.
    """

    _esm = "export default {}"

    bundle = traitlets.Bytes(packed(), read_only=True).tag(sync=True, echo_update=False)
    digest = traitlets.Unicode(hashlib.sha256(packed()).hexdigest(), read_only=True).tag(sync=True)

    _shared: ClassVar[FrontEnd | None] = None

    @classmethod
    def of_kernel(cls) -> FrontEnd:
        """Returns the one of this kernel. Other hosts, such as marimo, close widgets with their cells: a new one."""
        if cls._shared is None or cls._shared.comm is None or not has_front_end():
            cls._shared = cls()
        return cls._shared


class DisplayedWidget(anywidget.AnyWidget):
    """The base class of widgets. Subclasses define the traits, and the text that replaces the widget in a terminal.

    They also define `_static_html`, which is displayed with the widget and works without a kernel, and `FRONT_END`.

    Args:
        **traits: Keyword arguments of `Widget`.
    """

    _esm, _css = for_anywidget()

    FRONT_END: ClassVar[Mapping[str, Any]] = {}
    """The traits that the front end may set, with their types."""

    front_end = traitlets.Instance(FrontEnd, read_only=True).tag(sync=True, echo_update=False, **widget_serialization)

    def __init__(self, **traits: Any) -> None:
        self._display_id: str | None = None
        self._shown_html: str | None = None
        self.set_trait("front_end", FrontEnd.of_kernel())
        super().__init__(model_id=self._own_id, **traits)

    @functools.cached_property
    def _own_id(self) -> str:
        """The model id, also of a widget that is closed."""
        return uuid.uuid4().hex

    def _static_html(self) -> str | None:
        """Returns HTML for pages without a kernel or scripts; `None` if there is none any more."""
        raise NotImplementedError

    def _marked_html(self) -> str | None:
        """Returns the same with the class by which the live widget hides it."""
        inside = self._static_html()
        return None if inside is None else f'<div class="gp-static gp-static-{self._own_id}">\n{inside}\n</div>'

    def _check(self, name: str, value: Any) -> None:
        """Checks a value of a trait of `FRONT_END`.

        Raises:
            TraitError: It is not valid.
        """
        try:
            msgspec.convert(value, self.FRONT_END[name])
        except msgspec.ValidationError as error:
            raise traitlets.TraitError(f"{name}={value!r:.80} is not valid: {error}") from None

    def checked(self, proposal: Any) -> Any:
        """Returns the value of a proposal of traitlets, if it is valid: for `traitlets.validate`."""
        self._check(proposal["trait"].name, proposal["value"])
        return proposal["value"]

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Sets the traits that the front end has changed, if it may set them and the values are valid."""
        accepted = {}
        for name in sync_data.keys() & {*self.keys}:
            try:
                if name not in self.FRONT_END:
                    raise traitlets.TraitError(name)
                self._check(name, sync_data[name])
                accepted[name] = sync_data[name]
            except traitlets.TraitError:
                self.send_state(name)  # the valid value
                continue
        super().set_state(accepted)

    def close(self) -> None:
        """Removes the widget from the notebook. The displayed HTML remains."""
        self._display_id = None
        super().close()

    def save_html(self, file: str | os.PathLike[str]) -> None:
        """Saves the widget as a page of HTML: one file, which needs neither a kernel nor a network.

        In the page, one can do all that does not run the model. Where scripts are not allowed, the page shows what a
        notebook shows without them.

        Args:
            file: The file to write; it replaces a file of that name.

        Raises:
            ValueError: The widget is closed.

        Example:
            >>> import torch
            >>> from graphpatch_notebook import PatchableGraph
            >>> browser = PatchableGraph(torch.nn.ReLU(), torch.ones(2)).browse()
            >>> folder = getfixture("tmp_path")
            >>> browser.save_html(folder / "relu.html")
            >>> "<!DOCTYPE html>" in (folder / "relu.html").read_text("utf8")
            True
            >>> browser.close()
        """
        if self.comm is None:
            raise ValueError("the widget is closed; show the view again, and save that one")
        # Of this widget only, not of all in the kernel. With defaults: the front end does not have them.
        saved = embed_data([self], state=dependency_state([self], drop_defaults=False))
        page = _PAGE.format(
            title=escaped(Path(file).stem),
            state=_in_script(saved["manager_state"]),
            view=_in_script(saved["view_specs"][0]),
            html=self._marked_html() or "",
            script=_file("saved_page.js").read_text("utf8"),
        )
        with whole_file(Path(file)) as written:
            written.write_text(page, encoding="utf8")

    def _ipython_display_(self, **_: Any) -> None:
        if self.comm is None or not has_front_end():
            raise NotImplementedError  # for all other objects
        bundle: Any = super()._repr_mimebundle_()
        data, metadata = bundle
        self._shown_html = self._marked_html()
        # Where the widget is not shown, as in a notebook that is not trusted, its text would stand beside the HTML.
        text = data.pop("text/plain") if self._shown_html is not None else ""
        _display(data, metadata=metadata, raw=True)
        if self._shown_html is None:
            return
        if self._display_id is None:
            self._display_id = uuid.uuid4().hex
            _after_cells(weakref.WeakMethod(self.renew_html))
        _display({"text/html": self._shown_html, "text/plain": text}, raw=True, display_id=self._display_id)

    def renew_html(self) -> None:
        """Updates the displayed HTML, everywhere that the widget is displayed, if it has changed."""
        html = self._marked_html() if self._display_id is not None else None
        if html is not None and html != self._shown_html:
            self._shown_html = html
            shown = {"text/html": html, "text/plain": repr(self)}
            _update_display(shown, raw=True, display_id=self._display_id)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        # In a terminal, texts have colors, which a MIME bundle would not have.
        return None if is_terminal() else super()._repr_mimebundle_(**options)


def _in_script(value: Any) -> str:
    return json.dumps(value).replace("<", "\\u003c")


def _after_cells(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Calls a method after each cell, as long as its object lives."""
    events = getattr(get_ipython(), "events", None)
    if events is None:
        return

    def renew() -> None:
        if (function := method()) is not None:
            function()
        else:
            events.unregister("post_execute", renew)

    events.register("post_execute", renew)
