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
from graphpatch_notebook.errors import CaptureError, GraphError, GraphPatchWarning, PatchMapError, UnknownPathError
from graphpatch_notebook.graphs import code_generations
from tests.tiny_models import gpt2

X = torch.linspace(-1, 1, 12).view(3, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(), Block()

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


def test_methods_of_the_model_run_the_edit(model: Model, pg: PatchableGraph) -> None:
    assert torch.equal(pg.twice(X), steered(model, steered(model, X)))


def test_new_nodes_have_names_shapes_and_patches(model: Model, pg: PatchableGraph) -> None:
    assert pg.nodes["second.steered"].shape == (3, 8)
    assert pg.nodes["second.direction"].value == "Tensor(8)"
    assert "steered: Tensor(3, 8)" in repr(pg.graph.second)
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


def test_lazy_code_goes_stale_and_is_generated_anew(model: Model) -> None:
    before = code_generations()
    pg = PatchableGraph(model, ExtractionOptions(postprocessing_function=steer), X)
    assert code_generations() == before
    pg(X), pg(X)
    assert code_generations() == before + 1  # of the edited graph; no other one runs
    graph_module = pg._graph_module.second
    node_called(graph_module.graph, "steered").target = operator.sub
    graph_module.recompile()
    assert code_generations() == before + 1
    x = model.first(X)
    expected = x + model.second.down(torch.relu(model.second.up(x)) - torch.linspace(-3, 3, 8))
    assert torch.equal(pg(X), expected)
    assert torch.equal(pg(X), expected)
    assert code_generations() == before + 2


def test_nodes_that_are_gone_are_unknown(model: Model) -> None:
    def without_relu(graph_module: Any, module: nn.Module) -> None:
        if isinstance(module, Block):
            hidden = node_called(graph_module.graph, "hidden")
            hidden.replace_all_uses_with(hidden.args[0])
            graph_module.graph.erase_node(hidden)

    pg = PatchableGraph(model, ExtractionOptions(postprocessing_function=without_relu), X)
    x = X + model.first.down(model.first.up(X))
    assert torch.equal(pg(X), x + model.second.down(model.second.up(x)))
    with pytest.raises(UnknownPathError, match="no node 'hidden' in first"), pg.patch({"first.hidden": ZeroPatch()}):
        pass


def test_copies_keep_the_edit(model: Model, pg: PatchableGraph) -> None:
    copied = copy.deepcopy(pg)
    assert torch.equal(copied(X), steered(model, X))
    with copied.patch({"second.steered": ZeroPatch()}):
        assert torch.equal(copied(X), steered(model, X, torch.zeros_like))
    assert torch.equal(pg(X), steered(model, X))


def test_one_of_several_calls_is_edited_alone() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

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
    with pytest.raises(GraphError, match="forward hook .*lambda.* of a Linear writes into a tensor in place"):
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


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

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
    with pytest.raises(GraphError, match=r"'more\|shift' is not the same tensor as 'x'"):
        pg(y, y, shift=y + 1)
    with pytest.raises(PatchMapError, match="'mask' was the same tensor as another input of the example"):
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
        with pytest.raises(GraphError, match=f"'<root>' .Options. is not valid for this call: the input {what}"):
            each(X, **given)


def test_patches_on_what_the_graph_has_in_it_are_an_error() -> None:
    _, pg = options_pg(X)
    with pytest.raises(
        PatchMapError, match=r"'scale' was float\(2.0\) in the example, and the edited graph always uses"
    ):
        pg.patch({"scale": ZeroPatch()}).__enter__()
    probe = ProbePatch()
    with pg.patch({"scale": probe}):
        pg(X)
    assert probe.activation == 2.0


def test_another_mode_is_an_error() -> None:
    _, pg = options_pg(X)
    with pytest.raises(GraphError, match="captured in eval mode, and the module is in train mode now; call pg.eval"):
        pg.train()(X)


def test_graphs_that_cannot_run_again_are_an_error_at_once() -> None:
    class Cache:
        def __init__(self) -> None:
            self.values: list[Tensor] = []

    class Inner(nn.Module):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.values.append(x)
            return x * 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, Cache())

    with pytest.raises(CaptureError, match=r"'<root>' .Outer. uses an object .Cache. that existed only while"):
        PatchableGraph(Outer(), ExtractionOptions(postprocessing_function=double), X)


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
            with pytest.raises(GraphError, match="is not valid for this call"):
                each(x)
            with pytest.raises(GraphError, match="is not valid for this call"):
                each._graph_module(x)


def test_modes_that_no_graph_has_in_it_are_an_error_at_once() -> None:
    def switching(module: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module.inner(x)[0] @ x.T

    with pytest.raises(CaptureError, match="'<root>'.*autocast"):
        PatchableGraph(Deciding(switching), ExtractionOptions(postprocessing_function=double), X)


def test_generation_with_edited_blocks_gives_what_hooks_give() -> None:
    torch.manual_seed(0)
    model = gpt2(vocabulary=31, n_positions=32)
    ids = torch.randint(1, 31, (2, 5))

    def halve(graph_module: Any, module: nn.Module) -> None:
        if graph_module.path in ("transformer.h_0", "transformer.h_1.mlp"):
            output = node_called(graph_module.graph, "output")
            value = output.args[0][0] if isinstance(output.args[0], tuple) else output.args[0]
            with graph_module.graph.inserting_before(output):
                half = graph_module.graph.call_function(operator.mul, (value, 0.5))
            output.args = ((half, *output.args[0][1:]) if isinstance(output.args[0], tuple) else half,)

    with pytest.warns(GraphPatchWarning, match="transformer.h_0.*DynamicCache"):
        pg = PatchableGraph(model, ExtractionOptions(postprocessing_function=halve), ids)
    settings = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    found = pg.generate(ids, **settings)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return (output[0] * 0.5, *output[1:]) if isinstance(output, tuple) else output * 0.5

    for module in (model.transformer.h[0], model.transformer.h[1].mlp):
        module.register_forward_hook(hook)
    expected = model.generate(ids, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.logits, expected.logits, strict=True))


def add_what_changes_nothing(graph_module: Any, module: nn.Module) -> None:
    with graph_module.graph.inserting_before(node_called(graph_module.graph, "output")):
        graph_module.graph.call_function(torch.ones, (1,))


def test_the_output_of_a_module_with_hooks_is_refused_where_their_work_is_in_the_graph() -> None:
    model = Model()
    model.first.up.register_forward_hook(lambda module, args, output: output + 1)
    pg = PatchableGraph(model, ExtractionOptions(postprocessing_function=add_what_changes_nothing), X)
    expected = PatchableGraph(model, X)
    with pytest.raises(PatchMapError, match=r"'first.up.output' is what forward hooks"):
        pg.patch({"first.up.output": ZeroPatch(slice=0)}).__enter__()
    with pg.patch({"first.add": ZeroPatch(slice=0)}), expected.patch({"first.up.output": ZeroPatch(slice=0)}):
        assert torch.equal(pg(X), expected(X))
