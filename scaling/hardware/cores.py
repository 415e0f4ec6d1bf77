"""Which processor cores this process may use, and binding a rank to its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch


def available_cores() -> list[int]:
    """The cores of this process, one hardware thread of each physical core first."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    seen: set[str] = set()
    first: list[int] = []
    second: list[int] = []
    for core in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        group = siblings.read_text() if siblings.exists() else str(core)
        (second if group in seen else first).append(core)
        seen.add(group)
    return first + second


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs that the control group grants (cgroup v2 `cpu.max`), None where there is no limit."""
    file = cgroup / "cpu.max"
    quota, _, period = file.read_text().strip().partition(" ") if file.exists() else ("max", "", "")
    return None if quota == "max" else int(quota) / int(period)


def share(cores: Sequence[int], local_rank: int, threads: int) -> list[int]:
    """The `threads` cores of this rank; empty where there are not enough for it."""
    mine = cores[local_rank * threads : (local_rank + 1) * threads]
    return list(mine) if len(mine) == threads else []


def oversubscribed(cores: int, quota: float | None, local_world_size: int, threads: int) -> bool:
    """Whether the ranks of this host have more busy threads than there are cores."""
    return local_world_size * threads > min(float(cores), quota or float(cores))


def bind(local_rank: int, local_world_size: int, threads: int, own_cores: bool) -> tuple[int | None, bool]:
    """Compute with `threads` threads, the same number for every world size; with `own_cores` on as many cores.

    Returns (cores bound to, or None, whether the host is oversubscribed). Call before any compute: threads
    that a library starts later inherit the binding. A rank beside an accelerator is not bound: its threads feed
    the device and the network, and wait more than they compute.
    """
    cores = available_cores()
    torch.set_num_threads(threads)
    if oversubscribed(len(cores), cpu_quota(), local_world_size, threads):
        return None, True
    if not own_cores or not hasattr(os, "sched_setaffinity"):
        return None, False
    mine = share(cores, local_rank, threads)
    for task in Path("/proc/self/task").iterdir():  # threads that imports have started, too
        os.sched_setaffinity(int(task.name), mine)
    return len(mine), False
