"""`make bench`: the arithmetic of tests/bench/overhead.py by hand, and that it measures and says what it found."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.overhead import (
    Estimate,
    Nothing,
    OwnWork,
    Result,
    check_losses,
    describe,
    estimate,
    every_order,
    parse_options,
    slowest,
)

from scaling.measure.clock import HostClock
from scaling.measure.loop import TrainingLoop
from scaling.workload import Batch

OVERHEAD = Path(__file__).parent / "bench" / "overhead.py"


# n=6: 2/64 = 3.1 % lie outside [x1, x6]. n=8: 2/256 outside [x1, x8], but 18/256 = 7.0 % outside [x2, x7].
# n=9: 20/512 = 3.9 % outside [x2, x8]. n=10: 22/1024 outside [x2, x9]. 20 and 100: Conover's table and approximation.
@pytest.mark.parametrize(
    ("n", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9), (20, 6, 15), (100, 40, 61)]
)
def test_interval_of_the_median_ends_at_the_order_statistics_found_by_hand(n: int, low: int, high: int) -> None:
    values = [float(value) for value in range(1, n + 1)]
    random.Random(n).shuffle(values)
    assert estimate(values) == Estimate((n + 1) / 2, float(low), float(high), n)


def test_interval_covers_at_least_95_percent_and_the_next_narrower_one_does_not() -> None:
    for n in range(6, 100):
        interval = estimate([float(value) for value in range(1, n + 1)])
        assert interval.low is not None
        rank = int(interval.low)
        outside = [2 * sum(math.comb(n, k) for k in range(r)) / 2**n for r in (rank, rank + 1)]
        assert outside[0] <= 0.05 < outside[1]
        assert interval.high == n + 1 - rank


def test_five_values_have_a_median_but_no_interval() -> None:
    few = estimate([5.0, 1.0, 3.0, 2.0, 4.0])
    assert few == Estimate(3.0, None, None, 5)
    assert few.half_width == math.inf
    assert few.holds(3.0) is None


def test_an_interval_holds_its_ends_and_what_is_between() -> None:
    ratio = Estimate(1.002, 0.999, 1.005, 100)
    assert ratio.half_width == pytest.approx(0.003)
    assert (ratio.holds(0.999), ratio.holds(1.0), ratio.holds(1.005)) == (True, True, True)
    assert (ratio.holds(0.9989), ratio.holds(1.0051)) == (False, False)


def test_every_order_comes_once_in_an_order_that_the_seed_decides() -> None:
    orders = every_order(3, random.Random(7))
    assert sorted(orders) == sorted(permutations(range(3)))
    assert orders == every_order(3, random.Random(7))
    assert len({tuple(every_order(3, random.Random(seed))) for seed in range(5)}) > 1


def test_a_step_lasts_as_long_as_its_slowest_rank() -> None:
    first_rank = [[1.0, 2.0], [5.0, 1.0]]  # [arms, rounds]
    second_rank = [[3.0, 1.0], [4.0, 2.0]]
    assert np.array_equal(slowest([first_rank, second_rank]), [[3.0, 2.0], [5.0, 2.0]])


def test_loops_that_do_not_train_the_same_are_not_compared() -> None:
    check_losses([5.5, 4.0], [5.5, 4.00003])
    with pytest.raises(ValueError, match=r"step 1: the suite's loss is 4, the bare loop's 4\.0001"):
        check_losses([5.5, 4.0], [5.5, 4.0001])
    with pytest.raises(ValueError, match="step 0"):
        check_losses([math.nan], [1.0])


def test_the_engine_that_does_nothing_lets_the_suite_do_all_of_its_own_work() -> None:
    batch = Batch({"inputs": torch.zeros(2, 4)}, samples=2, targets=8, step_targets=32)
    loop = TrainingLoop(Nothing(), iter([batch] * 4), accumulation_steps=4, clock=HostClock())
    loop.step()
    assert [(noted.samples, noted.targets, float(noted.loss)) for noted in loop.noted] == [(8, 32, 0.0)]


def a_result(suite: Estimate, bare: Estimate) -> Result:
    us = Estimate(10.0, 9.0, 11.0, 100)
    own = OwnWork(1, us, us, model_step_ms=Estimate(50.0, 49.0, 51.0, 6), share=10e-6 / 50e-3)
    step = Estimate(50.0, 49.0, 51.0, suite.n)
    return Result("a processor", "2.13.0", 0.5, 2, [own], us, 8, 1, step, suite, bare, 0.005, 12.0, {})


def test_the_verdict_follows_from_the_interval() -> None:
    narrow, off, few = Estimate(1.001, 0.998, 1.003, 500), Estimate(1.02, 1.01, 1.03, 500), Estimate(1.0, None, None, 5)
    text = describe(a_result(narrow, off))
    assert "suite / bare: the interval holds 1.00; a difference above 0.30% is ruled out." in text
    assert "bare / bare: the interval does NOT hold 1.00; the difference is +2.00%." in text
    assert "±0.50% was reached" in text
    assert "Measured: 0.0200%, the claim holds." in text
    text = describe(a_result(few, narrow))
    assert "suite / bare: too few steps for an interval." in text
    assert "NOT reached" in text


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(OVERHEAD), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.ranks
def test_it_measures_both_and_writes_what_its_table_says(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ["--nproc", "2", "--limit", "60", "--steps", "6", "--accumulation", "2", "--micro-batch", "1"]
    done = run(*options, "--json", str(file))
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["world_size"] == 2
    assert [own["accumulation_steps"] for own in result["own_work"]] == [1, 4]
    for own in result["own_work"]:
        assert own["share"] == pytest.approx(own["step_us"]["median"] / own["model_step_ms"]["median"] / 1e3)
    suite, bare, again = (np.array(result["step_s"][arm]) for arm in ("suite", "bare", "bare again"))
    assert result["suite_to_bare"] == vars(estimate(suite / bare))
    assert result["bare_to_bare"] == vars(estimate(again / bare))
    assert result["suite_to_bare"]["n"] == 6
    assert "(a) The suite's own work per step" in done.stdout
    assert f"{result['suite_to_bare']['median']:.4f}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nproc", "0"), "must be at least 1"),
        (("--limit", "-1"), "must be greater than 0"),
        (("--json", "/no/such/folder/file.json"), "no such folder"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_without_options_it_is_two_ranks_half_a_percent_and_five_minutes() -> None:
    options = parse_options([])
    assert (options.nproc, options.target, options.limit, options.steps, options.json) == (2, 0.005, 300, None, None)


def test_help_names_the_options() -> None:
    done = run("--help")
    assert done.returncode == 0
    for option in ("--nproc", "--limit", "--target", "--steps", "--json"):
        assert option in done.stdout
