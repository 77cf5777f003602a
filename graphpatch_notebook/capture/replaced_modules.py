"""Modules that somebody put in the place of those that the graphs of a model call.

Such graphs find what they call by its name. What is there now runs, whoever put it there: its frame is opaque.
"""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from graphpatch_notebook.capture.inputs import input_parameters, signature_of
from graphpatch_notebook.capture.naming import name_nodes
from graphpatch_notebook.capture.records import CallNode, Conditions, Frame, Node, Ref
from graphpatch_notebook.capture.tensor_sources import held_tensors
from graphpatch_notebook.values import ScalarSpec, ValueSpec, describe

REASON = "it was put in the place of the module that the graph was made with"


class CalledModules:
    """The modules that the custom graphs from a root frame down call, as long as nobody puts others there."""

    def __init__(self, root: Frame) -> None:
        self._root = root
        self._originals: dict[CallNode, Frame] = {}
        self._calls = self._found()

    def _found(self) -> list[tuple[Frame, CallNode, list[str]]]:
        frames = [frame for frame in self._root.walk() if frame.custom_graph is not None]
        return [(frame, call, str(call.target).split(".")) for frame in frames for call in frame.calls()]

    def notice_others(self) -> bool:
        """Brings the frames of calls whose module was replaced up to date; says whether there were any.

        The frames of modules that are back where they were come back with them.
        """
        replaced = False
        for frame, call, names in self._calls:
            module = _called(frame.module, names)
            if module is None or module is call.frame.module:
                continue
            original = self._originals.setdefault(call, call.frame)
            call.frame = original if module is original.module else _frame(module, call, frame)
            call.op = type(module).__name__
            replaced = True
        if replaced:
            self._calls = self._found()
            self.notice_others()  # a frame that came back may hold others that were replaced meanwhile
        return replaced


def _called(module: Module, names: list[str]) -> Module | None:
    found: Module | None = module
    for name in names:
        found = found._modules.get(name) if found is not None else None
    return found


def _frame(module: Module, call: CallNode, parent: Frame) -> Frame:
    """Returns an opaque frame of a call of `module`: what goes in and out, and what the module holds."""
    output = call.frame.output_node
    frame = Frame(module, call.frame.attribute_path, parent, call, opaque_reason=REASON)
    frame.conditions, frame.capture = Conditions(module.training), parent.capture
    frame.parameters = input_parameters(signature_of(module.forward))
    for position, parameter in enumerate(frame.parameters):
        given = call.args[position] if position < len(call.args) else call.kwargs.get(parameter.name)
        node = Node(kind="input", op=parameter.name, target=parameter.name, spec=_spec(given))
        node.base_name = parameter.name
        frame.nodes.append(node)
    for source, tensor in held_tensors(module):
        path = source.attribute_path
        frame.nodes.append(Node(kind=source.kind, op=path, target=path, spec=describe(tensor), base_name=path))
    frame.nodes.append(Node(kind="output", op="output", target="output", spec=output.spec, base_name="output"))
    name_nodes(frame)
    return frame


def _spec(given: Any) -> ValueSpec:
    if isinstance(given, Ref) and not given.dig:
        return given.node.spec
    return ScalarSpec(None) if isinstance(given, Ref) else describe(given)
