"""Strategies in the report: side by side, what each sends and holds, and what may be compared; worked out by hand."""

from __future__ import annotations

import csv
import json
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from records import BUCKETS, COSTS, MIB, a_run, a_summary, deepspeed, save, strategy_fields

from scaling.analysis.believable import contradictions, refusals
from scaling.analysis.comparable import mismatches, points, remarks
from scaling.analysis.efficiency import scaling_rows
from scaling.analysis.strategies import USUAL, StrategyRow, cost, label, strategy_rows
from scaling.analysis.traffic import differing, surprise
from scaling.config import OPTIONS, conf_dir
from scaling.reporting.markdown import markdown
from scaling.reporting.sheets import runs_sheet, scaling_sheet, strategies_sheet
from scaling.reporting.tables import prepare
from scaling.reporting.terminal import PIPED, render
from scaling.reporting.verdicts import strategy_verdict, verdict
from scaling.results.reader import Run, read_runs
from scaling.results.record import Link, MemoryTerms

ZERO = {"name": "zero2", "bucket_mb": 25.0, "defaults": "scaling"}


def strategy(folder: Path, name: str, accumulation_steps: int = 1, **changes: Any) -> Run:
    return a_run(folder, **strategy_fields(name, accumulation_steps) | changes)


def with_file(folder: Path, like: str, config: dict[str, Any], **changes: Any) -> Run:
    """A run with a user's DeepSpeed file, which costs what a strategy of ours does."""
    return a_run(folder, **strategy_fields(like) | {"strategy": "deepspeed", "config": config} | changes)


def a_study(root: Path, accumulation_steps: int = 1) -> list[Run]:
    """All strategies at two ranks, and `single` alone."""
    save(root / "single", accumulation_steps=accumulation_steps, seconds=0.09 * accumulation_steps, parameters=MIB)
    for name in COSTS:
        save(root / name, **strategy_fields(name, accumulation_steps))
    return read_runs([root])


def cells(runs: list[Run], title: str) -> list[dict[str, str]]:
    """The rows of the table whose title begins so, by the names of their columns."""
    (table,) = [table for table in prepare(runs, wide=True).tables if table.title.startswith(title)]
    names = [heading.line for heading in table.headings]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def of(rows: list[StrategyRow], name: str) -> StrategyRow:
    (found,) = [row for row in rows if row.runs[0].run_id == name]
    return found


# Comparable or not


def test_what_only_names_or_follows_from_the_point_is_no_mismatch(tmp_path: Path) -> None:
    stage = {"zero_optimization": {"stage": 2}}
    one = deepspeed("a.json", train_batch_size=8, gradient_accumulation_steps=1, **stage)
    two = deepspeed("elsewhere/a.json", train_batch_size=16, train_micro_batch_size_per_gpu=8, **stage)
    base = with_file(tmp_path / "one", "ddp", one, world_size=1)
    run = with_file(tmp_path / "two", "ddp", two)
    assert mismatches(run, base) == []
    other = deepspeed("a.json", zero_optimization={"stage": 1})
    third = with_file(tmp_path / "three", "ddp", other)
    assert mismatches(third, base) == ["strategy.settings.zero_optimization.stage 1 vs 2"]


def test_the_gathered_type_is_compared_by_its_outcome(tmp_path: Path) -> None:
    def run(name: str, asked: str, got: str) -> Run:
        precision = {"precision": {"name": "bf16", "reduce": "fp32", "gather": asked}}
        return strategy(tmp_path / name, "zero3", precision="bf16", gather_dtype=got, config=precision)

    auto, asked, whole = run("a", "auto", "bfloat16"), run("b", "compute", "bfloat16"), run("c", "fp32", "float32")
    assert mismatches(auto, asked) == []
    assert mismatches(whole, auto) == ["gather_dtype float32 vs bfloat16"]


def test_copies_of_the_weights_are_said_and_may_beat_a_baseline_that_casts(tmp_path: Path) -> None:
    # X(2) / 2 X(1) = 0.09 / 0.08 = 1.125, far beyond its interval.
    base = a_run(tmp_path / "one", seconds=0.09, precision="bf16", parameters=MIB)
    fields: dict[str, Any] = {"precision": "bf16", "seconds": 0.08}
    copies = strategy(tmp_path / "copies", "zero3", **fields, gather_dtype="bfloat16")
    whole = strategy(tmp_path / "whole", "fsdp", **fields, gather_dtype="float32")
    said = "computes on bfloat16 copies of the weights, the baseline casts float32 weights at each operation"
    assert remarks(copies, base) == [said] and remarks(whole, base) == []
    rows = {row.runs[0].run_id: row for row in scaling_rows([base, copies, whole]) if row.against == "single"}
    assert not rows["copies"].impossible and rows["whole"].impossible
    assert verdict(rows["copies"]).startswith("112.5 % [") and said in verdict(rows["copies"])
    alone = strategy(tmp_path / "zero3 alone", "zero3", world_size=1, precision="bf16", gather_dtype="bfloat16")
    assert remarks(copies, alone) == []
    twice = [row for row in scaling_rows([alone, copies]) if row.against == "zero3" and row.runs == (copies,)]
    assert [row.impossible for row in twice] == [True]  # both on copies: 0.16 / 0.08 of one device is impossible


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"bf16": {"enabled": True}}, "bfloat16"),  # without a stage: nothing is gathered, and yet there are copies
        ({"fp16": {"enabled": True}}, "float16"),
        ({"bf16": {"enabled": False}}, None),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, None),  # which casts as ours does
        ({}, None),
    ],
)
def test_half_weights_of_a_users_file_are_copies_at_stage_0_too(
    settings: dict[str, Any], copies: str | None, tmp_path: Path
) -> None:
    base = strategy(tmp_path / "ddp", "ddp", precision="bf16")
    run = with_file(tmp_path / "file", "zero0", deepspeed("ds.json", **settings), precision="bf16")
    said = [remark for remark in remarks(run, base) if remark.startswith("computes on ")]
    assert [remark.split()[2] for remark in said] == ([] if copies is None else [copies])


def test_two_runs_of_one_such_file_both_compute_on_copies(tmp_path: Path) -> None:
    file = deepspeed("ds.json", bf16={"enabled": True})
    base = with_file(tmp_path / "one", "zero0", file, precision="bf16", world_size=1)
    run = with_file(tmp_path / "two", "zero0", file, precision="bf16")
    assert remarks(run, base) == []


def test_an_unexpected_count_is_shown_and_forbids_nothing(tmp_path: Path) -> None:
    run = strategy(tmp_path / "run", "zero2", flags=["unexpected_communication"])
    assert refusals(run) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"comm_bytes_per_step": {"all_reduce": -4.0}}, "comm_bytes_per_step.all_reduce -4 is below 0"),
        (
            {"expected_comm_bytes_per_step": {"all_gather": -1.0}},
            "expected_comm_bytes_per_step.all_gather -1 is below 0",
        ),
        ({"textbook_comm_bytes_per_step": -1.0}, "textbook_comm_bytes_per_step -1 is below 0"),
        ({"syncs_per_step": 3}, "syncs_per_step 3 is not within 0 and accumulation_steps 1"),
        ({"expected_syncs_per_step": -1}, "expected_syncs_per_step -1 is not within 0 and accumulation_steps 1"),
        ({"memory_terms_gib": MemoryTerms(-1.0, None, None, None, None, None)}, "memory_terms_gib.model -1 is below 0"),
        ({"textbook_bytes_per_parameter": {"model": -2.0}}, "textbook_bytes_per_parameter.model -2 is below 0"),
    ],
)
def test_counts_that_nothing_sends_are_contradictions(changes: dict[str, Any], reason: str) -> None:
    summary = asdict(replace(a_summary(world_size=2), **changes))
    assert contradictions(summary) == [reason]


# Names


def test_a_strategy_is_named_with_what_makes_another_one_of_it(tmp_path: Path) -> None:
    plain = strategy(tmp_path / "plain", "zero2", config={"strategy": ZERO})
    own = strategy(tmp_path / "own", "zero2", config={"strategy": ZERO | {"defaults": "deepspeed"}})
    file = deepspeed("confs/my.json", zero_optimization={"stage": 3})
    user = with_file(tmp_path / "user", "zero3", file)
    bare = with_file(tmp_path / "bare", "zero0", deepspeed("b.json"))
    names = ["zero2", "zero2 (DeepSpeed's defaults)", "deepspeed (my.json, stage 3)", "deepspeed (b.json, stage 0)"]
    assert [label(run) for run in (plain, own, user, bare)] == names
    assert [row["strategy"] for row in cells([plain, own, user, bare], "Runs")] == names


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("zero2", ZERO | {"offload_optimizer": True}, "zero2 (offload_optimizer=true)"),
        ("zero2", ZERO | {"bucket_mb": 100.0, "overlap": False}, "zero2 (bucket_mb=100.0, overlap=false)"),
        ("zero2", ZERO | {"bucket_mb": 25}, "zero2"),  # as YAML writes it
        (
            "zero2",
            ZERO | {"defaults": "deepspeed", "offload_optimizer": True},
            "zero2 (DeepSpeed's defaults, offload_optimizer=true)",
        ),
        ("zero3", {"name": "zero3", "param_persistence_threshold": 0}, "zero3 (param_persistence_threshold=0)"),
        ("zero3", {"name": "zero3", "param_persistence_threshold": None, "offload_parameters": False}, "zero3"),
        ("fsdp", {"name": "fsdp", "reshard": False}, "fsdp (reshard=false)"),
        ("fsdp", {"name": "fsdp", "reshard": True, "coalesce_grad_reduction": False}, "fsdp"),
        ("ddp", {"name": "ddp", "overlap": False}, "ddp (overlap=false)"),
        ("ddp", {"name": "ddp"}, "ddp"),  # a record from before there were options
        ("ddp", {"name": "ddp", "invented": 3}, "ddp"),  # and one from after
    ],
)
def test_options_that_are_not_the_usual_ones_are_part_of_the_name(
    name: str, options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    assert label(strategy(tmp_path / "run", name, config={"strategy": options})) == expected


@pytest.mark.parametrize("name", [name for name in OPTIONS["strategy"] if name != "deepspeed"])
def test_what_is_usual_is_what_an_untouched_config_has(name: str) -> None:
    """So that a strategy without options is named plainly, and one with any is not."""
    options = {field.name: field.default for field in fields(OPTIONS["strategy"][name]) if field.name != "name"}
    assert MISSING not in options.values()
    assert options.pop("defaults", "scaling") == "scaling"
    assert options == {option: USUAL[option] for option in options}
    written = yaml.safe_load((conf_dir() / "strategy" / f"{name}.yaml").read_text())
    written = written.get("strategy", written)
    assert {option: written[option] for option in options} == options


def test_one_strategy_with_two_options_is_two_strategies(tmp_path: Path) -> None:
    plain = strategy(tmp_path / "plain", "zero2", config={"strategy": ZERO | {"offload_optimizer": False}})
    other = strategy(tmp_path / "other", "zero2", config={"strategy": ZERO | {"offload_optimizer": True}})
    rows = cells([plain, other], "Strategies side by side")
    assert [row["strategy"] for row in rows] == ["zero2", "zero2 (offload_optimizer=true)"]


def test_two_files_of_one_name_are_told_apart_by_what_stands_in_them(tmp_path: Path) -> None:
    def run(folder: str, bucket: int) -> Run:
        content = {"zero_optimization": {"stage": 2, "reduce_bucket_size": bucket}}
        return with_file(tmp_path / folder, "zero2", deepspeed("ds.json", **content))

    runs = [run("a", 100), run("b", 5000)]
    assert len(points(runs)) == 2
    keys = [row["setting"].split(", ")[-1] for row in cells(runs, "Runs")]
    assert keys == [f"strategy.settings.zero_optimization.reduce_bucket_size={size}" for size in (100, 5000)]


# Side by side


def test_every_strategy_stands_beside_ddp(tmp_path: Path) -> None:
    rows = strategy_rows(a_study(tmp_path))
    assert [row.runs[0].strategy for row in rows] == ["ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"]
    assert {row.reference[0].strategy for row in rows} == {"ddp"}
    assert of(rows, "ddp").is_reference and strategy_verdict(of(rows, "ddp")) == "reference"
    # X(zero2) / X(ddp) = 0.100 / 0.125; 1 % on either side make 1.41 % of it.
    ratio = of(rows, "zero2").throughput
    assert ratio is not None and ratio.value == pytest.approx(0.8)
    assert (ratio.low, ratio.high) == pytest.approx((0.8 * (1 - 0.01 * 2**0.5), 0.8 * (1 + 0.01 * 2**0.5)))
    assert strategy_verdict(of(rows, "zero2")) == "80.0 % [78.9, 81.1] 95 % interval, n=1"


def test_the_table_lines_up_what_a_strategy_costs(tmp_path: Path) -> None:
    # zero2, 4 micro-steps: 4 reductions of 4 MB and 2 MB gathered; 4 + 2 + 4 bytes per parameter.
    rows = {row["strategy"]: row for row in cells(a_study(tmp_path, 4), "Strategies side by side")}
    costs = ("model B/param", "gradients B/param", "optimizer B/param", "activations GiB", "syncs/step", "sent MB/step")
    assert [rows["zero2"][name] for name in costs] == ["4.00", "2.00", "4.00", "0.5000", "4", "18.00"]
    assert [rows["ddp"][name] for name in costs] == ["4.00", "4.00", "8.00", "0.5000", "1", "4.000"]
    assert (rows["zero2"]["step time ms"], rows["zero2"]["peak GiB"], rows["zero2"]["host syncs"]) == (
        "500.0 ± 5.0",
        "1.250",
        "0",
    )
    assert rows["zero2"]["throughput"].startswith("80.0 % [") and rows["ddp"]["throughput"] == "reference"


def test_accumulations_and_world_sizes_are_groups_of_their_own(tmp_path: Path) -> None:
    runs = [*a_study(tmp_path / "1"), *a_study(tmp_path / "4", 4)]
    assert {row.runs[0].accumulation_steps: row.reference[0].accumulation_steps for row in strategy_rows(runs)} == {
        1: 1,
        4: 4,
    }
    assert [row for row in strategy_rows(runs) if row.reasons] == []


def test_one_device_takes_single_and_no_ddp_the_first(tmp_path: Path) -> None:
    single = a_run(tmp_path / "single", parameters=MIB)
    zero = strategy(tmp_path / "zero1", "zero1", world_size=1)
    assert {row.reference[0].run_id for row in strategy_rows([zero, single])} == {"single"}
    broken = strategy(tmp_path / "fsdp", "fsdp", flags=["disturbed"])
    others = [broken, strategy(tmp_path / "a", "zero1"), strategy(tmp_path / "b", "zero2")]
    assert {row.reference[0].run_id for row in strategy_rows(others)} == {"a"}


def test_wrapping_alone_is_left_to_the_scaling_tables(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "single"), a_run(tmp_path / "ddp", strategy="ddp")]
    assert strategy_rows(runs) == []
    assert "Strategies" not in render(runs, PIPED, colour=False)


def test_options_of_a_strategy_are_part_of_it(tmp_path: Path) -> None:
    own = {"strategy": ZERO | {"defaults": "deepspeed"}}
    runs = [
        strategy(tmp_path / "plain", "zero2", config={"strategy": ZERO}),
        strategy(tmp_path / "own", "zero2", config=own, seconds=0.1),
    ]
    row = of(strategy_rows(runs), "own")
    assert row.throughput is not None and row.throughput.value == pytest.approx(1.25)
    assert mismatches(runs[1], runs[0]) == ["strategy.defaults deepspeed vs scaling"]  # along an axis they differ


def test_a_second_ddp_stands_beside_the_first_and_one_that_differs_beside_none(tmp_path: Path) -> None:
    wide = {"strategy": {"name": "ddp", "bucket_mb": 100.0}}
    runs = [
        strategy(tmp_path / "a", "ddp"),
        strategy(tmp_path / "b", "ddp", config=wide, seconds=0.08),
        strategy(tmp_path / "c", "zero2"),
        strategy(tmp_path / "d", "zero2", compile=True),
    ]
    rows = strategy_rows(runs)
    assert [row.reference[0].run_id for row in rows] == ["a"] * 4
    assert of(rows, "b").throughput is not None
    assert of(rows, "d").throughput is None and of(rows, "d").reasons == ("compile True vs False",)
    assert strategy_verdict(of(rows, "d")) == "no ratio: compile True vs False"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"flags": ["disturbed"]}, "other programs took its cores"),
        ({"link": Link("host", "P2P", None)}, "link.requested host vs auto"),
        ({"nodes": 2}, "nodes 2 vs 1"),
        ({"reduce_dtype": "bfloat16"}, "reduce_dtype bfloat16 vs float32"),
        ({"environment": {"variables": {"NCCL_P2P_DISABLE": "1"}}}, "NCCL_P2P_DISABLE 1 vs none"),
    ],
)
def test_what_is_not_comparable_gets_no_ratio_and_the_reason(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    runs = [strategy(tmp_path / "ddp", "ddp"), strategy(tmp_path / "zero1", "zero1", **changes)]
    row = of(strategy_rows(runs), "zero1")
    assert row.throughput is None and row.reasons == (reason,)


def test_a_reference_that_may_stand_in_no_ratio_is_named(tmp_path: Path) -> None:
    runs = [strategy(tmp_path / "ddp", "ddp", flags=["oversubscribed"]), strategy(tmp_path / "zero1", "zero1")]
    rows = strategy_rows(runs)
    assert of(rows, "zero1").reasons == ("reference: oversubscribed",)
    assert strategy_verdict(of(rows, "ddp")) == "reference; oversubscribed; flags: oversubscribed"


def test_repeats_are_put_together(tmp_path: Path) -> None:
    # X(zero2) = 16 / 0.125 and 16 / 0.16 against 16 / 0.1 and 16 / 0.08: 114 / 180, from 100 / 200 to 128 / 160.
    runs = [strategy(tmp_path / f"d{s}", "ddp", seconds=s) for s in (0.1, 0.08)]
    terms = MemoryTerms(0.5, None, 0.25, None, 0.75, 0.0)
    runs += [strategy(tmp_path / "z1", "zero2", seconds=0.125)]
    runs += [strategy(tmp_path / "z2", "zero2", seconds=0.16, memory_terms_gib=terms)]
    reference, row = strategy_rows(runs)
    assert (len(reference.runs), len(row.runs)) == (2, 2)
    assert strategy_verdict(row) == "63.3 % [50.0, 80.0] range, n=2"
    held = cost(row.runs)
    assert held.step_time_s == pytest.approx(0.1425)
    # The larger of 4 and 512 bytes per parameter; of gradients only one run knows: 2.
    assert held.bytes_per_parameter == {"model": 512.0, "gradients": 2.0, "optimizer": 256.0}
    assert held.activations_gib == 0.75


# Beside every ratio


def test_what_a_step_sends_is_said_where_micro_steps_are_accumulated(tmp_path: Path) -> None:
    # C16: with 4 micro-steps zero2 reduces 4 times and sends 18 MB where ddp reduces once and sends 4.
    runs = [*a_study(tmp_path / "1"), *a_study(tmp_path / "4", 4)]
    rows = {
        (row.runs[0].strategy, row.runs[0].accumulation_steps): verdict(row)
        for row in scaling_rows(runs)
        if row.against == "single" and row.kind == "weak"
    }
    assert rows["ddp", 4].endswith("n=1; reduces 1 x per step, sends 4.000 MB")
    assert rows["zero2", 4].endswith("n=1; reduces 4 x per step, sends 18.00 MB")
    assert rows["zero2", 1].endswith("n=1")


def test_a_baseline_that_accumulates_is_enough_and_no_count_is_said(tmp_path: Path) -> None:
    base = a_run(tmp_path / "one", accumulation_steps=2, seconds=0.2, parameters=MIB)
    run = strategy(tmp_path / "two", "zero1", comm_bytes_per_step=None)
    (row,) = [row for row in scaling_rows([base, run]) if row.efficiency]
    assert row.kind == "strong" and "; reductions not counted; accumulation 2→1" in verdict(row)


# What is sent


def test_counted_expected_and_textbook_stand_side_by_side(tmp_path: Path) -> None:
    rows = {row["strategy"]: row for row in cells(a_study(tmp_path, 4), "Communication of a step")}
    assert list(rows) == ["ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"]
    assert rows["zero2"] | {"run": ""} == {
        "run": "",
        "strategy": "zero2",
        "N": "2",
        "acc": "4",
        "reductions": "4 (4)",
        "sent MB": "all_gather 2.000 (2.000), all_reduce 16.00 (16.00)",
        "textbook MB": "10.00",
        "why": "as #5",
    }
    assert rows["zero1"]["why"] == BUCKETS and rows["zero1"]["run"].startswith("#5 ")
    assert rows["fsdp"]["sent MB"] == "all_gather 14.64 (14.64), reduce_scatter 8.000 (8.000)"


@pytest.mark.parametrize(
    ("counted", "flags", "said"),
    [
        ({"all_reduce": 16e6, "all_gather": 2e6}, [], None),
        ({"all_reduce": 16e6 + 8, "all_gather": 2e6}, [], None),  # a norm is sent beside them
        ({"all_reduce": 32e6}, ["unexpected_communication"], "NOT AS EXPECTED: all_reduce, all_gather"),
        ({"all_reduce": 16e6 + 8, "all_gather": 2e6}, ["unexpected_communication"], "NOT AS EXPECTED"),
        (
            {"all_reduce": 16e6, "all_gather": 3e6},
            [],
            "within what its settings allow, not the expected: all_gather",
        ),
    ],
)
def test_a_count_that_is_not_the_expected_is_said(
    counted: dict[str, float], flags: list[str], said: str | None
) -> None:
    fields = strategy_fields("zero2", 4) | {"comm_bytes_per_step": counted, "flags": flags}
    assert surprise(asdict(a_summary(**fields))) == said


def test_too_many_reductions_are_no_range(tmp_path: Path) -> None:
    run = strategy(tmp_path / "run", "zero1", 4, syncs_per_step=4)
    (row,) = cells([run], "Communication of a step")
    assert (row["reductions"], row["why"]) == ("4 (1)", f"NOT AS EXPECTED: reductions; {BUCKETS}")
    assert run.summary is not None and differing(run.summary) == ["reductions"]


def test_one_all_reduce_without_accumulation_needs_no_table(tmp_path: Path) -> None:
    once = [a_run(tmp_path / "one"), strategy(tmp_path / "ddp", "ddp")]
    assert "Communication of a step" not in render(once, PIPED, colour=False)
    assert "Communication of a step" in render([strategy(tmp_path / "four", "ddp", 4)], PIPED, colour=False)
    uncounted = [strategy(tmp_path / "blind", "zero2", comm_bytes_per_step=None)]
    assert "Communication of a step" not in render(uncounted, PIPED, colour=False)


def test_what_is_sent_has_a_column_where_anything_is(tmp_path: Path) -> None:
    alone, sends = a_run(tmp_path / "one"), strategy(tmp_path / "zero2", "zero2", 4)
    assert [row["sent MB/step"] for row in cells([alone, sends], "Runs")] == ["", "18.00"]
    assert "sent" not in render([alone], PIPED, colour=False)


# What is held


def test_memory_is_told_apart_beside_the_textbook(tmp_path: Path) -> None:
    rows = {row["strategy"]: row for row in cells(a_study(tmp_path), "Memory held per rank")}
    names = ("model", "gradients", "optimizer", "sum", "buffers GiB", "activations GiB", "gathered GiB", "peak GiB")
    assert [rows["zero3"][name] for name in names] == [
        *("2.00 / 2", "2.00 / 2", "4.00 / 4", "8.00 / 8", "0.1250", "0.5000", "0.2500", "1.250"),
    ]
    assert rows["ddp"]["sum"] == "16.00 / 16"


def test_a_term_that_was_not_measured_is_no_zero_and_makes_no_sum(tmp_path: Path) -> None:
    run = strategy(
        tmp_path / "run",
        "zero1",
        memory_terms_gib=MemoryTerms(2.5 / 1024, None, 4 / 1024, None, None, None),
        textbook_bytes_per_parameter={"model": 8 / 3},
    )
    (row,) = cells([run], "Memory held per rank")
    names = ("model", "gradients", "optimizer", "sum", "activations GiB", "gathered GiB")
    assert [row[name] for name in names] == ["2.50 / 2.667", "?", "4.00", "?", "", ""]


# Files and terminals


def rows_of(sheet: str | None) -> dict[str, dict[str, str]]:
    assert sheet is not None
    rows = csv.DictReader(sheet.splitlines(keepends=True))
    return {row.get("runs") or row["run_id"]: row for row in rows}


def test_the_runs_sheet_has_a_column_per_term_and_kind(tmp_path: Path) -> None:
    notes = ["one, two", "three"]
    runs = [strategy(tmp_path / "zero2", "zero2", 4, comm_notes=notes), a_run(tmp_path / "plain")]
    rows = rows_of(runs_sheet(runs))
    assert rows["zero2"]["comm_notes"] == "one, two; three" and rows["plain"]["comm_notes"] == ""
    assert rows["zero2"]["expected_comm_bytes_per_step.all_reduce"] == "16000000.0"
    assert rows["zero2"]["textbook_bytes_per_parameter.gradients"] == "2.0"
    terms = [name for name in rows["plain"] if name.startswith("memory_terms_gib")]
    assert terms == [
        f"memory_terms_gib.{x}" for x in ("model", "gradients", "optimizer", "buffers", "activations", "gathered")
    ]
    assert (rows["zero2"][terms[0]], rows["plain"][terms[0]]) == (repr(4 / 1024), "")


def test_the_strategies_sheet_holds_stored_units(tmp_path: Path) -> None:
    rows = rows_of(strategies_sheet(a_study(tmp_path, 4)))
    row = rows["zero2"]
    assert (row["reference"], row["label"], row["world_size"], row["accumulation_steps"]) == ("ddp", "zero2", "2", "4")
    assert float(row["throughput"]) == pytest.approx(0.8) and float(row["step_time_s"]) == 0.5
    assert (row["syncs_per_step"], row["sent_bytes_per_step"]) == ("4", "18000000.0")
    assert (row["gradients_bytes_per_parameter"], row["activations_gib"]) == ("2.0", "0.5")
    assert rows["ddp"]["throughput"] == "" and rows["ddp"]["reference"] == "ddp"
    assert strategies_sheet([a_run(tmp_path / "alone")]) is None
    weak = rows_of(scaling_sheet(a_study(tmp_path / "again", 4)))["zero2"]
    assert (weak["syncs_per_step"], weak["sent_bytes_per_step"]) == ("4", "18000000.0")


def test_markdown_has_the_tables(tmp_path: Path) -> None:
    text = markdown(a_study(tmp_path, 4))
    titles = [line.split(":")[0] for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "## Runs",
        "## Strategies side by side",
        "## Weak scaling",
        "## Communication of a step, per rank",
        "## Memory held per rank, bytes per parameter",
    ]
    assert "Note: Strategies side by side: throughput is X / X(reference)" in text


def test_seven_strategies_fit_100_columns_and_cut_no_number(tmp_path: Path) -> None:
    own = {"strategy": ZERO | {"defaults": "deepspeed"}}
    file = deepspeed("ds_config.json", zero_optimization={"stage": 2})
    a_study(tmp_path, 4)
    save(tmp_path / "own", **strategy_fields("zero2", 4), config=own)
    save(tmp_path / "file", **strategy_fields("zero2", 4) | {"strategy": "deepspeed"}, config=file)
    text = render(read_runs([tmp_path]), 100, colour=False)
    assert max(map(len, text.splitlines())) <= 100
    assert "Strategies side by side: memory, host syncs" in text
    for whole in ("reduce_scatter 8.000 (8.000)", "16.00 / 16", "500.0 ± 5.0", "samples/s", " #3 ", "8 x 4 (64)"):
        assert whole in text, whole


def test_a_record_without_the_fields_reads_and_reports(tmp_path: Path) -> None:
    late = ["memory_terms_gib", "textbook_bytes_per_parameter", "expected_syncs_per_step", "comm_notes"]
    late += ["expected_comm_bytes_per_step", "textbook_comm_bytes_per_step"]
    for folder in (
        save(tmp_path / "ddp", **strategy_fields("ddp")),
        save(tmp_path / "zero1", **strategy_fields("zero1")),
    ):
        content = json.loads((folder / "summary.json").read_text())
        for name in late:
            del content[name]
        (folder / "summary.json").write_text(json.dumps(content))
    runs = read_runs([tmp_path])
    assert [refusals(run) for run in runs] == [[], []]
    (row,) = [row for row in cells(runs, "Communication of a step") if row["strategy"] == "zero1"]
    assert (row["reductions"], row["sent MB"], row["textbook MB"]) == ("1", "all_gather 2.000, all_reduce 4.000", "")
    assert "model B/param" not in cells(runs, "Strategies side by side")[0]
    assert "Memory held" not in render(runs, PIPED, colour=False)
    assert rows_of(runs_sheet(runs))["zero1"]["memory_terms_gib.model"] == ""
