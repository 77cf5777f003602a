"""The files by which a project is found, cited, built and released say what is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

import graphpatch_notebook
from tests.versions import OWN, ROWS, chosen_rows

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps_of(file: Path) -> list[str]:
    """Returns the commands of a workflow, with each value of the matrix in its place."""
    commands = []
    for job in yaml.safe_load(file.read_text("utf8"))["jobs"].values():
        matrices: list[dict[str, Any]] = [{}]
        for name, values in job.get("strategy", {}).get("matrix", {}).items():
            matrices = [{**chosen, name: value} for chosen in matrices for value in values]
        for chosen in matrices:
            for step in job["steps"]:
                command = step.get("run", "")
                for name, value in chosen.items():
                    command = command.replace(f"${{{{ matrix.{name} }}}}", value)
                commands.append(command)
    return commands


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_run_commands_that_exist(file: Path) -> None:
    environments = PROJECT["tool"]["hatch"]["envs"]
    commands = steps_of(file)
    assert any(commands)
    for command in commands:
        assert "${{ matrix." not in command
        if (match := re.match(r"hatch run (?:(\S+):)?(\S+)", command)) is not None:
            assert match[2] in environments[match[1] or "default"]["scripts"], command
        if command.startswith("hatch run versions"):
            assert chosen_rows(re.findall(r"'([^']+)'", command))
        if command.startswith(".ci/"):
            assert (ROOT / command).is_file()


def test_classifiers_are_the_pythons_that_tests_run_on() -> None:
    prefix = "Programming Language :: Python :: 3."
    classified = {text.removeprefix(prefix) for text in PROJECT["project"]["classifiers"] if text.startswith(prefix)}
    assert classified == {row[0].removeprefix("3.") for row in ROWS}
    assert {f"3.{minor}" for minor in classified} - {OWN} == {row[0] for row in ROWS} - {OWN}


def test_the_version_is_the_same_everywhere() -> None:
    version = graphpatch_notebook.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf8"))
    assert citation["version"] == version
    assert f"## [{version}] - {citation['date-released']}" in (ROOT / "CHANGELOG.md").read_text("utf8")


def test_the_changelog_of_a_version_is_short() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert {
        section.splitlines()[0]: len(section.splitlines()) for section in sections if section.count("\n") > 120
    } == {}
