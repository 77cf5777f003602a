"""Call sites: the chain of Python call sites from a module's `forward` down to a torch call.

An op is identified by its chain and how often the same chain ran before in its frame. Capture and live runs find
both here, so that they always agree.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch

from graphpatch_notebook.capture.naming.bytecode import Assigned, assigned_variable, instruction_offset
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


class _Offsets(dict[int, int]):
    """The offsets of the instructions of a code object by `lasti`, each read off the bytecode when it is first needed.

    The interpreter's own offsets are others: specialized code has several for one instruction.
    """

    def __init__(self, code: CodeType) -> None:
        super().__init__()
        self._code = code

    def __missing__(self, lasti: int) -> int:
        found = self[lasti] = instruction_offset(self._code, lasti)
        return found


class CodeFacts:
    """Facts about a code object. Keeps the code object alive, so that its `id` stays unique.

    Attributes:
        is_users: Whether it counts as a step of a call site: neither torch's inner code nor of this package.
        is_parallel: Whether transformers puts it around the forwards of modules that it shards over processes. It is
            not a step of call sites: an op has the same call site as in the model of a single process.
        is_offloading: Whether it moves weights and inputs around a module's own forward: accelerate, FSDP, shards.
        is_collecting: Whether transformers (before 5.2) puts it around the forwards of layers, to collect outputs.
        offsets: The offsets of its instructions by `lasti`: always the same dictionary.
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
        self.offsets: Mapping[int, int] = _Offsets(code)


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


def caller_of_hidden(frame: FrameType) -> FrameType | None:
    """Returns the caller of a frame that does not run the user's code; `None` if the frame does, or has no caller."""
    code = frame.f_code
    if code is INVOKE or (_codes.get(id(code)) or facts_of(code)).is_users:
        return None
    return frame.f_back


class SiteTable:
    """Interns sites: equal chains are the same `Site`."""

    def __init__(self) -> None:
        self._sites: dict[tuple[int, ...], Site] = {}
        self._offloading: set[Site] = set()

    def site(self, frame: FrameType | None) -> Site | None:
        """Returns the site of a torch call made from `frame`; `None` if no `forward` called it."""
        key = chain(frame)
        return None if key is None else self._sites.get(key) or self._add(key)

    def site_inside(self, outer: Site, steps: tuple[tuple[CodeType, int], ...]) -> Site:
        """Returns the site of a call inside the call at `outer`: `steps` are its call sites from there inward."""
        key = tuple(number for code, offset in reversed((*outer.steps, *steps)) for number in (id(code), offset))
        return self._sites.get(key) or self._add(key)

    def is_offloading(self, site: Site, frame: FrameType) -> bool:
        """Whether a torch call at a site, made from `frame`, only moves weights and inputs: code of accelerate or FSDP.

        It does if one of its hooks called it: a weight may be loaded, or quantized, by code of others.
        """
        return site in self._offloading or (not site.steps and frame.f_code is not INVOKE)

    def _add(self, key: tuple[int, ...]) -> Site:
        site = self._sites[key] = Site(steps_of(key))
        steps = [facts_of(code) for code, _ in site.steps]
        if steps and (steps[-1].is_offloading or any(facts.is_hook_of_offloading for facts in steps)):
            self._offloading.add(site)
        return site


def chain(frame: FrameType | None) -> tuple[int, ...] | None:
    """Returns the chain of call sites down to `frame`, innermost first: the id of the code and the offset of each step.

    `None` if no `forward` called it.
    """
    key: list[int] = []
    last, facts = None, None
    while frame is not None:
        code = frame.f_code
        if code is INVOKE:
            if last is not None and facts is not None and not (facts.is_users or facts.is_parallel):
                # `forward` itself counts even where it is one of torch's inner modules.
                key += (id(last.f_code), facts.offsets[last.f_lasti])
            return tuple(key)
        facts = _codes.get(id(code)) or facts_of(code)
        if facts.is_users:
            key += (id(code), facts.offsets[frame.f_lasti])
        last, frame = frame, frame.f_back
    return None


def steps_of(chain: tuple[int, ...]) -> tuple[tuple[CodeType, int], ...]:
    """Returns the code and the offset of each step of a chain, outermost first."""
    return tuple([(_codes[chain[i]].code, chain[i + 1]) for i in range(len(chain) - 2, -1, -2)])


def result_variable(frame: FrameType | None, function_name: str) -> Assigned:
    """Returns the user's variable that the result of a torch call made from `frame` is assigned to.

    `None` if the call is inside another of torch's functions: the variable is not for its result.
    """
    while frame is not None and (code := frame.f_code) is not INVOKE:
        if (_codes.get(id(code)) or facts_of(code)).is_users:
            return assigned_variable(code, frame.f_lasti)
        if not is_own(code) and code.co_name not in _DISPATCHERS and code.co_name != function_name:
            return None
        frame = frame.f_back
    return None


_DISPATCHERS = {"handle_torch_function", "wrapped", "fn", "inner", "wrapper", "apply", "_fn", "compile_wrapper"}


def caller(depth: int) -> FrameType:
    """Returns the Python frame `depth` calls above the caller of this function."""
    return sys._getframe(depth + 1)
