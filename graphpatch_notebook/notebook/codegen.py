"""Chosen patches as Python source that uses graphpatch. Pure text: nothing is evaluated, nothing runs.

ChosenPatches, Origin, records of the capture
  -> "with pg.patch({...}): output = pg(ids)"          (`graphpatch_source`)
  -> the same by plain forward hooks of torch          (`codegen_hooks.hooks_source`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.notebook.chosen import FLAGS, OBSERVING, ChosenPatch, ChosenPatches
from graphpatch_notebook.notebook.codegen_hooks import hooks_source
from graphpatch_notebook.notebook.expressions import without_syntax_warnings
from graphpatch_notebook.notebook.origin import Origin
from graphpatch_notebook.notebook.session import Session
from graphpatch_notebook.notebook.slices import parse_slice
from graphpatch_notebook.notebook.source_binding import bound_for_map
from graphpatch_notebook.notebook.source_code import SourceCode
from graphpatch_notebook.notebook.source_layout import (
    WIDTH,
    Group,
    Source,
    columns,
    indented,
    lines,
    text_literal,
    with_prefix,
)
from graphpatch_notebook.notebook.source_names import (
    Arguments,
    Names,
    Needs,
    in_order,
    parse_arguments,
    user_names,
)
from graphpatch_notebook.notebook.source_parts import (
    as_source,
    as_value,
    by_path,
    call_arguments,
    enabled_of,
    is_name,
    joined,
    left_out,
    name_of_model,
    needed_by,
    result_lines,
    unknown_inputs,
)
from graphpatch_notebook.selections import NAMED_STEPS

_CLASSES = {
    "zero": "ZeroPatch",
    "add": "AddPatch",
    "replace": "ReplacePatch",
    "probe": "ProbePatch",
    "record": "RecordPatch",
    "custom": "CustomPatch",
}


Form: TypeAlias = Literal["graphpatch", "hooks"]


def export(
    session: Session,
    form: Form = "graphpatch",
    *,
    wrap: bool = False,
    chosen: ChosenPatches | None = None,
    origin: Origin | None = None,
) -> SourceCode:
    """Returns the enabled patches of a session as Python; runs and evaluates nothing.

    Args:
        session: The session.
        form: With `graphpatch`, or as a script on plain forward hooks.
        wrap: Make the `PatchableGraph` in the code, too (for a file that is to be run by itself); of `model`, where it
            is not known what it was made of.
        chosen: The patches; those of the session now, if left out.
        origin: How graph, model and inputs are written; as the session knows it, if left out.

    Raises:
        ExportError: No patch is enabled; or hooks cannot do what some of them do (one message names them all).

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Linear(2, 3), torch.ones(1, 2))
        >>> session = Session(pg, Origin("pg", "model", "torch.ones(1, 2)"))
        >>> _ = session.add(ChosenPatch("linear", "zero", slice=":, -1"))
        >>> export(session)
        # Needs: pg
        import torch
        from graphpatch import ZeroPatch
        <BLANKLINE>
        with pg.patch({"linear": ZeroPatch(slice=(slice(None), -1))}):
            output = pg(torch.ones(1, 2))
    """
    patches = session.chosen if chosen is None else chosen
    root = session.graph._root_frame
    origin = session.origin if origin is None else origin
    with without_syntax_warnings():
        if form == "hooks":
            return hooks_source(patches, origin, root)
        return graphpatch_source(patches, origin, root, wrap=wrap)


def graphpatch_source(chosen: ChosenPatches, origin: Origin, root: Frame, *, wrap: bool = False) -> SourceCode:
    """Returns code that runs the graph with the enabled patches, and puts what they keep in its variables.

    Run in a fresh interpreter that has the names which its first line lists, it gives the numbers of
    `with pg.patch(session.resolve(...).patch_map)`, bit for bit.

    Args:
        chosen: The patches.
        origin: How the user made the graph.
        root: The root frame of its capture.
        wrap: Make the `PatchableGraph` in the code, too.

    Raises:
        ExportError: No patch is enabled: code that patches nothing is not what anybody wants to keep.
    """
    return _Export(enabled_of(chosen), origin, root, wrap).source(len(chosen.patches))


class _Export:
    """One export in the graphpatch form."""

    def __init__(self, patches: tuple[ChosenPatch, ...], origin: Origin, root: Frame, wrap: bool) -> None:
        self.patches = patches
        self.origin = origin
        self.wrap = wrap
        mine = user_names(patches, origin)
        self.arguments = call_arguments(origin, root, {str(p.name) for p in patches})
        self.names = Names({*mine, *in_order(self.arguments.expression), "torch"})
        self.model = name_of_model(patches, origin, self.names)
        self.classes = {name: self.names.free(name) for name in self._used_classes()}
        self.result = self.names.free("output", "result")
        self.observers = {p.number: self.names.free(f"{p.name}_{p.kind}") for p in patches if p.kind in OBSERVING}
        self.values = {p.number: as_value(p) for p in patches if p.value is not None}
        self.bound = bound_for_map(patches, self._call_arguments(), self.names)

    def _used_classes(self) -> list[str]:
        used = {_CLASSES[patch.kind] for patch in self.patches}
        return sorted(used | ({"PatchableGraph"} if self.wrap else set()))

    def source(self, count: int) -> SourceCode:
        """Returns all of the code; `count` patches were chosen, enabled or not."""
        needed = self.needed()
        kept = {p.number: self._kept(p) for p in self.patches if p.kind in OBSERVING}
        blocks = [
            [*needed.comment(), *left_out(count - len(self.patches)), *self.imports(needed)],
            [*self.preparations(), *self.context()],
            result_lines(self.patches, kept, self.bound.slices),
        ]
        return joined(blocks)

    def needed(self) -> Needs:
        """Returns what the code needs."""
        first = [self.origin.graph] if not self.wrap else [self.model] if is_name(self.model) else []
        wrapped = [self.model] if self.wrap and not first else []
        found = needed_by(self.patches, first, [*wrapped, self._call_arguments().expression])
        if self.wrap and self.origin.graph not in {*in_order(self.model), *self._argument_names()}:
            found.names = [name for name in found.names if name != self.origin.graph]
        return found

    def _argument_names(self) -> list[str]:
        return in_order(self._call_arguments().expression)

    def _call_arguments(self) -> Arguments:
        if not self.wrap or self.origin.arguments is None:
            return self.arguments
        return parse_arguments(self.origin.arguments, with_options=True)

    def imports(self, needed: Needs) -> list[str]:
        """Returns the import statements."""
        items = [name if name == own else f"{name} as {own}" for name, own in self.classes.items()]
        flat = f"from graphpatch import {', '.join(items)}"
        group = Group("from graphpatch import (", tuple(items), ")")
        return [*(f"import {name}" for name in needed.imports), *([flat] if columns(flat) <= WIDTH else lines(group))]

    def preparations(self) -> list[str]:
        """Returns what comes before the patch context: the graph, values and probes."""
        found: list[str] = []
        if self.wrap:
            items = (as_source(self.model, "the model"), *self._call_arguments().sources)
            found += unknown_inputs(self.origin)
            found += lines(Group(f"{self.origin.graph} = {self.classes['PatchableGraph']}(", items, ")"))
        found += self.bound.lines
        for patch in self.patches:
            if patch.number in self.observers:
                found += lines(with_prefix(f"{self.observers[patch.number]} = ", self._construction(patch)))
        return found

    def context(self) -> list[str]:
        """Returns the `with` statement with the call in it."""
        entries = tuple(self._entry(path, patches) for path, patches in by_path(self.patches).items())
        flat = f"with {self.origin.graph}.patch({Group('{', entries, '}')}):"
        head = [flat]
        if columns(flat) > WIDTH:
            inside = indented(["{", *(line for e in entries for line in lines(e, "    ", WIDTH - 4, ",")), "}"])
            head = [f"with {self.origin.graph}.patch(", *inside, "):"]
        call = lines(Group(f"{self.result} = {self.origin.graph}(", self.arguments.sources, ")"), width=WIDTH - 4)
        return [*head, *indented([*unknown_inputs(self.origin), *call])]

    def _entry(self, path: str, patches: Sequence[ChosenPatch]) -> Source:
        items = tuple(self.observers.get(patch.number) or self._construction(patch) for patch in patches)
        prefix = f"{text_literal(path)}: "
        return with_prefix(prefix, items[0] if len(items) == 1 else Group("[", items, "]"))

    def _construction(self, patch: ChosenPatch) -> Source:
        """Returns the source of the patch."""
        items: list[str] = []
        if patch.value is not None:
            field = "custom_op" if patch.kind == "custom" else "value"
            items.append(f"{field}={self.bound.values.get(patch.number, self.values[patch.number])}")
        if patch.index is not None and patch.kind not in OBSERVING:
            # What is zeroed is the same with a new dimension, and without.
            source = patch.index.source(is_bracketed=patch.kind == "zero")
            items.append(f"slice={self.bound.slices.get(patch.number, source)}")
        items += [f"{what}={_numbers(text)}" for what in ("steps", "positions") if (text := getattr(patch, what))]
        items += [] if patch.position_dim is None else [f"position_dim={patch.position_dim}"]
        items += [f"{flag}=True" for flag in FLAGS if getattr(patch, flag)]
        return Group(f"{self.classes[_CLASSES[patch.kind]]}(", tuple(items), ")")

    def _kept(self, patch: ChosenPatch) -> str:
        return f"{self.observers[patch.number]}.{'activations' if patch.kind == 'record' else 'activation'}"


def _numbers(text: str) -> str:
    if text in NAMED_STEPS:
        return text_literal(text)
    typed = parse_slice(text)
    return f"[{typed}]" if len(typed.parts) > 1 else typed.source()
