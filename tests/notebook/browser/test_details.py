"""Details of rows: true for every row of every model, and said in words."""

from __future__ import annotations

import ast
import json
from typing import Any

import msgspec
import torch

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.notebook.views.browser import details
from graphpatch_notebook.notebook.views.skeleton import skeleton_of
from tests.laws.captures import some_cases
from tests.notebook import shells
from tests.notebook.hostile import hostile_graph
from tests.notebook.shells import Mlp
from tests.zoo.case import Case, seed_all


def of(pg: PatchableGraph, path: str) -> dict[str, Any]:
    skeleton = skeleton_of(pg)
    return msgspec.to_builtins(details(pg, skeleton, skeleton.row(path)))


def texts(links: list[dict[str, Any]]) -> list[str]:
    return [link["text"] for link in links]


def test_an_op() -> None:
    found = of(PatchableGraph(Mlp().eval(), torch.ones(3, 4)), "mul")
    assert (found["kind"], found["shape"], found["dtype"], found["device"]) == ("op", [3, 8], "float32", "cpu")
    assert (found["code"], found["notes"]) == ("mul = hidden * 2", ["what mul returned"])
    assert (texts(found["inputs"]), texts(found["users"])) == (["hidden"], ["down.input"])
    (line,) = found["source"]
    assert (line["text"], line["function"]) == ("return self.down(hidden * 2)", "forward")
    assert line["file"] == shells.__file__


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
