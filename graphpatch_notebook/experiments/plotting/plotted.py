"""What can be plotted: results are checked, and messages say how to get there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.extras import extra

if TYPE_CHECKING:
    from xarray import DataArray


def checked(result: Any, dimensions: int, instead: str) -> DataArray:
    """Returns a result that has this many dimensions and is made of real numbers.

    Args:
        result: What a user gave.
        dimensions: How many it must have.
        instead: What draws other ones, as the end of the message; may be empty.

    Raises:
        ExperimentError: It is something else; the message says how to get there.
    """
    extra("xarray", "a plot")
    from xarray import DataArray, Dataset

    if isinstance(result, Dataset):
        names = ", ".join(map(repr, result.data_vars))
        raise ExperimentError(f"a Dataset holds several results: give one of them, result[name]; it has {names}")
    if not isinstance(result, DataArray):
        example = f"xarray.DataArray(values, dims={['path', 'position', 'head'][:dimensions]})"
        raise ExperimentError(f"a result is an xarray.DataArray, not {type(result).__name__}; make one: {example}")
    if result.ndim != dimensions:
        raise ExperimentError(_dimension_message(result, dimensions, instead))
    if not result.size:
        raise ExperimentError(f"the result is empty: {form_of(result)}")
    if result.dtype.kind not in "biuf":
        raise ExperimentError(f"the result holds {result.dtype}, not real numbers; use result.astype(float)")
    return result


def _dimension_message(result: DataArray, dimensions: int, instead: str) -> str:
    count = "one dimension" if result.ndim == 1 else f"{result.ndim} dimensions"
    message = f"the result has {count}, {form_of(result)}; a plot of it needs {dimensions}"
    if result.dims == ("path",):
        return f"{message}; plot_scores(result) draws one number for each path"
    if result.ndim < dimensions:
        example = "result.expand_dims('path')" if result.ndim == 0 else f"result.expand_dims('{_new_name(result)}')"
        return f"{message}: {example}{instead}"
    sizes = sorted(result.sizes.items(), key=lambda item: item[1])[: result.ndim - dimensions]
    names = [str(name) for name, _ in sizes]
    first = result.coords[names[0]].values[0] if names[0] in result.coords else 0
    reduced = names[0] if len(names) == 1 else names
    pick = (
        f"result.sel({names[0]}={getattr(first, 'item', lambda: first)()!r})"
        if names[0] in result.coords
        else f"result.isel({names[0]}=0)"
    )
    return f"{message}: pick one with {pick}, or take result.mean({reduced!r}){instead}"


def _new_name(result: DataArray) -> str:
    return next(name for name in ("path", "position", "head") if name not in result.dims)


def form_of(result: DataArray) -> str:
    """Returns the names and sizes of the dimensions, in words."""
    return ", ".join(f"{name}: {size}" for name, size in result.sizes.items()) or "a single number"


def dimension(array: DataArray, name: str, argument: str) -> str:
    """Returns a name, if it is that of a dimension.

    Raises:
        ExperimentError: It is not.
    """
    if name not in array.dims:
        raise ExperimentError(f"{argument}={name!r} is no dimension of the result, which has {form_of(array)}")
    return name
