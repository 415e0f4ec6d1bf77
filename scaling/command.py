"""The one module around `hydra.main`: a mistake is one line with near misses, printed once, with exit code 2."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import hydra
from omegaconf import DictConfig, OmegaConf

from scaling.command_line import UNREADABLE, CommandLine, explain
from scaling.config import TrainConfig, conf_dir, register_schemas, validate
from scaling.ranks import Launch, Refused

PRINTING = ("--help", "--cfg", "--info")
PATIENCE_S = 10.0  # how long the other ranks leave the word to the one that prints


def run(name: str, main: Callable[[TrainConfig, Launch], int]) -> NoReturn:
    """Compose conf/<name>.yaml with the command line, validate it, and exit with what `main` returns."""
    launch = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1, nodes=1, torchrun=False)
    try:
        launch = Launch.from_env(os.environ)
        config = compose(name, sys.argv[1:], launch)
        code = main(validate(config, launch.world_size), launch)
    except Refused as mistake:
        _refuse(name, str(mistake), launch, printer=mistake.rank)
    except ValueError as mistake:
        _refuse(name, str(mistake), launch, printer=None)
    sys.stdout.flush()
    sys.exit(code)


def _refuse(name: str, message: str, launch: Launch, *, printer: int | None) -> NoReturn:
    """Print on the rank that owns the mistake (None: rank 0, and whoever is still there after it should have)."""
    prints = launch.rank == (printer or 0)
    if not prints:
        time.sleep(PATIENCE_S)
        prints = printer is None
    if prints:
        print(f"scaling.{name}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    os._exit(2)  # no destructor of a half-open process group may hold the exit up


def compose(name: str, argv: list[str], launch: Launch) -> TrainConfig:
    """The typed config of this command line; exits where Hydra only printed. Raises ValueError in one line."""
    line = CommandLine.of(name, argv)
    if launch.rank != 0 and any(flag.split("=")[0] in PRINTING for flag in line.flags):
        sys.exit(0)
    register_schemas()
    OmegaConf.register_new_resolver("scaling_groups", line.describe_groups, replace=True)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let the exceptions come out here
    composed: list[DictConfig] = []
    entry = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=name)(composed.append)
    given, sys.argv = sys.argv, [sys.argv[0], *line.for_hydra]  # what Hydra parses
    try:
        entry()
        if not composed:  # Hydra only printed
            sys.exit(0)
        config = OmegaConf.to_object(composed[0])
    except (*UNREADABLE, ValueError) as error:
        raise ValueError(explain(line, error)) from error
    finally:
        sys.argv = given
    assert isinstance(config, TrainConfig)
    return config


def repeat_command(name: str, launch: Launch, argv: list[str]) -> str:
    """The command line that starts this run again, quoted for a shell."""
    python = f"-m scaling.{name} " + shlex.join(argv)
    if not launch.torchrun:
        return f"python {python}".strip()
    nodes = f"--nnodes={launch.nodes} " if launch.nodes > 1 else ""
    return f"torchrun {nodes}--nproc_per_node={launch.local_world_size} {python}".strip()
