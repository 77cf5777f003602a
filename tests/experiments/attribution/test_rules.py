"""Derivative rules: values stay the same to the last bit, and the secant explains the change of each operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphpatch_notebook import PatchableGraph, ProbePatch, ReplacePatch
from graphpatch_notebook.errors import ExperimentError, GraphPatchWarning
from graphpatch_notebook.experiments import attribute
from graphpatch_notebook.experiments.attribution.rules import DerivativeRules, FrozenDenominators
from tests.laws.captures import leaves_its_state_alone, some_cases
from tests.zoo import Case, case_by_name, seed_all
from tests.zoo.case import floats, tokens
from tests.zoo.values import flatten


def secant(function: Callable[..., Tensor], clean: list[Tensor], corrupted: list[Tensor]) -> tuple[Tensor, ...]:
    """Returns the gradients of the sum of a function, weighted, with the rules of the secant."""
    rules = DerivativeRules("secant")
    with torch.no_grad(), rules.recording():
        weighted(function(*clean))
    inputs = [x.clone().requires_grad_() for x in corrupted]
    with rules.applied():
        result = weighted(function(*inputs))
    assert rules.fallbacks == {}
    found = torch.autograd.grad(result, inputs, allow_unused=True)
    return tuple(torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, inputs, strict=True))


def weighted(value: Tensor) -> Tensor:
    return (value * torch.arange(1, value.numel() + 1, dtype=value.dtype).cos().reshape(value.shape)).sum()


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- each operation explains its whole change --------------------------------------------------------------------------


def softmax_by_hand(x: Tensor) -> Tensor:
    powers = (x - x.max(-1, keepdim=True).values).exp()
    return powers / powers.sum(-1, keepdim=True)


def layer_norm_by_hand(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()


def rms_norm_by_hand(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def in_place(x: Tensor) -> Tensor:
    y = x + 1
    y.mul_(x).sigmoid_()
    y *= x
    y[..., 1:] *= x[..., 1:]
    F.relu(y, inplace=True)
    z = F.hardtanh(y * 2, -0.5, 0.5, True)
    return z.add_(x).pow_(2)


def attention_of(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


MASK = torch.ones(5, 5, dtype=torch.bool).tril(1)
POINTWISE = {
    "tanh": torch.tanh, "gelu": F.gelu, "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "relu": F.relu, "abs": abs, "clamp": lambda x: x.clamp(-0.4, 0.6), "sin": Tensor.sin, "pow": lambda x: x**3,
    "power": lambda x: 2**x, "reciprocal": lambda x: 1 / (x.square() + 1), "softplus": F.softplus,
    "leaky": F.leaky_relu,
    "softmax": lambda x: x.softmax(-1), "softmax-wide": lambda x: (40 * x).softmax(-1),
    "softmax-hand": softmax_by_hand, "log_softmax": lambda x: F.log_softmax(x, -1),
    "lse": lambda x: x.logsumexp((0, -1)),
    "layer_norm": lambda x: F.layer_norm(x, (6,)), "layer_norm-hand": layer_norm_by_hand,
    "rms_norm": lambda x: F.rms_norm(x, (6,)), "rms_norm-hand": rms_norm_by_hand,
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, torch.ones(4).to(x), torch.full((4,), 2.0).to(x)), "normalize": F.normalize,
    "norm": lambda x: x.norm(dim=-1) + x.norm(p=2), "vector_norm": lambda x: torch.linalg.vector_norm(x, 2, -1),
    "linalg_norm": lambda x: torch.linalg.norm(x, dim=-1) + torch.linalg.norm(x, ord=2, dim=-1) + torch.linalg.norm(x),
    "std": lambda x: x.std(-1),
    "var": lambda x: torch.var(x, -1),
    "max": lambda x: x.max(-1).values + x.amax(-1) + x.max(), "min": lambda x: x.min(1)[0] + x.amin(1),
    "avg_pool": lambda x: F.avg_pool1d(x, 2), "cumsum": lambda x: x.cumsum(-1) * x, "in-place": in_place, "glu": F.glu,
    "cross_entropy": lambda x: F.cross_entropy(x[:, 0], torch.arange(x.shape[0])),
    "mse": lambda x: F.mse_loss(x, x.flip(-1)), "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x.sin()),
    "cube": lambda x: torch.einsum("bij,bij,bij->bi", x, x.tanh(), x.cos()),
}  # fmt: skip
SEVERAL = {
    "mul": torch.mul, "operator": lambda a, b: a * b - b / (a.square() + 1), "maximum": torch.maximum,
    "bmm": lambda a, b: a.bmm(b.mT), "matmul": lambda a, b: a @ b.transpose(1, 2),
    "addcmul": lambda a, b: a.addcmul(a, b),
    "baddbmm": lambda a, b: torch.baddbmm(a @ a.mT, a, b.mT, beta=0.5, alpha=2), "lerp": lambda a, b: a.lerp(b, a),
    "linear": lambda a, b: F.linear(a, b[0], b[0, :, 0]), "conv": lambda a, b: F.conv1d(a, b[:, :, :2]),
    "atan2": lambda a, b: torch.atan2(a, b.square() + 1),
    "broadcast": lambda a, b: a / (b[:, :1].exp() + 1),
}  # fmt: skip
ATTENTION = {
    "plain": attention_of(), "causal": attention_of(is_causal=True), "mask": attention_of(attn_mask=MASK),
    "bias": attention_of(attn_mask=torch.zeros(5, 5).double().masked_fill(~MASK, -math.inf), scale=0.3),
    "wide": attention_of(scale=30.0),
    "groups": lambda q, k, v: attention_of(enable_gqa=True, is_causal=True)(q, k[:, :1], v[:, :1]),
}  # fmt: skip


@pytest.mark.parametrize("name", POINTWISE)
def test_functions_of_one_value(name: str) -> None:
    explains(POINTWISE[name], [numbers(3, 4, 6, seed=1)], [numbers(3, 4, 6, seed=2)])


@pytest.mark.parametrize("name", SEVERAL)
def test_functions_of_several_values(name: str) -> None:
    explains(
        SEVERAL[name],
        [numbers(4, 4, 4, seed=seed) for seed in (1, 2)],
        [numbers(4, 4, 4, seed=seed) for seed in (3, 4)],
    )


@pytest.mark.parametrize("name", ATTENTION)
def test_fused_attention(name: str) -> None:
    explains(ATTENTION[name], *([numbers(2, 3, 5, 4, seed=9 * run + at) for at in range(3)] for run in (0, 1)))


def explains(function: Callable[..., Tensor], clean: list[Tensor], corrupted: list[Tensor]) -> None:
    change = weighted(function(*clean)) - weighted(function(*corrupted))
    gradients = secant(function, clean, corrupted)
    found = sum(((a - b) * gradient).sum() for a, b, gradient in zip(clean, corrupted, gradients, strict=True))
    assert float(found) == pytest.approx(float(change), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", [name for name in (*POINTWISE, *SEVERAL) if name != "in-place"])  # torch refuses it
def test_where_the_runs_coincide_it_is_the_gradient(name: str) -> None:
    function: Any = (POINTWISE | SEVERAL)[name]
    inputs = [numbers(4, 4, 4 if name in SEVERAL else 6, seed=seed) for seed in ((1, 2) if name in SEVERAL else (1,))]
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(weighted(function(*leaves)), leaves)
    for mine, gradient in zip(secant(function, inputs, inputs), expected, strict=True):
        torch.testing.assert_close(mine, gradient, rtol=1e-6, atol=1e-9)


# -- formulas by hand --------------------------------------------------------------------------------------------------


def test_large_scores_do_not_blow_derivatives_up() -> None:
    """A quotient of exp over the sum conserves as well, but its weights are not those of any softmax."""
    clean, corrupted = torch.tensor([[90.0, 0.0, 3.0, 1.0]]).double(), torch.tensor([[0.0, 80.0, 3.1, 1.0]]).double()
    (found,) = secant(lambda x: x.softmax(-1), [clean], [corrupted])
    assert float(found.abs().max()) < 0.05  # 1 / 90 at most for each row of the Jacobian, and not 1 / 4
    assert float(found.sum()) == pytest.approx(0, abs=1e-12)  # indifferent to a shift of all scores
    explains(lambda x: x.softmax(-1), [clean], [corrupted])


def test_products_share_equally() -> None:
    a, b, c, d = (numbers(3, seed=seed) for seed in range(4))
    found = secant(torch.mul, [a, b], [c, d])
    weights = torch.arange(1, 4).double().cos()
    torch.testing.assert_close(found, (weights * (b + d) / 2, weights * (a + c) / 2))


def test_close_values_have_the_derivative() -> None:
    """In float32, the quotient of values that differ by one rounding is noise."""
    corrupted = torch.linspace(-3, 3, 101)
    (found,) = secant(F.gelu, [torch.nextafter(corrupted, torch.tensor(9.0))], [corrupted])
    y = corrupted.double().requires_grad_()
    (expected,) = torch.autograd.grad(weighted(F.gelu(y)), y)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "size",
    [
        lambda x: (x.square().mean(-1, keepdim=True) + 1e-6) ** 0.5,
        lambda x: 1 / torch.pow(x.square().mean(-1, keepdim=True), exponent=-0.5),
        lambda x: torch.linalg.norm(x, dim=-1, keepdim=True),
        lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
        lambda x: (x.var(-1, keepdim=True) + 1e-6).sqrt(),
    ],
)
def test_held_norms_are_linear_however_they_are_written(size: Callable[[Tensor], Tensor]) -> None:
    x = numbers(4, 6, seed=1).requires_grad_()
    with FrozenDenominators():
        result = weighted(x / size(x) + F.layer_norm(x, (6,)) + x**2 + 0.5**x)
    (found,) = torch.autograd.grad(result, x)
    scale = torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5).detach()
    norm = (x - x.mean(-1, keepdim=True)) * scale
    (expected,) = torch.autograd.grad(weighted(x / size(x).detach() + norm + x**2 + 0.5**x), x)
    torch.testing.assert_close(found, expected)


# -- models ------------------------------------------------------------------------------------------------------------

NOT_RUN = {"awkward-inner-autograd", "awkward-sparse", "awkward-checkpoint-reentrant"}


@some_cases(lambda case: case.grad and leaves_its_state_alone(case) and case.name not in NOT_RUN)
def test_values_stay_the_same_to_the_last_bit(case: Case) -> None:
    model = case.build()

    def run() -> list[Any]:
        seed_all(5)
        return [value for _, value in flatten(case.example().run(model))]

    expected, rules = run(), DerivativeRules("secant")
    with rules.recording():
        recorded = run()
    with rules.applied():
        found = run()
    for mine, same, value in zip(found, recorded, expected, strict=True):
        for other in (mine, same) if isinstance(value, Tensor) else ():
            assert other.dtype == value.dtype
            torch.testing.assert_close(other.detach(), value.detach(), rtol=0, atol=0, equal_nan=True)


def a_logit(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return torch.log_softmax(logits[:, -1], -1)[:, 3].sum()


@pytest.fixture(scope="module")
def gpt2() -> tuple[PatchableGraph, Tensor, Tensor]:
    model = case_by_name("gpt2-sdpa").build()
    clean = tokens(2, 6)
    corrupted = clean.clone()
    corrupted[:, 2] += 1
    return PatchableGraph(model, clean), clean, corrupted


def test_scores_of_each_cut_sum_to_the_change(gpt2: Any) -> None:
    pg, clean, corrupted = gpt2
    scores = attribute(pg, a_logit, clean, corrupted, method="secant")
    conservation = scores.attrs["conservation"]
    assert {"total", "layers[0].resid_pre", "layers[1].resid_mid", "layers[1].resid_post"} <= set(conservation)
    assert max(conservation.values()) < 1e-5
    assert scores.attrs["fallbacks"] == {}
    resid = pg.components["layers[1].resid_mid"].path
    assert float(scores.sel(path=resid)) == pytest.approx(scores.clean - scores.corrupted, rel=1e-4)
    by_position = attribute(pg, a_logit, clean, corrupted, method="secant", paths=[resid], positions=True, max_bytes=1)
    assert float(by_position.sum()) == pytest.approx(float(scores.sel(path=resid)), rel=1e-5)


class Mixture(nn.Module):
    """Two layers of experts, of which each token gets the best two, or those that are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 8)
        self.gates = nn.ModuleList(nn.Linear(8, 5) for _ in range(2))
        self.experts = nn.ParameterList(torch.randn(5, 8, 8) for _ in range(2))

    def forward(self, ids: Tensor, chosen: list[Tensor] | None = None) -> Tensor:
        return self.run(self.embed(ids), chosen)[0]

    def run(self, x: Tensor, chosen: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        made: list[Tensor] = []
        for gate, experts in zip(self.gates, self.experts, strict=True):
            scores = gate(x).softmax(-1)
            weights, best = scores.topk(2, -1)
            if chosen is not None:
                best = chosen[len(made)]
                weights = scores.gather(-1, best)
            made.append(best)
            results = torch.einsum("bsd,edf->bsef", x, experts).tanh()
            x = x + (weights[..., None] * results.take_along_dim(best[..., None], 2)).sum(2)
        return x, made


def test_frozen_routing_holds_the_choices_of_the_clean_run() -> None:
    model = Mixture().eval()
    clean, corrupted = tokens(2, 6), tokens(2, 6).flip(1)
    pg = PatchableGraph(model, clean)

    def metric(output: Tensor) -> Tensor:
        return weighted(output[:, -1])

    _, chosen = model.run(model.embed(clean))
    x = model.embed(corrupted).detach().requires_grad_()
    expected = metric(model.run(x, chosen)[0])
    (gradient,) = torch.autograd.grad(expected, x)
    assert not torch.equal(model(corrupted), model(corrupted, chosen))

    scores = attribute(pg, metric, clean, corrupted, routing="frozen")
    assert scores.corrupted == pytest.approx(float(expected.detach()), rel=1e-6)
    product = (model.embed(clean) - x) * gradient
    assert float(scores.sel(path="embed.output")) == pytest.approx(float(product.detach().sum()), rel=1e-4)
    secant = attribute(pg, metric, clean, corrupted, method="secant", routing="frozen")
    assert secant.conservation["total"] < 1e-5
    assert not secant.fallbacks
    with pytest.warns(GraphPatchWarning, match="routing='frozen' holds choices"):
        free = attribute(pg, metric, clean, corrupted, method="secant")
    assert "topk" in free.fallbacks
    with pytest.warns(GraphPatchWarning, match="scores of 'embed.output' differ from its effect by .*topk"):
        attribute(pg, metric, clean, corrupted, method="secant", one_sided=True, paths=["embed.output"])
    assert free.corrupted == pytest.approx(float(metric(model(corrupted)).detach()), rel=1e-6)
    with pytest.raises(ExperimentError):
        attribute(pg, metric, clean, corrupted, routing="fixed")  # type: ignore[arg-type]


def test_one_sided_scores_sum_to_exact_patching(gpt2: Any) -> None:
    pg, clean, corrupted = gpt2
    paths = ["layers[0].mlp_out", "layers[1].attn_out", "layers[1].attn.heads[*].z"]
    scores = attribute(pg, a_logit, clean, corrupted, method="secant", one_sided=True, paths=paths, positions=True)
    sums = scores.sum("position").to_series().to_dict()

    def effect(name: str) -> float:
        probe = ProbePatch()
        with torch.no_grad():
            with pg.patch({name: probe}):
                pg(clean)
            with pg.patch({name: ReplacePatch(value=probe.activation)}):
                return float(a_logit(pg(corrupted))) - scores.corrupted

    assert sums["layers[0].mlp_out"] == pytest.approx(effect("layers[0].mlp_out"), rel=1e-3)
    assert sums["layers[1].attn_out"] == pytest.approx(effect("layers[1].attn_out"), rel=1e-3)
    heads = sum(score for name, score in sums.items() if ".z" in name)
    assert heads == pytest.approx(effect("layers[1].attn_out"), rel=1e-3)
    with pytest.raises(ExperimentError):
        attribute(pg, a_logit, clean, corrupted, one_sided=True)


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * (1 - ctx.saved_tensors[0].tanh() ** 2)


class WithCustom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Custom.apply(3 * x)  # type: ignore[no-untyped-call]
        return result * 2


def test_what_has_no_rule_is_named() -> None:
    pg = PatchableGraph(WithCustom(), floats(2, 3))
    with pytest.warns(GraphPatchWarning, match=r"differ from the change of the metric by .*It may be: .*Custom"):
        scores = attribute(pg, torch.sum, floats(2, 3), floats(2, 3, seed=4), method="secant")
    assert "Custom" in scores.attrs["fallbacks"]


def test_runs_that_take_other_steps_are_an_error() -> None:
    case = case_by_name("mixtral-expert-loop-eager")
    model = case.build()
    clean, corrupted = tokens(1, 6), tokens(1, 6, seed=5)
    with pytest.raises(
        ExperimentError, match=r"diverge at operation \d+: .* in the clean run, .* in the corrupted run"
    ):
        attribute(PatchableGraph(model, clean), a_logit, clean, corrupted, method="secant")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_frozen_denominators_round_as_kernels_do(dtype: torch.dtype) -> None:
    x, weight, bias = (numbers(*size, seed=seed).to(dtype) for seed, size in enumerate([(64, 48), (48,), (48,)]))
    x[:8] *= 30
    for norm in (
        lambda x: F.layer_norm(x, (48,), weight, bias),
        lambda x: F.rms_norm(x, (48,), weight=weight, eps=1e-6),
        lambda x: F.group_norm(x, 4, weight, bias),
        lambda x: F.normalize(x, p=1.0, eps=1e-3),
    ):
        expected, held = norm(x), FrozenDenominators()
        with held:
            found = norm(x)
        with held.again():
            doubled = norm(2 * x)
        assert found.dtype == doubled.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        added = norm(torch.zeros_like(x))  # by biases
        torch.testing.assert_close(doubled - added, 2 * (found - added), rtol=1e-2, atol=0.1)
