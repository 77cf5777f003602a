"""Call sites: the chain of Python call sites from a module's `forward` down to a torch call.

What an op *is* is its chain and how often the same chain came up before in its frame. Capture and live runs find
both here, so that they always agree.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from graphpatch_notebook.capture.bytecode import Assigned, assigned_variable
from graphpatch_notebook.capture.records import Site

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_TORCH_MODULES = os.path.join(_TORCH, "nn", "modules", "")
_MODULE_MACHINERY = os.path.join(_TORCH_MODULES, "module.py")
_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def invoke(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a module's `forward`: the Python frame at which the walk up the stack ends."""
    return forward(*args, **kwargs)


_INVOKE = invoke.__code__

# By id, with the code object kept alive: hashing a code object hashes its whole content.
_visible: dict[int, tuple[CodeType, bool]] = {}


def is_users_code(code: CodeType) -> bool:
    """Whether a frame of this code is a line that a person would call theirs.

    The forwards of torch's own modules are; torch's functions, its dispatch, and this package are not.
    """
    known = _visible.get(id(code))
    if known is None:
        file = code.co_filename
        in_torch = file.startswith(_TORCH) and (not file.startswith(_TORCH_MODULES) or file == _MODULE_MACHINERY)
        known = _visible[id(code)] = (code, not in_torch and not file.startswith(_OWN))
    return known[1]


def is_own(code: CodeType) -> bool:
    """Whether this is code of this package."""
    return code.co_filename.startswith(_OWN)


def leaf_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of the user's code that `frame` was called from, or `None` at the end of the walk."""
    last = None
    while frame is not None and frame.f_code is not _INVOKE:
        if is_users_code(frame.f_code):
            return frame
        last, frame = frame, frame.f_back
    return last if frame is not None else None


class SiteTable:
    """Interns sites: equal chains are the same `Site`."""

    def __init__(self) -> None:
        self._sites: dict[tuple[int, ...], Site] = {}

    def site(self, frame: FrameType | None) -> Site | None:
        """Returns the site of a torch call made from `frame`; `None` where no `forward` lies above it."""
        key, steps = chain(frame)
        if key is None:
            return None
        found = self._sites.get(key)
        if found is None:
            found = self._sites[key] = Site(tuple(reversed(steps)))
        return found


def chain(frame: FrameType | None) -> tuple[tuple[int, ...] | None, list[tuple[CodeType, int]]]:
    """Returns the chain of call sites above `frame`, innermost first, as a key to compare and as steps."""
    key: list[int] = []
    steps: list[tuple[CodeType, int]] = []
    last = None
    while frame is not None:
        code = frame.f_code
        if code is _INVOKE:
            if last is not None and (not steps or steps[-1][0] is not last.f_code):
                # `forward` itself counts even where it is one of torch's inner modules.
                key += (id(last.f_code), last.f_lasti)
                steps.append((last.f_code, last.f_lasti))
            return tuple(key), steps
        if is_users_code(code):
            key += (id(code), frame.f_lasti)
            steps.append((code, frame.f_lasti))
        last, frame = frame, frame.f_back
    return None, steps


def key_of(site: Site) -> tuple[int, ...]:
    """Returns the key that `chain` finds for `site`."""
    return tuple(number for code, lasti in reversed(site.steps) for number in (id(code), lasti))


def result_variable(frame: FrameType | None, function_name: str) -> Assigned:
    """Returns the user's variable that the result of a torch call made from `frame` is assigned to.

    `None` where the call stands inside another of torch's functions: the variable is not for its result.
    """
    while frame is not None and frame.f_code is not _INVOKE:
        code = frame.f_code
        if is_users_code(code):
            return assigned_variable(code, frame.f_lasti)
        if not is_own(code) and code.co_name not in _DISPATCHERS and code.co_name != function_name:
            return None
        frame = frame.f_back
    return None


_DISPATCHERS = {"handle_torch_function", "wrapped", "fn", "inner", "wrapper", "apply"}


def caller(depth: int) -> FrameType:
    """Returns the Python frame `depth` calls above the caller of this function."""
    return sys._getframe(depth + 1)
