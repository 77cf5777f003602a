"""What is found out about one architecture: its frames, its graphs, the laws, and why something is missing."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.graphs.verification import VerificationReport
from tests.architectures.building import NotSmall, case_of
from tests.architectures.families import Architecture
from tests.architectures.law_table import LAWS, broken_laws, changes_the_model, interrupts_change_the_model, is_random
from tests.laws.captures import run
from tests.zoo import Case
from tests.zoo.values import copy_call, scalar_loss


@dataclass
class Finding:
    """What came of one architecture.

    Attributes:
        name: The architecture's, and `model` its class.
        compiled: How many frames have a graph, of those that the example reaches; `opaque`, how many have none.
        equal: How many graphs were verified; `differing` and `not_comparable`, how many were refused instead.
        laws: How many laws were tried; `broken`, what breaks which.
        missing: Why there is no result at all, where there is none.
        reasons: Why frames are opaque and graphs were refused, with their number.
        notes: What restricts the laws that were tried.
        components: The components that were found, each with what is wrong with the sums of its layer, or nothing.
        expected: What the model should have of these.
        conservation: By how much the scores of the secant miss the change of the metric, relative to it.
        seconds: How long it took.
    """

    name: str
    family: str
    model: str
    compiled: int = 0
    opaque: int = 0
    equal: int = 0
    differing: int = 0
    not_comparable: int = 0
    laws: int = 0
    broken: dict[str, list[str]] = field(default_factory=dict)
    missing: str | None = None
    reasons: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    components: dict[str, str] = field(default_factory=dict)
    expected: list[str] = field(default_factory=list)
    conservation: float | None = None
    seconds: float = 0.0

    @classmethod
    def of(cls, architecture: Architecture) -> Finding:
        return cls(architecture.name, architecture.family, architecture.model)

    @property
    def frames(self) -> int:
        return self.compiled + self.opaque

    @property
    def held(self) -> int:
        return self.laws - len(self.broken)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def examine(architecture: Architecture, look: Callable[[Case, Finding], None] | None = None) -> Finding:
    """Builds an architecture, and notes what `look` finds: by default its frames and graphs, and whether laws hold."""
    started = time.perf_counter()
    finding = Finding.of(architecture)
    try:
        case = case_of(architecture)
    except NotSmall as error:
        finding.missing = str(error)
    else:
        (look or try_laws)(case, finding)
    finding.seconds = time.perf_counter() - started
    return finding


def try_laws(case: Case, finding: Finding) -> None:
    """Captures a case, verifies its graphs and tries the laws on it."""
    if difference := is_random(case):
        finding.missing = f"does not give the same numbers twice, without the package: {difference}"
        return
    changed = changes_the_model(case)
    if changed:
        finding.notes.append(f"a run changes the model ({changed}): laws on copies only")
    tolerance = 1e-4 if _has_fast_paths(case.build()) else 0.0
    refusal = refuses_backward(case)
    if refusal:
        finding.notes.append(f"cannot be backpropagated, without the package either: {refusal}")
    case = dataclasses.replace(case, mutates_state=changed is not None, tolerance=tolerance, grad=refusal is None)
    _look_at_frames(case, finding)
    kept = interrupts_change_the_model(case)
    if kept:
        finding.notes.append(f"keeps what an interrupted run leaves, without the package too ({kept}): not interrupted")
    laws = [law for law in LAWS if (case.grad or not law.needs_gradients) and not (kept and law.needs_tidiness)]
    finding.broken = broken_laws(case, laws)
    finding.laws = len(laws)


def refuses_backward(case: Case) -> str | None:
    """Returns why a loss of a case cannot be backpropagated, or `None`."""
    loss = scalar_loss(run(case.build(), case.example()))
    try:
        if loss is not None:
            loss.backward()
    except Exception as error:  # of whatever kind
        return f"{type(error).__name__} {' '.join(str(error).split())[:100]}"
    return None


def _has_fast_paths(model: nn.Module) -> bool:
    return any(isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention)) for module in model.modules())


def _look_at_frames(case: Case, finding: Finding) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = case.build()
        # A cache is an object that comes out changed: graphs that are given one are refused, so look at them without.
        call = case.variants(model).get("no_cache") or case.example()
        pg = run(lambda *args, **kwargs: PatchableGraph(model, *args, **kwargs), call)
        report = run(pg.verify, copy_call(call))
    finding.opaque = len(report.of("opaque"))
    finding.compiled = len(report.frames) - finding.opaque
    finding.equal, finding.differing = len(report.of("equal")), len(report.of("differing"))
    finding.not_comparable = len(report.of("not comparable"))
    finding.reasons = _reasons(report)


def _reasons(report: VerificationReport) -> dict[str, int]:
    counts = Counter(
        f"{frame.status}: {frame.module_class}: {frame.reason}"
        for frame in report
        if frame.status in ("opaque", "differing", "not comparable")
    )
    return dict(counts.most_common())
