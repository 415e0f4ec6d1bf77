"""The tables on the terminal: one row per run, then weak and strong scaling apart, then what the loader costs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TextIO

from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from scaling.reporting.table import Table
from scaling.reporting.tables import prepare
from scaling.results.reader import Run

NARROWEST = 100  # a narrower terminal wraps the lines; no number is cut
ONE_TABLE = 240  # from this width on all columns of a run fit side by side
PIPED = 10_000  # a file and a filter have no edge to fold at
STYLES = {"failed": "red", "incomplete": "yellow"}


def print_report(runs: Sequence[Run], stream: TextIO) -> None:
    """Print the tables of all runs; in colour, and folded to its width, only where the stream is a terminal."""
    terminal = stream.isatty()
    width = max(Console(file=stream).width, NARROWEST) if terminal else PIPED
    report = render(runs, width, colour=terminal)
    stream.write(report if terminal else "".join(f"{line.rstrip()}\n" for line in report.splitlines()))


def render(runs: Sequence[Run], width: int, *, colour: bool) -> str:
    """Lay the whole report out as text of at most `width` columns."""
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="auto" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    report = prepare(runs, wide=width >= ONE_TABLE)
    with console.capture() as capture:
        for table in report.tables:
            _print_table(console, table)
        for note in report.notes:
            console.print(Text(f"Note: {note}"))
        for skipped in report.skipped:
            console.print(Text(f"Skipped: {skipped}"))
    return capture.get()


def _print_table(console: Console, table: Table) -> None:
    """Print a table under its title. Numbers keep their width; columns of words share what is left over."""
    names = [heading.name if console.width < PIPED else heading.line for heading in table.headings]
    widths = _widths(console.width, names, table)
    laid_out = rich_table.Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name, width, heading in zip(names, widths, table.headings, strict=True):
        laid_out.add_column(name, justify="left" if heading.words else "right", width=width, overflow="fold")
    for row, state in zip(table.rows, table.states or [""] * len(table.rows), strict=True):
        laid_out.add_row(*row, style=STYLES.get(state, ""))
    console.print(Text(table.title, style="bold underline"))
    console.print(laid_out, width=max(console.width, sum(widths) + 2 * len(widths)), crop=False, no_wrap=False)
    console.print()


def _widths(width: int, names: Sequence[str], table: Table) -> list[int]:
    longest = [
        max(len(line) for cell in (name, *cells) for line in cell.splitlines() or [""])
        for name, *cells in zip(names, *table.rows, strict=True)
    ]
    widths = [min(most, heading.words or most) for most, heading in zip(longest, table.headings, strict=True)]
    spare = width - sum(widths) - 2 * (len(widths) - 1)
    for place, most in enumerate(longest):  # from the left: names first, prose last
        more = max(0, min(most - widths[place], spare))
        widths[place], spare = widths[place] + more, spare - more
    return widths
