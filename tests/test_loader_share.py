"""The loader's share: real data beside synthetic data, against values worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from records import CONFIG, a_run

from scaling.analysis.loading import LoaderRow, loader_rows
from scaling.measure.statistics import summarise
from scaling.reporting.terminal import PIPED, render
from scaling.reporting.verdicts import loader_verdict
from scaling.results.reader import Run
from scaling.results.record import Link, Step

TEXT: dict[str, Any] = {"name": "text", "path": "/corpus", "lengths": "mixed", "workers": 2}


def synthetic(folder: Path, **changes: Any) -> Run:
    return a_run(folder, **{"seconds": 0.08, **changes})


def real(folder: Path, **changes: Any) -> Run:
    config = {"data": TEXT} | changes.pop("config", {})
    environment = {"data": {"digest": "ab", "bytes": 9}} | changes.pop("environment", {})
    given = {"data": "text-mixed", "target_tokens_per_s": 5.0, **changes}
    return a_run(folder, **given, config=config, environment=environment)


def the_row(*runs: Run) -> LoaderRow:
    (row,) = loader_rows(runs)
    return row


def share(row: LoaderRow) -> tuple[float, float | None, float | None]:
    assert row.share is not None, row.reasons
    return row.share.value, row.share.low, row.share.high


def test_the_share_is_what_the_step_takes_longer_than_without_a_loader(tmp_path: Path) -> None:
    # T(synthetic) / T(real) = 0.08 / 0.1 = 0.8; 3 % and 4 % make 5 % of it, 0.04.
    row = the_row(synthetic(tmp_path / "s", relative=0.03), real(tmp_path / "r", relative=0.04, data_wait_s=0.5))
    assert share(row) == pytest.approx((0.2, 0.16, 0.24))
    assert row.waiting == pytest.approx(0.1)  # 0.5 of 5 s: half of what the loader costs
    assert row.remarks == ()
    assert loader_verdict(row) == "20.0 % [16.0, 24.0] 95 % interval, n=1"


def test_a_share_within_the_noise_is_shown_and_said_to_be_none(tmp_path: Path) -> None:
    # 1 - 0.08 / 0.0796 = -0.005, and both intervals make ±1.4 %.
    row = the_row(synthetic(tmp_path / "s"), real(tmp_path / "r", seconds=0.0796))
    value, low, high = share(row)
    assert value == pytest.approx(1 - 0.08 / 0.0796)
    assert low is not None and high is not None and low < 0 < high
    assert high - value == pytest.approx(math.hypot(0.01, 0.01) * 0.08 / 0.0796)
    assert loader_verdict(row).startswith("-0.5 % [") and "not distinguishable from 0" in loader_verdict(row)


def test_a_loader_that_speeds_up_is_not_the_loader(tmp_path: Path) -> None:
    row = the_row(synthetic(tmp_path / "s"), real(tmp_path / "r", seconds=0.07))
    assert row.remarks == ("below 0 beyond its interval or range: something else than the data differs",)


def test_without_blocks_there_is_a_share_without_an_interval(tmp_path: Path) -> None:
    row = the_row(synthetic(tmp_path / "s", relative=None), real(tmp_path / "r"))
    assert share(row)[0] == pytest.approx(0.2) and share(row)[1:] == (None, None)
    assert loader_verdict(row) == "20.0 % no interval, n=1"


def test_repeats_give_the_range_over_all_pairs(tmp_path: Path) -> None:
    # Means 0.09 and 0.11: 1 - 9/11. The range: 1 - 0.1/0.1 and 1 - 0.08/0.12.
    runs = [synthetic(tmp_path / "s1"), synthetic(tmp_path / "s2", seconds=0.1)]
    runs += [real(tmp_path / "r1", data_wait_s=0.5), real(tmp_path / "r2", seconds=0.12, data_wait_s=0.6)]
    row = the_row(*runs)
    assert share(row) == pytest.approx((1 - 9 / 11, 0.0, 1 / 3), abs=1e-12)
    assert row.share is not None and (row.share.basis, row.share.runs, row.share.baselines) == ("range", 2, 2)
    assert row.waiting == pytest.approx(1.1 / 11)
    assert [run.run_id for run in row.synthetic] == ["s1", "s2"]


def test_every_point_has_its_own_synthetic_arm(tmp_path: Path) -> None:
    runs = [synthetic(tmp_path / "s1"), synthetic(tmp_path / "s2", world_size=2, seconds=0.09)]
    runs += [real(tmp_path / "r1"), real(tmp_path / "r2", world_size=2)]
    assert [(row.runs[0].run_id, row.synthetic[0].run_id, round(share(row)[0], 9)) for row in loader_rows(runs)] == [
        ("r1", "s1", 0.2),
        ("r2", "s2", 0.1),
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"threads": 2}, "threads 2 vs 1"),
        ({"world_size": 4}, "N 4 vs 2"),
        ({"micro_batch_size": 4}, "micro-batch 4 vs 8"),
        ({"accumulation_steps": 2}, "accumulation 2 vs 1"),
        ({"nodes": 2}, "nodes 2 vs 1"),
        ({"link": Link("host", "P2P", None)}, "link.requested host vs auto"),
        ({"link": Link("auto", "SHM", None)}, "link.observed SHM vs P2P"),
        ({"environment": {"variables": {"NCCL_ALGO": "Ring"}}}, "NCCL_ALGO Ring vs none"),
        ({"config": {"optimizer": CONFIG["optimizer"] | {"clip": 1.0}}}, "optimizer.clip 1.0 vs none"),
        ({"flags": ["oversubscribed"]}, "oversubscribed"),
    ],
)
def test_what_differs_beside_the_data_is_the_reason(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    row = the_row(synthetic(tmp_path / "s", world_size=2), real(tmp_path / "r", **{"world_size": 2, **changes}))
    assert (row.share, row.reasons) == (None, (reason,))
    assert loader_verdict(row) == f"no ratio: {reason}"


def test_a_synthetic_arm_that_may_stand_in_no_ratio_is_named(tmp_path: Path) -> None:
    row = the_row(synthetic(tmp_path / "s", flags=["mixed_devices"]), real(tmp_path / "r"))
    assert row.reasons == ("synthetic: mixed devices",)


def test_the_closest_synthetic_arm_is_taken(tmp_path: Path) -> None:
    far, near = synthetic(tmp_path / "s1", threads=2, precision="bf16"), synthetic(tmp_path / "s2", threads=2)
    row = the_row(far, near, real(tmp_path / "r"))
    assert (row.synthetic, row.reasons) == ((near,), ("threads 1 vs 2",))


def test_an_arm_of_another_machine_is_said(tmp_path: Path) -> None:
    row = the_row(synthetic(tmp_path / "s", environment={"hosts": ["another"]}), real(tmp_path / "r"))
    assert row.share is not None and row.remarks == ("synthetic ran on another host (another)",)


@pytest.mark.parametrize("changes", [None, {"model": "gpt2"}])
def test_without_a_synthetic_run_of_the_model_there_is_no_row(tmp_path: Path, changes: dict[str, Any] | None) -> None:
    runs = [real(tmp_path / "r")]
    runs += [] if changes is None else [synthetic(tmp_path / "s", **changes)]
    assert loader_rows(runs) == []
    assert "Loader:" not in render(runs, PIPED, colour=False)


def test_failed_runs_have_no_share(tmp_path: Path) -> None:
    runs = [synthetic(tmp_path / "s"), real(tmp_path / "r")]
    (tmp_path / "r" / "summary.json").unlink()
    again = [runs[0], Run(tmp_path / "r", "r", "failed", None, {}, {}, None, None)]
    assert loader_rows(again) == []


def test_the_table_says_what_is_what(tmp_path: Path) -> None:
    runs = [synthetic(tmp_path / "s"), real(tmp_path / "r", data_wait_s=0.5, flags=["data_bound"])]
    lines = render(runs, PIPED, colour=False).splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("Loader: "))
    assert "1 - T(synthetic) / T(real); waiting is the part that the loop itself saw" in lines[place]
    assert lines[place + 2].split()[:2] == ["#2", "r"]
    assert "text-mixed  #1 s" in lines[place + 2] and " 10.0 %  20.0 % [" in lines[place + 2]
    assert lines[place + 2].rstrip().endswith("flags: data_bound")


def test_a_run_that_waits_for_three_tenths_of_a_step_is_data_bound() -> None:
    # C41: steps of 100 ms, of which 30 ms are waiting.
    rows = [Step(i, False, i // 10, [0.1], [0.03], 8, None, 1.0, False) for i in range(50)]
    timing = summarise(rows, None)
    assert timing.data_wait_s / timing.window_s == pytest.approx(0.3)
    assert timing.flags == ["data_bound"]
