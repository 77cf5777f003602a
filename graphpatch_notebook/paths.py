"""The text of node paths: parse, format, find the nearest, tell them from names of components (pure text, no torch).

A path is node names joined by dots, then optionally `|` and keys into the container that the last node holds:
`transformer.h_0.attn.output|sub_0`. A name with characters that mean something here is written as a JSON string:
`output|"a.b"`.
"""

from __future__ import annotations

import difflib
import json
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

_PLAIN = re.compile(r'[^."|\s\[\]]+')


@dataclass(frozen=True, slots=True)
class ParsedPath:
    """A parsed node path: `names` lead to the node, `dig` into its value."""

    names: tuple[str, ...]
    dig: tuple[str, ...] = ()

    def __str__(self) -> str:
        return format_path(self.names, self.dig)


def format_segment(name: str) -> str:
    """Returns `name` as a path writes it: plain where that is unambiguous, else as a JSON string."""
    # Nearly all names are identifiers, which is quicker to see.
    return name if name.isidentifier() or _PLAIN.fullmatch(name) else json.dumps(name)


def format_path(names: Iterable[str], dig: Iterable[str] = ()) -> str:
    """Returns the text of a path.

    Example:
        >>> format_path(["h_0", "output"], ["sub_0", "a.b"])
        'h_0.output|sub_0."a.b"'
    """
    text = ".".join(map(format_segment, names))
    dug = ".".join(map(format_segment, dig))
    return f"{text}|{dug}" if dug else text


def parse_path(text: str) -> ParsedPath:
    """Parses the text of a path.

    Raises:
        ValueError: The text is not a path; the message shows where it stops being one.

    Example:
        >>> parse_path("h_0.output|sub_0")
        ParsedPath(names=('h_0', 'output'), dig=('sub_0',))
    """
    segments: tuple[list[str], list[str]] = ([], [])
    side = position = 0
    while True:
        name, position = _read_segment(text, position)
        segments[side].append(name)
        if position == len(text):
            return ParsedPath(tuple(segments[0]), tuple(segments[1]))
        separator, position = text[position], position + 1
        if separator == "|" and side == 0:
            side = 1
        elif separator != ".":
            raise ValueError(f"not a node path: {text!r} (unexpected {separator!r} at position {position - 1})")


def _read_segment(text: str, position: int) -> tuple[str, int]:
    if text.startswith('"', position):
        try:
            return json.JSONDecoder().raw_decode(text, position)
        except json.JSONDecodeError:
            raise ValueError(f"not a node path: {text!r} (the quote at position {position} does not end)") from None
    if match := _PLAIN.match(text, position):
        return match.group(), match.end()
    raise ValueError(f"not a node path: {text!r} (a name is missing at position {position})")


def is_pattern(text: str) -> bool:
    """Whether the text of a path is a pattern for several paths: it contains `*`."""
    return "*" in text


def path_pattern(text: str) -> re.Pattern[str]:
    """Returns the regular expression for a pattern: `*` is any text within a name, `**` any text with dots and bars.

    Example:
        >>> pattern = path_pattern("**.h_*.output")
        >>> [bool(pattern.fullmatch(path)) for path in ("h_0.output", "a.b.h_12.output", "h_0.mlp.output")]
        [True, True, False]
    """
    parts = re.split(r"(\*\*\.|\*\*|\*)", text)
    return re.compile("".join(_PATTERN_PARTS.get(part) or re.escape(part) for part in parts))


_PATTERN_PARTS = {"**.": r"(?:.*\.)?", "**": r".*", "*": r"[^.|]*"}


def python_path(start: str, names: Iterable[str]) -> str:
    """Returns the Python expression that leads along `names`, from the expression `start` for a `NodePath`.

    Example:
        >>> python_path("pg.graph", ["h_0", "lambda", "_code"])
        "pg.graph.h_0['lambda']['_code']"
    """
    for name in names:
        is_attribute = name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
        start += f".{name}" if is_attribute else f"[{name!r}]"
    return start


def nearest(text: str, candidates: Sequence[str], count: int = 3) -> list[str]:
    """Returns up to `count` of the candidates that are most similar to `text`, best first.

    Example:
        >>> nearest("mlp.act.mul_9", ["mlp.act.mul_3", "mlp.c_fc.input", "attn.c_fc.weight"], count=1)
        ['mlp.act.mul_3']
    """
    # Comparing 50,000 paths letter by letter takes seconds: rank by shared parts first, then look closer.
    shared = shared_parts(text)

    # Of mul_1 ... mul_8, all as like mul_9 by their letters, the last is the nearest.
    def likeness(candidate: str) -> tuple[float, int]:
        distance = abs(_last_number(text) - _last_number(candidate))
        return difflib.SequenceMatcher(None, text, candidate).ratio(), -distance

    short_list = sorted(candidates, key=lambda candidate: shared(_parts(candidate)), reverse=True)[:200]
    return sorted(short_list, key=likeness, reverse=True)[:count]


def shared_parts(text: str) -> Callable[[Sequence[str]], float]:
    """Returns a function of the names in another path: how much of the path `text` they share.

    Example:
        >>> shared = shared_parts("h_0.mlp.output")
        >>> shared(("h_0", "mlp", "act")), shared(("h_1", "attn", "output"))
        (3.0, 2.0)
    """
    parts = _parts(text)
    wanted = set(parts)

    def shared(theirs: Sequence[str]) -> float:
        common = len(wanted.intersection(theirs))
        if not common:
            return 0.0
        leading = next((i for i, (a, b) in enumerate(zip(parts, theirs, strict=False)) if a != b), len(parts))
        return common + 0.5 * leading + (theirs[-1] == parts[-1])

    return shared


def _parts(text: str) -> list[str]:
    return text.replace("|", ".").split(".")


def _last_number(text: str) -> int:
    match = re.search(r"[0-9]{1,9}$", text)
    return int(match.group()) if match else 0


def call_name(attribute_path: str) -> str:
    """Returns the node name of calls of the submodule at `attribute_path`.

    Example:
        >>> call_name("h.3"), call_name("0"), call_name("a-b")
        ('h_3', 'sub_0', 'sub_a_b')
    """
    name = attribute_path.replace(".", "_")
    return name if name.isidentifier() else "sub_" + re.sub(r"\W", "_", name)


def unique_name(base: str, taken: Iterable[str] | dict[str, object] | set[str]) -> str:
    """Returns the first of `base`, `base_1`, `base_2`, ... that is not taken."""
    return base if base not in taken else next(n for n in numbered(base) if n not in taken)


def numbered(base: str) -> Iterator[str]:
    """Yields `base_1`, `base_2`, ..."""
    number = 0
    while True:
        number += 1
        yield f"{base}_{number}"


def is_component_name(text: str) -> bool:
    """Whether a text is a component name rather than a node path.

    Example:
        >>> [is_component_name(text) for text in ("layers[3].attn.z", "**.heads[1].z", "h_3.attn.output")]
        [True, True, False]
    """
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    return bool(re.search(r"(?:^|\.)(?:layers\[|@[\w*]|\*.*\[)", outside))
