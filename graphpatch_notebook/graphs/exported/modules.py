"""The modules of an exported program, with graphs in place of code; its inputs, and its own checks of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, fx
from torch.export.unflatten import UnflattenedModule
from torch.nn import Module

from graphpatch_notebook.capture.records import InputParameter
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.graphs.generated_code import generate
from graphpatch_notebook.interrupts import holding
from graphpatch_notebook.paths import unique_name
from graphpatch_notebook.torch_compat import parts_of, structure_of, structured, without_torch_functions

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


@dataclasses.dataclass(frozen=True)
class ProgramInput:
    """A parameter of the program: its record, how it is built up from flat values, and where the first of these is."""

    parameter: InputParameter
    structure: Any
    start: int

    @property
    def size(self) -> int:
        """How many flat values it has."""
        return int(self.structure.num_leaves)

    @property
    def is_leaf(self) -> bool:
        """Whether it is a single value rather than a container."""
        return bool(self.structure.is_leaf())


def program_inputs(unflattened: UnflattenedModule) -> list[ProgramInput]:
    """Returns the parameters of the program, with the names from the exported `forward`."""
    signature = unflattened.module_call_graph[0].signature
    assert signature is not None
    positional, by_name = parts_of(signature.in_spec)
    flat_names = [str(node.target) for node in unflattened.graph.nodes if node.op == "placeholder"]
    structures = [*parts_of(positional), *parts_of(by_name)]
    names = _names(getattr(signature, "forward_arg_names", None), positional, by_name, flat_names)
    found: list[ProgramInput] = []
    start = 0
    for position, (name, structure) in enumerate(zip(names, structures, strict=True)):
        kind = _POSITIONAL if position < positional.num_children else _KEYWORD
        found.append(ProgramInput(InputParameter(name, kind, inspect.Parameter.empty), structure, start))
        start += structure.num_leaves
    return found


def _names(known: list[str] | None, positional: Any, by_name: Any, flat_names: list[str]) -> list[str]:
    keywords = [str(key) for key in by_name.context or ()]
    count = positional.num_children + len(keywords)
    if known is not None and len(known) == count and known[positional.num_children :] == keywords:
        return list(known)
    # Programs of older versions do not say; `*args` have one name for all.
    names: list[str] = []
    start = 0
    for position, structure in enumerate(parts_of(positional)):
        base = flat_names[start] if structure.is_leaf() else f"input_{position}"
        names.append(unique_name(base, {*names, *keywords}))
        start += structure.num_leaves
    return [*names, *keywords]


class ProgramInputs:
    """Checks a call as the program does, and brings it into the form that the program was exported with.

    It is the unflattened program without its operations: a module of the same class, which returns its flat inputs.
    `guards` is what the program asserts of these, which `unflatten` leaves out. It holds no weights; copies share it.
    """

    def __init__(self, unflattened: UnflattenedModule, guards: Callable[..., None] | None = None) -> None:
        signature = unflattened.module_call_graph[0].signature
        assert signature is not None
        self.structure = signature.in_spec
        self._checks = _without_work(unflattened)
        self._guards = guards

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        flat = list(self._checks(*args, **kwargs))
        if self._guards is not None:
            with without_torch_functions():
                self._guards(*flat)
        new_args, new_kwargs = structured(flat, self.structure)
        return tuple(new_args), dict(new_kwargs)

    @property
    def fixed_sizes(self) -> list[list[int | None]]:
        """The sizes of each tensor among the flat inputs, `None` where the program takes others."""
        values = [node.meta.get("val") for node in self._checks.input_placeholders]
        tensors = [value for value in values if isinstance(value, Tensor)]
        return [[size if type(size) is int else None for size in tensor.shape] for tensor in tensors]

    def __deepcopy__(self, memo: dict[int, Any]) -> ProgramInputs:
        return self


def _without_work(unflattened: UnflattenedModule) -> UnflattenedModule:
    """Returns an unflattened module that checks its inputs like `unflattened`, and returns them as a flat tuple."""
    checks: UnflattenedModule = object.__new__(UnflattenedModule)
    Module.__init__(checks)
    # What `unflatten` put around it to hide it from compilers is bound to the module with the weights.
    hidden = {*vars(Module()), "process_forward_inputs", "graph_module", "ivals"}
    checks.__dict__.update({name: value for name, value in vars(unflattened).items() if name not in hidden})
    graph = fx.Graph()
    inputs = [graph.node_copy(node) for node in unflattened.graph.nodes if node.op == "placeholder"]
    graph.output(tuple(inputs))
    entry, *others = unflattened.module_call_graph
    assert entry.signature is not None
    signature = dataclasses.replace(entry.signature, out_spec=structure_of(tuple(inputs)))
    checks.__dict__["graph"] = graph
    checks.__dict__["input_placeholders"] = inputs
    checks.__dict__["module_call_graph"] = [dataclasses.replace(entry, signature=signature), *others]
    return checks


# -- modules -----------------------------------------------------------------------------------------------------------


_calls_so_far: ContextVar[dict[int, int] | None] = ContextVar("graphpatch_exported_calls", default=None)


class ExportedModule(Module):
    """A module of an exported program. Abstract: `exported_class` makes a class for each module.

    Runs the graph that was exported for it. A module that the program calls several times has a graph for each call
    that differs from the others.
    """

    def __init__(self) -> None:
        super().__init__()
        # The placeholders of a graph are the parameters of `forward`, its output is a one-element tuple.
        self._graphs: list[fx.Graph] = []
        self._graph_of_call: list[int] = []
        self._generated: dict[int, Callable[..., Any]] = {}

    def add_graph(self, graph: fx.Graph) -> None:
        """Adds a graph."""
        self._graphs.append(graph)

    def add_call(self, graph_number: int) -> None:
        """Notes the next of the calls that the program makes, by the number of the graph that runs in it."""
        self._graph_of_call.append(graph_number)

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

    def __init__(self, inputs: ProgramInputs) -> None:
        super().__init__()
        self._program_inputs = inputs

    @property
    def fixed_sizes(self) -> list[list[int | None]]:
        """The sizes of each tensor among the inputs, `None` where the program takes others."""
        return self._program_inputs.fixed_sizes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Checks the inputs, brings them into the form that the program was exported with, and runs it."""
        args, kwargs = self._program_inputs(args, kwargs)
        return super().__call__(*args, **kwargs)

    def run_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the program."""
        with holding(_calls_so_far, {}):
            return super().run_graph(args, kwargs)


_Exported = TypeVar("_Exported", bound=ExportedModule)


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


def exported_class(base: type[_Exported], name: str, parameters: Sequence[InputParameter]) -> type[_Exported]:
    """Returns a class of modules whose `forward` has these parameters."""
    return type(name, (base,), {"forward": _Forward(parameters), "__module__": __name__, "__doc__": base.__doc__})
