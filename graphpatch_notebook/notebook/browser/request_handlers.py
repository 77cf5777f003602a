"""The requests of the tree browser about its rows, besides those of all views (`notebook/views/requests.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.browser.details import details
from graphpatch_notebook.notebook.browser.skeleton import Skeleton
from graphpatch_notebook.notebook.views.requests import (
    HANDLERS,
    Answer,
    Handlers,
    Payload,
    RequestContext,
    inputs_of,
    interrupt_run,
    run_status,
)


@dataclass(frozen=True, kw_only=True)
class TreeContext(RequestContext):
    """The objects that requests of the tree read and change.

    Attributes:
        skeleton: Returns the rows that the front end shows.
        name_components: Sends the components, as the trait `components`.
    """

    skeleton: Callable[[], Skeleton]
    name_components: Callable[[], None] = lambda: None


def _details(context: TreeContext, payload: Payload) -> Answer:
    return details(context.session.graph, context.skeleton(), payload.number("row")), []


def _components(context: TreeContext, _: Payload) -> Answer:
    context.name_components()
    return {}, []


def _activation(context: TreeContext, payload: Payload) -> Answer:
    skeleton, row = context.skeleton(), payload.number("row")
    path = skeleton.path(row) if 0 <= row < len(skeleton) else ""
    if not path:
        raise SessionError(f"row {row} is not a node, so it does not have an activation")
    plane, is_patched = payload.text_or_none("plane"), payload.flag("is_patched")
    number = context.runs.start_activation(path, plane, is_patched, inputs_of(context, payload))
    return context.runs.status(number)


def _activation_close(context: TreeContext, payload: Payload) -> Answer:
    context.runs.close_activation(payload.number("id"))
    return {}, []


TREE_HANDLERS: Handlers = {
    **HANDLERS,
    "details": _details,
    "components": _components,
    "activation": _activation,
    "activation_status": run_status,
    "activation_interrupt": interrupt_run,
    "activation_close": _activation_close,
}
