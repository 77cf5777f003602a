"""What a notebook shows of an error of ours: the user's line, and the message, without the pages between them."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import pytest

from graphpatch_notebook.errors import PatchValueError
from tests.notebook.shells import Shell, opened

pytestmark = pytest.mark.hosts

SETUP = """
import torch
from torch import nn
from graphpatch_notebook import *

class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = Deep(depth - 1) if depth else nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)

def broken(t):
    return t @ torch.ones(9)

pg = PatchableGraph(Deep(2), torch.ones(2, 4))
path = ".".join(["inner"] * 3) + ".linear"
"""


@pytest.fixture
def shell() -> Iterator[Shell]:
    with opened() as shell:
        shell.ok(SETUP)
        yield shell


@pytest.mark.parametrize("path", ["path", "path.replace('linear', 'output')"])
def test_errors_of_patches_are_short(shell: Shell, path: str) -> None:
    names = sorted(shell.namespace)
    ran = shell.run(f"with pg.patch({{{path}: AddPatch(value=torch.ones(5))}}):\n    pg(torch.ones(2, 4))")
    assert isinstance(ran.error, PatchValueError)
    shown = ran.out + ran.err
    assert "pg(torch.ones(2, 4))" in shown
    assert "of shape (5,)" in shown
    assert "_call_impl" not in shown
    assert len(shown.splitlines()) < 25
    whole = [entry.name for entry in traceback.extract_tb(ran.error.__traceback__)]
    assert whole.count("_call_impl") >= 4  # of the graph itself, and of the modules around
    assert [name for name in sorted(shell.namespace) if name not in names and not name.startswith("_")] == []


def test_errors_of_the_users_code_show_it(shell: Shell) -> None:
    ran = shell.run("with pg.patch({path: CustomPatch(broken)}):\n    pg(torch.ones(2, 4))")
    shown = ran.out + ran.err
    assert "return t @ torch.ones(9)" in shown
    assert "return self.inner(x)" in shown
