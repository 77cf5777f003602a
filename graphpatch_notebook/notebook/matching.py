"""Whether paths and names are those that the terms of a query mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from graphpatch_notebook.notebook.labels import visible
from graphpatch_notebook.notebook.repetitions import check_length, open_repetitions
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


def regex_test(paths: Sequence[str], regex: re.Pattern[str]) -> Callable[[int], bool]:
    """Returns what tells of a position whether the path there is found; raises `ValueError` where it is too long."""
    repetitions = open_repetitions(regex.pattern)

    def is_found(at: int) -> bool:
        try:
            check_length(regex.pattern, repetitions, paths[at])
        except ValueError as error:
            raise ValueError(visible(str(error))) from None
        return regex.search(paths[at]) is not None

    return is_found


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
    inside = name[len(first) : len(name) - len(last)]
    for part in middle:
        _, found, inside = inside.partition(part) if part else ("", "*", inside)
        if not found:
            return False
    return True
