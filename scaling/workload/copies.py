"""Micro-batches from host memory to the device, copied while the one before is trained on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scaling.workload import Tensors


def on_device(batches: Iterator[Tensors], device: torch.device) -> Iterator[Tensors]:
    """The same micro-batches on `device`. The next one is always on its way when one is handed out.

    Copies run in a stream of their own, from pinned memory; a host needs none. Endless iterators only.
    """
    if device.type == "cpu":
        yield from batches
        return
    stream = torch.Stream(device)
    coming = _copy(next(batches), device, stream)
    while True:
        ready, coming = coming, _copy(next(batches), device, stream)
        current = torch.accelerator.current_stream(device)
        current.wait_event(ready[1])
        for tensor in ready[0].values():
            tensor.record_stream(current)  # or the allocator would hand its memory to the next copy too early
        yield ready[0]


def _copy(tensors: Tensors, device: torch.device, stream: torch.Stream) -> tuple[dict[str, Tensor], torch.Event]:
    with stream:
        copies = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return copies, stream.record_event()
