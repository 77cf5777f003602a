"""The checkpoint of a sweep: a folder with a file for each chunk of results. The same call resumes after a stop.

sweep.json      identifies the sweep
000000.json     the results of some cells by number, with a checksum: a file is complete, or does not exist
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from graphpatch_notebook.capture.records import spliced_calls
from graphpatch_notebook.errors import ExperimentError, reading, warn_each_time, whole_file
from graphpatch_notebook.inspection.meanings import differing_names
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patching.model_state import is_distributed, processes_of, runs_where_the_model_is
from graphpatch_notebook.torch_compat import is_fully_sharded
from graphpatch_notebook.values import digest

_SAMPLED = 1024
_SWEEP, _NAMES = "sweep.json", "names"


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
    held = [("", module), *((call.target, call.frame.module) for call in spliced_calls(pg.nodes.root))]
    tensors = [pair for start, one in held for pair in (*one.named_parameters(start), *one.named_buffers(start))]
    for name, tensor in tensors:
        part: Any = tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
        is_plain = type(part.data) is Tensor and not part.is_quantized
        sample = part.detach().reshape(-1)[:: max(1, -(-part.numel() // _SAMPLED))] if is_plain else None
        found[name] = (str(tensor.dtype), tuple(tensor.shape), sample)
    own = digest(found, [getattr(each, "training", False) for each in module.modules()])
    processes = processes_of(captured(pg).root)
    return own if processes is None else digest(processes.gathered(own))


def _reading(file: Path) -> AbstractContextManager[None]:
    return reading(repr(str(file)), ExperimentError, ". Delete it to run its cells again; without sweep.json, all")


def _checksum(cells: Mapping[Any, Any]) -> int:
    return zlib.crc32(json.dumps(cells).encode())  # the same of what was read: numbers are written exactly


class Checkpoint:
    """The checkpoint of one sweep.

    Args:
        folder: The name of the folder; it need not exist.
        own: JSON data that identifies the sweep, by what messages call it; under `names`, their meanings.
        parse: Returns a result from its JSON data.

    Attributes:
        done: The results in the folder, by the number of the cell.

    Raises:
        ExperimentError: The folder holds other data, or a damaged file. It is not changed.
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], own: Mapping[str, Any], parse: Callable[[Any], Any]) -> None:
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
        with _reading(header):
            found = json.loads(header.read_text())
            differing = [name for name in own if name != _NAMES and found.get(name) != own[name]]
            if not differing and (names := differing_names(own.get(_NAMES, {}), found.get(_NAMES, {}))):
                differing = [f"names, which mean other values ({names}),"]
        if differing:
            raise ExperimentError(
                f"checkpoint={str(folder)!r} holds another sweep: its {', '.join(differing)} differ. Give another "
                "name, or delete the folder to start over"
            )
        files = sorted(self._folder.glob("[0-9]*.json"))
        self._count = int(files[-1].stem) + 1 if files else 0
        self.done: dict[int, Any] = {}
        for file in files:
            with _reading(file):
                found = json.loads(file.read_text())
                if found["checksum"] != _checksum(cells := found["cells"]):
                    raise ValueError("it has other results than were written")
                self.done |= {int(number): parse(data) for number, data in cells.items()}

    def append(self, cells: Mapping[int, Any]) -> None:
        """Writes the results of a chunk, as JSON data by the number of the cell, and returns when they are on the disk.

        If that fails (for example, because the disk is full), a warning is issued and the sweep continues in memory.
        """
        if not cells:
            return
        try:
            with whole_file(self._folder / f"{self._count:06}.json") as file:
                file.write_text(json.dumps({"checksum": _checksum(cells), "cells": cells}))
            self._count += 1
        except OSError as error:
            warn_each_time(f"results of {len(cells)} cells are kept in memory only: {error}", "experiment")
