"""What a person sees while a measurement runs: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

EVERY_S = 5.0  # without a terminal


class Progress:
    """Writes to standard error. No thread and no timer: it only works when it is told something."""

    def __init__(self, stream: TextIO | None = None, *, enabled: bool = True) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._enabled = enabled
        self._last = -EVERY_S
        self._shown = 0

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._enabled:
            self.clear()
            print(text, file=self._stream, flush=True)

    def update(self, text: str) -> None:
        """The state of something long; replaces the one before it on a terminal."""
        if not self._enabled:
            return
        now = time.monotonic()
        if self._terminal:
            self._stream.write("\r" + text.ljust(self._shown))
            self._stream.flush()
            self._shown = len(text)
        elif now - self._last >= EVERY_S:
            self._last = now
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        """Take the changing line away."""
        if self._enabled and self._terminal and self._shown:
            self._stream.write("\r" + " " * self._shown + "\r")
            self._stream.flush()
            self._shown = 0
