"""Graphs run node by node: the same bits as their code and the model, each value shown, errors named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    CompiledGraphModule,
    ExtractionOptions,
    GraphError,
    GraphInterpreter,
    PatchableGraph,
    ProbePatch,
    ZeroPatch,
)
from graphpatch_notebook.capture import capture
from graphpatch_notebook.graphs import build_hierarchy
from graphpatch_notebook.graphs.verification import verify
from tests.graphs.models import Layers
from tests.zoo import CASES, TRANSFORMERS, Case, seed_all
from tests.zoo.values import bit_equal

X = torch.linspace(-1, 1, 12).reshape(3, 4)
SOME_TRANSFORMERS = {"gpt2-eager", "bert-eager", "t5-eager", "vit-eager"}
PURE = [
    case for case in CASES if not case.mutates_state and (case not in TRANSFORMERS or case.name in SOME_TRANSFORMERS)
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", PURE, ids=lambda case: case.name)
def test_results_are_those_of_the_model_wherever_graphs_are(case: Case) -> None:
    model = case.build()
    seed_all()
    call = case.example()
    root = build_hierarchy(capture(model, ExtractionOptions(), call.args, call.kwargs))
    if not verify(root, call.args, call.kwargs).is_equal:
        return
    results = []
    for run in (model, GraphInterpreter(root).run):
        seed_all(5)
        call = case.example()  # the model may write into its inputs
        results.append(run(*call.args, **call.kwargs))
    assert bit_equal(results[1], results[0]) is None


def test_every_value_is_shown_under_its_path() -> None:
    model = Layers().eval()
    pg = PatchableGraph(model, X)
    assert pg.verify(X).is_equal
    shown: dict[str, Any] = {}
    pg.interpreter(on_node=shown.__setitem__).run(X)
    probes = {path: ProbePatch() for path in pg.nodes if "|" not in path}
    with pg.patch(probes):
        pg(X)
    assert set(probes) <= set(shown)
    for path, probe in probes.items():
        assert bit_equal(shown[path], probe.activation) is None, path
    order = [path for path in shown if path in probes]
    assert order[0] == "x"
    assert order[-1] == "output"
    assert order.index("h_0.hidden") < order.index("h_1.linear.weight")


class Listed(nn.Module):
    """Calls a module that it does not register: files give it a name of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [Layers().eval()]

    def forward(self, x: Tensor) -> Tensor:
        return self.listed[0](x) * 2


def test_values_inside_of_modules_without_a_path_are_shown_of_loaded_graphs(tmp_path: Path) -> None:
    pg = PatchableGraph(Listed().eval(), X)
    pg.save(tmp_path / "graph.safetensors")
    shown: list[dict[str, Any]] = [{}, {}]
    for graph, values in zip((pg, PatchableGraph.load(tmp_path / "graph.safetensors")), shown, strict=True):
        assert torch.equal(graph.interpreter(on_node=values.__setitem__).run(X), pg(X))
    probes = {path: ProbePatch() for path in pg.nodes if "|" not in path and path.count(".") > 1}
    with pg.patch(probes):
        pg(X)
    for path, probe in probes.items():
        assert bit_equal(shown[0][path], probe.activation) is None, path
        assert bit_equal(shown[1][path], probe.activation) is None, path


def test_neither_generated_code_nor_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pg = PatchableGraph(Layers().eval(), X)
    expected = pg(X)
    monkeypatch.setattr(Layers, "forward", None)
    monkeypatch.setattr(nn.Linear, "forward", None)
    assert torch.equal(pg.interpreter().run(X), expected)
    assert all(
        not module._generated for module in pg._graph_module.modules() if isinstance(module, CompiledGraphModule)
    )


class Arguments(nn.Module):
    def forward(self, a: Tensor, /, b: Tensor, *more: Tensor, scale: float = 2.0, **named: Tensor) -> Tensor:
        return (a + b) * scale + sum(more) + named["c"]


def test_arguments_of_every_kind() -> None:
    pg = PatchableGraph(Arguments(), *(X.clone() for _ in range(4)), c=X.clone())
    args, kwargs = (X, X + 1, X + 2, X + 3), {"c": X + 4}
    assert pg.verify(*args, **kwargs).is_equal
    assert torch.equal(pg.interpreter().run(*args, **kwargs), pg(*args, **kwargs))
    with pytest.raises(TypeError, match="missing a required .*'b'"):
        pg.interpreter().run(X)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def forward(self, x: Tensor, table: dict[str, Tensor]) -> Tensor:
        return self.layers(x) + table["shift"]


def note_of(error: BaseException) -> list[str]:
    (note,) = error.__notes__
    return str(note).splitlines()


def test_an_error_names_the_node() -> None:
    table = {"shift": X}
    pg = PatchableGraph(Failing(), X, table)
    with torch.no_grad():
        pg._module.layers.h[1].linear.weight.set_(torch.ones(4, 7))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        pg.interpreter().run(X, table)
    lines = note_of(caught.value)
    assert lines[0] == "graphpatch: raised by 'layers.h_1.linear.linear' (linear)"
    assert lines[2] == "    return F.linear(input, self.weight, self.bias)"
    assert caught.value.args == ("mat1 and mat2 shapes cannot be multiplied (3x4 and 7x4)",)


def test_patches_are_refused() -> None:
    pg = PatchableGraph(nn.ReLU(), X)
    interpreter = pg.interpreter()
    with pg.patch({"relu": ZeroPatch()}), pytest.raises(GraphError, match="outside of patch"):
        interpreter.run(X)
