"""Graphs of models in which something else than a weight was changed since the capture: refused, in doubt, or right."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    EditedGraphWarning,
    PatchableGraph,
    ProbePatch,
    UnverifiedGraphWarning,
    ZeroPatch,
)
from graphpatch_notebook.errors import GraphError, SerializationError

SCALE: Any = 2.0
BOX: Any = {"scales": [2.0]}
ACT: Any = torch.relu
X = torch.randn(2, 3)


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Model(nn.Module):
    """Each variant reads one more value from somewhere else. `change` changes that value."""

    def __init__(
        self, run: Callable[[Any, Tensor], Tensor], change: Callable[[Any], object], **attributes: Any
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.run, self.change = run, change
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.linear(x))


class OfClass(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor

    def change(self, _: Any) -> None:
        OfClass.factor = 3.0


class OfMethod(OfClass):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.linear(x))

    def scaled(self, x: Tensor) -> Tensor:
        return x * 2

    def change(self, _: Any) -> None:
        OfMethod.scaled = lambda self, x: x * 3  # type: ignore[method-assign]


def set_global(name: str, value: Any) -> Callable[[Any], None]:
    return lambda _: globals().update({name: value})


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


def closed_over() -> Model:
    scale = 2.0

    def change(_: Any) -> None:
        nonlocal scale
        scale = 3.0

    return Model(lambda m, x: x * scale, change)


def with_child() -> Model:
    model = Model(lambda m, x: x * m.linear.scale, lambda m: setattr(m.linear, "scale", 3.0))
    model.linear.scale = 2.0
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "attribute": lambda: Model(lambda m, x: x * m.scale, lambda m: setattr(m, "scale", 3.0), scale=2.0),
    "flag": lambda: Model(
        lambda m, x: x.relu() if m.flag else x.tanh(), lambda m: setattr(m, "flag", False), flag=True
    ),
    "config": lambda: Model(
        lambda m, x: x * m.config.scale, lambda m: setattr(m.config, "scale", 3.0), config=SimpleNamespace(scale=2.0)
    ),
    "list": lambda: Model(lambda m, x: x * m.scales[0], lambda m: m.scales.insert(0, 3.0), scales=[2.0]),
    "tuple": lambda: Model(lambda m, x: x * m.scales[0], lambda m: setattr(m, "scales", (3.0,)), scales=(2.0,)),
    "new list": lambda: Model(lambda m, x: x * m.scales[0], lambda m: setattr(m, "scales", [3.0]), scales=[2.0]),
    "function": lambda: Model(lambda m, x: m.act(x), lambda m: setattr(m, "act", torch.tanh), act=torch.relu),
    "submodule": lambda: Model(lambda m, x: m.act(x), lambda m: setattr(m, "act", nn.Tanh()), act=nn.ReLU()),
    "attribute of a child": with_child,
    "global": lambda: Model(lambda m, x: x * SCALE, set_global("SCALE", 3.0)),
    "global of a helper": lambda: Model(lambda m, x: scaled(x), set_global("SCALE", 3.0)),
    "helper": lambda: Model(lambda m, x: scaled(x), set_global("scaled", lambda x: x * 3)),
    "function of torch": lambda: Model(lambda m, x: ACT(x), set_global("ACT", torch.tanh)),
    "in a global": lambda: Model(lambda m, x: x * BOX["scales"][0], lambda _: BOX["scales"].insert(0, 3.0)),
    "closure": closed_over,
    "slot": lambda: Model(
        lambda m, x: x * m.slotted.scale, lambda m: setattr(m.slotted, "scale", 3.0), slotted=Slotted(2.0)
    ),
    "forward": lambda: Model(lambda m, x: x * 2, lambda m: setattr(m, "forward", lambda x: m.linear(x) * 3)),
    "class attribute": OfClass,
    "method": OfMethod,
    "in an empty dict": lambda: Model(
        lambda m, x: x * m.scales.get("x", 2.0), lambda m: m.scales.update(x=3.0), scales={}
    ),
}
MORE_MODELS: dict[str, Callable[[], Any]] = {
    **MODELS,
    "forward of a child": lambda: Model(
        lambda m, x: x * 2, lambda m: setattr(m.linear, "forward", lambda x: x @ m.linear.weight)
    ),
}


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest, original_values: None) -> Any:
    torch.manual_seed(0)
    return MORE_MODELS[request.param]().eval()


@pytest.fixture
def original_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SCALE", 2.0), ("BOX", {"scales": [2.0]}), ("ACT", torch.relu), ("scaled", scaled)):
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setattr(OfClass, "factor", 2.0)
    monkeypatch.setattr(OfMethod, "scaled", OfMethod.scaled)


def edit(pg: PatchableGraph) -> None:
    pg._graph_module.recompile()  # the same graph, which replaces the module from now on


@pytest.mark.parametrize("is_edited_first", [False, True], ids=["changed, then edited", "edited, then changed"])
def test_an_edited_graph_is_not_run_in_place_of_a_changed_module(model: Any, is_edited_first: bool) -> None:
    pg = PatchableGraph(model, X)
    if is_edited_first:
        edit(pg)
        assert torch.equal(pg(X), model(X))
    model.change(model)
    if not is_edited_first:
        edit(pg)
    with pytest.raises(GraphError, match="before it was edited, it differed from the module"):
        pg(X)


def test_a_graph_of_an_unchanged_module_is_not_compared() -> None:
    model = MODELS["config"]()
    pg = PatchableGraph(model, X)
    with torch.no_grad():
        model.linear.weight += 1
    model.register_forward_hook(lambda *_: None)
    edit(pg)
    runs = []
    model.linear.register_forward_hook(lambda *_: runs.append(1))
    assert torch.equal(pg(X), model(X))
    assert len(runs) == 2
    model.unrelated = 5
    assert torch.equal(pg(X), model(X))  # compared, and equal


def test_a_copy_of_an_edited_graph_warns_if_it_cannot_be_compared(model: Any) -> None:
    pg = PatchableGraph(model, X)
    model.change(model)
    edit(pg)
    copied = copy.deepcopy(pg)
    with pytest.warns(EditedGraphWarning, match="cannot be compared with the module"):
        copied(X)


def test_what_was_verified_before_a_change_is_in_doubt(model: Any) -> None:
    pg = PatchableGraph(model, X)
    assert pg.verify(X).is_equal
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(pg.interpreter().run(X), model(X))
    model.change(model)
    with pytest.warns(UnverifiedGraphWarning, match="what its code reads, has changed since it was compared"):
        pg.interpreter().run(X)
    assert not pg.verify(X).is_equal


@pytest.mark.parametrize("is_loaded_first", [False, True], ids=["changed, then loaded", "loaded, then changed"])
def test_a_loaded_graph_does_not_run_in_place_of_a_changed_model(model: Any, is_loaded_first: bool) -> None:
    file = io.BytesIO()
    PatchableGraph(model, X).save(file)

    def loaded() -> PatchableGraph:
        file.seek(0)
        return PatchableGraph.load(file, model=model)

    pg = loaded()
    model.change(model)
    with contextlib.suppress(SerializationError):  # of a submodule of another class
        pg = pg if is_loaded_first else loaded()
    assert torch.equal(pg(X), model(X))


@pytest.mark.parametrize("model", list(MORE_MODELS), indirect=True)
def test_a_compiled_model_does_not_run_in_place_of_a_changed_one(model: Any) -> None:
    compiled = PatchableGraph(model, X).compile({"linear.output": AddPatch(value=0.0)}, X, backend="eager")
    before = model(X)
    assert torch.equal(compiled(X), before)
    model.change(model)
    assert not torch.equal(model(X), before)
    with pytest.raises(GraphError, match="than when it was compiled: call pg.compile again"):
        compiled(X)


@pytest.mark.usefixtures("original_values")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("attribute", r"the model \(Model\) has another attribute 'scale' than"),
        ("attribute of a child", r"'linear' \(Linear\) has another attribute 'scale' than"),
        ("config", "another attribute 'config.scale' than"),
        ("list", "another attribute 'scales.0' than"),
        ("global", "the code of the model reads another 'SCALE' than"),
        ("in a global", "the code of the model reads another 'BOX.scales' than"),
        ("class attribute", "the code of the model reads another 'OfClass.factor' than"),
        ("forward of a child", r"'linear' \(Linear\) has another attribute 'forward' than"),
    ],
)
def test_a_compiled_model_names_what_was_changed(name: str, message: str) -> None:
    model = MORE_MODELS[name]().eval()
    compiled = PatchableGraph(model, X).compile({"linear.output": AddPatch(value=0.0)}, X, backend="eager")
    model.change(model)
    with pytest.raises(GraphError, match=message):
        compiled(X)


def test_a_compiled_model_runs_after_what_changes_no_number() -> None:
    model = MODELS["config"]()
    pg = PatchableGraph(model, X)
    compiled = pg.compile({"linear.output": AddPatch(value=0.0)}, X, backend="eager")
    with torch.no_grad():
        model.linear.weight += 1
    model.config.scale = float("2")  # an equal number
    assert torch.equal(compiled(X), model(X))
    with pg.patch({"mul": ZeroPatch(), "linear.output": ProbePatch()}):
        pg(X)
        assert torch.equal(compiled(X), model(X))
        model.config.scale = float("3")
        with pytest.raises(GraphError, match=r"config.scale"):
            compiled(X)
    copied = copy.deepcopy(compiled)
    model.config.scale = float("2")
    assert torch.equal(compiled(X), model(X))
    assert torch.equal(copy.deepcopy(compiled)(X), model(X))
    with pytest.raises(GraphError, match=r"config.scale"):  # changed before it was copied
        copied(X)


class Deleting(nn.Module):
    def __init__(self, deletes_itself: bool) -> None:
        super().__init__()
        self.deletes_itself = deletes_itself
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if "mask" in self._buffers:
            x = x + self.mask
            if self.deletes_itself:
                del self.mask
        return x * 2


@pytest.mark.parametrize("deletes_itself", [False, True])
def test_buffers_that_were_deleted_are_named(deletes_itself: bool) -> None:
    model = nn.Sequential(Deleting(deletes_itself))
    pg = PatchableGraph(model, X)
    if not deletes_itself:
        del model[0].mask
    message = "'sub_0' does not have 'mask' any more, .* make a PatchableGraph of the model as it is now"
    with pytest.raises(GraphError, match=message):
        pg.to_fx((X,))
    with pytest.raises(GraphError, match=message):
        pg.compile({"output": AddPatch(value=0.0)}, X, backend="eager")
    assert torch.equal(pg(X), X * 2)
