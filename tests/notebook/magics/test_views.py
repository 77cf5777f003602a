"""`%graphpatch ls`: one level of a capture, with what one has to know before patching."""

from __future__ import annotations

from functools import cache

import pytest

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import UnknownChildError
from graphpatch_notebook.inspection.locations import Location
from graphpatch_notebook.notebook.magics.views import listing
from tests.notebook.hostile import KEYS, hostile_graph
from tests.zoo import case_by_name

graph = cache(hostile_graph)


def test_the_children_of_the_root() -> None:
    patched = ["blocks_1.linear", "blocks_1.output", "relu", 'output|"a.b"']
    rows = {child.name: (child.what, child.value, child.remark) for child in listing(graph(), "", patched)}
    assert rows["x"] == ("input", "[4, 2] f32", "")
    assert rows["mask"] == ("input", "", "not given in the example")
    assert rows["blocks_0"] == ("CompiledGraphModule", "Linear", "")
    assert rows["blocks_1"] == ("CompiledGraphModule", "Linear", "2 patched inside")
    assert rows["relu"] == ("relu", "[4, 2] f32", "patched")
    assert rows["output"] == ("output", f"dict({len(KEYS) + 1})", "1 patched inside")
    what, value, remark = rows["skipped"]
    assert (what, value) == ("OpaqueGraphModule", "Sequential")
    assert remark.startswith("opaque: ")
    assert rows["never"] == ("UnusedModule", "Linear", "did not run on the example")
    assert repr(listing(graph())).startswith("<root>: CompiledGraphModule of Hostile\n")


def test_inside_containers_and_at_values() -> None:
    inside = listing(graph(), "output")
    assert [child.path for child in inside][:2] == ["output|plain", 'output|"a.b"']
    assert len(inside) == len(KEYS) + 1
    assert [child.path for child in listing(graph(), "output|inner.sub_0")] == ['output|inner.sub_0."deep.est"']
    value = listing(graph(), "blocks_0.linear")
    assert [(child.path, child.what) for child in value] == [("blocks_0.linear", "linear")]


def test_unknown_paths_name_the_nearest() -> None:
    with pytest.raises(UnknownChildError, match=r"nearest: 'blocks_0.linear'"):
        listing(graph(), "blocks_0.linaer")


def test_every_place_of_a_transformer_can_be_listed() -> None:
    case = case_by_name("gpt2-eager")
    call = case.example()
    pg = PatchableGraph(case.build(), *call.args, **call.kwargs)
    seen = 0
    todo = [""]
    while todo:
        path = todo.pop()
        place = Location.of_root(pg.nodes.root).at(path)
        rows = [child for child in listing(pg, path) if child.path]
        if place.children():
            assert [child.path for child in rows] == [place.below(name).path for name in place.children()]
            todo += [child.path for child in rows]
        seen += 1
    assert seen > 200
