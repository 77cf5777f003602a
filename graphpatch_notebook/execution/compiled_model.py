"""A patched model as plain fx modules, and compiled by `torch.compile` with the values of its patches as inputs.

pg.to_fx(args, kwargs)        ->  fx modules, compared with the patched model before they are returned
pg.compile(patches, *inputs)  ->  CompiledModel: one graph, for calls like the one with `inputs`
                                  └── generate: CompiledSteps, with a CompiledModel for each form of its steps
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Module

from graphpatch_notebook.capture.inputs import ExampleInputs, inputs_of_call
from graphpatch_notebook.checks.comparison import compared
from graphpatch_notebook.errors import GraphError, PatchMapError, PatchValueError
from graphpatch_notebook.execution.captured_model import CapturedModel
from graphpatch_notebook.execution.patch_map import problems_of
from graphpatch_notebook.execution.plan import Entry
from graphpatch_notebook.graphs import GraphModule
from graphpatch_notebook.graphs.plain_fx import InputCheck, PatchedPart, listed_doubts, plain_fx_module
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.patches.kinds import Patch, ReplacePatch, declares
from graphpatch_notebook.values import TensorSpec, is_same_plain


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
        part = PatchedPart(target.index, entry.patches, f"{target.text!r} ({target.node.op})")
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
        steps: CompiledSteps,
        backend: Any,
        mode: str | None,
    ) -> None:
        self.graph = graph
        self._steps = steps
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
        __tracebackhide__ = True
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
            if type(error).__name__ in _TOO_MANY:
                raise GraphError(
                    "torch.compile keeps only so many graphs (torch._dynamo.config.recompile_limit), and there is one "
                    "for each slice of a patch, and each shape and dtype of its value: call pg.compile again for others"
                ) from error
            raise GraphError(
                f"torch.compile cannot make one graph of this model, as of many mixtures of experts "
                f"({str(error).splitlines()[0]}); run the patches without pg.compile"
            ) from error

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates text as the model's own `generate` does, with the patches, at compiled speed.

        Needs a static cache: `cache_implementation="static"`, or one of transformers as `cache` (of older ones, as
        `past_key_values`). The first step, over the prompt, runs the model with the patches as it is, since each length
        of a prompt would be compiled anew. The later ones are one compiled graph: other prompts, other values of
        patches and other caches do not compile again, another batch size or length of the cache does.

        Args:
            args: As for the model's own `generate`.
            kwargs: Likewise.

        Raises:
            GraphError: The cache is not static, or the steps cannot be compiled with these patches.

        Example:
            >>> from transformers import GPT2Config, GPT2LMHeadModel
            >>> from graphpatch_notebook import PatchableGraph, ZeroPatch
            >>> config = GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, bos_token_id=0, eos_token_id=None)
            >>> model, ids = GPT2LMHeadModel(config).eval(), torch.ones(1, 3, dtype=torch.long)
            >>> pg = PatchableGraph(model, ids, use_cache=False)
            >>> patches = {"output|logits": ZeroPatch()}
            >>> compiled = pg.compile(patches, ids, use_cache=False, allow_doubts=True, backend="eager")
            >>> compiled.generate(ids, max_new_tokens=3, do_sample=False, cache_implementation="static")
            tensor([[1, 1, 1, 0, 0, 0]])
        """
        return self._steps.generate(*args, **kwargs)

    def accepts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call has inputs like those that the graph is for."""
        check = self.graph.get_submodule("check_inputs")
        assert isinstance(check, InputCheck)
        return check.accepts(args, kwargs)


_TOO_MANY = ("FailOnRecompileLimitHit", "FailOnCacheLimitHit")
"""Errors of torch 2.6 and later, and before it."""


def _are_same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))


class CompiledPatches:
    """The patches in a compiled graph: copies of the user's, whose values are always tensors, in a `patch_map`.

    Compilers write numbers into the code, so they would compile again for each other number.
    """

    def __init__(self, patch_map: Mapping[Any, Any], entries: Sequence[Entry]) -> None:
        self._copies: dict[int, _CopiedPatch] = {}
        for entry in entries:
            for patch in entry.patches:
                self._copies.setdefault(id(patch), _CopiedPatch(patch)).targets.append(entry.target)
        self.patch_map = {
            path: self._copied(given) if isinstance(given, Patch) else [*map(self._copied, given)]
            for path, given in patch_map.items()
        }
        self.read()

    def read(self) -> None:
        """Reads the fields of the user's patches."""
        for copied in self._copies.values():
            copied.read()

    def _copied(self, given: Patch[Any]) -> Patch[Any]:
        known = self._copies.get(id(given))
        return given if known is None else known.copy


class _CopiedPatch:
    """A patch of the user, the copy of it in the graph, and the values that it is for."""

    def __init__(self, given: Patch[Any]) -> None:
        self.copy: Patch[Any] = object.__new__(type(given))
        self.targets: list[Target] = []
        self._given = given
        self._read: list[Any] = []

    def read(self) -> None:
        """Reads the fields of the user's patch."""
        fields = vars(self._given)
        if _are_same(self._read, [*fields.values()]):
            return
        problems = [problem for target in self.targets for problem in problems_of(target, [self._given])]
        if problems:
            raise PatchMapError("; ".join(problems))
        self._read = [*fields.values()]
        value = fields.get("value")
        if value is not None and not isinstance(value, Tensor):
            fields = {**fields, "value": self._as_tensor(value)}
        vars(self.copy).update(fields)

    def _as_tensor(self, value: Any) -> Tensor:
        specs: list[Any] = [target.spec for target in self.targets]
        device, dtypes = specs[0].device, {spec.dtype for spec in specs}
        dtype = None
        if type(self._given) is ReplacePatch and len(dtypes) == 1:
            (dtype,) = dtypes  # writing at a list of indices takes no other
        elif not isinstance(value, complex) and all(each.is_floating_point for each in dtypes):
            # A tensor without dimensions does not change the dtype of others, so it can be as exact as the number.
            dtype = torch.float32 if device.type == "mps" else torch.float64
        try:
            return torch.tensor(value, dtype=dtype, device=device)
        except (RuntimeError, ValueError, OverflowError, TypeError) as error:
            raise PatchValueError(
                f"{type(self._given).__name__} on {self.targets[0].text!r}: the patch's value is {value!r}, and the "
                f"value here has the dtype {dtype}: {error}"
            ) from None


class CompiledSteps:
    """The calls of a model in generations with a static cache: the first one of each runs as it is, others compiled.

    `run` runs the model with the patches, `compiled` returns the compiled model for calls with such inputs, and
    `generating` the `generate` of the model, with a function that runs the calls of the model.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        compiled: Callable[..., CompiledModel],
        generating: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self.run = run
        self._compiled = compiled
        self._generating = generating
        self._known: list[CompiledModel] = []

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._generating(_Generation(self))(*args, **kwargs)

    def compiled_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledModel:
        found = next((known for known in self._known if known.accepts(args, kwargs)), None)
        if found is None:
            if len(self._known) == _MOST_FORMS:
                raise GraphError(
                    f"the steps of these generations had {_MOST_FORMS} forms (sizes of inputs and caches, plain "
                    "arguments), and each was compiled; call pg.compile again for others"
                )
            found = self._compiled(*args, **kwargs)
            self._known.append(found)
        return found


_MOST_FORMS = 16


class _Generation:
    """The calls of the model in one generation."""

    def __init__(self, steps: CompiledSteps) -> None:
        self._steps = steps
        self._is_first = True
        self._current: tuple[dict[str, Any], CompiledModel] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if self._is_first:
            if not any(getattr(value, "is_compileable", False) for value in (*args, *kwargs.values())):
                raise GraphError(
                    "compiled generations need a cache whose tensors keep their sizes and places: give "
                    'cache_implementation="static", or a StaticCache as cache= (past_key_values= of older transformers)'
                )
            self._is_first = False
            return self._steps.run(*args, **kwargs)
        forms = {name: value.shape if isinstance(value, Tensor) else value for name, value in kwargs.items()}
        if self._current is None or args or not _are_same_forms(self._current[0], forms):
            self._current = forms, self._steps.compiled_for(args, kwargs)
        return self._current[1](*args, **kwargs)


def _are_same_forms(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return before.keys() == now.keys() and all(
        now[name] is form or (isinstance(form, torch.Size) and now[name] == form) for name, form in before.items()
    )


def patches_in_steps(entries: Sequence[Entry], step: CapturedModel) -> dict[Any, list[Patch[Any]]]:
    """Returns the patch map for the same patches on `step`, which is the model as captured on the inputs of a step.

    A `GraphError` names all that are not on the same values there.
    """
    patch_map: dict[Any, list[Patch[Any]]] = {}
    places: dict[str, Any] = {}
    for entry in entries:
        target = entry.target
        text = target.text if target.index else target.path  # without the encoder, layers have other names
        places[text] = _place(target)
        patch_map.setdefault(text, []).extend(entry.patches)
    try:
        found = [entry.target for entry in step.entries_of(patch_map)]
    except PatchMapError as error:
        raise GraphError(f"the steps after the prompt cannot have these patches: {error}") from None
    texts = [text for text, place in places.items() if place not in map(_place, found)]
    if texts:
        raise GraphError(
            f"the steps after the prompt cannot have these patches: {', '.join(map(repr, texts))} is another value "
            "there, as the code takes another way with a cache; patch another value, such as the output of the module"
        )
    return patch_map


def check_no_counts(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raises a `GraphError` if the run of a step has changed plain values in its inputs, which no graph does."""
    changed = [name for name, value in after.items() if name in before and not is_same_plain(before[name], value)]
    if changed:
        raise GraphError(
            f"each step changes {changed[0]!r}, which is not in a tensor, so that the steps cannot be one compiled "
            "graph: caches of transformers count so for layers with a sliding window. The numbers are the same with a "
            f"cache that keeps all positions, so give one:\n{_FULL_CACHE.format(changed[0].partition('|')[0])}"
        )


_FULL_CACHE = """\
    full = copy.deepcopy(model.config)
    full.sliding_window, full.layer_types = None, ["full_attention"] * full.num_hidden_layers
    compiled.generate(..., {}=StaticCache(config=full, max_cache_len=256))"""


def _place(target: Target) -> Any:
    """Returns the place in the model's code that computes a value."""
    node, calls = target.node, [frame.call for frame in (target.frame, *target.frame.frames_above())]
    frames = [(id(call.frame.module), call.call_index) for call in calls if call is not None]
    made = (node.site and node.site.steps, node.occurrence, node.position) if node.kind == "op" else node.target
    return frames, node.kind, made, target.dig, target.index


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
