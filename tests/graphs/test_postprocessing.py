"""Postprocessing functions, and graphs edited by hand: the edit is what runs, in every call, patched or not."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphpatch_notebook import AddPatch, ExtractionOptions, PatchableGraph, ProbePatch, ZeroPatch
from graphpatch_notebook.errors import GraphError, PatchMapError
from tests.zoo.submodules import Submodules

X = torch.linspace(-1, 1, 12).view(3, 4)


class Block(Submodules, up=(4, 8), down=(8, 4)):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        return x + self.down(hidden)


class Model(Submodules, seed=0, first=Block, second=Block):
    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        x = self.second(self.first(x))
        return x if shift is None else x + shift

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))


def node_called(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def steer(graph_module: Any, module: nn.Module) -> None:
    """Adds a vector of the graph module's own to `hidden` of the second block."""
    if graph_module.path != "second":
        return
    graph_module.direction = torch.linspace(-3, 3, 8)
    hidden = node_called(graph_module.graph, "hidden")
    with graph_module.graph.inserting_after(hidden):
        direction = graph_module.graph.get_attr("direction")
    with graph_module.graph.inserting_after(direction):
        steered = graph_module.graph.create_node("call_function", operator.add, (hidden, direction), name="steered")
    hidden.replace_all_uses_with(steered, delete_user_cb=lambda user: user is not steered)


def steered(model: Model, x: Tensor, change: Any = lambda value: value) -> Tensor:
    x = model.first(x)
    hidden = change(torch.relu(model.second.up(x)) + torch.linspace(-3, 3, 8))
    return x + model.second.down(hidden)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def pg(model: Model) -> PatchableGraph:
    return second_edited(model)


def test_the_edit_is_what_runs_and_the_model_is_left_alone(model: Model, pg: PatchableGraph) -> None:
    plain = Model()(X)
    assert torch.equal(pg(X), steered(model, X))
    assert torch.equal(pg._graph_module(X), steered(model, X))
    assert torch.equal(model(X), plain)
    assert not hasattr(model.second, "direction")
    assert list(model.state_dict()) == list(Model().state_dict())


def test_new_nodes_have_names_shapes_and_patches(model: Model, pg: PatchableGraph) -> None:
    assert pg.nodes["second.steered"].shape is None  # not known before it runs
    assert pg.nodes["second.direction"].value == "Tensor(8)"
    assert "steered: (not known)" in repr(pg.graph.second)
    assert "steered = hidden + direction" in pg.graph.second._code
    probe = ProbePatch()
    with pg.patch({"second.steered": [ZeroPatch(slice=(..., 0)), probe], "first.output": AddPatch(value=1.0)}):
        found = pg(X)
    assert torch.all(probe.activation[..., 0] == 0)
    block, x = model.second, model.first(X) + 1.0
    hidden = torch.relu(block.up(x)) + torch.linspace(-3, 3, 8)
    hidden[..., 0] = 0
    assert torch.equal(found, x + block.down(hidden))
    with pg.patch({"second.direction": ZeroPatch()}):
        assert torch.equal(pg(X), model(X))


def test_one_of_several_calls_is_edited_alone() -> None:
    class Twice(Submodules, block=Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    def negate(graph_module: Any, module: nn.Module) -> None:
        if graph_module.path == "block_1":
            output = node_called(graph_module.graph, "output")
            with graph_module.graph.inserting_before(output):
                output.args = (graph_module.graph.call_function(torch.neg, output.args),)

    model = Twice()
    pg = PatchableGraph(model, ExtractionOptions(postprocessing_function=negate), X)
    assert torch.equal(pg(X), -model.block(model.block(X)))
    with pg.patch({"block_0.output": ZeroPatch()}):
        assert torch.equal(pg(X), -model.block(torch.zeros_like(X)))


def second_edited(model: Model) -> PatchableGraph:
    return PatchableGraph(model, ExtractionOptions(postprocessing_function=steer), X)


def test_hooks_run_once_and_count_once(model: Model) -> None:
    """Before and after capture, on the edited module and below it: each runs once, and changes values once."""
    calls: list[str] = []

    def counting(name: str, change: Any) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Any:
            calls.append(name)
            return change(output)

        return hook

    model.second.register_forward_hook(counting("edited before", lambda output: output * 2))
    model.second.down.register_forward_hook(counting("below before", lambda output: output * 3))
    model.second.up.register_forward_hook(counting("collecting", lambda output: None))
    pg = second_edited(model)
    model.second.register_forward_hook(counting("edited since", lambda output: output * 5))
    model.second.down.register_forward_hook(counting("below since", lambda output: output * 7))
    model.second.down.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.second.down.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    calls.clear()
    found = pg(X)
    assert sorted(calls) == ["below before", "below since", "collecting", "edited before", "edited since"]
    x = model.first(X)
    hidden = torch.relu(nn.functional.linear(x, model.second.up.weight, model.second.up.bias))
    hidden = hidden + torch.linspace(-3, 3, 8) + 1
    down = nn.functional.linear(hidden, model.second.down.weight, model.second.down.bias)
    torch.testing.assert_close(found, (x + down * 3 * 7) * 2 * 5)


def test_hooks_that_write_in_place_are_an_error(model: Model) -> None:
    model.second.down.register_forward_hook(lambda module, args, output: output.mul_(2))
    pg = second_edited(model)
    with pytest.raises(GraphError):
        pg(X)


def test_errors_name_the_node_and_the_users_line(model: Model) -> None:
    def drop(graph_module: Any, module: nn.Module) -> None:
        if graph_module.path == "second":
            add = node_called(graph_module.graph, "add")
            with graph_module.graph.inserting_before(add):
                add.args = (graph_module.graph.call_method("flatten", (add.args[0],)), add.args[1])

    pg = PatchableGraph(model, ExtractionOptions(postprocessing_function=drop), X)
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        pg(X)
    note = "\n".join(caught.value.__notes__)
    assert "raised by 'second.add' (add)" in note
    assert "return x + self.down(hidden)" in note


# -- what an edited graph leaves out -------------------------------------------------------------------------------


class Options(Submodules, linear=(4, 4)):
    def forward(
        self, x: Tensor, mask: Tensor | None = None, negate: bool = False, scale: float = 2.0, **more: Any
    ) -> Tensor:
        x = nn.functional.dropout(self.linear(x), 0.5, self.training) * scale
        x = x if mask is None else x * mask
        x = x + more["shift"] if "shift" in more else x
        return -x if negate else x


def double(graph_module: Any, module: nn.Module) -> None:
    if graph_module.path == "":
        output = node_called(graph_module.graph, "output")
        with graph_module.graph.inserting_before(output):
            output.args = (graph_module.graph.call_function(operator.mul, (output.args[0], 2)),)


def options_pg(*args: Any, **kwargs: Any) -> tuple[nn.Module, PatchableGraph]:
    model = Options().eval()
    return model, PatchableGraph(model, ExtractionOptions(postprocessing_function=double), *args, **kwargs)


def test_one_tensor_as_several_inputs_is_not_recorded_as_two() -> None:
    model, pg = options_pg(X, X, shift=X)
    y = torch.randn(5, 4)
    assert torch.equal(pg(y, y, shift=y), model(y, y, shift=y) * 2)
    with pytest.raises(GraphError, match=r"'more\|shift'.*'x'"):
        pg(y, y, shift=y + 1)
    with pytest.raises(PatchMapError, match="'mask'"):
        pg.patch({"mask": ZeroPatch()}).__enter__()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"mask": X}, r"'mask' is Tensor\(3, 4\) of float32, and was None in the example"),
        ({"shift": X}, r"'more\|shift' is Tensor\(3, 4\) of float32, and was absent in the example"),
        ({"scale": 3.0}, "'scale' is 3.0, and was 2.0 in the example"),
        ({"negate": True}, "'negate' is True, and was False in the example"),
    ],
)
def test_inputs_that_the_graph_leaves_out_are_an_error(given: dict[str, Any], what: str) -> None:
    _, pg = options_pg(X)
    for each in (pg, copy.deepcopy(pg)):
        with pytest.raises(GraphError, match=f"'<root>' .Options.: the input {what}"):
            each(X, **given)


def test_patches_on_what_the_graph_has_in_it_are_an_error() -> None:
    _, pg = options_pg(X)
    with pytest.raises(PatchMapError, match="'scale'"):
        pg.patch({"scale": ZeroPatch()}).__enter__()
    probe = ProbePatch()
    with pg.patch({"scale": probe}):
        pg(X)
    assert probe.activation == 2.0


def test_another_mode_is_an_error() -> None:
    _, pg = options_pg(X)
    with pytest.raises(GraphError, match="pg.eval"):
        pg.train()(X)


class Reading(nn.Module):
    """Returns a number, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        return x * 1, bool((x.sum() > 0).item())


class Deciding(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = Reading(), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def inner_decides(module: Any, x: Tensor) -> Tensor:
    x, is_positive = module.inner(x)
    return x * 2 if is_positive else x * 3


@pytest.mark.parametrize(
    ("function", "others", "refused"),
    [
        (lambda m, x: x + 1 if x.sum() > 0 else x - 1, [X + 6, X[:2] + 9], [X - 5]),
        (lambda m, x: sum((x[:, i] * i for i in range(x.shape[1])), x[:, 0]), [X + 6], [X[:, :3] + 5]),
        (lambda m, x: x * len(x) if x.shape[1] > 3 else x, [X + 6], [X[:, :3] + 5, X[:1] + 5]),
        (lambda m, x: x.view(x.shape[0] * 2, -1) / x.shape[1], [X + 6, X[:, :2] + 9], []),
        (lambda m, x: (x.float() * 1.1).to(x.dtype), [X + 6, X[:1] + 9], [X.double() + 5]),
        (inner_decides, [X + 6, X[:1] + 9], [X - 5]),
    ],
    ids="branch loop len arithmetic dtype inner".split(),
)
def test_calls_of_which_the_graph_has_other_constants_are_an_error(function: Any, others: Any, refused: Any) -> None:
    model = Deciding(function)
    pg = PatchableGraph(model, ExtractionOptions(postprocessing_function=double), X + 5)
    for each in (pg, copy.deepcopy(pg)):
        for x in others:
            assert torch.equal(each(x), model(x) * 2)
        for x in refused:
            with pytest.raises(GraphError, match="this call"):
                each(x)
            with pytest.raises(GraphError, match="this call"):
                each._graph_module(x)
