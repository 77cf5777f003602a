"""Details of rows: true for every row of every model, and said in words."""

from __future__ import annotations

import ast
import json
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.notebook.views.browser import details
from graphpatch_notebook.notebook.views.skeleton import skeleton_of
from tests.laws.captures import some_cases
from tests.notebook.hostile import hostile_graph
from tests.zoo.case import Case, seed_all


def of(pg: PatchableGraph, path: str) -> dict[str, Any]:
    skeleton = skeleton_of(pg)
    return msgspec.to_builtins(details(pg, skeleton, skeleton.row(path)))


def texts(links: list[dict[str, Any]]) -> list[str]:
    return [link["text"] for link in links]


class Inner(nn.Module):
    def forward(self, x: Tensor, *rest: Tensor, scale: Tensor | None = None, **others: Tensor) -> dict[str, Any]:
        first, second = (x * scale).split(1, dim=-1)
        return {"pair": (first, second + rest[0]), "same": others["extra"]}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.inner(x, y, scale=y, extra=x)
        z = self.linear(self.linear(found["same"] - self.mean))
        z.add_(1.0)
        return z + found["pair"][0]


@pytest.fixture(scope="module")
def outer() -> PatchableGraph:
    return PatchableGraph(Outer().eval(), torch.ones(1, 2), torch.ones(1, 2))


def test_an_op(outer: PatchableGraph) -> None:
    found = of(outer, "inner.mul")
    assert found["kind"] == "op"
    assert (found["shape"], found["dtype"], found["device"]) == ([1, 2], "float32", "cpu")
    assert found["code"] == "mul = others_extra * scale"  # x, too, is that tensor: the last of its names counts
    assert found["notes"] == ["what mul returned"]
    assert texts(found["inputs"]) == ["others|extra", "scale"]
    assert texts(found["users"]) == ["split"]
    (line,) = found["source"]
    assert line["text"] == "first, second = (x * scale).split(1, dim=-1)"
    assert line["function"] == "forward"
    assert line["file"] == __file__


def test_what_cannot_be_patched_says_so() -> None:
    pg = hostile_graph()
    assert "its value was 2.0" in of(pg, "scale")["notes"]
    assert "the example did not have it" in of(pg, "mask")["notes"]
    assert any("patch the values in it" in note for note in of(pg, "output|inner")["notes"])
    for path in ("size_shape", "size_rows"):
        assert "it only carries sizes: hidden from the tree, unless it is asked for" in of(pg, path)["notes"]


def check_laws(pg: PatchableGraph) -> None:
    skeleton = skeleton_of(pg)

    def node_row(row: int) -> int:
        """Returns the row of the node that holds the value in a row."""
        return row if skeleton.kind[row] != "item" else node_row(skeleton.parent[row])

    links: dict[str, set[tuple[int, int]]] = {"inputs": set(), "users": set()}
    for row in range(len(skeleton)):
        found = msgspec.to_builtins(details(pg, skeleton, row))
        json.dumps(found)
        assert found["row"] == row
        assert found["kind"] == skeleton.kind[row]
        assert found["notes"] or found["kind"] == "graph"
        for side, pairs in links.items():
            for link in found[side]:
                assert skeleton.path(link["row"]).endswith(link["text"])
                pairs.add((row, node_row(link["row"])))
        if found["kind"] == "op" and found["code"]:
            ast.parse(found["code"])
            assert "=" in found["code"]
    # Between two ops, what one uses, the other is used by.
    ops = {row for row in range(len(skeleton)) if skeleton.kind[row] == "op"}
    used = {(a, b) for a, b in links["inputs"] if a in ops and b in ops}
    assert used == {(b, a) for a, b in links["users"] if a in ops and b in ops}


@some_cases(every=3)
def test_zoo_details_of_every_row(case: Case) -> None:
    seed_all()
    call = case.example()
    check_laws(PatchableGraph(case.build(), *call.args, **call.kwargs))
