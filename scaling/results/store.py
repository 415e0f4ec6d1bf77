"""The run directory: rank 0 owns it, nothing in it is ever overwritten, and `summary.json` comes last."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from scaling.results.record import Step, Summary

_ONE_ERROR = threading.Lock()


def make_run_dir(output_dir: str, slug: str, digest: str, run_dir: str | None = None) -> Path:
    """Make `output_dir/<slug>-<digest>-<nn>` with the first free nn, or exactly `run_dir`. Raises ValueError."""
    try:
        if run_dir is not None:
            path = Path(run_dir)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            return path.resolve()
        parent = Path(output_dir)
        parent.mkdir(parents=True, exist_ok=True)
        number = 1
        slug = re.sub(r"[^\w.-]+", "-", slug)  # a model's name may hold anything
        while True:
            path = parent / f"{slug}-{digest}-{number:02d}"
            try:
                path.mkdir()  # atomic: two launches never share a folder
                return path.resolve()
            except FileExistsError:
                number += 1
    except FileExistsError as error:
        if run_dir is not None and Path(run_dir).is_dir():
            raise ValueError(
                f"run_dir={run_dir}: exists already, and no run is overwritten; name a new folder"
            ) from error
        raise ValueError(
            f"{_key(run_dir)}={run_dir or output_dir}: {error.filename} is a file, not a folder"
        ) from error
    except OSError as error:
        raise ValueError(f"{_key(run_dir)}={run_dir or output_dir}: cannot write there ({error.strerror})") from error


def _key(run_dir: str | None) -> str:
    return "output_dir" if run_dir is None else "run_dir"


def write_config(run_dir: Path, config: dict[str, Any], command: str, world_size: int) -> None:
    """`config.yaml`: the resolved config, the ranks, and the command that repeats the run in the folder named there."""
    started = {"world_size": world_size, "command": command, "folder": str(Path.cwd())}
    text = yaml.safe_dump(config | started, sort_keys=False, allow_unicode=True)
    _write(run_dir / "config.yaml", text)


def write_environment(run_dir: Path, environment: dict[str, Any]) -> None:
    _write(run_dir / "environment.json", json.dumps(environment, indent=2) + "\n")


def write_deepspeed(run_dir: Path, settings: dict[str, Any]) -> None:
    """`deepspeed.json`: the DeepSpeed config as it holds, of the form that `strategy.config` takes."""
    _write(run_dir / "deepspeed.json", json.dumps(settings, indent=2) + "\n")


def extend_environment(run_dir: Path, facts: dict[str, Any]) -> None:
    """Add what was only learnt while the run went on."""
    environment = json.loads((run_dir / "environment.json").read_text())
    write_environment(run_dir, environment | facts)


def write_steps(run_dir: Path, steps: Iterable[Step]) -> None:
    """`steps.jsonl`: one line per optimizer step, warm-up included."""
    _write(run_dir / "steps.jsonl", "".join(json.dumps(asdict(step), allow_nan=False) + "\n" for step in steps))


def read_steps(run_dir: Path) -> list[Step]:
    lines = (run_dir / "steps.jsonl").read_text().splitlines()
    return [Step(**json.loads(line)) for line in lines]


def write_summary(run_dir: Path, summary: Summary) -> None:
    """`summary.json`: its presence means that the run completed. Raises RuntimeError for one that ended already."""
    if (run_dir / "error.json").exists():
        raise RuntimeError(f"{run_dir}: this run has ended with an error.json and gets no summary")
    _write(run_dir / "summary.json", json.dumps(asdict(summary), indent=2, allow_nan=False) + "\n")
    (run_dir / "error.json").unlink(missing_ok=True)  # of a rank that was told to end in this very moment


def write_error(run_dir: Path, kind: str, rank: int, message: str, trace: str | None = None) -> bool:
    """`error.json`, by the first rank that gets there; False if another was first or the run had completed."""
    with _ONE_ERROR:  # the thread that is first ends the process, and shall not do so in the middle of another's file
        return _write_error(run_dir, kind, rank, message, trace)


def _write_error(run_dir: Path, kind: str, rank: int, message: str, trace: str | None) -> bool:
    if (run_dir / "summary.json").exists() or (run_dir / "error.json").exists():
        return False
    content = json.dumps({"kind": kind, "rank": rank, "message": message, "traceback": trace}, indent=2) + "\n"
    try:
        _write(run_dir / "error.json", content, replace=False)
    except OSError:  # another rank was first, or the folder is gone: there is nobody left to tell
        return False
    if (run_dir / "summary.json").exists():  # completed while this was written
        (run_dir / "error.json").unlink(missing_ok=True)
        return False
    return True


def _write(path: Path, text: str, *, replace: bool = True) -> None:
    """Write whole or not at all: a temporary file in the same folder, then a rename (or, exclusively, a link)."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        if replace:
            Path(temporary).replace(path)
        else:
            _link(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _link(temporary: str, path: Path) -> None:
    """Give the file its name unless the name is taken; where the file system has no hard links, write it there."""
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        raise
    except OSError:
        with path.open("x") as file:
            file.write(Path(temporary).read_text())
