"""Interprets programs without the package: which node paths there are, and what edits of them do."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz.edits import Edit
from tests.fuzz.programs import (
    NAMESPACE,
    Assign,
    CallModule,
    Chain,
    Child,
    EachLayer,
    If,
    Layers,
    Linear,
    Program,
    Repeat,
    Shared,
    Statement,
    hooked_input,
    hooked_output,
)

Key: TypeAlias = "tuple[Any, ...]"
Edits: TypeAlias = "Mapping[str, Sequence[tuple[tuple[str, ...], Sequence[tuple[Edit, Any]]]]]"
"""By path of a node: where in its value, and what is done there (with the value that is used for it)."""


@dataclass
class Place:
    """A value that came up: a frame's input, parameter, output, or an operation."""

    path: str
    value: Any
    is_in_place: bool = False


@dataclass
class _Frame:
    """One call of a module: how often each statement and submodule came up in it, and the names given so far."""

    key: Key
    counts: dict[Any, int] = field(default_factory=dict)

    def count(self, what: Any) -> int:
        self.counts[what] = self.counts.get(what, 0) + 1
        return self.counts[what] - 1


class Interpreter:
    """Runs a program, the values of whose tensors are those of a module."""

    def __init__(self, program: Program, module: nn.Module) -> None:
        self.program = program
        self.module = module
        self.places: dict[Key, Place] = {}
        self.paths: dict[Key, str] = {}
        self.edits: Edits = {}
        self.fired: set[tuple[str, tuple[str, ...]]] = set()
        self.is_tracing = False

    def trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs once, and lays down which value has which path."""
        self.is_tracing = True
        result = self._program(self.program, self.module, (), args, kwargs)
        self.is_tracing = False
        self._name()
        return result

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], edits: Edits) -> Any:
        """Runs with edits; `fired` says afterwards which of them came up."""
        self.edits, self.fired = edits, set()
        return self._program(self.program, self.module, (), args, kwargs)

    # -- names ---------------------------------------------------------------------------------------------------------

    def _name(self) -> None:
        calls: dict[tuple[Key, str], int] = {}
        for key in self.places:
            for depth in range(len(key) - 1):
                attribute, index = key[depth]
                where = (key[:depth], attribute)
                calls[where] = max(calls.get(where, 0), index + 1)
        numbers: dict[tuple[Key, str], int] = {}
        for key, place in self.places.items():
            parts = []
            for depth, (attribute, index) in enumerate(key[:-1]):
                is_repeated = calls[key[:depth], attribute] > 1
                parts.append(f"{attribute}_{index}" if is_repeated else attribute)
            kind, name = key[-1][0], place.path
            if kind == "input":
                numbers[key[:-1], name] = 1
            elif kind == "op":
                number = numbers.get((key[:-1], name), 0)
                numbers[key[:-1], name] = number + 1
                name = f"{name}_{number}" if number else name
            place.path = self.paths[key] = ".".join([*parts, name])

    def at(self, key: Key, name: str, value: Any, is_in_place: bool = False) -> Any:
        """Returns what a value is after the edits on its node."""
        if self.is_tracing:
            self.places.setdefault(key, Place(name, _copied(value), is_in_place))
            return value
        path = self.paths.get(key)
        if path is None:
            return value
        for dig, edits in self.edits.get(path, ()):
            patched = _edited(value, dig, edits)
            if patched is _MISSING:
                continue
            self.fired.add((path, dig))
            if is_in_place and patched is not value:
                value.copy_(patched)
            else:
                value = patched
        return value

    # -- modules -------------------------------------------------------------------------------------------------------

    def _call(self, child: Child, module: nn.Module, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(child, Linear):
            return self._linear(child, module, key, args[0])
        if isinstance(child, Program):
            return self._program(child, module, key, args, kwargs)
        assert isinstance(child, Chain)
        value = self.at((*key, ("input", "input")), "input", args[0])
        for number, link in enumerate(child.links):
            if number:
                relu = (*key, (f"sub_{2 * number - 1}", 0))
                value = self.at((*relu, ("input", "input")), "input", value)
                value = self.at((*relu, ("op", "relu")), "relu", F.relu(value))
                value = self.at((*relu, ("output",)), "output", value)
            value = self._linear(link, module[2 * number], (*key, (f"sub_{2 * number}", 0)), value)  # type: ignore[index]
        return self.at((*key, ("output",)), "output", value)

    def _linear(self, child: Linear, module: nn.Module, key: Key, value: Any) -> Any:
        value = self.at((*key, ("input", "input")), "input", hooked_input(child, value))
        weight = self.at((*key, ("tensor", "weight")), "weight", module.weight)
        bias = self.at((*key, ("tensor", "bias")), "bias", module.bias)
        value = self.at((*key, ("op", "linear")), "linear", F.linear(value, weight, bias))
        return self.at((*key, ("output",)), "output", hooked_output(child, value))

    def _program(
        self, program: Program, module: nn.Module, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        variables = _bound(program, args, kwargs)
        frame = _Frame(key)
        for name in program.names:
            variables[name] = self.at((*key, ("input", name)), name, variables[name])
        variables["self"] = self._tensors(program, module, key)
        self._block(program.body, program, module, frame, variables)
        output = eval(_compiled(program.output, "eval"), NAMESPACE, variables)
        return self.at((*key, ("output",)), "output", output)

    def _tensors(self, program: Program, module: nn.Module, key: Key) -> Any:
        if self.is_tracing:
            return _NotingTensors(self, module, key)
        names = [name for name, _ in program.tensors]
        return SimpleNamespace(**{n: self.at((*key, ("tensor", n)), n, getattr(module, n)) for n in names})

    # -- statements ----------------------------------------------------------------------------------------------------

    def _block(
        self,
        body: Sequence[Statement],
        program: Program,
        module: nn.Module,
        frame: _Frame,
        variables: dict[str, Any],
    ) -> None:
        for statement in body:
            if isinstance(statement, If):
                is_true = eval(_compiled(statement.condition, "eval"), NAMESPACE, variables)
                self._block(statement.then if is_true else statement.otherwise, program, module, frame, variables)
            elif isinstance(statement, Repeat):
                for _ in range(variables[statement.count] if statement.count.isidentifier() else int(statement.count)):
                    self._block(statement.body, program, module, frame, variables)
            elif isinstance(statement, EachLayer):
                layers = program.child(statement.layers)
                assert isinstance(layers, Layers)
                for number, layer in enumerate(layers.layers):
                    name = f"{statement.layers}_{number}"
                    key = (*frame.key, (name, frame.count(name)))
                    inner = getattr(module, statement.layers)[number]
                    value = self._call(layer, inner, key, (variables[statement.variable],), {})
                    variables[statement.variable] = value
            elif isinstance(statement, CallModule):
                self._call_module(statement, program, module, frame, variables)
            else:
                self._assign(statement, frame, variables)

    def _call_module(
        self, statement: CallModule, program: Program, module: nn.Module, frame: _Frame, variables: dict[str, Any]
    ) -> None:
        child: Any = dict(program.children)[statement.child]
        name = statement.child
        while isinstance(child, Shared):
            name, child = child.other, dict(program.children)[child.other]
        given = [(n, eval(_compiled(code, "eval"), NAMESPACE, variables)) for n, code in statement.args]
        args = [value for n, value in given if n is None]
        kwargs = {n: value for n, value in given if n is not None}
        key = (*frame.key, (name, frame.count(name)))
        variables[statement.target] = self._call(child, getattr(module, name), key, args, kwargs)

    def _assign(self, statement: Assign, frame: _Frame, variables: dict[str, Any]) -> None:
        occurrence = frame.count(statement.uid)
        written = None
        if statement.written is not None:
            written = eval(_compiled(statement.written, "eval"), NAMESPACE, variables)
        exec(_compiled(statement.code, "exec"), NAMESPACE, variables)
        if written is not None:
            name = statement.name or statement.targets[0]
            self.at((*frame.key, ("op", statement.uid, name, occurrence)), name, written, True)
            return
        for target in statement.targets:
            key = (*frame.key, ("op", statement.uid, target, occurrence))
            variables[target] = self.at(key, statement.name or target, variables[target])


class _NotingTensors:
    """Hands out the tensors of a module, and notes which of them were used."""

    def __init__(self, interpreter: Interpreter, module: nn.Module, key: Key) -> None:
        self._all = interpreter, module, key

    def __getattr__(self, name: str) -> Any:
        interpreter, module, key = self._all
        return interpreter.at((*key, ("tensor", name)), name, getattr(module, name))


_MISSING: Any = object()


def _edited(value: Any, dig: tuple[str, ...], edits: Sequence[tuple[Edit, Any]]) -> Any:
    if not dig:
        for edit, new in edits:
            value = edit.apply(value, new)
        return value
    step, rest = dig[0], dig[1:]
    if isinstance(value, dict):
        if step not in value:
            return _MISSING
        patched = _edited(value[step], rest, edits)
        return value if patched is value[step] else patched if patched is _MISSING else {**value, step: patched}
    position = int(step.removeprefix("sub_"))
    if not isinstance(value, (tuple, list)) or position >= len(value):
        return _MISSING
    patched = _edited(value[position], rest, edits)
    if patched is value[position] or patched is _MISSING:
        return patched if patched is _MISSING else value
    items = [*value[:position], patched, *value[position + 1 :]]
    if type(value) in (tuple, list):
        return type(value)(items)
    return type(value)(items)  # torch.return_types


def _bound(program: Program, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    names = ", ".join(f"{name!r}: {name}" for name in program.names)
    exec(_compiled(f"def bind({program.signature}):\n    return {{{names}}}", "exec"), namespace)
    found: dict[str, Any] = namespace["bind"](*args, **kwargs)
    return found


@functools.lru_cache(maxsize=4096)
def _compiled(code: str, mode: str) -> CodeType:
    return compile(code, "<oracle>", mode)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        with torch.no_grad():
            return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_copied(item) for item in value])
    return value
