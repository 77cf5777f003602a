"""What becomes of chosen patches when their variable holds another graph."""

from __future__ import annotations

from graphpatch_notebook.errors import ChosenPatchError
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.session import Session


def counted(count: int) -> str:
    """Returns how many patches there are, in words."""
    return "1 patch" if count == 1 else f"{count} patches"


def hand_over(patches: tuple[ChosenPatch, ...], session: Session) -> None:
    """Chooses the patches of the graph that the variable held before; says what became of them."""
    kept: list[ChosenPatch] = []
    dropped: list[str] = []
    for patch in patches:
        problem = _problem(patch, kept, session)
        if problem is None:
            kept.append(patch)
        else:
            dropped.append(f"dropped #{patch.number} {patch}: {problem}")
    if kept:
        session.adopt(kept)
        print(f"{counted(len(kept))} carried over from the graph that was in {session.origin.graph} before")
    for line in dropped:
        print(line)


def _problem(patch: ChosenPatch, others: list[ChosenPatch], session: Session) -> ChosenPatchError | None:
    try:
        session.check(patch, others)
    except ChosenPatchError as problem:
        return problem
    return None
