"""Creates the browser of a graph, for `pg.browse()` and `%graphpatch show`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphpatch_notebook.notebook.session.session import session_of
from graphpatch_notebook.notebook.session.workspace import Workspace, workspace_of
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.paths import numbered

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
        views: The names of views that are shown above the tree, such as "attention".

    Raises:
        UnknownPathError: The path does not exist; the message lists the nearest paths.
        TypeError: The tokenizer is not valid.
        ValueError: There is not a view of such a name.
        GraphError: The front end is not built, or a view does not have anything to show.
    """
    from graphpatch_notebook.notebook.browser.widget import Browser
    from graphpatch_notebook.notebook.run.runs import SharedRuns

    _check_tokenizer(tokenizer)
    session = session_of(graph)
    names = [name for name, other in workspace.graphs().items() if other is graph]
    if names:  # sets the variable names of the graph and the model in the session
        workspace.named(session.origin.graph if session.origin.graph in names else names[0])
    elif session.origin.graph in workspace.namespace:  # may be another graph, which exported code must not patch
        free = next(name for name in numbered(session.origin.graph) if name not in workspace.namespace)
        session.origin = replace(session.origin, graph=free)
    shared = SharedRuns.of(session, workspace)
    shared.use(inputs=inputs, typed=typed, tokenizer=tokenizer)
    shown = [_view(name, graph, workspace) for name in ([views] if isinstance(views, str) else views)]
    browser = Browser(graph, session, workspace, path, shown)
    browser.set_circuit(circuit)
    return browser


def _view(name: str, graph: PatchableGraph, workspace: Workspace) -> LinkedView:
    from graphpatch_notebook.notebook.views.attention import attention_view

    known = {"attention": attention_view}
    if name not in known:
        raise ValueError(f"there is no view {name!r}; views are {', '.join(map(repr, known))}")
    return known[name](graph, workspace)


def _check_tokenizer(tokenizer: Any) -> None:
    methods = (getattr(tokenizer, name, None) for name in ("decode", "convert_ids_to_tokens"))
    if tokenizer is None or (any(map(callable, methods)) and not isinstance(tokenizer, bytes)):
        return
    raise TypeError(
        f"tokenizer must be an object with decode or convert_ids_to_tokens, not {tokenizer!r:.80}; "
        "load it first: AutoTokenizer.from_pretrained(...)"
    )


def workspace_of_user(namespace: dict[str, Any]) -> Workspace:
    """Returns the user's variables: those of IPython if it is running, else `namespace`."""
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        if (shell := get_ipython()) is not None:
            return workspace_of(shell)
    return Workspace(lambda: namespace, _refuse_cell)


def _refuse_cell(text: str) -> None:
    raise NotImplementedError("there are no cells here")
