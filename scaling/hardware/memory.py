"""Peak memory of this process over a window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scaling.results.record import Memory

GIB = 2**30
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> bool:
    """Start a new high-water mark; False where the system has none to reset."""
    if device.type != "cpu":
        reset = _function(device, "reset_peak_memory_stats")
        if reset is not None:
            reset(device)
        return reset is not None
    try:
        CLEAR_REFS.write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return False
    return True


def forget_setup(device: torch.device) -> None:
    """Give back what the allocator holds since set-up, so that `reserved` is what training needs."""
    if device.type != "cpu" and (empty := _function(device, "empty_cache")) is not None:
        empty()


def read_peak(device: torch.device, was_reset: bool) -> Memory:
    """GiB since `reset_peak`: what torch's allocator handed out and held, or a host process's resident set."""
    if device.type != "cpu":
        read = [_function(device, f"max_memory_{what}") if was_reset else None for what in ("allocated", "reserved")]
        allocated, reserved = (None if peak is None else peak(device) / GIB for peak in read)
        return Memory(allocated, reserved, "device")
    lines = STATUS.read_text().splitlines() if was_reset and STATUS.exists() else []
    peaks_gib = [int(line.split()[1]) * 1024 / GIB for line in lines if line.startswith("VmHWM:")]
    return Memory(peaks_gib[0] if peaks_gib else None, None, "host_resident")


def allocated(device: torch.device) -> int | None:
    """Bytes that the device's allocator has handed out now; None where it does not tell, as on hosts."""
    read = None if device.type == "cpu" else _function(device, "memory_allocated")
    return None if read is None else int(read(device))


def _function(device: torch.device, name: str) -> Callable[..., Any] | None:
    """A function of `torch.cuda` or its like, None where the backend lacks it.

    `torch.accelerator` has them too, but asserts for allocators that are not registered with it, such as Ascend's.
    """
    return getattr(torch.get_device_module(device), name, None)


def largest(peaks: list[Memory]) -> Memory:
    """Field by field the largest over ranks."""

    def over_ranks(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return max(known) if len(known) == len(values) else None

    return Memory(over_ranks([p.allocated for p in peaks]), over_ranks([p.reserved for p in peaks]), peaks[0].kind)
