"""Options of the capture: what is skipped, what fails and how, what is not reached."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphpatch_notebook import (
    AddPatch,
    CaptureError,
    CompiledGraphModule,
    ExtractionOptions,
    OpaqueGraphModule,
    PatchableGraph,
    UnusedModule,
    ZeroPatch,
)
from graphpatch_notebook.patchable_graph import captured
from tests.laws.captures import capture_of, some_cases
from tests.zoo import TRANSFORMERS, Case
from tests.zoo.submodules import Submodules


class Inner(Submodules, linear=(3, 3), dropout=partial(nn.Dropout, 0.5), offset=lambda: torch.ones(3)):
    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x) + self.offset)


class Outer(Submodules, seed=0, inner=Inner, unused=(3, 3)):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


X = torch.ones(2, 3)


def test_a_skipped_class_is_opaque_and_its_boundary_and_children_can_be_patched() -> None:
    model = Outer().eval()
    pg = PatchableGraph(model, ExtractionOptions(classes_to_skip_compiling={Inner}), X)
    assert isinstance(pg._graph_module.inner, OpaqueGraphModule)
    assert isinstance(pg._graph_module.inner.linear, CompiledGraphModule)
    assert "skip" in pg._graph_module.inner.reason
    inner = [path for path in pg.nodes if path.startswith("inner.") and path.count(".") == 1]
    assert inner == ["inner.x", "inner.offset", "inner.output"]
    with pg.patch({"inner.linear.output": ZeroPatch(), "inner.offset": AddPatch(1.0)}):
        assert torch.equal(pg(X), torch.full((2, 3), 4.0))


def test_opaque_modules_honour_train_and_eval() -> None:
    model = Outer().eval()
    pg = PatchableGraph(model, ExtractionOptions(skip_compilation=True), X)
    assert torch.equal(pg(X), pg(X))
    pg.train()
    torch.manual_seed(1)
    first = pg(X)
    assert not torch.equal(first, pg(X))


class Locked:
    """A function whose own code fails when somebody asks what it closes over."""

    def __call__(self) -> None:
        pass

    @property
    def __closure__(self) -> None:
        raise PermissionError("locked")


class Twofold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: Locked) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * 2, None


class Uncapturable(Submodules, linear=(3, 3), offset=lambda: torch.ones(3)):
    """A module that runs, but that cannot be recorded: one of its calls has an argument that nobody can look at."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = [Locked()]

    def forward(self, x: Tensor) -> Tensor:
        hidden = Twofold.apply(self.linear(x), self.settings[0])
        return self.linear(hidden) + self.offset


class Holder(nn.Module):
    def __init__(self, inner: nn.Module, count: int = 1) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.inner:
            x = inner(x) * 3
        return x


@pytest.mark.parametrize("warn", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_module_that_cannot_be_captured_becomes_opaque(warn: bool, count: int) -> None:
    model = Holder(Uncapturable(), count)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pg = PatchableGraph(model, ExtractionOptions(warn_on_compilation_failure=warn), X)
    paths = ["inner_0"] if count == 1 else ["inner_0_0", "inner_0_1"]
    expected = [f"{path!r} became an OpaqueGraphModule: PermissionError: locked" for path in paths]
    assert [warning.message.args[0] for warning in told] == (expected if warn else [])
    assert all(warning.message.kind == "compilation" and warning.filename == __file__ for warning in told)
    opaque = [module for module in pg._graph_module.modules() if isinstance(module, OpaqueGraphModule)]
    assert [module.path for module in opaque] == paths
    assert {module.reason for module in opaque} == {"PermissionError: locked"}
    assert "because PermissionError: locked" in str(pg.graph[paths[0]]._code)
    assert torch.equal(pg(X), model(X))
    first = paths[0]
    assert [path for path in pg.nodes if path.startswith(f"{first}.") and path.count(".") == 1] == [
        f"{first}.x", f"{first}.offset", f"{first}.output",
    ]  # fmt: skip
    linear = model.inner[0].linear
    patches = {f"{first}.linear_1.output": ZeroPatch(), f"{first}.offset": AddPatch(1.0)}
    with pg.patch(patches, strict=True):
        patched = pg(X)
    by_hand = torch.full((2, 3), 6.0)
    assert torch.equal(patched, by_hand if count == 1 else (linear(linear(by_hand) * 2) + 1) * 3)


def test_a_module_that_cannot_be_captured_raises_the_original_error() -> None:
    model = Holder(Uncapturable())
    before = dict(model.inner[0].__dict__)
    for warn in (False, True):  # the error is the stronger of the two
        options = ExtractionOptions(error_on_compilation_failure=True, warn_on_compilation_failure=warn)
        with pytest.raises(PermissionError, match="^locked$"):
            PatchableGraph(model, options, X)
    assert model.inner[0].__dict__ == before


@pytest.mark.parametrize("allowed", [None, True, False])
@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("warn", [False, True])
def test_unused_submodules_in_all_combinations(allowed: bool | None, error: bool, warn: bool) -> None:
    options = ExtractionOptions(
        allow_unused_submodules=allowed, error_on_compilation_failure=error, warn_on_compilation_failure=warn
    )
    model = Outer().eval()
    if allowed is False or (allowed is None and error):
        message = (
            "^the example inputs do not reach these submodules: unused; give inputs that do, or set "
            "allow_unused_submodules=True$"
        )
        with pytest.raises(CaptureError, match=message):
            PatchableGraph(model, options, X)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing failed: nothing to warn of
        pg = PatchableGraph(model, options, X)
    assert isinstance(pg._graph_module.unused, UnusedModule)
    assert torch.equal(pg(X), model(X))


def test_an_error_of_the_model_is_raised_as_it_is_and_the_model_stays_as_it_was() -> None:
    model = Outer().eval()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        PatchableGraph(model, torch.ones(2, 5))
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


@some_cases(lambda case: case in TRANSFORMERS)
def test_every_frame_of_the_transformers_models_is_compiled(case: Case) -> None:
    frames = captured(capture_of(case).pg).root.walk()
    assert [frame.path for frame in frames if frame.opaque_reason] == []


def test_objects_that_are_not_modules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module, not function"):
        PatchableGraph(lambda x: x, X)  # type: ignore[arg-type]


# -- values that options cannot have -----------------------------------------------------------------------------------


class Unrun(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("nothing is to run")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("custom_extraction_functions", {"Linear": abs}),
        ("custom_extraction_functions", {nn.Linear(2, 2): abs}),
        ("custom_extraction_functions", {int: abs}),
        ("custom_extraction_functions", {nn.Linear: fx.Graph()}),
        ("custom_extraction_functions", [nn.Linear]),
        ("classes_to_skip_compiling", [nn.ReLU()]),
        ("classes_to_skip_compiling", nn.Linear),
        ("classes_to_skip_compiling", "Linear"),
        ("classes_to_skip_compiling", None),
        ("postprocessing_function", 3),
        ("skip_compilation", None),
        ("allow_unused_submodules", 1),
    ],
)
def test_values_that_options_cannot_have_are_an_error_before_anything_runs(option: str, value: Any) -> None:
    with pytest.raises(CaptureError, match=f"^{option}"):
        PatchableGraph(Unrun(), ExtractionOptions(**{option: value}), X)


# -- where options are given -------------------------------------------------------------------------------------------


def test_options_may_be_given_by_keyword() -> None:
    options = ExtractionOptions(skip_compilation=True)
    for pg in (
        PatchableGraph(nn.ReLU(), X, extraction_options=options),
        PatchableGraph(nn.ReLU(), extraction_options=options, input=X),
    ):
        assert isinstance(pg._graph_module, OpaqueGraphModule)
        assert torch.equal(pg(X), torch.relu(X))


def test_other_values_of_that_keyword_are_the_models() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, extraction_options: float) -> Tensor:
            return x * extraction_options

    pg = PatchableGraph(Own(), X, extraction_options=3.0)
    assert torch.equal(pg(X, extraction_options=2.0), X * 2)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ((X, ExtractionOptions()), ()),
        ((ExtractionOptions, X), ()),
        ((X,), ("extraction_option",)),
        ((ExtractionOptions(), X, ExtractionOptions()), ()),
        ((ExtractionOptions(), X), ("extraction_options",)),
        ((X,), ("options",)),
    ],
)
def test_options_in_other_places_are_an_error(args: tuple[Any, ...], names: tuple[str, ...]) -> None:
    class Lenient(nn.Module):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            raise AssertionError("nothing is to run")

    with pytest.raises(TypeError, match=r"PatchableGraph\(model, ExtractionOptions\("):
        PatchableGraph(Lenient(), *args, **dict.fromkeys(names, ExtractionOptions()))
