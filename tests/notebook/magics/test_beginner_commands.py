"""What newcomers type: cells that run twice, loops, pasted paths, words of other tools, mistakes and their repairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook.notebook.session.session import session_of
from tests.notebook.shells import Shell

pytestmark = pytest.mark.hosts


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x + self.mlp(x), {"h": x * 2}


class Layers(nn.Module):
    """A stack of layers that return tuples, with a dictionary in them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

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


@pytest.mark.parametrize(
    "line",
    [
        "zero hidden[:,0 ]  # another spelling",
        'zero "hidden"[:, 0]',
        "zero --steps 0 hidden[:, 0]",
        "zero hidden[:, 1]",
        "zero hidden",
        "add hidden[:, 0] 1",
        "probe hidden[:, 0]",
    ],
)
def test_only_the_same_patch_is_the_same(pg: Shell, line: str) -> None:
    pg.ok("%graphpatch zero hidden[:, 0]")
    is_same = line.startswith(("zero hidden[:,0 ]", 'zero "hidden"'))
    assert ("is already chosen" in pg.ok(f"%graphpatch {line}").out) is is_same
    assert len(chosen(pg)) == 2 - is_same


def test_a_probe_of_another_name_or_place_is_another(pg: Shell) -> None:
    pg.ok("%graphpatch probe hidden first")
    pg.ok("%graphpatch probe hidden second")
    assert chosen(pg) == ["probe hidden as first", "probe hidden as second"]
    assert pg.refused("%graphpatch probe mul first").startswith("#1 puts 'hidden' in 'first'")
    assert pg.ok("%graphpatch probe hidden second").out == "#2 probe hidden as second is already chosen\n"


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
    ran = deep.ok("number = 0\nfor _ in [0]:\n    found = %graphpatch ls layers_{number}\nfound.title")
    assert ran.value.startswith("layers_0: ")


def test_the_variables_of_a_function_are_seen_too(deep: Shell) -> None:
    deep.ok("def choose(number, of='mlp'):\n    %graphpatch zero layers_{number}.{of}.output\nchoose(1)")
    assert chosen(deep) == ["zero layers_1.mlp.output"]


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


@pytest.mark.parametrize("quote", ['"', "'"])
def test_paths_in_quotes_as_code_has_them(deep: Shell, quote: str) -> None:
    path = f"{quote}layers_1.output|sub_0{quote}"
    deep.ok(f"%graphpatch zero {path}[:, 0]")
    assert chosen(deep) == ["zero layers_1.output|sub_0[:, 0]"]
    assert deep.ok(f"%graphpatch shape {path}[0]").value == (4,)
    assert tuple(deep.ok(f"%graphpatch shape {path}").value) == (3, 4)
    assert deep.ok(f"%graphpatch ls {quote}layers_1{quote}").value.title.startswith("layers_1: ")
    deep.ok(f"%graphpatch rm {path}")
    assert chosen(deep) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("zero layers[1].mlp.output[:, 0]", "did you mean 'layers_1.mlp.output'?"),
        ("show layers[1].mlp", "did you mean 'layers_1.mlp.output'?"),
        ("zero layers[7].mlp.output", "'layers[7].mlp.output': 7 is out of range: there are"),
        ("zero blocks[1].mlp.output", "for a module in a list write blocks_1.mlp.output"),
        ("zero output[:, 0]", "say which value: 'output|sub_0'"),
        ("zero layers_1.mlp.outptu[:, 0]", "nearest: 'layers_1.mlp.output'"),
        ("zero layers_1.mlp.output --steps decodng", "steps are also named prefill and decoding"),
    ],
)  # fmt: skip
def test_the_repair_can_be_typed(deep: Shell, line: str, message: str) -> None:
    assert message in deep.refused(f"%graphpatch {line}")


# --------------------------------------------------------------------------------------------------------------------
# Values and words


@pytest.mark.parametrize("value", ['"hello"', "None", "[1, 2, 3]", "{'a': 1}"])
@pytest.mark.parametrize("kind", ["add", "replace"])
def test_values_that_are_not_numbers_are_refused_when_chosen(pg: Shell, kind: str, value: str) -> None:
    message = pg.refused(f"%graphpatch {kind} hidden {value}")
    assert message.startswith(f"{kind} takes a number or a tensor, not {value}")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("delete", "%graphpatch rm "),
        ("remove", "%graphpatch rm "),
        ("set", "%graphpatch replace "),
        ("tree", "%graphpatch show "),
        ("browse", "%graphpatch show "),
        ("run", "%%graphpatch, "),
        ("off", "%graphpatch disable "),
        ("on", "%graphpatch enable "),
    ],
)
def test_words_of_other_tools(pg: Shell, word: str, meant: str) -> None:
    assert pg.refused(f"%graphpatch {word} #1").startswith(f"unknown command {word!r}; use {meant}")


# --------------------------------------------------------------------------------------------------------------------
# wrap
