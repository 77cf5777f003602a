"""torchlens, by the fast paths of its documentation: bindings change values, a trace that is run again records them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, reduce
from operator import or_
from typing import Any, ClassVar

import torch
import torchlens as tl
from torch import Tensor
from torchlens.options import CaptureOptions

from tests.benchmarks.peer_tools.plain_hooks import mlp_outputs
from tests.benchmarks.peer_tools.subject import Subject, difference, recorded_modules
from tests.benchmarks.peer_tools.tool import Tool

RERUN = "`trace.run(fast=True)`, which refuses a model that returns a cache: without one"


class Runs(Tool):
    packages: ClassVar = ("torchlens",)
    notes: ClassVar = {
        "construct": "the trace of one output and three bindings: each set of outputs is a trace of its own",
        "forward": "the plain model",
        "record": RERUN,
        "record_modules": RERUN,
        "everything": f"{RERUN}; all but the operations of the mask",
        "sweep": "a binding for each cell; its own grid forks and runs a trace for each",
    }

    def __init__(self, model: Any, subject: Subject) -> None:
        super().__init__(model, subject)
        self.mlp = f"{subject.block}.mlp"
        self.of_mlp = self.trace(tl.module(self.mlp))
        self.without = {
            "mlp": self.zeroing(tl.module(self.mlp)),
            "queries": self.zeroing(tl.regex(rf"^split_{3 * subject.layer + 1}_")),  # a split counts three values
            "tanh": self.zeroing(tl.func("tanh") & tl.in_module(f"{self.mlp}.act")),
        }
        self.values: list[Tensor] = []

    def trace(self, save: Any, unwrap: bool = True) -> Any:
        """A trace of other tokens, so that what it kept cannot pass for what a run of it records."""
        return tl.trace(
            self.model, self.subject.tokens(self.subject.length, seed=3), {"use_cache": False}, save=save,
            capture=CaptureOptions(inference_only=True, unwrap_when_done=unwrap),
        )  # fmt: skip

    @cached_property
    def of_everything(self) -> Any:
        """A trace that keeps what modules call. A fast run refuses it if it also keeps what is called for the mask.

        Torch stays wrapped: unlike the outputs of modules, operations are recorded by the wrappers.
        """
        found = self.trace(tl.func("linear"))
        inside = {operation.func_name for operation in found.layer_list if "." in (operation.module or "")}
        return self.trace(reduce(or_, [tl.func(name) for name in sorted({*inside, "linear"})]), unwrap=False)

    def zeroing(self, site: Any) -> Any:
        return tl.when(site, tl.zero_ablate()).bind(self.model)

    def forward(self) -> Tensor:
        return self.model(self.subject.inputs).logits

    def record(self) -> Tensor:
        self.of_mlp.run(inputs=self.subject.inputs, fast=True)
        return self.of_mlp.modules[self.mlp].out

    def zero(self) -> Tensor:
        return self.without["mlp"](self.subject.inputs).logits

    def zero_queries(self) -> Tensor:
        return self.without["queries"](self.subject.inputs).logits

    def zero_tanh(self) -> Tensor:
        return self.without["tanh"](self.subject.inputs).logits

    def record_modules(self) -> Mapping[str, Any]:
        self.of_everything.run(inputs=self.subject.inputs, fast=True)
        return {name: self.of_everything.modules[name].out for name in self.names}

    @cached_property
    def names(self) -> list[str]:
        return recorded_modules(self.model, self.subject.inputs)

    def record_everything(self) -> int:
        self.of_everything.run(inputs=self.subject.inputs, fast=True)
        return len(self.of_everything.saved_ops)

    def prepare_sweep(self) -> None:
        self.values = mlp_outputs(self.model, self.subject.other)

    def sweep(self) -> Tensor:
        found = torch.empty(self.subject.layers, self.subject.positions)
        for layer, value in enumerate(self.values):
            for position in range(self.subject.positions):

                def change(activation: Tensor, *, hook: Any, value: Tensor = value, position: int = position) -> Tensor:
                    activation = activation.clone()
                    activation[:, position] = value[:, position]
                    return activation

                bound = tl.when(tl.module(f"transformer.h.{layer}.mlp"), change).bind(self.model)
                found[layer, position] = difference(bound(self.subject.clean).logits)
        return found
