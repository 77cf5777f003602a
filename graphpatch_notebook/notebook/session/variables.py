"""Which variables chosen patches use and fill: no two fill the same one, and none fills what another uses."""

from __future__ import annotations

from collections.abc import Iterable

from graphpatch_notebook.errors import ChosenPatchError
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.code_names import names_in
from graphpatch_notebook.notebook.session.origin import Origin


def check_name(patch: ChosenPatch, others: Iterable[ChosenPatch], origin: Origin) -> None:
    """Makes sure that the variable of a probe is free for it.

    Raises:
        ChosenPatchError: Another fills it, or the graph is made from it.
    """
    if patch.name is None:
        return
    namesake = next((other for other in others if other.name == patch.name), None)
    if namesake is not None:
        raise ChosenPatchError(
            "name", f"#{namesake.number} puts {namesake.path!r} in {patch.name!r}: choose another variable"
        )
    if patch.name in origin.names:
        raise ChosenPatchError("name", f"{patch.name!r} is what the graph is made from: choose another variable")


def check_uses(patch: ChosenPatch, others: Iterable[ChosenPatch]) -> str | None:
    """Returns what is to be said if the patch uses what an earlier probe keeps.

    Raises:
        ChosenPatchError: A probe would overwrite what a patch uses that was chosen before it.
    """
    warning = None
    for other in others:
        if not (patch.is_enabled and other.is_enabled):
            continue
        is_newer = not patch.number or other.number < patch.number
        user, probe = (other, patch) if is_newer else (patch, other)
        if _uses(user, probe.name):
            does = "uses" if user is other else "puts what it keeps in"
            raise ChosenPatchError(
                "name" if probe is patch else "value",
                f"#{other.number} ({other}) {does} {probe.name!r}, so that the second run would use "
                "what the first one kept: choose another variable",
            )
        if is_newer and _uses(patch, other.name):
            warning = f"{other.name!r} is what #{other.number} keeps: each run uses what the run before it kept"
    return warning


def _uses(patch: ChosenPatch, name: str | None) -> bool:
    """Whether a text of the patch names the variable."""
    texts = f"{patch.value} {patch.slice}"
    # Most do not, which is seen at once; letters of other alphabets have several spellings.
    return name is not None and (name in texts or not texts.isascii()) and name in names_in(patch)
