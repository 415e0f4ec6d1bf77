"""The rows and the summary of a run, from what its parts learnt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from scaling.config import TrainConfig
from scaling.engine import Engine
from scaling.hardware import catalogue
from scaling.hardware.telemetry import lowest_clock, total_energy
from scaling.measure.clock import Clock
from scaling.measure.collectives import StepCount
from scaling.measure.loop import Noted
from scaling.measure.volume import Volume
from scaling.results.record import SCHEMA_VERSION, Link, Memory, MemoryTerms, Step, Summary, Telemetry, Timing
from scaling.workload import Workload
from scaling.world import World


class RankStep(NamedTuple):
    """One step as one rank saw it; `skipped` counts from the start of the run."""

    seconds: float
    data_wait_s: float
    samples: int
    targets: int
    loss: float
    skipped: int


def rank_steps(seconds: Sequence[float], noted: Sequence[Noted], clock: Clock) -> list[RankStep]:
    """Bring the losses, skip counts and waits of this rank to the host, once, after the window."""
    losses = torch.stack([n.loss.float() for n in noted]).tolist()
    return [
        RankStep(s, sum(clock.seconds(*wait) for wait in n.waits), n.samples, n.targets, loss, int(n.skipped))
        for s, n, loss in zip(seconds, noted, losses, strict=True)
    ]


def job_steps(ranks: Sequence[Sequence[RankStep]], warmup_steps: int, block_steps: int, *, tokens: bool) -> list[Step]:
    """The rows of `steps.jsonl`: times per rank, samples, targets and loss of the whole job.

    Without `tokens` the loss terms are something else, and `target_tokens` is None.
    """
    steps = []
    before = [0] * len(ranks)
    for index, row in enumerate(zip(*ranks, strict=True)):
        measured = index - warmup_steps
        loss = sum(rank.loss for rank in row)
        skipped = [rank.skipped for rank in row]
        steps.append(
            Step(
                step=index,
                warmup=measured < 0,
                block=None if measured < 0 else measured // block_steps,
                seconds=[rank.seconds for rank in row],
                data_wait_s=[rank.data_wait_s for rank in row],
                samples=sum(rank.samples for rank in row),
                target_tokens=sum(rank.targets for rank in row) if tokens else None,
                loss=loss if math.isfinite(loss) else None,
                skipped=skipped != before,
            )
        )
        before = skipped
    return steps


@dataclass(frozen=True)
class Limits:
    """What one device can do at most, in FLOP/s: its vendor's dense peak at the precision that ran, and whose number
    it is; and the largest matrix-product rate measured on the device, the least over ranks.
    """

    peak: float | None
    peak_source: str | None
    matmul: float | None

    @classmethod
    def of(cls, names: set[str], precision: str, matmul: float | None) -> Limits:
        """The peak of these devices, if they are of one model that the catalogue knows."""
        name = next(iter(names))
        peak = catalogue.dense_peak(name, precision) if len(names) == 1 else None
        entry = catalogue.look_up(name) if peak is not None else None
        return cls(peak, None if entry is None else entry.source[0], matmul)


@dataclass(frozen=True)
class Facts:
    """What was learnt besides the steps, already brought together over ranks."""

    run_id: str
    data: str
    block_steps: int
    flops_per_step: int | None
    hardware_flops_per_step: int | None
    limits: Limits
    telemetry: list[Telemetry | None]
    disturbed_s: float | None
    peak_memory: Memory
    count: StepCount | None
    volume: Volume
    memory_terms: MemoryTerms | None
    textbook: dict[str, float]
    gradients_reduced: bool | None
    parameters_agree: bool | None
    threads: int
    cores_per_rank: int | None
    flags: list[str]


def compose(
    config: TrainConfig,
    world: World,
    workload: Workload,
    engine: Engine,
    *,
    parameters: int,
    timing: Timing,
    facts: Facts,
) -> Summary:
    """`summary.json` of a training run; what this version cannot measure is None."""
    micro, accumulation, total = config.batch.sizes
    limits, count = facts.limits, facts.count
    model_rate, hardware_rate = (
        None if flops is None else flops / timing.step_time_s.mean / world.size
        for flops in (facts.flops_per_step, facts.hardware_flops_per_step)
    )
    return Summary(
        **{name: value for name, value in vars(timing).items() if name != "flags"},
        schema_version=SCHEMA_VERSION,
        run_id=facts.run_id,
        command="train",
        model=config.model.name,
        strategy=config.strategy.name,
        precision=config.precision.name,
        parameter_dtype=dtype_name(engine.parameter_dtype) or "",
        gather_dtype=dtype_name(engine.gather_dtype),
        reduce_dtype=dtype_name(engine.reduce_dtype),
        optimizer=config.optimizer.name,
        compile=config.compile,
        checkpointing=config.checkpointing,
        data=facts.data,
        device_name=str(world.members[0].device_name),
        threads=facts.threads,
        cores_per_rank=facts.cores_per_rank,
        world_size=world.size,
        nodes=world.launch.nodes,
        micro_batch_size=micro,
        accumulation_steps=accumulation,
        global_batch_size=total,
        sequence_length=workload.sequence_length,
        parameters=parameters,
        flops_per_step=facts.flops_per_step,
        hardware_flops_per_step=facts.hardware_flops_per_step,
        block_steps=facts.block_steps,
        samples_per_s_per_device=timing.samples_per_s / world.size,
        tflops_per_device=_over(model_rate, 1e12),
        mfu=_over(model_rate, limits.peak),
        hfu=_over(hardware_rate, limits.peak),
        peak_tflops=_over(limits.peak, 1e12),
        peak_source=limits.peak_source,
        matmul_tflops=_over(limits.matmul, 1e12),
        matmul_share=_over(model_rate, limits.matmul),
        peak_memory_gib=facts.peak_memory,
        host_syncs_per_step=None if count is None or config.compile else count.host_syncs,  # counting runs uncompiled
        syncs_per_step=None if count is None else count.syncs,
        comm_bytes_per_step=None if count is None else count.bytes,
        wait_s=None,
        comm_s=None,
        overlapped_comm_s=None,
        exposed_comm_s=None,
        gradient_sync_cost_s=None,
        contention_s=None,
        link=Link("auto", None, None),
        gradients_reduced=facts.gradients_reduced,
        parameters_agree=facts.parameters_agree,
        energy_j=total_energy(facts.telemetry),
        clock_mhz=lowest_clock(facts.telemetry),
        telemetry=facts.telemetry if any(facts.telemetry) else None,
        disturbed_s=facts.disturbed_s,
        image_size=workload.image_size,
        channels_last=workload.channels_last,
        batch_statistics=workload.batch_statistics,
        memory_terms_gib=facts.memory_terms,
        textbook_bytes_per_parameter=facts.textbook,
        expected_syncs_per_step=facts.volume.syncs,
        expected_comm_bytes_per_step=facts.volume.bytes,
        textbook_comm_bytes_per_step=facts.volume.textbook,
        comm_notes=_notes(facts) or None,
        flags=timing.flags + facts.flags,
    )


def _notes(facts: Facts) -> list[str]:
    unused = 0 if facts.count is None else facts.volume.unused(facts.count)
    said = [f"{unused} parameters got no gradient: what is sent for these is not computed"] if unused else []
    return facts.volume.notes + said


def _over(value: float | None, by: float | None) -> float | None:
    return None if value is None or by is None else value / by


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """`float32` for torch.float32."""
    return None if dtype is None else str(dtype).removeprefix("torch.")
