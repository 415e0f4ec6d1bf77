"""What DeepSpeed 0.19 leaves to chance: streams that run ahead of each other, and groups that wait for too long."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout


def bound_waits(engine: Any, timeout_s: float) -> None:
    """Let DeepSpeed's own groups, copies of the world, end a collective when the world would."""
    for group in {engine.data_parallel_group, engine.seq_data_parallel_group}:
        if group is not None:
            _set_pg_timeout(timedelta(seconds=timeout_s), group)


def keep_until_reduced(optimizer: Any) -> None:
    """Hold the memory of each gradient until the stream that reduces it has read it.

    A gradient larger than a bucket is reduced where it lies, on a stream of its own, and DeepSpeed 0.19 lets go of it
    at once on the ranks that keep no part of it.
    """
    stream, clear = getattr(optimizer, "reduction_stream", None), getattr(optimizer, "clear_grad_attribute", None)
    if stream is None or clear is None or not optimizer.overlap_comm:
        return

    def clear_later(parameter: Tensor) -> None:
        gradient = optimizer.get_gradient_for_reduction(parameter)
        if gradient is not None:
            gradient.record_stream(stream)
        clear(parameter)

    optimizer.clear_grad_attribute = clear_later


def let_gathers_wait(engine: Any) -> None:
    """Let the stream on which stage 3 gathers weights wait for the update: where no parameter is persistent, nothing
    else makes it.
    """
    offload = getattr(engine.optimizer, "parameter_offload", None)
    gathers = getattr(offload, "_DeepSpeedZeRoOffload__allgather_stream", None)
    if gathers is not None:
        gathers.wait_stream(torch.get_device_module(engine.device).current_stream())
