"""Whether paths and names are those that the terms of a query mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from graphpatch_notebook.paths import parse_path


def has_names(path: str, wanted: str) -> bool:
    """Whether `wanted`, one name or several with the dots between them, stands in `path` as whole names.

    Example:
        >>> has_names("h_0.mlp.act.mul", "mlp.act"), has_names("h_0.mlp.act", "ml"), has_names('out|"a.b"', "a.b")
        (True, False, True)
    """
    if '"' not in path:
        return wanted in path and f".{wanted.replace('|', '.')}." in f".{path.replace('|', '.')}."
    parsed = parse_path(path)
    names = [*parsed.names, *parsed.dig]
    parts = re.split(r"[.|]", wanted)
    return wanted in names or any(names[i : i + len(parts)] == parts for i in range(len(names)))


def has_parts(text: str, parts: Iterable[str]) -> bool:
    """Whether `text` has all parts in it, one behind the other: what `*` between them means.

    Example:
        >>> has_parts("h_0.mlp.act", ["h_", ".act"]), has_parts("h_0.mlp.act", ["act", "mlp"])
        (True, False)
    """
    start = 0
    for part in parts:
        found = text.find(part, start)
        if found < 0:
            return False
        start = found + len(part)
    return True


def is_among(names: Sequence[str], pattern: str) -> Callable[[int], bool]:
    """Returns what tells of a position whether the name there is the one meant; `*` stands for any letters."""
    if "*" not in pattern:
        return lambda at: names[at] == pattern
    parts = pattern.split("*")
    wanted = {name for name in set(names) if name and _is_made(name, parts)}
    return lambda at: names[at] in wanted


def _is_made(name: str, parts: Sequence[str]) -> bool:
    """Whether a name is made of the parts, two or more in order, with any letters between them."""
    first, *middle, last = parts
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    return has_parts(name[len(first) : len(name) - len(last)], middle)
