"""Positions of each row of the batch: the same as hooks that change each row at its own positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    FromPatch,
    PatchableGraph,
    PatchMapError,
    PatchValueError,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)
from graphpatch_notebook.patchable_graph import captured
from tests.tiny_models import gpt2
from tests.zoo import CASES
from tests.zoo.case import tokens
from tests.zoo.submodules import Submodules

LENGTH = 7
ENDS = [3, 5, 2]
INPUTS = tokens(3, LENGTH)
BY_ROW = {
    "lists": [[end] for end in ENDS],
    "tensor": torch.tensor(ENDS)[:, None],
    "array": np.array(ENDS)[:, None],
    "tensors": list(torch.tensor(ENDS)[:, None]),
}


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    """Returns a model that was captured with one row."""
    case = next(case for case in CASES if case.name == "gpt2-eager")
    return PatchableGraph(case.build(), tokens(1, LENGTH))


def layer(pg: PatchableGraph, number: int) -> nn.Module:
    return captured(pg).module.transformer.h[number].mlp


def hooked(pg: PatchableGraph, positions: list[list[int]], number: int = 0) -> Tensor:
    """Returns the logits with the MLP's output zero at the positions of each row."""

    def zero(module: nn.Module, args: object, output: Tensor) -> Tensor:
        output = output.clone()
        for row, own in enumerate(positions):
            for position in own:
                output[row, position] = 0
        return output

    with layer(pg, number).register_forward_hook(zero):
        return captured(pg).module(INPUTS).logits


MLP = "transformer.h_0.mlp.output"


@pytest.mark.parametrize("form", BY_ROW)
def test_each_row_is_patched_at_its_own_position(pg: PatchableGraph, form: str) -> None:
    for path in (MLP, "layers[0].mlp_out"):
        with pg.patch({path: ZeroPatch(positions=BY_ROW[form])}):
            patched = pg(INPUTS).logits
        assert torch.equal(patched, hooked(pg, BY_ROW["lists"]))
    with pg.patch({MLP: ZeroPatch(positions=ENDS)}):  # one dimension: several positions of all rows
        assert torch.equal(pg(INPUTS).logits, hooked(pg, [ENDS] * 3))


@pytest.mark.parametrize("path", ["layers[0].attn.z", "layers[0].attn.heads[1].z", "layers[0].attn.pattern", MLP])
def test_reading_gives_the_positions_of_each_row(pg: PatchableGraph, path: str) -> None:
    wanted = torch.tensor([[0, 3], [4, 5], [2, 6]])
    component = next(iter(pg.components.lookup(path))) if path != MLP else None
    axes = component.axes if component else ("batch", "position", "channel")
    whole = pg.record(path, INPUTS)[path]
    if whole.dim() < len(axes):
        axes = tuple(axis for axis in axes if axis != "head")
    batch = axes.index("batch")
    along = next(dim for dim, axis in enumerate(axes) if axis in ("position", "query"))
    read = pg.record(path, INPUTS, positions=wanted)[path]
    for row in range(3):
        expected = whole.select(batch, row).index_select(along - (batch < along), wanted[row])
        assert torch.equal(read.select(batch, row), expected)


@pytest.mark.parametrize(
    ("patches", "message"),
    [
        ({MLP: ZeroPatch(positions=[[3], 5, [2]])}, "whole numbers for each row"),
        ({MLP: ZeroPatch(positions=[[3], [], [2]])}, "selects nothing in a row"),
        ({MLP: ZeroPatch(positions=[[3], [True], [2]])}, "whole numbers for each row"),
        ({MLP: ProbePatch(positions=[[3], [4, 5], [2]])}, "a different number of positions in some rows"),
        ({"transformer.wpe.output": ZeroPatch(positions=[[3], [5], [2]])}, "holds the batch"),
        ({MLP: ReplacePatch(value=torch.ones(7, 1), positions=3)}, r"shape \(7, 1\).*shape \(1, 7, 48\)"),
        ({"layers[0].mlp.post[:, :, 5]": ReplacePatch(value=torch.ones(7))}, r"shape \(7,\).*shape \(1, 7\)"),
        (
            {"layers[0].attn.pattern": ReplacePatch(value=torch.ones(7), positions=3, position_dim=3)},
            r"shape \(7,\).*one entry for each position",
        ),
        ({"layers[0].mlp_out[0]": ZeroPatch(positions=[[3], [5], [2]])}, "rows of the batch"),
    ],
)
def test_what_cannot_be_is_an_error_on_entry(pg: PatchableGraph, patches: dict[str, ZeroPatch], message: str) -> None:
    with pytest.raises(PatchMapError, match=message), pg.patch(patches):
        pytest.fail("entered")


class Reader(
    Submodules,
    embed=partial(nn.Embedding, 200, 8),
    states=lambda: nn.Parameter(torch.randn(1, 4, 8)),
    layers=lambda: nn.ModuleList(ReaderLayer() for _ in range(2)),
):
    """Layers of a few states that attend to all tokens, as in Perceiver."""

    def forward(self, input_ids: Tensor) -> Tensor:
        tokens = self.embed(input_ids)
        states = self.states.expand(len(input_ids), -1, -1)
        for layer in self.layers:
            states = layer(states, tokens)
        return states


class ReaderLayer(Submodules, q=(8, 8), k=(8, 8), v=(8, 8), o=(8, 8)):
    def forward(self, states: Tensor, tokens: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (self.q(states), self.k(tokens), self.v(tokens))
        )
        pattern = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return states + self.o((pattern @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("positions", [2, [[3], [5], [2]]])
def test_positions_are_not_taken_from_keys_where_queries_are_not_tokens(positions: Any) -> None:
    graph = PatchableGraph(Reader().eval(), INPUTS)
    (name,) = graph.components.lookup("layers[1].cross_attn.pattern")
    for path in (name.name, name.path):
        with pytest.raises(PatchMapError, match="if those of keys are meant, give position_dim=3"):
            graph.patch({path: ZeroPatch(positions=positions)}).__enter__()
        whole, patched = RecordPatch(), RecordPatch()
        chosen = ZeroPatch(positions=positions, position_dim=3)
        with graph.patch({path: [whole, chosen, patched]}):
            graph(INPUTS)
        expected = whole.activations[0].clone()
        for row, each in enumerate([positions] * 3 if isinstance(positions, int) else positions):
            expected[row, ..., each] = 0
        assert torch.equal(patched.activations[0], expected)


def test_another_number_of_rows_is_an_error(pg: PatchableGraph) -> None:
    patches = {MLP: ZeroPatch(positions=[[3], [5]])}
    with pytest.raises(PatchValueError, match="positions has 2 rows, but"), pg.patch(patches):
        pg(INPUTS)


@pytest.mark.parametrize(
    ("name", "positions", "part"),
    [
        ("layers[0].attn.heads[1].z", None, lambda grad: grad[:, :, 1]),
        ("layers[1].mlp.post[:, :, 3:9]", None, lambda grad: grad[:, :, 3:9]),
        ("layers[0].resid_post", 2, lambda grad: grad[:, 2:3]),
        ("layers[0].resid_post", [[1], [3]], lambda grad: torch.stack([grad[0, 1:2], grad[1, 3:4]])),
        ("layers[1].attn.heads[0].z", [1, 3], lambda grad: grad[:, [1, 3], 0]),
    ],
)
def test_parts_that_are_read_have_gradients(name: str, positions: Any, part: Any) -> None:
    torch.manual_seed(0)
    ids = torch.arange(10).view(2, 5)
    graph = PatchableGraph(gpt2(width=8, vocabulary=20, n_positions=16), ids)
    whole, probe = ProbePatch(), ProbePatch(positions=positions)
    with graph.patch({graph.components.lookup(name)[0].path: whole}):
        expected = graph(ids).logits
        whole.activation.retain_grad()
        expected[:, -1, 3].sum().backward()
    with graph.patch({name: probe}):
        found = graph(ids).logits
        probe.activation.retain_grad()
        found[:, -1, 3].sum().backward()
    assert torch.equal(found, expected)
    component = graph.components.lookup(name)[0]
    value, grad = component.seen(whole.activation), component.seen(whole.activation.grad)
    assert torch.equal(probe.activation, part(value))
    torch.testing.assert_close(probe.activation.grad, part(grad))


SOURCE = "transformer.h_0.ln_2.output"
VECTOR = torch.linspace(-1, 1, 48)
ALL_KINDS: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "zero": (ZeroPatch, lambda value, source: value * 0),
    "add": (lambda **at: AddPatch(value=VECTOR, **at), lambda value, source: value + VECTOR),
    "replace": (lambda **at: ReplacePatch(value=VECTOR, **at), lambda value, source: VECTOR.expand_as(value)),
    "custom": (lambda **at: CustomPatch(lambda value: value.flip(1), **at), lambda value, source: value.flip(1)),
    "other": (lambda **at: FromPatch(SOURCE, **at), lambda value, source: source),
    "rows": (lambda **at: FromPatch(MLP, rows=[2, 0, 1], **at), lambda value, source: value[[2, 0, 1]]),
}


@pytest.mark.parametrize("positions", [4, [1, 5], [[3], [5], [2]]], ids=str)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_each_kind_at_positions_is_what_it_does_with_the_whole_value_there(
    pg: PatchableGraph, kind: str, positions: Any
) -> None:
    make, whole = ALL_KINDS[kind]
    model, kept = captured(pg).module, []
    rows = positions if isinstance(positions, list) and isinstance(positions[0], list) else [np.ravel(positions)] * 3

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        kept.append(output)

    def change(module: nn.Module, args: object, output: Tensor) -> Tensor:
        result, changed = output.clone(), whole(output, kept[-1])
        for row, own in enumerate(rows):
            result[row, list(own)] = changed[row, list(own)]
        return result

    with model.transformer.h[0].ln_2.register_forward_hook(keep), layer(pg, 0).register_forward_hook(change):
        expected = model(INPUTS).logits
    with pg.patch({MLP: make(positions=positions)}):
        torch.testing.assert_close(pg(INPUTS).logits, expected, atol=1e-6, rtol=1e-6)
    assert not torch.equal(expected, model(INPUTS).logits)
