"""Models sharded over two processes: what is refused, what is right, and that nothing reads memory that was freed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from tests.distributed import ranks

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available() and ranks.is_possible),
    reason="this torch has no gloo, or no DTensor",
)

SHARDED = "the model is sharded over 2 processes"
REPAIR = "zero or probe whole values (ZeroPatch(), ProbePatch()), or run the model unsharded"


def test_sharded_models(tmp_path: Path) -> None:
    """One test: starting the processes takes most of its time. They end by themselves."""
    torch.multiprocessing.spawn(ranks.main, (str(tmp_path),), nprocs=ranks.WORLD)
    for rank in range(ranks.WORLD):
        found = pickle.loads((tmp_path / f"rank{rank}").read_bytes())
        check_refusals(found["tensor parallel"])
        check_what_stays(found["tensor parallel"])
        for has_grad in (False, True):
            check_fully_sharded(found["fully sharded"][has_grad])
        assert "slice= would be applied to this process's part" in found["by tp_size"]["slice"]
        assert found["of one process"] == {"slice": "it ran"}


def check_refusals(found: dict[str, Any]) -> None:
    """Each before anything runs, with what is wrong and what may be done."""
    assert found["ran"] == 0
    why = {
        "slice": "slice= would be applied to this process's part of the value",
        "positions": "positions= would be applied to this process's part of the value",
        "add": "its value would be written into this process's part of the value",
        "replace": "its value would be written into this process's part of the value",
        "parameter": "this process holds a part of the parameter",
    }
    assert found["refused"].keys() == why.keys()
    for name, said in found["refused"].items():
        assert said.startswith("PatchMapError: ")
        assert "'blocks_0." in said
        assert f"{SHARDED}, and {why[name]}" in said
        assert said.endswith(REPAIR)
    assert f"{SHARDED}, and {why['slice']}" in found["sweep"]
    for name, said in found["experiments"].items():
        assert SHARDED in said, name
        assert said.endswith(REPAIR)


def check_what_stays(found: dict[str, Any]) -> None:
    """Whole values can be zeroed and probed; that they are local is said."""
    assert found["wrong"] == []
    ((category, text),) = found["warned"]
    assert category == "ShardedValueWarning"
    assert text.startswith(f"{SHARDED}: on each of them a patch sees what is there of a value")
    assert found["is the model's output"]
    assert found["probed"]
    assert found["weight"]
    assert found["pattern"] == (2, 2, 3, 3)  # two of four heads


def check_fully_sharded(found: dict[str, Any]) -> None:
    """Under FSDP values are whole: names, shapes and numbers are those of the unsharded model, weights included."""
    assert found["names"]
    assert found["differ"] == []
    assert found["weights"] == ["Tensor"]  # copies: the parameters themselves are empty by now
    assert found["wrong"] == []
    assert found["weight patched"]
    assert found["scores"]
    assert found["custom"]  # and the model still runs
