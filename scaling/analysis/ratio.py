"""Ratios of what runs measured, with the interval or range that so many repeats allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, variance
from typing import Literal

from scaling.results.reader import Run

Basis = Literal["ci95", "range", "t95"]

FEWEST_FOR_T = 4  # repeats; below, a t-interval says more than so few runs know, and the range is given


@dataclass(frozen=True)
class Ratio:
    """A ratio as a fraction. `basis` says what [low, high] is: of one run each the 95 % interval from both runs' block
    means (None where one has none), of a few repeats the range over all pairs, of four or more a t-interval.
    """

    value: float
    low: float | None
    high: float | None
    basis: Basis | None
    runs: int
    baselines: int

    def scaled(self, factor: float) -> Ratio:
        """Give the same ratio in another unit: the speed-up is the efficiency times N."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return replace(self, value=self.value * factor, low=low, high=high)

    def complement(self) -> Ratio:
        """Give 1 minus the ratio; what was its low end becomes the high one."""
        low, high = (None if end is None else 1 - end for end in (self.high, self.low))
        return replace(self, value=1 - self.value, low=low, high=high)


def times(runs: Sequence[Run]) -> list[float]:
    """Seconds per optimizer step of completed runs."""
    return [float(run.summary["step_time_s"]["mean"]) for run in runs if run.summary]


def rates(runs: Sequence[Run]) -> list[float]:
    """Samples per second of the whole job, of completed runs."""
    return [float(run.summary["samples_per_s"]) for run in runs if run.summary]


def divide(runs: Sequence[Run], base: Sequence[Run], top: list[float], bottom: list[float]) -> Ratio:
    """Divide mean(top) by mean(bottom), with the interval or range that so many runs allow."""
    value, counts = mean(top) / mean(bottom), (len(runs), len(base))
    if counts == (1, 1):
        spread = _quadrature(runs[0], base[0])
        if spread is None:
            return Ratio(value, None, None, None, *counts)
        return Ratio(value, value * (1 - spread), value * (1 + spread), "ci95", *counts)
    if min(counts) < FEWEST_FOR_T:
        return Ratio(value, min(top) / max(bottom), max(top) / min(bottom), "range", *counts)
    half = value * _relative_half_width(top, bottom)
    return Ratio(value, value - half, value + half, "t95", *counts)


def _quadrature(run: Run, base: Run) -> float | None:
    """Give the relative half-width of a ratio of two means, from the runs' own intervals; None if one has none."""
    widths = []
    for one in (run, base):
        assert one.summary is not None
        time = one.summary["step_time_s"]
        if time["ci95"] is None:
            return None
        widths.append((time["ci95"][1] - time["ci95"][0]) / 2 / time["mean"])
    return math.hypot(*widths)


def _relative_half_width(top: list[float], bottom: list[float]) -> float:
    """Give the 95 % half-width of mean(top)/mean(bottom) as a share of it.

    First-order error propagation with the degrees of freedom of Welch and Satterthwaite; the sides may scatter unlike.
    """
    from scipy.stats import t  # half a second, and only repeats need it

    parts = [(variance(side) / len(side) / mean(side) ** 2, len(side) - 1) for side in (top, bottom)]
    total = sum(part for part, _ in parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(part**2 / degrees for part, degrees in parts)
    return float(t.ppf(0.975, freedom)) * math.sqrt(total)
