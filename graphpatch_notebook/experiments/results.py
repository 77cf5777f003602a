"""Results as labeled arrays, the `xarray.DataArray` that a sweep returns, and in NetCDF files."""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from torch import Tensor

from graphpatch_notebook.components.names import ComponentName, parse_name
from graphpatch_notebook.errors import ExperimentError, extra, reading, warn_each_time, whole_file
from graphpatch_notebook.experiments.engine.cells import Cell, CellResult, Measurement
from graphpatch_notebook.paths import is_component_name

Scores: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
Labels: TypeAlias = "list[tuple[str, tuple[Any, ...]]]"
"""The labels of each dimension of an array."""

_COMPONENTS = "components"
_JSON = "graphpatch_json"
"""The attribute with all other attributes as JSON, since those of NetCDF are numbers and texts only."""

if TYPE_CHECKING:
    from xarray import DataArray


def metric_dims(baseline: Measurement, axes: Mapping[str, Any]) -> list[str]:
    """Returns the names of the dimensions that the metric adds to the result."""
    dims = ["metric"] if baseline.names is not None else [f"metric_{n}" for n in range(baseline.values.ndim)]
    if taken := [name for name in dims if name in axes]:
        raise ExperimentError(
            f"the metric returns several numbers, along the dimension {taken[0]!r}; give the axis another name"
        )
    return dims


def data_array(
    axes: Mapping[str, Sequence[Any]],
    cells: Sequence[Cell],
    results: Mapping[int, CellResult],
    baseline: Measurement,
    metric: Callable[[Any], Any],
    remarks: Sequence[str],
    more_attrs: Mapping[str, Any],
) -> DataArray:
    """Returns the results as an array, with NaN for cells that failed or did not run; a `ResultArray`.

    An axis of component names becomes several, as `with_component_dims` has it; `layer` keeps the names.

    Its attributes: `baseline`, the metric without patches; `metrics`, the names of several metrics; `errors`, a list of
    dicts with `cell` (the labels of a cell that failed) and `error`; `remarks`, a list of texts.

    Raises:
        ExperimentError: All cells failed.
    """
    data = np.full([len(cells), *baseline.values.shape], np.nan)
    errors, failed = [], []
    for cell in cells:
        result = results.get(cell.number)
        if result is not None and result.measurement is not None:
            data[cell.number] = result.measurement.values
        elif result is not None:
            labels = {name: plain_label(value) for name, value in cell.labels.items()}
            errors.append({"cell": labels, "error": result.error})
            failed.append(f"{cell}: {result.error}")
    if failed and len(failed) == len(cells):
        raise ExperimentError(f"all {len(cells)} cells failed, the first one: {failed[0]}")
    if failed:
        warn_each_time(
            f"{len(failed)} of {len(cells)} cells failed and are NaN, the first one: {failed[0]}; all errors are in "
            'attrs["errors"]',
            "experiment",
        )
    plain = [(name, tuple(map(plain_label, values))) for name, values in axes.items()]
    attrs: dict[str, Any] = {
        "baseline": baseline.values.tolist(),
        "remarks": list(remarks),
        "errors": errors,
        **more_attrs,
    }
    if baseline.names is not None:
        plain.append(("metric", baseline.names))
        attrs["metrics"] = list(baseline.names)  # kept when one of them is selected
    data = data.reshape([*(len(values) for values in axes.values()), *baseline.values.shape])
    data, plain, components = with_component_dims(data, plain)
    coordinates = {name: _coordinate(name, values) for name, values in plain}
    dims = [*(name for name, _ in plain if name != "metric"), *metric_dims(baseline, axes)]

    def made() -> DataArray:
        from xarray import DataArray

        array = DataArray(data, coordinates, dims, name=metric_name(metric), attrs=attrs)
        keep_components(array, components)
        return array

    return cast("DataArray", ResultArray(made))


class ResultArray:
    """An `xarray.DataArray` that is made when something of it is first asked for.

    To import xarray, and pandas with it, takes longer than many a sweep, and 80 MB. All that a `DataArray` has is here,
    and `isinstance` takes it for one; what is computed with it, copied or pickled is one.
    """

    __slots__ = ("__weakref__", "_array")

    def __init__(self, make: Callable[[], DataArray]) -> None:
        object.__setattr__(self, "_array", functools.cache(make))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._array(), name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._array().__reduce_ex__(protocol)

    def __dir__(self) -> list[str]:
        return dir(self._array())

    @property  # type: ignore[misc]  # for `isinstance`
    def __class__(self) -> Any:
        return type(self._array())


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: ResultArray, *args: Any) -> Any:
        return getattr(self._array(), name)(*args)

    return method


_BINARY = "add sub mul truediv floordiv mod pow and or xor".split()
for _name in (
    *(f"{prefix}{name}" for name in _BINARY for prefix in ("", "r", "i")),
    *"lt le gt ge eq ne matmul rmatmul neg pos abs invert".split(),
    *"len iter contains getitem setitem delitem bool int float complex".split(),
    *"array array_ufunc array_wrap repr str format copy deepcopy".split(),
):
    setattr(ResultArray, f"__{_name}__", _forwarded(f"__{_name}__"))
ResultArray.__hash__ = None  # type: ignore[assignment]  # as that of a `DataArray`


@dataclass(frozen=True)
class ComponentGrid:
    """The dimensions in component names.

    Attributes:
        axes: The labels of each dimension.
        order: The positions of the names in the order of these dimensions.
        components: The names with `*` for the layer, and for the head or expert.
    """

    axes: dict[str, tuple[Any, ...]]
    order: list[int]
    components: tuple[str, ...] = ()


def keep_components(result: DataArray, components: Sequence[str]) -> None:
    """Writes which components a result is of into its coordinate `layer`: parts and means of the result keep that.

    `components` are those that `with_component_dims` returned with its dimensions.
    """
    if components and "layer" in result.coords:
        result.coords["layer"].attrs[_COMPONENTS] = list(components)


def component_of(result: DataArray, label: Any = None) -> str | None:
    """Returns the component that a result is of, with `*` in place of numbers: `layers[*].attn.heads[*].z`.

    `label` is that along the dimension `component`, if there is one. Returns `None` if the component is not known, or
    if there are several.
    """
    known = result.coords["layer"].attrs.get(_COMPONENTS, ()) if "layer" in result.coords else ()
    found = [name for name in known if label is None or _common(parse_name(name)) == label]
    return found[0] if len(found) == 1 else None


def with_component_dims(data: Scores, labels: Labels) -> tuple[Scores, Labels, tuple[str, ...]]:
    """Returns an array with dimensions for layers and heads in place of a dimension `path` (`sender`) of components.

    These are what differs in the names: `component` (`"attn_out"`, `"mlp_out"`), `layer`, and `head` or `expert`. The
    dimension stays if the names are not all combinations of these, or if there is another dimension of that name. Also
    returns the components, for `keep_components`.
    """
    for position, (name, values) in enumerate(labels):
        grid = component_grid(values) if name in ("path", "sender") else None
        if grid is not None and not set(grid.axes) & {other for other, _ in labels}:
            sizes = [len(numbers) for numbers in grid.axes.values()]
            data = np.take(data, grid.order, position)
            data = data.reshape([*data.shape[:position], *sizes, *data.shape[position + 1 :]])
            return data, [*labels[:position], *grid.axes.items(), *labels[position + 1 :]], grid.components
    return data, labels, ()


def component_grid(labels: Sequence[Any]) -> ComponentGrid | None:
    """Returns the dimensions in the labels of an axis, if they are component names in all combinations.

    Example:
        >>> names = ["layers[0].attn_out", "layers[0].mlp_out", "layers[1].attn_out", "layers[1].mlp_out"]
        >>> grid = component_grid(names)
        >>> grid.axes, grid.order
        ({'component': ('attn_out', 'mlp_out'), 'layer': (0, 1)}, [0, 2, 1, 3])
        >>> grid.components
        ('layers[*].attn_out', 'layers[*].mlp_out')
    """
    if not all(isinstance(label, str) and is_component_name(label) for label in labels):
        return None
    names = [parse_name(label) for label in labels]
    keys = [_component_key(name) for name in names]
    if any(key.keys() != keys[0].keys() for key in keys):
        return None
    if any(not isinstance(number, (int, str)) for key in keys for number in key.values()):
        return None  # a name of several layers or heads, such as `layers[*].mlp_out`
    axes = {axis: tuple(dict.fromkeys(key[axis] for key in keys)) for axis in keys[0]}
    if len(axes["component"]) == 1 and len(axes) > 1:
        del axes["component"]
    places = {tuple(key[axis] for axis in axes): number for number, key in enumerate(keys)}
    cells = list(itertools.product(*axes.values()))
    is_grid = len(cells) == len(labels) and all(cell in places for cell in cells)
    every = slice(None)
    patterns = dict.fromkeys(
        str(replace(name, layers=every, members=None if name.axis is None else every))
        for name in names
        if name.layers is not None
    )
    return ComponentGrid(axes, [places[cell] for cell in cells], tuple(patterns)) if is_grid else None


def _component_key(name: ComponentName) -> dict[str, Any]:
    """Returns what tells a component from others, by dimension."""
    numbers = {"layer": name.layers, name.axis or "": name.members}
    return {"component": _common(name), **{axis: number for axis, number in numbers.items() if number is not None}}


def _common(name: ComponentName) -> str:
    """Returns what the names of a component have in common in all layers."""
    return str(replace(name, layers=None, members=None if name.axis is None else slice(None)))


def plain_label(value: Any) -> bool | int | float | str:
    """Converts the value of an axis to a bool, int, float or text, as coordinates and files need.

    Example:
        >>> plain_label(np.int64(3)), plain_label("wte.output"), plain_label(slice(0, 2))
        (3, 'wte.output', 'slice(0, 2, None)')
    """
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and value.ndim == 0:
        value = value.item()
    return value if type(value) in (bool, int, float, str) else str(value)


def _coordinate(name: str, values: Sequence[Any]) -> tuple[str, np.ndarray[Any, Any]]:
    """Returns the values of an axis as a coordinate for `xarray`; mixed values keep their types."""
    plain = [plain_label(value) for value in values]
    is_mixed = len({type(value) for value in plain}) > 1
    return (name, np.array(plain, dtype=object) if is_mixed else np.array(plain))


def metric_name(metric: Callable[[Any], Any]) -> str:
    """Returns the name of a metric: its attribute `name`, or the name of the function or class.

    Example:
        >>> metric_name(max), metric_name(functools.partial(max, 1))
        ('max', 'max')
    """
    while isinstance(metric, functools.partial):
        metric = metric.func
    name = getattr(metric, "name", None)
    return name if isinstance(name, str) else getattr(metric, "__name__", type(metric).__name__)


# -- files -------------------------------------------------------------------------------------------------------------


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
            # On a full disk, this raises an error. HDF5 would raise one too, and end the process some time later.
            temporary.write_bytes(bytes(4 * written.to_dataset(name="_").nbytes + 2**16))
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
    with reading(repr(str(path)), ExperimentError, ". Only what save_result wrote can be read"):
        result: DataArray = xarray.load_dataarray(path, engine="h5netcdf")
        kept = json.loads(result.attrs.pop(_JSON))
        for name, items in kept["mixed"].items():
            mixed = np.empty(len(items), dtype=object)
            mixed[:] = items
            result = result.assign_coords({name: (result.coords[name].dims, mixed)})
        for name, attrs in kept["coords"].items():
            result.coords[name].attrs = attrs
        result.attrs = kept["attrs"]
    return result


def _checked(file: str | os.PathLike[str]) -> Path:
    path = Path(file).expanduser()
    if path.suffix.lower() != ".nc":
        raise ExperimentError(f"{str(path)!r}: the name of a result file ends in .nc")
    return path
