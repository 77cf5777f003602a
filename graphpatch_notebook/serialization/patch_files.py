"""Saves patch maps to files, and loads them, without pickle.

A file is a safetensors file whose metadata holds a JSON document:

{"schema": 1, "written_by": "0.1.0", "tensors": [..],
 "patches": [{"path": "h_0.output", "kind": "AddPatch", "fields": {..}}]}

The values of fields are written as other plain values are, a tensor as its number in the table: {"tensor": 0}.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import IO, Any

from torch import Tensor

from graphpatch_notebook._version import __version__
from graphpatch_notebook.errors import SerializationError
from graphpatch_notebook.patches import kinds, splices
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.serialization.codecs.reading import JsonValue
from graphpatch_notebook.serialization.codecs.tensors import TensorTable, made_tensors
from graphpatch_notebook.serialization.codecs.values import UnstorableError, decoded, encoded
from graphpatch_notebook.serialization.files import checked_target, read_document, write_document

_KEY = "graphpatch_notebook_patches"
_SCHEMA = 1
_KINDS = {
    name: kind
    for name, kind in {**vars(kinds), **vars(splices)}.items()
    if isinstance(kind, type) and issubclass(kind, Patch)
}
_WRITER = "save_patches(file, patches)"


def save_patches(
    file: str | os.PathLike[str] | IO[bytes], patches: Mapping[Any, Patch[Any] | Sequence[Patch[Any]]]
) -> None:
    """Writes a patch map to one file, with its tensors, without pickle: JSON in a safetensors file.

    A patch of each kind of this package can be written if its fields are plain values and tensors. Functions are not
    written, so a patch that holds one (a `CustomPatch`) is an error. What probes have kept is not written either.

    Args:
        file: The name of the file, or an open binary file such as an `io.BytesIO`.
        patches: From paths to a patch or a list of patches, as for `PatchableGraph.patch`.

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
    where = checked_target(file, "save_patches")
    if not isinstance(patches, Mapping):
        raise TypeError(f"save_patches takes a dict from paths to patches, not {type(patches).__name__}")
    tensors, entries, problems = TensorTable(), [], []
    for path, given in patches.items():
        for patch in [given] if isinstance(given, Patch) else given:
            encoded_patch = _encoded_patch(patch, tensors)
            if isinstance(encoded_patch, str):
                problems.append(f"{str(path)!r}: {type(patch).__name__}: {encoded_patch}")
            else:
                entries.append({"path": str(path), **encoded_patch})
        if not isinstance(given, Patch) and not given:
            problems.append(f"{str(path)!r}: there are no patches")
    if problems:
        raise SerializationError("these patches cannot be saved:" + "".join(f"\n  {problem}" for problem in problems))
    content = {"schema": _SCHEMA, "written_by": __version__, "patches": entries, "tensors": tensors.encoded()}
    write_document(where, _KEY, content, tensors.contents())


def load_patches(file: str | os.PathLike[str] | IO[bytes]) -> dict[str, Patch[Any] | list[Patch[Any]]]:
    """Returns the patch map that `save_patches` wrote: new patches, with tensors on the devices that they were on.

    Nothing in the file is run or imported. The paths are checked when the map is used.

    Args:
        file: The name of the file, or an open binary file, which is read from its current position.

    Raises:
        SerializationError: The file was not written by `save_patches`, or is damaged.
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
    otherwise = f"does not hold patches; {_WRITER} writes files that do"
    name, content, contents = read_document(file, _KEY, _WRITER, "load_patches", otherwise)
    try:
        content.check_schema(_SCHEMA)
        fields = content.fields("schema", "written_by", "patches", "tensors")
        tensors = made_tensors(fields["tensors"], contents)
        found: dict[str, Patch[Any] | list[Patch[Any]]] = {}
        for item in fields["patches"].items():
            parts = item.fields("path", "kind", "fields")
            path, patch = parts["path"].text(), _decoded_patch(parts["kind"], parts["fields"], tensors)
            before = found.get(path)
            found[path] = patch if before is None else [*([before] if isinstance(before, Patch) else before), patch]
        return found
    except RecursionError:
        raise SerializationError(f"{name}: it is nested too deeply") from None


def _encoded_patch(patch: Any, tensors: TensorTable) -> dict[str, Any] | str:
    """Returns the JSON of a patch, or why it cannot be written."""
    kind = type(patch)
    if not isinstance(patch, Patch):
        return "it is not a patch"
    if _KINDS.get(kind.__name__) is not kind:
        return "it is a kind of your own; save what it holds, and make it again after loading"

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": tensors.add(value, kind.__name__)}
        if isinstance(value, frozenset):  # of steps or positions
            return {"set": encoded(sorted(value))}
        if callable(value):
            raise UnstorableError("it holds code, which is not written to files; add this patch after loading")
        raise UnstorableError(f"it holds an object of type {type(value).__name__}")

    try:
        values = {field.name: getattr(patch, field.name) for field in dataclasses.fields(kind) if field.init}
        return {"kind": kind.__name__, "fields": {name: encoded(value, leaf) for name, value in values.items()}}
    except UnstorableError as problem:
        return str(problem)


def _decoded_patch(kind: JsonValue, given: JsonValue, tensors: Sequence[Tensor]) -> Patch[Any]:
    made = _KINDS[kind.one_of(tuple(_KINDS))]
    names = [field.name for field in dataclasses.fields(made) if field.init]
    required = [
        field.name
        for field in dataclasses.fields(made)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]

    def tensor(item: JsonValue) -> Tensor:
        return tensors[item.whole(0, len(tensors) - 1)]

    leaves = {"tensor": tensor, "set": lambda item: frozenset(part.whole() for part in item.items())}
    values = {name: decoded(item, leaves) for name, item in given.fields(*required, optional=names).items()}
    try:
        patch = made(**values)
        problem = patch.problem(None)
    except (TypeError, ValueError, AttributeError) as error:
        problem = str(error)
    if problem is not None:
        raise given.error(f"{made.__name__}: {problem}")
    return patch
