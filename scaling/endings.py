"""How a run ends when it does not end well: signals, ranks that are gone, and `error.json`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil

from scaling.results.store import write_error
from scaling.world import Member

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG = 1  # Linux, prctl(2)
GRACE_S = 3.0  # a killed rank's sockets close before its process is gone


class Watcher:
    """Takes SIGTERM and SIGINT on a thread: the main thread may sit in a collective that no Python handler interrupts.

    A wake-up file descriptor is written by the C handler in whatever thread the signal reaches, so that
    threads which libraries started earlier need no signal mask.
    """

    def __init__(self) -> None:
        self.run_dir: Path | None = None
        self.members: list[Member] = []
        self.rank = 0
        self.on_exit: Callable[[], None] = lambda: None
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def start(self, *, follow_parent: bool) -> None:
        """Take the signals from here on; with `follow_parent` the launcher's death is a SIGTERM too (Linux)."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, _leave_to_watcher)
        os.register_at_fork(after_in_child=_forget_signals)
        if follow_parent and sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def _watch(self) -> None:
        number = os.read(self._read, 1)[0]
        while number not in SIGNALS:
            number = os.read(self._read, 1)[0]
        if self.run_dir is not None:
            gone = self.gone()
            name = signal.Signals(number).name
            kind = "killed" if gone else "terminated"
            write_error(
                self.run_dir, kind, gone[0] if gone else self.rank, _say_gone(gone) if gone else f"ended by {name}"
            )
        leave(128 + number, self.on_exit)

    def gone(self) -> list[int]:
        """Ranks of this host whose process has ended; of other hosts nothing is known."""
        me = self.members[self.rank] if self.members else None
        return [
            member.rank
            for member in self.members
            if me and (member.host, member.pid_namespace) == (me.host, me.pid_namespace) and not _alive(member)
        ]

    def failed(self, error: BaseException) -> None:
        """Record why this rank cannot go on; a broken connection is the fault of the rank that is gone."""
        kind, message = classify(error), str(error)
        gone: list[int] = []
        if kind == "other" and len(self.members) > 1 and isinstance(error, RuntimeError):
            deadline = time.monotonic() + GRACE_S
            while not (gone := self.gone()) and time.monotonic() < deadline:
                time.sleep(0.05)
        if gone:
            kind, message = "killed", f"{_say_gone(gone)}; rank {self.rank} then saw: {message}"
        if self.run_dir is not None:
            write_error(
                self.run_dir, kind, gone[0] if gone else self.rank, message, "".join(traceback.format_exception(error))
            )


def _say_gone(gone: list[int]) -> str:
    ranks = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}"
    return f"{ranks} ended without a word (killed from outside, or out of host memory)"


def _leave_to_watcher(number: int, frame: FrameType | None) -> None:
    """The thread acts on the wake-up byte; installing a handler is what makes the byte come."""


def _forget_signals() -> None:
    """A forked loader worker dies of its own signals and does not wake its parent's watcher."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _alive(member: Member) -> bool:
    try:
        process = psutil.Process(member.pid)
        return bool(process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - member.started) < 1.0)
    except psutil.NoSuchProcess:
        return False


def classify(error: BaseException) -> str:
    """The `kind` of `error.json` for an exception of the training."""
    import torch

    text = str(error).lower()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return "oom"
    if isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text:
        return "timeout"
    return "config" if isinstance(error, ValueError) else "other"


def leave(code: int, on_exit: Callable[[], None] = lambda: None) -> None:
    """End this process and its children now; a process group with a dead peer would hold a normal exit up."""
    on_exit()
    for child in psutil.Process().children(recursive=True):
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
