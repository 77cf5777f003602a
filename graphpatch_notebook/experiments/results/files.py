"""Results in NetCDF files, which xarray writes and many tools read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.whole_files import whole_file

if TYPE_CHECKING:
    from xarray import DataArray

_JSON = "graphpatch_json"
"""The attribute with all other attributes as JSON, since those of NetCDF are numbers and texts only."""


def save_result(result: DataArray, file: str | os.PathLike[str]) -> None:
    """Writes a result to a NetCDF file, with its coordinates and attributes. An existing file is replaced as a whole.

    `xarray.open_dataarray` and other tools read it, too: they see the attributes as one text of JSON.

    Args:
        result: The result of `pg.sweep`, `causal_trace` and others, or a part of it.
        file: The name of the file, ending in `.nc`.

    Raises:
        ExperimentError: The name has another suffix, or the result contains objects that are neither numbers nor texts.
        OSError: The file cannot be written.

    Example:
        >>> import tempfile, xarray
        >>> result = xarray.DataArray([[1.0, float("nan")]], {"position": [3, 4]}, ["path", "position"], name="loss")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_result(result, f"{folder}/loss.nc")
        ...     load_result(f"{folder}/loss.nc").identical(result)
        True
    """
    if not isinstance(result, extra("xarray", "a result").DataArray):
        raise ExperimentError(f"expected an xarray.DataArray, not {type(result).__name__}")
    extra("h5netcdf", "a result file")
    path = _checked(file)
    try:
        kept: dict[str, Any] = {"attrs": result.attrs, "coords": {}, "mixed": {}}
        written = result.drop_attrs()
        for name, coord in result.coords.items():
            kept["coords"][name] = coord.attrs
            if coord.dtype == object:  # such as [0, "all"]
                kept["mixed"][name] = coord.values.tolist()
                written = written.assign_coords({name: (coord.dims, np.array(coord.values, dtype=str))})
        written.attrs[_JSON] = json.dumps(kept, default=lambda value: value.tolist())  # of numpy
        with whole_file(path) as temporary:
            written.to_netcdf(temporary, engine="h5netcdf")
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise ExperimentError(f"the result cannot be written to {str(path)!r}: {error}") from error


def load_result(file: str | os.PathLike[str]) -> DataArray:
    """Returns the result that `save_result` wrote: values, coordinates and attributes (tuples in these are lists).

    Args:
        file: The name of the file.

    Raises:
        ExperimentError: The file was not written by `save_result`, or is damaged.
        OSError: The file cannot be read.

    Example:
        >>> import tempfile, xarray
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_result(xarray.DataArray([1.0, 2.0], dims=["layer"]), f"{folder}/effect.nc")
        ...     load_result(f"{folder}/effect.nc").values.tolist()
        [1.0, 2.0]
    """
    xarray = extra("xarray", "a result")
    extra("h5netcdf", "a result file")
    path = _checked(file)
    with path.open("rb"):  # an error that names the file, and not what reads it
        pass
    try:
        result: DataArray = xarray.load_dataarray(path, engine="h5netcdf")
        kept = json.loads(result.attrs.pop(_JSON))
        for name, items in kept["mixed"].items():
            mixed = np.empty(len(items), dtype=object)
            mixed[:] = items
            result = result.assign_coords({name: (result.coords[name].dims, mixed)})
        for name, attrs in kept["coords"].items():
            result.coords[name].attrs = attrs
        result.attrs = kept["attrs"]
    except (OSError, KeyError, ValueError) as error:
        raise ExperimentError(f"{str(path)!r} was not written by save_result, or is damaged: {error}") from error
    return result


def _checked(file: str | os.PathLike[str]) -> Path:
    path = Path(file).expanduser()
    if path.suffix.lower() != ".nc":
        raise ExperimentError(f"{str(path)!r}: the name of a result file ends in .nc")
    return path
