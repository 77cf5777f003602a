"""What the names of a capture mean, as texts: by these, captures of one model in several processes are compared.

A name is a label for a place in a run: a line of code, with the number of its earlier runs. If a model iterates over a
set, say, the same label is another value in another process. So wherever names go from one process to another, or into
a file, their meanings go with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from graphpatch_notebook.capture.records import Node, Ref, Site, Structure
from graphpatch_notebook.inspection.resolution import NodeMap, Target, Unresolvable, resolve
from graphpatch_notebook.paths import format_path, format_segment
from graphpatch_notebook.values import children, key_text

Facts: TypeAlias = dict[str, str]
"""What is known of a value, by what it is about: its operation, the line of source, arguments."""
Meanings: TypeAlias = dict[str, dict[str, Facts]]
"""The facts about each value, by the path of its graph and its name there, in order of execution. JSON data."""
_READS, _TEXT = "reads ", "text "  # facts about arguments: names of values, and texts
_CALLER = "caller "  # about the lines that call the function of the line: that of `forward` is number 0
_MOST = 3  # how many names a message shows
_DEPTH = 50  # how many values in front of each other are compared


def meanings(nodes: NodeMap, used: Iterable[Target] | None = None) -> Meanings:
    """Returns what the names of a capture mean, also of those that cannot be patched.

    The facts about a name are its operation, the line of source that calls it and those that call the function of this
    line (as text: files and line numbers differ between machines), and if several values share these, the arguments in
    which they differ: texts, and names of values. Shapes, numbers and devices are not among them, so captures on other
    example inputs, or on other machines, have the same.

    Args:
        nodes: The names: `pg.nodes`. `kept_for(pg.nodes, meanings)` computes all facts once.
        used: The values whose meanings are asked for: the result has the graphs that they are in, and those around
            these, with facts about these values and what they are computed from. Default: everything.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.ones(1, 2))
        >>> meanings(pg.nodes)["sub_0"]["linear"]
        {'operation': 'op linear', 'line': 'forward: return F.linear(input, self.weight, self.bias)'}
    """
    lines: dict[Site | None, Facts] = {None: {}}
    result: Meanings = {}
    around = None if used is None else {id(frame) for target in used for frame in target.frame.frames_above()}
    for frame in nodes.root.walk():
        if around is not None and id(frame) not in around:
            continue
        facts = result[format_path(frame.path)] = {}
        alike: dict[str, list[Node]] = {}
        for node in frame.nodes:
            if not node.is_size:
                found = facts[format_segment(node.name)] = _facts(node, lines)
                alike.setdefault(repr(found), []).append(node)
        for several in alike.values():
            given = [dict(_arguments(dict(enumerate(node.args)) | node.kwargs, "")) for node in several]
            for node, own in zip(several, given, strict=True):
                differing = {what for what in own if any(own[what] != other.get(what) for other in given)}
                facts[format_segment(node.name)] |= {what: own[what] for what in own if what in differing}
    if used is not None:
        wanted = set(_walked(result, result, used))
        result = {
            path: {name: facts if (path, name) in wanted else {} for name, facts in found.items()}
            for path, found in result.items()
        }
    return result


def _facts(node: Node, lines: dict[Site | None, Facts]) -> Facts:
    if node.site is not None and node.site not in lines:
        lines[node.site] = _lines(node.site)
    return {"operation": f"{node.kind} {node.target if isinstance(node.target, str) else node.op}"} | lines[node.site]


def _lines(site: Site) -> Facts:
    """Returns the lines of a call from its module's `forward` inward, without decorators; a process may have no source.

    One helper computes several values: a call of it that one capture lacks gives its name there to the next.
    """
    steps = site.source_lines()
    first = next((number for number, line in enumerate(steps) if line.function == "forward"), 0)
    *callers, last = (f"{line.function}: {line.text}" if line.text else "" for line in steps[first:])
    named = {"line": last, "callers": str(len(callers) or "")}
    named |= {f"{_CALLER}{number}": text for number, text in enumerate(callers)}
    return {what: text for what, text in named.items() if text}


def _arguments(value: Any, slot: str) -> Iterator[tuple[str, str]]:
    """Yields the names of values, and the texts, in arguments, by where they are."""
    if isinstance(value, Ref):
        yield _READS + slot, format_path((value.node.name,), map(key_text, value.dig))
    elif isinstance(value, str):
        yield _TEXT + slot, repr(value)
    else:
        inside = value.children if isinstance(value, Structure) else children(value)
        for key, child in inside or ():
            yield from _arguments(child, f"{slot}.{key}" if slot else str(key))


def targets_of(nodes: NodeMap, paths: Iterable[str]) -> list[Target]:
    """Returns the values at paths. What a capture does not have is left out."""
    found = []
    for path in paths:
        with suppress(Unresolvable):
            found.append(resolve(nodes.root, path))
    return found


def differing_names(here: Meanings, there: Meanings, used: Iterable[Target] | None = None) -> str:
    """Returns which names mean something else in two captures of a model, as a text; empty if there are none.

    What only one of them has does not count: with a mask, for example, a model computes more.

    Args:
        here: The meanings in one of them.
        there: The meanings in the other.
        used: The values whose names are to mean the same, and so what they are computed from. Default: all.

    Example:
        >>> one = {"": {"x": {"operation": "op mul"}, "y": {"operation": "op add"}}}
        >>> two = {"": {"x": {"operation": "op add"}, "z": {"operation": "op sub"}}}
        >>> differing_names(one, two), differing_names(one, one)
        ("'x' (operation: op mul here, op add there)", '')
    """
    names = [(path, name) for path in here for name in here[path]] if used is None else _walked(here, there, used)
    found = []
    for path, name in names:
        others = there.get(path, {})
        if name in others and (facts := _differing(here[path], others, name, name)):
            listed = "; ".join(f"{what}: {here[path][name][what]} here, {others[name][what]} there" for what in facts)
            found.append(f"{f'{path}.{name}' if path else name!r} ({listed})")
    return ", ".join(found[:_MOST]) + (f", and {len(found) - _MOST} more" if len(found) > _MOST else "")


def _differing(here: dict[str, Facts], there: dict[str, Facts], name: str, other: str, depth: int = 0) -> Sequence[str]:
    """Returns in which facts the value of `name` in a graph differs from that of `other` in the other capture of it.

    A value that both read by the same name is compared for itself, unless two other names are compared for it.
    """
    one, two, found = here[name], there[other], []
    for what in one.keys() & two.keys():
        read, also = (each[what].partition("|")[0] for each in (one, two))
        is_read = what.startswith(_READS) and {read, also} <= here.keys() & there.keys()
        if is_read and (read != also or depth) and depth < _DEPTH:
            found += [what] if _differing(here, there, read, also, depth + 1) else []
        elif one[what] != two[what] and (is_read or not what.startswith(_READS)):
            found.append(what)
    return sorted(found)


def _walked(here: Meanings, there: Meanings, used: Iterable[Target]) -> Iterable[tuple[str, str]]:
    """Returns the names of values, of the calls around them, and of what both captures compute these from."""
    todo = []
    for target in used:
        todo += [(target.frame.path, target.node.name)]
        todo += [(frame.path[:-1], frame.path[-1]) for frame in target.frame.frames_above() if frame.path]
    names = [(format_path(path), format_segment(name)) for path, name in todo]
    for path, name in names:  # which grows
        one, two = (each.get(path, {}).get(name, {}) for each in (here, there))
        reads = [what for what in one if what.startswith(_READS) and two.get(what) == one[what]]
        more = [(path, one[what].partition("|")[0]) for what in reads]
        names += [each for each in more if each not in names]
    return names
