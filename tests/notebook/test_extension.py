"""Loading and unloading: what is added to IPython, that it is all taken away again, and what it costs."""

from __future__ import annotations

import subprocess
import sys
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


def test_loading_twice_changes_nothing(plain_shell: Shell) -> None:
    plain_shell.ok("%load_ext graphpatch_notebook")
    loaded = everything(plain_shell)
    plain_shell.ok("%load_ext graphpatch")
    plain_shell.ok("%load_ext graphpatch_notebook")
    assert everything(plain_shell) == loaded
    plain_shell.ok("%reload_ext graphpatch_notebook")
    assert len(everything(plain_shell)["cleanup"]) == len(loaded["cleanup"])


def test_unloading_one_name_leaves_the_other(plain_shell: Shell) -> None:
    plain_shell.ok("%load_ext graphpatch")
    plain_shell.ok("%load_ext graphpatch_notebook")
    loaded = everything(plain_shell)
    plain_shell.ok("%unload_ext graphpatch")
    assert everything(plain_shell) == loaded
    plain_shell.ok("%unload_ext graphpatch_notebook")
    assert "not found" in plain_shell.refused("%graphpatch")


def test_a_magic_of_the_same_name_comes_back(plain_shell: Shell) -> None:
    plain_shell.ok("get_ipython().register_magic_function(lambda line: 'mine', 'line', 'graphpatch')")
    plain_shell.ok("%load_ext graphpatch_notebook")
    assert plain_shell.ok("%graphpatch").value != "mine"
    plain_shell.ok("%unload_ext graphpatch_notebook")
    assert plain_shell.ok("%graphpatch").value == "mine"


LOADING = """
import sys
import torch
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
known = set(sys.modules)
shell.run_line_magic("load_ext", "graphpatch_notebook")
print(*set(sys.modules) - known)
"""


def test_loading_imports_nothing_heavy() -> None:
    """How long it takes is in the benchmark (`tests/benchmarks/notebook.py`): a busy machine is no failure."""
    done = subprocess.run([sys.executable, "-c", LOADING], check=True, capture_output=True, text=True)
    heavy = {"rich", "ipywidgets", "anywidget", "transformers", "safetensors", "matplotlib", "torch._dynamo"}
    imported = set(done.stdout.split())
    assert "graphpatch_notebook.notebook.magics.commands" in imported
    assert not imported & heavy
    package = "graphpatch_notebook"
    later = (f"{package}.serialization", f"{package}.experiments", f"{package}.notebook.browser")
    assert not [module for module in imported if module.startswith(later)]
    components = {module for module in imported if module.startswith(f"{package}.components.")}
    assert components == {f"{package}.components.names", f"{package}.components.operations"}
