"""Chosen patches as Python that uses graphpatch: what a reader of the code gets to see."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.export import export
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import Origin
from graphpatch_notebook.notebook.session.session import Session
from tests.zoo.submodules import Submodules, copies


class Mlp(Submodules, up=(4, 8), down=(8, 4)):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.up(x).relu()
        return self.down(hidden), hidden


class Model(Submodules, layers=copies(Mlp, 2)):
    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
        kept = []
        for layer in self.layers:
            x, hidden = layer(x)
            kept.append(hidden)
        return {"last": x * scale, "first hidden": kept[0]}


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    torch.manual_seed(0)
    return PatchableGraph(Model(), torch.ones(2, 3, 4))


@pytest.fixture
def session(pg: PatchableGraph) -> Session:
    return Session(pg, Origin("pg", "model", "x"))


def patch(path: str, kind: str, **fields: object) -> ChosenPatch:
    return ChosenPatch(path, kind, **fields)  # type: ignore[arg-type]


def is_clean(source: str) -> bool:
    """Whether the source compiles, and ruff finds nothing in it but names from outside."""
    compile(source, "<exported>", "exec")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F", "--ignore", "F821", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return True


def test_a_file_makes_the_graph(session: Session) -> None:
    session.add(patch("layers_0.output|sub_0", "add", value="pg.layers[0].down.bias"))

    source = export(session, wrap=True)

    assert source == (
        """\
# Needs: model, x
from graphpatch import AddPatch, PatchableGraph

pg = PatchableGraph(model, x)
with pg.patch({"layers_0.output|sub_0": AddPatch(value=pg.layers[0].down.bias)}):
    output = pg(x)
"""
    )
    assert is_clean(source)


def test_values_are_evaluated_in_the_order_of_the_code(session: Session) -> None:
    session.add(patch("layers_0.up.linear", "add", value="numbers.pop()"))
    session.add(patch("layers_1.up.linear", "add", value="numbers.pop()"))
    session.add(patch("layers_0.up.linear", "add", value="numbers.pop()"))
    assert is_clean(export(session))
    resolved = session.resolve({"numbers": [3.0, 2.0, 1.0]}).patch_map
    values = [[one.value for one in patches] for patches in resolved.values()]
    assert values == [[1.0, 2.0], [3.0]]


def test_what_cannot_be_written_on_one_line_is_refused(session: Session) -> None:
    session.add(patch("layers_0.up.linear", "replace", value="f'''{\"\"\"a\nb\"\"\"}'''"))

    if sys.version_info >= (3, 12):  # whose f-strings may hold quotes of their own kind
        assert is_clean(export(session))
        return
    with pytest.raises(SessionError, match=r"#1 .*layers_0.up.linear"):
        export(session)
