"""The hook functions of an exported script, line by line, as a person would write them.

def zero_h_0_mlp(module, args, output):
    calls["zero_h_0_mlp"] += 1
    output = output.clone()
    output[:, -1] = 0
    return output
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from graphpatch_notebook.notebook.export.hook_places import Edit, Form, HookPlan
from graphpatch_notebook.notebook.export.source_code import block, text_literal
from graphpatch_notebook.notebook.export.source_parts import Lookups
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.code_names import Names, as_name
from graphpatch_notebook.values import ContainerSpec, TensorSpec, key_text, plain_dict_key


@dataclass(slots=True)
class Script:
    """The names that the functions share.

    Attributes:
        names: All names at the top of the script.
        calls: The variable that counts how often each function was called.
        kept: The variable that holds what probes and records keep.
        lookups: The sources of values and slices.
    """

    names: Names
    calls: str
    kept: str
    lookups: Lookups


def takes_kwargs(plan: HookPlan) -> bool:
    """Whether a hook before `forward` needs the keyword arguments."""
    return any(edit.form is not None and edit.form.name is not None for edit in plan.edits)


class HookFunction:
    """A hook of the script.

    Args:
        plan: What it does.
        name: Its name.
        script: The names that all share.
    """

    def __init__(self, plan: HookPlan, name: str, script: Script) -> None:
        self.plan = plan
        self.name = name
        self.script = script
        self.names = script.names.inner()
        self.module, self.args = self.names.free("module"), self.names.free("args")
        self.kwargs = self.names.free("kwargs") if plan.side == "inputs" else ""
        self.output = self.names.free("output") if plan.side == "output" else ""
        self.has_changed = False

    def source(self) -> str:
        """Returns the definition of the function."""
        own = f"{self.script.calls}[{text_literal(self.name)}]"
        body = [f"{own} += 1"]
        for index, edits in sorted(self.plan.calls.items()):
            statements = [statement for edit in edits for statement in self._edit(edit)]
            body += statements if self.plan.count == 1 else [block(f"if {own} == {index + 1}:", statements)]
        return block(f"def {self.name}({', '.join(self._parameters())}):", self._with_return(body))

    def _parameters(self) -> list[str]:
        if self.plan.side == "output":
            return [self.module, self.args, self.output]
        return [self.module, self.args, *([self.kwargs] if takes_kwargs(self.plan) else [])]

    def _with_return(self, body: list[str]) -> list[str]:
        if not self.has_changed:
            return body
        if self.plan.side == "inputs" and takes_kwargs(self.plan):
            return [*body, f"return {self.args}, {self.kwargs}"]
        result = self.output or self.args
        if body[-1].startswith(start := f"{result} = "):
            return [*body[:-1], f"return {body[-1].removeprefix(start)}"]
        return [*body, f"return {result}"]

    # -- one value ---------------------------------------------------------------------------------------------------

    def _edit(self, edit: Edit) -> list[str]:
        """Returns the statements that read a value, do what the patches say, and put it back."""
        found: list[str] = []
        whole = self.output
        if edit.form is not None:
            whole, before = self._read(edit)
            found += before
        source = whole
        for key, inside in edit.containers:
            source = _child(source, key, inside)
        variable = self.output if not edit.dig and edit.form is None else self._variable(edit, whole)
        value = _Value(source, variable, edit, self.script)
        for patch in edit.patches:
            value.apply(patch)
        found += value.lines
        if not value.is_changed:
            return found
        self.has_changed = True
        rebuilt = self._rebuilt(whole, edit.containers, value.source)
        if edit.form is not None:
            return [*found, self._write(edit.form, rebuilt)]
        if rebuilt != self.output:
            found.append(f"{self.output} = {rebuilt}")
        elif any(patch.definition.hook_result and patch.slice is None for patch in edit.patches):
            # For torch, a hook that returns None says that nothing is changed.
            message = text_literal(f"{edit.target.path}: the function returned None")
            found.append(block(f"if {self.output} is None:", [f"raise TypeError({message})"]))
        return found

    def _variable(self, edit: Edit, whole: str) -> str:
        if whole.isidentifier() and not edit.dig:
            return whole
        last = key_text(edit.target.dig[-1]) if edit.target.dig else str(edit.target.node.target)
        return self.names.free(as_name(last))

    def _read(self, edit: Edit) -> tuple[str, list[str]]:
        """Returns the source of an input, and the statements before it."""
        form = edit.form
        assert form is not None
        if form.name is None:
            return f"{self.args}[{form.position}]", []
        key = text_literal(form.name)
        by_name = f"{self.kwargs}[{key}]" if form.default is None else f"{self.kwargs}.get({key}, {form.default})"
        if form.position is None or form.is_sure:
            return by_name, []
        variable = self.names.free(as_name(form.name))
        by_position = f"{self.args}[{form.position}] if len({self.args}) > {form.position}"
        return variable, [f"{variable} = {by_position} else {by_name}"]

    def _write(self, form: Form, source: str) -> str:
        """Returns the statement that gives an input another value."""
        before = f"*{self.args}[:{form.position}], " if form.position else ""
        by_position = by_name = ""
        if form.position is not None:
            by_position = f"{self.args} = ({before}{source}, *{self.args}[{form.position + 1}:])"
        if form.name is not None:
            by_name = f"{self.kwargs} = {{**{self.kwargs}, {text_literal(form.name)}: {source}}}"
        if not by_position or not by_name:
            return by_position or by_name
        return block(f"if len({self.args}) > {form.position}:", [by_position]) + "\n" + block("else:", [by_name])

    def _rebuilt(self, whole: str, path: list[tuple[Any, ContainerSpec]], new: str) -> str:
        """Returns the source of `whole` with `new` at the end of `path`, where the tuples on the way are other ones."""
        if not path:
            return new
        (key, spec), *rest = path
        before = [f"*{whole}[:{key}]"] if key else []
        after = [] if key == len(spec.children) - 1 else [f"*{whole}[{key + 1}:]"]
        items = [*before, self._rebuilt(_child(whole, key, spec), rest, new), *after]
        return f"({', '.join(items)})" if len(items) > 1 else f"({items[0]},)"


# --------------------------------------------------------------------------------------------------------------------
# Patches as statements


class _Value:
    """A value on its way through the patches.

    Attributes:
        source: The source of what it is now.
        variable: The variable to put it in when it changes.
        lines: The statements so far.
        is_changed: Whether it is another object than before.
    """

    def __init__(self, source: str, variable: str, edit: Edit, script: Script) -> None:
        self.source = source
        self.variable = variable
        self.lines: list[str] = []
        self.is_changed = False
        self._edit = edit
        self._script = script
        self._is_own = False

    def apply(self, patch: ChosenPatch) -> None:
        """Adds the statements of one patch."""
        kind, value = patch.definition, self._script.lookups.values.get(patch.number, "")
        if kind.keeps is not None:
            self._keep(patch)
        elif kind.hook_result is not None:
            self._compute(patch, kind.hook_result, f"({value})" if value.startswith("lambda") else value)
        else:
            self._own()
            part = self._part(patch)
            target = self.variable if patch.slice is None else part
            self.lines.append(str(kind.hook_statement).format(target=target, part=part, value=value))

    def _keep(self, patch: ChosenPatch) -> None:
        place = f"{self._script.kept}[{text_literal(str(patch.name))}]"
        # What the model writes into later is kept as it was.
        target = self._edit.target
        is_copied = target.node.is_mutated_later and isinstance(target.spec, TensorSpec)
        source = f"{self.source}.clone()" if is_copied else self.source
        self.lines.append(f"{place}.append({source})" if patch.definition.keeps_list else f"{place} = {source}")
        self._is_own = False

    def _assign(self, source: str) -> None:
        if source != self.variable:
            self.lines.append(f"{self.variable} = {source}")
        self.source = self.variable
        self.is_changed = True

    def _own(self) -> None:
        if not self._is_own:
            self._assign(f"{self.source}.clone()")
            self._is_own = True

    def _part(self, patch: ChosenPatch) -> str:
        return f"{self.variable}[{self._script.lookups.slices.get(patch.number, '...')}]"

    def _compute(self, patch: ChosenPatch, result: str, value: str) -> None:
        if patch.slice is not None:
            self._own()
            part = self._part(patch)
            self.lines.append(f"{part} = {result.format(value=value, input=f'{part}.clone()')}")
            return
        given = self.source if self._is_own else f"{self.source}.clone()"
        self._assign(result.format(value=value, input=given))
        self._is_own = False


# --------------------------------------------------------------------------------------------------------------------
# Containers


def _child(source: str, key: Any, spec: ContainerSpec) -> str:
    if dataclasses.is_dataclass(spec.type) and isinstance(key, str) and key.isidentifier():
        return f"{source}.{key}"
    plain = plain_dict_key(key)
    return f"{source}[{text_literal(plain) if isinstance(plain, str) else repr(plain)}]"
