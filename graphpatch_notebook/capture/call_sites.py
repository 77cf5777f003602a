"""Call sites: the chain of Python call sites from a module's `forward` down to a torch call.

An op is identified by its chain and how often the same chain ran before in its frame. Capture and live runs find
both here, so that they always agree.

The instruction that makes a call, and the variable that gets its result, are read off the bytecode around it, as the
`executing` library does (https://github.com/alexmojaki/executing): the instruction after the call is the store.
"""

from __future__ import annotations

import dis
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import chain as concatenated
from itertools import dropwhile, islice
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch

from graphpatch_notebook.capture.records import Site, source_texts
from graphpatch_notebook.errors import GraphPatchError

# -- the bytecode around a call ----------------------------------------------------------------------------------------

Assigned: TypeAlias = "str | tuple[str | None, ...] | None"
"""A variable; one for each value of an unpacked sequence; or `None` where the result has no variable."""

_STORES = {"STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL", "STORE_FAST_MAYBE_NULL"}
_COMBINED = {  # in Python 3.13 and later
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
}
_SWAPS = {"ROT_TWO", "ROT_THREE", "SWAP"}
_DUPLICATES = {"COPY", "DUP_TOP"}  # `a = b = f()` and `(a := f())`
_PADDING = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "NOT_TAKEN"}

Instruction: TypeAlias = "tuple[str, int, int]"
"""The name of an instruction, its argument, and the offset behind it."""


class Bytecode(dict[int, int]):
    """The offsets of the instructions of a code object by `lasti`, each read off the bytecode when it is first needed.

    The same call has other offsets in `f_lasti` before and after Python 3.11 and later specialize the code.

    Not by `dis`: to disassemble all code of a model takes longer than to run the model, and a call needs a few
    instructions only.
    """

    def __init__(self, code: CodeType) -> None:
        super().__init__()
        self._code = code
        self._assigned: dict[int, Assigned] = {}

    @cached_property
    def _bytes(self) -> bytes:
        return self._code.co_code

    @cached_property
    def _variables(self) -> tuple[str, ...]:
        code, cells = self._code, (*self._code.co_cellvars, *self._code.co_freevars)
        return (*code.co_varnames, *[name for name in cells if name not in code.co_varnames])

    def __missing__(self, lasti: int) -> int:
        at, names = lasti, dis.opname
        while at > 0 and (name := names[self._bytes[at]]) in _PADDING and name != "PRECALL":
            at -= 2  # a cache entry behind its instruction
        while names[self._bytes[at]] in _PADDING:
            at += 2  # where Python 3.11 runs specialized calls: in the instruction before the call itself
        self[lasti] = at
        return at

    def instructions(self, offset: int) -> Iterator[Instruction]:
        """Yields the instructions from `offset` on, without padding."""
        extended = 0
        for at in range(offset, len(self._bytes), 2):
            name, argument = dis.opname[self._bytes[at]], self._bytes[at + 1] | extended
            extended = argument << 8 if name == "EXTENDED_ARG" else 0
            if name not in _PADDING:
                yield name, argument, at + 2

    def variable(self, name: str, argument: int) -> str:
        """Returns the variable of an instruction, or the attribute."""
        if sys.version_info < (3, 11) and name == "STORE_DEREF":
            return (*self._code.co_cellvars, *self._code.co_freevars)[argument]
        return (self._code.co_names if name in _OF_NAMES else self._variables)[argument]

    def assigned(self, lasti: int) -> Assigned:
        """Returns the variable(s) that the result of the instruction at `lasti` is stored in."""
        if lasti not in self._assigned:
            self._assigned[lasti] = _read(self, self[lasti])
        return self._assigned[lasti]


_OF_NAMES = {"STORE_NAME", "STORE_GLOBAL", "STORE_ATTR"}


def assigned_variable(code: CodeType, lasti: int) -> Assigned:
    """Returns the variable(s) that the result of the instruction at `lasti` is stored in.

    Example:
        >>> def f(x):
        ...     y = abs(x)
        ...     return y
        >>> call = next(i for i in dis.get_instructions(f) if i.opname.startswith("CALL"))
        >>> assigned_variable(f.__code__, call.offset)
        'y'
    """
    return facts_of(code).offsets.assigned(lasti)


def _read(code: Bytecode, offset: int) -> Assigned:
    following = code.instructions(offset)
    next(following)  # the call itself
    # `a = f() if x else g()`: before Python 3.12, and in blocks, one branch jumps to the store of the other.
    while (first := next(following, None)) and first[0] == "JUMP_FORWARD":
        following = code.instructions(first[2] + 2 * first[1])
    while first and first[0] in _DUPLICATES:
        first = next(following, None)
    if not first:
        return None
    name, count, _ = first
    if name == "UNPACK_SEQUENCE":
        names = tuple(islice(_stored(code, following), count))
        return names if len(names) == count else None
    # `a, b = f(), g()`: the result of `g` is below that of `f` when they are stored.
    depth = {"ROT_TWO": 1, "ROT_THREE": 2, "SWAP": count - 1}.get(name, 0)
    stores = dropwhile(lambda instruction: instruction[0] in _SWAPS, concatenated([first], following))
    return next(islice(_stored(code, stores), depth, None), None)


def _stored(code: Bytecode, instructions: Iterable[Instruction]) -> Iterator[str | None]:
    """Yields the name for each value on the stack that these instructions store or drop before they do anything else.

    `self.keys = torch.cat(...)`: the attribute is the name that the user gave.
    """
    is_object_loaded = False
    for name, argument in _single_steps(instructions):
        if name in _STORES and not is_object_loaded:
            yield _usable(code.variable(name, argument))
        elif name == "POP_TOP" and not is_object_loaded:
            yield None
        elif name == "STORE_ATTR" and is_object_loaded:
            yield _usable(code.variable(name, argument))
            is_object_loaded = False
        elif name.startswith("LOAD_") and not is_object_loaded:
            is_object_loaded = True
        else:
            return


def _single_steps(instructions: Iterable[Instruction]) -> Iterator[tuple[str, int]]:
    """Yields names and arguments of instructions; Python 3.13 and later combine some of them."""
    for name, argument, _ in instructions:
        if name in _COMBINED:
            yield from zip(_COMBINED[name], divmod(argument, 16), strict=True)
        else:
            yield name, argument


@lru_cache(maxsize=4096)
def _usable(variable: str) -> str | None:
    return variable if variable.strip("_") and variable != "self" else None


# -- chains of call sites ----------------------------------------------------------------------------------------------

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_TORCH_MODULES = os.path.join(_TORCH, "nn", "modules", "")
_MODULE_MACHINERY = os.path.join(_TORCH_MODULES, "module.py")
_SHARDING = os.path.join(_TORCH, "distributed", "fsdp", "")
_PARALLEL = (  # what transformers puts around the forwards of modules that it shards: 5.0 to 5.4, and since
    os.path.join("transformers", "integrations", "tensor_parallel.py"),
    os.path.join("transformers", "distributed", ""),
)
_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def invoke(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a module's `forward`: the Python frame at which the walk up the stack ends."""
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
        offsets: The offsets of its instructions by `lasti`, and the variables: always the same object.
    """

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
        self.offsets = Bytecode(code)


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
        for code, _ in site.steps:
            if id(code) not in source_texts:
                linecache.checkcache(code.co_filename)
                source_texts[id(code)] = linecache.getlines(code.co_filename)
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


def hide_frames(error: Exception) -> None:
    """Hides the frames of this package, and for an error of ours, which names its path, all of the way down to it.

    IPython and pytest leave out frames with a variable of this name: in most tracebacks, they would be the majority.
    """
    is_ours = isinstance(error, GraphPatchError) and error.__cause__ is None  # else the user's code raised it
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    above: FrameType | None = sys._getframe(1)
    while above is not None and (above.f_code.co_filename == _MODULE_MACHINERY or is_own(above.f_code)):
        frames.append(above)
        above = above.f_back
    for frame in frames:
        # Of functions only: the variables of modules and classes stay.
        if (is_ours or is_own(frame.f_code)) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            frame.f_locals["__tracebackhide__"] = True
