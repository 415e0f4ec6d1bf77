"""The parts of a DeepSpeed config that more than one question needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

AUTO = "auto"
STAGES = (0, 1, 2, 3)
SHOWN_CHARACTERS = 60


def shown(value: object) -> str:
    """A value as the file writes it, on one line and short."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A section by its dotted name; empty where it is absent. Raises ValueError for anything but an object."""
    inner: Any = settings
    keys = name.split(".")
    for depth, key in enumerate(keys, start=1):
        if key not in inner:
            return {}
        inner = inner[key]
        if inner is None:  # as DeepSpeed takes it
            return {}
        if not isinstance(inner, dict):
            raise ValueError(f"{'.'.join(keys[:depth])}={shown(inner)}: must be a section, {{...}}")
    return dict(inner)


def zero_section(settings: dict[str, Any]) -> dict[str, Any]:
    """`zero_optimization`; an old form that DeepSpeed still reads is true or false and nothing else."""
    switch = settings.get("zero_optimization")
    return {"stage": int(switch)} if isinstance(switch, bool) else section(settings, "zero_optimization")


def switched_on(settings: dict[str, Any], name: str, key: str = "enabled") -> bool:
    """Whether a section has this switch on. Raises ValueError for a switch that is neither true nor false."""
    value = section(settings, name).get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name}.{key}={shown(value)}: must be true or false")
    return value


def join(path: str, key: str) -> str:
    """The dotted path of a key in the section at `path`."""
    return f"{path}.{key}" if path else key


def walk(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every leaf with its dotted path; elements of lists are `key[index]`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from walk(inner, join(path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from walk(inner, f"{path}[{index}]")
    else:
        yield path, value


def settings_stage(settings: dict[str, Any]) -> int:
    """The ZeRO stage; 0 where the file has no `zero_optimization`. Raises ValueError for one that does not exist."""
    stage = zero_section(settings).get("stage", 0)
    if isinstance(stage, bool) or stage not in STAGES:
        raise ValueError(f"zero_optimization.stage={shown(stage)}: must be 0, 1, 2 or 3")
    return int(stage)


def reductions_per_step(stage: int, accumulation_steps: int, coalesced: bool = False) -> int:
    """How often each gradient is reduced for one update: ZeRO-2 and 3 keep a part of it only, so after every backward.

    `coalesced` is DeepSpeed's `coalesce_grad_reduction`, which holds whole gradients back until the last.
    """
    return accumulation_steps if stage >= 2 and not coalesced else 1
