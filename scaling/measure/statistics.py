"""From step rows to numbers. Pure: the summary's timing can be recomputed from `steps.jsonl` with this module alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from scaling.results.record import Step, StepTime, Timing

UNSTEADY_CV = 0.10
DRIFT = 0.02
FEW_STEPS = 20
FEW_BLOCKS = 4
DATA_BOUND = 0.05


def half_width(values: Sequence[float], confidence: float = 0.95) -> float | None:
    """Half-width of the t-interval on the mean of independent values; None below two of them."""
    if len(values) < 2:
        return None
    from scipy import stats

    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(stats.t.ppf((1 + confidence) / 2, len(values) - 1)) * spread


def summarise(steps: Sequence[Step], sequence_length: int | None) -> Timing:
    """Everything that the measured steps say of time, throughput and loss; a step lasts as long as its slowest rank.

    Raises ValueError without a measured step.
    """
    measured = [step for step in steps if not step.warmup]
    if not measured:
        raise ValueError("no measured step: the window is empty")
    seconds = np.array([step.seconds for step in measured])  # [steps, ranks]
    per_rank = seconds.sum(axis=0)
    window_s = float(per_rank.max())
    slowest = seconds.max(axis=1)
    samples = sum(step.samples for step in measured)
    targets = [step.target_tokens for step in measured if step.target_tokens is not None]
    data_wait_s = float(np.array([step.data_wait_s for step in measured]).sum(axis=0).max())
    step_time = _step_time(measured, slowest, window_s)
    ranks = seconds.shape[1]
    return Timing(
        warmup_steps=len(steps) - len(measured),
        measured_steps=len(measured),
        skipped_steps=sum(step.skipped for step in measured),
        window_s=window_s,
        step_time_s=step_time,
        samples_per_s=samples / window_s,
        tokens_per_s=None if sequence_length is None else samples * sequence_length / window_s,
        target_tokens_per_s=sum(targets) / window_s if targets else None,
        data_wait_s=data_wait_s,
        loss={"first": measured[0].loss, "last": measured[-1].loss},
        slowest_rank=int(per_rank.argmax()) if ranks > 1 else None,
        rank_spread=float(per_rank.max() / per_rank.min() - 1) if ranks > 1 else None,
        flags=_flags(measured, slowest, step_time, data_wait_s / window_s),
    )


def block_means(steps: Sequence[Step]) -> list[float]:
    """Mean seconds per step of each block, on its slowest rank."""
    blocks = itertools.groupby((s for s in steps if not s.warmup), key=lambda step: step.block)
    return [float(np.array([step.seconds for step in block]).mean(axis=0).max()) for _, block in blocks]


def _step_time(measured: Sequence[Step], slowest: np.ndarray, window_s: float) -> StepTime:
    mean = window_s / len(measured)
    means = block_means(measured)
    half = half_width(means)
    return StepTime(
        mean=mean,
        median=float(np.median(slowest)),
        p95=float(np.percentile(slowest, 95)),
        p99=float(np.percentile(slowest, 99)),
        cv=float(np.std(slowest, ddof=1) / slowest.mean()) if len(slowest) > 1 else None,
        ci95=None if half is None else (mean - half, mean + half),
        blocks=len(means),
    )


def _flags(measured: Sequence[Step], slowest: np.ndarray, step_time: StepTime, data_share: float) -> list[str]:
    half = len(slowest) // 2
    conditions = {
        "unsteady": step_time.cv is not None and step_time.cv > UNSTEADY_CV,
        "drift": half > 0 and abs(slowest[-half:].mean() / slowest[:half].mean() - 1) > DRIFT,
        "few_samples": len(slowest) < FEW_STEPS or step_time.blocks < FEW_BLOCKS,
        "data_bound": data_share > DATA_BOUND,
        "skipped_steps": any(step.skipped for step in measured),
        "nonfinite_loss": any(step.loss is None for step in measured),
    }
    return [flag for flag, raised in conditions.items() if raised]
