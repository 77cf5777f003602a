"""What tests of the magics share: a real IPython shell, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.shells import Shell, opened


@pytest.fixture(autouse=True, scope="session")
def own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """IPython's directory is not the user's: there is the list of session files that the user trusts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        yield


@pytest.fixture
def plain_shell() -> Iterator[Shell]:
    """A shell without the extension."""
    with opened() as shell:
        yield shell


@pytest.fixture
def shell(plain_shell: Shell) -> Shell:
    """A shell with the extension, a small model and an input."""
    plain_shell.ok("%load_ext graphpatch_notebook")
    plain_shell.ok("from tests.notebook.shells import Mlp\nimport torch\nmodel, x = Mlp(), torch.ones(3, 4)")
    return plain_shell


@pytest.fixture
def pg(shell: Shell) -> Shell:
    """The same, with a graph in the variable `pg`."""
    shell.ok("%graphpatch wrap pg = model(x)")
    return shell
