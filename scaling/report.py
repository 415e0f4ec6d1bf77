"""`python -m scaling.report PATH...`: the runs below the paths as tables and files, from their records alone."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from scaling.reporting.files import write_files
from scaling.reporting.terminal import print_report
from scaling.results.reader import read_runs

EPILOG = """\
One row per run, failed and unfinished ones included; then strategies side by side, where several trained the same;
weak scaling (work per device fixed) and strong scaling (global batch fixed), against `single` and against the same
strategy on one device; what the loader costs, of runs on real data that have a run on synthetic data beside them; what
a step sends, and what memory is held for. Where runs are not comparable there is no ratio, and the reason. In a pipe
or a file a row is one line.

With --output the same tables are in report.md, and the numbers behind them, in the units of the records, in runs.csv,
scaling.csv, loader.csv and strategies.csv. Files of these names that an earlier report wrote are replaced, others
never.

  python -m scaling.report runs
  python -m scaling.report runs --output report
  python -m scaling.report runs/gpt_tiny-ddp-0a1b2c3d-01 other-machine/runs
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report, and write it where asked to. Returns 0, or 2 after one line on stderr.

    A mistake is a path that holds no readable run, and a folder that may not be written to.
    """
    arguments = _parser().parse_args(argv)
    try:
        runs = read_runs(arguments.paths)
        if not any(run.readable for run in runs):
            raise ValueError("; ".join(f"{run.path}: {run.problem}" for run in runs))
        written = None if arguments.output is None else write_files(runs, arguments.output)
    except ValueError as mistake:
        print(f"scaling.report: error: {mistake}", file=sys.stderr)
        return 2
    try:
        print_report(runs, sys.stdout)
        if written is not None:
            print(f"\n{written}")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scaling.report",
        description="How the measured runs scale, and which of them can be compared.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", type=Path, help="a run's folder, or a folder of runs at any depth"
    )
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="also write the report there; made if missing")
    return parser


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that has no "±" gets "?"
    sys.exit(main())
