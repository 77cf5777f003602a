"""Graphs run only where they are known to equal the module; else the module runs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook.errors import LiveFallbackWarning
from graphpatch_notebook.graph_modules.verification import verify
from tests.graph_modules.models import Layers, Normed, TupleOutputModule, graph_module, settle
from tests.zoo.values import bit_equal

X = torch.linspace(-1, 1, 12).reshape(3, 4)
FACTOR = 1.0
MEMORY: list[Tensor] = []
SHIFT = torch.ones(4)


class Runs(nn.Module):
    """A module whose forward is a function of itself and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function
        self.flag = False
        self.sizes = {"width": 4}
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.linear(x))


def refusals(root: Any) -> dict[str, str]:
    """The reasons of the graphs that did not run in the last call, by path."""
    return {m.path: m.reason for m in root.modules() if getattr(m, "reason", None)}


def test_first_calls_return_what_the_module_returns_then_the_graph_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers()
    root = graph_module(model, X)
    for other in (X, X[:2], X + 1):
        for _ in range(4):
            assert bit_equal(root(other), model(other)) is None
    assert refusals(root) == {}
    monkeypatch.setattr(Layers, "forward", None)
    monkeypatch.setattr(nn.Linear, "forward", None)
    root.belief.watch._forward = root.frame.module.forward  # a replaced forward would be seen
    for module in root.modules():
        if getattr(module, "belief", None) is not None:
            module.belief.watch._forward = module.frame.module.forward
    assert root(X).shape == X.shape


def differences(root: Any, model: nn.Module) -> list[str | None]:
    """How five calls of the graph module differ from those of the model, on other values each time."""
    return [bit_equal(root(X + i), model(X + i)) for i in range(5)]


def branch(module: Any, x: Tensor) -> Tensor:
    return x if x.shape[0] > 2 else -x


@pytest.mark.parametrize("other", [X[:2], X[None], X.double()], ids=["rows", "rank", "dtype"])
def test_other_forms_of_input_are_examined_anew(other: Tensor) -> None:
    model = Runs(branch)
    root = graph_module(model, X)
    settle(root, X)
    if other.dtype == torch.float64:
        with pytest.raises(RuntimeError, match="dtype"):
            root(other)
        return
    if other.shape[0] < 3:
        with pytest.warns(LiveFallbackWarning, match=r"<root> \(Runs\): output: \d+ of \d+ values differ"):
            root(other)
    for _ in range(3):
        assert bit_equal(root(other), model(other)) is None
    assert bit_equal(root(X), model(X)) is None
    assert refusals(root) == {}


class Flags(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: float = 1.0, sizes: Any = ()) -> Tensor:
        x = x * scale if y is not x else x * 0
        return x.sum(sizes) if y is None else x.sum(sizes) + y.sum()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X,), {}),
        ((X, X), {}),
        ((X, X.clone()), {}),
        ((X,), {"scale": 2.0}),
        ((X,), {"scale": 1}),
        ((X,), {"scale": -0.0}),
        ((X,), {"scale": True}),
        ((X,), {"sizes": (0,)}),
        ((X,), {"sizes": [1]}),
        ((X,), {"sizes": 1}),
        ((X.t(),), {}),
        ((X.clone().requires_grad_(),), {}),
    ],
)
@pytest.mark.filterwarnings("ignore::graphpatch_notebook.LiveFallbackWarning")
def test_plain_inputs_and_none_are_part_of_the_form(args: Any, kwargs: Any) -> None:
    model = Flags()
    root = graph_module(model, X)
    settle(root, X)
    for _ in range(3):
        assert bit_equal(root(*args, **kwargs), model(*args, **kwargs)) is None


def change_global(module: Any) -> None:
    global FACTOR  # noqa: PLW0603
    FACTOR = 1.0 if FACTOR == 5.0 else 5.0


def change_tensor(module: Any) -> None:
    global SHIFT  # noqa: PLW0603
    SHIFT = torch.full((4,), 1.0 + float(SHIFT[0]))


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (lambda m, x: torch.dropout(x, 0.5, m.training), lambda m: m.train()),
        (lambda m, x: -x if m.flag else x, lambda m: setattr(m, "flag", True)),
        (lambda m, x: x.sum(-1) if m.sizes["width"] == 4 else x, lambda m: m.sizes.update(width=5)),
        (lambda m, x: -x if isinstance(m.linear, nn.Identity) else x, lambda m: setattr(m, "linear", nn.Identity())),
        (lambda m, x: x + m.linear.weight.requires_grad, lambda m: m.linear.requires_grad_(False)),
        (lambda m, x: x.to(m.table.dtype), lambda m: setattr(m, "table", m.table.half())),
        (lambda m, x: -x if m.linear.out_features == 4 else x, lambda m: setattr(m.linear, "out_features", 5)),
        (lambda m, x: x, lambda m: m.linear.register_forward_hook(lambda *_: X * 7)),
        (lambda m, x: x, lambda m: setattr(m.linear, "forward", lambda x: x * 7)),
        (lambda m, x: x, lambda m: setattr(m, "forward", lambda x: x * 7)),
        (lambda m, x: x, lambda m: setattr(m, "function", lambda m, x: x * 7)),
        (lambda m, x: x * FACTOR, change_global),
        (lambda m, x: x * SHIFT, change_tensor),
    ],
    ids="train attribute dict child requires_grad dtype child_attribute hook child_forward forward function global tensor".split(),  # noqa: E501
)
@pytest.mark.filterwarnings("ignore::graphpatch_notebook.LiveFallbackWarning")
def test_changes_of_the_module_are_seen(function: Any, change: Any) -> None:
    model = Runs(function)
    root = graph_module(model, X)
    settle(root, X)
    assert refusals(root) == {}
    change(model)
    for _ in range(3):
        torch.manual_seed(0)
        expected = model(X)
        torch.manual_seed(0)
        assert bit_equal(root(X), expected) is None
    if function.__code__.co_names == ("FACTOR",):
        change(model)
        assert bit_equal(root(X), model(X)) is None


def test_settings_of_torch_are_part_of_the_form() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2 if torch.is_grad_enabled() else x
            return x @ x.T

    model = Asks()
    root = graph_module(model, X)
    settle(root, X)
    with torch.no_grad(), pytest.warns(LiveFallbackWarning):
        assert bit_equal(root(X), model(X)) is None
    with torch.autocast("cpu"):
        assert root(X).dtype == model(X).dtype == torch.bfloat16
    with torch.inference_mode():
        assert bit_equal(root(X), model(X)) is None


def counts(module: Any, x: Tensor) -> Tensor:
    module.sizes["calls"] = module.sizes.get("calls", 0) + 1
    return x


def remembers(module: Any, x: Tensor) -> Tensor:
    MEMORY.append(x.detach())
    return x + MEMORY[-2]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: x if x.sum() > 0 else -x, "reads a value into Python"),
        (lambda m, x: x * random.random(), "draws random numbers of Python"),
        (counts, "Runs changes its 'sizes"),
        (lambda m, x: x.view(3, 2, 2).numpy(force=True).sum() * x, "reads a value into Python"),
        (lambda m, x: setattr(m, "last", x) or x, "Runs changes its 'last'"),
        (remembers, "neither made in it nor held by its module"),
    ],
    ids=["branch", "random", "counts", "numpy", "stash", "memory"],
)
def test_what_no_signature_sees_runs_live(function: Any, reason: str) -> None:
    MEMORY[:] = [torch.zeros(3, 4)]
    model = Runs(function)
    model.last = None
    twin = copy.deepcopy(model)
    root = graph_module(model, X)
    twin(X)
    memory = list(MEMORY)
    with pytest.warns(LiveFallbackWarning, match=reason):
        results = [root(X) for _ in range(3)]
    assert reason in root.reason
    MEMORY[:] = memory
    if reason.startswith("draws"):
        assert not torch.equal(results[0], results[1])
        return
    assert [bit_equal(result, twin(X)) for result in results] == [None] * 3


def test_each_refusal_is_warned_of_once() -> None:
    root = graph_module(Runs(lambda m, x: x if x.sum() > 0 else -x), X)
    with pytest.warns(LiveFallbackWarning) as warned:
        settle(root, X)
    assert len(warned) == 1
    assert warned[0].filename == settle.__code__.co_filename


def test_objects_among_the_inputs_run_live() -> None:
    class Cache:
        def __init__(self) -> None:
            self.seen = 0

    class Caching(nn.Module):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.seen += 1
            return x * cache.seen

    root = graph_module(Caching(), X, Cache())
    cache = Cache()
    with pytest.warns(LiveFallbackWarning, match=r"given an object \(Cache\), and what is in that cannot be seen"):
        assert torch.equal(root(X, cache), X)
    assert torch.equal(root(X, cache), X * 2)


def test_a_failing_graph_spoils_no_other() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good = TupleOutputModule()
            self.bad = Runs(branch)

        def forward(self, x: Tensor) -> Tensor:
            return self.bad(torch.cat([self.good(x[:, :2])[0], x[:, :1]], 1))

    model = Parent()
    root = graph_module(model, X)
    with pytest.warns(LiveFallbackWarning, match=r"bad \(Runs\)"):
        settle(root, X[:2])
    assert list(refusals(root)) == ["bad"]
    assert bit_equal(root(X[:2]), model(X[:2])) is None


def test_what_submodules_hand_on_behind_the_graphs_back_is_noticed() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            MEMORY[:] = [x * 2]
            return x + 1

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + MEMORY[0] if x.sum() < 1e9 else x

    model = nn.Sequential(Writes(), Reads())
    root = graph_module(model, X)
    with pytest.warns(LiveFallbackWarning, match="changes the global 'MEMORY'"):
        assert differences(root, model) == [None] * 5


HIDDEN: ContextVar[Tensor] = ContextVar("hidden")


def test_what_no_watch_sees_is_noticed_when_all_graphs_run_together() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            HIDDEN.set(x * 2)
            return x + 1

    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + HIDDEN.get() if x.sum() < 1e9 else x

    model = nn.Sequential(Writes(), Reads())
    root = graph_module(model, X)
    with pytest.warns(LiveFallbackWarning):
        assert differences(root, model) == [None] * 5
    assert "values differ" in root.reason


@pytest.mark.parametrize("training", [False, True])
def test_trials_leave_no_trace(training: bool) -> None:
    model, twin = Normed().train(training), Normed().train(training)
    twin.load_state_dict(model.state_dict())
    root = graph_module(model, X)
    torch.manual_seed(1)
    twin(X)  # as capture did
    model.load_state_dict(twin.state_dict())
    for seed in range(4):
        torch.manual_seed(seed)
        expected = twin(X)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        assert bit_equal(root(X), expected) is None
        assert torch.equal(torch.get_rng_state(), after)
        assert bit_equal(dict(model.named_buffers()), dict(twin.named_buffers())) is None
    assert refusals(root) == {}


def test_inputs_are_written_once() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor, more: dict[str, Tensor]) -> Tensor:
            more["y"].add_(1)
            return x.mul_(2)

    root = graph_module(InPlace(), X.clone(), {"y": X.clone()})
    for _ in range(4):
        x, y = X.clone(), X.clone()
        assert root(x, {"y": y}) is x
        assert torch.equal(x, X * 2)
        assert torch.equal(y, X + 1)
    assert refusals(root) == {}


def test_gradients_are_those_of_the_module() -> None:
    model = Layers()
    root = graph_module(model, X)
    settle(root, X)
    gradients = []
    for run in (model, root):
        model.zero_grad()
        x = X.clone().requires_grad_()
        run(x).pow(2).sum().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert bit_equal(*gradients) is None


def test_hooks_run_once_and_where_they_ran() -> None:
    model = Layers()
    root = graph_module(model, X)
    calls: list[str] = []
    expected = Layers.forward(model, X)
    model.register_forward_hook(lambda *_: calls.append("root"))
    model.h[1].register_forward_hook(lambda m, args, output: calls.append("layer") or output * 2)
    with pytest.warns(LiveFallbackWarning, match="hooks on a Layer that it calls would not run"):
        results = [root(X) for _ in range(3)]
    assert calls == ["layer", "root"] * 3
    assert [bit_equal(result, model(X)) for result in results] == [None] * 3
    assert not torch.equal(results[0], expected)


def test_accelerate_hooks_stay_around_the_frame() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Doubles(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return output * 2

    model = Layers()
    hooks.add_hook_to_module(model.h[0], Doubles())
    root = graph_module(model, X)
    with pytest.warns(LiveFallbackWarning, match="a Doubles on a Layer that it calls would not run"):
        assert differences(root, model) == [None] * 5


def test_offloaded_weights_are_there_when_graphs_run() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Layers()
    expected = model(X)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.h[0].linear.weight.device.type == "meta"
    root = graph_module(model, X)
    for _ in range(4):
        assert bit_equal(root(X).detach(), expected.detach()) is None
    assert refusals(root) == {}


def test_verified_graphs_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TupleOutputModule()
    root = graph_module(model, X[:, :2])
    verify(root, (X[:, :2],), {})
    ran: list[str] = []
    monkeypatch.setattr(TupleOutputModule, "forward", lambda self, x: ran.append("module"))
    root.belief.watch._forward = model.forward
    root(X[:, :2])
    assert ran == []


def test_interrupted_trials_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Normed().train()
    root = graph_module(model, X)
    expected = copy.deepcopy(model)
    expected(X)

    def interrupt(*args: Any) -> None:
        model.norm.running_mean.add_(100)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(root), "run_graph", interrupt)
    with pytest.raises(KeyboardInterrupt):
        root(X)
    assert bit_equal(dict(model.named_buffers()), dict(expected.named_buffers())) is None


def test_threads_get_their_own_results() -> None:
    model = Layers()
    root = graph_module(model, X)
    inputs = [X[: 1 + i % 3] + i for i in range(24)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(root, inputs))
    assert [bit_equal(result, model(x)) for result, x in zip(results, inputs, strict=True)] == [None] * 24
    assert refusals(root) == {}
