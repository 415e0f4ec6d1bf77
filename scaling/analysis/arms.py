"""Arms: runs at one point that are meant to differ in one thing alone, as in their data or their strategy."""

from __future__ import annotations

from scaling.analysis.comparable import mismatches, transport_variables
from scaling.results.reader import Run

# What makes a point: scaling sweeps it, and between arms it has to agree.
POINT = {
    "strategy": "strategy",
    "world_size": "N",
    "micro_batch_size": "micro-batch",
    "accumulation_steps": "accumulation",
}


def arm_mismatches(run: Run, other: Run, apart: str) -> list[str]:
    """Name what two completed runs differ in beside `apart`, as "N 4 vs 2"; one device sends nothing."""
    assert run.summary is not None and other.summary is not None
    pairs = {name: (getattr(run, key), getattr(other, key)) for key, name in POINT.items() if name != apart}
    if run.world_size == other.world_size != 1:
        pairs["nodes"] = run.summary["nodes"], other.summary["nodes"]
        pairs["link.requested"] = run.summary["link"]["requested"], other.summary["link"]["requested"]
        mine, theirs = transport_variables(run), transport_variables(other)
        pairs |= {name: (mine.get(name), theirs.get(name)) for name in sorted(mine | theirs)}
    differing = [f"{name} {_show(a)} vs {_show(b)}" for name, (a, b) in pairs.items() if a != b]
    return differing + mismatches(run, other, apart=apart)


def _show(value: object) -> str:
    return "none" if value is None else str(value)
