"""A measurement as a user starts it: the run directory is complete and its numbers follow from its steps."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import yaml
from ran import Ran, start

from scaling.measure.statistics import summarise
from scaling.results.record import Summary

pytestmark = pytest.mark.ranks

COMMON = ["model=gpt_tiny", "tracking=off", "measure.warmup_steps=3", "measure.max_steps=24"]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    batch = ["batch.micro_batch_size=2", "batch.accumulation_steps=4"]
    return start(2, tmp_path_factory.mktemp("ddp"), *COMMON, "data=text", *batch)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    shape = ["batch.micro_batch_size=2", "model.args.layers=1", "model.sequence_length=32"]
    return start(
        0, tmp_path_factory.mktemp("single"), *COMMON, "strategy=single", "precision=bf16", "compile=true", *shape
    )


def test_the_run_directory_is_complete_and_nothing_else(ddp: Ran) -> None:
    assert sorted(f.name for f in ddp.path.iterdir()) == [
        "config.yaml",
        "environment.json",
        "steps.jsonl",
        "summary.json",
    ]
    assert ddp.path.name.startswith("gpt_tiny-ddp-fp32-2x-")
    assert ddp.path.name.endswith("-01")


def test_the_summary_has_every_field_of_the_contract(ddp: Ran, single: Ran) -> None:
    for run in (ddp, single):
        assert list(run.summary) == list(Summary.__dataclass_fields__)
        assert run.summary["schema_version"] == 1
        assert run.summary["run_id"] == run.path.name


def test_throughput_is_what_the_loader_handed_out_over_the_window(ddp: Ran) -> None:
    s = ddp.summary
    assert s["global_batch_size"] == 16
    assert s["samples_per_s"] * s["window_s"] == pytest.approx(s["measured_steps"] * 16)
    assert s["samples_per_s_per_device"] * 2 == pytest.approx(s["samples_per_s"])
    assert s["tokens_per_s"] == pytest.approx(s["samples_per_s"] * 128)
    assert s["step_time_s"]["mean"] == s["window_s"] / s["measured_steps"]
    assert s["tflops_per_device"] == pytest.approx(s["flops_per_step"] / s["step_time_s"]["mean"] / 2 / 1e12)


def test_the_summary_can_be_recomputed_from_its_steps(ddp: Ran, single: Ran) -> None:
    for run in (ddp, single):
        timing = json.loads(json.dumps(asdict(summarise(run.steps, run.summary["sequence_length"]))))
        flags = timing.pop("flags")
        assert {name: run.summary[name] for name in timing} == timing
        assert run.summary["flags"][: len(flags)] == flags


def test_steps_are_the_whole_jobs(ddp: Ran) -> None:
    s = ddp.summary
    assert len(ddp.steps) == s["warmup_steps"] + s["measured_steps"] == 3 + 24
    assert all(len(step.seconds) == len(step.data_wait_s) == 2 for step in ddp.steps)
    assert {step.samples for step in ddp.steps} == {16}
    assert {step.target_tokens for step in ddp.steps} == {16 * 128}
    assert [step.block for step in ddp.steps[3:]] == [i // s["block_steps"] for i in range(24)]
    assert all(step.data_wait_s[0] > 0 for step in ddp.steps)


def test_one_reduction_per_step_and_the_gradients_bytes(ddp: Ran) -> None:
    s = ddp.summary
    assert s["syncs_per_step"] == 1
    assert s["comm_bytes_per_step"] == {"all_reduce": s["parameters"] * 4}  # 2 (n-1)/n = 1 for two ranks
    assert s["gradients_reduced"] is True
    assert s["parameters_agree"] is True
    assert s["host_syncs_per_step"] == 0


def test_what_was_not_measured_is_null_and_no_default(ddp: Ran) -> None:
    s = ddp.summary
    for name in ("mfu", "hfu", "wait_s", "comm_s", "exposed_comm_s", "contention_s", "energy_j", "clock_mhz"):
        assert s[name] is None, name  # C20: no peak is known for this device
    assert s["link"] == {"requested": "auto", "observed": None, "evidence": None}


def test_it_learns(ddp: Ran) -> None:
    assert ddp.summary["loss"]["last"] < ddp.summary["loss"]["first"] - 0.1


def test_one_device_without_a_wrapper(single: Ran) -> None:
    s = single.summary
    assert (s["strategy"], s["world_size"], s["reduce_dtype"], s["gradients_reduced"]) == ("single", 1, None, None)
    assert (s["precision"], s["parameter_dtype"], s["compile"]) == ("bf16", "float32", True)
    assert s["comm_bytes_per_step"] == {}
    assert s["syncs_per_step"] == 0
    assert s["threads"] == s["cores_per_rank"] == 1


def test_memory_of_a_host_is_named_as_what_it_is(single: Ran) -> None:
    memory = single.summary["peak_memory_gib"]
    assert memory["kind"] == "host_resident"
    assert memory["reserved"] is None
    assert 0.1 < memory["allocated"] < 8


def test_the_config_is_resolved_and_repeats_the_run(ddp: Ran, single: Ran) -> None:
    config = yaml.safe_load((ddp.path / "config.yaml").read_text())
    assert config["batch"] == {"micro_batch_size": 2, "accumulation_steps": 4, "global_batch_size": 16}
    assert config["tracking"]["name"] == "off"
    assert config["command"].startswith("torchrun --nproc_per_node=2 -m scaling.train model=gpt_tiny")
    config = yaml.safe_load((single.path / "config.yaml").read_text())
    assert config["command"].startswith("python -m scaling.train model=gpt_tiny")


def test_the_environment_says_what_ran(ddp: Ran) -> None:
    environment = json.loads((ddp.path / "environment.json").read_text())
    assert environment["versions"]["torch"]
    assert len(environment["devices"]) == 2
    assert environment["data"]["samples_dropped_per_epoch"] < 16
    assert environment["variables"].get("OMP_NUM_THREADS") == "1"


def test_the_last_line_is_the_run_and_progress_goes_to_standard_error(ddp: Ran) -> None:
    lines = ddp.done.stdout.splitlines()
    assert lines[-1] == str(ddp.path)
    assert any(line.startswith("step time") for line in lines)
    assert "building gpt_tiny" in ddp.done.stderr
    assert "Traceback" not in ddp.done.stderr
