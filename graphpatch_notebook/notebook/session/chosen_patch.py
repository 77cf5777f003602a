"""Chosen patches: what a user chose for nodes, as text. Values are evaluated when a context is entered.

A patch is of a `PatchKind`: that defines the command of `%graphpatch` with its help and completion, the fields of the
editor, the checks of a chosen patch, and the code that is exported for it.
"""

from __future__ import annotations

import ast
import builtins
import functools
import keyword
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from msgspec import structs
from torch import Tensor

from graphpatch_notebook.errors import ChosenPatchError, PatchValueError, SessionError, cut
from graphpatch_notebook.notebook.messages import PatchFields, PatchInput, PatchKindForm
from graphpatch_notebook.notebook.session.expressions import (
    SliceText,
    evaluate,
    free_names,
    numbers_text,
    parse_expression,
    parse_positions,
    parse_slice,
    parse_steps,
    variable_name,
)
from graphpatch_notebook.patches.kinds import (
    AddPatch,
    CustomPatch,
    FromPatch,
    Patch,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    SkipPatch,
    StopPatch,
    ZeroPatch,
)
from graphpatch_notebook.paths import nearest


@dataclass(frozen=True, slots=True)
class PatchValue:
    """The expression that a user types for a patch.

    Attributes:
        field: The field of the patch class that receives what the expression evaluates to.
        noun: What that must be.
        example: An expression, which the editor shows in the empty field.
        word: How the usage of the command calls it.
        help: What `%graphpatch help` says about it.
        is_function: Whether it must be a function.
        is_text: Whether it must be a text. A literal for what is neither must be a number.

    Example:
        >>> PatchValue("factor", "a number", "0.5").word
        'VALUE'
    """

    field: str
    noun: str
    example: str
    word: str = "VALUE"
    help: str = (
        "VALUE is a number, a variable or any Python expression. It is evaluated when a\n"
        "cell runs under the patches, and must broadcast to the slice."
    )
    is_function: bool = False
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class PatchKind:
    """A kind of patch that users choose by name. `register_patch_kind` adds one.

    Attributes:
        name: The name: the command is `%graphpatch NAME PATH`.
        patch: The class. It has a slice if it has a field `slice`, or keeps something.
        summary: What the patch does, for the help and the editor: `sets the value to zero`.
        value: What a user types for it, if anything.
        keeps: The attribute that holds what the patch has kept, which goes into a variable of the user's; `None` for a
            patch that keeps nothing.
        keeps_list: Whether that is a list, with one value for each call.
        examples: What follows `%graphpatch` in the examples of the help.
        is_elementwise: Whether each entry is treated alike, so that a new dimension in the slice makes no difference.

    Raises:
        ValueError: The name is not an identifier, or the class does not have the fields.

    Example:
        >>> kind = PatchKind("nothing", ZeroPatch, "sets the value to zero")
        >>> kind.fields[:2]
        ('slice', 'steps')
    """

    name: str
    patch: type[Patch[Any]]
    summary: str
    value: PatchValue | None = None
    keeps: str | None = None
    keeps_list: bool = False
    examples: tuple[str, ...] = ()
    is_elementwise: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or keyword.iskeyword(self.name):
            raise ValueError(f"the name of a patch kind must be an identifier, not {self.name!r}")
        if self.value is not None and self.value.field not in _field_names(self.patch):
            raise ValueError(f"{self.patch.__name__} has no field {self.value.field!r}")
        if self.value is not None and self.keeps is not None:
            raise ValueError(f"a patch kind takes a value or keeps one, but {self.name!r} does both")

    @property
    def has_slice(self) -> bool:
        """Whether it may be limited to a slice of the value."""
        return self.keeps is not None or "slice" in _field_names(self.patch)

    @property
    def has_positions(self) -> bool:
        """Whether it may be limited to positions: a run ends, and a call is replaced, as a whole."""
        return not (self.patch.stops_run or self.patch.replaces_call)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a `ChosenPatch` of this kind that a user may fill in, in the order of the editor."""
        own = {"slice": self.has_slice, "value": self.value is not None, "name": self.keeps is not None}
        restrictions = {name: self.has_positions or not name.startswith("position") for name in RESTRICTIONS}
        return tuple(name for name, is_there in {**own, **restrictions}.items() if is_there)

    def message(self) -> PatchKindForm:
        """Returns what the front end knows of it."""
        value = None if self.value is None else PatchInput(self.value.noun, self.value.example)
        return PatchKindForm(self.name, self.summary, list(self.fields), value)


FLAGS = ("any_shape", "allow_empty")
"""The fields of a patch that are `True` or `False`."""

RESTRICTIONS = ("steps", "positions", "position_dim", *FLAGS)
"""The fields that a patch of every kind has, positions where they make sense: when, where and to what it is applied."""


def _field_names(patch: type[Patch[Any]]) -> set[str]:
    return {field.name for field in fields(patch)}


_TENSOR = PatchValue("value", "a number or a tensor", "0.5 * steering")

PATCH_KINDS = {
    kind.name: kind
    for kind in (
        PatchKind(
            "zero",
            ZeroPatch,
            "sets the value to zero",
            examples=("zero h_0.mlp.output[:, -1]", "zero h_0.attn.output|sub_0 --steps decoding"),
            is_elementwise=True,
        ),
        PatchKind(
            "add",
            AddPatch,
            "adds to the value",
            value=_TENSOR,
            examples=("add h_0.output 0.5 * steering", "add h_0.output[:, -1] noise --steps prefill"),
        ),
        PatchKind(
            "replace",
            ReplacePatch,
            "replaces the value",
            value=_TENSOR,
            examples=("replace h_0.mlp.output other_run", "replace h_0.output[:, 3] torch.ones(768) --any-shape"),
        ),
        PatchKind(
            "probe",
            ProbePatch,
            "puts the value in a variable",
            keeps="activation",
            examples=("probe h_1.output[:, -1] hidden", "probe h_{i}.mlp.output mlp_{i}"),
        ),
        PatchKind(
            "record",
            RecordPatch,
            "puts the values of all calls in a list",
            keeps="activations",
            keeps_list=True,
            examples=("record h_1.output[:, -1] states", "record output|logits --steps decoding"),
        ),
        PatchKind(
            "stop",
            StopPatch,
            "ends the run, which returns the value",
            examples=("stop h_1.output", "stop h_1.output --steps 3"),
        ),
        PatchKind(
            "skip",
            SkipPatch,
            "skips the module, whose output is its input",
            examples=("skip h_1.mlp", "skip h_1 --steps decoding"),
        ),
        PatchKind(
            "copy_from",
            FromPatch,
            "replaces the value by another one of the same run",
            value=PatchValue(
                "source",
                "the path of another value in quotes",
                '"h_0.output"',
                "SOURCE",
                "SOURCE is the path of the other value, which comes earlier in the run.",
                is_text=True,
            ),
            examples=(
                "copy_from h_1.output h_0.output",
                "copy_from h_1.mlp.output h_0.mlp.output --steps prefill",
            ),
        ),
        PatchKind(
            "custom",
            CustomPatch,
            "applies a function to the value",
            value=PatchValue(
                "custom_op",
                "a function",
                "lambda x: x.relu()",
                "FUNCTION",
                "FUNCTION takes the value and returns another one: a variable, or a lambda.",
                is_function=True,
            ),
            examples=("custom h_0.output lambda value: value.clamp(-1, 1)", "custom h_0.mlp.output[:, -1] rotate"),
        ),
    )
}
"""All kinds by their names, in the order of the help and the editor."""


# --------------------------------------------------------------------------------------------------------------------
# Chosen patches


_CANONICAL = {
    "slice": lambda text: str(parse_slice(text)),
    "value": parse_expression,
    "steps": lambda text: numbers_text(parse_steps(text)),
    "positions": lambda text: numbers_text(parse_positions(text)),
    "name": variable_name,
}
"""By field: returns the canonical text of what was typed, or raises a `ValueError`."""


class ChosenPatch(PatchFields, frozen=True):
    """One patch that a user chose, as typed. Immutable; texts are in canonical form.

    Attributes:
        is_enabled: Whether it is applied.
        number: The `n` of `#n` in the notebook. The session sets it.

    Raises:
        ChosenPatchError: A field is not valid, or this kind does not have it.

    Example:
        >>> chosen = ChosenPatch("h_0.mlp.output", "add", slice=":, -1", value="0.5 * steering")
        >>> print(chosen)
        add h_0.mlp.output[:, -1] 0.5 * steering
    """

    is_enabled: bool = True
    number: int = 0

    def __post_init__(self) -> None:
        if self.kind not in PATCH_KINDS:
            close, names = nearest(self.kind, list(PATCH_KINDS), 1), ", ".join(PATCH_KINDS)
            raise ChosenPatchError("kind", f"unknown kind {cut(repr(self.kind))}; nearest: {close[0]!r} of {names}")
        kind = self.definition
        if kind.value is not None and self.value is None:
            raise ChosenPatchError("value", f"{self.kind} needs a value: {kind.value.noun}")
        if kind.keeps is not None and self.name is None:
            raise ChosenPatchError("name", f"{self.kind} needs the name of a variable to put the activation in")
        for field in ("slice", "value", "name", "positions", "position_dim"):
            if getattr(self, field) is not None and field not in kind.fields:
                raise ChosenPatchError(field, f"{self.kind} takes no {field}: it {kind.summary}")
        for field, canonical in _CANONICAL.items():
            if (text := getattr(self, field)) is not None:
                try:
                    structs.force_setattr(self, field, canonical(text))
                except ValueError as error:
                    raise ChosenPatchError(field, str(error)) from None
        if kind.value is not None and not kind.value.is_function:
            literal: Any = "" if kind.value.is_text else 0  # the type of another expression is not known yet
            with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                literal = ast.literal_eval(str(self.value))
            if not isinstance(literal, str if kind.value.is_text else (int, float, complex)):
                raise ChosenPatchError("value", f"{self.kind} takes {kind.value.noun}, not {cut(str(self.value))}")
        if self.position_dim is not None and self.positions is None:
            raise ChosenPatchError("position_dim", f"position_dim={self.position_dim} has no effect without positions")

    @property
    def definition(self) -> PatchKind:
        """The entry of its kind in `PATCH_KINDS`."""
        return PATCH_KINDS[self.kind]

    @property
    def is_function(self) -> bool:
        """Whether its value is a function."""
        return self.definition.value is not None and self.definition.value.is_function

    @property
    def index(self) -> SliceText | None:
        """The slice, parsed."""
        return None if self.slice is None else parse_slice(self.slice)

    def restrictions(self) -> dict[str, Any]:
        """Returns the fields of a `Patch` that restrict when and where it is applied, if they are set."""
        parse: dict[str, Callable[[Any], Any]] = {"steps": parse_steps, "positions": parse_positions}
        typed = {name: getattr(self, name) for name in RESTRICTIONS}
        given = {name: value for name, value in typed.items() if value is not None and value is not False}
        return {name: parse[name](value) if name in parse else value for name, value in given.items()}

    def patch(self, namespace: dict[str, Any]) -> Patch[Any]:
        """Returns the patch, with its value and slice evaluated in the user's `namespace`.

        The patch of a kind that keeps something does not have the slice: `taken` applies it.

        Raises:
            Exception: Any error of the value's expression.
        """
        given = self.restrictions()
        if self.index is not None and self.definition.keeps is None:
            given["slice"] = self.index.index(namespace)
        if self.value is not None and self.definition.value is not None:
            given[self.definition.value.field] = evaluate(self.value, namespace, f"value of patch #{self.number}")
        return self.definition.patch(**given)

    def taken(self, patch: Patch[Any], namespace: Mapping[str, Any]) -> Any:
        """Returns what the patch has kept, sliced: the value for its variable. `None` if a probe never fired.

        Raises:
            PatchValueError: The model has overwritten a kept value, or the slice does not fit one.
        """
        kept = getattr(patch, str(self.definition.keeps))
        if self.definition.keeps_list:
            return [self.part(value, namespace) for value in kept]
        return None if kept is None else self.part(kept, namespace)

    def part(self, value: Any, namespace: Mapping[str, Any]) -> Any:
        """Returns the part of a value that the slice selects."""
        if self.index is None:
            return value
        try:
            return value[self.index.index(namespace)]
        except Exception as error:
            what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
            raise PatchValueError(f"cannot take [{self.slice}] of a value {what}: {error}") from None

    @property
    def place(self) -> str:
        """The path, with the slice in brackets."""
        # After `latents`, a number alone would be one of these.
        is_clear = self.slice is None or not self.path.endswith(".latents") or "," in self.slice or "..." in self.slice
        return self.path if self.slice is None else f"{self.path}[{self.slice}{'' if is_clear else ', ...'}]"

    def __str__(self) -> str:
        words = [self.kind, self.place, self.value or (f"as {self.name}" if self.name else ""), *self.options()]
        return " ".join(word for word in words if word)

    def options(self) -> list[str]:
        """Returns the restrictions as options of the magic: `--steps decoding`, ..."""
        typed = {"steps": self.steps, "positions": self.positions, "position-dim": self.position_dim}
        words = [f"--{name} {_quoted(str(value))}" for name, value in typed.items() if value is not None]
        return [*words, *(f"--{flag.replace('_', '-')}" for flag in FLAGS if getattr(self, flag))]

    def with_fields(self, **changed: Any) -> ChosenPatch:
        """Returns the same patch with other values of some fields."""
        return structs.replace(self, **changed)


@dataclass(frozen=True, slots=True)
class ChosenPatches:
    """The chosen patches at one moment. Immutable, so a cell can run with them while the session changes."""

    version: int = 0  # how often the session has changed; an undo is also a change
    patches: tuple[ChosenPatch, ...] = ()  # as they are applied

    @property
    def enabled(self) -> tuple[ChosenPatch, ...]:
        """The patches that are applied."""
        return tuple(patch for patch in self.patches if patch.is_enabled)

    def find(self, number: int) -> ChosenPatch:
        """Returns the patch with this number."""
        for patch in self.patches:
            if patch.number == number:
                return patch
        there = ", ".join(f"#{patch.number}" for patch in self.patches)
        raise SessionError(f"unknown patch #{number}; " + (f"chosen: {there}" if there else "none is chosen"))

    def only(self, numbers: Iterable[int]) -> ChosenPatches:
        """Returns the patches with these numbers, in the order of the session."""
        wanted = set(numbers)
        for unknown in wanted - {patch.number for patch in self.patches}:
            self.find(unknown)  # raises the error
        return replace(self, patches=tuple(patch for patch in self.patches if patch.number in wanted))


def fields_of(patch: PatchFields) -> dict[str, Any]:
    """Returns what a user types for a patch, by field."""
    return {name: getattr(patch, name) for name in PatchFields.__struct_fields__}


def names_used(patches: Iterable[ChosenPatch]) -> set[str]:
    """Returns the names that values and slices use, including builtins."""
    return {name for patch in patches for name in _names_in(patch.value, patch.slice)}


@functools.lru_cache(10_000)
def _names_in(value: str | None, index: str | None) -> frozenset[str]:
    return frozenset((*(free_names(value) if value else ()), *(parse_slice(index).names if index else ())))


def unknown_names(patch: ChosenPatch, namespace: dict[str, Any]) -> str:
    """Returns which names a patch uses that are not defined yet; an empty text without any."""
    names = sorted(names_used([patch]))
    unknown = [name for name in names if name not in namespace and not hasattr(builtins, name)]
    return f"{', '.join(map(repr, unknown))} {'is' if len(unknown) == 1 else 'are'} not defined yet" if unknown else ""


def _quoted(text: str) -> str:
    return f'"{text}"' if " " in text else text
