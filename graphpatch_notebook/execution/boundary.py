"""Patches on what a module call is given: its inputs, and the tensors that the module holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.inputs import given_input, with_input, with_other_tensor
from graphpatch_notebook.execution.apply import Applier
from graphpatch_notebook.execution.plan import FramePlan
from graphpatch_notebook.execution.stand_in import held_value, tensor_at
from graphpatch_notebook.values import take


def watch_inputs(applier: Applier, plan: FramePlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Applies the entries on inputs that only look."""
    with applier.unseen():
        for position, name, entry in plan.watched_inputs:
            if position < len(args):
                value = args[position]
            elif name in kwargs:
                value = kwargs[name]
            else:
                value = given_input(plan.frame.parameters, name, args, kwargs)
            applier.watch(entry, value)


def patched_inputs(
    applier: Applier, plan: FramePlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call with the entries on inputs applied."""
    __tracebackhide__ = True
    for name, entries in plan.inputs.items():
        given = given_input(plan.frame.parameters, name, args, kwargs)
        value = applier.at_boundary(entries, given)
        if value is not given:
            args, kwargs = with_input(plan.frame.parameters, name, value, args, kwargs)
    return args, kwargs


def with_aliases(
    applier: Applier, plan: FramePlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call with an alias of its own for each tensor that a patch looks at.

    A caller may use the tensor elsewhere, too (the residual stream): the gradient of the alias is that of what the
    module does with it.
    """
    seen: set[int] = set()
    with_other_uses = applier.fired.with_other_uses
    with applier.unseen():
        for entry in plan.probed_inputs:
            value = given_input(plan.frame.parameters, entry.target.node.target, args, kwargs)
            try:
                for key in entry.target.dig:
                    value = take(value, key)
            except (LookupError, AttributeError, TypeError):  # reported when the patch is applied
                continue
            if not isinstance(value, Tensor) or not value.requires_grad or id(value) in seen:
                continue
            if not torch.is_grad_enabled():  # an alias would have no gradient, and the module might ask for one
                with_other_uses.append(entry.target.path)
                continue
            alias = value.view_as(value)
            # A module may ask whether two of its inputs are one tensor: then they stay one.
            args, count = with_other_tensor(args, value, alias)
            named = {name: with_other_tensor(given, value, alias) for name, given in kwargs.items()}
            kwargs = {name: given for name, (given, _) in named.items()}
            count += sum(each for _, each in named.values())
            if count:
                seen.add(id(alias))
            if count != 1:
                with_other_uses.append(entry.target.path)
    return args, kwargs


def replacements(applier: Applier, plan: FramePlan, module: Module) -> dict[str, Tensor]:
    """Returns the tensors that patches put in place of those that `module` holds, by attribute path."""
    __tracebackhide__ = True
    with applier.unseen():
        for path, entry in plan.watched_tensors:
            held = module._parameters
            applier.watch(entry, held[path] if path in held else tensor_at(module, path))
    found: dict[str, Tensor] = {}
    for path, entries in plan.tensors.items():
        with applier.unseen():
            value = held_value(module, path)
        patched = applier.at_boundary(entries, value)
        if patched is not value:
            found[path] = patched
    return found
