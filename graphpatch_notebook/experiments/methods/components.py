"""The components of a model whose outputs are held fixed in path patching, found where that can be told.

They are the submodules that the layers of a stack call, that have matrices and that return what could be added to the
residual stream: attention and MLP, not norms. What they give must be new: a submodule that adds its own input to its
result hands on what came before it, and holding it would cut edges that do not lead through it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import Module

from graphpatch_notebook.capture.records import CallNode, Frame, Node, refs_in
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import TensorSpec, leaves

_HOW_TO_GIVE = (
    "give the values to hold, those that carry all edges but the direct ones: components=['h_0.attn.output', ...]"
)


def default_components(pg: PatchableGraph) -> list[str]:
    """Returns the paths of the outputs of attentions, MLPs and the like, in order of execution.

    Raises:
        ExperimentError: They cannot be told: the model has no stack of layers, or one that is built in another way.
    """
    found = []
    for layer in _layers(pg.nodes.root):
        found += _components(layer)
    if not found:
        raise ExperimentError(f"the model has no stack of layers whose parts could be told; {_HOW_TO_GIVE}")
    return found


def _layers(frame: Frame) -> Iterator[Frame]:
    """Yields the calls of the members of module lists, where there are several of them; outermost lists only."""
    members: dict[str, list[Frame]] = {}
    for call in frame.calls():
        above, _, last = str(call.target).rpartition(".")
        if last.isdigit():
            members.setdefault(above, []).append(call.frame)
    stacked = {id(layer) for layers in members.values() if len(layers) > 1 for layer in layers}
    for call in frame.calls():
        if id(call.frame) in stacked:
            yield call.frame
        else:
            yield from _layers(call.frame)


def _components(layer: Frame) -> list[str]:
    where = format_path(layer.path)
    own = [node.name for node in layer.nodes if node.kind == "parameter" and _is_matrix(node)]
    if own or layer.opaque_reason is not None:
        raise ExperimentError(f"the parts of layer {where!r} cannot be told: it computes by itself; {_HOW_TO_GIVE}")
    _, stream = _output_of(layer)
    found = []
    for call in layer.calls():
        if not _has_matrices(call.frame.module):
            continue
        path, shape = _output_of(call.frame)
        if (shape[-1:], shape.numel()) != (stream[-1:], stream.numel()):
            continue  # the first half of an MLP, which is not added to the stream
        if _hands_on(call.frame, shape):
            raise ExperimentError(
                f"{path!r} holds more than what its module adds: its input is handed on in it; {_HOW_TO_GIVE}"
            )
        found.append(path)
    if not found and _has_matrices(layer.module):
        raise ExperimentError(f"no submodule of layer {where!r} adds to what the layer returns; {_HOW_TO_GIVE}")
    return found


def _output_of(frame: Frame) -> tuple[str, torch.Size]:
    for dig, spec in leaves(frame.output_node.spec):
        if isinstance(spec, TensorSpec):
            return format_path((*frame.path, frame.output_node.name), dig), spec.shape
    raise ExperimentError(f"{format_path(frame.path)!r} returns no tensor that could be held; {_HOW_TO_GIVE}")


def _has_matrices(module: Module) -> bool:
    return any(parameter.ndim > 1 for parameter in module.parameters())


def _is_matrix(node: Node) -> bool:
    return isinstance(node.spec, TensorSpec) and len(node.spec.shape) > 1


def _hands_on(frame: Frame, shape: torch.Size) -> bool:
    """Whether something in the output of shape `shape` comes from an input of that shape past all matrices."""
    inputs = {id(node) for node in frame.inputs() if isinstance(node.spec, TensorSpec) and node.spec.shape == shape}
    return _output_has(frame, inputs, shape)


def _output_has(frame: Frame, handed: set[int], shape: torch.Size) -> bool:
    """Whether an output of shape `shape` is made of some of the nodes `handed` (by id) past all matrices."""
    if frame.opaque_reason is not None:
        return bool(handed) and not _has_matrices(frame.module)
    handed, matrices = set(handed), set[int]()
    for node in frame.nodes:
        if not any(isinstance(spec, TensorSpec) for _, spec in leaves(node.spec)):
            continue  # sizes are handed on everywhere
        sources = [ref.node for ref in refs_in((node.args, node.kwargs))]
        if node.whole is not node:
            sources.append(node.whole)
        if node.kind == "parameter" and _is_matrix(node):
            matrices.add(id(node))
        elif isinstance(node, CallNode):
            if _call_has(node.frame, [source for source in sources if id(source) in handed]):
                handed.add(id(node))
        elif any(id(source) in matrices for source in sources):
            if all(id(source) in matrices for source in sources):  # a transposed weight
                matrices.add(id(node))
        elif any(id(source) in handed for source in sources):
            handed.add(id(node))
            if node.is_in_place:
                handed.update(id(source) for source in sources)
    returned = [ref.node for ref in refs_in(frame.output)]
    return any(id(node) in handed and _may_be_of(node, shape) for node in returned)


def _call_has(frame: Frame, given: list[Node]) -> bool:
    """Whether what a call returns is made of its arguments `given` past all matrices."""
    shapes = [node.spec.shape for node in given if isinstance(node.spec, TensorSpec)]
    inputs = {id(node) for node in frame.inputs() if isinstance(node.spec, TensorSpec) and node.spec.shape in shapes}
    return any(
        isinstance(spec, TensorSpec) and _output_has(frame, inputs, spec.shape)
        for _, spec in leaves(frame.output_node.spec)
    )


def _may_be_of(node: Node, shape: torch.Size) -> bool:
    return not isinstance(node.spec, TensorSpec) or node.spec.shape == shape
