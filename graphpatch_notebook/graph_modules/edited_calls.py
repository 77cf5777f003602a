"""Whether an edited graph may stand for its module in a call that is not like the example's.

A graph is a record of one run: flags, branches, and sizes that the code took for plain numbers (`range(n)`, a table cut
to a length, `is_causal`) are in it as they were. So for calls of each new form the graph as it was before it was edited
is compared with the module, on copies. Where the form does not say all (an object such as a cache is given, or the
module looks at values to find its way), that is done in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import Context
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.forward_swap import invoke, original_forward
from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.recorder import ROUNDS
from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.capture.tensor_sources import tensor_flags
from graphpatch_notebook.checks.call_signature import settings_key
from graphpatch_notebook.checks.equality import IncomparableError, difference
from graphpatch_notebook.checks.model_state import ModuleState, copied
from graphpatch_notebook.errors import EditedGraphWarning, GraphError
from graphpatch_notebook.graph_modules.belief import Refusal
from graphpatch_notebook.graph_modules.live_runs import unobserved
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, TensorSpec, ValueSpec, children, describe, leaves
from graphpatch_notebook.warning_places import warn

_MOST_FORMS = 1000
_OPENED = ROUNDS.partition("{")[0]


class RunnableAsRecorded(Protocol):
    """What this needs of a graph module."""

    def run_patched(
        self,
        names: frozenset[str],
        patched: Callable[[str, Any], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs the graph in place of its module in a call of a `PatchableGraph`."""


class CallCheck:
    """The calls that an edited graph holds for.

    Args:
        frame: The frame of the edited graph.
        recorded: The graph as it was; `None` if it is not known any more.
    """

    def __init__(self, frame: Frame, recorded: RunnableAsRecorded | None) -> None:
        self._frame = frame
        self._recorded = recorded
        example = tuple(_form(node.spec) for node in frame.inputs())
        # The graph is the record of a call of this form, with torch switched as it was.
        self._problems: dict[Hashable, Refusal | None] = {(example, frame.input_flags, settings_key()): None}
        self._look = _look_of(frame)
        # Numbers that a submodule returns are in the graph as they were, too.
        doubts = [doubt for doubt in frame.doubts if not doubt.startswith(_OPENED)]
        self._goes_by_values = bool(doubts) or any(map(_returns_numbers, frame.calls()))
        # The steps of an opened function equal it within rounding only.
        self._difference = difference if len(doubts) == len(frame.doubts) else _difference_beyond_rounding
        self._has_warned = False

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes sure that the graph holds for this call.

        Raises:
            GraphError: It does not: before it was edited, it did something else than the module.

        Warns:
            EditedGraphWarning: The two cannot be compared on these inputs.
        """
        frame = self._frame
        given = [given_input(frame.parameters, node.target, args, kwargs) for node in frame.inputs()]
        forms = tuple(_form(describe(value)) for value in given)
        form: Hashable = (forms, tensor_flags(given), settings_key())
        if (look := _look_of(frame)) != self._look or len(self._problems) >= _MOST_FORMS:
            self._look = look
            self._problems.clear()
        if self._goes_by_values or _says_too_little(forms):
            problem = self._problem(args, kwargs)
        else:
            problem = self._problems[form] if form in self._problems else self._problem(args, kwargs)
            if problem is None or not problem.may_pass:
                self._problems[form] = problem
        if problem is not None:
            self._tell(problem)

    def _tell(self, problem: Refusal) -> None:
        frame = self._frame
        who = f"{format_path(frame.path) or '<root>'!r} ({type(frame.module).__name__})"
        if problem.is_difference:
            raise GraphError(
                f"the edited graph of {who} does not hold for this call: before it was edited, it did something else "
                f"than the module ({problem.text}), for it has sizes, flags or branches of the example in it; make the "
                "PatchableGraph with inputs like these, or edit the graph of a module below it that has none of these"
            )
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"the edited graph of {who} cannot be compared with the module on inputs unlike the example's: "
                f"{problem.text}; sizes, flags and branches that it has in it are those of the example",
                EditedGraphWarning,
                stacklevel=2,
            )

    def _problem(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
        if self._recorded is None:
            return Refusal("what it was before it was edited is not known in a copy")
        # Without context variables: libraries collect hidden states in some, which these runs are not to add to.
        return Context().run(self._compared, self._recorded, args, kwargs)

    def _compared(self, recorded: RunnableAsRecorded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
        try:
            before = ModuleState(self._frame.module)
            (first_args, first_kwargs), second = copied((args, kwargs)), copied((args, kwargs))
        except Exception as error:  # of the user's own objects
            return Refusal(f"its inputs cannot be copied ({type(error).__name__}: {error})")
        try:
            with afterwards(before.restore), unobserved():
                result = invoke(original_forward(self._frame.module), first_args, first_kwargs)
                after = ModuleState(self._frame.module)
                before.restore()
                try:
                    value = recorded.run_patched(frozenset(), _unpatched, *second)
                except Exception as error:
                    return Refusal(f"it raised {type(error).__name__}: {error}", is_difference=True, may_pass=True)
                given = (first_args, first_kwargs)
                text = (
                    self._difference(_opened(value), _opened(result), "output")
                    or self._difference(_opened(second), _opened(given), "inputs")
                    or ModuleState(self._frame.module).difference(after)
                )
        except IncomparableError as error:
            return Refusal(str(error))
        return None if text is None else Refusal(text, is_difference=True)


def _difference_beyond_rounding(a: Any, b: Any, where: str) -> str | None:
    """As `difference`, but tensors may differ as `ExtractionOptions.decompose` says that they do."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and a.shape == b.shape:
        tolerance = _ROUNDING.get(a.dtype, 3e-2)
        is_close = a.dtype == b.dtype and torch.allclose(a, b, tolerance, tolerance, equal_nan=True)
        return None if is_close else f"{where}: the values differ by more than rounding"
    if type(a) is type(b) and isinstance(a, (tuple, dict)) and len(a) == len(b):
        pairs = zip(a, b, strict=True) if isinstance(a, tuple) else ((a[key], b.get(key)) for key in a)
        found = (_difference_beyond_rounding(one, other, where) for one, other in pairs)
        return next((text for text in found if text is not None), None)
    return difference(a, b, where)


_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-10}


def _unpatched(_name: str, value: Any) -> Any:
    return value


def _look_of(frame: Frame) -> Hashable:
    """Returns what the code of the module may look at beside its inputs: plain attributes, its modules, their hooks."""
    module = frame.module
    plain = tuple((n, v) for n, v in module.__dict__.items() if type(v) in (bool, int, float, str) and n != "training")
    called = [node.frame for node in frame.calls() if node.frame is not None]
    children = tuple((name, id(child)) for name, child in module._modules.items())
    hooks = tuple(key for callee in called for key in callee.hooks if not _has_hook(callee.module, key))
    return plain, children, hooks


def _has_hook(module: Module, key: int) -> bool:
    return key in module._forward_hooks or key in module._forward_pre_hooks


def _returns_numbers(call: Node) -> bool:
    return any(isinstance(leaf, ScalarSpec) for _, leaf in leaves(call.spec))


def _form(spec: ValueSpec) -> Hashable:
    """Returns what tells calls of one form from others; `...` where that is not all that there is to an object."""
    if isinstance(spec, TensorSpec):
        return spec
    if isinstance(spec, ContainerSpec):
        return spec.type, tuple((text, _form(child)) for text, _, child in spec.children)
    return (type(spec.value), repr(spec.value)) if isinstance(spec, ScalarSpec) else ...


def _says_too_little(form: Hashable) -> bool:
    return form is ... or (isinstance(form, tuple) and any(map(_says_too_little, form)))


def _opened(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """Returns a value with the attributes of plain objects in their place, so that these can be compared."""
    if isinstance(value, (Tensor, Module, type)) or callable(value):
        return value
    if id(value) in seen:  # in itself
        return None
    seen = (*seen, id(value))
    inside = children(value)
    if inside is None:
        attributes = getattr(value, "__dict__", None)
        if attributes is None:
            return value
        return type(value).__name__, {str(key): _opened(item, seen) for key, item in attributes.items()}
    return type(value).__name__, {str(key): _opened(item, seen) for key, item in inside}
