"""Model FLOPs, counted and not assumed."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from scaling.config import ModelConfig
from scaling.workload import build


def flops_per_sample(model: ModelConfig) -> int:
    """FLOPs of one sample's forward and backward, no recomputation, 2 per multiply-add; counted on the meta device."""
    workload = build(model, "meta", seed=0)
    generator = torch.Generator(device="cpu")
    tensors = {name: tensor.to("meta") for name, tensor in workload.synthetic(1, generator).items()}
    with FlopCounterMode(display=False) as counter:
        workload.loss(workload.module, tensors)[0].backward()
    return int(counter.get_total_flops())
