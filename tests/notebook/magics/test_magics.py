"""Every command of `%graphpatch`, typed into a real IPython shell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpatch_notebook import AddPatch, PatchableGraph, ZeroPatch
from graphpatch_notebook.notebook.magics.actions import parsed_assignment
from graphpatch_notebook.notebook.magics.commands import commands
from graphpatch_notebook.notebook.search import KEYS, STATES, parse_query
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.patch_kinds import PATCH_KINDS
from graphpatch_notebook.notebook.session.session import session_of
from tests.components.families import captured_model
from tests.notebook.shells import Mlp, Shell

pytestmark = pytest.mark.hosts


def chosen(shell: Shell, name: str = "pg") -> list[str]:
    return [str(patch) for patch in session_of(shell.namespace[name]).chosen.patches]


def lines(text: str) -> list[str]:
    return text.splitlines()


# --------------------------------------------------------------------------------------------------------------------
# wrap and use


def test_wrap(shell: Shell) -> None:
    ran = shell.ok("%graphpatch wrap pg = model(x)")
    assert re.fullmatch(r"pg: Mlp, 14 nodes \(\d+\.\d s\)\n", ran.out)
    assert ran.value is None
    assert isinstance(shell.namespace["pg"], PatchableGraph)
    origin = session_of(shell.namespace["pg"]).origin
    assert (origin.graph, origin.model, origin.arguments) == ("pg", "model", "x")


@pytest.mark.parametrize(
    ("text", "model", "arguments"),
    [
        ("pg = (model)(x)", "model", "x"),
        ("pg = Mlp()( torch.ones(1, 4) )", "Mlp()", "torch.ones(1, 4)"),
        ("pg=models['é'](x=x)  # why", "models['é']", "x=x"),
        ("pg = (model if True else None)(*[x],)", "model if True else None", "*[x]"),
        ("pg = model(**{'x': x})", "model", "**{'x': x}"),
        (
            "pg = model(ExtractionOptions(skip_compilation=True), x)",
            "model",
            "x, extraction_options=ExtractionOptions(skip_compilation=True)",
        ),
    ],
)
def test_wrap_remembers_what_was_typed(shell: Shell, text: str, model: str, arguments: str) -> None:
    shell.ok("from graphpatch_notebook import ExtractionOptions\nmodels = {'é': model}")
    shell.ok(f"%graphpatch wrap {text}")
    origin = session_of(shell.namespace["pg"]).origin
    assert (origin.model, origin.arguments) == (model, arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "NAME = MODEL"),
        ("model(x)", r"%graphpatch wrap pg = model\(x\)"),
        ("pg = model", "NAME = MODEL"),
        ("pg = model(", r"'pg = model\('"),
        ("pg.x = model(x)", r"'pg\.x'"),
        ("pg = q = model(x)", "NAME = MODEL"),
        ("pg = torch.relu(x)", r"'torch\.relu' must be a torch\.nn\.Module"),
        ("pg = Mlp(x)", r"'Mlp' must be a torch\.nn\.Module, but is the class Mlp"),
        ("pg = model(ExtractionOptions(decompose=3), x)", r"decompose"),
        ("x = model(x)", "'x' is used to make the graph"),
        ("y = model(torch.cat([y, x]))", "'y' is used"),
        ("pg = model(y := x + 1)", "cannot await, yield or assign"),
        ("list = model(x)", r"'list' is a builtin of Python"),
    ],
)
def test_wrap_refuses(shell: Shell, text: str, message: str) -> None:
    shell.ok("from graphpatch_notebook import ExtractionOptions")
    assert re.search(message, shell.refused(f"%graphpatch wrap {text}"))
    assert "pg" not in shell.namespace


def test_errors_of_the_model_are_the_users_own(shell: Shell) -> None:
    ran = shell.run("%graphpatch wrap pg = model(torch.ones(3, 5))")
    assert type(ran.error) is RuntimeError
    assert "mat1 and mat2 shapes cannot be multiplied" in ran.out
    assert "hidden = torch.relu(self.up(x))" in ran.out
    assert "commands.py" not in ran.out
    assert "actions.py" not in ran.out
    assert "pg" not in shell.namespace


def test_wrapping_again_keeps_the_chosen_patches(pg: Shell) -> None:
    pg.ok("%graphpatch zero hidden[:, 0:4]")
    pg.ok("%graphpatch probe mul product")
    pg.ok("%graphpatch disable #1")
    before = pg.namespace["pg"]
    ran = pg.ok("%graphpatch wrap pg = model(x)")
    assert lines(ran.out)[1:] == ["2 patches carried over from the previous graph in pg"]
    assert pg.namespace["pg"] is not before
    assert chosen(pg) == ["zero hidden[:, 0:4]", "probe mul as product"]
    assert [patch.is_enabled for patch in session_of(pg.namespace["pg"]).chosen.patches] == [False, True]


def test_wrapping_another_model_says_what_is_dropped(pg: Shell) -> None:
    pg.ok("%graphpatch zero hidden")
    pg.ok("%graphpatch add up.linear 2.5")
    pg.ok("class Other(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
          "        self.up = torch.nn.Linear(4, 8)\n    def forward(self, x): return self.up(x)")  # fmt: skip
    said = lines(pg.ok("%graphpatch wrap pg = Other()(x)").out)
    assert said[1] == "1 patch carried over from the previous graph in pg"
    assert said[2].startswith("dropped #1 zero hidden: no node 'hidden'")
    assert chosen(pg) == ["add up.linear 2.5"]


def test_use(pg: Shell) -> None:
    pg.ok("%graphpatch wrap other = model(x)")
    pg.ok("%graphpatch zero mul")
    assert pg.ok("%graphpatch use pg").out == "pg: Mlp, 14 nodes, 0 patches chosen\n"
    pg.ok("%graphpatch zero hidden")
    assert (chosen(pg), chosen(pg, "other")) == (["zero hidden"], ["zero mul"])
    assert pg.refused("%graphpatch use pgg") == "unknown variable 'pgg'; graphs: pg, other"
    assert pg.refused("%graphpatch use model").startswith("'model' is not a PatchableGraph but an object of Mlp")


def test_which_graph_is_active(shell: Shell) -> None:
    message = "no PatchableGraph yet; make one: %graphpatch wrap pg = model(EXAMPLE INPUTS)"
    assert shell.refused("%graphpatch zero hidden") == message
    shell.ok("from graphpatch_notebook import PatchableGraph\na = PatchableGraph(model, x)\na;")
    shell.ok("%graphpatch zero hidden")  # the only one
    assert session_of(shell.namespace["a"]).origin.graph == "a"
    assert session_of(shell.namespace["a"]).origin.model == "model"
    shell.ok("b = PatchableGraph(model, x)")
    message = "there are several graphs: a, b; pick one: %graphpatch use NAME, or %%graphpatch NAME"
    assert shell.refused("%graphpatch zero hidden") == message
    shell.ok("%graphpatch use b")
    shell.ok("%graphpatch zero mul")
    shell.ok("b = a")  # what `b` holds now
    shell.ok("%graphpatch zero up.weight")
    assert chosen(shell, "a") == ["zero hidden", "zero up.weight"]
    shell.ok("del b")
    shell.ok("%graphpatch zero down.weight")
    assert chosen(shell, "a") == ["zero hidden", "zero up.weight", "zero down.weight"]
    shell.ok("del a")
    assert shell.refused("%graphpatch list").startswith("no PatchableGraph yet")


# --------------------------------------------------------------------------------------------------------------------
# Choosing


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("zero hidden", "#1 zero hidden -> (3, 8)"),
        ("zero hidden[:, 0:4]", "#1 zero hidden[:, 0:4] -> (3, 4)"),
        ("zero hidden[ :,0 ]", "#1 zero hidden[:, 0] -> (3,)"),
        ("add mul[..., -1] 0.5 * x[0, 0]  # why", "#1 add mul[..., -1] 0.5 * x[0, 0] -> (3,)"),
        ("add hidden -1e-3", "#1 add hidden -1e-3 -> (3, 8)"),
        ('add hidden steer["a b"] + 1', '#1 add hidden steer["a b"] + 1 -> (3, 8)'),
        ("add hidden {'a': 1}['a']", "#1 add hidden {'a': 1}['a'] -> (3, 8)"),
        ("replace hidden [1, 2][0]", "#1 replace hidden [1, 2][0] -> (3, 8)"),
        ("probe hidden", "#1 probe hidden as hidden -> (3, 8)"),
        ("probe hidden[:, 0] h", "#1 probe hidden[:, 0] as h -> (3,)"),
        ("probe up.output as h", "#1 probe up.output as h -> (3, 8)"),
        ("probe down.output", "#1 probe down.output as down_output -> (3, 2)"),
        ("record mul[0] hs", "#1 record mul[0] as hs -> list of (8,)"),
        ("custom hidden lambda v: v * 2", "#1 custom hidden lambda v: v * 2 -> (3, 8)"),
        ("zero hidden --any-shape", "#1 zero hidden --any-shape -> (3, 8)"),
        ("zero --any-shape hidden[0]", "#1 zero hidden[0] --any-shape -> (8,)"),
        ("zero hidden[:, 8:16] --allow-empty", "#1 zero hidden[:, 8:16] --allow-empty -> (3, 0)"),
        ("add --steps 2 hidden 1", "#1 add hidden 1 --steps 2 -> (3, 8)"),
        ('add --steps "2, 4" hidden 1', '#1 add hidden 1 --steps "2, 4" -> (3, 8)'),
        ("add hidden 1 --steps 2, 4", '#1 add hidden 1 --steps "2, 4" -> (3, 8)'),
        (
            "add hidden 1 --positions 1: --position-dim=-2",
            "#1 add hidden 1 --positions 1: --position-dim -2 -> (3, 8)",
        ),
        ("zero hidden[:, k]", "#1 zero hidden[:, k]"),
    ],
)
def test_choosing_says_what_was_chosen(pg: Shell, line: str, said: str) -> None:
    pg.ok("steer, k = {'a b': 1}, 0")
    ran = pg.ok(f"%graphpatch {line}")
    assert ran.value is None
    assert lines(ran.out) == [said]
    # What is said can be typed.
    pg.ok("%graphpatch clear")
    pg.ok(f"%graphpatch {said.partition(' ')[2].partition(' -> ')[0]}")
    assert len(chosen(pg)) == 1


def test_a_slice_beyond_the_recorded_size_is_warned_of(pg: Shell) -> None:
    said = lines(pg.ok("%graphpatch zero hidden[9]").out)
    assert said[0] == "#1 zero hidden[9]"
    assert said[1].startswith("warning: ")
    assert len(said) == 2


def test_a_probe_says_that_it_will_overwrite(pg: Shell) -> None:
    pg.ok("mine = 1")
    assert "the next run overwrites the variable mine" in pg.ok("%graphpatch probe hidden mine").out
    pg.ok("%%graphpatch\npg(x);")
    pg.ok("%graphpatch rm #1")
    assert "overwrites" not in pg.ok("%graphpatch probe hidden mine").out


def test_undefined_names_are_reported(pg: Shell) -> None:
    said = lines(pg.ok("%graphpatch add hidden[:, k] abs(steer)").out)
    assert said[1:] == ["note: 'k', 'steer' are not defined yet"]
    pg.ok("k = 0")
    said = lines(pg.ok("%graphpatch custom hidden[:, k] lambda v: v + steer").out)
    assert said[1:] == ["note: 'steer' is not defined yet"]


def test_quotes_globs_and_lists_in_names(pg: Shell) -> None:
    for path in ("up.weight", "up.bias", "down.bias"):
        pg.ok(f"%graphpatch zero {path}")
    for specs, expected in (
        ("'*.bias'", ["down.bias", "up.bias"]),
        ('"*.bias"', ["down.bias", "up.bias"]),
        ("[du]*.bias", ["down.bias", "up.bias"]),
        ("up.[bw]*", ["up.bias", "up.weight"]),
        ("'up.bias'", ["up.bias"]),
        ("#1,#3", ["down.bias", "up.weight"]),
    ):
        removed = lines(pg.ok(f"%graphpatch rm {specs}").out)
        assert sorted(line.split()[-1] for line in removed) == expected
        pg.ok("%graphpatch undo")
    assert pg.refused("%graphpatch rm up.[xyz]*").startswith("no chosen patch matches 'up.[xyz]*'; nearest:")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("zeroo hidden", r"unknown command 'zeroo'; nearest: 'zero'"),
        ("pg", r"'pg' is a graph, not a command; %graphpatch use pg selects it"),
        ("zero", r"the following arguments are required: PATH"),
        ("zero hiden", r"no node 'hiden' in the root graph; nearest: 'hidden'"),
        ("zero up", r"'up' is a graph \(CompiledGraphModule\); patch a node in it"),
        ("zero hidden[:, 0:4,4]", r"'hidden': slice \[:, 0:4, 4\] has 3 dimensions"),
        ("zero hidden[a.b]", r"'a\.b' is not allowed in a slice"),
        ("zero hidden[", r"'hidden\[' is not a path, or its bracket is not closed"),
        ("zero hidden [0]", r"unrecognized arguments: \[0\]"),
        ("zero hidden 1", r"unrecognized arguments: 1;"),
        ("add hidden", r"add needs a value: a number or a tensor"),
        ("add hidden 1 2", r"'1 2' is not a Python expression"),
        ("add hidden # 1", r"add needs a value"),
        ("custom hidden", r"custom needs a value: a function"),
        ("probe hidden 3x", r"'3x' cannot be the name of a variable"),
        ("probe hidden a b", r"'a b' cannot be the name"),
        ("probe hidden as", r"'as' cannot be the name"),
        ("probe hidden pg", r"'pg' is used to make the graph"),
        ("zero hidden --step 1", r"unrecognized arguments: --step.*nearest: --steps"),
        ("zero hidden --steps x", r"'x' are no whole numbers|.*numbers"),
        ("zero hidden --position-dim x", r"argument --position-dim"),
        ("zero hidden --position-dim 1", r"position_dim=1 has no effect without positions"),
        (
            "zero hidden[..., 8:16]",
            r"'hidden': slice \[\.\.\., 8:16\] selects nothing: .*give the patch --allow-empty",
        ),
        ("probe hidden[:, 8]", r"'hidden': slice \[:, 8\] is out of range: dimension 1 of .*has 8 entries"),
        ("rm", "the following arguments are required: PATH"),
        ("rm #1", r"unknown patch #1; none is chosen"),
        ("rm hidden", r"no chosen patch matches 'hidden'; no patch is chosen"),
        ("clear all", "unrecognized arguments: all"),
        ("undo 2", "unrecognized arguments: 2"),
        ("list all", "unrecognized arguments: all"),
        ("show hiden", r"the root graph has no child 'hiden'; nearest: 'hidden'"),
        ("show hidden[0]", r"this command does not take a slice"),
        ("show hidden up", "unrecognized arguments: up"),
        ("code nope", r".*'nope'"),
        ("shape hidden[0, 0, 0]", r"'hidden': slice \[0, 0, 0\] has 3 dimensions"),
        ("help nope", r"unknown command 'nope'; nearest:"),
        ("export all", "unrecognized arguments: all"),
        ("export", r"nothing to export"),
        ("save", "the following arguments are required: FILE"),
        ("load a b", "unrecognized arguments: b"),
        ("ls nope", r"the root graph has no child 'nope'"),
    ],
)
def test_errors_are_shown_in_one_line(pg: Shell, line: str, message: str) -> None:
    assert re.match(message, pg.refused(f"%graphpatch {line}"))
    assert chosen(pg) == []


# --------------------------------------------------------------------------------------------------------------------
# Editing


@pytest.fixture
def four(pg: Shell) -> Shell:
    for line in ("zero hidden[:, 0]", "add hidden 1", "probe down.output as out", "zero up.bias"):
        pg.ok(f"%graphpatch {line}")
    return pg


@pytest.mark.parametrize(
    ("specs", "left"),
    [
        ("#2", ["zero hidden[:, 0]", "probe down.output as out", "zero up.bias"]),
        ("1 #4  # two", ["add hidden 1", "probe down.output as out"]),
        ("hidden", ["probe down.output as out", "zero up.bias"]),
        ("hidden[:,0]", ["add hidden 1", "probe down.output as out", "zero up.bias"]),
        ("*.bias down.*", ["zero hidden[:, 0]", "add hidden 1"]),
    ],
)
def test_rm(four: Shell, specs: str, left: list[str]) -> None:
    before = chosen(four)
    ran = four.ok(f"%graphpatch rm {specs}")
    assert ran.value is None
    assert chosen(four) == left
    removed = [text for text in before if text not in left]
    assert [re.sub(r"removed #\d ", "", line) for line in lines(ran.out)] == removed
    four.ok("%graphpatch undo")  # one step
    assert chosen(four) == before


def test_enable_and_disable(four: Shell) -> None:
    assert lines(four.ok("%graphpatch disable #1 up.bias").out) == [
        "disabled #1 zero hidden[:, 0]",
        "disabled #4 zero up.bias",
    ]
    four.ok("%%graphpatch\nout_1 = pg(x)")
    plain = Mlp()
    assert torch.equal(four.namespace["out_1"], plain.down((torch.relu(plain.up(torch.ones(3, 4))) + 1) * 2))
    assert four.ok("%graphpatch enable 4").out == "enabled #4 zero up.bias\n"
    assert [patch.is_enabled for patch in session_of(four.namespace["pg"]).chosen.patches] == [False, True, True, True]


def test_clear_undo_redo(four: Shell) -> None:
    before = chosen(four)
    assert four.ok("%graphpatch clear").out == "removed 4 patches; use undo to restore them\n"
    assert four.ok("%graphpatch clear").out == "no patch was chosen\n"
    assert four.ok("%graphpatch undo").out.startswith("+ #1 zero hidden[:, 0]; + #2 add hidden 1; ")
    assert chosen(four) == before
    assert four.ok("%graphpatch undo").out == "- #4 zero up.bias (3 patches chosen now)\n"
    assert four.ok("%graphpatch redo").out == "+ #4 zero up.bias (4 patches chosen now)\n"
    assert four.ok("%graphpatch disable #4").out
    assert four.ok("%graphpatch undo").out == "- #4 (off) zero up.bias; + #4 zero up.bias (4 patches chosen now)\n"
    assert four.ok("%graphpatch redo").out
    assert four.ok("%graphpatch redo").out == "there is nothing to redo\n"
    four.ok("%graphpatch clear")
    for _ in range(6):
        last = four.ok("%graphpatch undo").out
    four.ok("%graphpatch undo")
    assert four.ok("%graphpatch undo").out == "there is nothing to undo\n", last


# --------------------------------------------------------------------------------------------------------------------
# Looking


def test_status(plain_shell: Shell) -> None:
    plain_shell.ok("%load_ext graphpatch_notebook")
    assert "%graphpatch wrap pg = MODEL(EXAMPLE INPUTS)" in repr(plain_shell.ok("%graphpatch").value)
    plain_shell.ok("from tests.notebook.shells import Mlp\nimport torch\nnet = Mlp()")
    assert "%graphpatch wrap pg = net(EXAMPLE INPUTS)" in repr(plain_shell.ok("%graphpatch").value)
    plain_shell.ok("%graphpatch wrap g = net(torch.ones(3, 4))")
    status = lines(repr(plain_shell.ok("%graphpatch").value))
    assert status[0] == "g: Mlp, 14 nodes, 0 patches chosen"
    assert any("%graphpatch zero PATH" in line for line in status)
    plain_shell.ok("%graphpatch zero hidden[:, 0]")
    status = lines(repr(plain_shell.ok("%graphpatch").value))
    assert status[0] == "g: Mlp, 14 nodes, 1 patch chosen"
    assert any("%%graphpatch" in line for line in status)
    plain_shell.ok("%graphpatch wrap h = net(torch.ones(3, 4))")
    assert "other graphs: g" in repr(plain_shell.ok("%graphpatch").value)
    plain_shell.ok("%unload_ext graphpatch_notebook")


def test_list(four: Shell) -> None:
    four.ok("%graphpatch disable #2")
    table = four.ok("chosen = %graphpatch list\nchosen").value
    assert [str(patch) for patch in table] == chosen(four)
    rows = lines(repr(table))
    assert rows[0] == "pg: Mlp, 14 nodes, 4 patches chosen"
    assert [row.split() for row in rows[2:]] == [
        ["1", "zero", "hidden[:,", "0]", "(3,)"],
        ["2", "add", "hidden", "1", "(3,", "8)", "off"],
        ["3", "probe", "down.output", "as", "out", "(3,", "2)"],
        ["4", "zero", "up.bias", "(8,)"],
    ]


def test_show_code_and_shape(pg: Shell) -> None:
    assert repr(pg.ok("%graphpatch show").value) == repr(pg.namespace["pg"].graph)
    assert repr(pg.ok("tree = %graphpatch show up  # it\ntree").value) == repr(pg.namespace["pg"].graph.up)
    assert "hidden = torch.relu(self.up(x))" in str(pg.ok("%graphpatch code hidden").value)
    assert "linear" in str(pg.ok("%graphpatch code up").value)
    assert pg.ok("%graphpatch shape hidden").value == torch.Size([3, 8])
    assert pg.ok("%graphpatch shape hidden[:, 0:3]").value == (3, 3)
    assert pg.ok("%graphpatch shape up").value["weight"] == torch.Size([8, 4])
    assert pg.ok("%graphpatch show <root>").value.selected_path == ""


def test_lens(shell: Shell) -> None:
    model, ids = captured_model("gpt2")
    shell.namespace.update(gpt=model, ids=ids)
    shown = shell.ok("%graphpatch lens 5 --stream mlp --inputs ids[:, :3]  # a short one").value
    assert repr(shown) == "<LensView of gpt, mlp, 2 x 3>"
    assert shown.lens["has_target"]
    assert repr(shell.ok("%graphpatch lens").value) == "<LensView of gpt, residual, 3 x 7>"
    for typed, message in (("word", "tokenizer"), ("--stream heads", "'residual', 'attention', 'mlp'")):
        assert message in shell.refused(f"%graphpatch lens {typed}")


def test_generation(shell: Shell) -> None:
    model, ids = captured_model("llama")
    shell.namespace.update(llama=model, ids=ids)
    shown = shell.ok("%graphpatch generation 3 --inputs ids[:1]").value
    expected = model._module.generate(ids[:1], max_new_tokens=3, do_sample=False)[0, ids.shape[1] :].tolist()
    texts = shown.generation["tokens"]
    assert shown.generation["lines"][0]["steps"] == 3
    assert set(expected) <= set(texts)
    for typed, message in (
        ("many", "argument COUNT"),
        ("0 --inputs ids[:1]", "at least 1"),
        ("--inputs ids.repeat(3, 1)", "one prompt"),
    ):
        assert message in shell.refused(f"%graphpatch generation {typed}")


def test_ls_and_find(four: Shell) -> None:
    listing = four.ok("%graphpatch ls").value
    assert [child.path for child in listing] == ["x", "up", "hidden", "mul", "down", "output"]
    assert "hidden  relu                 [3, 8] f32  2 patched" in repr(listing)
    assert four.ok("%graphpatch ls up  # the first").value[0].path == "up.input"
    assert four.ok("%graphpatch find op:linear # both").value.paths == ["up.linear", "down.linear"]
    assert four.ok("found = %graphpatch find is:patched\nfound").value.paths == ["up.bias", "hidden", "down.output"]
    assert len(four.ok("%graphpatch find").value) == 14


def test_help(pg: Shell) -> None:
    overview = pg.ok("%graphpatch help").out
    assert pg.ok("%graphpatch -h").out == overview
    for name, command in commands().items():
        assert command.parser.line in overview
        said = pg.ok(f"%graphpatch help {name}").out
        assert said == pg.ok(f"%graphpatch {name} --help").out
        assert said.startswith(f"usage: {command.parser.line}\n\n{command.parser.description}\n")
        assert all(f"  {option}" in said for option in command.parser.options)
    assert "--only" in pg.ok("%graphpatch help %%graphpatch").out
    assert "Choose patches for a PyTorch model" in pg.ok("%graphpatch?").out


def test_the_grammar_of_the_search_is_in_the_help(pg: Shell) -> None:
    said = pg.ok("%graphpatch help find").out
    assert all(f"{key}:" in said for key in KEYS)
    assert all(state in said for state in STATES if state != "attribute")


@pytest.mark.parametrize("name", commands())
def test_examples_can_be_typed(name: str) -> None:
    parser = commands()[name].parser
    for example in re.findall(rf"^  %graphpatch {name}\b(.*)", str(parser.epilog), re.MULTILINE):
        found = parser.parse_line(example)
        if name in PATCH_KINDS:
            field, default = ("name", "free") if PATCH_KINDS[name].keeps else ("value", None)
            typed = " ".join(getattr(found, field, [])).replace("{i}", "0")
            texts = {what: text for what, text in vars(found).items() if what not in ("path", "name", "value")}
            assert ChosenPatch("x", name, **{field: typed or default}, **texts).kind == name  # type: ignore[arg-type]
        elif name == "find":
            assert parse_query(example)
        elif name == "wrap":
            assert parsed_assignment(example)[0] == "pg"


# --------------------------------------------------------------------------------------------------------------------
# Leaving


def test_export(four: Shell) -> None:
    code: Any = four.ok("code = %graphpatch export\ncode").value
    scope = {"pg": four.namespace["pg"], "x": torch.ones(3, 4)}
    exec(code, scope)
    assert torch.equal(scope["out"], four.ok("%%graphpatch\npg(x)").value)


def test_export_to_a_variable(four: Shell) -> None:
    assert four.ok("%graphpatch export -o code").out == "the code is in the variable code\n"
    first = four.namespace["code"]
    four.ok("%graphpatch rm #1")
    four.ok("%graphpatch export -o code")
    assert four.namespace["code"] != first
    four.ok("code = 'mine'")
    assert "the variable 'code' holds an object of type str that export did not create" in four.refused(
        "%graphpatch export -o code"
    )
    assert four.namespace["code"] == "mine"
    four.ok("%graphpatch export -o code --force")
    assert "pg.patch" in four.namespace["code"]


def test_export_to_a_file(four: Shell, tmp_path: Path) -> None:
    file = tmp_path / "my patches.py"
    assert four.ok(f'%graphpatch export -o "{file}"').out == f"the code is in {file}\n"
    scope = {"model": Mlp(), "x": torch.ones(3, 4)}
    exec(compile(file.read_text("utf8"), str(file), "exec"), scope)
    assert torch.equal(scope["out"], four.ok("%%graphpatch\npg(x)").value)
    four.ok(f"%graphpatch export -o '{file}'")
    written = file.read_text("utf8")
    file.write_text(written + "mine = 1\n", "utf8")
    assert "was changed since" in four.refused(f"%graphpatch export -o '{file}'")
    assert file.read_text("utf8") == written + "mine = 1\n"
    file.write_text(written, "utf8", newline="\r\n")  # as an editor on another system saves it
    four.ok(f"%graphpatch export -o '{file}'")
    file.write_text("mine", "utf8")
    assert "was not written by %graphpatch export" in four.refused(f'%graphpatch export -o "{file}"')
    assert file.read_text("utf8") == "mine"
    four.ok(f'%graphpatch export -o "{file}" --force')
    assert "cannot be written" in four.refused(f"%graphpatch export -o {tmp_path}/nope/a.py")


def test_export_to_a_cell(four: Shell) -> None:
    ran = four.ok("%graphpatch export --cell")
    assert (ran.value, ran.out) == (None, "the code is in a new cell\n")
    assert "pg.patch" in four.ip.rl_next_input


def test_save_and_load(four: Shell, tmp_path: Path) -> None:
    file = tmp_path / "patches.json"
    assert four.ok(f"%graphpatch save {file}").out == f"saved 4 patches to {file}\n"
    before = chosen(four)
    four.ok("%graphpatch clear")
    said = lines(four.ok(f"%graphpatch load {file}").out)
    assert said == [f"loaded 4 patches from {file}"]
    assert chosen(four) == before  # under numbers that none of them had before
    four.ok(f"%graphpatch save '{file}'")
    file.write_text("{}", "utf8")
    assert str(file) in four.refused(f"%graphpatch save {file}")
    four.ok(f"%graphpatch save {file} --force")
    assert "cannot be read" in four.refused(f"%graphpatch load {tmp_path}/nope.json")
    assert chosen(four) == before


def test_code_of_others_is_shown_and_not_run(four: Shell, tmp_path: Path) -> None:
    ours, file, canary = tmp_path / "ours.json", tmp_path / "their patches.json", tmp_path / "canary"
    code = f"__import__('pathlib').Path({str(canary)!r}).touch() or x[0, 0] * 2"
    four.ok(f"%graphpatch add down.output {code}")
    four.ok("%graphpatch add down.output 2 * x[0, 0]")
    four.ok(f"%graphpatch save {ours}")
    assert four.ok(f"%graphpatch load {ours}").out.startswith("loaded 6 patches")  # what was saved here is trusted
    file.write_text(ours.read_text("utf8").replace("2 * x", "4 * x"), "utf8")

    read, shown, how = lines(four.ok(f"%graphpatch load '{file}'").out)
    assert read.startswith(f"loaded 6 patches from {file}, replacing 6")
    assert shown == f"these values are code, which does not run until you trust the file: #17 {code}"
    assert how == f'after you have read them, trust the file: %graphpatch load "{file}" --trust'
    table = str(four.ok("%graphpatch list").value)
    assert re.search(r"^17 .*__import__.* not trusted$", table, re.MULTILINE)
    assert table.count("not trusted") == 1
    assert table.endswith(f"""does not run until you trust the file: %graphpatch load "{file}" --trust""")
    assert "__import__" in str(four.ok("%graphpatch export").value)
    for cell in ("%%graphpatch\npg(x)", "%%graphpatch --only down.output\npg(x)"):
        refused = four.refused(cell)
        assert f"UntrustedValueError: the value is code from '{file}', which you have not trusted" in refused
    four.ok("%%graphpatch --only up.bias\npg(x)")
    four.ok("%graphpatch disable #17\n%graphpatch disable #15")
    four.ok("%%graphpatch\npg(x)")
    assert not canary.exists()

    four.ok(f"%graphpatch load '{file}' --trust")
    four.ok("%%graphpatch --only down.output\npg(x)")
    assert canary.exists()
    assert "until you trust" not in four.ok(f"%graphpatch load '{file}'").out


# --------------------------------------------------------------------------------------------------------------------
# All kinds, against plain patches


def test_every_kind_does_what_it_says(pg: Shell) -> None:
    pg.ok("steer = torch.arange(8.0)\ndef halve(v): return v / 2")
    for line in (
        "zero hidden[:, 0]",
        "add hidden[1] 0.5 * steer",
        "replace mul[..., -1] -1e-3",
        "custom down.output halve",
        "probe down.output result",
        "record mul muls",
    ):
        pg.ok(f"%graphpatch {line}")
    pg.ok("%%graphpatch\nout = pg(x)")
    model = Mlp()
    hidden = torch.relu(model.up(torch.ones(3, 4)))
    hidden[:, 0] = 0
    hidden[1] += 0.5 * torch.arange(8.0)
    mul = hidden * 2
    mul[..., -1] = -1e-3
    out = model.down(mul) / 2
    assert torch.equal(pg.namespace["out"], out)
    assert torch.equal(pg.namespace["result"], out)
    assert torch.equal(pg.namespace["muls"][0], mul)
    resolved = session_of(pg.namespace["pg"]).resolve(pg.namespace)
    assert isinstance(resolved.patch_map["hidden"][0], ZeroPatch)
    assert isinstance(resolved.patch_map["hidden"][1], AddPatch)


def test_patches_follow_the_variable_to_another_graph(pg: Shell) -> None:
    """Whoever runs the cell that makes the graph again keeps the choice, however that cell makes it."""
    pg.ok("%graphpatch zero hidden[:, 0]")
    pg.ok("%graphpatch probe mul kept")
    pg.ok("from graphpatch_notebook import PatchableGraph\npg = PatchableGraph(model, x)")
    assert "2 patches carried over" in pg.ok("%graphpatch").out
    assert "carried" not in pg.ok("%graphpatch list").out
    assert pg.ok("%%graphpatch\n_ = pg(x)\nkept[:, 0].sum().item()").value == 0
    pg.ok("pg = PatchableGraph(torch.nn.ReLU(), x)")
    ran = pg.ok("%%graphpatch\npg(x)")
    assert "dropped #1 zero hidden[:, 0]: no node 'hidden'" in ran.out
    assert torch.equal(ran.value, torch.relu(pg.namespace["x"]))
