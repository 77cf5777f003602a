"""The checkpoint of a sweep: a folder with a file for each chunk of results. The same call resumes after a stop.

sweep.json      identifies the sweep
000000.json     the results of some cells by number: a file is complete, or does not exist
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from graphpatch_notebook.checks.digests import digest
from graphpatch_notebook.checks.sharding import is_distributed, processes_of
from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.experiments.engine.cells import Cell, CellResult, patches_in
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import Measurement
from graphpatch_notebook.experiments.results.arrays import metric_name, plain_label
from graphpatch_notebook.patchable_graph import PatchableGraph, captured, runs_where_the_model_is
from graphpatch_notebook.patches.kinds import declares
from graphpatch_notebook.torch_compat import is_fully_sharded
from graphpatch_notebook.warning_places import warn_each_time
from graphpatch_notebook.whole_files import whole_file

_SAMPLED = 1024
_SWEEP = "sweep.json"


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
        sample = None
        if type(part.data) is Tensor and not part.is_quantized:
            # A copy, as FSDP cannot free memory that was lent to NumPy.
            sample = part.detach().reshape(-1)[:: max(1, -(-part.numel() // _SAMPLED))].clone()
        found[name] = (str(tensor.dtype), tuple(tensor.shape), sample)
    own = digest(found, [each.training for each in module.modules()])
    processes = processes_of(captured(pg).root)
    return own if processes is None else digest(processes.gathered(own))


def identity(
    axes: Mapping[str, Sequence[Any]],
    key: str,
    metric: Callable[[Any], Any],
    baseline: Measurement,
    inputs: Inputs,
    pg: PatchableGraph,
    cells: Sequence[Cell],
) -> dict[str, Any]:
    """Returns JSON data that identifies a sweep: its axes, the baseline, and digests of the rest.

    Raises:
        ExperimentError: Patches are functions, which only a key can identify, and there is no key.
    """
    patches = {type(patch).__name__: patch for cell in cells for patch in patches_in(cell.patches)}
    unknown = [name for name, patch in patches.items() if not declares(patch, "is_pure")]
    if unknown and not key:
        raise ExperimentError(
            f"checkpoint= does not see what a {unknown[0]} does: give a text that names this version of it, and change "
            'it when that changes: checkpoint="sweep", checkpoint_key="version 1"'
        )
    return {
        "axes": {name: [repr(plain_label(value)) for value in values] for name, values in axes.items()},
        "checkpoint_key": key,
        "metric": [metric_name(metric), digest(metric)],
        "inputs": digest(inputs.args, inputs.kwargs),
        "weights or modes": weights_digest(pg),
        "numbers without patches": baseline.to_json(),
        "patches": digest([cell.patches for cell in cells]),
    }


class Checkpoint:
    """The checkpoint of one sweep.

    Args:
        folder: The name of the folder; it need not exist.
        own: The `identity` of the sweep.

    Attributes:
        done: The results in the folder, by the number of the cell, without those of failed cells.

    Raises:
        ExperimentError: The folder holds other data. It is not changed.
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], own: Mapping[str, Any]) -> None:
        self._folder = Path(folder).expanduser()
        self._folder.mkdir(parents=True, exist_ok=True)
        header = self._folder / _SWEEP
        if not header.exists():
            if any(self._folder.iterdir()):
                raise ExperimentError(
                    f"checkpoint={str(folder)!r} is a folder that was not written by a sweep: give another name"
                )
            with whole_file(header) as file:
                file.write_text(json.dumps(own))
        found = json.loads(header.read_text())
        if differing := [name for name in own if found.get(name) != own[name]]:
            raise ExperimentError(
                f"checkpoint={str(folder)!r} holds another sweep: its {', '.join(differing)} differ. Give another "
                "name, or delete the folder to start over"
            )
        files = sorted(self._folder.glob("[0-9]*.json"))
        self._count = int(files[-1].stem) + 1 if files else 0
        cells = {int(number): data for file in files for number, data in json.loads(file.read_text()).items()}
        self.done = {number: CellResult(number, Measurement.from_json(data)) for number, data in cells.items()}

    def append(self, results: Sequence[CellResult]) -> None:
        """Writes the results of a chunk, and returns when they are on the disk.

        If that fails (for example, because the disk is full), a warning is issued and the sweep continues in memory.
        """
        cells = {each.number: each.measurement.to_json() for each in results if each.measurement is not None}
        if not cells:
            return
        try:
            with whole_file(self._folder / f"{self._count:06}.json") as file:
                file.write_text(json.dumps(cells))
            self._count += 1
        except OSError as error:
            warn_each_time(f"results of {len(cells)} cells are kept in memory only: {error}", ExperimentWarning)
