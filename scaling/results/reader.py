"""Run directories read back: what completed, what failed, and which files cannot be believed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from scaling.results.schema import complete, distrust

Status = Literal["complete", "failed", "incomplete"]

# Any of these makes a folder a run. A lone config.yaml does not: configurations of other programs have that name too.
MARKS = ("summary.json", "error.json", "steps.jsonl", "environment.json")
RUN_NAME = re.compile(r".+-[0-9a-f]{8}-\d{2,}")  # <slug>-<digest8>-<nn>

NO_SETTINGS = ("command", "folder", "output_dir", "run_dir", "world_size")


@dataclass(frozen=True)
class Run:
    """One run directory. `summary` holds every field of the record; None: not completed, or not believable.

    `problem` names each file that was skipped, with the reason; `doubts` say why its numbers may stand in no ratio.
    """

    path: Path
    run_id: str
    status: Status
    summary: dict[str, Any] | None
    config: dict[str, Any]
    environment: dict[str, Any]
    error: dict[str, Any] | None
    problem: str | None
    doubts: tuple[str, ...] = ()
    steps_digest: str | None = None

    @property
    def readable(self) -> bool:
        """Whether there is a row to show; a completed run without a believable summary has none."""
        return self.status != "complete" or self.summary is not None

    @property
    def settings(self) -> dict[str, Any]:
        """The config with dotted keys; what was started and where it lies is no setting."""
        return {key: value for key, value in _flat(self.config) if key not in NO_SETTINGS}

    def group(self, name: str) -> dict[str, Any]:
        """Give a group of the config, empty where it was not recorded."""
        return as_dict(self.config.get(name))

    @property
    def model(self) -> str:
        """Of the summary, else of the config; "?" where neither was recorded."""
        return self._head("model", self.group("model").get("name"))

    @property
    def strategy(self) -> str:
        """Of the summary, else of the config; "?" where neither was recorded."""
        return self._head("strategy", self.group("strategy").get("name"))

    @property
    def world_size(self) -> int | None:
        """Ranks of the job; of a run without a summary, as many as were started."""
        return self._count(
            "world_size", self.config.get("world_size") or len(as_list(self.environment.get("devices"))) or None
        )

    @property
    def micro_batch_size(self) -> int | None:
        """Samples per rank per micro-step."""
        return self._count("micro_batch_size", self.group("batch").get("micro_batch_size"))

    @property
    def accumulation_steps(self) -> int | None:
        """Micro-batches per optimizer step."""
        return self._count("accumulation_steps", self.group("batch").get("accumulation_steps"))

    @property
    def global_batch_size(self) -> int | None:
        """Samples per optimizer step, over all ranks."""
        return self._count("global_batch_size", self.group("batch").get("global_batch_size"))

    def _head(self, key: str, otherwise: Any) -> str:
        value = self.summary[key] if self.summary else otherwise
        return str(value) if value is not None else "?"

    def _count(self, key: str, otherwise: Any) -> int | None:
        value = self.summary[key] if self.summary else otherwise
        return value if isinstance(value, int) else None


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def as_dict(value: object) -> dict[str, Any]:
    """Give the value if it is a mapping, else an empty one: files of strangers hold anything."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Give the value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read all runs at or below the paths, each once, by model, strategy (baselines first), world size and batch.

    Raises ValueError in one line for a path that holds none.
    """
    return _without_copies(sorted((read_run(folder) for folder in find_runs(paths)), key=_place))


def _without_copies(runs: list[Run]) -> list[Run]:
    """Doubt every run whose steps are, to the byte, those of one before it: a copied folder is no repeat."""
    first: dict[str, Run] = {}
    kept = []
    for run in runs:
        original = first.setdefault(run.steps_digest, run) if run.steps_digest else run
        copied = f"a copy of {original.run_id} in {original.path.parent}"
        kept.append(run if original is run else replace(run, doubts=(*run.doubts, copied)))
    return kept


def _place(run: Run) -> tuple[Any, ...]:
    strategy = {"single": 0, "ddp": 1}.get(run.strategy, 2), run.strategy
    batch = run.global_batch_size or 0, run.micro_batch_size or 0
    return run.model, strategy, run.world_size or 0, batch, run.run_id, run.path


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Find the run directories at or below the paths, in order of first mention. Raises ValueError."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: no such folder")
        if not path.is_dir():
            raise ValueError(f"{path}: is a file; name the run's folder, or a folder of runs")
        below = _below(path.resolve())
        if not below:
            raise ValueError(f"{path}: holds no run (a run's folder holds one of {', '.join(MARKS)})")
        found |= dict.fromkeys(below)
    return list(found)


def is_run(folder: Path) -> bool:
    """Whether this folder is a run's own."""
    if any((folder / mark).exists() for mark in MARKS):
        return True
    return (folder / "config.yaml").exists() and RUN_NAME.fullmatch(folder.name) is not None


def _below(top: Path) -> list[Path]:
    runs = []
    for folder, folders, _ in os.walk(top):
        folders.sort()
        if is_run(Path(folder)):
            runs.append(Path(folder))
            folders.clear()  # the tracker's own files lie inside a run, and look like another
    return runs


def read_run(path: Path) -> Run:
    """Read one run directory; a file that is truncated, foreign or too new is skipped and named in `problem`."""
    problems: list[str] = []
    config = as_dict(_load(path / "config.yaml", problems))
    environment = as_dict(_load(path / "environment.json", problems))
    error = _load(path / "error.json", problems)
    summary = _load(path / "summary.json", problems)
    if summary is not None and (reason := distrust(summary)):
        problems.append(f"summary.json: {reason}")
        summary = None
    elif summary is not None:
        summary = complete(summary)
    status: Status = "incomplete"
    if (path / "summary.json").exists():
        status = "complete"
    elif (path / "error.json").exists():
        status = "failed"
    run_id = path.name if summary is None else summary["run_id"]
    doubts, digest = ((), None) if summary is None else _check_steps(path / "steps.jsonl", summary)
    problem = "; ".join(problems) or None
    return Run(path, run_id, status, summary, config, environment, error, problem, doubts, digest)


def _check_steps(path: Path, summary: dict[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """Compare the summary with what its steps add up to; (reasons for doubt, digest of the steps)."""
    try:
        content = path.read_bytes()
        steps = [step for step in map(json.loads, content.splitlines()) if not step["warmup"]]
        per_rank = [sum(seconds) for seconds in zip(*(step["seconds"] for step in steps), strict=True)]
        samples = sum(step["samples"] for step in steps)
    except (OSError, ValueError, KeyError, TypeError):
        return ("no readable steps.jsonl",), None
    window = max(per_rank, default=0.0)
    from_steps = {
        "measured_steps": len(steps),
        "world_size": len(per_rank),
        "window_s": window,
        "samples_per_s": samples / window if window else 0.0,
    }
    doubts = tuple(
        f"{name} is {summary[name]:g}, but its steps give {value:g}"
        for name, value in from_steps.items()
        if not math.isclose(summary[name], value, rel_tol=1e-6)
    )
    return doubts, hashlib.sha256(content).hexdigest()


def _load(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """Read the mapping in a JSON or YAML file; None where there is none, with the reason added to `problems`."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
        json.dumps(content, default=str)  # an alias may make YAML hold itself
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror}")
        return None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        kind = "YAML" if path.suffix == ".yaml" else "JSON"
        problems.append(f"{path.name}: not {kind}, truncated? ({' '.join(str(error).split())})")
        return None
    if not isinstance(content, dict):
        problems.append(f"{path.name}: holds no mapping, so it is not ours")
        return None
    return content
