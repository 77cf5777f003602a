"""Scores of nodes and graphs, such as the results of a sweep or an attribution, which color the rows of the tree."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.inspection.node_path import NodePath, location_of
from graphpatch_notebook.notebook.browser.skeleton import Skeleton

_LARGEST = 3.4028234663852886e38  # of a float32


def scores_by_path(scores: Mapping[str | NodePath, Any] | Any, skeleton: Skeleton) -> dict[str, float]:
    """Returns scores by the canonical paths of their rows: `Browser.set_scores`, which names the errors."""
    if _is_data_array(scores):
        scores = _mapping_of(scores)
    if not isinstance(scores, Mapping):
        raise TypeError(f"scores must be a dict from paths to numbers, not {type(scores).__name__}: {{'PATH': 0.5}}")
    found: dict[str, float] = {}
    unknown: list[str] = []
    for path, value in scores.items():
        try:
            row = skeleton.row(_text(path, skeleton))
        except UnknownPathError as problem:
            unknown.append(str(problem))
            continue
        number = _number(value, str(path))
        if not math.isnan(number):
            found[skeleton.path(row)] = number
    if unknown:
        more = f"; and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise UnknownPathError("; ".join(unknown[:3]) + more)
    return found


def packed_scores(scores: Mapping[str, float], skeleton: Skeleton) -> bytes:
    """Returns a little-endian float32 for each row, NaN without a score. Ignores paths without a row."""
    column = [math.nan] * len(skeleton)
    for path, number in scores.items():
        if (row := skeleton.find(path)) is not None:
            column[row] = number
    return struct.pack(f"<{len(column)}f", *column)


def _is_data_array(scores: Any) -> bool:
    # By its attributes, since xarray may not be installed, and importing it is slow.
    return all(hasattr(scores, name) for name in ("dims", "coords", "values", "attrs")) and not callable(scores.values)


def _mapping_of(array: Any) -> dict[Any, Any]:
    """Returns an `xarray.DataArray` of scores as a dict by path."""
    dims = tuple(array.dims)
    others = [dim for dim in dims if dim != "path"]
    if "path" not in dims and len(dims) == 1:
        raise ValueError(
            f"these scores are by {dims[0]!r}, not by 'path'; if these are paths: .rename({{{dims[0]!r}: 'path'}})"
        )
    if others:
        shown = ", ".join(map(repr, others))
        raise ValueError(
            f"these scores have dimensions {dims}, and a row has one number only: reduce the others, say by "
            f".sum({shown if len(others) == 1 else f'[{shown}]'}) or .sel({others[0]}=...)"
        )
    if "path" not in array.coords:
        raise ValueError("these scores have no dimension 'path', with the paths as its coordinate")
    return dict(zip(array.coords["path"].values.tolist(), array.values.tolist(), strict=True))


def _text(path: Any, skeleton: Skeleton) -> str:
    if isinstance(path, NodePath):
        if location_of(path).root is not skeleton.nodes.root:
            raise UnknownPathError(f"the NodePath {str(path)!r} belongs to another PatchableGraph")
        return location_of(path).path
    if not isinstance(path, str):
        raise TypeError(f"scores are by path: a text or a NodePath, not {path!r}")
    return path


def _number(value: Any, path: str) -> float:
    if isinstance(value, (str, bytes, complex)):
        raise TypeError(f"the score of {path!r} is {value!r}: scores are numbers")
    try:
        number = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = getattr(value, "shape", None)
        what = type(value).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
        raise TypeError(f"the score of {path!r} is a {what}, not a number: {error}") from None
    if math.isinf(number) or abs(number) > _LARGEST:
        raise ValueError(f"the score of {path!r} is {number}: scores must be finite, or NaN for no score")
    return number
