"""Draws programs, calls of them, and patch maps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.fuzz.edits import Edit
from tests.fuzz.oracle import Place
from tests.fuzz.programs import (
    Assign,
    CallModule,
    Chain,
    EachLayer,
    If,
    Layers,
    Linear,
    Program,
    Repeat,
    Shared,
    Statement,
)
from tests.zoo import Call

# Sizes of values beyond the batch: `4` is (batch, 4), `22` is (batch, 2, 2), `0` is (batch,).
SAME_SIZE = [
    "torch.relu({0})",
    "{0}.tanh()",
    "{0} * 2.0",
    "1.0 - {0}",
    "-{0}",
    "torch.sigmoid(input={0})",
    "F.gelu({0})",
    "F.softmax({0}, dim=-1)",
    "{0} ** 2",
    "torch.clamp({0}, min=-1.0, max=1.0)",
    "{0}.abs().sqrt()",
    "torch.where({0} > 0, {0}, {0} * 0.1)",
    "{0}.contiguous()",
    "{0}.to(torch.float32)",
    "F.dropout({0}, 0.5, training=False)",
    "{0}.clone()",
    "{0}.flip(0)",
    "{0} / {0}.shape[0]",
    "wave({0})",
    "Steep.apply({0})",
    "{0} + torch.ones_like({0})",
    "{0}.view_as({0})",
    "{0} + {1}",
    "torch.mul({0}, {1})",
    "torch.maximum({0}, other={1})",
    "{0} - {1}.mean(0, keepdim=True)",
    "torch.stack([{0}, {1}]).sum(0)",
    "torch.stack(tensors=({1}, {0}), dim=0)[0]",
    "torch.lerp({0}, {1}, 0.25)",
]
RESHAPING = {
    "4": [
        ("2", "{0}[:, :2]"),
        ("2", "{0}[..., ::2]"),
        ("22", "{0}.view({0}.shape[0], 2, 2)"),
        ("22", "{0}.unflatten(-1, (2, 2))"),
        ("0", "{0}.sum(dim=-1)"),
        ("0", "{0}[:, -1]"),
        ("4", "{0} * self.{t}"),
        ("4", "F.layer_norm({0}, ({0}.shape[-1],), self.{t})"),
        ("4", "self.{t} + {0}"),
    ],
    "2": [
        ("4", "torch.cat([{0}, {1}], -1)"),
        ("4", "F.pad({0}, (1, 1))"),
        ("4", "{0}.repeat(1, 2)"),
        ("22", "{0}.unsqueeze(1) * {1}.unsqueeze(2)"),
    ],
    "22": [
        ("4", "{0}.flatten(1)"),
        ("4", "{0}.reshape({0}.size(0), -1)"),
        ("22", "{0}.transpose(1, 2)"),
        ("22", "{0} @ {1}"),
        ("22", "F.scaled_dot_product_attention({0}, {1}, {0})"),
        ("2", "{0}[:, 0]"),
        ("2", "{0}.mean(dim=1)"),
        ("22", "torch.einsum('bij,bjk->bik', {0}, {1})"),
    ],
    "0": [("4", "{0}[:, None].expand(-1, 4).clone()"), ("2", "torch.stack([{0}, {1}], 1)")],
}
SEVERAL = {  # the size of each part, the code, and how the parts are reached
    "4": [
        ("2", "{0}.chunk(2, -1)", ("[0]", "[1]")),
        ("2", "torch.split({0}, 2, dim=-1)", ("[0]", "[1]")),
    ],
    "22": [("2", "{0}.unbind(1)", ("[0]", "[1]")), ("2", "torch.max({0}, dim=-1)", ("[0]", ".values"))],
    "2": [("0", "{0}.unbind(-1)", ("[0]", "[1]"))],
    "0": [("0", "torch.sort({0})", ("[0]",))],
}
IN_PLACE = ["{0}.add_(1.0)", "{0}.mul_({1})", "{0}.clamp_(min=-0.5)", "torch.relu_({0})", "{0}.copy_({1})"]
SIZES = ("4", "2", "22", "0")


@dataclass
class Scope:
    """What a statement may use: expressions by size, and those among them that may be written into."""

    values: list[tuple[str, str]] = field(default_factory=list)
    writable: list[tuple[str, str]] = field(default_factory=list)
    containers: list[str] = field(default_factory=list)

    def inner(self) -> Scope:
        return Scope(list(self.values), list(self.writable), list(self.containers))

    def of(self, size: str) -> list[str]:
        return [expression for expression, found in self.values if found == size]

    def add(self, expression: str, size: str, may_be_written: bool) -> None:
        self.values.append((expression, size))
        if may_be_written and expression.isidentifier():
            self.writable.append((expression, size))


def named(uid: int, target: str, code: str) -> Assign:
    """Returns the statement; what a function of the user's returns has the name that it has there."""
    return Assign(uid, (target,), f"{target} = {code}", name="steep" if code.startswith("wave(") else None)


class Writer:
    """Draws the body of one program."""

    def __init__(self, draw: Any, depth: int, flag: str | None, count: str | None) -> None:
        self.draw = draw
        self.depth = depth
        self.flag, self.count = flag, count
        self.number = 0
        self.tensors: dict[str, bool] = {}
        self.children: dict[str, Any] = {}
        self.outputs: dict[str, tuple[str, ...]] = {}

    def pick(self, options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def fresh(self) -> str:
        self.number += 1
        return f"v{self.number}x"

    def expression(self, scope: Scope) -> tuple[str, str]:
        """Draws an operation on values in scope; returns the code and the size."""
        first, size = self.pick(scope.values)
        if self.draw(st.integers(0, 2)):
            code, result = self.pick(SAME_SIZE), size
        else:
            result, code = self.pick(RESHAPING[size])
        second = self.pick(scope.of(size)) if "{1}" in code else ""
        return code.format(first, second, t=self.tensor() if "{t}" in code else ""), result

    def tensor(self) -> str:
        name = self.pick(["p0", "p1", "b0"])
        self.tensors[name] = name.startswith("p")
        return name

    def block(self, scope: Scope, length: int) -> list[Statement]:
        body: list[Statement] = []
        for _ in range(length):
            kind = self.pick(["op", "op", "op", "op", "several", "write", "module", "module", "if", "loop"])
            body += getattr(self, f"_{kind}")(scope)
        return body

    def _op(self, scope: Scope) -> list[Statement]:
        code, size = self.expression(scope)
        target = self.fresh()
        scope.add(target, size, True)
        return [named(self.number, target, code)]

    def _several(self, scope: Scope) -> list[Statement]:
        first, size = self.pick(scope.values)
        part, code, access = self.pick(SEVERAL[size])
        code = code.format(first)
        if self.draw(st.booleans()) and len(access) == 2 and "max" not in code:
            targets = (self.fresh(), self.fresh())
            for target in targets:
                scope.add(target, part, False)
            return [Assign(self.number, targets, f"{', '.join(targets)} = {code}")]
        target = self.fresh()
        for step in access:
            scope.add(target + step, part, False)
        return [Assign(self.number, (target,), f"{target} = {code}")]

    def _write(self, scope: Scope) -> list[Statement]:
        if not scope.writable:
            return self._op(scope)
        written, size = self.pick(scope.writable)
        others = [name for name in scope.of(size) if name != written] or ["2.0"]
        how = self.draw(st.integers(0, 3))
        if how == 0:
            self.number += 1
            return [Assign(self.number, (), f"{written} += 0.5", written, written)]
        if how == 1:
            self.number += 1
            return [Assign(self.number, (), f"{written}[..., 0] = 0.25", written, "setitem")]
        options = IN_PLACE if others != ["2.0"] else [code for code in IN_PLACE if "{1}" not in code]
        code = self.pick(options).format(written, self.pick(others))
        target = self.fresh()
        scope.add(target, size, True)
        return [Assign(self.number, (target,), f"{target} = {code}", written)]

    def _if(self, scope: Scope) -> list[Statement]:
        if self.flag is None:
            return self._op(scope)
        target = self.fresh()
        size = self.pick(SIZES[:1])
        branches = []
        for _ in range(2):
            inner = scope.inner()
            body = self.block(inner, self.draw(st.integers(0, 2))) if self.depth < 3 else []
            self.number += 1
            source = self.pick(inner.of(size))
            code = self.pick(SAME_SIZE[:18]).format(source)
            branches.append((*body, named(self.number, target, code)))
        scope.add(target, size, True)
        return [If(self.flag, *branches)]

    def _loop(self, scope: Scope) -> list[Statement]:
        target = self.fresh()
        source, size = self.pick([value for value in scope.values if value[1] in ("4", "2", "22")])
        self.number += 1
        first = Assign(self.number, (target,), f"{target} = {source} * 1.5")
        inner = scope.inner()
        inner.add(target, size, False)
        body = self.block(inner, self.draw(st.integers(0, 2))) if self.depth < 3 else []
        self.number += 1
        other = self.pick(inner.of(size))
        last = Assign(self.number, (target,), f"{target} = torch.sin({target}) + {other}")
        scope.add(target, size, True)
        count = self.pick([self.count, "2"] if self.count else ["2"])
        return [first, Repeat(count, (*body, last))]

    def _module(self, scope: Scope) -> list[Statement]:
        known = [name for name in self.children if not isinstance(self.children[name], Layers)]
        how = self.pick(["new", "new", "again", "shared", "layers"])
        if how == "layers":
            return self._layers(scope)
        if how == "again" and known:
            name = self.pick(known)
        elif how == "shared" and known:
            other = self.pick(known)
            name = f"s{len(self.children)}"
            self.children[name] = Shared(other)
        else:
            name = f"m{len(self.children)}"
            self.children[name] = self._new_child()
        return self._call(scope, name)

    def _new_child(self) -> Any:
        kind = self.pick(["linear", "linear", "chain", "program", "program"]) if self.depth < 2 else "linear"
        if kind == "linear":
            return self._linear()
        if kind == "chain":
            return Chain(tuple(self._linear() for _ in range(self.draw(st.integers(1, 2)))))
        return self.draw(programs(self.depth + 1))

    def _linear(self) -> Linear:
        return Linear(4, self.draw(st.integers(0, 4)) == 4, self.draw(st.integers(0, 4)) == 4)

    def _layers(self, scope: Scope) -> list[Statement]:
        name = f"l{len(self.children)}"
        self.children[name] = Layers(tuple(self._linear() for _ in range(self.draw(st.integers(1, 2)))))
        target = self.fresh()
        source = self.pick(scope.of("4"))
        scope.add(target, "4", True)
        return [Assign(self.number, (target,), f"{target} = {source} * 1.0"), EachLayer(target, name)]

    def _call(self, scope: Scope, name: str) -> list[Statement]:
        child = self.children[name]
        while isinstance(child, Shared):
            child = self.children[child.other]
        target = self.fresh()
        args: list[tuple[str | None, str]] = [(None, self.pick(scope.of("4")))]
        parts: tuple[str, ...] = ("",)
        if isinstance(child, Program):
            args = self._arguments(child, scope)
            parts = parts_of(child)
        for part in parts:
            scope.add(target + part, "4", isinstance(child, Linear))
        return [CallModule(target, name, tuple(args))]

    def _arguments(self, child: Program, scope: Scope) -> list[tuple[str | None, str]]:
        by_keyword = self.draw(st.booleans())
        args: list[tuple[str | None, str]] = []
        for name in child.names:
            if name == "x":
                value = self.pick(scope.of("4"))
            elif name == "y":
                if self.draw(st.booleans()):
                    continue
                value = self.pick(scope.of("4"))
            elif name == "pair":
                value = f"({self.pick(scope.of('4'))}, {self.pick(scope.of('4'))})"
            elif name == "flag":
                value = self.pick(["True", "False", *([self.flag] if self.flag in ("flag", "not flag") else [])])
            else:
                value = self.pick(["1", "2"])
            is_positional = name == "x" and not by_keyword
            args.append((None if is_positional else name, value))
        return args


def parts_of(program: Program) -> tuple[str, ...]:
    """Returns how the values in the output of a program are reached."""
    return _PARTS[program.output.split("#")[1].strip()] if "#" in program.output else ("",)


_PARTS: dict[str, tuple[str, ...]] = {"value": ("",), "tuple": ("[0]", "[1]"), "dict": ('["a"]', '["b"][0]')}


@st.composite
def programs(draw: Any, depth: int = 0) -> Program:
    """Draws a program; the inner ones of a program are of `depth` 1 and 2."""
    has_y, has_pair = draw(st.booleans()), draw(st.booleans())
    has_flag, has_count = draw(st.booleans()), draw(st.booleans())
    parameters = ["x"]
    parameters += ["y=None"] if has_y else []
    parameters += ["*", "pair"] if has_pair else []
    parameters += ["flag=True"] if has_flag else []
    parameters += ["k=2"] if has_count else []
    scope = Scope([("x", "4")], [("x", "4")])
    if has_pair:
        scope.add("pair[0]", "4", False)
        scope.add("pair[1]", "4", False)
    writer = Writer(draw, depth, "flag" if has_flag else None, "k" if has_count else None)
    body: list[Statement] = []
    if has_y:
        target = writer.fresh()
        writer.number += 2
        then = Assign(writer.number - 1, (target,), f"{target} = x * 1.0")
        body += [If("y is None", (then,), (Assign(writer.number, (target,), f"{target} = x + y"),))]
        scope.add(target, "4", True)
    body += writer.block(scope, draw(st.integers(1, 4 if depth else 8)))
    output = draw_output(draw, scope, depth)
    return Program(
        ", ".join(parameters),
        tuple(name.split("=")[0] for name in parameters if name != "*"),
        tuple(sorted(writer.tensors.items())),
        tuple(writer.children.items()),
        tuple(body),
        output,
    )


def draw_output(draw: Any, scope: Scope, depth: int) -> str:
    """Draws what a program returns: its last value, and others in a container."""
    wide = list(reversed(scope.of("4")))
    kind = draw(st.sampled_from(["value", "tuple", "dict"]))
    first, second = draw(st.sampled_from(wide[:3])), draw(st.sampled_from(wide))
    rest = [expression for expression, _ in scope.values][-3:]
    more = draw(st.sampled_from([*rest, "None", "1.5"])) if depth == 0 else "None"
    if kind == "value":
        return f"{first}  # value"
    if kind == "tuple":
        return f"({first}, {second}, {more})  # tuple"
    return f'{{"a": {first}, "b": [{second}, {more}]}}  # dict'


@dataclass
class Inputs:
    """A call of a program: made anew each time, since it may write into its inputs."""

    batch: int
    seed: int
    has_y: bool
    is_y_positional: bool
    flag: bool | None
    count: int | None

    def call(self, program: Program) -> Call:
        generator = torch.Generator().manual_seed(self.seed)

        def numbers() -> Tensor:
            return torch.randn(self.batch, 4, generator=generator)

        args: list[Any] = [numbers()]
        kwargs: dict[str, Any] = {}
        if "y" in program.names and self.has_y:
            value = numbers()
            if self.is_y_positional:
                args.append(value)
            else:
                kwargs["y"] = value
        if "pair" in program.names:
            kwargs["pair"] = (numbers(), numbers())
        if "flag" in program.names and self.flag is not None:
            kwargs["flag"] = self.flag
        if "k" in program.names and self.count is not None:
            kwargs["k"] = self.count
        return Call(tuple(args), kwargs)


def inputs(batches: tuple[int, ...]) -> st.SearchStrategy[Inputs]:
    return st.builds(
        Inputs,
        st.sampled_from(batches),
        st.integers(0, 5),
        st.booleans(),
        st.booleans(),
        st.sampled_from([None, True, False]),
        st.sampled_from([None, 1, 2, 3]),
    )


EXAMPLE_BATCH = 3
OTHER_BATCHES = (3, 5, 1)


def leaves(value: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns what can be dug for in a value, as a path shows it."""
    if isinstance(value, dict):
        return [((step, *dig), leaf) for step, item in value.items() for dig, leaf in leaves(item)]
    if isinstance(value, (tuple, list)):
        items = enumerate(value)
        return [((f"sub_{number}", *dig), leaf) for number, item in items for dig, leaf in leaves(item)]
    return [((), value)]


@dataclass
class Choice:
    """The edits of one path."""

    path: str
    dig: tuple[str, ...]
    edits: list[Edit]

    @property
    def text(self) -> str:
        return f"{self.path}|{'.'.join(self.dig)}" if self.dig else self.path


def draw_choices(draw: Any, places: list[Place]) -> list[Choice]:
    """Draws a patch map over places that came up."""
    options = [
        (place, dig, leaf)
        for place in places
        for dig, leaf in leaves(place.value)
        if isinstance(leaf, Tensor) or (isinstance(leaf, float) and place.path.endswith("output"))
    ]
    count = draw(st.integers(1, 5))
    found: dict[str, Choice] = {}
    for _ in range(count):
        place, dig, leaf = draw(st.sampled_from(options))
        choice = Choice(place.path, dig, [draw_edit(draw, leaf) for _ in range(draw(st.integers(1, 2)))])
        found.setdefault(choice.text, choice)
    return list(found.values())


def draw_edit(draw: Any, value: Any) -> Edit:
    """Draws an edit that a value like this one can take, also with another batch."""
    if not isinstance(value, Tensor):
        return Edit(draw(st.sampled_from(["zero", "add", "replace", "probe"])), 0.5)
    kind = draw(st.sampled_from(["zero", "add", "add", "replace", "custom", "custom", "probe", "record"]))
    if kind in ("probe", "record"):
        return Edit(kind)
    if not value.is_floating_point():
        return Edit("zero")
    slices: list[Any] = [None, None, 0, (..., 0), (slice(None), slice(0, 1)), (..., [0]), slice(None, None, 2)]
    chosen = draw(st.sampled_from([s for s in slices if value.dim() > 1 or not isinstance(s, tuple)]))
    if kind == "zero":
        return Edit(kind, slice=chosen)
    if kind == "custom":
        name = draw(st.sampled_from(["doubled", "flipped", "bent", "same"]))
        if name == "flipped" and (chosen is not None or value.dim() < 2):
            name = "bent"
        clones = chosen is not None or name == "doubled" or draw(st.booleans())
        return Edit(kind, name, slice=chosen, clones=clones)
    if draw(st.booleans()):
        return Edit(kind, draw(st.sampled_from([0.5, -2, 0.0])), slice=chosen)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 3)))
    is_whole = chosen is None and value.dim() > 1
    shape = value.shape[-1:] if is_whole else ()
    return Edit(kind, torch.randn(shape, generator=generator), slice=chosen)


__all__ = ["Choice", "Inputs", "Scope", "draw_choices", "inputs", "programs"]
