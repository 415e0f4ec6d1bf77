"""The device of a rank, and its name."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def local_device(request: str, rank: int, local_rank: int) -> torch.device:
    """The device of this rank: `auto`, `cpu` or an accelerator type; the index is LOCAL_RANK."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kinds = ["cpu"] + ([accelerator.type] if accelerator else [])
    if request == "auto":
        request = kinds[-1]
    if request not in kinds:
        why = "; the index comes from LOCAL_RANK" if ":" in request else ""
        raise ValueError(f"device={request}: not on this host{why}; there is: auto, {', '.join(kinds)}")
    if request == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ValueError(
            f"rank {rank} needs {request}:{local_rank}, but {platform.node()} shows {count} "
            f"{request} device(s); start at most {count} processes here (--nproc_per_node={count})"
        )
    return torch.device(request, local_rank)


def device_name(device: torch.device) -> str:
    """The name as the driver prints it; for a host, the processor's."""
    if device.type == "cpu":
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return names[0] if names else platform.processor() or platform.machine()
    module = torch.get_device_module(device)
    return str(module.get_device_name(device))
