"""Where the runs of an experiment happen: here, or by an executor, or where the model of a remote graph is.

What the experiments know of the room `distributed`.
"""

from __future__ import annotations

from graphpatch_notebook.distributed.checkpoint import Checkpoint, weights_digest
from graphpatch_notebook.distributed.executors import Lost, RayExecutor, Workers, check_executor, map_batches
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
