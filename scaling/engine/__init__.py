"""How a workload is trained. Everything that strategies do differently hides behind two methods."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scaling.config import (
    DDPConfig,
    DeepSpeedConfig,
    FSDPConfig,
    OptimizerConfig,
    SingleConfig,
    TrainConfig,
    Zero0Config,
    Zero3Config,
)
from scaling.deepspeed_file.sections import switched_on
from scaling.engine.precision import AUTOCAST, Precision
from scaling.engine.zero_config import stage
from scaling.workload import Batch, Loss, Workload

# Devices with fused optimizer kernels: torch.optim.AdamW, argument `fused`.
FUSED = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


class Held(NamedTuple):
    """The tensors that one rank keeps for each purpose; on whatever device, and some with the same storage.

    What lies in the storage of an earlier field is that field's.
    """

    model: list[Tensor]
    gradients: list[Tensor]
    optimizer: list[Tensor]  # master weights included, where they are not the model's
    buffers: list[Tensor]  # to send from


class Engine(Protocol):
    """Trains a workload: `accumulate` once per micro-batch, `last` on the one that completes the step; then `step`.

    `module` is the model without any wrapper and `loss` the workload's, both for checks; `parameter_dtype` is that of
    the weights which the optimizer updates, `weight_dtype` that of the model's between steps. A `gather_dtype` says
    that gradients or parameters are sharded, and how the weights travel. `settings` is the config of DeepSpeed, as it
    holds; None for others. `skipped` counts the steps that loss scaling left out (a device tensor or a number, read
    after the window).
    """

    module: nn.Module
    loss: Loss
    parameter_dtype: torch.dtype
    weight_dtype: torch.dtype
    gather_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    settings: dict[str, Any] | None

    @property
    def skipped(self) -> Tensor | int: ...

    def accumulate(self, batch: Batch, *, last: bool) -> Tensor:
        """Forward and backward of one micro-batch; its share of the step's loss, detached, on the device."""
        ...

    def step(self) -> None:
        """Update the weights and clear the gradients."""
        ...

    def held(self) -> Held: ...


def make_optimizer(
    module: nn.Module, config: OptimizerConfig, device: torch.device, *, sharded: bool = False
) -> torch.optim.Optimizer:
    """AdamW with torch's defaults, or plain SGD; fused where the device has it, which also reads nothing back.

    `sharded` parameters are DTensors, for which torch has a fused AdamW and no fused SGD.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    fused = device.type in FUSED or None
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, fused=None if sharded else fused)
    return torch.optim.AdamW(parameters, lr=config.lr, fused=fused)


def make_engine(config: TrainConfig, workload: Workload, device: torch.device, world_size: int) -> Engine:
    """The engine of `config.strategy`. Raises ValueError for a pair that its library does not allow."""
    precision = Precision.of(config.precision, device)
    precision.apply()
    if config.compile:
        _compile(config, workload)
    strategy, clip = config.strategy, config.optimizer.clip
    weights = gathered_as(config, workload)
    if not isinstance(strategy, SingleConfig | DDPConfig) and world_size > 1:
        for buffer in workload.module.buffers():  # as DDP does when it wraps; these share out parameters only
            dist.broadcast(buffer, src=0)
    if isinstance(strategy, FSDPConfig):
        from scaling.engine.fsdp import FSDPEngine

        return FSDPEngine(
            workload,
            lambda module: make_optimizer(module, config.optimizer, device, sharded=True),
            precision,
            world_size,
            gather_dtype=weights,
            reshard=strategy.reshard,
            coalesce=strategy.coalesce_grad_reduction,
            clip=clip,
        )
    if not isinstance(strategy, SingleConfig | DDPConfig):
        from scaling.engine.zero import ZeroEngine

        return ZeroEngine(config, workload, precision, world_size, weights=weights)
    optimizer = make_optimizer(workload.module, config.optimizer, device)
    if isinstance(strategy, SingleConfig):
        from scaling.engine.single import SingleEngine

        return SingleEngine(workload, optimizer, precision, clip=clip)
    from scaling.engine.ddp import DDPEngine, DeferredEngine

    kind = DDPEngine if strategy.overlap else DeferredEngine
    return kind(workload, optimizer, precision, world_size, bucket_mb=strategy.bucket_mb, clip=clip)


def _compile(config: TrainConfig, workload: Workload) -> None:
    """Block by block where a strategy acts between blocks: hooks of FSDP and ZeRO-3 would break a graph of the whole
    model, and in one backward of the whole model ZeRO's buckets would all be ready at its end.
    """
    whole = isinstance(config.strategy, SingleConfig | DDPConfig | Zero0Config) or not workload.blocks
    for part in [workload.module] if whole else workload.blocks:
        part.compile()


def check_pair(config: TrainConfig, workload: Workload) -> None:
    """Raise ValueError for a strategy and a model or setting that its library does not allow together."""
    strategy, half = config.strategy, config.precision.name in AUTOCAST
    where = f"strategy={strategy.name}"
    gathers = not isinstance(strategy, SingleConfig | DDPConfig | Zero0Config)
    if config.precision.gather == "compute" and not gathers:
        raise ValueError(f"precision.gather=compute: {where} gathers no weights; leave precision.gather=auto")
    flat = [name for name, p in workload.module.named_parameters() if not p.dim()]
    if flat and not isinstance(strategy, SingleConfig | DDPConfig):
        raise ValueError(f"{where}: parameter {flat[0]} has no dimensions and cannot be shared out; give it one, [1]")
    if isinstance(strategy, DeepSpeedConfig) and workload.image_size is not None and _native_half(strategy):
        raise ValueError(
            f"{where}: this model takes images as float32, and the weights would be half precision; write "
            '"torch_autocast": {"enabled": true, "dtype": "bfloat16"} into the file instead'
        )
    if half and workload.batch_statistics and gathered_as(config, workload) != torch.float32:
        raise ValueError(
            f"{where} with precision.gather=compute: kernels of batch normalisation want float32 weights; leave "
            "precision.gather=auto"
        )
    if (
        isinstance(strategy, Zero3Config)
        and half
        and config.precision.reduce != "fp32"
        and gathered_as(config, workload) == torch.float32
    ):
        raise ValueError(
            f"{where} with float32 weights: DeepSpeed has one type for gathering and for reducing then; use "
            "precision.reduce=fp32"
        )
    if _skips_for_ever(config, workload):
        raise ValueError(
            f"{where} with precision=fp16 and float32 weights: DeepSpeed never lowers its loss scale there, and leaves "
            "out every step after the first overflow; use precision=bf16, or strategy=zero0, ddp or fsdp"
        )


def _native_half(strategy: DeepSpeedConfig) -> bool:
    """Whether DeepSpeed keeps, and computes with, weights in half precision."""
    return any(switched_on(strategy.settings, name) for name in ("fp16", "bf16", "bfloat16"))


def _skips_for_ever(config: TrainConfig, workload: Workload) -> bool:
    """DeepSpeed 0.19: above stage 0 its `torch_autocast` updates the scale only in steps that it takes, and clips
    gradients that are still scaled.
    """
    if config.precision.name != "fp16" or not stage(config.strategy):
        return False
    if isinstance(config.strategy, DeepSpeedConfig):
        return switched_on(config.strategy.settings, "torch_autocast")
    return gathered_as(config, workload) == torch.float32


def gathered_as(config: TrainConfig, workload: Workload) -> torch.dtype:
    """The type of the weights that a sharding strategy gathers, or keeps beside its masters, to compute with.

    Kernels of batch normalisation want float32 weights. Stage 0 of DeepSpeed shards nothing.
    """
    compute = AUTOCAST.get(config.precision.name, torch.float32)
    gather = config.precision.gather
    if gather == "fp32" or isinstance(config.strategy, Zero0Config):
        return torch.float32
    return torch.float32 if gather == "auto" and workload.batch_statistics else compute
