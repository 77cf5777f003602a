"""Sweeps have the numbers of a loop over patch contexts, over the zoo: to the bit, or to 2e-6 where cells are rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.experiments.engine.loops import (
    TOLERANCE,
    Everything,
    disagreement,
    last_logits,
    leaves_of,
    looped,
    swept,
)
from tests.experiments.engine.sweep_cells import cells_of
from tests.laws.captures import Capture, capture_of, each_case, run, some_cases
from tests.zoo import Call, Case, seed_all
from tests.zoo.values import bit_equal, copy_call, same_state, snapshot

pytestmark = [
    pytest.mark.usefixtures("small_modules_in_parts"),
    pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning"),
]

SINGLE = "single"
"""The name of the example's first sequence: a batch of one."""

ONLY_SEVERAL = ("torch-attention", "awkward-called-from-c")
"""The models that take no batch of one."""


def tolerance_of(case: Case) -> float:
    """What rows may differ by: more in models of less precision, and where torch's fast paths come and go."""
    return max(TOLERANCE * (65536 if "bfloat16" in case.name else 1), case.tolerance)


def calls_of(case: Case) -> list[str]:
    """Returns the names of the calls of a case besides the example."""
    call = case.example()
    tensors = [*call.args, *call.kwargs.values()]
    has_batch = all(isinstance(tensor, Tensor) for tensor in tensors) and len({len(tensor) for tensor in tensors}) == 1
    names = list(case.calls(capture_of(case).reference))[1:]
    return [*names, SINGLE] if has_batch and case.name not in ONLY_SEVERAL else names


def call_maker(case: Case, name: str) -> Callable[[], Call]:
    """Returns what makes the call of that name, anew each time."""
    if name == "example":
        return case.example
    if name == SINGLE:
        call = case.example()
        return lambda: Call(
            tuple(tensor[:1].clone() for tensor in call.args), {key: t[:1].clone() for key, t in call.kwargs.items()}
        )
    if case.name.startswith(("torch-", "awkward-")):
        return lambda: capture_of(case).call(name)
    prototype = capture_of(case).call(name)  # that of a language model may need a run
    return lambda: copy_call(prototype)


@dataclass(frozen=True)
class Sweeps:
    """Sweeps of one call of a case, to be compared with the loop."""

    case: Case
    call_name: str
    make_call: Callable[[], Call]
    nodes: int = 1

    @classmethod
    def of(cls, case: Case, call_name: str = "example", nodes: int = 1) -> Sweeps:
        return cls(case, call_name, call_maker(case, call_name), nodes)

    def maps(self, capture: Capture) -> list[dict[str, Any]]:
        return cells_of(capture, self.call_name, same_sizes=self.call_name == "example", nodes=self.nodes)

    def output(self) -> Any:
        seed_all(7)
        capture = capture_of(self.case)
        with torch.no_grad():
            run(capture.reference, self.make_call())  # both stay equal: for some calls transformers hangs up hooks
            seed_all(7)
            return self.make_call().run(capture.pg)

    def check(self, *batches: Any) -> None:
        """Compares the sweeps with a loop."""
        output = self.output()
        sizes = [len(leaf) for leaf in leaves_of(output)]
        self.check_metric(Everything(sum(sizes)), sizes, batches)
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.dim() == 3:
            self.check_metric(last_logits, [], batches[-1:])

    def check_metric(self, metric: Callable[[Any], Any], sizes: list[int], batches: tuple[Any, ...]) -> None:
        capture = capture_of(self.case)
        before = snapshot(capture.model)
        seed_all(7)
        unpatched = capture_of(self.case).pg
        expected = looped(capture.pg, self.maps(capture), self.make_call, metric, unpatched=unpatched)
        is_left_alone = same_state(capture.model, before) is None
        for batch in batches:
            capture = capture_of(self.case)
            call = self.make_call()
            before = snapshot(capture.model)
            seed_all(7)
            found = swept(capture.pg, self.maps(capture), call, metric, batch=batch)
            tolerance = self.case.tolerance if batch is None else tolerance_of(self.case)
            assert disagreement(expected, found, tolerance, sizes) is None, f"{batch=}, {metric}, {found.remarks}"
            assert bit_equal(self.make_call(), call) is None
            if is_left_alone:
                assert same_state(capture.model, before) is None


@some_cases()
def test_sweeps_equal_loops(case: Case) -> None:
    Sweeps.of(case).check(None, "auto")


@some_cases(every=4)
def test_sweeps_of_other_calls_equal_loops(case: Case) -> None:
    """One of the calls of each model: all of them take minutes."""
    Sweeps.of(case, capture_of(case).random("call").choice(calls_of(case))).check(3)


@pytest.mark.exhaustive
@each_case()
def test_sweeps_of_all_calls_equal_loops(case: Case) -> None:
    for name in ["example", *calls_of(case)]:
        Sweeps.of(case, name, nodes=2).check(None, "auto")
