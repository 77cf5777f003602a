"""Runs a model with interventions, and trains these."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.datasets.batches import RowReader
from graphpatch_notebook.experiments.engine.inputs import Inputs, check_graph, inputs_of, several_paths
from graphpatch_notebook.experiments.interventions.modules import Intervention
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import CustomPatch, shown_value
from graphpatch_notebook.patches.slices import PositionSelection, selection

_KEYS = {"base", "sources", "target", "positions", "source_positions"}


def intervene(
    pg: PatchableGraph,
    interventions: Mapping[Any, nn.Module],
    base: Any,
    *sources: Any,
    positions: PositionSelection | None = None,
    source_positions: PositionSelection | None = None,
) -> Any:
    """Returns the output of the model on some inputs, with interventions on its values.

    Each intervention is called with the value of this run, and the values at the same path of runs on the sources,
    which have no gradients; it returns the new value. The patches of active contexts have their effect in all runs.

    Args:
        pg: The graph.
        interventions: By path, component name or pattern, a module whose `forward` takes `(base, *sources)`: `DAS`,
            `LoReFT`, ..., or your own. At several values, one module is called for each of them.
        base: The inputs: a tensor, a text or several, a tuple of arguments, or a dict of keyword arguments.
        *sources: The inputs of each source run, likewise.
        positions: The positions that change: a number or several, the same for all rows, or with two dimensions those
            of each row of the batch. Negative ones count from the end of each row, before its padding. The modules are
            given these positions alone, of shape (batch, positions, ...). `None` for the whole value.
        source_positions: The positions of the sources, in the same order; `None` for the same numbers.

    Raises:
        UnknownPathError: A path does not exist; nothing ran.
        ExperimentError: A value does not have these positions, or a source has a value of another shape. The message
            names the path and both shapes.

    Example:
        >>> pg = PatchableGraph(nn.Sequential(nn.ReLU(), nn.Softplus()), torch.ones(1, 2))
        >>> from graphpatch_notebook.experiments import DAS
        >>> base, source = torch.zeros(1, 2), torch.ones(1, 2)
        >>> swapped = intervene(pg, {"sub_0.output": DAS(2, dimensions=2)}, base, source)
        >>> torch.allclose(swapped, pg(source), atol=1e-5)
        True
    """
    runs = _Runs(pg, interventions)
    own, *others = [inputs_of(pg, each) for each in (base, *sources)]
    with runs.patched(own, others, positions, source_positions):
        return own.run(pg)


def fit(
    pg: PatchableGraph,
    interventions: Mapping[Any, nn.Module],
    dataset: Any,
    loss: Callable[[Any, Any], Tensor],
    *,
    epochs: int = 1,
    lr: float = 1e-3,
    optimizer: torch.optim.Optimizer | None = None,
    positions: PositionSelection | None = None,
    source_positions: PositionSelection | None = None,
) -> list[float]:
    """Trains interventions, in place, and returns the loss of each batch.

    The model itself is not trained: its parameters get no gradients. To save memory, freeze it with
    `model.requires_grad_(False)`. The interventions are in eval mode afterwards.

    Args:
        pg: The graph.
        interventions: As for `intervene`. Move them to the device of the values.
        dataset: A list of batches or a `DataLoader`: something with a length that can be read in each epoch. A batch is
            a tuple or list of the base inputs, those of the sources, and the target: `(base, target)`,
            `(base, source, target)`, ...; or a dict with `base`, `target`, and optionally `sources` (a list),
            `positions` and `source_positions`.
        loss: A function of the model's output and the target that returns a scalar, such as
            `lambda output, target: cross_entropy(output.logits[:, -1], target)`. Penalties of the interventions are
            added.
        epochs: How often to read the dataset.
        lr: The learning rate of Adam.
        optimizer: Another optimizer, of the interventions' parameters.
        positions: As for `intervene`, for batches without their own.
        source_positions: Likewise.

    Raises:
        UnknownPathError: A path does not exist; nothing ran.
        ExperimentError: There is nothing to train, the loss does not depend on an intervention, or a batch has another
            form; or as from `intervene`.

    Example:
        >>> from graphpatch_notebook.experiments import LowRankSteering
        >>> pg = PatchableGraph(nn.Sequential(nn.ReLU(), nn.Softplus()), torch.ones(1, 2))
        >>> steering = {"sub_0.output": LowRankSteering(2, rank=1)}
        >>> losses = fit(pg, steering, [(torch.ones(4, 2), torch.zeros(4, 2))], nn.MSELoss(), epochs=50, lr=0.1)
        >>> losses[-1] < losses[0] / 2
        True
    """
    run = _Runs(pg, interventions)

    def step(batch: Any) -> float:
        base, sources, target, *at = _parts(pg, batch, positions, source_positions)
        with torch.enable_grad(), run.patched(base, sources, *at):  # where layers are recomputed for gradients, too
            penalties = (module.penalty() for module in modules if isinstance(module, Intervention))
            value = sum(penalties, loss(base.run(pg), target))
            set_gradients(run.modules, value)
        return value.item()

    modules = nn.ModuleList(dict.fromkeys(run.modules.values()))
    return trained(modules, dataset, step, epochs=epochs, lr=lr, optimizer=optimizer)


def trained(
    modules: nn.ModuleList,
    dataset: Any,
    step: Callable[[Any], float],
    *,
    epochs: int,
    lr: float,
    optimizer: torch.optim.Optimizer | None,
) -> list[float]:
    """Trains modules, and returns the loss of each batch: `step` sets the gradients on one, and returns its loss."""
    annealed = [module for module in modules if isinstance(module, Intervention)]
    parameters = [each for each in modules.parameters() if each.requires_grad]
    count = epochs * len(dataset) if hasattr(dataset, "__len__") else 0
    if not parameters or not count:
        raise ExperimentError(
            "there is nothing to train: no parameter requires gradients, or no batches; dataset, a "
            f"{type(dataset).__name__}, must have a length, and each epoch reads it: a list of batches, or a DataLoader"
        )
    optimizer = torch.optim.Adam(parameters, lr) if optimizer is None else optimizer
    losses: list[float] = []
    try:
        modules.train()
        for batch in itertools.chain.from_iterable(itertools.repeat(dataset, epochs)):
            for module in annealed:
                module.progress.fill_((len(losses) + 1) / count)
            losses.append(step(batch))
            optimizer.step()
    finally:
        modules.eval()
    return losses


def set_gradients(modules: Mapping[str, nn.Module], loss: Any) -> None:
    """Sets the gradients of the parameters of modules, by path, and of no others."""
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        raise ExperimentError(f"the loss must be a scalar that depends on the interventions, not {shown_value(loss)}")
    owners = {each: path for path, module in modules.items() for each in module.parameters()}
    own = [each for each in owners if each.requires_grad]
    for parameter, gradient in zip(own, torch.autograd.grad(loss, own, allow_unused=True), strict=True):
        parameter.grad = gradient
    used = {owners[each] for each in own if each.grad is not None}
    if unused := [owners[each] for each in own if owners[each] not in used]:
        raise ExperimentError(f"the loss does not depend on the intervention on {unused[0]!r}")


def _parts(
    pg: PatchableGraph, batch: Any, positions: Any, source_positions: Any
) -> tuple[Inputs, list[Inputs], Any, Any, Any]:
    """Returns the base inputs of a batch, those of the sources, the target, and the positions of both."""
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        base, *sources, target = batch
    elif isinstance(batch, Mapping) and {"base", "target"} <= batch.keys() <= _KEYS:
        base, sources, target = batch["base"], batch.get("sources", []), batch["target"]
        positions, source_positions = batch.get("positions", positions), batch.get("source_positions", source_positions)
        if any(isinstance(each, Tensor) and each.dim() == 1 for each in (positions, source_positions)):
            raise ExperimentError("positions of a batch are those of each row, of shape (batch, 1) for one: [:, None]")
    else:
        what = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ExperimentError(f"a batch must be (base, *sources, target), or a dict of {sorted(_KEYS)}, not {what}")
    return inputs_of(pg, base), [inputs_of(pg, each) for each in sources], target, positions, source_positions


class _Runs:
    """Runs of a model with interventions.

    Attributes:
        modules: The interventions, by path.
    """

    def __init__(self, pg: PatchableGraph, interventions: Mapping[Any, nn.Module]) -> None:
        check_graph(pg)
        self._pg = pg
        self.modules = {path: module for key, module in interventions.items() for path in several_paths(pg, [key])}
        for path, module in self.modules.items():
            if not isinstance(module, nn.Module):
                raise ExperimentError(f"the intervention on {path!r} must be an nn.Module, not {type(module).__name__}")

    @functools.cached_property
    def _reader(self) -> RowReader:
        reader = RowReader(self._pg, list(self.modules), None)
        if without := reader.without_positions:
            raise ExperimentError(
                f"{without[0]!r} has one row for each example, not for each position: drop positions="
            )
        return reader

    def patched(
        self, base: Inputs, sources: Sequence[Inputs], positions: Any, source_positions: Any
    ) -> AbstractContextManager[Any]:
        """Returns a context for a run on the base inputs: interventions are given the values of the sources."""
        other = positions if source_positions is None else source_positions
        places, *source_places = [self._places(base, positions), *(self._places(each, other) for each in sources)]
        given = [self._values(each, at) for each, at in zip(sources, source_places, strict=True)]
        patches: dict[Any, Any] = {
            path: CustomPatch(partial(self._changed, path, places, [values[path] for values in given]))
            for path in self.modules
        }
        return self._pg.patch(patches, strict=True)

    def _values(self, source: Inputs, places: _Places | None) -> dict[str, Tensor]:
        with torch.no_grad():
            recording = source.run(partial(self._pg.record, list(self.modules)))
        return {path: self._view(path, recording[path], places)[_index(places)] for path in self.modules}

    def _places(self, inputs: Inputs, positions: Any) -> _Places | None:
        """Returns the positions of each row of the batch, counted from the start of the sequence."""
        if positions is None:
            return None
        kept = self._reader.rows(self._pg, inputs, 0).kept
        try:
            chosen = selection(positions, "positions")
        except ValueError as error:
            raise ExperimentError(str(error)) from None
        numbers: Any = chosen.chosen
        same = chosen.within(0, kept.shape[1]) if isinstance(numbers, slice) else numbers
        rows, found = chosen.rows or [same] * len(kept), []
        if len(rows) != len(kept) or len(set(map(len, rows))) > 1:
            raise ExperimentError(f"positions={positions!r} must have as many numbers for each of {len(kept)} rows")
        for number, row in enumerate(rows):
            own = kept[number].nonzero().flatten().tolist()
            found.append([own[place] if -len(own) <= place < 0 else place for place in row])
            if not {*found[-1]} <= {*own}:
                raise ExperimentError(f"positions={positions!r}: row {number} has {len(own)} positions, {own}")
        return _Places(kept.shape, torch.tensor(found))

    def _view(self, path: str, value: Any, places: _Places | None) -> Tensor:
        """Returns a value; with positions, as a view whose first dimensions are the rows and the positions."""
        if not isinstance(value, Tensor):
            raise ExperimentError(f"{path!r} must be a tensor, not {type(value).__name__}")
        return value if places is None else self._reader.by_position(path, value, places.shape)

    def _changed(self, path: str, places: _Places | None, sources: Sequence[Tensor], value: Any) -> Tensor:
        view, index = self._view(path, value, places), _index(places)
        base = view[index]
        for source in sources:
            if source.shape != base.shape:
                raise ValueError(
                    f"the value has the shape {tuple(base.shape)}, and that of a source {tuple(source.shape)}: give "
                    "inputs of the same shape, or positions="
                )
        new = self.modules[path](base, *sources)
        if not isinstance(new, Tensor) or new.shape != base.shape:
            raise ValueError(
                f"the intervention must return a tensor of shape {tuple(base.shape)}, not {shown_value(new)}"
            )
        if places is None:
            return new.to(value.dtype)  # not written into the value, which the module may have saved for its gradient
        view[index] = new.to(view.dtype)
        return value  # type: ignore[no-any-return]


class _Places(NamedTuple):
    """Positions of each row of a batch: `columns`, (rows, count), in sequences of `shape`, (rows, positions)."""

    shape: torch.Size
    columns: Tensor


def _index(places: _Places | None) -> Any:
    return ... if places is None else (torch.arange(len(places.columns))[:, None], places.columns)
