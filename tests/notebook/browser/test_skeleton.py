"""The skeleton: a row for everything there is, and no two ways between rows and paths."""

from __future__ import annotations

import itertools
import json
import operator
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphpatch_notebook import PatchableGraph, UnknownPathError
from graphpatch_notebook.capture.records import RECORD, Node
from graphpatch_notebook.graphs import CompiledGraphModule
from graphpatch_notebook.inspection.resolution import NodeMap, resolve
from graphpatch_notebook.notebook.display.tables import spec_label
from graphpatch_notebook.notebook.views import skeleton as skeletons
from graphpatch_notebook.notebook.views.skeleton import (
    HIDDEN,
    KINDS,
    NEXT,
    OPAQUE,
    PATCHABLE,
    SIZE,
    Skeleton,
    skeleton_of,
)
from graphpatch_notebook.patchable_graph import captured
from tests.frames import layered_frame
from tests.laws.captures import some_cases
from tests.notebook.hostile import hostile_graph
from tests.zoo.case import Case, seed_all


def columns_of(skeleton: Skeleton) -> dict[str, Any]:
    columns = json.loads(zlib.decompress(skeleton.data))
    for name in ("name", "op", "spec"):
        fresh = itertools.count()
        columns[name] = [next(fresh) if position == NEXT else position for position in columns[name]]
    return columns


def check_laws(pg: PatchableGraph) -> None:
    skeleton = skeleton_of(pg)
    columns = columns_of(skeleton)
    rows = range(len(skeleton))
    kinds = [KINDS[kind] for kind in columns["kind"]]
    assert {len(columns[name]) for name in "name depth kind op spec flags".split()} == {len(skeleton)}

    by_path = {}
    for row in rows:
        place = skeleton.place(row)
        if place is None:
            assert kinds[row] == "unused"
            assert skeleton.path(row) == ""
            continue
        path = skeleton.path(row)
        assert skeleton.row(path) == row
        assert place.path == path
        assert place.last_name == columns["names"][columns["name"][row]]
        assert (place.graph is not None) == (kinds[row] == "graph") == (columns["spec"][row] == -1)
        if place.spec is not None:
            label, shape, dtype, _, *_ = columns["specs"][columns["spec"][row]]
            assert label == spec_label(place.spec)
            assert shape == (list(place.spec.shape) if hasattr(place.spec, "shape") else None)
            assert dtype == (str(place.spec.dtype).removeprefix("torch.") if hasattr(place.spec, "dtype") else None)
        by_path[path] = row

    nodes = pg.nodes
    assert len(nodes) > 0
    for path, meta in nodes.items():
        row = by_path[path]
        flags = columns["flags"][row]
        assert flags & PATCHABLE
        assert bool(flags & SIZE) == meta.is_size
        assert kinds[row] in (meta.kind, "item")
    for path, row in by_path.items():
        if columns["flags"][row] & PATCHABLE:
            target = resolve(captured(pg).root, path)
            assert path in nodes or (target.node.kind == "input" and target.node.spec.value is None)
        elif path in nodes:
            raise AssertionError(path)

    # What is not hidden is what `pg.graph` shows, and only that.
    for row in rows:
        place = skeleton.place(row)
        if place is not None and place.graph is not None:
            shown = {child.name for child in place.entry().children}
            called = [child for child in skeleton.children(row) if skeleton.kind[child] != "unused"]
            assert {skeleton.name[c] for c in called if not skeleton.flags[c] & (HIDDEN | SIZE)} == shown


@some_cases(every=3)
def test_zoo_rows_and_paths_are_one_to_one(case: Case) -> None:
    seed_all()
    call = case.example()
    check_laws(PatchableGraph(case.build(), *call.args, **call.kwargs))


def makers(skeleton: Skeleton) -> dict[int, set[int]]:
    """Returns what the front end reads: for each row, those of the nodes in its graph that it is computed from."""
    sent, user = json.loads(zlib.decompress(skeleton.packed_edges())), 0
    found: dict[int, set[int]] = {}
    for step, back in zip(sent["users"], sent["values"], strict=True):
        user += step
        value = user - back
        while skeleton.parent[value] != skeleton.parent[user]:
            value = skeleton.parent[value]
            assert value > 0, "an edge from another graph"
        found.setdefault(user, set()).add(value)
    return found


def read_by(node: fx.Node, written: dict[fx.Node, Node]) -> set[Node]:
    """Returns the records of the nodes that a node of an fx graph reads, past those that take containers apart.

    `written` has the last assignment into each tensor, or operator of a library that writes into it: graphs of fx read
    the tensor, and records the assignment.
    """
    given = ((each, written.get(each, each.meta.get(RECORD))) for each in node.all_input_nodes)
    return {one for each, record in given for one in ([record] if record is not None else read_by(each, written))}


def check_edges(pg: PatchableGraph) -> int:
    """Edges are the arguments in the fx graphs, which also run; returns how many there are."""
    skeleton, count = skeleton_of(pg), 0
    found = makers(skeleton)
    for frame in captured(pg).root.walk():
        module = captured(pg).graph_of(frame)
        written: dict[fx.Node, Node] = {}
        for node in module.graph.nodes if isinstance(module, CompiledGraphModule) else ():
            record = frame.output_node if node.op == "output" else node.meta.get(RECORD)
            if record is None or record.inner:
                continue
            rows = {skeleton.row_of_node(one) for one in read_by(node, written)}
            if (place := 0 if node.target is operator.setitem else record.written_argument) is not None:
                written[node.kwargs[place] if isinstance(place, str) else node.args[place]] = record
            assert found.get(skeleton.row_of_node(record), set()) == rows, node
            count += len(rows)
    return count


@some_cases(every=3)
def test_zoo_edges_are_the_arguments(case: Case) -> None:
    seed_all()
    call = case.example()
    check_edges(PatchableGraph(case.build(), *call.args, **call.kwargs))


def test_edges_lead_to_parts_of_values_and_outputs_of_calls() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            left, right = self.linear(x).chunk(2, -1)
            return left * right, left

    skeleton = skeleton_of(PatchableGraph(Halves(), torch.ones(2, 4)))
    edges = [(skeleton.path(user), skeleton.path(value)) for user, value in skeleton.edges()]
    inner = [("linear.linear", f"linear.{name}") for name in ("input", "weight", "bias")]
    assert sorted(edges) == sorted(
        [
            ("linear", "x"),
            *inner,
            ("linear.output", "linear.linear"),
            ("chunk", "linear.output"),
            ("left", "chunk|sub_0"),
            ("right", "chunk|sub_1"),
            ("mul", "left"),
            ("mul", "right"),
            ("output", "mul"),
            ("output", "left"),
        ]
    )


def test_hostile_names_have_rows() -> None:
    pg = hostile_graph()
    check_laws(pg)
    assert check_edges(pg) > 0
    skeleton = skeleton_of(pg)
    assert '"line\\nbreak"' in columns_of(skeleton)["names"]
    assert skeleton.path(skeleton.row('output|"a.b"')) == 'output|"a.b"'
    assert skeleton.path(skeleton.row('output|inner.sub_0."deep.est"')) == 'output|inner.sub_0."deep.est"'
    opaque = skeleton.row("skipped")
    assert skeleton.flags[opaque] & OPAQUE
    assert skeleton.notes[opaque] == "the options say to skip it"
    assert columns_of(skeleton)["notes"][str(opaque)] == skeleton.notes[opaque]


def test_unknown_paths_are_refused_with_the_nearest() -> None:
    skeleton = skeleton_of(hostile_graph())
    with pytest.raises(UnknownPathError, match=r"'blocks_1.liner'.*'blocks_1.linear'"):
        skeleton.row("blocks_1.liner")
    with pytest.raises(UnknownPathError, match=r"a\[0\]"):
        skeleton.row("a[0]")
    assert skeleton.find("a[0]") is None
    assert skeleton.find("<root>") == 0


def test_large_models_make_small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """50,000 nodes: the labels of a few values are written, not those of all, and little is sent."""
    labeled = []
    monkeypatch.setattr(skeletons, "spec_label", lambda spec: labeled.append(spec) or spec_label(spec))
    skeleton = Skeleton(NodeMap(layered_frame(1000, ops=22)))
    assert len(skeleton) > 50_000
    assert len(skeleton.data) < 250_000
    assert len(labeled) < len(skeleton) / 4
