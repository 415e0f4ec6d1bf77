"""A measurement that a user starts and that completes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from scaling.results.store import read_steps


class Ran:
    """A completed run: what it printed, and its record."""

    def __init__(self, done: subprocess.CompletedProcess[str], output_dir: Path) -> None:
        assert done.returncode == 0, done.stderr
        self.done = done
        self.path = Path(done.stdout.splitlines()[-1])
        assert self.path.parent == output_dir
        self.summary: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        self.environment: dict[str, Any] = json.loads((self.path / "environment.json").read_text())
        self.steps = read_steps(self.path)


def start(nproc: int, output_dir: Path, *overrides: str, cwd: Path | None = None) -> Ran:
    """torchrun with so many processes, or plain python for 0."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={nproc}", "-m", "scaling.train"]
    if nproc == 0:
        command = [sys.executable, "-m", "scaling.train"]
    words = [*command, *overrides, f"output_dir={output_dir}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False, cwd=cwd)
    return Ran(done, output_dir)
