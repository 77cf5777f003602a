"""Chosen patches as scripts on plain forward hooks: what they look like, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import ExportError
from graphpatch_notebook.notebook.export.patch_code import export
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.origin import Origin
from graphpatch_notebook.notebook.session.session import Session
from tests.notebook.export.test_patch_code import is_clean

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x).relu()
        return hidden * scale, hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> dict[str, Tensor]:
        x, first = self.blocks[0](x)
        x, _ = self.blocks[1](x, scale=2.0)
        for _ in range(3):
            x = self.cell(x)
        return {"last": x if mask is None else x * mask, "first": first}


def patch(path: str, kind: str, **fields: Any) -> ChosenPatch:
    return ChosenPatch(path, kind, **fields)  # type: ignore[arg-type]


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> PatchableGraph:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return PatchableGraph(model, *args, **kwargs)


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return captured(Model(), X)


@pytest.fixture
def session(pg: PatchableGraph) -> Session:
    return Session(pg, Origin("pg", "model", "x"))


def run(source: str, model: nn.Module, **variables: Any) -> dict[str, Any]:
    namespace = {"model": model, "x": X, **variables}
    exec(compile(source, "<exported>", "exec"), namespace)
    return namespace


def equals_session(session: Session, **variables: Any) -> str:
    """Asserts that the script gives what the session gives, and leaves no hook behind; returns it."""
    source = export(session, "hooks")
    model = session.graph._module
    with session.graph.patch(session.resolve({"torch": torch, "x": X, **variables}).patch_map, strict=True):
        patched = session.graph(X)
    found = run(source, model, **variables)
    same_values(found["output"], patched)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert is_clean(source)
    return source


def same_values(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif dataclasses.is_dataclass(one):
        same_values(dataclasses.asdict(one), dataclasses.asdict(other))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same_values(one[key], other[key])
    elif isinstance(one, (tuple, list)):
        for a, b in zip(one, other, strict=True):
            same_values(a, b)
    else:
        assert one == other


def test_one_patch(session: Session) -> None:
    session.add(patch("cell_1.output", "zero", slice=":, -1"))
    session.add(patch("blocks_0.linear.output", "zero"))
    assert equals_session(session)
    session.remove([1])

    assert equals_session(session) == (
        """\
# Needs: model, x
from collections import Counter

calls = Counter()


def zero_blocks_0_linear(module, args, output):
    calls["zero_blocks_0_linear"] += 1
    output = output.clone()
    output[...] = 0
    return output


hooks = []
try:
    hooks.append(
        model.get_submodule("blocks.0.linear").register_forward_hook(zero_blocks_0_linear),
    )
    output = model(x)
finally:
    for hook in hooks:
        hook.remove()

expected = {"zero_blocks_0_linear": 1}
if calls != expected:
    raise RuntimeError(f"the hooks ran {dict(calls)} times, not {expected}")
"""
    )


def test_calls_of_a_module_are_counted(session: Session) -> None:
    session.add(patch("cell_0.input", "add", value="0.5 * steering", slice=":, 1"))
    session.add(patch("cell_2.input", "probe", name="last", slice="0"))
    session.add(patch("cell_2.input", "replace", value="steering"))

    assert equals_session(session, steering=torch.tensor(3.0)) == (
        """\
# Needs: model, x, steering
from collections import Counter

cell_0_input_value = 0.5 * steering
cell_2_input_value = steering
calls = Counter()
kept = {}


def patch_cell_inputs(module, args):
    calls["patch_cell_inputs"] += 1
    if calls["patch_cell_inputs"] == 1:
        input_1 = args[0].clone()
        input_1[:, 1] += cell_0_input_value
        args = (input_1, *args[1:])
    if calls["patch_cell_inputs"] == 3:
        kept["last"] = args[0]
        input_2 = args[0].clone()
        input_2[...] = cell_2_input_value
        args = (input_2, *args[1:])
    return args


hooks = []
try:
    hooks.append(
        model.get_submodule("cell").register_forward_pre_hook(patch_cell_inputs),
    )
    output = model(x)
finally:
    for hook in hooks:
        hook.remove()

# Calls are identified by their number, so there must be as many as in the example.
expected = {"patch_cell_inputs": 3}
if calls != expected:
    raise RuntimeError(f"the hooks ran {dict(calls)} times, not {expected}")

last = kept["last"][0]
"""
    )


def test_tuples_are_made_anew_and_inputs_keep_their_form(session: Session) -> None:
    session.add(patch("blocks_0.output|sub_0", "add", value="1"))
    session.add(patch("output|last", "record", name="acts", slice="0"))
    session.add(patch("blocks_0.x", "custom", value="torch.tanh"))
    session.add(patch("blocks_0.output|sub_1", "replace", value="0.5"))

    source = equals_session(session)

    assert source.split("\n\n\n", 1)[1].split("\n\n\nhooks = []")[0] == (
        """\
def patch_blocks_0_output(module, args, output):
    calls["patch_blocks_0_output"] += 1
    sub_0 = output[0].clone()
    sub_0 += 1
    output = (sub_0, *output[1:])
    sub_1 = output[1].clone()
    sub_1[...] = 0.5
    return (*output[:1], sub_1)


def record_output_last(module, args, output):
    calls["record_output_last"] += 1
    kept["acts"].append(output["last"])


def custom_blocks_0_x(module, args):
    calls["custom_blocks_0_x"] += 1
    x_1 = torch.tanh(args[0].clone())
    return (x_1, *args[1:])"""
    )


def test_functions_with_slices(session: Session) -> None:
    session.add(patch("blocks_0.linear.output", "custom", value="lambda t: t.flip(0)", slice=":2"))
    session.add(patch("blocks_0.linear.output", "custom", value="make(2)", slice="..., 0"))

    source = equals_session(session, make=lambda factor: lambda t: t * factor)

    assert "    output[:2] = (lambda t: t.flip(0))(output[:2].clone())\n" in source
    assert "blocks_0_linear_value = make(2)\n" in source


def test_a_function_that_returns_none_is_an_error(session: Session) -> None:
    session.add(patch("blocks_0.linear.output", "custom", value="print"))

    with pytest.raises(TypeError, match=r"blocks_0.linear.output: the function returned None"):
        run(export(session, "hooks"), session.graph._module)


class Pair(NamedTuple):
    a: Tensor
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Tensor
    more: Any


class ListOf(list[Any]):
    pass


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        ordered = OrderedDict([("b", x + 3), ("a b", x + 4)])
        return {
            "pair": Pair(x, [x + 1, (x + 2,)]),
            "frozen": Frozen(x, ordered),
            "list": ListOf([x + 5, {1: x + 6, None: x + 7}]),
            "maximum": x.max(0),
            "none": None,
            "number": 3,
        }


def test_values_in_containers_of_every_kind_are_kept_but_only_those_in_tuples_are_changed() -> None:
    pg = captured(Returns(), X)
    paths = [path for path in pg.nodes if path.startswith("output|")]
    assert len(paths) == 12

    session = Session(pg, Origin("pg", "model", "x"))
    for number, path in enumerate(paths):
        session.add(patch(path, "probe", name=f"kept_{number}"))
    equals_session(session)

    for path in paths:
        assert re.search("is in a .*, and hooks change tensors and tuples only: patch what", refusal(pg, path))


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, (x + 1, 3), x + 2


def test_tuples_in_tuples() -> None:
    pg = captured(Nested(), X)
    session = Session(pg, Origin("pg", "model", "x"))
    for path in ("output|sub_0", "output|sub_1.sub_0", "output|sub_2"):
        session.add(patch(path, "add", value="2"))
    equals_session(session)
    assert "is not a tensor (int(3)), and hooks change tensors only" in refusal(pg, "output|sub_1.sub_1")


class Calls(nn.Module):
    """A child that takes inputs in every way."""

    class Child(nn.Module):
        def forward(self, a: Tensor, /, b: Tensor, *rest: Tensor, c: Tensor, d: int = 2, **more: Tensor) -> Tensor:
            return a + 2 * b + 3 * rest[0] + 5 * c + d * more["e"]

    def __init__(self) -> None:
        super().__init__()
        self.child = self.Child()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x, x + 1, x + 2, c=x.cos(), e=x.exp())


@pytest.mark.parametrize("path", ["a", "b", "rest|sub_0", "c", "more|e"])
def test_inputs_of_every_kind(path: str) -> None:
    pg = captured(Calls(), X)
    session = Session(pg, Origin("pg", "model", "x"))
    session.add(patch(f"child.{path}", "add", value="3"))
    session.add(patch(f"child.{path}", "probe", name="kept"))

    equals_session(session)


@pytest.mark.parametrize("arguments", ["x, mask=mask", "mask=mask, x=x", "x, **{'mask': mask}"])
def test_inputs_of_the_model(arguments: str) -> None:
    pg = captured(Model(), X, mask=torch.ones(3, 4))
    session = Session(pg, Origin("pg", "model", arguments))
    session.add(patch("x", "add", value="1"))
    session.add(patch("mask", "zero", slice=":, 0"))
    mask = torch.full((3, 4), 2.0)
    with pg.patch(session.resolve({}).patch_map):
        patched = pg(X, mask=mask)

    same_values(run(export(session, "hooks"), pg._module, mask=mask)["output"], patched)


def test_an_input_that_the_call_does_not_pass_by_position_or_by_name_is_refused(session: Session) -> None:
    session.origin = Origin("pg", "model", "*inputs")
    session.add(patch("x", "add", value="1"))
    with pytest.raises(ExportError, match="'x': the call does not pass this input by position or by name"):
        export(session, "hooks")


def test_a_hook_that_does_not_run_is_an_error(session: Session) -> None:
    session.add(patch("blocks_0.linear.output", "zero"))
    source = export(session, "hooks")
    model = Model()
    model.blocks[0].forward = lambda x: (x, x)  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match=r"the hooks ran {} times, not {'zero_blocks_0_linear': 1}"):
        run(source, model)
    assert not model.blocks[0].linear._forward_hooks


def test_hooks_go_when_the_model_raises(session: Session) -> None:
    session.add(patch("blocks_0.linear.output", "custom", value="fail"))
    model = session.graph._module

    with pytest.raises(ZeroDivisionError):
        run(export(session, "hooks"), model, fail=lambda t: 1 / 0)
    assert not model.blocks[0].linear._forward_hooks  # type: ignore[index, union-attr]


def test_a_model_that_is_an_expression_is_made_once(pg: PatchableGraph) -> None:
    session = Session(pg, Origin("pg", "models[0]", "x"))
    session.add(patch("blocks_0.x", "add", value="model"))

    source = export(session, "hooks")

    assert source.startswith("# Needs: models, x, model\n")
    assert "\nmodel_1 = models[0]\n" in source
    assert "output = model_1(x)" in source


def test_everything_that_hooks_cannot_do_is_in_one_error(session: Session) -> None:
    session.add(patch("blocks_0.hidden", "zero"))
    session.add(patch("blocks_0.linear.linear", "zero"))
    session.add(patch("blocks_0.linear.weight", "zero"))
    session.add(patch("blocks_1.linear.output", "zero", steps="1:"))
    session.add(patch("blocks_1.output|sub_0", "zero"))

    with pytest.raises(ExportError) as raised:
        export(session, "hooks")

    message = str(raised.value)
    for part in (
        "#1 'blocks_0.hidden' is an operation (relu) inside Block, which hooks do not see; "
        "nearest: 'blocks_0.output|sub_1'",
        "#2 'blocks_0.linear.linear' is an operation (linear) inside Linear, which hooks do not see; "
        "nearest: 'blocks_0.linear.output'",
        "#3 'blocks_0.linear.weight' is a parameter, and hooks see inputs and outputs only; "
        "its result is in 'blocks_0.linear.output'",
        "#4 'blocks_1.linear.output' has steps or positions, which a hook cannot know",
        "(the graphpatch form can do all of it)",
    ):
        assert part in message
    assert "'blocks_1.output" not in message
    assert "\n" not in message


def refusal(pg: PatchableGraph, path: str) -> str:
    session = Session(pg, Origin("pg", "model", "x"))
    session.add(patch(path, "zero"))
    with pytest.raises(ExportError) as raised:
        export(session, "hooks")
    assert export(session)
    return str(raised.value)


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        given = x.cos()
        return self.linear(given).sin() + given


def test_an_operation_is_near_the_input_that_it_is_given_to() -> None:
    pg = captured(Between(), X)
    assert "nearest: 'linear.input' (" in refusal(pg, "given")
    assert "nearest: 'output' (" in refusal(pg, "sin")


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](x)


def test_modules_that_take_no_hook_are_refused() -> None:
    hidden = captured(Hidden(), X)
    path = next(path for path in hidden.nodes if path.endswith(".output"))
    assert "this Linear is not a registered submodule, so it cannot have a hook" in refusal(hidden, path)

    scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    pg = captured(scripted, X)
    assert "this is a TorchScript module, which does not support hooks" in refusal(pg, "sub_0.output")


class Half(nn.Module):
    """`get_submodule` finds the method `half` of modules rather than the child."""

    def __init__(self) -> None:
        super().__init__()
        self.half = nn.Linear(4, 4)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self._modules["half"](x)  # type: ignore[misc]


def test_children_that_are_named_like_methods() -> None:
    pg = captured(Half(), X)
    session = Session(pg, Origin("pg", "model", "x"))
    session.add(patch("half.output", "zero", slice="0"))

    source = equals_session(session)

    assert 'dict(model.named_modules())["half"].register_forward_hook(' in source


def test_hooks_that_would_switch_a_fused_kernel_off_are_refused() -> None:
    pg = captured(nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()), X[None])
    for path in ("sub_0.output", "sub_0.src", "sub_0.linear1.output"):
        assert "disables the fused kernel of 'sub_0': the last bits would differ" in refusal(pg, path)

    session = Session(pg, Origin("pg", "model", "x"))
    session.add(patch("output", "zero", slice="..., 0"))
    assert "zero_output" in export(session, "hooks")


def test_graphs_that_are_their_module_are_refused() -> None:
    pg = captured(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), X)
    linear: Any = next(pg._graph_module.children())
    with linear.graph.inserting_before(next(iter(reversed(linear.graph.nodes)))):
        linear.graph.call_function(torch.neg, (next(iter(linear.graph.nodes)),))
    linear.recompile()

    assert "'sub_0' runs as a graph (edited, custom, or from a file), and hooks run" in refusal(pg, "sub_1.output")


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.forward(x) + 1


def test_a_forward_that_is_called_directly_runs_no_hook() -> None:
    pg = captured(Direct(), X)
    session = Session(pg, Origin("pg", "model", "x"))
    session.add(patch("linear.output", "zero"))

    with pytest.raises(RuntimeError, match=r"the hooks ran {} times, not {'zero_linear': 1}"):
        run(export(session, "hooks"), pg._module)


def test_gradients_flow_as_through_patches(session: Session) -> None:
    shift = torch.ones(4, requires_grad=True)
    session.add(patch("blocks_0.linear.output", "add", value="shift"))
    session.add(patch("blocks_0.linear.output", "zero", slice="0"))
    session.add(patch("cell_1.input", "probe", name="kept"))
    model = session.graph._module

    resolved = session.resolve({"shift": shift})
    with session.graph.patch(resolved.patch_map):
        loss = session.graph(X)["last"].square().sum()
    here = torch.autograd.grad(loss, [shift, *model.parameters(), resolved.observing[0][1].activation])

    found = run(export(session, "hooks"), model, shift=shift)
    loss = found["output"]["last"].square().sum()
    there = torch.autograd.grad(loss, [shift, *model.parameters(), found["kept"]])

    assert all(map(torch.equal, here, there))
    assert here[0].abs().sum() > 0
