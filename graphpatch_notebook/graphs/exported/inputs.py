"""The inputs of an exported program: their names, their structure, and the program's own checks of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.export.unflatten import UnflattenedModule
from torch.nn import Module

from graphpatch_notebook.capture.records import InputParameter
from graphpatch_notebook.paths import unique_name
from graphpatch_notebook.torch_compat import parts_of, structure_of, structured, without_torch_functions

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


@dataclasses.dataclass(frozen=True)
class ProgramInput:
    """A parameter of the program.

    Attributes:
        parameter: Its record.
        structure: How it is built up from flat values.
        start: The position of the first of these among all flat values.
    """

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
    Holds no weights; copies share it.

    Args:
        unflattened: The unflattened program.
        guards: What the program asserts of its flat inputs, which `unflatten` leaves out.
    """

    def __init__(self, unflattened: UnflattenedModule, guards: Callable[..., None] | None = None) -> None:
        signature = unflattened.module_call_graph[0].signature
        assert signature is not None
        self.structure = signature.in_spec
        self._checks = _without_work(unflattened)
        self._guards = guards

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the call in the form that the program was exported with.

        Raises:
            Exception: Raised by the program on such inputs.
        """
        flat = list(self._checks(*args, **kwargs))
        if self._guards is not None:
            with without_torch_functions():
                self._guards(*flat)
        new_args, new_kwargs = structured(flat, self.structure)
        return tuple(new_args), dict(new_kwargs)

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
