"""Patches on the parts of a splice: they wait in entries of their own, until a plan joins them with the splice.

The splice may be in the same patch map, in a context around it, or permanent, so it is not known when a path is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import PatchMapError, PatchValueError
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, resolve
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patches.splices import SplicePatch, inside_of

if TYPE_CHECKING:
    from graphpatch_notebook.execution.plan import Entry


@dataclass(eq=False, kw_only=True)
class InsidePatch(Patch[Any]):
    """Patches on a part of a splice, before they are joined with it; `problem_without` is what is wrong without it."""

    name: str
    part: str
    patches: Sequence[Patch[Any]]
    problem_without: str

    def op(self, original_output: Any) -> Any:
        raise PatchValueError(self.problem_without)


def inside_splice(
    root: Frame, text: str, patches: Sequence[Patch[Any]], problem: str
) -> tuple[Target, InsidePatch] | None:
    """Returns the value with the splice, and the patches on a part of it, if `text` is the path of such a part.

    `problem` is what is wrong with the path if there is no splice.
    """
    found = inside_of(text)
    if found is None:
        return None
    path, name, part = found
    try:
        target = resolve(root, path)
    except Unresolvable:
        return None
    hint = f"{problem}; a SplicePatch(sae, name={name!r}) on {path!r} would have it, and there is none"
    return target, InsidePatch(name=name, part=part, patches=patches, problem_without=hint)


def is_part_of_splice(root: Frame, text: str) -> bool:
    """Whether a path can only be that of a part of a splice."""
    try:
        resolve(root, text)
    except Unresolvable:
        return inside_splice(root, text, (), "") is not None
    return False


def joined_with_splices(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Returns entries with the patches on parts of splices inside of these splices.

    Two splices of one name on a value, and changes of an error that is not added, are a `PatchMapError`.
    """
    found = [entry for entry in entries if not isinstance(entry.patches[0], InsidePatch)]
    if len(found) == len(entries):
        return entries
    for entry in entries:
        inside, path = entry.patches[0], entry.target.path
        if not isinstance(inside, InsidePatch):
            continue
        places = [
            (number, place)
            for number, other in enumerate(found)
            if (other.target.path, other.target.spec) == (path, entry.target.spec)
            for place, patch in enumerate(other.patches)
            if isinstance(patch, SplicePatch) and patch.name == inside.name
        ]
        if len(places) > 1:
            raise PatchMapError(f"{path!r} has {len(places)} splices named {inside.name!r}: give one name=")
        for number, place in places:
            patches: list[Any] = list(found[number].patches)
            if inside.part == "error" and not patches[place].error and not all(p.observes_only for p in inside.patches):
                raise PatchMapError(
                    f"{path!r}: the splice {inside.name!r} has error=False, so its error is not part of the value and "
                    "can only be probed: use SplicePatch(..., error=True)"
                )
            patches[place] = patches[place].with_inside(inside.part, inside.patches)
            found[number] = replace(found[number], patches=tuple(patches))
        if not places:
            found.append(entry)
    return found
