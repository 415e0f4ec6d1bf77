"""Everything before the first step: cores, model, data, engine, and what is known of the work they will do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from scaling.config import DDPConfig, ImagesConfig, SingleConfig, TextConfig, TrainConfig
from scaling.engine import Engine, check_pair, make_engine
from scaling.engine.deepspeed_ready import import_deepspeed
from scaling.engine.notes import notes as strategy_notes
from scaling.engine.zero_config import stage
from scaling.hardware import cores, environment, memory
from scaling.measure.clock import Clock, make_clock
from scaling.measure.layout import Layout
from scaling.measure.loop import TrainingLoop
from scaling.ranks import hosts, place_on_machine
from scaling.reporting.progress import Progress
from scaling.results import store
from scaling.workload import Workload, build, source_digest
from scaling.workload.checkpointing import checkpoint_blocks
from scaling.workload.contract import check_loss
from scaling.workload.flops import count_flops
from scaling.workload.layout import lay_out
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
    layout: Layout  # of the parameters, before a strategy took them
    clock: Clock
    loop: TrainingLoop
    flops_per_rank: int | None  # of one step; known on rank 0
    hardware_flops_per_rank: int | None  # with what checkpointing recomputes; likewise
    cores_per_rank: int | None
    oversubscribed: bool


def prepare(setup: Setup) -> Job:
    """Bind, build and wrap; every rank comes out of it at the same time."""
    config, world = setup.config, setup.world
    allowed = cores.available_cores()
    index, ranks = place_on_machine(world.members, world.rank)
    bound, crowded = cores.bind(index, ranks, config.threads, own_cores=world.device.type == "cpu")
    setup.progress.update(f"building {config.model.name} on {world.members[0].device_name}")
    workload, source = world.together(lambda: _build(config, world, allowed))
    _same_data(world, source)
    layout = Layout.of(workload)
    _write_environment(setup, source, allowed)
    flops, hardware_flops = _count_flops(config) if world.rank == 0 else (None, None)
    notes = source.notes + _of_workers(config, ranks, len(allowed)) + strategy_notes(config, workload, layout)
    _warn(setup, flops, crowded, notes)
    world.barrier()  # counting costs seconds on rank 0; nobody shall wait for it inside a training step
    torch.manual_seed(config.seed + 1 + world.rank)  # dropout draws differently on every rank
    engine = world.together(lambda: make_engine(config, workload, world.device, world.size))
    if world.rank == 0 and engine.settings is not None:
        store.write_deepspeed(setup.run_dir, engine.settings)
    clock = make_clock(world.device)
    loop = TrainingLoop(engine, source.batches, config.batch.sizes[1], clock)
    memory.forget_setup(world.device)
    return Job(workload, source, engine, layout, clock, loop, flops, hardware_flops, bound, crowded)


def _count_flops(config: TrainConfig) -> tuple[int | None, int | None]:
    """FLOPs of one rank's part of a step: of the model, and of the hardware."""
    micro, accumulation, _ = config.batch.sizes
    model = count_flops(config.model, micro)
    hardware = count_flops(config.model, micro, checkpointing=True) if config.checkpointing else model
    return times(model, accumulation), times(hardware, accumulation)


def times(value: int | None, factor: int) -> int | None:
    """A product in which None, "not known", stays None."""
    return None if value is None else value * factor


def _build(config: TrainConfig, world: World, allowed_cores: list[int]) -> tuple[Workload, Source]:
    workload = build(config.model, world.device, config.seed)
    flat = not isinstance(config.strategy, SingleConfig | DDPConfig)
    workload = lay_out(workload, config.model.channels_last, world.device, config.precision.name, flat_weights=flat)
    if workload.batch_statistics and workload.ours and config.batch.sizes[0] == 1 and (workload.image_size or 0) <= 32:
        raise ValueError(
            f"batch.micro_batch_size=1: at model.image_size={workload.image_size} the last layers see one pixel of one "
            "image, and batch normalisation needs more than one value; use 2, or larger images"
        )
    if not workload.ours:
        check_loss(workload, world.device)
    if stage(config.strategy) is not None:
        import_deepspeed()
    check_pair(config, workload)
    if config.checkpointing:
        checkpoint_blocks(workload)
    place = Place(world.rank, world.size, world.device, allowed_cores)
    source = open_source(config.data, config.batch, workload, config.seed, place)
    torch.backends.cudnn.benchmark = workload.image_size is not None  # shapes are fixed: searched for in the warm-up
    return workload, source


def _warn(setup: Setup, flops: int | None, oversubscribed: bool, notes: list[str]) -> None:
    """Say before a long wait what will be slow or of little use."""
    for note in notes:
        setup.progress.note(f"! {note}")
    if oversubscribed:
        setup.progress.note("! fewer cores than ranks x threads: the ranks take turns, and no efficiency is computed")
    if setup.world.device.type == "cpu" and flops is not None and flops > SLOW_ON_A_HOST:
        setup.progress.note(
            f"! a step is {flops / 1e12:.1f} TFLOP per rank, many seconds on a CPU; "
            "gpt_tiny, llama_tiny, bert_tiny and resnet_tiny are made for one"
        )


def _of_workers(config: TrainConfig, ranks: int, cores: int) -> list[str]:
    """Say where loader workers and ranks of this host want more cores than it has."""
    workers = ranks * config.data.workers if isinstance(config.data, TextConfig | ImagesConfig) else 0
    if not workers or workers + ranks * config.threads <= cores:
        return []
    return [f"{workers} loader worker(s) and {ranks} rank(s) share {cores} core(s): loading takes time from training"]


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
