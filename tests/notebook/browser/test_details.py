"""Details of rows: true for every row of every model, and said in words."""

from __future__ import annotations

import ast
import json
import zlib
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import ExtractionOptions, PatchableGraph
from graphpatch_notebook.distributed.sharding import note_placements
from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.browser.skeleton import skeleton_of
from graphpatch_notebook.notebook.browser.widget import details
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


def test_placements() -> None:
    pg = PatchableGraph(nn.Sequential(nn.Linear(2, 4), nn.ReLU()), torch.ones(1, 2))
    note_placements(
        pg.nodes.root, {"sub_0.output": "split along dimension 1", "output": "refused: a sum", "input": "replicated"}
    )
    pg._captured.renew()
    columns = json.loads(zlib.decompress(skeleton_of(pg).data))
    placed = {spec[0]: spec[4] for spec in columns["specs"] if len(spec) > 4}
    assert placed == {
        "[1, 4] f32 split along dimension 1": "split along dimension 1",
        "[1, 4] f32 refused": "refused: a sum",
    }
    assert (
        "over the processes of the model: refused: a sum; its shape is that of the whole value"
        in of(pg, "output")["notes"]
    )


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


def test_the_flow_of_values_continues_across_calls(outer: PatchableGraph) -> None:
    assert texts(of(outer, "x")["users"]) == ["inner.x", "inner.others"]
    assert texts(of(outer, "y")["users"]) == ["inner.rest", "inner.scale"]
    assert texts(of(outer, "inner.scale")["inputs"]) == ["y"]
    assert texts(of(outer, "inner.rest|sub_0")["inputs"]) == ["y"]
    assert texts(of(outer, "inner.others|extra")["inputs"]) == ["x"]
    assert texts(of(outer, "inner.output|same")["inputs"]) == ["others|extra"]
    assert texts(of(outer, "inner.output|same")["users"]) == ["sub"]
    assert texts(of(outer, "sub")["inputs"]) == ["inner.output|same", "mean"]
    assert texts(of(outer, "linear_1.input")["inputs"]) == ["linear_0.output"]
    assert texts(of(outer, "linear_0.output")["users"]) == ["linear_1.input"]
    assert texts(of(outer, "inner.output|pair.sub_1")["users"]) == []


def test_a_graph(outer: PatchableGraph) -> None:
    inner = of(outer, "inner")
    assert texts(inner["inputs"]) == ["x", "y"]
    assert texts(inner["users"]) == ["sub", "add_1"]
    assert inner["notes"] == ["the graph of Inner"]
    assert inner["code"].startswith("def forward(self, x : torch.Tensor, *rest")
    assert inner["source"][0]["text"] == "found = self.inner(x, y, scale=y, extra=x)"
    assert (inner["shape"], inner["dtype"], inner["device"]) == (None, None, None)
    assert of(outer, "linear_1")["notes"] == ["the graph of Linear, called 2 times; this is call 2"]
    root = of(outer, "")
    assert (root["path"], root["inputs"], root["users"], root["source"]) == ("", [], [], [])


def test_other_kinds(outer: PatchableGraph) -> None:
    assert of(outer, "mean")["notes"] == ["the buffer mean of Outer"]
    assert of(outer, "linear_0.weight")["notes"] == ["the parameter weight of Linear"]
    x = of(outer, "x")
    assert x["code"] == "def forward(self, x : torch.Tensor, y : torch.Tensor):"
    assert x["source"][0]["text"].startswith("def forward(self, x: Tensor, y: Tensor)")
    output = of(outer, "output")
    assert output["code"].startswith("return ")
    assert output["notes"] == ["what Outer returned"]
    assert any("the model writes into this tensor later" in n for n in of(outer, "linear_1.output")["notes"])


def test_a_module_that_was_never_called(outer: PatchableGraph) -> None:
    skeleton = skeleton_of(outer)
    row = next(row for row in range(len(skeleton)) if skeleton.kind(row) == "unused")
    found = msgspec.to_builtins(details(outer, skeleton, row))
    assert (found["kind"], found["path"], found["code"]) == ("unused", "never", "")
    assert found["notes"][0].startswith("Linear: the run on the example inputs did not call this module")


def test_an_opaque_graph() -> None:
    options = ExtractionOptions(classes_to_skip_compiling={nn.Sequential})
    pg = PatchableGraph(nn.Sequential(nn.Linear(2, 2)), options, torch.ones(1, 2))
    found = of(pg, "")
    assert found["code"] == ""
    assert any(note.startswith("opaque: the options say to skip it") for note in found["notes"])
    assert of(pg, "input")["code"] == ""


def test_what_cannot_be_patched_says_so() -> None:
    pg = hostile_graph()
    assert "its value was 2.0" in of(pg, "scale")["notes"]
    assert "the example did not have it" in of(pg, "mask")["notes"]
    assert any("patch the values in it" in note for note in of(pg, "output|inner")["notes"])
    for path in ("size_shape", "size_rows"):
        assert "it only carries sizes: hidden from the tree, unless it is asked for" in of(pg, path)["notes"]


def test_a_row_that_is_not_there(outer: PatchableGraph) -> None:
    for row in (-1, 10**6):
        with pytest.raises(SessionError, match="unknown row"):
            details(outer, skeleton_of(outer), row)


def check_laws(pg: PatchableGraph) -> None:
    skeleton = skeleton_of(pg)

    def node_row(row: int) -> int:
        """Returns the row of the node that holds the value in a row."""
        return row if skeleton.kind(row) != "item" else node_row(skeleton.parent(row) or 0)

    links: dict[str, set[tuple[int, int]]] = {"inputs": set(), "users": set()}
    for row in range(len(skeleton)):
        found = msgspec.to_builtins(details(pg, skeleton, row))
        json.dumps(found)
        assert found["row"] == row
        assert found["kind"] == skeleton.kind(row)
        assert found["notes"] or found["kind"] == "graph"
        for side, pairs in links.items():
            for link in found[side]:
                assert skeleton.path(link["row"]).endswith(link["text"])
                pairs.add((row, node_row(link["row"])))
        if found["kind"] == "op" and found["code"]:
            ast.parse(found["code"])
            assert "=" in found["code"]
    # Between two ops, what one uses, the other is used by.
    ops = {row for row in range(len(skeleton)) if skeleton.kind(row) == "op"}
    used = {(a, b) for a, b in links["inputs"] if a in ops and b in ops}
    assert used == {(b, a) for a, b in links["users"] if a in ops and b in ops}


@some_cases(every=3)
def test_zoo_details_of_every_row(case: Case) -> None:
    seed_all()
    call = case.example()
    check_laws(PatchableGraph(case.build(), *call.args, **call.kwargs))


def test_details_of_hostile_names() -> None:
    check_laws(hostile_graph())
