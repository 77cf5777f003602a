"""Reads the bytecode around a call: which instruction makes the call, and which variable gets its result.

The same idea as in the `executing` library (https://github.com/alexmojaki/executing): the instruction after the call
is the store. Only offsets are read; nothing runs.
"""

from __future__ import annotations

import bisect
import dis
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import dropwhile, islice
from types import CodeType
from typing import Any, TypeAlias

Assigned: TypeAlias = "str | tuple[str | None, ...] | None"
"""A variable; one for each value of an unpacked sequence; or `None` where the result has no variable."""

_STORES = {"STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL", "STORE_FAST_MAYBE_NULL"}
_COMBINED = {
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
}
_DUPLICATES = {"COPY", "DUP_TOP"}  # `a = b = f()` and `(a := f())`
_PADDING = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "NOT_TAKEN"}


class _Instructions:
    """The instructions of a code object, kept with it so that its `id` stays its own."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.instructions = [i for i in dis.get_instructions(code) if i.opname not in _PADDING]
        self.offsets = [i.offset for i in self.instructions]
        self.early_calls = {i.offset for i in dis.get_instructions(code) if i.opname == "PRECALL"}
        self.assigned: dict[int, Assigned] = {}

    def position(self, lasti: int) -> int:
        """Returns the index of the instruction at `lasti`."""
        while lasti >= 0 and lasti not in self.early_calls and lasti not in self.offsets:
            lasti -= 2  # a cache entry behind its instruction
        # Python 3.11 runs specialised calls in the instruction before the call itself.
        is_early = lasti in self.early_calls
        return bisect.bisect_right(self.offsets, lasti) - (0 if is_early else 1)


# Hashing a code object hashes its whole content: look them up by id, and keep them alive.
_codes: dict[int, _Instructions] = {}


def _known(code: CodeType) -> _Instructions:
    known = _codes.get(id(code))
    if known is None:
        known = _codes[id(code)] = _Instructions(code)
    return known


def instruction_offset(code: CodeType, lasti: int) -> int:
    """Returns the offset of the instruction at `lasti`, also if the interpreter has specialized it.

    The same call has other offsets in `f_lasti` before and after Python 3.11 and later specialize the code.
    """
    known = _known(code)
    return known.offsets[known.position(lasti)]


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
    known = _known(code)
    if lasti not in known.assigned:
        known.assigned[lasti] = _read(known, lasti)
    return known.assigned[lasti]


def _read(code: _Instructions, lasti: int) -> Assigned:
    position = code.position(lasti) + 1
    following = code.instructions[position : position + 40]
    # `a = f() if x else g()`: before Python 3.12, and in blocks, one branch jumps to the store of the other.
    while following and following[0].opname == "JUMP_FORWARD":
        position = bisect.bisect_left(code.offsets, following[0].argval)
        following = code.instructions[position : position + 40]
    while following and following[0].opname in _DUPLICATES:
        following = following[1:]
    if not following:
        return None
    count = int(following[0].arg or 0)
    if following[0].opname != "UNPACK_SEQUENCE":
        # `a, b = f(), g()`: the result of `g` is below that of `f` when they are stored.
        depth = {"ROT_TWO": 1, "ROT_THREE": 2, "SWAP": count - 1}.get(following[0].opname, 0)
        stores = dropwhile(lambda instruction: instruction.opname in ("ROT_TWO", "ROT_THREE", "SWAP"), following)
        return next(islice(_stored(stores), depth, None), None)
    names = tuple(islice(_stored(following[1:]), count))
    return names if len(names) == count else None


def _stored(instructions: Iterable[dis.Instruction]) -> Iterator[str | None]:
    """Yields the name for each value on the stack that these instructions store or drop before they do anything else.

    `self.keys = torch.cat(...)`: the attribute is the name that the user gave.
    """
    is_object_loaded = False
    for name, argument in _single_steps(instructions):
        if name in _STORES and not is_object_loaded:
            yield _usable(argument)
        elif name == "POP_TOP" and not is_object_loaded:
            yield None
        elif name == "STORE_ATTR" and is_object_loaded:
            yield _usable(argument)
            is_object_loaded = False
        elif name.startswith("LOAD_") and not is_object_loaded:
            is_object_loaded = True
        else:
            return


def _single_steps(instructions: Iterable[dis.Instruction]) -> Iterator[tuple[str, Any]]:
    """Yields names and arguments of instructions; Python 3.13 and later combine some of them."""
    for instruction in instructions:
        if instruction.opname in _COMBINED:
            yield from zip(_COMBINED[instruction.opname], instruction.argval, strict=True)
        else:
            yield instruction.opname, instruction.argval


@lru_cache(maxsize=4096)
def _usable(variable: str) -> str | None:
    return variable if variable.strip("_") and variable != "self" else None
