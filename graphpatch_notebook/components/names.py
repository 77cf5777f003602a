"""The text of component names: parse, format, and look up among the components that were found.

"decoder.layers[*].attn.heads[0:2].z[:, 0]"   text
  -> ComponentName                              stack, words, numbers, slice (`parse_name`)
  -> ComponentName, ...                         one for each stack and layer, and for each match of a pattern
  -> [Component, ...]                           path, index and axes, one for each layer and head (`look_up`)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.patches.slices import composed, index_problem, index_text, part_sizes
from graphpatch_notebook.paths import nearest, path_pattern

if TYPE_CHECKING:
    from graphpatch_notebook.components.components import Component, Components

Numbers: TypeAlias = "int | slice | tuple[int, ...]"
"""What is in brackets after `layers`, `heads` or `experts`: a number, a list of them, or a slice (`*` is all)."""

MEMBERS = {"heads": "head", "experts": "expert"}
"""The words that take numbers, and the axis that these count along."""

BRACKETS = r"\[(?:\[[^\[\]]*\]|[^\[\]]*)\]"
"""What a name has in brackets, as a regular expression: numbers and slices, or a list of numbers."""

_LAYERS = re.compile(rf"(?:(?P<stack>[^\[\]@]+)\.)?layers(?P<layer>{BRACKETS})(?P<part>.*)", re.DOTALL)
_WORD = re.compile(r"(?:(?P<stack>[^\[\]@]+)\.)?(?P<part>@.*)", re.DOTALL)
_STEP = re.compile(rf"(@?(?:[^\W\d]|\*)[\w*]*)({BRACKETS})?(?:\.|$)")
_EXAMPLES = "'layers[3].attn.z', 'layers[*].attn.heads[0].pattern', 'layers[3].mlp.post[:, :, 17]', '@logits'"


@dataclass(frozen=True, slots=True)
class ComponentName:
    """A parsed component name.

    Attributes:
        words: The words of the part: `("attn", "heads", "z")`, `("@logits",)`. They may have `*`, as patterns of paths.
            Of a pattern of whole names, all words: `("**", "attn", "heads", "z")`.
        stack: The path of the frame that holds the list of layers, if the name has one. It may have `*`.
        layers: The layers; `None` for the values outside of the layers (`@embed`), and for patterns of whole names.
        members: The heads, or the experts; `None` if the name has no word that takes numbers.
        index: The slice of the value, as a tuple of integers, slices and `...`; `()` for the whole value.
    """

    words: tuple[str, ...]
    stack: str = ""
    layers: Numbers | None = None
    members: Numbers | None = None
    index: tuple[Any, ...] = ()

    def __str__(self) -> str:
        member = None if self.members is None else f"[{_numbers_text(self.members)}]"
        part = ".".join(f"{word}{member}" if word in MEMBERS and member else word for word in self.words)
        layer = None if self.layers is None else f"layers[{_numbers_text(self.layers)}]"
        name = ".".join(filter(None, (self.stack, layer, part)))
        return f"{name}[{index_text(self.index)}]" if self.index else name

    @property
    def axis(self) -> str | None:
        """The axis that `members` count along."""
        return next((MEMBERS[word] for word in self.words if word in MEMBERS), None)


def is_component_name(text: str) -> bool:
    """Whether a text is a component name rather than a node path.

    Example:
        >>> [is_component_name(text) for text in ("layers[3].attn.z", "**.heads[1].z", "h_3.attn.output")]
        [True, True, False]
    """
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    return bool(re.search(r"(?:^|\.)(?:layers\[|@[\w*]|\*.*\[)", outside))


def parse_name(text: str) -> ComponentName:
    """Parses the text of a component name.

    Raises:
        ValueError: The text is not a component name.

    Example:
        >>> parse_name("decoder.layers[-1].attn.heads[0:2].z[:, 0]")
        ... # doctest: +NORMALIZE_WHITESPACE
        ComponentName(words=('attn', 'heads', 'z'), stack='decoder', layers=-1, members=slice(0, 2, None),
                      index=(slice(None, None, None), 0))
    """
    found = _LAYERS.fullmatch(text)
    if found is not None:
        layers, part = _numbers(found["layer"][1:-1], text), found["part"]
        if not part.startswith("."):
            raise ValueError(f"not a component name: {text!r} (say which part of the layer, such as .resid_post)")
        return _with_part(part[1:], text, found["stack"] or "", layers)
    found = _WORD.fullmatch(text)
    if found is None and "*" in text:
        return _with_part(text, text, "", None)
    if found is None:
        raise ValueError(f"not a component name: {text!r}; such names are {_EXAMPLES}")
    return _with_part(found["part"], text, found["stack"] or "", None)


def _with_part(part: str, text: str, stack: str, layers: Numbers | None) -> ComponentName:
    words: list[str] = []
    members: Numbers | None = None
    index: tuple[Any, ...] = ()
    position = 0
    is_last = False
    while not is_last:
        step = _STEP.match(part, position)
        if step is None:
            if re.fullmatch(r"\w+\[.*\[.*\]", part[position:]):
                raise ValueError(f"not a component name: {text!r} ({_LIST_OF_INDICES})")
            raise ValueError(f"not a component name: {text!r} (unexpected {part[position:]!r}); such are {_EXAMPLES}")
        word, brackets = step.groups()
        inside = None if brackets is None else brackets[1:-1]
        words.append(word)
        is_last = step.end() == len(part) and not step.group().endswith(".")
        position = step.end()
        if word in MEMBERS and is_last:
            example = "z" if word == "heads" else "out"
            raise ValueError(f"not a component name: {text!r} (say what of the {word}, such as .{example})")
        if word in MEMBERS:
            members = slice(None) if inside is None else _numbers(inside, text)
        elif inside is not None and is_last:
            index = _index(inside, text)
            if index.count(...) > 1:
                raise ValueError(f"not a component name: {text!r} (a slice has at most one ...)")
            if any(isinstance(part, slice) and (part.step or 1) < 1 for part in index):
                raise ValueError(f"not a component name: {text!r} (the step of a slice of a value must be positive)")
        elif inside is not None:
            raise ValueError(f"not a component name: {text!r} (a slice is at its end, not after {word!r})")
    return ComponentName(tuple(words), stack, layers, members, index)


_LIST_OF_INDICES = "a slice in a name has integers, slices and ...; for a list of indices, give the patch slice="


def _numbers(inside: str, text: str) -> Numbers:
    inside = inside.strip()
    if inside == "*":
        return slice(None)
    is_list = inside.startswith("[")
    found = _index(
        inside[1:-1] if is_list else inside, text, "a number, a list of them ([0, 2] or 0, 2), a slice, or *"
    )
    if len(found) == 1 and isinstance(found[0], int if is_list else (int, slice)):
        return found[0]
    if all(type(number) is int for number in found):
        return found
    raise ValueError(f"not a component name: {text!r} ([{inside}] is not a number, a list of them, a slice, or *)")


def _index(inside: str, text: str, wanted: str = "integers, slices and ...") -> tuple[Any, ...]:
    try:
        node = ast.parse(f"_[{inside.strip()}]", mode="eval").body
        assert isinstance(node, ast.Subscript)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return tuple(map(_index_part, parts))
    except (SyntaxError, ValueError, AssertionError):
        raise ValueError(f"not a component name: {text!r} ([{inside}] is not {wanted})") from None


def _index_part(node: ast.expr) -> Any:
    if isinstance(node, ast.Slice):
        bounds = [None if bound is None else _whole(bound) for bound in (node.lower, node.upper, node.step)]
        if bounds[2] == 0:
            raise ValueError("slice step cannot be zero")
        return slice(*bounds)
    if isinstance(node, ast.Constant) and node.value is Ellipsis:
        return Ellipsis
    return _whole(node)


def _whole(node: ast.expr) -> int:
    value = ast.literal_eval(node)
    if type(value) is not int:
        raise ValueError(f"{value!r} is not an integer")
    return value


def _numbers_text(numbers: Numbers) -> str:
    return "*" if numbers == slice(None) else index_text(numbers)


# --------------------------------------------------------------------------------------------------------------------
# Look-up


def look_up(found: Components, text: str) -> list[Component]:
    """Returns the components that a name refers to, as `Components.lookup` describes.

    Where query heads share keys and values, `heads[3].*` means those that query head 3 reads. Whether a slice at the
    end is in range is not asked here, but where the value is used (`inspection.resolution`).
    """
    try:
        name = parse_name(text)
    except ValueError as error:
        raise UnknownPathError(str(error)) from None
    by_layer = [_of_layer(found, one, text) for one in _by_layer(found, name, text)]
    problems = [each for each in by_layer if isinstance(each, UnknownPathError)]
    is_lenient = name.layers == slice(None) or "*" in name.stack
    if problems and not (is_lenient and len(problems) < len(by_layer)):
        raise problems[0]
    return [component for each in by_layer if isinstance(each, list) for component in each]


def _by_layer(found: Components, name: ComponentName, text: str) -> list[ComponentName]:
    """Returns the names that a name expands to, each with one stack and one layer."""
    stacks = [name.stack]
    if "*" in name.stack:
        pattern = path_pattern(f"{name.stack}.layers")
        known = found.layers if name.layers is not None else ("", *found.layers)
        stacks = [stack for stack in dict.fromkeys(known) if pattern.fullmatch(_list_of(stack))] or stacks
    names: list[ComponentName] = []
    problem: UnknownPathError | None = None
    for stack in stacks:
        in_stack = replace(name, stack=stack)
        try:
            names += [replace(in_stack, layers=layer) for layer in _layers(found, in_stack, text)]
        except UnknownPathError as error:  # other stacks may have more layers
            problem = problem or error
    if not names and problem is not None:
        raise problem
    return names


def _list_of(stack: str) -> str:
    return f"{stack}.layers" if stack else "layers"


def _layers(found: Components, name: ComponentName, text: str) -> list[int | None]:
    if name.layers is None:
        return [None]
    count = found.layers.get(name.stack)
    if count is None:
        named = list(map(_list_of, found.layers))
        if not named:
            raise UnknownPathError(
                f"{text!r}: {why_missing(found.missing, str(name)) or 'no stack of layers was found'}"
            )
        meant = [*nearest(f"{name.stack}.layers", named, 1), *["**.layers"] * (len(named) > 1)]
        rest = text[text.index("layers[") + len("layers") :]
        close = ", ".join(repr(one + rest) for one in meant if _is_found(found, one + rest))
        hint = f"; nearest: {close}" if close else ""
        raise UnknownPathError(f"{text!r}: the stacks of layers in this model are {', '.join(map(repr, named))}{hint}")
    return list(_counted(name.layers, count, f"layers in {name.stack!r}" if name.stack else "layers", text))


def _is_found(found: Components, text: str) -> bool:
    try:
        return bool(look_up(found, text))
    except UnknownPathError:
        return False


def _counted(numbers: Numbers, count: int, what: str, text: str) -> Iterator[int]:
    """Yields numbers from the start, of `count`."""
    if isinstance(numbers, slice):
        chosen = list(range(count)[numbers])
        if not chosen:
            raise UnknownPathError(f"{text!r}: [{index_text(numbers)}] selects none of the {count} {what}")
        yield from chosen
        return
    for number in (numbers,) if isinstance(numbers, int) else numbers:
        if not -count <= number < count:
            raise UnknownPathError(f"{text!r}: {number} is out of range: there are {count} {what}")
        yield number % count


def _matching(found: Components, name: ComponentName, text: str) -> list[ComponentName]:
    """Returns the names that a name with `*` in its words expands to: those of its layer, or of all layers."""
    if not any("*" in word for word in name.words):
        return [name]
    has_heads = "heads" in name.words
    bare = replace(name, words=tuple(word for word in name.words if word != "heads"), members=None, index=())
    pattern, start = path_pattern(str(bare)), str(bare).partition("*")[0]
    matching: list[ComponentName] = []
    for key in found:
        each = parse_name(key) if key.startswith(start) else None
        if each is None or not pattern.fullmatch(str(replace(each, members=None))):
            continue
        if has_heads and "head" not in found[key].axes:
            continue
        words = (*each.words[:-1], "heads", each.words[-1]) if has_heads else each.words
        members = slice(None) if name.members is None and each.members is not None else name.members
        one = replace(each, words=words, members=members, index=name.index)
        matching += [one] if one not in matching else []
    if not matching:
        find_one(found, str(replace(name, members=None, index=())), text)
    return matching


def _of_layer(found: Components, name: ComponentName, text: str) -> list[Component] | UnknownPathError:
    """Returns the components that a name with one layer refers to, or an error that says why there are none."""
    is_pattern = any("*" in word for word in name.words)
    try:
        return [
            component for one in _matching(found, name, text) for component in _of_one(found, one, text, is_pattern)
        ]
    except UnknownPathError as error:
        return error


def _of_one(found: Components, name: ComponentName, text: str, is_pattern: bool) -> Iterator[Component]:
    """Yields the components that a name with one layer and without `*` in its words refers to.

    If it comes from a pattern, its numbers are those of query heads.
    """
    if name.words[-1] == "result" and name.words[0].endswith("attn"):
        raise UnknownPathError(f"{text!r}: {_of_result(name)}")
    bare = replace(name, members=None, index=())
    if name.axis is None:
        yield _sliced(find_one(found, str(bare), text), name, text)
        return
    word = next(word for word in name.words if word in MEMBERS)
    separate = _separate(found, bare)
    if separate:  # such as experts that are separate modules
        chosen = list(_counted(name.members or 0, len(separate), word, text))
        there = [number for number in chosen if separate[number] in found]
        if not there or (there != chosen and not isinstance(name.members, slice)):
            find_one(found, next(separate[number] for number in chosen if number not in there), text)
        for number in there:
            yield _sliced(found[separate[number]], replace(name, members=number), text)
        return
    key = str(replace(bare, words=tuple(w for w in name.words if w != word)))
    if key not in found and word != "heads":
        key = str(replace(name, members=name.members or 0, index=()))  # which says why there are no separate ones
    whole = find_one(found, key, text)
    if name.axis not in whole.axes:
        raise UnknownPathError(
            f"{text!r}: {whole.name!r} has no dimension of the {word}: its axes are {', '.join(map(str, whole.axes))}"
        )
    dim = whole.axes.index(name.axis)
    if len(whole.index) > dim and whole.index[dim] != slice(None):
        raise UnknownPathError(f"{text!r}: {whole.name!r} is a part along its dimension of the {word} already")
    numbers, count = slice(None) if name.members is None else name.members, whole.shape[dim]
    queries = _query_heads(found, bare) if word == "heads" else count
    if is_pattern and count < queries:
        read = (whole.head_of(each, queries) for each in _counted(numbers, queries, word, text))
        numbers = tuple(dict.fromkeys(read))
    elif isinstance(numbers, int) and count <= numbers < queries:
        own = str(replace(name, members=whole.head_of(numbers, queries)))
        raise UnknownPathError(
            f"{text!r}: {numbers} is out of range: {queries} heads share {count}: head {numbers} reads {own!r}"
        )
    for number in _counted(numbers, count, word, text):
        index = [*whole.index, *(slice(None),) * (dim + 1 - len(whole.index))]
        index[dim] = number
        yield _sliced(replace(whole, index=tuple(index)), replace(name, members=number), text)


def _query_heads(found: Components, bare: ComponentName) -> int:
    """Returns the number of query heads that belong to a component with heads; 0 if that is not known."""
    keys = [str(replace(bare, words=(bare.words[0], part))) for part in "qz"]
    known = [found[key] for key in keys if key in found and "head" in found[key].axes]
    return next((one.shape[one.axes.index("head")] for one in known), 0)


def _of_result(name: ComponentName) -> str:
    """Returns how to get the output of a head, as a message: models compute only the sum over heads."""
    head = name.members if isinstance(name.members, int) else "H"
    z = replace(name, words=(name.words[0], "heads", "z"), members=name.members or 0, index=())
    return (
        "the model computes the sum of what heads write, not each head's result, which is z @ W_O: record or patch "
        f"{str(z)!r}, whose rows of the output projection are pg.weights.W_O[{name.layers}, {head}]"
    )


def _separate(found: Components, bare: ComponentName) -> list[str]:
    """Returns the names of the members that are separate values, in order, including those that did not run."""
    members: list[str] = []
    while (key := str(replace(bare, members=len(members)))) in found or key in found.missing:
        members.append(key)
    return members


def find_one(found: Components, key: str, text: str) -> Component:
    """Returns the component whose whole name is `key`; the error shows `text`.

    Raises:
        UnknownPathError: It was not found. The message has the reason, and the nearest names.
    """
    if key in found:
        return found[key]
    names = list(found)
    reason = why_missing(found.missing, key)
    close = nearest(key, names)
    why = f": {reason}" if reason else ""
    hint = f"; nearest: {', '.join(map(repr, close))}" if close else ""
    raise UnknownPathError(f"unknown component {text!r}{why}{hint}")


def why_missing(missing: Mapping[str, str], name: str) -> str | None:
    """Returns why a component was not found. The reasons are stored by names, patterns and beginnings of names."""
    for pattern, reason in missing.items():
        if re.match(re.escape(pattern).replace(r"\*", r"[^\[\]]*") + r"(?![^.\[])", name):
            return reason
    return None


def _sliced(component: Component, name: ComponentName, text: str) -> Component:
    """Returns a component with the slice of its name."""
    shape = torch.Size(component.shape)
    if name.index:
        if (problem := index_problem(name.index, part_shape(shape, component.index))) is not None:
            raise UnknownPathError(f"{text!r}: {problem}")
        component = replace(component, index=composed(component.index, name.index, shape))
    return replace(component, name=str(name))


def part_shape(shape: torch.Size, index: tuple[Any, ...]) -> torch.Size:
    """Returns the shape of a part of a tensor.

    Example:
        >>> part_shape(torch.Size([2, 12, 5, 64]), (slice(None), 3))
        torch.Size([2, 5, 64])
    """
    return torch.Size(size for size in part_sizes(shape, index) if size is not None) if index else shape
