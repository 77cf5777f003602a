"""Programs of `torch.export` as models, with the module hierarchy of the model that was exported.

`torch.export.unflatten` makes a module with a graph for each module of the model. Here the graphs become the code of
these modules, so that a program is captured and patched as any other model is. Its operations are named after the
variables of that code: the names in the program.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterator
from itertools import cycle
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.unflatten import InterpreterModule, InterpreterModuleDispatcher, UnflattenedModule
from torch.nn import Module, ModuleList

from graphpatch_notebook.capture import capture, name_nodes
from graphpatch_notebook.capture.records import Frame, Node, OpNode, Site, SourceLine, line_at
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.graphs.generated_code import GeneratedCode, generate, name_assigned_at
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.patching.model_state import copied, preserved
from graphpatch_notebook.paths import unique_name
from graphpatch_notebook.torch_compat import (
    input_guards,
    is_overload,
    parts_of,
    structure_of,
    structured,
    without_torch_functions,
)

_TRACE_LINE = re.compile(r'^ *File "(.+)", line (\d+), in (.+)\n *(.*)', re.MULTILINE)
_OF_MODULES = frozenset(vars(Module()))


def exported_model(program: Any, flat_args_adapter: Any = None) -> tuple[Module, Frame]:
    """Returns an exported program, or the program in a file, as a model, and the record of its run on its examples.

    Arguments and errors are those of `PatchableGraph.from_exported`. Torch raises its own for a file that it cannot
    read, and for a program that it cannot unflatten.
    """
    file = _checked_file(program) if isinstance(program, (str, os.PathLike)) else None
    if file is None and not isinstance(program, ExportedProgram):
        raise TypeError(
            "from_exported needs what torch.export.export returns, or a file that torch.export.save wrote, not "
            f"{type(program).__name__}; for a model, use PatchableGraph(model, *example_args)"
        )
    program = program if file is None else torch.export.load(file)
    if program.example_inputs is None:
        raise GraphError("the exported program has no example inputs (program.example_inputs), on which to capture it")
    unflattened = torch.export.unflatten(program, flat_args_adapter)
    inputs = ProgramInputs(unflattened, input_guards(program))
    _separate_calls(unflattened, {}, set())
    for module in list(unflattened.modules()):
        children = [(_call_name(module, name), child) for name, child in module._modules.items()]
        called = {name: child for name, child in children if _has_graph(child)}
        module._modules = {name: called.get(name, child) for name, child in children}
    for module in list(unflattened.modules()):
        if _has_graph(module):
            _give_code(module, inputs if module is unflattened else None)
        elif isinstance(module, InterpreterModule) or type(module) is Module:  # it is never called
            is_list = [*module._modules] == [str(number) for number in range(len(module._modules))]
            module.__class__ = ModuleList if is_list else Module
            _strip(module, ())
    args, kwargs = copied(program.example_inputs)
    with preserved(unflattened):
        root = capture(unflattened, ExtractionOptions(), tuple(args), kwargs)
    root.capture.is_program = True
    _name_as_exported(root, program)
    return unflattened, root


def _checked_file(file: str | os.PathLike[str]) -> str:
    """Returns the name of a file that may hold a program. For other files torch prints a traceback before it raises."""
    name = os.fspath(file)
    if not Path(name).is_file():
        raise FileNotFoundError(f"the file does not exist: {name!r}")
    if not zipfile.is_zipfile(name):
        raise GraphError(f"{name!r} is not a file that torch.export.save wrote")
    return name


# -- modules -----------------------------------------------------------------------------------------------------------


def _separate_calls(module: Any, turns: dict[Any, Iterator[tuple[int, Module]]], seen: set[int]) -> None:
    """Makes graphs call a module of its own in each call of a module that does something else: `inner`, `inner_call_1`.

    `turns` has the graphs of modules that torch lets choose among several in turn, by the name of the module.
    """
    if id(module) in seen:
        return
    seen.add(id(module))
    for node in module.graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        names: list[str] = []
        *path, name = str(node.target).split(".")
        owner = module
        for part in path:
            names.append(_call_name(owner, part))
            owner = getattr(owner, part)
        child, key = getattr(owner, name), (id(owner), name)
        if isinstance(child, InterpreterModuleDispatcher):
            turns[key] = cycle(enumerate(child.call_modules()))
        if node.op == "call_module" and key in turns:
            turn, child = next(turns[key])
            name = f"{name}@{turn}" if turn else name
            owner.add_module(name, child)
        node.target = ".".join([*names, _call_name(owner, name)])
        if node.op == "call_module" and _has_graph(child):
            _separate_calls(child, turns, seen)


def _call_name(owner: Module, name: str) -> str:
    """Returns the name here of what `unflatten` calls `name` or, from the second call of a module on, `name@1`."""
    base, _, number = name.partition("@")
    variants = [key for key, child in owner._modules.items() if key.partition("@")[0] == base and _has_graph(child)]
    return base if not number or variants[:1] == [name] else f"{base}_call_{number}"


def _has_graph(module: Any) -> bool:
    return isinstance(module, (UnflattenedModule, InterpreterModule, fx.GraphModule)) and len(module.graph.nodes) > 0


def _strip(module: Module, held: Collection[str]) -> None:
    """Removes what `unflatten` ran a module by: all but tensors, and the attributes that its graph reads."""
    for name in vars(module).keys() - _OF_MODULES - {*held}:
        if not isinstance(module.__dict__[name], Tensor):
            del module.__dict__[name]


class ExportedModule(Module):
    """A module of an exported program. Abstract: each module has a class of its own, with its code."""

    graph: ClassVar[fx.Graph]
    _generated: ClassVar[GeneratedCode | None] = None

    @classmethod
    def run(cls, module: Module, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph on a module."""
        if cls._generated is None:
            cls._generated = generate(cls.graph)
        return cls._generated.function(module, *args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """Raises an error: the modes were fixed when the program was exported."""
        raise NotImplementedError(
            f"{'train' if mode else 'eval'}() does not change an exported program: dropout and the like run as they "
            "did when it was exported; export the model in the other mode"
        )


def _give_code(module: Any, inputs: ProgramInputs | None) -> None:
    """Makes the graph of an unflattened module its code, with the parameters of its placeholders, or of the program."""
    graph = module.graph
    for node in graph.nodes:
        if node.name == "self":  # the result of a submodule of that name: in code, this is the module
            node.name = unique_name("self_1", {other.name for other in graph.nodes})
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.run(self, *args, **kwargs) if inputs is None else inputs.run(cls.run, self, args, kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    cast(Any, forward).__signature__ = inspect.Signature([own, *(parameters if inputs is None else inputs.parameters)])
    exported = getattr(module, "_ty", None)
    name = str(getattr(exported, "__name__", exported)).rsplit(".", 1)[-1]
    contents = {"forward": forward, "graph": graph, "__module__": __name__}
    cls: Any = type(name if exported and name.isidentifier() else "ExportedModule", (ExportedModule,), contents)
    _strip(module, [str(node.target).split(".")[0] for node in graph.nodes if node.op == "get_attr"])
    module.__class__ = cls
    if inputs is not None:
        module.__dict__["fixed_sizes"] = inputs.fixed_sizes


# -- names -------------------------------------------------------------------------------------------------------------


def _name_as_exported(root: Frame, program: ExportedProgram) -> None:
    """Gives the operations of all frames the names that they have in the program, and the lines of the exported model.

    Calls that do the same have one graph, with the names of the first. But the modules run the operations of a program
    in its order, so these are paired one by one, unless `unflatten` repeats some.
    """
    by_frame = {id(frame): {node.name: node for node in _graph_of(frame).nodes} for frame in root.walk()}
    signature = program.graph_signature
    # What `unflatten` adds to write into the buffers and inputs that a functional program returns instead.
    added = torch.ops.aten.copy_.default if signature.buffers_to_mutate or signature.user_inputs_to_mutate else None
    run = [(frame, node) for frame, node in _in_order(root) if _gives_tensors(node) and node.target is not added]
    operations = [node for node in program.graph.nodes if _gives_tensors(node)]
    if [node.target for _, node in run] == [node.target for node in operations]:
        for (frame, node), operation in zip(run, operations, strict=True):
            by_frame[id(frame)][node.name] = operation
    for frame in root.walk():
        _name_operations(frame, by_frame[id(frame)])


def _graph_of(frame: Frame) -> fx.Graph:
    return cast(ExportedModule, frame.module).graph


def _in_order(frame: Frame) -> Iterator[tuple[Frame, fx.Node]]:
    """Yields the nodes of a frame and those below it in order, without those of operators that call graphs."""
    calls = frame.calls()
    for node in _graph_of(frame).nodes:
        yield frame, node
        if node.op == "call_module":
            module = attrgetter(node.target)(frame.module)
            yield from _in_order(next(call.frame for call in calls if call.frame.module is module))


def _gives_tensors(node: fx.Node) -> bool:
    return is_overload(node.target) and isinstance(node.meta.get("val"), (Tensor, tuple, list))


def _name_operations(frame: Frame, nodes: dict[str, fx.Node]) -> None:
    """Names the operations of a frame, given the nodes of the program by the variables of the frame's code."""
    sites: dict[tuple[int, str | None], Site] = {}
    reserved = {node.name for node in frame.nodes if node.kind != "op"}
    values: list[tuple[Node, Any]] = []
    for node in frame.nodes:
        variable = node.target if node.kind == "input" else node.op.replace(".", "_")
        if node.site is not None:
            variable = name_assigned_at(node.site.leaf[0], line_at(*node.site.leaf))
        if (found := nodes.get(variable)) is None:
            continue
        value: Any = found.meta.get("val")
        values.append((node, value if node.position is None else value[node.position]))
        if isinstance(node, OpNode) and is_overload(node.target):
            # A submodule may have the name: then the operation has one that is not another operation's.
            node.base_name, node.name = f"{found.name}_op" if found.name in reserved else found.name, ""
        if node.site is not None and (lines := _lines_of(found)):
            node.site = sites.setdefault((id(node.site), variable), Site(node.site.steps, lines))
    name_nodes(frame, size_prefix="")
    frame.example_values.update({node.name: value for node, value in values if value is not None})


def _lines_of(node: fx.Node) -> tuple[SourceLine, ...]:
    found = _TRACE_LINE.findall(node.meta.get("stack_trace") or "")
    return tuple(SourceLine(file, int(line), function, text) for file, line, function, text in found)


# -- inputs ------------------------------------------------------------------------------------------------------------


class ProgramInputs:
    """The inputs of a program: their structure, and the checks of a call.

    It has the unflattened program without its operations: a module of the same class, which returns its flat inputs.
    `guards` is what the program asserts of these, which `unflatten` leaves out. It holds no weights.
    """

    def __init__(self, unflattened: UnflattenedModule, guards: Callable[..., None] | None) -> None:
        signature: Any = unflattened.module_call_graph[0].signature
        self._output_structure = signature.out_spec
        self._checks = _without_work(unflattened)
        self._guards = guards
        positional, by_name = parts_of(signature.in_spec)
        flat = [node for node in unflattened.graph.nodes if node.op == "placeholder"]
        names = _names(getattr(signature, "forward_arg_names", None), positional, by_name)
        kinds: list[Any] = [inspect.Parameter.POSITIONAL_OR_KEYWORD] * positional.num_children
        kinds += [inspect.Parameter.KEYWORD_ONLY] * (len(names) - len(kinds))
        self.parameters = [inspect.Parameter(name, kind) for name, kind in zip(names, kinds, strict=True)]
        values = [node.meta.get("val") for node in flat]
        self.fixed_sizes = [
            [size if type(size) is int else None for size in value.shape]
            for value in values
            if isinstance(value, Tensor)
        ]
        """The sizes of each tensor among the flat inputs, `None` where the program takes others."""

    def run(self, code: Callable[..., Any], module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Checks a call as the program does, and runs the code of the program on its flat inputs."""
        with without_torch_functions():
            flat = self._checks(*args, **kwargs)
            if self._guards is not None:
                self._guards(*flat)
        return structured(list(code(module, *flat)), self._output_structure)


def _names(known: list[str] | None, positional: Any, by_name: Any) -> list[str]:
    keywords = [str(key) for key in by_name.context or ()]
    count = positional.num_children + len(keywords)
    if known is not None and len(known) == count and known[positional.num_children :] == keywords:
        return list(known)
    # Programs of older versions do not say.
    return [*(f"input_{position}" for position in range(positional.num_children)), *keywords]


def _without_work(unflattened: UnflattenedModule) -> UnflattenedModule:
    """Returns an unflattened module that checks its inputs like `unflattened`, and returns them as a flat tuple."""
    checks: Any = object.__new__(UnflattenedModule)
    Module.__init__(checks)
    # What `unflatten` put around it to hide it from compilers is bound to the module with the weights.
    hidden = {*_OF_MODULES, "process_forward_inputs", "graph_module", "ivals"}
    checks.__dict__.update({name: value for name, value in vars(unflattened).items() if name not in hidden})
    graph = fx.Graph()
    inputs = [graph.node_copy(node) for node in unflattened.graph.nodes if node.op == "placeholder"]
    graph.output(tuple(inputs))
    entry, *others = unflattened.module_call_graph
    signature = dataclasses.replace(cast(Any, entry.signature), out_spec=structure_of(tuple(inputs)))
    checks.__dict__ |= {
        "graph": graph,
        "input_placeholders": inputs,
        "module_call_graph": [dataclasses.replace(entry, signature=signature), *others],
        "_run_with_interpreter": True,  # also where torch was asked to generate code for unflattened programs
    }
    return cast(UnflattenedModule, checks)
