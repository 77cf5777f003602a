"""Where a restricted patch has an effect: at which steps of a generation, and at which positions of the sequence.

    Restriction             of a patch: decided when a context is entered, with the dimension of the sequence
    StepCount               of a block: lasts over its calls
    └── GenerationSteps     of one call of the `PatchableGraph`, or of a method of it
        └── GenerationStep  one call of the model within it

The sequence is the second dimension of `input_ids` and the like; of inputs with other names, it is the dimension that
the layers of the model treat as positions (`find`). A dimension of a value runs along the sequence if it has, at all
sizes, the same length (`dimensions_of`). All other cases are errors: a guess could give silently wrong numbers. The
caches of transformers are recognized by names and methods: transformers need not be installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import HELD_KINDS, Frame
from graphpatch_notebook.components import find
from graphpatch_notebook.components.dimensions import Extent, dimensions_of
from graphpatch_notebook.errors import GraphPatchError, PatchValueError
from graphpatch_notebook.inspection.resolution import Target, axes_of
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patches.slices import Selection, selection
from graphpatch_notebook.values import (
    ContainerSpec,
    TensorSpec,
    ValueSpec,
    children,
    key_text,
    leaves,
    tensor_specs,
)

if TYPE_CHECKING:
    from graphpatch_notebook.components.flow import Axes
    from graphpatch_notebook.patching.plan import Entry


TOKENS = ("input_ids", "inputs_embeds")
DECODER_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")
_SORTS = ("sort", "argsort")

Indices: TypeAlias = "list[int] | list[list[int]]"
"""Indices along a dimension: for all rows of the batch, or those of each row."""


class Restriction(NamedTuple):
    """Where one patch on one value has an effect."""

    steps: Selection | None  # the steps; `None` for all
    positions: Selection | None  # the positions; `None` for all
    # The dimension of the value (the whole value, for a component that is a part of it) that runs along the sequence.
    dim: int = 0
    is_encoder: bool = False  # whether that is the sequence of an encoder, which is complete from the start
    row_dim: int | None = None  # the dimension of the value that holds the batch, if each row has positions of its own

    def indices(self, first: int, size: int) -> Indices:
        """Returns the indices of the positions in a value of `size` positions from `first` on; empty if it has none."""
        assert self.positions is not None
        within = self.positions.within(first, first + size)
        if self.row_dim is None or not within:
            return [position - first for position in within]
        rows = self.positions.rows_within(first, first + size)
        return [[position - first for position in row] for row in rows]

    def is_whole_in(self, shape: Sequence[int]) -> bool:
        """Whether all steps and positions are reached in one forward without a cache, by a value of this shape."""
        if self.steps is not None and (0 not in self.steps or self.steps.outside(0, 1)):
            return False
        size = shape[self.dim] if self.dim < len(shape) else 0
        chosen = self.positions
        return chosen is None or bool(chosen.within(0, size) and not chosen.outside(0, size))

    @property
    def is_empty(self) -> bool:
        """Whether the patch selects no steps, or no positions."""
        return any(chosen is not None and not chosen.chosen for chosen in (self.steps, self.positions))


def restriction_of(root: Frame, target: Target, patch: Patch[Any]) -> Restriction | None:
    """Returns where `patch` has an effect on `target` (`None`: everywhere), or raises a `ValueError` with a repair."""
    if patch.steps is None and patch.positions is None:
        return None
    steps = None if patch.steps is None else selection(patch.steps, "steps", allow_empty=patch.allow_empty)
    if patch.positions is None:
        return Restriction(steps, None)
    if not takes_tokens(root):
        raise ValueError(
            "it is not known which input has the positions (of input_ids and inputs_embeds it is, and of others if "
            "layers treat a dimension as positions); use slice= to choose a part of the value"
        )
    dim, is_encoder = sequence_dim(root, target, patch.position_dim)
    positions = selection(patch.positions, "positions", allow_empty=patch.allow_empty)
    value, kept = getattr(patch, "value", None), target.kept_dims
    if isinstance(value, Tensor) and 1 == value.dim() < len(kept) and kept[-1] == dim and len(value) > 1:
        raise ValueError(
            f"value, of shape {tuple(value.shape)}, has one entry for each position of {target.spec}: give it as many "
            "dimensions, with those of the positions of size 1"
        )
    if positions.rows is None:
        return Restriction(steps, positions, dim, is_encoder)
    if patch.observes_only and len({len(row) for row in positions.rows}) > 1:
        raise ValueError(
            f"positions ({positions}) has a different number of positions in some rows; a patch that reads a value "
            "needs the same number in every row"
        )
    return Restriction(steps, positions, dim, is_encoder, row_dimension(root, target, dim))


# -- which dimension is the batch --------------------------------------------------------------------------------------


class TokenInput(NamedTuple):
    """An input that holds the sequences that a model works on, with the dimensions of the batch and of the sequence.

    The name of a tensor in a container is `batch|tokens`, as in node paths; in `**kwargs`, that of the argument.
    """

    name: str
    row: int
    positions: int


def row_dimension(root: Frame, target: Target, position_dim: int | None) -> int:
    """Returns the dimension of a target's whole value that holds the batch and nothing else; raises a `ValueError`.

    By a component's name, a dimension of batch and heads is seen as two, and is returned for the first of them. The
    batch is that of the tokens, or the first dimension of the first input. `position_dim` is that of the sequence.
    """
    whole, known, tokens = target.whole, dimensions_of(root), _tokens(root)
    if not isinstance(whole, TensorSpec):
        raise ValueError(f"it was {whole} when it was captured, and only tensors have rows")
    if target.layout is not None and target.layout.merged is not None and target.index[:1] in ((), (slice(None),)):
        return target.layout.merged  # of its two axes, the batch comes first
    tensors = (spec for node in root.inputs() for spec in tensor_specs(node.spec) if spec.shape)
    spec, row = (next(tensors, None), 0) if tokens is None else (tokens[0], tokens[1].row)
    found = [] if spec is None else known.dims_like(whole, known.extents(spec)[row])
    found = [dim for dim in found if dim != position_dim]
    if len(found) != 1:
        may_be = found or [dim for dim, extent in enumerate(known.extents(whole)) if extent is None]
        axes = axes_of(root, target)
        found = [dim for dim in may_be if axes[dim : dim + 1] == ("batch",)] or found
    if len(found) != 1:
        which = f"dimensions {', '.join(map(str, found))} may" if found else "none is known to"
        raise ValueError(f"it is not known which dimension of its shape {tuple(whole.shape)} holds the batch: {which}")
    if found[0] not in target.whole_dims:
        raise ValueError(f"{target.text!r} takes a part of dimension {found[0]}, which has the rows of the batch")
    return found[0]


def row_and_position_dims(root: Frame, target: Target) -> tuple[int, int | None, bool]:
    """Returns the dimensions of a target's whole value with the batch and the sequence, and whether an encoder has it.

    The second is `None` if the value has no positions, as a pooled output, or if the model does not take tokens. Both
    are the same if one dimension holds the positions of all rows, one row after the other, as of a router's logits.
    Keys and values of attention have the positions that are attended to. If that is not known, raises a `ValueError`.
    """
    whole, known, dim, is_encoder = target.whole, dimensions_of(root), None, False
    axes, tokens = axes_of(root, target), _tokens(root)
    for of_encoder, sequence in _sequences(root, target).items():
        if tokens is not None and sequence is not None and axes[:1] == ("token",) and isinstance(whole, TensorSpec):
            batch = known.extents(tokens[0])[tokens[1].row]
            extent = known.extents(whole)[0]
            if batch is not None and extent == Extent(tuple(sorted((*batch.groups, *sequence.groups)))):
                return 0, 0, of_encoder
        if isinstance(whole, TensorSpec) and known.dims_like(whole, sequence):
            dim, is_encoder = sequence_dim(root, target)
    return row_dimension(root, target, dim), dim, is_encoder


# -- which dimension is the sequence -----------------------------------------------------------------------------------


class TokenDims(NamedTuple):
    """The dimensions of a value that hold the batch (`None` if none does, or it is not known) and the tokens."""

    row: int | None
    positions: tuple[int, ...]


def token_dims(root: Frame, target: Target) -> TokenDims | None:
    """Returns the dimensions of a target's part that run along the tokens of the model; `None` if none is known to.

    In a pattern of attention, these are two. Of an encoder-decoder model, the tokens are those of the decoder.
    """
    tokens, whole, known = _tokens(root), target.whole, dimensions_of(root)
    if tokens is None or not isinstance(whole, TensorSpec) or target.node.kind in HELD_KINDS:
        return None
    sequence = known.extents(tokens[0])[tokens[1].positions]
    dims = [dim for dim in known.dims_like(whole, sequence) if dim in target.whole_dims]
    if not dims or _is_sorted(target, sequence):
        return None
    kept, row = target.kept_dims, None
    with suppress(ValueError):
        row = kept.index(row_dimension(root, target, dims[0]))
    return TokenDims(row, tuple(map(kept.index, dims)))


def sequence_dim(root: Frame, target: Target, given: int | None = None) -> tuple[int, bool]:
    """Returns the dimension of a target's whole value that runs along the sequence, and whether an encoder has that.

    All that has positions asks here. If it is not known, or cannot be what was given, raises a `ValueError`.

    Args:
        root: The root frame of the capture.
        target: The value.
        given: A dimension of the target's part, as the user said (`position_dim=`); where no sequence is known, this
            is it.
    """
    whole, kept = _checked_whole(target, given), target.kept_dims
    asked = kept if given is None else [kept[given]]
    known, shape, named = dimensions_of(root), tuple(whole.shape), _sequence_dims(root, target)
    own = _sequences(root, target)
    sequences = {of: extent for of, extent in own.items() if extent is not None and extent.groups}
    if any(_is_sorted(target, sequence) for sequence in sequences.values()):
        raise ValueError(
            f"the entries of its shape {shape} are sorted by values (tokens that are routed to an expert, say), so "
            "they are not at positions of the sequence; choose a part with slice="
        )
    is_unknown = given is not None and known.changes(whole)[asked[0]] is None
    if not sequences or is_unknown:
        along = asked if given is not None else [dim for dim in named if dim in kept]
        if len(along) != 1:
            raise ValueError(f"it is not known which dimension of its shape {shape} has positions; give position_dim=")
        return along[0], list(own) == [True]
    found = [
        (dim, is_encoder)
        for is_encoder, extent in sequences.items()
        for dim in known.dims_like(whole, extent)
        if dim in asked
    ]
    if len(found) > 1 or (given is None and found and found[0][0] == len(shape) - 1):
        chosen = [item for item in found if item[0] in named]
        if given is None and not chosen and "query" in axes_of(root, target):
            raise ValueError(
                f"positions are those of queries, and no dimension of queries in its shape {shape} has the length of "
                f"the sequence; if those of keys are meant, give position_dim={found[0][0]}"
            )
        found = chosen or found
    if cut := [dim for dim, _ in found if dim not in target.whole_dims]:
        raise ValueError(
            f"{target.text!r} takes a part of dimension {cut[0]}, which has the positions; drop positions="
        )
    if len(found) == 1:
        return found[0]
    if not found:
        which = "no dimension of its shape {} is" if given is None else f"dimension {given} of its shape {{}} is not"
        raise ValueError(
            f"{which.format(shape)} the example's sequence; choose a part of the value with slice= and a step with "
            "steps=, or give position_dim="
        )
    listed = " or ".join(str(dim) for dim, _ in found)
    raise ValueError(
        f"several dimensions of its shape {shape} may be the example's sequence; say which: position_dim={listed}"
    )


def _checked_whole(target: Target, given: int | None) -> TensorSpec:
    """Returns what was recorded of a target's whole value; raises a `ValueError` if that cannot have positions."""
    whole, kept = target.whole, target.kept_dims
    if target.node.kind in HELD_KINDS:
        raise ValueError(f"a {target.node.kind} has no positions; drop positions=")
    if not isinstance(whole, TensorSpec):
        raise ValueError(f"positions are those of a tensor, but this was {whole} when it was captured")
    if given is not None and (type(given) is not int or not -len(kept) <= given < len(kept)):
        raise ValueError(f"position_dim must be a dimension of the value recorded here, {target.spec}, not {given!r}")
    return whole


def _sequence_dims(root: Frame, target: Target) -> list[int]:
    """Returns the dimensions of a component that run along the sequence: in a pattern, the queries."""
    axes = axes_of(root, target)
    named = () if "window" in axes else ("position", "query")  # in a window, queries are numbered from its start
    return [dim for dim, axis in enumerate(axes) if axis in named]


def _is_sorted(target: Target, sequence: Extent | None) -> bool:
    """Whether a value comes after code of its frame, or of one above, that sorts something as long as the sequence.

    Code that sorts rows puts them back before it returns them.
    """
    known, at = dimensions_of(target.frame.root), target.node
    for frame in target.frame.frames_above():
        nodes = frame.nodes_and_splices
        before = nodes[: nodes.index(at)]
        sorts = [node for node in before if node.op in _SORTS and node.kind == "op"] if at.kind != "output" else []
        if any(known.dims_like(spec, sequence) for node in sorts for spec in tensor_specs(node.spec)):
            return True
        if frame.call is None:
            return False
        at = frame.call
    return False


def _sequences(root: Frame, target: Target) -> dict[bool, Extent | None]:
    """Returns the sequences that a value may run along, by whether it is that of an encoder; none without tokens."""
    tokens, encoder, known = _tokens(root), encoder_of(root), dimensions_of(root)
    found = {} if tokens is None else {False: known.extents(tokens[0])[tokens[1].positions]}
    if encoder is None:
        return found
    if any(frame.module is encoder for frame in target.frame.frames_above()):
        found = {}
    outputs: list[ValueSpec] = [frame.output_node.spec for frame in root.walk() if frame.module is encoder]
    outputs += [node.spec for node in root.inputs() if node.target == "encoder_outputs"]
    for output in outputs:
        first = output.children[0][2] if isinstance(output, ContainerSpec) and output.children else output
        if isinstance(first, TensorSpec):
            dims = [dim for dim, axis in enumerate(_stream_axes(root, encoder)) if axis == "position"]
            return found | ({True: known.extents(first)[dims[0]]} if len(dims) == 1 else {})
    return found


def _stream_axes(root: Frame, module: Module) -> Axes:
    """Returns what the dimensions of the stream of the layers in a module are."""
    layers = [layer for stack in find(root).evidence.stacks for layer in stack.layers.values()]
    inside = (layer for layer in layers if any(each.module is module for each in layer.frame.frames_above()))
    return next((layer.axes for layer in inside), ())


def token_inputs(root: Frame, *, is_encoder: bool = False) -> Sequence[TokenInput]:
    """Returns the inputs that hold the sequence that a model works on.

    Of an encoder-decoder model, that is the sequence of the decoder, or with `is_encoder` that of the encoder.
    """
    names = {parameter.name for parameter in root.parameters}
    has_decoder = "decoder_input_ids" in names and not is_encoder
    found = [TokenInput(name, 0, 1) for name in (DECODER_TOKENS if has_decoder else TOKENS) if name in names]
    return found or _found_inputs(root)


def _found_inputs(root: Frame) -> list[TokenInput]:
    """Returns the first input that has the batch and the positions of the layers, each as one dimension."""
    known, roles = dimensions_of(root), find(root).groups
    for name, spec in _input_specs(root).items():
        groups = [known.group_of(spec, dim) for dim in range(len(spec.shape))]
        axes = [None if group is None else roles.get(group) for group in groups]
        if axes.count("batch") == axes.count("position") == 1:
            return [TokenInput(name, axes.index("batch"), axes.index("position"))]
    return []


def _input_specs(root: Frame) -> dict[str, TensorSpec]:
    """Returns the tensors among the inputs of the example, also in containers, by their names."""
    found = ((str(node.target), dig, spec) for node in root.inputs() for dig, spec in leaves(node.spec))
    keywords = {each.name for each in root.parameters if each.kind is inspect.Parameter.VAR_KEYWORD}
    return {
        "|".join(dig if name in keywords else (name, *dig)): spec
        for name, dig, spec in found
        if isinstance(spec, TensorSpec)
    }


def encoder_of(root: Frame) -> Module | None:
    """Returns the encoder of an encoder-decoder model of transformers."""
    get_encoder = getattr(root.module, "get_encoder", None)
    if get_encoder is None or "decoder_input_ids" not in {parameter.name for parameter in root.parameters}:
        return None
    encoder = get_encoder()
    return encoder if isinstance(encoder, Module) and encoder is not root.module else None


def takes_tokens(root: Frame) -> bool:
    """Whether it is known which input of the example has the positions."""
    return _tokens(root) is not None


def _tokens(root: Frame) -> tuple[TensorSpec, TokenInput] | None:
    """Returns the input of the example that has the sequence."""
    specs = _input_specs(root)
    for one in token_inputs(root):
        if one.name in specs and len(specs[one.name].shape) >= 2:
            return specs[one.name], one
    return None


# -- the steps of a generation -----------------------------------------------------------------------------------------

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
        self.current = GenerationStep(number, 0, encoder_length=_length_among(_ENCODER_INPUTS, kwargs))

    def _place(self, step: GenerationStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step.past = self._past(args, kwargs)
        tokens = token_inputs(self._root)
        inputs = {each.name: input_of(self._root, each.name, args, kwargs) for each in (*tokens, *_ENCODER_INPUTS)}
        step.length = _length_among(tokens, inputs)
        rows = [(inputs[each.name], each.row) for each in (*tokens, *_ENCODER_INPUTS)]
        step.batch = next((given.shape[row] for given, row in rows if isinstance(given, Tensor) and given.dim()), 1)
        step.encoder_length = _length_among(_ENCODER_INPUTS, inputs)
        for restriction in self._restrictions:
            if restriction.positions is None or not restriction.positions.counts_from_end:
                continue
            if why := padded_end(self._root, args, kwargs, is_encoder=restriction.is_encoder):
                raise PatchValueError(f"positions={restriction.positions} {why}")
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


def padded_end(
    root: Frame, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_encoder: bool = False
) -> str | None:
    """Returns why positions of a call cannot count from the end of the sequence, or of that of the encoder."""
    name = "attention_mask" if is_encoder or encoder_of(root) is None else "decoder_attention_mask"
    mask = mask_of(root, name, args, kwargs)
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not mask.shape[1] or mask[:, -1].all():
        return None
    return (
        f"counts from the end, where rows of {name} have padding: pad on the left (tokenizer.padding_side = 'left'), "
        "or give the positions of each row ([[3], [5]])"
    )


def caches_of(root: Frame, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the caches that a call of a model is given, by the names of its inputs.

    With one, the first token may not be at position 0.
    """
    names = dict.fromkeys([*(parameter.name for parameter in root.parameters), *kwargs])
    given = ((name, input_of(root, name, args, kwargs)) for name in names)
    return {name: value for name, value in given if value is not None and _is_cache(name, value)}


def _is_cache(name: str, value: Any) -> bool:
    if name in CACHES or hasattr(value, "get_seq_length"):
        return True
    # One by another name, as models written by hand have it. Positions in it, flags and lengths are not caches.
    is_plain = isinstance(value, (Tensor, str, bool, int, float))
    return not is_plain and ("cache" in name or name.startswith("past"))


def input_of(root: Frame, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns what a call gives for an input by its name, as of a `TokenInput`; `None` if it does not."""
    first, *dig = name.split("|")
    value = kwargs[first] if first in kwargs else given_input(root.parameters, first, args, dict(kwargs))
    for text in dig:
        value = next((child for key, child in children(value) or () if key_text(key) == text), None)
    return value


def mask_of(root: Frame, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the mask of this name, which is where the tokens are."""
    holder = "".join(next((each.name.rpartition("|")[:2] for each in token_inputs(root)), ()))
    return input_of(root, holder + name, args, kwargs)


_ENCODER_INPUTS = [TokenInput(name, 0, 1) for name in ("encoder_outputs", *TOKENS)]


def _length_among(tokens: Iterable[TokenInput], inputs: Mapping[str, Any]) -> int | None:
    """Returns the length of the sequence in the first of some inputs that is not `None`."""
    for each in tokens:
        value = inputs.get(each.name)
        if each.name == "encoder_outputs" and value is not None and not isinstance(value, Tensor):
            value = value[0]  # a `ModelOutput` or a tuple: the hidden states come first
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value.shape[each.positions]
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
