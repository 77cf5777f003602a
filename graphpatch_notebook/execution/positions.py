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


def restriction_of(root: Frame, target: Target, patch: Patch[Any]) -> Restriction | None:
    """Returns where `patch` has an effect on `target` (`None`: everywhere), or raises a `ValueError` with a repair."""
    if patch.steps is None and patch.positions is None:
        return None
    steps = None if patch.steps is None else selection(patch.steps, "steps", allow_empty=patch.allow_empty)
    if patch.positions is None:
        return Restriction(steps, None)
    if not takes_tokens(root):
        raise ValueError(
            "positions are known for models that take input_ids or inputs_embeds, and were captured with them; use "
            "slice= to choose a part of the value"
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


# -- which dimension is the batch --------------------------------------------------------------------------------------


def row_dimension(root: Frame, target: Target, position_dim: int | None) -> int:
    """Returns the dimension of a target's whole value that holds the batch and nothing else; raises a `ValueError`.

    The batch is the first dimension of the tokens, or of the first input. `position_dim` is that of the sequence.
    """
    tensors = (spec for node in root.inputs() for spec in tensor_specs(node.spec) if spec.shape)
    spec, whole, known = _token_spec(root) or next(tensors, None), target.whole, dimensions_of(root)
    if not isinstance(whole, TensorSpec):
        raise ValueError(f"it was {whole} when it was captured, and only tensors have rows")
    found = [] if spec is None else known.dims_like(whole, known.profiles(spec)[0])
    found = [dim for dim in found if dim != position_dim]
    if len(found) > 1:
        axes = axes_of(root, target)
        found = [dim for dim in found if axes[dim : dim + 1] == ("batch",)] or found
    if len(found) != 1:
        which = f"dimensions {', '.join(map(str, found))} may" if found else "none does"
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
    whole, known, sequences = target.whole, dimensions_of(root), _sequences(root, target)
    spec, dim, is_encoder = _token_spec(root), None, False
    for of_encoder, sequence in sequences.items():
        if spec is not None and axes_of(root, target)[:1] == ("token",) and isinstance(whole, TensorSpec):
            merged = tuple(count * size for count, size in zip(known.profiles(spec)[0], sequence, strict=False))
            is_ordered = not known.is_placed_by_values(target.frame, target.node, whole, [0], [merged])
            if 0 in known.dims_like(whole, merged) and is_ordered:
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
    spec, whole, known = _token_spec(root), target.whole, dimensions_of(root)
    if spec is None or not isinstance(whole, TensorSpec) or target.node.kind in HELD_KINDS:
        return None
    sequence = known.profiles(spec)[1]
    dims = [dim for dim in known.dims_like(whole, sequence) if dim in target.whole_dims]
    # By equal sizes only: a guess where there are two, or two sequences.
    is_guess = not known.is_known(whole) and (len(dims) > 1 or encoder_of(root) is not None)
    if not dims or is_guess or known.is_placed_by_values(target.frame, target.node, whole, dims, [sequence]):
        return None
    kept, row = target.kept_dims, None
    with suppress(ValueError):
        row = kept.index(row_dimension(root, target, dims[0]))
    return TokenDims(row, tuple(map(kept.index, dims)))


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
    whole, kept = target.whole, target.kept_dims
    if target.node.kind in HELD_KINDS:
        raise ValueError(f"a {target.node.kind} has no positions; drop positions=")
    if not isinstance(whole, TensorSpec):
        raise ValueError(f"positions are those of a tensor, but this was {whole} when it was captured")
    if given is not None and (type(given) is not int or not -len(kept) <= given < len(kept)):
        raise ValueError(f"position_dim must be a dimension of the value recorded here, {target.spec}, not {given!r}")
    asked = kept if given is None else [kept[given]]
    sequences = _sequences(root, target) or ({} if of_input is None else {False: of_input})
    if not sequences:
        along = asked if given is not None else [dim for dim in _sequence_dims(root, target) if dim in kept]
        if len(along) != 1:
            raise ValueError(
                "the model does not take input_ids or inputs_embeds; give the dimension, such as position_dim=1"
            )
        return along[0], False
    known, shape = dimensions_of(root), tuple(whole.shape)
    if known.is_placed_by_values(target.frame, target.node, whole, asked, sequences.values()):
        raise ValueError(
            f"the entries of its shape {shape} are chosen, or sorted, by values (tokens that are routed to an expert, "
            "say), so they are not at positions of the sequence, however many they are; choose a part with slice="
        )
    found = [
        (dim, is_encoder)
        for is_encoder, profile in sequences.items()
        for dim in known.dims_like(whole, profile)
        if given is None or dim in asked
    ]
    if len(found) > 1 or (given is None and found and found[0][0] == len(shape) - 1):
        along = _sequence_dims(root, target)
        chosen = [item for item in found if item[0] in along]
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
    lengths = " and an encoder's ".join(str(profile[0]) for profile in sequences.values())
    if not found:
        which = "no dimension of its shape {} is" if given is None else f"dimension {given} of its shape {{}} is not"
        raise ValueError(
            f"{which.format(shape)} the example's sequence, of length {lengths}; choose a part of the value with "
            "slice= and a step with steps="
        )
    listed = " or ".join(str(dim) for dim, _ in found)
    raise ValueError(
        f"several dimensions of its shape {shape} may be the example's sequence, of length {lengths}; say which: "
        f"position_dim={listed}"
    )


def _sequence_dims(root: Frame, target: Target) -> list[int]:
    """Returns the dimensions of a component that run along the sequence: in a pattern, the queries."""
    return [dim for dim, axis in enumerate(axes_of(root, target)) if axis in ("position", "query")]


def _sequences(root: Frame, target: Target) -> dict[bool, Profile]:
    """Returns the sequences that a value may run along, by whether it is that of an encoder; none without tokens."""
    spec, encoder = _token_spec(root), encoder_of(root)
    found = {} if spec is None else {False: dimensions_of(root).profiles(spec)[1]}
    if encoder is None:
        return found
    if any(frame.module is encoder for frame in target.frame.frames_above()):
        found = {}
    outputs: list[ValueSpec] = [frame.output_node.spec for frame in root.walk() if frame.module is encoder]
    outputs += [node.spec for node in root.inputs() if node.target == "encoder_outputs"]
    for output in outputs:
        first = output.children[0][2] if isinstance(output, ContainerSpec) and output.children else output
        if isinstance(first, TensorSpec) and len(first.shape) == 3:
            return found | {True: dimensions_of(root).profiles(first)[1]}
    return found


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


def _token_spec(root: Frame) -> TensorSpec | None:
    """Returns the input that holds the tokens: its dimensions are the batch and the sequence."""
    specs = {node.target: node.spec for node in root.inputs()}
    tokens = (specs.get(name) for name in token_inputs(root))
    return next((spec for spec in tokens if isinstance(spec, TensorSpec) and len(spec.shape) >= 2), None)
