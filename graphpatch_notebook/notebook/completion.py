"""Completes node paths and all other arguments of `%graphpatch`, in magics and in Python code.

CompletionContext -> the arguments of a parser, or `pg.patch({"`, `pg.nodes["`, `pg.graph.` -> the offers

Nothing is evaluated: names are looked up in the user's namespace. A path is completed one segment at a time.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

from IPython.core.completer import CompletionContext, SimpleCompletion
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.components import find
from graphpatch_notebook.inspection.node_path import Location, is_child
from graphpatch_notebook.inspection.resolution import is_patchable
from graphpatch_notebook.notebook.display.tables import visible
from graphpatch_notebook.notebook.magics.command_line import (
    COMPONENT,
    OPEN_STRING,
    STRING,
    CommandParser,
    TypedPath,
    words,
)
from graphpatch_notebook.notebook.magics.commands import CELL, commands
from graphpatch_notebook.notebook.search import KEYS, STATES, index_of
from graphpatch_notebook.notebook.session.workspace import ActiveGraph, is_a
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.slices import NAMED_STEPS
from graphpatch_notebook.paths import format_segment, is_component_name
from graphpatch_notebook.values import ContainerSpec, ObjectSpec, ScalarSpec, leaves

MOST_OFFERS = 500
_LONGEST = 5_000
_MAGIC = re.compile(r"\s*(?P<assigned>[^\s%!?\"'(\[{#][^%!?\"'(\[{#]*=\s*)?(?P<mark>%{0,2})graphpatch(?=\s)")
_IDENTIFIER = re.compile(r"(?<![\w.])(?:[^\W\d]\w*)?$")
_PATCH_MAP = re.compile(r"(?<![\w.])([^\W\d]\w*)\.patch\(\s*(?:patch_map\s*=\s*)?\{")
_PATH = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^"\[])*')
_QUOTED_ITEM = r"""\[(?:"[^"\\\n]*"|'[^'\\\n]*')\]"""
_PLACE = re.compile(
    rf"""(?<![\w.])([^\W\d]\w*)\.(graph|nodes)((?:\.\w+|{_QUOTED_ITEM})*)(?:\.(\w*)|\[(["'])([^"'\\\n]*))$"""
)
_LINK = re.compile(r"""\.(\w+)|\["([^"]*)"\]|\['([^']*)'\]""")
_SEGMENT = re.compile(r'("(?:[^"\\]|\\.)*"|[^."|\s\[\]]+)([.|])')
_LAST_SEGMENT = re.compile(r'"(?:[^"\\]|\\.)*"?|[^."|\s\[\]]*')

Offers: TypeAlias = tuple[int, list[SimpleCompletion]]
"""The offset in a text of what is completed, and the completions, best first."""
_NOTHING: Offers = (0, [])


def _offer(text: str, label: str) -> SimpleCompletion:
    return SimpleCompletion(text=text, type=label[:40])


def _beginning(typed: str, offers: Iterable[SimpleCompletion]) -> Offers:
    return 0, list(islice((offer for offer in offers if offer.text.startswith(typed)), MOST_OFFERS))


def _words(typed: str, texts: Iterable[str], label: str) -> Offers:
    return _beginning(typed, (_offer(text, label) for text in texts))


def _after(text: str, found: Offers) -> Offers:
    """Returns completions of the rest of a text that begins with `text`."""
    return len(text) + found[0], found[1]


class PathCompleter:
    """The completer of one shell."""

    def __init__(
        self,
        shell: Any,
        active: Callable[[], ActiveGraph | None],
        taken: Callable[[], Container[str]] | None = None,
    ) -> None:
        self._shell = shell
        self._taken = taken or (lambda: self._namespace)
        self._active = active

    def matched(self, context: CompletionContext) -> dict[str, Any]:
        """Returns the completions as a matcher of IPython does."""
        lines = context.full_text.split("\n")[: context.cursor_line + 1]
        lines[-1] = lines[-1][: context.cursor_position]
        try:
            start, offers = self.offers(lines)
        except Exception:  # a traceback while the user types would not help; other completions still work
            start, offers = _NOTHING
        if not offers:
            return {"completions": [], "suppress": False}
        matched = "\n".join(lines)[start:]
        return {"completions": offers, "matched_fragment": matched, "suppress": True, "ordered": True}

    def offers(self, lines: Sequence[str]) -> Offers:
        """Returns the completions at the end of the lines of a cell, with the offset in the cell."""
        line = lines[-1]
        match = _MAGIC.match(line)
        if match is None or not self._is_magic(match, lines):
            return self._python_offers("\n".join(lines))
        before = [(match.end() + start, word) for start, word in words(line[match.end() :], OPEN_STRING)]
        is_at_end = before and before[-1][0] + len(before[-1][1]) == len(line)
        start, typed = before.pop() if is_at_end else (len(line), "")
        texts = [word for _, word in before]
        if match["mark"] == "%%":
            found = self._argument_offers(CELL, texts, typed)
        elif not texts:
            found = _words(typed, commands(), "command")
        else:
            parser, _ = commands().get(texts[0], (None, None))
            found = _NOTHING if parser is None else self._argument_offers(parser, texts[1:], typed)
        return _after("\n".join([*lines[:-1], line[:start]]), found)

    def _is_magic(self, match: re.Match[str], lines: Sequence[str]) -> bool:
        if match["mark"] == "%%":
            return not match["assigned"] and not any(map(str.strip, lines[:-1]))
        is_automagic = bool(self._shell.automagic) and "graphpatch" not in self._namespace
        return bool(match["mark"]) or (is_automagic and not match["assigned"])

    @property
    def _namespace(self) -> dict[str, Any]:
        namespace: dict[str, Any] = self._shell.user_ns
        return namespace

    # --- arguments of the magic -------------------------------------------------------------------------------------

    def _argument_offers(self, parser: CommandParser, before: Sequence[str], typed: str) -> Offers:
        kind = parser.completes(before)
        options = _words(typed, (option for option in parser.options if option not in before), "option")
        if (typed.startswith("-") and options[1]) or (kind in (None, "text") and not typed):
            return options
        match kind:
            case "query" | "chosen" | "name" | "node" | "place":
                active = self._active()
                return _NOTHING if active is None else self._offers_in_graph(active, kind, before, typed)
            case "command":
                return _words(typed, commands(), "command")
            case "graph":
                return _beginning(typed, self._variables(lambda value: is_a(value, PatchableGraph)))
            case "model" if any("=" in word for word in before):
                return self._values(typed, lambda value: is_a(value, Module) and not is_a(value, PatchableGraph))
            case "value":
                return self._values(typed, lambda value: is_a(value, (Tensor, int, float, complex)))
            case "steps":
                return _words(typed, NAMED_STEPS, "steps")
        return _NOTHING  # IPython completes files

    def _offers_in_graph(self, active: ActiveGraph, kind: str, before: Sequence[str], typed: str) -> Offers:
        root = captured(active.graph).root
        match kind:
            case "query":
                return _query_offers(typed, active)
            case "chosen":
                patches = active.session.chosen.patches
                numbers = [_offer(f"#{patch.number}", visible(str(patch))) for patch in patches]
                return _beginning(typed, [*numbers, *(_offer(path, "chosen") for path in {p.path: 0 for p in patches})])
            case "name":
                path = next(word for word in before if (not word.startswith("-") and "." in word) or word in root.names)
                name = active.session.free_name(TypedPath.parse(path, root).path, self._taken())
                return _words(typed, [name], "variable")
        return self._path_offers(Location.of_root(root), typed, patchable=kind == "node")

    def _path_offers(self, root: Location, typed: str, *, patchable: bool) -> Offers:
        """Returns the completions of a path, or of the slice after it. A whole path may be in quotes."""
        path = COMPONENT.match(typed) or _PATH.match(typed)
        end = path.end() if path else 0
        if patchable and typed.startswith("[", end):
            if typed.endswith("]") and typed.count("[") == typed.count("]"):
                # A slice is complete and needs a space. Without an offer, IPython would complete the word.
                return 0, [_offer(f"{typed} ", "slice")]
            return _after(typed[:end], self._values(typed[end:], lambda value: is_a(value, (Tensor, int))))
        start, offers = next_segments(root, typed, patchable=patchable)
        if not typed.startswith('"'):
            return start, offers
        named = [offer for offer in offers if not offer.text.strip('".|').isidentifier()]
        return (start, named) if named else _after('"', next_segments(root, typed[1:], patchable=patchable))

    def _variables(self, is_meant: Callable[[Any], bool]) -> Iterator[SimpleCompletion]:
        hidden = self._shell.user_ns_hidden
        for name, value in list(self._namespace.items()):
            is_hidden = name.startswith("_") or (name in hidden and hidden[name] is value)
            if not is_hidden and name.isidentifier() and is_meant(value):
                yield _offer(name, visible(type(value).__name__))

    def _values(self, typed: str, is_likely: Callable[[Any], bool]) -> Offers:
        """Returns the variables for the end of a Python expression, most likely ones first."""
        identifier = _IDENTIFIER.search(typed)
        if identifier is None:
            return _NOTHING
        likely = list(self._variables(is_likely))
        others = self._variables(lambda value: not is_likely(value) and not isinstance(value, types.ModuleType))
        return _after(typed[: identifier.start()], _beginning(identifier.group(), [*likely, *others]))

    # --- Python code ------------------------------------------------------------------------------------------------

    def _python_offers(self, text: str) -> Offers:
        """Returns the completions of `pg.patch({"`, `pg.nodes["`, `pg.graph["` and `pg.graph.`."""
        recent = text[-_LONGEST:]
        if match := _PLACE.search(recent):
            typed = match[6] if match[4] is None else match[4]
            links = [next(filter(None, link), "") for link in _LINK.findall(match[3])]
            quote, is_patchable = match[5] or "", match[2] == "nodes"
        else:
            match = next(iter(list(_PATCH_MAP.finditer(recent))[::-1]), None)
            key = "" if match is None else _open_key(recent[match.end() :])
            quote, typed, links, is_patchable = key[:1], key[1:], [], True
            if match is None or not quote:
                return _NOTHING
        graph = self._namespace.get(match[1])
        if not is_a(graph, PatchableGraph) or "\\" in typed:
            return _NOTHING
        place = Location.of_root(graph.nodes.root)
        for link in links:
            place = place if link == "_shape" else place.at(link)
        start, offers = next_segments(place, typed, patchable=is_patchable)
        if quote:
            escaped = [one.text.replace("\\", "\\\\").replace(quote, f"\\{quote}") for one in offers]
            offers = [_offer(written, str(one.type)) for written, one in zip(escaped, offers, strict=True)]
        else:
            offers = [offer for offer in offers if offer.text.isidentifier()]
            offers += [_offer(name, "NodePath") for name in ("_code", "_shape") if name.startswith(typed)]
        return len(text) - len(typed) + start, offers


def _open_key(text: str) -> str:
    """Returns the string that is open at the end of a dict literal, with its quote, if it is a key; else nothing.

    Example:
        >>> _open_key('"a": [f(1)], "h_0.m'), _open_key('"a": "h_0.m')
        ('"h_0.m', '')
    """
    position, depth, last = 0, 0, ","
    while position < len(text):
        if string := STRING.match(text, position):
            position, last = string.end(), "string"
            continue
        character = text[position]
        if character in "\"'":
            return text[position:] if depth == 0 and last == "," else ""
        depth += (character in "([{") - (character in ")]}")
        last = last if character.isspace() else character
        position += 1
    return ""


def _query_offers(typed: str, active: ActiveGraph) -> Offers:
    minus = typed[: typed.startswith("-")]
    key, colon, value = typed[len(minus) :].partition(":")
    index = index_of(active.graph)
    if not colon:
        names = index.words_from(key) if key else ()
        offered = [*(_offer(f"{name}:", "search") for name in KEYS), *(_offer(name, "name") for name in names)]
        return _after(minus, _beginning(key, offered))
    values = {"is": STATES, "op": sorted({*index.ops} - {""})}.get(key.lower(), ())
    found = _after(f"{minus}{key}:", _words(value, values, key))
    # Nothing else is valid here, and the completions of IPython would take seconds.
    return found if found[1] else (0, [_offer(typed, "search")])


# --------------------------------------------------------------------------------------------------------------------
# Segments of a path


def next_segments(place: Location, typed: str, *, patchable: bool, limit: int = MOST_OFFERS) -> Offers:
    """Returns the completions of the last segment of a path, from `place` on. With `patchable`, it ends at a value."""
    if not place.names and (typed == "@" or is_component_name(typed)):  # it cannot be a path any more
        components = ((name, one) for name, one in find(place.root).items() if name.startswith(typed))
        if named := [_offer(name, " ".join(map(str, one.axes))) for name, one in islice(components, limit)]:
            return 0, named
    start, here = 0, place
    while match := _SEGMENT.match(typed, start):
        child = here.child(_content(match[1]))
        if child is None or (match[2] == "|") != (child.graph is None and not child.dig):
            return _NOTHING
        start, here = match.end(), child
    last = typed[start:]
    if not _LAST_SEGMENT.fullmatch(last):
        return _NOTHING
    children = _children(here, _content(last), patchable, limit)
    return start, [_segment(child, last.startswith('"'), patchable) for child in children]


def _content(segment: str) -> str:
    """Returns the name in a segment, which may be a JSON string that is not closed."""
    for text in (segment, f'{segment}"'):
        try:
            return str(json.loads(text)) if segment.startswith('"') else segment
        except json.JSONDecodeError:
            continue
    return segment  # it ends inside an escape sequence, so nothing matches


def _children(here: Location, prefix: str, patchable: bool, limit: int) -> list[Location]:
    """Returns the children whose names start with `prefix`, or else contain it, or else are sizes.

    The output is first, as the most common choice, and inputs without a value are last. With `patchable`, only those
    that lead to a value that can be patched.
    """
    names, nodes = here.children(), {}
    if here.graph is not None:
        nodes, output = here.graph.names, here.graph.output_node.name
        names = [output, *(node.name for node in here.graph.nodes_and_splices if node.name != output)]
    beginning = [name for name in names if name.startswith(prefix)]
    inside = [name for name in names if prefix.casefold() in name.casefold()]
    for meant, has_sizes in ((beginning, False), (inside, False), (beginning, bool(prefix))):
        children = (here.child(name) for name in meant if name not in nodes or is_child(nodes[name]) or has_sizes)
        found = list(islice((c for c in children if c and (not patchable or _leads_to_patchable(c))), limit))
        if found:
            return sorted(found, key=lambda child: child.spec == ScalarSpec(None))
    return []


def _leads_to_patchable(child: Location) -> bool:
    spec = child.spec
    if child.graph is not None or spec is None or child.node is None or not is_patchable(child.node):
        return child.graph is not None
    if isinstance(spec, ContainerSpec):
        return any(True for _ in leaves(spec))
    if isinstance(spec, ScalarSpec):
        return spec.is_number or (child.node.kind == "input" and spec.value is None)
    return not isinstance(spec, ObjectSpec)


def _segment(child: Location, is_quoted: bool, patchable: bool) -> SimpleCompletion:
    name = (*child.names, *child.dig)[-1]
    text = json.dumps(name) if is_quoted else format_segment(name)
    if child.graph is not None:
        return _offer(f"{text}." if patchable else text, visible(type(child.graph.module).__name__))
    is_container = patchable and isinstance(child.spec, ContainerSpec)
    separator = ("." if child.dig else "|") if is_container else ""
    return _offer(text + separator, visible(str(child.spec)))
