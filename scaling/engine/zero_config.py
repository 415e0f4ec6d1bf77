"""What DeepSpeed is given for `zero0` to `zero3`, with every default that changes the training or the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scaling.config import (
    DeepSpeedConfig,
    StrategyConfig,
    TrainConfig,
    Zero0Config,
    Zero1Config,
    Zero2Config,
    Zero3Config,
)
from scaling.deepspeed_file import settings_stage
from scaling.deepspeed_file.sections import zero_section

MIB = 2**20
GRADIENT_BYTES = 4  # DDP's buckets are measured in float32 gradients, whatever type they travel in
STAGES: dict[type[StrategyConfig], int] = {Zero0Config: 0, Zero1Config: 1, Zero2Config: 2, Zero3Config: 3}
# DeepSpeed 0.19's own values, deepspeed/runtime/zero/config.py; here so that the record has them.
OWN_BUCKET = 500_000_000
OWN_THRESHOLDS = {
    "param_persistence_threshold": 100_000,
    "max_live_parameters": 1_000_000_000,
    "max_reuse_distance": 1_000_000_000,
}
PREFETCH = 50_000_000
NEVER = 2**31 - 1  # steps
HALF = ("bf16", "fp16")


def stage(strategy: StrategyConfig) -> int | None:
    """The ZeRO stage of a DeepSpeed strategy; None for the others."""
    if isinstance(strategy, DeepSpeedConfig):
        return settings_stage(strategy.settings)
    return STAGES.get(type(strategy))


def offloads(strategy: StrategyConfig) -> bool:
    """Whether the update runs on the host."""
    if isinstance(strategy, DeepSpeedConfig):
        zero = zero_section(strategy.settings)
        place = (zero.get("offload_optimizer") or {}).get("device", "none")
        return str(place) != "none" or zero.get("cpu_offload") is True
    return isinstance(strategy, Zero1Config) and strategy.offload_optimizer


def zero_settings(
    config: TrainConfig, *, half_weights: bool, weight_classes: Sequence[str], on_host: bool
) -> dict[str, Any]:
    """The DeepSpeed config of a named strategy.

    With `half_weights` DeepSpeed keeps compute copies in the precision's type beside float32 masters; without, weights
    are float32 and `weight_classes`, the classes of the modules that own some, are reduced in `precision.reduce`.
    """
    micro, accumulation, total = config.batch.sizes
    given: dict[str, Any] = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optimizer.clip or 0.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": config.precision.reduce,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},  # its timer synchronises the device in every step
        "zero_optimization": _zero_section(config.strategy, on_host) | _norm(config, half_weights),
    }
    return given | _precision_section(config, half_weights, weight_classes)


def _precision_section(config: TrainConfig, half_weights: bool, weight_classes: Sequence[str]) -> dict[str, Any]:
    name, reduce = config.precision.name, config.precision.reduce
    if name not in HALF:
        return {}
    if not half_weights:
        # Under its autocast DeepSpeed reduces by class of module, and not by `communication_data_type`.
        classes = list(weight_classes) if reduce != "fp32" else []
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[name]
        return {"torch_autocast": {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": classes}}
    types = {"data_types": {"grad_accum_dtype": "fp32"}}
    if name == "bf16":
        own = isinstance(config.strategy, Zero1Config) and config.strategy.defaults == "deepspeed"
        return {"bf16": {"enabled": True, "check_grad_overflow": own}} | types
    # As torch.amp.GradScaler: from 2^16, halved at each overflow. Never doubled: DeepSpeed 0.19 does that before it
    # divides the gradients of the step by the scale.
    scale = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": NEVER, "hysteresis": 1}
    return {"fp16": {"enabled": True, **scale, "min_loss_scale": 1}} | types


def _norm(config: TrainConfig, half_weights: bool) -> dict[str, Any]:
    """Stages 1 and 2 would compute the norm of the gradients, and wait for it, in steps that clip nothing as well.

    DeepSpeed cannot leave it out with offload, nor in its own optimizer for stage 1 with bfloat16 weights.
    """
    strategy = config.strategy
    if not isinstance(strategy, Zero1Config) or isinstance(strategy, Zero3Config) or strategy.defaults == "deepspeed":
        return {}
    own_optimizer = STAGES[type(strategy)] == 1 and half_weights and config.precision.name == "bf16"
    needed = config.optimizer.clip is not None or strategy.offload_optimizer or own_optimizer
    return {"compute_grad_norm": needed}


def _zero_section(strategy: StrategyConfig, on_host: bool) -> dict[str, Any]:
    number = STAGES[type(strategy)]
    zero: dict[str, Any] = {"stage": number}
    if not isinstance(strategy, Zero1Config):
        return zero
    if strategy.defaults == "deepspeed":
        zero |= {"reduce_bucket_size": OWN_BUCKET, "overlap_comm": number == 3}
    else:
        elements = max(1, int(strategy.bucket_mb * MIB / GRADIENT_BYTES))
        zero |= {"reduce_bucket_size": elements, "overlap_comm": strategy.overlap}
    zero |= {"allgather_bucket_size": OWN_BUCKET, "contiguous_gradients": True, "reduce_scatter": True}
    offload = {"device": "cpu", "pin_memory": not on_host}
    if strategy.offload_optimizer:
        zero["offload_optimizer"] = offload
    if isinstance(strategy, Zero3Config):
        for name, own in OWN_THRESHOLDS.items():
            value = getattr(strategy, name)
            zero[f"stage3_{name}"] = own if value is None else value
        zero["stage3_prefetch_bucket_size"] = PREFETCH
        if strategy.offload_parameters:
            zero["offload_param"] = offload
    return zero


def coalesces(strategy: StrategyConfig) -> bool:
    """Whether gradients are reduced once per step although the stage would do it at every micro-step."""
    return isinstance(strategy, Zero2Config) and strategy.coalesce_grad_reduction
