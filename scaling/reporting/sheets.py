"""The report as CSV: stored units, full precision, fractions as fractions, empty where nothing was measured."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from scaling.analysis.believable import refusals
from scaling.analysis.efficiency import scaling_rows
from scaling.analysis.loading import loader_rows
from scaling.analysis.memory import TERMS
from scaling.analysis.ratio import Ratio
from scaling.analysis.strategies import cost, label, strategy_rows
from scaling.analysis.traffic import sent_bytes
from scaling.reporting.tables import namer, relative
from scaling.reporting.verdicts import flags
from scaling.results.reader import Run, as_dict
from scaling.results.record import Summary

Cells = dict[str, Any]

RUNS_HEAD = ("path", "run_id", "status", "problem", "error.kind", "error.rank", "error.message", "refusals")
POINT = ("model", "strategy", "world_size", "micro_batch_size", "accumulation_steps", "global_batch_size")
OF_RATIO = ("low", "high", "basis", "repeats", "base_repeats")
SAID = ("reasons", "remarks", "flags")
SPEEDUP = ("speedup", "speedup_low", "speedup_high")
SCALING_COLUMNS = (
    *("kind", *POINT, "runs", "against", "baseline", "efficiency", *OF_RATIO, *SPEEDUP, "impossible"),
    *("syncs_per_step", "sent_bytes_per_step", *SAID),
)
LOADER_COLUMNS = ("runs", "synthetic", "data", *POINT, "share", *OF_RATIO, "data_wait", *SAID)
STRATEGY_COLUMNS = (
    *("runs", "reference", *POINT, "label", "throughput", *OF_RATIO, "step_time_s", "peak_memory_gib"),
    *(f"{term}_bytes_per_parameter" for term in TERMS),
    *("activations_gib", "syncs_per_step", "sent_bytes_per_step", "host_syncs_per_step", *SAID),
)
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes as the start of a formula


def runs_sheet(runs: Sequence[Run]) -> str:
    """Write one row per run, whatever became of it, with every field of the record in the record's order.

    A field that holds a mapping has a column per key, of whatever run has it; telemetry is JSON. What was configured
    follows, as `config.KEY`.
    """
    records = {run.path: dict(_fields(run)) for run in runs}
    configs = {run.path: {f"config.{key}": _plain(value) for key, value in run.settings.items()} for run in runs}
    columns = list(RUNS_HEAD)
    for name, hint in get_type_hints(Summary).items():
        if name not in RUNS_HEAD:
            columns += _columns(name, hint, records.values())
    columns += dict.fromkeys(key for config in configs.values() for key in config)
    return _sheet(columns, [records[run.path] | configs[run.path] | _head(run) for run in runs])


def _plain(value: Any) -> Any:
    """A cell: lists, as of a ResNet's depths, become JSON."""
    return _json(value) if isinstance(value, list | dict) else value


def _head(run: Run) -> Cells:
    """What is known of any run; what the config says of one without a summary is in the columns of the summary."""
    known = {name: value for name in POINT if (value := getattr(run, name)) != "?"} if run.summary is None else {}
    return known | {
        "path": relative(run.path),
        "run_id": run.run_id,
        "status": run.status if run.readable else "skipped",
        "problem": run.problem,
        **{f"error.{key}": as_dict(run.error).get(key) for key in ("kind", "rank", "message")},
        "refusals": "; ".join(refusals(run)),
    }


def _fields(run: Run) -> Iterator[tuple[str, Any]]:
    """Give the fields of the summary under dotted names."""
    for name in get_type_hints(Summary):
        value = None if run.summary is None else run.summary[name]
        if name == "telemetry":
            yield name, None if value is None else _json(value)
        elif name == "flags":
            yield name, " ".join(value or [])
        elif name == "comm_notes":
            yield name, "; ".join(value or [])
        else:
            yield from _flat(name, value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif name.endswith(".ci95") and (value is None or (isinstance(value, list) and len(value) == 2)):
        yield from zip((f"{name}.low", f"{name}.high"), value or (None, None), strict=True)
    else:
        yield name, value


def _columns(name: str, hint: Any, records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Name the columns of a field of the record, in the record's order; of free keys in that of the alphabet."""
    if get_origin(hint) is UnionType:  # of a mapping with fixed keys, or of anything, and None
        hint = next(of for of in get_args(hint) if of is not NoneType)
    if is_dataclass(hint):
        inner = (_columns(f"{name}.{key}", of, ()) for key, of in get_type_hints(hint).items())
        return [column for columns in inner for column in columns]
    if name.endswith(".ci95"):
        return [f"{name}.low", f"{name}.high"]
    return sorted({key for record in records for key in record if key.startswith(f"{name}.")}) or [name]


def scaling_sheet(runs: Sequence[Run]) -> str:
    """Write one row per measured point and baseline, with or without a ratio."""
    named = namer(runs)
    table = [
        {
            "kind": row.kind,
            **_point(row.runs, named),
            "against": row.against,
            "baseline": _names(row.baseline, named),
            **_ratio("efficiency", row.efficiency),
            "speedup": row.speedup and row.speedup.value,
            "speedup_low": row.speedup and row.speedup.low,
            "speedup_high": row.speedup and row.speedup.high,
            "impossible": row.impossible,
            **_traffic(row.runs),
            "reasons": "; ".join(row.reasons),
            "remarks": "; ".join(row.remarks),
            "flags": " ".join(flags((*row.runs, *row.baseline))),
        }
        for row in scaling_rows(run for run in runs if run.readable)
    ]
    return _sheet(SCALING_COLUMNS, table)


def loader_sheet(runs: Sequence[Run]) -> str | None:
    """Write one row per measured point on real data; None where there is none beside synthetic data."""
    named = namer(runs)
    table = [
        {
            **_point(row.runs, named),
            "synthetic": _names(row.synthetic, named),
            "data": row.runs[0].summary and row.runs[0].summary["data"],
            **_ratio("share", row.share),
            "data_wait": row.waiting,
            "reasons": "; ".join(row.reasons),
            "remarks": "; ".join(row.remarks),
            "flags": " ".join(flags((*row.runs, *row.synthetic))),
        }
        for row in loader_rows(run for run in runs if run.readable)
    ]
    return _sheet(LOADER_COLUMNS, table) if table else None


def strategies_sheet(runs: Sequence[Run]) -> str | None:
    """Write one row per measured point beside its reference; None where there is but one strategy."""
    named = namer(runs)
    table = []
    for row in strategy_rows(run for run in runs if run.readable):
        held = cost(row.runs)
        table.append(
            {
                **_point(row.runs, named),
                "reference": _names(row.reference, named),
                "label": label(row.runs[0]),
                **_ratio("throughput", row.throughput),
                "step_time_s": held.step_time_s,
                "peak_memory_gib": held.peak_memory_gib,
                **{f"{term}_bytes_per_parameter": value for term, value in held.bytes_per_parameter.items()},
                "activations_gib": held.activations_gib,
                "syncs_per_step": held.syncs_per_step,
                "sent_bytes_per_step": held.sent_bytes,
                "host_syncs_per_step": held.host_syncs_per_step,
                "reasons": "; ".join(row.reasons),
                "remarks": "; ".join(row.remarks),
                "flags": " ".join(flags((*row.runs, *row.reference))),
            }
        )
    return _sheet(STRATEGY_COLUMNS, table) if table else None


def _traffic(runs: Sequence[Run]) -> Cells:
    """What the first of a point's runs that was counted sends; runs.csv has it of each."""
    counted = next((run for run in runs if sent_bytes(run) is not None), runs[0])
    syncs = counted.summary and counted.summary["syncs_per_step"]
    return {"syncs_per_step": syncs, "sent_bytes_per_step": sent_bytes(counted)}


def _point(runs: Sequence[Run], named: Callable[[Run], str]) -> Cells:
    return {name: getattr(runs[0], name) for name in POINT} | {"runs": _names(runs, named)}


def _names(runs: Sequence[Run], named: Callable[[Run], str]) -> str:
    return " ".join(map(named, runs))


def _ratio(name: str, ratio: Ratio | None) -> Cells:
    if ratio is None:
        return {}
    ends = {"low": ratio.low, "high": ratio.high, "basis": ratio.basis}
    return {name: ratio.value, **ends, "repeats": ratio.runs, "base_repeats": ratio.baselines}


def _sheet(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Write rows as RFC 4180 has them, under a header."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(columns)
    writer.writerows([[_cell(row.get(column)) for column in columns] for row in rows])
    return out.getvalue()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _cell(value: Any) -> Any:
    """Give a number as it is, a truth as JSON has it, and no text that a spreadsheet would compute."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return value
    text = "" if value is None else _json(value) if isinstance(value, list | dict) else str(value)
    return f"'{text}" if text.startswith(FORMULA) else text
