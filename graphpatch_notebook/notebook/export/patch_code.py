"""Chosen patches as Python source that uses graphpatch. Pure text: nothing is evaluated, nothing runs.

ChosenPatches, Origin, records of the capture
  -> "with pg.patch({...}): output = pg(ids)"          (here)
  -> the same with plain forward hooks of torch        (`hook_code`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import ExportError
from graphpatch_notebook.notebook.export.hook_code import HooksExport
from graphpatch_notebook.notebook.export.source_code import WIDTH, SourceCode, block, bracketed, text_literal
from graphpatch_notebook.notebook.export.source_parts import (
    Names,
    Needs,
    arguments_in,
    as_source,
    call_arguments,
    in_order,
    is_name,
    left_out,
    looked_up,
    name_of_model,
    needs,
    result_lines,
    unknown_inputs,
    user_names,
)
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, ChosenPatches
from graphpatch_notebook.notebook.session.expressions import without_syntax_warnings
from graphpatch_notebook.notebook.session.origin import Origin
from graphpatch_notebook.notebook.session.session import Session, by_value
from graphpatch_notebook.notebook.session.slices import SliceText
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.patches.kinds import Patch

ExportForm: TypeAlias = Literal["graphpatch", "hooks"]


def export(
    session: Session,
    form: ExportForm = "graphpatch",
    *,
    wrap: bool = False,
    chosen: ChosenPatches | None = None,
    origin: Origin | None = None,
) -> SourceCode:
    """Returns the enabled patches of a session as Python. Runs and evaluates nothing.

    Args:
        session: The session.
        form: Code that uses `graphpatch`, or a script with plain forward hooks.
        wrap: Also make the `PatchableGraph` in the code, for a file that runs by itself. If its model is not known, the
            code uses the name `model`.
        chosen: The patches; by default those of the session now.
        origin: The names of graph, model and inputs; by default those of the session.

    Raises:
        ExportError: No patch is enabled, or some patches cannot be written as hooks (one message names them all).

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
    off = len(patches.patches) - len(patches.enabled)
    if not patches.enabled:
        there = f"; all {off} are disabled: enable one" if off else ": choose one"
        raise ExportError(f"nothing to export{there} first")
    if paths := captured(session.graph).permanent_paths:
        raise ExportError(
            f"this graph has permanent patches ({', '.join(paths)}), which are not chosen ones: export those of the "
            "graph that edit() was called on"
        )
    root = captured(session.graph).root
    origin = session.origin if origin is None else origin
    with without_syntax_warnings():
        if form == "hooks":
            return HooksExport(patches.enabled, origin, root).source(off)
        return _Export(patches.enabled, origin, root, wrap).source(off)


class _Export:
    """One export in the graphpatch form.

    In a fresh interpreter with the names in its first line, the code computes the same values, bit for bit, as
    `with pg.patch(session.resolve(...).patch_map)`.
    """

    def __init__(self, patches: tuple[ChosenPatch, ...], origin: Origin, root: Frame, wrap: bool) -> None:
        self.patches = patches
        self.origin = origin
        self.root = root
        self.wrap = wrap
        self.arguments = call_arguments(origin, root, {str(p.name) for p in patches})
        # The call that makes the graph, which may have options.
        self.first_call = self.arguments
        if wrap and origin.arguments is not None:
            self.first_call = arguments_in(origin.arguments, with_options=True)
        self.names = Names({*user_names(patches, origin), *in_order(self.arguments.expression), "torch"})
        self.model = name_of_model(patches, origin, self.names)
        used = {_import_of(patch.definition.patch) for patch in patches} | ({_GRAPH} if wrap else set())
        self.classes = {one: self.names.free(one[1]) if one[0] else one[1] for one in sorted(used)}
        self.result = self.names.free("output", "result")
        self.observers = {p.number: self.names.free(f"{p.name}_{p.kind}") for p in patches if p.definition.keeps}
        self.lookups = looked_up(patches, self.first_call, self.names, in_hooks=False)

    def source(self, off: int) -> SourceCode:
        """Returns the code; `off` is the number of disabled patches."""
        needed = self.needed()
        kept = {
            p.number: f"{self.observers[p.number]}.{p.definition.keeps}"
            for p in self.patches
            if p.number in self.observers
        }
        blocks = [
            [*needed.comment(), *left_out(off), *self.imports(needed)],
            [*self.preparations(), self.context()],
            result_lines(self.patches, kept, self.lookups.slices),
        ]
        return SourceCode("\n\n".join("\n".join(statements) for statements in blocks if statements) + "\n")

    def needed(self) -> Needs:
        """Returns the names that the code needs."""
        made_here = [own for (module, _), own in self.classes.items() if not module]
        first = [self.origin.graph] if not self.wrap else [self.model] if is_name(self.model) else []
        wrapped = [self.model] if self.wrap and not first else []
        arguments = self.first_call.expression
        found = needs(self.patches, [*first, *made_here], [*wrapped, arguments])
        if self.wrap and self.origin.graph not in {*in_order(self.model), *in_order(arguments)}:
            return replace(found, names=tuple(name for name in found.names if name != self.origin.graph))
        return found

    def imports(self, needed: Needs) -> list[str]:
        """Returns the import statements."""
        items: dict[str, list[str]] = {}
        for (module, name), own in self.classes.items():
            items.setdefault(module, []).append(name if name == own else f"{name} as {own}")
        lines = ["import torch"] * needed.imports_torch
        for module, names in items.items():
            flat = f"from {module} import {', '.join(names)}"
            if module:
                lines.append(flat if len(flat) <= WIDTH else bracketed(f"from {module} import (", names, ")", 0))
        return lines

    def preparations(self) -> list[str]:
        """Returns the statements before the patch context: the graph, values and probes."""
        found: list[str] = []
        if self.wrap:
            items = [as_source(self.model, "the model"), *self.first_call.sources]
            found += unknown_inputs(self.origin)
            found.append(bracketed(f"{self.origin.graph} = {self.classes[_GRAPH]}(", items, ")"))
        found += self.lookups.lines
        for patch in self.patches:
            if patch.number in self.observers:
                found.append(self._construction(patch, f"{self.observers[patch.number]} = "))
        return found

    def context(self) -> str:
        """Returns the `with` statement with the call in it."""
        entries = [self._entry(path, patches) for path, patches in by_value(self.root, self.patches).items()]
        call = bracketed(f"{self.result} = {self.origin.graph}(", self.arguments.sources, ")", WIDTH - 4)
        head = bracketed(f"with {self.origin.graph}.patch({{", entries, "}):")
        return block(head, [*unknown_inputs(self.origin), call])

    def _entry(self, path: str, patches: Sequence[ChosenPatch]) -> str:
        start = f"{text_literal(path)}: "
        if len(patches) == 1:
            return self._item(patches[0], start)
        return bracketed(f"{start}[", [self._item(patch) for patch in patches], "]", WIDTH - 5)

    def _item(self, patch: ChosenPatch, start: str = "") -> str:
        observer = self.observers.get(patch.number)
        return start + observer if observer else self._construction(patch, start)

    def _construction(self, patch: ChosenPatch, start: str) -> str:
        """Returns the source of the patch, with `start` before it."""
        items: list[str] = []
        kind = patch.definition
        if kind.value is not None:
            items.append(f"{kind.value.field}={self.lookups.values[patch.number]}")
        if patch.index is not None and kind.keeps is None:
            items.append(f"slice={self.lookups.slices[patch.number]}")
        items += [f"{what}={_literal(given)}" for what, given in patch.restrictions().items()]
        return bracketed(f"{start}{self.classes[_import_of(kind.patch)]}(", items, ")", WIDTH - 5)


_GRAPH = ("graphpatch", "PatchableGraph")


def _import_of(patch: type[Patch[Any]]) -> tuple[str, str]:
    """Returns the module and the name of a patch class; no module for one that cannot be imported."""
    if patch.__module__ == "__main__" or "<locals>" in patch.__qualname__:
        return "", patch.__name__
    package = patch.__module__.partition(".")[0]
    return "graphpatch" if package == "graphpatch_notebook" else patch.__module__, patch.__name__


def _literal(value: Any) -> str:
    return text_literal(value) if isinstance(value, str) else SliceText((value,)).source()
