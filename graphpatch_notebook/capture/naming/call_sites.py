"""Call sites: the chain of Python call sites from a module's `forward` down to a torch call.

An op is identified by its chain and how often the same chain ran before in its frame. Capture and live runs find
both here, so that they always agree.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from graphpatch_notebook.capture.naming.bytecode import Assigned, assigned_variable, instruction_offset, is_in_loop
from graphpatch_notebook.capture.records import Site

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_TORCH_MODULES = os.path.join(_TORCH, "nn", "modules", "")
_MODULE_MACHINERY = os.path.join(_TORCH_MODULES, "module.py")
_SHARDING = os.path.join(_TORCH, "distributed", "fsdp", "")
_COLLECTING = os.path.join("transformers", "utils", "generic.py")
_PARALLEL = (  # what transformers puts around the forwards of modules that it shards: 5.0 to 5.4, and since
    os.path.join("transformers", "integrations", "tensor_parallel.py"),
    os.path.join("transformers", "distributed", ""),
)
_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")


def invoke(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a module's `forward`: the Python frame at which the walk up the stack ends."""
    # Also in other functions of the engine between the user's code and the model's: IPython and pytest leave such
    # frames out of tracebacks, where they would be the majority.
    __tracebackhide__ = True
    return forward(*args, **kwargs)


INVOKE = invoke.__code__
"""The code at which a frame begins."""


class CodeFacts:
    """Facts about a code object. Keeps the code object alive, so that its `id` stays unique.

    Attributes:
        is_users: Whether it counts as a step of a call site: neither torch's inner code nor of this package.
        is_parallel: Whether transformers puts it around the forwards of modules that it shards over processes. It is
            not a step of call sites: an op has the same call site as in the model of a single process.
        is_offloading: Whether it moves weights and inputs around a module's own forward: accelerate, FSDP, shards.
        is_collecting: Whether transformers (before 5.2) puts it around the forwards of layers, to collect outputs.
        offsets: The offsets of instructions by `lasti` that were looked up so far: always the same dictionary.
    """

    __slots__ = (
        "code", "is_collecting", "is_hook_of_offloading", "is_offloading", "is_parallel", "is_users", "offsets",
    )  # fmt: skip

    def __init__(self, code: CodeType) -> None:
        file = code.co_filename
        in_torch = file.startswith(_TORCH) and (not file.startswith(_TORCH_MODULES) or file == _MODULE_MACHINERY)
        self.code = code
        is_sharding = file.startswith(_SHARDING)
        self.is_parallel = any(path in file for path in _PARALLEL)
        self.is_users = is_sharding or not (in_torch or self.is_parallel or file.startswith(_OWN))
        accelerate = getattr(sys.modules.get("accelerate"), "__file__", None)
        of_accelerate = accelerate is not None and file.startswith(os.path.join(os.path.dirname(accelerate), ""))
        self.is_offloading = is_sharding or of_accelerate or self.is_parallel
        self.is_hook_of_offloading = self.is_offloading and code.co_name in ("pre_forward", "post_forward")
        self.is_collecting = code.co_name == "wrapped_forward" and file.endswith(_COLLECTING)
        self.offsets: dict[int, int] = {}

    def offset(self, lasti: int) -> int:
        """Returns the offset of the instruction at `lasti`."""
        found = self.offsets.get(lasti)
        if found is None:
            found = self.offsets[lasti] = instruction_offset(self.code, lasti)
        return found


# By id: hashing a code object hashes its whole content.
_codes: dict[int, CodeFacts] = {}


def facts_of(code: CodeType) -> CodeFacts:
    """Returns the facts about `code`: the same object each time."""
    known = _codes.get(id(code))
    if known is None:
        known = _codes[id(code)] = CodeFacts(code)
    return known


def count_as_users(code: CodeType) -> None:
    """Makes `code` count as the user's, wherever it is: call sites go through it, names are read off it."""
    facts_of(code).is_users = True


def is_own(code: CodeType) -> bool:
    """Whether this is code of this package."""
    return code.co_filename.startswith(_OWN)


def leaf_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the frame of the user's code that `frame` was called from, or `None` at the end of the walk.

    A line that a person would call theirs is in a forward of torch's own modules, too; torch's functions, its
    dispatch, and this package are not.
    """
    last = None
    while frame is not None:
        code = frame.f_code
        known = _codes.get(id(code)) or facts_of(code)
        if known.is_users:
            return frame
        if code is INVOKE:
            return last
        last, frame = frame, frame.f_back
    return None


def is_offloading(frame: FrameType | None) -> bool:
    """Whether a torch call made from `frame` only moves weights and inputs, in code of accelerate or FSDP.

    It does if one of its hooks called it: a weight may be loaded, or quantized, by code of others.
    """
    leaf = leaf_frame(frame)
    if leaf is None or facts_of(leaf.f_code).is_offloading:
        return leaf is not None
    above = leaf.f_back
    while above is not None and above.f_code is not INVOKE:
        code = above.f_code
        if (_codes.get(id(code)) or facts_of(code)).is_hook_of_offloading:
            return True
        above = above.f_back
    return False


def caller_of_hidden(frame: FrameType) -> FrameType | None:
    """Returns the caller of a frame that does not run the user's code; `None` if the frame does, or has no caller."""
    code = frame.f_code
    if code is INVOKE or (_codes.get(id(code)) or facts_of(code)).is_users:
        return None
    return frame.f_back


def offset_in(frame: FrameType) -> int:
    """Returns the offset of the instruction that `frame` is at."""
    return facts_of(frame.f_code).offset(frame.f_lasti)


class SiteTable:
    """Interns sites: equal chains are the same `Site`."""

    def __init__(self) -> None:
        self._sites: dict[tuple[int, ...], Site] = {}

    def site(self, frame: FrameType | None) -> Site | None:
        """Returns the site of a torch call made from `frame`; `None` if no `forward` called it."""
        key, steps = chain(frame)
        if key is None:
            return None
        return self._sites.get(key) or self._sites.setdefault(key, Site(tuple(reversed(steps))))

    def site_inside(self, outer: Site, steps: tuple[tuple[CodeType, int], ...]) -> Site:
        """Returns the site of a call inside the call at `outer`: `steps` are its call sites from there inward."""
        steps = (*outer.steps, *steps)
        key = tuple(number for code, offset in reversed(steps) for number in (id(code), offset))
        return self._sites.get(key) or self._sites.setdefault(key, Site(steps))


def chain(frame: FrameType | None) -> tuple[tuple[int, ...] | None, list[tuple[CodeType, int]]]:
    """Returns the chain of call sites above `frame`, innermost first, as a key to compare and as steps."""
    key: list[int] = []
    steps: list[tuple[CodeType, int]] = []
    last = None
    while frame is not None:
        code = frame.f_code
        if code is INVOKE:
            if last is not None and _counts_as_forward(last):
                # `forward` itself counts even where it is one of torch's inner modules.
                offset = offset_in(last)
                key += (id(last.f_code), offset)
                steps.append((last.f_code, offset))
            return tuple(key), steps
        known = _codes.get(id(code)) or facts_of(code)
        if known.is_users:
            offset = known.offset(frame.f_lasti)
            key += (id(code), offset)
            steps.append((code, offset))
        last, frame = frame, frame.f_back
    return None, steps


def may_repeat(site: Site) -> bool:
    """Whether one call of a `forward` may come to a site several times: it is in a loop, or in a function it calls."""
    (code, offset), *inner = site.steps
    return bool(inner) or is_in_loop(code, offset)


def _counts_as_forward(frame: FrameType) -> bool:
    """Whether what `invoke` called is a step of call sites although it is not the user's: a forward of torch's own."""
    known = facts_of(frame.f_code)
    return not known.is_users and not known.is_parallel


def chain_above(leaf: FrameType) -> tuple[int, ...]:
    """Returns the call sites above a frame of the user's code, as `chain` does, without the frame itself."""
    at = leaf.f_back
    if at is not None and at.f_code is INVOKE:  # the call is in `forward` itself, as most are
        return ()
    key: list[int] = []
    last = leaf
    while at is not None:
        code = at.f_code
        if code is INVOKE:
            if last is not leaf and _counts_as_forward(last):
                key += (id(last.f_code), offset_in(last))
            break
        known = _codes.get(id(code)) or facts_of(code)
        if known.is_users:
            key += (id(code), known.offset(at.f_lasti))
        last, at = at, at.f_back
    return tuple(key)


def result_variable(frame: FrameType | None, function_name: str) -> Assigned:
    """Returns the user's variable that the result of a torch call made from `frame` is assigned to.

    `None` if the call is inside another of torch's functions: the variable is not for its result.
    """
    while frame is not None and frame.f_code is not INVOKE:
        code = frame.f_code
        if facts_of(code).is_users:
            return assigned_variable(code, frame.f_lasti)
        if not is_own(code) and code.co_name not in _DISPATCHERS and code.co_name != function_name:
            return None
        frame = frame.f_back
    return None


_DISPATCHERS = {"handle_torch_function", "wrapped", "fn", "inner", "wrapper", "apply", "_fn", "compile_wrapper"}


def caller(depth: int) -> FrameType:
    """Returns the Python frame `depth` calls above the caller of this function."""
    return sys._getframe(depth + 1)
