"""Models sharded over two processes: every value is right, or refused by name; and no process waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import ranks
from tests.distributed.processes import run_on_ranks

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available() and ranks.is_possible),
    reason="this torch has no gloo, or no DTensor",
)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each rank finds: starting them takes most of the time."""
    return run_on_ranks(ranks.WORLD, ranks.find, seconds=90)


def test_every_value_is_right(found: list[dict[str, Any]]) -> None:
    """Also where torch's own styles split and join values."""
    for each in (one["tensor parallel"] for one in found):
        law = each["law"]
        assert law.names == []
        assert law.wrong == {}
        assert law.refused == {}
        assert law.right > 50
        assert {kind for kind in law.kinds if kind.startswith("split")}
        assert each["gradients of weights"] == []
        assert each["is the model's output"]
        assert each["placements"] == [
            "split along dimension 2",
            "replicated",
            "split along dimension 0",
        ]


def test_one_collective_a_patched_visit(found: list[dict[str, Any]]) -> None:
    """And none where each process holds the whole value."""
    for each in found:
        assert each["tensor parallel"]["collectives"] == [1, 0]


def test_refusals(found: list[dict[str, Any]]) -> None:
    for each in (one["tensor parallel"]["refused"] for one in found):
        assert "the graphs of a model that is sharded over processes do not run" in each["verify"]
        assert "the graphs of a model that is sharded over processes do not run" in each["copy"]
        assert "leave executor= out" in each["executor"]
        assert "computes with DTensors, which derivative rules cannot follow" in each["rules"]
        assert each["metric"].startswith("ExperimentError: the metric differs between the processes: ")
        assert "'blocks_0.hidden' has 16 entries in dimension 2, distributed over processes" in each["longer"]
        assert "held 2 entries of dimension 1 when the model was captured" in each["other sizes"]


def test_ranks_that_differ(found: list[dict[str, Any]]) -> None:
    """Raised on all of them, at once, and the next call works."""
    differ = {
        "none": "'blocks_0.up.output': another kind (none on process 0, ZeroPatch",
        "slice": "'blocks_0.up.output': another value",
        "edited": "'blocks_0.up.output': another value",
        "contents": "'blocks_0.up.output': another value",
        "inputs": "the input 'x': another value",
        "kind": "'blocks_0.up.output': another kind (AddPatch",
        "order": "'blocks_0.up.output': another order",
        "number": "'blocks_0.up.output': another value",
        "input": "the input 'x': another value",
        "input's kind": "the input 'x': another kind (Tensor(1, 3, 8) of float32 on process 0, Tensor(2, 3, 8)",
        "example": "the input 'x': another value",
        "names": "'mul' (reads 1: tables_a here, tables_b there), 'mul_1' (reads 1: tables_b here, tables_a there)",
    }
    one, other = (each["tensor parallel"]["other"] for each in found)
    assert one == other
    for name, what in differ.items():
        assert one[name].startswith("GraphError: ")
        assert what in one[name]
        assert one[name].count(": another ") == (name != "names")  # and nothing else
    assert {one[name] for name in ("same", "function", "last digits", "input's last digits")} == {"it ran"}
    assert one["dict order"]
    assert one["noise"] == [True, True]


def test_fully_sharded(found: list[dict[str, Any]]) -> None:
    """Under FSDP values are whole: names, shapes and numbers are those of the unsharded model, weights included."""
    for each in (one["fully sharded"][has_grad] for one in found for has_grad in (False, True)):
        assert each["names"]
        assert each["components"]
        assert each["differ"] == []
        assert each["weights"] == ["Tensor"]  # copies: the parameters themselves are empty by now
        assert each["wrong"] == []
        assert each["weight patched"]
        assert each["scores"]
        assert each["custom"]  # and the model still runs
    for each in (one["fully sharded"] for one in found):
        assert "whose weights are only whole while the model runs" in each["edges"]


def test_one_process_writes_files(found: list[dict[str, Any]]) -> None:
    for said in (one["fully sharded"]["files"] for one in found):
        assert said["sweep"]
        assert said["files"] == [5, 5]
        assert said["rows"] == said["own rows"] == (2, 3, 16)
        assert "ExperimentError" in said["inputs"]
        assert "the processes give different batches" in said["batches"]


def test_replicated(found: list[dict[str, Any]]) -> None:
    assert all(one["replicated"] for one in found)


def test_pipeline(found: list[dict[str, Any]]) -> None:
    first, second = (one["pipeline"] for one in found)
    assert first["is right"]
    assert second["is right"]
    assert first["other"].startswith("UnknownPathError")
    assert second["other"] == "it ran"


def test_meshes_of_two_dimensions() -> None:
    """Tensor parallelism with replicas, each with inputs and patches of its own, and tensor parallelism within FSDP."""
    for each in run_on_ranks(4, ranks.find_on_mesh, seconds=90):
        assert each["law"].wrong == {}
        assert each["law"].refused == {}
        assert each["law"].right == 8
        assert each["replicas"]
        assert "GraphError: the model is under FSDP and under tensor parallelism at once" in each["within"]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("tensor parallel", "is late"), ("fully sharded", "is slow"), ("fully sharded", "leaves"),
        ("tensor parallel", "raises"),
    ],
)  # fmt: skip
def test_a_process_that_others_wait_for_is_named(kind: str, what: str) -> None:
    """After a while, by a warning; and by the error, once the group of processes gives up."""
    first, second = run_on_ranks(2, ranks.wait_for_others, kind, what, seconds=60, patience=4)
    error, messages, seconds = first
    if what == "is slow":  # by itself
        assert (error, messages) == second[:2] == ("NoneType: None", [])
        return
    assert [message.split("]")[0] for message in messages] == ["[missing process"]
    why = (
        "process 1, which raised ValueError in this call" if what == "raises" else "process 1, which has not made this"
    )
    assert f"process 0 waits for {why}" in messages[0]
    assert second[1] == []
    if what == "is late":
        assert error == second[0] == "NoneType: None"
    else:
        assert error.startswith(f"GraphError: forward: process 0 waits for {why}")
        assert second[0].startswith("ValueError")
        assert seconds < 10
