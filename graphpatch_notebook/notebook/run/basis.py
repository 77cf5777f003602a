"""What a value comes from: inputs, variables and weights, to tell whether one that was kept is still that of today."""

from __future__ import annotations

from typing import Any

from graphpatch_notebook.capture.inputs import ExampleInputs
from graphpatch_notebook.checks.model_state import Fingerprint
from graphpatch_notebook.notebook.session.chosen_patch import names_used
from graphpatch_notebook.notebook.session.expressions import free_names
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.patchable_graph import captured


class Basis:
    """All that a run would start from at this moment. Nothing is copied.

    Two are equal if nothing was changed in between, as far as torch counts: writes through `.data` it does not.

    Args:
        session: The session.
        is_patched: Whether the model would run with the chosen patches.
        typed: Arguments of a call, as Python.
        given: Inputs that were given.
        namespace: The user's variables.
    """

    def __init__(
        self, session: Session, is_patched: bool, typed: str | None, given: Any, namespace: dict[str, Any]
    ) -> None:
        examples = captured(session.graph).examples
        arguments: tuple[Any, ...] = (given,)
        names = names_used(session.chosen.enabled) if is_patched else set()
        if typed is not None and typed.strip():
            names |= _names_in(typed)
            arguments = ()
        elif given is None and examples is not None:
            arguments = (examples.args, examples.kwargs)
        elif given is None and session.origin.arguments is not None:
            names |= _names_in(session.origin.arguments)
        # It holds the objects: another one made later could have the identity of one that is gone.
        self._values = ExampleInputs(arguments, {name: namespace[name] for name in sorted(names) if name in namespace})
        model = captured(session.graph)
        self._model = Fingerprint(model.module), model.edits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Basis) and self._model == other._model and self._values.is_like(other._values)

    __hash__ = None  # type: ignore[assignment]  # it holds what changes


def _names_in(arguments: str) -> set[str]:
    try:
        return set(free_names(f"_(\n{arguments}\n)"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()  # they cannot be evaluated either
