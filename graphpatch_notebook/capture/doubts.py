"""Why a graph, a record of one run, may not do what its module does: typed reasons; `str` returns their text."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Reason(enum.Enum):
    """A kind of doubt; its value is the text about the module in messages."""

    READS_VALUE = "reads a value into Python ({what}: {line})"
    COUNTS_PARTS = "reads a value into Python ({what}: the number of parts depends on values)"
    USES_OBJECT = "uses an object ({what}) that is not one of its inputs"
    IS_GIVEN_OBJECT = "it is given an object ({what}), whose contents are unknown"
    HOOKS_ARE_LEFT_OUT = "hooks on a {what} that it calls would not run"
    HOLDS_UNKNOWN_VALUE = "it uses a value ({what}) that is not computed in it, and not held by its module or its code"
    SWITCHES_MODES = "switches autocast or inference mode, which a graph does not record"
    HANDLES_ERROR = "a call of {what!r} raised an error, which was handled"
    WRITES_PARAMETER = "writes into a parameter ({what})"
    ROUNDS = (
        "it holds the steps of {what}, as ExtractionOptions(decompose=...) asks, which equal the function itself only "
        "within rounding"
    )


@dataclass(frozen=True, slots=True)
class Doubt:
    """One reason why the graph of a frame may not do what its module does.

    Attributes:
        reason: The kind.
        what: The name of the operation, class, module or function that it is about.
        line: The user's line of source.
    """

    reason: Reason
    what: str = ""
    line: str = ""

    def __str__(self) -> str:
        return self.reason.value.format(what=self.what, line=self.line)


def listed_doubts(doubts: list[Doubt]) -> str:
    """Returns doubts as one text."""
    return "; ".join(map(str, doubts))
