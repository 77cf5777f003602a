"""Tables that display as plain text, as colored text in a terminal, and as HTML in a notebook.

The cells can contain text from anywhere, such as names in a model or of files. It is always shown as plain text.
"""

from __future__ import annotations

import html
import html as html_module
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from graphpatch_notebook.capture.records import SourceLine
from graphpatch_notebook.inspection.tree import CSS_STYLES, Style, colored, is_color_terminal
from graphpatch_notebook.texts import is_joiner
from graphpatch_notebook.values import TensorSpec, ValueSpec, dtype_name

Item = TypeVar("Item")

MAX_ROWS = 50
_GAP = 2
# A narrower column would be unreadable; in a narrower terminal, lines wrap instead.
_NARROWEST = 12


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    style: Style = "name"
    is_cut: bool = False  # in a narrow terminal; in HTML, its text wraps


class Table(Sequence[Item]):
    """A sequence of items that displays as a table with one row for each item.

    `cells` returns the text of each column for an item, only for rows that are displayed: at most `max_rows`. `notes`
    are lines below the table, and `how_to_narrow` says how to get fewer rows.

    Example:
        >>> Table([Column("name"), Column("size")], ["a", "bcd"], lambda text: [text, str(len(text))], title="Texts")
        Texts
        name  size
        a     1
        bcd   3
    """

    def __init__(
        self,
        columns: Sequence[Column],
        items: Sequence[Item],
        cells: Callable[[Item], Sequence[str]],
        *,
        title: str = "",
        notes: Iterable[str] = (),
        empty: str = "nothing",
        how_to_narrow: str = "",
        max_rows: int = MAX_ROWS,
    ) -> None:
        self.columns = tuple(columns)
        self._titles = [column.title for column in columns]
        self.title = visible(title)
        self.notes = tuple(map(visible, notes))
        self._items = items
        self._cells = cells
        self._empty = visible(empty)
        self._how_to_narrow = how_to_narrow
        self._max_rows = max_rows

    # --- the sequence -----------------------------------------------------------------------------------------------

    def __getitem__(self, position: Any) -> Any:
        return self._items[position]

    def __len__(self) -> int:
        return len(self._items)

    # --- display ----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return "\n".join("".join(text for text, _ in line).rstrip() for line in self._lines())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        if len(printer.stack) > 1:  # inside a list or dict, a table would be unreadable
            printer.text(f"<{type(self).__name__} of {len(self):,} rows>")
            return
        # Fitted to the width of the terminal.
        lines = self._lines(shutil.get_terminal_size().columns)
        printer.text(colored(lines) if is_color_terminal() else repr(self))

    def _lines(self, width: int | None = None) -> Iterator[list[tuple[str, Style]]]:
        """Yields the lines, in parts with separate colors; in a terminal of this width, some columns are cut."""
        rows = self._shown_rows()
        if self.title:
            yield [(self.title, "name")]
        if rows:
            widths = [max(map(_width, column)) for column in zip(*rows, self._titles, strict=True)]
            excess = 0 if width is None else sum(widths) + _GAP * (len(widths) - 1) - width
            for at in reversed([at for at, column in enumerate(self.columns) if column.is_cut]):
                given = max(0, min(excess, widths[at] - _NARROWEST))
                widths[at] -= given
                excess -= given
            notes: list[Style] = ["note"] * len(widths)
            styles = [column.style for column in self.columns]
            for row, of in [(self._titles, notes), *((row, styles) for row in rows)]:
                *cells, last = map(_padded, row, widths)
                yield [*zip([*cells, last.rstrip()], of, strict=True)]
        for line in self._footer():
            yield [(line, "note")]

    def _repr_html_(self) -> str:
        rows = self._shown_rows()
        head = "".join(_html_cell("th", title, "opacity:.7;font-weight:600") for title in self._titles)
        styles = [CSS_STYLES[column.style] + (_CSS_WRAPPED if column.is_cut else "") for column in self.columns]
        body = "\n".join(
            "<tr>" + "".join(_html_cell("td", *cell) for cell in zip(row, styles, strict=True)) + "</tr>"
            for row in rows
        )
        table = f'<table style="border-collapse:collapse;margin:0"><thead><tr>{head}</tr></thead>'
        table = f"{table}\n<tbody>{body}</tbody></table>" if rows else ""
        title = f'<div style="font-weight:600">{html_module.escape(self.title)}</div>' if self.title else ""
        footer = "".join(f'<div style="opacity:.7">{html_module.escape(line)}</div>' for line in self._footer())
        return f'<div style="overflow-x:auto">{title}{table}{footer}</div>'

    def _shown_rows(self) -> list[list[str]]:
        return [[visible(cell) for cell in self._cells(self._items[i])] for i in range(min(len(self), self._max_rows))]

    def _footer(self) -> Iterator[str]:
        if not len(self):
            yield self._empty
        elif (hidden := len(self) - self._max_rows) > 0:
            yield f"… {hidden:,} more" + (f": {self._how_to_narrow}" if self._how_to_narrow else "")
        yield from self.notes


def _padded(cell: str, width: int) -> str:
    text = cell if _width(cell) <= width else f"{cell[: width - 1]}…"
    return text + " " * (width - _width(text) + _GAP)


def _width(text: str) -> int:
    """Returns the width of `text` in columns of a terminal."""
    return len(text) if text.isascii() else sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


# Appended to the style of a cell: long text wraps instead of running off the page.
_CSS_WRAPPED = ";white-space:pre-wrap;overflow-wrap:anywhere;min-width:16ch"


def _html_cell(tag: str, text: str, style: str) -> str:
    # Set on each cell, because JupyterLab right-aligns tables and uses a proportional font.
    fixed = "text-align:left;vertical-align:top;padding:1px 12px 1px 0;white-space:pre;font-family:monospace"
    return f'<{tag} style="{fixed};{style}">{html_module.escape(text)}</{tag}>'


# --------------------------------------------------------------------------------------------------------------------
# Short labels for values, ops and source lines, and safe display of text from models and files


_LONGEST = 300
_DTYPE = re.compile(r"(bfloat|float|complex|uint|int)(\d.*)")
_SHORT = {"bfloat": "bf", "float": "f", "complex": "c", "uint": "u", "int": "i"}


def visible(text: str, longest: int | None = _LONGEST) -> str:
    r"""Returns text from the model or the user on one line, with control characters escaped.

    Example:
        >>> print(visible("a\x1b[31m\nb"))
        a\x1b[31m\nb
    """
    text = text if longest is None or len(text) <= longest else f"{text[:longest]}…"
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or is_joiner(text, at) else c.encode("unicode_escape").decode()
        for at, c in enumerate(text)
    )


def escaped(text: str) -> str:
    """Returns text from the model or the user as escaped HTML, on one line like `visible`."""
    return html.escape(visible(text))


def dtype_label(dtype: torch.dtype) -> str:
    """Returns the short name of a dtype.

    Example:
        >>> dtype_label(torch.bfloat16), dtype_label(torch.float8_e4m3fn), dtype_label(torch.bool)
        ('bf16', 'f8_e4m3fn', 'bool')
    """
    name = dtype_name(dtype)
    match = _DTYPE.fullmatch(name)
    return f"{_SHORT[match[1]]}{match[2]}" if match else name


def spec_label(spec: ValueSpec) -> str:
    """Returns a short label of a recorded value: `[1, 128] f32` for a tensor."""
    return value_label(spec.shape, spec.dtype, str(spec)) + spec.badge if isinstance(spec, TensorSpec) else str(spec)


def value_label(shape: Sequence[int] | None, dtype: torch.dtype | None, words: str) -> str:
    """Returns a short label of a value from its shape, its dtype, and its text in the tree.

    Example:
        >>> value_label([3, 2], torch.float32, "Tensor(3, 2)"), value_label(None, None, "int(5)")
        ('[3, 2] f32', 'int(5)')
    """
    if shape is None or dtype is None:
        return words
    name = words.partition("(")[0]
    return f"{'' if name == 'Tensor' else f'{name} '}{list(shape)} {dtype_label(dtype)}"


def source_label(lines: Sequence[SourceLine], owner: str) -> str:
    """Returns the file, the line and the code that compute a value."""
    if not lines:
        return f"of {owner}"
    return f"{file_label(lines[-1].file)}:{lines[-1].line}  {lines[-1].text}"


def file_label(file: str) -> str:
    """Returns a readable name of a file of code: its name, or the notebook cell that it belongs to.

    Example:
        >>> file_label("/lib/models/gpt2.py"), file_label("<ipython-input-3-1f>"), file_label("/tmp/ipykernel_7/99.py")
        ('gpt2.py', 'In[3]', 'cell')
    """
    if prompt := re.match(r"<ipython-input-(\d+)-", file):
        return f"In[{prompt[1]}]"
    if re.search(r"[/\\]ipykernel_\d+[/\\]", file):
        return "cell"  # the file of a cell has a meaningless number as its name
    return re.split(r"[/\\]", file)[-1]
