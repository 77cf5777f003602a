from __future__ import annotations

from typing import Any

import pytest
import torch

from graphpatch_notebook.notebook.session.origin import written_arguments
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
    assert written_arguments(args, kwargs, namespace) == written
    if written is not None:
        assert eval(f"(lambda *a, **k: (a, k))({written})", dict(namespace)) == (args, kwargs)


def test_exported_code_runs_without_typed_inputs(shell: Shell) -> None:
    shell.ok("import torch; from graphpatch_notebook import PatchableGraph; x = torch.ones(2, 3)")
    shell.ok("pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(3, 3)), x); browser = pg.browse()")
    shell.ok("%graphpatch zero sub_0.linear[:, 0]")
    code = str(shell.ok("code = %graphpatch export\ncode").value)
    assert "output = pg(x)" in code
    shell.ok(code)
    assert shell.namespace["output"][:, 0].tolist() == [0.0, 0.0]
