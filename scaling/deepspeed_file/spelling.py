"""Keys of a DeepSpeed file that are probably meant to be others: DeepSpeed ignores what it does not know."""

from __future__ import annotations

import difflib
from typing import Any

# What DeepSpeed 0.19 reads at the top of its config.
KNOWN = (
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "compression_training", "csv_monitor", "curriculum_learning",
    "data_efficiency", "data_parallel_size", "data_types", "dataloader_drop_last", "disable_allgather",
    "disable_python_gc", "dump_state", "elasticity", "expert_parallel", "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor",
    "hybrid_engine", "load_universal_checkpoint", "log_level", "managed_gradient_accumulation", "memory_breakdown",
    "optimizer", "pipeline", "prescale_gradients", "scheduler", "seq_parallel_communication_data_type",
    "sequence_parallel_size", "sparse_attention", "sparse_gradients", "steps_per_print", "tensor_parallel",
    "tensorboard", "timers", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
)  # fmt: skip
CLOSE = 0.75


def refuse_misspelt(settings: dict[str, Any]) -> None:
    """Raise ValueError for a key that DeepSpeed does not know and that looks like one which it does."""
    for key in settings:
        if key not in KNOWN and (meant := difflib.get_close_matches(key.lower(), KNOWN, n=1, cutoff=CLOSE)):
            raise ValueError(f"{key}: DeepSpeed has no such key, and would ignore it; did you mean {meant[0]}?")


def unknown(settings: dict[str, Any]) -> list[str]:
    """Keys that DeepSpeed reads nowhere."""
    return [key for key in settings if key not in KNOWN]
