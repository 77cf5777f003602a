"""The text of component names: parse, format, and look up among the components that were found.

"decoder.layers[*].attn.heads[0:2].z[:, 0]"   text
  -> ComponentName                              stack, words, numbers, slice (`parse_name`)
  -> ComponentName, ...                         one for each stack and layer, and for each match of a pattern
  -> [Component, ...]                           path, index and axes, one for each layer and head (`look_up`)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.patches.slices import composed, index_problem, index_text, part_sizes
from graphpatch_notebook.paths import nearest, path_pattern

if TYPE_CHECKING:
    from graphpatch_notebook.components.components import Component, Components

Numbers: TypeAlias = "int | slice | tuple[int, ...]"
"""What is in brackets after `layers`, `heads` or `experts`: a number, a list of them, or a slice (`*` is all)."""

_Item = TypeVar("_Item")
_Other = TypeVar("_Other")

MEMBERS = {"heads": "head", "experts": "expert", "latents": "latent"}
"""The words that take numbers, and the axis that these count along. `latents` may be the last word, too."""

BRACKETS = r"\[(?:\[[^\[\]]*\]|[^\[\]]*)\]"
"""What a name has in brackets, as a regular expression: numbers and slices, or a list of numbers."""

_NAME = re.compile(rf"(?:(?P<stack>[^\[\]@]+)\.)?(?:layers(?P<layers>{BRACKETS})|(?=@))(?P<part>.*)", re.DOTALL)
_STEP = re.compile(rf"(@?(?:[^\W\d]|\*)[\w*]*)({BRACKETS})?(?:\.(?=.)|$)", re.DOTALL)
_INDEX = re.compile(r"\.\.\.|(-?\d+)|(-?\d+)?:(-?\d+)?(?::(-?\d+)?)?")
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
        part = ".".join(f"{word}{member}" if word == self.member_word and member else word for word in self.words)
        layer = None if self.layers is None else f"layers[{_numbers_text(self.layers)}]"
        name = ".".join(filter(None, (self.stack, layer, part)))
        return f"{name}[{index_text(self.index)}]" if self.index else name

    @property
    def member_word(self) -> str:
        """The word that takes numbers; empty if there is none."""
        if self.words[-1] == "latents":
            return "" if self.members is None else "latents"
        return next((word for word in self.words if word in MEMBERS), "")

    @property
    def axis(self) -> str | None:
        """The axis that `members` count along."""
        return MEMBERS.get(self.member_word)


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
    try:
        return _parsed(text)
    except ValueError as problem:
        raise ValueError(f"not a component name: {text!r} ({problem}); such names are {_EXAMPLES}") from None


def _parsed(text: str) -> ComponentName:
    found = _NAME.fullmatch(text)
    if found is None and "*" not in text:
        raise ValueError("it names neither layers nor a value outside of them")
    stack, layers, part = (None, None, text) if found is None else found.groups()
    if layers is not None:
        if not part.startswith("."):
            raise ValueError("say which part of the layer, such as .resid_post")
        part = part[1:]
    steps = list(_STEP.finditer(part))
    known = "".join(step.group() for step in steps)
    if known != part or not part:
        hint = "; for a list of indices, give the patch slice=" if "[" in part else ""
        raise ValueError(f"unexpected {part[len(known) :]!r}{hint}")
    *before, (last, index) = [step.groups() for step in steps]
    if last in MEMBERS and last != "latents":
        raise ValueError(f"say what of the {last}, such as .{'z' if last == 'heads' else 'out'}")
    if outer := [word for word, inside in before if inside is not None and word not in MEMBERS]:
        raise ValueError(f"a slice is at its end, not after {outer[0]!r}")
    members = [slice(None) if inside is None else _numbers(inside) for word, inside in before if word in MEMBERS]
    if last == "latents" and index is not None:
        with suppress(ValueError):  # else it is a slice of the value
            members, index = [_numbers(index)], None
    numbers, words = None if layers is None else _numbers(layers), (*(word for word, _ in before), last)
    return ComponentName(words, stack or "", numbers, members[-1] if members else None, _slice(index))


def _numbers(brackets: str) -> Numbers:
    """Returns the numbers of layers or members: a number, several, or a slice."""
    inside = brackets[1:-1].strip()
    is_list = inside.startswith("[")
    found = (slice(None),) if inside == "*" else _index(inside[1:-1] if is_list else inside)
    if len(found) == 1 and isinstance(found[0], int if is_list else (int, slice)):
        return found[0]
    if not found or not all(type(number) is int for number in found):
        raise ValueError(f"[{inside}] is not a number, a list of them ([0, 2] or 0, 2), a slice, or *")
    return found


def _slice(brackets: str | None) -> tuple[Any, ...]:
    """Returns the slice of a value."""
    found = () if brackets is None else _index(brackets[1:-1])
    if (brackets and not found) or found.count(...) > 1:
        raise ValueError(f"{brackets} is not integers, slices and at most one ...")
    if any(isinstance(part, slice) and part.step is not None and part.step < 1 for part in found):
        raise ValueError("the step of a slice of a value must be positive")
    return found


def _index(inside: str) -> tuple[Any, ...]:
    """Returns integers, slices and `...` from their text; `()` if it has something else."""
    parts = [_INDEX.fullmatch(part) for part in inside.replace(" ", "").split(",")]
    return () if None in parts else tuple(_part(part) for part in parts if part is not None)


def _part(found: re.Match[str]) -> Any:
    if found[0] == "...":
        return ...
    number, *bounds = (None if each is None else int(each) for each in found.groups())
    return slice(*bounds) if number is None else number


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
    stacks = [name]
    if name.layers is not None:
        pattern = path_pattern(_list_of(name.stack))
        stacks = [replace(name, stack=stack) for stack in found.layers if pattern.fullmatch(_list_of(stack))]
        if not stacks:
            known = ", ".join(repr(_list_of(stack)) for stack in found.layers)
            reason = found.why_missing(str(name)) or "no stack of layers was found"
            raise UnknownPathError(
                f"{text!r}: {f'the stacks of layers in this model are {known}' if known else reason}"
            )
    is_lenient = name.layers == slice(None) or "*" in name.stack
    layers = _collected(stacks, lambda each: _layers(found, each, text), is_lenient=True)
    return _collected(layers, lambda each: [*_of_layer(found, each, text)], is_lenient=is_lenient)


def _collected(items: Iterable[_Item], expanded: Callable[[_Item], list[_Other]], *, is_lenient: bool) -> list[_Other]:
    """Returns what items expand to; if that is lenient, an error of one is raised only if it is one of all."""
    result, problems = list[_Other](), list[UnknownPathError]()
    for item in items:
        try:
            result += expanded(item)
        except UnknownPathError as problem:
            if not is_lenient:
                raise
            problems.append(problem)
    if problems and not result:
        raise problems[0]
    return result


def _list_of(stack: str) -> str:
    return f"{stack}.layers" if stack else "layers"


def _layers(found: Components, name: ComponentName, text: str) -> list[ComponentName]:
    """Returns a name with the number of each layer in turn."""
    if name.layers is None:
        return [name]
    what = f"layers in {name.stack!r}" if name.stack else "layers"
    return [replace(name, layers=layer) for layer in _counted(name.layers, found.layers[name.stack], what, text)]


def _counted(numbers: Numbers, count: int, what: str, text: str) -> list[int]:
    """Returns numbers from the start, of `count`."""
    chosen = range(count)[numbers] if isinstance(numbers, slice) else numbers
    chosen = (chosen,) if isinstance(chosen, int) else chosen
    if not chosen:
        raise UnknownPathError(f"{text!r}: [{_numbers_text(numbers)}] selects none of the {count} {what}")
    if outside := [number for number in chosen if not -count <= number < count]:
        raise UnknownPathError(f"{text!r}: {outside[0]} is out of range: there are {count} {what}")
    return [number % count for number in chosen]


def _of_layer(found: Components, name: ComponentName, text: str) -> Iterator[Component]:
    """Yields the components that a name with at most one layer refers to."""
    if name.words[-1] == "result" and name.words[0].endswith("attn"):
        raise UnknownPathError(f"{text!r}: {_of_result(name)}")
    bare = str(replace(name, members=None, index=()))
    if name.axis is None and bare in found:
        yield _sliced(found[bare], name.index, text)
        return
    # The names of members that are values of their own have a number; others are parts along a dimension.
    any_member = r"(?:\1\\[(\\d+)\\]\\.)?"
    pattern = re.sub(r"(heads|experts)\\\.", any_member, path_pattern(bare).pattern.replace(".*", ".*?"))
    start = re.split(r"\*|heads|experts", bare)[0]
    families: dict[str, dict[int, str]] = {}
    for key in (*found, *found.missing):
        match = re.fullmatch(pattern, key) if key.startswith(start) else None
        if match is None:
            continue
        if name.axis is not None and match.re.groups and match[1] is not None:
            families.setdefault(key[: match.start(1)] + key[match.end(1) :], {})[int(match[1])] = key
        elif key in found and (name.axis is None or "*" not in bare or name.axis in found[key].axes):
            families[key] = {}
    if not families:
        whole = replace(name, words=tuple(word for word in name.words if word != "heads"), index=())
        find_one(found, str(whole), text)
    for key, numbered in families.items():
        if name.axis is None:
            yield _sliced(found[key], name.index, text)
        else:
            yield from _separate(found, name, numbered, text) if numbered else _along(found, name, found[key], text)


def _separate(found: Components, name: ComponentName, numbered: Mapping[int, str], text: str) -> Iterator[Component]:
    """Yields members that are values of their own, by their numbers; some may not have run."""
    members = name.members if name.members is not None else slice(None)
    chosen = [numbered[number] for number in _counted(members, len(numbered), name.member_word, text)]
    absent = [key for key in chosen if key not in found]
    if absent and (len(absent) == len(chosen) or not isinstance(members, slice)):
        find_one(found, absent[0], text)
    yield from (_sliced(found[key], name.index, text) for key in chosen if key in found)


def _along(found: Components, name: ComponentName, whole: Component, text: str) -> Iterator[Component]:
    """Yields members that are parts of a value along a dimension."""
    word, start, last = name.member_word, *whole.name.rsplit(".", 1)
    form = f"{start}.{word}[{{}}]" if last == word else f"{start}.{word}[{{}}].{last}"
    if name.axis not in whole.axes:
        raise UnknownPathError(
            f"{text!r}: {whole.name!r} has no dimension of the {word}: its axes are {', '.join(map(str, whole.axes))}"
        )
    dim = whole.axes.index(name.axis)
    if len(whole.index) > dim and whole.index[dim] != slice(None):
        raise UnknownPathError(f"{text!r}: {whole.name!r} is a part along its dimension of the {word} already")
    numbers, count = name.members if name.members is not None else slice(None), whole.shape[dim]
    read_by = [found[key] for key in (f"{start}.q", f"{start}.z") if key in found and "head" in found[key].axes]
    queries = read_by[0].shape[read_by[0].axes.index("head")] if read_by and word == "heads" else count
    if "*" in "".join(name.words) and count < queries:  # its numbers are those of query heads
        numbers = tuple(dict.fromkeys(whole.head_of(each, queries) for each in _counted(numbers, queries, word, text)))
    elif isinstance(numbers, int) and count <= numbers < queries:
        own = f"{start}.{word}[{whole.head_of(numbers, queries)}].{last}"
        raise UnknownPathError(
            f"{text!r}: {numbers} is out of range: {queries} heads share {count}: head {numbers} reads {own!r}"
        )
    for number in _counted(numbers, count, word, text):
        index = [*whole.index, *(slice(None),) * (dim + 1 - len(whole.index))]
        index[dim] = number
        part = replace(whole, name=form.format(number), index=tuple(index))
        yield _sliced(part, name.index, text)


def _of_result(name: ComponentName) -> str:
    """Returns how to get the output of a head, as a message: models compute only the sum over heads."""
    head = name.members if isinstance(name.members, int) else "H"
    z = replace(name, words=(name.words[0], "heads", "z"), members=name.members or 0, index=())
    return (
        "the model computes the sum of what heads write, not each head's result, which is z @ W_O: record or patch "
        f"{str(z)!r}, whose rows of the output projection are pg.weights.W_O[{name.layers}, {head}]"
    )


def find_one(found: Components, key: str, text: str) -> Component:
    """Returns the component whose whole name is `key`; the error shows `text`.

    Raises:
        UnknownPathError: It was not found. The message has the reason, and the nearest names.
    """
    if key in found:
        return found[key]
    names = list(found)
    reason = found.why_missing(key)
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


def _sliced(component: Component, index: tuple[Any, ...], text: str) -> Component:
    """Returns the slice of a component."""
    if not index:
        return component
    shape = torch.Size(component.shape)
    if (problem := index_problem(index, part_shape(shape, component.index))) is not None:
        raise UnknownPathError(f"{text!r}: {problem}")
    name = f"{component.name}[{index_text(index)}]"
    return replace(component, name=name, index=composed(component.index, index, shape))


def part_shape(shape: torch.Size, index: tuple[Any, ...]) -> torch.Size:
    """Returns the shape of a part of a tensor.

    Example:
        >>> part_shape(torch.Size([2, 12, 5, 64]), (slice(None), 3))
        torch.Size([2, 5, 64])
    """
    return torch.Size(size for size in part_sizes(shape, index) if size is not None) if index else shape
