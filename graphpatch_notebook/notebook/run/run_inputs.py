"""What *Run* runs the model on: typed arguments, else inputs that were given, else the example inputs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from graphpatch_notebook.capture.inputs import ExampleInputs
from graphpatch_notebook.checks.model_state import copied
from graphpatch_notebook.errors import ChosenPatchError, SessionError
from graphpatch_notebook.notebook.session.expressions import quoted, undefined, without_syntax_warnings
from graphpatch_notebook.notebook.session.origin import changed_variables, written_arguments
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.options import options_among
from graphpatch_notebook.patchable_graph import captured

_REPAIR = "type the arguments of a call in the field Inputs, or give some: pg.browse(inputs=...)"
_CALL = "<graphpatch>"  # no name that a user could have


@dataclass(frozen=True)
class RunInputs:
    """The inputs of one run.

    Attributes:
        args: The positional ones.
        kwargs: Those by keyword.
        text: The same as they stand in a call, as far as known.
        examples: The kept inputs that they are, which must not change before they are copied.
        remark: What is to be said of them, if anything.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    text: str = "..."
    examples: ExampleInputs | None = None
    remark: str | None = None

    def copy(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a copy for one run: a model may write into its inputs, or let a cache grow.

        Raises:
            SessionError: They were changed since the capture.
        """
        args, kwargs = copied((self.args, self.kwargs))
        if self.examples is not None:
            _check_unchanged(self.examples)
        return args, kwargs


def inputs_for_run(session: Session, namespace: dict[str, Any], typed: str | None, given: Any) -> RunInputs:
    """Returns the inputs to run on.

    Args:
        session: The session; its graph keeps the example inputs, and its origin how the user wrote them.
        namespace: The user's variables.
        typed: Arguments of a call, as Python; `None` or empty for none.
        given: A tuple of arguments, a dict of keyword arguments, or one value; `None` for none.

    Raises:
        ChosenPatchError: What was typed is no such thing, or cannot be evaluated (`field` is `inputs`).
        SessionError: There are no inputs, or the example inputs were changed since.
    """
    if typed is not None and typed.strip():
        args, kwargs = evaluated_arguments(typed, namespace)
        return RunInputs(args, kwargs, typed.strip())
    if given is not None:
        return _given(given, namespace)
    examples: ExampleInputs | None = captured(session.graph).examples
    written = _without_options(session.origin.arguments)
    if examples is not None:
        _check_unchanged(examples)
        return _kept(examples, written, namespace)
    if written is None:
        raise SessionError(f"there are no example inputs for this graph; {_REPAIR}")
    args, kwargs = evaluated_arguments(written, namespace)
    return RunInputs(args, kwargs, written)


def _kept(examples: ExampleInputs, written: str | None, namespace: dict[str, Any]) -> RunInputs:
    if written is None:
        return RunInputs(examples.args, examples.kwargs, "...", examples)
    changed = ", ".join(changed_variables(written, examples, namespace))
    if not changed:
        return RunInputs(examples.args, examples.kwargs, written, examples)
    remark = f"{changed} got another value since the capture: this ran on the example inputs, as they were captured; "
    remark += f"to run on what the variables hold now, type {written} in the field Inputs"
    return RunInputs(examples.args, examples.kwargs, "...", examples, remark)


def no_inputs(session: Session, given: Any = None) -> str | None:
    """Returns why there is nothing that *Run* could run on without typed inputs; `None` where there is something."""
    examples: ExampleInputs | None = captured(session.graph).examples
    if given is not None or (examples is None and session.origin.arguments is not None):
        return None
    if examples is None:
        return f"there are no example inputs for this graph; {_REPAIR}"
    change = examples.change()
    return None if change is None else _changed(change)


def _check_unchanged(examples: ExampleInputs) -> None:
    if (change := examples.change()) is not None:
        raise SessionError(_changed(change))


def _changed(change: str) -> str:
    return f"the example inputs are not what they were before the capture any more ({change}); {_REPAIR}"


def given_arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns what a tuple of arguments, a dict of keyword arguments, or one value stands for.

    Example:
        >>> given_arguments((1, 2)), given_arguments({"x": 1}), given_arguments(3)
        (((1, 2), {}), ((), {'x': 1}), ((3,), {}))
    """
    if type(given) is tuple:
        return given, {}
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return (), dict(given)
    return (given,), {}


def _given(given: Any, namespace: dict[str, Any]) -> RunInputs:
    args, kwargs = given_arguments(given)
    written = written_arguments(args, kwargs, namespace)
    return RunInputs(args, kwargs, written or ("*inputs" if len(args) > 1 else "**inputs" if kwargs else "inputs"))


def evaluated_arguments(text: str, namespace: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments that were typed as in a call.

    Raises:
        ChosenPatchError: They cannot be read, or evaluated.

    Example:
        >>> evaluated_arguments("a, scale=2 * a", {"a": 3})
        ((3,), {'scale': 6})
    """
    call = _parsed(text)
    call.func = ast.copy_location(ast.Name(_CALL, ast.Load()), call.func)
    code = compile(ast.fix_missing_locations(ast.Expression(call)), "<inputs>", "eval")
    make: Callable[..., Any] = lambda *args, **kwargs: (args, kwargs)  # noqa: E731
    try:
        args, kwargs = eval(code, namespace, {_CALL: make})
        _, args, kwargs = options_among(args, kwargs)
    except NameError as error:
        message = undefined(error.name, namespace) if error.name not in namespace else f"NameError: {error}"
        raise ChosenPatchError("inputs", f"inputs {quoted(text)}: {message}") from error
    except Exception as error:
        raise ChosenPatchError("inputs", f"inputs {quoted(text)}: {type(error).__name__}: {error}") from error
    return args, kwargs


def _parsed(text: str) -> ast.Call:
    try:
        # On lines of its own: a comment, or a parenthesis too many, is no way out.
        with without_syntax_warnings():
            node = ast.parse(f"_(\n{text}\n)", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ChosenPatchError("inputs", f"{quoted(text)} are no arguments of a call ({reason})") from None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ChosenPatchError("inputs", f"{quoted(text)} are no arguments of a call")
    if any(isinstance(inner, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)) for inner in ast.walk(node)):
        raise ChosenPatchError("inputs", f"{quoted(text)}: inputs cannot await, yield or assign; do that in a cell")
    return node


def _without_options(arguments: str | None) -> str | None:
    """Returns how the example inputs were written, without options for the capture among them."""
    if arguments is None or "extraction_options" not in arguments:
        return arguments
    call = _parsed(arguments)
    call.keywords = [keyword for keyword in call.keywords if keyword.arg != "extraction_options"]
    return ", ".join(ast.unparse(argument) for argument in (*call.args, *call.keywords))
