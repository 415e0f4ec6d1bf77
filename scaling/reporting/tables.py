"""The report's tables, prepared: titles, headings and cells, for the terminal and for a file alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaling.analysis.comparable import arms_with_one_transport
from scaling.analysis.efficiency import Kind, Row, scaling_rows
from scaling.analysis.loading import LoaderRow, loader_rows
from scaling.reporting.columns import DEVICE, NAMES, REST, SPEED, Column, batch, percent, settings, text
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
class Heading:
    """A column's name, which may have two lines. Words stand left and fold at so many letters; 0 is a number."""

    name: str
    words: int = 0

    @property
    def line(self) -> str:
        """The name on one line."""
        return self.name.replace("\n/", "/").replace("\n", " ")


@dataclass(frozen=True)
class Table:
    """Cells under a title. `states` has, per row, how the run ended; empty where rows are no single runs."""

    title: str
    headings: tuple[Heading, ...]
    rows: tuple[tuple[str, ...], ...]
    states: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """All that is to be shown of some runs, in this order."""

    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    skipped: tuple[str, ...]


def prepare(runs: Sequence[Run], *, wide: bool) -> Report:
    """Fill all tables that have a row; `wide` puts all columns of a run side by side, and ids beside the numbers."""
    shown = [run for run in runs if run.readable]
    labels = {run.path: f"#{number}" for number, run in enumerate(shown, start=1)}
    rows, loading = scaling_rows(shown), loader_rows(shown)
    tables = _run_tables(shown, labels, wide)
    for kind in ("weak", "strong", None):
        tables += _scaling_table(kind, [row for row in rows if row.kind == kind], labels, wide)
    tables += _loader_table(loading, labels, wide)
    ratios = [*(row.efficiency for row in rows), *(row.share for row in loading)]
    once = any(ratio is not None and ratio.basis == "ci95" for ratio in ratios)
    skipped = (f"{relative(run.path)}: {run.problem}" for run in runs if not run.readable)
    return Report(tuple(tables), tuple(_notes(shown, labels, once=once)), tuple(skipped))


def _run_tables(runs: Sequence[Run], labels: dict[Path, str], wide: bool) -> list[Table]:
    """Make one table of all columns where they fit, else one per group of columns, each with a row per run."""
    number = Column("#", lambda run: labels[run.path])
    name = Column("run", namer(runs), words=22)
    first = [*NAMES, Column("setting", settings(runs), words=15), *SPEED]
    if wide:
        return [_run_table("Runs", [number, name, *first, *DEVICE, *REST], runs)]
    speed = _run_table("Runs: speed", [number, *first], runs)
    rest = _run_table("Runs: memory, waiting, flags", [number, name, *REST], runs)
    if not any(column.shown(runs) for column in DEVICE):
        return [speed, rest]
    return [speed, _run_table("Runs: use of the devices", [number, name, *DEVICE], runs), rest]


def _run_table(title: str, columns: Iterable[Column], runs: Sequence[Run]) -> Table:
    kept = [column for column in columns if column.shown(runs)]
    return Table(
        title,
        tuple(Heading(column.header, column.words) for column in kept),
        tuple(tuple(column.cell(run) for column in kept) for run in runs),
        tuple(run.status for run in runs),
    )


def _scaling_table(kind: Kind | None, rows: Sequence[Row], labels: dict[Path, str], wide: bool) -> list[Table]:
    headings = [*_point_headings(), Heading("baseline", 10)]
    headings += [*[Heading("speed-up")] * (kind == "strong"), Heading("efficiency", 20)]
    table = []
    for row in rows:
        cells = [*_point(row.runs, labels, wide), f"{row.against} {_members(row.baseline, labels, wide)}".strip()]
        table.append((*cells, *[speedup(row)] * (kind == "strong"), verdict(row)))
    return [Table(TITLES[kind], tuple(headings), tuple(table))] if rows else []


def _loader_table(rows: Sequence[LoaderRow], labels: dict[Path, str], wide: bool) -> list[Table]:
    headings = [*_point_headings(), Heading("data", 10), Heading("synthetic", 7), Heading("waiting")]
    table = []
    for row in rows:
        data = str(row.runs[0].summary["data"]) if row.runs[0].summary else ""
        cells = [*_point(row.runs, labels, wide), data, _members(row.synthetic, labels, wide), percent(row.waiting)]
        table.append((*cells, loader_verdict(row)))
    return [Table(LOADER_TITLE, (*headings, Heading("loader's share", 20)), tuple(table))] if rows else []


def _point_headings() -> list[Heading]:
    names = [("run", 7), ("model", 10), ("strategy", 8), ("N", 0), ("micro x acc\n(global)", 0)]
    return [Heading(name, words) for name, words in names]


def _point(runs: Sequence[Run], labels: dict[Path, str], wide: bool) -> list[str]:
    run = runs[0]
    return [_members(runs, labels, wide), run.model, run.strategy, text(run.world_size), batch(run)]


def _notes(runs: Sequence[Run], labels: dict[Path, str], *, once: bool) -> list[str]:
    """Say what holds for several rows: contention on hosts, ratios of runs made `once`, and arms that were one."""
    hosts = [run for run in runs if run.summary and run.summary["peak_memory_gib"]["kind"] == "host_resident"]
    several = [(labels[run.path], run.summary["contention_s"]) for run in hosts if run.summary and run.world_size != 1]
    blind = ", ".join(label for label, contention in several if contention is None)
    unmeasured = f" contention_s was not measured in {blind}." if blind else ""
    host = [HOST_NOTE + unmeasured] * bool(several)
    return host + [ONE_RUN_NOTE] * once + arms_with_one_transport(runs)


def _members(runs: Sequence[Run], labels: dict[Path, str], wide: bool) -> str:
    """Name the runs by their numbers, and where there is room the first of them by its id too."""
    names = [labels[run.path] for run in runs]
    return " ".join([names[0], runs[0].run_id, *names[1:]] if wide and runs else names)


def namer(runs: Sequence[Run]) -> Callable[[Run], str]:
    """Give the run's id, or its path where two machines gave the same id."""
    ids = [run.run_id for run in runs]
    return lambda run: run.run_id if ids.count(run.run_id) == 1 else relative(run.path)


def relative(path: Path) -> str:
    """Write a path from the current folder where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
