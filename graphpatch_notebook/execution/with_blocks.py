"""What the user's Python frames tell about patch contexts: that a `with` block is over, or that there never was one.

An interrupt that comes when a block calls `__exit__`, before the first line of that, ends the block without it: no
Python code can take the patches back then. So whoever asks for the active contexts later looks whether the frame that
the block stands in still runs. Known limit: where that very frame goes on (its own code handles the interrupt), it
cannot be told, and the patches stay until it ends.
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
    """A `with` block that stands in the code of a function or of a cell.

    Args:
        frame: The frame that it stands in.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._thread = threading.get_ident()

    @staticmethod
    def around(frame: FrameType) -> WithBlock | None:
        """Returns the block that a frame is entering, or `None` where it is entered otherwise or may be suspended."""
        code, last = frame.f_code.co_code, frame.f_lasti
        is_with = code[last] in _WITH or (last >= 2 and code[last - 2] == _LOAD_SPECIAL)
        return WithBlock(frame) if is_with and not frame.f_code.co_flags & _SUSPENDS else None

    def is_over(self) -> bool:
        """Whether the frame has come to its end; unknown, so not, in other threads than its own."""
        if threading.get_ident() != self._thread:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is None


def throws_away(frame: FrameType) -> bool:
    """Whether a frame is dropping the value of an expression that nobody uses: a line that is nothing but a call."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _POP_TOP
