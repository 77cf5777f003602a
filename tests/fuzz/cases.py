"""One case of the fuzz: a program, calls of it and a patch map; and what must hold for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import GraphPatchError, GraphPatchWarning, PatchValueError
from tests.fuzz.oracle import Interpreter
from tests.fuzz.programs import Program, build
from tests.fuzz.strategies import EXAMPLE_BATCH, OTHER_BATCHES, Choice, Inputs, draw_choices, inputs, programs
from tests.zoo import Call
from tests.zoo.values import bit_equal, same_state, snapshot, tensors_of


@dataclass
class FuzzCase:
    """A program, the calls of it, and the edits."""

    program: Program
    example: Inputs
    others: list[Inputs]
    choices: list[Choice]
    has_grad: bool
    is_nested: bool
    way: int = 0

    def interpreter(self) -> Interpreter:
        """Returns an interpreter of the program that knows the paths, on weights that nothing else has."""
        found = Interpreter(self.program, build(self.program))
        call = self.example.call(self.program)
        with torch.no_grad():
            found.trace(call.args, call.kwargs)
        return found


@st.composite
def cases(draw: Any) -> FuzzCase:
    """Draws a case; the edits are of values that come up on its example."""
    program, example = draw(programs()), draw(inputs((EXAMPLE_BATCH,)))
    others = draw(st.lists(inputs(OTHER_BATCHES), min_size=1, max_size=2))
    case = FuzzCase(program, example, others, [], draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 59)))
    case.choices = draw_choices(draw, list(case.interpreter().places.values()))
    return case


@dataclass
class Outcome:
    """What a run gave: its output, what it wrote into its inputs, gradients, and what was kept."""

    output: Any = None
    arguments: Any = None
    gradients: Any = None
    error: Exception | None = None
    fired: set[str] | None = None
    seen: Any = None


def by_oracle(case: FuzzCase, interpreter: Interpreter, call: Call, choices: list[Choice]) -> Outcome:
    """Returns what the interpreter makes of a call."""
    for choice in choices:
        for edit in choice.edits:
            edit.seen.clear()
    values = [[edit.own_value() for edit in choice.edits] for choice in choices]
    edits: dict[str, list[Any]] = {}
    for choice, own in zip(choices, values, strict=True):
        edits.setdefault(choice.path, []).append((choice.dig, list(zip(choice.edits, own, strict=True))))
    found = Outcome(arguments=call)
    with torch.set_grad_enabled(case.has_grad):
        try:
            found.output = interpreter.run(call.args, call.kwargs, edits)
            found.gradients = gradients(case, found.output, interpreter.module, values)
        except RuntimeError as error:
            found.error = error
    found.fired = {choice.text for choice in choices if (choice.path, choice.dig) in interpreter.fired}
    found.seen = {(c.text, n): list(e.seen) for c in choices for n, e in enumerate(c.edits)}
    return found


def by_patches(
    case: FuzzCase, pg: PatchableGraph, run: Callable[..., Any], call: Call, choices: list[Choice]
) -> Outcome:
    """Returns what a patched call makes of it; `run` is what is called inside of the context."""
    values = [[edit.own_value() for edit in choice.edits] for choice in choices]
    patches = {
        choice.text: [edit.patch(value) for edit, value in zip(choice.edits, own, strict=True)]
        for choice, own in zip(choices, values, strict=True)
    }
    half = len(patches) // 2 if case.is_nested else 0
    outer, inner = dict(list(patches.items())[:half]), dict(list(patches.items())[half:])
    found = Outcome(arguments=call)
    with warnings.catch_warnings(record=True) as told, torch.set_grad_enabled(case.has_grad):
        warnings.simplefilter("always", GraphPatchWarning)
        try:
            with pg.patch(outer) if half else nullcontext(), pg.patch(inner):
                found.output = run(*call.args, **call.kwargs)
                found.gradients = gradients(case, found.output, pg._module, values)
        except (RuntimeError, GraphPatchError, AttributeError, TypeError) as error:
            found.error = error
    unfired = " ".join(str(t.message) for t in told if getattr(t.message, "kind", None) == "not fired")
    found.fired = {text for text in patches if repr(text) not in unfired}
    found.seen = {(text, n): kept(patch) for text, several in patches.items() for n, patch in enumerate(several)}
    return found


def kept(patch: Any) -> Any:
    """Returns what a patch kept: `None` where it says that it cannot tell any more."""
    try:
        if hasattr(patch, "activations"):
            return [value.detach().clone() if isinstance(value, Tensor) else value for value in patch.activations]
        value = getattr(patch, "activation", None)
    except PatchValueError:
        return None
    if not hasattr(patch, "activation"):
        return []
    return [value.detach().clone() if isinstance(value, Tensor) else value]


def gradients(case: FuzzCase, output: Any, module: nn.Module, values: list[list[Any]]) -> Any:
    """Returns the gradients of all in an output, at the weights and at the values of the patches."""
    if not case.has_grad:
        return None
    losses = [t.double().pow(2).sum() for t in tensors_of(output) if t.requires_grad and t.is_floating_point()]
    wanted = [*module.parameters(), *(v for own in values for v in own if isinstance(v, Tensor) and v.requires_grad)]
    if not losses or not wanted:
        return None
    found = torch.autograd.grad(torch.stack(losses).sum(), wanted, allow_unused=True)
    return [None if gradient is None else gradient.clone() for gradient in found]


def difference(expected: Outcome, found: Outcome) -> str | None:
    """Returns in words where two outcomes differ, or `None`."""
    if expected.error is not None:
        return None if found.error is not None else f"did not raise {expected.error!r}"
    if found.error is not None:
        return f"raised {found.error!r}"
    for name in ("output", "arguments"):
        if (problem := bit_equal(getattr(expected, name), getattr(found, name))) is not None:
            return f"{name}: {problem}"
    if (problem := _far(expected.gradients, found.gradients)) is not None:
        return f"gradients: {problem}"
    if expected.fired != found.fired:
        return f"fired: {found.fired} is not {expected.fired}"
    return _unlike(expected.seen, found.seen)


def _far(expected: Any, found: Any) -> str | None:
    """Gradients may be summed in another order."""
    if expected is None or found is None:
        return None if expected is found else f"{found} is not {expected}"
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one is None or other is None:
            # A branch of zeros and none at all are the same gradient.
            given = one if other is None else other
            if given is not None and given.abs().max() > 0:
                return f"{number}: {other} is not {one}"
        elif not torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"{number}: {other} is not {one}"
    return None


def _unlike(expected: Any, found: Any) -> str | None:
    for where, values in found.items():
        wanted = expected[where]
        if values is None or (not wanted and values in ([], [None])):
            continue
        if len(values) == 1 and wanted:  # a probe keeps the last one
            wanted = wanted[-1:] if len(values) < len(wanted) else wanted
        if (problem := bit_equal(wanted, values)) is not None:
            return f"seen at {where}: {problem}"
    return None


__all__ = ["FuzzCase", "Outcome", "by_oracle", "by_patches", "cases", "difference", "same_state", "snapshot"]
