"""Peak memory of this process over a window."""

from __future__ import annotations

from pathlib import Path

import torch

from scaling.results.record import Memory

GIB = 2**30
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> bool:
    """Start a new high-water mark; False where the system has none to reset."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text("5")  # proc(5): resets VmHWM
    except OSError:
        return False
    return True


def forget_setup(device: torch.device) -> None:
    """Give back what the allocator holds since set-up, so that `reserved` is what training needs."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def read_peak(device: torch.device, was_reset: bool) -> Memory:
    """GiB since `reset_peak`: what torch's allocator handed out and held, or a host process's resident set."""
    if device.type != "cpu":
        allocated = torch.accelerator.max_memory_allocated(device) / GIB
        reserved = torch.accelerator.max_memory_reserved(device) / GIB
        return Memory(allocated, reserved, "device")
    lines = STATUS.read_text().splitlines() if was_reset and STATUS.exists() else []
    peaks = [int(line.split()[1]) * 1024 / GIB for line in lines if line.startswith("VmHWM:")]
    return Memory(peaks[0] if peaks else None, None, "host_resident")


def largest(peaks: list[Memory]) -> Memory:
    """Field by field the largest over ranks."""

    def over_ranks(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return max(known) if len(known) == len(values) else None

    return Memory(over_ranks([p.allocated for p in peaks]), over_ranks([p.reserved for p in peaks]), peaks[0].kind)
