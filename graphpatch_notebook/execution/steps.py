"""The steps of a generation: which one is running, and the positions of its tokens in the sequence.

    StepCount            of a block: lasts over its calls
    └── GenerationSteps            of one call of the `PatchableGraph`, or of a method of it
        └── GenerationStep         one call of the model within it

The caches of transformers are recognized by names and methods: transformers need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import GraphPatchError, PatchValueError
from graphpatch_notebook.execution.plan import Entry
from graphpatch_notebook.execution.positions import DECODER_TOKENS, TOKENS, Indices, token_inputs

CACHES = (
    "cache", "past_key_values", "past_key_value", "cache_params", "layer_past", "past", "past_buckets_states", "mems",
    "state",
)  # fmt: skip

Unreached: TypeAlias = "list[tuple[Entry, str]]"
"""Entries whose steps or positions were not reached, each with the reason."""


class HeldBackError(Exception):
    """The value has none of the positions of a patch, or it is not a step of the patch (caught inside the package)."""


@dataclass(slots=True)
class StepCount:
    """The steps of the calls made in a block; blocks inside it share the count."""

    last: int = 0  # the step of the last direct call
    # Entries without an effect so far, since no direct call was at their steps or positions, with the reason.
    idle: dict[Entry, str] = field(default_factory=dict)
    fired: set[Entry] = field(default_factory=set)  # entries that had an effect
    # Of the numbers that an entry lists one by one, as "steps" or "positions", those that no call had so far.
    missed: dict[tuple[Entry, str], list[int]] = field(default_factory=dict)
    # Entries whose value is known to have a dimension as long as the sequence.
    fitting: set[Entry] = field(default_factory=set)

    def take(self, entries: Sequence[Entry]) -> Unreached:
        """Returns those of `entries` that had no effect, at all or at some of their numbers, and forgets them."""
        found: Unreached = []
        for entry in entries if self.idle or self.missed else ():
            if (why := self.idle.pop(entry, None)) is not None and entry not in self.fired:
                found.append((entry, why))
            for what in ("steps", "positions"):
                if (numbers := self.missed.pop((entry, what), None)) and entry in self.fired:
                    listed = f"{what} {', '.join(map(str, numbers))} (of {getattr(entry.restriction, what)})"
                    found.append((entry, f"at {listed}"))
        return found

    def note_missed(self, entry: Entry, what: str, outside: list[int]) -> None:
        """Keeps which of the numbers that an entry lists a call does not have."""
        before = self.missed.get((entry, what), outside)
        self.missed[entry, what] = [number for number in before if number in outside]


@dataclass(slots=True)
class GenerationStep:
    """One call of the model."""

    number: int  # from zero
    past: int | None = None  # how many positions the cache holds; `None` if no patch needs it
    length: int | None = None  # how many tokens the model is given; `None` if that is not known
    batch: int = 1  # how many sequences there are
    # How many positions an encoder sees; `None` without an encoder, or if it is not known.
    encoder_length: int | None = None


class GenerationSteps:
    """The steps of one call: of the model itself (`is_direct`), or of a method that calls it.

    Direct calls in a block are steps of one sequence; outside of any block (`is_outside`), nothing is known of others.
    """

    def __init__(
        self, root: Frame, restricted: Sequence[Entry], count: StepCount, is_direct: bool, *, is_outside: bool = False
    ) -> None:
        self._root = root
        self._restricted = restricted
        self._restrictions = [entry.restriction for entry in restricted if entry.restriction is not None]
        self.count = count
        self.is_direct = is_direct
        self.is_outside = is_outside
        self._begun: list[GenerationStep] = []
        self._outside: dict[int, int] = {}
        self.current = GenerationStep(0, 0)
        self._skipped: set[Entry] = set()
        self._held_back: set[Entry] = set()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begins the next step: a call of the model."""
        step = GenerationStep(len(self._begun))
        if any(restriction.positions for restriction in self._restrictions):
            self._place(step, args, kwargs)
        if self.is_direct:
            past = self._past(args, kwargs) if step.past is None else step.past
            if past and self.is_outside and any(restriction.steps for restriction in self._restrictions):
                raise GraphPatchError(
                    "the step of a call with a cache is not known outside of a block: make the calls of a sequence in "
                    "one `with pg.patch({}):`"
                )
            step.number = self.count.last = 0 if past == 0 else self.count.last + 1
        self.current = step
        self._begun.append(step)

    def outside(self, module: object, kwargs: dict[str, Any]) -> None:
        """Counts a call of a module of the model by a method, outside of the model's own forward."""
        number = len(self._begun)
        if self._outside.get(id(module)) == number:
            raise PatchValueError(
                f"steps are not known: {type(module).__name__} is called repeatedly, not by the model's own forward; "
                "drop steps= and positions=, or call the model itself"
            )
        self._outside[id(module)] = number
        self.current = GenerationStep(number, 0, encoder_length=_length_among(TOKENS, kwargs))

    def _place(self, step: GenerationStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step.past = self._past(args, kwargs)
        names = (*DECODER_TOKENS, *TOKENS, "encoder_outputs")
        inputs = {name: _input_of(self._root, name, args, kwargs) for name in names}
        step.length = _length_among(token_inputs(self._root), inputs)
        step.batch = next((len(given) for given in inputs.values() if isinstance(given, Tensor) and given.dim()), 1)
        step.encoder_length = _length_among(("encoder_outputs", *TOKENS), inputs)
        before = self._begun[-1] if self._begun else step
        if step.past == 0 and (step.length or 0) < (before.length or 0):
            raise PatchValueError(
                f"the positions of the {step.length} tokens of step {step.number} are not known: no cache of the "
                f"earlier ones was given with them ({', '.join(CACHES[:3])}, ...); use steps= and slice="
            )

    def _past(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return max((_length_of(*given) for given in caches_of(self._root, args, kwargs).items()), default=0)

    # -- what of a patch belongs to the step ---------------------------------------------------------------------------

    def admits(self, entry: Entry) -> bool:
        """Whether a restricted entry may have an effect at the current step."""
        steps = entry.restriction.steps if entry.restriction is not None else None
        if steps is None:
            return True
        number = self.current.number
        if number not in steps:
            self._skipped.add(entry)
            return False
        if steps.lists_several:
            self.count.note_missed(entry, "steps", steps.outside(number, number + 1))
        return True

    def indices(self, entry: Entry, value: Any) -> Indices:
        """Returns the indices in `value` of the positions of an entry, along the dimension of its restriction.

        If there are none, raises a `HeldBackError`, and a `PatchValueError` if they are not known.
        """
        restriction, target = entry.restriction, entry.target
        assert restriction is not None
        if value is None:  # an input that is not given at this step
            raise HeldBackError
        if not isinstance(value, Tensor) or value.dim() != len(target.whole.shape):  # type: ignore[union-attr]
            shown = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise PatchValueError(f"{target.path!r} was {target.whole} when it was captured, but is {shown} now")
        size = value.shape[restriction.dim]
        first, positions = self._first(entry, size), restriction.positions
        assert positions is not None
        is_for_one_run = entry.patches[0].is_for_one_run
        outside = positions.outside(first, first + size) if is_for_one_run or positions.lists_several else []
        if is_for_one_run and outside:
            raise PatchValueError(
                f"{target.text!r}: positions has {outside[0]}, but the sequence has positions {first} to "
                f"{first + size - 1} here"
            )
        found = restriction.indices(first, size)
        if not found:
            self._held_back.add(entry)
            raise HeldBackError
        if positions.lists_several:
            self.count.note_missed(entry, "positions", outside)
        return found

    def _first(self, entry: Entry, size: int) -> int:
        """Returns the position of the first entry of a value: that of its first token, or zero for a whole sequence."""
        restriction, step = entry.restriction, self.current
        assert restriction is not None
        assert restriction.positions is not None
        past, length = step.past or 0, step.length
        if restriction.is_encoder:
            past, length = 0, step.encoder_length
            if length is None:
                return 0
        if size == length:
            if past == 0 and step.batch > 1:
                self.count.fitting.add(entry)
            return past
        # Keys and values, after those in the cache were put before them. The number of tokens of several sequences in
        # one row could be the same by accident.
        is_whole = restriction.dim > 0 and length is not None and size == past + length
        if is_whole and (entry in self.count.fitting or step.batch * (length or 0) != size):
            self.count.fitting.add(entry)
            return 0
        if not restriction.is_encoder and length is not None and not restriction.positions.within(0, past + length):
            self._held_back.add(entry)
            raise HeldBackError
        raise PatchValueError(
            f"{entry.target.path!r} has {size} entries in dimension {restriction.dim} at step {step.number}, where "
            f"there are {length} tokens after {past} others: their positions are not known; choose with steps= and "
            "slice="
        )

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def settle(self, unfired: Unreached, fired: set[int]) -> Unreached:
        """Returns the entries that did not fire and that are reported.

        A direct call in a block is one step only: that a patch is not for that step is reported at the end of the
        block, if then no other call was.
        """
        self.count.fired |= {entry for entry in self._restricted if id(entry) in fired}
        if not self.is_direct or self.is_outside:
            return unfired
        held_back = {entry: why for entry, why in unfired if self.why_not(entry) is not None}
        self.count.idle |= held_back
        return [(entry, why) for entry, why in unfired if entry not in held_back]

    def why_not(self, entry: Entry) -> str | None:
        """Returns why an entry was held back; `None` if steps and positions are not the reason."""
        restriction = entry.restriction
        if restriction is None or not self._begun:
            return None
        call = "the last call" if self.is_direct and not self.is_outside else "this call"
        if restriction.steps is not None and not any(step.number in restriction.steps for step in self._begun):
            first, last = self._begun[0].number, self._begun[-1].number
            return f"its steps ({restriction.steps}) were not reached: {call} had steps {first} to {last}"
        if entry in self._held_back:
            where = "" if restriction.steps is None else " at its steps"
            lengths = [
                s.encoder_length if restriction.is_encoder else (s.past or 0) + (s.length or 0) for s in self._begun
            ]
            last = max(length or 0 for length in lengths) - 1
            return f"its positions ({restriction.positions}) were not reached{where}: {call} had 0 to {last}"
        if entry in self._skipped:
            return f"its value was computed, but not at its steps ({restriction.steps})"
        return None


def caches_of(root: Frame, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the caches that a call of a model is given, by the names of its inputs.

    With one, the first token may not be at position 0.
    """
    names = dict.fromkeys([*(parameter.name for parameter in root.parameters), *kwargs])
    given = ((name, _input_of(root, name, args, kwargs)) for name in names)
    return {name: value for name, value in given if value is not None and _is_cache(name, value)}


def _is_cache(name: str, value: Any) -> bool:
    if name in CACHES or hasattr(value, "get_seq_length"):
        return True
    # One by another name, as models written by hand have it. Positions in it, flags and lengths are none.
    is_plain = isinstance(value, (Tensor, str, bool, int, float))
    return not is_plain and ("cache" in name or name.startswith("past"))


def _input_of(root: Frame, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return kwargs[name] if name in kwargs else given_input(root.parameters, name, args, dict(kwargs))


def _length_among(names: Iterable[str], inputs: Mapping[str, Any]) -> int | None:
    """Returns the length of the first of some inputs that is not `None`."""
    for name in names:
        value = inputs.get(name)
        if name == "encoder_outputs" and value is not None and not isinstance(value, Tensor):
            value = value[0]  # a `ModelOutput` or a tuple: the hidden states come first
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value.shape[1]
    return None


def _length_of(name: str, cache: Any) -> int:
    """Returns how many positions a cache holds: an object of transformers, or (keys, values) for each layer."""
    unknown = PatchValueError(
        f"steps and positions are not known: the {type(cache).__name__} given as {name} does not say how many tokens "
        "it holds (as the caches of transformers do by get_seq_length); drop steps= and positions="
    )
    if hasattr(cache, "get_seq_length"):
        try:
            return int(cache.get_seq_length())
        except ValueError as error:  # a cache of linear attention, which holds one state for all tokens
            raise unknown from error
    if not isinstance(cache, (tuple, list)):
        raise unknown
    if all(layer is None for layer in cache):
        return 0
    keys = cache[0][0] if isinstance(cache[0], (tuple, list)) and cache[0] else None
    if not isinstance(keys, Tensor) or keys.dim() != 4:
        raise unknown
    return keys.shape[-2]
