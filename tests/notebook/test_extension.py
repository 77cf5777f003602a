"""Loading and unloading: what is added to IPython, that it is all taken away again, and what it costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.shells import Shell

pytestmark = pytest.mark.hosts


def everything(shell: Shell) -> dict[str, Any]:
    """Returns whatever an extension may change in a shell."""
    ip = shell.ip
    return {
        "magics": {kind: dict(table) for kind, table in ip.magics_manager.magics.items()},
        "registry": dict(ip.magics_manager.registry),
        "cleanup": list(ip.input_transformers_cleanup),
        "post": list(ip.input_transformers_post),
        "lines": list(ip.input_transformer_manager.line_transforms),
        "ast": list(ip.ast_transformers),
        "matchers": list(ip.Completer.custom_matchers),
        "events": {name: list(callbacks) for name, callbacks in ip.events.callbacks.items()},
        "hooks": sorted(ip.hooks),
        "names": {name for name in ip.user_ns if not name.startswith("_")},
        "attributes": set(vars(ip)),
        "builtins": set(vars(__import__("builtins"))),
        "display": sys.displayhook,
    }


@pytest.mark.parametrize("names", [["graphpatch_notebook"], ["graphpatch"], ["graphpatch", "graphpatch_notebook"]])
def test_unloading_leaves_ipython_as_it_was(plain_shell: Shell, names: list[str]) -> None:
    shell = plain_shell
    shell.run("%unload_ext nothing")  # IPython makes its own magics when they are first used
    before = everything(shell)
    for name in names * 2:
        shell.run(f"%load_ext {name}")
    assert "graphpatch" in shell.ip.magics_manager.magics["line"]
    shell.ok("import torch\nmodel = torch.nn.ReLU()\n%graphpatch wrap pg = model(torch.ones(2))")
    shell.ok("%graphpatch zero relu")
    shell.ok("%%graphpatch\npg(torch.ones(2));")
    for name in names * 2:
        shell.run(f"%unload_ext {name}")
    shell.ok("pg(torch.ones(2));")
    assert {"pg", "model", "torch"} <= everything(shell)["names"]
    shell.ok("del pg, model, torch")
    assert everything(shell) == before
    assert "not found" in shell.refused("%graphpatch")
    assert "not found" in shell.refused("%%graphpatch\n1")


FIRST_USES = [
    'assert "zero" in completed("%graphpatch ze")',
    'assert completed("pg.graph.hi") == {"hidden"}',
    'assert "output" in completed("pg.patch({\\"up.")',
    'assert "%graphpatch wrap" in shell.ok("%graphpatch help").out',
    'assert "unknown command" in shell.refused("%graphpatch zreo up")',
    'shell.ok("%graphpatch zero down.output"); assert not shell.ok("%%graphpatch\\npg(x)").value.any()',
    'assert torch.equal(shell.ok("%%graphpatch\\npg(x)").value, model(x))',
    'assert "is a command" in shell.refused("%%graphpatch zero\\npg(x)")',
    'shell.ok("%unload_ext graphpatch_notebook"); assert "not found" in shell.refused("%graphpatch")',
]
LOADING = """
import os, sys, traceback
import torch
from IPython.core.completer import provisionalcompleter
from tests.notebook.shells import Mlp, opened

def completed(text):
    with provisionalcompleter():
        return {completion.text for completion in shell.ip.Completer.completions(text, len(text))}

with opened() as shell:
    known = set(sys.modules)
    shell.ok("%load_ext graphpatch_notebook")
    print(*set(sys.modules) - known, flush=True)
    from graphpatch_notebook import PatchableGraph
    model, x = Mlp(), torch.ones(3, 4)
    shell.namespace.update(pg=PatchableGraph(model, x), x=x)
    for first_use in sys.argv[1:]:
        if not (child := os.fork()):
            try:
                exec(first_use)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, first_use
"""


def test_loading_imports_little_and_the_rest_at_its_first_use() -> None:
    """How long it takes is in the benchmark (`tests/benchmarks/notebook.py`): a busy machine is no failure."""
    command = [sys.executable, "-c", LOADING, *FIRST_USES]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    heavy = {"rich", "ipywidgets", "anywidget", "transformers", "safetensors", "matplotlib", "torch._dynamo"}
    imported = set(done.stdout.split("\n")[0].split())
    assert not imported & heavy
    package = "graphpatch_notebook"
    later = (f"{package}.files", f"{package}.experiments")
    assert not [module for module in imported if module.startswith(later)]
    components = {module for module in imported if module.startswith(f"{package}.components.")}
    known = ("dimensions", "names", "operations")  # contexts ask which dimension is which
    assert components == {f"{package}.components.{name}" for name in known}
    notebook = {module for module in imported if module.startswith(f"{package}.notebook.")}
    assert {module.removeprefix(f"{package}.notebook.") for module in notebook} == {
        "extension",
        "magics",
        "magics.cells",
        "messages",
        "session",
        "session.chosen_patch",
        "session.expressions",
    }
