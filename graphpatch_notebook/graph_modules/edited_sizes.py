"""Whether an edited graph may run on other sizes than the example's: some models have sizes in them as plain numbers.

`range(n)`, tables that are cut to a length, chunks: a record holds these as they were. So the graph as it was before it
was edited is compared with the module, once for all inputs of these sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import Any

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import EditedGraphWarning, GraphError
from graphpatch_notebook.graph_modules import belief
from graphpatch_notebook.graph_modules.belief import Refusal, RunnableGraph
from graphpatch_notebook.graph_modules.live_runs import run_live
from graphpatch_notebook.graph_modules.snapshots import ModuleState, copied
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import ContainerSpec, TensorSpec, ValueSpec, describe


class SizeCheck:
    """The sizes that an edited graph holds for.

    Args:
        frame: The frame of the edited graph.
        recorded: The graph as it was; `None` if it is not known any more.
    """

    def __init__(self, frame: Frame, recorded: RunnableGraph | None) -> None:
        self._frame = frame
        self._recorded = recorded
        example = tuple(_sizes(node.spec) for node in frame.inputs())
        self._problems: dict[Hashable, Refusal | None] = {example: None}
        self._warned = False

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Makes sure that the graph holds for inputs of these sizes and dtypes.

        Raises:
            GraphError: It does not: before it was edited, it gave other results than the module.

        Warns:
            EditedGraphWarning: The two cannot be compared on these inputs.
        """
        frame = self._frame
        given = (given_input(frame.parameters, node.target, args, kwargs) for node in frame.inputs())
        key = tuple(_sizes(describe(value)) for value in given)
        if key not in self._problems:
            self._problems[key] = self._problem(key, args, kwargs)
        problem = self._problems[key]
        if problem is None:
            return
        who = f"{format_path(frame.path) or '<root>'!r} ({type(frame.module).__name__})"
        if problem.is_difference:
            raise GraphError(
                f"the edited graph of {who} does not hold for inputs of these sizes: before it was edited, it differed "
                f"from the module on them ({problem.text}), since sizes of the example are in it as plain numbers; "
                "make the PatchableGraph with inputs of these sizes"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the edited graph of {who} cannot be compared with the module on inputs of other sizes than the "
                f"example's: {problem.text}; sizes that it holds as plain numbers would stay those of the example",
                EditedGraphWarning,
                stacklevel=2,
            )

    def _problem(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
        recorded = self._recorded
        if recorded is None:
            return Refusal("what it was before it was edited is not known in a copy")
        try:
            state = ModuleState(self._frame.module)
            args, kwargs = copied((args, kwargs))
        except Exception as error:  # of the user's own objects
            return Refusal(f"its inputs cannot be copied ({type(error).__name__}: {error})")
        try:
            with belief.unreported():
                belief.examine(recorded, key, args, kwargs, lambda: run_live(recorded, args, kwargs), is_alone=True)
        finally:
            state.restore()
        return recorded.belief.verdicts[key]


def _sizes(spec: ValueSpec) -> Hashable:
    if isinstance(spec, TensorSpec):
        return spec.shape, spec.dtype
    if isinstance(spec, ContainerSpec):
        return tuple((text, _sizes(child)) for text, _, child in spec.children)
    return None
