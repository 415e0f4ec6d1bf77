"""Weak and strong scaling from records: ratios with their intervals, or the reasons why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scaling.analysis.believable import refusals
from scaling.analysis.comparable import (
    batch_change,
    batch_relation,
    computes_on_copies,
    mismatches,
    other_hosts,
    points,
    remarks,
)
from scaling.analysis.ratio import Ratio, divide, rates, times
from scaling.results.reader import Run

Kind = Literal["weak", "strong"]

KINDS: tuple[Kind, ...] = ("weak", "strong")


@dataclass(frozen=True)
class Row:
    """One measured point against one baseline; `kind` is None where neither work per device nor global batch is fixed.

    With `efficiency` None or `impossible` there is no verdict, and `reasons` says why.
    """

    kind: Kind | None
    runs: tuple[Run, ...]
    against: str  # the strategy of the one-device baseline
    baseline: tuple[Run, ...] = ()
    efficiency: Ratio | None = None
    speedup: Ratio | None = None
    impossible: bool = False
    reasons: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def weak_efficiency(runs: Sequence[Run], base: Sequence[Run]) -> Ratio:
    """E(N) = X(N) / (N x X(1)), X in samples/s of the whole job. Raises ValueError unless work per device is fixed."""
    _require("weak", runs, base)
    world = _world_size(runs[0])
    return divide(runs, base, [x / world for x in rates(runs)], rates(base))


def strong_efficiency(runs: Sequence[Run], base: Sequence[Run]) -> Ratio:
    """Compute S(N) / N with S(N) = T(1) / T(N), T the step time. Raises ValueError where the global batch changes."""
    _require("strong", runs, base)
    world = _world_size(runs[0])
    return divide(runs, base, times(base), [world * t for t in times(runs)])


EFFICIENCY: dict[Kind, Callable[[Sequence[Run], Sequence[Run]], Ratio]] = {
    "weak": weak_efficiency,
    "strong": strong_efficiency,
}


def _require(kind: Kind, runs: Sequence[Run], base: Sequence[Run]) -> None:
    relation = batch_relation(runs[0], base[0])
    if relation not in (kind, "both"):
        raise ValueError(f"no {kind} scaling: {relation}, {batch_change(runs[0], base[0])}")
    if base[0].world_size != 1:
        raise ValueError(f"no baseline: {base[0].run_id} ran on {base[0].world_size} devices, not on one")


def _world_size(run: Run) -> int:
    assert run.world_size is not None
    return run.world_size


def scaling_rows(runs: Iterable[Run]) -> list[Row]:
    """Make one row per point, kind and baseline: `single` on one device, and the same strategy on one device.

    The rows come in the order of the runs; with growing world size a change of transport is noticed.
    """
    measured = points(run for run in runs if run.summary is not None)
    one = [point for point in measured if point[0].world_size == 1]
    many = [point for point in measured if point[0].world_size != 1]
    rows = [row for point in many for row in _rows(point, one, KINDS)]
    for point in one:
        if point[0].strategy != "single":  # on one device weak and strong are the same: it joins the tables there are
            kinds = tuple(k for k in KINDS if any(r.kind == k and r.runs[0].model == point[0].model for r in rows))
            added = _rows(point, one, kinds or ("weak",))
            rows += added if any(row.kind for row in added) else _rows(point, one, KINDS)
    order = {id(point[0]): place for place, point in enumerate(measured)}
    return _with_transport(sorted(rows, key=lambda row: order[id(row.runs[0])]))


def _rows(point: tuple[Run, ...], one: list[tuple[Run, ...]], kinds: tuple[Kind, ...]) -> list[Row]:
    run = point[0]
    strategies = ["single"] if run.world_size == 1 else list(dict.fromkeys(("single", run.strategy)))
    bases = {n: [base for base in one if (base[0].strategy, base[0].model) == (n, run.model)] for n in strategies}
    fitting = {
        kind: {name: [b for b in bases[name] if batch_relation(run, b[0]) in (kind, "both")] for name in strategies}
        for kind in kinds
    }
    present = [kind for kind in kinds if any(fitting[kind].values())]
    if not present:
        return [_without(None, point, name, bases[name]) for name in strategies]
    return [
        _against(kind, point, name, fitting[kind][name])
        if fitting[kind][name]
        else _without(kind, point, name, bases[name])
        for kind in present
        for name in strategies
    ]


def _without(kind: Kind | None, point: tuple[Run, ...], name: str, bases: list[tuple[Run, ...]]) -> Row:
    """Make a row without a fitting baseline: none was measured, or none keeps fixed what has to be."""
    run = point[0]
    wanted = {
        None: "neither work per device nor global batch is fixed",
        "weak": f"none has micro-batch {run.micro_batch_size} and accumulation {run.accumulation_steps}",
        "strong": f"none has global batch {run.global_batch_size}",
    }[kind]
    if not bases:
        reason = f"no completed one-device `{name}` run of {run.model}"
    elif kind is None:
        reason = f"{wanted}: {batch_change(run, bases[0][0])}"
    else:
        reason = f"of the one-device `{name}` runs {wanted}"
    return Row(kind, point, name, bases[0] if bases and kind is None else (), reasons=(*refusals(run), reason))


def _against(kind: Kind, point: tuple[Run, ...], name: str, bases: list[tuple[Run, ...]]) -> Row:
    """Make the row against the most comparable of the fitting baselines."""
    run = point[0]
    # On the same machine if there is one; of several with one global batch the one whose micro-batch stays.
    base = min(bases, key=lambda each: _distance(run, each[0]))
    reasons = _reasons(run, base[0])
    said = list(dict.fromkeys(remark for one in point for other in base for remark in remarks(one, other)))
    if change := batch_change(run, base[0]) if kind == "strong" else "":
        said.insert(0, change)
    if reasons:
        return Row(kind, point, name, base, reasons=tuple(reasons), remarks=tuple(said))
    ratio = EFFICIENCY[kind](point, base)
    speedup = ratio.scaled(_world_size(run)) if kind == "strong" else None
    row = Row(kind, point, name, base, ratio, speedup, remarks=tuple(said))
    return _judge(row) if kind == "weak" else row


def _distance(run: Run, base: Run) -> tuple[int, bool, bool]:
    changed = base.micro_batch_size != run.micro_batch_size
    return len(_reasons(run, base)), bool(other_hosts(run, base)), changed


def _reasons(run: Run, base: Run) -> list[str]:
    return refusals(run) + [f"baseline: {reason}" for reason in refusals(base)] + mismatches(run, base)


def _judge(row: Row) -> Row:
    """Mark a weak efficiency above 1 beyond its interval (without one: at all): it is impossible, and no verdict."""
    assert row.efficiency is not None
    if row.runs[0].world_size == 1:
        return row  # what a wrapper costs on the same device: a gain is rare, and possible
    if computes_on_copies(row.runs[0], row.baseline[0]):
        return row  # a baseline that casts its weights at every operation does more work per device than the run
    least = row.efficiency.value if row.efficiency.low is None else row.efficiency.low
    if least <= 1 + 1e-9:
        return row
    beyond = "and has no interval" if row.efficiency.low is None else "beyond its interval or range"
    return replace(row, impossible=True, reasons=(f"impossible: above 100 % {beyond}",))


def _with_transport(rows: list[Row]) -> list[Row]:
    """Say where the observed transport changes along an axis: from there on another wire is measured."""
    last: dict[tuple[object, ...], str] = {}
    marked = []
    for row in rows:
        run, said = row.runs[0], row.remarks
        observed = run.summary["link"]["observed"] if run.summary and run.world_size != 1 else None
        axis = (row.kind, row.against, run.model, run.strategy, *(base.path for base in row.baseline))
        if observed is not None and row.kind is not None:
            if (before := last.get(axis, observed)) != observed:
                said = (*said, f"transport changes here: {before} → {observed}")
            last[axis] = observed
        marked.append(replace(row, remarks=said))
    return marked
