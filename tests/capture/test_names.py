"""Names are labels that a person finds in the source: they do not depend on what else the model did."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, PatchableGraph
from graphpatch_notebook.experiments import attribute
from graphpatch_notebook.patchable_graph import captured as captured_model
from tests.zoo import case_by_name
from tests.zoo.case import floats
from tests.zoo.submodules import Submodules


def names(pg: PatchableGraph) -> list[str]:
    return [path for path, node in pg.nodes.items() if not node.is_size]


def captured(name: str) -> PatchableGraph:
    case = case_by_name(name)
    call = case.example()
    return PatchableGraph(case.build(), *call.args, **call.kwargs)


def test_the_names_of_gpt2() -> None:
    paths = set(captured("gpt2-eager").nodes)
    assert "transformer.h_0.mlp.act.mul_3" in paths
    assert "transformer.h_0.mlp.act.mul_4" not in paths
    assert {f"transformer.h_1.attn.{name}" for name in ("query_states", "key_states", "value_states")} <= paths
    assert {"transformer.h_1.attn.attn_weights", "transformer.h_1.attn.c_proj.weight"} <= paths


def test_the_names_of_a_llama() -> None:
    paths = set(captured("llama-eager").nodes)
    assert {"model.layers_0.self_attn.q_embed", "model.layers_1.mlp.down_proj.linear", "lm_head.output"} <= paths
    assert {"model.layers_0.input_layernorm.variance", "model.layers_0.position_embeddings|sub_0"} <= paths


class Shadowing(Submodules, output=(2, 2), scale=lambda: nn.Parameter(torch.ones(2))):
    """A child called `output`, an input called like a parameter, variables called like both."""

    def forward(self, scale: Tensor, add: Tensor) -> Tensor:
        weight = scale * self.scale
        output = self.output(weight)
        scale = output + add
        return scale + 1


def test_the_models_own_names_come_first() -> None:
    pg = PatchableGraph(Shadowing(), torch.ones(2), torch.ones(2))
    kinds = {path: node.kind for path, node in pg.nodes.items() if "." not in path}
    assert kinds == {
        "scale": "input",
        "add": "input",
        "scale_1": "parameter",
        "weight": "op",
        "scale_2": "op",
        "add_1": "op",
        "output_1": "output",
    }
    assert "output.output" in pg.nodes


@pytest.mark.parametrize("name", ["gpt2-sdpa", "t5-eager", "torch-resnet"])
def test_names_are_the_same_for_other_inputs_of_the_same_kind(name: str) -> None:
    case = case_by_name(name)
    model = case.build()
    expected = names(captured(name))
    variants = case.variants(model)
    for variant in [v for v in variants if v in ("other_size", "one_token")]:
        call = variants[variant]
        assert names(PatchableGraph(model, *call.args, **call.kwargs)) == expected


def helper(x: Tensor) -> Tensor:
    shifted = x + 1
    return shifted * 2


class CallsHelperTwice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return helper(x) + helper(x - 1)


def test_two_calls_of_one_helper_stay_apart() -> None:
    pg = PatchableGraph(CallsHelperTwice(), torch.ones(2))
    assert [p for p in names(pg) if p.startswith("shifted")] == ["shifted", "shifted_1"]
    sites = {node.name: node.site for node in captured_model(pg).root.nodes if node.name.startswith("shifted")}
    assert sites["shifted"] is not sites["shifted_1"]
    lines = [line.text for line in pg.nodes["shifted_1"].source_lines]
    assert lines == ["return helper(x) + helper(x - 1)", "shifted = x + 1"]


class Loop(nn.Module):
    """One variable and one function over and over, beside an input that has one of the numbered names already."""

    def forward(self, x: Tensor, x_3: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.relu(x + 1)
        return x * x_3


def test_numbering_continues_and_skips_used_numbers() -> None:
    pg = PatchableGraph(Loop(), torch.ones(2), torch.ones(2))
    assert names(pg) == ["x", "x_3", "add", "x_1", "add_1", "x_2", "add_2", "x_4", "add_3", "x_5", "mul", "output"]


class Lazy(Submodules, first=partial(nn.LazyLinear, 4), norm=nn.LazyBatchNorm1d, idle=partial(nn.LazyLinear, 3)):
    """Modules that find out their sizes at their first call, and one that is never called."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).tanh()


def test_what_lazy_modules_do_once_has_no_names() -> None:
    x = floats(3, 5)
    captured, ran = Lazy().eval(), Lazy().eval()
    ran(x)
    pg = PatchableGraph(captured, x)
    assert list(pg.nodes) == list(PatchableGraph(ran, x).nodes)
    assert not any("initialize_parameters" in vars(module) for module in captured.modules())
    assert torch.equal(pg(x), captured(x))
    pg.verify(x)
    with torch.no_grad():
        expected = captured.norm(captured.first(x) + 1).tanh()
    with pg.patch({"first.output": AddPatch(value=1.0)}):
        assert torch.equal(pg(x), expected)
    assert len(attribute(pg, torch.sum, x, x * 2)) > 0
