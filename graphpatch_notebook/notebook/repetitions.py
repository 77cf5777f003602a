r"""Which regular expressions a search takes: none that tries so many ways to match that the kernel or the page hangs.

js/src/repetitions.ts is the same for the widget; tests/notebook/test_search_parity.py sees to that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# How often something may be repeated and still count as written out.
_FEW = 9
# By number of open repetitions: the most letters of a path, such that some 10**9 steps are enough for any pattern.
_LONGEST = (None, 40_000, 1_800, 390, 160, 100, 80)

_TOKEN = re.compile(
    r"""(?P<skipped> \(\?\#[^)]*\) | \(\?[aiLmsux]+\) )
      | (?P<item> \\. | \[\^?\]?(?:\\.|[^\]\\])*\] | \(\?P=[^)]*\) )
      | (?P<opening> \(\?P<[^>]*> | \(\?\([^)]*\) | \(\?<[=!] | \(\?[aiLmsux-]*[:=!>] | \( )
      | (?P<closing> \) )
      | (?P<choice> \| )
      | (?P<count> (?: [*+?] | \{[0-9]+\} | \{[0-9]*,[0-9]*\} ) [?+]? )
      | (?P<letter> . )""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(slots=True)
class _Group:
    """What is in a group: how many open repetitions, and whether there is more than one way to go through it."""

    repetitions: int = 0
    varies: bool = False


def open_repetitions(pattern: str) -> int:
    r"""Returns how many open repetitions, such as `*`, `+` and `{2,}`, a regular expression has.

    Raises:
        ValueError: A group that repeats or chooses is itself repeated, or there are too many repetitions: the time that
            these take is beyond all bounds.

    Example:
        >>> open_repetitions(r"h_\d+\.(attn|mlp)\..*")
        2
    """
    groups, last = [_Group()], None
    for token in _TOKEN.finditer(pattern):
        text, kind = token[0], token.lastgroup
        if kind == "opening":
            groups.append(_Group())
        elif kind == "choice":
            groups[-1].varies = True
        elif kind == "count":
            _count(pattern, *_bounds(text), groups[-1], last)
        elif kind == "closing" and len(groups) > 1:
            last = groups.pop()
            groups[-1].repetitions += last.repetitions
            groups[-1].varies |= last.varies
            continue
        last = None
    repetitions = sum(group.repetitions for group in groups)
    if repetitions >= len(_LONGEST):
        raise ValueError(
            f"this regular expression may take forever: /{pattern}/ has {repetitions} open repetitions, at most "
            f"{len(_LONGEST) - 1} are searched; write several terms"
        )
    return repetitions


def check_length(pattern: str, repetitions: int, path: str) -> None:
    """Checks that a path is not too long for a pattern with so many open repetitions.

    Raises:
        ValueError: It is.
    """
    longest = _LONGEST[repetitions]
    if longest is not None and len(path) > longest:
        raise ValueError(
            f"/{pattern}/ has {repetitions} open repetition{'s' * (repetitions != 1)}, which may take forever on the "
            f"{len(path):,} letters of {path[:60]}…; leave this path out with another term, or write fewer of * + {{}}"
        )


def _count(pattern: str, least: int, most: float, around: _Group, group: _Group | None) -> None:
    """Adds to a group that the item in it, perhaps a group, is repeated."""
    if group is not None and group.varies and most > _FEW:
        raise ValueError(
            f"this regular expression may take forever: /{pattern}/ repeats a group that itself repeats or chooses; "
            "write [ab]* for (a|b)*, or how often: (...){2}"
        )
    if group is not None and 1 < most <= _FEW:
        around.repetitions += group.repetitions * (int(most) - 1)
    if least != most:
        around.varies = True
        around.repetitions += most > _FEW


def _bounds(count: str) -> tuple[int, float]:
    """Returns how often something is repeated, at least and at most, from `*`, `{2,}` and the like."""
    if count[0] != "{":
        return int(count[0] == "+"), 1 if count[0] == "?" else float("inf")
    least, comma, most = count.rstrip("?+")[1:-1].partition(",")
    return int(least or 0), float(most or "inf") if comma else int(least)
