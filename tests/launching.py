"""Start the real commands the way people do, watch their processes, and see that none is left.

`Launched` is torchrun or plain python in a session of its own. `forked` is the same entry point in a process forked
from a server that has the imports done: half a second instead of four, for the many cases that need no launcher;
`forked_ranks` sets the variables that a launcher would.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

# A suite in the background of a script inherits an ignored SIGINT, and so would every process that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

BIN = Path(sys.executable).parent
TESTS = Path(__file__).resolve().parent
MARKER = "SCALING_TEST_LAUNCH"
# A run of about a hundredth of a second: one layer, 16 positions, 5 steps.
SMALL = (
    "model=gpt_tiny",
    "model.args.layers=1",
    "model.sequence_length=16",
    "measure.warmup_steps=1",
    "measure.max_steps=5",
)
# The same, but it goes on until something ends it, and says when it trains: see faulty_model.py.
ENDLESS = (*SMALL[:-1], "measure.max_seconds=1000", "measure.target_ci=1e-9", "model.target=faulty_model:faulty")
WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SERVER_IMPORTS = ["scaling.command", "scaling.endings", "scaling.measurement", "scaling.reporting.run_table"]


@dataclass(frozen=True)
class Ended:
    """How a process, or a launch with all its ranks, ended."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def errors(self) -> list[str]:
        """The lines in which our process says what the user did wrong."""
        return [line for line in self.stderr.splitlines() if line.startswith("scaling.train: error:")]

    @property
    def run_dirs(self) -> list[Path]:
        return run_dirs(self.folder)

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def run_dirs(folder: Path) -> list[Path]:
    """The run directories in the default `output_dir` of a command that was started in `folder`."""
    return sorted((folder / "runs").glob("*"))


def read_error(run_dir: Path) -> dict[str, Any]:
    """`error.json`, which never stands beside `summary.json`; no temporary file may be left either."""
    names = {path.name for path in run_dir.iterdir()}
    assert "error.json" in names, names
    assert "summary.json" not in names
    assert not [name for name in names if name.startswith(".")]
    content: dict[str, Any] = json.loads((run_dir / "error.json").read_text())
    return content


def eventually(condition: Callable[[], Any], within_s: float, what: str) -> Any:
    """The first true value of `condition`; fails the test after `within_s`."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)
    return value


def until_training(folder: Path, runs: Callable[[], Any], limit_s: float = 60.0) -> Path:
    """Wait until rank 0 of an `ENDLESS` run started in `folder` is in its window; the run directory."""

    def training() -> bool:
        assert (still := runs()) is True, f"ended before it trained\n{still}"
        return (folder / "training-0").exists()

    eventually(training, limit_s, "training")
    (run_dir,) = run_dirs(folder)
    return run_dir


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment without a world of its own, with this checkout and its tests/ importable.

    A variable that is None is taken out.
    """
    env = {name: value for name, value in os.environ.items() if name not in WORLD and not name.startswith("HYDRA_")}
    env |= {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "COLUMNS": "200"}
    for name, value in changes.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


class Launched:
    """One command line in a new session, in `folder`, with its output in files. Leaving the block kills all of it."""

    def __init__(self, command: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._output, self._errors = (folder.parent / f"{folder.name}.{self._mark[:8]}.{end}" for end in ("out", "err"))
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=(env or environment()) | {MARKER: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    @classmethod
    def torchrun(
        cls, ranks: int, arguments: Sequence[str], folder: Path, env: dict[str, str] | None = None
    ) -> Launched:
        """`torchrun --nproc_per_node=<ranks> -m scaling.train <arguments>`."""
        return cls([str(BIN / "torchrun"), f"--nproc_per_node={ranks}", "-m", "scaling.train", *arguments], folder, env)

    @classmethod
    def python(cls, arguments: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> Launched:
        """`python -m scaling.train <arguments>`, a world of one."""
        return cls([sys.executable, "-m", "scaling.train", *arguments], folder, env)

    def __enter__(self) -> Launched:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _kill(self.alive())
        self.process.wait()

    @property
    def stderr(self) -> str:
        return self._errors.read_text()

    def wait(self, limit_s: float = 90.0) -> Ended:
        """The end of the launcher; fails with all output if it takes longer than `limit_s`."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s:g} s\n{self._ended(0)}") from None
        return self._ended(code)

    def _ended(self, code: int) -> Ended:
        return Ended(code, self._output.read_text(), self.stderr, self.folder)

    def alive(self) -> list[psutil.Process]:
        """Every living process that descends from this launch, wherever it moved: it carries our mark."""
        return [process for process in psutil.process_iter() if _variable(process, MARKER) == self._mark]

    def rank(self, number: int) -> psutil.Process:
        """The process of this rank; its loader workers have the same variables and are younger."""
        found = [process for process in self.alive() if _variable(process, "RANK") == str(number)]
        return min(found, key=lambda process: (process.create_time(), process.pid))

    def until_training(self, limit_s: float = 60.0) -> Path:
        """Wait until rank 0 of an `ENDLESS` run is in its window; the run directory."""
        return until_training(self.folder, lambda: self.process.poll() is None or self._ended(0), limit_s)

    def assert_nothing_left(self, within_s: float = 10.0) -> None:
        eventually(lambda: not self.alive(), within_s, f"{self.alive()} end")


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name) if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, OSError):
        return None


# The server is started by the first use and ends with this process.
fork_server = multiprocessing.get_context("forkserver")
fork_server.set_forkserver_preload(SERVER_IMPORTS)


class Forked:
    """`python -m <module> <arguments>` in a fork of a process that has imported it already."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, env: dict[str, str] | None = None, module: str = "scaling.train"
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        name = uuid.uuid4().hex[:8]
        self._output, self._errors = (folder.parent / f"{folder.name}.{name}.{end}" for end in ("out", "err"))
        self.process = fork_server.Process(
            target=_enter,
            args=(module, list(arguments), str(folder), env or environment(), (str(self._output), str(self._errors))),
            daemon=False,
        )
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def stderr(self) -> str:
        return self._errors.read_text() if self._errors.exists() else ""

    def __enter__(self) -> Forked:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """End it and its children, if they still run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            _kill(psutil.Process(self.pid).children(recursive=True))
        self.process.kill()
        self.process.join()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def until_training(self, limit_s: float = 60.0) -> Path:
        """Wait until rank 0 of an `ENDLESS` run is in its window; the run directory."""
        return until_training(self.folder, lambda: self.process.is_alive() or self._ended(0), limit_s)

    def wait(self, limit_s: float = 60.0) -> Ended:
        """How it ended; killed by signal n is -n."""
        self.process.join(limit_s)
        code = self.process.exitcode
        if code is None:
            self.kill()
            raise AssertionError(f"still running after {limit_s:g} s\n{self._ended(0)}")
        return self._ended(code)

    def _ended(self, code: int) -> Ended:
        return Ended(code, self._output.read_text() if self._output.exists() else "", self.stderr, self.folder)


def _enter(module: str, arguments: list[str], folder: str, env: dict[str, str], output: tuple[str, str]) -> None:
    """Become the command: its arguments, folder, environment and output; then its own entry point."""
    for number, path in enumerate(output, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    multiprocessing.set_start_method(None, force=True)  # the platform's own, as anywhere else
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def forked(arguments: Sequence[str], folder: Path, env: dict[str, str] | None = None, limit_s: float = 60.0) -> Ended:
    """One world of one, to its end."""
    with Forked(arguments, folder, env) as process:
        return process.wait(limit_s)


def rank_environment(rank: int, ranks: int, port: int, **changes: str | None) -> dict[str, str]:
    """What a launcher sets for one rank on this host; rank 0 hosts the store."""
    world = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return environment(**(world | changes))


@contextlib.contextmanager
def forked_ranks(arguments: Sequence[Sequence[str]], folder: Path, **changes: str | None) -> Iterator[list[Forked]]:
    """One rank per list of arguments, as if a launcher had started them. Leaving the block kills those still there."""
    port = free_port()
    ranks = [
        Forked(own, folder, rank_environment(rank, len(arguments), port, **changes))
        for rank, own in enumerate(arguments)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


def ended_together(ranks: Sequence[Forked], limit_s: float = 60.0) -> list[Ended]:
    """Do as launchers do: when the first rank has ended badly, SIGTERM the others; then how each ended."""
    deadline = time.monotonic() + limit_s
    while all(rank.process.exitcode in (None, 0) for rank in ranks) and time.monotonic() < deadline:
        if all(rank.process.exitcode == 0 for rank in ranks):
            break
        time.sleep(0.02)
    for rank in ranks:
        if rank.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                rank.signal(signal.SIGTERM)
    return [rank.wait(max(1.0, deadline - time.monotonic())) for rank in ranks]
