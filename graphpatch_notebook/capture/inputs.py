"""Binds the arguments of a call to the parameters of `forward`, and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from graphpatch_notebook.capture.records import InputParameter

_EMPTY = inspect.Parameter.empty
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


def signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of `forward` without `self`, through decorators that say what they wrap."""
    function = getattr(forward, "__func__", None)
    if function is None:
        return _signature(forward)
    known = _signatures.get(function)
    if known is None:
        known = _signatures[function] = _signature(forward)
    return known


def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):  # a forward written in C tells nothing
        return inspect.Signature(
            [
                inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
                inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
            ]
        )


def input_parameters(signature: inspect.Signature) -> list[InputParameter]:
    """Returns the parameters of a signature as records."""
    return [InputParameter(p.name, p.kind, p.default) for p in signature.parameters.values()]


def bind(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the value of each parameter that a call gives, or `None` where the call does not fit the signature.

    `*args` is bound to a tuple and `**kwargs` to a dict, also where they are empty; parameters that are not given are
    absent.
    """
    try:
        bound = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return None
    for parameter in signature.parameters.values():
        if parameter.kind in _VARIADIC and parameter.name not in bound:
            bound[parameter.name] = () if parameter.kind is inspect.Parameter.VAR_POSITIONAL else {}
    return bound


def unbind(
    signature: inspect.Signature, bound: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call with the values of `bound`, in the positional and keyword form of the call `args`, `kwargs`."""
    new_args: list[Any] = []
    new_kwargs: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if name not in bound:
            continue
        value = bound[name]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            new_args.extend(value)
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            new_kwargs.update(value)
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY or name in kwargs or not _fits(new_args, args, parameter):
            new_kwargs[name] = value
        else:
            new_args.append(value)
    return tuple(new_args), new_kwargs


def _fits(new_args: list[Any], args: tuple[Any, ...], parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.POSITIONAL_ONLY or len(new_args) < len(args)
