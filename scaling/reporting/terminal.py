"""The tables on the terminal: one row per run, then weak and strong scaling apart."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scaling.analysis.comparable import arms_with_one_transport
from scaling.analysis.efficiency import Kind, Ratio, Row, scaling_rows
from scaling.reporting.columns import REST, SPEED, Column, batch, number, percent, text
from scaling.results.reader import Run

NARROWEST = 100  # a narrower terminal wraps the lines; no number is cut
ONE_TABLE = 220  # from this width on all columns of a run fit side by side
PIPED = 10_000  # a file and a filter have no edge to fold at

TITLES: dict[Kind | None, str] = {
    "weak": "Weak scaling: work per device fixed; efficiency E(N) = X(N) / (N x X(1)), X in samples/s",
    "strong": "Strong scaling: global batch fixed; S(N) = T(1) / T(N) of the step time, efficiency S(N) / N",
    None: "In no scaling table",
}
HOST_NOTE = (
    "On a host without accelerators busy ranks slow each other even with a core each: "
    "an efficiency there holds this contention beside the communication."
)


def print_report(runs: Sequence[Run], stream: TextIO) -> None:
    """Print the tables of all runs; in colour, and folded to its width, only where the stream is a terminal."""
    terminal = stream.isatty()
    width = max(Console(file=stream).width, NARROWEST) if terminal else PIPED
    report = render(runs, width, colour=terminal)
    stream.write(report if terminal else "".join(f"{line.rstrip()}\n" for line in report.splitlines()))


def render(runs: Sequence[Run], width: int, *, colour: bool) -> str:
    """Lay the whole report out as text of at most `width` columns."""
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="auto" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    shown = [run for run in runs if run.readable]
    labels = {run.path: f"#{number}" for number, run in enumerate(shown, start=1)}
    with console.capture() as capture:
        _print_runs(console, shown, labels)
        rows = scaling_rows(shown)
        for kind in ("weak", "strong", None):
            _print_scaling(console, kind, [row for row in rows if row.kind == kind], labels)
        for note in notes(shown, labels):
            console.print(Text(f"Note: {note}"))
        for run in runs:
            if not run.readable:
                console.print(Text(f"Skipped: {_relative(run.path)}: {run.problem}"))
    return capture.get()


def _print_runs(console: Console, runs: Sequence[Run], labels: dict[Path, str]) -> None:
    """Print one table of all columns where they fit, else the speeds and then the rest, each with a row per run."""
    number = Column("#", lambda run: labels[run.path])
    name = Column("run", _name(runs), words=22)
    if console.width >= ONE_TABLE:
        _print_table(console, "Runs", [number, name, *SPEED, *REST], runs)
    else:
        _print_table(console, "Runs: speed", [number, *SPEED], runs)
        _print_table(console, "Runs: memory, waiting, flags", [number, name, *REST], runs)


def _print_table(console: Console, title: str, columns: Iterable[Column], runs: Sequence[Run]) -> None:
    kept = [(column, [column.cell(run) for run in runs]) for column in columns]
    kept = [(column, cells) for column, cells in kept if not column.optional or any(cells)]
    styles = [{"failed": "red", "incomplete": "yellow"}.get(run.status, "") for run in runs]
    headers = [(column.header, column.words) for column, _ in kept]
    _print_rows(console, title, headers, list(zip(*(cells for _, cells in kept), strict=True)), styles)


def _print_scaling(console: Console, kind: Kind | None, rows: Sequence[Row], labels: dict[Path, str]) -> None:
    headers = [("run", 7), ("model", 10), ("strategy", 8), ("N", 0), ("micro x acc\n(global)", 0), ("baseline", 10)]
    headers += [*[("speed-up", 0)] * (kind == "strong"), ("efficiency", 20)]
    wide, table = console.width >= ONE_TABLE, []
    for row in rows:
        run = row.runs[0]
        cells = [_members(row.runs, labels, wide), run.model, run.strategy, text(run.world_size), batch(run)]
        cells.append(f"{row.against} {_members(row.baseline, labels, wide)}".strip())
        if kind == "strong":
            cells.append("" if row.speedup is None else f"{row.speedup.value:.2f}{_ends(row.speedup, '.2f')}")
        table.append((*cells, verdict(row)))
    if rows:
        _print_rows(console, TITLES[kind], headers, table, [""] * len(rows))


def _print_rows(
    console: Console,
    title: str,
    headers: Sequence[tuple[str, int]],
    rows: Sequence[tuple[str, ...]],
    styles: Sequence[str],
) -> None:
    """Print a table under its title. Numbers (words 0) keep their width; columns of words share what is left over."""
    names = [name if console.width < PIPED else name.replace("\n/", "/").replace("\n", " ") for name, _ in headers]
    longest = [
        max(len(line) for cell in (name, *cells) for line in cell.splitlines() or [""])
        for name, *cells in zip(names, *rows, strict=True)
    ]
    widths = [min(most, words or most) for most, (_, words) in zip(longest, headers, strict=True)]
    spare = console.width - sum(widths) - 2 * (len(widths) - 1)
    for place, most in enumerate(longest):  # from the left: names first, prose last
        more = max(0, min(most - widths[place], spare))
        widths[place], spare = widths[place] + more, spare - more
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name, width, (_, words) in zip(names, widths, headers, strict=True):
        table.add_column(name, justify="left" if words else "right", width=width, overflow="fold")
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*row, style=style)
    console.print(Text(title, style="bold underline"))
    console.print(table, width=max(console.width, sum(widths) + 2 * len(widths)), crop=False, no_wrap=False)
    console.print()


def verdict(row: Row) -> str:
    """Give the efficiency with its interval or range, or why there is none, and what has to be said beside it."""
    if row.impossible and row.efficiency is not None:
        said = [f"no verdict: {'; '.join(row.reasons)}", f"raw {_efficiency(row.efficiency)}"]
    elif row.efficiency is None:
        said = [f"no ratio: {'; '.join(row.reasons)}"]
    else:
        said = [_efficiency(row.efficiency)]
    flags = dict.fromkeys(flag for run in (*row.runs, *row.baseline) if run.summary for flag in run.summary["flags"])
    contention = [
        run.summary["contention_s"] for run in row.runs if run.summary and run.summary["contention_s"] is not None
    ]
    if contention:
        said.append(f"contention {', '.join(number(1e3 * seconds) for seconds in contention)} ms")
    if flags and row.efficiency is not None:
        said.append(f"flags: {', '.join(flags)}")
    return "; ".join([*said, *row.remarks])


def _efficiency(ratio: Ratio) -> str:
    repeats = f"n={ratio.runs}" if ratio.runs == ratio.baselines else f"n={ratio.runs} against {ratio.baselines}"
    basis = {"ci95": "95 % interval", "t95": "95 % t-interval", "range": "range", None: "no interval"}[ratio.basis]
    return f"{percent(ratio.value)}{_ends(ratio.scaled(100), '.1f')} {basis}, {repeats}"


def _ends(ratio: Ratio, form: str) -> str:
    return "" if ratio.low is None or ratio.high is None else f" [{ratio.low:{form}}, {ratio.high:{form}}]"


def notes(runs: Sequence[Run], labels: dict[Path, str]) -> list[str]:
    """Say what holds for several rows: contention on hosts, and arms that were one."""
    hosts = [run for run in runs if run.summary and run.summary["peak_memory_gib"]["kind"] == "host_resident"]
    several = [(labels[run.path], run.summary["contention_s"]) for run in hosts if run.summary and run.world_size != 1]
    blind = ", ".join(label for label, contention in several if contention is None)
    unmeasured = f" contention_s was not measured in {blind}." if blind else ""
    return [HOST_NOTE + unmeasured] * bool(hosts) + arms_with_one_transport(runs)


def _members(runs: Sequence[Run], labels: dict[Path, str], wide: bool) -> str:
    """Name the runs by their numbers, and where there is room the first of them by its id too."""
    names = [labels[run.path] for run in runs]
    return " ".join([names[0], runs[0].run_id, *names[1:]] if wide and runs else names)


def _name(runs: Sequence[Run]) -> Callable[[Run], str]:
    """Give the run's id, or its path where two machines gave the same id."""
    ids = [run.run_id for run in runs]
    return lambda run: run.run_id if ids.count(run.run_id) == 1 else _relative(run.path)


def _relative(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
