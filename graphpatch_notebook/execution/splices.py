"""Patches on the parts of a splice: they wait in entries of their own, until a plan joins them with the splice.

The splice may be in the same patch map, in a context around it, or permanent, so it is not known when a path is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import PatchMapError, PatchValueError, UnknownPathError
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, resolve
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patches.splices import PARTS, SplicePatch, inside_of, may_be_inside
from graphpatch_notebook.values import TensorSpec

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


def inside_splice(root: Frame, text: str, given: Any, problem: str) -> tuple[Target, InsidePatch] | None:
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
    patches = [given] if isinstance(given, Patch) else given
    return target, InsidePatch(name=name, part=part, patches=patches, problem_without=hint)


def no_such_part(root: Frame, text: str) -> str:
    """Returns a hint for the error of a path that may refer to a part of a splice."""
    found = may_be_inside(text)
    if found is None:
        return ""
    try:
        spec = resolve(root, found[0]).spec
    except Unresolvable:
        return ""
    parts = ", ".join(f"{text.removesuffix(found[2])}{part}" for part in PARTS)
    return f"; the parts of a splice there are {parts}" if isinstance(spec, TensorSpec) else ""


def is_part_of_splice(root: Frame, text: str) -> bool:
    """Whether a path can only be that of a part of a splice."""
    try:
        resolve(root, text)
    except Unresolvable as error:
        return inside_splice(root, text, (), error.message) is not None
    return False


def joined_with_splices(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Returns entries with the patches on parts of splices inside of these splices.

    Two splices of one name on a value, and changes of an error that is not added, are a `PatchMapError`.
    """
    inside = [entry for entry in entries if isinstance(entry.patches[0], InsidePatch)]
    if not inside:
        return entries
    found = {id(entry): entry for entry in entries}
    for entry in inside:
        waiting = entry.patches[0]
        assert isinstance(waiting, InsidePatch)
        places = [
            (key, place)
            for key, other in found.items()
            if (other.target.path, other.target.spec) == (entry.target.path, entry.target.spec)
            for place, patch in enumerate(other.patches)
            if isinstance(patch, SplicePatch) and patch.name == waiting.name
        ]
        if len(places) > 1:
            raise PatchMapError(
                f"{entry.target.path!r} has {len(places)} splices named {waiting.name!r}: give one name="
            )
        for key, place in places:
            patches = list(found[key].patches)
            splice = patches[place]
            assert isinstance(splice, SplicePatch)
            if waiting.part == "error" and not splice.error and not all(p.observes_only for p in waiting.patches):
                raise PatchMapError(
                    f"{entry.target.path!r}: the splice {waiting.name!r} has error=False, so its error is not part of "
                    "the value and can only be probed: use SplicePatch(..., error=True)"
                )
            patches[place] = splice.with_inside(waiting.part, waiting.patches)
            found[key] = replace(found[key], patches=tuple(patches))
            del found[id(entry)]
    return list(found.values())


def check_splices(entries: Sequence[Entry]) -> None:
    """Raises an `UnknownPathError` for patches on parts of splices that were not joined with one."""
    problems = [patch.problem_without for entry in entries if isinstance(patch := entry.patches[0], InsidePatch)]
    if problems:
        raise UnknownPathError("\n".join(problems))
