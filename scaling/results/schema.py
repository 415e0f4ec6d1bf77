"""Whether a JSON object is a record of this schema, and believable as one."""

from __future__ import annotations

from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from scaling.results.record import SCHEMA_VERSION, Summary

# `flops_per_step` of the largest job is far below; a longer number of a stranger's would overflow in a division.
LARGEST, SMALLEST = 1e30, 1e-12
# Every ratio divides by some of these, so that a zero has to stop at the door.
POSITIVE = ("world_size", "micro_batch_size", "accumulation_steps", "global_batch_size", "window_s", "samples_per_s")


def distrust(summary: dict[str, Any]) -> str | None:
    """Say why a `summary.json` is not a training record of this schema, or None."""
    version = summary.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool):
        return "has no schema_version, so it is not a record of scaling"
    if version > SCHEMA_VERSION:
        return f"schema_version {version} is newer than {SCHEMA_VERSION}, the newest that this version reads"
    if version < 1:
        return f"schema_version {version} never existed"
    if str(summary.get("command")).split()[:1] == ["comm"]:
        return "a record of scaling.comm, which this report does not show yet"
    if summary.get("command") != "train":
        return f"command {str(summary.get('command'))[:40]!r} is none that this report shows"
    if reason := _mismatch(complete(summary), Summary, ""):
        return reason
    measured = {key: summary[key] for key in POSITIVE} | {"step_time_s.mean": summary["step_time_s"]["mean"]}
    wrong = [f"{key} is {value}" for key, value in measured.items() if value < SMALLEST]
    return f"{wrong[0]}, which no measurement gives" if wrong else None


def complete(summary: dict[str, Any]) -> dict[str, Any]:
    """Add None for the fields that a version may have added since this record was written."""
    return dict.fromkeys(get_type_hints(Summary)) | {"flags": []} | summary


def _mismatch(value: object, hint: Any, name: str) -> str | None:
    """Say what is wrong with a JSON value for a type of the record, or None; further fields are fine."""
    if is_dataclass(hint):
        if not isinstance(value, dict):
            return f"{name} is no mapping"
        inner = (_mismatch(value.get(key), of, f"{name}.{key}".lstrip(".")) for key, of in get_type_hints(hint).items())
        return next((reason for reason in inner if reason), None)
    return None if _fits(value, hint) else f"{name} is {str(value)[:40]!r}" if value is not None else f"has no {name}"


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is not None:
        return _fits_generic(value, get_origin(hint), get_args(hint))
    if hint is Any:
        return True
    if isinstance(value, bool):  # which is an int to isinstance
        return hint is bool
    if hint is float:  # NaN and infinity are no JSON, and no measurement
        return isinstance(value, int | float) and abs(value) < LARGEST
    if hint is int:
        return isinstance(value, int) and abs(value) < LARGEST
    return isinstance(value, hint)


def _fits_generic(value: object, origin: Any, arguments: tuple[Any, ...]) -> bool:
    if origin in (Union, UnionType):
        return any(_mismatch(value, argument, "") is None for argument in arguments)
    if origin is tuple:  # JSON has lists only
        return isinstance(value, list) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if not isinstance(value, dict | list) or not isinstance(value, origin):
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(_mismatch(item, arguments[-1], "") is None for item in items)
