"""What a strategy does otherwise than its options, or a user's file, would let one think."""

from __future__ import annotations

import torch

from scaling import deepspeed_file
from scaling.config import DeepSpeedConfig, FSDPConfig, TrainConfig, Zero1Config, Zero3Config
from scaling.engine import gathered_as
from scaling.engine.deepspeed_ready import held_builds
from scaling.engine.zero_config import OWN_THRESHOLDS, offloads, stage
from scaling.measure.layout import Layout
from scaling.workload import Workload


def notes(config: TrainConfig, workload: Workload, layout: Layout) -> list[str]:
    """One line each, for the terminal."""
    strategy = config.strategy
    locked = [] if stage(strategy) is None else _of_builds()
    if isinstance(strategy, DeepSpeedConfig):
        return locked + [f"{strategy.config}: {note}" for note in deepspeed_file.notes(config)]
    if isinstance(strategy, FSDPConfig) and not workload.blocks:
        return ["fsdp: the model names no block_types, so that all its parameters are gathered at once"]
    said = locked + _of_offload(config) + _of_compile(config)
    if isinstance(strategy, Zero3Config):
        return said + _kept(strategy, layout)
    overlaps = isinstance(strategy, Zero1Config) and strategy.overlap and not strategy.offload_optimizer
    if overlaps and strategy.name == "zero1" and gathered_as(config, workload) == torch.bfloat16:
        return ["zero1 with bf16: DeepSpeed reduces after backward, in one bucket; overlap and bucket_mb are idle"]
    return said


def _of_builds() -> list[str]:
    return [
        f"DeepSpeed compiles a part of itself, or was killed while it did: if nobody does, remove {lock}"
        for lock in held_builds()
    ]


def _of_compile(config: TrainConfig) -> list[str]:
    if not config.compile or stage(config.strategy) != 3:
        return []
    return ["zero3 with compile: DeepSpeed's hooks break the graph at every module, and parts of it run uncompiled"]


def _of_offload(config: TrainConfig) -> list[str]:
    if not offloads(config.strategy) or config.threads > 1:
        return []
    return [f"offload: the update runs on threads={config.threads} of the host; a device leaves it room for more"]


def _kept(strategy: Zero3Config, layout: Layout) -> list[str]:
    threshold = strategy.param_persistence_threshold
    threshold = OWN_THRESHOLDS["param_persistence_threshold"] if threshold is None else threshold
    kept = sum(weight.elements for weight in layout.weights if weight.elements <= threshold)
    if kept < layout.all_elements / 2:
        return []
    share = f"{kept / layout.all_elements:.0%} of this model"
    return [
        f"zero3: parameters of up to {threshold:,} elements, {share}, stay gathered on every rank; "
        "strategy.param_persistence_threshold=0 shares them out"
    ]
