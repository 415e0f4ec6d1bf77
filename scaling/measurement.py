"""From a config and a world to a record: set up, warm up, measure, check, write."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from scaling.config import TrainConfig
from scaling.engine import Engine, make_engine
from scaling.hardware import cores, environment, memory
from scaling.measure import agreement
from scaling.measure.clock import Clock, make_clock
from scaling.measure.collectives import StepCount, count_step
from scaling.measure.loop import TrainingLoop
from scaling.measure.statistics import half_width, summarise
from scaling.measure.summary import Facts, compose, job_steps, rank_steps
from scaling.measure.window import Plan, Window, run_window
from scaling.ranks import hosts, place_on_machine
from scaling.reporting.progress import Progress
from scaling.results import store
from scaling.results.record import Step, Summary
from scaling.workload import Workload, build, check_loss, is_ours, source_digest
from scaling.workload.flops import count_flops
from scaling.workload.loader import Place, Source, open_source
from scaling.world import World

SLOW_ON_A_HOST = 1e12  # FLOPs


@dataclass(frozen=True)
class Setup:
    """What the command hands over. `run_dir` is rank 0's to write."""

    config: TrainConfig
    world: World
    run_dir: Path
    command: str
    progress: Progress


@dataclass(frozen=True)
class Job:
    """What is measured, ready to run."""

    workload: Workload
    source: Source
    engine: Engine
    loop: TrainingLoop
    flops_per_rank: int | None  # of one step; known on rank 0
    cores_per_rank: int | None
    oversubscribed: bool


@dataclass(frozen=True)
class Checked:
    """What one untimed step sent, and whether this was data-parallel training; None for a world of one."""

    count: StepCount
    gradients_reduced: bool | None
    parameters_agree: bool | None


def measure(setup: Setup) -> Summary | None:
    """The whole measurement. The record is written, and returned, on rank 0. Raises Refused for a user's mistake."""
    config, world, progress = setup.config, setup.world, setup.progress
    job = _prepare(setup)
    clock = make_clock(world.device)
    warmup_s = _warm_up(job.loop, clock, config.measure.warmup_steps, progress)
    plan = Plan.of(config.measure, max(world.gather(min(warmup_s[-3:], default=math.inf))))
    job.loop.shapes.clear()
    was_reset = memory.reset_peak(world.device)
    total = config.batch.sizes[2]
    window = run_window(job.loop.step, clock, plan, world, progress=lambda w: show_block(progress, w, plan, total))
    peak = memory.largest(world.gather(memory.read_peak(world.device, was_reset)))

    seconds = warmup_s + [s for block in window.seconds() for s in block]
    noted = world.gather(rank_steps(seconds, job.loop.noted))
    tokens = job.workload.sequence_length is not None
    steps = job_steps(noted, len(warmup_s), plan.block_steps, tokens=tokens)
    if world.rank == 0:
        store.write_steps(setup.run_dir, steps)
    progress.update("checking what a step sends and that the ranks agree")
    checked = _check(job, config, world)
    facts = Facts(
        run_id=setup.run_dir.name,
        data=job.source.description,
        block_steps=plan.block_steps,
        flops_per_step=None if job.flops_per_rank is None else job.flops_per_rank * world.size,
        peak_memory=peak,
        count=checked.count,
        gradients_reduced=checked.gradients_reduced,
        parameters_agree=checked.parameters_agree,
        threads=config.threads,
        cores_per_rank=job.cores_per_rank,
        flags=_flags(job, config, world, window, checked),
    )
    return _write(setup, job, steps, facts) if world.rank == 0 else None


def _prepare(setup: Setup) -> Job:
    """Bind, build and wrap; every rank comes out of it at the same time."""
    config, world = setup.config, setup.world
    allowed = cores.available_cores()
    index, ranks = place_on_machine(world.members, world.rank)
    bound, crowded = cores.bind(index, ranks, config.threads, own_cores=world.device.type == "cpu")
    setup.progress.update(f"building {config.model.name} on {world.members[0].device_name}")
    workload, source = world.together(lambda: _build(config, world, allowed))
    _same_data(world, source)
    _write_environment(setup, source, allowed)
    micro, accumulation, _ = config.batch.sizes
    counted = count_flops(config.model, micro) if world.rank == 0 else None
    flops = None if counted is None else counted * accumulation  # of this rank's part of a step
    _warn(setup, flops, crowded)
    world.barrier()  # counting costs seconds on rank 0; nobody shall wait for it inside a training step
    torch.manual_seed(config.seed + 1 + world.rank)  # dropout draws differently on every rank
    engine = make_engine(config, workload, world.device, world.size)
    loop = TrainingLoop(engine, source.batches, accumulation)
    return Job(workload, source, engine, loop, flops, bound, crowded)


def _write(setup: Setup, job: Job, steps: list[Step], facts: Facts) -> Summary:
    timing = summarise(steps, job.workload.sequence_length)
    summary = compose(setup.config, setup.world, job.workload, job.engine, timing=timing, facts=facts)
    store.write_summary(setup.run_dir, summary)
    return summary


def _build(config: TrainConfig, world: World, allowed_cores: list[int]) -> tuple[Workload, Source]:
    workload = build(config.model, world.device, config.seed)
    if not is_ours(config.model.target):
        check_loss(workload, world.device)
    place = Place(world.rank, world.size, world.device, allowed_cores)
    return workload, open_source(config.data, config.batch, workload, config.seed, place)


def _warn(setup: Setup, flops: int | None, oversubscribed: bool) -> None:
    """Say before a long wait what will be slow or of little use."""
    if oversubscribed:
        setup.progress.note("! fewer cores than ranks x threads: the ranks take turns, and no efficiency is computed")
    if setup.world.device.type == "cpu" and flops is not None and flops > SLOW_ON_A_HOST:
        setup.progress.note(
            f"! a step is {flops / 1e12:.1f} TFLOP per rank: far too long for a CPU; model=gpt_tiny is made for one"
        )


def _same_data(world: World, source: Source) -> None:
    """Ranks that read different text would train on another global batch than the record says."""
    facts = world.gather(source.facts)

    def check() -> None:
        if source.facts != facts[0]:
            raise ValueError(
                f"rank {world.rank} reads other data than rank 0 ({source.facts} and {facts[0]}); "
                "give data.path a folder that all hosts share"
            )

    world.together(check)


def _write_environment(setup: Setup, source: Source, allowed_cores: list[int]) -> None:
    members = setup.world.members
    if setup.world.rank == 0:
        facts = environment.snapshot(setup.command, hosts(members), [m.device_name for m in members], allowed_cores)
        own = {"data": source.facts, "model_source": source_digest(setup.config.model.target)}
        store.write_environment(setup.run_dir, facts | own)


def _warm_up(loop: TrainingLoop, clock: Clock, steps: int, progress: Progress) -> list[float]:
    """Seconds of each warm-up step of this rank: compilation, first connections and caches end up in these."""
    seconds = []
    for step in range(1, steps + 1):
        if step == 1:
            progress.update(f"warm-up 1/{steps}")
        start = clock.mark()
        loop.step()
        end = clock.mark()
        clock.wait(end)
        seconds.append(clock.seconds(start, end))
        progress.update(f"warm-up {step}/{steps}  {seconds[-1] * 1e3:.1f} ms/step")
    return seconds


def show_block(progress: Progress, window: Window, plan: Plan, global_batch_size: int) -> None:
    """One line from the finished blocks; the block in flight is not waited for."""
    finished = [window.block_seconds(block) / plan.block_steps for block in range(len(window.blocks) - 1)]
    if not finished:
        return
    mean = sum(finished) / len(finished)
    half = half_width(finished)
    spread = "" if half is None else f" ±{half / mean:.1%} (target {plan.target_ci:.1%})"
    progress.update(
        f"block {len(finished)}  {mean * 1e3:.2f} ms/step{spread}  {global_batch_size / mean:,.1f} samples/s  "
        f"{sum(finished) * plan.block_steps:.0f} of at most {plan.max_seconds:.0f} s"
    )


def _compiles_by_shape(config: TrainConfig) -> bool:
    """Whether a new input shape costs a compilation or a search for kernels."""
    return config.compile or torch.backends.cudnn.benchmark


def _check(job: Job, config: TrainConfig, world: World) -> Checked:
    """Count one more step, and compare the weights of the ranks; collective. The count is that of the busiest rank."""
    mine = count_step(job.engine, lambda: next(job.source.batches), config.batch.sizes[1], world.size)
    counts = world.gather(mine)
    count = max(counts, key=lambda each: (each.syncs, sum(each.bytes.values()), each.host_syncs))
    if world.size == 1:
        return Checked(count, None, None)
    width = (job.engine.reduce_dtype or torch.float32).itemsize
    reduced = all(each.reduces(width) for each in counts)
    if job.engine.gather_dtype is not None:  # sharded: gathering makes them agree whatever happened
        return Checked(count, reduced, None)
    return Checked(count, reduced, not agreement.disagreeing(world.gather(agreement.fingerprint(job.engine.module))))


def _flags(job: Job, config: TrainConfig, world: World, window: Window, checked: Checked) -> list[str]:
    """The flags that the steps alone do not show; collective."""
    raised = {
        "host_bound": any(world.gather(window.host_bound)),
        "oversubscribed": any(world.gather(job.oversubscribed)),
        "varying_shapes": _compiles_by_shape(config) and any(world.gather(len(job.loop.shapes) > 1)),
        "mixed_devices": len({member.device_name for member in world.members}) > 1,
        "gradients_not_reduced": checked.gradients_reduced is False,
        "parameters_disagree": checked.parameters_agree is False,
    }
    return [flag for flag, is_raised in raised.items() if is_raised]
