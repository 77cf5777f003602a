"""Where a disk is full, each writer raises an `OSError` that names the user's file, and leaves what was there."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import xarray
from torch import nn

from graphpatch_notebook import AddPatch, PatchableGraph, save_patches
from graphpatch_notebook.experiments import record_to, save_result
from graphpatch_notebook.notebook.views.browser import browser_of
from graphpatch_notebook.notebook.views.linked import workspace_of_user

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sizes of files are limited by the system")


def save(pg: PatchableGraph, file: Path) -> None:
    pg.save(file)


def patches(pg: PatchableGraph, file: Path) -> None:
    save_patches(file, {"output": AddPatch(value=torch.ones(100, 100))})


def record(pg: PatchableGraph, file: Path) -> None:
    record_to(pg, file, ["output"], [torch.ones(100, 100)])


def result(pg: PatchableGraph, file: Path) -> None:
    save_result(xarray.DataArray(torch.rand(100, 100).numpy()), file.with_suffix(".nc"))


def page(pg: PatchableGraph, file: Path) -> None:
    browser_of(pg, workspace_of_user({})).save_html(file)


WRITERS = [save, patches, record, result, page]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_full_disks_are_errors_with_the_file(write: Callable[[PatchableGraph, Path], None], tmp_path: Path) -> None:
    pg, file = PatchableGraph(nn.Linear(100, 100), torch.ones(100, 100)), tmp_path / "full" / "file"
    file.parent.mkdir()
    write(pg, tmp_path / "another")  # all is imported: Python writes byte code by halves, too
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match=str(file)) as caught:
            write(pg, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path for path in file.parent.rglob("*") if path.is_file() and path.suffix in (".tmp", ".safetensors")] == []
    assert ".tmp" not in str(caught.value)
    write(pg, file.with_name("again"))


@pytest.mark.parametrize("write", [save, patches], ids=lambda write: write.__name__)
@pytest.mark.parametrize("device", ["/dev/full", "/dev/null"])
def test_devices_stay_devices(write: Callable[[PatchableGraph, Path], None], device: str) -> None:
    pg, file = PatchableGraph(nn.Linear(100, 100), torch.ones(100, 100)), Path(device)
    is_written = device == "/dev/null" and os.access("/dev", os.W_OK)
    with nullcontext() if is_written else pytest.raises(OSError, match=device):
        write(pg, file)
    assert file.is_char_device()
