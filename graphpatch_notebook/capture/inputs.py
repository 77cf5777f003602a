"""The arguments of `forward`: bound to its parameters, split and rebuilt; and the example inputs."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from graphpatch_notebook.capture.records import CallNode, Frame, InputParameter, Node, Ref
from graphpatch_notebook.torch_compat import without_torch_functions
from graphpatch_notebook.values import (
    ContainerSpec,
    ScalarSpec,
    TensorSpec,
    ValueSpec,
    digest,
    rebuilt,
)

_EMPTY = inspect.Parameter.empty
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_parameters: WeakKeyDictionary[Any, list[InputParameter]] = WeakKeyDictionary()


def parameters_of(forward: Callable[..., Any]) -> list[InputParameter]:
    """Returns the parameters of `forward` without `self`, as records. Follows `__wrapped__` of decorators."""
    function = getattr(forward, "__func__", None)
    known = None if function is None else _parameters.get(function)
    if known is None:
        try:
            signature = inspect.signature(forward)
            known = [InputParameter(p.name, p.kind, p.default) for p in signature.parameters.values()]
        except (TypeError, ValueError):  # a forward written in C has no signature
            kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            known = [InputParameter(name, kind, _EMPTY) for name, kind in zip(("args", "kwargs"), kinds, strict=True)]
        if function is not None:
            _parameters[function] = known
    return list(known)


def signature_with(parameters: Iterable[InputParameter]) -> inspect.Signature:
    """Returns the signature with these parameters."""
    return inspect.Signature([inspect.Parameter(p.name, p.kind, default=p.default) for p in parameters])


def bind(parameters: list[InputParameter], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the value of each parameter that a call passes, or `None` if the call does not fit them.

    `*args` is bound to a tuple and `**kwargs` to a dict, also where they are empty; parameters that are not given are
    absent. The same as `inspect.Signature.bind`, which takes ten times as long.
    """
    bound: dict[str, Any] = {}
    count, named = 0, dict(kwargs)  # those that are left
    for parameter in parameters:
        name, kind = parameter.name, parameter.kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            bound[name], count = args[count:], len(args)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            bound[name], named = named, {}
        elif count < len(args) and kind is not inspect.Parameter.KEYWORD_ONLY:
            bound[name], count = args[count], count + 1
            if name in named and kind is not inspect.Parameter.POSITIONAL_ONLY:
                return None
        elif name in named and kind is not inspect.Parameter.POSITIONAL_ONLY:
            bound[name] = named.pop(name)
        elif parameter.default is _EMPTY:
            return None
    return None if named or count < len(args) else bound


def given_input(parameters: list[InputParameter], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the value that a call passes for the parameter `name`, or its default, or `None`: faster than `bind`."""
    for position, parameter in enumerate(parameters):
        if parameter.name != name:
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return args[position:]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named = _named(parameters) if kwargs else ()
            return {key: value for key, value in kwargs.items() if key not in named}
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY and position < len(args):
            return args[position]
        if name in kwargs and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
            return kwargs[name]
        return None if parameter.default is _EMPTY else parameter.default
    return None


def inputs_of_call(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the value that a call of the module of `frame` passes for each parameter."""
    return {p.name: given_input(frame.parameters, p.name, args, kwargs) for p in frame.parameters}


def passed_on(node: Node, frame: Frame) -> tuple[Any, Frame] | None:
    """Returns the recorded value that a node at the boundary of a frame passes on, and the frame of that value.

    For an input, this is the argument that the caller gave; for a call, the output node of the called frame; for an
    output, what `forward` returned. `None` for other nodes, and where it was not recorded.
    """
    if node.kind == "input":
        if frame.parent is None or frame.call is None:
            return None
        return given_input(frame.parameters, node.target, frame.call.args, frame.call.kwargs), frame.parent
    if isinstance(node, CallNode):
        return (Ref(node.frame.output_node), node.frame) if node.frame.nodes else None
    return (frame.output, frame) if node.kind == "output" and frame.opaque_reason is None else None


def with_input(
    parameters: list[InputParameter], name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the call with another value for the parameter `name`, otherwise in the same form."""
    position, parameter = next((i, p) for i, p in enumerate(parameters) if p.name == name)
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return (*args[:position], *value), kwargs
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        named = _named(parameters)
        return args, {**{key: old for key, old in kwargs.items() if key in named}, **value}
    if parameter.kind is not inspect.Parameter.KEYWORD_ONLY and position < len(args):
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: value}


def with_other_tensor(given: Any, old: Tensor, new: Tensor) -> tuple[Any, int]:
    """Returns arguments with the object `old` replaced by `new`, and the number of replacements.

    Only in tuples: lists and dicts belong to the caller, who may read what a module writes into them.
    """
    if given is old:
        return new, 1
    if not isinstance(given, tuple) or isinstance(given, torch.Size):
        return given, 0
    items, counts = zip(*(with_other_tensor(item, old, new) for item in given), strict=True) if given else ((), ())
    return (rebuilt(type(given), (), items), sum(counts)) if any(counts) else (given, 0)


def _named(parameters: list[InputParameter]) -> set[str]:
    positional_only = inspect.Parameter.POSITIONAL_ONLY
    return {p.name for p in parameters if p.kind not in _VARIADIC and p.kind is not positional_only}


class UnknownInputError(Exception):
    """An input of the example was an object, which was not kept (caught inside the package)."""


_CONSTANT: Callable[[ScalarSpec], Any] = operator.attrgetter("value")


def call_like(
    frame: Frame,
    tensor: Callable[[str, TensorSpec], Any],
    number: Callable[[ScalarSpec], Any] = _CONSTANT,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call like the call of a captured frame, without arguments that equal their default.

    `tensor` makes each tensor, given its name in messages and its spec; `number` each number or other constant. An
    input that cannot be made is an `UnknownInputError`.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    is_positional = True
    values = {str(node.target): value_like(node.spec, tensor, number, str(node.target)) for node in frame.inputs()}
    for parameter in frame.parameters:
        value = values.get(parameter.name)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            args.extend(value or ())
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            kwargs.update(value or {})
        elif value is parameter.default:
            is_positional = False
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            args.append(value)
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY or not is_positional:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def value_like(
    spec: ValueSpec,
    tensor: Callable[[str, TensorSpec], Any],
    number: Callable[[ScalarSpec], Any] = _CONSTANT,
    name: str = "",
) -> Any:
    """Returns a value with this spec, called `name` in messages: see `call_like`."""
    if isinstance(spec, TensorSpec):
        return tensor(name, spec)
    if isinstance(spec, ScalarSpec):
        return number(spec)
    if isinstance(spec, ContainerSpec):
        items = [value_like(child, tensor, number, f"{name}|{text}") for text, _, child in spec.children]
        return rebuilt(spec.type, [key for _, key, _ in spec.children], items)
    raise UnknownInputError(f"its input {name!r} is an object ({spec}), for which no values can be generated")


# -- example inputs ----------------------------------------------------------------------------------------------------


class ExampleInputs:
    """References to the inputs of a call, such as the example inputs of a graph. Nothing is copied.

    Make it before the inputs are used: what the call itself changes (a cache that grows) is a change, too.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self._before = self._digests()

    def change(self) -> str | None:
        """Returns what has changed since this object was made, or `None`: numbers, or what objects hold (`digest`).

        Example:
            >>> import torch
            >>> x = torch.ones(2)
            >>> inputs = ExampleInputs((x,), {})
            >>> inputs.change()
            >>> _ = x.add_(1)
            >>> inputs.change()
            'argument 0'
        """
        now = self._digests()
        return next((name for name, before in self._before.items() if now[name] != before), None)

    def _digests(self) -> dict[str, str]:
        named = {f"argument {position}": value for position, value in enumerate(self.args)} | self.kwargs
        with without_torch_functions():  # some subclasses have no shape otherwise: see `describe`
            return {name: digest(value) for name, value in named.items()}
