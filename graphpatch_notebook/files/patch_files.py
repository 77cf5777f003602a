"""Saves patch maps to files, and loads them, without pickle. The fields of patches are written as plain values."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from torch import Tensor

from graphpatch_notebook.errors import SerializationError, reading
from graphpatch_notebook.files.documents import (
    PatchDocument,
    PatchPart,
    TensorTable,
    checked_file,
    decoded,
    encoded,
    made_tensors,
    read_document,
    write_document,
)
from graphpatch_notebook.inspection.meanings import differing_names, meanings, targets_of
from graphpatch_notebook.inspection.resolution import kept_for
from graphpatch_notebook.patches import kinds
from graphpatch_notebook.patches.kinds import Patch

_KEY = "graphpatch_notebook_patches"
_KINDS = {name: kind for name, kind in vars(kinds).items() if isinstance(kind, type) and issubclass(kind, Patch)}


def save_patches(
    file: str | os.PathLike[str] | IO[bytes],
    patches: Mapping[Any, Patch[Any] | Sequence[Patch[Any]]],
    pg: Any = None,
) -> None:
    """Writes a patch map to one file, with its tensors, without pickle: JSON in a safetensors file.

    A patch of each kind of this package can be written if its fields are plain values and tensors. Functions are not
    written, so a patch that holds one (a `CustomPatch`) is an error. What probes have kept is not written either.

    Args:
        file: The name of the file, or an open binary file such as an `io.BytesIO`.
        patches: From paths to a patch or a list of patches, as for `PatchableGraph.patch`.
        pg: The `PatchableGraph` that the patches are for. What its names mean is then written, too, and `load_patches`
            compares it with what they mean in the graph there: in another version of a model's code, a name may be of
            another value.

    Raises:
        SerializationError: Some patches cannot be written; the message names all of them. Nothing is written.
        FileNotFoundError, IsADirectoryError: The folder does not exist, or `file` is a folder.
        TypeError: `file` is neither the name of a file nor an open binary file, or `patches` is not a dict.

    Example:
        >>> import io, torch
        >>> from graphpatch_notebook import AddPatch, load_patches, save_patches
        >>> file = io.BytesIO()
        >>> save_patches(file, {"h_0.output": AddPatch(value=torch.ones(2), steps="decoding")})
        >>> _ = file.seek(0)
        >>> load_patches(file)
        {'h_0.output': AddPatch(any_shape=False, allow_empty=False, steps='decoding', positions=None, \
position_dim=None, value=tensor([1., 1.]), slice=None)}
    """
    target = checked_file(file, "write")
    if not isinstance(patches, Mapping):
        raise TypeError(f"save_patches takes a dict from paths to patches, not {type(patches).__name__}")
    tensors, parts, problems = TensorTable(), [], []
    for path, given in patches.items():
        for patch in [given] if isinstance(given, Patch) else given:
            try:
                parts.append(_encoded(str(path), patch, tensors))
            except SerializationError as problem:  # all of them are named
                problems.append(f"{str(path)!r}: {type(patch).__name__}: {problem}")
        if not isinstance(given, Patch) and not given:
            problems.append(f"{str(path)!r}: there are no patches")
    if problems:
        raise SerializationError("these patches cannot be saved:" + "".join(f"\n  {problem}" for problem in problems))
    document = PatchDocument(patches=parts, tensors=tensors.parts)
    if pg is not None:
        document.meanings = meanings(pg.nodes, targets_of(pg.nodes, (part.path for part in parts)))
    write_document(target, _KEY, document, tensors.contents())


def load_patches(file: str | os.PathLike[str] | IO[bytes], pg: Any = None) -> dict[str, Patch[Any] | list[Patch[Any]]]:
    """Returns the patch map that `save_patches` wrote: new patches, with tensors on the devices that they were on.

    Nothing in the file is run or imported. Whether the paths exist is checked when the map is used.

    Args:
        file: The name of the file, or an open binary file, which is read from its current position.
        pg: The `PatchableGraph` that the patches are for. The names in the file must mean the same in it, if they were
            saved with a graph.

    Raises:
        SerializationError: The file was not written by `save_patches`, or is damaged; or a name means another value in
            `pg`: the message has the difference.
        FileNotFoundError, IsADirectoryError: The file does not exist, or is a folder.

    Example:
        >>> import io
        >>> from graphpatch_notebook import ZeroPatch, load_patches, save_patches
        >>> file = io.BytesIO()
        >>> save_patches(file, {"output": ZeroPatch(slice=(..., 0))})
        >>> _ = file.seek(0)
        >>> load_patches(file)["output"].slice
        (Ellipsis, 0)
    """
    name, document, contents = read_document(file, _KEY, PatchDocument, "save_patches(file, patches)")
    found: dict[str, Patch[Any] | list[Patch[Any]]] = {}
    with reading(name, SerializationError):
        tensors = made_tensors(document.tensors, contents)
        for part in document.patches:
            patch, before = _decoded(part, tensors), found.get(part.path)
            before = [before] if isinstance(before, Patch) else before
            found[part.path] = patch if before is None else [*before, patch]
    if pg is not None:
        used = targets_of(pg.nodes, found)
        if differing := differing_names(kept_for(pg.nodes, meanings), document.meanings, used):
            raise SerializationError(f"names in {name} mean other values in this graph: {differing}")
    return found


def _encoded(path: str, patch: Any, tensors: TensorTable) -> PatchPart:
    kind = type(patch)
    if _KINDS.get(kind.__name__) is not kind:
        raise SerializationError(
            "it is not a patch of this package; save what it holds, and make it again after loading"
        )

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": tensors.add(value, kind.__name__)}
        if isinstance(value, frozenset):  # of steps or positions
            return {"set": encoded(sorted(value))}
        raise SerializationError(
            f"it holds a {type(value).__name__}, not plain values and tensors; add it after loading"
        )

    fields = {field.name: getattr(patch, field.name) for field in dataclasses.fields(kind) if field.init}
    return PatchPart(path, kind.__name__, {name: encoded(value, leaf) for name, value in fields.items()})


def _decoded(part: PatchPart, tensors: Sequence[Tensor]) -> Patch[Any]:
    leaves: dict[str, Callable[[Any], Any]] = {"tensor": lambda number: tensors[number], "set": frozenset}
    patch = _KINDS[part.kind](**{name: decoded(value, leaves) for name, value in part.fields.items()})
    if (problem := patch.problem(None)) is not None:
        raise ValueError(f"{part.kind}: {problem}")
    return patch
