"""The cells of the run tables: a record's fields as a person reads them. Fractions become percent here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scaling.analysis.believable import contradictions, impossible_values
from scaling.analysis.devices import odd_devices
from scaling.analysis.strategies import label
from scaling.analysis.traffic import sent_bytes
from scaling.results.reader import Run, as_dict

RANK_SPREAD = 0.05  # the slowest rank is named from here on
STRATEGY_WORDS = 12  # "(DeepSpeed's" stays whole


@dataclass(frozen=True)
class Column:
    """A column of numbers, which stand right and never fold; or of words, which fold at `words` letters or later.

    An `optional` one in which no run has a value is left out; so is one that no run `needs`.
    """

    header: str
    cell: Callable[[Run], str]
    words: int = 0
    optional: bool = False
    needs: Callable[[Run], bool] | None = None

    def shown(self, runs: Sequence[Run]) -> bool:
        """Whether any of the runs has something to say here."""
        if self.needs is not None:
            return any(map(self.needs, runs))
        return not self.optional or any(map(self.cell, runs))


def number(value: float) -> str:
    """Write at least four significant digits, without exponent or separators from 0.001 on."""
    return f"{value:.3e}" if 0 < abs(value) < 0.001 else f"{value:.{_decimals(value, 4)}f}"


def _decimals(value: float, digits: int) -> int:
    """Count the decimal places that show so many significant digits of a value."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0


def text(value: object) -> str:
    return "?" if value is None else str(value)


def batch(run: Run) -> str:
    return f"{text(run.micro_batch_size)} x {text(run.accumulation_steps)} ({text(run.global_batch_size)})"


def _measured(key: str, form: Callable[[float], str] = number) -> Callable[[Run], str]:
    """Make a cell with a number of the summary; empty where it was not measured."""
    return lambda run: "" if run.summary is None or run.summary[key] is None else form(run.summary[key])


def percent(fraction: float) -> str:
    """Write a stored fraction for people."""
    return f"{100 * fraction:.1f} %"


def _step_time(run: Run) -> str:
    return run.status if run.summary is None else milliseconds(run.summary["step_time_s"])


def milliseconds(step_time_s: dict[str, Any]) -> str:
    """Give the mean in ms, with the half-width of its 95 % interval where there is one."""
    mean, ends = 1e3 * step_time_s["mean"], step_time_s["ci95"]
    if ends is None:
        return number(mean)
    half = 1e3 * (ends[1] - ends[0]) / 2
    places = max(_decimals(mean, 4), _decimals(half, 1))
    return f"{mean:.{places}f} ± {half:.{places}f}"


def _data_wait(run: Run) -> str:
    """Give the share of the window in which the rank that waits most for data does so."""
    return "" if run.summary is None else percent(run.summary["data_wait_s"] / run.summary["window_s"])


def _recomputes(run: Run) -> bool:
    """Whether the hardware computes other than the model's own FLOPs, as with checkpointing."""
    return run.summary is not None and run.summary["hfu"] not in (None, run.summary["mfu"])


def _energy(run: Run) -> str:
    """Give the joules of all devices per sample of the window."""
    if run.summary is None or run.summary["energy_j"] is None:
        return ""
    return number(run.summary["energy_j"] / (run.summary["samples_per_s"] * run.summary["window_s"]))


def _memory(run: Run) -> str:
    """Give the peak with whose it is: a device's, or the resident set of a process on a host."""
    memory = as_dict(run.summary["peak_memory_gib"]) if run.summary else {}
    kept = "allocated" if memory.get("allocated") is not None else "reserved"
    return f"{number(memory[kept])} {memory['kind'].removeprefix('host_')}" if memory.get(kept) is not None else ""


def _matmul(run: Run) -> str:
    """Give the share with what it is a share of: on a disturbed host that is less, and the share more."""
    if run.summary is None or run.summary["matmul_share"] is None:
        return ""
    of = "" if run.summary["matmul_tflops"] is None else f" of {run.summary['matmul_tflops']:.4g}"
    return percent(run.summary["matmul_share"]) + of


def megabytes(sent: float) -> str:
    """Write bytes in MB of 1e6."""
    return number(sent / 1e6)


def _sent(run: Run) -> str:
    """Give what one rank sends per step, all kinds together."""
    return "" if (sent := sent_bytes(run)) is None else megabytes(sent)


def _link(run: Run) -> str:
    """Name what was observed to carry the bytes; what was only asked for is no label."""
    if run.summary is None or run.world_size == 1:
        return ""
    return str(run.summary["link"]["observed"] or "unverified")


def _state(run: Run) -> str:
    """Give the flags of a completed run; how the others ended; files that could not be read."""
    said: list[str] = [] if run.status == "complete" else [run.status]
    if run.summary is not None:
        said = [*run.summary["flags"], *impossible_values(run.summary), *contradictions(run.summary)]
        if (run.summary.get("rank_spread") or 0) > RANK_SPREAD:
            said.append(f"rank {run.summary.get('slowest_rank')} is slowest, by {percent(run.summary['rank_spread'])}")
        said += odd_devices(run.summary)
    if run.error is not None:
        rank = "" if run.error.get("rank") is None else f" on rank {run.error['rank']}"
        said = [f"failed: {run.error.get('kind', 'other')}{rank}: {_line(run.error.get('message'))}"]
    return ", ".join([*said, run.problem] if run.problem else said)


def _line(message: object) -> str:
    """Give the first line of a message that says something, printable, and short enough for a table."""
    lines = [line.strip() for line in str(message or "no message").splitlines() if line.strip()]
    text = "".join(letter for letter in lines[0] if letter.isprintable()) if lines else "no message"
    return text if len(text) <= 160 else f"{text[:157]}..."


def setting(summary: dict[str, Any]) -> str:
    """Say what is trained in which way: all that tells two runs of one model and strategy apart but their batch."""
    sizes = {"tokens": summary["sequence_length"], "px": summary.get("image_size")}
    parts = [summary["precision"], f"{summary['data']} data"]
    parts += [f"{size} {unit}" for unit, size in sizes.items() if size is not None]
    return ", ".join(parts + [name for name in ("compile", "checkpointing") if summary[name]])


def _setting(run: Run) -> str:
    if run.summary is not None:
        return setting(run.summary)
    return ", ".join(str(name) for group in ("precision", "data") if (name := run.group(group).get("name")))


def settings(runs: Sequence[Run]) -> Callable[[Run], str]:
    """Make a cell with the setting, and whatever else tells runs apart that would look the same in the table."""
    alike: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        alike.setdefault(_looks(run), []).append(run)

    def cell(run: Run) -> str:
        others = [other.settings for other in alike[_looks(run)]]
        differing = [k for k, v in run.settings.items() if any(k in other and other[k] != v for other in others)]
        return ", ".join([_setting(run), *(f"{key}={run.settings[key]}" for key in differing)])

    return cell


def _looks(run: Run) -> tuple[str, ...]:
    return run.model, label(run), text(run.world_size), batch(run), _setting(run)


NAMES = (
    Column("model", lambda run: run.model, words=10),
    Column("strategy", label, words=STRATEGY_WORDS),
)
SIZE = (
    Column("N", lambda run: text(run.world_size)),
    Column("micro x acc\n(global)", batch),
)
SPEED = (
    Column("step time\nms", _step_time),
    Column("samples/s", _measured("samples_per_s")),
    Column("samples/s\nper device", _measured("samples_per_s_per_device")),
    Column("tokens/s", _measured("tokens_per_s"), optional=True),
    Column("TFLOPS\nper device", _measured("tflops_per_device"), optional=True),
)
DEVICE = (
    Column("MFU", _measured("mfu", percent), optional=True),
    Column("HFU", _measured("hfu", percent), needs=_recomputes),
    Column("share of\nmatmul", _matmul, optional=True),
    Column("energy\nJ/sample", _energy, optional=True),
    Column("clock\nMHz", _measured("clock_mhz"), optional=True),
)
REST = (
    Column("peak memory\nGiB", _memory),
    Column("data\nwait", _data_wait),
    Column("syncs\n/step", _measured("syncs_per_step", str)),
    Column("sent\nMB/step", _sent, needs=lambda run: bool(sent_bytes(run))),
    Column("link", _link, words=10, optional=True),
    Column("flags", _state, words=20),
)
