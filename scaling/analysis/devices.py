"""What the devices' own drivers say of a run that was flagged for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Not odd: a device at full load runs at its power cap, and one that waits for the others idles.
USUAL = ("sw_power_cap", "gpu_idle")
CLOCK_TOLERANCE = 0.02  # what raises `clock_changed`
MOST = 4  # what is named; the record holds the rest


def odd_devices(summary: dict[str, Any]) -> list[str]:
    """Say, per rank, what lies behind the flags of devices, so that a slow card is explained.

    Ranks of which the same is to be said are named together.
    """
    ranks: dict[str, list[int]] = {}
    for rank, telemetry in enumerate(summary["telemetry"] or []):
        for text in _oddities(telemetry or {}, summary["flags"]):
            ranks.setdefault(text, []).append(rank)
    said = [f"{'rank' if len(of) == 1 else 'ranks'} {_spans(of)}: {text}" for text, of in ranks.items()]
    return said if len(said) <= MOST else [*said[:MOST], f"and {len(said) - MOST} more in summary.json, telemetry"]


def _oddities(telemetry: dict[str, Any], flags: list[str]) -> Iterator[str]:
    limit, default = telemetry.get("power_limit_w"), telemetry.get("default_power_limit_w")
    if "power_limited" in flags and limit is not None and default is not None and limit < default:
        yield f"power limit {limit:.0f} of {default:.0f} W"
    change = telemetry.get("sm_clock_change")
    if "clock_changed" in flags and change is not None and abs(change) > CLOCK_TOLERANCE:
        yield f"clock {100 * change:+.1f} % in the second half"
    if "throttled" in flags:
        for reason, share in (telemetry.get("throttle_reasons") or {}).items():
            if reason not in USUAL and share > 0:
                yield f"{reason} in {_share(share)} of samples"


def _spans(ranks: list[int]) -> str:
    """Write growing numbers as "0-3, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _share(share: float) -> str:
    return "under 1 %" if share < 0.01 else f"{100 * share:.0f} %"
