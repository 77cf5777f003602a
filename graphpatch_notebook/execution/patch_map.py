"""Checks a patch map, all of it, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import PatchMapError, UnknownPathError
from graphpatch_notebook.execution.plan import Entry
from graphpatch_notebook.patches import Patch
from graphpatch_notebook.resolution import Target, Unresolvable, resolve
from graphpatch_notebook.values import TensorSpec


def entries_of(root: Frame, patch_map: Any, known: dict[str, Target]) -> list[Entry]:
    """Returns the entries of a patch map.

    Args:
        root: The root frame of the capture.
        patch_map: From paths (strings or `NodePath`s) to a patch, or a sequence of patches.
        known: Targets that were resolved before, by path: read and filled.

    Raises:
        UnknownPathError, PatchMapError: One error with all that is wrong.
    """
    if not isinstance(patch_map, Mapping):
        raise PatchMapError(f"a patch map is a dict from paths to patches, not {type(patch_map).__name__}")
    problems: list[str] = []
    is_unknown = False
    entries: list[Entry] = []
    for path, patches in patch_map.items():
        text = str(path)
        target = known.get(text)
        if target is None:
            try:
                target = known[text] = resolve(root, text)
            except Unresolvable as error:
                problems.append(error.message)
                is_unknown |= error.is_unknown
                continue
        listed = [patches] if isinstance(patches, Patch) else patches
        problems += _problems(target, listed)
        entries.append(Entry(target, tuple(listed) if isinstance(listed, Sequence) else ()))
    if problems:
        raise _error(problems, is_unknown)
    return entries


def _problems(target: Target, patches: Any) -> list[str]:
    if isinstance(patches, type) and issubclass(patches, Patch):
        patches = [patches]
    if not isinstance(patches, Sequence) or isinstance(patches, (str, bytes)):
        return [f"{target.path!r}: give a patch or a list of patches, not {type(patches).__name__}"]
    shape = target.spec.shape if isinstance(target.spec, TensorSpec) else None
    found = []
    for patch in patches:
        if isinstance(patch, type) and issubclass(patch, Patch):
            found.append(f"{target.path!r}: {patch.__name__} is a class; write {patch.__name__}(...)")
        elif not isinstance(patch, Patch):
            found.append(f"{target.path!r}: {patch!r} is no Patch")
        elif problem := patch.problem(None if patch.any_shape else shape):
            found.append(f"{target.path!r}: {type(patch).__name__}: {problem}")
    return found


def _error(problems: list[str], is_unknown: bool) -> PatchMapError:
    kind = UnknownPathError if is_unknown else PatchMapError
    if len(problems) == 1:
        return kind(problems[0])
    return kind("\n".join([f"{len(problems)} problems in this patch map:", *(f"  - {p}" for p in problems)]))


def snapshot(patch_map: Mapping[Any, Any]) -> list[tuple[Any, Any, list[Any]]]:
    """Returns what `is_unchanged` compares a patch map with later."""
    return [(path, given, [given] if isinstance(given, Patch) else list(given)) for path, given in patch_map.items()]


def is_unchanged(before: list[tuple[Any, Any, list[Any]]], patch_map: Mapping[Any, Any]) -> bool:
    """Whether a patch map still has the same paths and the very same patches as when the snapshot was taken."""
    if len(before) != len(patch_map):
        return False
    for (path, given, patches), (path_now, given_now) in zip(before, patch_map.items(), strict=True):
        if path is not path_now or given is not given_now:
            return False
        if isinstance(given_now, list) and list(map(id, patches)) != list(map(id, given_now)):
            return False
    return True
