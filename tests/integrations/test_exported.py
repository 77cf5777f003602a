"""Exported programs: real exports, against `program.module()`, `unflatten(program)`, hooks and edited copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export, unflatten
from torch.export.unflatten import _disable_interpreter

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    PatchableGraph,
    ProbePatch,
    ReplacePatch,
    ZeroPatch,
)
from tests.zoo import installed
from tests.zoo.submodules import Submodules

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Mlp(nn.Module):
    def __init__(self, inside: int = 8) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, inside), nn.GELU(), nn.Linear(inside, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(x))
        return self.down(hidden * 2)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Switch(Submodules, linear=(4, 4)):
    def forward(self, x: Tensor, is_long: bool) -> Tensor:
        return self.linear(self.linear(x)).relu() if is_long else self.linear(x)


class Repeated(Submodules, same=(4, 4), switch=Switch):
    """`same` is called twice alike, `switch` twice with different graphs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.switch(self.switch(x, True) + self.same(self.same(x)), False)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.second = self.first
        self.head = nn.Linear(4, 4)
        self.head.weight = self.first[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.tensor([2.0]), persistent=False)
        self.constant = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.norm(x) * self.count * self.scale + self.constant


class Structured(Submodules, linear=(4, 4)):
    def forward(self, pair: tuple[Tensor, Tensor], *, by_name: dict[str, Tensor], flag: bool = True) -> dict[str, Any]:
        total = self.linear(pair[0]) + pair[1] + by_name["b"]
        return {"total": total, "parts": (total * 2, by_name["a"]), "nothing": None}


class Branches(Submodules, linear=(4, 4)):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.linear(x).abs().amax()
        return torch.cond(x.sum() > 0, lambda v: v * 2, lambda v: v - 1, (self.linear(x) / scale,))


class Inner(Submodules, linear=(4, 4)):
    def forward(self, x: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x)
        return (hidden, hidden * 2) if shift is None else (hidden + shift, hidden)


class OddNames(nn.Module):
    """Variadic arguments, modules with several results, names that mean something to us."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a-b": Inner(), "training_": Inner()})
        self.output = nn.Linear(4, 4)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, list[Any]]:
        first, second = self.parts["a-b"](args[0], shift=args[1])
        third, _ = self.parts["training_"](first + second, kwargs["extra"])
        return self.output(third), [None, (second, 3)]


@dataclass
class Case:
    build: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    others: tuple[Any, ...] | None = None  # other positional arguments that the program admits
    is_decomposed: bool = False

    known: ExportedProgram | None = None

    def program(self) -> ExportedProgram:
        if self.known is not None:
            return self.known
        torch.manual_seed(0)
        program = export(self.build(), self.args, self.kwargs, **{"strict": False, **self.options})
        program = program.run_decompositions() if self.is_decomposed else program
        if not program.graph_signature.buffers:  # else running it changes it
            self.known = program
        return program


X = tensor(3, 4)
BATCH = {"dynamic_shapes": {"x": {0: Dim("batch", max=64)}}}
PAIR = ((tensor(2, 4), tensor(4)),)
BY_NAME = {"by_name": {"b": tensor(1, 4), "a": tensor(2)}, "flag": True}
CASES = {
    "mlp": Case(Mlp, (X,)),
    "layers": Case(Residual, (X,)),
    "dynamic": Case(Residual, (X,), options=BATCH, others=(tensor(7, 4),)),
    "repeated": Case(Repeated, (X,)),
    "dispatched": Case(Repeated, (X,), options={"preserve_module_call_signature": ("same", "switch")}),
    "shared": Case(Shared, (X,)),
    "counting": Case(Counting, (X,)),
    "structured": Case(Structured, PAIR, BY_NAME),
    "preserved": Case(Residual, (X,), options={"preserve_module_call_signature": ("layers.0", "layers.1.up"), **BATCH}),
    "branches": Case(Branches, (X,)),
    "odd names": Case(OddNames, (X, tensor(4)), {"extra": tensor(1)}),
    "odd names, strict": Case(OddNames, (X, tensor(4)), {"extra": tensor(1)}, {"strict": True}),
    "decomposed": Case(Counting, (X,), is_decomposed=True),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
identity = CustomPatch(lambda value: value, requires_clone=False)


def bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().numpy().tobytes(), value.shape, value.dtype
    if isinstance(value, dict):
        return {key: bits(child) for key, child in value.items()}
    return type(value)(map(bits, value)) if isinstance(value, (tuple, list)) else value


def state(module: Any) -> dict[str, Any]:
    return {name: bits(value) for name, value in (*module.named_buffers(), *module.named_parameters())}


@each_case
def test_unpatched_is_the_program(case: Case) -> None:
    program = case.program()
    pg, whole, modules = PatchableGraph.from_exported(program), program.module(), unflatten(program)
    for args in [case.args, *([case.others] if case.others else []), case.args]:
        expected = bits(whole(*args, **case.kwargs))
        assert bits(modules(*args, **case.kwargs)) == expected
        assert bits(pg(*args, **case.kwargs)) == expected
        assert state(pg) == state(whole)
    direct = PatchableGraph.from_exported(case.program())
    assert bits(direct._module(*case.args, **case.kwargs)) == bits(case.program().module()(*case.args, **case.kwargs))
    assert [name for name, _ in pg.named_parameters()] == [name for name, _ in whole.named_parameters()]


def test_what_a_program_cannot_do_is_refused() -> None:
    model, x = Mlp().eval(), tensor(2, 4)
    program = export(model, (x,))
    pg = PatchableGraph.from_exported(program)
    for change in (pg.train, pg.eval):  # the mode is a part of the program
        with pytest.raises(NotImplementedError):
            change()
    for other in (tensor(3, 4), x.double(), [x]):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            pg(other)
        with pytest.raises((RuntimeError, TypeError, ValueError)), pg.patch({"up.output": ZeroPatch()}):
            pg(other)
    for no_program in (model, program.graph_module, program.module(), None):
        with pytest.raises(TypeError, match="torch.export.export"):
            PatchableGraph.from_exported(no_program)
    assert torch.equal(pg(x), model(x))


def test_programs_that_torch_does_not_interpret() -> None:
    case = CASES["layers"]
    with _disable_interpreter():
        pg = PatchableGraph.from_exported(case.program())
        assert torch.equal(pg(*case.args), case.program().module()(*case.args))
        with pg.patch({"layers_1.output": ZeroPatch()}, strict=True):
            assert not torch.equal(pg(*case.args), case.program().module()(*case.args))


@each_case
def test_identity_patches_on_all_nodes_change_no_bit(case: Case) -> None:
    program = case.program()
    pg, whole = PatchableGraph.from_exported(program), program.module()
    with pg.patch(dict.fromkeys(pg.nodes, identity), strict=True):
        for args in [case.args, *([case.others] if case.others else [])]:
            assert bits(pg(*args, **case.kwargs)) == bits(whole(*args, **case.kwargs))
    assert state(pg) == state(whole)


@pytest.mark.filterwarnings("ignore:.shared gradient:graphpatch_notebook.GraphPatchWarning")
@each_case
def test_recorded_shapes_are_those_of_a_run(case: Case) -> None:
    pg = PatchableGraph.from_exported(case.program())
    probes = {path: ProbePatch() for path, node in pg.nodes.items() if node.shape is not None}
    with pg.patch(probes, strict=True):
        pg(*case.args, **case.kwargs)
    for path, probe in probes.items():
        assert (path, probe.activation.shape, probe.activation.dtype) == (
            path,
            pg.nodes[path].shape,
            pg.nodes[path].dtype,
        )


def test_the_hierarchy_is_that_of_the_model() -> None:
    pg = PatchableGraph.from_exported(CASES["layers"].program())
    assert (
        repr(pg.graph.layers_0)
        == """\
layers_0: Mlp
├─x: Tensor(3, 4)
├─up: Linear
│ ├─x: Tensor(3, 4)
│ ├─weight: Tensor(8, 4)
│ ├─bias: Tensor(8)
│ ├─linear: Tensor(3, 8)
│ └─output: Tensor(3, 8)
├─act: GELU
│ ├─linear: Tensor(3, 8)
│ ├─gelu: Tensor(3, 8)
│ └─output: Tensor(3, 8)
├─mul: Tensor(3, 8)
├─down: Linear
│ ├─mul: Tensor(3, 8)
│ ├─weight: Tensor(4, 8)
│ ├─bias: Tensor(4)
│ ├─linear_1: Tensor(3, 4)
│ └─output: Tensor(3, 4)
└─output: Tensor(3, 4)"""
    )
    assert pg.nodes["layers_0.up.linear"].module_class == "Linear"
    assert pg.nodes["layers_0.up.linear"].op == "linear"
    assert pg.nodes["layers_0.mul"].source_lines[-1].text == "return self.down(hidden * 2)"
    assert "mul = torch.ops.aten.mul.Tensor(act, 2)" in pg.graph.layers_0._code
    assert isinstance(pg.layers, nn.ModuleList)
    assert type(pg.layers[0]).__name__ == "Mlp"
    assert isinstance(pg._graph_module.layers[0].up, nn.Module)


@pytest.mark.parametrize("name", ["repeated", "dispatched"])
def test_calls_are_patched_one_by_one(name: str) -> None:
    program = CASES[name].program()
    pg = PatchableGraph.from_exported(program)
    eager = Repeated()
    eager.load_state_dict(program.state_dict)

    def expected(where: str) -> Tensor:
        long = eager.switch(X, True)
        same_0 = eager.same(X)
        same_1 = eager.same(same_0 * (where != "same_0.output"))
        total = long * (where != "switch.output") + same_1 * (where != "same_1.output")
        return eager.switch(total, False) * (where != "switch_call_1.output")

    for where in ("", "same_0.output", "same_1.output", "switch.output", "switch_call_1.output"):
        with pg.patch({where: ZeroPatch()} if where else {}, strict=True):
            assert torch.equal(pg(X), expected(where))
    with pg.patch({"switch.linear_1.weight": ZeroPatch(), "switch.linear_1.bias": ZeroPatch()}, strict=True):
        assert torch.equal(pg(X), eager.switch(eager.same(eager.same(X)), False))


class Powers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor, times: int) -> Tensor:
        self.seen += x.sum(0)
        for _ in range(times):
            x = x * self.linear(x)
        return x + self.seen


class Chained(Submodules, powers=Powers, tanh=nn.Tanh):
    """A module's calls run different graphs, and equal ones; each reads the result of the one before."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.powers(x, 1)
        second = self.powers(self.tanh(first), 2)
        third = self.powers(self.tanh(second), 1)
        return self.powers(third, 3) + first.tanh()


class OneMore(torch.fx.Interpreter):
    """Runs a graph, and adds one to the value of the node called `name`."""

    def __init__(self, module: Any, name: str) -> None:
        super().__init__(module)
        self.name = name

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if n.name != self.name:
            return value
        return value.add_(1) if getattr(n.target, "_schema", None) and n.target._schema.is_mutable else value + 1


@pytest.mark.parametrize("is_decomposed", [False, True])
def test_operations_have_the_names_of_the_program(is_decomposed: bool) -> None:
    program = Case(Chained, (X,), is_decomposed=is_decomposed).program()
    operations = {node.name for node in program.graph.nodes if node.op == "call_function"}
    pg = PatchableGraph.from_exported(program)
    names = {path.rpartition(".")[2]: path for path, node in pg.nodes.items() if node.kind == "op"}
    assert names.keys() - operations <= {"copy__default"}  # by which the buffer is written
    module = program.module()
    before = copy.deepcopy(module.state_dict())
    for name in operations:
        module.load_state_dict(before)  # running writes into the buffer
        pg.load_state_dict(before, strict=False)  # each call has a module
        want = OneMore(module, name).run(X)
        with pg.patch({names[name]: AddPatch(value=1.0)}, strict=True):
            assert torch.equal(pg(X), want), name


def test_a_submodule_may_be_called_self() -> None:
    """As in BERT's attention: the code of the caller calls its module `self`, too."""

    class Attention(Submodules, self=(6, 6), output=(6, 6)):
        def forward(self, x: Tensor) -> Tensor:
            return self.output(self.self(x).relu())

    model, x = nn.Sequential(Attention()), torch.ones(2, 6)
    pg = PatchableGraph.from_exported(torch.export.export(model, (x,)))
    assert torch.equal(pg(x), model(x))
    with pg.patch({"sub_0.self.output": ZeroPatch()}):
        assert torch.equal(pg(x), model[0].output(torch.zeros(2, 6)))


def test_inputs_and_outputs_have_the_structure_of_the_model() -> None:
    program = CASES["structured"].program()
    pg = PatchableGraph.from_exported(program)
    assert repr(pg.graph).splitlines()[1:6] == [
        "├─pair: tuple(2)",
        "│ ├─sub_0: Tensor(2, 4)",
        "│ └─sub_1: Tensor(4)",
        "├─by_name: dict(2)",
        "│ ├─b: Tensor(1, 4)",
    ]
    plain = program.module()
    with pg.patch({"pair|sub_1": ZeroPatch(), "by_name|b": AddPatch(value=1.0), "output|parts.sub_0": ZeroPatch()}):
        out = pg(*PAIR, **BY_NAME)
    pair, by_name = (PAIR[0][0], torch.zeros(4)), {**BY_NAME["by_name"], "b": BY_NAME["by_name"]["b"] + 1}
    expected = plain(pair, by_name=by_name, flag=True)
    assert torch.equal(out["total"], expected["total"])
    assert torch.equal(out["parts"][0], torch.zeros(2, 4))
    assert out["nothing"] is None
    assert torch.equal(pg(*PAIR, flag=True, by_name=BY_NAME["by_name"])["total"], plain(*PAIR, **BY_NAME)["total"])


def test_buffers_are_written_as_the_program_does() -> None:
    program = CASES["counting"].program()
    pg, whole = PatchableGraph.from_exported(program), program.module()
    for _ in range(3):
        with pg.patch({"norm.output": ZeroPatch()}):
            pg(X)
        whole(X)
    assert state(pg) == state(whole)
    assert pg.count == 3
    assert torch.equal(pg.norm.running_mean, whole.norm.running_mean)
    probe = ProbePatch()
    with pg.patch({"count": probe}, strict=True):
        pg(X)
    assert probe.activation == 3  # and not what the program writes into it later


class Even(Submodules, linear=(1, 2)):
    def forward(self, x: Tensor, *, more: dict[str, list[Tensor]]) -> Tensor:
        y = self.linear(x[..., None]).sum(-1)
        if x.shape[1] % 2 == 0 and more["to"][1].shape[0] > x.shape[0]:
            return y * 2 + more["to"][0]
        return y * 3


def test_guards_of_the_program_are_kept(tmp_path: Any) -> None:
    def call(rows: int, columns: int, more_rows: int) -> tuple[Tensor, dict[str, list[Tensor]]]:
        return tensor(rows, columns), {"to": [tensor(rows, columns), tensor(more_rows)]}

    auto = (Dim.AUTO, Dim.AUTO)
    x, more = call(2, 6, 4)
    shapes = {"x": auto, "more": {"to": [auto, auto[:1]]}}
    program: Any = export(Even(), (x,), {"more": more}, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "program.pt2")
    pg = PatchableGraph.from_exported(tmp_path / "program.pt2")
    ran: list[int] = []
    pg.linear.register_forward_hook(lambda *_: ran.append(1))
    for sizes, message in [((2, 5, 4), r"x.size\(\)\[1\] % 2 == 0"), ((5, 6, 4), r"more\['to'\]\[1\]")]:
        x, more = call(*sizes)
        if installed.TORCH < (2, 9):  # there are no guards: it runs whatever the sizes
            assert torch.equal(pg(x, more=more), program.module()(x, more=more))
            ran.clear()
            continue
        with pytest.raises(AssertionError, match=f"Guard failed: {message}") as theirs:
            program.module()(x, more=more)
        for patches in ({}, {"linear.linear": AddPatch(value=1.0)}):
            with pg.patch(patches), pytest.raises(AssertionError) as ours:
                pg(x, more=more)
            assert str(ours.value) == str(theirs.value)
        with pytest.raises(AssertionError, match=message):
            copy.deepcopy(pg)(x, more=more)
    assert not ran
    x, more = call(3, 8, 5)
    with pg.patch({path: AddPatch(value=0.0) for path in ("linear.linear", "mul")}, strict=True):
        assert torch.equal(pg(x, more=more), program.module()(x, more=more))


class FromDict(torch.export.FlatArgsAdapter):
    def adapt(
        self, target_spec: Any, input_spec: Any, input_args: list[Any], metadata: Any = None, obj: Any = None
    ) -> list[Any]:
        return list(input_args[:1])


def test_flat_args_adapter() -> None:
    program = CASES["mlp"].program()
    pg = PatchableGraph.from_exported(program, flat_args_adapter=FromDict())
    expected = program.module()(X)
    assert torch.equal(pg(X), expected)
    assert torch.equal(pg({"x": X, "more": X}), expected)
    with pg.patch({"mul": ZeroPatch()}, strict=True):
        assert torch.equal(pg([X, X]), pg.down.bias.expand(3, 4))


@pytest.mark.parametrize("name", ["structured", "repeated"])
def test_saved_and_loaded_like_any_other(name: str, tmp_path: Any) -> None:
    case = CASES[name]
    pg = PatchableGraph.from_exported(case.program())
    pg.save(tmp_path / "graphs.safetensors")
    loaded = PatchableGraph.load(tmp_path / "graphs.safetensors")
    assert bits(loaded(*case.args, **case.kwargs)) == bits(pg(*case.args, **case.kwargs))
    path = next(path for path in pg.nodes if path.endswith("linear"))
    with loaded.patch({path: ZeroPatch()}, strict=True), pg.patch({path: ZeroPatch()}, strict=True):
        assert bits(loaded(*case.args, **case.kwargs)) == bits(pg(*case.args, **case.kwargs))


def test_transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=False)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 32, (2, 5))
    given = {"input_ids": ids, "use_cache": False}
    if installed.TRANSFORMERS < (5, 0):  # it makes masks with `torch.vmap`, which cannot be exported; not one like this
        given["attention_mask"] = torch.ones(5, 5).tril().log().expand(2, 1, 5, 5)
    with torch.no_grad():
        program = export(model, (), given, strict=False)
        pg, whole = PatchableGraph.from_exported(program), program.module()
        out = pg(**given)
        assert type(out).__name__ == "CausalLMOutputWithCrossAttentions"
        assert torch.equal(out.logits, whole(**given).logits)
        assert torch.equal(out.logits, model(**given).logits)
        with pg.patch(dict.fromkeys(pg.nodes, identity), strict=True):
            assert torch.equal(pg(**given).logits, out.logits)
        with model.transformer.h[0].mlp.act.register_forward_hook(lambda m, args, out: out * 0):
            expected = model(**given).logits
        with pg.patch({"transformer.h_0.mlp.act.output": ZeroPatch()}, strict=True):
            assert torch.equal(pg(**given).logits, expected)
        with pg.patch({"output|logits": ReplacePatch(value=1.0)}, strict=True):
            assert torch.equal(pg(**given).logits, torch.ones(2, 5, 32))
