"""The report as GitHub Markdown: the terminal's tables, whose cells can be neither markup nor HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from scaling.reporting.table import Table
from scaling.reporting.tables import prepare
from scaling.results.reader import Run

HEADING = "# Scaling report"

# What GitHub Markdown reads as markup inside a line; an underscore inside a word and a lone bracket are none.
MARKUP = re.compile(r"[\\`*~|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=\])[(\[:]")


def markdown(runs: Sequence[Run]) -> str:
    """Write the whole report; the same records give the same text."""
    report = prepare(runs, wide=True)
    parts = [HEADING, *map(_table, report.tables)]
    parts += [f"Note: {escape(note)}" for note in report.notes]
    parts += [f"Skipped: {escape(skipped)}" for skipped in report.skipped]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    lines = [
        _line(escape(heading.line) for heading in table.headings),
        _line("---" if heading.words else "---:" for heading in table.headings),
        *(_line(map(escape, row)) for row in table.rows),
    ]
    return "\n".join([f"## {escape(table.title)}", "", *lines])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def escape(cell: str) -> str:
    """Make text show as it is: markup and HTML escaped, a line's end as <br>, what no one can see left out."""
    lines = []
    for line in cell.splitlines():
        seen = "".join(letter for letter in line if letter.isprintable())
        safe = seen.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        lines.append(MARKUP.sub(lambda found: f"\\{found[0]}", safe))
    return "<br>".join(lines)
