"""What a benchmark prints: a table of rows, each with what was measured, what is asked, and whether it holds."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from rich.console import Console
from rich.table import Table

Row: TypeAlias = tuple[str, str, str, bool]


def row(what: str, measured: str, must: str, holds: bool) -> Row:
    return what, measured, must, holds


def report(title: str, about: str | None, sections: Callable[[bool], Iterable[Iterable[Row]]]) -> None:
    """Runs the sections of a benchmark, on one thread, and prints their rows; reads the command line.

    Args:
        title: The title of the table.
        about: What `--help` says.
        sections: From whether a quick look is enough to the sections.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    parser.add_argument("--only", nargs="*", help="sections, by the names of their functions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    started = time.perf_counter()
    table = Table(title=f"{title}, torch {torch.__version__}, one thread, medians of alternating runs")
    for column in ("what", "measured", "asked", ""):
        table.add_column(column)
    for section in sections(options.quick):
        if options.only and section.__name__ not in options.only:
            continue
        for what, measured, must, holds in section:
            table.add_row(what, measured, must, "ok" if holds else "MISSED")
            print(what, measured, must, file=sys.stderr, flush=True)  # it takes minutes
    console = Console(width=120)
    console.print(table)
    console.print(f"{time.perf_counter() - started:.0f} s")
