"""Modules that somebody put in the place of those that the graphs of a model call.

Such graphs find what they call by its name. What is there now runs, whoever put it there: its frame is opaque.
"""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from graphpatch_notebook.capture.inputs import input_parameters, signature_of
from graphpatch_notebook.capture.naming import name_nodes
from graphpatch_notebook.capture.records import Frame, Node, Ref
from graphpatch_notebook.capture.tensor_sources import held_tensors
from graphpatch_notebook.values import ScalarSpec, ValueSpec, describe

REASON = "it was put in the place of the module that the graph was made with"


def note_replaced_modules(root: Frame, originals: dict[Node, Frame]) -> bool:
    """Looks at what the custom graphs from `root` down call now, and brings the frames of these calls up to date.

    Args:
        root: The root frame.
        originals: The frames of calls whose module was replaced: they come back with their modules. Written to.

    Returns:
        Whether there was anything to be done.
    """
    has_changed = False
    for frame in list(root.walk()):
        for call in frame.calls() if frame.custom_graph is not None else ():
            module = _called(frame.module, str(call.target))
            if call.frame is None or module is None or module is call.frame.module:
                continue
            original = originals.setdefault(call, call.frame)
            call.frame = original if module is original.module else _frame(module, call, frame)
            call.op = type(module).__name__
            has_changed = True
    return has_changed


def _called(module: Module, path: str) -> Module | None:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, Module) else None


def _frame(module: Module, call: Node, parent: Frame) -> Frame:
    """Returns an opaque frame of a call of `module`: what goes in and out, and what the module holds."""
    assert call.frame is not None
    output = call.frame.output_node
    frame = Frame(module, call.frame.attribute_path, parent, call, training=module.training, opaque_reason=REASON)
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
