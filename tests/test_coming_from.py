"""The guide for those who come from other tools: what it says to write here runs, and gives what is written there."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "coming_from.md").read_text("utf8")
SETUPS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL))
NOT_OF_CODE = "`patching."  # needs a model from the hub's names, and clean tokens


def rows(section: str) -> list[tuple[str, str, str]]:
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [(what, there, here) for what, there, here in cells]


def code(cell: str) -> str | None:
    """Returns the code of a cell, all of which stands in backticks; `None` for words."""
    lines = [re.fullmatch(r"`(.*)`", line.strip()) for line in cell.split("<br>")]
    return "\n".join(line[1].replace("\\|", "|") for line in lines if line) if all(lines) else None


def last_value(source: str, namespace: dict[str, Any]) -> Any:
    """Runs the lines; returns the value of the last one, if it is an expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "guide", "exec"), namespace)
    return eval(compile(ast.Expression(last.value), "guide", "eval"), namespace) if isinstance(last, ast.Expr) else None


@pytest.fixture(scope="module")
def setup() -> Callable[[int], dict[str, Any]]:
    """Gives the names that a section's code may use: those of the first setup, or of more."""

    def made(count: int) -> dict[str, Any]:
        namespace: dict[str, Any] = {}
        for source in SETUPS[:count]:
            exec(source.replace('"examples/', f'"{ROOT.as_posix()}/examples/'), namespace)
        return namespace

    return made


@pytest.mark.parametrize("section", SECTIONS)
def test_what_to_write_here_runs(section: str, setup: Callable[[int], Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = setup(1)
    if section in ("SAELens", "circuit-tracer"):
        exec(SETUPS[2], namespace)
    assert len(rows(section)) > 4
    for what, _, here in rows(section):
        source = code(here)
        if here != "(the end of the block)":
            assert source is not None, what
            last_value(source, namespace)


@pytest.mark.parametrize(("what", "there", "here"), [row for row in rows("Plain hooks") if code(row[1])])
def test_hooks_give_the_same(what: str, there: str, here: str, setup: Callable[[int], Any]) -> None:
    sources = code(there), code(here)
    assert all(sources)
    namespaces = setup(1), setup(1)
    by_hook, by_patch = (last_value(str(s), n) for s, n in zip(sources, namespaces, strict=True))
    assert torch.equal(by_hook, by_patch)
    if what != "Keep an output":
        model, inputs = namespaces[1]["model"], namespaces[1]["other" if what == "From another run" else "ids"]
        assert not torch.equal(by_patch, model(inputs).logits)


@pytest.mark.slow
def test_what_one_writes_in_transformer_lens_runs(setup: Callable[[int], Any]) -> None:
    namespace = setup(2)
    ran = [
        last_value(str(code(there)), namespace) is None
        for what, there, _ in rows("TransformerLens")
        if code(there) and not what.startswith("Load") and NOT_OF_CODE not in there
    ]
    assert len(ran) > 6


@pytest.mark.slow
def test_a_hooked_transformer_is_a_module_as_others(setup: Callable[[int], Any]) -> None:
    assert "`PatchableGraph(hooked, ids)` works too" in GUIDE
    namespace = setup(2)
    hooked, ids = namespace["hooked"], namespace["ids"]
    probe = namespace["probe"]
    pg = namespace["PatchableGraph"](hooked, ids)
    with pg.patch({"blocks_1.attn.hook_z.output": probe}):
        logits = pg(ids)
    assert torch.equal(logits, hooked(ids))
    assert torch.equal(probe.activation, hooked.run_with_cache(ids)[1]["z", 1])
    for hook in ("hook_embed", "blocks.1.attn.hook_q", "blocks.0.attn.hook_pattern", "blocks.0.hook_resid_post"):
        path = f"{hook.replace('blocks.', 'blocks_')}.output"
        with pg.patch({path: namespace["ZeroPatch"](slice=(slice(None), -1))}):
            found = pg(ids)
        assert torch.equal(found, hooked.run_with_hooks(ids, fwd_hooks=[(hook, without_last)]))
        assert not torch.equal(found, logits)


def without_last(value: torch.Tensor, hook: Any) -> torch.Tensor:
    return value.index_fill(1, torch.tensor(value.shape[1] - 1), 0)
