"""What a step sends, counted beside what was computed for it and beside the textbook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scaling.analysis.strategies import PLAIN, label
from scaling.analysis.traffic import accumulates, kinds, sent_bytes, surprise, tells
from scaling.reporting.columns import STRATEGY_WORDS, megabytes, text
from scaling.reporting.table import Heading, Names, Table
from scaling.results.reader import Run

TITLE = "Communication of a step, per rank: counted (expected)"
HEADINGS = (
    *(Heading("run", 7), Heading("strategy", STRATEGY_WORDS), Heading("N"), Heading("acc"), Heading("reductions")),
    *(Heading("sent\nMB", 29), Heading("textbook\nMB"), Heading("why", 20)),
)


def traffic_table(runs: Sequence[Run], names: Names) -> list[Table]:
    """Make a row per run that was counted, unless all are `ddp` without accumulation: one all-reduce is no news."""
    sending = [run for run in runs if run.world_size != 1 and sent_bytes(run) is not None]
    if not accumulates(sending) and not any(run.strategy not in PLAIN for run in sending):
        return []
    rows = [
        (*_row(run, run.summary, names), why)
        for run, why in zip(sending, _reasons(sending, names), strict=True)
        if run.summary
    ]
    return [Table(TITLE, HEADINGS, tuple(rows))]


def _row(run: Run, summary: dict[str, Any], names: Names) -> tuple[str, ...]:
    textbook = summary["textbook_comm_bytes_per_step"]
    reductions = text(summary["syncs_per_step"]) + _expected(summary["expected_syncs_per_step"], str)
    return (
        names.of([run]),
        label(run),
        text(run.world_size),
        text(run.accumulation_steps),
        reductions,
        ", ".join(_kind(kind, summary) for kind in kinds(summary) if tells(kind, summary)) or "nothing",
        "" if textbook is None else megabytes(textbook),
    )


def _reasons(runs: Sequence[Run], names: Names) -> list[str]:
    """Say why each run sends what it does; of a strategy's runs, the first says it for all."""
    first: dict[str, str] = {}
    said = []
    for run in runs:
        summary = run.summary or {}
        surprising, why = surprise(summary), "; ".join(summary["comm_notes"] or [])
        before = first.setdefault(why, names.labels[run.path])
        why = f"as {before}" if why and before != names.labels[run.path] else why
        said.append("; ".join(filter(None, [surprising, why])))
    return said


def _kind(kind: str, summary: dict[str, Any]) -> str:
    counted, expected = summary["comm_bytes_per_step"] or {}, summary["expected_comm_bytes_per_step"]
    computed = None if expected is None else expected.get(kind, 0.0)
    return f"{kind} {megabytes(counted.get(kind, 0.0))}{_expected(computed, megabytes)}"


def _expected(value: Any, form: Any) -> str:
    return "" if value is None else f" ({form(value)})"
