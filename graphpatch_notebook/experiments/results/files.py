"""Results in files: Parquet tables, which other tools can read, or JSON."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.whole_files import whole_file

if TYPE_CHECKING:
    from xarray import DataArray


_FORMAT = "graphpatch result"
_VERSION = 1
_KEY = b"graphpatch_notebook"
_SUFFIXES = (".parquet", ".json")


def save_result(result: DataArray, file: str | os.PathLike[str]) -> None:
    """Writes a result to a file. The file is replaced only when the new one is complete.

    A `.parquet` file contains a long table with a column for each dimension and one for the values, which has the name
    of the result (or `value`): `pandas.read_parquet(file)` reads it. A `.json` file is readable text. Both also contain
    dtype, coordinates, attributes and name.

    Args:
        result: The result of `pg.sweep`, `causal_trace` and others, or a part of it.
        file: The name of the file, ending in `.parquet` or `.json`.

    Raises:
        ExperimentError: The name has another suffix, the file cannot be written, or the result contains objects that
            are neither numbers nor texts.

    Example:
        >>> import tempfile, xarray
        >>> result = xarray.DataArray([[1.0, float("nan")]], {"position": [3, 4]}, ["path", "position"], name="loss")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_result(result, f"{folder}/loss.parquet")
        ...     load_result(f"{folder}/loss.parquet").identical(result)
        True
    """
    from_xarray = extra("xarray", "a result").DataArray
    if not isinstance(result, from_xarray):
        raise ExperimentError(f"expected an xarray.DataArray, not {type(result).__name__}")
    target = _checked(file)
    document = _document(result)
    values = encoded_array(np.asarray(result.values), "the result")  # checks what neither format can contain
    if target.suffix.lower() == ".json":
        data = json.dumps({**document, "data": values}, allow_nan=False, indent=1).encode()
    else:
        data = _parquet(result, document)
    try:
        with whole_file(target) as written:
            written.write_bytes(data)
    except OSError as error:
        raise ExperimentError(f"{str(target)!r} cannot be written: {error.strerror or error}") from error


def load_result(file: str | os.PathLike[str]) -> DataArray:
    """Returns the result that `save_result` wrote. Values, coordinates and attributes have the same bits.

    Args:
        file: The name of the file.

    Raises:
        ExperimentError: The file cannot be read, was not written by `save_result`, or its rows were changed.

    Example:
        >>> import tempfile, xarray
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_result(xarray.DataArray([1.0, 2.0], dims=["layer"]), f"{folder}/effect.json")
        ...     load_result(f"{folder}/effect.json").values.tolist()
        [1.0, 2.0]
    """
    array = extra("xarray", "a result").DataArray
    source = _checked(file)
    try:
        data = source.read_bytes()
    except OSError as error:
        raise ExperimentError(f"{str(source)!r} cannot be read: {error.strerror or error}") from error
    try:
        document, values = _read_json(data) if source.suffix.lower() == ".json" else _read_parquet(data)
        coords = {
            decoded(name): (decoded(dims), decoded_array(items), decoded(attrs))
            for name, dims, items, attrs in document["coords"]
        }
        result: DataArray = array(values, coords, decoded(document["dims"]), decoded(document["name"]))
        result.attrs = decoded(document["attrs"])
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ExperimentError):
            raise ExperimentError(f"{str(source)!r}: {error}") from error
        raise ExperimentError(f"{str(source)!r} was not written by save_result, or is damaged: {error}") from error
    return result


def _checked(file: str | os.PathLike[str]) -> Path:
    path = Path(file).expanduser()
    if path.suffix.lower() not in _SUFFIXES:
        raise ExperimentError(f"{str(path)!r}: the name of a result file must end in {' or '.join(_SUFFIXES)}")
    return path


def _document(result: DataArray) -> dict[str, Any]:
    """Returns a result without its values."""
    coords = []
    for name, coord in result.coords.items():
        if getattr(coord.to_index() if coord.dims == (name,) else None, "nlevels", 1) > 1:
            raise ExperimentError(f"coordinate {name!r} has several levels; call reset_index({name!r}) first")
        where = f"coordinate {name!r}"
        items = encoded_array(np.asarray(coord.values), where)
        coords.append([encoded(name, where), encoded(list(coord.dims), where), items, encoded(coord.attrs, where)])
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "name": encoded(result.name, "the name"),
        "dims": encoded(list(result.dims), "dims"),
        "coords": coords,
        "attrs": encoded(dict(result.attrs), "attrs"),
    }


def _read_json(data: bytes) -> tuple[Any, np.ndarray[Any, Any]]:
    document = json.loads(data)
    _check_format(document)
    return document, decoded_array(document["data"])


def _check_format(document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError(f'it does not contain "format": "{_FORMAT}"')
    if document["version"] != _VERSION:
        raise ExperimentError(f"it has format version {document['version']!r}, but this package reads {_VERSION}")


# -- Parquet -----------------------------------------------------------------------------------------------------------


def _parquet(result: DataArray, document: dict[str, Any]) -> bytes:
    pyarrow = extra("pyarrow", "a .parquet file", ", or save as .json")
    columns = [(str(dim), _column(result, axis)) for axis, dim in enumerate(result.dims)]
    taken = {name for name, _ in columns}
    name = str(result.name) if result.name is not None and str(result.name) not in taken else "value"
    while name in taken:
        name += "_"
    columns.append((name, result.values.ravel()))
    document = {**document, "dtype": result.dtype.str, "shape": list(result.shape)}
    table = pyarrow.table([pyarrow.array(items) for _, items in columns], names=[name for name, _ in columns])
    table = table.replace_schema_metadata({_KEY: json.dumps(document, allow_nan=False)})
    stream = io.BytesIO()
    extra("pyarrow.parquet", "a .parquet file").write_table(table, stream)
    return stream.getvalue()


def _column(result: DataArray, axis: int) -> np.ndarray[Any, Any]:
    """Returns the coordinate of each value along one dimension as a table column of one type."""
    dim, sizes = result.dims[axis], result.shape
    labels = np.asarray(result.coords[dim].values) if dim in result.coords else np.arange(sizes[axis])
    if labels.dtype.kind in "UO":
        labels = np.array(list(map(str, labels.tolist())), dtype=object)
    before, after = int(np.prod(sizes[:axis])), int(np.prod(sizes[axis + 1 :]))
    return np.tile(np.repeat(labels, after), before)


def _read_parquet(data: bytes) -> tuple[Any, np.ndarray[Any, Any]]:
    table = extra("pyarrow.parquet", "a .parquet file").read_table(io.BytesIO(data))
    document = json.loads((table.schema.metadata or {})[_KEY])
    _check_format(document)
    values = table.column(table.num_columns - 1).to_numpy().astype(np.dtype(document["dtype"]), copy=False)
    result = values.reshape(document["shape"])
    _check_rows(table, document)
    return document, result


def _check_rows(table: Any, document: Any) -> None:
    from xarray import DataArray

    coords = {decoded(name): (decoded(dims), decoded_array(items)) for name, dims, items, _ in document["coords"]}
    frame = DataArray(np.zeros(document["shape"]), coords, decoded(document["dims"]))
    for axis, dim in enumerate(frame.dims):
        expected, found = _column(frame, axis), table.column(axis).to_numpy()
        if [*map(repr, expected.tolist())] != [*map(repr, found.tolist())]:
            raise ExperimentError(f"the rows were changed after save_result wrote them: column {dim!r} differs")


KINDS = "biufUO"  # dtype kinds that can be written: booleans, numbers, texts, and objects that are one of these


def encoded(value: Any, where: str) -> Any:
    """Returns a value as JSON: `None`, a number, a text, an array of these, or a list, tuple or dict of such values.

    Example:
        >>> encoded({"a": (1, float("nan"))}, "attrs")
        {'a': {'$tuple': [1, {'$float': 'nan'}]}}
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [encoded(item, where) for item in value]
    if kind is tuple:
        return {"$tuple": [encoded(item, where) for item in value]}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encoded(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {"$dict": [[encoded(key, where), encoded(item, where)] for key, item in value.items()]}
    if isinstance(value, np.generic):
        return {"$scalar": encoded_array(np.asarray(value), where)}
    if kind is np.ndarray:
        return {"$array": encoded_array(value, where)}
    raise ExperimentError(
        f"{where} holds an object of {kind.__module__}.{kind.__qualname__}, which cannot be written: put numbers, "
        "texts, lists or dicts there, or delete it"
    )


def decoded(data: Any) -> Any:
    """Returns the value that `encoded` converted."""
    if isinstance(data, list):
        return [decoded(item) for item in data]
    if not isinstance(data, dict):
        return data
    tag = next(iter(data), "")
    if not tag.startswith("$"):
        return {key: decoded(item) for key, item in data.items()}
    inside = data[tag]
    if tag == "$float":
        return float(inside)
    if tag == "$tuple":
        return tuple(map(decoded, inside))
    if tag == "$dict":
        return {decoded(key): decoded(item) for key, item in inside}
    array = decoded_array(inside)
    return array[()] if tag == "$scalar" else array


def encoded_array(array: np.ndarray[Any, Any], where: str) -> dict[str, Any]:
    """Returns an array as JSON; raises an `ExperimentError` if the items are neither numbers nor texts."""
    if array.dtype.kind not in KINDS or array.dtype == np.longdouble:  # Python's floats are less precise
        raise ExperimentError(f"{where} has dtype {array.dtype}, which cannot be written; convert it with .astype(str)")
    items = [encoded(item, where) for item in array.ravel().tolist()]
    return {"dtype": array.dtype.str, "shape": list(array.shape), "values": items}


def decoded_array(data: Any) -> np.ndarray[Any, Any]:
    """Returns the array that `encoded_array` converted."""
    items = decoded(data["values"])
    array: np.ndarray[Any, Any] = np.empty(len(items), dtype=np.dtype(data["dtype"]))
    for number, item in enumerate(items):
        array[number] = item  # one by one: NumPy would convert lists and tuples
    shaped: np.ndarray[Any, Any] = array.reshape(data["shape"])
    return shaped
