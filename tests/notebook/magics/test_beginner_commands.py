"""What newcomers type: cells that run twice, loops, pasted paths, words of other tools, mistakes and their repairs."""

from __future__ import annotations

import pytest
from torch import Tensor

from graphpatch_notebook.notebook.session.session import session_of
from tests.notebook.shells import Shell
from tests.zoo.submodules import Submodules, copies

pytestmark = pytest.mark.hosts


class Layer(Submodules, mlp=(4, 4)):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x + self.mlp(x), {"h": x * 2}


class Layers(Submodules, seed=0, layers=copies(Layer, 3)):
    """A stack of layers that return tuples, with a dictionary in them."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        state: dict[str, Tensor] = {}
        for layer in self.layers:
            x, state = layer(x)
        return x, state


@pytest.fixture
def deep(shell: Shell) -> Shell:
    shell.ok("from tests.notebook.magics.test_beginner_commands import Layers\nmodel = Layers()")
    shell.ok("%graphpatch wrap pg = model(x)")
    return shell


def chosen(shell: Shell) -> list[str]:
    return [str(patch) for patch in session_of(shell.namespace["pg"]).chosen.patches]


# --------------------------------------------------------------------------------------------------------------------
# Cells that are run again

CELL = """\
%graphpatch zero hidden[:, 0]
%graphpatch add  up.linear  0.5 * torch.ones(8)  --steps prefill
%graphpatch probe mul product
%graphpatch probe hidden
%graphpatch record hidden --any-shape
"""


def test_a_cell_that_is_run_again_changes_nothing(pg: Shell) -> None:
    pg.ok(CELL)
    session = session_of(pg.namespace["pg"])
    before = session.chosen
    pg.ok("%graphpatch disable #1")
    again = pg.ok(CELL).out.splitlines()
    assert again == [
        "#1 zero hidden[:, 0] is already chosen, but disabled: %graphpatch enable #1",
        "#2 add up.linear 0.5 * torch.ones(8) --steps prefill is already chosen",
        "#3 probe mul as product is already chosen",
        "#4 probe hidden as hidden is already chosen",
        "#5 record hidden as hidden_1 --any-shape is already chosen",
    ]
    assert session.chosen.version == before.version + 1
    pg.ok("%%graphpatch\npg(x);")
    assert "is already chosen" in pg.ok("%graphpatch probe hidden").out  # now that the variable holds something


# --------------------------------------------------------------------------------------------------------------------
# Loops


def test_patches_are_chosen_in_a_loop(deep: Shell) -> None:
    deep.ok("for i in range(3):\n    %graphpatch probe layers_{i}.mlp.output[:, 0] h_{i}  # all {of} them")
    assert chosen(deep) == [f"probe layers_{i}.mlp.output[:, 0] as h_{i}" for i in range(3)]
    deep.ok("%graphpatch clear\nfor path in pg.nodes:\n    if path.endswith('mlp.output'):\n        "
            "%graphpatch add --steps 0 $path {'a': 1}['a']")  # fmt: skip
    assert chosen(deep) == [f"add layers_{i}.mlp.output {{'a': 1}}['a'] --steps 0" for i in range(3)]
    deep.ok("for i in (0, 2):\n    %graphpatch rm #{i + 4}")
    assert chosen(deep) == ["add layers_1.mlp.output {'a': 1}['a'] --steps 0"]
    ran = deep.ok("number = 0\nfor _ in [0]:\n    found = %graphpatch shape layers_{number}.mlp.output\nfound")
    assert ran.value == deep.ok("%graphpatch shape layers_0.mlp.output").value


def test_what_cannot_be_expanded(deep: Shell) -> None:
    deep.ok("index = 1")
    assert deep.refused("%graphpatch zero layers_{indx}.mlp.output").startswith(
        "{indx}: unknown variable 'indx'; nearest: index"
    )
    assert deep.refused("%graphpatch zero layers_{1 // 0}.output").startswith(
        "{1 // 0} cannot be evaluated: ZeroDivisionError"
    )
    assert "unknown variable 'indx'" in deep.refused("%graphpatch probe layers_1.mlp.output h_$indx")
    for pattern in ("layers_*.mlp.output", "**.attn.heads[1].pattern"):
        assert "choose them in a loop" in deep.refused(f"%graphpatch zero {pattern}[:, 0]")
    assert chosen(deep) == []


# --------------------------------------------------------------------------------------------------------------------
# Pasted paths


# --------------------------------------------------------------------------------------------------------------------
# Values and words


# --------------------------------------------------------------------------------------------------------------------
# wrap
