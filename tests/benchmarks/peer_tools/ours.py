"""This package, as its documentation says: a graph made once, a patch context entered for each call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
import xarray
from torch import Tensor

import graphpatch_notebook.experiments  # noqa: F401 - as the others, imported before anything is timed
from graphpatch_notebook import PatchableGraph, ProbePatch, ReplacePatch, ZeroPatch
from tests.benchmarks.peer_tools.subject import Subject, difference, recorded_modules
from tests.benchmarks.peer_tools.tool import Tool


class Ours(Tool):
    packages: ClassVar = ("graphpatch-notebook",)

    def __init__(self, model: Any, subject: Subject) -> None:
        super().__init__(model, subject)
        self.pg = PatchableGraph(model, subject.inputs)
        self.path = f"transformer.h_{subject.layer}"
        self.swept = [f"transformer.h_{layer}.mlp.output" for layer in range(subject.layers)]
        self.values: dict[str, Tensor] = {}

    def patched(self, patches: Any) -> Any:
        with self.pg.patch(patches):
            return self.pg(self.subject.inputs)

    def forward(self) -> Tensor:
        return self.pg(self.subject.inputs).logits

    def record(self) -> Tensor:
        probe = ProbePatch()
        self.patched({f"{self.path}.mlp.output": probe})
        return probe.activation

    def zero(self) -> Tensor:
        return self.patched({f"{self.path}.mlp.output": ZeroPatch()}).logits

    def zero_queries(self) -> Tensor:
        return self.patched({f"{self.path}.attn.query_states": ZeroPatch()}).logits

    def zero_tanh(self) -> Tensor:
        return self.patched({f"{self.path}.mlp.act.tanh": ZeroPatch()}).logits

    def record_modules(self) -> Mapping[str, Any]:
        probes = {name: ProbePatch() for name in self.of_modules}
        self.patched({self.of_modules[name]: probe for name, probe in probes.items()})
        return {name: probe.activation for name, probe in probes.items()}

    @cached_property
    def of_modules(self) -> dict[str, str]:
        """The node paths of what modules return, by attribute path."""
        found = {}
        for name in recorded_modules(self.model, self.subject.inputs):
            output = f"{name.replace('.h.', '.h_')}.output"
            found[name] = f"{output}|sub_0" if f"{output}|sub_0" in self.pg.nodes else output
        return found

    def record_everything(self) -> int:
        probes = {path: ProbePatch() for path in self.of_tensors}
        self.patched(probes)
        return len(probes)

    @cached_property
    def of_tensors(self) -> list[str]:
        return [path for path, node in self.pg.nodes.items() if node.shape is not None]

    def prepare_sweep(self) -> None:
        probes = {path: ProbePatch() for path in self.swept}
        with self.pg.patch(probes):
            self.pg(self.subject.other)
        self.values = {path: probe.activation for path, probe in probes.items()}
        xarray.DataArray(torch.zeros(1).numpy(), {"path": ["text"]}, ["path"])  # imports what others have imported

    def sweep(self) -> Tensor:
        def patches(path: str, position: int) -> dict[str, ReplacePatch]:
            at = (slice(None), position)
            return {path: ReplacePatch(value=self.values[path][at], slice=at)}

        axes = {"path": self.swept, "position": range(self.subject.positions)}
        found = self.pg.sweep(
            axes, patches, self.subject.clean, metric=lambda output: difference(output.logits), progress=False
        )
        return torch.from_numpy(found.values)
