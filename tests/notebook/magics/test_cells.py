"""`%%graphpatch` cells: what a user expects of a cell, with the patches active for exactly its length."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from IPython.core.error import UsageError
from torch import Tensor

from graphpatch_notebook import GraphPatchWarning, PatchValueError
from tests.notebook.shells import Mlp, Shell

pytestmark = pytest.mark.hosts


def zeroed(x: Tensor) -> Tensor:
    """Returns what the model gives with `hidden[:, :4]` set to zero, by plain torch."""
    model = Mlp()
    hidden = torch.relu(model.up(x))
    hidden = torch.cat([torch.zeros_like(hidden[:, :4]), hidden[:, 4:]], 1)
    return model.down(hidden * 2)


# What is said of a cell that does not call its graph.
UNCALLED = re.compile(r"(?m)^no patch was applied, because this cell did not call pg under the patches \(.*\)\n")


NOT_FILLED = "no call in this cell filled {} for {}: the variable holds {}\n"


@pytest.fixture
def zero(pg: Shell) -> Iterator[Shell]:
    """A shell with one chosen patch; the model is unpatched, and bit-identical, after each test."""
    pg.ok("%graphpatch zero hidden[:, 0:4]")
    model = pg.namespace["model"]
    before, weights = _everything(model), copy.deepcopy(model.state_dict())
    yield pg
    assert _everything(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(pg.namespace["pg"](torch.ones(3, 4)), Mlp()(torch.ones(3, 4)))


def _everything(model: torch.nn.Module) -> list[dict[str, Any]]:
    return [{name: repr(value) for name, value in vars(module).items()} for module in model.modules()]


@pytest.fixture
def expected() -> Tensor:
    return zeroed(torch.ones(3, 4))


# --------------------------------------------------------------------------------------------------------------------
# Values


CELLS = [
    "import math as m\nfrom os.path import *\n(m.pi, basename('a/b'))",
    "x_1: int = 3\ny_1: 'str'\n__annotations__",
    "def deco(f): return f\n@deco\ndef g(a, *, b=2): return a + b\ng(1)",
    "class A:\n    1\n    b = [i for i in range(3)]\n    def f(self): return __class__\nA().f() is A",
    "[w := 1, w]\n{w: w for w in range(3)}\nw",
    "n = 0\ndef inc():\n    global n\n    n += 1\ninc()\nn",
    "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    caught = str(e)\nfinally:\n    done = True\ncaught",
    "match [1, 2]:\n    case [a, *rest]:\n        rest",
    "d = 1\ndel d\n'd' in globals()",
    "with open(__import__('os').devnull) as f:\n    f.name\n",
    "for i in range(3):\n    if i == 1: break\nelse:\n    no\ni",
    "async def f():\n    return 5\nr = [await f() for _ in range(2)]\nr",
    "async def g():\n    yield 1\n    yield 2\nasync for v in g():\n    print(v)\nawait g().__anext__()",
    "lines = !echo one two\nlines",
    "%precision 3\n%precision",
    "get = %env HOME\nisinstance(get, str)",
    "from __future__ import annotations\nfrom __future__ import division\n1 / 2",
    's = """\n  a\n%%time\n"""\ns',
    "a = 1; b = 2; a + b",
    "a = 1; b = 2; a + b;",
    "'doc'",
    "print('x', end='')\n3",
    "return 1",
    "nonlocal a",
    "yield 1",
    "def f(:",
    "  a = 1\n  a",
    "raise ValueError('mine') from KeyError(1)",
    "(lambda: 1 / 0)()",
    "_ = 5\n_",
    "len?",
    "help",
    "sys = 3\nsys",
    "sum([1,\n     2,\n     None])",
]


MARKER_LINE = r"(?m)^\s*1 get_ipython\(\)\.run_line_magic\('graphpatch', '%%graphpatch'\)\n"


def shown(ran: Any, first: int) -> str:
    """Returns what a cell printed, with numbers of lines as if the cell began at line 1."""
    text = re.sub(r"\bno patch is chosen: [^\n]*\n", "", ran.out)
    text = re.sub(r"Out\[\d+\]|input-\d+-\w+|at 0x\w+", "*", text)
    if ran.error is None:
        return text
    text = re.sub(MARKER_LINE, "", text)
    text = re.sub(r"(?m)^(-*>?\s*)(\d+)(?= |$)", lambda m: f"{'>' * ('>' in m[1])}{int(m[2]) - first}", text)
    return re.sub(r"(?<=>:)\d+|(?<=line )\d+", lambda m: str(int(m[0]) - first), text)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.filterwarnings("ignore:.*never awaited")
def test_any_cell_runs_as_it_does_without(pg: Shell, cell: str) -> None:
    def others() -> dict[str, str]:
        known = r"_i*|_+|_i?\d+|In|Out|_ih|_oh|__builtins__|__annotations__"
        return {name: repr(value) for name, value in pg.namespace.items() if not re.fullmatch(known, name)}

    start = dict(pg.namespace)
    plain = pg.run(cell)
    names = others()
    for name in set(pg.namespace) - set(start):
        if not name.startswith("_"):
            del pg.namespace[name]
    patched = pg.run(f"%%graphpatch\n{cell}")
    assert shown(patched, 1) == shown(plain, 0)
    assert type(patched.error) is type(plain.error)
    assert repr(patched.value) == repr(plain.value)
    assert {n: re.sub("0x\\w+", "", v) for n, v in others().items()} == {
        n: re.sub("0x\\w+", "", v) for n, v in names.items()
    }


# --------------------------------------------------------------------------------------------------------------------
# Errors


def test_traceback_is_that_of_the_users_lines(zero: Shell) -> None:
    ran = zero.run("%%graphpatch\na = pg(x)\n\n1 / 0\nb = 1")
    assert type(ran.error) is ZeroDivisionError
    assert "----> 4 1 / 0" in ran.out
    assert ran.out.count("File <ipython-input") == 1
    assert "graphpatch_notebook" not in ran.out
    assert "hidden" not in ran.out
    assert "a" in zero.namespace
    assert "b" not in zero.namespace


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit", "GeneratorExit", "ValueError"])
@pytest.mark.filterwarnings("ignore:To exit")
def test_patches_are_gone_after(zero: Shell, error: str) -> None:
    ran = zero.run(f"%%graphpatch\na = pg(x)\nraise {error}")
    assert type(ran.error).__name__ == error


def test_interrupt_inside_the_model(zero: Shell) -> None:
    zero.ok("%graphpatch probe up.output early")
    zero.ok("%graphpatch custom down.output interrupt")
    zero.ok("def interrupt(value):\n    raise KeyboardInterrupt")
    assert type(zero.run("%%graphpatch\npg(x)").error) is KeyboardInterrupt
    # What had come up before helps to see why.
    assert torch.equal(zero.namespace["early"], zero.namespace["model"].up(torch.ones(3, 4)))


def test_bad_values_stop_the_cell_before_it_begins(zero: Shell) -> None:
    zero.ok("%graphpatch add mul undefined_name * 2")
    zero.ok("%graphpatch replace up.output 1 / 0")
    message = zero.refused("%%graphpatch\nran = 1")
    assert message == (
        "#2 (add mul undefined_name * 2): NameError: name 'undefined_name' is not defined; "
        "#3 (replace up.output 1 / 0): ZeroDivisionError: division by zero"
    )
    assert "ran" not in zero.namespace


def test_without_chosen_patches_the_cell_runs_and_says_so(zero: Shell) -> None:
    zero.ok("%graphpatch disable #1")
    ran = zero.ok("%%graphpatch\nequal = torch.equal(pg(x), model(x))")
    assert ran.out == "all of these patches are disabled: the cell runs without patches on pg\n"
    assert zero.namespace["equal"]
    zero.ok("%graphpatch clear")
    assert zero.ok("%%graphpatch\na = 1").out == "no patch is chosen: the cell runs without patches on pg\n"


def test_a_patch_that_never_fires_warns_at_the_users_line(zero: Shell) -> None:
    zero.ok("%graphpatch zero up.weight --steps 7")
    with pytest.warns(GraphPatchWarning, match="up.weight") as warned:
        zero.ok("%%graphpatch\na = pg(x)")
    assert [w.filename.startswith("<ipython-input") for w in warned] == [True]


# --------------------------------------------------------------------------------------------------------------------
# Which patches


def test_a_graph_with_the_name_of_a_command(zero: Shell) -> None:
    zero.ok("zero = pg")
    zero.ok("%%graphpatch zero\nout = zero(x)")
    assert torch.equal(zero.namespace["out"], zeroed(torch.ones(3, 4)))


def test_only_some(zero: Shell) -> None:
    zero.ok("%graphpatch zero down.bias")
    zero.ok("%graphpatch zero up.bias")
    run = "%%graphpatch pg --only {}\nout = pg(x)"

    def bias(name: str) -> Tensor:
        model = Mlp()
        model.get_parameter(name).data.zero_()
        return model(torch.ones(3, 4))

    for spec in ("#2", "down.bias", "down.*", "2"):
        zero.ok(run.format(spec))
        assert torch.equal(zero.namespace["out"], bias("down.bias"))
    zero.ok(run.format("*.bias  # both"))
    both = Mlp()
    both.up.bias.data.zero_()
    both.down.bias.data.zero_()
    assert torch.equal(zero.namespace["out"], both(torch.ones(3, 4)))


# --------------------------------------------------------------------------------------------------------------------
# Probes


def test_probes_land_in_their_variables_within_the_cell(zero: Shell) -> None:
    zero.ok("%graphpatch probe hidden h")
    zero.ok("%graphpatch record down.output[:, 0] outs")
    ran = zero.ok("%%graphpatch\npg(x)\nfirst = h\npg(2 * x)\n(first is not h, h.shape, len(outs))")
    assert ran.value == (True, torch.Size([3, 8]), 2)
    assert torch.equal(zero.namespace["h"][:, :4], torch.zeros(3, 4))
    assert torch.equal(zero.namespace["outs"][1], zeroed(2 * torch.ones(3, 4))[:, 0])


def test_results_of_an_earlier_run_are_not_used(zero: Shell) -> None:
    zero.ok("%graphpatch probe hidden h")
    zero.ok("%graphpatch record hidden hs")
    zero.ok("%%graphpatch\npg(x)")
    assert type(zero.run("%%graphpatch\nh.mean()").error) is NameError
    zero.ok("%graphpatch probe up.bias b --steps 7")
    zero.namespace["b"] = before = torch.ones(1)
    with pytest.warns(GraphPatchWarning, match=r"up\.bias"):
        ran = zero.ok("%%graphpatch\npg(x);")
    assert ran.out == NOT_FILLED.format("b", "#4 (probe up.bias as b --steps 7)", "not the result of a patch")
    assert zero.namespace["b"] is before


# --------------------------------------------------------------------------------------------------------------------
# What is written into, and what is not called


@pytest.mark.parametrize("kind", ["probe", "record"])
def test_a_result_that_is_written_into_is_an_error(zero: Shell, kind: str) -> None:
    zero.ok(f"%graphpatch {kind} output h")
    zero.ok("%graphpatch probe hidden other")
    ran = zero.run("%%graphpatch\nfor k in range(3):\n    out = pg(k * x).detach()\n    out[:, 0] = -100\nk")
    assert type(ran.error) is PatchValueError
    assert str(ran.error).startswith(f"#2 ({kind} output as h): the kept tensor of shape (3, 2) was overwritten")
    assert "Out[" in ran.out  # the cell itself ran as the `with` version does
    assert "h" not in zero.namespace
    assert "other" in zero.namespace
    zero.ok("%%graphpatch\nout = pg(x).detach().clone()\nout[:, 0] = -100")
    assert "h" in zero.namespace


def test_a_slice_out_of_range_is_an_error_after_the_other_variables_are_filled(zero: Shell) -> None:
    zero.ok("%graphpatch probe output[99] far")
    zero.ok("%graphpatch probe hidden h")
    ran = zero.run("%%graphpatch\npg(x)")
    assert type(ran.error) is PatchValueError
    assert str(ran.error).startswith(
        "#2 (probe output[99] as far): cannot take [99] of a value of shape (3, 2): index 99"
    )
    assert not hasattr(ran.error, "__notes__")
    assert "h" in zero.namespace
    assert "far" not in zero.namespace
    ran = zero.run("%%graphpatch\ntry:\n    pg(x)\nexcept ValueError:\n    pass")
    assert type(ran.error) is PatchValueError


OTHERS = [
    "%graphpatch wrap pg = model(x)\npg(x)\n%graphpatch zero hidden[:, 0:4]",
    "pg = model\npg(x)",
    "del pg",
    "model(x)",
    "from threading import Thread\nt = Thread(target=lambda: pg(x))\nt.start()\nt.join()",
    "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor() as ex:\n    list(ex.map(pg, [x]))",
    "f = lambda: pg(x)",
]


@pytest.mark.parametrize("body", OTHERS)
def test_a_graph_that_is_not_called_is_reported(zero: Shell, body: str) -> None:
    zero.ok("mine = pg")
    ran = zero.ok(f"%%graphpatch\n{body}")
    assert len(UNCALLED.findall(ran.out)) == 1
    is_other = zero.namespace.get("pg") is not zero.namespace["mine"]
    assert ("the variable pg no longer holds that graph" in ran.out) == is_other
    zero.ok("pg = mine")


# --------------------------------------------------------------------------------------------------------------------
# Interrupts


# --------------------------------------------------------------------------------------------------------------------
# Among other magics


def test_ways_that_swallow_the_cell_are_refused(zero: Shell) -> None:
    assert "the rest of the cell did not run" in zero.refused("%%prun -q\n%%graphpatch\nran = 1")
    assert "ran" not in zero.namespace


def test_one_inside_another_is_refused(zero: Shell) -> None:
    assert "not its first line" in zero.refused("%%graphpatch\n%%graphpatch\npg(x)")
    zero.ok("%%graphpatch\nresult = get_ipython().run_cell('%%graphpatch\\nran = 1')")
    assert type(zero.namespace["result"].error_in_exec) is UsageError
    assert "ran" not in zero.namespace


# --------------------------------------------------------------------------------------------------------------------
# await


def test_await(zero: Shell, expected: Tensor) -> None:
    ran = zero.ok("%%graphpatch\nimport asyncio\nawait asyncio.sleep(0)\nout = pg(x)\nawait asyncio.sleep(0, out)")
    assert torch.equal(ran.value, expected)
