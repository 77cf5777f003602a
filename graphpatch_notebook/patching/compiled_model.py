"""A patched model as plain fx modules, and compiled by `torch.compile` with the values of its patches as inputs.

pg.to_fx(args, kwargs)        ->  fx modules, compared with the patched model before they are returned
pg.compile(patches, *inputs)  ->  CompiledModel: one graph, for calls like the one with `inputs`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Module

from graphpatch_notebook.capture.inputs import ExampleInputs, inputs_of_call
from graphpatch_notebook.errors import GraphError, PatchMapError, PatchValueError
from graphpatch_notebook.graphs import GraphModule
from graphpatch_notebook.graphs.plain_fx import InputCheck, PatchedPart, listed_doubts, plain_fx_module
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patches.kinds import Patch, ReplacePatch, declares
from graphpatch_notebook.patching.model_state import compared
from graphpatch_notebook.patching.plan import Entry, problems_of
from graphpatch_notebook.values import TensorSpec


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
    """Returns the model as plain fx modules with the patches of `entries`, compared with `run`: see `to_fx`."""
    patched: dict[Any, list[Any]] = {}
    for entry in entries:
        if entry.is_source:
            continue
        if entry.restriction is not None:
            raise GraphError(
                f"{entry.target.text!r}: a graph does not count steps, so steps= and positions= cannot be kept; use "
                "slice= instead"
            )
        control = next((p for p in entry.patches if p.stops_run or p.replaces_call or p.sources), None)
        if control is not None:
            raise GraphError(
                f"{entry.target.text!r}: {type(control).__name__} changes the run, and a graph does not keep that"
            )
        target = entry.target
        part = PatchedPart(target.index, entry.patches, target.layout)
        patched.setdefault(target.node, []).append((target.dig, part))
    given = {} if examples is None else inputs_of_call(root.frame, examples.args, examples.kwargs)
    result = plain_fx_module(root, patched, given, any_size=any_size)
    doubts = listed_doubts(root)
    if doubts and not allow_doubts:
        raise GraphError(
            f"the graphs are a record of one run, and the model may go another way with other inputs: {doubts}; if it "
            "goes this way with all inputs that you have in mind, say allow_doubts=True"
        )
    with _unchanged(patch for entry in entries for patch in entry.patches):
        comparison = compared(root.frame.module, run, result, args, kwargs)
    if not comparison.is_equal:
        because = f"; it is known that the model {doubts}" if doubts else ""
        raise GraphError(f"the graphs do not do what the model does on these inputs: {comparison.reason}{because}")
    return result


@contextmanager
def _unchanged(patches: Iterable[Patch[Any]]) -> Iterator[None]:
    """Restores the values that patches keep to those from before the block."""
    saved = [(patch, {k: list(v) if isinstance(v, list) else v for k, v in vars(patch).items()}) for patch in patches]
    try:
        yield
    finally:
        for patch, fields in saved:
            vars(patch).clear()
            vars(patch).update(fields)


# -- compiled ----------------------------------------------------------------------------------------------------------


class CompiledModel:
    """What `PatchableGraph.compile` returns: call it like the model.

    It is a snapshot of the model's code, over the model's own weights: writes into weights have their effect, other
    changes of the model (its attributes, hooks, replaced parameters) have none.

    Each call reads the values of the patches that it was compiled with. Another value of the same shape and dtype does
    not compile again; a number counts as a tensor without dimensions.

    Attributes:
        graph: The graphs that were compiled, with the patches in them.

    Example:
        >>> from graphpatch_notebook import PatchableGraph, ReplacePatch
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2))
        >>> patch = ReplacePatch(value=2.0, slice=0)
        >>> compiled = pg.compile({"output": patch}, torch.ones(2), backend="eager")
        >>> patch.value = 3.0
        >>> compiled(torch.ones(2))
        tensor([3., 1.])
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        patches: CompiledPatches,
        model: Module,
        backend: Any,
        mode: str | None,
    ) -> None:
        self.graph = graph
        self._patches = patches
        self._model, self._was_training = model, model.training
        check = graph.get_submodule("check_inputs")
        assert isinstance(check, InputCheck)
        check.maker = "pg.compile"
        self._compiled: Callable[..., Any] = torch.compile(graph, fullgraph=True, backend=backend, mode=mode)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled model with the current values of the patches.

        Raises:
            GraphError: The inputs, or the mode (train or eval), differ from those that it was compiled for; torch
                cannot compile the model; or fields of patches other than values had too many values.
            PatchMapError: A patch is not valid any more.
            PatchValueError: The value of a patch does not fit, or is neither a tensor nor a number.
        """
        if self._model.training is not self._was_training:
            mode = "train" if self._was_training else "eval"
            raise GraphError(f"the model was compiled in {mode} mode: call pg.{mode}(), or pg.compile again")
        self._patches.read()
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:
            # The compiler hides why the graph refused inputs or values behind its own error: without it, the
            # graph raises that error itself.
            self.graph(*args, **kwargs)
            if not type(error).__module__.startswith("torch._dynamo"):
                raise
            raise GraphError(
                f"torch.compile cannot make one graph of this model, as of many mixtures of experts "
                f"({str(error).splitlines()[0]}); run the patches without pg.compile"
            ) from error


class CompiledPatches:
    """The patches in a compiled graph: copies of the user's, whose values are always tensors, in a `patch_map`.

    Compilers write numbers into the code, so they would compile again for each other number.
    """

    def __init__(self, patch_map: Mapping[Any, Any], entries: Sequence[Entry]) -> None:
        # By the id of each patch: the patch, its copy, the values that it is for, and its fields when they were read.
        self._known: dict[int, tuple[Patch[Any], Patch[Any], list[Target], list[Any]]] = {}
        for entry in entries:
            for patch in entry.patches:
                new: Patch[Any] = object.__new__(type(patch))
                self._known.setdefault(id(patch), (patch, new, [], []))[2].append(entry.target)
        self.patch_map = {
            path: [self._known.get(id(one), (one, one))[1] for one in ([given] if isinstance(given, Patch) else given)]
            for path, given in patch_map.items()
        }
        self.read()

    def read(self) -> None:
        """Reads the fields of the user's patches."""
        for given, new, targets, before in self._known.values():
            fields = vars(given)
            if list(map(id, before)) == list(map(id, fields.values())):
                continue
            if problems := [problem for target in targets for problem in problems_of(target, [given])]:
                raise PatchMapError("; ".join(problems))
            before[:] = fields.values()
            value = fields.get("value")
            if value is not None and not isinstance(value, Tensor):
                fields = {**fields, "value": _as_tensor(value, given, targets)}
            vars(new).update(fields)


def _as_tensor(value: Any, given: Patch[Any], targets: Sequence[Target]) -> Tensor:
    specs: list[Any] = [target.spec for target in targets]
    device, dtypes = specs[0].device, {spec.dtype for spec in specs}
    dtype = None
    if type(given) is ReplacePatch and len(dtypes) == 1:
        (dtype,) = dtypes  # writing at a list of indices takes no other
    elif not isinstance(value, complex) and all(each.is_floating_point for each in dtypes):
        # A tensor without dimensions does not change the dtype of others, so it can be as exact as the number.
        dtype = torch.float32 if device.type == "mps" else torch.float64
    try:
        return torch.tensor(value, dtype=dtype, device=device)
    except (RuntimeError, ValueError, OverflowError, TypeError) as error:
        raise PatchValueError(
            f"{type(given).__name__} on {targets[0].text!r}: the patch's value is {value!r}, and the "
            f"value here has the dtype {dtype}: {error}"
        ) from None


def check_compilable(entries: Sequence[Entry]) -> None:
    """Raises a `GraphError` that names all patches that cannot be parts of a compiled graph."""
    problems = [f"{entry.target.text!r}: {problem}" for entry in entries if (problem := _problem_of(entry)) is not None]
    if problems:
        raise GraphError("; ".join(problems))


def _problem_of(entry: Entry) -> str | None:
    if not isinstance(entry.target.spec, TensorSpec):
        return f"the value is {entry.target.spec}, which compiled code holds as a constant; patch a tensor instead"
    for patch in entry.patches:
        if not declares(patch, "is_pure"):
            return (
                f"a {type(patch).__name__} may run other Python code in each call, or keep what it sees, and compiled "
                "code does not run Python; use ZeroPatch, AddPatch or ReplacePatch, or a class of your own that sets "
                "is_pure = True (torch.compile(pg.to_fx(...)) compiles what it can of other patches)"
            )
    return None
