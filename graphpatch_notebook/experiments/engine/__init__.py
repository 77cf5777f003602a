"""Runs the cells of a sweep, so that they share forwards.

`cells` has the cells and their results, and tells which patch maps declare themselves pure. By `shared` forwards, each
cell has its rows, modules before the first patched value return what they returned without patches, and others compute
only the positions that patches changed. `inputs` has the arguments that experiments share.

What the experiments know of the room `distributed` is here: where runs happen, by an executor, or where the model of a
remote graph is.
"""

from __future__ import annotations

from graphpatch_notebook.distributed.executors import (
    Checkpoint,
    Lost,
    RayExecutor,
    Workers,
    check_executor,
    map_batches,
    weights_digest,
)
from graphpatch_notebook.distributed.remote import RemoteGraph, remote

__all__ = [
    "Checkpoint",
    "Lost",
    "RayExecutor",
    "RemoteGraph",
    "Workers",
    "check_executor",
    "map_batches",
    "remote",
    "weights_digest",
]
