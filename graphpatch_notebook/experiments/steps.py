"""The steps of a run, call of torch by call of torch: whether another run takes the same."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from graphpatch_notebook.execution.frame_effects import PLAIN

_MANY = 16


class Steps:
    """What a run did: functions, with their arguments that are neither tensors nor objects."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes a call."""
        self.calls.append((func, _settings(args, kwargs)))


def _settings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a call is told besides tensors; `None` for nothing."""
    settings = [_plain(value) for value in args]
    if kwargs:
        return settings, {name: _plain(value) for name, value in kwargs.items()}
    return settings if any(setting is not None for setting in settings) else None


def _plain(value: Any) -> Any:
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
        self._calls = steps.calls
        self._count = 0
        self._has_strayed = False

    @property
    def is_same(self) -> bool:
        """Whether the run, which is over, took the very same steps."""
        return not self._has_strayed and self._count == len(self._calls)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._has_strayed:
            number = self._count
            self._count += 1
            if number >= len(self._calls):
                self._has_strayed = True
            else:
                expected, settings = self._calls[number]
                self._has_strayed = func != expected or (settings is not None and settings != _settings(args, kwargs))
        return func(*args, **kwargs)
