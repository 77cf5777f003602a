"""The table of `tests.benchmarks.peers`: a row for each thing to do on each model, a column for each tool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from tests.benchmarks.peer_tools.measurement import ROWS, Measured
from tests.benchmarks.peer_tools.subject import SUBJECTS
from tests.benchmarks.peer_tools.tools import TOOLS

PEERS = [tool for tool in TOOLS if tool not in ("hooks", "ours")]


@dataclass
class Comparison:
    """What was measured, and what went wrong.

    Attributes:
        measured: By title of the model, then by tool.
        failures: By tool: why it was not measured.
    """

    measured: dict[str, dict[str, Measured]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def tools(self) -> list[str]:
        """Those that were measured on any model, in the order of the table."""
        found = {tool for by_tool in self.measured.values() for tool in by_tool}
        return [tool for tool in TOOLS if tool in found]

    def headers(self) -> list[str]:
        """The titles of the columns."""
        return ["multiples of a plain forward", "asked", "best peer", *(TOOLS[tool].title for tool in self.tools)]

    def rows(self) -> Iterator[tuple[str, list[list[str]]]]:
        """The title of each model, and its rows: what is done, what is asked of us, then the ratio of each tool."""
        for title, by_tool in self.measured.items():
            forward = by_tool[min(by_tool, key=lambda tool: by_tool[tool].forward)].forward
            loop = by_tool[min(by_tool, key=lambda tool: by_tool[tool].loop)].loop
            heading = f"{title} (a forward: {1000 * forward:.1f} ms; the loop of a sweep: {loop:.2f} s)"
            asked = next((subject.asked for subject in SUBJECTS.values() if subject.name == title), {})
            yield heading, [self.row(row, by_tool, asked.get(row)) for row in ROWS]

    def row(self, row: str, by_tool: Mapping[str, Measured], asked: float | None) -> list[str]:
        found = [by_tool[tool].ratios.get(row) if tool in by_tool else None for tool in self.tools]
        shown = ["-" if ratio is None else f"{ratio:.2f}" for ratio in found]
        peers = [by_tool[tool].ratios[row] for tool in PEERS if tool in by_tool and row in by_tool[tool].ratios]
        return [ROWS[row], "" if asked is None else f"{asked:.2f}", f"{min(peers):.2f}" if peers else "-", *shown]

    def versions(self) -> list[str]:
        """For each tool, what its environment has."""
        lines = []
        for tool in self.tools:
            versions = next(by_tool[tool] for by_tool in self.measured.values() if tool in by_tool).versions
            lines.append(f"{TOOLS[tool].title}: " + ", ".join(f"{name} {number}" for name, number in versions.items()))
        return lines

    def notes(self) -> list[str]:
        """Why there are gaps, and what has to be known of a number."""
        lines = [f"{TOOLS[tool].title}: not measured: {reason}" for tool, reason in self.failures.items()]
        for tool in self.tools:
            for row, what in ROWS.items():
                found = {title: by_tool[tool] for title, by_tool in self.measured.items() if tool in by_tool}
                missing = {one.missing[row] for one in found.values() if row in one.missing}
                said = [one.notes[row] for one in found.values() if row in one.notes]
                lines += [f"{TOOLS[tool].title}, {what}: -, {reason}" for reason in sorted(missing)]
                lines += [f"{TOOLS[tool].title}, {what}: {note}" for note in dict.fromkeys(said)]
        return lines

    def table(self, title: str) -> Table:
        """All of it for a terminal."""
        table = Table(title=title)
        for number, header in enumerate(self.headers()):
            table.add_column(header, justify="right" if number else "left")
        for heading, rows in self.rows():
            table.add_section()
            table.add_row(f"[bold]{heading}[/bold]")
            for row in rows:
                table.add_row(*row)
        return table

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [line(self.headers()), line(["---"] * len(self.headers()))]
        for heading, rows in self.rows():
            lines += [line([f"**{heading}**", *([""] * (2 + len(self.tools)))]), *(line(row) for row in rows)]
        return "\n".join(lines)


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
