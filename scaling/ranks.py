"""Which ranks there are: what the launcher said, who came, and whether they are one world."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from scaling.hardware.device import device_name

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Where another launcher says how many processes it started; seen without WORLD_SIZE, each would be a world of its own.
FOREIGN_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


class Refused(ValueError):
    """A mistake that every rank knows of; `rank` is the one that prints it."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class Launch:
    """What the launcher said. The only reader of RANK, LOCAL_RANK, WORLD_SIZE and their kin."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    nodes: int
    torchrun: bool

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Launch:
        """Read torchrun's variables; none of them is a world of one. Raises ValueError on a half-set world."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        missing = [name for name in names if name not in env]
        if len(missing) == len(names):
            for name in FOREIGN_LAUNCHERS:
                if env.get(name, "1") not in ("", "1"):
                    raise ValueError(
                        f"{name}={env[name]} but no WORLD_SIZE: these {env[name]} processes do not know each other; "
                        "start them with torchrun --nproc_per_node=N -m scaling.train"
                    )
            return cls(rank=0, local_rank=0, world_size=1, local_world_size=1, nodes=1, torchrun=False)
        if missing:
            raise ValueError(
                f"{', '.join(missing)} not set, but {', '.join(n for n in names if n in env)}; start with torchrun"
            )
        given = {name: env[name] for name in (*names, "GROUP_WORLD_SIZE") if name in env}
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        try:
            rank, local_rank, world_size, local_world_size, *groups = map(int, given.values())
        except ValueError:
            raise ValueError(f"not numbers: {said}") from None
        if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
            raise ValueError(f"no such place in a world: {said}")
        nodes = groups[0] if groups else math.ceil(world_size / local_world_size)
        return cls(rank, local_rank, world_size, local_world_size, nodes, torchrun=True)


@dataclass(frozen=True)
class Member:
    """One rank as it introduced itself."""

    rank: int
    host: str
    machine: str  # the same for every container and network namespace of one kernel
    pid_namespace: int
    pid: int
    started: float
    device: str | None
    device_name: str | None
    config: dict[str, Any]
    problem: str | None

    @classmethod
    def here(cls, launch: Launch, device: torch.device | None, config: dict[str, Any], problem: str | None) -> Member:
        return cls(
            rank=launch.rank,
            host=platform.node(),
            machine=BOOT_ID.read_text().strip() if BOOT_ID.exists() else platform.node(),
            pid_namespace=Path("/proc/self/ns/pid").stat().st_ino if Path("/proc/self/ns/pid").exists() else 0,
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            device=str(device) if device else None,
            device_name=device_name(device) if device else None,
            config=config,
            problem=problem,
        )


def check_one_world(members: list[Member]) -> None:
    """Raise Refused unless these are distinct processes of one config, none of which found a problem."""
    processes: dict[tuple[str, int, int], int] = {}
    for member in members:
        process = (member.host, member.pid_namespace, member.pid)
        if process in processes:
            raise Refused(
                f"ranks {processes[process]} and {member.rank} are one process ({member.host}, pid {member.pid})", 0
            )
        processes[process] = member.rank
    for member in members:
        if member.config != members[0].config:
            keys = _differences(members[0].config, member.config)
            raise Refused(f"ranks 0 and {member.rank} have different configs: {'; '.join(keys)}", 0)
    for member in members:
        if member.problem:
            raise Refused(member.problem, member.rank)
    types = {(member.device or "").split(":")[0] for member in members}
    if len(types) > 1:
        raise Refused(f"ranks are on different kinds of device: {', '.join(sorted(types))}", 0)


def _differences(a: Any, b: Any, prefix: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in sorted({*a, *b}) for d in _differences(a.get(k), b.get(k), f"{prefix}.{k}" if prefix else k)]
    return [] if a == b else [f"{prefix} {a} and {b}"]


def rendezvous(launch: Launch, timeout_s: float) -> dist.Store:
    """The store of this launch, kept by torchrun or else by rank 0. Raises ValueError.

    It waits for nobody: `introduce` does, and can say who is missing.
    """
    if not launch.torchrun:
        return dist.HashStore()
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise ValueError(f"MASTER_ADDR={address} and MASTER_PORT={port} do not say where ranks meet; use torchrun")
    serves = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(
            address, int(port), launch.world_size, is_master=serves, timeout=timeout, wait_for_workers=False
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        hint = "is the port another launch's? torchrun --standalone takes a free one" if serves else "is rank 0 there?"
        raise Refused(
            f"rank {launch.rank} of {launch.world_size} cannot meet the others at {address}:{port} "
            f"({str(error).splitlines()[0].rstrip('.')}); {hint}",
            launch.rank,
        ) from error
    # torchrun restarts failed ranks on the store that it has
    return dist.PrefixStore(f"scaling/attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def introduce(store: dist.Store, launch: Launch, me: Member, timeout_s: float) -> list[Member]:
    """Every rank's own words, in rank order. Raises Refused for a rank that two processes claim or none does."""
    hello = dist.PrefixStore("scaling/hello", store)
    mine = json.dumps(asdict(me))
    if (claim := hello.compare_set(f"member/{me.rank}", "", mine).decode()) != mine:
        first = Member(**json.loads(claim))
        doubled = (
            f"rank {me.rank} of {launch.world_size} was started twice: "
            f"on {first.host} (pid {first.pid}) and on {me.host} (pid {me.pid})"
        )
        hello.set("doubled", doubled)
        raise Refused(doubled, me.rank)
    deadline = time.monotonic() + timeout_s
    members = []
    for rank in range(launch.world_size):
        _wait(hello, rank, deadline, f"rank {rank} of {launch.world_size} did not come within timeout_s={timeout_s:g}")
        members.append(Member(**json.loads(hello.get(f"member/{rank}"))))
    return members


def _wait(hello: dist.Store, rank: int, deadline: float, otherwise: str) -> None:
    """Until `rank` has introduced itself; by asking, because a store's own wait neither ends early nor is it quiet."""
    pause = 0.01
    while True:
        if hello.check(["doubled"]):
            raise Refused(hello.get("doubled").decode(), 0)
        if hello.check([f"member/{rank}"]):
            return
        if time.monotonic() > deadline:
            raise Refused(otherwise, 0)
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def place_on_machine(members: list[Member], rank: int) -> tuple[int, int]:
    """(index of this rank, number of ranks) on its machine, whatever launchers and nodes they belong to."""
    here = [member.rank for member in members if member.machine == members[rank].machine]
    return here.index(rank), len(here)


def hosts(members: Iterable[Member]) -> list[str]:
    """The distinct hosts, in rank order."""
    return list(dict.fromkeys(member.host for member in members))
