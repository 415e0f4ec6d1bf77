"""One training measurement: torchrun --nproc_per_node=N -m scaling.train [group=option] [key=value]."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from scaling.command import repeat_command, run
from scaling.config import ImagesConfig, SingleConfig, TextConfig, TrainConfig, digest
from scaling.endings import Watcher
from scaling.engine.precision import check_precision
from scaling.engine.zero_config import offloads, stage
from scaling.ranks import Launch, Refused
from scaling.reporting.progress import Progress
from scaling.reporting.run_table import print_run
from scaling.results import store
from scaling.world import World


def main(config: TrainConfig, launch: Launch) -> int:
    """Measure, write the record, print it; the run directory is the last line of standard output."""
    watcher = Watcher()
    watcher.start(follow_parent=launch.torchrun)
    progress = Progress(enabled=launch.rank == 0)
    watcher.on_exit = progress.clear
    world = World.open(
        launch,
        asdict(config),
        request=config.device,
        local_check=lambda device: check_host(config, device),
        process_group=not isinstance(config.strategy, SingleConfig),
        timeout_s=config.timeout_s,
    )
    watcher.rank, watcher.members = world.rank, world.members
    command = repeat_command("train", launch, sys.argv[1:])
    slug = f"{config.model.name}-{config.strategy.name}-{config.precision.name}-{world.size}x"
    made = world.together(
        lambda: store.make_run_dir(config.output_dir, slug, digest(config), config.run_dir) if world.rank == 0 else None
    )
    run_dir = world.gather(made)[0]
    assert run_dir is not None
    watcher.run_dir = run_dir
    try:
        from scaling.measurement import measure  # brings in transformers: not before it is needed
        from scaling.preparation import Setup

        if world.rank == 0:
            store.write_config(run_dir, asdict(config), command, world.size)
        with output_aside():
            summary = measure(Setup(config, world, run_dir, command, progress))
            world.close()
    except Refused as mistake:
        progress.clear()
        store.write_error(run_dir, "config", mistake.rank, str(mistake))  # the first to get there; all know the same
        raise
    except BaseException as error:
        watcher.fail(error)
    if summary is not None:
        progress.clear()
        print_run(asdict(summary))
        print(run_dir)
    return 0


@contextlib.contextmanager
def output_aside() -> Iterator[None]:
    """Send what libraries, compilers and a user's model print to standard error: standard output is for the result."""
    sys.stdout.flush()
    kept = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, sys.stdout.fileno())
        os.close(kept)


def check_host(config: TrainConfig, device: torch.device) -> None:
    """Raise ValueError for what this host or its device cannot do."""
    check_precision(config.precision.name, device)
    if stage(config.strategy) is not None:
        from scaling.engine.deepspeed_ready import check_deepspeed, prepare_environment

        check_deepspeed(config.strategy.name, device.type, offloads(config.strategy))
        prepare_environment(device)
    if isinstance(config.data, ImagesConfig):
        from scaling.workload.images import check_folder

        check_folder(Path(config.data.path or "").expanduser())
    if isinstance(config.data, TextConfig):
        from scaling.workload.text import text_files, text_path

        if not text_files(text_path(config.data.path)):
            raise ValueError(f"data.path={config.data.path}: no files in this folder")


if __name__ == "__main__":
    run("train", main)
