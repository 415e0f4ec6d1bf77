"""From a config and a world to a record: set up, warm up, measure, check, write."""

from __future__ import annotations

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
from scaling.ranks import hosts
from scaling.reporting.progress import Progress
from scaling.results import store
from scaling.results.record import Summary
from scaling.workload import Workload, build
from scaling.workload.flops import flops_per_sample
from scaling.workload.loader import Place, Source, open_source
from scaling.world import World


@dataclass(frozen=True)
class Setup:
    """What the command hands over. `run_dir` is rank 0's to write."""

    config: TrainConfig
    world: World
    run_dir: Path
    command: str
    progress: Progress


def measure(setup: Setup) -> Summary | None:
    """The whole measurement. The record is written, and returned, on rank 0. Raises Refused for a user's mistake."""
    config, world, progress = setup.config, setup.world, setup.progress
    _, accumulation, total = config.batch.sizes
    allowed = cores.available_cores()
    own_cores = world.device.type == "cpu"
    cores_per_rank, crowded = cores.bind(
        world.launch.local_rank, world.launch.local_world_size, config.threads, own_cores
    )
    progress.update(f"building {config.model.name} on {world.members[0].device_name}")
    workload, source = world.together(lambda: _build(config, world, allowed))
    _same_data(world, source)
    _write_environment(setup, source, allowed)
    flops = _count_flops(config) if world.rank == 0 else None
    world.barrier()  # counting costs seconds on rank 0; nobody shall wait for it inside a training step
    torch.manual_seed(config.seed + 1 + world.rank)  # dropout draws differently on every rank
    engine = make_engine(config, workload, world.device, world.size)
    loop = TrainingLoop(engine, source.batches, accumulation)
    clock = make_clock(world.device)

    warmup_s = _warm_up(loop, clock, config.measure.warmup_steps, progress)
    plan = Plan.of(config.measure, max(world.gather(warmup_s[-1] if warmup_s else 0.0)))
    loop.shapes.clear()
    was_reset = memory.reset_peak(world.device)
    window = run_window(loop.step, clock, plan, world, progress=lambda w: show_block(progress, w, plan, total))
    peak = memory.largest(world.gather(memory.read_peak(world.device, was_reset)))

    seconds = warmup_s + [s for block in window.seconds() for s in block]
    steps = job_steps(world.gather(rank_steps(seconds, loop.noted)), len(warmup_s), plan.block_steps)
    progress.update("checking what a step sends and that the ranks agree")
    count = count_step(engine, lambda: next(source.batches), accumulation, world.size)
    reduced, agree = _checks(world, engine, count)
    raised = {
        "host_bound": any(world.gather(window.host_bound)),
        "oversubscribed": any(world.gather(crowded)),
        "varying_shapes": _compiles_by_shape(config) and any(world.gather(len(loop.shapes) > 1)),
        "mixed_devices": len({member.device_name for member in world.members}) > 1,
        "gradients_not_reduced": reduced is False,
        "parameters_disagree": agree is False,
    }
    if world.rank != 0:
        return None
    facts = Facts(
        run_id=setup.run_dir.name,
        data=source.description,
        block_steps=plan.block_steps,
        flops_per_step=None if flops is None else flops * total,
        peak_memory=peak,
        count=count,
        gradients_reduced=reduced,
        parameters_agree=agree,
        threads=config.threads,
        cores_per_rank=cores_per_rank,
        flags=[flag for flag, is_raised in raised.items() if is_raised],
    )
    timing = summarise(steps, workload.sequence_length)
    summary = compose(config, world, workload, engine, timing=timing, facts=facts)
    store.write_steps(setup.run_dir, steps)
    store.write_summary(setup.run_dir, summary)
    return summary


def _build(config: TrainConfig, world: World, allowed_cores: list[int]) -> tuple[Workload, Source]:
    workload = build(config.model, world.device, config.seed)
    place = Place(world.rank, world.size, world.device, allowed_cores)
    return workload, open_source(config.data, config.batch, workload, config.seed, place)


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
        store.write_environment(setup.run_dir, facts | {"data": source.facts})


def _count_flops(config: TrainConfig) -> int | None:
    """None for a model that does not run on the meta device, which a user's own may not."""
    try:
        return flops_per_sample(config.model)
    except (NotImplementedError, RuntimeError):
        return None


def _warm_up(loop: TrainingLoop, clock: Clock, steps: int, progress: Progress) -> list[float]:
    """Seconds of each warm-up step of this rank: compilation, first connections and caches end up in these."""
    seconds = []
    for step in range(1, steps + 1):
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


def _checks(world: World, engine: Engine, count: StepCount) -> tuple[bool | None, bool | None]:
    """gradients_reduced and parameters_agree; None for a world of one."""
    if world.size == 1:
        return None, None
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    width = (engine.reduce_dtype or torch.float32).itemsize
    reduced = all(world.gather(count.reduces(sum(p.numel() for p in parameters) * width)))
    if engine.gather_dtype is not None:  # sharded: gathering makes them agree whatever happened
        return reduced, None
    return reduced, not agreement.disagreeing(world.gather(agreement.fingerprint(engine.module)))
