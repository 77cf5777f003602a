"""Plain forward hooks of torch: what the other tools are compared with, in time and in numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.benchmarks.peer_tools.subject import Subject, difference, first_tensor, recorded_modules
from tests.benchmarks.peer_tools.tool import Tool


@contextmanager
def hooked(module: nn.Module, change: Callable[[Any], Any]) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _module, _args, output: change(output))
    try:
        yield
    finally:
        handle.remove()


def mlp_outputs(model: Any, tokens: Tensor) -> list[Tensor]:
    """What the MLP of each block returns for the tokens."""
    found: list[Tensor] = []
    keep = found.append
    handles = [block.mlp.register_forward_hook(lambda _m, _a, output: keep(output)) for block in model.transformer.h]
    model(tokens)
    for handle in handles:
        handle.remove()
    return found


class PlainHooks(Tool):
    packages: ClassVar = ()

    def __init__(self, model: Any, subject: Subject) -> None:
        super().__init__(model, subject)
        self.mlps = [block.mlp for block in model.transformer.h]
        self.named = [(name, model.get_submodule(name)) for name in recorded_modules(model, subject.inputs)]
        self.values: list[Tensor] = []

    def forward(self) -> Tensor:
        return self.model(self.subject.inputs).logits

    def record(self) -> Tensor:
        found: list[Tensor] = []
        with hooked(self.mlps[self.subject.layer], found.append):
            self.model(self.subject.inputs)
        return found[0]

    def zero(self) -> Tensor:
        with hooked(self.mlps[self.subject.layer], torch.zeros_like):
            return self.forward()

    def zero_queries(self) -> Tensor:
        def change(projected: Tensor) -> Tensor:
            projected = projected.clone()
            projected[..., : self.subject.width] = 0
            return projected

        with hooked(self.model.transformer.h[self.subject.layer].attn.c_attn, change):
            return self.forward()

    def record_modules(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {}

        def keep(name: str) -> Callable[[Any, Any, Any], None]:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                found[name] = first_tensor(output)

            return hook

        handles = [module.register_forward_hook(keep(name)) for name, module in self.named]
        self.model(self.subject.inputs)
        for handle in handles:
            handle.remove()
        return found

    def prepare_sweep(self) -> None:
        self.values = mlp_outputs(self.model, self.subject.other)

    def sweep(self) -> Tensor:
        found = torch.empty(self.subject.layers, self.subject.positions)
        for layer, mlp in enumerate(self.mlps):
            for position in range(self.subject.positions):

                def change(output: Tensor, layer: int = layer, position: int = position) -> Tensor:
                    output = output.clone()
                    output[:, position] = self.values[layer][:, position]
                    return output

                with hooked(mlp, change):
                    found[layer, position] = difference(self.model(self.subject.clean).logits)
        return found

    def expected_without_tanh(self) -> Tensor:
        """The logits with the tanh set to zero, by an edited activation function: hooks do not get there."""
        mlp = self.mlps[self.subject.layer]
        activation, mlp.act = mlp.act, Halved()
        try:
            return self.forward()
        finally:
            mlp.act = activation


class Halved(nn.Module):
    """What is left of `0.5 * x * (1 + tanh(...))` with the tanh set to zero."""

    def forward(self, entered: Tensor) -> Tensor:
        return 0.5 * entered
