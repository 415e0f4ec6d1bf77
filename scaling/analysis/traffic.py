"""What one rank sends in an optimizer step: counted beside what was computed for its strategy and settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scaling.results.reader import Run

FLAG = "unexpected_communication"  # raised by the run itself, which knows the range that its settings leave
# Sums of one number, as of a gradient's norm or of an overflow, are sent beside the gradients and computed by nobody.
SCALARS, ROUNDING = 1000, 1e-3  # bytes; share of all that was expected


def sent_bytes(run: Run) -> float | None:
    """Sum what a rank sends per step over all kinds of collectives; None where it was not counted."""
    counted = None if run.summary is None else run.summary["comm_bytes_per_step"]
    return None if counted is None else float(sum(counted.values()))


def accumulates(runs: Iterable[Run]) -> bool:
    """Whether any of the runs has several micro-steps per step: strategies then reduce unequally often."""
    return any((run.accumulation_steps or 1) > 1 for run in runs)


def kinds(summary: dict[str, Any]) -> list[str]:
    """Name the kinds of collectives that were counted or expected, in this order."""
    return list((summary["comm_bytes_per_step"] or {}) | (summary["expected_comm_bytes_per_step"] or {}))


def tells(kind: str, summary: dict[str, Any]) -> bool:
    """Whether more than single numbers were sent, or should have been."""
    expected = summary["expected_comm_bytes_per_step"] or {}
    return bool(max((summary["comm_bytes_per_step"] or {}).get(kind, 0), expected.get(kind, 0)) > SCALARS)


def differing(summary: dict[str, Any]) -> list[str]:
    """Name the kinds, or "reductions", whose count is not what was computed; empty where either is missing."""
    named = []
    counted, computed = summary["syncs_per_step"], summary["expected_syncs_per_step"]
    if None not in (counted, computed) and counted != computed:
        named.append("reductions")
    sent, expected = summary["comm_bytes_per_step"], summary["expected_comm_bytes_per_step"]
    if sent is None or expected is None:
        return named
    slack = SCALARS + ROUNDING * sum(expected.values())
    return named + [kind for kind in kinds(summary) if abs(sent.get(kind, 0) - expected.get(kind, 0)) > slack]


def surprise(summary: dict[str, Any]) -> str | None:
    """Say in which numbers the count is not what was computed, so that nobody has to compare them by eye.

    Where a setting leaves a range, as how long ZeRO-3 keeps weights gathered, what is expected is its least.
    """
    named = differing(summary)
    if FLAG in summary["flags"] or "reductions" in named:
        return f"NOT AS EXPECTED: {', '.join(named)}" if named else "NOT AS EXPECTED"
    return f"within what its settings allow, not the expected: {', '.join(named)}" if named else None
