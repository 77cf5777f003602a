"""TransformerLens: `run_with_cache`, `run_with_hooks`, and its own sweep, the same for both of its models."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformer_lens import patching

from tests.benchmarks.peer_tools.subject import Subject, difference
from tests.benchmarks.peer_tools.tool import Tool


def zeroed(value: Tensor, hook: Any) -> Tensor:
    return torch.zeros_like(value)


class Lens(Tool):
    packages: ClassVar = ("transformer-lens",)
    notes: ClassVar = {"sweep": "`patching.get_act_patch_mlp_out`"}

    def __init__(self, model: Any, subject: Subject) -> None:
        super().__init__(model, subject)
        self.lens: Any = self.made(model)
        self.cache: Any = None

    @abstractmethod
    def made(self, model: Any) -> Any:
        """The model of TransformerLens."""

    @property
    def mlp_out(self) -> str:
        return f"blocks.{self.subject.layer}.hook_mlp_out"

    def changed(self, name: str) -> Tensor:
        return self.lens.run_with_hooks(self.subject.inputs, fwd_hooks=[(name, zeroed)])

    def forward(self) -> Tensor:
        return self.lens(self.subject.inputs)

    def record(self) -> Tensor:
        _, cache = self.lens.run_with_cache(self.subject.inputs, names_filter=self.mlp_out)
        return cache[self.mlp_out]

    def zero(self) -> Tensor:
        return self.changed(self.mlp_out)

    def zero_queries(self) -> Tensor:
        return self.changed(f"blocks.{self.subject.layer}.attn.hook_q")

    def record_everything(self) -> int:
        _, cache = self.lens.run_with_cache(self.subject.inputs)
        return len({id(value) for value in cache.values()})

    def prepare_sweep(self) -> None:
        _, self.cache = self.lens.run_with_cache(
            self.subject.other, names_filter=lambda name: name.endswith("hook_mlp_out")
        )

    def sweep(self) -> Tensor:
        return patching.get_act_patch_mlp_out(self.lens, self.subject.clean, self.cache, difference)
