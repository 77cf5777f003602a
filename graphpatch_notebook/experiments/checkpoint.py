"""The file in which a sweep keeps what is done, chunk by chunk, so that the same call goes on where it was stopped.

Lines of JSON: the first says which sweep it is, each other one holds the cells of a chunk, as `[number, measurement]`,
or `[number, null, error]` for a cell that failed. A last line that is not whole was being written when the process
died; it is cut off.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.nn import Module

from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.experiments.cells import Cell, CellResult
from graphpatch_notebook.experiments.digests import Digester, weights_digest
from graphpatch_notebook.experiments.inputs import Inputs
from graphpatch_notebook.experiments.labels import metric_name, plain_label
from graphpatch_notebook.experiments.measurements import Measurement
from graphpatch_notebook.warning_places import warn_each_time
from graphpatch_notebook.whole_files import whole_file

_FORMAT = "graphpatch sweep"
_VERSION = 2


@dataclass(frozen=True)
class Identity:
    """What a sweep is: files of another one are refused.

    Attributes:
        axes: The values of each axis.
        key: What the user gave to tell what digests do not see: see `Digester`.
        metric: The name of the metric, and a digest of it.
        baseline: What the metric gives without patches, bit for bit.
        inputs: A digest of what the model runs on.
        weights: A digest of the weights of the model.
        patches: A digest of the patch map of each cell.
    """

    axes: dict[str, list[Any]]
    key: str
    metric: list[str]
    baseline: Any
    inputs: str
    weights: str
    patches: list[str]

    @classmethod
    def of(
        cls,
        axes: Mapping[str, Sequence[Any]],
        key: str,
        metric: Callable[[Any], Any],
        baseline: Measurement,
        inputs: Inputs,
        module: Module,
        cells: Sequence[Cell],
    ) -> Identity:
        """Returns the identity of a sweep.

        Raises:
            ExperimentError: There is code in it that only a key can tell, and none was given.
        """
        digester = Digester(key)
        name = metric_name(metric)
        return cls(
            {name: [_label(value) for value in values] for name, values in axes.items()},
            key,
            [name, digester.digest(metric, f"the metric {name}")],
            baseline.to_json(),
            digester.digest((inputs.args, inputs.kwargs), "the inputs"),
            weights_digest(module),
            [
                digester.digest({str(path): patch for path, patch in cell.patches.items()}, f"the patches of {cell}")
                for cell in cells
            ],
        )

    def differences(self, other: Identity, cells: Sequence[Cell]) -> Iterator[str]:
        """Yields, in words, what is otherwise in `other`, which a file holds."""
        if list(self.axes) != list(other.axes):
            yield f"its axes are {list(other.axes)}, not {list(self.axes)}"
            return
        for name, values in self.axes.items():
            if (theirs := other.axes[name]) != values:
                yield f"the values of its axis {name!r} are {_shown(theirs)}, not {_shown(values)}"
        if self.key != other.key:
            yield f"its checkpoint_key is {other.key!r}, not {self.key!r}"
        if self.metric != other.metric:
            is_named = self.metric[0] != other.metric[0]
            yield f"its metric is {other.metric[0] if is_named else f'another {other.metric[0]}'}, not {self.metric[0]}"
        yield from (f"its {what} are others" for what in ("inputs", "weights") if vars(self)[what] != vars(other)[what])
        if self.baseline != other.baseline:
            yield (
                f"without patches its metric is {_shown(other.baseline['values'])}, not "
                f"{_shown(self.baseline['values'])}: other weights, inputs or machine"
            )
        if self.axes == other.axes and self.patches != other.patches:
            pairs = zip(cells, self.patches, other.patches, strict=True)
            differing = [cell for cell, mine, theirs in pairs if mine != theirs]
            yield f"its patches are others in {len(differing)} of {len(cells)} cells, the first being {differing[0]}"


def _label(value: Any) -> Any:
    label = plain_label(value)
    return label if not isinstance(label, float) or math.isfinite(label) else str(label)  # JSON has no NaN


def _shown(values: Any) -> str:
    text = repr(values)
    return text if len(text) <= 100 else f"{text[:80]}... ({len(values)})"


class Checkpoint:
    """A file that is written by one sweep.

    Args:
        file: Its name; it need not exist.
        identity: Of the sweep.
        cells: The cells of the sweep.

    Attributes:
        done: What the file holds: results of cells, by number, those that failed not among them.

    Raises:
        ExperimentError: The file holds another sweep, or something else, or cannot be written: it is left as it is.
    """

    def __init__(self, file: str | os.PathLike[str], identity: Identity, cells: Sequence[Cell]) -> None:
        self.file = Path(file).expanduser()
        self.done: dict[int, CellResult] = {}
        self._is_writable = True
        try:
            if not self.file.exists() or not self.file.stat().st_size:
                with whole_file(self.file) as written:
                    written.write_bytes(_line({"format": _FORMAT, "version": _VERSION, **asdict(identity)}))
            else:
                self._take_up(identity, cells)
            with self.file.open("ab"):
                pass
        except OSError as error:
            raise ExperimentError(f"checkpoint={str(self.file)!r} cannot be used: {error.strerror or error}") from error

    def _take_up(self, identity: Identity, cells: Sequence[Cell]) -> None:
        with self.file.open("rb") as stream:
            header, sizes = stream.readline(), [stream.tell()]
            found = _identity(header)
            if found is None:
                raise ExperimentError(
                    f"checkpoint={str(self.file)!r} is a file that no sweep has written, or none of this version; it "
                    "is left as it is: give another name"
                )
            if differences := list(identity.differences(found, cells)):
                raise ExperimentError(
                    f"checkpoint={str(self.file)!r} holds another sweep: {'; '.join(differences)}. Give another name, "
                    "or delete the file to begin anew"
                )
            for line in stream:
                if line.endswith(b"\n"):
                    sizes.append(stream.tell())
                    self.done |= {result.number: result for result in _results(line)}
        if sizes[-1] < self.file.stat().st_size:
            os.truncate(self.file, sizes[-1])

    def append(self, results: Sequence[CellResult]) -> None:
        """Writes the results of a chunk, and returns when they are on the disk.

        Where that fails (a full disk) the sweep goes on in memory, with a warning: nothing that is done gets lost.
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
                f"checkpoint={str(self.file)!r} cannot be written any more ({error.strerror or error}); the sweep goes "
                "on, but what comes now is in memory only",
                ExperimentWarning,
            )


def _line(data: Any) -> bytes:
    return json.dumps(data, allow_nan=False).encode() + b"\n"


def _identity(line: bytes) -> Identity | None:
    try:
        data = json.loads(line)
        if data.pop("format") == _FORMAT and data.pop("version") == _VERSION:
            return Identity(**data)
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    return None


def _written(result: CellResult) -> list[Any]:
    if result.measurement is None:
        return [result.number, None, result.error]
    return [result.number, result.measurement.to_json()]


def _results(line: bytes) -> list[CellResult]:
    """Returns the results in a line, without cells that failed; none for a line that cannot be read."""
    try:
        cells = json.loads(line)["cells"]
        return [CellResult(int(number), Measurement.from_json(data)) for number, data, *_ in cells if data is not None]
    except (KeyError, TypeError, ValueError):
        return []
