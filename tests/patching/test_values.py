"""Patches on values of all kinds, and the errors that only the run can show."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    FromPatch,
    GraphPatchWarning,
    PatchableGraph,
    PatchValueError,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)
from tests.integrations.test_torch_compile import gpt2


class Numbers(nn.Module):
    """Values that are no tensors, and decide what happens."""

    def forward(self, x: Tensor, steps: int = 2, scale: float = 0.5, is_shifted: bool = False) -> Tensor:
        total = x.sum().item()
        for _ in range(steps):
            x = x * scale
        if (x > 0).all():
            x = x + total
        return x + 1 if is_shifted else x


X = torch.ones(2, 2)


def patched(pg: PatchableGraph, path: str, patch: Any, *args: Any) -> Tensor:
    with pg.patch({path: patch}, strict=True):
        return pg(*args)


def test_ints_floats_and_bools_are_patched() -> None:
    pg = PatchableGraph(Numbers(), X, 2, 0.5, False)
    assert torch.equal(pg(X, 2, 0.5, False), torch.full((2, 2), 4.25))
    assert torch.equal(patched(pg, "steps", ReplacePatch(0), X, 2, 0.5, False), torch.full((2, 2), 5.0))
    assert torch.equal(patched(pg, "scale", AddPatch(0.5), X, 2, 0.5, False), torch.full((2, 2), 5.0))
    assert torch.equal(patched(pg, "is_shifted", ReplacePatch(True), X, 2, 0.5, False), torch.full((2, 2), 5.25))
    assert torch.equal(patched(pg, "total", ZeroPatch(), X, 2, 0.5, False), torch.full((2, 2), 0.25))
    assert torch.equal(patched(pg, "bool", ReplacePatch(False), X, 2, 0.5, False), torch.full((2, 2), 0.25))


@pytest.mark.parametrize(
    ("patch", "parts"),
    [
        (ReplacePatch(torch.ones(3)), ["ReplacePatch on 'relu' (relu)", "(2, 2)", "(3,)", "must broadcast"]),
        (AddPatch(torch.ones(5, 2)), ["AddPatch on 'relu' (relu)", "(2, 2)", "(5, 2)"]),
        (ZeroPatch(slice=7), ["ZeroPatch on 'relu' (relu)", "slice [7]", "(2, 2)", "out of bounds"]),
        (AddPatch(torch.ones(2, 2, dtype=torch.complex64)), ["relu", "complex64", "float32"]),
        (ReplacePatch(torch.ones(2, 2, device="meta")), ["relu", "meta"]),
    ],
)
def test_errors_of_the_run_name_path_op_and_both_shapes(patch: Any, parts: list[str]) -> None:
    pg = PatchableGraph(nn.ReLU(), X)
    with pytest.raises(PatchValueError, match=re.escape(parts[0])) as caught:
        patched(pg, "relu", patch, X)
    assert all(part in str(caught.value) for part in parts)


def test_several_patches_run_in_order_and_contexts_add_up() -> None:
    pg = PatchableGraph(nn.ReLU(), X)
    with pg.patch({"relu": [AddPatch(1.0), ReplacePatch(5.0, slice=0)]}):
        with pg.patch({"relu": CustomPatch(lambda value: value * 2)}):
            assert torch.equal(pg(X), torch.tensor([[10.0, 10.0], [4.0, 4.0]]))
        assert torch.equal(pg(X), torch.tensor([[5.0, 5.0], [2.0, 2.0]]))
    assert torch.equal(pg(X), X)


class WritesLater(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept = x + 1
        left = kept[:, 0]
        left.fill_(7.0)
        return kept * 1


def test_probes_hold_what_came_up_not_what_was_written_later() -> None:
    pg = PatchableGraph(WritesLater(), X)
    kept, left = ProbePatch(), ProbePatch()
    with pg.patch({"kept": kept, "left": left}):
        pg(X)
    assert torch.equal(kept.activation, torch.full((2, 2), 2.0))
    assert torch.equal(left.activation, torch.full((2,), 2.0))


def test_what_is_read_is_what_came_up_not_what_was_written_later() -> None:
    assert torch.equal(patched(PatchableGraph(WritesLater(), X), "mul", FromPatch("kept"), X), torch.full((2, 2), 2.0))


def test_a_patched_view_that_is_filled_later_is_warned_of() -> None:
    pg = PatchableGraph(WritesLater(), X)
    with pytest.warns(GraphPatchWarning, match="'left' is a view through which the model later writes"):
        patched(pg, "left", ZeroPatch(), X)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y += 1
        y[0] = 5.0
        return y * 2


def test_patches_on_in_place_operations_are_written_back() -> None:
    pg = PatchableGraph(InPlace(), X)
    assert torch.equal(patched(pg, "y_1", ZeroPatch(), X), torch.tensor([[10.0, 10.0], [0.0, 0.0]]))
    assert torch.equal(patched(pg, "setitem", AddPatch(1.0), X), torch.tensor([[12.0, 12.0], [6.0, 6.0]]))
    with pytest.raises(PatchValueError, match="writes in place into a tensor of shape"):
        patched(pg, "y_1", CustomPatch(lambda value: value[0]), X)


class Reads(TorchDispatchMode):
    """Counts what reads values into Python: on a GPU, it would wait for them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_patched_runs_read_no_values_into_python() -> None:
    model, ids = gpt2()
    pg, value = PatchableGraph(model, ids), torch.ones(16)
    everything = {path: ProbePatch() for path, node in pg.nodes.items() if node.shape is not None}
    added = {"layers[0].resid_post": AddPatch(value=value, positions=[1]), "layers[1].attn.pattern": RecordPatch()}
    head = {"layers[0].attn.heads[1].z": ZeroPatch(), "layers[1].mlp_out": ReplacePatch(value=value, slice=(0, 2))}
    weight = {"transformer.h_0.mlp.c_fc.weight": AddPatch(value=1.0, slice=slice(0, 3))}
    with Reads() as reads:
        model(ids)
    own = reads.count  # of a mask
    for patches in (everything, head | added | weight):
        with pg.patch(patches), Reads() as reads:
            pg(ids)
            pg(ids)
        assert reads.count == 2 * own
    with pg.patch({"layers[0].mlp_out": CustomPatch(lambda given: given * given.sum().item())}), Reads() as reads:
        pg(ids)
    assert reads.count == own + 1


@torch.no_grad()
def test_patches_on_in_place_operations_of_an_edited_graph_are_written_back() -> None:
    pg = PatchableGraph(InPlace(), X)
    edited: Any = pg._graph_module
    output = next(node for node in edited.graph.nodes if node.op == "output")
    with edited.graph.inserting_before(output):
        output.args = (edited.graph.call_function(torch.neg, (output.args[0],)),)
    edited.recompile()
    assert torch.equal(patched(pg, "setitem", AddPatch(1.0), X), -torch.tensor([[12.0, 12.0], [6.0, 6.0]]))
    assert torch.equal(patched(pg, "y_1", ZeroPatch(), X), -torch.tensor([[10.0, 10.0], [0.0, 0.0]]))


def test_what_is_a_number_now_and_was_a_tensor_is_an_error() -> None:
    pg = PatchableGraph(Numbers(), X, 2, X)
    with pytest.raises(PatchValueError, match="but is of type float now"):
        patched(pg, "scale", ReplacePatch(X), X, 2, 0.5)
