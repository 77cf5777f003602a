"""Patch maps in files: what comes back is equal; code, damage and other files are clear errors."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    GraphError,
    Patch,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
    load_patches,
    save_patches,
)
from graphpatch_notebook.errors import SerializationError, UnknownPathError
from graphpatch_notebook.patching.model_state import difference
from tests.inspection.test_meanings import captured

SHARED = torch.arange(12.0).view(3, 4)
PATCHES: dict[str, Any] = {
    "up.output": [
        AddPatch(value=SHARED[1, :1], slice=(..., slice(None, 4)), steps="decoding"),
        ReplacePatch(value=SHARED.T[:1, :1].bool(), slice=(slice(1), torch.tensor([0, 2]))),
    ],
    'output|sub_0."a.b"': ZeroPatch(positions=[1, 3], position_dim=-2, allow_empty=True, slice=(None, ..., -1)),
    "down.weight": AddPatch(value=torch.nn.Parameter(torch.ones(2, 1)), steps={0, 2}),
    "mul": ReplacePatch(value=complex("inf"), any_shape=True, positions=range(1, 9, 2), steps=slice(1, None)),
    "a": [ProbePatch(), RecordPatch(steps=0)],
}


def fields(patch: Patch[Any]) -> dict[str, Any]:
    shown = {name: value for name, value in vars(patch).items() if name not in ("_kept", "_version", "_versions")}
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in shown.items()}


@pytest.mark.parametrize("is_open", [True, False])
def test_round_trip(tmp_path: Path, is_open: bool) -> None:
    file: Any = io.BytesIO() if is_open else tmp_path / "patches.safetensors"
    save_patches(file, PATCHES)
    if is_open:
        file.seek(0)
    found = load_patches(file)
    assert list(found) == list(PATCHES)
    for path, given in PATCHES.items():
        pairs = zip(*([one] if isinstance(one, Patch) else one for one in (found[path], given)), strict=True)
        for patch, expected in pairs:
            assert type(patch) is type(expected)
            assert difference(fields(patch), fields(expected), path) is None
    assert isinstance(found["down.weight"].value, torch.nn.Parameter)
    found["up.output"][0].value.zero_()
    assert SHARED[1, 0] == 4


class Own(ZeroPatch):
    """A kind of somebody's."""


def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    file = tmp_path / "patches.safetensors"
    computed = torch.ones(2, requires_grad=True) * 2
    bad = {
        "a": CustomPatch(custom_op=torch.relu),
        "b": [ZeroPatch(), Own()],
        "c": AddPatch(computed),
        "d": [],
        "e": [1],
    }
    with pytest.raises(GraphError) as raised:
        save_patches(file, bad)
    assert all(f"'{path}'" in str(raised.value) for path in bad)
    assert not file.exists()
    with pytest.raises(TypeError, match="list"):
        save_patches(file, [ZeroPatch()])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int"):
        save_patches(3, {})  # type: ignore[arg-type]


def document(patches: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    file = io.BytesIO()
    save_patches(file, patches)
    data = file.getvalue()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["graphpatch_notebook_patches"]), load(data)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("schema",), 1, "version 1"),
        (("patches", 0, "kind"), "CustomPatch", "BytesIO"),
        (("patches", 0, "kind"), "Bomb", "BytesIO"),
        (("patches", 0, "fields", "value"), {"tensor": 7}, "BytesIO"),
        (("patches", 0, "fields", "value"), "text", "AddPatch"),
        (("patches", 0, "fields", "slice"), {"node": 0}, "BytesIO"),
        (("patches", 0, "fields", "more"), 1, "more"),
        (("patches", 0, "path"), 3, "path"),
        (("tensors", 0, "shape"), [9], "BytesIO"),
    ],
)
def test_damaged_files_are_errors(where: tuple[Any, ...], value: Any, message: str) -> None:
    content, tensors = document({"a": AddPatch(torch.ones(2))})
    inner = content
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    with pytest.raises(GraphError, match=message):
        load_patches(io.BytesIO(save(tensors, {"graphpatch_notebook_patches": json.dumps(content)})))


def test_names_mean_the_same_where_patches_are_loaded(tmp_path: Path) -> None:
    """A model that iterates over a set has other names in another process."""
    one, other, file = captured("full", "local"), captured("local", "full"), tmp_path / "patches"
    save_patches(file, {"mul_1": ZeroPatch(), "last.output": ZeroPatch(slice=0)}, one)
    for same in (one, captured("full", "local", mask=torch.ones(1, 2)), None):
        assert list(load_patches(file, same)) == ["mul_1", "last.output"]
    with pytest.raises(SerializationError, match=r"'mul_1' \(") as caught:
        load_patches(file, other)
    assert "'mul' (" not in str(caught.value)
    assert "'last" not in str(caught.value)
    save_patches(file, {"last.output": ZeroPatch()}, one)
    load_patches(file, other)  # the same value there
    save_patches(file, {"mul_1": ZeroPatch()})
    load_patches(file, other)  # it is not known what the name meant
    save_patches(file, {"nope": ZeroPatch()}, one)
    with pytest.raises(UnknownPathError, match="nope"), one.patch(load_patches(file, one)):
        pass
