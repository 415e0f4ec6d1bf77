"""The contract of `steps.jsonl` and `summary.json`. Fields may be added, not renamed; units are in the names.

Every field means what MEASURING.md (docs/measuring.md) says; `None` is "not measured" or "could not be measured".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Step:
    """One optimizer step of the whole job; the lists hold one entry per rank."""

    step: int
    warmup: bool
    block: int | None  # None for warm-up steps
    seconds: list[float]
    data_wait_s: list[float]
    samples: int
    target_tokens: int | None
    loss: float | None  # None where it is not finite
    skipped: bool


@dataclass(frozen=True)
class StepTime:
    """Seconds per optimizer step, slowest rank. `ci95` is None with fewer than two blocks."""

    mean: float
    median: float
    p95: float
    p99: float
    cv: float | None
    ci95: tuple[float, float] | None
    blocks: int


@dataclass(frozen=True)
class Timing:
    """What the steps alone say: the part of the summary that can be recomputed from `steps.jsonl`."""

    warmup_steps: int
    measured_steps: int
    skipped_steps: int
    window_s: float
    step_time_s: StepTime
    samples_per_s: float
    tokens_per_s: float | None
    target_tokens_per_s: float | None
    data_wait_s: float
    loss: dict[str, float | None]  # first and last measured step
    slowest_rank: int | None  # None at world size 1
    rank_spread: float | None  # slowest rank's window over the fastest's, minus 1
    flags: list[str]


@dataclass(frozen=True)
class Memory:
    """Peak over the window, the largest over ranks. `kind` says whose: "device" or "host_resident"."""

    allocated: float | None
    reserved: float | None
    kind: str


@dataclass(frozen=True)
class Telemetry:
    """One rank's device over the window, as its driver tells it; `None` where it does not.

    Clocks and power are means over the samples. `sm_clock_change` is the mean of the second half of the samples over
    that of the first, minus 1. `throttle_reasons` maps a reason to the share of samples in which it held.
    """

    device: str  # UUID
    samples: int
    energy_j: float | None
    sm_clock_mhz: float | None
    sm_clock_change: float | None
    memory_clock_mhz: float | None
    power_w: float | None
    power_limit_w: float | None
    default_power_limit_w: float | None
    temperature_c: float | None  # the highest
    throttle_reasons: dict[str, float] | None
    problem: str | None  # why something is missing


@dataclass(frozen=True)
class MemoryTerms:
    """GiB that one rank's device holds for each purpose, measured in untimed steps; the largest over ranks.

    `activations` is what one forward leaves for its backward, `gathered` the weights that are whole at that moment
    only because they were gathered. On a host all lies in the memory of the process.
    """

    model: float | None  # parameters and buffers, as they lie between steps
    gradients: float | None  # the most between two micro-steps, or before the update
    optimizer: float | None  # its state, and master weights beside the model's
    buffers: float | None  # to send from, where they stay between steps
    activations: float | None
    gathered: float | None


@dataclass(frozen=True)
class Link:
    """What was asked for, what carried the bytes, and how we know; no observation, no label."""

    requested: str
    observed: str | None
    evidence: str | None


@dataclass(frozen=True)
class Summary:
    """`summary.json`: one measurement. A field without `_per_device` is the whole job's."""

    schema_version: int
    run_id: str
    command: str
    model: str
    strategy: str
    precision: str
    parameter_dtype: str
    gather_dtype: str | None
    reduce_dtype: str | None
    optimizer: str
    compile: bool
    checkpointing: bool
    data: str
    device_name: str
    threads: int
    cores_per_rank: int | None  # None where ranks are not bound to cores
    world_size: int
    nodes: int
    micro_batch_size: int
    accumulation_steps: int
    global_batch_size: int
    sequence_length: int | None
    parameters: int
    flops_per_step: int | None
    warmup_steps: int
    measured_steps: int
    skipped_steps: int
    window_s: float
    step_time_s: StepTime
    samples_per_s: float
    samples_per_s_per_device: float
    tokens_per_s: float | None
    target_tokens_per_s: float | None
    tflops_per_device: float | None
    mfu: float | None
    hfu: float | None
    peak_memory_gib: Memory
    data_wait_s: float
    host_syncs_per_step: float | None
    syncs_per_step: int | None
    comm_bytes_per_step: dict[str, float] | None
    wait_s: float | None
    comm_s: float | None
    overlapped_comm_s: float | None
    exposed_comm_s: float | None
    gradient_sync_cost_s: dict[str, Any] | None
    contention_s: float | None
    link: Link
    gradients_reduced: bool | None
    parameters_agree: bool | None
    loss: dict[str, float | None]
    energy_j: float | None
    clock_mhz: float | None
    flags: list[str] = field(default_factory=list)
    slowest_rank: int | None = None
    rank_spread: float | None = None
    block_steps: int | None = None
    hardware_flops_per_step: int | None = None  # with what checkpointing recomputes
    peak_tflops: float | None = None  # of one device, dense, by its vendor: what mfu and hfu divide by
    peak_source: str | None = None
    matmul_tflops: float | None = None  # largest matrix-product rate measured on the device itself, least over ranks
    matmul_share: float | None = None  # tflops_per_device / matmul_tflops
    telemetry: list[Telemetry | None] | None = None  # per rank; None without a driver that tells
    disturbed_s: float | None = None  # of the window, which other programs took from the rank that lost most
    image_size: int | None = None
    channels_last: bool | None = None  # of images; None for models without
    batch_statistics: bool | None = None  # true: normalises over a micro-batch, whose size then changes training
    memory_terms_gib: MemoryTerms | None = None
    textbook_bytes_per_parameter: dict[str, float] | None = None  # model, gradients, optimizer: of this strategy
    expected_syncs_per_step: int | None = None  # computed from strategy, settings, accumulation and ranks
    expected_comm_bytes_per_step: dict[str, float] | None = None  # likewise, {kind: bytes}; checked against the count
    textbook_comm_bytes_per_step: float | None = None  # what the strategy's paper would send, at the same types
    comm_notes: list[str] | None = None  # why the expected differs from the textbook
