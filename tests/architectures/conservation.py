"""Whether the scores of the secant sum to the change of the metric, for an architecture in float32."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import attribute
from graphpatch_notebook.experiments.engine.inputs import Inputs
from tests.architectures.families import Architecture
from tests.architectures.findings import Finding, examine
from tests.zoo import Case, seed_all
from tests.zoo.values import flatten

BOUND = 1e-5


def examine_conservation(architecture: Architecture) -> Finding:
    """Builds an architecture, and looks at the conservation of the secant only."""
    return examine(architecture, look_at_conservation)


def look_at_conservation(case: Case, finding: Finding) -> None:
    """Notes the relative error of the sum of all scores, and what the rules name as its cause."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        model, call = case.build().eval(), case.example()
        clean, corrupted = Inputs(call.args, call.kwargs), Inputs(other(call.args), other(call.kwargs))
        seed_all(5)
        try:
            pg = PatchableGraph(model, *call.args, **call.kwargs)
            scores = attribute(pg, metric, clean, corrupted, method="secant")
        except Exception as error:  # of whatever kind: it is the reason
            finding.notes.append(f"conservation: {type(error).__name__} {' '.join(str(error).split())[:200]}")
            return
    finding.conservation = scores.attrs["conservation"].get("total")
    causes = scores.attrs["fallbacks"]
    if finding.conservation is None or not finding.conservation <= BOUND:
        finding.notes += [f"conservation: {name}: {why}" for name, why in causes.items()]


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
    """Returns how many conserve, and a line for each that does not, with the reason."""
    ran = [each for each in findings if each.conservation is not None or _reasons(each)]
    if not ran:
        return []
    good = [each for each in ran if each.conservation is not None and each.conservation <= BOUND]
    lines = [f"conservation: within {BOUND:.0e} in {len(good)} of {len(ran)} architectures"]
    for each in ran:
        if each not in good:
            shown = "failed" if each.conservation is None else f"{each.conservation:.1e}"
            lines.append(f"conservation: {each.name}: {shown}: {'; '.join(_reasons(each)) or 'rounding'}")
    return lines


def _reasons(finding: Finding) -> list[str]:
    return [note.removeprefix("conservation: ") for note in finding.notes if note.startswith("conservation: ")]
