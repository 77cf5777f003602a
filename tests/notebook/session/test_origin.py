from __future__ import annotations

from typing import Any

import pytest
import torch

from graphpatch_notebook.capture.inputs import ExampleInputs
from graphpatch_notebook.notebook.session.origin import changed_variables, written_arguments
from tests.notebook.shells import Shell

pytestmark = pytest.mark.hosts

A, B, C = (torch.tensor([float(number)]) for number in range(3))


@pytest.mark.parametrize(
    ("args", "kwargs", "namespace", "written"),
    [
        ((A,), {}, {"a": A, "again": A}, "a"),
        ((A, None, 2, "x"), {"flag": True}, {"a": A}, "a, None, 2, 'x', flag=True"),
        ((A,), {"mask": B}, {"a": A, "m": B}, "a, mask=m"),
        ((), {"ids": A, "mask": B}, {"a": A, "b": B, "inputs": {"ids": A, "mask": B}}, "**inputs"),
        (
            (C,),
            {"ids": A, "mask": B, "n": 1},
            {"c": C, "inputs": {"ids": A, "mask": B}},
            "c, n=1, **inputs",
        ),
        ((), {"ids": A}, {"a": A, "more": {"ids": A, "other": B}}, "ids=a"),
        ((A,), {}, {"b": B}, None),
        ((A,), {}, {"_": A, "_3": A}, None),
        ((A,), {"mask": B}, {"a": A}, None),
        ((), {}, {}, ""),
    ],
)
def test_inputs_are_written_by_the_variables_that_hold_them(
    args: tuple[Any, ...], kwargs: dict[str, Any], namespace: dict[str, Any], written: str | None
) -> None:
    examples = ExampleInputs(args, kwargs)
    assert written_arguments(args, kwargs, namespace) == written
    if written is not None:
        assert eval(f"(lambda *a, **k: (a, k))({written})", dict(namespace)) == (args, kwargs)
        assert changed_variables(written, examples, namespace) == []


def test_variables_that_hold_another_value_are_reported() -> None:
    examples = ExampleInputs((A,), {"mask": B, "n": 3})
    assert changed_variables("a, mask=m, n=n", examples, {"a": C, "m": B, "n": 3}) == ["a"]
    assert changed_variables("a, n=n, **more", examples, {"a": A, "n": 4, "more": {"mask": C}}) == ["n", "more"]
    assert changed_variables("a.clone(), mask=m", examples, {"m": B}) == []


def test_exported_code_runs_without_typed_inputs(shell: Shell) -> None:
    shell.ok("import torch; from graphpatch_notebook import PatchableGraph; x = torch.ones(2, 3)")
    shell.ok("pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(3, 3)), x); browser = pg.browse()")
    shell.ok("%graphpatch zero sub_0.linear[:, 0]")
    code = str(shell.ok("code = %graphpatch export\ncode").value)
    assert "output = pg(x)" in code
    shell.ok(code)
    assert shell.namespace["output"][:, 0].tolist() == [0.0, 0.0]


def test_a_run_says_that_it_is_not_on_what_a_variable_holds_now(shell: Shell) -> None:
    shell.ok("import torch; from graphpatch_notebook import PatchableGraph; x = torch.ones(2, 3)")
    shell.ok("pg = PatchableGraph(torch.nn.Linear(3, 3), x); browser = pg.browse(); x = torch.zeros(2, 3)")
    runs = shell.namespace["browser"]._runs
    number = runs.start(None)
    runs.wait(number)
    status, _ = runs.status(number)
    assert status["report"]["call"] == "pg(...)"
    assert status["report"]["warnings"] == [
        "x has changed since the capture: this run used the example inputs of the capture; to use the current values, "
        "type x in the field Inputs"
    ]
    number = runs.start("x")
    runs.wait(number)
    status, _ = runs.status(number)
    assert (status["report"]["call"], status["report"]["warnings"]) == ("pg(x)", [])
