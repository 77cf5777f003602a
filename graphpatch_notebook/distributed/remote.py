"""A graph whose model runs in other processes: the engines of an IPython cluster, one for each rank of the model.

    notebook                                   engines
    RemoteGraph: a model without weights       PatchableGraph: the model, or this rank's part of it
      names, shapes, tree, patches   ------->  the same patches, the same call
      outputs, what probes keep      <-------  of the first engine

Engines are started by ipyparallel: on this machine, by SSH, by MPI or by SLURM. Patches, inputs and functions are
pickled (functions by cloudpickle, as Dask does), and run in all engines.
"""

from __future__ import annotations

import functools
import math
import pickle
import signal
import time
import uuid
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.components import Components, Weights, find
from graphpatch_notebook.components.dimensions import copy_on_meta
from graphpatch_notebook.distributed.executors import dumps, sendable
from graphpatch_notebook.distributed.sharding import note_placements
from graphpatch_notebook.errors import ExperimentError, GraphError, GraphPatchWarning, add_note, warn_each_time
from graphpatch_notebook.inspection.meanings import differing_names, meanings
from graphpatch_notebook.inspection.resolution import kept_for
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patching import GENERATION_CONFIG, PatchContext, Recording, active_patches, innermost
from graphpatch_notebook.torch_compat import version_of
from graphpatch_notebook.values import mapped

_RECIPE = """\
    def build():
        return AutoModelForCausalLM.from_pretrained("gpt2").eval()

    pg = remote(cluster, build, input_ids=ids)"""
_CHANGES = "bfloat16 cpu cuda double eval float half requires_grad_ to train type xpu zero_grad".split()
_REFUSED = (
    "add_module apply load_state_dict register_buffer register_module register_parameter set_submodule to_empty _apply"
).split()
_POLL = 0.2  # seconds
_GRACE = 5.0  # seconds for engines to answer after one failed
_PATIENCE = 15.0  # seconds for engines to answer an interrupt


def remote(cluster: Any, recipe: Callable[[], Any], *example_args: Any, **example_kwargs: Any) -> RemoteGraph:
    """Returns a `PatchableGraph` of a model that runs in the engines of a cluster.

    Each engine builds the model by `recipe`, and keeps it. The result has the names, shapes and code of the model, but
    no weights: browsing it sends nothing. Calls in a patch context run in all engines with the same patches, and return
    what the first engine returns, on the CPU. So do `generate`, `record`, sweeps and all experiments, magics and the
    browser.

    If the engines form no process group, each has the whole model, and only the first one is used.

    Functions (of `CustomPatch`, metrics, `make_patches`) run in the engines: what they change there, such as a list
    that they append to, does not change here. Gradients do not pass between processes; `attribute` computes them there.

    Args:
        cluster: A client of ipyparallel (`ipyparallel.Client`), or some of its engines (`client[:2]`). If the model is
            sharded, these are its ranks, in order; start their process group in `recipe`.
        recipe: A function without arguments that returns the model, or a `PatchableGraph` of it, in an engine.
        *example_args: Example inputs, positional.
        **example_kwargs: Example inputs, by keyword.

    Raises:
        ExperimentError: `cluster` has no engines, `recipe` holds the model itself, or an engine died.
        Exception: Any error that `recipe` or the model raises in an engine.

    Example:
        >>> import ipyparallel
        >>> from graphpatch_notebook.experiments import remote
        >>> with ipyparallel.Cluster(n=2) as client:  # doctest: +SKIP
        ...     pg = remote(client, build, input_ids=ids)
        ...     with pg.patch({"layers[3].attn.heads[5].z": ZeroPatch()}):
        ...         logits = pg(input_ids=ids).logits
    """
    from graphpatch_notebook.errors import extra

    extra("ipyparallel", "remote")
    if isinstance(recipe, Module) or not callable(recipe):
        raise ExperimentError(
            "recipe is a function that builds the model where it runs, so that no weights are sent:\n" + _RECIPE
        )
    engines = Engines(cluster)
    made, (args, kwargs) = engines.run(_build_there, recipe, (example_args, example_kwargs))
    model, options, placements, there, are_together = pickle.loads(made)
    if not are_together:
        engines.keep_first()
    result = RemoteGraph(model, options, *args, **kwargs)
    captured(result).root.capture.findings[Engines] = engines  # of the capture, so copies and edits have them too
    if differing := differing_names(kept_for(result.nodes, meanings), there):
        raise ExperimentError(f"names mean other values in the engines: {differing}")
    note_placements(result.nodes.root, placements)
    captured(result).renew()
    return result


class RemoteGraph(PatchableGraph):
    """A `PatchableGraph` whose model runs in the engines of a cluster: see `remote`.

    Example:
        >>> from graphpatch_notebook.experiments import remote
        >>> pg = remote(client, build, input_ids=ids)  # doctest: +SKIP
        >>> pg.run_there(lambda there: torch.cuda.memory_allocated())  # doctest: +SKIP
        16060522496
    """

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        name = None if function is self._module else function.__name__
        context = innermost(self._captured)
        if context is not None:
            has_steps = any(patch.steps is not None for entry in context.plan.entries for patch in entry.patches)
            if has_steps and context.is_used:
                raise GraphError(
                    "patches with steps= count the calls of one block, and each call here is one of its own in the "
                    "engines: call generate(), or enter a block for each step"
                )
            context.is_used = True
        patches = active_patches(self._captured)
        output, kept = self._there.run(
            _call_there,
            (patches, self._is_strict),
            (name, args, kwargs),
            getattr(self, GENERATION_CONFIG, None),
            torch.is_grad_enabled(),
        )
        for patch, values in zip([patch for _, patch in patches if patch.only_keeps], kept, strict=True):
            patch.forget()
            for value in values:
                patch.op(value)
        return output

    def run_there(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns `function(pg, *args, **kwargs)` of the first engine; it runs in all of them.

        There, `pg` is the graph of the model, in a context with the patches that are active here.

        Args:
            function: The function. It is pickled, and so is what it returns.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Raises:
            ExperimentError: An engine died, or something cannot be pickled.
            Exception: What the function raises.
        """
        __tracebackhide__ = True
        if kwargs.get("executor") is not None:
            raise ExperimentError(
                "the model runs in engines already, which run cells and batches in one order: leave executor= out"
            )
        patches = active_patches(self._captured), self._is_strict
        return self._there.run(_apply_there, patches, function, (args, kwargs))

    @property
    def _is_strict(self) -> bool:
        context = innermost(self._captured)
        return context is not None and context.is_strict

    def record(self, patterns: Any, *inputs: Any, **options: Any) -> Recording:
        """Returns the values at some paths, on the CPU: see `PatchableGraph.record`."""
        __tracebackhide__ = True
        given = patterns if isinstance(patterns, Iterable) and not isinstance(patterns, str) else [patterns]
        values: dict[str, Any] = self.run_there(_recorded, [str(pattern) for pattern in given], *inputs, **options)
        kept = {path: (value, version_of(value)) for path, value in values.items()}
        return Recording(kept, self._captured, is_whole=options.get("positions") is None)

    def sweep(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a sweep in the engines: see `PatchableGraph.sweep`."""
        __tracebackhide__ = True
        return self.run_there(PatchableGraph.sweep, *args, **kwargs | {"progress": False})

    def splice(self, *args: Any, **kwargs: Any) -> Any:
        """Raises a `GraphError`: SAEs run where the model runs."""
        raise GraphError("SAEs are spliced where the model is: not into a graph of a model that runs elsewhere")

    def verify(self, *args: Any, **kwargs: Any) -> Any:
        """Compares the graphs with the model in the engines: see `PatchableGraph.verify`."""
        __tracebackhide__ = True
        return self.run_there(PatchableGraph.verify, *args, **kwargs)

    @property
    def components(self) -> Components:
        """The components of the model: see `PatchableGraph.components`."""
        return find(self._captured.root)

    @property
    def weights(self) -> Weights:
        """Is an error: the weights are in other processes."""
        raise GraphError("the weights are in the engines: pg.run_there(lambda there: there.weights.W_Q[0].cpu())")

    def _refuse_elsewhere(self) -> None:
        raise GraphError(
            "the model runs in other processes, and so does what needs its graphs and weights: "
            'pg.run_there(lambda there: there.save("FILE"))'
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if "_captured" in self.__dict__ and name != GENERATION_CONFIG:
            raise GraphError(
                f"the model runs in other processes, where {name!r} would not change: set it there, by a function of "
                "the graph: pg.run_there(function)"
            )
        super().__setattr__(name, value)

    @property
    def _there(self) -> Engines:
        engines: Engines = self._captured.root.capture.findings[Engines]
        return engines


def _changing(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Module, name))
    def method(self: RemoteGraph, *args: Any, **kwargs: Any) -> Any:
        if name in _REFUSED:
            raise GraphError(
                f"the model runs in other processes, where {name} would change nothing: "
                f"pg.run_there(lambda there: there.{name}(...))"
            )
        if name in ("train", "eval", "requires_grad_"):  # which can be read here
            getattr(self._module, name)(*args, **kwargs)
        self.run_there(_changed, name, *args, **kwargs)
        return self

    where = "Is an error: the model runs in other processes." if name in _REFUSED else "Has its effect in the engines."
    method.__doc__ = f"{where} See `torch.nn.Module.{name}`."
    return method


for _name in (*_CHANGES, *_REFUSED):
    if hasattr(Module, _name):
        setattr(RemoteGraph, _name, _changing(_name))


def _changed(pg: PatchableGraph, name: str, *args: Any, **kwargs: Any) -> None:
    getattr(pg, name)(*args, **kwargs)


_Patches: TypeAlias = "tuple[list[tuple[str, Patch[Any]]], bool]"
"""The patches, each with its path, and whether it is an error if one never fires."""


def _recorded(pg: PatchableGraph, patterns: list[str], *inputs: Any, **options: Any) -> dict[str, Any]:
    return dict(pg.record(patterns, *inputs, **options))


# -- in an engine ------------------------------------------------------------------------------------------------------

_graphs: dict[str, PatchableGraph] = {}


def _answer(token: str, is_first: bool, task: bytes) -> bytes:
    """Runs a task in an engine. Returns whether it is done, its warnings, and its result or its error, as bytes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GraphPatchWarning)
        try:
            function, *parts = pickle.loads(task)
            result = function(token, *parts)
            is_right, answer = True, dumps(result if is_first else None)
        except BaseException as error:
            is_right, answer = False, dumps(sendable(error))
    given = {each.message.args: None for each in caught if isinstance(each.message, GraphPatchWarning)}
    return dumps((is_right, list(given), answer))


def _build_there(token: str, recipe: Callable[[], Any], inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    import cloudpickle

    made = recipe()
    pg = _graphs[token] = made if isinstance(made, PatchableGraph) else PatchableGraph(made, *inputs[0], **inputs[1])
    model = captured(pg)
    examples = model.examples
    given = inputs if examples is None else (examples.args, examples.kwargs)
    placements = {path: node.placement for path, node in pg.nodes.items() if node.placement}
    are_together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    found = copy_on_meta(model.root), model.options, placements, meanings(pg.nodes), are_together
    return cloudpickle.dumps(found), mapped(given, _on_cpu)


def _call_there(token: str, patches: _Patches, call: tuple[Any, ...], config: Any, is_with_gradients: bool) -> Any:
    name, args, kwargs = call
    pg = _graphs[token]
    if config is not None and captured(pg).options.copy_transformers_generation_config:
        pg.generation_config = config
    with torch.set_grad_enabled(is_with_gradients), _patched(pg, patches):
        output = (pg if name is None else getattr(pg, name))(*args, **kwargs)
    kept = [patch.values_kept() for _, patch in patches[0] if patch.only_keeps]
    return mapped((output, kept), _on_cpu)


def _apply_there(token: str, patches: _Patches, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    pg = _graphs[token]
    with _patched(pg, patches) if patches[0] else nullcontext():
        return mapped(function(pg, *given[0], **given[1]), _on_cpu)


def _patched(pg: PatchableGraph, patches: _Patches) -> PatchContext:
    found: dict[Any, list[Patch[Any]]] = {}
    for path, patch in patches[0]:
        found.setdefault(path, []).append(patch)
    return pg.patch(found, strict=patches[1])


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


# -- engines -----------------------------------------------------------------------------------------------------------

_Answer: TypeAlias = "tuple[bool, list[tuple[str, str]], bytes]"
"""What an engine answers: whether it is done, its warnings, and its result or its error."""


class Engines:
    """Runs tasks in all engines of a cluster at once: those of a client of ipyparallel, or of a view of some."""

    def __init__(self, cluster: Any) -> None:
        client = getattr(cluster, "client", cluster)
        if not hasattr(client, "direct_view"):
            raise ExperimentError(
                f"remote takes a client of ipyparallel, or a view of its engines, not {type(cluster).__name__}"
            )
        targets = client.ids if client is cluster else cluster.targets
        self._ids: list[int] = [targets] if isinstance(targets, int) else list(targets)
        if not self._ids:
            raise ExperimentError("the cluster has no engines: start some with ipyparallel.Cluster(n=...)")
        self._client = client
        self._token = uuid.uuid4().hex
        self._late: dict[int, Any] = {}  # what engines still run that did not answer an interrupt

    def keep_first(self) -> None:
        """Uses only the first engine from now on: one that runs the model alone, and writes files."""
        del self._ids[1:]

    def run(self, function: Callable[..., Any], *parts: Any) -> Any:
        """Returns what `function` returns in the first engine. `parts` are its arguments.

        Raises:
            ExperimentError: An engine died, or a part cannot be pickled.
            KeyboardInterrupt: The user interrupted it; the engines were interrupted, too.
            Exception: What the function raised.
        """
        __tracebackhide__ = True
        task = dumps((function, *parts))
        if lost := [engine for engine in self._ids if engine not in self._client.ids]:
            raise ExperimentError(
                f"engine {lost[0]} of the cluster has died: start the cluster and make the graph again"
            )
        if late := [engine for engine, result in self._late.items() if not result.ready()]:
            raise ExperimentError(
                f"engine {late[0]} of the cluster still runs an earlier call, which an interrupt did not end: it waits "
                "for other processes of the model, until their process group gives up. Restart the cluster, and make "
                "the graph anew"
            )
        waiting = {
            engine: self._client[engine].apply_async(_answer, self._token, engine == self._ids[0], task)
            for engine in self._ids
        }
        answers: dict[int, _Answer] = {}
        try:
            self._collect(waiting, answers, math.inf, is_until_error=True)
            if waiting:  # for the engine that failed, perhaps
                self._collect(waiting, answers, _GRACE)
                self._interrupt(waiting, answers)
        except BaseException:  # an interrupt, or an engine died: the others are not left waiting for it
            with suppress(ExperimentError):
                self._interrupt(waiting, answers)
            raise
        for message, category in dict.fromkeys(given for _, warned, _ in answers.values() for given in warned):
            warn_each_time(message, category)
        for engine, (is_right, _, data) in answers.items():  # the first failure caused the others
            if not is_right:
                result = pickle.loads(data)
                if len(self._ids) > 1:
                    add_note(result, f"raised in engine {engine} of {len(self._ids)}")
                raise result
        return pickle.loads(answers[self._ids[0]][2])

    def _interrupt(self, waiting: dict[int, Any], answers: dict[int, _Answer]) -> None:
        """Interrupts the engines that have not answered, and waits for them a while."""
        alive = [engine for engine in waiting if engine in self._client.ids]
        if alive:
            self._client.send_signal(signal.SIGINT, alive, block=False)
        try:
            self._collect(waiting, answers, _PATIENCE)
        finally:
            self._late = dict(waiting)

    def _collect(
        self, waiting: dict[int, Any], answers: dict[int, _Answer], seconds: float, *, is_until_error: bool = False
    ) -> None:
        """Waits for answers, and moves those that arrive, in their order."""
        deadline = time.monotonic() + seconds
        while waiting and time.monotonic() < deadline:
            for engine, result in list(waiting.items()):
                if not result.ready():
                    continue
                del waiting[engine]
                try:
                    answers[engine] = pickle.loads(result.get())
                except Exception as error:  # ipyparallel raises its own errors
                    raise ExperimentError(
                        f"engine {engine} of the cluster did not answer: {type(error).__name__}: {error}. If it died, "
                        "start the cluster again and make the graph again"
                    ) from None
            if is_until_error and not all(is_right for is_right, _, _ in answers.values()):
                return
            if waiting:
                next(iter(waiting.values())).wait(_POLL)
