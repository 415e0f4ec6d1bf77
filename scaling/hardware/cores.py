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


def numa_nodes(nodes: Path = Path("/sys/devices/system/node")) -> dict[int, str]:
    """NUMA nodes that have cores, with these cores. Others (Grace names eight more) hold device memory only."""
    found = {}
    for folder in nodes.glob("node[0-9]*"):
        cores = folder / "cpulist"
        if cores.exists() and (listed := cores.read_text().strip()):
            found[int(folder.name.removeprefix("node"))] = listed
    return dict(sorted(found.items()))


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs that the control group grants (cgroup v2 `cpu.max`, v1 `cpu.cfs_quota_us`), None where there is no limit."""
    old = [cgroup / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
    if all(file.exists() for file in old):
        quota_us, period_us = (int(file.read_text()) for file in old)
        return quota_us / period_us if quota_us > 0 else None
    file = cgroup / "cpu.max"
    quota, _, period = file.read_text().strip().partition(" ") if file.exists() else ("max", "", "")
    return None if quota == "max" else int(quota) / int(period)


def share(cores: Sequence[int], index: int, threads: int) -> list[int]:
    """The `threads` cores of the rank with this index on its machine; empty where there are not enough for it."""
    mine = cores[index * threads : (index + 1) * threads]
    return list(mine) if len(mine) == threads else []


def oversubscribed(cores: int, quota: float | None, ranks: int, threads: int) -> bool:
    """Whether the ranks of this host have more busy threads than there are cores."""
    return ranks * threads > min(float(cores), quota or float(cores))


def bind(index: int, ranks: int, threads: int, own_cores: bool) -> tuple[int | None, bool]:
    """Compute with `threads` threads, the same number for every world size; with `own_cores` on as many cores.

    `index` and `ranks` count the ranks of this machine.
    Returns (cores bound to, or None, whether the host is oversubscribed). Call before any compute: threads
    that a library starts later inherit the binding. A rank beside an accelerator is not bound: its threads feed
    the device and the network, and wait more than they compute.
    """
    cores = available_cores()
    torch.set_num_threads(threads)
    if oversubscribed(len(cores), cpu_quota(), ranks, threads):
        return None, True
    if not own_cores or not hasattr(os, "sched_setaffinity"):
        return None, False
    mine = share(cores, index, threads)
    for task in Path("/proc/self/task").iterdir():  # threads that imports have started, too
        os.sched_setaffinity(int(task.name), mine)
    return len(mine), False
