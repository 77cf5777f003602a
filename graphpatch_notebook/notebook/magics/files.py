"""The commands that export code, and that save and load the chosen patches."""

from __future__ import annotations

import keyword
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpatch_notebook.components.names import is_component_name
from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.inspection.resolution import resolve
from graphpatch_notebook.notebook.display.labels import visible
from graphpatch_notebook.notebook.session import session_file
from graphpatch_notebook.notebook.session.session_file import digest, real_file, replace_text
from graphpatch_notebook.notebook.session.workspace import Workspace, counted, is_a
from graphpatch_notebook.patchable_graph import captured

if TYPE_CHECKING:
    from graphpatch_notebook.notebook.export.source_code import SourceCode

# The first line of an exported file, followed by a hash of the rest. A file whose hash matches may be overwritten.
MARK = "# Written by %graphpatch export, sha256 "


def export(workspace: Workspace, args: Namespace) -> SourceCode | None:
    """Returns the chosen patches as Python code. With a target, writes the code there instead, and returns `None`."""
    from graphpatch_notebook.notebook.export import patch_code

    session, target = workspace.current().session, args.o
    is_variable = target is not None and target.isidentifier()
    if is_variable and keyword.iskeyword(target):
        raise SessionError(f"{target!r} is a keyword and cannot be a variable name; for a file, write ./{target}")
    # A file runs on its own, so it also contains the code that creates the graph.
    code = patch_code.export(session, wrap=target is not None and not is_variable)
    if is_variable:
        _to_variable(workspace.namespace, target, code, args.force)
    elif target is not None:
        _to_file(target, code, args.force)
    if args.cell:
        workspace.put_in_new_cell(code.rstrip("\n"))
        print("the code is in a new cell")
    return code if target is None and not args.cell else None


def _to_variable(namespace: dict[str, Any], name: str, code: SourceCode, is_forced: bool) -> None:
    from graphpatch_notebook.notebook.export.source_code import SourceCode

    there = namespace.get(name)
    if name in namespace and not is_a(there, SourceCode) and not is_forced:
        raise SessionError(
            f"the variable {name!r} holds an object of type {type(there).__name__} that export did not create; "
            "choose another name, or add --force"
        )
    namespace[name] = code
    print(f"the code is in the variable {name}")


def _to_file(file: str, code: SourceCode, is_forced: bool) -> None:
    try:
        target = real_file(file)
        if target.exists() and not is_forced:
            _check_overwritten(target)
        replace_text(target, f"{MARK}{digest(str(code))}\n{code}")
    except OSError as error:
        raise SessionError(f"{file!r} cannot be written: {error.strerror or error}") from None
    print(f"the code is in {file}")


def _check_overwritten(target: Path) -> None:
    try:
        first, _, rest = target.read_text("utf8").partition("\n")
    except UnicodeDecodeError:
        first = rest = ""
    if first.startswith(MARK) and first == f"{MARK}{digest(rest)}":
        return
    what = (
        "was changed since %graphpatch export wrote it"
        if first.startswith(MARK)
        else "was not written by %graphpatch export"
    )
    raise SessionError(f"{str(target)!r} {what}; choose another file, or add --force")


# --------------------------------------------------------------------------------------------------------------------
# Sessions


def save(workspace: Workspace, args: Namespace) -> None:
    """Saves the chosen patches to a file."""
    session = workspace.current().session
    session_file.save(session, args.file, force=args.force)
    print(f"saved {counted(len(session.chosen.patches))} to {args.file}")


def load(workspace: Workspace, args: Namespace) -> None:
    """Replaces the chosen patches by those in a file."""
    session = workspace.current().session
    before = len(session.chosen.patches)
    patches = session_file.load(session, args.file, is_trusted=args.trust)
    instead = f", replacing {counted(before)}; use undo to restore those" if before else ""
    print(f"loaded {counted(len(patches))} from {args.file}{instead}")
    for one in patches:
        if is_component_name(one.path):
            print(f"#{one.number}: {one.path} is {resolve(captured(session.graph).root, one.path).path} here")
    code = {f"#{one.number} {visible(str(one.value), None)}": one.untrusted for one in patches if one.untrusted}
    for file in dict.fromkeys(code.values()):
        print(f"these values are code, which does not run until you trust the file: {'; '.join(code)}")
        print(f"after you have read them, trust the file: {file.repair}")
