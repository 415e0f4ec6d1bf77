"""A table before it is laid out, and the cells that name a measured point in every table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scaling.analysis.strategies import label
from scaling.reporting.columns import STRATEGY_WORDS, batch, text
from scaling.results.reader import Run


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
class Names:
    """How runs are named: by their numbers, and where there is room (`wide`) the first of several by its id too."""

    labels: dict[Path, str]
    wide: bool

    def of(self, runs: Sequence[Run]) -> str:
        """Name the runs of a point."""
        names = [self.labels[run.path] for run in runs]
        return " ".join([names[0], runs[0].run_id, *names[1:]] if self.wide and runs else names)


def point_headings() -> list[Heading]:
    names = [("run", 7), ("model", 10), ("strategy", STRATEGY_WORDS), ("N", 0), ("micro x acc\n(global)", 0)]
    return [Heading(name, words) for name, words in names]


def point_cells(runs: Sequence[Run], names: Names) -> list[str]:
    run = runs[0]
    return [names.of(runs), run.model, label(run), text(run.world_size), batch(run)]
