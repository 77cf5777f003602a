"""Tables that display as plain text, as colored text in a terminal, and as HTML in a notebook.

The cells can contain text from anywhere, such as names in a model or of files. It is always shown as plain text.
"""

from __future__ import annotations

import html as html_module
import io
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from graphpatch_notebook.inspection.tree import CSS_STYLES, RICH_STYLES, Style, is_color_terminal
from graphpatch_notebook.notebook.display.labels import visible

if TYPE_CHECKING:
    from rich.console import Group

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
    is_cut: bool = False  # in a narrow terminal; the text of other columns wraps
    is_whole: bool = False  # never cut or wrapped, so that it can be copied
    is_optional: bool = False  # left out without enough space


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
        notes: Sequence[str] | Callable[[], Iterable[str]] = (),
        empty: str = "nothing",
        how_to_narrow: str = "",
        max_rows: int = MAX_ROWS,
    ) -> None:
        self.columns = tuple(columns)
        self.title = visible(title)
        self._notes = notes
        self._items = items
        self._cells = cells
        self._empty = visible(empty)
        self._how_to_narrow = how_to_narrow
        self._max_rows = max_rows

    # --- the sequence -----------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, position: int) -> Item: ...

    @overload
    def __getitem__(self, position: slice) -> Sequence[Item]: ...

    def __getitem__(self, position: int | slice) -> Item | Sequence[Item]:
        return self._items[position]

    def __len__(self) -> int:
        return len(self._items)

    @property
    def notes(self) -> tuple[str, ...]:
        """The lines below the table."""
        return tuple(map(visible, self._notes() if callable(self._notes) else self._notes))

    # --- display ----------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        rows = self._shown_rows()
        widths = [max(map(_width, column)) for column in zip(*rows, self._titles(), strict=True)]
        lines = [_plain_line(row, widths) for row in (self._titles(), *rows)] if rows else []
        return "\n".join(filter(None, (self.title, *lines, *self._footer())))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        if len(printer.stack) > 1:  # inside a list or dict, a table would be unreadable
            printer.text(f"<{type(self).__name__} of {len(self):,} rows>")
            return
        printer.text(self._colored() if is_color_terminal() else repr(self))

    def _colored(self) -> str:
        """Returns the table with ANSI colors, fitted to the width of the terminal."""
        from rich.console import Console

        width = shutil.get_terminal_size().columns
        console = Console(
            file=io.StringIO(), force_terminal=True, force_jupyter=False, color_system="standard", width=width
        )
        needed = sum(w + _GAP for w in self._fitted(self._shown_rows(), width) if w)
        if any(column.is_whole for column in self.columns):
            console.width = max(width, needed)  # the terminal wraps such lines, so copied text stays complete
        with console.capture() as captured:
            console.print(self.__rich__(width))
        return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))

    def __rich__(self, width: int | None = None) -> Group:
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        rows = self._shown_rows()
        grid = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
        widths = self._fitted(rows, width or shutil.get_terminal_size().columns)
        shown = [i for i, column_width in enumerate(widths) if column_width or not self.columns[i].is_optional]
        for i in shown:
            column = self.columns[i]
            is_cut = column.is_cut or column.is_whole
            overflow = {"overflow": "ellipsis", "no_wrap": True} if is_cut else {"overflow": "fold"}
            grid.add_column(column.title, style=RICH_STYLES[column.style], width=widths[i], **overflow)
        for row in rows:
            grid.add_row(*(Text(row[i]) for i in shown))  # a string would be parsed as markup such as `[red]`
        texts = [Text(self.title, style="bold")] if self.title else []
        return Group(*texts, *([grid] if rows else ()), *(Text(line, style="dim") for line in self._footer()))

    def _fitted(self, rows: Sequence[Sequence[str]], width: int) -> list[int]:
        """Returns the widths of the columns in a terminal of this width; 0 for a column that is omitted."""
        widths = [max(map(_width, column)) for column in zip(*rows, self._titles(), strict=True)]
        excess = sum(widths) + _GAP * len(widths) - width
        # Optional columns first, then columns that are truncated, then the widest.
        order = sorted(
            (i for i, column in enumerate(self.columns) if not column.is_whole),
            key=lambda i: (not self.columns[i].is_optional, not self.columns[i].is_cut, -widths[i]),
        )
        for i in order:
            given = max(0, min(excess, widths[i] - _NARROWEST))
            if given < excess and self.columns[i].is_optional:
                given = widths[i]
                excess -= _GAP
            widths[i] -= given
            excess -= given
        return widths

    def _repr_html_(self) -> str:
        rows = self._shown_rows()
        head = "".join(_html_cell("th", title, "opacity:.7;font-weight:600") for title in self._titles())
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

    def _titles(self) -> list[str]:
        return [column.title for column in self.columns]

    def _shown_rows(self) -> list[list[str]]:
        return [[visible(cell) for cell in self._cells(self._items[i])] for i in range(min(len(self), self._max_rows))]

    def _footer(self) -> Iterator[str]:
        if not len(self):
            yield self._empty
        elif (hidden := len(self) - self._max_rows) > 0:
            yield f"… {hidden:,} more" + (f": {self._how_to_narrow}" if self._how_to_narrow else "")
        yield from self.notes


def _plain_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell + " " * (width - _width(cell) + _GAP) for cell, width in zip(cells, widths, strict=True))
    return "".join(padded).rstrip()


def _width(text: str) -> int:
    """Returns the width of `text` in columns of a terminal."""
    return len(text) if text.isascii() else sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


# Appended to the style of a cell: long text wraps instead of running off the page.
_CSS_WRAPPED = ";white-space:pre-wrap;overflow-wrap:anywhere;min-width:16ch"


def _html_cell(tag: str, text: str, style: str) -> str:
    # Set on each cell, because JupyterLab right-aligns tables and uses a proportional font.
    fixed = "text-align:left;vertical-align:top;padding:1px 12px 1px 0;white-space:pre;font-family:monospace"
    return f'<{tag} style="{fixed};{style}">{html_module.escape(text)}</{tag}>'
