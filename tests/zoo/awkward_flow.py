"""Awkward control flow: branches and loops on data and sizes, caches, contexts, randomness, custom operations."""

# The awkward spelling is the point: ruff must not tidy it up.
# ruff: noqa: B009, PIE804, SIM300

from __future__ import annotations

import functools
import math
import operator
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Call, Case, floats, simple_case
from .submodules import Submodules, copies


class BranchOnValues(Submodules, linear=(6, 6)):
    """Branches on .item(), torch.any, torch.equal, a comparison of shapes and a None argument."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.linear(x)
        if x.max().item() > 3:
            h = h / x.max()
        if torch.any(x < -3):
            h = h.clamp(min=-1)
        if mask is not None and not mask.all():
            h = h.masked_fill(~mask, 0.0)
        if x.shape[0] > 4 or torch.equal(x, x.abs()):
            h = h[:4] * 2
        while h.norm() > 2:
            h = h * 0.5
        return h


class LoopsOverValues(Submodules, shared=(6, 6), layers=copies((6, 6), 4)):
    """Loops over what values choose, as often as they say, and until they say so; one over modules besides."""

    def forward(self, x: Tensor) -> Tensor:
        total = x * float(x.max())
        for row in (x[:, 0] > 0).nonzero():
            chosen = x[row] * 2
            total = total + self.shared(chosen)
        kinds = x.argmax(1).tolist()
        for kind in sorted(set(kinds)):
            total = total + self.layers[kind % 4](x) * kind
        for layer in self.layers:
            total = torch.tanh(layer(total))
        while total.norm() > 2:
            total = total * 0.5
        return total


class LoopsOverSizes(Submodules, linear=(6, 6)):
    """Loops over ranges of sizes, chunks and windows, and lists as long as a size."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0], 6)
        for position in range(x.shape[1]):
            total = total * 0.9 + self.linear(x[:, position])
        weights = torch.tensor([0.5] * x.shape[1] + list(range(x.size(0))))
        chunks = [chunk.mean(1) for chunk in x.split(math.ceil(x.shape[1] / 2), dim=1)]
        windows = [x[:, start : start + 2].amax(1) for start in range(0, x.shape[1] - 1, 2)]
        return total + sum(chunks) + torch.stack(windows).mean(0) * weights.sum()


class _Merge(nn.Module):
    def forward(self, x: Tensor, sizes: tuple[int, int]) -> tuple[Tensor, tuple[int, ...]]:
        merged = x.transpose(1, 2).reshape(*sizes, -1)
        return merged, (*sizes, merged.shape[-1])


class SizePlumbing(Submodules, qkv=(12, 36), merge=_Merge):
    """Sizes that are unpacked, multiplied, compared, square-rooted, passed on and returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, torch.Size, int, list[int]]:
        batch, length, width = x.shape
        heads = 3
        qkv = self.qkv(x).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = q @ k.mT / math.sqrt(width // heads)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, torch.finfo(scores.dtype).min)
        positions = torch.arange(length, device=x.device)[None].expand(batch, -1)
        out, sizes = self.merge(scores.softmax(-1) @ v, (batch, length))
        out = out[:, -min(length, 4) :] + positions[:, -4:, None]
        return out, x.shape[:-1], x.numel() + len(x) + x.dim(), [int(size) for size in sizes]


@functools.lru_cache(maxsize=8)
def _cached_positions(length: int, width: int) -> Tensor:
    return torch.arange(length)[:, None] / torch.arange(1, width + 1)


_TABLES: dict[tuple[int, ...], Tensor] = {}


class CachedByShape(nn.Module):
    """Tables cached in functools.lru_cache and in a global dict, with sizes of the first input as keys."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        _TABLES.clear()  # each model fills them anew, whatever ran before in this process
        _cached_positions.cache_clear()

    def forward(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape[1:])
        if shape not in _TABLES:
            _TABLES[shape] = torch.linspace(0, 1, x.shape[1])[:, None]
        return self.linear(x) + _cached_positions(x.shape[1], x.shape[2]) * _TABLES[shape]


class Closures(nn.Module):
    """Functions that close over tensors, lambdas as attributes and partials."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        offset = torch.linspace(-1, 1, 6)
        self.shift = lambda x: x + offset
        self.power = functools.partial(torch.pow, exponent=2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)

        def mix(value: Tensor, weight: float = 0.5) -> Tensor:
            return value * weight + hidden

        return mix(self.shift(mix(x)), weight=0.1) + self.power(hidden)


def _normalise(x: Tensor, eps: float = 1e-5) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)


class HelpersCalledTwice(Submodules, linear=(6, 6)):
    """A helper function called on two lines, twice on one line, in a loop and inside of itself."""

    def forward(self, x: Tensor, rounds: int = 2) -> Tensor:
        left = _normalise(x)
        right = _normalise(self.linear(x))
        out = _normalise(left) + _normalise(right * 2)
        for _ in range(rounds):
            out = _normalise(_normalise(out) + left)
        return out


class Comprehensions(Submodules, linears=copies((6, 6), 3)):
    """Operations in list, dict, set and generator comprehensions and in nested ones."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        listed = [torch.relu(linear(x)) for linear in self.linears]
        table = {f"h{index}": h * (index + 1) for index, h in enumerate(listed) if index != 1}
        total = sum(h.sin() for h in listed)
        nested = [[a * b for b in listed[:2]] for a in table.values()]
        sizes = {h.shape[0] for h in listed}
        return {"table": table, "total": total, "nested": torch.stack(nested[0]), "sizes": sorted(sizes)}


class CalledFromC(Submodules, linear=(6, 6)):
    """Operations that C code calls for Python: sum, map, max, sorted, reduce, operator and iteration."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        rows = list(map(torch.tanh, h))
        largest = max(rows, key=lambda row: row.sum())
        order = sorted(rows, key=lambda row: row[0].item())
        product = functools.reduce(operator.mul, rows)
        first, second, *_ = h
        return sum(rows) + largest * product + operator.add(order[0], order[-1]) + first - second


class LookedUp(nn.Module):
    """Operations looked up by name, in a dict, through an alias and through the class of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.table = {"relu": torch.relu, "gelu": F.gelu}

    def forward(self, x: Tensor, act: str = "gelu") -> Tensor:
        h = self.table[act](self.linear(x))
        for name in ("sin", "cos"):
            h = h + getattr(torch, name)(h)
        apply = torch.Tensor.mul
        return apply(h, 2) + getattr(h, "tanh")() + torch._C._nn.gelu(h)


class Switches(Submodules, linear=(6, 6), detached=(6, 6)):
    """no_grad, enable_grad and bfloat16 autocast for parts of the forward."""

    def forward(self, x: Tensor, amp: bool = True) -> tuple[Tensor, Tensor, bool]:
        with torch.no_grad():
            constant = self.detached(x) * 2
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            low = self.linear(x + constant)
            with torch.autocast("cpu", enabled=False):
                high = self.linear(x)
            logits = low @ high.T.to(low.dtype)
        return logits, high * self._frozen(x), constant.requires_grad

    @torch.no_grad()
    def _frozen(self, x: Tensor) -> Tensor:
        return self.detached(x).exp()


class InferenceForward(Submodules, linear=(6, 6)):
    """A forward decorated with inference_mode, whose outputs know no autograd."""

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h += 1
        return h.relu()


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return torch.round(x * scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        sine, cosine = ctx.saved_tensors
        return left * cosine - right * sine


_straight = _Straight.apply


class AutogradFunctions(nn.Module):
    """Custom autograd functions through `Function.apply`, through an alias bound before, and with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.bound = _Straight.apply

    def forward(self, x: Tensor) -> Tensor:
        h = _Straight.apply(self.linear(x), 4.0)
        h = _straight(h / 3, 2.0) + self.bound(h, 0.5)
        sine, cosine = _Split.apply(h)
        return sine * 2 + cosine


# With schemas, since torch 2.4 reads none off annotations that are texts, as all are in this file.
@torch.library.custom_op(
    "graphpatch_zoo::scaled_add", mutates_args=(), schema="(Tensor x, Tensor y, float scale) -> Tensor"
)
def _scaled_add(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return x + y * scale


@_scaled_add.register_fake
def _(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _keep_scale(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    ctx.scale = inputs[2]


def _scaled_add_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return gradient, gradient * ctx.scale, None


_scaled_add.register_autograd(_scaled_add_backward, setup_context=_keep_scale)


@torch.library.custom_op("graphpatch_zoo::add_one_", mutates_args={"x"}, schema="(Tensor(a!) x) -> ()")
def _add_one_(x: Tensor) -> None:
    x.add_(1.0)


class CustomOperators(Submodules, linear=(6, 6)):
    """Operators of one's own, one of which writes in place, and calls of torch.ops.aten."""

    def forward(self, x: Tensor) -> Tensor:
        h = _scaled_add(self.linear(x), x, 0.5)
        h = torch.ops.graphpatch_zoo.scaled_add(h, x, scale=2.0)
        counter = torch.zeros(6)
        _add_one_(counter)
        h = torch.ops.aten.add.Tensor(h, counter, alpha=2)
        return torch.ops.aten.mul(h, torch.ops.aten.sigmoid.default(h))


class RandomOps(Submodules, layers=copies((6, 6), 4)):
    """Random numbers in the forward, of torch, a generator of its own and Python, and layers skipped by chance."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.randn_like(x) * torch.rand(1) + torch.empty_like(x).uniform_()
        x = x * torch.bernoulli(torch.full_like(x, 0.8), generator=torch.Generator().manual_seed(5))
        for layer in self.layers:
            if random.random() < 0.5:
                x = layer(x)
        return self.layers[0](x)[torch.randperm(x.shape[0])]


class _Picky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        doubled = x * 2
        if x.shape[0] > 4:
            raise ValueError(f"batch of {doubled.shape[0]}")
        return doubled


class SideEffects(Submodules, linear=(6, 6), picky=_Picky):
    """Prints, exceptions raised and caught, else and finally, in forward and through a child."""

    def forward(self, x: Tensor) -> Tensor:
        print(f"mean {x.mean():.2f} of {x.shape}")
        try:
            h = self.picky(self.linear(x))
        except ValueError as error:
            h = self.linear(x) * len(str(error))
        else:
            h = h + 1
        finally:
            x = x * 2
        try:
            x @ torch.ones(5, 5)
        except RuntimeError:
            h = h - x
        return h


class Reflected(Submodules, linear=(6, 6)):
    """Operators with the tensor on the right, comparisons, unary operators and boolean algebra."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.linear(x)
        mask = (h > 0) & (x < 1)
        count = (h * 10).long()
        numbers = 1 - h, 2 / (h.abs() + 1), 2**h, 3 + h, 4 * h, -h, abs(h), +h
        logic = True & mask, False | mask, True ^ mask, ~mask, 0 < h, 1 >= h, h == x
        integers = (
            6 & count,
            3 | count,
            5 % (count.abs() + 1),
            7 // (count.abs() + 1),
            1 << (count.abs() % 4),
            2.5 * count,
            count // 3,
            divmod(7, 2)[0] + count,
        )
        return (*numbers, *logic, *integers, x.numpy(force=True).mean() * h)


class Einsum(Submodules, weight=lambda: nn.Parameter(torch.ones(2, 6, 3))):
    """einsum and einops, whose recipes are cached by shape."""

    def forward(self, x: Tensor) -> Tensor:
        from einops import rearrange, reduce, repeat

        heads = torch.einsum("btd,hdk->bhtk", x, self.weight)
        merged = rearrange(heads, "b h t k -> b t (h k)")
        mean = repeat(reduce(merged, "b t d -> b d", "mean"), "b d -> b t d", t=x.shape[1])
        return merged - torch.einsum("...d,...d->...", mean, merged)[..., None]


class Factories(Submodules, linear=(6, 6)):
    """Tensors made in forward: from sizes, lists, numbers, like others, and of random seeds."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        steps = torch.arange(h.shape[0], dtype=h.dtype)[:, None] + torch.linspace(0, 1, 6)
        table = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).flatten()
        grid, _ = torch.meshgrid(torch.arange(x.shape[0]), torch.arange(6), indexing="ij")
        shape = (x.shape[0], 1)
        return h * torch.ones(shape) + torch.full(shape, 0.5) * steps + table + torch.eye(6)[0] + grid + h.new_tensor(2)


class _Variable(Submodules, linear=(6, 6)):
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        total = self.linear(args[0])
        for arg in args[1:]:
            total = total + arg
        for name, value in kwargs.items():
            total = total * value if name.startswith("mul") else total - value
        return total


class Signatures(Submodules, child=_Variable):
    """Positional-only, keyword-only, default and variable arguments, and children called in every form."""

    def forward(
        self, x: Tensor, /, y: Tensor | None = None, *more: Tensor, scale: float = 2.0, shift: Tensor, **others: Tensor
    ) -> Tensor:
        out = self.child(x, *more, bias=shift, **others)
        out = out + self.child(x) + self.child(*(x, x), **{"bias": shift})
        return out * scale if y is None else out * y


def _rows(**kwargs: Any) -> Callable[[], Call]:
    return lambda: Call.of(floats(3, 6), **kwargs)


_OTHER: dict[str, Callable[[], Call]] = {"other_size": lambda: Call.of(floats(5, 6))}


AWKWARD_FLOW: list[Case] = [
    simple_case(
        "awkward-branch-on-values",
        BranchOnValues,
        lambda: Call.of(floats(3, 6).clamp(-2, 2)),
        {
            "large": lambda: Call.of(floats(3, 6) + 4),
            "small": lambda: Call.of(floats(3, 6) - 4),
            "mask": lambda: Call.of(floats(3, 6).clamp(-2, 2), mask=floats(3, 6, seed=1) > 0),
            "many_rows": lambda: Call.of(floats(7, 6) * 5, floats(7, 6, seed=1) > 0),
        },
    ),
    simple_case(
        "awkward-loops-over-values",
        LoopsOverValues,
        lambda: Call.of(floats(5, 6, seed=3)),
        {"others": lambda: Call.of(floats(5, 6)), "fewer": lambda: Call.of(floats(2, 6) - 1)},
    ),
    simple_case(
        "awkward-loops-over-sizes",
        LoopsOverSizes,
        lambda: Call.of(floats(3, 4, 6)),
        {"longer": lambda: Call.of(floats(2, 7, 6)), "shorter": lambda: Call.of(floats(3, 2, 6))},
    ),
    simple_case(
        "awkward-size-plumbing",
        SizePlumbing,
        lambda: Call.of(floats(2, 5, 12)),
        {"longer": lambda: Call.of(floats(4, 7, 12)), "shorter": lambda: Call.of(floats(1, 2, 12))},
    ),
    simple_case(
        "awkward-cached-by-shape",
        CachedByShape,
        lambda: Call.of(floats(3, 4, 6)),
        {"other_size": lambda: Call.of(floats(2, 7, 6)), "other_batch": lambda: Call.of(floats(5, 4, 6))},
    ),
    simple_case("awkward-closures", Closures, _rows(), _OTHER),
    simple_case("awkward-helpers-called-twice", HelpersCalledTwice, _rows(), {**_OTHER, "more": _rows(rounds=4)}),
    simple_case("awkward-comprehensions", Comprehensions, _rows(), _OTHER),
    simple_case("awkward-called-from-c", CalledFromC, _rows(), _OTHER),
    simple_case("awkward-looked-up", LookedUp, _rows(), {**_OTHER, "other_act": _rows(act="relu")}),
    simple_case("awkward-switches", Switches, _rows(), {**_OTHER, "no_amp": _rows(amp=False)}),
    simple_case("awkward-inference-forward", InferenceForward, _rows(), _OTHER, grad=False),
    simple_case("awkward-autograd-functions", AutogradFunctions, _rows(), _OTHER),
    simple_case("awkward-custom-operators", CustomOperators, _rows(), _OTHER),
    simple_case("awkward-random-ops", RandomOps, _rows(), _OTHER, training=True),
    simple_case("awkward-side-effects", SideEffects, _rows(), _OTHER),
    simple_case("awkward-reflected", Reflected, _rows(), _OTHER),
    simple_case(
        "awkward-einsum",
        Einsum,
        lambda: Call.of(floats(3, 4, 6)),
        {"other_size": lambda: Call.of(floats(2, 7, 6))},
    ),
    simple_case("awkward-factories", Factories, _rows(), _OTHER),
    simple_case(
        "awkward-signatures",
        Signatures,
        _rows(shift=torch.linspace(0, 1, 6)),
        {
            "defaults_given": lambda: Call.of(floats(3, 6), floats(3, 6, seed=1), scale=0.5, shift=floats(6)),
            "more": lambda: Call.of(
                floats(3, 6), None, floats(3, 6, seed=2), floats(6, seed=3), shift=floats(6), mul_by=floats(6, seed=4)
            ),
            "other_size": lambda: Call.of(floats(5, 6), y=floats(5, 6, seed=1), shift=floats(5, 6, seed=2)),
        },
    ),
]
