"""Ratios as a person reads them: the value with its interval or range, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable

from scaling.analysis.efficiency import Row
from scaling.analysis.loading import LoaderRow
from scaling.analysis.ratio import Ratio
from scaling.analysis.strategies import ROLE, StrategyRow
from scaling.analysis.traffic import accumulates, sent_bytes
from scaling.reporting.columns import megabytes, number, percent
from scaling.results.reader import Run

BASES = {"ci95": "95 % interval", "t95": "95 % t-interval", "range": "range", None: "no interval"}


def verdict(row: Row) -> str:
    """Give the efficiency with its interval or range, or why there is none, and what has to be said beside it."""
    if row.impossible and row.efficiency is not None:
        said = [f"no verdict: {'; '.join(row.reasons)}", f"raw {_ratio(row.efficiency)}"]
    else:
        said = [_ratio_or_reasons(row.efficiency, row.reasons)]
    contention = [
        run.summary["contention_s"] for run in row.runs if run.summary and run.summary["contention_s"] is not None
    ]
    if contention:
        said.append(f"contention {', '.join(number(1e3 * seconds) for seconds in contention)} ms")
    if row.efficiency is not None:
        said += [*_flagged((*row.runs, *row.baseline)), *_traffic(row)]
    return "; ".join([*said, *row.remarks])


def strategy_verdict(row: StrategyRow) -> str:
    """Give the throughput over the reference's with its interval or range, or why there is none."""
    if row.is_reference:
        return "; ".join([ROLE, *row.reasons, *_flagged(row.runs)])
    said = [_ratio_or_reasons(row.throughput, row.reasons)]
    if row.throughput is not None:
        said += _flagged((*row.runs, *row.reference))
    return "; ".join([*said, *row.remarks])


def loader_verdict(row: LoaderRow) -> str:
    """Give the loader's share of the step with its interval or range, or why there is none."""
    said = [_ratio_or_reasons(row.share, row.reasons)]
    if row.share is not None:
        said += _flagged((*row.runs, *row.synthetic))
    return "; ".join([*said, *row.remarks])


def speedup(row: Row) -> str:
    """Give the speed-up with its interval or range; empty where there is none."""
    return "" if row.speedup is None else f"{row.speedup.value:.2f}{_ends(row.speedup, '.2f')}"


def flags(runs: Iterable[Run]) -> list[str]:
    """Collect the flags of the runs, each once."""
    return list(dict.fromkeys(flag for run in runs if run.summary for flag in run.summary["flags"]))


def _flagged(runs: Iterable[Run]) -> list[str]:
    raised = flags(runs)
    return [f"flags: {', '.join(raised)}"] if raised else []


def _traffic(row: Row) -> list[str]:
    """Say how often a step reduces and what a rank sends, where either side of a ratio accumulates micro-steps.

    Strategies that partition gradients reduce after every backward, the others once: that has to be seen beside a
    ratio. The baseline is one device, and sends nothing.
    """
    if row.runs[0].world_size == 1 or not accumulates((*row.runs, *row.baseline)):
        return []
    return [" or ".join(dict.fromkeys(map(_reduces, row.runs)))]  # of repeats that were counted alike, once


def _reduces(run: Run) -> str:
    syncs, sent = run.summary and run.summary["syncs_per_step"], sent_bytes(run)
    if syncs is None or sent is None:
        return "reductions not counted"
    return f"reduces {syncs} x per step, sends {megabytes(sent)} MB"


def _ratio_or_reasons(ratio: Ratio | None, reasons: Iterable[str]) -> str:
    return f"no ratio: {'; '.join(reasons)}" if ratio is None else _ratio(ratio)


def _ratio(ratio: Ratio) -> str:
    repeats = f"n={ratio.runs}" if ratio.runs == ratio.baselines else f"n={ratio.runs} against {ratio.baselines}"
    return f"{percent(ratio.value)}{_ends(ratio.scaled(100), '.1f')} {BASES[ratio.basis]}, {repeats}"


def _ends(ratio: Ratio, form: str) -> str:
    return "" if ratio.low is None or ratio.high is None else f" [{ratio.low:{form}}, {ratio.high:{form}}]"
