"""Records as a run writes them, made up: what the tests of the report read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from scaling.results.reader import Run, read_run
from scaling.results.record import Link, Memory, MemoryTerms, StepTime, Summary, Telemetry

CONFIG: dict[str, Any] = {
    "model": {"name": "gpt_tiny", "target": "w:gpt2", "args": {"layers": 4}, "sequence_length": 128, "dropout": 0.0},
    "strategy": {"name": "ddp", "bucket_mb": 25.0, "overlap": True},
    "precision": {"name": "fp32", "reduce": "fp32"},
    "data": {"name": "synthetic", "batches": 4},
    "batch": {"micro_batch_size": 8, "accumulation_steps": 1, "global_batch_size": 8},
    "optimizer": {"name": "adamw", "lr": 1e-4, "clip": None},
    "measure": {"warmup_steps": 10, "block_steps": 10, "target_ci": 0.01},
    "compile": False,
    "threads": None,
    "seed": 0,
    "output_dir": "runs",
    "run_dir": None,
    "command": "torchrun -m scaling.train",
}
ENVIRONMENT: dict[str, Any] = {
    "git": {"commit": "a" * 40, "dirty": False},
    "versions": {"python": "3.11.2", "torch": "2.13.0", "scaling": "0.1.0"},
    "hosts": ["box"],
}


def a_summary(**changes: Any) -> Summary:
    """A consistent record: `seconds` per step and `relative` half-width are given, the rates follow."""
    seconds, relative = changes.pop("seconds", 0.1), changes.pop("relative", 0.01)
    world = changes.get("world_size", 1)
    micro, steps = changes.get("micro_batch_size", 8), changes.get("accumulation_steps", 1)
    total = micro * steps * world
    ends = None if relative is None else (seconds * (1 - relative), seconds * (1 + relative))
    base = Summary(
        schema_version=1,
        run_id="gpt_tiny-ddp-0a1b2c3d-01",
        command="train",
        model="gpt_tiny",
        strategy="single" if world == 1 else "ddp",
        precision="fp32",
        parameter_dtype="float32",
        gather_dtype=None,
        reduce_dtype=None if world == 1 else "float32",
        optimizer="adamw",
        compile=False,
        checkpointing=False,
        data="synthetic",
        device_name="NVIDIA H200",
        threads=1,
        cores_per_rank=1,
        world_size=world,
        nodes=1,
        micro_batch_size=micro,
        accumulation_steps=steps,
        global_batch_size=total,
        sequence_length=128,
        parameters=840_000,
        flops_per_step=total * 10**11,
        warmup_steps=10,
        measured_steps=50,
        skipped_steps=0,
        window_s=50 * seconds,
        step_time_s=StepTime(seconds, seconds, seconds, seconds, 0.01, ends, 5),
        samples_per_s=total / seconds,
        samples_per_s_per_device=total / seconds / world,
        tokens_per_s=changes.get("sequence_length", 128) * total / seconds,
        target_tokens_per_s=None,
        tflops_per_device=total * 0.1 / seconds / world,
        mfu=None,
        hfu=None,
        peak_memory_gib=Memory(1.25, 1.5, "device"),
        data_wait_s=50 * seconds * 0.02,
        host_syncs_per_step=0.0,
        syncs_per_step=0 if world == 1 else 1,
        comm_bytes_per_step=None,
        wait_s=None,
        comm_s=None,
        overlapped_comm_s=None,
        exposed_comm_s=None,
        gradient_sync_cost_s=None,
        contention_s=None,
        link=Link("auto", None if world == 1 else "P2P", None),
        gradients_reduced=None if world == 1 else True,
        parameters_agree=None if world == 1 else True,
        loss={"first": 5.0, "last": 4.0},
        energy_j=None,
        clock_mhz=None,
    )
    return replace(base, **changes)


def steps_of(summary: Summary) -> Iterator[dict[str, Any]]:
    """Steps that add up to the summary."""
    for step in range(summary.measured_steps):
        seconds = summary.window_s / summary.measured_steps
        samples = summary.samples_per_s * summary.window_s / summary.measured_steps
        note = f"{summary.run_id} {step}"  # no two runs are alike
        yield {"warmup": False, "seconds": [seconds] * summary.world_size, "samples": samples, "note": note}


def save(
    folder: Path,
    summary: Summary | None = None,
    *,
    config: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a completed run to `folder`; `changes` are fields of its summary."""
    folder.mkdir(parents=True)
    changes.setdefault("run_id", folder.name)
    summary = a_summary(**changes) if summary is None else summary
    batch = {key: getattr(summary, key) for key in ("micro_batch_size", "accumulation_steps", "global_batch_size")}
    strategy = {"name": summary.strategy} | ({} if summary.strategy == "single" else {"bucket_mb": 25.0})
    precision = CONFIG["precision"] | {"name": summary.precision}
    made = CONFIG | {"batch": batch, "strategy": strategy, "precision": precision} | (config or {})
    devices = {"devices": [summary.device_name] * summary.world_size}
    (folder / "config.yaml").write_text(yaml.safe_dump(made))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT | devices | (environment or {})))
    (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps_of(summary)))
    (folder / "summary.json").write_text(json.dumps(asdict(summary)))
    return folder


def a_run(folder: Path, **changes: Any) -> Run:
    return read_run(save(folder, **changes))


MIB = 2**20  # parameters of the strategies' model: a byte of each is 1 / 1024 GiB

# Of the strategies at 2 ranks, fp32, Adam: seconds, then what k micro-steps reduce and send in MB, of gradients and
# weights of 4 MB each, then the bytes per parameter of model, gradients and optimizer, and what the textbook sends.
COSTS: dict[
    str, tuple[float, bool, dict[str, tuple[float, float]], tuple[float, float, float], tuple[float, float]]
] = {
    # a kind of collective: MB per step, and MB per micro-step
    "ddp": (0.100, False, {"all_reduce": (4.0, 0.0)}, (4, 4, 8), (4.0, 0.0)),
    "fsdp": (0.120, True, {"all_gather": (0.0, 3.66), "reduce_scatter": (0.0, 2.0)}, (2, 2, 4), (0.0, 6.0)),
    "zero0": (0.104, False, {"all_reduce": (4.0, 0.0)}, (4, 4, 8), (4.0, 0.0)),
    "zero1": (0.108, False, {"all_gather": (2.0, 0.0), "all_reduce": (4.0, 0.0)}, (4, 4, 4), (4.0, 0.0)),
    "zero2": (0.125, True, {"all_gather": (2.0, 0.0), "all_reduce": (0.0, 4.0)}, (4, 2, 4), (2.0, 2.0)),
    "zero3": (0.160, True, {"all_gather": (0.0, 4.0), "reduce_scatter": (0.0, 2.0)}, (2, 2, 4), (0.0, 6.0)),
}
BUCKETS = "ZeRO-1/2 all-reduce their buckets where the paper reduce-scatters them"
SHARDED = ("fsdp", "zero1", "zero2", "zero3")


def strategy_fields(name: str, accumulation_steps: int = 1) -> dict[str, Any]:
    """What a run of a strategy on two ranks records of its memory and of what it sends; as expected in all."""
    seconds, every, kinds, held, textbook = COSTS[name]
    k = accumulation_steps
    sent = {kind: (once + k * each) * 1e6 for kind, (once, each) in kinds.items()}
    terms = dict(zip(("model", "gradients", "optimizer"), held, strict=True))
    gib = {term: value / 1024 for term, value in terms.items()}
    rest = {"buffers": 0.125, "activations": 0.5, "gathered": 0.25 if name in ("fsdp", "zero3") else 0.0}
    return {
        "strategy": name,
        "world_size": 2,
        "accumulation_steps": k,
        "seconds": seconds * k,
        "parameters": MIB,
        "gather_dtype": "float32" if name in SHARDED else None,
        "parameters_agree": None if name in SHARDED else True,
        "syncs_per_step": k if every else 1,
        "expected_syncs_per_step": k if every else 1,
        "comm_bytes_per_step": sent,
        "expected_comm_bytes_per_step": sent,
        "textbook_comm_bytes_per_step": (textbook[0] + k * textbook[1]) * 1e6,
        "comm_notes": [BUCKETS] if name in ("zero1", "zero2") else None,
        "memory_terms_gib": MemoryTerms(**gib, **rest),
        "textbook_bytes_per_parameter": {term: float(value) for term, value in terms.items()},
    }


def deepspeed(file: str, **settings: Any) -> dict[str, Any]:
    """The config of a run with a user's DeepSpeed file."""
    return {"strategy": {"name": "deepspeed", "config": file, "settings": settings}}


def telemetry(**changes: Any) -> Telemetry:
    """What the driver of a healthy device says."""
    usual: dict[str, Any] = {
        "device": "GPU-0",
        "samples": 50,
        "energy_j": 1000.0,
        "sm_clock_mhz": 1980.0,
        "sm_clock_change": 0.0,
        "memory_clock_mhz": 3201.0,
        "power_w": 290.0,
        "power_limit_w": 300.0,
        "default_power_limit_w": 300.0,
        "temperature_c": 60.0,
        "throttle_reasons": {"sw_power_cap": 0.9},
        "problem": None,
    }
    return Telemetry(**usual | changes)


def run_report(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scaling.report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
