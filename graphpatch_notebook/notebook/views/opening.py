"""What opens a view of a graph: its session with the names of the user's variables, and the inputs of runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.notebook.run.model_calls import RunInputs, inputs_for_run
from graphpatch_notebook.notebook.run.runs import SharedRuns
from graphpatch_notebook.notebook.session.origin import written_arguments
from graphpatch_notebook.notebook.session.session import Session, session_of
from graphpatch_notebook.notebook.session.workspace import Workspace, workspace_of
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.paths import numbered


def session_for_view(
    graph: PatchableGraph,
    workspace: Workspace,
    *,
    inputs: Any = None,
    typed: str | None = None,
    tokenizer: Any = None,
) -> tuple[Session, SharedRuns]:
    """Returns the session of a graph for a new view of it, and the runs, with these inputs and this tokenizer.

    Args:
        graph: The graph.
        workspace: The user's variables.
        inputs: The inputs of runs: a tuple of arguments, a dict of keyword arguments, or one value; `None`: as before.
        typed: The arguments of a call as Python code, evaluated for each run.
        tokenizer: Turns tokens into text; `None`: as before.

    Raises:
        TypeError: The tokenizer is not valid.
    """
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
    return session, shared


def inputs_of_view(
    session: Session, workspace: Workspace, shared: SharedRuns, inputs: Inputs | None, typed: str | None = None
) -> RunInputs:
    """Returns the inputs of a new view: those that were given, else those that were typed, else those of *Run*.

    Args:
        session: The session of the graph.
        workspace: The user's variables.
        shared: The runs of the session.
        inputs: The inputs that were given.
        typed: The inputs as Python code.

    Raises:
        ChosenPatchError: The typed inputs are not valid.
        SessionError: There are no inputs.
    """
    if inputs is None:
        return inputs_for_run(session, workspace.namespace, typed or shared.typed(), shared.runs.inputs)
    written = written_arguments(inputs.args, inputs.kwargs, workspace.namespace)
    return RunInputs(inputs.args, inputs.kwargs, written or "...")


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
