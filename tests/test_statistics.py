"""Every formula of the window against values worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from scaling.measure.statistics import block_means, half_width, summarise
from scaling.results.record import Step


def steps(
    seconds: list[list[float]],
    *,
    warmup: int = 0,
    block_steps: int = 10,
    samples: int = 8,
    wait: float = 0.0,
    skipped: tuple[int, ...] = (),
) -> list[Step]:
    return [
        Step(
            step=i,
            warmup=i < warmup,
            block=None if i < warmup else (i - warmup) // block_steps,
            seconds=s,
            data_wait_s=[wait] * len(s),
            samples=samples,
            target_tokens=samples * 3,
            loss=float(i),
            skipped=i in skipped,
        )
        for i, s in enumerate(seconds)
    ]


def test_throughput_is_samples_over_the_window_and_no_mean_of_rates() -> None:
    timing = summarise(steps([[0.1]] * 9 + [[0.5]]), sequence_length=16)
    assert timing.samples_per_s == pytest.approx(80 / 1.4)  # 57.1, where a mean of rates says 73.6
    assert timing.tokens_per_s == pytest.approx(80 * 16 / 1.4)
    assert timing.target_tokens_per_s == pytest.approx(240 / 1.4)


@pytest.mark.parametrize("block_steps", [1, 2, 5])
def test_accumulation_counts_once_whatever_the_block_length(block_steps: int) -> None:
    # C07: micro 4 x accumulation 8 x 2 ranks = 64 samples per step, 10 steps in 20 s.
    timing = summarise(steps([[2.0, 2.0]] * 10, samples=64, block_steps=block_steps), None)
    assert timing.measured_steps * 64 == 640
    assert timing.window_s == 20.0
    assert timing.samples_per_s == 32.0
    assert timing.tokens_per_s is None


def test_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    timing = summarise(steps([[1.0, 1.0, 1.0, 1.3]] * 20), None)  # C32
    assert timing.step_time_s.mean == pytest.approx(1.3)
    assert timing.step_time_s.median == pytest.approx(1.3)
    assert timing.slowest_rank == 3
    assert timing.rank_spread == pytest.approx(0.3)


def test_the_window_is_the_longest_sum_and_percentiles_are_of_the_longest_steps() -> None:
    timing = summarise(steps([[1.0, 3.0], [3.0, 1.0]]), None)
    assert timing.window_s == 4.0
    assert timing.step_time_s.mean == 2.0
    assert timing.step_time_s.median == 3.0
    assert timing.rank_spread == 0.0


def test_the_interval_comes_from_block_means() -> None:
    # Block means 1, 2, 3: mean 2, standard deviation 1, t(0.975; 2) = 4.302653.
    rows = steps([[1.0], [1.0], [2.0], [2.0], [3.0], [3.0]], block_steps=2)
    assert block_means(rows) == [1.0, 2.0, 3.0]
    expected = 4.302653 / math.sqrt(3)
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(expected, rel=1e-6)
    timing = summarise(rows, None)
    assert timing.step_time_s.ci95 == pytest.approx((2 - expected, 2 + expected), rel=1e-6)
    assert timing.step_time_s.blocks == 3


def test_one_block_has_no_interval() -> None:
    assert half_width([1.0]) is None
    assert summarise(steps([[1.0]] * 5), None).step_time_s.ci95 is None
    assert summarise(steps([[1.0]]), None).step_time_s.cv is None


def test_percentiles_and_variation() -> None:
    timing = summarise(steps([[float(i)] for i in range(1, 102)]), None)
    assert (timing.step_time_s.median, timing.step_time_s.p95, timing.step_time_s.p99) == (51.0, 96.0, 100.0)
    assert timing.step_time_s.cv == pytest.approx(math.sqrt(101 * 102 / 12) / 51)


def test_warm_up_is_counted_and_outside() -> None:
    timing = summarise(steps([[30.0], [20.0], [8.0]] + [[1.0]] * 40, warmup=3), None)  # C22
    assert (timing.warmup_steps, timing.measured_steps) == (3, 40)
    assert timing.step_time_s.mean == 1.0
    assert timing.flags == []
    assert timing.loss == {"first": 3.0, "last": 42.0}


def test_a_lone_slow_step_leaves_the_median_and_flags_the_mean() -> None:
    timing = summarise(steps([[1.0]] * 40 + [[8.0]] + [[1.0]] * 39), None)  # C22
    assert timing.step_time_s.median == 1.0
    assert "unsteady" in timing.flags


def test_a_window_that_speeds_up_or_slows_down_drifts() -> None:
    assert "drift" in summarise(steps([[1.0]] * 20 + [[1.03]] * 20), None).flags  # C23
    assert "drift" in summarise(steps([[1.03]] * 20 + [[1.0]] * 20), None).flags
    assert summarise(steps([[1.0]] * 20 + [[1.01]] * 20), None).flags == []


@pytest.mark.parametrize(
    ("count", "block_steps", "flagged"), [(19, 1, True), (20, 5, False), (20, 10, True), (40, 10, False)]
)
def test_under_twenty_steps_or_four_blocks_is_too_few(count: int, block_steps: int, flagged: bool) -> None:
    assert ("few_samples" in summarise(steps([[1.0]] * count, block_steps=block_steps), None).flags) is flagged


@pytest.mark.parametrize(("wait", "flagged"), [(0.03, True), (0.006, True), (0.004, False)])
def test_waiting_for_data_for_over_five_percent_is_flagged(wait: float, flagged: bool) -> None:
    timing = summarise(steps([[0.1, 0.1]] * 40, wait=wait), None)  # C41: 30 ms of 100 ms
    assert timing.data_wait_s == pytest.approx(40 * wait)
    assert ("data_bound" in timing.flags) is flagged


def test_skipped_steps_are_counted_and_flagged() -> None:
    timing = summarise(steps([[1.0]] * 41, warmup=1, skipped=(0, 5, 7)), None)
    assert timing.skipped_steps == 2
    assert timing.flags == ["skipped_steps"]


def test_rows_survive_json_exactly() -> None:
    rows = steps([[0.1 + 0.2, 1 / 3]] * 30, warmup=2)
    read = [Step(**json.loads(json.dumps(asdict(row)))) for row in rows]
    assert summarise(read, 7) == summarise(rows, 7)


def test_an_empty_window_is_an_error() -> None:
    with pytest.raises(ValueError, match="no measured step"):
        summarise(steps([[1.0]], warmup=1), None)
