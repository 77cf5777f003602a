"""Pipelines: which process has the stage that a path leads to.

Each process has a graph of its own stage. It writes the paths of its modules into the store through which the processes
found each other, so that no process waits for another one.
"""

from __future__ import annotations

import json

import torch.distributed as dist

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import default_store

_KEY = "graphpatch_notebook/stages/{}"


def publish_stage(root: Frame) -> None:
    """Publishes the modules of this process for the other processes; does nothing if there are none."""
    if not _are_several():
        return
    own = sorted({format_path(frame.path) for frame in root.walk()})
    default_store().set(_KEY.format(dist.get_rank()), json.dumps(own))


def other_stage(root: Frame, path: str) -> str:
    """Returns a sentence that names the process whose stage has an unknown path; empty if no process has it."""
    if not _are_several():
        return ""
    store, here = default_store(), dist.get_rank()
    mine = {format_path(frame.path) for frame in root.walk()}
    for rank in range(dist.get_world_size()):
        if rank == here or not store.check([_KEY.format(rank)]):
            continue
        theirs = set(json.loads(store.get(_KEY.format(rank)))) - mine
        found = [name for name in theirs if path == name or path.startswith((f"{name}.", f"{name}|"))]
        if found:
            stage = max(found, key=len)
            return f". {stage!r} is in the stage of process {rank}, and this is process {here}: patch it there"
    return ""


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
