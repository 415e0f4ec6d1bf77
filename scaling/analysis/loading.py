"""What the loader costs: a run on real data beside one on synthetic data that is the same in everything else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scaling.analysis.arms import arm_mismatches
from scaling.analysis.believable import refusals
from scaling.analysis.comparable import other_hosts, points, remarks
from scaling.analysis.ratio import Ratio, divide, times
from scaling.results.reader import Run

MIXED = "text-mixed"
BIDIRECTIONAL = "scaling.workload.bert:bert"
SYNTHETIC = "synthetic"  # made on the device before the window: a loader that costs nothing


@dataclass(frozen=True)
class LoaderRow:
    """One measured point on real data against its synthetic arm; with `share` None `reasons` says why.

    `share` = 1 - T(synthetic) / T(real) of the step time. `waiting` is the part of the window in which the loop waited
    for data: a loader can cost without it, by the cores it takes from the ranks.
    """

    runs: tuple[Run, ...]
    synthetic: tuple[Run, ...]
    waiting: float
    share: Ratio | None = None
    reasons: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def loader_rows(runs: Iterable[Run]) -> list[LoaderRow]:
    """Make one row per point on real data of whose model there is a completed synthetic run, in the runs' order."""
    measured = points(run for run in runs if run.summary is not None)
    arms = [point for point in measured if _made(point[0])]
    rows = []
    for point in measured:
        candidates = [arm for arm in arms if arm[0].model == point[0].model]
        if candidates and not _made(point[0]):
            rows.append(_against(point, min(candidates, key=lambda arm: _distance(point[0], arm[0]))))
    return rows


def _pads(run: Run) -> bool:
    return _data(run) == MIXED and run.group("model").get("target") == BIDIRECTIONAL


def _made(run: Run) -> bool:
    return _data(run) == SYNTHETIC


def _data(run: Run) -> str | None:
    return None if run.summary is None else str(run.summary["data"])


def _against(point: tuple[Run, ...], arm: tuple[Run, ...]) -> LoaderRow:
    waits = [(run.summary["data_wait_s"], run.summary["window_s"]) for run in point if run.summary]
    waiting = sum(wait for wait, _ in waits) / sum(window for _, window in waits)
    masked = ["the share holds the padding mask of a bidirectional model"] * _pads(point[0])
    said = dict.fromkeys(masked) | dict.fromkeys(
        remark for run in point for other in arm for remark in remarks(run, other, SYNTHETIC)
    )
    if reasons := _reasons(point[0], arm[0]):
        return LoaderRow(point, arm, waiting, reasons=tuple(reasons), remarks=tuple(said))
    share = divide(point, arm, times(arm), times(point)).complement()
    return LoaderRow(point, arm, waiting, share, remarks=(*_judgement(share), *said))


def _judgement(share: Ratio) -> list[str]:
    """Say what the interval says of 0, which is a loader that costs nothing."""
    if share.low is None or share.high is None:
        return []
    if share.high < 0:
        return ["below 0 beyond its interval or range: something else than the data differs"]
    return ["not distinguishable from 0"] if share.low <= 0 else []


def _distance(run: Run, other: Run) -> tuple[int, bool]:
    return len(_reasons(run, other)), bool(other_hosts(run, other))


def _reasons(run: Run, other: Run) -> list[str]:
    """Say why two runs do not differ in their data alone.

    Sequences of unequal length are no reason: their padding is computed like anything else. A bidirectional model then
    also runs with a padding mask, which is said beside the share.
    """
    return [
        *refusals(run),
        *(f"{SYNTHETIC}: {reason}" for reason in refusals(other)),
        *arm_mismatches(run, other, apart="data"),
    ]
