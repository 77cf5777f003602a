"""Chosen patches: what a user chose for nodes, as text. Values are evaluated when a context is entered."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs
from torch import Tensor

from graphpatch_notebook.errors import ChosenPatchError, PatchValueError, SessionError, UntrustedValueError
from graphpatch_notebook.notebook.messages import PatchFields
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
from graphpatch_notebook.notebook.session.patch_kinds import FLAGS, PATCH_KINDS, PatchKind
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.paths import nearest

_CANONICAL = {
    "slice": lambda text: str(parse_slice(text)),
    "value": parse_expression,
    "steps": lambda text: numbers_text(parse_steps(text)),
    "positions": lambda text: numbers_text(parse_positions(text)),
    "name": variable_name,
}
"""By field: returns the canonical text of what was typed, or raises a `ValueError`."""


@dataclass(frozen=True, slots=True)
class UntrustedFile:
    """A session file that the user has not trusted yet."""

    name: str
    digest: str

    @property
    def repair(self) -> str:
        """The command that trusts it."""
        return f"%graphpatch load {_quoted(self.name)} --trust"


class ChosenPatch(PatchFields, frozen=True):
    """One patch that a user chose, as typed. Immutable; texts are in canonical form.

    Attributes:
        is_enabled: Whether it is applied.
        number: The `n` of `#n` in the notebook. The session sets it.
        untrusted: The file that the value is from, if the user must trust it before the value is evaluated.

    Raises:
        ChosenPatchError: A field is not valid, or this kind does not have it.

    Example:
        >>> chosen = ChosenPatch("h_0.mlp.output", "add", slice=":, -1", value="0.5 * steering")
        >>> print(chosen)
        add h_0.mlp.output[:, -1] 0.5 * steering
    """

    is_enabled: bool = True
    number: int = 0
    untrusted: UntrustedFile | None = None

    def __post_init__(self) -> None:
        if self.kind not in PATCH_KINDS:
            close, names = nearest(self.kind, list(PATCH_KINDS), 1), ", ".join(PATCH_KINDS)
            raise ChosenPatchError("kind", f"unknown kind {self.kind!r}; nearest: {close[0]!r} of {names}")
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
                raise ChosenPatchError("value", f"{self.kind} takes {kind.value.noun}, not {self.value}")
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
        found: dict[str, Any] = {}
        if self.steps is not None:
            found["steps"] = parse_steps(self.steps)
        if self.positions is not None:
            found["positions"] = parse_positions(self.positions)
        if self.position_dim is not None:
            found["position_dim"] = self.position_dim
        return found | {flag: True for flag in FLAGS if getattr(self, flag)}

    def patch(self, namespace: dict[str, Any]) -> Patch[Any]:
        """Returns the patch, with its value and slice evaluated in the user's `namespace`.

        The patch of a kind that keeps something does not have the slice: `taken` applies it.

        Raises:
            UntrustedValueError: The value is from a file that the user has not trusted yet.
            Exception: Any error of the value's expression.
        """
        if self.untrusted is not None:
            raise UntrustedValueError(
                f"the value is code from {self.untrusted.name!r}, which you have not trusted: nothing ran; read the "
                f"value, then trust the file with {self.untrusted.repair}, or disable #{self.number}"
            )
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
        return self.path if self.slice is None else f"{self.path}[{self.slice}]"

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
        wanted = {self.find(number).number for number in numbers}
        return replace(self, patches=tuple(patch for patch in self.patches if patch.number in wanted))


def names_used(patches: Iterable[ChosenPatch]) -> set[str]:
    """Returns the names that values and slices use, including builtins."""
    names: set[str] = set()
    for patch in patches:
        names |= {*(free_names(patch.value) if patch.value else ()), *(patch.index.names if patch.index else ())}
    return names


def unknown_names(patch: ChosenPatch, namespace: dict[str, Any]) -> str:
    """Returns which names a patch uses that are not defined yet; an empty text without any."""
    names = sorted(names_used([patch]))
    unknown = [name for name in names if name not in namespace and not hasattr(builtins, name)]
    return f"{', '.join(map(repr, unknown))} {'is' if len(unknown) == 1 else 'are'} not defined yet" if unknown else ""


def _quoted(text: str) -> str:
    return f'"{text}"' if " " in text else text
