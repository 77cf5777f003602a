"""Awkward values: containers, in-place writes and views, aliases, dtypes, and tensors that are not quite tensors."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .case import Call, Case, floats, simple_case, tokens
from .submodules import Runs, Submodules, copies


class Moments(NamedTuple):
    mean: Tensor
    variance: Tensor | None
    count: int


Pair = namedtuple("Pair", "left right")


@dataclass
class State:
    hidden: Tensor
    history: list[Tensor] = field(default_factory=list)
    mask: Tensor | None = None
    step: int = 0


@dataclass(frozen=True)
class FrozenResult:
    logits: Tensor
    state: State
    label: str = "none"


class PlainResult:
    """An object that knows nothing of containers or equality."""

    def __init__(self, value: Tensor, extra: Any) -> None:
        self.value = value
        self.extra = extra


class Slots:
    """A record that has no `__dict__`."""

    __slots__ = ("scale", "shift")

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        self.scale, self.shift = scale, shift


class ResultList(list[Any]):
    """A list with an attribute."""

    note = "own class"


class _DictChild(Submodules, linear=(6, 6)):
    def forward(self, values: dict[str, Tensor | None]) -> dict[str, Any]:
        return {
            "sum": self.linear(values["x"] + values["y"]),
            "diff": values["x"] - values["y"],
            "skip": values["skip"],
        }


class NestedContainers(Submodules, child=_DictChild):
    """Nested tuples, lists and dicts in and out, with Nones, numbers and strings among the tensors."""

    def forward(self, inputs: dict[str, Any], extra: tuple[Any, ...] = (None, 1)) -> dict[str, Any]:
        x, (y, _) = inputs["x"], inputs["pair"]
        z = self.child({"x": x, "y": y, "skip": None})
        if extra[0] is not None:
            z["sum"] = z["sum"] * extra[0]
        return {
            "first": (z["sum"], [z["diff"], None, {"deep": (x * 2, extra[1])}]),
            "none": None,
            "text": "label",
            3: z["sum"].shape[0],
            "empty": ((), [], {}),
        }


class _MomentsChild(Submodules, linear=(6, 4)):
    def forward(self, pair: Pair, with_variance: bool) -> Moments:
        hidden = self.linear(pair.left + pair.right)
        return Moments(hidden.mean(0), hidden.var(0) if with_variance else None, pair.left.size(0))


class NamedTuples(Submodules, child=_MomentsChild):
    """Named tuples, of both kinds, in and out of a child."""

    def forward(self, pair: Pair, with_variance: bool = False) -> tuple[Moments, Pair]:
        moments = self.child(pair, with_variance)
        mean, *_ = moments
        return moments, Pair(mean * 2, moments.count)


class _RecordChild(Submodules, linear=(6, 6)):
    def forward(self, state: SimpleNamespace, recent: deque[Tensor]) -> tuple[SimpleNamespace, deque[Tensor]]:
        hidden = self.linear(state.hidden + recent[0])
        recent.append(hidden)
        return SimpleNamespace(hidden=hidden.tanh(), seen=state.seen + 1), recent


class Records(Submodules, steps=copies(_RecordChild, 2)):
    """Objects with slots, namespaces and queues, in and out of children; the queue drops what is too old."""

    def forward(self, given: Slots) -> tuple[Slots, SimpleNamespace, Tensor]:
        recent: deque[Tensor] = deque([given.scale, given.shift], maxlen=2)
        state = SimpleNamespace(hidden=given.scale + given.shift, seen=1)
        for step in self.steps:
            state, recent = step(state, recent)
        first, second = recent
        return Slots(first, second), state, first * second


class _StateChild(Submodules, linear=(6, 6)):
    def forward(self, state: State) -> State:
        hidden = self.linear(state.hidden)
        state.history.append(hidden)
        masked = hidden if state.mask is None else hidden.masked_fill(state.mask, 0.0)
        return State(masked, state.history, state.mask, state.step + 1)


class Dataclasses(Submodules, steps=copies(_StateChild, 2)):
    """A mutable dataclass that a child fills, a frozen one, a plain object and a list of an own class."""

    def forward(self, state: State) -> tuple[FrozenResult, PlainResult, ResultList]:
        for step in self.steps:
            state = step(state)
        logits = state.hidden * 2
        return FrozenResult(logits, state), PlainResult(logits + 1, {"step": state.step}), ResultList([logits, None])


class Nones(
    Submodules,
    nothing=lambda: Runs(lambda x: None),
    pair=lambda: Runs(lambda x: (x + 1, None)),
    table=lambda: Runs(lambda x: {"a": x * 2, "b": None}),
    linear=(6, 6),
):
    """Children that return None, (tensor, None) and {"a": tensor, "b": None}."""

    def forward(self, x: Tensor | None = None, y: Tensor | None = None) -> tuple[Any, ...]:
        x = self.linear(y if x is None else x)
        assert self.nothing(x) is None
        first, second = self.pair(x)
        table = self.table(first)
        return first, second, table, self.nothing(table["a"]), (table["b"],)


class _ListChild(Submodules, linear=(6, 6)):
    def forward(self, x: Tensor, collected: list[Tensor]) -> OrderedDict[str, Any]:
        hidden = self.linear(x)
        collected.append(hidden)
        return OrderedDict(value=hidden, list=collected)


class ContainerPassedThrough(Submodules, child=_ListChild):
    """A parent that adds to, overwrites in and returns the very container that its child returned."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        out = self.child(x, [])
        out["list"].append(out["value"] + 1)
        out["value"] = out["value"] * 2
        out["more"] = out
        del out["more"]
        return out


class FilledArgument(Submodules, layers=lambda: nn.ModuleList([_CachingLayer(index) for index in range(2)])):
    """Children that write their results into a cache that they are given, and return nothing of it."""

    def forward(self, x: Tensor, cache: dict[int, Tensor] | None = None) -> tuple[Tensor, dict[int, Tensor]]:
        cache = {} if cache is None else cache
        for layer in self.layers:
            x = layer(x, cache)
        return x, cache


class _CachingLayer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.key = nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: dict[int, Tensor]) -> Tensor:
        keys = self.key(x)
        past = cache.get(self.index)
        cache[self.index] = keys if past is None else torch.cat([past, keys], dim=1)
        return x + cache[self.index].mean(1, keepdim=True)


class InPlace(Submodules, linear=(6, 6), relu=partial(nn.ReLU, inplace=True)):
    """Arithmetic, activations, masks and index assignments in place on values computed before."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.linear(x) + 0.1
        h.add_(1.0).mul_(0.5)
        h += x
        h -= 0.25
        before = h.clone()
        F.relu(h, inplace=True)
        out = self.relu(h + before - 0.2) * 1.5
        out[0] = 7.0
        out[1:, 2] = before[1:, 0]
        out[out > 6.5] *= 0.5
        out.masked_fill_(before < -0.5, -1.0)
        total = torch.zeros_like(out)
        torch.add(out.detach(), 1.0, out=total)
        return out, before, total


class InPlaceOnInput(Submodules, scale=lambda: nn.Parameter(torch.ones(6)), child=lambda: _AddsOne()):
    """Writes into the caller's tensor and returns it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.child(x)
        return y, y * self.scale


class _AddsOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0.0
        return x.add_(1.0)


class ViewsFilledLater(Submodules, nope=(6, 4), rope=(6, 2)):
    """Uninitialised memory whose views are filled one by one, and a view changed through its base."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        keys = x.new_empty(*x.shape[:-1], 6)
        left = keys[..., :4]
        left.copy_(self.nope(x))
        keys[..., 4:] = self.rope(x)
        base = keys * 2
        row = base.view(-1, 6)[0]
        base.add_(1.0)
        row.mul_(3.0)
        return base, row


class DataAccess(Submodules, linear=(6, 6)):
    """Writes through `.data` and `detach()`, which autograd and version counters do not see."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h.data.clamp_(min=-0.5)
        h.detach()[:, 0] = 2.0
        return h + h.data.mean()


class BuffersReassigned(nn.Module):
    """Buffers, a plain tensor and a counter that the forward replaces by new values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("last", None)
        self.register_buffer("total", torch.zeros(6))
        self.plain = torch.ones(6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h = h if self.last is None else h + self.last.mean()
        self.last = h.detach()
        self.total = self.total + h.detach().sum(0)
        self.plain = self.plain * 2
        self.calls += 1
        return h * self.total + self.plain * self.calls


class _Stashes(Submodules, inner=(6, 6)):
    def forward(self, x: Tensor) -> Tensor:
        self.last_hidden = self.inner(x)
        return torch.relu(self.last_hidden)


class StashedAttribute(Submodules, child=_Stashes):
    """A child leaves a value on itself for the parent to read after the call."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.child(x)
        return out + self.child.last_hidden * 2


class SameObject(Submodules, linear=(6, 6), drop=partial(nn.Dropout, 0.5), same=nn.Identity, empty=nn.Sequential):
    """Operations and layers that return their input, after which both names are used."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.linear(x)
        dropped = self.drop(h)
        cast = dropped.to(h.dtype)
        flat = cast.contiguous()
        same = self.empty(self.same(flat))
        expanded = same.view_as(h)
        return h * 2, dropped + 1, cast - 1, F.dropout(flat, 0.1, training=False), same, expanded.requires_grad_(True)


class AliasedOutputs(Submodules, weight=lambda: nn.Parameter(torch.ones(6)), offset=lambda: torch.ones(6)):
    """The input, a view of it, a parameter, a buffer and one tensor twice as outputs."""

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = x * self.weight
        return x, x[0], self.weight, self.offset, y, [y, y]


class _Difference(Submodules, linear=(6, 6)):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.linear(a * 1) - b * 2


class AliasedInputs(Submodules, child=_Difference):
    """One tensor as several inputs, one of which is written to: which is which can only be told by name."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        out = self.child(x, y)
        z.mul_(2.0)
        return self.child(out, out) + self.child(y, b=x) + z


class MultipleOutputs(Submodules, qkv=(6, 12)):
    """split, chunk, max, topk, unbind, sort and friends: unpacked, indexed, and by field."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.qkv(x).split(4, dim=-1)
        halves = q.chunk(2, dim=-1)
        values, indices = k.max(dim=-1)
        best = v.topk(2)
        first, *others = torch.unbind(x, dim=-1)
        ordered = torch.sort(x, descending=True)
        mean, deviation = torch.std_mean(k, dim=-1)[::-1]
        return (
            halves[0] + halves[1],
            values + indices,
            best.values + best[0] + best.indices,
            first + others[-1],
            ordered[0],
            mean / deviation,
            torch.linalg.svd(v, full_matrices=False).S,
        )


class ScalarOutputs(
    Submodules, linear=(6, 1), count=lambda: Runs(lambda x: x.shape[0]), mean=lambda: Runs(lambda x: float(x.mean()))
):
    """Zero-dimensional tensors and Python numbers, out of children too."""

    def forward(self, x: Tensor) -> tuple[Tensor, float, int, bool]:
        loss = self.linear(x).pow(2).mean()
        return loss, self.mean(x) + loss.item(), self.count(x) * 2, bool(loss > 1)


class ScalarInputs(Submodules, linear=(6, 6)):
    """Integers, floats, booleans, strings, dtypes, slices and zero-dimensional tensors as inputs."""

    def forward(
        self, x: Tensor, power: int, scale: float, flip: bool, mode: str, dtype: torch.dtype, part: slice, shift: Tensor
    ) -> Tensor:
        h = self.linear(x) * scale + shift
        h = h**power if power > 1 else h
        h = h.flip(-1) if flip else h
        return getattr(h, mode)(dim=-1).to(dtype)[part]


class Dtypes(
    Submodules,
    wide=lambda: nn.Linear(6, 6, dtype=torch.float64),
    narrow=lambda: nn.Linear(6, 6, dtype=torch.bfloat16),
    phase=lambda: nn.Parameter(torch.ones(4, dtype=torch.complex64)),
):
    """Complex, double, half-precision and integer arithmetic in one forward."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = self.wide(x.double())
        narrow = self.narrow(x.bfloat16())
        spectrum = torch.fft.rfft(x) * self.phase
        return wide, narrow, spectrum, torch.fft.irfft(spectrum, n=6), (x * 100).int() // 7, x > 0, spectrum.conj().imag


class NotANumber(Submodules, linear=(6, 6)):
    """NaNs, infinities and negative zeros on the way and in the output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, float]:
        h = self.linear(x)
        masked = h.masked_fill(h < 0, float("-inf"))
        scores = torch.where(h > 0.5, masked / 0.0, masked.softmax(-1) * -0.0)
        return scores, torch.log(h), float("nan")


class Sparse(
    Submodules, bag=partial(nn.EmbeddingBag, 99, 6, mode="sum"), weight=lambda: nn.Parameter(torch.ones(6, 3))
):
    """A sparse matrix, built, multiplied and returned, and sums over bags of embeddings."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(ids.shape[0])
        diagonal = self.bag(ids).mean(-1)
        size = (ids.shape[0], ids.shape[0])
        matrix = torch.sparse_coo_tensor(torch.stack([rows, rows]), diagonal, size, check_invariants=True)
        return torch.sparse.mm(matrix, self.bag(ids) @ self.weight), matrix.coalesce()


class PackedLSTM(Submodules, lstm=partial(nn.LSTM, 6, 5, batch_first=True), head=(5, 3)):
    """Packed sequences, in and out of an LSTM and of this module."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, PackedSequence]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = self.lstm(packed)
        padded, _ = pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])
        return self.head(padded), output


class TaggedTensor(torch.Tensor):
    """A tensor subclass that survives operations."""


class TensorSubclass(Submodules, linear=(6, 6)):
    """A tensor subclass comes in, and what is computed of it stays one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tagged = self.linear(x) + 1
        return tagged, tagged.as_subclass(torch.Tensor).sum(-1)


class NumpyRoundtrip(Submodules, linear=(6, 6)):
    """Leaves torch for NumPy and Python lists and comes back."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        order = h.detach().numpy().argsort(axis=-1)[:, ::-1].copy()
        weights = torch.tensor([1.0 / (1 + index) for index in range(len(h[0].tolist()))])
        return h.gather(-1, torch.from_numpy(order)) * weights


class ParameterContainers(
    Submodules,
    listed=lambda: nn.ParameterList([torch.ones(6), torch.ones(6)]),
    named=lambda: nn.ParameterDict({"scale": torch.ones(6), "odd-name": torch.ones(6)}),
):
    """Parameters in lists and dicts, plain tensors as attributes, a parameter in a tuple and a None parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.linspace(0, 1, 6)
        self.hidden = (nn.Parameter(torch.full((6,), 0.5)), torch.ones(6))
        self.register_parameter("nothing", None)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.listed:
            x = x * parameter + self.plain
        x = x * self.named["scale"] + self.named["odd-name"] * self.frozen
        return x * self.hidden[0] + self.hidden[1] if self.nothing is None else x


def _rows(**kwargs: Any) -> Callable[[], Call]:
    return lambda: Call.of(floats(3, 6), **kwargs)


_OTHER: dict[str, Callable[[], Call]] = {"other_size": lambda: Call.of(floats(5, 6))}


def _with_view() -> Call:
    x = floats(3, 6)
    return Call.of(x, x.flip(0), x[0])


def _nested(batch: int) -> dict[str, Any]:
    return {"x": floats(batch, 6), "pair": (floats(batch, 6, seed=1), None)}


AWKWARD_VALUES: list[Case] = [
    simple_case(
        "awkward-nested-containers",
        NestedContainers,
        lambda: Call.of(_nested(3)),
        {
            "other_size": lambda: Call.of(_nested(5)),
            "extra": lambda: Call.of(inputs=_nested(3), extra=(floats(6, seed=2), 4.5)),
        },
    ),
    simple_case(
        "awkward-named-tuples",
        NamedTuples,
        lambda: Call.of(Pair(floats(3, 6), floats(3, 6, seed=1))),
        {
            "variance": lambda: Call.of(Pair(floats(5, 6), floats(5, 6, seed=1)), with_variance=True),
            "number": lambda: Call.of(Pair(floats(3, 6), 2)),
        },
    ),
    simple_case(
        "awkward-dataclasses",
        Dataclasses,
        lambda: Call.of(State(floats(3, 6))),
        {"mask": lambda: Call.of(State(floats(5, 6), [floats(2)], floats(5, 6, seed=1) > 0, step=4))},
    ),
    simple_case(
        "awkward-records",
        Records,
        lambda: Call.of(Slots(floats(3, 6), floats(3, 6, seed=1))),
        {"other_size": lambda: Call.of(given=Slots(floats(5, 6), floats(5, 6, seed=1)))},
    ),
    simple_case(
        "awkward-nones",
        Nones,
        _rows(),
        {"other_argument": lambda: Call.of(None, floats(5, 6)), "keyword": lambda: Call.of(y=floats(3, 6))},
    ),
    simple_case("awkward-container-passed-through", ContainerPassedThrough, _rows(), _OTHER),
    simple_case(
        "awkward-filled-argument",
        FilledArgument,
        lambda: Call.of(floats(3, 4, 6)),
        {
            "cache": lambda: Call.of(floats(3, 2, 6), {0: floats(3, 5, 6, seed=1), 1: floats(3, 5, 6, seed=2)}),
            "half_a_cache": lambda: Call.of(floats(3, 4, 6), cache={1: floats(3, 5, 6, seed=2)}),
        },
    ),
    simple_case("awkward-in-place", InPlace, _rows(), _OTHER),
    simple_case("awkward-in-place-on-input", InPlaceOnInput, _rows(), _OTHER),
    simple_case(
        "awkward-views-filled-later",
        ViewsFilledLater,
        lambda: Call.of(floats(3, 4, 6)),
        {"other_size": lambda: Call.of(floats(2, 5, 6))},
    ),
    simple_case("awkward-data-access", DataAccess, _rows(), _OTHER),
    simple_case("awkward-buffers-reassigned", BuffersReassigned, _rows(), _OTHER, mutates_state=True),
    simple_case("awkward-stashed-attribute", StashedAttribute, _rows(), _OTHER, mutates_state=True),
    simple_case("awkward-same-object", SameObject, _rows(), _OTHER),
    simple_case("awkward-aliased-outputs", AliasedOutputs, _rows(), _OTHER),
    simple_case(
        "awkward-aliased-inputs",
        AliasedInputs,
        lambda: Call.of(*[floats(3, 6)] * 3),
        {"distinct": lambda: Call.of(floats(5, 6), floats(5, 6, seed=1), floats(6, seed=2)), "view": _with_view},
    ),
    simple_case("awkward-multiple-outputs", MultipleOutputs, _rows(), _OTHER),
    simple_case("awkward-scalar-outputs", ScalarOutputs, _rows(), _OTHER),
    simple_case(
        "awkward-scalar-inputs",
        ScalarInputs,
        lambda: Call.of(floats(3, 6), 2, 0.5, False, "sum", torch.float32, part=slice(None), shift=torch.tensor(0.25)),
        {
            "other_values": lambda: Call.of(
                floats(5, 6), 3, 2, True, "softmax", torch.float64, part=slice(1, None, 2), shift=torch.tensor(2)
            ),
            "no_power": lambda: Call.of(
                floats(3, 6), 1, -0.5, True, "mean", dtype=torch.float32, part=slice(1), shift=torch.tensor([0.5])
            ),
        },
    ),
    simple_case("awkward-dtypes", Dtypes, _rows(), _OTHER),
    simple_case("awkward-not-a-number", NotANumber, _rows(), _OTHER),
    simple_case("awkward-sparse", Sparse, lambda: Call.of(tokens(3, 7)), {"other_size": lambda: Call.of(tokens(5, 2))}),
    simple_case(
        "awkward-packed-lstm",
        PackedLSTM,
        lambda: Call.of(floats(3, 7, 6), torch.tensor([7, 2, 5])),
        {"other_size": lambda: Call.of(floats(2, 4, 6), torch.tensor([1, 4]))},
    ),
    simple_case(
        "awkward-tensor-subclass",
        TensorSubclass,
        lambda: Call.of(floats(3, 6).as_subclass(TaggedTensor)),
        {"other_size": lambda: Call.of(floats(5, 6).as_subclass(TaggedTensor)), "plain": _rows()},
    ),
    simple_case("awkward-numpy-roundtrip", NumpyRoundtrip, _rows(), _OTHER),
    simple_case("awkward-parameter-containers", ParameterContainers, _rows(), _OTHER),
]
