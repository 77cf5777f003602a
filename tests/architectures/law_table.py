"""The laws as they are run on one architecture: the functions of the law tests themselves."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphpatch_notebook import GraphPatchWarning
from tests.graphs import test_zoo_graphs as law_04
from tests.laws import test_law_01_unpatched as law_01
from tests.laws import test_law_02_identity as law_02
from tests.laws import test_law_03_edits as law_03
from tests.laws import test_law_05_untouched as law_05
from tests.laws import test_law_06_gradients as law_06
from tests.laws import test_law_13_memory as law_13
from tests.zoo import Case, seed_all
from tests.zoo.values import bit_equal, same_state, snapshot

CaseTest = Callable[[Case], None]


@dataclass(frozen=True)
class Law:
    """A law, and the tests of it that apply to any model.

    Attributes:
        number: As in the list of laws.
        name: What it says, in few words.
        tests: Functions of a case that raise where it does not hold.
        only_without_state: More of them, which mean nothing where a run changes the model.
        needs_gradients: Whether it says something only of models that can be backpropagated.
        needs_tidiness: Whether it says something only of models that an interrupted run leaves as they were.
    """

    number: int
    name: str
    tests: tuple[CaseTest, ...]
    only_without_state: tuple[CaseTest, ...] = ()
    needs_gradients: bool = False
    needs_tidiness: bool = False

    def broken_by(self, case: Case) -> list[str]:
        """Returns in words how the law is broken by a case; nothing if it holds."""
        tests = self.tests if case.mutates_state else (*self.tests, *self.only_without_state)
        return [text for test in tests if (text := _failure(test, case))]


def _graphs_equal_the_model(case: Case) -> None:
    law_04.test_graphs_equal_the_model_on_all_calls(case)


LAWS = (
    Law(
        1,
        "unpatched is the model",
        (law_01.test_same_bits,),
        (law_01.test_same_code,),
    ),
    Law(
        2,
        "identity changes no bit",
        (law_02.test_on_every_call,),
        (law_02.test_probes_find_what_was_recorded,),
    ),
    Law(
        3,
        "patches equal edits by torch",
        (law_03.test_edits_equal_those_by_torch,),
        (law_03.test_inputs_and_outputs_equal_hooks_on_other_calls, law_03.test_ops_equal_edited_source),
    ),
    Law(4, "graphs equal the model, or are refused", (), (_graphs_equal_the_model,)),
    Law(
        5,
        "the model is left as it was",
        (),
        (law_05.test_after_errors_and_interrupts_at_any_point, law_05.test_after_an_error_of_capture),
        needs_tidiness=True,
    ),
    Law(6, "gradients are those of hooks", (), (law_06.test_gradients_equal_those_of_hooks,), needs_gradients=True),
    Law(13, "no weight is copied", (law_13.test_records_hold_no_tensors_and_parameters_are_shared,)),
)

_MOST_INTERRUPTS = 12
_IGNORED: dict[int, tuple[str, ...]] = {
    2: ("shared gradient",),
    3: ("aliased view", "repeated call"),
    5: ("",),
    6: ("aliased view",),
}


def broken_laws(case: Case, laws: Iterable[Law] = LAWS) -> dict[str, list[str]]:
    """Returns what breaks each law that a case breaks, by the number of the law.

    As in the tests, a warning of the package is an error, unless the law is about such calls.
    """
    broken = {}
    for law in laws:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", GraphPatchWarning)
            for kind in _IGNORED.get(law.number, ()):
                warnings.filterwarnings("ignore", rf"\[{kind}", GraphPatchWarning)
            if found := law.broken_by(case):
                broken[str(law.number)] = found
        _give_back_memory()
    return broken


def _give_back_memory() -> None:
    """What is freed in small pieces, glibc keeps: gigabytes of the autograd graphs of interrupted runs."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _failure(test: CaseTest, case: Case) -> str | None:
    try:
        test(case)
    except MemoryError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:300]
        what = f"{type(error).__name__} {text}, at {Path(where.filename).name}:{where.lineno} {where.line}"
        return f"{test.__name__.strip('_')}: {what}"
    return None


def is_random(case: Case) -> str | None:
    """Returns where two runs of equal models from equal random states differ, on the example; None if nowhere."""
    outputs = []
    for _ in range(2):
        model = case.build()
        seed_all(5)
        outputs.append(case.example().run(model))
    return bit_equal(*outputs)


def changes_the_model(case: Case) -> str | None:
    """Returns what a second run changes in a model, if anything."""
    model = case.build()
    seed_all(5)
    first = case.example().run(model)
    before = snapshot(model)
    seed_all(5)
    second = case.example().run(model)
    return same_state(model, before) or bit_equal(first, second)


def interrupts_change_the_model(case: Case) -> str | None:
    """Returns what a model of its own keeps of a run that ends with an error in one of its modules, if anything."""
    model = case.build()
    seed_all(5)
    case.example().run(model)
    before = snapshot(model)
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    for module in modules[:: 1 + len(modules) // _MOST_INTERRUPTS]:
        with module.register_forward_pre_hook(_interrupt), contextlib.suppress(_Interrupted):
            case.example().run(model)
        if (changed := same_state(model, before)) is not None:
            return changed
    return None


class _Interrupted(BaseException):
    """Stands in for an interrupt from the keyboard."""


def _interrupt(module: nn.Module, args: Any) -> None:
    raise _Interrupted
