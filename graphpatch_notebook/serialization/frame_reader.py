"""Makes the records of a loaded graph: a tree of frames, each with the graph that is its module from then on."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Module

from graphpatch_notebook.capture.records import CallNode, Conditions, Frame, SourceLine
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.serialization.codecs.names import Allowed
from graphpatch_notebook.serialization.codecs.reading import Item
from graphpatch_notebook.serialization.frames import check_nodes, check_repeats, decoded_nodes, decoded_parameters
from graphpatch_notebook.serialization.graphs import decoded_graph
from graphpatch_notebook.serialization.modules import LoadedModule, StoredForward

_DEEPEST = 100
_FIELDS = ("module", "attribute_path", "training", "unstored", "parameters", "nodes")


class FrameReader:
    """Reads the frames of a file.

    Args:
        item: The frames: callers before those that they call.
        modules: The modules, by number.
        lines: The lines of code that records refer to.
        allowed: What graphs may call.

    Attributes:
        frames: The frames; the first is the root.
    """

    def __init__(self, item: Item, modules: Sequence[Module], lines: Sequence[SourceLine], allowed: Allowed) -> None:
        self._modules = modules
        self._lines = lines
        items = item.items()
        entries = [entry.fields(*_FIELDS, optional=("graph", "own_graph")) for entry in items]
        if not entries:
            raise item.error("there is no frame")
        self._callers: dict[int, tuple[Frame, CallNode, int]] = {}
        self.frames = [self._frame(fields) for fields in entries]
        for number, fields in enumerate(entries):
            if (number == 0) == (number in self._callers):
                raise items[number].error("each frame but the first is called by one before it")
            self._add(number, fields, items[number])
        if len(self._callers) != len(entries) - 1:
            raise item.error("a call refers to a frame that is not there")
        for frame, fields, entry in zip(self.frames, entries, items, strict=True):
            check_nodes(frame, entry)
            check_repeats(frame, entry)
            if frame.opaque_reason is None:
                if "graph" not in fields:
                    raise entry.error("there should be a graph, or why there is none")
                frame.custom_graph = decoded_graph(fields["graph"].items(), frame, allowed)
                # Of loaded graphs all are custom ones: these are no records of the model's code besides.
                frame.is_edited = "own_graph" in fields and fields["own_graph"].flag()
            if isinstance(frame.module, LoadedModule):
                _set_forward(frame.module, frame)

    def _add(self, number: int, fields: dict[str, Item], item: Item) -> None:
        frame, depth = self.frames[number], 0
        if number:
            frame.parent, frame.call, depth = self._callers[number]
            frame.capture = frame.parent.capture
        if depth > _DEEPEST:
            raise item.error("calls are nested too deeply")
        frame.parameters = decoded_parameters(fields["parameters"])
        if not fields["unstored"].is_null:
            frame.opaque_reason = fields["unstored"].text()
        for called, node in decoded_nodes(fields["nodes"], frame, self._lines, self.frames).items():
            if called <= number or called in self._callers:
                raise item.error(f"it cannot call the frame {called}, which comes before it or is called already")
            self._callers[called] = frame, node, depth + 1

    def _frame(self, fields: dict[str, Item]) -> Frame:
        module = self._modules[fields["module"].whole(0, len(self._modules) - 1)]
        return Frame(module, fields["attribute_path"].text(), conditions=Conditions(fields["training"].flag()))


def _set_forward(module: LoadedModule, frame: Frame) -> None:
    """Gives the module the signature of its `forward`, which says why it cannot run."""
    reason = "its graph runs in a call of the PatchableGraph only"
    if frame.opaque_reason is not None:
        reason = (
            f"the file has no graph of {format_path(frame.path) or '<root>'!r}: {frame.opaque_reason}; give the "
            "model whose graph it is: PatchableGraph.load(file, model=model)"
        )
    module.__dict__["forward"] = StoredForward(type(module).__name__, frame.parameters, reason)
