"""How a workload is trained. Everything that strategies do differently hides behind two methods."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from scaling.config import DDPConfig, OptimizerConfig, SingleConfig, TrainConfig
from scaling.engine.precision import Precision
from scaling.workload import Batch, Workload

# Devices with fused optimizer kernels: torch.optim.AdamW, argument `fused`.
FUSED = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


class Engine(Protocol):
    """Trains a workload: `accumulate` once per micro-batch, `last` on the one that completes the step; then `step`.

    `module` is the model without any wrapper, for checks; `skipped` counts the steps that loss scaling left out (a
    device tensor or a number, read after the window).
    """

    module: nn.Module
    gather_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    skipped: Tensor | int

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        """Forward and backward of one micro-batch; its share of the step's loss, detached, on the device."""
        ...

    def step(self) -> None:
        """Update the weights and clear the gradients."""
        ...


def make_optimizer(module: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW with torch's defaults, or plain SGD; fused where the device has it, which also reads nothing back."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    fused = device.type in FUSED or None
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, fused=fused)
    return torch.optim.AdamW(parameters, lr=config.lr, fused=fused)


def make_engine(config: TrainConfig, workload: Workload, device: torch.device, world_size: int) -> Engine:
    """The engine of `config.strategy`."""
    precision = Precision.of(config.precision, device)
    precision.apply()
    if config.compile:
        workload.module.compile()
    optimizer = make_optimizer(workload.module, config.optimizer, device)
    if isinstance(config.strategy, SingleConfig):
        from scaling.engine.single import SingleEngine

        return SingleEngine(workload, optimizer, precision, clip=config.optimizer.clip)
    assert isinstance(config.strategy, DDPConfig)
    from scaling.engine.ddp import DDPEngine, DeferredEngine

    kind = DDPEngine if config.strategy.overlap else DeferredEngine
    bucket_mb, clip = config.strategy.bucket_mb, config.optimizer.clip
    return kind(workload, optimizer, precision, world_size, bucket_mb=bucket_mb, clip=clip)
