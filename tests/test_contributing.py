"""The pages for contributors: the map is the tree, and the walk-throughs work."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpatch_notebook import PatchMapError
from graphpatch_notebook.capture import decompositions, packed_weights
from graphpatch_notebook.notebook import PATCH_KINDS
from test_layers import LAYERS

ROOT = Path(__file__).parents[1]
GUIDE, MAP, EXTENDING = (
    (ROOT / "docs" / name).read_text("utf8") for name in ("CONTRIBUTING.md", "code_map.md", "extending.md")
)
FENCES = re.findall(r"```python\n(.*?)```", EXTENDING, re.DOTALL)
PATCH_KIND, REGISTRATION, OPERATION, DECOMPOSITION, DECOMPOSED, PACKING, PACKED = range(7)


def map_rows() -> list[list[str]]:
    rows = re.findall(r"^\| (`[^|]*`) \|", MAP.split("## The code")[1].split("\n## ")[0], re.MULTILINE)
    return [[name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", row)] for row in rows[1:]]


def test_the_map_has_all_layers_and_no_others() -> None:
    assert sorted(name for row in map_rows() for name in row) == sorted(LAYERS)
    package = ROOT / "graphpatch_notebook"
    others = {path.name for path in package.iterdir() if path.is_dir()} - set(LAYERS) - {"__pycache__"}
    assert others == set(re.findall(r"`(\w+)/`", MAP.split("Beside these:")[1].split(". The\n")[0])) - {"js"}


def test_imports_go_down_the_map() -> None:
    heights = [[LAYERS.index(name) for name in row] for row in map_rows()]
    for upper, lower in itertools.pairwise(heights):
        assert min(upper) > max(lower)


def test_files_that_are_named_exist() -> None:
    folders = (
        "graphpatch_notebook|js|tests|docs|patching|inspection|capture|components|experiments|files|notebook|graphs"
    )
    names = re.findall(rf"`((?:{folders})/[\w/.]*)`", GUIDE + MAP + EXTENDING)
    assert len(names) > 20
    missing = [n for n in names if not (ROOT / n).exists() and not (ROOT / "graphpatch_notebook" / n).exists()]
    assert not missing


def test_the_files_of_a_patch_kind_are_those_that_name_one() -> None:
    listed = set(
        re.findall(r"`((?:graphpatch_notebook|js)/[\w/.]+)`", EXTENDING.split("follow `")[1].split("Tests:")[0])
    )
    files = [*(ROOT / "graphpatch_notebook").rglob("*.py"), *(ROOT / "js/src").rglob("*.ts")]
    naming = {file.relative_to(ROOT).as_posix() for file in files if '"replace"' in file.read_text("utf8")}
    assert listed == naming | {"graphpatch_notebook/patches/kinds.py", "graphpatch_notebook/__init__.py"}


def test_no_file_lists_classes_of_patches() -> None:
    """What a kind of patches is, its class says; a list of classes would lack the next one."""
    package = ROOT / "graphpatch_notebook"
    kinds = {kind.patch.__name__ for kind in PATCH_KINDS.values()}
    found = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf8"))):
            if isinstance(node, (ast.Tuple, ast.Set)) and {ast.unparse(each) for each in node.elts} <= kinds:
                found |= {file.relative_to(package).as_posix()} if node.elts else set()
    assert found == set()


def test_laws_are_numbered_as_in_their_list() -> None:
    laws = re.findall(r"^(\d+)\. ", (ROOT / "docs/concepts/laws.md").read_text("utf8"), re.MULTILINE)
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", MAP, re.MULTILINE))
    assert list(rows) == laws
    for file in sorted((ROOT / "tests/laws").glob("test_*.py")):
        number = str(int(file.name.split("_")[2]))
        assert file.relative_to(ROOT).as_posix() in rows[number]
        assert file.read_text("utf8").startswith(f'"""Law {number}')


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the walk-throughs make; they are run from files, since capture reads sources."""
    names: dict[str, Any] = {"__name__": "walk_through"}
    for number, source in enumerate(FENCES):
        if number == DECOMPOSED:
            monkeypatch.setitem(decompositions._BY_ID, id(names["gelu"].function), names["gelu"])
        if number == PACKED:
            monkeypatch.setitem(packed_weights._packings, names["Int8Linear"], names["packing"])
        file = tmp_path / f"walk_through_{number}.py"
        file.write_text(source, "utf8")
        exec(compile(source, str(file), "exec", dont_inherit=True), names)
    assert len(FENCES) == 7
    kind = PATCH_KINDS.pop("scale")
    assert kind.patch is names["ScalePatch"]
    return names


def test_walk_throughs(namespace: dict[str, Any]) -> None:
    x = torch.ones(1, 2)
    pg = namespace["pg"]
    assert torch.equal(namespace["doubled"], pg(x) * 2)
    with (
        pytest.raises(PatchMapError, match="factor must be a number"),
        pg.patch({"output": namespace["ScalePatch"](factor="2")}),
    ):
        pytest.fail("the block must not be entered")
    assert not namespace["nothing"].any()
    torch.testing.assert_close(namespace["probe"].activation * torch.ones(2), torch.nn.functional.gelu(torch.ones(2)))
    assert namespace["without_first"].tolist() == [[0.0, 1.0]]
    assert namespace["quantized"](x).tolist() == [[1.0, 1.0]]
