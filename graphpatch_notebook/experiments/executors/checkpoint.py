"""The checkpoint file of a sweep: results are added chunk by chunk, so that the same call resumes after a stop.

The file has lines of JSON. The first identifies the sweep. Each other line holds the cells of a chunk, as
`[number, measurement]`, or `[number, null, error]` for a cell that failed. An incomplete last line was being written
when the process died; it is removed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.checks.sharding import is_distributed
from graphpatch_notebook.errors import ExperimentError, ExperimentWarning, cut
from graphpatch_notebook.experiments import metrics
from graphpatch_notebook.experiments.engine.cells import Cell, CellResult
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import Measurement
from graphpatch_notebook.experiments.results.arrays import metric_name, plain_label
from graphpatch_notebook.patchable_graph import PatchableGraph, captured, runs_where_the_model_is
from graphpatch_notebook.patches import kinds
from graphpatch_notebook.patches.kinds import Patch, declares
from graphpatch_notebook.sharded import processes_of
from graphpatch_notebook.torch_compat import is_fully_sharded
from graphpatch_notebook.values import children, tensor_bytes
from graphpatch_notebook.warning_places import warn_each_time
from graphpatch_notebook.whole_files import whole_file

# -- which sweep a file is of ------------------------------------------------------------------------------------------

_SIMPLE = {
    bool, int, float, complex, str, bytes, type(None), type(...), slice, range, torch.dtype, torch.device,
}  # fmt: skip
_SAMPLED = 1024


class Digester:
    """Computes digests of plain data, which are equal for equal data in all processes.

    Plain data are numbers, strings, slices, tensors, arrays, containers of these, C functions such as `torch.sum`, and
    the package's metrics and pure patches (`ZeroPatch`, `AddPatch`, `ReplacePatch`) with such fields. Code is not read:
    the digest of another object includes only its class (and the fields of a patch), and the key must represent the
    rest.

    Args:
        key: The `checkpoint_key` of the user.
    """

    def __init__(self, key: str) -> None:
        self._has_key = key != ""
        # Cells share large tensors. The object is kept alive, so that its id stays unique.
        self._known: dict[int, tuple[Any, str]] = {}

    def digest(self, value: Any, what: str) -> str:
        """Returns the digest of a value as 16 hexadecimal digits.

        Args:
            value: The value.
            what: The name of the value in messages.

        Raises:
            ExperimentError: The value contains an object that is not plain data, and there is no key.
        """
        return hashlib.sha256(repr(self._description(value, what)).encode()).hexdigest()[:16]

    def _description(self, value: Any, what: str) -> Any:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind in _SIMPLE:
            return name, repr(value)
        if _has_memory(value):
            if id(value) not in self._known:
                self._known[id(value)] = value, _memory_digest(value)
            return name, self._known[id(value)][1]
        if isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, (type, ModuleType, type(None))):
            return name, value.__module__, value.__qualname__
        if isinstance(value, (set, frozenset)):
            return name, sorted(repr(self._description(item, what)) for item in value)
        inside, is_dataclass = children(value), not isinstance(value, (list, tuple, Mapping))
        is_pure = isinstance(value, Patch) and declares(value, "is_pure") and kind.__module__ == kinds.__name__
        is_ours = is_pure or kind.__module__ == metrics.__name__
        if not self._has_key and (inside is None or (is_dataclass and not is_ours)):
            raise ExperimentError(
                f"checkpoint= does not see what a {kind.__name__} does ({what}): give a text to tell this sweep from "
                'others, and change it when that changes: checkpoint="sweep.jsonl", checkpoint_key="version 1"'
            )
        if inside is None or (is_dataclass and not is_ours and not isinstance(value, Patch)):
            return name
        # A probe keeps its values in a private field.
        public = [(key, part) for key, part in inside if not (is_dataclass and str(key).startswith("_"))]
        return name, [(repr(key), self._description(part, what)) for key, part in public]


@runs_where_the_model_is
def weights_digest(pg: PatchableGraph) -> str:
    """Returns a digest of the modes of a model, and of names, shapes, dtypes and some values of parameters and buffers.

    If the model is sharded, the digest covers all processes, and all of them must call this.

    Raises:
        GraphError: The model has no weights.
    """
    captured(pg).check_weights()
    found, module = {}, captured(pg).module
    each: Any
    for each in module.modules():
        if is_fully_sharded(each) and hasattr(each, "reshard"):  # not the older FSDP
            each.reshard()  # a call may leave weights whole
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        part: Any = tensor
        part = part.to_local() if is_distributed(part) else part
        plain = part.detach() if _has_memory(part) else None
        # A copy, as FSDP cannot free memory that was lent to NumPy.
        sample = None if plain is None else plain.reshape(-1)[:: max(1, -(-plain.numel() // _SAMPLED))].clone()
        found[name] = (str(tensor.dtype), tuple(tensor.shape), sample)
    modes = [each.training for each in module.modules()]
    own, processes = Digester("").digest([found, modes], "the weights"), processes_of(captured(pg).root)
    return own if processes is None else Digester("").digest(processes.gathered(own), "the weights")


def _has_memory(value: Any) -> bool:
    """Whether a value is a tensor or an array of plain numbers: not sparse, quantized, sharded or on `meta`."""
    if type(value) in (Tensor, torch.nn.Parameter):
        return value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized
    return isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject


def _memory_digest(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    memory = tensor_bytes(value) if is_tensor else np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(memory.data).hexdigest()}"


# -- the file ----------------------------------------------------------------------------------------------------------

_FORMAT = "graphpatch sweep"
_VERSION = 2


def identity(
    axes: Mapping[str, Sequence[Any]],
    key: str,
    metric: Callable[[Any], Any],
    baseline: Measurement,
    inputs: Inputs,
    pg: PatchableGraph,
    cells: Sequence[Cell],
) -> dict[str, Any]:
    """Returns JSON data that identifies a sweep: the axes, the exact baseline, and digests of the rest.

    Raises:
        ExperimentError: The sweep uses code, which only a key can identify, and there is no key.
    """
    digester = Digester(key)
    name = metric_name(metric)
    maps = [({str(path): patch for path, patch in cell.patches.items()}, f"the patches of {cell}") for cell in cells]
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "axes": {name: [_label(value) for value in values] for name, values in axes.items()},
        "key": key,
        "metric": [name, digester.digest(metric, f"the metric {name}")],
        "inputs": digester.digest((inputs.args, inputs.kwargs), "the inputs"),
        "weights": weights_digest(pg),
        "baseline": baseline.to_json(),
        "patches": [digester.digest(*patches) for patches in maps],
    }


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], cells: Sequence[Cell]) -> Iterator[str]:
    """Yields a message for each difference between the identities of this sweep and of the file."""
    if list(mine["axes"]) != list(theirs["axes"]):
        yield f"its axes are {list(theirs['axes'])}, not {list(mine['axes'])}"
        return
    for name, values in mine["axes"].items():
        if theirs["axes"][name] != values:
            before = theirs["axes"][name]
            yield f"the {len(before)} values of its axis {name!r} are {cut(repr(before))}, not {cut(repr(values))}"
    if mine["key"] != theirs["key"]:
        yield f"its checkpoint_key is {theirs['key']!r}, not {mine['key']!r}"
    if mine["metric"] != theirs["metric"]:
        other = "another " if mine["metric"][0] == theirs["metric"][0] else ""
        yield f"its metric is {other}{theirs['metric'][0]}, not {mine['metric'][0]}"
    texts = {"inputs": "inputs", "weights": "weights or modes (train or eval)"}
    yield from (f"its {text} are others" for what, text in texts.items() if mine[what] != theirs[what])
    if mine["baseline"] != theirs["baseline"]:
        before, now = (cut(repr(one["baseline"]["values"])) for one in (theirs, mine))
        yield f"without patches its metric is {before}, not {now}: other weights, inputs or machine"
    if mine["axes"] == theirs["axes"] and mine["patches"] != theirs["patches"]:
        pairs = zip(cells, mine["patches"], theirs["patches"], strict=True)
        differing = [cell for cell, one, other in pairs if one != other]
        yield f"its patches are others in {len(differing)} of {len(cells)} cells, the first being {differing[0]}"


def _label(value: Any) -> Any:
    label = plain_label(value)
    return label if not isinstance(label, float) or math.isfinite(label) else str(label)  # JSON has no NaN


class Checkpoint:
    """The checkpoint file of one sweep.

    Args:
        file: The name of the file; it need not exist.
        own: The `identity` of the sweep.
        cells: The cells of the sweep.

    Attributes:
        done: The results in the file, by the number of the cell, without those of failed cells.

    Raises:
        ExperimentError: The file holds other data, or cannot be written. It is not changed.
    """

    def __init__(self, file: str | os.PathLike[str], own: Mapping[str, Any], cells: Sequence[Cell]) -> None:
        self.file = Path(file).expanduser()
        self.done: dict[int, CellResult] = {}
        self._is_writable = True
        try:
            if not self.file.exists() or not self.file.stat().st_size:
                with whole_file(self.file) as written:
                    written.write_bytes(_line(own))
            else:
                self._take_up(own, cells)
            with self.file.open("ab"):
                pass
        except OSError as error:
            raise ExperimentError(f"checkpoint={str(self.file)!r} cannot be used: {error.strerror or error}") from error

    def _take_up(self, own: Mapping[str, Any], cells: Sequence[Cell]) -> None:
        with self.file.open("rb") as stream:
            header, sizes = stream.readline(), [stream.tell()]
            try:
                found = json.loads(header)
            except ValueError:
                found = None
            is_ours = isinstance(found, dict) and found.keys() == own.keys()
            if not is_ours or any(found[name] != own[name] for name in ("format", "version")):
                raise ExperimentError(
                    f"checkpoint={str(self.file)!r} was not written by a sweep, or not by this version; it is left "
                    "as it is: give another name"
                )
            if differences := list(_differences(own, found, cells)):
                raise ExperimentError(
                    f"checkpoint={str(self.file)!r} holds another sweep: {'; '.join(differences)}. Give another name, "
                    "or delete the file to start over"
                )
            for line in stream:
                if line.endswith(b"\n"):
                    sizes.append(stream.tell())
                    self.done |= {result.number: result for result in _results(line)}
        if sizes[-1] < self.file.stat().st_size:
            os.truncate(self.file, sizes[-1])

    def append(self, results: Sequence[CellResult]) -> None:
        """Writes the results of a chunk, and returns when they are on the disk.

        If that fails (for example, because the disk is full), a warning is issued and the sweep continues in memory.
        """
        if not self._is_writable or not results:
            return
        try:
            with self.file.open("ab") as stream:
                stream.write(_line({"cells": [_written(result) for result in results]}))
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            self._is_writable = False
            warn_each_time(
                f"checkpoint={str(self.file)!r} can no longer be written ({error.strerror or error}); the sweep "
                "continues, but further results are kept in memory only",
                ExperimentWarning,
            )


def _line(data: Any) -> bytes:
    return json.dumps(data, allow_nan=False).encode() + b"\n"


def _written(result: CellResult) -> list[Any]:
    if result.measurement is None:
        return [result.number, None, result.error]
    return [result.number, result.measurement.to_json(), *([True] if result.has_changed_state else [])]


def _results(line: bytes) -> list[CellResult]:
    """Returns the results in a line, without failed cells; an empty list if the line cannot be read."""
    try:
        cells = json.loads(line)["cells"]
        return [
            CellResult(int(number), Measurement.from_json(data), has_changed_state=state == [True])
            for number, data, *state in cells
            if data is not None
        ]
    except (KeyError, TypeError, ValueError):
        return []
