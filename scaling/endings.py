"""How a run ends when it does not end well: signals, ranks that are gone, and `error.json`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from scaling.ranks import Member
from scaling.results.store import write_error

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # Linux, prctl(2)
GRACE_S = 3.0  # a killed rank's sockets close before its process is gone
LAST_WORDS_S = 10  # for error.json and open output; a reader that is gone or a lock that is held ends them


class Watcher:
    """Takes the signals that end a run on a thread: no Python handler interrupts a main thread inside a collective.

    A wake-up file descriptor is written by the C handler in whatever thread the signal reaches, so that
    threads which libraries started earlier need no signal mask.
    """

    def __init__(self) -> None:
        self.run_dir: Path | None = None
        self.members: list[Member] = []
        self.rank = 0
        self.on_exit: Callable[[], None] = lambda: None
        self._signalled = False
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def start(self, *, follow_parent: bool) -> None:
        """Take the signals from here on; with `follow_parent` the launcher's death is a SIGTERM too (Linux)."""
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and shells' background jobs
                signal.signal(number, self._leave_to_thread)
        os.register_at_fork(after_in_child=_forget_signals)
        if follow_parent and sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        self._thread.start()

    def _leave_to_thread(self, number: int, frame: FrameType | None) -> None:
        """The wake-up byte makes the thread act; it only comes while a handler is installed."""
        self._signalled = True

    def _watch(self) -> None:
        number = os.read(self._read, 1)[0]
        while number not in SIGNALS:
            number = os.read(self._read, 1)[0]
        try:
            signal.alarm(LAST_WORDS_S)
            if self.run_dir is not None:
                gone, name = self.gone(), signal.Signals(number).name
                kind, message = ("killed", _say_gone(gone)) if gone else ("terminated", f"ended by {name}")
                if write_error(self.run_dir, kind, gone[0] if gone else self.rank, message):
                    self.on_exit()
                    print(f"scaling.train: {kind}: {message}; recorded in {self.run_dir}", file=sys.stderr)
        finally:
            leave(128 + number, self.on_exit)

    def gone(self) -> list[int]:
        """Ranks of this host whose process has ended; of other hosts nothing is known."""
        me = self.members[self.rank] if self.members else None
        return [
            member.rank
            for member in self.members
            if me and (member.host, member.pid_namespace) == (me.host, me.pid_namespace) and not _alive(member)
        ]

    def fail(self, error: BaseException) -> NoReturn:
        """Record the failure, print it, and leave. For the main thread."""
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.failed(error)
            self.on_exit()
            sys.excepthook(type(error), error, error.__traceback__)
        except RuntimeError:  # a loader worker has died: torch's SIGCHLD handler raises wherever the main thread is
            self.fail(error)
        finally:
            leave(1)

    def failed(self, error: BaseException) -> None:
        """Record why this rank cannot go on; a broken connection is the fault of the rank that is gone."""
        if self._signalled:  # whatever broke, broke because this process and its workers were told to end
            self._thread.join()
        kind, message = classify(error), str(error)
        gone: list[int] = []
        if kind == "other" and len(self.members) > 1 and _lost_a_peer(error):
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
    return f"{ranks} ended without a word (killed from outside, out of host memory, or crashed)"


def _forget_signals() -> None:
    """A forked loader worker dies of its own signals and does not wake its parent's watcher."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _alive(member: Member) -> bool:
    try:
        process = psutil.Process(member.pid)
        return bool(process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - member.started) < 1.0)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def classify(error: BaseException) -> str:
    """The `kind` of `error.json` for an exception of the training."""
    import torch

    text = str(error).lower()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return "oom"
    if "dataloader worker" in text and ("killed by signal" in text or "exited unexpectedly" in text):
        return "killed"  # of one signal torch says either, as it happens
    if isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text:
        return "timeout"
    return "other"  # a ValueError too: a mistake of the user's is a Refused and never comes here


def _lost_a_peer(error: BaseException) -> bool:
    """Whether it may be a collective or a store that broke because another rank's process has ended."""
    from torch.distributed import DistError

    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "broken pipe", "socket")
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and any(word in text for word in words))


def leave(code: int, on_exit: Callable[[], None] = lambda: None) -> NoReturn:
    """End this process and its children now; a process group with a dead peer would hold a normal exit up."""
    try:
        signal.alarm(LAST_WORDS_S)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        on_exit()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
