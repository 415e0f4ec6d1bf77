"""From a config and a world to a record: set up, warm up, measure, check, write."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from scaling.config import TrainConfig
from scaling.engine.precision import Precision
from scaling.hardware import environment, memory
from scaling.hardware.disturbance import DISTURBED, Shares, disturbance, read_shares
from scaling.hardware.telemetry import Sampler, open_telemetry
from scaling.hardware.telemetry import flags as device_flags
from scaling.measure import agreement
from scaling.measure.clock import Clock
from scaling.measure.collectives import StepCount, count_step
from scaling.measure.loop import TrainingLoop
from scaling.measure.matmul import cache_folder, matmul_rate
from scaling.measure.memory_terms import largest_terms, memory_terms, textbook_bytes
from scaling.measure.statistics import half_width, summarise
from scaling.measure.summary import Facts, Limits, compose, job_steps, rank_steps
from scaling.measure.volume import Volume, expected_volume
from scaling.measure.window import Plan, Window, run_window
from scaling.preparation import Job, Setup, prepare, times
from scaling.reporting.progress import Progress
from scaling.results import store
from scaling.results.record import Memory, MemoryTerms, Summary, Telemetry
from scaling.world import World

SHOWN_NAMES = 5
T = TypeVar("T")


@dataclass(frozen=True)
class Checked:
    """What untimed steps sent and held, and whether this was data-parallel training.

    The last two are None for a world of one; `count`, `memory` and `gradients_reduced` also where such a step did not
    fit into memory.
    """

    volume: Volume
    count: StepCount | None
    memory: MemoryTerms | None
    gradients_reduced: bool | None
    parameters_agree: bool | None


@dataclass(frozen=True)
class Timed:
    """The warm-up and the window of this rank."""

    warmup_s: list[float]
    plan: Plan
    window: Window
    peak_memory: Memory
    telemetry: Telemetry | None
    shares: Shares | None

    @property
    def seconds(self) -> list[float]:
        """Of each step, warm-up first."""
        return self.warmup_s + [seconds for block in self.window.seconds() for seconds in block]


class Observation:
    """Watches a rank while it is entered: `telemetry` is what its device's driver told, `shares` who had its cores."""

    def __init__(self, sampler: Sampler | None, *, host: bool) -> None:
        self.telemetry: Telemetry | None = None
        self.shares: Shares | None = None
        self._sampler = sampler
        self._host = host
        self._before: Shares | None = None

    def __enter__(self) -> None:
        if self._sampler is not None:
            self._sampler.start()
        if self._host:
            self._before = read_shares()

    def __exit__(self, *_: object) -> None:
        if self._before is not None and (after := read_shares()) is not None:
            self.shares = after.since(self._before)
        if self._sampler is not None:
            self.telemetry = self._sampler.stop()


def measure(setup: Setup) -> Summary | None:
    """The whole measurement. The record is written, and returned, on rank 0. Raises Refused for a user's mistake."""
    config, world, progress = setup.config, setup.world, setup.progress
    job = prepare(setup)
    timed = _time(setup, job)
    noted = world.gather(rank_steps(timed.seconds, job.loop.noted, job.clock))
    tokens = job.workload.sequence_length is not None
    steps = job_steps(noted, len(timed.warmup_s), timed.plan.block_steps, tokens=tokens)
    timing = summarise(steps, job.workload.sequence_length)
    if world.rank == 0:
        store.write_steps(setup.run_dir, steps)
    progress.update("checking what a step sends and that the ranks agree")
    checked = _check(job, config, world)
    telemetry = world.gather(timed.telemetry)
    limits = _limits(setup, job, telemetry[world.rank])
    unreadable = sorted(set().union(*world.gather(job.source.unreadable())))
    disturbed_s = disturbance(world.gather(timed.shares))
    facts = Facts(
        run_id=setup.run_dir.name,
        data=job.source.description,
        block_steps=timed.plan.block_steps,
        flops_per_step=times(job.flops_per_rank, world.size),
        hardware_flops_per_step=times(job.hardware_flops_per_rank, world.size),
        limits=limits,
        telemetry=telemetry,
        disturbed_s=disturbed_s,
        peak_memory=memory.largest(world.gather(timed.peak_memory)),
        count=checked.count,
        volume=checked.volume,
        memory_terms=checked.memory,
        textbook=textbook_bytes(config, job.engine, job.layout, world.size),
        gradients_reduced=checked.gradients_reduced,
        parameters_agree=checked.parameters_agree,
        threads=config.threads,
        cores_per_rank=job.cores_per_rank,
        flags=_flags(job, config, world, timed.window, checked)
        + (["disturbed"] if (disturbed_s or 0.0) > DISTURBED * timing.window_s else [])
        + device_flags(telemetry)
        + (["unreadable_samples"] if unreadable else []),
    )
    if world.rank != 0:
        return None
    _note_unreadable(setup, unreadable)
    summary = compose(
        config, world, job.workload, job.engine, parameters=job.layout.elements, timing=timing, facts=facts
    )
    store.write_summary(setup.run_dir, summary)
    return summary


def _time(setup: Setup, job: Job) -> Timed:
    """Warm up, and run the window as long as its plan says."""
    config, world, progress, clock = setup.config, setup.world, setup.progress, job.clock
    warmup_s = _warm_up(job.loop, clock, config.measure.warmup_steps, progress)
    plan = Plan.of(config.measure, max(world.gather(min(warmup_s[-3:], default=math.inf))))
    job.loop.shapes.clear()
    was_reset = memory.reset_peak(world.device)
    total = config.batch.sizes[2]
    observed = Observation(open_telemetry(world.device), host=world.device.type == "cpu")
    show = lambda window: show_block(progress, window, plan, total)  # noqa: E731
    window = run_window(job.loop.step, clock, plan, world, observer=observed, progress=show)
    peak = memory.read_peak(world.device, was_reset)
    return Timed(warmup_s, plan, window, peak, observed.telemetry, observed.shares)


def _warm_up(loop: TrainingLoop, clock: Clock, steps: int, progress: Progress) -> list[float]:
    """Seconds of each warm-up step of this rank: compilation, first connections and caches end up in these.

    The host waits for the step before the one in flight, as it does in the window: with a device that ran dry after
    every step, copies and allocations would settle only inside the window.
    """
    progress.update(f"warm-up 1/{steps}")
    marks = [clock.mark()]
    for step in range(1, steps + 1):
        loop.step()
        marks.append(clock.mark())
        if step > 1:
            clock.wait(marks[-2])
            progress.update(f"warm-up {step}/{steps}  {clock.seconds(*marks[-3:-1]) * 1e3:.1f} ms/step")
    clock.wait(marks[-1])
    return [clock.seconds(start, end) for start, end in itertools.pairwise(marks)]


def show_block(progress: Progress, window: Window, plan: Plan, global_batch_size: int) -> None:
    """One line from the finished blocks; the block in flight is not waited for."""
    finished = [seconds / plan.block_steps for seconds in window.finished()]
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
    """Look into two more steps, and compare the weights of the ranks; collective.

    The count is the busiest rank's, of those that sent other than expected where some did.
    """
    accumulation, next_batch = config.batch.sizes[1], lambda: next(job.source.batches)
    volume = expected_volume(config, job.engine, job.layout, world.size)
    terms = _together(world, lambda: memory_terms(job.engine, next_batch, accumulation, world.device))
    counts = _together(world, lambda: count_step(job.engine, next_batch, accumulation, world.size))
    odd = [each for each in counts if not volume.holds(each)]  # on whichever rank: it is the one to be seen
    count = max(odd or counts, key=lambda each: (each.syncs, sum(each.bytes.values()), each.host_syncs), default=None)
    held = largest_terms(terms) if terms else None
    if world.size == 1:
        return Checked(volume, count, held, None, None)
    width = (job.engine.reduce_dtype or torch.float32).itemsize
    reduced = all(each.reduces(width) for each in counts) if counts else None
    if job.engine.gather_dtype is not None:  # sharded: gathering makes them agree whatever happened
        return Checked(volume, count, held, reduced, None)
    agree = not agreement.disagreeing(world.gather(agreement.fingerprint(job.engine.module)))
    return Checked(volume, count, held, reduced, agree)


def _together(world: World, look: Callable[[], T]) -> list[T]:
    """What each rank saw; empty where that did not fit into memory on one, as uncompiled where compiled steps do."""
    mine = None
    with contextlib.suppress(torch.OutOfMemoryError):
        mine = look()
    seen = [each for each in world.gather(mine) if each is not None]
    return seen if len(seen) == world.size else []


def _limits(setup: Setup, job: Job, telemetry: Telemetry | None) -> Limits:
    """What the devices can do at most, by their vendor and by a measurement of their own; collective."""
    config, world = setup.config, setup.world
    rate = None
    if config.measure.matmul_rate:
        setup.progress.update("measuring the largest matrix-product rate of the device")
        conditions = {"driver": environment.driver_version(), "power_limit_w": telemetry and telemetry.power_limit_w}
        precision = Precision.of(config.precision, world.device)
        rate = matmul_rate(precision, world.device, job.clock, cache_folder(), conditions)
    rates = world.gather(None if rate is None else rate.flops_per_s)
    known = [each for each in rates if each is not None]
    names = {member.device_name or "" for member in world.members}
    return Limits.of(names, config.precision.name, min(known) if len(known) == len(rates) else None)


def _note_unreadable(setup: Setup, names: list[str]) -> None:
    """Samples that could not be read, in environment.json and on the terminal."""
    if names:
        store.extend_environment(setup.run_dir, {"unreadable_samples": names})
        shown = ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
        setup.progress.note(f"! {len(names)} sample(s) could not be read, and neighbours took their places: {shown}")


def _flags(job: Job, config: TrainConfig, world: World, window: Window, checked: Checked) -> list[str]:
    """The flags that the steps alone do not show; collective."""
    settings = job.engine.settings or {}
    raised = {
        "host_bound": any(world.gather(window.host_bound)),
        "oversubscribed": any(world.gather(job.oversubscribed)),
        "varying_shapes": _compiles_by_shape(config) and any(world.gather(len(job.loop.shapes) > 1)),
        "mixed_devices": len({member.device_name for member in world.members}) > 1,
        "sync_each_step": any(settings.get(key) for key in ("wall_clock_breakdown", "memory_breakdown"))
        or bool(settings.get("comms_logger", {}).get("enabled")),
        "profiled": bool(settings.get("flops_profiler", {}).get("enabled")),
        "not_counted": checked.count is None,
        "unexpected_communication": checked.count is not None and not checked.volume.holds(checked.count),
        "gradients_not_reduced": checked.gradients_reduced is False,
        "parameters_disagree": checked.parameters_agree is False,
    }
    return [flag for flag, is_raised in raised.items() if is_raised]
