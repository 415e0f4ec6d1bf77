"""The report as files in a folder; nothing that an earlier report did not write is touched."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from scaling.reporting.markdown import HEADING, markdown
from scaling.reporting.sheets import (
    LOADER_COLUMNS,
    RUNS_HEAD,
    SCALING_COLUMNS,
    STRATEGY_COLUMNS,
    loader_sheet,
    runs_sheet,
    scaling_sheet,
    strategies_sheet,
)
from scaling.results.reader import Run, is_run

# How the first line of each file begins if a report wrote it: two columns tell ours from a table of somebody else's.
BEGINNINGS = {
    "report.md": HEADING,
    "runs.csv": ",".join(RUNS_HEAD[:2]),
    "scaling.csv": ",".join(SCALING_COLUMNS[:2]),
    "loader.csv": ",".join(LOADER_COLUMNS[:2]),
    "strategies.csv": ",".join(STRATEGY_COLUMNS[:2]),
}


def write_files(runs: Sequence[Run], folder: Path) -> str:
    """Write the report into the folder and say which files. Raises ValueError, and has then replaced none."""
    contents = {"report.md": markdown(runs), "runs.csv": runs_sheet(runs), "scaling.csv": scaling_sheet(runs)}
    for name, sheet in (("loader.csv", loader_sheet(runs)), ("strategies.csv", strategies_sheet(runs))):
        if sheet is not None:
            contents[name] = sheet
    try:
        _check(folder, contents)
        stale = [folder / name for name in BEGINNINGS if name not in contents and _ours(folder / name)]
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder, contents)
        for path in stale:  # an earlier report's, of rows that there are no more
            path.unlink()
    except OSError as error:
        raise ValueError(f"--output {folder}: cannot write there ({error.strerror})") from error
    removed = f"; removed {', '.join(path.name for path in stale)}, of an earlier report" if stale else ""
    return f"Written to {folder}: {', '.join(contents)}{removed}"


def _check(folder: Path, names: Mapping[str, str]) -> None:
    """Raise ValueError for a folder that is none or is a run's, and for a file that no report wrote."""
    for place in (folder.resolve(), *folder.resolve().parents):
        if is_run(place):
            raise ValueError(f"--output {folder}: {place} is a run's own folder; name another one")
    if not folder.exists() and not folder.is_symlink():
        if folder.suffix in (".md", ".csv", ".html", ".txt", ".json"):
            raise ValueError(f"--output {folder}: looks like a file; name the folder for {', '.join(names)}")
        return
    if not folder.is_dir():
        raise ValueError(f"--output {folder}: is no folder; name one, new or old")
    for name in names:
        path = folder / name
        if (path.exists() or path.is_symlink()) and not _ours(path):
            raise ValueError(
                f"--output {folder}: {name} there was not written by this report; move it, or name another"
            )


def _ours(path: Path) -> bool:
    """Whether a report wrote this file, by its first line."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        first = file.readline(1000).rstrip("\r\n")
    beginning = BEGINNINGS[path.name]
    return first == beginning or (path.suffix == ".csv" and first.startswith(f"{beginning},"))


def _replace(folder: Path, contents: Mapping[str, str]) -> None:
    """Write every file under another name first, so that a full disk leaves the old ones; then rename them."""
    written: dict[str, Path] = {}
    try:
        for name, content in contents.items():
            handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
            written[name] = Path(temporary)
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode(errors="replace"))  # a path may hold bytes that are no text
            Path(temporary).chmod(0o644)
        for name, path in written.items():
            path.replace(folder / name)
    finally:
        for path in written.values():
            path.unlink(missing_ok=True)
