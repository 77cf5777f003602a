"""What components of a model are, against values that the model's own code or modules give."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph

Expected: TypeAlias = "dict[str, tuple[Tensor, str]]"
"""Values by the names of their components, each with the letters of its dimensions.

Letters are batch `b`, position `t`, query `q`, key `k`, head `h`, channel `c`, neuron `n`, vocabulary `v`.
"""

LAYERS, HEAD_SIZE = 3, 6
_LETTERS = {
    "batch": "b", "position": "t", "query": "q", "key": "k", "head": "h", "channel": "c", "neuron": "n", "vocab": "v",
    "token": "b t",
}  # fmt: skip
_HIDDEN = -1e8
_kept: list[Expected] = []


@dataclass(frozen=True)
class Trial:
    """A model whose components are compared.

    Attributes:
        label: The library, and which of its models.
        build: Makes it, with random weights.
        example: What it is captured with.
        others: What it is run with: other values, and other sizes if it takes them.
        expected: Returns what the components are in a run.
    """

    label: str
    build: Callable[[], nn.Module]
    example: tuple[Any, ...]
    others: tuple[Any, ...]
    expected: Callable[[nn.Module, tuple[Any, ...]], Expected]


@dataclass
class Outcome:
    """The components that are right; those that are wrong or missing, with the reason; and those not compared."""

    right: list[str] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


def keep(start: str, axes: str, **values: Tensor) -> None:
    """Keeps values of a model's own code under the names of their components, in a run that asks for them."""
    for kept in _kept:
        kept.update({f"{start}{name}": (value.detach().clone(), axes) for name, value in values.items()})


def add_kept(found: Expected, model: nn.Module, seen: Seen) -> None:
    """Adds what a model keeps in a run."""
    _kept.append(found)
    try:
        model(*seen.inputs)
    finally:
        _kept.pop()


class Seen:
    """What modules are given (`in`) and return (`out`) in a run, by their paths, seen by forward hooks of torch."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.inputs, self.values = inputs, dict[tuple[str, str], Any]()

        def hook(name: str) -> Callable[..., None]:
            def see(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                given = [_copy(each) for each in (*args, *kwargs.values())]
                self.values["in", name] = given if len(given) > 1 else given[0]
                self.values["out", name] = _copy(output)

            return see

        named = model.named_modules()
        hooks = [each.register_forward_hook(hook(name or "."), with_kwargs=True) for name, each in named]
        try:
            model(*inputs)
        finally:
            for each in hooks:
                each.remove()

    def get(self, text: str) -> Tensor:
        """Returns a value by its text: `in` or `out`, the module's path, and perhaps an index of its last dimension."""
        side, path, number, start, end = _VALUE.fullmatch(text).groups()  # type: ignore[union-attr]
        found = self.values[side, path]
        found = found if isinstance(found, Tensor) else found[int(number or 0)]
        return found if start is None else found[..., int(start) : int(end)]  # type: ignore[no-any-return]


_VALUE = re.compile(r"(in|out) ([\w.]+)(?:#(\d))?(?:\[(\d+):(\d+)\])?")
_LINE = re.compile(r"(\S+) +((?:in|out) \S+) +(.*)")


def _copy(value: Any) -> Any:  # as later code may write into it
    return value.clone() if isinstance(value, Tensor) else value


def seen_by(
    table: str, rest: Callable[..., None] = lambda *_: None
) -> Callable[[nn.Module, tuple[Any, ...]], Expected]:
    """Returns what components are by a table of names, what module is given or returns them, and letters.

    Lines with `{n}` are for each layer; there, `{m}` is the next number, and `{a}` and `{b}` are those of two parts in
    a flat list. `(h c)` are heads side by side. A line whose module did not run is left out. `rest` adds what no module
    has.
    """

    def expected(model: nn.Module, inputs: tuple[Any, ...]) -> Expected:
        seen, found = Seen(model, inputs), dict[str, tuple[Tensor, str]]()
        for line in filter(None, map(str.strip, table.splitlines())):
            for n in range(LAYERS if "{" in line else 1):
                text = line.format(n=n, m=n + 1, a=2 * n, b=2 * n + 1)
                name, source, axes = _LINE.fullmatch(text).groups()  # type: ignore[union-attr]
                if _VALUE.fullmatch(source).group(1, 2) not in seen.values:  # type: ignore[union-attr]
                    continue
                value = seen.get(source)
                if axes.endswith("(h c)"):
                    value, axes = value.unflatten(-1, (-1, HEAD_SIZE)), axes.replace("(h c)", "h c")
                found[name] = value, axes
        rest(found, model, seen)
        return found

    return expected


def in_order(found: tuple[Tensor, str], letters: str) -> Tensor:
    """Returns a value with its dimensions in another order."""
    value, axes = found
    return value.permute([axes.split().index(letter) for letter in letters.split()])


def add_pattern(
    found: Expected,
    start: str,
    *,
    is_causal: bool,
    is_tiled: bool = False,
    scale: float = HEAD_SIZE**-0.5,
    cap: float | None = None,
) -> None:
    """Adds the scores and the pattern of an attention, which follow from its queries and keys.

    Neighboring heads of queries read the same head of keys, or they take turns (`is_tiled`).
    """
    ends = ("q_rot", "k_rot") if f"{start}.q_rot" in found else ("q", "k")
    q, k = (in_order(found[f"{start}.{end}"], "b h t c") for end in ends)
    times = q.shape[1] // k.shape[1]
    scores = q @ (k.repeat(1, times, 1, 1) if is_tiled else k.repeat_interleave(times, 1)).mT * scale
    scores = scores if cap is None else (scores / cap).tanh() * cap
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    found[f"{start}.scores"] = scores, "b h q k"
    found[f"{start}.pattern"] = scores.softmax(-1), "b h q k"


def outcome_of(trial: Trial) -> Outcome:
    """Compares the components of a model with what they should be."""
    torch.manual_seed(0)
    model = trial.build().eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for number, parameter in enumerate(model.parameters()):  # norms and biases that do nothing would hide mistakes
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(noise, alpha=0.1)
        pg = PatchableGraph(model, *trial.example)
        components, expected = pg.components, trial.expected(model, trial.others)
        found = [name for name in expected if name in components and None not in components[name].axes]
        recorded = pg.record(found, *trial.others) if found else {}
    outcome = Outcome(others=[name for name in components if name not in expected])
    for name in expected:
        if name not in found:
            outcome.missing[name] = str(components[name].axes if name in components else components.why_missing(name))
        elif problem := _difference(name, recorded[name], components[name].axes, *expected[name]):
            outcome.wrong[name] = f"{problem} ({components[name].path}, {components[name].axes})"
        else:
            outcome.right.append(name)
    return outcome


def _difference(name: str, value: Tensor, axes: Iterable[str | None], expected: Tensor, letters: str) -> str:
    """Returns how a component differs from what it should be; an empty text if it does not."""
    own = " ".join(_LETTERS.get(word, word) for axis in axes for word in str(axis).split("_"))
    if not name.endswith((".pattern", ".scores")):
        own = own.replace("q", "t").replace("k", "t")
    sizes = dict(zip(letters.split(), expected.shape, strict=True))
    if sorted(own) != sorted(letters):
        return f"axes are not {letters!r}"
    if value.numel() != expected.numel():
        return f"shape {tuple(value.shape)}, not {tuple(expected.shape)}"
    value = in_order((value.reshape([sizes[letter] for letter in own.split()]), own), letters)
    one, other = (each.float().clamp(_HIDDEN) for each in (value, expected))  # a mask hides by infinity, or so
    return "" if torch.allclose(one, other, 1e-4, 1e-5) else f"differs by {(one - other).abs().max():.2g}"
