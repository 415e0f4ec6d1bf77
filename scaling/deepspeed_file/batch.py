"""Batch numbers of a DeepSpeed file: DeepSpeed's own arithmetic, and what the command line adds to it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from scaling.config import BatchConfig, resolve_batch
from scaling.deepspeed_file.sections import AUTO, shown

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# DeepSpeed's keys, and ours for the same number.
OURS = {TOTAL: "global_batch_size", MICRO: "micro_batch_size", STEPS: "accumulation_steps"}

Numbers = dict[str, int | None]


def resolve(settings: dict[str, Any], world_size: int) -> tuple[int, int, int]:
    """(micro, accumulation, global) as DeepSpeed itself would have it: `_set_batch_related_parameters` of 0.19.

    Raises ValueError where DeepSpeed would stop, with its numbers; "auto" is something that it does not know.
    """
    for key in OURS:
        if settings.get(key) == AUTO:
            raise ValueError(f'{key}="auto" reached DeepSpeed, which cannot fill it in; write a number')
    return _complete({key: _number(key, settings.get(key)) for key in OURS}, world_size)


def fill_batch(settings: dict[str, Any], batch: BatchConfig, default_micro: int, world_size: int) -> tuple[int, int]:
    """Write all three numbers into the settings; (micro, accumulation). Raises ValueError where the sides disagree."""
    written = {key: _number(key, None if settings.get(key) == AUTO else settings.get(key)) for key in OURS}
    given = {key: _number(f"batch.{ours}", asdict(batch)[ours]) for key, ours in OURS.items()}
    if not any(written.values()):
        micro, steps, total = resolve_batch(batch, default_micro, world_size).sizes
    else:
        micro, steps, total = _together(written, given, default_micro, world_size)
    settings.update({TOTAL: total, MICRO: micro, STEPS: steps})
    return micro, steps


def _together(written: Numbers, given: Numbers, default_micro: int, world_size: int) -> tuple[int, int, int]:
    """The file's numbers, completed from the command line and then from the model."""
    if any(written[key] and given[key] and written[key] != given[key] for key in OURS):
        raise ValueError(_disagreement(written, given, world_size))
    merged = {key: written[key] or given[key] for key in OURS}
    if not merged[TOTAL] and not merged[MICRO]:
        merged[MICRO] = default_micro
    try:
        return _complete(merged, world_size)
    except ValueError as error:
        if all(merged.values()) and any(given.values()):
            raise ValueError(_disagreement(written, given, world_size)) from None
        added = _listed({key: given[key] if not written[key] else None for key in OURS}, ours=True)
        raise ValueError(f"{error} (the command line gave {added})" if added else str(error)) from None


def _complete(numbers: Numbers, world_size: int) -> tuple[int, int, int]:
    """DeepSpeed's floor divisions, and then its check that nothing was lost by them."""
    total, micro, steps = numbers[TOTAL], numbers[MICRO], numbers[STEPS]
    if total is None:
        if micro is None:
            raise ValueError(f"neither {TOTAL} nor {MICRO} is given; write one of them")
        steps = steps or 1
        return micro, steps, micro * steps * world_size
    if micro is None:
        steps = steps or 1
        micro = total // world_size // steps
    elif steps is None:
        steps = total // micro // world_size
    if total != micro * steps * world_size:
        product = micro * steps * world_size
        raise ValueError(
            f"{TOTAL} {total} is not micro {micro} x accumulation {steps} x {_ranks(world_size)} = {product}; "
            f"what works: {_alternatives(numbers, total, world_size)}"
        )
    return micro, steps, total


def _alternatives(numbers: Numbers, total: int, world_size: int) -> str:
    """Totals for these ranks and numbers of ranks for this total, nearest first."""
    micro, steps = numbers[MICRO], numbers[STEPS]
    per_rank = (micro or 1) * (steps or 1)
    unit = per_rank * world_size
    below, above = total // unit * unit, -(-total // unit) * unit
    totals = [unit] if micro and steps else [size for size in (below, above) if size]
    found = [f"{TOTAL} {' or '.join(map(str, totals))}"]
    if total % per_rank == 0:
        shares = total // per_rank
        fitting = [shares] if micro and steps else [n for n in range(1, shares + 1) if shares % n == 0]
        fewer, more = [n for n in fitting if n < world_size], [n for n in fitting if n > world_size]
        *first, last = fewer[-1:] + more[:1]
        found.append(" or ".join([*map(str, first), _ranks(last)]))
    return ", or ".join(found)


def _disagreement(written: Numbers, given: Numbers, world_size: int) -> str:
    try:
        micro, steps, total = _complete(written, world_size)
        meaning = f", which is micro {micro} x accumulation {steps} x {_ranks(world_size)} = {total}"
    except ValueError:
        meaning = f" for {_ranks(world_size)}"
    return (
        f"the file has {_listed(written)}{meaning}, but the command line has {_listed(given, ours=True)}; "
        'leave the numbers out on one side ("auto" in the file), or make them agree'
    )


def _listed(numbers: Numbers, *, ours: bool = False) -> str:
    return ", ".join(f"{f'batch.{OURS[key]}' if ours else key}={n}" for key, n in numbers.items() if n is not None)


def _number(key: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        template = "; if it is a word of a template, it must be filled in first" if isinstance(value, str) else ""
        raise ValueError(f'{key}={shown(value)}: must be a whole number or "auto"{template}')
    if value < 1:
        raise ValueError(f"{key}={value}: must be at least 1")
    return value


def _ranks(world_size: int) -> str:
    return f"{world_size} rank" + ("s" if world_size != 1 else "")
