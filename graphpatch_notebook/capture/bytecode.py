"""What the bytecode around a call says: which instruction it is, and which variable its result is assigned to.

The same idea as in the `executing` library (https://github.com/alexmojaki/executing): the instruction after the call
is the store. Only offsets are looked at, nothing is run.
"""

from __future__ import annotations

import bisect
import dis
from functools import lru_cache
from types import CodeType
from typing import TypeAlias

Assigned: TypeAlias = "str | tuple[str | None, ...] | None"
"""A variable; one for each value of an unpacked sequence; or `None` where the result has no variable."""

_STORES = {"STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL", "STORE_FAST_MAYBE_NULL"}
_DUPLICATES = {"COPY", "DUP_TOP"}  # `a = b = f()` and `(a := f())`
_PADDING = {"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "NOT_TAKEN"}


class _Code:
    """The instructions of a code object, kept with it so that its `id` stays its own."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.instructions = [i for i in dis.get_instructions(code) if i.opname not in _PADDING]
        self.offsets = [i.offset for i in self.instructions]
        self.early_calls = {i.offset for i in dis.get_instructions(code) if i.opname == "PRECALL"}
        self.assigned: dict[int, Assigned] = {}

    def position(self, lasti: int) -> int:
        """Returns the index of the instruction that `lasti` means."""
        while lasti >= 0 and lasti not in self.early_calls and lasti not in self.offsets:
            lasti -= 2  # a cache entry behind its instruction
        # Python 3.11 runs specialised calls in the instruction before the call itself.
        is_early = lasti in self.early_calls
        return bisect.bisect_right(self.offsets, lasti) - (0 if is_early else 1)


# Hashing a code object hashes its whole content: look them up by id, and keep them alive.
_codes: dict[int, _Code] = {}


def _known(code: CodeType) -> _Code:
    known = _codes.get(id(code))
    if known is None:
        known = _codes[id(code)] = _Code(code)
    return known


def instruction_offset(code: CodeType, lasti: int) -> int:
    """Returns the offset of the instruction that `lasti` means, however the interpreter has specialised it.

    The same call stands at other offsets of `f_lasti` before and after Python 3.11 and later have warmed up.
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


def _read(code: _Code, lasti: int) -> Assigned:
    position = code.position(lasti) + 1
    following = code.instructions[position : position + 40]
    while following and following[0].opname in _DUPLICATES:
        following = following[1:]
    if not following:
        return None
    first = following[0]
    if first.opname == "UNPACK_SEQUENCE":
        names = [name for instruction in following[1:] for name in _stored(instruction)]
        count = int(first.arg or 0)
        plain = _leading_stores(following[1:])
        return tuple(names[:count]) if plain >= count else None
    stored = _stored(first) or _stored_attribute(following)
    return stored[0] if stored else None


def _leading_stores(instructions: list[dis.Instruction]) -> int:
    count = 0
    for instruction in instructions:
        stored = _stored(instruction)
        if not stored:
            break
        count += len(stored)
    return count


def _stored(instruction: dis.Instruction) -> list[str | None]:
    name = instruction.opname
    if name in _STORES:
        return [_usable(instruction.argval)]
    if name == "STORE_FAST_STORE_FAST":
        return [_usable(v) for v in instruction.argval]
    if name == "STORE_FAST_LOAD_FAST":
        return [_usable(instruction.argval[0])]
    if name in ("STORE_ATTR", "POP_TOP"):
        return [None]
    return []


def _stored_attribute(following: list[dis.Instruction]) -> list[str | None]:
    """`self.keys = torch.cat(...)`: the attribute is the name that the user gave."""
    if len(following) > 1 and following[0].opname.startswith("LOAD_FAST") and following[1].opname == "STORE_ATTR":
        return [_usable(following[1].argval)]
    return []


@lru_cache(maxsize=4096)
def _usable(variable: str) -> str | None:
    return variable if variable.strip("_") and variable != "self" else None
