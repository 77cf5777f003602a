"""Chosen patches: what a user chose for nodes, as text. Values are evaluated when a context is entered."""

from __future__ import annotations

import ast
import builtins
import keyword
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from graphpatch_notebook.errors import ChosenPatchError, PatchValueError, SessionError, UntrustedValueError
from graphpatch_notebook.notebook.session.expressions import (
    evaluate,
    free_names,
    parse_expression,
    parsed,
    without_syntax_warnings,
)
from graphpatch_notebook.notebook.session.patch_kinds import FLAGS, PATCH_KINDS, PatchKind, PatchValue
from graphpatch_notebook.notebook.session.slices import SliceText, parse_slice
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patches.selections import NAMED_STEPS
from graphpatch_notebook.paths import nearest

_OF_IPYTHON = frozenset({"In", "Out", "exit", "quit", "get_ipython"})


@dataclass(frozen=True, slots=True)
class UntrustedFile:
    """A session file that the user has not trusted yet."""

    name: str
    digest: str

    @property
    def repair(self) -> str:
        """The command that trusts it."""
        return f"%graphpatch load {_quoted(self.name)} --trust"


@dataclass(frozen=True, slots=True)
class ChosenPatch:
    """One patch that a user chose, as typed. Immutable.

    Attributes:
        path: The node path, with the keys of a value in a container.
        kind: The name of a `PatchKind`: `zero`, `add`, `probe`, ...
        slice: The text between brackets; `None` for the whole value.
        value: A Python expression, for the kinds that take one: what to add, the function to apply.
        name: The variable that receives what the patch keeps, for the kinds that keep something.
        is_enabled: Whether it is applied.
        steps: The steps of a generation: `prefill`, `decoding`, or numbers as in a slice (`0`, `2, 4`, `1:`).
        positions: The positions in the sequence, as numbers in the same form.
        position_dim: The dimension that runs along the sequence, if it cannot be inferred.
        any_shape: Apply it also to values of another rank or of other sizes than at capture.
        allow_empty: Whether the slice may select nothing.
        number: The `n` of `#n` in the notebook. The session sets it.
        untrusted: The file that the value is from, if the user must trust it before the value is evaluated.

    Raises:
        ChosenPatchError: A field is not valid, or this kind does not have it.

    Example:
        >>> chosen = ChosenPatch("h_0.mlp.output", "add", slice=":, -1", value="0.5 * steering")
        >>> print(chosen)
        add h_0.mlp.output[:, -1] 0.5 * steering
    """

    path: str
    kind: str
    slice: str | None = None
    value: str | None = None
    name: str | None = None
    is_enabled: bool = True
    steps: str | None = None
    positions: str | None = None
    position_dim: int | None = None
    any_shape: bool = False
    allow_empty: bool = False
    number: int = 0
    untrusted: UntrustedFile | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "untrusted":
                _check_type(field.name, getattr(self, field.name), str(field.type))
        if self.kind not in PATCH_KINDS:
            close, names = nearest(self.kind, list(PATCH_KINDS), 1), ", ".join(PATCH_KINDS)
            raise ChosenPatchError("kind", f"unknown kind {self.kind!r}; nearest: {close[0]!r} of {names}")
        self._check_fields_of_kind()
        for what, parse in (("slice", parse_slice), ("value", parse_expression), ("steps", parse_numbers)):
            self._check_text(what, parse)
        if (wanted := self.definition.value) is not None and not wanted.is_function:
            _check_literal(self.kind, wanted, str(self.value))
        self._check_text("positions", parse_positions)
        if self.positions in NAMED_STEPS:
            raise ChosenPatchError("positions", f"positions are numbers, but {self.positions!r} is a name for steps")
        if self.position_dim is not None and self.positions is None:
            raise ChosenPatchError("position_dim", f"position_dim={self.position_dim} has no effect without positions")
        if self.name is not None:
            # As Python normalizes names: exported code would use that variable.
            object.__setattr__(self, "name", unicodedata.normalize("NFKC", self.name))
            _check_variable(self.name)

    def _check_fields_of_kind(self) -> None:
        kind = self.definition
        if kind.value is not None and self.value is None:
            raise ChosenPatchError("value", f"{self.kind} needs a value: {kind.value.noun}")
        if kind.value is None and self.value is not None:
            raise ChosenPatchError("value", f"{self.kind} takes no value, but {self.value!r} was given")
        if kind.keeps is not None and self.name is None:
            raise ChosenPatchError("name", f"{self.kind} needs the name of a variable to put the activation in")
        if kind.keeps is None and self.name is not None:
            raise ChosenPatchError("name", f"{self.kind} puts nothing in a variable, but {self.name!r} was named")
        if not kind.has_slice and self.slice is not None:
            raise ChosenPatchError("slice", f"{self.kind} takes no slice, but [{self.slice}] was given")
        if not kind.has_positions and self.positions is not None:
            raise ChosenPatchError("positions", f"{self.kind} takes no positions: it {kind.summary}")

    def _check_text(self, what: str, parse: Any) -> None:
        text = getattr(self, what)
        if text is None:
            return
        try:
            parsed = parse(text)
        except ValueError as error:
            named = f"; steps are also named {' and '.join(NAMED_STEPS)}" if what == "steps" else ""
            raise ChosenPatchError(what, f"{error}{named}") from None
        object.__setattr__(self, what, parsed if isinstance(parsed, str) else str(parsed))

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
        for what in ("steps", "positions"):
            if (text := getattr(self, what)) is not None:
                found[what] = _numbers(text)
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
        index = None if self.index is None else self.index.index(namespace)
        value = None if self.value is None else evaluate(self.value, namespace, f"value of patch #{self.number}")
        given: dict[str, Any] = self.restrictions()
        if self.definition.value is not None:
            given[self.definition.value.field] = value
        if index is not None and self.definition.keeps is None:
            given["slice"] = index
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
            raise PatchValueError(
                f"#{self.number} ({self}): cannot take [{self.slice}] of a value {what}: {error}"
            ) from None

    @property
    def place(self) -> str:
        """The path, with the slice in brackets."""
        return self.path if self.slice is None else f"{self.path}[{self.slice}]"

    def __str__(self) -> str:
        words = [self.kind, self.place, self.value or self.name or "", *self.options()]
        return " ".join(word for word in words if word)

    def options(self) -> list[str]:
        """Returns the restrictions as options of the magic: `--steps decoding`, ..."""
        texts = [
            f"--{what} {_quoted(text)}" for what in ("steps", "positions") if (text := getattr(self, what)) is not None
        ]
        dim = [] if self.position_dim is None else [f"--position-dim {self.position_dim}"]
        return [*texts, *dim, *(f"--{flag.replace('_', '-')}" for flag in FLAGS if getattr(self, flag))]

    def numbered(self, number: int) -> ChosenPatch:
        """Returns the same patch with another number."""
        return replace(self, number=number)


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
        found = next((patch for patch in self.patches if patch.number == number), None)
        if found is None:
            there = ", ".join(f"#{patch.number}" for patch in self.patches)
            raise SessionError(f"unknown patch #{number}; " + (f"chosen: {there}" if there else "none is chosen"))
        return found

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


def parse_numbers(text: str) -> str:
    """Returns numbers as typed (`3`, `2, 40`, `1:`, `prefill`), in their canonical form.

    Raises:
        ValueError: The text is not such a list of numbers.
    """
    stripped = text.strip()
    if stripped in NAMED_STEPS:
        return stripped
    typed = parse_slice(stripped)
    is_list = all(isinstance(part, int) for part in typed.parts)
    is_range = len(typed.parts) == 1 and isinstance(typed.parts[0], slice)
    if typed.names or not (is_list or is_range):
        raise ValueError(f"{text!r} is not a list of whole numbers; write 3, or 2, 40, or 1:5")
    return str(typed)


def parse_positions(text: str) -> str:
    """Returns positions as typed, in their canonical form: as `parse_numbers`, or those of each row of the batch.

    Raises:
        ValueError: The text is neither.

    Example:
        >>> parse_positions("2,40"), parse_positions("[3], [5], [2]")
        ('2, 40', '[[3], [5], [2]]')
    """
    stripped = text.strip()
    if "[" not in stripped:
        return parse_numbers(text)
    is_whole = stripped.startswith("[[") and stripped.endswith("]]")
    typed = parse_slice(stripped[1:-1] if is_whole else stripped)
    is_rows = all(isinstance(part, list) for part in typed.parts) and (is_whole or len(typed.parts) > 1)
    if typed.names or not is_rows:
        raise ValueError(f"{text!r} has no positions for each row of the batch; write [3], [5], [2]")
    return f"[{typed}]"


def _numbers(text: str) -> Any:
    if text in NAMED_STEPS:
        return text
    if text.startswith("[["):  # positions of each row
        return ast.literal_eval(text)
    typed = parse_slice(text)
    parts = typed.index({})
    return list(parts) if isinstance(parts, tuple) else parts


def _quoted(text: str) -> str:
    return f'"{text}"' if " " in text else text


def _check_type(what: str, value: Any, annotation: str) -> None:
    kinds = {"str": str, "bool": bool, "int": int, "None": type(None)}
    allowed = tuple(kinds[word.strip()] for word in annotation.split("|"))
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise ChosenPatchError(what, f"{what} must be {annotation}, not {value!r}")


def _check_literal(kind: str, wanted: PatchValue, value: str) -> None:
    """Raises if a literal is not a number, or not a text. The type of any other expression is not known yet."""
    try:
        with without_syntax_warnings():
            literal = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return
    if isinstance(literal, str if wanted.is_text else (int, float, complex)):
        return
    what = "None" if literal is None else f"a {type(literal).__name__}"
    is_list = isinstance(literal, (list, tuple)) and not wanted.is_text
    repair = f": torch.tensor({ast.unparse(parsed(value))})" if is_list else ""
    raise ChosenPatchError("value", f"{kind} takes {wanted.noun}, not {what}, {value}{repair}")


def _check_variable(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ChosenPatchError("name", f"{name!r} cannot be the name of a variable")
    if kind := reserved(name):
        raise ChosenPatchError("name", f"{name!r} {kind}: choose another name for the variable")


def reserved(name: str) -> str:
    """Returns why a variable of the user should not have this name; an empty string if it may."""
    if name.startswith("_"):
        return "begins with an underscore, like the variables of IPython"
    if name in _OF_IPYTHON:
        return "is a variable of IPython"
    return "is a builtin of Python" if hasattr(builtins, name) else ""
