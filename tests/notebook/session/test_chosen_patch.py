"""A chosen patch is text that was checked, and becomes the very patch that a person would write."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    Patch,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)
from graphpatch_notebook.errors import ChosenPatchError
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch

NAMESPACE = {"shift": 0.5, "tok": 3, "flip": torch.flip}


def fields_of(patch: Patch[Any]) -> dict[str, Any]:
    return {field.name: getattr(patch, field.name) for field in dataclasses.fields(patch)}


@pytest.mark.parametrize(
    ("chosen", "patch"),
    [
        (ChosenPatch("x", "zero"), ZeroPatch()),
        (ChosenPatch("x", "zero", slice=":,-1"), ZeroPatch(slice=(slice(None), -1))),
        (ChosenPatch("x", "add", value=" 2 * shift "), AddPatch(value=1.0)),
        (ChosenPatch("x", "replace", value="-1e-3", slice="tok"), ReplacePatch(value=-1e-3, slice=3)),
        (ChosenPatch("x", "custom", value="flip", slice="0"), CustomPatch(custom_op=torch.flip, slice=0)),
        (ChosenPatch("x", "probe", name="kept"), ProbePatch()),
        (ChosenPatch("x", "record", name="kept", steps="decoding"), RecordPatch(steps="decoding")),
        (ChosenPatch("x", "zero", steps="prefill", any_shape=True), ZeroPatch(steps="prefill", any_shape=True)),
        (ChosenPatch("x", "zero", steps="2, 4"), ZeroPatch(steps=[2, 4])),
        (ChosenPatch("x", "zero", steps="1:"), ZeroPatch(steps=slice(1, None))),
        (ChosenPatch("x", "zero", positions="7", position_dim=1), ZeroPatch(positions=7, position_dim=1)),
        (ChosenPatch("x", "zero", positions="[3],[5 , 6]"), ZeroPatch(positions=[[3], [5, 6]])),
        (ChosenPatch("x", "zero", positions="[[3]]"), ZeroPatch(positions=[[3]])),
    ],
    ids=lambda value: str(value) if isinstance(value, ChosenPatch) else "",
)
def test_becomes_the_patch_that_a_person_would_write(chosen: ChosenPatch, patch: Patch[Any]) -> None:
    made = chosen.patch(NAMESPACE)
    assert type(made) is type(patch)
    assert fields_of(made) == fields_of(patch)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"kind": "zeor"}, "kind"),
        ({"kind": "add"}, "value"),
        ({"kind": "custom"}, "value"),
        ({"value": "3"}, "value"),
        ({"kind": "add", "value": "a b"}, "value"),
        ({"kind": "probe"}, "name"),
        ({"kind": "record", "name": "a.b"}, "name"),
        ({"kind": "record", "name": "for"}, "name"),
        ({"kind": "probe", "name": "_"}, "name"),
        ({"kind": "probe", "name": "print"}, "name"),
        ({"name": "kept"}, "name"),
        ({"slice": "a.b"}, "slice"),
        ({"steps": "never"}, "steps"),
        ({"positions": "decoding"}, "positions"),
        ({"positions": "[3, 5]"}, "positions"),
        ({"positions": "[3], 5"}, "positions"),
        ({"positions": "[3], [n]"}, "positions"),
        ({"position_dim": 1}, "position_dim"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ChosenPatchError) as caught:
        ChosenPatch(**{"path": "x", "kind": "zero", **fields})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (ChosenPatch("a.b", "add", slice=": ,-1", value="0.5 * v"), "add a.b[:, -1] 0.5 * v"),
        (ChosenPatch("a", "probe", name="kept", steps="2,4"), 'probe a as kept --steps "2, 4"'),
        (
            ChosenPatch("a", "zero", positions="3:", position_dim=1, any_shape=True, allow_empty=True),
            "zero a --positions 3: --position-dim 1 --any-shape --allow-empty",
        ),
    ],
)
def test_reads_as_it_is_typed(chosen: ChosenPatch, text: str) -> None:
    assert str(chosen) == text


def test_takes_its_slice_of_what_was_kept() -> None:
    probe, record = ProbePatch(), RecordPatch()
    value = torch.arange(6).view(2, 3)
    probe.op(value)
    record.op(value)
    record.op(value + 1)
    assert ChosenPatch("x", "probe", name="kept", slice=":, tok").taken(probe, {"tok": 1}).tolist() == [1, 4]
    assert [t.tolist() for t in ChosenPatch("x", "record", name="kept", slice="0").taken(record, {})] == [
        [0, 1, 2],
        [1, 2, 3],
    ]
    assert ChosenPatch("x", "probe", name="kept", slice="0").taken(ProbePatch(), {}) is None


def test_a_variable_is_named_as_python_reads_it() -> None:
    assert ChosenPatch("x", "probe", name="\ufb01rst").name == "first"
    with pytest.raises(ChosenPatchError, match="'if'"):
        ChosenPatch("x", "probe", name="\uff49f")
