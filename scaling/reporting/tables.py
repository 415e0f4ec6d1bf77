"""The report's tables, prepared: titles, headings and cells, for the terminal and for a file alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaling.analysis.comparable import arms_with_one_transport
from scaling.analysis.efficiency import Kind, Row, scaling_rows
from scaling.analysis.loading import LoaderRow, loader_rows
from scaling.analysis.strategies import strategy_rows
from scaling.reporting.columns import DEVICE, NAMES, REST, SIZE, SPEED, Column, percent, settings
from scaling.reporting.memory_table import memory_table
from scaling.reporting.strategy_tables import STRATEGY_NOTE, strategy_tables
from scaling.reporting.table import Heading, Names, Table, point_cells, point_headings
from scaling.reporting.traffic_table import traffic_table
from scaling.reporting.verdicts import loader_verdict, speedup, verdict
from scaling.results.reader import Run

TITLES: dict[Kind | None, str] = {
    "weak": "Weak scaling: work per device fixed; efficiency E(N) = X(N) / (N x X(1)), X in samples/s",
    "strong": "Strong scaling: global batch fixed; S(N) = T(1) / T(N) of the step time, efficiency S(N) / N",
    None: "In no scaling table",
}
LOADER_TITLE = (
    "Loader: share of the step that real data costs: 1 - T(synthetic) / T(real); "
    "waiting is the part that the loop itself saw"
)
HOST_NOTE = (
    "On a host without accelerators busy ranks slow each other even with a core each: "
    "an efficiency there holds this contention beside the communication."
)
ONE_RUN_NOTE = (
    "An interval of n=1 comes from the blocks inside one run each. What differs between runs, as other work on a host, "
    "is not in it: repeat the runs, and equal ones are put together."
)


@dataclass(frozen=True)
class Report:
    """All that is to be shown of some runs, in this order."""

    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    skipped: tuple[str, ...]


def prepare(runs: Sequence[Run], *, wide: bool) -> Report:
    """Fill all tables that have a row; `wide` puts all columns of a run side by side, and ids beside the numbers."""
    shown = [run for run in runs if run.readable]
    names = Names({run.path: f"#{number}" for number, run in enumerate(shown, start=1)}, wide)
    rows, loading, strategies = scaling_rows(shown), loader_rows(shown), strategy_rows(shown)
    tables = [*_run_tables(shown, names), *strategy_tables(strategies, names)]
    scaling: list[Kind | None] = ["weak", "strong", None]
    weak, strong, neither = (_scaling_table(k, [row for row in rows if row.kind == k], names) for k in scaling)
    tables += [*weak, *strong, *_loader_table(loading, names), *traffic_table(shown, names)]
    tables += [*memory_table(shown, names), *neither]
    ratios = [row.efficiency for row in rows] + [row.share for row in loading] + [row.throughput for row in strategies]
    once = any(ratio is not None and ratio.basis == "ci95" for ratio in ratios)
    notes = [STRATEGY_NOTE] * bool(strategies) + _notes(shown, names.labels, once=once)
    skipped = (f"{relative(run.path)}: {run.problem}" for run in runs if not run.readable)
    return Report(tuple(tables), tuple(notes), tuple(skipped))


def _run_tables(runs: Sequence[Run], names: Names) -> list[Table]:
    """Make one table of all columns where they fit, else one per group of columns, each with a row per run."""
    number = Column("#", lambda run: names.labels[run.path])
    run = Column("run", namer(runs), words=22)
    setting = Column("setting", settings(runs), words=15)
    if names.wide:
        return [_run_table("Runs", [number, run, *NAMES, setting, *SIZE, *SPEED, *DEVICE, *REST], runs)]
    tables = [
        _run_table("Runs", [number, run, *NAMES, *SIZE, setting], runs),
        _run_table("Runs: speed", [number, *NAMES, SIZE[0], *SPEED], runs),
        _run_table("Runs: memory, waiting, flags", [number, run, *REST], runs),
    ]
    if any(column.shown(runs) for column in DEVICE):
        tables.insert(2, _run_table("Runs: use of the devices", [number, run, *DEVICE], runs))
    return tables


def _run_table(title: str, columns: Iterable[Column], runs: Sequence[Run]) -> Table:
    kept = [column for column in columns if column.shown(runs)]
    return Table(
        title,
        tuple(Heading(column.header, column.words) for column in kept),
        tuple(tuple(column.cell(run) for column in kept) for run in runs),
        tuple(run.status for run in runs),
    )


def _scaling_table(kind: Kind | None, rows: Sequence[Row], names: Names) -> list[Table]:
    headings = [*point_headings(), Heading("baseline", 10)]
    headings += [*[Heading("speed-up")] * (kind == "strong"), Heading("efficiency", 20)]
    table = []
    for row in rows:
        cells = [*point_cells(row.runs, names), f"{row.against} {names.of(row.baseline)}".strip()]
        table.append((*cells, *[speedup(row)] * (kind == "strong"), verdict(row)))
    return [Table(TITLES[kind], tuple(headings), tuple(table))] if rows else []


def _loader_table(rows: Sequence[LoaderRow], names: Names) -> list[Table]:
    headings = [*point_headings(), Heading("data", 10), Heading("synthetic", 7), Heading("waiting")]
    table = []
    for row in rows:
        data = str(row.runs[0].summary["data"]) if row.runs[0].summary else ""
        cells = [*point_cells(row.runs, names), data, names.of(row.synthetic), percent(row.waiting)]
        table.append((*cells, loader_verdict(row)))
    return [Table(LOADER_TITLE, (*headings, Heading("loader's share", 20)), tuple(table))] if rows else []


def _notes(runs: Sequence[Run], labels: dict[Path, str], *, once: bool) -> list[str]:
    """Say what holds for several rows: contention on hosts, ratios of runs made `once`, and arms that were one."""
    hosts = [run for run in runs if run.summary and run.summary["peak_memory_gib"]["kind"] == "host_resident"]
    several = [(labels[run.path], run.summary["contention_s"]) for run in hosts if run.summary and run.world_size != 1]
    blind = ", ".join(label for label, contention in several if contention is None)
    unmeasured = f" contention_s was not measured in {blind}." if blind else ""
    host = [HOST_NOTE + unmeasured] * bool(several)
    return host + [ONE_RUN_NOTE] * once + arms_with_one_transport(runs)


def namer(runs: Sequence[Run]) -> Callable[[Run], str]:
    """Give the run's id, or its path where two machines gave the same id."""
    ids = [run.run_id for run in runs]
    return lambda run: run.run_id if ids.count(run.run_id) == 1 else relative(run.path)


def relative(path: Path) -> str:
    """Write a path from the current folder where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
