"""What all tools are given: a model, its inputs, and what is to be done at which places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Subject:
    """A GPT-2 of transformers, from a config, with random weights.

    Attributes:
        name: As the table names it.
        layers: How many blocks it has; the one in the middle is recorded and changed.
        width: The width of the residual stream.
        heads: Attention heads of a block.
        vocabulary: How many tokens there are.
        rounds: How often each forward is timed.
        sweep_rounds: How often each sweep is timed.
        positions: Tokens of the inputs of sweeps.
        length: Tokens of the other inputs.
        asked: By row of the table: the most that this package is to take.
    """

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    rounds: int
    sweep_rounds: int
    positions: int
    length: int = 32
    asked: Mapping[str, float] = field(default_factory=dict)

    def build(self) -> Any:
        from tests.benchmarks.models import gpt2

        torch.manual_seed(0)
        model: Any = gpt2(self.layers, self.width, self.heads, self.vocabulary)
        with (
            torch.no_grad()
        ):  # biases are zero and scales are one at first: a tool that mixed them up would not be seen
            for number, parameter in enumerate(model.parameters()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                parameter.add_(noise, alpha=0.02)
        return model

    @property
    def layer(self) -> int:
        return self.layers // 2

    @property
    def block(self) -> str:
        """The attribute path of the block in the middle."""
        return f"transformer.h.{self.layer}"

    @cached_property
    def inputs(self) -> Tensor:
        return self.tokens(self.length, seed=0)

    @cached_property
    def clean(self) -> Tensor:
        """The tokens of the run that sweeps change."""
        return self.tokens(self.positions, seed=1)

    @cached_property
    def other(self) -> Tensor:
        """The tokens whose values sweeps put into the other run."""
        return self.tokens(self.positions, seed=2)

    def tokens(self, length: int, seed: int) -> Tensor:
        return torch.randint(0, self.vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))


SMALL = Subject(
    "GPT-2 4x128", 4, 128, 4, 4096, rounds=200, sweep_rounds=9, positions=16,
    asked={
        "construct": 3, "record": 1.06, "zero": 1.06, "zero_queries": 1.1, "zero_tanh": 1.08, "record_modules": 1.2,
        "everything": 1.6, "sweep": 0.12, "first_sweep": 0.2,
    },
)  # fmt: skip
LARGE = Subject(
    "GPT-2 124M", 12, 768, 12, 50257, rounds=7, sweep_rounds=2, positions=4,
    asked={
        "construct": 1.3, "record": 1.02, "zero": 1.02, "zero_queries": 1.03, "zero_tanh": 1.03, "everything": 1.1,
        "sweep": 0.1,
    },
)  # fmt: skip
SUBJECTS: Mapping[str, Subject] = {"small": SMALL, "large": LARGE}


def difference(logits: Tensor) -> Tensor:
    """The metric of sweeps: how much more of one token than of another comes after the last."""
    return logits[0, -1, 5] - logits[0, -1, 6]


def first_tensor(output: Any) -> Tensor | None:
    """A module's output, or the first of several; `None` where that is no tensor."""
    found = output[0] if isinstance(output, tuple) and output else output
    return found if isinstance(found, Tensor) else None


def recorded_modules(model: nn.Module, inputs: Tensor) -> list[str]:
    """The attribute paths of the modules that run and return a tensor, or a tuple that begins with one, in order."""
    ran: list[str] = []

    def note(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if first_tensor(output) is not None:
                ran.append(name)

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return ran
