"""Custom extraction functions in a captured model: where their graphs run, and what becomes of functions that fail."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphpatch_notebook import (
    AddPatch,
    CompiledGraphModule,
    ExtractionOptions,
    OpaqueGraphModule,
    PatchableGraph,
    ZeroPatch,
)
from tests.zoo.submodules import Submodules

X = torch.ones(2, 3)


class Scale(nn.Module):
    def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor


class Model(Submodules, scale=Scale, linear=(3, 3)):
    def forward(self, x: Tensor, times: int = 1, is_late: bool = False) -> Tensor:
        for _ in range(times):
            x = self.scale(x)
        x = self.linear(x)
        return self.scale(x, 3.0) if is_late else x


def tenfold(module: nn.Module) -> fx.Graph:
    """A graph that does not do what the module does: so that it can be told which of them ran."""
    graph = fx.Graph()
    given, factor = graph.placeholder("x"), graph.placeholder("factor")
    product = graph.call_function(operator.mul, (given, factor))
    product.name = "product"
    graph.output((graph.call_function(operator.mul, (product, 10)),))
    return graph


def options(function: Callable[[nn.Module], Any], **others: Any) -> ExtractionOptions:
    return ExtractionOptions(custom_extraction_functions={Scale: function}, **others)


def test_the_graph_is_the_module_patched_or_not() -> None:
    model = Model()
    pg = PatchableGraph(model, options(tenfold), X)
    assert torch.equal(pg(X), model.linear(X * 20))
    with pg.patch({"linear.output": AddPatch(1.0)}):
        assert torch.equal(pg(X), model.linear(X * 20) + 1)
    with pg.patch({"scale.product": ZeroPatch()}):
        assert torch.equal(pg(X), model.linear(X * 0))
    assert torch.equal(model(X), model.linear(X * 2))  # the model itself stays as it is


def test_each_call_has_a_graph_and_names_of_its_own() -> None:
    model = Model()
    pg = PatchableGraph(model, options(tenfold), X, times=3)
    assert [path for path in pg.nodes if path.endswith("product")] == [f"scale_{i}.product" for i in range(3)]
    with pg.patch({"scale_1.product": AddPatch(1.0)}, strict=True):
        assert torch.equal(pg(X, times=3), model.linear((X * 20 * 2 + 1) * 10 * 20))


def test_an_extraction_function_overrides_skipping() -> None:
    model = Model()
    for skipping in ({"skip_compilation": True}, {"classes_to_skip_compiling": {Scale}}):
        pg = PatchableGraph(model, options(tenfold, **skipping), X)
        assert torch.equal(pg(X), model.linear(X * 20))
        with pg.patch({"scale.product": ZeroPatch()}):
            assert torch.equal(pg(X), model.linear(X * 0))


def test_subclasses_have_it_too_and_the_nearest_class_wins() -> None:
    class Special(Scale):
        pass

    model = nn.Sequential(Special())
    assert torch.equal(PatchableGraph(model, options(tenfold), X)(X), X * 20)
    nearest = ExtractionOptions(custom_extraction_functions={nn.Module: fails, Scale: tenfold})
    assert torch.equal(PatchableGraph(model, nearest, X)(X), X * 20)


ERROR = LookupError("no graph today")


def fails(module: nn.Module) -> fx.Graph:
    raise ERROR


@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("warn", [False, True])
@pytest.mark.parametrize("is_skipped", [False, True])
def test_a_function_that_raises(error: bool, warn: bool, is_skipped: bool) -> None:
    skipped = {Scale} if is_skipped else set()
    given = options(
        fails, error_on_compilation_failure=error, warn_on_compilation_failure=warn, classes_to_skip_compiling=skipped
    )
    model = Model()
    if error:  # the stronger of the two
        with pytest.raises(LookupError) as caught:
            PatchableGraph(model, given, X)  # a warning would be another error
        assert caught.value is ERROR
        assert "forward" not in model.scale.__dict__
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pg = PatchableGraph(model, given, X)
    became = "became an OpaqueGraphModule" if is_skipped else "was captured without its custom graph"
    expected = [f"'scale' {became}: LookupError: no graph today"] if warn else []
    assert [warning.message.args[0] for warning in told] == expected
    assert all(warning.message.kind == "compilation" and warning.filename == __file__ for warning in told)
    scale = pg._graph_module.scale
    assert isinstance(scale, OpaqueGraphModule if is_skipped else CompiledGraphModule)
    assert ("scale.mul" in pg.nodes) is not is_skipped
    assert torch.equal(pg(X), model(X))
    assert scale.reason.endswith("its custom extraction function raised LookupError: no graph today")
    assert "raised LookupError: no graph today" in str(pg.graph.scale._code)
    with pg.patch({"scale.output": ZeroPatch()}):
        assert torch.equal(pg(X), model.linear(X * 0))
