"""Whether the scores of the secant sum to the change of the metric, for an architecture in float32."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import attribute
from graphpatch_notebook.experiments.attribution.gradient_runs import Routing
from graphpatch_notebook.experiments.engine.inputs import Inputs
from tests.architectures.families import Architecture
from tests.architectures.findings import Finding, examine, refuses_backward
from tests.zoo import Case, seed_all
from tests.zoo.values import flatten

BOUND = 1e-5


def examine_conservation(architecture: Architecture) -> Finding:
    """Builds an architecture, and looks at the conservation of the secant only."""
    return examine(architecture, look_at_conservation)


def look_at_conservation(case: Case, finding: Finding) -> None:
    """Notes the relative error of the sum of all scores, and the reason if it exceeds the bound.

    Without a reason by name, it looks whether the sum is exact if experts are chosen as in the clean run, and in double
    precision: sums over many entries round, most where they cancel.
    """
    refusal = refuses_backward(case)
    if refusal:
        finding.notes.append(f"conservation: cannot be backpropagated, without the package either: {refusal}")
        return
    found = scored(case, "free", torch.float32)
    finding.conservation, causes = found.error, found.causes
    if found.is_within(BOUND):
        return
    routing: Routing = "free"
    if found.is_routed:
        routing, found = "frozen", scored(case, "frozen", torch.float32)
        causes = found.causes
    if found.is_within(BOUND):
        finding.notes.append(f"conservation: routing: {found.error:.0e} if it is frozen")
        return
    exact = scored(case, routing, torch.float64)
    if exact.is_within(BOUND):
        shown = "routing, and rounding" if routing == "frozen" else "rounding"
        finding.notes.append(f"conservation: {shown}: {exact.error:.0e} in double precision")
        return
    if exact.change <= BOUND:
        finding.notes.append(f"conservation: rounding: the metric changes by {exact.change:.0e} of itself only")
        return
    in_double = "; ".join(exact.causes) if exact.error is None else f"{exact.error:.0e} in double precision"
    left = "" if routing == "free" or found.error is None else f" ({found.error:.0e} if the routing is frozen)"
    finding.notes += [f"conservation: {cause}{left}" for cause in causes or [f"not known: {in_double}"]]


@dataclass(frozen=True)
class Scored:
    """The relative error of the sum of all scores, what the rules name as its causes, and the metric's change."""

    error: float | None
    causes: list[str]
    change: float = 1.0

    def is_within(self, bound: float) -> bool:
        return self.error is not None and self.error <= bound

    @property
    def is_routed(self) -> bool:
        """Whether the two runs chose differently."""
        return any("decides otherwise" in cause or "operations of the two runs" in cause for cause in self.causes)


def scored(case: Case, routing: Routing, dtype: torch.dtype) -> Scored:
    """Returns the conservation of the secant between two inputs of a case."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        model, call = case.build().eval().to(dtype), case.example()
        given, changed = (in_dtype(each, dtype) for each in ((call.args, call.kwargs), (call.args, call.kwargs)))
        clean, corrupted = Inputs(*given), Inputs(*map(other, changed))
        seed_all(5)
        try:
            pg = PatchableGraph(model, *clean.args, **clean.kwargs)
            scores = attribute(pg, metric, clean, corrupted, method="secant", routing=routing)
        except Exception as error:  # of whatever kind: it is the reason
            return Scored(None, [f"{type(error).__name__} {' '.join(str(error).split())[:200]}"])
    causes = [f"{name}: {why}" for name, why in scores.attrs["fallbacks"].items()]
    change = abs(scores.attrs["clean"] - scores.attrs["corrupted"]) / (abs(scores.attrs["clean"]) or 1.0)
    return Scored(scores.attrs["conservation"].get("total"), causes, change)


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Returns inputs with their floating-point tensors in another dtype."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(in_dtype(item, dtype) for item in value)
    return {key: in_dtype(item, dtype) for key, item in value.items()} if type(value) is dict else value


def metric(output: Any) -> Tensor:
    """A sum of all entries of an output, each with a weight of its own."""
    tensors = [tensor for _, tensor in flatten(output) if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    terms = [tensor.double().flatten().nan_to_num() for tensor in tensors if tensor.layout is torch.strided]
    return torch.stack([term @ torch.arange(len(term)).double().cos() for term in terms]).sum()


def other(value: Any) -> Any:
    """Inputs of the same form: another order of the tokens, and other numbers."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            return value + 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(9)).to(value)
        return value.flip(-1) if value.dtype == torch.int64 and value.dim() > 1 and value.max() > 2 else value
    if type(value) in (tuple, list):
        return type(value)(map(other, value))
    return {key: other(item) for key, item in value.items()} if type(value) is dict else value


def conservation_totals(findings: Sequence[Finding]) -> list[str]:
    """Returns how many conserve, for how many there is which kind of reason, and the reason of each."""
    ran = [each for each in findings if each.conservation is not None or _reasons(each)]
    if not ran:
        return []
    good = [each for each in ran if each.conservation is not None and each.conservation <= BOUND]
    lines = [f"conservation: within {BOUND:.0e} in {len(good)} of {len(ran)} architectures"]
    rest = [each for each in ran if each not in good]
    kinds = Counter(reason.split(":")[0] for each in rest for reason in _reasons(each)[:1])
    lines += [f"conservation: {count} {kind}" for kind, count in kinds.most_common()]
    for each in rest:
        shown = "failed" if each.conservation is None else f"{each.conservation:.1e}"
        lines.append(f"conservation: {each.name}: {shown}: {'; '.join(_reasons(each)) or 'not known'}")
    return lines


def _reasons(finding: Finding) -> list[str]:
    return [note.removeprefix("conservation: ") for note in finding.notes if note.startswith("conservation: ")]
