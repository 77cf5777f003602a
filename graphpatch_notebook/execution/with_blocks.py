"""Reads from the user's Python frames whether a `with` block has ended, or whether there is a block at all.

An interrupt during the call of `__exit__`, before its first line, ends the block without it: no Python code can take
the patches back then. So each later query of the active contexts checks whether the frame with the block still runs.
Known limit: if that same frame continues (its own code handles the interrupt), the patches stay until it ends.
"""

from __future__ import annotations

import inspect
import sys
import threading
from opcode import opmap
from types import FrameType

# Python 3.10; 3.11 to 3.13; from 3.14 on an ordinary call follows the last of these.
_WITH = {opmap.get("SETUP_WITH"), opmap.get("BEFORE_WITH")} - {None}
_LOAD_SPECIAL = opmap.get("LOAD_SPECIAL")
_POP_TOP = opmap["POP_TOP"]
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class WithBlock:
    """A `with` block in the code of a function or of a cell.

    Args:
        frame: The Python frame of that code.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._thread = threading.get_ident()

    @staticmethod
    def around(frame: FrameType) -> WithBlock | None:
        """Returns the block that a frame is entering; `None` if it does not use `with`, or may be suspended."""
        code, last = frame.f_code.co_code, frame.f_lasti
        is_with = code[last] in _WITH or (last >= 2 and code[last - 2] == _LOAD_SPECIAL)
        return WithBlock(frame) if is_with and not frame.f_code.co_flags & _SUSPENDS else None

    def is_over(self) -> bool:
        """Whether the frame has ended; `False` in other threads than its own, where that is not known."""
        if threading.get_ident() != self._thread:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is None


def throws_away(frame: FrameType) -> bool:
    """Whether a frame is dropping the unused value of an expression: a line that is only a call."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _POP_TOP
