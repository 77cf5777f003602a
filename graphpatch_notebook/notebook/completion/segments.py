"""Completes a node path, one segment at a time: from what was typed to what may stand there next."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from graphpatch_notebook.inspection.locations import Location, is_child
from graphpatch_notebook.inspection.resolution import is_patchable
from graphpatch_notebook.notebook.display.labels import visible
from graphpatch_notebook.paths import format_segment
from graphpatch_notebook.values import ContainerSpec, ObjectSpec, ScalarSpec, ValueSpec, leaves

MOST_OFFERS = 500

_PLAIN = re.compile(r'[^."|\s\[\]]*')


@dataclass(frozen=True, slots=True)
class Offer:
    """What may stand where the cursor is.

    Attributes:
        text: The text.
        label: What it is, in a word or two.
    """

    text: str
    label: str


@dataclass(frozen=True, slots=True)
class Offers:
    """What may stand at the end of a text.

    Attributes:
        start: Where in the text begins what an offer replaces.
        offers: The offers, best first.
    """

    start: int
    offers: list[Offer]


@dataclass(frozen=True, slots=True)
class _Typed:
    """A path that ends anywhere: the segments before the last separator, each with the separator behind it."""

    complete: list[tuple[str, str]]
    start: int
    last: str
    is_quoted: bool


def next_segments(place: Location, typed: str, *, patchable: bool, limit: int = MOST_OFFERS) -> Offers | None:
    """Returns what the last segment of a path may become.

    Args:
        place: Where the path begins: the root, or a place that it is relative to.
        typed: The path as far as it was typed.
        patchable: Whether it is to lead to a value that can be patched: then graphs and containers come with the
            separator that leads on into them. Else graphs, containers and objects are meant too.
        limit: The most offers.
    """
    parsed = _parsed(typed)
    if parsed is None:
        return None
    here = place
    for name, separator in parsed.complete:
        child = here.child(name)
        if child is None or (separator == "|") != (child.graph is None and not child.dig):
            return None
        here = child
    children = list(islice(_children(here, parsed.last, patchable), limit))
    children = _in_order(here, parsed.last, children, patchable)[:limit]
    return Offers(parsed.start, [_offer(child, parsed.is_quoted, patchable) for child in children])


def _in_order(here: Location, prefix: str, children: list[Location], patchable: bool) -> list[Location]:
    """Returns the children: the output first, which most people look for, and inputs that were not given last."""
    if here.graph is None:
        return children
    name = here.graph.output_node.name
    output = here.child(name) if name.startswith(prefix) else None
    if output is not None and patchable and not _leads_to_patchable(output):
        output = None
    others = [child for child in children if child.names[-1] != name]
    others.sort(key=lambda child: child.spec == ScalarSpec(None))
    found = [child for child in children if child.names[-1] == name] if output is None else [output]
    return [*found, *others]


def _parsed(typed: str) -> _Typed | None:
    """Returns the path taken apart; `None` where it is none, whatever follows."""
    complete: list[tuple[str, str]] = []
    position = 0
    while True:
        start = position
        is_quoted = typed.startswith('"', position)
        if is_quoted:
            try:
                name, position = json.JSONDecoder().raw_decode(typed, position)
            except json.JSONDecodeError:
                return _Typed(complete, start, _unfinished(typed[position:]), True)
        else:
            match = _PLAIN.match(typed, position)
            name, position = (match.group(), match.end()) if match else ("", position)
        if position == len(typed):
            return _Typed(complete, start, name, is_quoted)
        if typed[position] not in ".|" or not (name or is_quoted):
            return None
        complete.append((name, typed[position]))
        position += 1


def _unfinished(quoted: str) -> str:
    """Returns what stands in a JSON string that does not end yet."""
    try:
        return str(json.loads(quoted + '"'))
    except json.JSONDecodeError:
        return quoted[1:]  # it ends within an escape: what is there so far fits nothing


def _children(here: Location, prefix: str, patchable: bool) -> Iterator[Location]:
    """Yields the children that begin with `prefix`; where there are none, others that it may mean."""
    folded = prefix.casefold()
    if here.graph is not None and folded not in "\n".join(here.graph.names).casefold():
        return  # quicker than to ask each of 50,000 names

    names = [name for name in _all_names(here) if folded in name.casefold()] if prefix else _all_names(here)
    begin = (name for name in names if name.startswith(prefix))
    found = False
    for child in _meant(here, begin, patchable):
        found = True
        yield child
    if found or not prefix:
        return
    # One after the other, as far as somebody takes them: there may be tens of thousands.
    first = [name for name in names if name.casefold().startswith(folded)]
    inside = (name for name in names if not name.casefold().startswith(folded))
    for child in _meant(here, itertools.chain(first, inside), patchable):
        found = True
        yield child
    if not found and here.graph is not None:  # plumbing is for those who ask for it by its name
        nodes = here.graph.names
        plumbing = (here.child(name) for name in names if name.startswith(prefix) and nodes[name].is_plumbing)
        yield from (child for child in plumbing if child is not None and _leads_to_patchable(child))


def _all_names(here: Location) -> list[str]:
    """Returns the names there, in order of execution; in a graph those of plumbing and constants, too."""
    return [node.name for node in here.graph.nodes] if here.graph is not None else here.children()


def _meant(here: Location, names: Iterable[str], patchable: bool) -> Iterator[Location]:
    """Yields the children of these names that may be meant: no plumbing, and with `patchable` what leads to a value."""
    nodes = here.graph.names if here.graph is not None else None
    for name in names:
        if nodes is not None and not is_child(nodes[name]):
            continue
        child = here.child(name)
        if child is not None and (not patchable or _leads_to_patchable(child)):
            yield child


def _name(place: Location) -> str:
    return (*place.names, *place.dig)[-1]


def _leads_to_patchable(child: Location) -> bool:
    if child.graph is not None:
        return True
    if child.node is None or child.spec is None or not is_patchable(child.node):
        return False
    return _is_given(child.spec) or (child.node.kind == "input" and child.spec == ScalarSpec(None))


def _is_given(spec: ValueSpec) -> bool:
    if isinstance(spec, ContainerSpec):
        return any(True for _ in leaves(spec))
    return not isinstance(spec, ObjectSpec) and (not isinstance(spec, ScalarSpec) or spec.is_number)


def _offer(child: Location, is_quoted: bool, patchable: bool) -> Offer:
    text = json.dumps(_name(child)) if is_quoted else format_segment(_name(child))
    if child.graph is not None:
        return Offer(f"{text}." if patchable else text, visible(type(child.graph.module).__name__))
    is_container = patchable and isinstance(child.spec, ContainerSpec)
    separator = ("." if child.dig else "|") if is_container else ""
    return Offer(text + separator, visible(str(child.spec)))
