"""How long other programs kept a rank from its cores: what makes a host's step times wrong without a trace in them.

The scheduler counts, per thread, how long it was ready to run and did not (Linux, Documentation/scheduler/sched-stats:
`/proc/<pid>/schedstat`); a virtual machine also tells the time that its hypervisor gave away (proc(5): steal).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

DISTURBED = 0.05  # of the window, from which on its times are not those of this job alone
PROC = Path("/proc")


@dataclass(frozen=True)
class Shares:
    """Seconds of one rank: its main thread ready and not running, its other threads and its loader workers running,
    and its cores given to other machines.
    """

    waited_s: float
    threads_s: float
    workers_s: float
    stolen_s: float

    def since(self, start: Shares) -> Shares:
        """What was added since `start`; threads and workers may have ended meanwhile."""
        return Shares(
            self.waited_s - start.waited_s,
            max(0.0, self.threads_s - start.threads_s),
            max(0.0, self.workers_s - start.workers_s),
            self.stolen_s - start.stolen_s,
        )


def read_shares(proc: Path = PROC) -> Shares | None:
    """Seconds since this process started; None where the system does not count them."""
    me = proc / "self" / "task" / str(os.getpid())
    try:
        waited_s = _schedstat(me)[1]
        others = [task for task in me.parent.iterdir() if task.name != me.name]
        stolen_s = _stolen((proc / "stat").read_text(), os.sched_getaffinity(0))
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    threads_s = 0.0
    for task in others:
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            threads_s += _schedstat(task)[0]
    return Shares(waited_s, threads_s, _workers_s(), stolen_s)


def _schedstat(task: Path) -> tuple[float, float]:
    """(seconds on a core, seconds ready and not on one)."""
    ran, waited = (task / "schedstat").read_text().split()[:2]
    return int(ran) / 1e9, int(waited) / 1e9


def _stolen(stat: str, cores: set[int]) -> float:
    """Mean over these cores of the seconds that a hypervisor gave to others; 0 on bare metal."""
    ticks = 0
    for line in stat.splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            ticks += int(values[7])
    return ticks / os.sysconf("SC_CLK_TCK") / len(cores)


def _workers_s() -> float:
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            times = child.cpu_times()
            total += times.user + times.system
    return total


def disturbance(ranks: Sequence[Shares | None]) -> float | None:
    """Seconds that others took from the rank that lost most; None unless every rank has counted.

    A rank's own threads share its cores, and loader workers of any rank may run there: what they used is none.
    """
    known = [shares for shares in ranks if shares is not None]
    if not known or len(known) < len(ranks):
        return None
    workers_s = sum(shares.workers_s for shares in known)
    return max(max(0.0, s.waited_s - s.threads_s - workers_s) + s.stolen_s for s in known)
