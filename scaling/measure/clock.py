"""The only module that reads clocks and waits for devices."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks step boundaries without waiting for the device; their distance is read once it has passed them.

    `contiguous` blocks share their boundary: the device runs on while the host works. Where it is False the
    host is the device, and every block has a start mark of its own.
    """

    contiguous: bool

    def mark(self) -> Any:
        """A boundary after all work issued so far."""
        ...

    def wait(self, mark: Any) -> None:
        """Block the host until the device has passed `mark`; work issued after it goes on."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether the device has passed `mark`; does not wait."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """From one passed mark to another."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        ...


class HostClock:
    """Compute is done when the call returns: a mark is the host's own time."""

    contiguous = False

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self, mark: float) -> None: ...

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None: ...


class DeviceClock:
    """Compute is queued: a mark is an event in the current stream of the device."""

    contiguous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.Event:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.Event) -> None:
        mark.synchronize()

    def passed(self, mark: torch.Event) -> bool:
        return bool(mark.query())

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3  # elapsed_time is in milliseconds

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._device)


def make_clock(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else DeviceClock(device)
