"""Plain fx modules of a patched model, compared with the patched model before they are returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx

from graphpatch_notebook.capture.inputs import ExampleInputs, inputs_of_call
from graphpatch_notebook.checks.comparison import compared
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.execution.plan import Entry
from graphpatch_notebook.graphs import GraphModule
from graphpatch_notebook.graphs.plain_fx import PatchedPart, listed_doubts, plain_fx_module
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.patches.kinds import Patch


def verified_fx_module(
    root: GraphModule,
    entries: Sequence[Entry],
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    examples: ExampleInputs | None,
    allow_doubts: bool,
    any_size: bool,
) -> fx.GraphModule:
    """Returns the model as plain fx modules with the patches of `entries`, if they return what `run` does.

    Args:
        root: The graph module of the whole model.
        entries: The patches.
        run: Runs the model with these patches.
        args: Positional inputs to compare with.
        kwargs: Inputs by keyword.
        examples: The example inputs, if they are known.
        allow_doubts: Whether to accept graphs that may not hold for other inputs.
        any_size: Whether the result takes inputs of other sizes.

    Raises:
        GraphError: A part of the model does not have a graph, there are doubts, or the results differ.
        Exception: Any error that the model raises on these inputs.
    """
    patched: dict[Any, list[Any]] = {}
    for entry in entries:
        if entry.is_source:
            continue
        if entry.restriction is not None:
            raise GraphError(
                f"{entry.target.text!r}: a graph does not count steps, so steps= and positions= cannot be kept; use "
                "slice= instead"
            )
        if (
            control := next((p for p in entry.patches if p.stops_run or p.replaces_call or p.sources), None)
        ) is not None:
            raise GraphError(
                f"{entry.target.text!r}: {type(control).__name__} changes the run, and a graph does not keep that"
            )
        target = entry.target
        part = PatchedPart(target.index, entry.patches, f"{target.text!r} ({target.node.op})")
        patched.setdefault(target.node, []).append((target.dig, part))
    given = {} if examples is None else inputs_of_call(root.frame, examples.args, examples.kwargs)
    result, check = plain_fx_module(root, patched, given, any_size=any_size)
    doubts = listed_doubts(root)
    if doubts and not allow_doubts:
        raise GraphError(
            f"the graphs are a record of one run, and the model may go another way with other inputs: {doubts}; if it "
            "goes this way with all inputs that you have in mind, say allow_doubts=True"
        )
    with _unchanged(patch for entry in entries for patch in entry.patches), check.noting_layouts():
        comparison = compared(root.frame.module, run, result, args, kwargs)
    if not comparison.is_equal:
        because = f"; it is known that the model {doubts}" if doubts else ""
        raise GraphError(f"the graphs do not do what the model does on these inputs: {comparison}{because}")
    return result


@contextmanager
def _unchanged(patches: Iterable[Patch[Any]]) -> Iterator[None]:
    """Restores the values that patches keep to those from before the block."""
    saved = [(patch, {name: _contents(value) for name, value in vars(patch).items()}) for patch in patches]

    def put_back() -> None:
        for patch, attributes in saved:
            for name in vars(patch).keys() - attributes.keys():
                delattr(patch, name)
            for name, (value, contents) in attributes.items():
                if isinstance(value, list):
                    value[:] = contents
                elif isinstance(value, dict):
                    value.clear()
                    value.update(contents)
                patch.__dict__[name] = value

    with afterwards(put_back):
        yield


def _contents(value: Any) -> tuple[Any, Any]:
    return value, value.copy() if isinstance(value, (list, dict)) else None
