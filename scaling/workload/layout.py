"""How images lie in memory: channels last where the device's convolutions are faster that way."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from scaling.workload import Tensors, Workload


def helps(device: torch.device, precision: str) -> bool:
    """Whether convolutions want channels last: on NVIDIA's tensor cores (cuDNN's own layout) and in oneDNN on hosts.

    Plain fp32 does not use tensor cores; MIOpen has to be asked for this layout, and others have their own.
    """
    return device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None and precision != "fp32")


def lay_out(
    workload: Workload, choice: bool | None, device: torch.device, precision: str, *, flat_weights: bool = False
) -> Workload:
    """The workload with images and weights laid out as `choice` says, None: where it helps; other models untouched.

    Strategies that put weights into flat buffers want them in their order (`flat_weights`); convolutions then follow
    the images.
    """
    if workload.image_size is None:
        if choice is not None:
            raise ValueError(f"model.channels_last={str(choice).lower()}: this model takes no images")
        return workload
    last = helps(device, precision) if choice is None else choice
    if last and not flat_weights:
        workload.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return replace(workload, channels_last=last)


def arrange(tensors: Tensors, workload: Workload) -> dict[str, Tensor]:
    """Images in the model's layout; no copy where they have it already."""
    if workload.channels_last is None:
        return dict(tensors)
    form = torch.channels_last if workload.channels_last else torch.contiguous_format
    return {name: t.contiguous(memory_format=form) if t.dim() == 4 else t for name, t in tensors.items()}
