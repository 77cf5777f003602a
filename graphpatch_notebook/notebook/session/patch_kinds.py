"""The kinds of patches that users choose by name, each in one `PatchKind`.

It defines the command of `%graphpatch` with its help and completion, the fields of the editor, the checks of a chosen
patch, and the code that is exported for it.
"""

from __future__ import annotations

import keyword
from dataclasses import dataclass, fields
from typing import Any

from graphpatch_notebook.notebook import messages
from graphpatch_notebook.patches.kinds import (
    AddPatch,
    CustomPatch,
    FromPatch,
    Patch,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    SkipPatch,
    SplicePatch,
    StopPatch,
    ZeroPatch,
)


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
        restrictions = (name for name in RESTRICTIONS if self.has_positions or not name.startswith("position"))
        return (*(name for name, is_there in own.items() if is_there), *restrictions)

    def message(self) -> messages.PatchKindForm:
        """Returns what the front end knows of it."""
        value = None if self.value is None else messages.PatchInput(self.value.noun, self.value.example)
        return messages.PatchKindForm(self.name, self.summary, list(self.fields), value)


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
        PatchKind(
            "splice",
            SplicePatch,
            "puts a sparse autoencoder in place of the value",
            value=PatchValue(
                "sae",
                "an object with methods encode and decode",
                "sae",
                "SAE",
                "SAE is a sparse autoencoder: an object with methods encode and decode.",
            ),
            examples=("splice h_1.output sae", "splice h_0.mlp.output sae --steps prefill"),
        ),
    )
}
"""All kinds by their names, in the order of the help and the editor."""
