"""The commands that create a graph, or select one."""

from __future__ import annotations

import ast
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from graphpatch_notebook.errors import CaptureError, SessionError
from graphpatch_notebook.notebook.display.progress import capture_progress
from graphpatch_notebook.notebook.session.chosen_patch import reserved
from graphpatch_notebook.notebook.session.origin import Origin
from graphpatch_notebook.notebook.session.session import session_of
from graphpatch_notebook.notebook.session.workspace import Workspace, counted, is_a, transfer
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.patchable_graph import PatchableGraph

_USAGE = "write %graphpatch wrap NAME = MODEL(EXAMPLE INPUTS)"
_TYPED = "<%graphpatch wrap>"  # the file name of the typed line in tracebacks
_MAKE = "<graphpatch>"  # not a name that a user can define


@dataclass(frozen=True, slots=True)
class Assignment:
    """The parsed form of `NAME = MODEL(ARGS)`."""

    name: str
    call: ast.Call

    @classmethod
    def parse(cls, text: str) -> Assignment:
        """Parses a line."""
        text = text.strip()
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise SessionError(f"{text!r} is not valid Python ({reason}); {_USAGE}") from None
        if len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Call):
            raise SessionError(f"wrap needs a name for the graph: %graphpatch wrap pg = {text}")
        statement = body[0] if len(body) == 1 else None
        if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            raise SessionError(f"{text!r} is not an assignment; {_USAGE}" if text else f"wrap needs a model; {_USAGE}")
        target, call = statement.targets[0], statement.value
        if not isinstance(target, ast.Name):
            raise SessionError(f"{ast.unparse(target)!r} is not a plain variable name; {_USAGE}")
        if not isinstance(call, ast.Call):
            raise SessionError(f"the model must be called on example inputs: {target.id} = {ast.unparse(call)}(...)")
        return cls(target.id, call)

    @property
    def model(self) -> str:
        """The expression for the model."""
        return ast.unparse(self.call.func)

    def arguments(self, *, has_options_first: bool) -> str:
        """Returns the arguments; options that are the first argument become a keyword, since they are not an input."""
        texts = [ast.unparse(argument) for argument in (*self.call.args, *self.call.keywords)]
        return ", ".join([*texts[1:], f"extraction_options={texts[0]}"] if has_options_first else texts)


def wrap(workspace: Workspace, args: Namespace) -> None:
    """Assigns a new `PatchableGraph` to a variable. Patches that were chosen for the graph before are carried over."""
    __tracebackhide__ = True
    assignment = Assignment.parse(" ".join(args.text))
    namespace = workspace.namespace
    _check_name(assignment, namespace)
    start = time.perf_counter()
    graph, has_options_first = _evaluate(assignment, namespace)
    origin = Origin(assignment.name, assignment.model, assignment.arguments(has_options_first=has_options_first))
    seconds = time.perf_counter() - start
    before = namespace.get(assignment.name)
    session = session_of(graph)
    session.origin = origin
    namespace[assignment.name] = graph
    print(f"{workspace.use(assignment.name).title} ({seconds:.1f} s)")
    if is_a(before, PatchableGraph):
        transfer(session_of(before).chosen.patches, session)


def _check_name(assignment: Assignment, namespace: dict[str, Any]) -> None:
    name = assignment.name
    inputs = [*assignment.call.args, *(keyword.value for keyword in assignment.call.keywords)]
    why = reserved(name)
    if any(isinstance(node, ast.Name) and node.id == name for value in inputs for node in ast.walk(value)):
        why = "is one of the example inputs, and the graph would overwrite it"
    if assignment.model == name and not is_a(namespace.get(name), PatchableGraph):
        why = "is the model itself, and the graph would overwrite it"
    if why:
        raise SessionError(f"{name!r} {why}: choose another name: %graphpatch wrap pg = {assignment.model}(...)")


def _evaluate(assignment: Assignment, namespace: dict[str, Any]) -> tuple[PatchableGraph, bool]:
    """Returns the graph, and whether the first argument is an `ExtractionOptions`.

    Evaluates the typed call in the user's namespace, with `PatchableGraph` in place of the model.
    """
    __tracebackhide__ = True
    has_options_first = False

    def make(module: Any, *args: Any, **kwargs: Any) -> PatchableGraph:
        __tracebackhide__ = True
        nonlocal has_options_first
        has_options_first = bool(args) and isinstance(args[0], ExtractionOptions)
        if isinstance(module, PatchableGraph) or not isinstance(module, Module):
            kind = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
            raise SessionError(f"{assignment.model!r} must be a torch.nn.Module, but is {kind}; {_USAGE}")
        with capture_progress(module):
            return PatchableGraph(module, *args, **kwargs)

    function = ast.copy_location(ast.Name(_MAKE, ast.Load()), assignment.call.func)
    call = ast.copy_location(
        ast.Call(function, [assignment.call.func, *assignment.call.args], assignment.call.keywords), assignment.call
    )
    code = compile(ast.fix_missing_locations(ast.Expression(call)), _TYPED, "eval")
    local: dict[str, Any] = {_MAKE: make, "__tracebackhide__": True}
    try:
        graph = eval(code, namespace, local)
    except CaptureError as error:
        raise SessionError(str(error)) from None
    namespace.update({name: value for name, value in local.items() if name not in (_MAKE, "__tracebackhide__")})
    return graph, has_options_first and not isinstance(assignment.call.args[0], ast.Starred)


def use(workspace: Workspace, args: Namespace) -> None:
    """Selects the graph that commands apply to."""
    active = workspace.use(args.name)
    print(f"{active.title}, {counted(len(active.session.chosen.patches))} chosen")
