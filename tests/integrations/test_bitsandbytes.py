"""Quantized modules run as they do; their weights are seen, probed and patched as what they stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExtractionOptions,
    PatchableGraph,
    PatchValueError,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)
from graphpatch_notebook.checks.dimensions import dimensions_of
from graphpatch_notebook.patches.kinds import Patch
from tests.integrations.quantized import KINDS, FloatTensors, Quantized, dequantized, quantized
from tests.laws.captures import identity

X = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
OUT, IN = 32, 64

each_kind = pytest.mark.parametrize("kind", KINDS)


def plain(model: Quantized, weight: Tensor, x: Tensor = X) -> Tensor:
    """Returns what the model gives with this weight, computed by a plain linear function."""
    dtype = getattr(model.linear, "compute_dtype", None) or x.dtype
    bias = model.linear.bias
    output = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return output.to(x.dtype) * 2


# -- what is seen ------------------------------------------------------------------------------------------------------


@each_kind
@torch.no_grad()
def test_a_weight_is_recorded_with_its_unpacked_shape(kind: str) -> None:
    pg = PatchableGraph(quantized(kind), X)
    node = pg.nodes["linear.weight"]
    assert (node.shape, node.dtype, node.device) == ((OUT, IN), torch.float32, torch.device("cpu"))
    assert "weight: Tensor(32, 64)\n" in repr(pg.graph)
    assert tuple(pg.graph.linear.weight._shape) == (OUT, IN)
    names = ["x", "weight", "bias", "output"] if kind != "nf4, no bias" else ["x", "weight", "output"]
    assert [path for path in pg.nodes if path.startswith("linear.")] == [f"linear.{name}" for name in names]
    assert "quantized" in pg._graph_module.linear.reason


@each_kind
@torch.no_grad()
def test_weight_is_seen_in_opaque_parents(kind: str) -> None:
    for options in (ExtractionOptions(skip_compilation=True), ExtractionOptions(classes_to_skip_compiling={Quantized})):
        pg = PatchableGraph(quantized(kind), options, X)
        assert pg.nodes["linear.weight"].shape == (OUT, IN)
        with pg.patch({"linear.weight": ZeroPatch()}):
            assert torch.equal(pg(X), plain(pg._module, torch.zeros(OUT, IN)))


# -- untouched ---------------------------------------------------------------------------------------------------------


@each_kind
@torch.no_grad()
def test_untouched_weight_changes_no_bit(kind: str) -> None:
    model, other = quantized(kind), quantized(kind)
    pg = PatchableGraph(model, X)
    expected = other(X)
    assert torch.equal(pg(X), expected)
    looks = [ProbePatch(), RecordPatch(), identity()]
    for patches in (*looks, looks):
        with pg.patch({"linear.weight": patches}, strict=True):
            assert torch.equal(pg(X), expected)
    with pg.patch({path: identity() for path in pg.nodes}, strict=True):
        assert torch.equal(pg(X), expected)
        assert torch.equal(pg(X[:1, :2]), other(X[:1, :2]))


@each_kind
@torch.no_grad()
def test_input_output_and_bias_are_patched_around_the_kernel(kind: str) -> None:
    pg = PatchableGraph(quantized(kind), X)
    edited = quantized(kind)
    probe = ProbePatch()
    with pg.patch({"linear.x": ZeroPatch(), "linear.output": probe}):
        patched = pg(X)
    assert torch.equal(probe.activation, edited.linear(torch.zeros_like(X)))
    assert torch.equal(patched, probe.activation * 2)
    if edited.linear.bias is not None:
        edited.linear.bias += 1
        with pg.patch({"linear.bias": AddPatch(1)}):
            assert torch.equal(pg(X), edited(X))


# -- probed and patched ------------------------------------------------------------------------------------------------


@each_kind
@torch.no_grad()
def test_a_probe_keeps_the_unpacked_weight(kind: str) -> None:
    model, probe = quantized(kind), ProbePatch()
    pg = PatchableGraph(model, X)
    expected = dequantized(quantized(kind).linear, like=model.linear)
    for _ in range(2):
        with pg.patch({"linear.weight": probe}):
            pg(X)
        torch.testing.assert_close(probe.activation, expected, rtol=1e-6, atol=1e-8)
    # It is the weight that the kernel works with, up to its rounding.
    error = (plain(model, probe.activation) - pg(X)).norm() / pg(X).norm()
    assert error < 0.02


@pytest.mark.parametrize("kind", ["int8", "int8, outliers"])
@torch.no_grad()
def test_8_bit_scales_are_found_in_the_weight_and_in_the_state(kind: str) -> None:
    model, other = quantized(kind), quantized(kind)
    pg, probe = PatchableGraph(model, X), ProbePatch()
    scales = model.linear.state.SCB
    for is_in_weight in (False, True, False):
        if is_in_weight:  # as accelerate does, which loads a weight anew for each forward
            other.linear.weight.data[0] = 0
            model.linear.weight = other.linear.weight
        assert (model.linear.weight.SCB is not None) == is_in_weight
        expected = model.linear.weight.float() * ((model.linear.weight.SCB if is_in_weight else scales) / 127)[:, None]
        with pg.patch({"linear.weight": probe}):
            pg(X)
        scales = model.linear.state.SCB
        torch.testing.assert_close(probe.activation, expected, rtol=1e-6, atol=1e-8)


def flipped(weight: Tensor) -> Tensor:
    return weight.flip(1)


EDITS: dict[str, tuple[Callable[[], Patch[Any]], Callable[[Tensor], Tensor]]] = {
    "zero": (ZeroPatch, torch.zeros_like),
    "zero a row": (lambda: ZeroPatch(slice=3), lambda w: w.index_fill(0, torch.tensor(3), 0)),
    "zero columns": (
        lambda: ZeroPatch(slice=(slice(None), slice(8, 10))),
        lambda w: w.index_fill(1, torch.tensor([8, 9]), 0),
    ),
    "add": (lambda: AddPatch(torch.arange(64) / 100), lambda w: w + torch.arange(64) / 100),
    "add to a slice": (
        lambda: AddPatch(0.5, slice=(slice(0, 2), -1)),
        lambda w: w + F.pad(torch.full((2, 1), 0.5), (63, 0, 0, 30)),
    ),
    "replace": (lambda: ReplacePatch(torch.ones(32, 64)), torch.ones_like),
    "replace a row": (
        lambda: ReplacePatch(torch.ones(64), slice=5),
        lambda w: torch.cat([w[:5], torch.ones(1, 64), w[6:]]),
    ),
    "a function": (lambda: CustomPatch(flipped), flipped),
}


@pytest.mark.parametrize("edit", EDITS)
@each_kind
@torch.no_grad()
def test_a_patched_weight_is_used_by_a_plain_linear_function(kind: str, edit: str) -> None:
    model, (patch, edited) = quantized(kind), EDITS[edit]
    pg = PatchableGraph(model, X)
    probe = ProbePatch()
    with pg.patch({"linear.weight": probe}):
        expected = pg(X)
    with pg.patch({"linear.weight": patch()}, strict=True):
        assert torch.equal(pg(X), plain(model, edited(probe.activation)))
        assert torch.equal(pg(x=X[0]), plain(model, edited(probe.activation), X[0]))
    assert torch.equal(pg(X), expected)


@torch.no_grad()
def test_weight_bias_input_and_output_are_patched_together() -> None:
    model = quantized("nf4")
    pg = PatchableGraph(model, X)
    patches = {"weight": AddPatch(1.0), "bias": ReplacePatch(3.0), "x": ReplacePatch(1.0), "output": AddPatch(-3.0)}
    probe = ProbePatch()
    with pg.patch({"linear.weight": probe}):
        pg(X)
    with pg.patch({f"linear.{name}": patch for name, patch in patches.items()}, strict=True):
        output = pg(X)
    sums = (probe.activation + 1).sum(dim=1) * 2
    torch.testing.assert_close(output, sums.expand(3, 5, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_kind
@torch.no_grad()
def test_a_patched_weight_gives_the_dtype_that_the_module_gives(kind: str, dtype: torch.dtype) -> None:
    model = quantized(kind)
    pg = PatchableGraph(model, X.to(dtype))
    expected = pg(X.to(dtype))
    with pg.patch({"linear.weight": CustomPatch(torch.clone)}):
        patched = pg(X.to(dtype))
    assert patched.dtype == expected.dtype == dtype
    assert type(patched) is Tensor
    assert (patched - expected).float().norm() / expected.float().norm() < 0.05


@each_kind
def test_gradients_flow_to_the_inputs_and_to_a_patch(kind: str) -> None:
    model = quantized(kind)
    x, value = X.clone().requires_grad_(), torch.ones(64, requires_grad=True)
    pg = PatchableGraph(model, X)
    probe = ProbePatch()
    with pg.patch({"linear.weight": [ReplacePatch(value, slice=5), probe]}):
        pg(x).pow(2).sum().backward()
    reference = [X.clone().requires_grad_(), torch.ones(64, requires_grad=True)]
    weight = torch.cat([probe.activation[:5].detach(), reference[1][None], probe.activation[6:].detach()])
    plain(model, weight, reference[0]).pow(2).sum().backward()
    torch.testing.assert_close([x.grad, value.grad], [tensor.grad for tensor in reference])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_8_bit_modules_with_float_weights_train_under_a_patch() -> None:
    model = quantized("int8, float weights").train().requires_grad_(True)
    pg = PatchableGraph(model, X[0])
    with pg.patch({"linear.weight": ZeroPatch(slice=0)}):
        pg(X[0]).sum().backward()
    assert not model.linear.weight.grad[0].any()
    torch.testing.assert_close(model.linear.weight.grad[1:], 2 * X[0].sum(dim=0).expand(31, 64))


@each_kind
@torch.no_grad()
def test_the_module_keeps_its_packed_weight(kind: str) -> None:
    model, other = quantized(kind), quantized(kind)
    pg = PatchableGraph(model, X)
    expected = other(X)
    state = {key: value.clone() for key, value in model.linear._parameters.items() if value is not None}
    scales = {key: copy.copy(value) for key, value in vars(model.linear).items() if key != "_parameters"}
    with pg.patch({"linear.weight": AddPatch(1.0)}):
        pg(X)
    assert all(torch.equal(model.linear._parameters[key].data, value.data) for key, value in state.items())
    assert vars(model.linear).keys() - {"_parameters"} == scales.keys()
    assert torch.equal(model(X), expected)
    assert "forward" not in vars(model.linear)


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int8, float weights"])
@torch.no_grad()
def test_a_weight_is_unpacked_only_where_it_is_patched_or_probed(kind: str) -> None:
    model = quantized(kind)
    with FloatTensors((OUT, IN)) as made:
        pg = PatchableGraph(model, X)
        pg(X)
        repr(pg.graph)
        assert pg.nodes["linear.weight"].shape == (OUT, IN)
        with pg.patch({"linear.output": ZeroPatch(), "linear.x": ProbePatch(), "mul": ProbePatch()}):
            pg(X)
        assert made.count == 0
        context = pg.patch({"linear.weight": ProbePatch()})
        with context:
            assert made.count == 0
            pg(X)
        assert made.count > 0


# -- where it is not so simple -----------------------------------------------------------------------------------------


class OwnForward(bnb.nn.Linear4bit):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@torch.no_grad()
def test_a_module_with_a_forward_of_its_own_is_probed_but_not_patched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OwnForward(64, 32, quant_type="nf4")).to("cpu").eval()
    pg = PatchableGraph(model, X)
    expected, probe = pg(X), ProbePatch()
    with pg.patch({"sub_0.weight": probe}):
        assert torch.equal(pg(X), expected)
    assert probe.activation.shape == (32, 64)
    with (
        pg.patch({"sub_0.weight": ZeroPatch()}),
        pytest.raises(PatchValueError, match=r"OwnForward.*not patched.*its l"),
    ):
        pg(X)
    assert torch.equal(pg(X), expected)


class LooksAtTheWeight(Quantized):
    """As T5 does, to choose a dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2 if self.linear.weight.dtype == torch.uint8 else 3)


@torch.no_grad()
def test_the_weight_of_another_module_can_only_be_probed() -> None:
    model = LooksAtTheWeight("nf4").to("cpu").eval()
    pg = PatchableGraph(model, X)
    expected, probe = quantized("nf4")(X), ProbePatch()
    assert pg.nodes["linear_weight"].shape == (OUT, IN)
    with pg.patch({path: identity() for path in pg.nodes}, strict=True):
        assert torch.equal(pg(X), expected)
    with pg.patch({"linear_weight": probe}, strict=True):
        assert torch.equal(pg(X), expected)
    assert probe.activation.shape == (OUT, IN)
    with (
        pg.patch({"linear_weight": ZeroPatch()}),
        pytest.raises(PatchValueError, match=r"'linear.weight' is the quant"),
    ):
        pg(X)
    with pg.patch({"linear.weight": ZeroPatch()}):
        assert torch.equal(pg(X), plain(model, torch.zeros(OUT, IN)))


@torch.no_grad()
def test_8_bit_weights_without_their_scales_say_so() -> None:
    model = quantized("int8")
    pg = PatchableGraph(model, X)
    model.linear.state.SCB = None
    with pg.patch({"linear.weight": ProbePatch()}), pytest.raises(PatchValueError, match="no scales"):
        pg(X)


EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "nf4": lambda: bnb.nn.EmbeddingNF4(20, 64),
    "fp4, odd": lambda: bnb.nn.EmbeddingFP4(20, 48),
    "int8": lambda: bnb.nn.Embedding8bit(20, 64),
}


@pytest.mark.parametrize("kind", EMBEDDINGS)
@torch.no_grad()
def test_embeddings(kind: str) -> None:
    torch.manual_seed(0)
    embedding = EMBEDDINGS[kind]().to("cpu").eval()
    ids = torch.arange(6).view(2, 3)
    expected, probe = embedding(ids), ProbePatch()
    pg = PatchableGraph(nn.Sequential(embedding), ids)
    assert pg.nodes["sub_0.weight"].shape == (20, embedding.embedding_dim)
    with pg.patch({"sub_0.weight": probe}, strict=True):
        assert torch.equal(pg(ids), expected)
    torch.testing.assert_close(F.embedding(ids, probe.activation), expected)
    with pg.patch({"sub_0.weight": ZeroPatch(slice=1)}, strict=True):
        patched = pg(ids)
    assert not patched[0, 1].any()
    torch.testing.assert_close(patched[1], expected[1])


@torch.no_grad()
def test_graph_modules_run_the_quantized_module() -> None:
    model = quantized("nf4")
    pg = PatchableGraph(model, X)
    expected = model(X)
    report = pg.verify(X)
    assert report.is_equal
    assert report.counts() == {"equal": 1, "opaque": 1}
    assert torch.equal(pg._graph_module(X), expected)


@each_kind
@torch.no_grad()
def test_edited_graphs_call_the_quantized_module(kind: str) -> None:
    def triple(graph_module: Any, module: nn.Module) -> None:
        for node in graph_module.graph.nodes:
            if node.name == "mul":
                node.args = (node.args[0], 3)

    model = quantized(kind)
    pg = PatchableGraph(model, ExtractionOptions(postprocessing_function=triple), X)
    assert torch.equal(pg(X), quantized(kind).linear(X) * 3)
    probe = ProbePatch()
    with pg.patch({"linear.weight": [ZeroPatch(slice=0), probe]}, strict=True):
        assert torch.equal(pg(X), plain(model, probe.activation) / 2 * 3)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(2, 64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,eio->...eo", x, self.up)


@torch.no_grad()
def test_parameters_that_are_unpacked_whenever_they_are_read() -> None:
    model = Experts()
    replace_parameter_4bit(model, "up")
    pg, probe = PatchableGraph(model, X), ProbePatch()
    with pg.patch({"parametrizations_up.output": [ZeroPatch(slice=0), probe]}, strict=True):
        patched = pg(X)
    assert probe.activation.shape == (2, 64, 32)
    assert not patched[..., 0, :].any()
    assert torch.equal(patched[..., 1, :], model(X)[..., 1, :])


@torch.no_grad()
def test_two_threads_patch_the_same_quantized_weight() -> None:
    pg = PatchableGraph(quantized("nf4"), X)
    probe = ProbePatch()
    with pg.patch({"linear.weight": probe}):
        pg(X)
    expected = [plain(pg._module, probe.activation * factor) for factor in range(4)]

    def runs(factor: int) -> list[Tensor]:
        with torch.no_grad(), pg.patch({"linear.weight": CustomPatch(lambda weight: weight * factor)}):
            return [pg(X) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for results, right in zip(pool.map(runs, range(4)), expected, strict=True):
            assert all(torch.equal(result, right) for result in results)


@each_kind
@torch.no_grad()
def test_hooks_of_accelerate_run_around_the_patched_weight(kind: str) -> None:
    model = quantized(kind)
    for module in list(model.modules()):
        add_hook_to_module(module, ModelHook())
    pg, probe = PatchableGraph(model, X), ProbePatch()
    with pg.patch({"linear.weight": [ZeroPatch(slice=0), probe]}, strict=True):
        assert torch.equal(pg(X), plain(model, probe.activation))
    assert torch.equal(pg(X), quantized(kind)(X))


@each_kind
def test_which_dimension_is_which(kind: str) -> None:
    pg = PatchableGraph(quantized(kind), X)
    known = dimensions_of(pg.nodes.root)
    assert (known.reason, known.groups) == (None, [[(0, 0)], [(0, 1)]])
    assert [known.follows_inputs(dim) for dim in known.profiles(pg.nodes.root.output_node.spec)] == [True, True, False]
