"""The steps of a run, call of torch by call of torch: whether another run takes the same."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.execution.replay import PLAIN

_MANY = 16


class Steps:
    """What a run did: functions, with their arguments that are neither tensors nor objects."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, _Settings | None]] = []

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes a call."""
        self.calls.append((func, _settings(args, kwargs)))


_Settings: TypeAlias = "tuple[list[Any], dict[str, Any]]"
"""What a call is told besides tensors, positional and by keyword."""


def _settings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Settings | None:
    """Returns what a call is told besides tensors; `None` for nothing."""
    settings = [_plain(value) for value in args]
    if kwargs or any(setting is not None for setting in settings):
        return settings, {name: _plain(value) for name, value in kwargs.items()}
    return None


def _is_told(settings: _Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is told the same: asked for each call of torch, so that nothing is built for it."""
    expected, by_name = settings
    if len(args) != len(expected) or len(kwargs) != len(by_name):
        return False
    for value, setting in zip(args, expected, strict=True):
        if value is not setting and not (setting is None and isinstance(value, Tensor)) and _plain(value) != setting:
            return False
    return not kwargs or (
        kwargs.keys() == by_name.keys() and all(_plain(value) == by_name[name] for name, value in kwargs.items())
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):  # most are: this one is cheap to ask
        return None
    if isinstance(value, PLAIN):
        return value
    if type(value) in (tuple, list) and len(value) <= _MANY:
        return [_plain(item) for item in value]
    return None


class SameSteps(TorchFunctionMode):
    """Sees whether a run takes the steps that another one took.

    Args:
        steps: Of the other one.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._expected = iter(steps.calls)
        self._has_strayed = False

    @property
    def is_same(self) -> bool:
        """Whether the run, which is over, took the very same steps."""
        self._has_strayed = self._has_strayed or next(self._expected, None) is not None
        return not self._has_strayed

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._has_strayed:
            expected, settings = next(self._expected, _NONE_LEFT)
            self._has_strayed = (func is not expected and func != expected) or (
                settings is not None and not _is_told(settings, args, kwargs)
            )
        return func(*args, **kwargs)


_NONE_LEFT = (None, None)
