"""Turns the result of `torch.export.unflatten` into modules and graphs of this package.

unflatten                                    here
inner, inner@1, ... (one for each call)  ->  inner, a module with several graphs
InterpreterModuleDispatcher              ->  the same
Module without a graph                   ->  ModuleList, or Module
UnflattenedModule                        ->  ExportedRoot, whose graph has the inputs and the output of the model
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.export.unflatten import InterpreterModule, InterpreterModuleDispatcher, UnflattenedModule
from torch.nn import Module, ModuleList

from graphpatch_notebook.capture.records import InputParameter
from graphpatch_notebook.graphs.build import Structured, identifier
from graphpatch_notebook.graphs.exported.modules import (
    ExportedModule,
    ExportedRoot,
    ProgramInput,
    ProgramInputs,
    exported_class,
    program_inputs,
)
from graphpatch_notebook.paths import unique_name
from graphpatch_notebook.torch_compat import leaves_of, parts_of, structured

CALLED = "graphpatch_called"
"""The key in the meta of a `call_module` node of the group that it calls, and the number of the graph that runs there
(`None`: the next in turn)."""
_POSITIONAL_ARGUMENT = "_positional_arg_"


class Group:
    """The variants of one module: one for each of its calls that differs from the others."""

    def __init__(self, variants: list[Module]) -> None:
        self.variants = variants  # the modules that `unflatten` made; those without a graph are never called
        # The numbers of the graphs in the order of all calls, if only the order distinguishes them.
        self.turns: list[int] = []
        self.module: Module | None = None  # the module made for all of them
        self.names: dict[str, str] = {}  # what the placeholders of all graphs are called here, by their names there
        self.is_by_name = False  # whether callers give the arguments by name: the graphs have different placeholders
        self._common: set[str] = set()

    def add(self, variants: list[Module]) -> list[Module]:
        """Adds variants; returns those that are new."""
        new: list[Module] = []
        for variant in variants:
            if all(variant is not known for known in self.variants):
                self.variants.append(variant)
                new.append(variant)
        return new

    def graphs(self) -> list[Module]:
        """Returns the variants that have a graph: its number is its position here."""
        return [variant for variant in self.variants if graph_in(variant) is not None]

    def number(self, variant: Module) -> int:
        """Returns the number of the graph of a variant."""
        return next(number for number, known in enumerate(self.graphs()) if known is variant)

    @property
    def class_name(self) -> str:
        """The name of the class of the module that was exported."""
        kind = next((getattr(variant, "_ty", None) for variant in self.graphs()), None)
        name = str(getattr(kind, "__name__", kind)).rsplit(".", 1)[-1]
        return name if kind is not None and name.isidentifier() else "ExportedModule"

    def name_parameters(self) -> list[InputParameter]:
        """Chooses the names of the placeholders, and returns the parameters of `forward`."""
        by_variant = [placeholder_names(variant) for variant in self.graphs()]
        union = list(dict.fromkeys(name for names in by_variant for name in names))
        self._common = {name for name in union if all(name in names for names in by_variant)}
        self.is_by_name = any(names != by_variant[0] for names in by_variant)
        if self.is_by_name:  # a parameter without a default must not follow one with a default
            union.sort(key=lambda name: name not in self._common)
        known: dict[str, str] = {}
        for variant in self.graphs():
            known = {**_values_by_position(variant), **known}
        for name in union:
            readable = known.get(name, name.lstrip("_"))
            self.names[name] = unique_name(readable if readable.isidentifier() else name, set(self.names.values()))
        return self.parameters()

    def parameters(self) -> list[InputParameter]:
        """Returns the parameters of `forward`; `None` is the default of those that not every graph has."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        empty = inspect.Parameter.empty
        return [InputParameter(new, kind, empty if old in self._common else None) for old, new in self.names.items()]


def placeholder_names(variant: Module) -> list[str]:
    """Returns the names of the placeholders of a variant's graph."""
    graph = graph_in(variant)
    return [str(node.target) for node in graph.nodes if node.op == "placeholder"] if graph is not None else []


def _values_by_position(variant: Module) -> dict[str, str]:
    """Returns the names of the values of placeholders that have only generated names.

    A module whose signature is preserved splits its arguments first: `x` is the first value of the first argument.
    """
    graph = graph_in(variant)
    positional = [name for name in placeholder_names(variant) if name.startswith(_POSITIONAL_ARGUMENT)]
    users = [user for node in graph.nodes if node.op == "placeholder" for user in node.users] if graph else []
    flat = next((user for user in users if user.op == "call_function"), None)
    if flat is None or not positional or not isinstance(flat.args[-1], fx.Node):
        return {}
    structure = parts_of(at(variant, str(flat.args[-1].target)))[0]
    by_position = {user.args[1]: user.name for user in flat.users if len(user.args) == 2}
    found: dict[str, str] = {}
    start = 0
    for name, part in zip(positional, parts_of(structure), strict=False):
        if part.is_leaf() and start in by_position:
            found[name] = str(by_position[start]).lstrip("_")
        start += part.num_leaves
    return found


def graph_in(variant: Module) -> fx.Graph | None:
    """Returns the graph of a module that `unflatten` made, if it is called anywhere."""
    graph = getattr(variant, "graph", None)
    return graph if isinstance(graph, fx.Graph) and len(graph.nodes) else None


def variants_in(child: Module) -> list[Module]:
    """Returns the modules that a child of an unflattened module dispatches to, or the child itself."""
    return list(child.call_modules()) if isinstance(child, InterpreterModuleDispatcher) else [child]


def is_dispatcher(child: Module) -> bool:
    """Whether a child of an unflattened module dispatches to several modules in turn."""
    return isinstance(child, InterpreterModuleDispatcher)


def is_unflattened(child: Module) -> bool:
    """Whether `unflatten` made this module, rather than the program held it (a branch of a condition, say)."""
    kinds = (InterpreterModule, InterpreterModuleDispatcher, UnflattenedModule)
    return isinstance(child, kinds) or type(child) is Module


def children_by_name(module: Module) -> dict[str, list[Module]]:
    """Returns the children grouped by their module: `inner` and `inner@1` are two calls of `inner`."""
    found: dict[str, list[Module]] = {}
    for name, child in module._modules.items():
        if child is not None and is_unflattened(child):
            found.setdefault(base_name(name), []).append(child)
    return found


def base_name(name: str) -> str:
    """Returns a name without the number of the call: `inner` for `inner@1`."""
    return re.sub(r"(.+)@\d+", r"\1", name)


def at(module: Module, path: str) -> Any:
    """Returns the value at an attribute path."""
    found: Any = module
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return found


class Converter:
    """Turns an unflattened program, and what it asserts of its flat inputs, into modules and graphs of our own."""

    def __init__(self, unflattened: UnflattenedModule, guards: Callable[..., None] | None = None) -> None:
        self.inputs = program_inputs(unflattened)
        self._groups: dict[int, Group] = {}
        self.root_group = Group([unflattened])
        self._groups[id(unflattened)] = self.root_group
        self._collect(unflattened)
        parameters = [known.parameter for known in self.inputs]
        inputs = ProgramInputs(unflattened, guards)
        self.root = exported_class(ExportedRoot, self.root_group.class_name, parameters)(inputs)
        self.root_group.module = self.root
        self._fill(self.root_group)
        for group in {id(group): group for group in self._groups.values()}.values():
            if isinstance(group.module, ExportedModule):
                self._add_graphs(group, group.module)

    def _collect(self, module: Module) -> None:
        """Finds the groups of all modules below `module`."""
        for children in children_by_name(module).values():
            variants = [variant for child in children for variant in variants_in(child)]
            known = {id(g): g for g in (self._groups.get(id(variant)) for variant in variants) if g is not None}
            group, *others = [*known.values()] or [Group([])]
            for other in others:  # they share a call, so they are one module
                group.add(other.variants)
                group.turns = group.turns or other.turns
            new = group.add(variants)
            for variant in group.variants:
                self._groups[id(variant)] = group
            for child in children:
                if is_dispatcher(child):
                    group.turns = [group.number(variant) for variant in variants_in(child)]
            for variant in new:
                self._collect(variant)

    # -- modules -------------------------------------------------------------------------------------------------------

    def _fill(self, group: Group) -> None:
        """Fills the module of a group with the attributes of its variants, and makes the modules below it."""
        module = group.module
        assert module is not None
        for variant in group.variants:
            for name, children in children_by_name(variant).items():
                if name not in module._modules:
                    module.add_module(name, self._module(self._groups[id(variants_in(children[0])[0])]))
            for name, child in variant._modules.items():
                if child is not None and not is_unflattened(child):
                    module.add_module(name, child)
            for name, parameter in variant._parameters.items():
                module.register_parameter(name, parameter)
            for name, buffer in variant._buffers.items():
                module.register_buffer(name, buffer, persistent=name not in variant._non_persistent_buffers_set)

    def _module(self, group: Group) -> Module:
        if group.module is None:
            if group.graphs():
                group.module = exported_class(ExportedModule, group.class_name, group.name_parameters())()
            else:
                group.module = _container(group.variants)
            self._fill(group)
        return group.module

    def _add_graphs(self, group: Group, module: ExportedModule) -> None:
        for number in range(len(group.graphs())):
            graph = self.graph(group, number)
            for node in graph.nodes:
                node.meta.clear()
            module.add_graph(graph)

    # -- graphs --------------------------------------------------------------------------------------------------------

    def graph(self, group: Group, number: int) -> fx.Graph:
        """Returns a new copy of a graph of a group, ready to run as its module."""
        variant = group.graphs()[number]
        source = graph_in(variant)
        assert source is not None
        if isinstance(variant, UnflattenedModule):
            signature = variant.module_call_graph[0].signature
            assert signature is not None
            graph = root_graph(source, self.inputs, signature.out_spec)
        else:
            graph = _with_parameters(source, group)
        held: dict[str, fx.Node] = {}
        for node in list(graph.nodes):
            if node.op == "get_attr":
                node.target = _attribute(group, variant, str(node.target))
                first = held.setdefault(node.target, node)
                if first is not node:  # one value, one node: else a patch would reach half of its users
                    node.replace_all_uses_with(first)
                    graph.erase_node(node)
            elif node.op == "call_module":
                self._retarget(node, variant)
        return graph

    def _retarget(self, node: fx.Node, caller: Module) -> None:
        target = str(node.target)
        callee = at(caller, target)
        if not is_unflattened(callee):
            return
        group = self._groups[id(variants_in(callee)[0])]
        number = None if is_dispatcher(callee) else group.number(callee)
        node.target = ".".join(map(base_name, target.split(".")))
        node.meta[CALLED] = (group, number)
        if group.is_by_name:
            graph = graph_in(group.graphs()[number or 0])
            assert graph is not None
            names = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
            given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
            node.args, node.kwargs = (), {group.names[name]: value for name, value in given.items()}
        else:
            node.kwargs = {group.names[name]: value for name, value in node.kwargs.items()}


def _with_parameters(source: fx.Graph, group: Group) -> fx.Graph:
    """Returns a copy of a graph with the parameters of the group's `forward`, and the output in a tuple."""
    graph = fx.Graph()
    old = {str(node.target): node for node in source.nodes if node.op == "placeholder"}
    made: dict[fx.Node, fx.Node] = {}
    for name, parameter in zip(group.names, group.parameters(), strict=True):
        default = () if name in old and parameter.default is not None else (None,)
        node = graph.create_node("placeholder", parameter.name, default, name=parameter.name)
        if name in old:
            node.meta = dict(old[name].meta)
            made[old[name]] = node
    graph.output((copied_into(graph, source, made),))
    return graph


def _container(variants: list[Module]) -> Module:
    """Returns an empty module for a module that is never called."""
    names = [base_name(name) for variant in variants for name in variant._modules]
    is_list = bool(names) and names == [str(position) for position in range(len(names))]
    has_tensors = any(variant._parameters or variant._buffers for variant in variants)
    return ModuleList() if is_list and not has_tensors else Module()


def _attribute(group: Group, variant: Module, target: str) -> str:
    """Returns the path in a group's module of the value that a variant has at `target`; stores it there if needed."""
    *path, name = target.split(".")
    plain = [base_name(part) for part in path]
    assert group.module is not None
    holder, value = at(group.module, ".".join(plain)), at(variant, target)
    if not hasattr(holder, name):
        holder.__dict__[name] = value
    elif getattr(holder, name) is not value and not isinstance(value, Tensor):
        # Each variant counts the structures that it needs for itself.
        known: Any = next((n for n, v in vars(holder).items() if v is value), None)
        name = known or unique_name(name, set(dir(holder)))
        holder.__dict__[name] = value
    return ".".join([*plain, name])


# -- the graph of the whole program ------------------------------------------------------------------------------------


def root_graph(source: fx.Graph, inputs: Sequence[ProgramInput], output_structure: Any) -> fx.Graph:
    """Returns a graph like `source` that takes `inputs`, and returns the output in a one-element tuple."""
    graph = fx.Graph()
    flat = [node for node in source.nodes if node.op == "placeholder"]
    given = [
        graph.create_node("placeholder", known.parameter.name, name=known.parameter.name)
        for known in inputs
    ]  # fmt: skip
    made: dict[fx.Node, fx.Node] = {}
    for known, node in zip(inputs, given, strict=True):
        parts = flat[known.start : known.start + known.size]
        if known.is_leaf:
            node.meta = dict(parts[0].meta)
            made[parts[0]] = node
            continue
        node.meta["val"] = structured([part.meta.get("val") for part in parts], known.structure)
        _take_apart(graph, node, known.structure, parts, made)
    results = copied_into(graph, source, made)
    graph.output((_put_together(graph, list(results), output_structure),))
    return graph


def _take_apart(
    graph: fx.Graph, node: fx.Node, structure: Any, parts: Sequence[fx.Node], made: dict[fx.Node, fx.Node]
) -> None:
    """Adds nodes for the flat values in the container of `node` that the program uses."""
    if not any(part.users for part in parts):
        return
    if not _is_plain(structure):
        leaves = graph.create_node("call_function", leaves_of, (node,), name=f"{node.name}_leaves")
        for position, part in enumerate(parts):
            _add_part(graph, leaves, position, part, made)
        return
    start = 0
    keys = structure.context if structure.type is dict else range(structure.num_children)
    for key, child in zip(keys, parts_of(structure), strict=True):
        inside = parts[start : start + child.num_leaves]
        start += child.num_leaves
        if child.is_leaf():
            _add_part(graph, node, key, inside[0], made)
        elif any(part.users for part in inside):
            name = f"{node.name}_{key}"
            inner = graph.create_node("call_function", operator.getitem, (node, key), name=name)
            _take_apart(graph, inner, child, inside, made)


def _add_part(graph: fx.Graph, node: fx.Node, key: Any, part: fx.Node, made: dict[fx.Node, fx.Node]) -> None:
    if part.users:
        made[part] = graph.create_node("call_function", operator.getitem, (node, key), name=part.name)
        made[part].meta = dict(part.meta)


def copied_into(graph: fx.Graph, source: fx.Graph, made: dict[fx.Node, fx.Node]) -> Any:
    """Copies all nodes of `source` except its placeholders to `graph`, and returns the output in terms of these.

    `made` has the nodes that replace the placeholders; the copies are added.
    """
    for node in source.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], lambda n: made[n])
        if node.op != "placeholder":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: made[n])
            copied = graph.create_node(node.op, node.target, args, kwargs, identifier(node.name), node.type)
            copied.meta = dict(node.meta)
            made[node] = copied
    raise AssertionError("a graph has an output")


def _put_together(graph: fx.Graph, leaves: list[Any], structure: Any) -> Any:
    """Returns the output as a graph holds it: plain containers unchanged, others as calls."""
    if structure.is_leaf():
        return leaves[0]
    if not _is_plain(structure):
        return graph.create_node("call_function", Structured(structure), tuple(leaves))
    children: list[Any] = []
    start = 0
    for part in parts_of(structure):
        children.append(_put_together(graph, leaves[start : start + part.num_leaves], part))
        start += part.num_leaves
    if structure.type is dict:
        return dict(zip(structure.context, children, strict=True))
    return structure.type(children)


def _is_plain(structure: Any) -> bool:
    """Whether graphs can hold such a container directly: a tuple, a list, a dict with strings as keys."""
    if structure.type is dict:
        return all(type(key) is str for key in structure.context)
    return structure.type in (tuple, list)
