"""Chosen patches as a script on plain forward hooks of torch, without graphpatch. Pure text: nothing runs."""

from __future__ import annotations

from collections.abc import Sequence

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.notebook.export.hook_functions import HookFunction, Script, takes_kwargs
from graphpatch_notebook.notebook.export.hook_places import HookPlan, hook_plans
from graphpatch_notebook.notebook.export.source_code import WIDTH, SourceCode, block, bracketed, text_literal
from graphpatch_notebook.notebook.export.source_parts import (
    call_arguments,
    is_name,
    left_out,
    looked_up,
    name_of_model,
    result_lines,
    unknown_inputs,
)
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.code_names import (
    Names,
    Needs,
    as_name,
    as_source,
    in_order,
    last_words,
    needs,
    user_names,
)
from graphpatch_notebook.notebook.session.origin import Origin


class HooksExport:
    """One export in the hooks form.

    Run where there are the names that its first line lists, the script gives the numbers of
    `with pg.patch(session.resolve(...).patch_map)`, bit for bit, or raises: a module that is not called as often as in
    the example is an error.

    Args:
        patches: The patches.
        origin: How the user made the graph.
        root: The root frame of its capture.

    Raises:
        ExportError: Hooks cannot do what some of them do: the message names these, and what to patch instead.
    """

    def __init__(self, patches: tuple[ChosenPatch, ...], origin: Origin, root: Frame) -> None:
        self.patches = patches
        self.origin = origin
        probes = {str(patch.name) for patch in patches}
        self.arguments = call_arguments(origin, root, probes)
        self.names = Names({*user_names(patches, origin), *in_order(self.arguments.expression)})
        made = origin.model is not None and not is_name(origin.model)
        self.model = self.names.free("model") if made else name_of_model(patches, origin, self.names)
        self.plans = hook_plans(patches, root, self.model, self.arguments, knows_call=origin.arguments is not None)
        calls, kept = self.names.free("calls"), self.names.free("kept")
        self.counter = self.names.free("Counter")
        self.lookups = looked_up(patches, self.arguments, self.names, in_hooks=True)
        self.script = Script(self.names, calls, kept, self.lookups)
        self.functions = {self.names.free(_function_name(plan)): plan for plan in self.plans}

    def needed(self) -> Needs:
        """Returns what the script needs."""
        first = [self.model] if self.origin.model is None or is_name(self.origin.model) else []
        made = [] if first else [str(self.origin.model)]
        return needs(self.patches, first, [*made, self.arguments.expression])

    def source(self, off: int) -> SourceCode:
        """Returns all of the script; `off` patches are not in it."""
        functions = [HookFunction(plan, name, self.script).source() for name, plan in self.functions.items()]
        head = [*self.needed().comment(), *left_out(off), *self._imports()]
        sections = ["\n".join([*head, "", *self._preparations()]), *functions, "\n".join(self._run())]
        return SourceCode("\n\n\n".join(sections) + "\n")

    def _imports(self) -> list[str]:
        alias = "" if self.counter == "Counter" else f" as {self.counter}"
        return [f"from collections import Counter{alias}", *["", "import torch"] * self.needed().imports_torch]

    def _preparations(self) -> list[str]:
        found: list[str] = []
        if self.origin.model is not None and not is_name(self.origin.model):
            found.append(f"{self.model} = {as_source(self.origin.model, 'the model')}")
        found += [*self.lookups.lines, f"{self.script.calls} = {self.counter}()"]
        if any(patch.definition.keeps for patch in self.patches):
            records = [f"{text_literal(str(p.name))}: []" for p in self.patches if p.definition.keeps_list]
            found.append(bracketed(f"{self.script.kept} = {{", records, "}"))
        return found

    def _run(self) -> list[str]:
        hooks, hook = self.names.free("hooks"), self.names.free("hook")
        result = self.names.free("output", "result")
        call = bracketed(f"{result} = {self.model}(", self.arguments.sources, ")", WIDTH - 4)
        body = [self._registration(hooks, name, plan) for name, plan in self.functions.items()]
        kept = {
            patch.number: f"{self.script.kept}[{text_literal(str(patch.name))}]"
            for patch in self.patches
            if patch.definition.keeps
        }
        results = result_lines(self.patches, kept, self.lookups.slices)
        return [
            f"{hooks} = []",
            block("try:", [*body, *unknown_inputs(self.origin), call]),
            block("finally:", [block(f"for {hook} in {hooks}:", [f"{hook}.remove()"])]),
            "",
            *self._check(),
            *([""] if results else []),
            *results,
        ]

    def _registration(self, hooks: str, name: str, plan: HookPlan) -> str:
        side = "" if plan.side == "output" else "pre_"
        options = ", with_kwargs=True" if takes_kwargs(plan) else ""
        handle = f"{plan.module}.register_forward_{side}hook({name}{options})"
        return bracketed(f"{hooks}.append(", [handle], ")", WIDTH - 4)

    def _check(self) -> list[str]:
        """Returns the statements that raise if a module was not called as often as in the example."""
        expected = self.names.free("expected")
        counts = [f"{text_literal(name)}: {plan.count}" for name, plan in self.functions.items()]
        message = f'f"the hooks ran {{dict({self.script.calls})}} times, not {{{expected}}}"'
        is_counted = any(plan.count > 1 for plan in self.plans)
        return [
            *["# Calls are told by their number, so there must be as many as in the example."] * is_counted,
            bracketed(f"{expected} = {{", counts, "}"),
            block(f"if {self.script.calls} != {expected}:", [f"raise RuntimeError({message})"]),
        ]


def _function_name(plan: HookPlan) -> str:
    """Returns what a hook does, in a name."""
    kinds = {patch.kind for edit in plan.edits for patch in edit.patches}
    verb = kinds.pop() if len(kinds) == 1 else "patch"
    paths: Sequence[str] = list(dict.fromkeys(edit.target.path for edit in plan.edits))
    if len(paths) == 1:
        return f"{verb}_{as_name(*last_words(paths[0]))}"
    inside = plan.edits[0].target.frame.attribute_path_from_root.split(".")[-2:]
    return f"{verb}_{as_name(*inside) if any(inside) else 'model'}_{plan.side}"
