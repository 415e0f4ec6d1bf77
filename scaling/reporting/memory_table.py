"""What a rank's memory is held for, term by term, beside what the textbook gives the strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from scaling.analysis.memory import TERMS, bytes_per_parameter
from scaling.analysis.strategies import label, peak_gib
from scaling.reporting.columns import STRATEGY_WORDS, number, text
from scaling.reporting.table import Heading, Names, Table
from scaling.results.reader import Run

TITLE = "Memory held per rank, bytes per parameter: measured / textbook"
REST = ("buffers", "activations", "gathered")  # what does not grow with the parameters alone
HEADINGS = (
    *(Heading("run", 7), Heading("strategy", STRATEGY_WORDS), Heading("N"), *map(Heading, TERMS), Heading("sum")),
    *(Heading(f"{term}\nGiB") for term in REST),
)
PEAK = Heading("peak\nGiB")  # where there is room: it stands in the table of the runs, too


def memory_table(runs: Sequence[Run], names: Names) -> list[Table]:
    """Make a row per run whose memory was told apart."""
    rows = [_row(run, run.summary, names) for run in runs if run.summary and run.summary["memory_terms_gib"]]
    return [Table(TITLE, (*HEADINGS, *[PEAK] * names.wide), tuple(rows))] if rows else []


def _row(run: Run, summary: dict[str, Any], names: Names) -> tuple[str, ...]:
    held, textbook = bytes_per_parameter(summary), summary["textbook_bytes_per_parameter"] or {}
    gib = [*map(summary["memory_terms_gib"].get, REST), *[peak_gib(summary)] * names.wide]
    return (
        *(names.of([run]), label(run), text(run.world_size)),
        *(beside(held[term], textbook.get(term)) for term in TERMS),
        beside(_sum(held.values()), _sum(map(textbook.get, TERMS))),
        *("" if value is None else number(value) for value in gib),
    )


def beside(measured: float | None, textbook: float | None) -> str:
    """Write a measured number of bytes per parameter beside the textbook's, as "2.03 / 2"."""
    first = "?" if measured is None else f"{measured:.2f}"
    return first if textbook is None else f"{first} / {textbook:.4g}"


def _sum(values: Iterable[float | None]) -> float | None:
    """Add the terms; a part of them is no sum."""
    terms = list(values)
    return None if None in terms else sum(value for value in terms if value is not None)
