"""Small programs: what a random module does, as data, and the `torch.nn.Module` that does it.

A program is written as Python source, so that capture meets what it meets in users' code, and is interpreted by
`tests.fuzz.oracle`, which never sees the package. Statements are lines of Python; each value that is assigned has a
variable of its own, from which its node path follows.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def wave(t: Tensor) -> Tensor:
    """A function that programs call: its values have names of their own, in the frame of the caller."""
    bent = torch.sin(t)
    steep = bent + t * 0.5
    return steep  # noqa: RET504  # the variable is its name


class Steep(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t * 3.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2.0


NAMESPACE: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "wave": wave, "Steep": Steep}


@dataclass(frozen=True)
class Assign:
    """`targets = expression`: one target, or several that a result is unpacked into.

    Attributes:
        uid: Unique in the program.
        targets: Variables.
        code: The line.
        written: The expression of the tensor that it writes into, if it does.
        name: What the node is called (before it is numbered), where that is no target.
    """

    uid: int
    targets: tuple[str, ...]
    code: str
    written: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class CallModule:
    """`target = self.child(...)`."""

    target: str
    child: str
    args: tuple[tuple[str | None, str], ...]

    @property
    def code(self) -> str:
        given = ", ".join(value if name is None else f"{name}={value}" for name, value in self.args)
        return f"{self.target} = self.{self.child}({given})"


@dataclass(frozen=True)
class If:
    condition: str
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]


@dataclass(frozen=True)
class Repeat:
    count: str
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class EachLayer:
    """`for layer in self.layers: variable = layer(variable)`."""

    variable: str
    layers: str


Statement: TypeAlias = "Assign | CallModule | If | Repeat | EachLayer"


@dataclass(frozen=True)
class Linear:
    """A `torch.nn.Linear`, maybe with hooks of the user's on it."""

    size: int
    has_hook: bool = False
    has_pre_hook: bool = False


@dataclass(frozen=True)
class Chain:
    """A `torch.nn.Sequential` of linear maps with ReLUs in between."""

    links: tuple[Linear, ...]


@dataclass(frozen=True)
class Layers:
    """A `torch.nn.ModuleList`, of layers that are called in turn."""

    layers: tuple[Linear | Program, ...]


@dataclass(frozen=True)
class Shared:
    """The module that already stands under another name."""

    other: str


@dataclass(frozen=True)
class Program:
    """What a module does.

    Attributes:
        signature: The parameters of `forward`, after `self`.
        names: Their names.
        tensors: Parameters (True) and buffers (False) of size 4, by name.
        children: Submodules by attribute.
        body: What `forward` does.
        output: The expression that it returns.
    """

    signature: str
    names: tuple[str, ...]
    tensors: tuple[tuple[str, bool], ...]
    children: tuple[tuple[str, Child], ...]
    body: tuple[Statement, ...]
    output: str

    def child(self, name: str) -> Child:
        found = dict(self.children)[name]
        return self.child(found.other) if isinstance(found, Shared) else found

    def __repr__(self) -> str:
        return "\n" + source_of(self)


Child: TypeAlias = "Linear | Chain | Layers | Shared | Program"


def source_of(program: Program) -> str:
    """Returns `forward` of a program as Python."""
    lines = [f"def forward(self, {program.signature}):", *_indented(program.body), f"    return {program.output}"]
    for name, child in program.children:
        if isinstance(child, Program):
            lines += [f"    # self.{name}:", textwrap.indent(source_of(child), "    # ")]
        elif isinstance(child, Layers):
            lines += [textwrap.indent(f"self.{name}: {child!r}", "    # ")]
        else:
            lines += [f"    # self.{name} = {child!r}"]
    return "\n".join(lines)


def _indented(body: tuple[Statement, ...], depth: int = 1) -> Iterator[str]:
    space = "    " * depth
    for statement in body:
        if isinstance(statement, If):
            yield f"{space}if {statement.condition}:"
            yield from _indented(statement.then, depth + 1)
            yield f"{space}else:"
            yield from _indented(statement.otherwise, depth + 1)
        elif isinstance(statement, Repeat):
            yield f"{space}for _ in range({statement.count}):"
            yield from _indented(statement.body, depth + 1)
        elif isinstance(statement, EachLayer):
            yield f"{space}for layer in self.{statement.layers}:"
            yield f"{space}    {statement.variable} = layer({statement.variable})"
        else:
            yield space + statement.code


def build(program: Program, seed: int = 0) -> nn.Module:
    """Returns a module that does what the program says; the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _module(program)


_NUMBERS = itertools.count()


def _module(child: Child) -> nn.Module:
    if isinstance(child, Linear):
        return _linear(child)
    if isinstance(child, Chain):
        links = [module for link in child.links for module in (_linear(link), nn.ReLU())]
        return nn.Sequential(*links[:-1])
    if isinstance(child, Layers):
        return nn.ModuleList([_module(layer) for layer in child.layers])
    assert isinstance(child, Program)
    namespace = dict(NAMESPACE)
    exec(compile(source_of(child), f"<program {next(_NUMBERS)}>", "exec"), namespace)
    module: nn.Module = type("Random", (nn.Module,), {"forward": namespace["forward"]})()
    for name, is_parameter in child.tensors:
        if is_parameter:
            module.register_parameter(name, nn.Parameter(torch.randn(4)))
        else:
            module.register_buffer(name, torch.randn(4))
    for name, inner in child.children:
        module.add_module(name, getattr(module, inner.other) if isinstance(inner, Shared) else _module(inner))
    return module


def _linear(child: Linear) -> nn.Linear:
    module = nn.Linear(child.size, child.size)
    if child.has_pre_hook:
        module.register_forward_pre_hook(_before)
    if child.has_hook:
        module.register_forward_hook(_after)
    return module


def _before(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return (args[0] * 0.5,)


def _after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 1.0


def hooked_input(child: Linear, value: Tensor) -> Tensor:
    """Returns what the hook of a linear map makes of its input."""
    return value * 0.5 if child.has_pre_hook else value


def hooked_output(child: Linear, value: Tensor) -> Tensor:
    """Returns what the hook of a linear map makes of its output."""
    return value + 1.0 if child.has_hook else value


__all__ = [
    "NAMESPACE",
    "Assign",
    "CallModule",
    "Chain",
    "Child",
    "EachLayer",
    "If",
    "Layers",
    "Linear",
    "Program",
    "Repeat",
    "Shared",
    "Statement",
    "build",
    "hooked_input",
    "hooked_output",
    "source_of",
]
