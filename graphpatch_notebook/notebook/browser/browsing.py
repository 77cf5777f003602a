"""Creates the browser of a graph, for `pg.browse()` and `%graphpatch show`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.notebook.views.opening import session_for_view
from graphpatch_notebook.patchable_graph import PatchableGraph

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphpatch_notebook.experiments.circuits.circuit import Circuit
    from graphpatch_notebook.notebook.browser.widget import Browser
    from graphpatch_notebook.notebook.views.linked import LinkedView


def browser_of(
    graph: PatchableGraph,
    workspace: Workspace,
    path: str = "",
    *,
    inputs: Any = None,
    typed: str | None = None,
    tokenizer: Any = None,
    circuit: Circuit | None = None,
    views: Iterable[str] = (),
) -> Browser:
    """Returns a new browser of a graph. All browsers of a graph share the chosen patches and the runs.

    Args:
        graph: The graph.
        workspace: The user's variables.
        path: The path of the row to select.
        inputs: The inputs of *Run*: a tuple of arguments, a dict of keyword arguments, or one value.
        typed: The arguments of a call as Python code, evaluated for each run.
        tokenizer: Turns tokens into text.
        circuit: Shown above the tree.
        views: The names of views that are shown above the tree: "attention", "lens".

    Raises:
        UnknownPathError: The path does not exist; the message lists the nearest paths.
        TypeError: The tokenizer is not valid.
        ValueError: There is not a view of such a name.
        GraphError: The front end is not built, or a view does not have anything to show.
    """
    from graphpatch_notebook.notebook.browser.widget import Browser

    # The runs exist as long as something refers to them.
    session, _shared = session_for_view(graph, workspace, inputs=inputs, typed=typed, tokenizer=tokenizer)
    shown = [_view(name, graph, workspace) for name in ([views] if isinstance(views, str) else views)]
    browser = Browser(graph, session, workspace, path, shown)
    browser.set_circuit(circuit)
    return browser


def _view(name: str, graph: PatchableGraph, workspace: Workspace) -> LinkedView:
    from graphpatch_notebook.notebook.views.attention import attention_of
    from graphpatch_notebook.notebook.views.lens import LensOptions, lens_of

    match name:
        case "attention":
            return attention_of(graph, workspace)
        case "lens":
            return lens_of(graph, workspace, None, LensOptions())
    raise ValueError(f"there is no view {name!r}; views are 'attention' and 'lens'")
