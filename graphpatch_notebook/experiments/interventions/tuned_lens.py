"""The tuned lens: a map of each state of the residual stream to the one that the logit lens reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.datasets.batches import RowReader
from graphpatch_notebook.experiments.engine.inputs import (
    Examples,
    Inputs,
    Paths,
    batches_of,
    check_graph,
    record,
    several_paths,
)
from graphpatch_notebook.experiments.engine.shared import RunsFrom
from graphpatch_notebook.experiments.interventions.training import set_gradients, trained
from graphpatch_notebook.experiments.methods.lens import check_states, component, layer_count, stream_states
from graphpatch_notebook.experiments.metrics import log_probabilities
from graphpatch_notebook.inspection.resolution import resolve
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import ReplacePatch


class TunedLens(nn.Module):
    """An affine map for each state of the residual stream, `h + A h + b`, before `logit_lens` reads it.

    Before `fit`, `A` and `b` are zero, and the lens is the logit lens. The last state is read as it is. `state_dict`
    and `load_state_dict` save and load it.

    Args:
        pg: The graph. The lens does not keep it.
        streams: As for `logit_lens`; by default, the input of each layer.
        stack: The stack of layers, if the model has several.

    Attributes:
        names: The names of the states, in order.

    Raises:
        ExperimentError: The model has no layers that are known, or the channels of its stream are not the last
            dimension.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from graphpatch_notebook.experiments import logit_lens
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> ids = torch.randint(0, 20, (16, 6))
        >>> pg = PatchableGraph(model, ids[:1])
        >>> lens = TunedLens(pg)
        >>> losses = lens.fit(pg, ids, batch_size=4, epochs=20, lr=0.01)
        >>> losses[-1] < losses[0]
        True
        >>> logit_lens(pg, ids, target=3, lens=lens).shape
        (3, 16, 6)

    Source:
        Belrose et al., "Eliciting latent predictions from transformers with the tuned lens" (2023).
    """

    def __init__(self, pg: PatchableGraph, *, streams: Paths | None = None, stack: str = "") -> None:
        super().__init__()
        check_graph(pg)
        start, count = f"{stack}." if stack else "", layer_count(pg, stack)
        last = component(pg, f"{start}layers[{count - 1}].resid_post")
        if last.axes[-1] != "channel":
            raise ExperimentError(f"the stream has the dimensions {last.axes}, and not channels as the last one")
        self._last = last.name
        given = stream_states(start, count)[:-1]
        self.names = [component(pg, name).name for name in given] if streams is None else several_paths(pg, streams)
        values = pg.components.evidence.values
        named = {values[name]: name for name in self.names if name in values}
        self._same = {name: named[value] for name, value in values.items() if value in named}
        self.maps = nn.ModuleList(nn.Linear(last.shape[-1], last.shape[-1]) for _ in self.names)
        for parameter in self.maps.parameters():
            nn.init.zeros_(parameter)
        self.to(next((each.device for each in pg.parameters()), None))

    def forward(self, name: str, state: Tensor) -> Tensor:
        """Returns the state that is read in place of one, in its dtype.

        Raises:
            ExperimentError: The lens has no map for a state of this name.
        """
        name = self._same.get(name, name)
        if name == self._last:
            return state
        if name not in self.names:
            raise ExperimentError(f"the lens has no map for {name!r}: TunedLens(pg, streams=...) makes one")
        linear: Any = self.maps[self.names.index(name)]
        weight, bias = linear.weight.to(state.device), linear.bias.to(state.device)
        wide = state.to(weight.dtype)
        return (wide + functional.linear(wide, weight, bias)).to(state.dtype)

    def fit(
        self,
        pg: PatchableGraph,
        dataset: Examples,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        lr: float = 1e-3,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> list[float]:
        """Trains the maps so that what each state says is what the model says, and returns the loss of each batch.

        The loss of a state is KL(model || lens), a mean over the positions that are not padding; that of a batch is the
        mean over the states. The layers run once for each batch, and what follows them once for each state. The
        model is not trained.

        Args:
            pg: The graph of the same model.
            dataset: As of `record_to`; its batches are kept.
            batch_size: As of `record_to`.
            epochs: How often to read the dataset.
            lr: The learning rate of Adam.
            optimizer: Another optimizer, of `lens.parameters()`.

        Raises:
            ExperimentError: The dataset is empty, or the model has no logits.
        """
        check_graph(pg)
        batches, logits = [*batches_of(pg, dataset, batch_size)], component(pg, "@logits")
        reader, last = RowReader(pg, self._last, None), resolve(captured(pg).root, component(pg, self._last).path)

        def step(batch: Inputs) -> float:
            runs = RunsFrom(pg, batch, last)
            values = record(pg, batch, [*self.names, self._last], run=runs.first).values
            check_states(values, self.names, self._last)
            said, kept = log_probabilities(runs.output), reader.rows(pg, batch, 0).kept
            total = 0.0
            for name, linear in zip(self.names, self.maps, strict=True):
                with torch.enable_grad():
                    output = runs.again({self._last: ReplacePatch(self(name, values[name]))})
                    divergence = functional.kl_div(log_probabilities(output), said, log_target=True, reduction="none")
                    each = logits.seen(divergence).sum(-1)
                    loss = each[kept.to(each.device)].mean() if each.shape == kept.shape else each.mean()
                    set_gradients({name: linear}, loss)
                total += loss.item() / len(self.names)
            return total

        return trained(self.maps, batches, step, epochs=epochs, lr=lr, optimizer=optimizer)
