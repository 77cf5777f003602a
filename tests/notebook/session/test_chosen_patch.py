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
    ("fields", "field", "message"),
    [
        ({"kind": "zeor"}, "kind", "unknown kind 'zeor'; nearest: 'zero' of zero, add"),
        ({"kind": "add"}, "value", "add needs a value: a number or a tensor"),
        ({"kind": "custom"}, "value", "custom needs a value: a function"),
        ({"value": "3"}, "value", "zero takes no value, but '3' was given"),
        ({"kind": "add", "value": "a b"}, "value", "'a b' is not a Python expression"),
        ({"kind": "probe"}, "name", "probe needs the name of a variable"),
        ({"kind": "record", "name": "a.b"}, "name", "'a.b' cannot be the name of a variable"),
        ({"kind": "record", "name": "for"}, "name", "'for' cannot be the name of a variable"),
        ({"kind": "probe", "name": "_"}, "name", "'_' begins with an underscore, like the variables of IPython"),
        ({"kind": "probe", "name": "print"}, "name", "'print' is a builtin of Python: choose another name"),
        ({"name": "kept"}, "name", "zero puts nothing in a variable, but 'kept' was named"),
        ({"slice": "a.b"}, "slice", "'a.b' is not allowed in the slice 'a.b'"),
        ({"steps": "never"}, "steps", "'never' is not a list of whole numbers; write 3, or 2, 40, or 1:5"),
        ({"positions": "decoding"}, "positions", "positions are numbers, but 'decoding' is a name for steps"),
        ({"positions": "[3, 5]"}, "positions", r"has no positions for each row of the batch; write \[3\], \[5\]"),
        ({"positions": "[3], 5"}, "positions", r"has no positions for each row"),
        ({"positions": "[3], [n]"}, "positions", r"has no positions for each row"),
        ({"position_dim": 1}, "position_dim", "position_dim=1 has no effect without positions"),
        ({"path": 3}, "path", "path must be str, not 3"),
        ({"path": None}, "path", "path must be str, not None"),
        ({"is_enabled": 1}, "is_enabled", "is_enabled must be bool, not 1"),
        ({"position_dim": True, "positions": "1"}, "position_dim", r"position_dim must be int \| None, not True"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ChosenPatchError, match=message) as caught:
        ChosenPatch(**{"path": "x", "kind": "zero", **fields})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (ChosenPatch("a.b", "add", slice=": ,-1", value="0.5 * v"), "add a.b[:, -1] 0.5 * v"),
        (ChosenPatch("a", "probe", name="kept", steps="2,4"), 'probe a kept --steps "2, 4"'),
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
    with pytest.raises(ChosenPatchError, match=r"'if' cannot be the name of a variable"):
        ChosenPatch("x", "probe", name="\uff49f")
