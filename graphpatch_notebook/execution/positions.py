"""Where a restricted patch has an effect: the steps, and the dimension of its value that runs along a sequence.

Decided when a context is entered: a dimension of a node's value runs along the sequence if it has, at all sizes, the
same length (`checks.dimensions`). All other cases are errors: a guess could give silently wrong numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch.nn import Module

from graphpatch_notebook.capture.records import HELD_KINDS, Frame
from graphpatch_notebook.checks.dimensions import Profile, dimensions_of
from graphpatch_notebook.inspection.resolution import Target, axes_of
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patches.selections import Selection, selection
from graphpatch_notebook.values import ContainerSpec, TensorSpec, ValueSpec, tensor_specs

TOKENS = ("input_ids", "inputs_embeds")
DECODER_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")

Indices: TypeAlias = "list[int] | list[list[int]]"
"""Indices along a dimension: for all rows of the batch, or those of each row."""


@dataclass(frozen=True, slots=True)
class Restriction:
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


class PositionsError(ValueError):
    """A value does not have positions that a patch can select. `reason` is the message without the repair."""

    def __init__(self, reason: str, repair: str) -> None:
        super().__init__(f"{reason}; {repair}")
        self.reason = reason


def restriction_of(root: Frame, target: Target, patch: Patch[Any]) -> Restriction | None:
    """Returns where `patch` has an effect on `target` (`None`: everywhere), or raises a `ValueError` with a repair."""
    if patch.steps is None and patch.positions is None:
        return None
    steps = None if patch.steps is None else selection(patch.steps, "steps", allow_empty=patch.allow_empty)
    if patch.positions is None:
        return Restriction(steps, None)
    if not takes_tokens(root):
        raise PositionsError(
            "positions are known for models that take input_ids or inputs_embeds, and were captured with them",
            "use slice= to choose a part of the value",
        )
    dim, is_encoder = sequence_dim(root, target, patch.position_dim)
    positions = selection(
        patch.positions, "positions", allow_empty=patch.allow_empty, allow_negative=patch.is_for_one_run
    )
    if positions.rows is None:
        return Restriction(steps, positions, dim, is_encoder)
    if patch.observes_only and len({len(row) for row in positions.rows}) > 1:
        raise ValueError(
            f"positions ({positions}) has a different number of positions in some rows; a patch that reads a value "
            "needs the same number in every row"
        )
    return Restriction(steps, positions, dim, is_encoder, row_dimension(root, target, dim))


def row_dimension(root: Frame, target: Target, position_dim: int | None) -> int:
    """Returns the dimension of a target's whole value that holds the batch and nothing else; raises a `ValueError`.

    The batch is the first dimension of the tokens, or of the first input. `position_dim` is that of the sequence.
    """
    tensors = (spec for node in root.inputs() for spec in tensor_specs(node.spec) if spec.shape)
    spec, whole, known = _token_spec(root) or next(tensors, None), target.whole, dimensions_of(root)
    if not isinstance(whole, TensorSpec):
        raise ValueError(f"it was {whole} when it was captured, and only tensors have rows")
    shape = tuple(whole.shape)
    found = [] if spec is None else known.dims_like(whole, known.profiles(spec)[0])
    found = [dim for dim in found if dim != position_dim]
    if len(found) > 1:
        axes = axes_of(root, target)
        found = [dim for dim in found if axes[dim : dim + 1] == ("batch",)] or found
    if len(found) != 1:
        which = f"dimensions {', '.join(map(str, found))} may" if found else "none does"
        raise ValueError(f"it is not known which dimension of its shape {shape} holds the batch: {which}")
    if found[0] not in target.whole_dims:
        raise ValueError(f"{target.text!r} takes a part of dimension {found[0]}, which has the rows of the batch")
    return found[0]


def row_and_position_dims(root: Frame, target: Target) -> tuple[int, int | None, bool]:
    """Returns the dimensions of a target's whole value with the batch and the sequence, and whether an encoder has it.

    The second is `None` if the value has no positions, as a pooled output, or if the model does not take tokens. Both
    are the same if one dimension holds the positions of all rows, one row after the other, as of a router's logits.
    Keys and values of attention have the positions that are attended to. If that is not known, raises a `ValueError`.
    """
    if axes_of(root, target)[:1] == ("token",) and _holds_all_positions(root, target):
        return 0, 0, _is_inside(encoder_of(root), target)
    whole, dim, is_encoder = target.whole, None, False
    sequences = filter(None, (_sequence(root), _encoder_sequence(root)))
    if isinstance(whole, TensorSpec) and any(dimensions_of(root).dims_like(whole, profile) for profile in sequences):
        dim, is_encoder = sequence_dim(root, target)
    return row_dimension(root, target, dim), dim, is_encoder


class TokenDims(NamedTuple):
    """The dimensions of a value that hold the batch (`None` if none does, or it is not known) and the tokens."""

    row: int | None
    positions: tuple[int, ...]


def token_dims(root: Frame, target: Target) -> TokenDims | None:
    """Returns the dimensions of a target's part that run along the tokens of the model; `None` if none is known to.

    In a pattern of attention, these are two. Of an encoder-decoder model, the tokens are those of the decoder.
    """
    sequence, whole, known = _sequence(root), target.whole, dimensions_of(root)
    if sequence is None or not isinstance(whole, TensorSpec) or target.node.kind in HELD_KINDS:
        return None
    dims = [dim for dim in known.dims_like(whole, sequence) if dim in target.whole_dims]
    if known.is_placed_by_values(target.frame, target.node, whole, dims, [sequence]):
        return None
    has_decoder = token_inputs(root) != token_inputs(root, is_encoder=True)
    if not known.is_known(whole) and (len(dims) > 1 or has_decoder):  # by equal sizes
        return None
    kept, row = target.kept_dims, None
    with suppress(ValueError):
        row = kept.index(row_dimension(root, target, dims[0] if dims else None))
    return TokenDims(row, tuple(map(kept.index, dims))) if dims else None


def _holds_all_positions(root: Frame, target: Target) -> bool:
    """Whether the first dimension of a value is as long as all rows together, and in their order."""
    spec, whole, known = _token_spec(root), target.whole, dimensions_of(root)
    length = _encoder_sequence(root) if _is_inside(encoder_of(root), target) else _sequence(root)
    if spec is None or length is None or not isinstance(whole, TensorSpec):
        return False
    merged = tuple(count * size for count, size in zip(known.profiles(spec)[0], length, strict=False))
    if 0 not in known.dims_like(whole, merged):
        return False
    return not known.is_placed_by_values(target.frame, target.node, whole, [0], [merged])


def sequence_dims(axes: Sequence[str]) -> list[int]:
    """Returns the dimensions of a component that run along the sequence: in a pattern, the queries."""
    return [dim for dim, axis in enumerate(axes) if axis in ("position", "query")]


def token_inputs(root: Frame, *, is_encoder: bool = False) -> Sequence[str]:
    """Returns the parameters of a model's `forward` whose second dimension is the sequence that it works on.

    Of an encoder-decoder model, that is the sequence of the decoder, or with `is_encoder` that of the encoder.
    """
    names = {parameter.name for parameter in root.parameters}
    has_decoder = "decoder_input_ids" in names and not is_encoder
    return [name for name in (DECODER_TOKENS if has_decoder else TOKENS) if name in names]


def encoder_of(root: Frame) -> Module | None:
    """Returns the encoder of an encoder-decoder model of transformers."""
    get_encoder = getattr(root.module, "get_encoder", None)
    if get_encoder is None or "decoder_input_ids" not in {parameter.name for parameter in root.parameters}:
        return None
    encoder = get_encoder()
    return encoder if isinstance(encoder, Module) and encoder is not root.module else None


def takes_tokens(root: Frame) -> bool:
    """Whether the model was captured with tokens, or with embeddings of tokens."""
    return _token_spec(root) is not None


def sequence_dim(
    root: Frame, target: Target, given: int | None = None, of_input: Profile | None = None
) -> tuple[int, bool]:
    """Returns the dimension of a target's whole value that runs along the sequence, and whether an encoder has that.

    All that has positions asks here. If it is not known, or cannot be what was given, raises a `ValueError`.

    Args:
        root: The root frame of the capture.
        target: The value.
        given: A dimension of the target's part, as the user said (`position_dim=`); of a model that does not take
            tokens, this is the sequence.
        of_input: The sequence of a model that does not take tokens, if a dimension of its input is said to be that.
    """
    if target.node.kind in HELD_KINDS:
        raise PositionsError(f"a {target.node.kind} has no positions", "drop positions=")
    if not isinstance(target.whole, TensorSpec):
        raise ValueError(f"positions are those of a tensor, but this was {target.whole} when it was captured")
    shape, sequence, kept = tuple(target.whole.shape), _sequence(root) or of_input, target.kept_dims
    if given is not None and type(given) is not int:
        raise ValueError(f"position_dim must be an int, not {given!r}")
    if given is not None and not -len(kept) <= given < len(kept):
        part = tuple(shape[dim] for dim in kept)
        raise ValueError(f"position_dim={given} is out of range for the value recorded here, of shape {part}")
    asked = kept if given is None else [kept[given]]
    if sequence is None:
        along = asked if given is not None else [dim for dim in sequence_dims(axes_of(root, target)) if dim in kept]
        if len(along) != 1:
            raise ValueError(
                "the model does not take input_ids or inputs_embeds; give the dimension, such as position_dim=1"
            )
        return along[0], False
    of_encoder = _encoder_sequence(root)
    sequences = {True: of_encoder} if _is_inside(encoder_of(root), target) else {False: sequence, True: of_encoder}
    known = dimensions_of(root)
    found = [
        (dim, is_encoder)
        for is_encoder, profile in sequences.items()
        for dim in (known.dims_like(target.whole, profile) if profile is not None else ())
        if given is None or dim in asked
    ]
    if known.is_placed_by_values(target.frame, target.node, target.whole, asked, filter(None, sequences.values())):
        raise PositionsError(
            f"the entries of its shape {shape} are chosen, or sorted, by values (tokens that are routed to an expert, "
            "say), so they are not at positions of the sequence, however many they are",
            "choose a part with slice=",
        )
    if len(found) > 1 or (given is None and found and found[0][0] == len(shape) - 1):
        axes = axes_of(root, target)
        along = sequence_dims(axes)
        found = [item for item in found if item[0] in along] or found
        if given is None and "query" in axes and not any(dim in along for dim, _ in found):
            raise ValueError(_only_keys(shape, sequence[0], kept, [dim for dim, _ in found]))
    if cut := [dim for dim, _ in found if dim not in target.whole_dims]:
        raise PositionsError(
            f"{target.text!r} takes a part of dimension {cut[0]}, which has the positions", "drop positions="
        )
    if len(found) == 1:
        return found[0]
    encoder_length = None if of_encoder is None else of_encoder[0]
    raise _unclear(shape, sequence[0], encoder_length, given, [dim for dim, _ in found])


def _is_inside(encoder: Module | None, target: Target) -> bool:
    return encoder is not None and any(frame.module is encoder for frame in target.frame.frames_above())


def _only_keys(shape: tuple[int, ...], length: int, kept: list[int], dims: list[int]) -> str:
    repair = f"position_dim={kept.index(dims[0])}" if dims[0] in kept else "slice="
    return (
        f"positions are those of queries, but no query of its shape {shape} is one of the example's sequence, {length} "
        f"tokens: its keys are; if they are meant, use {repair}"
    )


def _unclear(
    shape: tuple[int, ...], length: int, encoder_length: int | None, given: int | None, dims: list[int]
) -> ValueError:
    lengths = f"{length} tokens" + ("" if encoder_length is None else f" and an encoder's {encoder_length} positions")
    if not dims:
        which, is_it = ("no dimension", "is") if given is None else (f"dimension {given}", "is not")
        return PositionsError(
            f"{which} of its shape {shape} {is_it} the example's sequence, {lengths}",
            "choose a part of the value with slice= and a step with steps=",
        )
    if len(set(dims)) < len(dims):
        return ValueError(
            f"the example had {lengths}, so it is not known whose positions its shape {shape} has; make the "
            "PatchableGraph with an example whose encoder and decoder sequences differ in length"
        )
    return ValueError(
        f"several dimensions of its shape {shape} have the length of the example's sequence, {lengths}; say which one "
        f"is meant: position_dim={dims[0]} or {', '.join(map(str, dims[1:]))}"
    )


def _sequence(root: Frame) -> Profile | None:
    """Returns the sequence dimension of the model's inputs."""
    spec = _token_spec(root)
    return None if spec is None else dimensions_of(root).profiles(spec)[1]


def _token_spec(root: Frame) -> TensorSpec | None:
    """Returns the input that holds the tokens: its dimensions are the batch and the sequence."""
    specs = {node.target: node.spec for node in root.inputs()}
    tokens = (specs.get(name) for name in token_inputs(root))
    return next((spec for spec in tokens if isinstance(spec, TensorSpec) and len(spec.shape) >= 2), None)


def _encoder_sequence(root: Frame) -> Profile | None:
    """Returns the sequence dimension of the encoder's output."""
    encoder = encoder_of(root)
    if encoder is None:
        return None
    outputs: list[ValueSpec] = [frame.output_node.spec for frame in root.walk() if frame.module is encoder]
    outputs += [node.spec for node in root.inputs() if node.target == "encoder_outputs"]
    for spec in outputs:
        first = spec.children[0][2] if isinstance(spec, ContainerSpec) and spec.children else spec
        if isinstance(first, TensorSpec) and len(first.shape) == 3:
            return dimensions_of(root).profiles(first)[1]
    return None
