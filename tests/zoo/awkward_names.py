"""Awkward names: our own words as attributes, keywords, builtins, names that are no identifiers, ways to assign."""

# The awkward spelling is the point: ruff must not tidy it up.
# ruff: noqa: E702

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .case import Call, Case, floats, simple_case
from .submodules import Submodules


class OwnWords(
    Submodules,
    graph=(6, 6),
    code=(6, 6),
    output=(6, 6),
    _code=(6, 6),
    _shape=lambda: nn.Parameter(torch.ones(6)),
    nodes=lambda: torch.ones(6),
    forward_=nn.Tanh,
    patch=[nn.ReLU],
    _graph_module=nn.Identity,
):
    """Submodules, parameters, buffers and attributes named like the parts of a graph module or a node path."""

    def __init__(self) -> None:
        super().__init__()
        self._trace = "not a module"
        self.sub_0 = nn.Linear(6, 6)
        self.reason = None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        graph = self.graph(x)
        output = self.output(self.patch(graph) * self._shape)
        code = self.code(output) + self._code(output) * self.nodes
        return {"output": self.forward_(code), "_shape": self._graph_module(output), "sub_0": self.sub_0(x)}


class _Shadows(Submodules, weight=lambda: nn.Parameter(torch.ones(6))):
    def forward(this, self: Tensor, output: Tensor, graph: Tensor | None = None, _code: int = 2) -> Tensor:
        torch_ = self * this.weight
        nodes = torch_ + output
        return nodes * _code if graph is None else nodes * graph


class ShadowedNames(
    Submodules, weight=lambda: nn.Parameter(torch.ones(6)), linear=(6, 6), add=(6, 6), shadows=_Shadows
):
    """Variables and arguments named self, input, list, output, weight, torch functions, keywords with an underscore."""

    def forward(self, input: Tensor, list: Tensor, type: float = 1.0) -> Tensor:
        linear = self.linear(input)
        add = self.add(list) + linear
        weight = add * self.weight
        print_ = weight * type
        class_ = lambda_ = print_.relu()
        None_ = class_ + lambda_
        add_1 = None_ + 1
        add = add + add_1
        _ = add * 2
        __ = _ - 1
        ünïcode = __ * 0.5
        return self.shadows(ünïcode, add, graph=weight) + self.shadows(_, output=add)


class OddChildNames(nn.Module):
    """Children whose names are digits, have dashes, are keywords or methods, or collide once dots are underscores."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(6, 6))
        self.add_module("a-b", nn.Linear(6, 6))
        self.add_module("class", nn.Linear(6, 6))
        self.add_module("with space", nn.Sequential(nn.Linear(6, 6)))
        self.half = nn.Linear(6, 6)
        self.a = nn.ModuleDict({"b": nn.Linear(6, 6), "b_c": nn.Linear(6, 6)})
        self.a_b = nn.ModuleDict({"c": nn.Linear(6, 6)})

    def forward(self, x: Tensor) -> Tensor:
        children = dict(self.named_children())
        x = children["with space"](children["class"](children["a-b"](children["0"](x))))
        return children["half"](x) + self.a["b"](x) + self.a["b_c"](x) + self.a_b["c"](x)


class _Layers(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class _Skip(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


class NestedModules(
    Submodules,
    module_dict=lambda: nn.ModuleDict(
        {
            "foo": nn.Linear(6, 6),
            "bar": nn.ModuleDict({"baz": nn.ModuleList([nn.Linear(6, 6), nn.Tanh()]), "qux": nn.Linear(6, 6)}),
        }
    ),
    twice=lambda: nn.ModuleDict({"bar": nn.ModuleDict({"baz": nn.Linear(6, 6)})}),
    layers=lambda: _Layers([nn.Linear(6, 6), nn.ReLU(), _Skip(nn.Linear(6, 6), nn.Sequential(nn.Tanh()))]),
):
    """Dicts and lists of modules inside each other, which are not called themselves, and containers that are."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.module_dict["foo"](x)
        for layer in self.module_dict["bar"]["baz"]:
            x = layer(x)
        x = self.module_dict["bar"]["qux"](x)
        x = self.twice["bar"]["baz"](self.twice["bar"]["baz"](x))
        return self.layers(x)


class AssignmentForms(Submodules, linear=(6, 6)):
    """Results bound by tuples, stars, chains, walruses, subscripts, attributes, augmented operators and loops."""

    def forward(self, x: Tensor, flag: bool = True) -> dict[str, Tensor]:
        a, b = self.linear(x), x * 2
        (c, d), *rest = (a.chunk(2, -1)), b.sin(), b.cos()
        first = second = c + d
        if (walrus := first.mean()) > -100:
            second = second + walrus
        table: dict[str, Tensor] = {}
        table["key"] = second * 3
        table["key"] += 1
        third = second.exp() if flag else second.log1p()
        a, b = b + 1, a + 1
        for part in (third, second):
            table["key"] = table["key"] * part
        del third
        multiline = (
            a.relu()
            .add(1)
            .mul(b)
        )  # fmt: skip
        with torch.no_grad() as nothing:
            detached = a + 1
        assert nothing is None
        first, second = second, first
        table["rest"] = rest[0] + rest[1] + multiline + detached
        table["same_line"] = x + 1; table["and_again"] = x + 1 + 1  # fmt: skip
        return table


class PropertyValues(Submodules, raw=lambda: nn.Parameter(torch.ones(6)), linear=(6, 6)):
    """Values computed in properties of the module, in a static and a class method, and in a nested function."""

    factor = 2.0

    @property
    def scale(self) -> Tensor:
        return torch.nn.functional.softplus(self.raw)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        return x / (1 + x.abs())

    @classmethod
    def stretch(cls, x: Tensor) -> Tensor:
        return x * cls.factor

    def forward(self, x: Tensor) -> Tensor:
        def outer(value: Tensor) -> Tensor:
            def inner(deeper: Tensor) -> Tensor:
                return deeper + self.scale

            return inner(inner(value))

        return self.squash(outer(self.stretch(self.linear(x))) * self.scale)


def _rows() -> Call:
    return Call.of(floats(3, 6))


_OTHER: dict[str, Callable[[], Call]] = {"other_size": lambda: Call.of(floats(5, 6))}


AWKWARD_NAMES: list[Case] = [
    simple_case("awkward-own-words", OwnWords, _rows, _OTHER),
    simple_case(
        "awkward-shadowed-names",
        ShadowedNames,
        lambda: Call.of(floats(3, 6), floats(3, 6, seed=1)),
        {"keywords": lambda: Call.of(input=floats(5, 6), list=floats(5, 6, seed=1), type=0.5)},
    ),
    simple_case("awkward-odd-child-names", OddChildNames, _rows, _OTHER),
    simple_case("awkward-nested-modules", NestedModules, _rows, _OTHER),
    simple_case(
        "awkward-assignment-forms",
        AssignmentForms,
        _rows,
        {**_OTHER, "flag": lambda: Call.of(floats(3, 6).abs(), flag=False)},
    ),
    simple_case("awkward-property-values", PropertyValues, _rows, _OTHER),
]
