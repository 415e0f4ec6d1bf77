"""`python -m scaling.report` and what it computes: every formula against values worked out by hand."""

from __future__ import annotations

import io
import json
import math
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from records import CONFIG, ENVIRONMENT, a_run, a_summary, run_report, save, telemetry

import scaling
from scaling import report
from scaling.analysis.believable import contradictions, refusals
from scaling.analysis.comparable import batch_change, batch_relation, mismatches, points, remarks
from scaling.analysis.devices import odd_devices
from scaling.analysis.efficiency import Row, scaling_rows, strong_efficiency, weak_efficiency
from scaling.analysis.ratio import Ratio
from scaling.reporting.columns import number
from scaling.reporting.tables import prepare
from scaling.reporting.terminal import PIPED, print_report, render
from scaling.reporting.verdicts import verdict
from scaling.results.reader import Run, find_runs, read_run, read_runs
from scaling.results.record import Link, Memory, Telemetry


def pair(tmp_path: Path, base: dict[str, Any] | None = None, **changes: Any) -> tuple[Run, Run]:
    """A run on two devices and `single` on one, both as `changes` and `base` say."""
    run = a_run(tmp_path / "ddp2", **{"world_size": 2, **changes})
    return run, a_run(tmp_path / "single1", **(base or {}))


def only(rows: list[Row], **wanted: Any) -> Row:
    found = [row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())]
    assert len(found) == 1, found
    return found[0]


def ends(ratio: Ratio | None) -> tuple[float, float]:
    assert ratio is not None and ratio.low is not None and ratio.high is not None
    return ratio.low, ratio.high


# Formulas


def test_weak_efficiency_divides_whole_job_rates(tmp_path: Path) -> None:
    # C08: two ranks of 100 samples/s each are 200 samples/s, and against 100 on one device that is 1.00.
    run, base = pair(tmp_path, {"seconds": 0.08}, seconds=0.08)
    assert run.summary and base.summary
    assert (run.summary["samples_per_s"], base.summary["samples_per_s"]) == pytest.approx((200, 100))
    assert weak_efficiency([run], [base]).value == pytest.approx(1.00)


def test_weak_interval_adds_relative_half_widths_in_quadrature(tmp_path: Path) -> None:
    # X(2) = 16 / 0.125 = 128, X(1) = 8 / 0.1 = 80: E = 128 / 160 = 0.8; 3 % and 4 % make 5 %.
    run, base = pair(tmp_path, {"seconds": 0.1, "relative": 0.03}, seconds=0.125, relative=0.04)
    ratio = weak_efficiency([run], [base])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.8, 0.76, 0.84))
    assert (ratio.basis, ratio.runs, ratio.baselines) == ("ci95", 1, 1)


def test_strong_speedup_and_efficiency(tmp_path: Path) -> None:
    # T(1) = 0.4 at 4 micro-batches, T(4) = 0.125 at one: S = 3.2, S / 4 = 0.8; 5 % of it is 0.04 and of S 0.16.
    run = a_run(tmp_path / "ddp4", world_size=4, micro_batch_size=8, seconds=0.125, relative=0.04)
    base = a_run(tmp_path / "one", accumulation_steps=4, seconds=0.4, relative=0.03)
    ratio = strong_efficiency([run], [base])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.8, 0.76, 0.84))
    row = only(scaling_rows([base, run]), kind="strong", against="single")
    assert row.speedup is not None
    assert (row.speedup.value, *ends(row.speedup)) == pytest.approx((3.2, 3.04, 3.36))
    assert row.remarks[0] == "accumulation 4→1"


def test_one_block_gives_a_ratio_without_an_interval(tmp_path: Path) -> None:
    run, base = pair(tmp_path, {"relative": None}, seconds=0.125)
    ratio = weak_efficiency([run], [base])
    assert ratio.value == pytest.approx(0.8)
    assert ratio.low is None and ratio.high is None and ratio.basis is None
    assert "no interval" in verdict(scaling_rows([run, base])[0])


def repeats(folder: Path, times: list[float], **changes: Any) -> list[Run]:
    return [a_run(folder / f"{number:02d}", seconds=seconds, **changes) for number, seconds in enumerate(times)]


def test_two_repeats_give_the_range_over_all_pairs(tmp_path: Path) -> None:
    # Rates 2 x 80 against 100 and 80 (T = 0.08, 0.1) ; 16 / 0.125 = 128 and 16 / 0.16 = 100, per device 64 and 50.
    runs = repeats(tmp_path / "ddp", [0.125, 0.16], world_size=2)
    base = repeats(tmp_path / "single", [0.08, 0.1])
    row = only(scaling_rows([*base, *runs]), kind="weak", against="single")
    ratio = row.efficiency
    assert ratio is not None and (ratio.basis, ratio.runs, ratio.baselines) == ("range", 2, 2)
    assert ratio.value == pytest.approx(57 / 90)
    assert ends(ratio) == pytest.approx((50 / 100, 64 / 80))
    assert verdict(row) == "63.3 % [50.0, 80.0] range, n=2"


def test_unequal_repeats_below_four_are_a_range_that_names_both_counts(tmp_path: Path) -> None:
    runs = repeats(tmp_path / "ddp", [0.125] * 5, world_size=2)
    base = repeats(tmp_path / "single", [0.1])
    row = only(scaling_rows([*base, *runs]), kind="weak", against="single")
    assert verdict(row) == "80.0 % [80.0, 80.0] range, n=5 against 1"


def test_five_repeats_give_a_t_interval(tmp_path: Path) -> None:
    # Per device rates 64 (1 ± .01, .01, .02, .02, 0) against 80 without scatter: variance of the mean of the
    # relative rates = 2 x (.01^2 + .02^2) / 4 / 5 = 5e-5, and t(0.975, 4) = 2.776445.
    factors = [0.98, 0.99, 1.0, 1.01, 1.02]
    runs = repeats(tmp_path / "ddp", [16 / 128 / factor for factor in factors], world_size=2)
    base = repeats(tmp_path / "single", [0.1] * 5)
    row = only(scaling_rows([*base, *runs]), kind="weak", against="single")
    assert row.efficiency is not None and (row.efficiency.basis, row.efficiency.runs) == ("t95", 5)
    half = 0.8 * 2.776445 * math.sqrt(5e-5)
    assert (row.efficiency.value, *ends(row.efficiency)) == pytest.approx((0.8, 0.8 - half, 0.8 + half), rel=1e-6)


def test_scatter_on_both_sides_is_welch(tmp_path: Path) -> None:
    # The same relative scatter on both sides: variances add to 1e-4, and 4 + 4 degrees of freedom: t = 2.306004.
    factors = [0.98, 0.99, 1.0, 1.01, 1.02]
    runs = repeats(tmp_path / "ddp", [16 / 128 / factor for factor in factors], world_size=2)
    base = repeats(tmp_path / "single", [8 / 80 / factor for factor in factors])
    ratio = weak_efficiency(runs, base)
    half = 0.8 * 2.306004 * 1e-2
    assert ends(ratio) == pytest.approx((0.8 - half, 0.8 + half), rel=1e-6)


def test_repeats_without_scatter_have_a_point_for_an_interval(tmp_path: Path) -> None:
    runs, base = repeats(tmp_path / "ddp", [0.125] * 4, world_size=2), repeats(tmp_path / "single", [0.1] * 4)
    assert ends(weak_efficiency(runs, base)) == pytest.approx((0.8, 0.8))


# Weak and strong


def test_weak_is_refused_where_accumulation_shrinks(tmp_path: Path) -> None:
    # C09: a fixed train_batch_size of 65536 with micro-batch 64 is accumulation 64 on 16 devices and 1 on 1024.
    few = a_run(tmp_path / "few", world_size=16, micro_batch_size=64, accumulation_steps=64)
    many = a_run(tmp_path / "many", world_size=1024, micro_batch_size=64)
    assert batch_relation(many, few) == "strong"
    assert batch_change(many, few) == "accumulation 64→1"
    with pytest.raises(ValueError, match="no weak scaling: strong, accumulation 64→1"):
        weak_efficiency([many], [few])


def test_strong_is_refused_where_work_per_device_is_fixed(tmp_path: Path) -> None:
    run, base = pair(tmp_path)
    with pytest.raises(ValueError, match="no strong scaling: weak, global batch 8→16"):
        strong_efficiency([run], [base])


def test_a_baseline_runs_on_one_device(tmp_path: Path) -> None:
    two, four = a_run(tmp_path / "two", world_size=2), a_run(tmp_path / "four", world_size=4)
    with pytest.raises(ValueError, match="two ran on 2 devices, not on one"):
        weak_efficiency([four], [two])


def test_neither_constant_is_no_ratio(tmp_path: Path) -> None:
    run, base = pair(tmp_path, world_size=2, micro_batch_size=16)
    row = only(scaling_rows([base, run]), against="single")
    assert (row.kind, row.efficiency) == (None, None)
    assert row.reasons == ("neither work per device nor global batch is fixed: micro-batch 8→16, global batch 8→32",)


def test_accumulations_are_points_of_their_own(tmp_path: Path) -> None:
    once, base = pair(tmp_path, seconds=0.125)
    four = a_run(tmp_path / "four", world_size=2, accumulation_steps=4, seconds=0.45)
    base_four = a_run(tmp_path / "single4", accumulation_steps=4, seconds=0.4)
    rows = [row for row in scaling_rows([base, base_four, once, four]) if row.against == "single"]
    assert [(row.runs, row.baseline) for row in rows] == [((once,), (base,)), ((four,), (base_four,))]
    assert rows[1].efficiency is not None and rows[1].efficiency.value == pytest.approx(0.4 / 0.45)


def test_one_run_can_be_weak_and_strong_and_the_tables_are_apart(tmp_path: Path) -> None:
    run, base = pair(tmp_path, {"seconds": 0.1}, seconds=0.125)
    large = a_run(tmp_path / "large", accumulation_steps=2, seconds=0.2)
    rows = scaling_rows([base, large, run])
    assert only(rows, kind="weak", against="single").baseline == (base,)
    assert only(rows, kind="strong", against="single").baseline == (large,)
    text = render([base, large, run], PIPED, colour=False)
    assert text.index("Weak scaling") < text.index("Strong scaling")


def test_both_baselines_are_named_and_wrapping_has_its_own_row(tmp_path: Path) -> None:
    single = a_run(tmp_path / "single1", seconds=0.1)
    wrapped = a_run(tmp_path / "ddp1", strategy="ddp", seconds=0.104, link=Link("auto", None, None))
    run = a_run(tmp_path / "ddp2", world_size=2, seconds=0.13)
    rows = scaling_rows([single, wrapped, run])
    assert [(row.runs[0].run_id, row.against, row.baseline[0].run_id) for row in rows] == [
        ("ddp1", "single", "single1"),
        ("ddp2", "single", "single1"),
        ("ddp2", "ddp", "ddp1"),
    ]
    values = [row.efficiency.value for row in rows if row.efficiency]
    assert values == pytest.approx([0.1 / 0.104, 0.1 / 0.13, 0.104 / 0.13])
    assert {row.kind for row in rows} == {"weak"}


def test_a_missing_baseline_is_said(tmp_path: Path) -> None:
    run, base = pair(tmp_path)
    row = only(scaling_rows([run, base]), against="ddp")
    assert verdict(row) == "no ratio: no completed one-device `ddp` run of gpt_tiny"


# Comparable or not


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"threads": 2}, "threads 2 vs 1"),
        ({"cores_per_rank": 2}, "cores_per_rank 2 vs 1"),
        ({"device_name": "NVIDIA H100 PCIe"}, "device_name NVIDIA H100 PCIe vs NVIDIA H200"),
        ({"precision": "bf16"}, "precision bf16 vs fp32"),
        ({"parameter_dtype": "bfloat16"}, "parameter_dtype bfloat16 vs float32"),
        ({"sequence_length": 64}, "sequence_length 64 vs 128"),
        ({"optimizer": "sgd"}, "optimizer sgd vs adamw"),
        ({"compile": True}, "compile True vs False"),
        ({"checkpointing": True}, "checkpointing True vs False"),
        ({"data": "text"}, "data text vs synthetic"),
        ({"channels_last": True}, "channels_last True vs False"),
        ({"parameters": 1}, "parameters 1 vs 840000"),
        ({"config": {"measure": CONFIG["measure"] | {"block_steps": 5}}}, "measure.block_steps 5 vs 10"),
        ({"config": {"optimizer": CONFIG["optimizer"] | {"clip": 1.0}}}, "optimizer.clip 1.0 vs none"),
        ({"config": {"model": CONFIG["model"] | {"args": {"layers": 2}}}}, "model.args.layers 2 vs 4"),
        ({"config": {"seed": 1}}, "seed 1 vs 0"),
        ({"environment": {"git": {"commit": "b" * 40, "dirty": False}}}, f"git.commit {'b' * 12} vs {'a' * 12}"),
        (
            {"environment": {"versions": ENVIRONMENT["versions"] | {"torch": "2.11.0"}}},
            "versions.torch 2.11.0 vs 2.13.0",
        ),
    ],
)
def test_every_field_that_has_to_agree(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    run, base = pair(tmp_path, {"channels_last": False}, **{"channels_last": False, **changes})
    assert mismatches(run, base) == [reason]
    row = only(scaling_rows([base, run]), against="single")
    assert row.efficiency is None
    assert verdict(row) == f"no ratio: {reason}"


def test_what_follows_from_the_swept_field_may_differ(tmp_path: Path) -> None:
    config = {"output_dir": "elsewhere", "run_dir": "x", "command": "srun", "threads": 1, "timeout_s": 1.0}
    versions = {"versions": ENVIRONMENT["versions"] | {"deepspeed": "0.19.8"}}
    run, base = pair(tmp_path, reduce_dtype="bfloat16", config=config, environment=versions)
    assert mismatches(run, base) == []


def test_a_field_that_an_older_record_lacks_does_not_forbid_the_ratio(tmp_path: Path) -> None:
    rate = {"measure": CONFIG["measure"] | {"matmul_rate": True}}
    run, base = pair(tmp_path, channels_last=False, batch_statistics=False, matmul_share=0.5, config=rate)
    assert mismatches(run, base) == []


def test_options_of_one_strategy_have_to_agree(tmp_path: Path) -> None:
    run = a_run(tmp_path / "two", world_size=2, config={"strategy": {"name": "ddp", "bucket_mb": 50.0}})
    base = a_run(tmp_path / "one", strategy="ddp")
    assert mismatches(run, base) == ["strategy.bucket_mb 50.0 vs 25.0"]


def test_transports_have_to_agree_where_both_have_one(tmp_path: Path) -> None:
    two = a_run(tmp_path / "two", world_size=2, link=Link("auto", "P2P", None))
    four = a_run(tmp_path / "four", world_size=4, link=Link("auto", "SHM", None))
    unseen = a_run(tmp_path / "unseen", world_size=4, link=Link("auto", None, None))
    one = a_run(tmp_path / "one", link=Link("host", "SHM", None))
    assert mismatches(four, two) == ["link.observed SHM vs P2P"]
    assert mismatches(unseen, two) == mismatches(two, one) == []


def test_a_change_of_transport_is_shown_where_it_happens(tmp_path: Path) -> None:
    base = a_run(tmp_path / "one")
    two, four, eight = (
        a_run(tmp_path / f"{n}", world_size=n, seconds=0.2, link=Link("auto", seen, None))
        for n, seen in ((2, "P2P"), (4, "SHM"), (8, "SHM"))
    )
    rows = [row for row in scaling_rows([base, two, four, eight]) if row.against == "single"]
    assert [row.remarks for row in rows] == [(), ("transport changes here: P2P → SHM",), ()]
    assert all(row.efficiency for row in rows)


def test_requested_links_with_one_observation_are_not_two_arms(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / asked, world_size=2, link=Link(asked, "SHM", "log")) for asked in ("host", "pcie")]
    text = render(runs, PIPED, colour=False)
    assert "Note: links host and pcie were all observed as SHM: not different arms" in text


def test_a_link_that_nobody_observed_gets_no_label(tmp_path: Path) -> None:
    text = render([a_run(tmp_path / "two", world_size=2, link=Link("nvlink", None, None))], PIPED, colour=False)
    assert "unverified" in text and "nvlink" not in text


def test_dirty_trees_of_one_commit_compare_and_it_is_said(tmp_path: Path) -> None:
    run, base = pair(tmp_path, environment={"git": {"commit": "a" * 40, "dirty": True}})
    assert mismatches(run, base) == []
    assert remarks(run, base) == [f"uncommitted changes on {'a' * 12}"]
    assert "uncommitted changes" in verdict(only(scaling_rows([base, run]), against="single"))


def test_an_unchecked_reduction_is_said(tmp_path: Path) -> None:
    run, base = pair(tmp_path, gradients_reduced=None)
    assert remarks(run, base) == ["nobody checked that gradients were reduced"]


def test_the_baseline_of_the_same_machine_is_taken(tmp_path: Path) -> None:
    other = a_run(tmp_path / "other", environment={"hosts": ["another"]})
    run, base = pair(tmp_path, seconds=0.2)
    assert only(scaling_rows([other, base, run]), against="single").baseline == (base,)
    row = only(scaling_rows([other, run]), against="single")
    assert row.remarks == ("baseline ran on another host (another)",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"flags": ["oversubscribed"]}, "oversubscribed"),
        ({"flags": ["drift", "profiled"]}, "profiled"),
        ({"gradients_reduced": False}, "gradients were not reduced"),
        ({"parameters_agree": False}, "parameters differ between ranks"),
        ({"mfu": 1.04}, "impossible: MFU 104.0 % is above 100 %"),
        ({"mfu": 0.9, "hfu": 1.04}, "impossible: HFU 104.0 % is above 100 %"),
        (
            {"matmul_share": 1.06},
            "impossible: share of matmul 106.0 % is above the rate measured on the device itself",
        ),
        ({"mfu": 0.4, "hfu": 0.3}, "hfu 0.3 is below mfu 0.4"),
        ({"hfu": 0.3}, "hfu 0.3 without an mfu"),
        ({"tflops_per_device": 6.7}, "tflops_per_device 6.7 is not 8, its FLOPs over its time"),
        ({"data_wait_s": -5.0}, "data_wait_s -5 is not within window_s 5"),
        ({"energy_j": -1e9}, "energy_j -1e+09 is below 0"),
        ({"mfu": 0.4, "peak_tflops": 16.0}, "mfu 0.4 is not 8 TFLOPS per device / peak_tflops 16"),
        (
            {"matmul_share": 0.6, "matmul_tflops": 16.0},
            "matmul_share 0.6 is not 8 TFLOPS per device / matmul_tflops 16",
        ),
        ({"hardware_flops_per_step": 10**12}, "hardware_flops_per_step 1e+12 is below flops_per_step 1.6e+12"),
        ({"flags": ["mixed_devices"]}, "mixed devices"),
        ({"comm_s": 0.01, "exposed_comm_s": 0.02}, "impossible: exposed_comm_s 0.02 is above comm_s 0.01"),
        ({"environment": {"devices": ["A", "B"]}}, "mixed devices: A, B"),
        # C08: one rank's rate, shown as the whole job's.
        ({"samples_per_s": 80.0, "samples_per_s_per_device": 80.0}, "samples/s 80 is not 2 x 80 per device"),
        ({"global_batch_size": 8}, "global batch 8 is not micro-batch 8 x accumulation 1 x 2 ranks"),
    ],
)
def test_runs_that_may_stand_in_no_ratio(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    run, base = pair(tmp_path, seconds=0.1, **changes)
    assert refusals(run)[0] == reason
    rows = [row for row in scaling_rows([base, run]) if row.runs == (run,)]
    assert rows and all(row.efficiency is None and reason in row.reasons for row in rows)
    assert run.run_id in render([base, run], PIPED, colour=False)


def test_values_that_agree_within_rounding_and_probing_stand(tmp_path: Path) -> None:
    # 8 TFLOPS per device of a peak of 16 are 0.5; a probe of a few shapes finds a little less than a model may reach.
    run = a_run(
        tmp_path / "two",
        world_size=2,
        mfu=0.503,
        hfu=0.503,
        peak_tflops=16.0,
        matmul_share=1.04,
        matmul_tflops=7.7,
        hardware_flops_per_step=16 * 10**11,
    )
    assert refusals(run) == []


def test_a_baseline_that_may_stand_in_no_ratio_is_named_as_the_reason(tmp_path: Path) -> None:
    run, base = pair(tmp_path, {"flags": ["oversubscribed"]})
    assert only(scaling_rows([base, run]), against="single").reasons == ("baseline: oversubscribed",)


def test_throughput_counts_accumulation_and_steps_once() -> None:
    # C07: micro 4 x accumulation 8 x 2 ranks, 10 steps in 20 s are 640 samples: 32 samples/s, 16 per device.
    right = {"micro_batch_size": 4, "accumulation_steps": 8, "world_size": 2, "measured_steps": 10, "seconds": 2.0}
    summary = asdict(a_summary(**right, window_s=20.0))
    assert (summary["samples_per_s"], summary["samples_per_s_per_device"]) == (32.0, 16.0)
    assert contradictions(summary) == []
    forgotten = summary | {"samples_per_s": 4.0, "samples_per_s_per_device": 2.0, "tokens_per_s": 512.0}
    assert contradictions(forgotten) == ["samples/s 4 is not 10 steps x 64 samples / 20 s"]


def test_the_row_shows_both_scopes_of_the_rate(tmp_path: Path) -> None:
    changes = {"micro_batch_size": 4, "accumulation_steps": 8, "world_size": 2, "measured_steps": 10, "seconds": 2.0}
    run = a_run(tmp_path / "c07", **changes, window_s=20.0, data_wait_s=6.0)
    line = next(line for line in render([run], PIPED, colour=False).splitlines() if "c07" in line)
    assert "4 x 8 (64)" in line and "2000 ± 20" in line
    assert " 32.00 " in line and " 16.00 " in line and " 30.0 % " in line


def test_weak_efficiency_above_one_is_impossible_and_the_row_stays(tmp_path: Path) -> None:
    # E = 0.1 / 0.08 = 1.25, far beyond its ±1.4 %.
    run, base = pair(tmp_path, seconds=0.08)
    row = only(scaling_rows([base, run]), against="single")
    assert row.impossible and row.efficiency is not None
    assert row.efficiency.value == pytest.approx(1.25)
    assert verdict(row).startswith("no verdict: impossible: above 100 % beyond its interval or range; raw 125.0 %")


def test_weak_efficiency_above_one_within_its_interval_stands(tmp_path: Path) -> None:
    # 0.1 / 0.0995 = 1.005, and ±1.4 % reaches below 1.
    run, base = pair(tmp_path, seconds=0.0995)
    assert not only(scaling_rows([base, run]), against="single").impossible


def test_weak_efficiency_above_one_without_an_interval_is_impossible(tmp_path: Path) -> None:
    run, base = pair(tmp_path, seconds=0.0995, relative=None)
    assert only(scaling_rows([base, run]), against="single").impossible


# Files


def test_a_run_is_found_at_any_depth_and_once(tmp_path: Path) -> None:
    deep = save(tmp_path / "runs" / "study" / "gpt_tiny-ddp-0a1b2c3d-01")
    tracker = deep / "wandb" / "run" / "files"
    tracker.mkdir(parents=True)
    (tracker / "summary.json").write_text("{}")
    assert find_runs([tmp_path, deep, tmp_path / "runs" / ".." / "runs"]) == [deep.resolve()]


def test_a_failed_run_shows_kind_rank_and_message(tmp_path: Path) -> None:
    folder = save(tmp_path / "gpt_tiny-ddp-0a1b2c3d-02", world_size=2)
    (folder / "summary.json").unlink()
    error = {"kind": "oom", "rank": 1, "message": "out of memory:\n wanted [8 GiB]", "traceback": "Traceback"}
    (folder / "error.json").write_text(json.dumps(error))
    run = read_run(folder)
    assert (run.status, run.summary, run.world_size, run.global_batch_size) == ("failed", None, 2, 16)
    assert refusals(run) == ["failed: oom"]
    text = render([run], PIPED, colour=False)
    assert "failed: oom on rank 1: out of memory:" in text and "Traceback" not in text
    assert text.count("failed: oom") == 1 and "no ratio" not in text


def test_a_run_without_an_ending_is_incomplete(tmp_path: Path) -> None:
    folder = tmp_path / "gpt_tiny-ddp-0a1b2c3d-03"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    run = read_runs([tmp_path])[0]
    assert (run.status, run.model, run.world_size) == ("incomplete", "gpt_tiny", None)
    text = render([run], PIPED, colour=False)
    assert "incomplete" in text and "no ratio" not in text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON, truncated?"),
        ('{"schema_version": 1, "mod', "not JSON, truncated?"),
        ("[1, 2]", "holds no mapping, so it is not ours"),
        ('{"accuracy": 0.9}', "has no schema_version, so it is not a record of scaling"),
        ('{"schema_version": 2}', "schema_version 2 is newer than 1, the newest that this version reads"),
        ('{"schema_version": 1, "command": "comm"}', "a record of scaling.comm"),
        ('{"schema_version": 1, "command": "train"}', "has no run_id"),
        ("\udcff\x00", "not JSON, truncated?"),
    ],
)
def test_a_summary_that_cannot_be_believed_is_named_and_skipped(tmp_path: Path, text: str, reason: str) -> None:
    good, bad = save(tmp_path / "good"), save(tmp_path / "bad")
    (bad / "summary.json").write_bytes(text.encode(errors="surrogateescape"))
    result = run_report(tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    skipped = [line for line in result.stdout.splitlines() if line.startswith("Skipped: ")]
    assert len(skipped) == 1 and f"{bad}: summary.json: {reason}" in skipped[0]
    assert good.name in result.stdout


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"world_size": 0}, "world_size is 0, which no measurement gives"),
        ({"threads": "many"}, "threads is 'many'"),
        ({"compile": 1}, "compile is '1'"),
        ({"samples_per_s": math.nan}, "samples_per_s is 'nan'"),
        ({"flags": "drift"}, "flags is 'drift'"),
        ({"link": None}, "link is no mapping"),
        ({"step_time_s": {"mean": 0.1}}, "has no step_time_s.median"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    folder = save(tmp_path / "run")
    content = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(content | changes))
    assert read_run(folder).problem == f"summary.json: {reason}"


def test_a_record_with_added_and_without_later_fields_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "run")
    content = json.loads((folder / "summary.json").read_text())
    del content["clock_mhz"], content["flags"]
    (folder / "summary.json").write_text(json.dumps(content | {"invented_later": {"x": 1}}))
    run = read_run(folder)
    assert run.summary is not None and run.problem is None
    assert (run.summary["clock_mhz"], run.summary["flags"], run.summary["invented_later"]) == (None, [], {"x": 1})


def test_a_truncated_environment_keeps_the_row_and_refuses_the_ratio(tmp_path: Path) -> None:
    save(tmp_path / "single1")
    folder = save(tmp_path / "ddp2", world_size=2)
    (folder / "environment.json").write_text('{"git":')
    runs = read_runs([tmp_path])
    row = only(scaling_rows(runs), against="single")
    assert row.reasons == ("no readable environment.json",)
    assert "environment.json: not JSON, truncated?" in render(runs, PIPED, colour=False)


def test_files_of_strangers_never_end_in_a_traceback(tmp_path: Path) -> None:
    save(tmp_path / "single1", config={"model": "x", "batch": [1], "measure": None}, environment={"git": 3, "hosts": 1})
    for name in ("config.yaml", "environment.json", "error.json"):
        (tmp_path / name.replace(".", "_")).mkdir()
        (tmp_path / name.replace(".", "_") / "error.json").write_text("{}")
        (tmp_path / name.replace(".", "_") / name).write_text("[")
    result = run_report(tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


# The command


@pytest.mark.parametrize(
    ("path", "message"),
    [("nowhere", "no such folder"), ("empty", "holds no run"), ("a_file", "is a file; name the run's folder")],
)
def test_a_wrong_path_is_one_line_and_exit_code_2(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a_file").write_text("")
    save(tmp_path / "good")
    result = run_report(tmp_path / "good", tmp_path / path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"scaling.report: error: {tmp_path / path}: {message}")
    assert len(result.stderr.splitlines()) == 1


def test_runs_of_which_none_can_be_read_are_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "run")
    (folder / "summary.json").write_text("{")
    assert report.main([str(tmp_path)]) == 2
    assert "summary.json: not JSON" in capsys.readouterr().err


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        report.main(["--help"])
    assert exit_.value.code == 0
    assert "python -m scaling.report runs" in capsys.readouterr().out


def a_study(root: Path) -> list[Run]:
    """Runs with everything that a table can hold."""
    save(root / "gpt_tiny-single-0a1b2c3d-01", seconds=12.3456789)
    save(root / "gpt_tiny-single-0a1b2c3d-02", accumulation_steps=2, seconds=24.5)
    save(root / "gpt_tiny-ddp-1a1b2c3d-01", strategy="ddp", seconds=12.5, mfu=0.4321)
    save(root / "gpt_tiny-ddp-2a1b2c3d-01", world_size=2, seconds=13.1, flags=["drift", "unsteady", "data_bound"])
    save(root / "gpt_tiny-ddp-3a1b2c3d-01", world_size=2, threads=2, config={"seed": 3, "optimizer": {"lr": 1}})
    error = save(root / "gpt_tiny-ddp-4a1b2c3d-01", world_size=4)
    (error / "summary.json").unlink()
    (error / "error.json").write_text(json.dumps({"kind": "oom", "rank": 1, "message": "CUDA out of memory. " * 20}))
    return read_runs([root])


def test_the_tables_fit_100_columns_and_cut_no_number(tmp_path: Path) -> None:
    runs = a_study(tmp_path)
    text = render(runs, 100, colour=False)
    assert max(map(len, text.splitlines())) <= 100
    for summary in (run.summary for run in runs if run.summary):
        assert f" {number(summary['samples_per_s'])} " in text
        assert number(1e3 * summary["step_time_s"]["mean"]) in text
    assert "…" not in text
    for title in ("Runs", "Runs: speed"):
        heading = next(line for line in text[text.index(f"{title}\n") :].splitlines() if "strategy" in line)
        assert " N " in heading, title  # no column is left out


def test_a_pipe_gets_one_plain_line_per_run(tmp_path: Path) -> None:
    runs = a_study(tmp_path)
    result = run_report(tmp_path)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    table = lines[lines.index("Runs") + 2 : lines.index("")]
    assert [line.split()[:2] for line in table] == [[f"#{n}", run.run_id] for n, run in enumerate(runs, start=1)]
    assert "\x1b" not in result.stdout and not set("│┃─━┏╭") & set(result.stdout)
    assert all(line == line.rstrip() for line in lines)


def test_a_host_is_told_what_busy_ranks_do(tmp_path: Path) -> None:
    memory = Memory(0.5, None, "host_resident")
    device = "AMD EPYC"
    base = a_run(tmp_path / "one", peak_memory_gib=memory, device_name=device)
    blind = a_run(tmp_path / "two", world_size=2, seconds=0.2, peak_memory_gib=memory, device_name=device)
    seen = a_run(
        tmp_path / "four",
        world_size=4,
        seconds=0.2,
        peak_memory_gib=memory,
        device_name=device,
        contention_s=0.0125,
    )
    text = render([base, blind, seen], PIPED, colour=False)
    assert "busy ranks slow each other even with a core each" in text
    assert "contention_s was not measured in #2." in text
    assert "contention 12.50 ms" in text and "0.5000 resident" in text


def test_no_host_no_note(tmp_path: Path) -> None:
    assert "busy ranks" not in render([a_run(tmp_path / "one")], PIPED, colour=False)


def test_an_unknown_mfu_has_no_column_and_a_known_one_is_percent(tmp_path: Path) -> None:
    unknown, known = a_run(tmp_path / "one"), a_run(tmp_path / "two", mfu=0.4321)
    assert "MFU" not in render([unknown], PIPED, colour=False)
    assert "43.2 %" in render([unknown, known], PIPED, colour=False)


def headings_and_cells(runs: list[Run]) -> list[dict[str, str]]:
    (table,) = [table for table in prepare(runs, wide=True).tables if table.title == "Runs"]
    names = [heading.line for heading in table.headings]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def test_what_the_device_did_has_columns_where_it_is_known(tmp_path: Path) -> None:
    # 1,000 J over a window of 5 s at 80 samples/s are 2.5 J per sample.
    known = a_run(tmp_path / "known", mfu=0.3, hfu=0.3, matmul_share=0.456, energy_j=1000.0, clock_mhz=1980.0)
    unknown = a_run(tmp_path / "unknown")
    names = ("share of matmul", "energy J/sample", "clock MHz")
    first, second = headings_and_cells([known, unknown])
    assert [first[name] for name in names] == ["45.6 %", "2.500", "1980"]
    assert [second[name] for name in ("MFU", *names)] == [""] * 4
    assert not {"MFU", *names} & set(headings_and_cells([unknown])[0])


def test_hfu_stands_beside_mfu_where_something_is_recomputed(tmp_path: Path) -> None:
    plain = a_run(tmp_path / "plain", mfu=0.3, hfu=0.3)
    again = a_run(tmp_path / "again", mfu=0.3, hfu=0.4, checkpointing=True)
    assert "HFU" not in headings_and_cells([plain])[0]
    assert [(row["MFU"], row["HFU"]) for row in headings_and_cells([plain, again])] == [
        ("30.0 %", "30.0 %"),
        ("30.0 %", "40.0 %"),
    ]


def test_a_narrow_terminal_gives_the_devices_a_table_of_their_own(tmp_path: Path) -> None:
    known = {"mfu": 0.3, "hfu": 0.4, "matmul_share": 0.456, "energy_j": 1000.0, "clock_mhz": 1980.0}
    runs = [a_run(tmp_path / "gpt_tiny-ddp-fp32-2x-0a1b2c3d-01", world_size=2, **known)]
    text = render(runs, 100, colour=False)
    assert max(map(len, text.splitlines())) <= 100
    assert "Runs: use of the devices" in text and "45.6 %" in text
    assert "Runs: use of the devices" not in render([a_run(tmp_path / "plain")], 100, colour=False)


def test_equal_ids_of_two_machines_are_told_apart_by_path(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / box / "gpt_tiny-ddp-0a1b2c3d-01") for box in ("a", "b")]
    text = render(runs, PIPED, colour=False)
    assert all(str(run.path) in text for run in runs)


def test_the_slowest_rank_is_named_and_explained(tmp_path: Path) -> None:
    # C32: ranks of 1.0, 1.0, 1.0 and 1.3 s.
    late = {"world_size": 4, "seconds": 1.3, "slowest_rank": 3, "rank_spread": 0.3}
    plain = a_run(tmp_path / "plain", **late)
    assert headings_and_cells([plain])[0]["flags"] == "rank 3 is slowest, by 30.0 %"
    slow = [telemetry(), telemetry(), telemetry(throttle_reasons={"sw_power_cap": 1.0, "sw_thermal_slowdown": 0.4})]
    devices = [*slow, telemetry(power_limit_w=150.0, throttle_reasons={"hw_slowdown": 0.004, "gpu_idle": 0.5})]
    run = a_run(tmp_path / "four", **late, telemetry=devices, flags=["throttled", "power_limited"])
    assert headings_and_cells([run])[0]["flags"] == (
        "throttled, power_limited, rank 3 is slowest, by 30.0 %, rank 2: sw_thermal_slowdown in 40 % of samples, "
        "rank 3: power limit 150 of 300 W, rank 3: hw_slowdown in under 1 % of samples"
    )
    assert refusals(run) == []


@pytest.mark.parametrize(
    ("flags", "devices", "said"),
    [
        ([], [telemetry(power_limit_w=150.0, throttle_reasons={"hw_slowdown": 1.0})], []),
        (["throttled"], None, []),
        (["throttled", "power_limited"], [None, telemetry(throttle_reasons=None, power_limit_w=None)], []),
        (
            ["power_limited"],
            [telemetry(power_limit_w=150.0)] * 3 + [None] + [telemetry(power_limit_w=150.0)],
            ["0-2, 4"],
        ),
    ],
)
def test_only_what_was_flagged_and_is_known_is_explained(
    flags: list[str], devices: list[Telemetry | None] | None, said: list[str]
) -> None:
    summary = asdict(a_summary(flags=flags, telemetry=devices))
    assert odd_devices(summary) == [f"ranks {spans}: power limit 150 of 300 W" for spans in said]


def test_of_many_odd_devices_some_are_named_and_the_others_counted() -> None:
    devices = [telemetry(power_limit_w=100.0 + rank) for rank in range(10)]
    said = odd_devices(asdict(a_summary(flags=["power_limited"], telemetry=devices)))
    assert (len(said), said[0]) == (5, "rank 0: power limit 100 of 300 W")
    assert said[-1] == "and 6 more in summary.json, telemetry"


def test_colour_and_folding_are_for_terminals(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    runs, screen, pipe = a_study(tmp_path), Terminal(), io.StringIO()
    print_report(runs, screen)
    print_report(runs, pipe)
    assert len(screen.getvalue().splitlines()) > len(pipe.getvalue().splitlines())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00012346, "1.235e-04"),
        (1.23456, "1.235"),
        (12.3456, "12.35"),
        (123.456, "123.5"),
        (12345.6, "12346"),
    ],
)
def test_numbers_keep_four_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_the_report_imports_nothing_of_the_training() -> None:
    ours = ("analysis", "reporting")
    found = [path for name in ours for path in (Path(scaling.__file__).parent / name).glob("*.py")]
    names = ["report", "results.reader", *(f"{path.parent.name}.{path.stem}" for path in found)]
    assert len(names) > 10
    imports = "; ".join(f"import scaling.{name}" for name in names)
    heavy = ["torch", "transformers", "hydra", "omegaconf", "deepspeed", "scipy", "numpy"]
    check = f"import sys; {imports}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# Records that cannot be believed


def doubted(folder: Path, edit: dict[str, Any]) -> list[str]:
    """Why a run whose summary.json was edited by hand may stand in no ratio."""
    save(folder)
    content = json.loads((folder / "summary.json").read_text())
    for key, value in edit.items():
        target, _, leaf = key.rpartition(".")
        (content[target] if target else content)[leaf] = value
    (folder / "summary.json").write_text(json.dumps(content))
    return refusals(read_run(folder))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ({"step_time_s.mean": 0.025, "step_time_s.ci95": None}, "step_time_s.mean 0.025 x 50 steps is not window_s 5"),
        ({"step_time_s.ci95": [0.11, 0.09]}, "ci95 [0.11, 0.09] does not hold the mean 0.1"),
        ({"tokens_per_s": 1.0}, "tokens/s 1 is not 80 samples/s x 128"),
        ({"samples_per_s": 104.0, "samples_per_s_per_device": 104.0}, "samples_per_s is 104, but its steps give 80"),
        ({"window_s": 4.0}, "window_s is 4, but its steps give 5"),
        ({"measured_steps": 25}, "measured_steps is 25, but its steps give 50"),
        ({"world_size": 2}, "world_size is 2, but its steps give 1"),
        ({"world_size": 2}, "devices 1 in its files, 2 in its summary"),
        ({"micro_batch_size": 4}, "batch.micro_batch_size 8 in its files, 4 in its summary"),
        ({"precision": "bf16"}, "precision.name fp32 in its files, bf16 in its summary"),
    ],
)
def test_a_summary_that_contradicts_its_own_files_is_refused(tmp_path: Path, edit: dict[str, Any], reason: str) -> None:
    assert reason in doubted(tmp_path / "run", edit)


@pytest.mark.parametrize(("key", "value"), [("schema_version", 0), ("command", "banana")])
def test_a_record_of_another_kind_is_skipped(tmp_path: Path, key: str, value: Any) -> None:
    folder = save(tmp_path / "run")
    content = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(content | {key: value}))
    assert not read_run(folder).readable


def test_a_run_without_its_steps_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "run")
    (folder / "steps.jsonl").unlink()
    assert refusals(read_run(folder)) == ["no readable steps.jsonl"]


def test_a_copied_run_is_no_repeat(tmp_path: Path) -> None:
    folder = save(tmp_path / "run")
    shutil.copytree(folder, tmp_path / "again")
    first, second = read_runs([tmp_path])
    assert refusals(first) == []
    assert refusals(second) == [f"a copy of run in {tmp_path}"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"flops_per_step": 10**15}, "flops per sample 62500000000000 vs 100000000000"),
        ({"environment": {"model_source": "ab"}}, "model source ab vs none"),
        ({"environment": {"data": {"digest": "ab"}}}, "data.digest ab vs none"),
    ],
)
def test_another_model_or_text_under_one_name_gives_no_ratio(tmp_path: Path, changes: Any, reason: str) -> None:
    run = a_run(tmp_path / "ddp2", world_size=2, **changes)
    assert reason in mismatches(run, a_run(tmp_path / "single1"))


def test_runs_with_other_transport_variables_are_no_repeats(tmp_path: Path) -> None:
    variables = {"variables": {"NCCL_P2P_DISABLE": "1", "OMP_NUM_THREADS": "1"}}
    runs = [a_run(tmp_path / "a", world_size=2, environment=variables), a_run(tmp_path / "b", world_size=2)]
    assert len(points(runs)) == 2
    assert len(points([a_run(tmp_path / "c", environment=variables), a_run(tmp_path / "d")])) == 1


def test_what_nobody_checked_is_said(tmp_path: Path) -> None:
    run, base = pair(tmp_path, parameters_agree=None, environment={"git": {"commit": None, "dirty": None}})
    assert {"nobody checked that parameters agree", "commit unknown"} <= set(remarks(run, base))


def test_a_wrapper_that_gains_on_one_device_is_possible(tmp_path: Path) -> None:
    a_run(tmp_path / "ddp1", strategy="ddp", seconds=0.09)
    a_run(tmp_path / "single1")
    (row,) = scaling_rows(read_runs([tmp_path]))
    assert row.efficiency is not None and row.efficiency.low is not None and row.efficiency.low > 1
    assert not row.impossible


def test_a_device_that_was_not_the_same_is_said_and_far_off_gives_no_ratio(tmp_path: Path) -> None:
    # The largest matrix-product rate tells a host on which other work ran: 0.1 TFLOPS and then 0.08 or 0.05.
    base = a_run(tmp_path / "base", matmul_tflops=0.1)
    for rate, said, refused in ((0.095, False, False), (0.08, True, False), (0.05, True, True)):
        run = a_run(tmp_path / f"run{rate}", world_size=2, matmul_tflops=rate)
        assert any("not equally fast" in remark for remark in remarks(run, base)) is said, rate
        assert any(reason.startswith("matmul_tflops") for reason in mismatches(run, base)) is refused, rate
    assert not any("equally" in r for r in remarks(a_run(tmp_path / "none", world_size=2), base))


def test_another_micro_batch_is_said_where_a_model_has_batch_statistics(tmp_path: Path) -> None:
    base = a_run(tmp_path / "base", micro_batch_size=8, batch_statistics=True)
    run = a_run(tmp_path / "run", world_size=2, micro_batch_size=4, batch_statistics=True)
    assert "batch statistics over another micro-batch: not the same training" in remarks(run, base)
    same = a_run(tmp_path / "same", world_size=2, micro_batch_size=8, batch_statistics=True)
    assert not any("batch statistics" in remark for remark in remarks(same, base))


def test_the_same_data_may_lie_anywhere_and_other_data_under_one_name_is_told_apart(tmp_path: Path) -> None:
    def run(name: str, path: str, digest: str) -> Run:
        config = CONFIG | {"data": {"name": "images", "path": path, "workers": 4}}
        return a_run(tmp_path / name, config=config, environment=ENVIRONMENT | {"data": {"digest": digest}})

    here, there, other = run("a", "photos", "1"), run("b", "/data/photos", "1"), run("c", "photos", "2")
    assert mismatches(here, there) == []
    assert mismatches(here, other) == ["data.digest 1 vs 2"]


@pytest.mark.parametrize(
    "changes", [{"flops_per_step": 10**400}, {"window_s": 5e-324}, {"samples_per_s": 5e-324}, {"parameters": 10**400}]
)
def test_a_number_that_no_machine_gives_hides_no_other_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    a_run(tmp_path / "good")
    a_run(tmp_path / "odd")
    summary = json.loads((tmp_path / "odd" / "summary.json").read_text()) | changes
    (tmp_path / "odd" / "summary.json").write_text(json.dumps(summary))
    odd = read_run(tmp_path / "odd")
    assert odd.summary is None and odd.problem is not None and odd.problem.startswith("summary.json: ")
    assert "good" in render(read_runs([tmp_path]), PIPED, colour=False)


def test_a_config_that_holds_itself_is_skipped(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("a: &a\n  x: *a\n")
    run = read_run(tmp_path / "run")
    assert run.config == {} and "config.yaml: not YAML" in (run.problem or "")


def test_runs_that_would_look_alike_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    def run(name: str, **model: Any) -> Run:
        return a_run(tmp_path / name, config=CONFIG | {"model": CONFIG["model"] | model})

    runs = [
        run("a", args={"layers": 4}),
        run("b", args={"layers": 8}, dropout=0.1),
        a_run(tmp_path / "c", compile=True),
    ]
    cells = [row["setting"] for row in headings_and_cells(runs)]
    plain = "fp32, synthetic data, 128 tokens"
    assert cells == [
        f"{plain}, model.args.layers=4, model.dropout=0.0",
        f"{plain}, model.args.layers=8, model.dropout=0.1",
        f"{plain}, compile",
    ]
    assert [row["setting"] for row in headings_and_cells(runs[1:])] == [plain, f"{plain}, compile"]


def test_a_disturbed_run_gets_no_ratio_and_one_run_each_is_said(tmp_path: Path) -> None:
    base, run = a_run(tmp_path / "base"), a_run(tmp_path / "run", world_size=2)
    assert "An interval of n=1 comes from the blocks inside one run each" in render([base, run], PIPED, colour=False)
    disturbed = a_run(tmp_path / "disturbed", world_size=2, flags=["disturbed"], disturbed_s=1.0)
    text = render([base, disturbed], PIPED, colour=False)
    assert "no ratio: other programs took its cores" in text and "n=1" not in text


def test_contention_is_said_of_several_ranks_only(tmp_path: Path) -> None:
    host = {"peak_memory_gib": Memory(0.5, None, "host_resident")}
    alone, pair = a_run(tmp_path / "one", **host), a_run(tmp_path / "two", world_size=2, **host)
    assert "busy ranks slow each other" not in render([alone], PIPED, colour=False)
    assert "busy ranks slow each other" in render([alone, pair], PIPED, colour=False)


def test_another_image_size_is_another_point_however_it_was_set(tmp_path: Path) -> None:
    named = CONFIG | {"model": CONFIG["model"] | {"image_size": 224}}
    base = a_run(tmp_path / "base", image_size=224, config=CONFIG)
    same = a_run(tmp_path / "same", image_size=224, config=named)
    other = a_run(tmp_path / "other", image_size=96, config=named)
    assert mismatches(same, base) == []
    assert mismatches(other, base) == ["image_size 96 vs 224"]
