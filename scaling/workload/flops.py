"""FLOPs of the model and of the hardware, counted and not assumed."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from scaling.config import ModelConfig
from scaling.workload import build
from scaling.workload.checkpointing import checkpoint_blocks


def count_flops(model: ModelConfig, samples: int, *, checkpointing: bool = False) -> int | None:
    """FLOPs of forward and backward of so many samples, 2 per multiply-add, counted on the meta device.

    With `checkpointing` what the device really does, recomputation included. None for a model that does not run there;
    a user's own may not. Operators that the counter does not know count nothing: it knows products and convolutions.
    """
    try:
        workload = build(model, "meta", seed=0)
        if checkpointing:
            checkpoint_blocks(workload)
        made = workload.synthetic(samples, torch.Generator(device="cpu"))
        tensors = {name: tensor.to("meta") for name, tensor in made.items()}
        with FlopCounterMode(display=False) as counter:
            workload.loss(workload.module, tensors)[0].backward()
    except Exception:  # of a user's code on tensors without values anything may come
        return None
    return int(counter.get_total_flops()) or None
