"""What an import brings in and gives out, under both names."""

from __future__ import annotations

import builtins
import email
import importlib
import importlib.resources
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import pytest

import graphpatch_notebook
from graphpatch_notebook import errors

ROOT = Path(__file__).parents[1]
HEAVY = "IPython accelerate anywidget bitsandbytes ipywidgets rich safetensors traitlets transformers".split()
# What few programs use, among the modules of the package.
LATER = (
    "patching.compiled_model",
    "experiments",
    "graphs.plain_fx",
    "graphs.verification",
    "notebook",
    "files",
)


def test_all_is_sorted_and_unique() -> None:
    assert graphpatch_notebook.__all__ == sorted(set(graphpatch_notebook.__all__))


def test_all_is_exact() -> None:
    assert all(hasattr(graphpatch_notebook, name) for name in graphpatch_notebook.__all__)  # some are imported by this
    public = {
        name
        for name, value in vars(graphpatch_notebook).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - {"annotations", "load_ipython_extension", "unload_ipython_extension"} == set(
        graphpatch_notebook.__all__
    )


def test_alias_is_the_package_under_another_name_with_one_copy_of_each_module_and_light() -> None:
    source = """
import sys, torch
before = set(sys.modules)
import graphpatch, graphpatch_notebook
print(*set(sys.modules) - before)
for module in (graphpatch, graphpatch_notebook):
    assert set(module.__all__) <= set(dir(module)), module
assert graphpatch.__all__ == graphpatch_notebook.__all__
assert graphpatch.__version__ == graphpatch_notebook.__version__
for name in graphpatch.__all__:
    assert getattr(graphpatch, name) is getattr(graphpatch_notebook, name), name
for name in ("load_ipython_extension", "unload_ipython_extension"):
    assert getattr(graphpatch, name, None) is getattr(graphpatch_notebook, name, None), name
namespace = {}
exec("from graphpatch import *", namespace)
assert set(graphpatch.__all__) == set(namespace) - {"__builtins__"}
try:
    graphpatch.no_such_name
except AttributeError as error:
    print(error)
import graphpatch.experiments.attribution.rules
from graphpatch.patches.kinds import ZeroPatch
import pickle
both = {name: module for name, module in sys.modules.items() if name.startswith("graphpatch.")}
assert "graphpatch.experiments.attribution.rules" in both
for name, module in both.items():
    assert module is sys.modules[name.replace("graphpatch", "graphpatch_notebook", 1)], name
    assert module.__name__ == module.__spec__.name != name, name
assert ZeroPatch is graphpatch_notebook.ZeroPatch is type(pickle.loads(pickle.dumps(ZeroPatch())))
try:
    import graphpatch.no_such_module
except ModuleNotFoundError as error:
    print(error.name)
"""
    done = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True)
    modules, error, missing = done.stdout.splitlines()
    assert missing == "graphpatch.no_such_module"
    imported = {module.split(".")[0] for module in modules.split()}
    assert {"graphpatch", "graphpatch_notebook"} <= imported
    assert not imported & set(HEAVY)
    assert "torch._dynamo" not in modules.split()  # takes as long as torch itself
    assert [module for module in modules.split() if module.removeprefix("graphpatch_notebook.").startswith(LATER)] == []
    assert "has no attribute 'no_such_name'" in error


@pytest.mark.parametrize("module", ["graphpatch", "graphpatch_notebook"])
def test_experiments_that_are_imported_from_the_package_are_answered_with_where_they_are(module: str) -> None:
    for name in importlib.import_module("graphpatch_notebook.experiments").__all__:
        if name in graphpatch_notebook.__all__:
            continue
        with pytest.raises(ImportError, match=rf"from graphpatch_notebook.experiments import {name}$"):
            exec(f"from {module} import {name}", {})
    with pytest.raises(ImportError, match="cannot import name 'causal_traces'"):
        exec(f"from {module} import causal_traces", {})
    assert not hasattr(sys.modules[module], "no.such")
    exec(f"from {module} import experiments", {})


@pytest.mark.parametrize("module", ["graphpatch_notebook", "graphpatch_notebook.experiments", "graphpatch"])
def test_names_that_were_removed_are_answered_with_what_to_write(module: str) -> None:
    for name, now in errors.REMOVED.items():
        with pytest.raises(ImportError, match=re.escape(now)):
            exec(f"from {module} import {name}", {})
        named = now.split(",")[0]
        assert not named.isidentifier() or hasattr(graphpatch_notebook, named) or hasattr(builtins, named)
    for kind in errors.KINDS.values():
        assert f"`{kind}`" in str(graphpatch_notebook.GraphPatchWarning.__doc__)


def test_removed_names_are_kept_for_one_version() -> None:
    assert graphpatch_notebook.__version__.startswith(("0.1.", "0.2.")), "delete `_REMOVED`"


def test_the_package_holds_what_the_wheel_is_to_hold() -> None:
    package = ROOT / "graphpatch_notebook"
    there = {file.relative_to(package) for file in package.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    data = {"py.typed", *(f"static/{name}" for name in (*hatch_build().BUNDLE, "source.sha256"))}
    assert {file.as_posix() for file in there if file.suffix != ".py"} == data


def hatch_build() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "js" / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bundle_is_what_its_sources_make() -> None:
    """`npm run build` wrote the stamp by the digest of js/build.mjs: both digests are the same."""
    stamp = ROOT / "graphpatch_notebook" / "static" / "source.sha256"
    assert stamp.read_text("utf8").strip() == hatch_build().digest(ROOT), "js/ was changed: npm run build"


def test_a_bundle_of_other_sources_is_out_of_date(tmp_path: Path) -> None:
    hook = hatch_build()
    others = ("js/__pycache__/x.pyc", "js/node_modules/.vite/x.json", "js/tests/x.test.ts")
    for name in (*hook.SOURCES[1:], "js/src/index.ts", *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"one\r\ntwo")
    static = tmp_path / "graphpatch_notebook" / "static"
    static.mkdir(parents=True)
    for name in hook.BUNDLE:
        (static / name).touch()
    assert not hook.is_current(tmp_path)
    (static / "source.sha256").write_text(hook.digest(tmp_path) + "\n")
    assert hook.is_current(tmp_path)
    for name in others:
        (tmp_path / name).write_bytes(b"other")
    (tmp_path / "package.json").write_bytes(b"one\ntwo")  # as git may check it out
    assert hook.is_current(tmp_path)
    (tmp_path / "js/src/new.ts").write_bytes(b"")
    assert not hook.is_current(tmp_path)
    (tmp_path / "js/src/new.ts").unlink()
    (static / "widget.css").unlink()
    assert not hook.is_current(tmp_path)


MAGICS = (ROOT / "docs" / "guides" / "magics.md").read_text("utf8")
START = (ROOT / "docs" / "index.md").read_text("utf8")
SESSION = re.search(r"```text\n(In \[1\]: .*?)```", MAGICS, re.DOTALL)


def test_the_session_of_magics_shows_what_ipython_shows(tmp_path: Path) -> None:
    """It goes on from the example on the start page."""
    assert SESSION is not None
    cells = re.split(r"^In \[\d+\]: ", SESSION[1], flags=re.MULTILINE)[1:]
    typed = ["\n".join([cell.split("\n")[0], *re.findall(r"^ +\.\.\.: (.*)", cell, re.MULTILINE)]) for cell in cells]
    typed = [f"{cell}\n\n" if cell.startswith("%%") else cell for cell in typed]  # ends a cell magic at this prompt
    script = tmp_path / "example.py"
    script.write_text(re.findall(r"```python\n(.*?)```", START, re.DOTALL)[0], "utf8")
    arguments = "-m IPython --simple-prompt --no-banner --colors=NoColor --no-confirm-exit -i".split()
    settings = {"IPYTHONDIR": str(tmp_path), "PYTHONIOENCODING": "utf8"}
    shown = subprocess.run(
        [sys.executable, *arguments, str(script)],
        check=True,
        capture_output=True,
        text=True,
        encoding="utf8",
        input="\n".join(typed) + "\n",
        env={**os.environ, **settings},
        cwd=tmp_path,
    ).stdout
    # A pipe has no echo of what is typed, and the page no `Out[3]:` and no empty lines.
    outputs = re.split(r"^In \[\d+\]: ", shown, flags=re.MULTILINE)[1 : len(cells) + 1]
    for cell, output in zip(cells, outputs, strict=True):
        printed = re.sub(r"^( *\.\.\.: )+|Out\[\d+\]: ?\n?", "", output)
        written = "\n".join(line for line in cell.split("\n")[1:] if not line.lstrip().startswith("...:"))
        assert _without_gaps(printed) == _without_gaps(written)


def _without_gaps(text: str) -> list[str]:
    return [re.sub(r"\(\d+\.\d s\)", "(0.0 s)", line.rstrip()) for line in text.split("\n") if line.strip()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as an installer does: from the source distribution, where there is no npm."""
    folder = tmp_path_factory.mktemp("dist")
    # A scratch copy keeps what lies about in a checkout out of it.
    checkout = folder / "checkout"
    ignored = shutil.ignore_patterns(".*", "node_modules", "__pycache__")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    _build(checkout, "sdist", folder)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    _build(folder / source.name.removesuffix(".tar.gz"), "wheel", folder)
    (built,) = folder.glob("*.whl")
    return built


def _build(project: Path, target: str, folder: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=project, env={**os.environ, "PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    assert "warn" not in (done.stdout + done.stderr).lower()


def test_the_wheel_holds_the_package_and_its_alias(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    here = (ROOT / "graphpatch_notebook").rglob("*")
    files = {file.relative_to(ROOT).as_posix() for file in here if file.is_file() and file.suffix != ".pyc"}
    assert names == {name for name in files if "/_alias/" not in name} | {"graphpatch.py"}
    assert {Path(name).suffix for name in names} == {".css", ".js", ".py", ".sha256", ".typed"}


def test_the_metadata_is_whole(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (file,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(file))
    assert (metadata["Name"], metadata["Version"]) == ("graphpatch-notebook", graphpatch_notebook.__version__)
    assert (metadata["License-Expression"], metadata["License-File"]) == ("MIT", "LICENSE")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Requires-Python"] == ">=3.10"
    assert {*metadata.get_all("Provides-Extra", [])} == {"all", "experiments", "quantized", "remote", "transformers"}
    assert len(metadata.get_all("Classifier", [])) > 5
    assert metadata["Summary"]
