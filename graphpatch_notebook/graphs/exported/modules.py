"""The modules of an exported program: the hierarchy of the model that was exported, with graphs in place of code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import MethodType
from typing import Any

from torch import fx
from torch.nn import Module

from graphpatch_notebook.capture.records import InputParameter
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.graphs.exported.inputs import ProgramInputs
from graphpatch_notebook.graphs.generated_code import generate
from graphpatch_notebook.interrupts import holding

_calls_so_far: ContextVar[dict[int, int] | None] = ContextVar("graphpatch_exported_calls", default=None)


class ExportedModule(Module):
    """A module of an exported program. Abstract: `exported_module` makes a class for each module.

    Runs the graph that was exported for it. A module that the program calls several times has a graph for each call
    that differs from the others.
    """

    _graphs: list[fx.Graph]
    _graph_of_call: list[int]
    _generated: dict[int, Callable[..., Any]]

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_graphs"] = []
        self.__dict__["_graph_of_call"] = []
        self.__dict__["_generated"] = {}

    def add_graph(self, graph: fx.Graph) -> None:
        """Adds a graph. Its placeholders are the parameters of `forward`, its output is a one-element tuple."""
        self._graphs.append(graph)

    def add_call(self, graph_number: int) -> int:
        """Notes the next of the calls that the program makes, by the number of the graph that runs in it."""
        self._graph_of_call.append(graph_number)
        return graph_number

    def run_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the graph of the call that this is in the run of the program."""
        number = self._graph_number()
        function = self._generated.get(number)
        if function is None:
            function = self._generated[number] = generate(self._graphs[number]).function
        return function(self, *args, **kwargs)[0]

    def _graph_number(self) -> int:
        if len(self._graphs) == 1:
            return 0
        name = type(self).__name__
        if not self._graphs:
            raise GraphError(f"the exported program never calls this {name}, so it has no graph to run")
        counts = _calls_so_far.get()
        if counts is None:
            raise GraphError(
                f"the exported program calls this {name} {len(self._graph_of_call)} times, with {len(self._graphs)} "
                "different graphs; only a run of the whole program decides which one runs"
            )
        call = counts.get(id(self), 0)
        counts[id(self)] = call + 1
        if call >= len(self._graph_of_call):
            raise GraphError(f"this {name} is called more often than in the exported program")
        return self._graph_of_call[call]

    def train(self, mode: bool = True) -> Any:
        """Raises an error: the modes were fixed when the program was exported."""
        raise NotImplementedError(
            f"{'train' if mode else 'eval'}() does not change an exported program: dropout and the like run as they "
            "did when it was exported; export the model in the other mode"
        )

    def __getitem__(self, position: int) -> Module:
        """Returns a child by its position, if the children are numbered as in a `Sequential`."""
        found = self._modules.get(str(position))
        if found is None:
            raise IndexError(f"{type(self).__name__} has no child {position}")
        return found

    def __setitem__(self, position: int, module: Module) -> None:
        """Puts another module in the place of a numbered child."""
        setattr(self, str(position), module)


class ExportedRoot(ExportedModule):
    """The whole program. Abstract. Checks its inputs before it runs, as the program does."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Checks the inputs, brings them into the form that the program was exported with, and runs it."""
        args, kwargs = self.program_inputs(args, kwargs)
        return super().__call__(*args, **kwargs)

    @property
    def program_inputs(self) -> ProgramInputs:
        """The checks of the program."""
        return self.__dict__["_program_inputs"]  # type: ignore[no-any-return]

    def run_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program."""
        with holding(_calls_so_far, {}):
            return super().run_graph(args, kwargs)


class _Forward:
    """`forward` of a class of modules, with the signature of that class."""

    def __init__(self, parameters: Sequence[InputParameter]) -> None:
        self.__name__ = "forward"
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        given = [inspect.Parameter(p.name, p.kind, default=p.default) for p in parameters]
        self.__signature__ = inspect.Signature([own, *given])

    def __get__(self, module: Any, owner: Any = None) -> Any:
        return self if module is None else MethodType(self, module)

    def __call__(self, module: ExportedModule, *args: Any, **kwargs: Any) -> Any:
        return module.run_graph(args, kwargs)


def exported_module(class_name: str, parameters: Sequence[InputParameter]) -> ExportedModule:
    """Returns a new module, without graphs, whose `forward` has these parameters."""
    made: ExportedModule = _class(ExportedModule, class_name, parameters)()
    return made


def exported_root(class_name: str, parameters: Sequence[InputParameter], inputs: ProgramInputs) -> ExportedRoot:
    """Returns a new module for a whole program."""
    made: ExportedRoot = _class(ExportedRoot, class_name, parameters)()
    made.__dict__["_program_inputs"] = inputs
    return made


def _class(base: type[ExportedModule], name: str, parameters: Sequence[InputParameter]) -> Any:
    return type(name, (base,), {"forward": _Forward(parameters), "__module__": __name__, "__doc__": base.__doc__})
