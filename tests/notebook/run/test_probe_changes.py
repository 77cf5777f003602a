"""What a run has changed at its probes, beside what plain hooks of torch see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.notebook.runs import Runs
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import Origin
from graphpatch_notebook.notebook.session.session import Session
from tests.hooks import registered
from tests.notebook.replies import received
from tests.notebook.shells import Mlp

X = torch.arange(12.0).reshape(3, 4) / 10


def patch(path: str, kind: str, **fields: Any) -> ChosenPatch:
    return ChosenPatch(path, kind, **fields)  # type: ignore[arg-type]


def run(pg: PatchableGraph, *patches: ChosenPatch, **variables: Any) -> tuple[Runs, dict[str, Any]]:
    session = Session(pg, Origin("pg", "model"))
    session.extend(patches)
    runs = Runs(session, lambda: variables)
    number = runs.start(None)
    runs.wait(number, 20)
    status = received(runs.status(number))[0]
    assert status["state"] == "done", status
    return runs, status["report"]


def change_at(pg: PatchableGraph, *patches: ChosenPatch, **variables: Any) -> Any:
    """What the report says of the only probe."""
    (probe,) = run(pg, *patches, **variables)[1]["probes"]
    return probe["change"]


def seen(model: nn.Module, at: nn.Module, edit: Callable[[Tensor], Tensor] | None = None, of: Any = None) -> Tensor:
    """What comes out of `at`, by a plain hook, when `edit` is applied to what comes out of `of`."""
    kept: list[Tensor] = []
    handles = []
    if edit is not None:
        handles.append((of or at).register_forward_hook(lambda *call: edit(call[2])))
    handles.append(at.register_forward_hook(lambda *call: kept.append(call[2].clone())))
    with registered(handles), torch.no_grad():
        model(X)
    (value,) = kept
    return value.double()


def without_first_row(value: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(value[:1]), value[1:]])


@pytest.mark.parametrize("slice_", [None, ":, :2"])
def test_norms_at_a_probe_are_those_that_hooks_see(slice_: str | None) -> None:
    model = Mlp().eval()
    pg = PatchableGraph(model, X.clone())
    zero = patch("up.linear", "zero", slice="0")
    runs, report = run(pg, zero, patch("down.linear", "probe", name="h", slice=slice_))
    before, after = seen(model, model.down), seen(model, model.down, without_first_row, model.up)
    if slice_ is not None:
        before, after = before[:, :2], after[:, :2]
    change = report["probes"][0]["change"]
    assert change["norm_before"] == pytest.approx(float(before.norm()), rel=1e-12)
    assert change["norm_after"] == pytest.approx(float(after.norm()), rel=1e-12)
    assert change["norm_difference"] == pytest.approx(float((after - before).norm()), rel=1e-12)
    assert change["norm_difference"] > 0
    assert change["note"] is None
    assert runs.last is not None
    assert torch.equal(runs.last.activations["h"].double(), after)
    with torch.no_grad():
        assert torch.equal(runs.last.unpatched_output, model(X))


def test_a_probe_has_pictures_without_the_patches_and_of_the_difference() -> None:
    model = Mlp().eval()
    pg = PatchableGraph(model, X.clone())
    session = Session(pg, Origin("pg", "model"))
    probe = patch("down.linear", "probe", name="h")
    runs = Runs(session, dict)
    reports = []
    for chosen in (probe, patch("up.linear", "zero", slice="0")):
        session.add(chosen)
        number = runs.start(None)
        runs.wait(number, 20)
        status, buffers = received(runs.status(number))
        reports.append(status["report"]["probes"][-1])
    assert reports[0]["before"] is None
    assert reports[0]["difference"] is None
    found = [
        np.frombuffer(buffers[reports[1][part]["buffer"]], "<f4").reshape(3, -1) for part in ("before", "difference")
    ]
    before, after = seen(model, model.down), seen(model, model.down, without_first_row, model.up)
    for numbers, wanted in zip(found, (before, after - before), strict=True):
        assert np.allclose(numbers, wanted.numpy(), atol=1e-6)


def test_values_that_cannot_be_kept_are_not_said_to_be_missing() -> None:
    pg = PatchableGraph(Mlp().eval(), X.clone())
    resized, names = patch("x", "custom", value="resize"), {"name": "h", "any_shape": True}
    probe = patch("hidden", "probe", slice="4", **names)
    change = change_at(pg, resized, probe, resize=lambda value: value.repeat(2, 1))
    assert change["norm_before"] is None
    assert change["note"].startswith("not compared: without the patches, cannot take [4]")
    probe = patch("hidden", "probe", slice="2", **names)
    _, report = run(pg, resized, probe, resize=lambda value: value[:2])
    assert report["probes"][0]["note"].startswith("cannot take [2]")
    assert report["probes"][0]["change"] is None
