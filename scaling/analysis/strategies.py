"""Strategies side by side: runs of one model, batch and N that differ in nothing but their strategy and its options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from scaling.analysis.arms import arm_mismatches
from scaling.analysis.believable import refusals
from scaling.analysis.comparable import other_hosts, points, remarks
from scaling.analysis.memory import TERMS, bytes_per_parameter
from scaling.analysis.ratio import Ratio, divide, rates, times
from scaling.analysis.traffic import sent_bytes
from scaling.results.reader import Run, as_dict

Point = tuple[Run, ...]

# What conf/strategy/ has where nothing else is said; a threshold is None there.
USUAL = {
    "bucket_mb": 25.0,
    "overlap": True,
    "reshard": True,
    **dict.fromkeys(("coalesce_grad_reduction", "offload_optimizer", "offload_parameters"), False),
    **dict.fromkeys(("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")),
}
PLAIN = {"single", "ddp"}  # what wrapping costs is a row of the scaling tables
ROLE = "reference"


@dataclass(frozen=True)
class StrategyRow:
    """One measured point beside the reference of its group; with `throughput` None `reasons` says why.

    `throughput` = X / X(reference), X in samples/s. The reference's own row has neither, where nothing speaks against
    it.
    """

    runs: Point
    reference: Point
    throughput: Ratio | None = None
    reasons: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def is_reference(self) -> bool:
        """Whether the point stands beside itself."""
        return self.runs == self.reference


@dataclass(frozen=True)
class Cost:
    """What a strategy costs at a point: the mean step time, and of everything else the largest over its repeats."""

    step_time_s: float
    peak_memory_gib: float | None
    bytes_per_parameter: dict[str, float | None]
    activations_gib: float | None
    syncs_per_step: float | None
    sent_bytes: float | None
    host_syncs_per_step: float | None


def label(run: Run) -> str:
    """Name the strategy with what makes another one of it: its options, or a user's file."""
    options = run.group("strategy")
    if run.strategy == "deepspeed":
        stage = as_dict(as_dict(options.get("settings")).get("zero_optimization")).get("stage", 0)
        name = PurePath(str(options["config"])).name if options.get("config") else "no file"
        return f"{run.strategy} ({name}, stage {stage})"
    said = ["DeepSpeed's defaults"] if options.get("defaults") == "deepspeed" else []
    usual = USUAL | {"name": run.strategy, "defaults": options.get("defaults")}
    said += [f"{key}={_word(value)}" for key, value in options.items() if value != usual.get(key, value)]
    return f"{run.strategy} ({', '.join(said)})" if said else run.strategy


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def strategy_rows(runs: Iterable[Run]) -> list[StrategyRow]:
    """Make one row per point of every group in which there are several strategies, other than `single` and `ddp`."""
    groups: dict[tuple[object, ...], list[Point]] = {}
    for point in points(run for run in runs if run.summary is not None):
        groups.setdefault(_group(point[0]), []).append(point)
    rows = []
    for group in groups.values():
        labels = {label(point[0]) for point in group}
        if len(labels) > 1 and labels - PLAIN:
            references = _references(group)
            rows += [_against(point, min(references, key=_distance_from(point[0]))) for point in group]
    return rows


def _group(run: Run) -> tuple[object, ...]:
    batch = run.micro_batch_size, run.accumulation_steps, run.global_batch_size
    return run.model, run.world_size, batch, run.summary and run.summary["precision"]


def _references(group: Sequence[Point]) -> list[Point]:
    """Give the points that the others may stand beside: of ddp, or `single` on its one device, or of the first."""
    for name in ("ddp", "single"):
        if found := [point for point in group if point[0].strategy == name]:
            return found
    first = next((point for point in group if not refusals(point[0])), group[0])
    return [point for point in group if label(point[0]) == label(first[0])]


def _distance_from(run: Run) -> Callable[[Point], tuple[int, bool]]:
    return lambda reference: (len(_reasons(run, reference[0])), bool(other_hosts(run, reference[0])))


def _against(point: Point, reference: Point) -> StrategyRow:
    if point == reference:
        return StrategyRow(point, reference, reasons=tuple(refusals(point[0])))
    said = dict.fromkeys(remark for run in point for other in reference for remark in remarks(run, other, ROLE))
    if reasons := _reasons(point[0], reference[0]):
        return StrategyRow(point, reference, reasons=tuple(reasons), remarks=tuple(said))
    return StrategyRow(point, reference, divide(point, reference, rates(point), rates(reference)), remarks=tuple(said))


def _reasons(run: Run, other: Run) -> list[str]:
    theirs = [f"{ROLE}: {reason}" for reason in refusals(other)]
    return [*refusals(run), *theirs, *arm_mismatches(run, other, apart="strategy")]


def cost(runs: Point) -> Cost:
    """Collect what the completed runs of a point measured beside their rate."""
    summaries = [run.summary for run in runs if run.summary]
    held = [bytes_per_parameter(summary) for summary in summaries]
    return Cost(
        sum(times(runs)) / len(summaries),
        _largest(peak_gib(summary) for summary in summaries),
        {term: _largest(each[term] for each in held) for term in TERMS},
        _largest((summary["memory_terms_gib"] or {}).get("activations") for summary in summaries),
        _largest(summary["syncs_per_step"] for summary in summaries),
        _largest(map(sent_bytes, runs)),
        _largest(summary["host_syncs_per_step"] for summary in summaries),
    )


def peak_gib(summary: dict[str, Any]) -> float | None:
    """Give the peak that was allocated, or where that is unknown the one that was reserved."""
    memory = summary["peak_memory_gib"]
    kept = memory["allocated"] if memory["allocated"] is not None else memory["reserved"]
    return None if kept is None else float(kept)


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
