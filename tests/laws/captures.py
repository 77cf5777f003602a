"""What the law tests share: each model of the zoo, captured, next to an equal model that nobody captured."""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from graphpatch_notebook import CustomPatch, GraphPatchWarning, PatchableGraph
from graphpatch_notebook.capture.modules import reachable_modules
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.patchable_graph import captured
from tests.zoo import CASES, Call, Case, is_of_a_kind_of_its_own, seed_all
from tests.zoo.values import bit_equal, close


def outside_fused_calls(pg: PatchableGraph) -> list[str]:
    """Returns the paths of all values but those inside fused calls, since a patch there changes rounding."""
    return [path for path, meta in pg.nodes.items() if meta.opens is None]


@dataclass(frozen=True)
class Capture:
    """A captured model of the zoo.

    Attributes:
        case: What it is.
        model: The model that `pg` was made of.
        reference: An equal model that ran as often, and that the package never saw.
        pg: The `PatchableGraph`.
    """

    case: Case
    model: nn.Module
    reference: nn.Module
    pg: PatchableGraph

    @classmethod
    def of(cls, case: Case) -> Capture:
        model, reference = case.build(), case.build()
        # Under a checkpoint, layers of transformers run other lines than without gradients, as most tests run them.
        with nullcontext() if case.name.startswith("awkward-") else without_recomputing(case):
            pg = run(functools.partial(PatchableGraph, model), case.example())
        run(reference, case.example())
        return cls(case, model, reference, pg)

    @functools.cached_property
    def paths(self) -> list[str]:
        return outside_fused_calls(self.pg)

    def calls(self) -> dict[str, Call]:
        """The example and the variants: new tensors and caches each time."""
        return self.case.calls(self.reference)

    def call(self, name: str) -> Call:
        return self.case.example() if name == "example" else self.calls()[name]

    def difference(self, expected: Any, found: Any) -> str | None:
        """Returns in words where two outputs differ: in any bit, but for the models of torch's fast paths."""
        return close(expected, found, self.case.tolerance) if self.case.tolerance else bit_equal(expected, found)

    @functools.cached_property
    def _counterparts(self) -> dict[nn.Module, nn.Module]:
        return {}

    def counterpart(self, module: nn.Module) -> nn.Module:
        """Returns the module of the reference that stands where `module` does in the model."""
        if module not in self._counterparts:
            theirs = zip(reachable_modules(self.model), reachable_modules(self.reference), strict=True)
            self._counterparts.update(theirs)
        return self._counterparts[module]

    def frames_called_once(self) -> Iterator[Frame]:
        """Yields the frames whose modules have no other frame: whatever is done to these modules is done there."""
        frames = list(captured(self.pg).root.walk())
        modules = [id(frame.module) for frame in frames]
        return (frame for frame in frames if modules.count(id(frame.module)) == 1)

    def random(self, purpose: str) -> random.Random:
        """A source of choices that are the same in each test run."""
        return random.Random(zlib.crc32(f"{self.case.name} {purpose}".encode()))


_captures: dict[str, Capture] = {}


def capture_of(case: Case) -> Capture:
    """Returns the capture of a case: the same one each time, unless runs of that model change it."""
    if case.mutates_state:
        return Capture.of(case)
    if case.name not in _captures:
        _captures[case.name] = Capture.of(case)
    return _captures[case.name]


def each_call(case: Case) -> Iterator[tuple[str, Capture, Call, Call]]:
    """Yields the name of each call of a case, the capture to run it on, and its arguments twice over."""
    capture = capture_of(case)
    for (name, call), same in zip(capture.calls().items(), capture.calls().values(), strict=True):
        yield name, capture, call, same
        if case.mutates_state:
            capture = capture_of(case)


def run(module: Callable[..., Any], call: Call) -> Any:
    """Calls a module with the random state that all compared runs start from."""
    seed_all(5)
    return call.run(module)


def outcome(module: Callable[..., Any], call: Call) -> Any:
    """As `run`, but an edit may well break a model: then `"raises"` comes back, whatever the exception is."""
    try:
        return run(module, call)
    except GraphPatchWarning:
        raise
    except Exception as error:  # of whatever kind the edited model raises
        raise_if_out_of_memory(error)
        return "raises"


def raise_if_out_of_memory(error: Exception) -> None:
    """Sees to it that what the machine lacks is not taken for what an edited model does."""
    if "can't allocate memory" in str(error):
        raise MemoryError(str(error)) from error


def each_case(applies: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    """Parametrizes a test by the cases that it applies to."""
    cases = [case for case in CASES if applies(case)]
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def some_cases(applies: Callable[[Case], bool] = lambda case: True, *, every: int = 1) -> pytest.MarkDecorator:
    """Parametrizes a test by the cases that it applies to; those that others stand for are `exhaustive`.

    Args:
        applies: As of `each_case`.
        every: Of the models of all kinds, how many one of them stands for.
    """
    cases = [case for case in CASES if applies(case)]
    chosen = [case for case in cases if is_of_a_kind_of_its_own(case)][::every]
    return pytest.mark.parametrize(
        "case",
        [pytest.param(case, marks=[] if case in chosen else [pytest.mark.exhaustive]) for case in cases],
        ids=[case.name for case in cases],
    )


def leaves_its_state_alone(case: Case) -> bool:
    """A run does not change the model: the state before can be compared with the state after."""
    return not case.mutates_state


def runs_the_same_code_again(case: Case) -> bool:
    """A second run on the same inputs comes to every operation of the first.

    Tables cached by shape are made in the first run only.
    """
    return case.name != "awkward-cached-by-shape"


def without_recomputing(case: Case) -> AbstractContextManager[Any]:
    """Without gradients nothing is recomputed in backward, where functions under a checkpoint cannot be patched."""
    return torch.no_grad() if "checkpoint" in case.name else nullcontext()


def identity(any_shape: bool = False) -> CustomPatch:
    """A patch that changes nothing."""
    return CustomPatch(custom_op=lambda value: value, requires_clone=False, any_shape=any_shape)
