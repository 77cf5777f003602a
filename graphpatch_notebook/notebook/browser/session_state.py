"""The chosen patches as the front end has them: `SessionState` of js/src/kernel/protocol.ts."""

from __future__ import annotations

from typing import Any

from graphpatch_notebook.errors import ChosenPatchError
from graphpatch_notebook.notebook.browser.skeleton import Skeleton
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.patch_kinds import RESTRICTIONS
from graphpatch_notebook.notebook.session.session import Session

FIELDS = ("path", "kind", "slice", "value", "name", *RESTRICTIONS)


def session_state(
    session: Session, skeleton: Skeleton, known: dict[ChosenPatch, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Returns the chosen patches, each with the row of its node and the shapes that it was chosen for.

    Args:
        session: The session.
        skeleton: The rows.
        known: What was found out about patches on these rows before; is brought up to date.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> from graphpatch_notebook.notebook.browser.skeleton import skeleton_of
        >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(2, 3))
        >>> session = Session(pg)
        >>> _ = session.add(ChosenPatch("relu", "zero", slice=":, 0"))
        >>> state = session_state(session, skeleton_of(pg))
        >>> state["version"], [(one["number"], one["row"], one["sliced"]) for one in state["patches"]]
        (1, [(1, 2, [2])])
    """
    chosen = session.chosen
    before = {} if known is None else dict(known)
    now = {patch: before.get(patch) or patch_state(session, skeleton, patch) for patch in chosen.patches}
    if known is not None:
        known.clear()
        known.update(now)
    return {
        "version": chosen.version,
        "patches": [now[patch] for patch in chosen.patches],
        "can_undo": session.can_undo,
        "can_redo": session.can_redo,
    }


def patch_state(session: Session, skeleton: Skeleton, patch: ChosenPatch) -> dict[str, Any]:
    """Returns one chosen patch."""
    row = skeleton.find(patch.path)
    shape = sliced = warning = None
    try:
        # Beside no others: what they do to each other was said when they were chosen.
        found = session.check(patch, ())
    except ChosenPatchError as problem:  # the graph was edited since
        warning = str(problem)
    else:
        shape, sliced, warning = found.shape, found.sliced, found.warning
    return {
        **{field: getattr(patch, field) for field in FIELDS},
        "number": patch.number,
        "is_enabled": patch.is_enabled,
        "untrusted": None if patch.untrusted is None else patch.untrusted.name,
        "row": -1 if row is None else row,
        "shape": None if shape is None else list(shape),
        "sliced": None if sliced is None else list(sliced),
        "warning": warning,
    }
