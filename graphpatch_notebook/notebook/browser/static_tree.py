"""The tree as static HTML, which a saved notebook, nbconvert or GitHub shows in place of the browser.

It uses `<details>` without scripts, style sheets or style attributes. The live widget hides it by its classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphpatch_notebook.inspection.tree import Row, TreeEntry, opened
from graphpatch_notebook.notebook.display.labels import escaped
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.workspace import counted

MOST_BYTES = 30_000
_MOST_LINES = 160
_MOST_PATCHES = 100


def static_tree(title: str, entry: TreeEntry, patches: Sequence[ChosenPatch] = ()) -> str:
    """Returns the HTML, of at most about `MOST_BYTES`; all text is escaped.

    Example:
        >>> print(static_tree("pg: ReLU", TreeEntry("<root>", "", "graph")))
        <p><strong>pg: ReLU</strong> (a picture of the tree; to browse it, run the cell)</p>
        <p>No patch is chosen.</p>
        <ul>
        <li><code>&lt;root&gt;</code></li>
        </ul>
    """
    most = _MOST_LINES
    while True:
        lines = [
            f"<p><strong>{escaped(title)}</strong> (a picture of the tree; to browse it, run the cell)</p>",
            *_patch_lines(patches, min(most, _MOST_PATCHES)),
            *("<ul>", *_tree_lines(opened(entry, most), is_open=True), "</ul>"),
        ]
        text = "\n".join(lines)
        if len(text.encode()) <= MOST_BYTES or most < 4:
            return text
        most = most * 2 // 3


def _patch_lines(patches: Sequence[ChosenPatch], most: int) -> Iterator[str]:
    if not patches:
        yield "<p>No patch is chosen.</p>"
        return
    yield f"<p>{counted(len(patches))} chosen:</p>\n<ul>"
    for patch in patches[:most]:
        yield f"<li><code>{escaped(f'#{patch.number} {patch}')}</code>{'' if patch.is_enabled else ' (off)'}</li>"
    if len(patches) > most:
        yield f"<li>… {len(patches) - most} more</li>"
    yield "</ul>"


def _tree_lines(row: Row, *, is_open: bool = False) -> Iterator[str]:
    if row.run:
        yield f"<li><em>{escaped(row.note)}</em></li>"
        return
    text = f"<code>{escaped(row.entry.name)}</code>"
    label = f": {escaped(row.entry.label)}" if row.entry.label else ""
    if not row.rows:
        yield f"<li>{text}{label}{escaped(row.note)}</li>"
        return
    yield f"<li><details{' open' * is_open}><summary>{text}{label}{escaped(row.note)}</summary>\n<ul>"
    for child in row.rows:
        yield from _tree_lines(child)
    yield "</ul>\n</details></li>"
