"""pyvene: one `IntervenableModel` for each set of interventions, made once and called often."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import pyvene as pv
import torch
from torch import Tensor

from tests.benchmarks.peer_tools.plain_hooks import mlp_outputs
from tests.benchmarks.peer_tools.subject import Subject, difference, recorded_modules
from tests.benchmarks.peer_tools.tool import Tool


def component(name: str) -> str:
    """The output of a module, as pyvene writes attribute paths: `transformer.h[2].mlp.output`."""
    parts: list[str] = []
    for part in name.split("."):
        if part.isdigit():
            parts[-1] += f"[{part}]"
        else:
            parts.append(part)
    return ".".join([*parts, "output"])


class Interventions(Tool):
    packages: ClassVar = ("pyvene",)
    notes: ClassVar = {
        "construct": "for one intervention: each set of them is a model of its own, made once and called often",
        "sweep": "one model for each layer, with the positions as rows of a batch, each with its own location",
    }

    def __init__(self, model: Any, subject: Subject) -> None:
        super().__init__(model, subject)
        self.made: dict[str, Any] = {}
        self.values: list[Tensor] = []
        self.intervenable("zero", [self.at_mlp(subject.layer, pv.ZeroIntervention)])

    @staticmethod
    def at_mlp(layer: int, kind: type) -> dict[str, Any]:
        return {"layer": layer, "component": "mlp_output", "intervention_type": kind}

    def intervenable(self, what: str, representations: list[dict[str, Any]]) -> Any:
        if what not in self.made:
            self.made[what] = pv.IntervenableModel(representations, model=self.model)
        return self.made[what]

    def base(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"input_ids": tokens}

    def forward(self) -> Tensor:
        found, _ = self.intervenable("nothing", [])(self.base(self.subject.inputs))
        return found.logits

    def record(self) -> Tensor:
        # Components named by their attribute path are collected whole; abstract ones only at locations.
        name = component(f"{self.subject.block}.mlp")
        model = self.intervenable("record", [{"component": name, "intervention_type": pv.CollectIntervention}])
        (_, (found,)), _ = model(self.base(self.subject.inputs))
        return found

    def zero(self) -> Tensor:
        _, found = self.made["zero"](self.base(self.subject.inputs))
        return found.logits

    def zero_queries(self) -> Tensor:
        queries = {**self.at_mlp(self.subject.layer, pv.ZeroIntervention), "component": "query_output"}
        everywhere = {"base": list(range(self.subject.length))}
        model = self.intervenable("queries", [{**queries, "max_number_of_units": self.subject.length}])
        _, found = model(self.base(self.subject.inputs), unit_locations=everywhere)
        return found.logits

    def record_modules(self) -> Mapping[str, Any]:
        names = self.names
        model = self.intervenable(
            "modules",
            [{"component": component(name), "intervention_type": pv.CollectIntervention} for name in names],
        )
        (_, found), _ = model(self.base(self.subject.inputs))
        return dict(zip(names, found, strict=True))

    @cached_property
    def names(self) -> list[str]:
        return recorded_modules(self.model, self.subject.inputs)

    def prepare_sweep(self) -> None:
        self.values = [output[0].unsqueeze(1) for output in mlp_outputs(self.model, self.subject.other)]

    def sweep(self) -> Tensor:
        subject = self.subject
        base = self.base(subject.clean.expand(subject.positions, -1))
        locations = [[[position] for position in range(subject.positions)]]
        rows = []
        for layer in range(subject.layers):
            model = self.intervenable(f"sweep {layer}", [self.at_mlp(layer, pv.VanillaIntervention)])
            _, found = model(
                base,
                unit_locations={"sources->base": (locations, locations)},
                source_representations=self.values[layer],
            )
            rows.append(torch.stack([difference(found.logits[row : row + 1]) for row in range(subject.positions)]))
        return torch.stack(rows)
