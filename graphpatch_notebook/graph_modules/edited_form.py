"""What an edited graph would leave out of a call: it has the example's flags and absent inputs in it."""

from __future__ import annotations

import functools
from typing import Any

from torch import fx

from graphpatch_notebook.capture.custom_graphs import RECORD
from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import Frame, InputPlace, Node
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, ValueSpec, children, key_text, take

_FLAGS = (bool, str, bytes)
_REPAIR = "make the PatchableGraph with such inputs, and edit the graph that it makes of them"


class EditedForm:
    """The calls that an edited graph holds for.

    Args:
        frame: The frame that the graph was a record of.
        graph: The graph.
    """

    def __init__(self, frame: Frame, graph: fx.Graph) -> None:
        self._frame = frame
        # What no node uses has no effect, whatever the caller gives.
        self._unused: list[Node] = []
        self._containers: list[Node] = []
        for node in graph.nodes:
            record = node.meta.get(RECORD)
            if node.op != "placeholder" or not isinstance(record, Node):
                continue
            if isinstance(record.spec, ContainerSpec):
                self._containers.append(record)
            elif not node.users and isinstance(record.spec, ScalarSpec):
                self._unused.append(record)

    def input_problem(self, node: Node) -> str | None:
        """Returns why a patch on this input would not do in the graph what it does in the module, if so."""
        if node in self._unused:
            return f"was {node.spec} in the example, and is so in the edited graph, whatever it is given"
        same = {name for pair in self._frame.same_inputs for name, _ in pair}
        if node.target in same:
            return "was one tensor with another input of the example, from which the edited graph cannot tell it"
        return None

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes sure that the graph leaves nothing out that this call gives.

        Raises:
            GraphError: It would leave out a tensor, a number or an object, or it was captured in another mode.
        """
        frame = self._frame
        if frame.module.training != frame.training:
            was, now = ("train", "eval") if frame.training else ("eval", "train")
            raise GraphError(
                f"the edited graph of {self._who()} was captured in {was} mode, and the module is in {now} mode now; "
                f"call pg.{was}(), or make the PatchableGraph in {now} mode"
            )
        for one, other in frame.same_inputs:
            if self._given(one, args, kwargs) is not self._given(other, args, kwargs):
                raise GraphError(
                    f"the edited graph of {self._who()} is of a call in which {_place(one)} and {_place(other)} were "
                    f"one tensor, and takes them for the same; {_REPAIR}"
                )
        for node in self._unused:
            value = given_input(frame.parameters, node.target, args, kwargs)
            if value is not None or node.spec != ScalarSpec(None):
                self._compare(node.name, node.spec, value)
        for node in self._containers:
            self._compare_keys(node, given_input(frame.parameters, node.target, args, kwargs))

    def _given(self, place: InputPlace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, dig = place
        value = given_input(self._frame.parameters, name, args, kwargs)
        try:
            return functools.reduce(take, dig, value)
        except (LookupError, AttributeError, TypeError):  # nothing is there
            return None

    def _compare(self, name: str, spec: ValueSpec | None, value: Any) -> None:
        was = spec.value if isinstance(spec, ScalarSpec) else None
        if value is was or (type(value) is type(was) and value == was):
            return
        if value is not None and not isinstance(value, _FLAGS):
            had = "did not have" if was is None else f"had as {was!r}"
            raise GraphError(
                f"the edited graph of {self._who()} leaves out the input {name!r}, which the example {had}; {_REPAIR}"
            )

    def _compare_keys(self, node: Node, value: Any) -> None:
        """Compares what a container holds that the example's did not: the graph takes out what the example had."""
        assert isinstance(node.spec, ContainerSpec)
        known = {text for text, _, _ in node.spec.children}
        for key, item in children(value) or ():
            text = f"sub_{key}" if type(key) is int else str(key)
            if text not in known and item is not None:
                self._compare(f"{node.name}|{text}", None, item)

    def _who(self) -> str:
        return f"{format_path(self._frame.path) or '<root>'!r} ({type(self._frame.module).__name__})"


def _place(place: InputPlace) -> str:
    name, dig = place
    return repr(format_path((name,), tuple(map(key_text, dig))))
