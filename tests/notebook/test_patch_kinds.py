"""A kind of patch is registered in one call, and everything in the notebook knows it: commands, files, code, editor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import torch
from IPython.core.completer import provisionalcompleter
from torch import Tensor

from graphpatch_notebook import Patch
from graphpatch_notebook.notebook import PATCH_KINDS, PatchKind, PatchValue, register_patch_kind
from graphpatch_notebook.notebook.runs import Runs
from graphpatch_notebook.notebook.session.session import session_of
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.notebook.views.linked import HANDLERS, RequestContext, answer
from tests.notebook.shells import Shell

FRONT_END = Path(__file__).parents[2] / "js" / "tests" / "fixtures" / "patch_kinds.json"


@dataclass(kw_only=True, eq=False)
class ScalePatch(Patch[Tensor]):
    """Multiplies the value, as in the contributor's guide."""

    requires_clone: ClassVar[bool] = True
    factor: float

    def op(self, original_output: Tensor) -> Tensor:
        return original_output.mul_(self.factor)


@dataclass(kw_only=True, eq=False)
class FlipPatch(Patch[Tensor]):
    """A patch without a value."""

    def op(self, original_output: Tensor) -> Tensor:
        return original_output.flip(-1)


SCALE = PatchKind(
    "scale",
    ScalePatch,
    "multiplies the value",
    value=PatchValue("factor", "a number", "0.5", help="VALUE is a number."),
    examples=("scale h_0.output 0.5",),
)


@pytest.fixture(autouse=True)
def kinds() -> Iterator[None]:
    register_patch_kind(SCALE)
    register_patch_kind(PatchKind("flip", FlipPatch, "turns the value around"))
    yield
    del PATCH_KINDS["scale"], PATCH_KINDS["flip"]


def expected(pg: Shell) -> Tensor:
    """Returns the output of the model whose `down.output` is halved, by a plain hook."""
    model, x = pg.namespace["model"], pg.namespace["x"]
    with model.down.register_forward_hook(lambda module, args, output: output * 0.5):
        return model(x)


def test_it_is_a_command(pg: Shell) -> None:
    assert pg.ok("%graphpatch scale down.output 0.5").out == "#1 scale down.output 0.5 -> (3, 2)\n"
    assert torch.equal(pg.ok("%%graphpatch\npg(x)").value, expected(pg))
    assert "takes no slice" in pg.run("%graphpatch scale down.output[0] 0.5").err
    assert "scale needs a value: a number" in pg.run("%graphpatch scale up.output").err


def test_it_has_help_and_completion(pg: Shell) -> None:
    assert "%graphpatch scale PATH VALUE [OPTIONS]" in pg.ok("%graphpatch help").out
    said = pg.ok("%graphpatch help scale").out
    assert all(
        text in said for text in ("multiplies the value", "VALUE is a number.", "%graphpatch scale h_0.output 0.5")
    )
    assert "[slice]" not in said
    assert "Examples" not in pg.ok("%graphpatch help flip").out
    pg.namespace["strength"] = 0.5
    for typed, completed in (("sca", "scale"), ("scale dow", "down."), ("scale down.output stren", "strength")):
        line = f"%graphpatch {typed}"
        with provisionalcompleter():
            assert completed in [one.text for one in pg.ip.Completer.completions(line, len(line))]


def test_it_is_in_the_editor(pg: Shell) -> None:
    graph = pg.namespace["pg"]
    session, workspace = session_of(graph), Workspace(lambda: pg.namespace, print)
    context = RequestContext(session, workspace, Runs.of(session, workspace))
    patch = {"path": "down.output", "kind": "scale", "value": None}
    reply, _ = answer(context, {"id": 1, "request": "check", "payload": {"patch": patch, "number": None}}, HANDLERS)
    assert reply["result"]["shape"] == [3, 2]
    edit = {"action": "add", "patch": {**patch, "value": "0.5"}}
    answer(
        context, {"id": 2, "request": "edit", "payload": {"based_on": session.chosen.version, "edit": edit}}, HANDLERS
    )
    assert [str(one) for one in session.chosen.patches] == ["scale down.output 0.5"]
    browser = graph.browse()
    assert {
        "name": "scale",
        "summary": "multiplies the value",
        "value": {"noun": "a number", "example": "0.5"},
    }.items() <= (browser.about["patch_kinds"][-2].items())
    assert browser.about["patch_kinds"][-1]["fields"] == [
        "steps",
        "positions",
        "position_dim",
        "any_shape",
        "allow_empty",
    ]
    browser.close()


def test_the_tests_of_the_front_end_have_the_kinds_of_the_kernel() -> None:
    known = json.loads(FRONT_END.read_text("utf8"))
    assert known == [msgspec.to_builtins(kind.message()) for kind in PATCH_KINDS.values()][:-2]
