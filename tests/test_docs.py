"""The code in the documents runs, and what it prints or raises is what is written below it."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from graphpatch_notebook import GraphPatchWarning
from tests.versions import SELECTION

ROOT = Path(__file__).parents[1]
HAVE_TESTS_OF_THEIR_OWN = {"extending.md", "coming_from.md", "remote.md", "sharded.md"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
PAGES_WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text("utf8"))]


def ids(pages: list[Path]) -> list[str]:
    return [page.relative_to(ROOT).as_posix() for page in pages]


def run(source: str, names: dict[str, Any], file: Path) -> tuple[str, str]:
    """Returns what the code prints, and the error that it raises or the warning of this package that it gives."""
    file.write_text(source, "utf8")  # capture reads the names of variables from the source
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as given, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            exec(compile(source, str(file), "exec", dont_inherit=True), names)
        except Exception as error:
            return printed.getvalue(), f"{type(error).__name__}: {error}"
    ours = [warning for warning in given if issubclass(warning.category, GraphPatchWarning)]
    return printed.getvalue(), "\n".join(f"{warning.category.__name__}: {warning.message}" for warning in ours)


@pytest.mark.parametrize(
    "page",
    pages := [page for page in PAGES_WITH_CODE if page.name not in HAVE_TESTS_OF_THEIR_OWN],
    ids=ids(pages),
)
def test_code_gives_what_is_written_below_it(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order, in one namespace, as in a notebook in the root of a clone."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for number, (source, expected) in enumerate(BLOCK.findall(page.read_text("utf8"))):
        printed, message = run(source, names, tmp_path / f"block_{number}.py")
        if message:
            assert (printed + message).split() == expected.split(), source
        else:
            assert printed == expected, source


def test_there_are_messages_in_the_page_on_troubleshooting() -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "troubleshooting.md").read_text("utf8"))
    assert sum(": " in expected for _, expected in blocks) > 8


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_commands_exist(page: Path) -> None:
    settings = (ROOT / "pyproject.toml").read_text("utf8")
    for command in set(re.findall(r"hatch run (?:[\w-]+:)?([\w-]+)", page.read_text("utf8"))):
        assert re.search(rf"^{command} = ", settings, re.MULTILINE), command


def test_the_tests_that_run_with_other_versions_exist() -> None:
    assert not [name for name in SELECTION if not (ROOT / "tests" / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_linked_files_exist(page: Path) -> None:
    """The site checks links between its pages; this checks those of files that are not pages, too."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)", page.read_text("utf8"))
    on_github = "../../actions/"  # beside the repository: the runs of its workflows
    missing = [t for t in targets if not t.startswith(on_github) and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "extending.md"], ids=lambda page: page.stem)
def test_pages_import_by_one_name(page: Path) -> None:
    assert not re.findall(r"(?:from|import) graphpatch_notebook[\w.]* ", page.read_text("utf8"))


def test_readme_is_one_short_page() -> None:
    assert len((ROOT / "README.md").read_text("utf8").splitlines()) <= 150
