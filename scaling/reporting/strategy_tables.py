"""Strategies side by side: what each makes of the same training in throughput, memory and communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from scaling.analysis.memory import TERMS
from scaling.analysis.strategies import Cost, StrategyRow, cost
from scaling.reporting.columns import megabytes, milliseconds, number
from scaling.reporting.table import Heading, Names, Table, point_cells, point_headings
from scaling.reporting.verdicts import strategy_verdict

TITLE = "Strategies side by side"
STRATEGY_NOTE = (
    "Strategies side by side: throughput is X / X(reference) of runs that agree in model, N, batch and all else but "
    "their strategy; its options (buckets, overlap, thresholds) belong to it. Memory and what is sent are those of "
    "the rank that holds or sends most, of repeats the largest. Model, gradients and optimizer state are told apart, "
    "in bytes per parameter of the whole model; activations and gathered weights come on top."
)


class CostColumn(NamedTuple):
    """A column of one number of a point's cost, left out where no point has it."""

    header: str
    value: Callable[[Cost], float | None]
    form: Callable[[float], str]


def per_parameter(value: float) -> str:
    """Write bytes per parameter."""
    return f"{value:.2f}"


def _term(name: str) -> CostColumn:
    return CostColumn(f"{name}\nB/param", lambda cost: cost.bytes_per_parameter[name], per_parameter)


MEMORY = (
    CostColumn("peak\nGiB", lambda cost: cost.peak_memory_gib, number),
    *map(_term, TERMS),
    CostColumn("activations\nGiB", lambda cost: cost.activations_gib, number),
    CostColumn("host\nsyncs", lambda cost: cost.host_syncs_per_step, "{:g}".format),
)
# They stand beside the ratio: a strategy that reduces at every micro-step is compared with one that reduces once.
TRAFFIC = (
    CostColumn("syncs\n/step", lambda cost: cost.syncs_per_step, "{:g}".format),
    CostColumn("sent\nMB/step", lambda cost: cost.sent_bytes, megabytes),
)


def strategy_tables(rows: Sequence[StrategyRow], names: Names) -> list[Table]:
    """Make one table of all columns where they fit, else one of speed and one of what it costs."""
    if not rows:
        return []
    costs = [cost(row.runs) for row in rows]
    point = Block(point_headings(), [point_cells(row.runs, names) for row in rows])
    speed = Block([Heading("step time\nms")], [[_step_time(row)] for row in rows])
    memory, traffic = _costs(MEMORY, costs), _costs(TRAFFIC, costs)
    words = [Heading("reference", 9), Heading("throughput", 20)]
    verdict = Block(words, [[_reference(row, names), strategy_verdict(row)] for row in rows])
    if names.wide:
        return [_side_by_side(TITLE, point, speed, memory, traffic, verdict)]
    run, model, *strategy = (point.column(place) for place in range(len(point.headings)))
    several = [model] * (len({row.runs[0].model for row in rows}) > 1)  # one model is known from the table of runs
    return [
        _side_by_side(TITLE, run, *several, *strategy, speed, traffic, verdict),
        _side_by_side(f"{TITLE}: memory, host syncs", run, *strategy, memory),
    ]


class Block(NamedTuple):
    """Some columns of a table: their headings, and per row their cells."""

    headings: list[Heading]
    rows: list[list[str]]

    def column(self, place: int) -> Block:
        """Take one column out."""
        return Block([self.headings[place]], [[row[place]] for row in self.rows])


def _side_by_side(title: str, *blocks: Block) -> Table:
    headings = tuple(heading for block in blocks for heading in block.headings)
    lines = zip(*(block.rows for block in blocks), strict=True)
    return Table(title, headings, tuple(tuple(cell for cells in line for cell in cells) for line in lines))


def _reference(row: StrategyRow, names: Names) -> str:
    return "" if row.is_reference else names.of(row.reference)


def _costs(columns: Sequence[CostColumn], costs: Sequence[Cost]) -> Block:
    """Fill the columns in which any point has something."""
    kept = [column for column in columns if any(column.value(each) is not None for each in costs)]
    return Block([Heading(c.header) for c in kept], [[_cell(c.value(each), c.form) for c in kept] for each in costs])


def _cell(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


def _step_time(row: StrategyRow) -> str:
    """Give a single run's mean with its own interval, of repeats the mean; how they scatter is in the ratio."""
    if len(row.runs) == 1 and row.runs[0].summary:
        return milliseconds(row.runs[0].summary["step_time_s"])
    return number(1e3 * cost(row.runs).step_time_s)
